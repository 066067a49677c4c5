"""The rollout and the log-probabilities: what costs the time of a step.

Two engines, held to each other by tests and by a numerical check at the start of each run. `generate` is the plain
path: `model.generate`, and padded forwards. `fast` feeds the model one padding-free row of tokens and brings its own
attention, a function registered with transformers, so the model's code stays stock:
- rollout: each prompt is prefilled once and its keys and values are copied for its group; rows that ended leave;
- log-probabilities: each prompt once, followed by its completions; logits only where a sampled token is predicted.

Letters: P prompts, B rows, N tokens of a padding-free row, L prompt length, T completion length, S cached length,
V vocabulary, H query heads, K key heads, d head size, D hidden; lower case b and n: of one batch.
`policy` is `train_grpo.Policy`; this module imports nothing of the project but data.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
from torch import Tensor

from data import Prompt, Rollout, TrainingFailed, UserError


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
        token = torch.searchsorted(cdf, uniforms[:, None].to(cdf) * cdf[:, -1:], right=True)
        last = kept.shape[-1] - 1 - (kept.flip(-1) > 0).int().argmax(-1, keepdim=True)
        token = torch.minimum(token, last)  # the product may round up to the total
    entropy = -torch.special.xlogy(p, p).sum(-1)
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
    """What was sampled so far, (B, T) each, and which rows go on."""

    def __init__(self, rows: list[Rollout], room: list[int], uniforms: Tensor, policy, temperature: float):
        args, shape, device = policy.args, (len(rows), max(room)), policy.device
        self.settings = (temperature, args.top_k, args.top_p)
        self.uniforms, self.room = uniforms.to(device), torch.tensor(room, device=device)
        self.stop = torch.tensor(policy.stop_ids, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logp, self.entropy, self.filtered = (torch.zeros(shape, device=device) for _ in range(3))
        self.length = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.ended = torch.zeros(len(rows), dtype=torch.bool, device=device)  # by a stop id

    def add(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of the rows `index` (b,) from logits (b, V); returns tokens and which rows go on."""
        t = self.length[index]
        token, logp, entropy, filtered = draw(logits, self.uniforms[index, t], *self.settings)
        self.tokens[index, t] = token
        for kept, new in ((self.logp, logp), (self.entropy, entropy), (self.filtered, filtered)):
            kept[index, t] = new.to(kept.dtype)
        self.length[index] = t + 1
        self.ended[index] = torch.isin(token, self.stop)
        return token, ~self.ended[index] & (t + 1 < self.room[index])

    def write(self, rows: list[Rollout], policy) -> float:
        """Append what was sampled to the rollouts; returns the mean filtered mass."""
        ended, masses = self.ended.tolist(), []
        for i, (row, n) in enumerate(zip(rows, self.length.tolist(), strict=True)):
            tokens, logp = self.tokens[i, :n].tolist(), self.logp[i, :n].tolist()
            if not np.isfinite(logp).all():
                raise TrainingFailed("the policy's probabilities are not finite (NaN or Inf): the weights are broken")
            row.stop = "stop" if ended[i] else "length" if n == policy.args.max_new else "context"
            row.ids += tokens
            row.mask += [1] * n
            row.logp += logp
            row.entropy += self.entropy[i, :n].tolist()
            row.version += [policy.version] * n
            masses += self.filtered[i, :n].tolist()
            said = policy.tokenizer.decode(tokens, skip_special_tokens=True)
            row.turns.append({"role": "assistant", "content": said})
        return float(np.mean(masses)) if masses else 0.0


# ------------------------------------------------------------------------------------------------ attention by plan
def install_attention(hf) -> bool:
    """Let the model's attention take a `plan` (a forward keyword); without one it is what it was. False: it cannot."""
    before = hf.config._attn_implementation
    inner = transformers.AttentionInterface().get(before)
    masks = transformers.AttentionMaskInterface().get(before)
    if before.startswith("planned_") or inner is None or masks is None:
        return before.startswith("planned_")

    def attention(module, query, key, value, attention_mask, *args, plan=None, scaling=None, **keywords):
        if plan is None:
            return inner(module, query, key, value, attention_mask, *args, scaling=scaling, **keywords)
        if keywords.get("softcap") is not None or keywords.get("s_aux") is not None:
            raise NotImplementedError("attention with a soft cap or sinks")
        out = plan.attend(module.layer_idx, query[0], key[0], value[0], scaling, keywords.get("sliding_window"))
        return out[None], None

    transformers.AttentionInterface.register(f"planned_{before}", attention)
    transformers.AttentionMaskInterface.register(f"planned_{before}", masks)
    hf.config._attn_implementation = f"planned_{before}"
    return True


