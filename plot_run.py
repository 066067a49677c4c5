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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: no display, no global state, nothing to close
from matplotlib.ticker import MaxNLocator

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888"]  # Okabe and Ito
DASHES = ["-", "--", "-.", ":"]  # the ninth line is the first colour again, dashed
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
    "accuracy": Panel("accuracy", {"accuracy": "train", "eval_accuracy": "eval greedy", "eval_pass_at_k": "pass@k",
                                   "eval_maj_at_k": "maj@k"}),
    "parts": Panel("mean reward part", {}),  # its columns are the run's own
    "loss": Panel("loss", {"loss": "loss", "policy_loss": "policy loss"}),
    "kl": Panel("KL to reference", {"kl": "KL"}),
    "entropy": Panel("entropy (nats)", {"entropy": "entropy"}),
    "length": Panel("completion tokens", {"length_mean": "mean", "length_max": "longest"}),
    "truncated": Panel("truncated share", {"truncated_share": "truncated"}),
    "groups": Panel("groups", {f"groups_{name}": name for name in ("used", "constant", "dropped")}, stacked=True),
    "clip": Panel("share of tokens clipped", {"clip_low_share": "low", "clip_high_share": "high"}),
    "norm": Panel("gradient norm", {"grad_norm": "norm"}),
    "seconds": Panel("seconds per step", {f"seconds_{name}": name for name in ("rollout", "score", "update", "eval")},
                     stacked=True),
}  # fmt: skip
FACTORS = {"eval_fve": 100, "eval_hallucinations": 10, "eval_capture_rate": 100, "eval_clean_rate": 100}  # one scale
CAPABILITY = Panel("capability vs faithfulness", {
    name: f"{name[5:].replace('_', ' ')} × {factor}" for name, factor in FACTORS.items()}, factors=FACTORS)
# The columns of the trainer; any other is its task's own and goes to task.png.
KNOWN = {column for panel in PANELS.values() for column in panel.columns} | set(
    "step time tokens tokens_total reward_std reward_min reward_max reward_std_group groups_sampled unscorable logp_gap"
    " ratio_mean ratio_max lr beta temperature advantage_mean advantage_std skipped_updates filtered_mass"
    " tokens_per_second peak_memory_gb".split())  # fmt: skip


@dataclass
class Run:
    """What is on disk of one run: columns of equal length, one entry a step; steps and values of evaluations; `curves`
    of the last one's answers: title, x_label, x, and y by name for `points` and for `lines`."""

    name: str
    columns: dict[str, list[float | None]]
    evals: dict[str, tuple[list[float], list[float | None]]]
    curves: list[dict] = field(default_factory=list)
    phases: dict[float, str] = field(default_factory=dict)  # step -> what begins there, of a run that has a `phase`

    def series(self, metric: str) -> tuple[list[float], list[float], list[int]]:
        """Steps, values (NaN in a gap), and where a value has no neighbour; empty lists where there is no value.
        What is measured now and then comes without the blanks between, and every place of it is in the third list."""
        steps, values = self.evals.get(metric) or (self.columns["step"], self.columns.get(metric, []))
        there = {i: y for i, y in enumerate(values) if y is not None}
        alone = [i for i in there if i - 1 not in there and i + 1 not in there]
        if metric.startswith("eval_") or len(alone) == len(there):
            return [steps[i] for i in there], list(there.values()), list(range(len(there)))
        return steps, [there.get(i, math.nan) for i in range(len(steps))], alone


