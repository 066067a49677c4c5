"""The rollout and the log-probabilities: what costs the time of a step.

Two engines, held to each other by tests and by a numerical check at the start of each run. `generate` is the plain
path: `model.generate`, and padded forwards. `fast` feeds the model one padding-free row of tokens and brings its own
attention, a function registered with transformers, so the model's code stays stock:
- rollout: each prompt is prefilled once and its keys and values are copied for its group; rows that ended leave;
- log-probabilities: each prompt once, followed by its completions; logits only where a sampled token is predicted.

Letters: B rows, T completion length, V vocabulary, D hidden; lower case b and n: rows and tokens of one batch.
`policy` is `models.policy.Policy`. Log-probabilities are in engine/logps.py, the KV cache in
engine/attention.py.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np
import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor

from data import Prompt, Rollout, TrainingFailed, UserError
from engine.attention import Cache, gather


# ------------------------------------------------------------------------------------------------ the sampler
def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    """A token a row from logits (b, V) and uniforms (b,) in [0, 1): inverse CDF, or the argmax at temperature 0.

    Returns (b,) tensors: token, its log-probability and the entropy under softmax(logits / temperature) (temperature 1
    where greedy), and the probability that top-k, then top-p, removed from the draw.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / (temperature or 1.0)
    logp = logits - logits.logsumexp(-1, keepdim=True)
    p = logp.exp()
    kept = p if temperature == 0 else keep_top(p, top_k, top_p)
    filtered = torch.zeros_like(p[:, 0]) if kept is p else 1 - kept.sum(-1)
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:  # the cumulative sum in float64: in float32 the tail of a large vocabulary is lost
        cdf = kept.double().cumsum(-1)
        total = cdf[:, -1:]  # the product may round up to it: just below, the last token with a probability is drawn
        target = torch.minimum(uniforms[:, None].to(cdf) * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, target, right=True).clamp(max=p.shape[-1] - 1)  # NaN: reported by the caller
    entropy = -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)  # a logit of -inf adds nothing
    return token[:, 0], logp.gather(-1, token)[:, 0], entropy, filtered


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


