"""The log-probabilities of what was sampled: micro-batches, packed and padded forwards, log-softmax in chunks."""

from __future__ import annotations

import dataclasses

import torch
import torch.utils.checkpoint
from torch import Tensor

from data import Rollout
from engine.attention import Packed, planned_forward


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
    """Batches of at most `budget` tokens (one row at least); packed, the rows of a prompt stay together.

    A packed batch costs each prompt once and its completions; a padded one its rows times the longest of each.
    """
    if packed:
        first = {id(row.rollout.prompt): i for i, row in reversed(list(enumerate(rows)))}
        rows = sorted(rows, key=lambda row: first[id(row.rollout.prompt)])
    else:
        rows = sorted(rows, key=lambda row: -len(row.rollout.ids))
    out: list[list[TrainRow]] = []
    for row in rows:
        batch = [r.rollout for r in (*(out[-1] if out else ()), row)]
        prompts = {id(r.prompt): r.prompt_length for r in batch}
        written = [len(r.mask) for r in batch]
        cost = (sum(prompts.values()) + sum(written) if packed
                else len(batch) * (max(prompts.values()) + max(written)))
        if out and cost <= budget:
            out[-1].append(row)
        else:
            out.append([row])
    return out


def token_logps(policy, hf, rows: list[TrainRow], temperature: float, entropy: bool = False
                ) -> tuple[Tensor, Tensor | None]:
    """Log-probability (b, T) of every sampled token at `temperature`, and the entropy there (or None).

    Where the mask is 0 (observations, padding) both are 0.
    """
    rollouts = [row.rollout for row in rows]
    mask = pad([r.mask for r in rollouts], 0, torch.bool, policy.device)
    targets = pad([r.ids[r.prompt_length :] for r in rollouts], 0, torch.long, policy.device)[mask]
    if policy.engine == "fast":
        plan = Packed(rollouts, policy.device, policy.flex)
        policy.task.on_forward(plan.prompts)
        hidden = planned_forward(hf, plan.ids, plan.position, plan).index_select(0, plan.predictors)
        logp, h = chunked_logps(hf.get_output_embeddings(), hidden, targets, temperature, entropy)
    else:
        logp, h = chunked_logps(lambda x: x, padded_logits(policy, hf, rollouts)[mask], targets, temperature, entropy)
    return tuple(torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mask, x)
                 if x is not None else None for x in (logp, h))


def padded_logits(policy, hf, rollouts: list[Rollout]) -> Tensor:
    """The plain path: logits (b, T, V) that predict each token after the prompts.

    Prompts are padded on the left and completions on the right, so that all completions start in one column.
    """
    left, width = max(r.prompt_length for r in rollouts), max(len(r.mask) for r in rollouts)
    filler = policy.tokenizer.pad_token_id or 0
    ids = pad([[filler] * (left - r.prompt_length) + r.ids for r in rollouts], filler, torch.long, policy.device)
    real = [[0] * (left - r.prompt_length) + [1] * len(r.ids) for r in rollouts]
    keywords = {"input_ids": ids, "attention_mask": pad(real, 0, torch.long, policy.device)}
    if policy.takes_positions:
        keywords["position_ids"] = (keywords["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    policy.task.on_forward([r.prompt for r in rollouts])
    return hf(**keywords, use_cache=False, logits_to_keep=width + 1).logits[:, -width - 1 : -1]


def chunked_logps(head, x: Tensor, targets: Tensor, temperature: float, entropy: bool, chunk: int = 256
                  ) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(x) / temperature) at `targets` (n,) and its entropy, `chunk` positions of x (n, …) at a time.

    Each chunk is recomputed in the backward pass, so logits of more than one chunk are never kept.
    """
    def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        z = logits.logsumexp(-1)
        p = logits.softmax(-1) if entropy else logits
        h = -(p * (logits - z[:, None]).masked_fill(p == 0, 0.0)).sum(-1) if entropy else z
        return logits.gather(-1, y[:, None])[:, 0] - z, h

    parts = [torch.utils.checkpoint.checkpoint(part, a, b, use_reentrant=False)
             for a, b in zip(x.split(chunk), targets.split(chunk), strict=True)]
    logp, h = (torch.cat(values) for values in zip(*parts, strict=True))
    return logp, h if entropy else None


def pad(rows: list, fill, dtype, device) -> Tensor:
    """Rows of numbers, lengths up to T -> (b, T), filled on the right."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], dtype=dtype, device=device)


@torch.no_grad()
def fill_logps(policy, hf, rows: list[TrainRow], field: str, temperature: float, budget: int) -> None:
    """Set `old` or `ref` of every row to the log-probabilities under `hf`, in the update's own batches."""
    for batch in micro_batches(rows, budget, policy.engine == "fast"):
        logp, _ = token_logps(policy, hf, batch, temperature)
        for row, values in zip(batch, logp, strict=True):
            setattr(row, field, values[: len(row.rollout.mask)].clone())
