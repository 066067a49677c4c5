"""Pictures of one run, or of several laid over each other, from the files in runs/NAME/, also while they are written.

    python plot_run.py runs/A                                                  standard pictures, into runs/A/plots/
    python plot_run.py runs/A runs/B --metrics 'accuracy,part_*' -o ab.pdf     a panel a metric, a colour a run
"""

import argparse
import csv
import difflib
import fnmatch
import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: no display, no global state, nothing to close
from matplotlib.ticker import MaxNLocator

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888"]  # Okabe and Ito
LOOKS = [(colour, dash) for dash in ("-", "--", "-.", ":") for colour in COLOURS]  # the ninth line is dashed
STYLE = {
    "font.size": 10, "legend.fontsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9, "axes.formatter.limits": (-6, 6),
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555", "axes.axisbelow": True,
    "axes.grid": True, "grid.color": "#e6e6e6", "axes.xmargin": 0.02, "legend.frameon": False, "legend.borderpad": 0.2,
    "legend.handlelength": 1.4, "legend.columnspacing": 1.2, "savefig.dpi": 160, "text.usetex": False,
}  # fmt: skip
LABELS = {"kl": "KL to reference", "eval_pass_at_k": "eval pass@k", "eval_maj_at_k": "eval maj@k"}
COMPARED = "reward_mean,accuracy,eval_accuracy,kl,entropy,length_mean".split(",")


class Panel(NamedTuple):
    """One set of axes: its label, and columns with their legend names."""

    label: str
    columns: dict[str, str]
    stacked: bool = False
    factors: dict[str, float] = {}  # what a column is multiplied by


PANELS = {
    "reward": Panel("reward", {"reward_mean": "train mean", "eval_reward": "eval"}),
    "accuracy": Panel("accuracy", {
        "accuracy": "train", "eval_accuracy": "eval greedy", "eval_pass_at_k": "pass@k", "eval_maj_at_k": "maj@k"}),
    "parts": Panel("mean reward part", {}),  # its columns are the run's own
    "loss": Panel("loss", {"loss": "loss", "policy_loss": "policy loss"}),
    "kl": Panel("KL to reference", {"kl": "KL"}),
    "entropy": Panel("entropy (nats)", {"entropy": "entropy"}),
    "length": Panel("completion tokens", {"length_mean": "mean", "length_max": "longest"}),
    "truncated": Panel("truncated share", {"truncated_share": "truncated"}),
    "groups": Panel("groups", {
        "groups_used": "used", "groups_constant": "constant", "groups_dropped": "dropped"}, stacked=True),
    "clip": Panel("share of tokens clipped", {"clip_low_share": "low", "clip_high_share": "high"}),
    "norm": Panel("gradient norm", {"grad_norm": "norm"}),
    "seconds": Panel("seconds per step", {
        "seconds_rollout": "rollout", "seconds_score": "score", "seconds_update": "update", "seconds_eval": "eval",
    }, stacked=True),
}  # fmt: skip
CAPABILITY = Panel("capability vs faithfulness", {
    "eval_fve": "fve × 100",
    "eval_hallucinations": "hallucinations × 10",
    "eval_capture_rate": "capture rate × 100",
    "eval_clean_rate": "clean rate × 100",
}, factors={"eval_fve": 100, "eval_hallucinations": 10, "eval_capture_rate": 100, "eval_clean_rate": 100})  # one scale
# The columns of the trainer; any other is its task's own and goes to task.png.
KNOWN = set(
    "step time tokens tokens_total reward_std reward_min reward_max reward_std_group groups_sampled unscorable logp_gap"
    " ratio_mean ratio_max lr beta temperature advantage_mean advantage_std skipped_updates filtered_mass"
    " tokens_per_second peak_memory_gb".split())  # fmt: skip
for panel in PANELS.values():
    KNOWN.update(panel.columns)

Column = list[float | None]  # None: a gap


