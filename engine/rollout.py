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
import dataclasses

import numpy as np
import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor

from data import Prompt, Rollout, TrainingFailed, UserError
from engine.attention import Cache, select_rows


# ------------------------------------------------------------------------------------------------ the sampler
def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    """A token a row from logits (b, V) and uniforms (b,) in [0, 1): inverse CDF, or the argmax at temperature 0.

    Returns (b,) tensors: token, its log-probability and the entropy under softmax(logits / temperature) (temperature 1
    where greedy), and the probability that top-k, then top-p, removed from the draw.
    """
    precision = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(precision) / (temperature or 1.0)
    normaliser = logits.logsumexp(-1, keepdim=True)
    logp = logits - normaliser
    p = logp.exp()
    kept = p
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        kept = keep_top(p, top_k, top_p)
        token = inverse_cdf(kept, uniforms)
    if kept is p:
        filtered = p.new_zeros(len(p))
    else:
        filtered = 1 - kept.sum(-1)
    finite = logp.masked_fill(p == 0, 0.0)  # a logit of -inf adds nothing
    surprise = p * finite
    entropy = -surprise.sum(-1)
    chosen = logp.gather(-1, token)
    return token[:, 0], chosen[:, 0], entropy, filtered


def inverse_cdf(p: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (b, 1) from probabilities (b, V), which need not add up to 1, and uniforms (b,) in [0, 1)."""
    cdf = p.double().cumsum(-1)  # in float32 the tail of a large vocabulary is lost
    total = cdf[:, -1:]
    uniforms = uniforms.to(cdf)
    target = uniforms[:, None] * total
    zero = torch.zeros_like(total)
    below = torch.nextafter(total, zero)  # the product may round up to the total, past every token
    target = torch.minimum(target, below)
    token = torch.searchsorted(cdf, target, right=True)
    vocabulary = p.shape[-1]
    return token.clamp(max=vocabulary - 1)  # NaN: reported by the caller


def keep_top(p: Tensor, top_k: int, top_p: float) -> Tensor:
    """Probabilities (b, V) with those outside the `top_k` largest, then outside the nucleus, set to 0."""
    if top_k and top_k < p.shape[-1]:
        largest = p.topk(top_k, -1).values
        smallest = largest[:, -1:]
        p = p.masked_fill(p < smallest, 0.0)
    if top_p < 1:
        ordered, index = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass above a token: the first token always stays
        total = ordered.sum(-1, keepdim=True)
        nucleus = top_p * total
        drop = before >= nucleus
        drop = drop.scatter(-1, index, drop)
        p = p.masked_fill(drop, 0.0)
    return p


class TurnBuffer:
    """What is sampled in one turn, (B, T) each, and which rows are active. A row that ended samples on, for nothing."""

    def __init__(self, rows: list[Rollout], max_new: list[int], uniforms: Tensor, policy, temperature: float):
        args = policy.args
        device = policy.device
        count = len(rows)
        shape = count, max(max_new)
        self.settings = (temperature, args.top_k, args.top_p)
        self.uniforms = uniforms.to(device)
        self.max_new = torch.tensor(max_new, device=device)
        self.stop = torch.tensor(policy.stop_ids, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logp = torch.zeros(shape, device=device)
        self.entropy = torch.zeros(shape, device=device)
        self.filtered = torch.zeros(shape, device=device)
        self.length = torch.zeros(count, dtype=torch.long, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)  # by a stop id
        self.active = self.max_new > 0

    def sample(self, logits: Tensor, index: Tensor, t: int) -> Tensor:
        """Draw token `t` of the turn for the rows `index` (b,) from logits (b, V); nothing here waits for the GPU."""
        uniforms = self.uniforms[index, t]
        token, logp, entropy, filtered = draw(logits, uniforms, *self.settings)
        self.tokens[index, t] = token
        self.logp[index, t] = logp.to(self.logp.dtype)
        self.entropy[index, t] = entropy.to(self.entropy.dtype)
        self.filtered[index, t] = filtered.to(self.filtered.dtype)
        active = self.active[index]
        stopped = torch.isin(token, self.stop)
        has_room = t + 1 < self.max_new[index]
        goes_on = has_room & ~stopped
        self.length[index] += active
        self.ended[index] |= active & stopped
        self.active[index] = active & goes_on
        return token

    def append_to(self, rows: list[Rollout], policy) -> float:
        """Append what was sampled to the rollouts; returns the mean filtered mass."""
        lengths = self.length.tolist()
        ended = self.ended.tolist()
        tokens = self.tokens.tolist()
        logps = self.logp.tolist()
        entropies = self.entropy.tolist()
        filtered = self.filtered.tolist()
        masses: list[float] = []
        for i, row in enumerate(rows):
            n = lengths[i]
            ids = tokens[i][:n]
            logp = logps[i][:n]
            entropy = entropies[i][:n]
            if not np.isfinite(logp).all():
                raise TrainingFailed("the policy's probabilities are not finite (NaN or Inf): the weights are broken")
            row.stop = "length" if n == policy.args.max_new else "context"
            if ended[i]:
                row.stop = "stop"
            extend(row, ids, 1, logp, entropy, policy.version)
            masses += filtered[i][:n]
            text = policy.tokenizer.decode(ids, skip_special_tokens=True)
            row.turns.append({"role": "assistant", "content": text})
        return mean_mass(masses)


def mean_mass(masses: list[float]) -> float:
    """The mean of filtered masses, 0 where nothing was sampled."""
    if not masses:
        return 0.0
    return float(np.mean(masses))


def extend(row: Rollout, ids: list[int], mask: int, logp: list[float], entropy: list[float], version: int) -> None:
    """Append tokens with one mask and version to a rollout."""
    n = len(ids)
    row.ids += ids
    row.mask += [mask] * n
    row.logp = row.logp + logp
    row.entropy = row.entropy + entropy
    row.version = row.version + [version] * n


# ------------------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(policy, prompts: list[Prompt], n: int, temperature: float, seed: int) -> list[list[Rollout]]:
    """`n` rollouts of each prompt, in prompt order. One batch a turn, split only by --rollout-tokens.

    The draws of a row depend on its place and turn alone, not on the rows that share its batch.
    """
    rows = empty_rollouts(policy, prompts, n)
    size = rows_at_once(policy, rows)
    policy.model.eval()
    merged = contextlib.nullcontext()
    if policy.server:
        policy.server.sync(policy)
    elif policy.engine == "fast":
        merged = policy.adapter.merged_in()
    masses: list[float] = []
    with merged:
        for i in range(0, len(rows), size):
            places = range(i, i + size)
            batch = rows[i : i + size]
            masses += converse(policy, batch, places, temperature, seed)
    policy.filtered_mass = mean_mass(masses)
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def empty_rollouts(policy, prompts: list[Prompt], n: int) -> list[Rollout]:
    """`n` rollouts of each prompt, which hold its ids alone. A prompt that fills the context is a user's error."""
    rows: list[Rollout] = []
    for prompt in prompts:
        ids = policy.encode(prompt)
        if len(ids) >= policy.context:
            raise UserError(f"a prompt of {len(ids)} tokens leaves no room in the context of {policy.context}; raise "
                            "--context, or let the task's drop_prompts() leave it out")
        for _ in range(n):
            row = Rollout(prompt, list(ids), [], [], [], [], "", [])
            rows.append(row)
    return rows


def rows_at_once(policy, rows: list[Rollout]) -> int:
    """How many rollouts of full length --rollout-tokens holds, one at least."""
    prompt = max((len(row.ids) for row in rows), default=0)
    written = policy.args.max_new * policy.task.turns()
    longest = min(policy.context, prompt + written)
    return max(1, policy.rollout_tokens // longest)


def converse(policy, rows: list[Rollout], places: range, temperature: float, seed: int) -> list[float]:
    """All turns of one batch of rows, which grow; returns each turn's filtered mass."""
    most = policy.args.max_new
    turns = policy.task.turns()
    masses: list[float] = []
    kv_rows: dict[Rollout, KVRow] = {}
    active = list(range(len(rows)))
    for turn in range(turns):
        generator = torch.Generator().manual_seed(seed + turn)
        uniforms = torch.rand(places.stop, most, generator=generator, dtype=torch.float64)
        uniforms = uniforms[places.start :]
        uniforms = uniforms[active]
        batch = [rows[i] for i in active]
        max_new = [min(most, policy.context - len(row.ids)) for row in batch]
        buffer = TurnBuffer(batch, max_new, uniforms, policy, temperature)
        if policy.server:
            policy.server.fill(policy, batch, buffer, temperature)
        elif policy.engine == "fast":
            kv_rows = decode(policy, batch, buffer, kv_rows)
        else:
            generate(policy, batch, buffer)
        mass = buffer.append_to(batch, policy)
        masses.append(mass)
        more = turn + 1 < turns
        active = [i for i in active if takes_turn(policy, rows[i], more)]
        going_on = {rows[i] for i in active}
        kv_rows = {row: kv for row, kv in kv_rows.items() if row in going_on}  # the others' memory goes
        if not active:
            break
    return masses


# ------------------------------------------------------------------------------------------------ the fast path
@dataclasses.dataclass(frozen=True)
class KVRow:
    """What an earlier turn left of a rollout: a row of a KV cache, and how many of its tokens stand there."""

    cache: Cache
    place: int
    tokens: int


def decode(policy, rows: list[Rollout], buffer: TurnBuffer, kv_rows: dict[Rollout, KVRow]) -> dict[Rollout, KVRow]:
    """Prefill, then a token a row and step; rows that ended leave. Returns the rows of the cache where another turn may
    follow, which then feeds only what was added since."""
    hf = policy.hf
    graphs = policy.args.cuda_graphs
    several_turns = policy.task.turns() > 1
    steps = buffer.tokens.shape[1]
    longest = max(len(row.ids) for row in rows)
    capacity = min(policy.context, longest + steps)
    if kv_rows:
        cache, hidden = prefill_more(policy, rows, kv_rows, capacity)
    else:
        cache, hidden = prefill(policy, rows, capacity)
    head = hf.get_output_embeddings()
    logits = head(hidden)
    index = torch.arange(len(rows), device=policy.device)  # the rows that the cache holds
    left: dict[int, tuple[Cache, int]] = {}  # what the cache held of rows that ended
    look_every = 16 if policy.device.type == "cuda" else 1  # on a GPU looking is a wait
    most_left = 0.5 if graphs else 1
    for t in range(steps):
        token = buffer.sample(logits, index, t)
        last = t + 1 == steps
        if (t + 1) % look_every == 0 or last:
            active = buffer.active[index]
            alive = active.nonzero()[:, 0]
            if not len(alive):
                break
            leaving = len(index) - len(alive)
            if leaving and len(alive) <= most_left * len(index):
                if several_turns:
                    left |= set_aside(cache, index, alive)
                order = cache.keep_rows(alive.tolist())
                index = index[order]
                token = token[order]
        logits = cache.step(hf, token, graphs)
    if not several_turns:
        return {}
    return carry_over(cache, index, left, rows, buffer)


def prefill(policy, rows: list[Rollout], capacity: int) -> tuple[Cache, Tensor]:
    """A cache of the rows' prompts, each fed once and copied to its rows; their last hidden states (B, D)."""
    number_of: dict[tuple, int] = {}
    distinct: list[Rollout] = []
    share: list[int] = []
    for row in rows:
        key = (row.prompt, *row.ids)
        if key not in number_of:
            number_of[key] = len(distinct)
            distinct.append(row)
        share.append(number_of[key])
    policy.task.on_forward([row.prompt for row in distinct])
    longest = max(len(row.ids) for row in distinct)
    cache = Cache(len(distinct), longest, policy.device)
    hidden = cache.feed(policy.hf, [row.ids for row in distinct])
    policy.task.on_forward([])
    expanded = select_rows([(cache, i) for i in share], capacity)
    return expanded, hidden[share]


def prefill_more(policy, rows: list[Rollout], kv_rows: dict[Rollout, KVRow], capacity: int) -> tuple[Cache, Tensor]:
    """A cache of what an earlier turn left of the rows, fed with what was added to them since."""
    found = [kv_rows[row] for row in rows]
    cache = select_rows([(kv.cache, kv.place) for kv in found], capacity)
    tokens = [kv.tokens for kv in found]
    cache.length = torch.tensor(tokens, device=policy.device)
    added = [row.ids[n:] for row, n in zip(rows, tokens, strict=True)]
    hidden = cache.feed(policy.hf, added)
    return cache, hidden


def set_aside(cache: Cache, index: Tensor, alive: Tensor) -> dict[int, tuple[Cache, int]]:
    """What a cache holds of the rows `index` that are not at the places `alive`, by row."""
    staying = set(alive.tolist())
    gone = [place for place in range(len(index)) if place not in staying]
    sources = [(cache, place) for place in gone]
    apart = select_rows(sources, cache.longest)
    rows = index[gone].tolist()
    left = {}
    for i, row in enumerate(rows):
        left[row] = apart, i
    return left


def carry_over(cache: Cache, index: Tensor, left: dict[int, tuple[Cache, int]], rows: list[Rollout],
               buffer: TurnBuffer) -> dict[Rollout, KVRow]:
    """Where each row stands for the next turn. The last token of a turn was sampled and never fed."""
    if len(index) < len(rows):  # what `keep_rows` left is a view of the whole
        places = range(len(index))
        cache = select_rows([(cache, place) for place in places], cache.longest)
    cache.graphs = {}
    for place, row in enumerate(index.tolist()):
        left[row] = cache, place
    lengths = buffer.length.tolist()
    kv_rows = {}
    for i, row in enumerate(rows):
        source, place = left[i]
        tokens = len(row.ids) + lengths[i] - 1
        kv_rows[row] = KVRow(source, place, tokens)
    return kv_rows


# ------------------------------------------------------------------------------------------------ the plain path
class OnlyChoice:
    """The only logits processor of `generate`: samples for the rows `index` and leaves no other choice."""

    def __init__(self, buffer: TurnBuffer, index: Tensor):
        self.buffer = buffer
        self.index = index
        self.t = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        token = self.buffer.sample(logits, self.index, self.t)
        self.t += 1
        forced = torch.full_like(logits, -torch.inf)
        return forced.scatter_(1, token[:, None], 0.0)


def generate(policy, rows: list[Rollout], buffer: TurnBuffer) -> None:
    """`model.generate`, with the model's own generation config put aside; each turn from its start.

    Rows of unequal room are apart: generate goes on to the largest, past what learned positions may have.
    """
    hf = policy.hf
    before = hf.generation_config
    filler = policy.tokenizer.pad_token_id or 0
    hf.generation_config = transformers.GenerationConfig(  # none of the model's own penalties or filters
        do_sample=False, use_cache=True, eos_token_id=policy.stop_ids or None, pad_token_id=filler)
    try:
        rooms = set(buffer.max_new.tolist())
        for room in sorted(rooms):
            has_room = buffer.max_new == room
            index = has_room.nonzero()[:, 0]
            some = [rows[i] for i in index.tolist()]
            ids, mask = left_padded([row.ids for row in some], filler)
            policy.task.on_forward([row.prompt for row in some])
            hf.generate(
                input_ids=torch.tensor(ids, device=policy.device),
                attention_mask=torch.tensor(mask, device=policy.device),
                max_new_tokens=room,
                logits_processor=[OnlyChoice(buffer, index)],
            )
    finally:
        hf.generation_config = before


def left_padded(rows: list[list[int]], filler: int) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of ids of one length, filled on the left, and their attention mask."""
    longest = max(len(row) for row in rows)
    ids: list[list[int]] = []
    mask: list[list[int]] = []
    for row in rows:
        missing = longest - len(row)
        ids.append([filler] * missing + row)
        mask.append([0] * missing + [1] * len(row))
    return ids, mask


# ------------------------------------------------------------------------------------------------ turns
def takes_turn(policy, row: Rollout, may: bool) -> bool:
    """Whether another turn follows: the task replies and there is room. The reply is appended as observations.

    What the policy wrote stays as it was sampled: only the template's text after it is tokenised.
    """
    if row.stop != "stop":
        return False
    reply = policy.task.reply(row)
    if not reply:
        return False
    if not may:
        row.stop = "unfinished"
        return False
    new = policy.reply_ids(row, reply)
    row.turns += reply
    if len(row.ids) + len(new) >= policy.context:
        row.stop = "context"
        return False
    nothing = [0.0] * len(new)
    extend(row, new, 0, nothing, nothing, -1)
    return True