def number(value: object) -> float | None:
    """A finite float, or None for anything else: a blank, text, NaN, and 1e100 and more, which no axis can hold."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(value) if abs(float(value)) < 1e100 else None


def read_rows(path: Path) -> tuple[list[str], dict[float, dict[str, str]]]:
    """Header and rows by step of a metrics.csv. A line without its newline is still being written and is left out."""
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    header, *rows = [next(csv.reader([line]), []) for line in lines] or [[]]  # a torn quote swallows no line after it
    by_step = {}
    for i, row in enumerate(rows, start=1):
        values = {"step": str(i)} | dict(zip(header, row, strict=False))
        if len(row) == len(header) and (step := number(values["step"])) is not None:
            by_step[step] = values  # a resumed run writes a step again: its last row counts
    return header, dict(sorted(by_step.items()))


def read_records(path: Path) -> list[dict]:
    """The records of an eval.jsonl in the order of their steps; a torn line is left out."""
    by_step = {}
    for line in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            by_step[number(record["step"])] = record
    return [by_step[step] for step in sorted(by_step.keys() - {None})]


def read_run(folder: str | Path) -> Run:
    """Reads a run folder, finished or not. ValueError, one sentence, where it is no run or has not begun."""
    if not (folder := Path(folder)).is_dir():
        raise ValueError(f"there is no run folder {folder}.")
    if not (folder / "metrics.csv").exists():
        inside = [str(path.parent) for path in sorted(folder.glob("*/metrics.csv"))]
        hint = f"name some of the runs inside: {', '.join(inside)}" if inside else "it has no metrics.csv"
        raise ValueError(f"{folder} is not a run folder; {hint}.")
    header, rows = read_rows(folder / "metrics.csv")
    if not header:
        raise ValueError(f"{folder / 'metrics.csv'} is empty: the run has not come to its first step.")
    columns = {name: [number(row[name]) for row in rows.values()] for name in ["step", *header]}
    named = [(step, row["phase"]) for step, row in rows.items() if row.get("phase")]
    phases = dict(new for old, new in zip([(0, ""), *named], named, strict=False) if old[1] != new[1])
    records = read_records(folder / "eval.jsonl")
    steps = [number(record["step"]) for record in records]
    evals = {"eval_" + key.removeprefix("eval_"): (steps, [number(record.get(key)) for record in records])
             for key in {key: 0 for record in records for key in record if key != "step"}}
    curves = [answer["curves"] for answer in [{}, *records][-1].get("answers", []) if "curves" in answer]
    return Run(folder.resolve().name, columns, evals, curves, phases)


def smoothed(values: list[float | None], weight: float) -> list[float]:
    """Exponential moving average without the pull to zero at its start; a gap stays a gap."""
    total, norm, result = 0.0, 0.0, []
    for value in (math.nan if value is None else value for value in values):
        if value == value:
            total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
        result.append(total / norm if value == value else math.nan)
    return result


def plain(text: str) -> str:
    """Text as it is: matplotlib takes $ for mathematics and hides a legend name that begins with an underscore."""
    return ("\u200a" if text.startswith("_") else "") + text.replace("$", r"\$")


def draw_line(ax: Axes, run: Run, metric: str, label: str, index: int, smooth: float, factor: float) -> None:
    """A light line of what was logged under a strong smoothed one; sparse values as they are, with markers."""
    steps, values, alone = run.series(metric)
    values = [factor * y for y in values]
    if not steps:
        return
    look = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}
    if smooth > 0 and len(alone) < len(values):
        ax.plot(steps, values, alpha=0.28, linewidth=0.9, **look)
        values = smoothed(values, smooth)
    marks = {"marker": "o", "markersize": 4, "markevery": alone[:: len(alone) // 40 + 1]} if alone else {}
    ax.plot(steps, values, label=plain(label), linewidth=1.7, **marks, **look)


def draw_panel(ax: Axes, runs: list[Run], panel: Panel, smooth: float) -> None:
    """One panel: a colour a column for a single run, a colour a run for several."""
    labels, single, first = panel.columns, len(runs) == 1, runs[0].columns
    if panel.stacked:  # a bar a step, with no gaps between
        edges = [*(x - 0.5 for x in first["step"]), first["step"][-1] + 0.5]
        stack = {labels[x]: [y or 0.0 for y in [*first[x], first[x][-1]]] for x in labels if runs[0].series(x)[0]}
        ax.stackplot(edges, stack.values(), labels=stack.keys(), colors=COLOURS, step="post", alpha=0.75, lw=0)
    if single and "reward_mean" in labels and "reward_std" in first:
        mean, std = (smoothed(first[name], smooth) for name in ("reward_mean", "reward_std"))
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        ax.fill_between(first["step"], low, high, color=COLOURS[0], alpha=0.13, linewidth=0, label="±1σ")
    for i, run in enumerate(runs if not panel.stacked else []):
        for j, (column, name) in enumerate(labels.items()):
            draw_line(ax, run, column, *((name, j) if single else (run.name, i)), smooth, panel.factors.get(column, 1))
    ax.set_ylabel(plain(panel.label))
    low, high = ax.dataLim.intervaly
    if 0 <= low <= high / 2:  # near zero begins at zero
        ax.set_ylim(-0.03 * (high or 1), None if high else 1)
    some = sorted(y for run in runs for y in run.series("kl")[1] if y > 0 or y < 0)  # it is 0 at the first step
    if "kl" in labels and some and 0 < some[0] <= some[len(some) // 10] < some[-1] / 100:
        ax.set_yscale("log", nonpositive="mask")
        ax.set_ylim(max(some[0], some[-1] * 1e-6) / 2, None)
    for step, phase in runs[0].phases.items() if single else ():
        ax.axvline(step - 0.5, color="#555555", linewidth=0.8, linestyle=":")
        ax.text(step - 0.4, 0.98, phase.lower(), transform=ax.get_xaxis_transform(), va="top", size=7, rotation=90)
    if single and len(ax.get_legend_handles_labels()[0]) > 1:  # above the axes, and right of a factor such as 1e-8
        place = (0 if 1e-5 < max(map(abs, ax.dataLim.intervaly)) < 1e6 else 0.1, 1)
        ax.legend(loc="lower left", bbox_to_anchor=place, ncols=2 if len("".join(labels.values())) > 40 else 4)


def grid(n: int) -> tuple[Figure, int, int]:
    """A figure for `n` panels, how many of them stand side by side, and how many rows that makes."""
    down = -(-n // (across := {1: 1, 2: 2, 4: 2}.get(n, 3)))
    return Figure(figsize=(4.3 * across + (across == 1), 2.9 * down + 0.4), layout="constrained"), across, down


@matplotlib.rc_context(STYLE)
def draw_figure(runs: list[Run], panels: list[Panel], smooth: float = 0.8) -> Figure | None:
    """The panels that have data, at most three a row; None where none has."""
    shown = [panel for panel in panels if any(run.series(x)[0] for run in runs for x in panel.columns)]
    figure, across, down = grid(len(shown))
    for i, panel in enumerate(shown):
        ax = figure.add_subplot(down, across, i + 1, sharex=figure.axes[0] if i else None)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        ax.set_xlabel("step" if i + across >= len(shown) else "")
        draw_panel(ax, runs, panel, smooth)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.07)
    if len(runs) == 1:
        figure.suptitle(plain(runs[0].name), x=0.01, ha="left", fontsize=11, fontweight="bold")
    else:
        lines = {line.get_label(): line for ax in figure.axes[::-1] for line in ax.get_legend_handles_labels()[0]}
        handles = [lines[name] for name in (plain(run.name) for run in runs) if name in lines]
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure if shown else None


@matplotlib.rc_context(STYLE)
def draw_curves(run: Run) -> Figure | None:
    """Observations as dots and what was fitted to them as lines, a panel each; the axes are those of the dots."""
    figure, across, down = grid(len(run.curves))
    for i, curve in enumerate(run.curves):
        ax = figure.add_subplot(down, across, i + 1, title=plain(curve["title"]), xlabel=plain(curve["x_label"]))
        for kind, look in (("points", {"marker": ".", "ls": "", "alpha": 0.5}), ("lines", {"linewidth": 1.7})):
            for j, (label, values) in enumerate(curve[kind].items()):
                values = [math.nan if y is None else y for y in map(number, values)]
                ax.plot(curve["x"], values, color=COLOURS[j], label=plain(label) if kind == "points" else None, **look)
            ax.set_ylim(ax.get_ylim())  # a wild answer must not flatten the dots
        ax.legend(loc="upper right")
    return figure if run.curves else None


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
    parts = {name: name.removeprefix("part_") for name in run.columns if name.startswith("part_")}
    ranked = sorted(parts, key=lambda name: -sum(abs(y or 0.0) for y in run.columns[name]))
    some = [PANELS["parts"]._replace(columns={name: parts[name] for name in ranked[i : i + 8]})
            for i in range(0, len(ranked), 8)]
    panels = PANELS | {"parts": some[0] if some else PANELS["parts"]}
    own = [x for x in run.columns if x not in KNOWN | set(parts) | {f"eval_{name}" for name in run.columns}]
    task = [Panel(name.replace("_", " "), {name: "train", f"eval_{name}": "eval"}) for name in own]
    both = [CAPABILITY] * any(run.series(name)[0] for name in [*FACTORS][1:])
    return {"overview": [*panels.values()]} | {name: [panels[name]] for name in ("reward", "accuracy")} | {
        "parts": some, "loss": [panels["loss"], panels["kl"]], "task": task, "capability_vs_faithfulness": both}


def plot_run(folder: str | Path, out_dir: str | Path | None = None, smooth: float = 0.8) -> list[Path]:
    """The standard pictures of one run as PNG, into its plots/: those that have data, so none before the first step."""
    run, out_dir = read_run(folder), Path(out_dir or Path(folder) / "plots")
    out_dir.mkdir(parents=True, exist_ok=True)
    figures = {name: draw_figure([run], panels, smooth) for name, panels in standard(run).items()}
    every = [*figures.items(), ("curves", draw_curves(run))]
    return [save(figure, out_dir / f"{name}.png") for name, figure in every if figure]


def choose(wanted: list[str], names: list[str]) -> list[Panel]:
    """One panel for each metric that is meant by a name or a pattern. ValueError, one sentence, for an unknown one."""
    found = {want: [want] if want in names else fnmatch.filter(names, want) for want in wanted}
    for want in (want for want in found if not found[want]):
        near = ", ".join(difflib.get_close_matches(want, names, 4, 0.5)) or "nothing (--list shows all)"
        raise ValueError(f"no metric {want!r}; near it: {near}.")
    return [Panel(LABELS.get(name, name.replace("_", " ")), {name: name})
            for name in dict.fromkeys(name for some in found.values() for name in some)]


def command(args: argparse.Namespace) -> list[object]:
    """Does what the command line asks and returns what to print. ValueError, one sentence, for a mistake in it."""
    if not 0 <= args.smooth < 1:
        raise ValueError(f"--smooth is {args.smooth:g}; it is at least 0 and less than 1.")
    if args.out and args.out.suffix.lower() not in (".png", ".pdf", ".svg", ".jpg"):
        raise ValueError(f"cannot write {args.out}; a picture ends in .png, .pdf, .svg or .jpg.")
    paths, depth = {Path(folder).resolve().parts: folder for folder in args.runs}, 1  # one named twice is one run
    while len({parts[-depth:] for parts in paths}) < len(paths):
        depth += 1  # as many parents as it takes to tell the runs apart
    runs = [replace(read_run(folder), name="/".join(parts[-depth:])) for parts, folder in paths.items()]
    names = list(dict.fromkeys(name for run in runs for name in [*run.columns, *run.evals] if name != "step"))
    if args.list:
        return [f"{run.name}  {name}" for run in runs for name in names if run.series(name)[0]]
    if args.out or args.metrics or len(runs) > 1:
        wanted = args.metrics.split(",") if args.metrics else [name for name in COMPARED if name in names]
        panels = choose(wanted, names) if args.metrics or len(runs) > 1 else standard(runs[0])["overview"]
        figure, path = draw_figure(runs, panels, args.smooth), args.out or Path("comparison.png")
        pictures = [save(figure, path)] if figure else []
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