def planned_forward(hf, ids: Tensor, positions: Tensor, plan) -> Tensor:
    """Last hidden states (N, D) of one row of N tokens under a plan. A 4-D mask keeps the model from making its own."""
    unused = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    out = hf.base_model(input_ids=ids[None], position_ids=positions[None], attention_mask=unused, use_cache=False,
                        plan=plan)
    return out.last_hidden_state[0]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """q (b, H, m, d), k and v (b, K, S, d), mask (b, 1, m, S) -> (b, m, H, d).

    The H / K query heads that share a key head are folded into its query axis, so keys are never repeated.
    """
    b, heads, m, d = q.shape
    fold = heads // k.shape[1]
    q = q.reshape(b, k.shape[1], fold * m, d)
    mask = mask.expand(b, 1, m, k.shape[2]).repeat(1, 1, fold, 1) if fold > 1 and m > 1 else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(b, heads, m, v.shape[-1]).transpose(1, 2)


class Cache:
    """Keys and values of many rows, (B, K, S, d) a layer, fed with any number of new tokens a row. A plan."""

    def __init__(self, rows: int, capacity: int, device):
        self.capacity, self.device = capacity, device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = torch.zeros(rows, dtype=torch.long)

    def feed(self, hf, ids: Tensor, counts: Tensor) -> Tensor:
        """Feed new tokens, ids (N,), of which row i gets counts[i]; returns the hidden state (B, D) after each last."""
        start, row = self.length, torch.repeat_interleave(torch.arange(len(counts)), counts)
        ends = counts.cumsum(0)
        at = torch.arange(len(row)) - (ends - counts)[row]
        position = (start[row] + at).clamp(max=self.capacity - 1)  # beyond is only a row that ended
        self.length = (start + counts).clamp(max=self.capacity)
        self.seen, self.m = int(self.length.max()), int(counts.max())
        self.row, self.at, self.position = (x.to(self.device) for x in (row, at, position))
        asking = (start[:, None] + torch.arange(self.m)).to(self.device)  # (B, m), padded queries too
        self.distance = asking[:, None, :, None] - torch.arange(self.seen, device=self.device)
        return planned_forward(hf, ids.to(self.device), self.position, self)[(ends - 1).to(self.device)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """q (H, N, d), k and v (K, N, d) of the new tokens -> (N, H, d)."""
        if layer not in self.layers:
            rows = len(self.length)
            self.layers[layer] = tuple(x.new_zeros(rows, len(x), self.capacity, x.shape[-1]) for x in (k, v))
        keys, values = self.layers[layer]
        keys[self.row, :, self.position] = k.transpose(0, 1)
        values[self.row, :, self.position] = v.transpose(0, 1)
        mask = (self.distance >= 0) & (self.distance < window) if window else self.distance >= 0
        queries = q.transpose(0, 1)[:, None]
        if self.m > 1:
            queries = q.new_zeros(len(self.length), self.m, len(q), q.shape[-1])
            queries[self.row, self.at] = q.transpose(0, 1)
        out = attend(queries.transpose(1, 2), keys[:, :, : self.seen], values[:, :, : self.seen], mask, scaling)
        return out[self.row, self.at]

    def arrange(self, index: list[int]) -> None:
        """Row i becomes what row index[i] was: expansion over a group, removal and reordering alike."""
        picked, seen = torch.tensor(index), int(self.length.max())
        self.length = self.length[picked]
        self.layers = {layer: tuple(F.pad(old[picked.to(self.device), :, :seen], (0, 0, 0, self.capacity - seen))
                                    for old in pair) for layer, pair in self.layers.items()}


def choose_engine(policy, say) -> str:
    """'fast' where this model's fast path gives what its plain path gives, on rollouts of a few random tokens."""
    args, hf = policy.args, policy.hf
    if args.engine == "generate":
        return "generate"
    vocabulary = min(hf.get_output_embeddings().weight.shape[0], len(policy.tokenizer))
    ids = np.random.default_rng(0).integers(vocabulary, size=14).tolist()
    rows = [Rollout(p, list(p.meta["ids"]), [], [], [], [], "", [])
            for p in (Prompt("", meta={"ids": ids[:5]}), Prompt("", meta={"ids": ids[5:]})) for _ in range(2)]
    try:
        models = [hf] + [policy.reference] * isinstance(policy.reference, torch.nn.Module)
        if not min(install_attention(model) for model in models):
            raise NotImplementedError(f"its attention is {hf.config._attn_implementation}")
        with torch.no_grad():
            draws = Draws(rows, [6] * 4, torch.full((4, 6), 0.5), policy, 1.0)
            draws.stop = draws.stop[:0]
            decode(policy, rows, draws)
            draws.write(rows, policy)
            logps = [draws.logp]
            for policy.engine in ("fast", "generate"):
                logps.append(token_logps(policy, hf, [Row(row, 0.0) for row in rows], 1.0)[0])
        gap = max((logps[-1] - other).abs().mean().item() for other in logps[:-1])
        if not gap < (0.05 if next(hf.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-3):
            raise NotImplementedError(f"log-probabilities differ by {gap:.2g}")
        return "fast"
    except (NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        if args.engine == "fast":
            raise UserError(f"--engine fast does not work with {args.model}: {error}; use --engine auto") from error
        say(f"engine generate: the fast one does not fit this model ({type(error).__name__}: {str(error)[:150]})")
        return "generate"


# ------------------------------------------------------------------------------------------------ rollout
@torch.no_grad()
def rollout(policy, prompts: list[Prompt], n: int, temperature: float, seed: int) -> list[list[Rollout]]:
    """`n` rollouts of each prompt, in prompt order. One batch a turn, split only by --rollout-tokens."""
    args, task = policy.args, policy.task
    rows = []
    for prompt in prompts:
        ids = policy.encode(prompt)
        if len(ids) >= policy.context:
            raise UserError(f"a prompt of {len(ids)} tokens leaves no room in the context of {policy.context}; raise "
                            "--context, or let the task's keep() drop it")
        rows += [Rollout(prompt, list(ids), [], [], [], [], "", []) for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    active, masses = list(range(len(rows))), []
    for turn in range(task.turns()):
        uniforms = torch.rand(len(rows), args.max_new, generator=generator, dtype=torch.float64)
        size = max(1, policy.rollout_tokens // (max((len(rows[i].ids) for i in active), default=0) + args.max_new))
        for batch in (active[i : i + size] for i in range(0, len(active), size)):
            masses.append(sample_turn(policy, [rows[i] for i in batch], uniforms[batch], temperature))
        waiting = []
        for i in active:
            reply = task.reply(rows[i]) if rows[i].stop == "stop" else None
            if reply and turn + 1 < task.turns():
                waiting += [i] if observe_reply(policy, rows[i], reply) else []
            elif reply:
                rows[i].stop = "unfinished"
        active = waiting
        if not active:
            break
    policy.filtered_mass = float(np.mean(masses)) if masses else 0.0
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def sample_turn(policy, rows: list[Rollout], uniforms: Tensor, temperature: float) -> float:
    """One turn of all rows, which grow by what was sampled; returns the mean filtered mass."""
    room = [min(policy.args.max_new, policy.context - len(row.ids)) for row in rows]
    draws = Draws(rows, room, uniforms, policy, temperature)
    policy.model.eval()
    with merged_lora(policy):
        (decode if policy.engine == "fast" else generate)(policy, rows, draws)
    return draws.write(rows, policy)


def decode(policy, rows: list[Rollout], draws: Draws) -> None:
    """The fast path: prefill what differs once, copy it to the rows that share it, then a token a row and step."""
    hf, head = policy.hf, policy.hf.get_output_embeddings()
    first: dict[tuple, int] = {}  # rows of one prompt are fed once
    share = [first.setdefault((id(row.prompt), *row.ids), len(first)) for row in rows]
    distinct = [rows[share.index(i)] for i in range(len(first))]
    capacity = min(policy.context, max(len(row.ids) for row in rows) + draws.tokens.shape[1])
    cache = Cache(len(distinct), capacity, policy.device)
    policy.task.on_forward([row.prompt for row in distinct])
    ids, counts = [t for row in distinct for t in row.ids], [len(row.ids) for row in distinct]
    logits = head(cache.feed(hf, torch.tensor(ids), torch.tensor(counts)))[share]
    cache.arrange(share)
    index = alive = torch.arange(len(rows), device=policy.device)  # the batch's rows; the places that go on in it
    while True:
        token, going = draws.add(logits[alive], index[alive])
        alive, token = alive[going], token[going]
        if not len(alive):
            return
        if len(alive) < 0.8 * len(index):  # a copy of the cache, worth it where a fifth of the rows are spared
            cache.arrange(alive.tolist())
            index, alive = index[alive], torch.arange(len(alive), device=policy.device)
        fed = torch.zeros_like(index)  # rows that ended and are still here are fed anything
        fed[alive] = token
        logits = head(cache.feed(hf, fed, torch.ones(len(fed), dtype=torch.long)))


class OnlyChoice:
    """The only logits processor of `generate`: draws the tokens of the rows `index` and leaves no other choice."""

    def __init__(self, draws: Draws, index: Tensor):
        self.draws, self.index, self.alive = draws, index, torch.arange(len(index), device=index.device)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[:, 0] = 0.0
        token, going = self.draws.add(logits[self.alive], self.index[self.alive])
        forced[self.alive, 0] = -torch.inf
        forced[self.alive, token] = 0.0
        self.alive = self.alive[going]
        return forced


def generate(policy, rows: list[Rollout], draws: Draws) -> None:
    """The plain path: `model.generate`, with the model's own generation config put aside.

    Rows of unequal room are apart: generate goes on to the largest, past what learned positions may have.
    """
    hf, filler = policy.hf, policy.tokenizer.pad_token_id or 0
    before = hf.generation_config  # top-k, penalties, minimal lengths: nothing of it may reach the sampler
    hf.generation_config = transformers.GenerationConfig(
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


@contextlib.contextmanager
def merged_lora(policy):
    """Within: the LoRA is part of float32 weights, which come back as they were from a copy, not by subtraction.

    A bfloat16 or 4-bit base cannot hold the sum exactly, so there the adapter stays beside it.
    """
    layers = [m for m in policy.model.modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")]
    layers = [m for m in layers if "default" in m.lora_A and not m.disable_adapters]
    weights = [m.get_base_layer().weight for m in layers]
    owners = collections.Counter(id(p) for _, p in policy.model.named_parameters(remove_duplicate=False))
    plain = all(w.dtype == torch.float32 and owners[id(w)] == 1 and not m.lora_variant.get("default")
                and not m.lora_bias.get("default") for m, w in zip(layers, weights, strict=True))
    if policy.engine != "fast" or not plain:
        yield
        return
    saved = [w.data for w in weights]
    try:
        for layer, weight in zip(layers, weights, strict=True):
            weight.data = weight.data + layer.get_delta_weight("default")
            layer._disable_adapters = True
        yield
    finally:
        for layer, weight, old in zip(layers, weights, saved, strict=True):
            weight.data = old
            layer._disable_adapters = False


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
    anchored: bool = True  # held to the reference by the KL term
    weight: float = 0.0  # what each sampled token's loss is multiplied by: the normaliser of the optimizer step
    old: Tensor | None = None
    ref: Tensor | None = None
    uncertain: list[bool] | None = None  # (T,) the tokens that --top-entropy selects


class Packed:
    """A plan for log-probabilities: one row of N tokens, each prompt once, then its completions' inputs.

    A completion's queries see the keys of its prompt and its own, gathered by index; positions go on from the
    prompt's. The last token of a completion predicts nothing and is left out.
    """

    def __init__(self, rows: list[Row], device):
        ids, position, spans, self.prompts, queries, keys, predictors = [], [], {}, [], [], [], []
        for r in (row.rollout for row in rows):
            length = r.prompt_length
            span = spans.get((id(r.prompt), *r.ids[:length]))
            if span is None:
                span = spans[(id(r.prompt), *r.ids[:length])] = range(len(ids), len(ids) + length)
                ids += r.ids[:length]
                position += range(length)
                self.prompts.append(r.prompt)
            own = range(len(ids), len(ids) + len(r.mask) - 1)
            ids += r.ids[length:-1]
            position += range(length, length + len(own))
            queries.append(own)
            keys.append([*span, *own])
            predictors += [place for place, m in zip([span[-1], *own], r.mask, strict=True) if m]
        self.ids, self.position, self.predictors = (
            torch.tensor(x, device=device) for x in (ids, position, predictors))
        self.blocks, place, base = [], torch.empty(len(ids), dtype=torch.long, device=device), 0
        for q, k in ((list(spans.values()), list(spans.values())), (queries, keys)):
            q, k = pad(q, -1, torch.long, device), pad(k, -1, torch.long, device)
            distance = self.position[q][:, :, None] - self.position[k][:, None].where(k[:, None] >= 0, 2**30)
            self.blocks.append((q.clamp(min=0), k.clamp(min=0), distance[:, None]))
            real = (q >= 0).flatten().nonzero()[:, 0]
            place[q.flatten()[real]] = base + real
            base += q.numel()
        self.place = place  # of each of the N tokens in the blocks' padded outputs

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """q (H, N, d), k and v (K, N, d) -> (N, H, d)."""
        def rows(x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(1, index.flatten()).view(x.shape[0], *index.shape, x.shape[-1]).transpose(0, 1)

        outs = []
        for query, key, distance in self.blocks:
            mask = (distance >= 0) & (distance < window) if window else distance >= 0
            outs.append(attend(rows(q, query), rows(k, key), rows(v, key), mask, scaling).flatten(0, 1))
        return torch.cat(outs).index_select(0, self.place)


def micro_batches(rows: list[Row], budget: int, packed: bool) -> list[list[Row]]:
    """Batches of at most `budget` tokens (one row at least); packed, the rows of a prompt stay together.

    A packed batch costs each prompt once and its completions; a padded one its rows times the longest of each.
    """
    if packed:
        first = {id(row.rollout.prompt): i for i, row in reversed(list(enumerate(rows)))}
        rows = sorted(rows, key=lambda row: first[id(row.rollout.prompt)])
    else:
        rows = sorted(rows, key=lambda row: -len(row.rollout.ids))
    out: list[list[Row]] = []
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


def pad(rows: list, fill, dtype, device) -> Tensor:
    """Rows of numbers, lengths up to T -> (b, T), filled on the right."""
    width = max(1, *(len(row) for row in rows))
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], dtype=dtype, device=device)


def token_logps(policy, hf, rows: list[Row], temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Log-probability (b, T) of every sampled token at `temperature`, and the entropy there (or None).

    Where the mask is 0 (observations, padding) both are 0.
    """
    rollouts = [row.rollout for row in rows]
    mask = pad([r.mask for r in rollouts], 0, torch.bool, policy.device)
    targets = pad([r.ids[r.prompt_length :] for r in rollouts], 0, torch.long, policy.device)[mask]
    if policy.engine == "fast":
        plan = Packed(rows, policy.device)
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
    ids, mask = [], []
    for r in rollouts:
        before, after = left - r.prompt_length, width - len(r.mask)
        ids.append([filler] * before + r.ids + [filler] * after)
        mask.append([0] * before + [1] * len(r.ids) + [0] * after)
    mask = torch.tensor(mask, device=policy.device)
    keywords = {"input_ids": torch.tensor(ids, device=policy.device), "attention_mask": mask}
    if policy.takes_positions:
        keywords["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
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
        h = z - (p * logits.masked_fill(p == 0, 0.0)).sum(-1) if entropy else z  # a logit of -inf adds nothing
        return logits.gather(-1, y[:, None])[:, 0] - z, h

    parts = [torch.utils.checkpoint.checkpoint(part, a, b, use_reentrant=False)
             for a, b in zip(x.split(chunk), targets.split(chunk), strict=True)]
    logp, h = (torch.cat(values) for values in zip(*parts, strict=True))
    return logp, h if entropy else None


@torch.no_grad()
def fill_logps(policy, hf, rows: list[Row], field: str, temperature: float, budget: int) -> None:
    """Set `old` or `ref` of every row to the log-probabilities under `hf`, in the update's own batches."""
    for batch in micro_batches(rows, budget, policy.engine == "fast"):
        logp, _ = token_logps(policy, hf, batch, temperature)
        for row, values in zip(batch, logp, strict=True):
            setattr(row, field, values[: len(row.rollout.mask)].clone())
