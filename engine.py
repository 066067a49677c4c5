"""The rollout and the log-probabilities: what costs the time of a step.

Letters: B rows, L prompt length, T completion length, V vocabulary; lower case b and n are a micro-batch's.
`policy` is `train_grpo.Policy`; this module imports nothing of the project but data.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor

from data import Prompt, Rollout, TrainingFailed, UserError


# ------------------------------------------------------------------------------------------------ rollout
class Draw:
    """The sampler, as the only logits processor of `generate`: draws a token a row and leaves generate no choice.

    Inverse CDF from uniforms fixed beforehand, (B, T): a row's tokens do not depend on how rows are batched. Records
    tokens, log-probabilities and entropies of the distribution at `temperature` before top-k and top-p. At
    temperature 0 it is greedy and records those of temperature 1.
    """

    def __init__(self, uniforms: Tensor, temperature: float, top_k: int, top_p: float):
        self.uniforms, self.temperature, self.top_k, self.top_p = uniforms, temperature, top_k, top_p
        self.tokens: list[Tensor] = []
        self.logp: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.filtered: list[Tensor] = []

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / (self.temperature or 1.0)
        logp = logits - logits.logsumexp(-1, keepdim=True)
        p = logp.exp()
        kept = p if self.temperature == 0 else keep_top(p, self.top_k, self.top_p)
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:  # the cumulative sum in float64: in float32 the tail of a large vocabulary is lost
            cdf = kept.double().cumsum(-1)
            u = self.uniforms[:, len(self.tokens), None].to(cdf.device) * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True)
            last = kept.shape[-1] - 1 - (kept.flip(-1) > 0).int().argmax(-1, keepdim=True)
            token = torch.minimum(token, last)  # u may round up to the total
        self.tokens.append(token[:, 0])
        self.logp.append(logp.gather(-1, token)[:, 0])
        self.entropy.append(-torch.special.xlogy(p, p).sum(-1))
        self.filtered.append((p - kept).sum(-1))  # exactly 0 without a filter
        return torch.full_like(logits, -torch.inf).scatter_(-1, token, 0.0)


def keep_top(p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities (b, V) with those outside the `top_k` largest, then outside the nucleus, set to 0."""
    if top_k and top_k < p.shape[-1]:
        p = p.masked_fill(p < p.topk(top_k, -1).values[:, -1:], 0.0)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass above a token: the first token always stays
        drop = before >= top_p * ordered.sum(-1, keepdim=True)
        p = p.masked_fill(drop.scatter(-1, index, drop), 0.0)
    return p


@contextlib.contextmanager
def own_generation_config(hf, stop: list[int], pad: int):
    """Within: `generate` sees only these settings, whatever the model's own config asks for (top-k, penalties)."""
    before = hf.generation_config
    hf.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=stop or None, pad_token_id=pad)
    try:
        yield
    finally:
        hf.generation_config = before


