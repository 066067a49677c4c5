"""Attention by plan: one row of N tokens without padding, and a function that says which keys each query sees.

The function is registered with transformers and takes the plan as a forward keyword, so the models' code stays stock.
`Cache` is the plan of a rollout, `Packed` that of log-probabilities.

Letters: B rows, N tokens of a padding-free row, S cached length, H query heads, K key heads, d head size, D hidden;
lower case b and m: of one block.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.utils.rnn import pad_sequence

from data import Rollout


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

    def keep(self, alive: list[int]) -> list[int]:
        """Let all rows but these go; the last of them fill the gaps, so little is copied. Returns the new order."""
        n, there = len(alive), set(alive)
        last = iter([i for i in alive if i >= n])
        order = [i if i in there else next(last) for i in range(n)]
        gaps = [i for i in range(n) if order[i] != i]
        for x in (x for pair in self.layers.values() for x in pair):
            x[gaps, :, : self.longest] = x[[order[i] for i in gaps], :, : self.longest]
        self.layers = {layer: (k[:n], v[:n]) for layer, (k, v) in self.layers.items()}
        self.length, self.graphs = self.length[order], {}
        self.longest = min(int(self.length.max()), self.capacity)
        return order

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
            if layer not in out.layers:
                out.layers[layer] = tuple(x.new_zeros(len(sources), x.shape[1], capacity, x.shape[3]) for x in old)
            for x, y in zip(out.layers[layer], old, strict=True):
                x[to, :, :seen] = y[of, :, :seen]
    out.longest = min(int(out.length.max()), capacity)
    return out


class Packed(Plan):
    """A plan for log-probabilities: one row of N tokens, each prompt once, then its completions' inputs.

    A completion's queries see the keys of its prompt and its own; positions go on from the prompt's. The last token of
    a completion predicts nothing and is left out. Attention is FlexAttention over the whole row, or scaled dot products
    over keys and queries that are gathered to padded blocks of segments of similar length.
    """

    def __init__(self, rollouts: list[Rollout], device, flex: bool):
        ids, position, prompts, self.prompts, self.segments, predictors = [], [], {}, [], [], []
        for r in rollouts:
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
            q, k = (pad_sequence([torch.tensor(x, device=device) for x in rows], batch_first=True, padding_value=-1)
                    for rows in ([own for own, _ in some], [[*prompt, *own] for own, prompt in some]))
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


