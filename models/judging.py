"""Judging models: loading, 4-bit weights, batches by a token budget, right padding.

For models that score what the policy wrote: process reward models, reward models, extractors, reconstructors. All of
them read token ids in one forward and train nothing of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from data import UserError
from engine.logps import pad

Result = TypeVar("Result")


# ---- loading
def load_judge(name: str, path: str, from_pretrained: Callable[..., nn.Module], device: torch.device,
               dtype: torch.dtype, quantized: dict[str, Any] | None = None, advice: str = "") -> tuple[nn.Module, Any]:
    """Frozen model, in evaluation mode on `device`, and tokenizer, of a folder or hub id.

    `from_pretrained(path, **keywords)` gives the model; `quantized` are the keywords of `four_bit`, None for weights of
    `dtype`. What the libraries raise becomes one UserError that begins with `name` (a flag) and ends with `advice`.
    """
    keywords = {"dtype": dtype, **(quantized or {})}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)  # before the weights, which take minutes
        model = from_pretrained(path, **keywords)
    except UserError:
        raise
    except Exception as error:  # hub, torch, safetensors: each has its own classes
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name} {path} cannot be loaded: {type(error).__name__}: {reason}{advice}") from error
    if not quantized:
        model = model.to(device)
    return model.eval().requires_grad_(False), tokenizer


# ---- batches
class TokenBudget:
    """Batches of rows of similar length with at most `budget` padded tokens each, one row at least."""

    def __init__(self, budget: int):
        self.budget = budget

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of rows of these lengths, longest first."""
        order = longest_first(lengths)
        while order:
            count = self._rows_of(lengths[order[0]])
            yield order[:count]
            order = order[count:]

    def map(self, lengths: Sequence[int], judge: Callable[[list[int]], Sequence[Result]]) -> list[Result]:
        """`judge(indices)` of each batch gives a result a row; returns them in the rows' order.

        Out of memory halves the batch, and the budget for good; with one row it is raised.
        """
        results: dict[int, Result] = {}
        order = longest_first(lengths)
        while order:
            longest = lengths[order[0]]
            batch = order[: self._rows_of(longest)]
            try:
                found = judge(batch)
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self.budget = longest * (len(batch) // 2)
                torch.cuda.empty_cache()
                continue
            results.update(zip(batch, found, strict=True))
            order = order[len(batch):]
        return [results[i] for i in range(len(lengths))]

    def _rows_of(self, length: int) -> int:
        return max(1, self.budget // max(1, length))


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by falling length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def pad_right(rows: Sequence[Sequence[int]], filler: int, device: torch.device | None = None
              ) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (b, n) int64, of b rows of ids. A causal model never sees what is filled on
    the right, so a batch gives what one row at a time gives."""
    ids = pad(rows, filler, torch.long, device)
    mask = pad([[1] * len(row) for row in rows], 0, torch.long, device)
    return ids, mask