@torch.no_grad()
def rollout(policy, prompts: list[Prompt], n: int, temperature: float, seed: int) -> list[list[Rollout]]:
    """`n` rollouts of each prompt, in prompt order. One batched generate a turn, split only by --rollout-tokens."""
    args, task = policy.args, policy.task
    rows = []
    for prompt in prompts:
        ids = policy.encode(prompt)
        if len(ids) >= policy.context:
            raise UserError(f"a prompt of {len(ids)} tokens leaves no room in the context of {policy.context}; raise "
                            "--context, or let the task's keep() drop it")
        rows += [Rollout(prompt, list(ids), [], [], [], [], "", []) for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    active, masses = rows, []
    for turn in range(args.max_turns):
        uniforms = torch.rand(len(rows), args.max_new, generator=generator, dtype=torch.float64)
        lookup = {id(row): i for i, row in enumerate(rows)}
        for batch in split_rollout(active, args):
            drawn = uniforms[[lookup[id(row)] for row in batch]]
            masses.append(generate_turn(policy, batch, drawn, temperature))
        waiting = []
        for row in active:
            reply = task.reply(row) if row.stop == "stop" else None
            if reply and turn + 1 < args.max_turns:
                if observe_reply(policy, row, reply):
                    waiting.append(row)
            elif reply:
                row.stop = "unfinished"
        active = waiting
        if not active:
            break
    policy.filtered_mass = float(np.mean(masses)) if masses else 0.0
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def split_rollout(rows: list[Rollout], args) -> list[list[Rollout]]:
    """Consecutive rows whose padded size stays under --rollout-tokens."""
    out: list[list[Rollout]] = []
    width = max((len(row.ids) for row in rows), default=0) + args.max_new
    size = max(1, args.rollout_tokens // width)
    for i in range(0, len(rows), size):
        out.append(rows[i : i + size])
    return out


def generate_turn(policy, rows: list[Rollout], uniforms: Tensor, temperature: float) -> float:
    """One generate call for all rows, which grow by what was sampled; returns the mean filtered mass."""
    args, hf = policy.args, policy.hf
    width = max(len(row.ids) for row in rows)
    pad = policy.tokenizer.pad_token_id if policy.tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(row.ids)) + row.ids for row in rows], device=policy.device)
    mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in rows], device=policy.device)
    room = [min(args.max_new, policy.context - len(row.ids)) for row in rows]
    draw = Draw(uniforms, temperature, args.top_k, args.top_p)
    policy.model.eval()
    policy.task.on_forward([row.prompt for row in rows])
    with own_generation_config(hf, policy.stop_ids, pad):
        hf.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(room), logits_processor=[draw])
    tokens, logp, entropy, filtered = (
        torch.stack(x, 1).tolist() for x in (draw.tokens, draw.logp, draw.entropy, draw.filtered))
    stop, masses = set(policy.stop_ids), []
    for i, row in enumerate(rows):
        length = next((t + 1 for t, token in enumerate(tokens[i][: room[i]]) if token in stop), 0)
        row.stop = "stop" if length else "length" if room[i] == args.max_new else "context"
        length = length or min(room[i], len(tokens[i]))
        if not np.isfinite(logp[i][:length]).all():
            raise TrainingFailed("the policy's probabilities are not finite (NaN or Inf): the weights are broken")
        row.ids += tokens[i][:length]
        row.mask += [1] * length
        row.logp += logp[i][:length]
        row.entropy += entropy[i][:length]
        row.version += [policy.version] * length
        masses += filtered[i][:length]
        said = policy.tokenizer.decode(tokens[i][:length], skip_special_tokens=True)
        row.turns.append({"role": "assistant", "content": said})
    return float(np.mean(masses)) if masses else 0.0


def observe_reply(policy, row: Rollout, reply: list[dict]) -> bool:
    """Append a task's reply, as the chat template writes it after the policy's turn; False where no room is left.

    What the policy wrote stays as it was sampled: only the template's text after it is tokenised.
    """
    if isinstance(row.prompt.messages, str):
        raise UserError("a task that replies needs chat messages as its prompts, not plain text")
    mark = "replysuffixmark"
    head = list(row.prompt.messages) + row.turns[:-1] + [{"role": "assistant", "content": mark}]
    suffix = policy.render(head + reply, row.prompt, True).rpartition(mark)[2]
    new = policy.tokenizer.encode(suffix, add_special_tokens=False)
    if new and new[0] == row.ids[-1]:  # the stop token that ends the turn is already there
        new = new[1:]
    row.turns += reply
    if len(row.ids) + len(new) >= policy.context:
        row.stop = "context"
        return False
    row.ids += new
    row.mask += [0] * len(new)
    row.logp += [0.0] * len(new)
    row.entropy += [0.0] * len(new)
    row.version += [-1] * len(new)
    return True


