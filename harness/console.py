"""What a run says: lines on the terminal and in console.log, advice, seconds by phase, the summary."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from harness.files import append_whole

PHASES = ("rollout", "score", "update", "eval")  # of a step


class Console:
    """Says one line at a time: to the terminal, above the bar if there is one, and to console.log once it exists."""

    def __init__(self):
        self.lines: list[str] = []  # not in the file yet
        self.path: Path | None = None
        self.bar = None
        self.began = time.time()

    def __call__(self, text: str) -> None:
        try:
            if self.bar is None:
                print(text, flush=True)
            else:
                self.bar.write(text)
        except BrokenPipeError:  # `| head` has seen enough; the run goes on for its folder
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        except OSError:  # a full disk behind `> log`: the line is lost, the run is not
            pass
        self.lines.append(text + "\n")
        if self.path:
            self.attach(self.path)

    def open_bar(self, total: int, step: int) -> None:
        """A progress bar under the lines, where the output is a terminal."""
        self.bar = tqdm(total=total, initial=step, disable=None, leave=False)

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update(1)

    def close_bar(self) -> None:
        self.bar.close()
        self.bar = None

    def attach(self, path: Path) -> None:
        """Write to this file from now on, what was said before included."""
        self.path = path
        with contextlib.suppress(OSError):  # what does not fit now is written with the next line
            append_whole(path, "".join(self.lines).encode())
            self.lines.clear()


def mean_of(rows: list[dict], key: str) -> float:
    """The mean of a column over rows, NaN where none has it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return float(np.mean(values)) if values else math.nan


def advice(rows: list[dict], args) -> dict[str, str]:
    """What the last rows warn of: a short name -> one sentence with the flag to move."""
    last, recent = rows[-1], rows[-5:]
    found: dict[str, str] = {}
    constant = mean_of(recent, "groups_constant") / max(1e-9, mean_of(recent, "groups_sampled"))
    if len(recent) == 5 and constant > 0.3:
        what, data = difficulty(mean_of(recent, "accuracy"))
        found["starvation"] = (f"{constant:.0%} of the groups are constant and teach nothing: the problems are too "
                               f"{what}; try --group {2 * args.group}, --dynamic-sampling 2, or {data} data")
    if last["truncated_share"] > 0.5:
        out = " (--overlong drop leaves them out)" if args.overlong == "drop" else ""
        found["truncation"] = (f"{last['truncated_share']:.0%} of the completions hit the limit{out}; raise --max-new "
                               f"over {args.max_new}")
    if len(rows) >= 10 and mean_of(recent, "entropy") < 0.02 and mean_of(rows[:5], "entropy") > 0.1:
        found["entropy"] = "entropy has collapsed; raise --temperature, --clip-high or --entropy-coef, or lower --lr"
    if last.get("kl") is not None and last["kl"] > 10:
        found["kl"] = f"the KL to the reference is {last['kl']:.1f} nats a token; lower --lr or raise --beta"
    if last.get("filtered_mass", 0) > 0 and (args.top_p < 1 or args.top_k):  # else it is rounding
        found["filter"] = (f"--top-p / --top-k cut {last['filtered_mass']:.1%} of the probability from the sampler; "
                           "the trained ratio is the unfiltered policy's, so the gradient is off by about that")
    if len(rows) >= 20 and gain(rows, "reward_mean") > 0.05 and gain(rows, "accuracy") < -0.05:
        found["hacking"] = "the reward rises while true accuracy falls: read completions/, the reward may be hacked"
    return found


def difficulty(accuracy: float) -> tuple[str, str]:
    """What constant groups say of the problems, and the data to take instead."""
    if math.isnan(accuracy):
        return "alike", "other"
    return ("hard", "easier") if accuracy < 0.5 else ("easy", "harder")


def gain(rows: list[dict], key: str) -> float:
    """How much a column's mean over ten rows has grown over ten rows."""
    return mean_of(rows[-10:], key) - mean_of(rows[-20:-10], key)


def console_line(row: dict, args, shown: tuple[str, ...]) -> str:
    """One step on one line; `shown` are columns of the task."""
    def number(key: str, width: str = ".3f") -> str:
        return format(row[key], width) if row.get(key) is not None else "-"

    seconds = sum(row[f"seconds_{phase}"] for phase in PHASES)
    words = [
        f"step {row['step']:>{len(str(args.steps))}}/{args.steps}",
        f"reward {number('reward_mean')} ± {number('reward_std')}",
        f"accuracy {number('accuracy')}",
        f"groups {row['groups_used']}/{row['groups_sampled']}",
        f"length {number('length_mean', '.0f')}",
        f"kl {number('kl', '.4f')}",
        f"entropy {number('entropy')}",
        f"grad {number('grad_norm', '.2f')}",
        *(f"{name} {number(name)}" for name in shown),
        f"{seconds:.2f} s",
    ]
    if "eval_reward" in row:
        words.append(f"| held-out reward {number('eval_reward')} accuracy {number('eval_accuracy')}")
    return "  ".join(words)


def first_to_last(rows: list[dict]) -> list[str]:
    """Reward and its parts in the first and in the last row."""
    lines = []
    for name, last in rows[-1].items() if rows else ():
        first = rows[0].get(name)
        if name != "reward_mean" and not name.startswith("part_"):
            continue
        if first is not None and last is not None:
            lines.append(f"{name} {first:.3f} → {last:.3f}")
    return lines


class Clock:
    """Seconds by phase, and the peak of CUDA memory since it was made."""

    def __init__(self):
        self.start = time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @property
    def whole(self) -> float:
        return time.perf_counter() - self.start

    def metrics(self, tokens: int, asynchronous: bool) -> dict[str, float | None]:
        """The columns of metrics.csv that time and memory give, for a step that sampled `tokens`."""
        sampling = self.whole if asynchronous else self.seconds["rollout"]
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        row = {f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
        return row | {"tokens_per_second": tokens / max(1e-9, sampling), "peak_memory_gb": memory}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - begin