@dataclass
class Run:
    """What is on disk of one run: columns of equal length, one entry a step; those of the evaluations; `curves` of
    the last one's answers: title, x_label, x, and y by name for `points` and for `lines`."""

    name: str
    columns: dict[str, Column]
    evals: dict[str, Column]  # `eval_step` and the metrics
    curves: list[dict]
    phases: dict[float, str]  # step -> what begins there, of a run that has a `phase`

    def series(self, metric: str) -> tuple[list[float], list[float], list[int]]:
        """Steps, values (NaN in a gap), and where a value has no neighbour; empty lists where there is no value.
        What is measured now and then comes without the blanks between, and every place of it is in the third list."""
        steps = self.columns["step"]
        values = self.columns.get(metric, [])
        if metric in self.evals:
            steps = self.evals["eval_step"]
            values = self.evals[metric]
        there = {i: y for i, y in enumerate(values) if y is not None}
        alone = [i for i in there if i - 1 not in there and i + 1 not in there]
        if metric.startswith("eval_") or len(alone) == len(there):
            steps = [steps[i] for i in there]
            return steps, list(there.values()), list(range(len(there)))
        return steps, with_gaps(values), alone

    def has(self, *metrics: str) -> bool:
        """Whether one of the metrics has a value."""
        return any(self.series(metric)[0] for metric in metrics)


def number(value: object) -> float | None:
    """A finite float, or None for anything else: a blank, text, NaN, and 1e100 and more, which no axis can hold."""
    with suppress(TypeError, ValueError, OverflowError):
        if abs(float(value)) < 1e100:
            return float(value)
    return None


def with_gaps(values: Column) -> list[float]:
    """The values with NaN in place of None."""
    return np.array(values, float).tolist()


def read_rows(path: Path) -> tuple[list[str], dict[float, dict[str, str]]]:
    """Header and rows by step of a metrics.csv. A line without its newline is still being written and is left out."""
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    rows = [next(csv.reader([line]), []) for line in lines]  # a torn quote swallows no line after it
    header = rows[0] if rows else []
    by_step = {}
    for i, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            continue
        values = {"step": str(i)} | dict(zip(header, row, strict=True))
        by_step[number(values["step"])] = values  # a resumed run writes a step again: its last row counts
    by_step.pop(None, None)
    return header, dict(sorted(by_step.items()))


def read_records(path: Path) -> list[dict]:
    """The records of an eval.jsonl in the order of their steps; a torn line is left out."""
    by_step = {}
    lines = path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            by_step[number(record["step"])] = record
    by_step.pop(None, None)
    return [by_step[step] for step in sorted(by_step)]


def read_evals(records: list[dict]) -> dict[str, Column]:
    """Columns of the evaluations, one entry an evaluation, named as in metrics.csv."""
    keys = {}
    for record in records:
        keys |= record
    evals = {}
    for key in keys:
        evals["eval_" + key.removeprefix("eval_")] = [number(record.get(key)) for record in records]
    return evals


