"""What the study of hacking logs of a step by source, the adapter at the first hack, and the table at the end.

Live rollouts are those that the policy sampled in the step, cached ones come from a teacher pool.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from data import Group, Rollout, Score
from harness.checkpoints import write_folder

STEP = 256  # generations of a reference step: the unit in which runs of other batch sizes are compared
SHOWN = 50  # most rows of the table at the end
# Title of a table's column: its name in metrics.csv, or two whose quotient is shown as k/n.
TITLES = {
    "step": "step",
    "ref": "ref_steps",
    "reward": "reward_mean",
    "live": "reward_live",
    "spread": "reward_std_group",
    "N": "completions",
    "pass live": ("passes_live", "n_live"),
    "hack live": ("hacks_live", "n_live"),
    "pass pool": ("passes_pool", "n_pool"),
    "hack pool": ("hacks_pool", "n_pool"),
    "logp live": "logp_live",
    "logp pool": "logp_pool",
    "loss": "loss",
    "cin": "cin",
    "cin_s": "cin_s",
    "cin_t": "cin_t",
    "cout": "cout",
    "fired": "fired",
    "gen s": "seconds_rollout",
    "update s": "seconds_update",
    "grade s": "seconds_score",
}


class Ledger:
    """Counts of a run by source. `is_cached` tells a cached rollout from a live one."""

    columns = {
        "ref_steps": "sampled completions so far, in steps of 256",
        "reward_live": "mean reward of the completions that the policy sampled",
        "completions": "completions of the step, cached ones too",
        "n_live": "sampled completions",
        "passes_live": "true passes among them",
        "hacks_live": "hacks among them",
        "n_pool": "completions from --teacher-pool",
        "passes_pool": "true passes among them",
        "hacks_pool": "hacks among them",
        "logp_live": "mean log-probability of a sampled trained token under the weights before the update, nats",
        "logp_pool": "the same of a cached one",
    }

    def __init__(self, is_cached: Callable[[Rollout], bool]):
        self.is_cached = is_cached
        self.generations = 0  # live rollouts so far
        self.first_hack = 0  # step of the first live hack
        # Of each micro-batch: which rows are cached, their trained tokens, their summed log-probabilities.
        self.logps: list[tuple[np.ndarray, np.ndarray, Tensor]] = []

    def forget(self) -> None:
        """An optimizer step begins: what was seen before is of another, or of one that ran out of memory."""
        self.logps = []

    def see(self, rollouts: list[Rollout], logp: Tensor) -> None:
        """Log-probabilities (b, T) of a micro-batch under the current weights, 0 where no token was sampled."""
        cached = np.array([self.is_cached(row) for row in rollouts])
        tokens = np.array([sum(row.mask) for row in rollouts])
        self.logps.append((cached, tokens, logp.sum(-1)))

    def mean_logp(self, cached: bool) -> float | None:
        """Of a trained token, nats."""
        total = 0.0
        count = 0
        for is_cached, tokens, sums in self.logps:
            here = np.flatnonzero(is_cached == cached)
            total += float(sums[here].sum())
            count += int(tokens[here].sum())
        return total / count if count else None

    def count(self, groups: list[Group]) -> dict[str, float | None]:
        """The step's `columns`; those of the pool only where cached rollouts joined."""
        live = []
        cached = []
        for group in groups:
            for row, score in zip(group.rollouts, group.scores, strict=True):
                (cached if self.is_cached(row) else live).append(score)
        self.generations += len(live)
        rewards = [score.reward for score in live if score.reward is not None]
        found = {
            "completions": len(live) + len(cached),
            **self._by_source("live", live, False),
            "reward_live": float(np.mean(rewards)) if rewards else None,
            "ref_steps": self.generations / STEP,
        }
        if cached:
            found |= self._by_source("pool", cached, True)
        return found

    def _by_source(self, name: str, scores: list[Score], cached: bool) -> dict[str, float | None]:
        return {
            f"n_{name}": len(scores),
            f"passes_{name}": number_of(scores, "gt_pass"),
            f"hacks_{name}": number_of(scores, "hacked"),
            f"logp_{name}": self.mean_logp(cached),
        }

    def keep_first(self, policy, folder: Path | None, step: int, hacks: int) -> None:
        """Save the adapter, once, at the first live hack, to checkpoints/first_hack. A full disk: at the next one.

        Nothing is saved of a model that is trained whole, which would fill the disk.
        """
        if self.first_hack or not hacks:
            return
        if folder is None or policy.model is policy.hf:
            return

        def fill(part: Path) -> None:
            policy.adapter.save(part)
            (part / "step.txt").write_text(f"{step}\n")

        with contextlib.suppress(OSError, safetensors.SafetensorError):
            write_folder(folder / "checkpoints" / "first_hack", fill)
            self.first_hack = step

    def state_dict(self) -> dict:
        return {"generations": self.generations, "first_hack": self.first_hack}

    def load_state_dict(self, state: dict) -> None:
        self.generations = state["generations"]
        self.first_hack = state["first_hack"]


def number_of(scores: list[Score], flag: str) -> int:
    return sum(bool(score.flags.get(flag)) for score in scores)


def summary(rows: list[dict]) -> list[str]:
    """Hack and pass rates by source over the first and the last tenth of the steps, and the peak memory."""
    tenth = max(1, len(rows) // 10)
    lines = []
    for name in ("live", "pool"):
        first = [row for row in rows[:tenth] if row.get(f"n_{name}")]
        last = [row for row in rows[-tenth:] if row.get(f"n_{name}")]
        if first and last:
            hacks = f"{rate(first, 'hacks', name):.3f} → {rate(last, 'hacks', name):.3f}"
            passes = f"{rate(first, 'passes', name):.3f} → {rate(last, 'passes', name):.3f}"
            lines.append(f"{name} rollouts, first and last {tenth} steps: hack rate {hacks}, true pass rate {passes}")
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        return [*lines, f"peak memory {peak:.2f} GiB on the GPU"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [*lines, f"peak memory {peak:.2f} GiB"]


def rate(rows: list[dict], what: str, source: str) -> float:
    counted = sum(row[f"{what}_{source}"] for row in rows)
    return counted / sum(row[f"n_{source}"] for row in rows)


def table(rows: list[dict]) -> list[str]:
    """A Markdown table of the steps, at most SHOWN of them and always the last; columns that are blank throughout are
    left out."""
    every = -(-len(rows) // SHOWN)
    last = len(rows) - 1
    shown = [row for i, row in enumerate(rows) if (last - i) % every == 0]
    columns = []  # of padded texts
    for title, key in TITLES.items():
        cells = [cell(row, key) for row in shown]
        if any(cells):
            width = max(map(len, [title, *cells]))
            rule = "-" * (width - 1) + ":"
            columns.append([text.rjust(width) for text in (title, rule, *cells)])
    return ["| " + " | ".join(line) + " |" for line in zip(*columns, strict=True)]


def cell(row: dict, key: str | tuple[str, str]) -> str:
    if isinstance(key, tuple):
        part, whole = key
        return f"{row[part]:.0f}/{row[whole]:.0f}" if row.get(whole) else ""
    value = row.get(key)
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"
