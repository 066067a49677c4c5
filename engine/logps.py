"""The log-probabilities of what was sampled: micro-batches, packed and padded forwards, log-softmax in chunks."""

from __future__ import annotations

import dataclasses

import torch
import torch.utils.checkpoint
from torch import Tensor

from data import Prompt, Rollout
from engine.attention import PackedLayout, layout_forward


@dataclasses.dataclass(eq=False)
class TrainRow:
    """A rollout on its way through the update. `old` and `ref` are (T,) log-probabilities where they are needed."""

    rollout: Rollout
    advantage: float
    anchored: bool = True  # held to the reference by the KL term
    weight: float = 0.0  # what each sampled token's loss is multiplied by: the normaliser of the optimizer step
    old: Tensor | None = None
    ref: Tensor | None = None
    uncertain: list[bool] | None = None  # (T,) the tokens that --top-entropy selects

    @property
    def tokens(self) -> int:
        """How many tokens of it the policy sampled."""
        return sum(self.rollout.mask)


def micro_batches(rows: list[TrainRow], budget: int, packed: bool) -> list[list[TrainRow]]:
    """Batches of at most `budget` tokens (one row at least); packed, the rows of a prompt stay together."""
    if packed:
        first: dict[Prompt, int] = {}
        for i, row in enumerate(rows):
            first.setdefault(row.rollout.prompt, i)
        rows = sorted(rows, key=lambda row: first[row.rollout.prompt])
    else:
        rows = sorted(rows, key=lambda row: -len(row.rollout.ids))
    out: list[list[TrainRow]] = []
    for row in rows:
        if out and batch_tokens([*out[-1], row], packed) <= budget:
            out[-1].append(row)
        else:
            out.append([row])
    return out


def batch_tokens(rows: list[TrainRow], packed: bool) -> int:
    """What a batch costs: packed, each prompt once and its completions; padded, its rows times the longest of each."""
    prompts: dict[Prompt, int] = {}
    written: list[int] = []
    for row in rows:
        prompts[row.rollout.prompt] = row.rollout.prompt_length
        written.append(len(row.rollout.mask))
    lengths = prompts.values()
    if packed:
        return sum(lengths) + sum(written)
    longest = max(lengths) + max(written)
    return len(rows) * longest


def token_logps(policy, hf, rows: list[TrainRow], temperature: float, entropy: bool = False
                ) -> tuple[Tensor, Tensor | None]:
    """Log-probability (b, T) of every sampled token at `temperature`, and the entropy there (or None).

    Where the mask is 0 (observations, padding) both are 0.
    """
    rollouts = [row.rollout for row in rows]
    mask = pad([rollout.mask for rollout in rollouts], 0, torch.bool, policy.device)
    written = [rollout.ids[rollout.prompt_length :] for rollout in rollouts]
    targets = pad(written, 0, torch.long, policy.device)
    targets = targets[mask]
    if policy.engine == "fast":
        layout = PackedLayout(rollouts, policy.device, policy.flex)
        policy.task.on_forward(layout.prompts)
        hidden = layout_forward(hf, layout.ids, layout.position, layout)
        hidden = hidden.index_select(0, layout.predictors)  # the rest of the row is let go
        logp, h = chunked_logps(hf.get_output_embeddings(), hidden, targets, temperature, entropy)
    else:
        logits = padded_logits(policy, hf, rollouts)
        logits = logits[mask]
        logp, h = chunked_logps(torch.nn.Identity(), logits, targets, temperature, entropy)
    logp = scattered(logp, mask)
    if h is None:
        return logp, None
    return logp, scattered(h, mask)


def scattered(values: Tensor, mask: Tensor) -> Tensor:
    """Values (n,) at the places of a mask (b, T), 0 elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return zeros.masked_scatter(mask, values)


def padded_logits(policy, hf, rollouts: list[Rollout]) -> Tensor:
    """The plain path: logits (b, T, V) that predict each token after the prompts.

    Prompts are padded on the left and completions on the right, so that all completions start in one column.
    """
    left = max(rollout.prompt_length for rollout in rollouts)
    width = max(len(rollout.mask) for rollout in rollouts)
    filler = policy.tokenizer.pad_token_id or 0
    ids: list[list[int]] = []
    real: list[list[int]] = []
    for rollout in rollouts:
        missing = left - rollout.prompt_length
        ids.append([filler] * missing + rollout.ids)
        real.append([0] * missing + [1] * len(rollout.ids))
    attention_mask = pad(real, 0, torch.long, policy.device)
    keywords = {
        "input_ids": pad(ids, filler, torch.long, policy.device),
        "attention_mask": attention_mask,
    }
    if policy.takes_positions:
        position = attention_mask.cumsum(-1) - 1
        keywords["position_ids"] = position.clamp(min=0)
    policy.task.on_forward([rollout.prompt for rollout in rollouts])
    predicting = width + 1  # the last position predicts nothing
    out = hf(**keywords, use_cache=False, logits_to_keep=predicting)
    return out.logits[:, -predicting:-1]


def chunked_logps(head, x: Tensor, targets: Tensor, temperature: float, entropy: bool, chunk: int = 256
                  ) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(x) / temperature) at `targets` (n,) and its entropy, `chunk` positions of x (n, …) at a time.

    Each chunk is recomputed in the backward pass, so logits of more than one chunk are never kept.
    """
    def logps_of(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = head(x)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(dtype) / temperature
        z = logits.logsumexp(-1)
        found: tuple[Tensor, ...] = ()
        if entropy:
            p = logits.softmax(-1)
            finite = logits - z[:, None]
            finite = finite.masked_fill(p == 0, 0.0)
            surprise = p * finite
            found = (-surprise.sum(-1),)
        chosen = logits.gather(-1, y[:, None])
        return chosen[:, 0] - z, *found

    parts: list[tuple[Tensor, ...]] = []
    for some, at in zip(x.split(chunk), targets.split(chunk), strict=True):
        part = torch.utils.checkpoint.checkpoint(logps_of, some, at, use_reentrant=False)
        parts.append(part)
    logp = torch.cat([part[0] for part in parts])
    if not entropy:
        return logp, None
    h = torch.cat([part[1] for part in parts])
    return logp, h


def pad(rows: list, fill, dtype, device) -> Tensor:
    """Rows of numbers, lengths up to T -> (b, T), filled on the right."""
    width = max(1, *(len(row) for row in rows))
    filled = []
    for row in rows:
        missing = width - len(row)
        filled.append([*row, *[fill] * missing])
    return torch.tensor(filled, dtype=dtype, device=device)


@torch.no_grad()
def fill_logps(policy, hf, rows: list[TrainRow], field: str, temperature: float, budget: int) -> None:
    """Set `old` or `ref` of every row to the log-probabilities under `hf`, in the update's own batches."""
    packed = policy.engine == "fast"
    for batch in micro_batches(rows, budget, packed):
        logp, _ = token_logps(policy, hf, batch, temperature)
        for row, values in zip(batch, logp, strict=True):
            written = len(row.rollout.mask)
            values = values[:written]
            setattr(row, field, values.clone())