class Draws:
    """What is sampled in one turn, (B, T) each, and which rows go on. A row that ended draws on, for nothing."""

    def __init__(self, rows: list[Rollout], room: list[int], uniforms: Tensor, policy, temperature: float):
        args, shape, device = policy.args, (len(rows), max(room)), policy.device
        self.settings = (temperature, args.top_k, args.top_p)
        self.uniforms, self.room = uniforms.to(device), torch.tensor(room, device=device)
        self.stop = torch.tensor(policy.stop_ids, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logp, self.entropy, self.filtered = (torch.zeros(shape, device=device) for _ in range(3))
        self.length = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.ended = torch.zeros(len(rows), dtype=torch.bool, device=device)  # by a stop id
        self.going = self.room > 0

    def add(self, logits: Tensor, index: Tensor, t: int) -> Tensor:
        """Draw token `t` of the turn for the rows `index` (b,) from logits (b, V); nothing here waits for the GPU."""
        token, *values = draw(logits, self.uniforms[index, t], *self.settings)
        self.tokens[index, t] = token
        for kept, new in zip((self.logp, self.entropy, self.filtered), values, strict=True):
            kept[index, t] = new.to(kept.dtype)
        going, stopped = self.going[index], torch.isin(token, self.stop)
        self.length[index] += going
        self.ended[index] |= going & stopped
        self.going[index] = going & ~stopped & (t + 1 < self.room[index])
        return token

    def write(self, rows: list[Rollout], policy) -> float:
        """Append what was sampled to the rollouts; returns the mean filtered mass."""
        columns = (x.tolist() for x in (self.tokens, self.logp, self.entropy, self.filtered, self.ended, self.length))
        masses = []
        for row, tokens, logp, entropy, filtered, ended, n in zip(rows, *columns, strict=True):
            if not np.isfinite(logp[:n]).all():
                raise TrainingFailed("the policy's probabilities are not finite (NaN or Inf): the weights are broken")
            row.stop = "stop" if ended else "length" if n == policy.args.max_new else "context"
            extend(row, tokens[:n], 1, logp[:n], entropy[:n], policy.version)
            masses += filtered[:n]
            text = policy.tokenizer.decode(tokens[:n], skip_special_tokens=True)
            row.turns.append({"role": "assistant", "content": text})
        return float(np.mean(masses)) if masses else 0.0


def extend(row: Rollout, ids: list[int], mask: int, logp: list[float], entropy: list[float], version: int) -> None:
    """Append tokens with one mask and version to a rollout."""
    row.ids += ids
    row.mask += [mask] * len(ids)
    row.logp, row.entropy, row.version = row.logp + logp, row.entropy + entropy, row.version + [version] * len(ids)


# ------------------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(policy, prompts: list[Prompt], n: int, temperature: float, seed: int) -> list[list[Rollout]]:
    """`n` rollouts of each prompt, in prompt order. One batch a turn, split only by --rollout-tokens.

    The draws of a row depend on its place and turn alone, not on the rows that share its batch.
    """
    args, rows = policy.args, []
    for prompt in prompts:
        ids = policy.encode(prompt)
        if len(ids) >= policy.context:
            raise UserError(f"a prompt of {len(ids)} tokens leaves no room in the context of {policy.context}; raise "
                            "--context, or let the task's keep() drop it")
        rows += [Rollout(prompt, list(ids), [], [], [], [], "", []) for _ in range(n)]
    longest = max((len(row.ids) for row in rows), default=0) + args.max_new * policy.task.turns()
    size = max(1, policy.rollout_tokens // min(policy.context, longest))
    policy.model.eval()
    if policy.server:
        policy.server.sync(policy)
    merge = policy.engine == "fast" and not policy.server
    with policy.adapter.merged_in() if merge else contextlib.nullcontext():
        masses = [mass for i in range(0, len(rows), size)
                  for mass in converse(policy, rows[i : i + size], range(i, i + size), temperature, seed)]
    policy.filtered_mass = float(np.mean(masses)) if masses else 0.0
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def converse(policy, rows: list[Rollout], places: range, temperature: float, seed: int) -> list[float]:
    """All turns of one batch of rows, which grow; returns each turn's filtered mass."""
    args, held, masses, active = policy.args, {}, [], list(range(len(rows)))
    for turn in range(policy.task.turns()):
        generator = torch.Generator().manual_seed(seed + turn)
        uniforms = torch.rand(places.stop, args.max_new, generator=generator, dtype=torch.float64)[places.start :]
        batch = [rows[i] for i in active]
        room = [min(args.max_new, policy.context - len(row.ids)) for row in batch]
        draws = Draws(batch, room, uniforms[active], policy, temperature)
        if policy.server:
            policy.server.fill(policy, batch, draws, temperature)
        else:
            (decode if policy.engine == "fast" else generate)(policy, batch, draws, held)
        masses.append(draws.write(batch, policy))
        active = [i for i in active if takes_turn(policy, rows[i], turn + 1 < policy.task.turns())]
        held = {id(rows[i]): held[id(rows[i])] for i in active if id(rows[i]) in held}  # the others' memory goes
        if not active:
            break
    return masses


def decode(policy, rows: list[Rollout], draws: Draws, held: dict[int, tuple]) -> None:
    """The fast path: prefill what differs once, copy it to the rows that share it, then a token a row and step.

    `held` has, by id of a row, what an earlier turn left of it: (cache, place, tokens that stand there). Then only
    what was added since is fed. It is renewed where another turn may follow.
    """
    hf, graphs = policy.hf, policy.args.cuda_graphs
    many = policy.task.turns() > 1
    capacity = min(policy.context, max(len(row.ids) for row in rows) + draws.tokens.shape[1])
    if held:
        cache = gather([held[id(row)][:2] for row in rows], capacity)
        starts = [held[id(row)][2] for row in rows]
        cache.length = torch.tensor(starts, device=policy.device)
        hidden = cache.feed(hf, [row.ids[start:] for row, start in zip(rows, starts, strict=True)])
    else:
        first: dict[tuple, int] = {}  # rows of one prompt are fed once
        share = [first.setdefault((id(row.prompt), *row.ids), len(first)) for row in rows]
        distinct = [rows[share.index(i)] for i in range(len(first))]
        policy.task.on_forward([row.prompt for row in distinct])
        cache = Cache(len(distinct), max(len(row.ids) for row in distinct), policy.device)
        hidden = cache.feed(hf, [row.ids for row in distinct])[share]
        cache = gather([(cache, i) for i in share], capacity)
        policy.task.on_forward([])
    logits = hf.get_output_embeddings()(hidden)
    index, ends = torch.arange(len(rows), device=policy.device), {}
    every, spare = 16 if policy.device.type == "cuda" else 1, 0.5 if graphs else 1  # on a GPU looking is a wait
    for t in range(draws.tokens.shape[1]):
        token = draws.add(logits, index, t)
        if (t + 1) % every == 0 or t + 1 == draws.tokens.shape[1]:
            alive = draws.going[index].nonzero()[:, 0]
            if not len(alive):
                break
            if len(alive) < len(index) and len(alive) <= spare * len(index):  # rows that ended leave
                if many:
                    ends |= keep_ended(cache, index, alive)
                order = cache.keep(alive.tolist())
                index, token = index[order], token[order]
        logits = cache.step(hf, token, graphs)
    if many:
        if len(index) < len(rows):  # what `keep` left is a view of the whole
            cache = gather([(cache, i) for i in range(len(index))], cache.longest)
        ends |= {row: (cache, i) for i, row in enumerate(index.tolist())}
        cache.graphs = {}
        length = draws.length.tolist()
        held |= {id(row): (*ends[i], len(row.ids) + length[i] - 1) for i, row in enumerate(rows)}


def keep_ended(cache, index: Tensor, alive: Tensor) -> dict[int, tuple]:
    """What a cache holds of the rows `index` that are not at the places `alive`, by row."""
    gone = sorted(set(range(len(index))) - set(alive.tolist()))
    apart = gather([(cache, i) for i in gone], cache.longest)
    return {row: (apart, i) for i, row in enumerate(index[gone].tolist())}


class OnlyChoice:
    """The only logits processor of `generate`: draws the tokens of the rows `index` and leaves no other choice."""

    def __init__(self, draws: Draws, index: Tensor):
        self.draws, self.index, self.t = draws, index, 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        token = self.draws.add(logits, self.index, self.t)
        self.t += 1
        return torch.full_like(logits, -torch.inf).scatter_(1, token[:, None], 0.0)


def generate(policy, rows: list[Rollout], draws: Draws, held: dict) -> None:
    """The plain path: `model.generate`, with the model's own generation config put aside; each turn from its start.

    Rows of unequal room are apart: generate goes on to the largest, past what learned positions may have.
    """
    hf, filler, before = policy.hf, policy.tokenizer.pad_token_id or 0, policy.hf.generation_config
    hf.generation_config = transformers.GenerationConfig(  # none of the model's own penalties or filters
        do_sample=False, use_cache=True, eos_token_id=policy.stop_ids or None, pad_token_id=filler)
    try:
        for room in sorted(set(draws.room.tolist())):
            index = (draws.room == room).nonzero()[:, 0]
            some = [rows[i] for i in index.tolist()]
            left = max(len(row.ids) for row in some)
            ids = [[filler] * (left - len(row.ids)) + row.ids for row in some]
            mask = [[0] * (left - len(row.ids)) + [1] * len(row.ids) for row in some]
            policy.task.on_forward([row.prompt for row in some])
            hf.generate(input_ids=torch.tensor(ids, device=policy.device), max_new_tokens=room,
                        attention_mask=torch.tensor(mask, device=policy.device),
                        logits_processor=[OnlyChoice(draws, index)])
    finally:
        hf.generation_config = before


def takes_turn(policy, row: Rollout, may: bool) -> bool:
    """Whether another turn follows: the task replies and there is room. The reply is appended as observations.

    What the policy wrote stays as it was sampled: only the template's text after it is tokenised.
    """
    reply = policy.task.reply(row) if row.stop == "stop" else None
    if not reply:
        return False
    if not may:
        row.stop = "unfinished"
        return False
    new = reply_ids(policy, row, reply)
    row.turns += reply
    if len(row.ids) + len(new) >= policy.context:
        row.stop = "context"
        return False
    extend(row, new, 0, [0.0] * len(new), [0.0] * len(new), -1)
    return True


def reply_ids(policy, row: Rollout, reply: list[dict]) -> list[int]:
    """Ids from the end of the policy's last turn to where it speaks again. What it wrote is never tokenised anew.

    The stop token that it wrote stands for the template's own, also where the template has white space before it. A
    template that shows the policy nothing of a reply is a user's error.
    """
    if isinstance(row.prompt.messages, str):
        raise UserError("a task that replies needs chat messages as its prompts, not plain text")
    mark = "replysuffixmark"
    while any(mark in message["content"] for message in reply):  # a tool may repeat what the policy wrote
        mark += "x"
    head = list(row.prompt.messages) + row.turns[:-1] + [{"role": "assistant", "content": mark}]
    suffix = policy.render(head + reply, row.prompt, True).rpartition(mark)[2]
    for message in reply:
        said = message["content"].strip()
        if said not in suffix and json.dumps(said, ensure_ascii=False)[1:-1] not in suffix:
            raise UserError(f"the chat template of {policy.args.model} leaves out a message of role {message['role']}, "
                            "so the policy would never see it; give another with --chat-template FILE")
    new = policy.tokenizer.encode(suffix, add_special_tokens=False)
    for i, token in enumerate(new[:4]):
        if token == row.ids[-1]:
            return new[i + 1 :]
        if policy.tokenizer.decode([token]).strip():
            break
    return new