def read_run(folder: str | Path) -> Run:
    """Reads a run folder, finished or not. ValueError, one sentence, where it is no run or has not begun."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}.")
    path = folder / "metrics.csv"
    if not path.exists():
        inside = [str(found.parent) for found in sorted(folder.glob("*/metrics.csv"))]
        hint = f"name some of the runs inside: {', '.join(inside)}" if inside else "it has no metrics.csv"
        raise ValueError(f"{folder} is not a run folder; {hint}.")
    header, rows = read_rows(path)
    if not header:
        raise ValueError(f"{path} is empty: the run has not come to its first step.")
    columns = {}
    for name in ["step", *header]:
        columns[name] = [number(row[name]) for row in rows.values()]
    phases = {}
    last = None
    for step, row in rows.items():
        phase = row.get("phase")
        if phase and phase != last:
            phases[step] = last = phase
    records = read_records(folder / "eval.jsonl")
    answers = records[-1].get("answers", []) if records else []
    curves = [answer["curves"] for answer in answers if "curves" in answer]
    return Run(folder.resolve().name, columns, read_evals(records), curves, phases)


def smoothed(values: Column, weight: float) -> list[float]:
    """Exponential moving average without the pull to zero at its start; a gap stays a gap."""
    total = norm = 0.0
    result = []
    for value in with_gaps(values):
        if math.isnan(value):
            result.append(value)
            continue
        total = weight * total + (1 - weight) * value
        norm = weight * norm + 1 - weight
        result.append(total / norm)
    return result


def plain(text: str) -> str:
    """Text as it is: matplotlib takes $ for mathematics and hides a legend name that begins with an underscore."""
    if text.startswith("_"):
        text = "\u200a" + text
    return text.replace("$", r"\$")


def draw_line(ax: Axes, run: Run, metric: str, label: str, index: int, smooth: float, factor: float) -> None:
    """A light line of what was logged under a strong smoothed one; sparse values as they are, with markers."""
    steps, values, alone = run.series(metric)
    if not steps:
        return
    colour, dash = LOOKS[index % len(LOOKS)]
    look = {"color": colour, "linestyle": dash}
    values = [factor * y for y in values]
    if smooth > 0 and len(alone) < len(values):
        ax.plot(steps, values, alpha=0.28, linewidth=0.9, **look)
        values = smoothed(values, smooth)
    if alone:
        every = len(alone) // 40 + 1
        look |= {"marker": "o", "markersize": 4, "markevery": alone[::every]}
    ax.plot(steps, values, label=plain(label), linewidth=1.7, **look)


def draw_stack(ax: Axes, run: Run, labels: dict[str, str]) -> None:
    """Stacked columns: a bar a step, with no gaps between."""
    steps = run.columns["step"]
    edges = np.append(steps, steps[-1] + 1) - 0.5
    stack = {}
    for name, label in labels.items():
        if run.has(name):
            heights = run.columns[name]
            heights = heights + heights[-1:]  # the last bar ends where it began
            stack[label] = np.nan_to_num(with_gaps(heights))
    ax.stackplot(edges, stack.values(), labels=stack.keys(), colors=COLOURS, step="post", alpha=0.75, lw=0)


def draw_band(ax: Axes, run: Run, smooth: float) -> None:
    """The standard deviation of the reward round its mean."""
    mean = np.array(smoothed(run.columns["reward_mean"], smooth))
    std = np.array(smoothed(run.columns["reward_std"], smooth))
    steps = run.columns["step"]
    ax.fill_between(steps, mean - std, mean + std, color=COLOURS[0], alpha=0.13, linewidth=0, label="±1σ")


def draw_lines(ax: Axes, runs: list[Run], panel: Panel, smooth: float) -> None:
    """Lines of a panel: a colour a column for a single run, a colour a run for several."""
    single = len(runs) == 1
    for i, run in enumerate(runs):
        for j, (column, label) in enumerate(panel.columns.items()):
            factor = panel.factors.get(column, 1)
            if single:
                draw_line(ax, run, column, label, j, smooth, factor)
            else:
                draw_line(ax, run, column, run.name, i, smooth, factor)


def set_scale(ax: Axes, runs: list[Run], panel: Panel) -> None:
    """Limits of the values' axis: what comes near zero begins at zero; a KL over decades is on a log scale."""
    low, high = ax.dataLim.intervaly
    if 0 <= low <= high / 2:
        ax.set_ylim(-0.03 * (high or 1), None if high else 1)
    if "kl" not in panel.columns:
        return
    values = []
    for run in runs:
        values += run.series("kl")[1]
    values = sorted(y for y in values if y < 0 or y > 0)  # it is 0 at the first step, and NaN in a gap
    if not values:
        return
    smallest = values[0]
    largest = values[-1]
    low_decile = values[len(values) // 10]
    if smallest > 0 and low_decile < largest / 100:
        ax.set_yscale("log", nonpositive="mask")
        ax.set_ylim(max(smallest, largest * 1e-6) / 2, None)


def annotate(ax: Axes, run: Run, panel: Panel) -> None:
    """What is written on a panel of a single run: its phases, and a legend where there is more than one line."""
    for step, phase in run.phases.items():
        ax.axvline(step - 0.5, color="#555555", linewidth=0.8, linestyle=":")
        ax.text(step - 0.4, 0.98, phase.lower(), transform=ax.get_xaxis_transform(), va="top", size=7, rotation=90)
    handles, _ = ax.get_legend_handles_labels()
    if len(handles) < 2:
        return
    largest = max(map(abs, ax.dataLim.intervaly))
    left = 0 if 1e-5 < largest < 1e6 else 0.1  # right of a factor such as 1e-8
    letters = sum(map(len, panel.columns.values()))
    across = 2 if letters > 40 else 4
    ax.legend(loc="lower left", bbox_to_anchor=(left, 1), ncols=across)  # above the axes


def grid(n: int) -> tuple[Figure, int]:
    """A figure with axes for `n` panels, and how many of them stand side by side."""
    across = {1: 1, 2: 2, 4: 2}.get(n, 3)
    down = math.ceil(n / across)
    width = 5.3 if across == 1 else 4.3 * across
    figure = Figure(figsize=(width, 2.9 * down + 0.4), layout="constrained")
    for place in range(1, n + 1):
        figure.add_subplot(down, across, place)
    return figure, across


@matplotlib.rc_context(STYLE)
def draw_figure(runs: list[Run], panels: list[Panel], smooth: float = 0.8) -> Figure | None:
    """The panels that have data, at most three a row; None where none has."""
    shown = [panel for panel in panels if any(run.has(*panel.columns) for run in runs)]
    if not shown:
        return None
    figure, across = grid(len(shown))
    for ax, panel in zip(figure.axes, shown, strict=True):
        if ax is not figure.axes[0]:
            ax.sharex(figure.axes[0])
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if panel.stacked:
            draw_stack(ax, runs[0], panel.columns)
        else:
            if len(runs) == 1 and "reward_mean" in panel.columns and "reward_std" in runs[0].columns:
                draw_band(ax, runs[0], smooth)
            draw_lines(ax, runs, panel, smooth)
        ax.set_ylabel(plain(panel.label))
        set_scale(ax, runs, panel)
        if len(runs) == 1:
            annotate(ax, runs[0], panel)
    for ax in figure.axes[-across:]:
        ax.set_xlabel("step")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.07)
    if len(runs) == 1:
        figure.suptitle(plain(runs[0].name), x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure
    lines = {}
    for ax in reversed(figure.axes):
        handles, labels = ax.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    names = [plain(run.name) for run in runs]
    handles = [lines[name] for name in names if name in lines]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def draw_curve(ax: Axes, x: list, curves: dict[str, list], **look) -> None:
    """One curve a name, each in the colour of its place; what is no number leaves a gap."""
    for colour, (label, values) in enumerate(curves.items()):
        y = [number(value) for value in values]
        ax.plot(x, with_gaps(y), color=COLOURS[colour], label=plain(label), **look)


@matplotlib.rc_context(STYLE)
def draw_curves(run: Run) -> Figure | None:
    """Observations as dots and what was fitted to them as lines, a panel each; the axes are those of the dots."""
    if not run.curves:
        return None
    figure, _ = grid(len(run.curves))
    for ax, curve in zip(figure.axes, run.curves, strict=True):
        ax.set_title(plain(curve["title"]))
        ax.set_xlabel(plain(curve["x_label"]))
        draw_curve(ax, curve["x"], curve["points"], marker=".", linestyle="", alpha=0.5)
        ax.legend(loc="upper right")
        ax.set_ylim(ax.get_ylim())  # a wild answer must not flatten the dots
        draw_curve(ax, curve["x"], curve["lines"], linewidth=1.7)
    return figure


@matplotlib.rc_context(STYLE)
def save(figure: Figure, path: Path) -> Path:
    """Writes beside the target and renames, so that a viewer never sees half a picture."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(temporary, format=path.suffix[1:].lower())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def standard(run: Run) -> dict[str, list[Panel]]:
    """The panels of each standard picture. Beside the others there is one of parts, with the largest; a legend of more
    than eight cannot be read."""
    names = [name for name in run.columns if name.startswith("part_")]
    names.sort(key=lambda name: sum(abs(y or 0.0) for y in run.columns[name]), reverse=True)
    parts = []
    for i in range(0, len(names), 8):
        columns = {name: name.removeprefix("part_") for name in names[i : i + 8]}
        parts.append(PANELS["parts"]._replace(columns=columns))
    overview = PANELS | {"parts": parts[0]} if parts else PANELS
    judged = run.has("eval_hallucinations", "eval_capture_rate", "eval_clean_rate")
    task = []
    known = KNOWN.union(names, ["eval_" + name for name in run.columns])
    for name in run.columns:
        if name not in known:
            task.append(Panel(name.replace("_", " "), {name: "train", f"eval_{name}": "eval"}))
    return {
        "overview": list(overview.values()),
        "reward": [PANELS["reward"]],
        "accuracy": [PANELS["accuracy"]],
        "parts": parts,
        "loss": [PANELS["loss"], PANELS["kl"]],
        "task": task,
        "capability_vs_faithfulness": [CAPABILITY] if judged else [],
    }


def plot_run(folder: str | Path, out_dir: str | Path | None = None, smooth: float = 0.8) -> list[Path]:
    """The standard pictures of one run as PNG, into its plots/: those that have data, so none before the first step."""
    run = read_run(folder)
    out_dir = Path(out_dir or Path(folder) / "plots")
    out_dir.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, panels in standard(run).items():
        figures[name] = draw_figure([run], panels, smooth)
    figures["curves"] = draw_curves(run)
    return [save(figure, out_dir / f"{name}.png") for name, figure in figures.items() if figure]


def choose(wanted: list[str], names: list[str]) -> list[Panel]:
    """One panel for each metric that is meant by a name or a pattern. ValueError, one sentence, for an unknown one."""
    chosen = {}
    for want in wanted:
        found = [want] if want in names else fnmatch.filter(names, want)
        if not found:
            near = ", ".join(difflib.get_close_matches(want, names, 4, 0.5)) or "nothing (--list shows all)"
            raise ValueError(f"no metric {want!r}; near it: {near}.")
        for name in found:
            label = LABELS.get(name, name.replace("_", " "))
            chosen[name] = Panel(label, {name: name})
    return list(chosen.values())


def read_runs(folders: list[str]) -> list[Run]:
    """The runs, each once, with as many parents in their names as it takes to tell them apart."""
    paths = {Path(folder).resolve().parts: folder for folder in folders}
    depth = 1
    while len({parts[-depth:] for parts in paths}) < len(paths):
        depth += 1
    runs = []
    for parts, folder in paths.items():
        run = read_run(folder)
        run.name = "/".join(parts[-depth:])
        runs.append(run)
    return runs


def command(args: argparse.Namespace) -> list[object]:
    """Does what the command line asks and returns what to print. ValueError, one sentence, for a mistake in it."""
    if not 0 <= args.smooth < 1:
        raise ValueError(f"--smooth is {args.smooth:g}; it is at least 0 and less than 1.")
    if args.out and args.out.suffix.lower() not in (".png", ".pdf", ".svg", ".jpg"):
        raise ValueError(f"cannot write {args.out}; a picture ends in .png, .pdf, .svg or .jpg.")
    runs = read_runs(args.runs)
    columns = {}
    for run in runs:
        columns |= run.columns | run.evals
    names = [name for name in columns if name not in ("step", "eval_step")]
    if args.list:
        lines = []
        for run in runs:
            lines += [f"{run.name}  {name}" for name in names if run.has(name)]
        return lines
    if args.metrics:
        panels = choose(args.metrics.split(","), names)
    elif len(runs) > 1:
        panels = choose([name for name in COMPARED if name in names], names)
    else:
        panels = standard(runs[0])["overview"]
    if args.out or args.metrics or len(runs) > 1:
        figure = draw_figure(runs, panels, args.smooth)
        pictures = [save(figure, args.out or Path("comparison.png"))] if figure else []
    else:
        pictures = plot_run(args.runs[0], smooth=args.smooth)
    if not pictures:
        raise ValueError(f"nothing to draw: no value has been logged yet in {', '.join(args.runs)}.")
    return pictures


def main(argv: list[str] | None = None) -> None:
    """The command line: exit code 0, or 2 and one sentence on stderr for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, runs/NAME")
    parser.add_argument("-o", "--out", type=Path, help="the picture to write, else comparison.png; also .pdf, .svg, …")
    parser.add_argument("--metrics", metavar="A,B", help="what to draw; patterns as 'part_*'; evaluations are 'eval_*'")
    parser.add_argument("--smooth", type=float, default=0.8, help="weight of the moving average, 0 for none (0.8)")
    parser.add_argument("--list", action="store_true", help="print what can be drawn, and draw nothing")
    try:
        print(*command(parser.parse_args(argv)), sep="\n", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        parser.exit(2, f"plot_run: {error}\n")


if __name__ == "__main__":
    main()