# ------------------------------------------------------------------------------------------------ log-probabilities
@dataclasses.dataclass
class Row:
    """A rollout on its way through the update. `old` and `ref` are (T,) log-probabilities where they are needed."""

    rollout: Rollout
    advantage: float
    weight: float = 0.0  # what each sampled token's loss is multiplied by: the normaliser of the optimizer step
    old: Tensor | None = None
    ref: Tensor | None = None
    uncertain: list[bool] | None = None  # (T,) the tokens that --top-entropy selects


def micro_batches(rows: list[Row], budget: int) -> list[list[Row]]:
    """Rows by length, longest first, in batches whose padded size stays within `budget` tokens (one row at least)."""
    out: list[list[Row]] = []
    width = 0
    for row in sorted(rows, key=lambda row: -len(row.rollout.ids)):
        prompt, completion = row.rollout.prompt_length, len(row.rollout.mask)
        if out:
            batch = out[-1]
            width = (max(prompt, *(r.rollout.prompt_length for r in batch))
                     + max(completion, *(len(r.rollout.mask) for r in batch)))
        if not out or width * (len(out[-1]) + 1) > budget:
            out.append([])
        out[-1].append(row)
    return out


def pad(rows: list, fill, dtype, device) -> Tensor:
    """Rows of numbers, lengths up to T -> (b, T), filled on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], dtype=dtype, device=device)


def token_logps(policy, hf, rows: list[Row], temperature: float, entropy: bool = False
                ) -> tuple[Tensor, Tensor | None]:
    """Log-probability (b, T) of every token after the prompts at `temperature`, and the entropy there (or None).

    Prompts are padded on the left and completions on the right, so that all completions start in one column; logits
    exist only where a completion token is predicted.
    """
    rollouts = [row.rollout for row in rows]
    left = max(r.prompt_length for r in rollouts)
    width = max(len(r.mask) for r in rollouts)
    filler = policy.tokenizer.pad_token_id or 0
    ids, mask = [], []
    for r in rollouts:
        before, after = left - r.prompt_length, width - len(r.mask)
        ids.append([filler] * before + r.ids + [filler] * after)
        mask.append([0] * before + [1] * len(r.ids) + [0] * after)
    ids = torch.tensor(ids, device=policy.device)
    mask = torch.tensor(mask, device=policy.device)
    keywords = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "logits_to_keep": width + 1}
    if policy.takes_positions:
        keywords["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    policy.task.on_forward([r.prompt for r in rollouts])
    logits = hf(**keywords).logits[:, -width - 1 : -1]
    return chunked_logps(logits, ids[:, left:], temperature, entropy)


def chunked_logps(logits: Tensor, targets: Tensor, temperature: float, entropy: bool, chunk: int = 256
                  ) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `targets` (b, T) and its entropy, `chunk` positions at a time.

    Each chunk is recomputed in the backward pass, so no second (b, T, V) tensor is ever kept.
    """
    def part(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(torch.promote_types(x.dtype, torch.float32)) / temperature
        z = x.logsumexp(-1)
        p = x.softmax(-1) if entropy else x
        h = z - (p * x.masked_fill(p == 0, 0.0)).sum(-1) if entropy else z  # a logit of -inf adds nothing
        return x.gather(-1, y[:, None])[:, 0] - z, h

    flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    parts = [torch.utils.checkpoint.checkpoint(part, x, y, use_reentrant=False)
             for x, y in zip(flat.split(chunk), wanted.split(chunk), strict=True)]
    logp, h = (torch.cat(x).view(targets.shape) for x in zip(*parts, strict=True))
    return logp, h if entropy else None


@torch.no_grad()
def fill_logps(policy, hf, rows: list[Row], field: str, temperature: float, budget: int) -> None:
    """Set `old` or `ref` of every row to the log-probabilities under `hf`, in the update's own batches."""
    for batch in micro_batches(rows, budget):
        logp, _ = token_logps(policy, hf, batch, temperature)
        for row, values in zip(batch, logp, strict=True):
            setattr(row, field, values[: len(row.rollout.mask)].clone())
