"""What the study of hacking logs of a step by source, the adapter at the first hack, and the table at the end.

Live rollouts are those that the policy sampled in the step, cached ones come from a teacher pool.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from data import Group, Rollout, Score

STEP = 256  # generations of a reference step: the unit in which runs of other batch sizes are compared
SHOWN = 50  # most rows of the table at the end
# Title of a table's column: its name in metrics.csv, or two whose quotient is shown as k/n.
TITLES = {"step": "step", "ref": "ref_steps", "reward": "reward_mean", "live": "reward_live",
          "spread": "reward_std_group", "N": "completions", "pass live": ("passes_live", "n_live"),
          "hack live": ("hacks_live", "n_live"), "pass pool": ("passes_pool", "n_pool"),
          "hack pool": ("hacks_pool", "n_pool"), "logp live": "logp_live", "logp pool": "logp_pool", "loss": "loss",
          "cin": "cin", "cin_s": "cin_s", "cin_t": "cin_t", "cout": "cout", "fired": "fired",
          "gen s": "seconds_rollout", "update s": "seconds_update", "grade s": "seconds_score"}


class Ledger:
    """Counts of a run by source. `is_cached` tells a cached rollout from a live one."""

    columns = ("ref_steps", "reward_live", "completions", "n_live", "passes_live", "hacks_live", "n_pool",
               "passes_pool", "hacks_pool", "logp_live", "logp_pool")

    def __init__(self, is_cached: Callable[[Rollout], bool]):
        self.is_cached = is_cached
        self.generations, self.first_hack = 0, 0  # live rollouts so far; step of the first live hack
        self.logps: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def forget(self) -> None:
        """An optimizer step begins: what was seen before is of another, or of one that ran out of memory."""
        self.logps = []

    def see(self, rollouts: list[Rollout], logp: Tensor) -> None:
        """Log-probabilities (b, T) of a micro-batch under the current weights, 0 where no token was sampled."""
        tokens = np.array([sum(row.mask) for row in rollouts])
        self.logps.append((np.array([self.is_cached(row) for row in rollouts]), tokens, logp.sum(-1)))

    def mean_logp(self, cached: bool) -> float | None:
        """Of a trained token, nats."""
        total = sum(float(sums[np.flatnonzero(where == cached)].sum()) for where, _, sums in self.logps)
        count = sum(int(tokens[where == cached].sum()) for where, tokens, _ in self.logps)
        return total / count if count else None

    def count(self, groups: list[Group]) -> dict[str, float | None]:
        pairs = [pair for g in groups for pair in zip(g.rollouts, g.scores, strict=True)]
        found: dict[str, float | None] = {"completions": len(pairs)}
        for name, cached in (("live", False), ("pool", True)):
            scores = [score for row, score in pairs if self.is_cached(row) == cached]
            if scores or not cached:
                found |= {f"n_{name}": len(scores), f"passes_{name}": total(scores, "gt_pass"),
                          f"hacks_{name}": total(scores, "hacked"), f"logp_{name}": self.mean_logp(cached)}
            if not cached:
                rewards = [score.reward for score in scores if score.reward is not None]
                self.generations += len(scores)
                found |= {"reward_live": float(np.mean(rewards)) if rewards else None,
                          "ref_steps": self.generations / STEP}
        return found

    def keep_first(self, policy, folder: Path | None, step: int, hacks: int) -> None:
        """Save the adapter, once, at the first live hack, to checkpoints/first_hack. A full disk: at the next one."""
        if self.first_hack or not hacks or folder is None or policy.args.adapter == "none":
            return
        target = folder / "checkpoints" / "first_hack"
        part = target.with_name(".first_hack")
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
        try:
            policy.model.save_pretrained(part)
            (part / "step.txt").write_text(f"{step}\n")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(part, target)
        except (OSError, safetensors.SafetensorError):
            shutil.rmtree(part, ignore_errors=True)
        else:
            self.first_hack = step

    def state_dict(self) -> dict:
        return {"generations": self.generations, "first_hack": self.first_hack}

    def load_state_dict(self, state: dict) -> None:
        self.generations, self.first_hack = state["generations"], state["first_hack"]


def total(scores: list[Score], flag: str) -> int:
    return sum(bool(score.flags.get(flag)) for score in scores)


def summary(rows: list[dict]) -> list[str]:
    """Hack and pass rates by source over the first and the last tenth of the steps, and the peak memory."""
    some, lines = max(1, len(rows) // 10), []
    for name in ("live", "pool"):
        parts = [[row for row in part if row.get(f"n_{name}")] for part in (rows[:some], rows[-some:])]
        if all(parts):
            rates = [" → ".join(f"{sum(row[key] for row in part) / sum(row[f'n_{name}'] for row in part):.3f}"
                                for part in parts) for key in (f"hacks_{name}", f"passes_{name}")]
            lines.append(f"{name} rollouts, first and last {some} steps: hack rate {rates[0]}, true pass rate "
                         f"{rates[1]}")
    if torch.cuda.is_available():
        return [*lines, f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on the GPU"]
    return [*lines, f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"]


def table(rows: list[dict]) -> list[str]:
    """A Markdown table of the steps, at most SHOWN of them and always the last; columns that are blank throughout are
    left out."""
    every = -(-len(rows) // SHOWN)
    shown = [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % every == 0]
    columns = {title: [cell(row, key) for row in shown] for title, key in TITLES.items()}
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    widths = [max(map(len, [title, *cells])) for title, cells in columns.items()]
    lines = [columns, ["-" * (width - 1) + ":" for width in widths], *zip(*columns.values(), strict=True)]
    return ["| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |"
            for line in lines]


def cell(row: dict, key: str | tuple[str, str]) -> str:
    if isinstance(key, tuple):
        return f"{row[key[0]]:.0f}/{row[key[1]]:.0f}" if row.get(key[1]) else ""
    value = row.get(key)
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"
