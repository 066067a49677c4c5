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
import functools
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import transformers
from torch import Tensor
from torch.nn.attention import flex_attention

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
            said = policy.tokenizer.decode(tokens[:n], skip_special_tokens=True)
            row.turns.append({"role": "assistant", "content": said})
        return float(np.mean(masses)) if masses else 0.0


def extend(row: Rollout, ids: list[int], mask: int, logp: list[float], entropy: list[float], version: int) -> None:
    """Append tokens with one mask and version to a rollout."""
    n = len(ids)
    for kept, new in ((row.ids, ids), (row.mask, [mask] * n), (row.logp, logp), (row.entropy, entropy),
                      (row.version, [version] * n)):
        kept += new


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


class Plan:
    """Which keys each query sees; attention masks are made once for all layers."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, block: int, distance: Tensor, scaling: float | None,
                  window: int | None) -> Tensor:
        """q (b, H, m, d), k and v (b, K, S, d) -> (b, m, H, d); distance (b, m, S) from key to query, below 0 unseen.

        The H / K query heads that share a key head are folded into its query axis, so keys are never repeated.
        """
        b, heads, m, d = q.shape
        fold = heads // k.shape[1]
        key = (block, window)
        if key not in self.masks:
            seen = (distance >= 0) & (distance < window) if window else distance >= 0
            mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
            self.masks[key] = (mask.repeat(1, fold, 1) if m > 1 else mask)[:, None]
        q = q.reshape(b, k.shape[1], fold * m, d)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[key], scale=scaling)
        return out.reshape(b, heads, m, v.shape[-1]).transpose(1, 2)


class Cache(Plan):
    """Keys and values of many rows, (B, K, S, d) a layer, and how many tokens of each row they hold."""

    def __init__(self, rows: int, capacity: int, device):
        self.capacity, self.device = capacity, device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length, self.longest = torch.zeros(rows, dtype=torch.long, device=device), 0
        self.graphs: dict[int, tuple] = {}

    def feed(self, hf, new: list[list[int]]) -> Tensor:
        """Feed row i the tokens new[i], one or more; returns the hidden state (B, D) after each row's last."""
        counts = torch.tensor([len(ids) for ids in new])
        ends, row = counts.cumsum(0), torch.repeat_interleave(torch.arange(len(new)), counts)
        at = torch.arange(len(row)) - (ends - counts)[row]
        self.row, self.at, ends, counts = (x.to(self.device) for x in (row, at, ends, counts))
        self.position, self.m = self.length[self.row] + self.at, int(counts.max())
        self.seen = self.longest = int((self.length + counts).max())
        asking = self.length[:, None] + torch.arange(self.m, device=self.device)  # (B, m), padded queries too
        self.distance = asking[:, :, None] - torch.arange(self.seen, device=self.device)
        self.length, self.masks = self.length + counts, {}
        ids = torch.tensor([t for ids in new for t in ids], device=self.device)
        return planned_forward(hf, ids, self.position, self)[ends - 1]

    def step(self, hf, token: Tensor, graphs: bool) -> Tensor:
        """Feed one token a row (B,); returns the logits (B, V). With `graphs`, replayed as a CUDA graph."""
        self.longest = min(self.longest + 1, self.capacity)
        self.seen = min(self.capacity, -(-self.longest // 256) * 256) if graphs else self.longest
        if not graphs:
            return self.one_each(hf, token)
        if self.seen not in self.graphs:
            self.graphs[self.seen] = self.capture(hf, token)
        graph, fed, logits = self.graphs[self.seen]
        fed.copy_(token)
        graph.replay()
        return logits

    def one_each(self, hf, token: Tensor) -> Tensor:
        """`step` in operations on the device alone, at shapes that depend on `seen` only."""
        self.row, self.m, self.masks = torch.arange(len(token), device=self.device), 1, {}
        self.position = self.length.clamp(max=self.capacity - 1)  # beyond is only a row that ended
        self.distance = self.position[:, None, None] - torch.arange(self.seen, device=self.device)
        self.length += 1
        return hf.get_output_embeddings()(planned_forward(hf, token, self.position, self))

    def capture(self, hf, token: Tensor) -> tuple:
        """The graph of `one_each` at this `seen`, with the tensors that it reads and writes."""
        fed, before, stream = token.clone(), self.length.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels and workspaces are chosen before the capture
            for _ in range(2):
                self.one_each(hf, fed)
                self.length.copy_(before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.one_each(hf, fed)
        return graph, fed, logits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """q (H, N, d), k and v (K, N, d) of the new tokens -> (N, H, d)."""
        if layer not in self.layers:
            rows = len(self.length)
            self.layers[layer] = tuple(x.new_zeros(rows, len(x), self.capacity, x.shape[-1]) for x in (k, v))
        keys, values = self.layers[layer]
        keys[self.row, :, self.position] = k.transpose(0, 1)
        values[self.row, :, self.position] = v.transpose(0, 1)
        queries = q.transpose(0, 1)[:, None]
        if self.m > 1:
            queries = q.new_zeros(len(self.length), self.m, len(q), q.shape[-1])
            queries[self.row, self.at] = q.transpose(0, 1)
        out = self.attention(queries.transpose(1, 2), keys[:, :, : self.seen], values[:, :, : self.seen], 0,
                             self.distance, scaling, window)
        return out[self.row, self.at] if self.m > 1 else out[:, 0]


def gather(sources: list[tuple[Cache, int]], capacity: int) -> Cache:
    """A cache whose row i copies row `place` of `cache`, (cache, place) being sources[i].

    Expansion over a group, removal, reordering and reunion alike.
    """
    out = Cache(len(sources), capacity, sources[0][0].device)
    for cache in {id(cache): cache for cache, _ in sources}.values():
        pairs = [(i, place) for i, (source, place) in enumerate(sources) if source is cache]
        to, of = torch.tensor(pairs, device=out.device).T
        seen = min(cache.longest, capacity)
        out.length[to] = cache.length[of]
        for layer, old in cache.layers.items():
            new = out.layers.setdefault(layer, tuple(x.new_zeros(len(sources), x.shape[1], capacity, x.shape[3])
                                                     for x in old))
            for x, y in zip(new, old, strict=True):
                x[to, :, :seen] = y[of, :, :seen]
    out.longest = min(int(out.length.max()), capacity)
    return out


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
            decode(policy, rows, draws, {})
            draws.write(rows, policy)
            close_enough(policy, rows, draws.logp)
            policy.engine = "fast"
            close_enough(policy, rows, token_logps(policy, hf, [Row(row, 0.0) for row in rows], 1.0)[0])
    except FAULTS as error:
        if args.engine == "fast":
            raise UserError(f"--engine fast does not work with {args.model}: {error}; use --engine auto") from error
        say(f"engine generate: the fast one does not fit this model ({type(error).__name__}: {str(error)[:150]})")
        return "generate"
    if args.packed_attention == "flex" or (args.packed_attention == "auto" and policy.device.type == "cuda"):
        policy.flex = choose_flex(policy, rows, say)
    return "fast"


FAULTS = (NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, ValueError, IndexError, ImportError)


def close_enough(policy, rows: list[Rollout], logp: Tensor) -> None:
    """Raises where log-probabilities (b, T) of the rows are not those of the plain path."""
    engine, policy.engine = policy.engine, "generate"
    with torch.no_grad():
        expected = token_logps(policy, policy.hf, [Row(row, 0.0) for row in rows], 1.0)[0]
    policy.engine = engine
    gap = (expected - logp).abs().mean().item()
    if not gap < (0.05 if next(policy.hf.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-3):
        raise NotImplementedError(f"log-probabilities differ by {gap:.2g}")


def choose_flex(policy, rows: list[Rollout], say) -> bool:
    """Whether FlexAttention works here, forward and backward, on a few rows."""
    policy.flex = True
    try:
        logp = token_logps(policy, policy.hf, [Row(row, 0.0) for row in rows], 1.0)[0]
        if policy.device.type == "cuda":
            logp.sum().backward()
        close_enough(policy, rows, logp.detach())
        return True
    except (*FAULTS, torch._dynamo.exc.TorchDynamoException) as error:
        if policy.args.packed_attention == "flex":
            raise UserError(f"--packed-attention flex does not work here: {str(error)[:200]}") from error
        say(f"packed attention by gathered blocks: FlexAttention fails here ({type(error).__name__})")
        return False
    finally:
        policy.model.zero_grad(set_to_none=True)


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
    with merged_lora(policy):
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
        (decode if policy.engine == "fast" else generate)(policy, batch, draws, held)
        masses.append(draws.write(batch, policy))
        active = [i for i in active if takes_turn(policy, rows[i], turn + 1 < policy.task.turns())]
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
    every, spare = (16, 0.5) if policy.device.type == "cuda" else (1, 0.8)  # on a GPU looking is a wait, copying dear
    for t in range(draws.tokens.shape[1]):
        token = draws.add(logits, index, t)
        if (t + 1) % every == 0 or t + 1 == draws.tokens.shape[1]:
            alive = draws.going[index].nonzero()[:, 0]
            if not len(alive):
                break
            if len(alive) <= spare * len(index):  # rows that ended leave; a copy of the cache, so not for each of them
                if many:
                    ends |= keep_ended(cache, index, alive)
                cache = gather([(cache, i) for i in alive.tolist()], capacity)
                index, token = index[alive], token[alive]
        logits = cache.step(hf, token, graphs)
    if many:
        ends |= {row: (cache, i) for i, row in enumerate(index.tolist())}
        cache.graphs = {}
        length = draws.length.tolist()
        held |= {id(row): (*ends[i], len(row.ids) + length[i] - 1) for i, row in enumerate(rows)}


def keep_ended(cache: Cache, index: Tensor, alive: Tensor) -> dict[int, tuple[Cache, int]]:
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
    if isinstance(row.prompt.messages, str):
        raise UserError("a task that replies needs chat messages as its prompts, not plain text")
    mark = "replysuffixmark"
    while any(mark in message["content"] for message in reply):  # a tool may repeat what the policy wrote
        mark += "x"
    head = list(row.prompt.messages) + row.turns[:-1] + [{"role": "assistant", "content": mark}]
    suffix = policy.render(head + reply, row.prompt, True).rpartition(mark)[2]
    new = policy.tokenizer.encode(suffix, add_special_tokens=False)
    if new and new[0] == row.ids[-1]:  # the stop token that ends the turn is already there
        new = new[1:]
    row.turns += reply
    if len(row.ids) + len(new) >= policy.context:
        row.stop = "context"
        return False
    extend(row, new, 0, [0.0] * len(new), [0.0] * len(new), -1)
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


class Packed(Plan):
    """A plan for log-probabilities: one row of N tokens, each prompt once, then its completions' inputs.

    A completion's queries see the keys of its prompt and its own; positions go on from the prompt's. The last token of
    a completion predicts nothing and is left out. Attention is FlexAttention over the whole row, or scaled dot products
    over keys and queries that are gathered to padded blocks of segments of similar length.
    """

    def __init__(self, rows: list[Row], device, flex: bool):
        ids, position, prompts, self.prompts, self.segments, predictors = [], [], {}, [], [], []
        for r in (row.rollout for row in rows):
            length, before = r.prompt_length, len(ids)
            prompt = prompts.setdefault((id(r.prompt), *r.ids[:length]), range(before, before + length))
            if prompt.start == before:
                ids += r.ids[:length]
                position += range(length)
                self.prompts.append(r.prompt)
                self.segments.append((prompt, prompt[:0]))
            own = range(len(ids), len(ids) + len(r.mask) - 1)
            ids += r.ids[length:-1]
            position += range(length, length + len(own))
            self.segments.append((own, prompt))
            predictors += [place for place, m in zip([prompt[-1], *own], r.mask, strict=True) if m]
        self.ids, self.position, self.predictors = (
            torch.tensor(x, device=device) for x in (ids, position, predictors))
        self.masks: dict[tuple, Any] = {}
        self.attend = self.flex if flex else self.by_blocks
        self.own_and_prompt(device) if flex else self.make_blocks(device)

    def make_blocks(self, device) -> None:
        """Padded blocks of segments (queries; keys: the prompt's and their own), none under 0.6 of the longest."""
        self.blocks, base = [], 0
        self.place = torch.empty(len(self.ids), dtype=torch.long, device=device)  # of each token in the padded outputs
        rest = sorted((part for part in self.segments if part[0]), key=lambda part: -len(part[0]))
        while rest:
            some = [part for part in rest if len(part[0]) >= 0.6 * len(rest[0][0])]
            rest = rest[len(some) :]
            q = pad([own for own, _ in some], -1, torch.long, device)
            k = pad([[*prompt, *own] for own, prompt in some], -1, torch.long, device)
            distance = self.position[q][:, :, None] - self.position[k][:, None].where(k[:, None] >= 0, 2**30)
            self.blocks.append((q.clamp(min=0), k.clamp(min=0), distance))
            real = (q >= 0).flatten().nonzero()[:, 0]
            self.place[q.flatten()[real]] = base + real
            base += q.numel()

    def by_blocks(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None
                  ) -> Tensor:
        """q (H, N, d), k and v (K, N, d) -> (N, H, d)."""
        def rows(x: Tensor, index: Tensor) -> Tensor:
            return x.index_select(1, index.flatten()).view(x.shape[0], *index.shape, x.shape[-1]).transpose(0, 1)

        outs = [self.attention(rows(q, query), rows(k, key), rows(v, key), i, distance, scaling, window).flatten(0, 1)
                for i, (query, key, distance) in enumerate(self.blocks)]
        return torch.cat(outs).index_select(0, self.place)

    def own_and_prompt(self, device) -> None:
        """Number (N,) of each token's segment, and of its prompt's."""
        first = {own.start: i for i, (own, prompt) in enumerate(self.segments) if not prompt}
        own, prompt = zip(*((i, first[(before or span).start]) for i, (span, before) in enumerate(self.segments)
                            for _ in span), strict=True)
        self.own, self.prompt = torch.tensor(own, device=device), torch.tensor(prompt, device=device)

    def flex(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """As `by_blocks`; blocks of keys that no query of a block sees are skipped by the kernel."""
        def sees(b, h, i, j):
            near = (self.position[j] <= self.position[i]) & (self.position[i] - self.position[j] < (window or 2**30))
            return near & ((self.own[j] == self.own[i]) | (self.own[j] == self.prompt[i]))

        if window not in self.masks:
            n = len(self.ids)
            self.masks[window] = flex_attention.create_block_mask(sees, None, None, n, n, device=q.device)
        kernel = compiled_flex() if q.is_cuda else flex_attention.flex_attention
        out = kernel(q[None], k[None], v[None], block_mask=self.masks[window], scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention.flex_attention, dynamic=True)


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
        plan = Packed(rows, policy.device, policy.flex)
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


def measure_budget(policy, say, fallback: int = 16_384) -> int:
    """The micro-batch budget, in tokens, with the most tokens a second forward and backward.

    It is doubled from 2,048 on made-up rows of the run's own shape until that gains less than a twentieth or memory
    runs out. Before any training: the gradients that it makes are thrown away. With --deterministic `fallback`: a
    measurement is not repeatable.
    """
    args, best, rate, budget = policy.args, fallback if policy.args.deterministic else 2048, 0.0, 2048
    length = max(1, min(args.max_new, policy.context // 2))
    while not args.deterministic and budget <= 131_072:
        prompts = [Prompt("") for _ in range(1 + budget // (length * (args.group + 1)))]
        rows = [Row(Rollout(p, [5] * 2 * length, *([1] * length for _ in range(4)), "", []), 0.0)
                for p in prompts for _ in range(args.group)]
        batch = micro_batches(rows, budget, policy.engine == "fast")[0]
        try:
            for _ in range(2):  # the first may compile
                begin = time.perf_counter()
                token_logps(policy, policy.hf, batch, 1.0)[0].sum().backward()
                float(next(p.grad for p in policy.model.parameters() if p.grad is not None).sum())  # waits for the GPU
            now = budget / (time.perf_counter() - begin)
        except (RuntimeError, MemoryError):
            break
        finally:
            policy.model.zero_grad(set_to_none=True)
        if now < 1.05 * rate:
            break
        best, rate, budget = budget, now, 2 * budget
    say(f"--micro-tokens {best}" + (f", measured: {rate:,.0f} tokens a second" if rate else ""))
    return best


@torch.no_grad()
def fill_logps(policy, hf, rows: list[Row], field: str, temperature: float, budget: int) -> None:
    """Set `old` or `ref` of every row to the log-probabilities under `hf`, in the update's own batches."""
    for batch in micro_batches(rows, budget, policy.engine == "fast"):
        logp, _ = token_logps(policy, hf, batch, temperature)
        for row, values in zip(batch, logp, strict=True):
            setattr(row, field, values[: len(row.rollout.mask)].clone())
