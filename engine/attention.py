"""The KV cache and the packed layout: attention over one row of N tokens without padding.

One attention function is registered with transformers. It takes a layout, which says which keys each query sees, as a
forward keyword, so the models' code stays stock. `CacheStep` is the layout of a step of a rollout, over the KV cache;
`PackedLayout` is that of log-probabilities.

Letters: B rows, N tokens of a padding-free row, S cached length, H query heads, K key heads, d head size, D hidden;
lower case b and m: of one block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.utils.rnn import pad_sequence

from data import Prompt, Rollout

UNSEEN = 2**30  # a distance that no window holds


def install_attention(hf) -> bool:
    """Let the model's attention take a `layout`, a forward keyword; without one it is as before. False: it cannot."""
    before = hf.config._attn_implementation
    if before.startswith("layout_"):
        return True
    inner = transformers.AttentionInterface().get(before)
    masks = transformers.AttentionMaskInterface().get(before)
    if inner is None or masks is None:
        return False

    def attention(module, query, key, value, attention_mask, *args, layout=None, scaling=None, **keywords):
        if layout is None:
            return inner(module, query, key, value, attention_mask, *args, scaling=scaling, **keywords)
        if keywords.get("softcap") is not None or keywords.get("s_aux") is not None:
            raise NotImplementedError("attention with a soft cap or sinks")
        window = keywords.get("sliding_window")
        out = layout.attend(module.layer_idx, query[0], key[0], value[0], scaling, window)
        return out[None], None

    transformers.AttentionInterface.register(f"layout_{before}", attention)
    transformers.AttentionMaskInterface.register(f"layout_{before}", masks)
    hf.config._attn_implementation = f"layout_{before}"
    return True


def layout_forward(hf, ids: Tensor, positions: Tensor, layout) -> Tensor:
    """Last hidden states (N, D) of one row of N tokens. A 4-D mask keeps the model from making its own."""
    unused = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    out = hf.base_model(input_ids=ids[None], position_ids=positions[None], attention_mask=unused, use_cache=False,
                        layout=layout)
    return out.last_hidden_state[0]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, scaling: float | None, window: int | None,
                     masks: dict[Any, Tensor], key: Any) -> Tensor:
    """q (b, H, m, d), k and v (b, K, S, d) -> (b, m, H, d); distance (b, m, S) from key to query, below 0 unseen.

    The H / K query heads that share a key head are folded into its query axis, so keys are never repeated. `masks`
    keeps the additive mask under `key`, so that it is made once for all layers.
    """
    b, heads, m, d = q.shape
    key_heads = k.shape[1]
    fold = heads // key_heads
    if key not in masks:
        seen = distance >= 0
        if window:
            seen &= distance < window
        mask = torch.zeros_like(seen, dtype=q.dtype)
        mask.masked_fill_(~seen, -torch.inf)
        if m > 1:
            mask = mask.repeat(1, fold, 1)
        masks[key] = mask[:, None]
    q = q.reshape(b, key_heads, fold * m, d)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[key], scale=scaling)
    size = out.shape[-1]
    out = out.reshape(b, heads, m, size)
    return out.transpose(1, 2)


# ------------------------------------------------------------------------------------------------ the KV cache
class Cache:
    """Keys and values of many rows, (B, K, S, d) a layer, and how many tokens of each row they hold."""

    def __init__(self, rows: int, capacity: int, device):
        self.capacity = capacity
        self.device = device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.graphs: dict[int, tuple] = {}

    def feed(self, hf, new: list[list[int]]) -> Tensor:
        """Feed row i the tokens new[i], one or more; returns the hidden state (B, D) after each row's last."""
        counts = torch.tensor([len(ids) for ids in new])
        ends = counts.cumsum(0)
        starts = ends - counts
        rows = torch.arange(len(new))
        row = torch.repeat_interleave(rows, counts)
        place = torch.arange(len(row))
        place -= starts[row]
        row = row.to(self.device)
        place = place.to(self.device)
        counts = counts.to(self.device)
        before = self.length
        self.length = before + counts
        self.longest = int(self.length.max())
        position = before[row] + place
        most = int(counts.max())
        offsets = torch.arange(most, device=self.device)
        queries = before[:, None] + offsets  # (B, m), padded ones too
        keys = torch.arange(self.longest, device=self.device)
        distance = queries[:, :, None] - keys
        step = CacheStep(self, row, place, most, position, distance, self.longest)
        flat: list[int] = []
        for ids in new:
            flat += ids
        tokens = torch.tensor(flat, device=self.device)
        hidden = layout_forward(hf, tokens, position, step)
        last = ends.to(self.device) - 1
        return hidden[last]

    def step(self, hf, token: Tensor, graphs: bool) -> Tensor:
        """Feed one token a row (B,); returns the logits (B, V). With `graphs`, replayed as a CUDA graph."""
        self.longest = min(self.longest + 1, self.capacity)
        if not graphs:
            return self.one_each(hf, token, self.longest)
        seen = min(self.capacity, -(-self.longest // 256) * 256)
        if seen not in self.graphs:
            self.graphs[seen] = self.capture(hf, token, seen)
        graph, fed, logits = self.graphs[seen]
        fed.copy_(token)
        graph.replay()
        return logits

    def one_each(self, hf, token: Tensor, seen: int) -> Tensor:
        """`step` in operations on the device alone, at shapes that depend on `seen` only."""
        row = torch.arange(len(token), device=self.device)
        position = self.length.clamp(max=self.capacity - 1)  # beyond is only a row that ended
        keys = torch.arange(seen, device=self.device)
        distance = position[:, None, None] - keys
        step = CacheStep(self, row, None, 1, position, distance, seen)
        self.length += 1
        hidden = layout_forward(hf, token, position, step)
        head = hf.get_output_embeddings()
        return head(hidden)

    def capture(self, hf, token: Tensor, seen: int) -> tuple:
        """The graph of `one_each` at this `seen`, with the tensors that it reads and writes."""
        fed = token.clone()
        before = self.length.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels and workspaces are chosen before the capture
            for _ in range(2):
                self.one_each(hf, fed, seen)
                self.length.copy_(before)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.one_each(hf, fed, seen)
        return graph, fed, logits

    def keep_rows(self, alive: list[int]) -> list[int]:
        """Let all rows but these go; the last of them fill the gaps, so little is copied. Returns the new order."""
        n = len(alive)
        staying = set(alive)
        gaps = [i for i in range(n) if i not in staying]
        moved = [i for i in alive if i >= n]
        order = list(range(n))
        for gap, filler in zip(gaps, moved, strict=True):
            order[gap] = filler
        for layer, (keys, values) in self.layers.items():
            keys[gaps, :, : self.longest] = keys[moved, :, : self.longest]
            values[gaps, :, : self.longest] = values[moved, :, : self.longest]
            self.layers[layer] = keys[:n], values[:n]
        self.length = self.length[order]
        self.graphs = {}
        self.longest = self.longest_row()
        return order

    def longest_row(self) -> int:
        """How many tokens the longest row holds; a row that ended may count past the capacity."""
        longest = int(self.length.max())
        return min(longest, self.capacity)

    def allocate(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Room for all rows of a layer, of the heads and sizes of some keys (K, …, d) and values (K, …, d)."""
        rows = len(self.length)
        self.layers[layer] = (
            keys.new_zeros(rows, len(keys), self.capacity, keys.shape[-1]),
            values.new_zeros(rows, len(values), self.capacity, values.shape[-1]),
        )

    def copy_rows(self, to: Tensor, cache: Cache, of: Tensor) -> None:
        """Make the rows `to` (b,) what the rows `of` (b,) of another cache are."""
        seen = min(cache.longest, self.capacity)
        self.length[to] = cache.length[of]
        for layer, (keys, values) in cache.layers.items():
            if layer not in self.layers:
                self.allocate(layer, keys[0], values[0])
            own_keys, own_values = self.layers[layer]
            own_keys[to, :, :seen] = keys[of, :, :seen]
            own_values[to, :, :seen] = values[of, :, :seen]

    def write(self, layer: int, row: Tensor, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values (K, N, d) of N tokens into a layer; returns all of it, (B, K, capacity, d) each."""
        if layer not in self.layers:
            self.allocate(layer, k, v)
        keys, values = self.layers[layer]
        keys[row, :, position] = k.transpose(0, 1)
        values[row, :, position] = v.transpose(0, 1)
        return keys, values


@dataclasses.dataclass(frozen=True, eq=False)
class CacheStep:
    """The layout of one forward over a cache: where its N new tokens stand and which keys they see."""

    cache: Cache
    row: Tensor  # (N,) of the cache
    place: Tensor | None  # (N,) among the new tokens of its row; None where each row has one
    most: int  # m: new tokens of a row, at most
    position: Tensor  # (N,) in its row
    distance: Tensor  # (B, m, S) from key to query, below 0 unseen
    seen: int  # S: keys that are read
    masks: dict[Any, Tensor] = dataclasses.field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """q (H, N, d), k and v (K, N, d) of the new tokens -> (N, H, d)."""
        keys, values = self.cache.write(layer, self.row, self.position, k, v)
        keys = keys[:, :, : self.seen]
        values = values[:, :, : self.seen]
        queries = self.by_row(q)
        out = masked_attention(queries, keys, values, self.distance, scaling, window, self.masks, window)
        if self.place is None:
            return out[:, 0]
        return out[self.row, self.place]

    def by_row(self, q: Tensor) -> Tensor:
        """q (H, N, d) of the new tokens -> (B, H, m, d), padded where rows have fewer."""
        by_token = q.transpose(0, 1)  # (N, H, d)
        if self.place is None:
            return by_token[:, :, None]
        heads, _, size = q.shape
        rows = len(self.distance)
        padded = q.new_zeros(rows, self.most, heads, size)
        padded[self.row, self.place] = by_token
        return padded.transpose(1, 2)


def select_rows(sources: list[tuple[Cache, int]], capacity: int) -> Cache:
    """A cache whose row i copies row `place` of `cache`, (cache, place) being sources[i].

    It serves the expansion of a prompt over its group, removal, reordering, and the reunion of several caches.
    """
    first, _ = sources[0]
    out = Cache(len(sources), capacity, first.device)
    for cache in dict.fromkeys(cache for cache, _ in sources):
        to: list[int] = []
        of: list[int] = []
        for i, (source, place) in enumerate(sources):
            if source is cache:
                to.append(i)
                of.append(place)
        places = torch.tensor(to, device=out.device)
        copied = torch.tensor(of, device=out.device)
        out.copy_rows(places, cache, copied)
    out.longest = out.longest_row()
    return out


# ------------------------------------------------------------------------------------------------ log-probabilities
class PackedLayout:
    """The layout of log-probabilities: one row of N tokens, each prompt once, then its completions' inputs.

    A completion's queries see the keys of its prompt and its own; positions go on from the prompt's. The last token of
    a completion predicts nothing and is left out. Attention is FlexAttention over the whole row, or scaled dot products
    over keys and queries that are gathered to padded blocks of segments of similar length.
    """

    def __init__(self, rollouts: list[Rollout], device, flex: bool):
        self.prompts: list[Prompt] = []
        self.segments: list[tuple[range, range]] = []  # tokens of a segment, and of the prompt before it
        self.masks: dict[Any, Any] = {}
        ids, position, predictors = self.lay_out(rollouts)
        self.ids = torch.tensor(ids, device=device)
        self.position = torch.tensor(position, device=device)
        self.predictors = torch.tensor(predictors, device=device)
        self.flex = flex
        if flex:
            self.number_segments(device)
        else:
            self.make_blocks(device)

    def lay_out(self, rollouts: list[Rollout]) -> tuple[list[int], list[int], list[int]]:
        """Ids and positions of the row, and the places whose hidden states predict a sampled token."""
        ids: list[int] = []
        position: list[int] = []
        predictors: list[int] = []
        spans: dict[tuple, range] = {}  # of the prompts that are in the row
        for rollout in rollouts:
            length = rollout.prompt_length
            before = len(ids)
            asked = rollout.ids[:length]
            key = (rollout.prompt, *asked)
            prompt = spans.setdefault(key, range(before, before + length))
            if prompt.start == before:
                ids += asked
                position += range(length)
                self.prompts.append(rollout.prompt)
                self.segments.append((prompt, range(0)))
            begin = len(ids)
            ids += rollout.ids[length:-1]
            own = range(begin, len(ids))
            position += range(length, length + len(own))
            self.segments.append((own, prompt))
            predicting = [prompt[-1], *own]
            predictors += [place for place, sampled in zip(predicting, rollout.mask, strict=True) if sampled]
        return ids, position, predictors

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """q (H, N, d), k and v (K, N, d) -> (N, H, d)."""
        if self.flex:
            return self.attend_flex(q, k, v, scaling, window)
        return self.attend_blocks(q, k, v, scaling, window)

    # ---- gathered blocks
    def make_blocks(self, device) -> None:
        """Padded blocks of segments (queries; keys: the prompt's and their own), none under 0.6 of the longest."""
        self.blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        self.place = torch.empty(len(self.ids), dtype=torch.long, device=device)  # of each token in the padded outputs
        base = 0
        rest = [segment for segment in self.segments if segment[0]]
        rest.sort(key=lambda segment: -len(segment[0]))
        while rest:
            longest, _ = rest[0]
            shortest = 0.6 * len(longest)
            some = [(own, prompt) for own, prompt in rest if len(own) >= shortest]
            rest = rest[len(some) :]
            queries = padded_places([own for own, _ in some], device)
            keys = padded_places([[*prompt, *own] for own, prompt in some], device)
            distance = self.distances(queries, keys)
            block = queries.clamp(min=0), keys.clamp(min=0), distance
            self.blocks.append(block)
            flat = queries.flatten()
            filled = flat >= 0
            real = filled.nonzero()[:, 0]
            token = flat[real]
            self.place[token] = base + real
            base += len(flat)

    def distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Distance (b, m, S) from the keys (b, S) to the queries (b, m) of a block, below 0 for keys of the padding."""
        query_position = self.position[queries]
        key_position = self.position[keys]
        real = keys >= 0
        key_position = key_position.where(real, UNSEEN)
        return query_position[:, :, None] - key_position[:, None]

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        outs = []
        for i, (queries, keys, distance) in enumerate(self.blocks):
            asking = gathered(q, queries)
            key = gathered(k, keys)
            value = gathered(v, keys)
            out = masked_attention(asking, key, value, distance, scaling, window, self.masks, (i, window))
            outs.append(out.flatten(0, 1))
        padded = torch.cat(outs)
        return padded.index_select(0, self.place)

    # ---- FlexAttention
    def number_segments(self, device) -> None:
        """Number (N,) of each token's segment, and of its prompt's."""
        number_of: dict[int, int] = {}  # of a prompt's segment, by where it begins
        own: list[int] = []
        prompt: list[int] = []
        for i, (span, before) in enumerate(self.segments):
            if before:
                number = number_of[before.start]
            else:
                number = i
                number_of[span.start] = i
            own += [i] * len(span)
            prompt += [number] * len(span)
        self.own = torch.tensor(own, device=device)
        self.prompt = torch.tensor(prompt, device=device)

    def attend_flex(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Blocks of keys that no query of a block sees are skipped by the kernel."""
        def sees(b, h, i, j):
            distance = self.position[i] - self.position[j]
            near = (distance >= 0) & (distance < farthest)
            segment = self.own[j]
            same = segment == self.own[i]
            of_prompt = segment == self.prompt[i]
            return near & (same | of_prompt)

        farthest = window or UNSEEN
        if window not in self.masks:
            n = len(self.ids)
            self.masks[window] = flex_attention.create_block_mask(sees, None, None, n, n, device=q.device)
        mask = self.masks[window]
        kernel = flex_attention.flex_attention
        if q.is_cuda:
            kernel = compiled_flex()
        out = kernel(q[None], k[None], v[None], block_mask=mask, scale=scaling, enable_gqa=True)
        by_head = out[0]
        return by_head.transpose(0, 1)


def padded_places(rows: list, device) -> Tensor:
    """Places in the row of tokens, (b, m), -1 in the padding."""
    tensors = [torch.tensor(row, device=device) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=-1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """x (H, N, d) at places (b, m) -> (b, H, m, d)."""
    heads, _, size = x.shape
    rows = x.index_select(1, index.flatten())
    rows = rows.view(heads, *index.shape, size)
    return rows.transpose(0, 1)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention.flex_attention, dynamic=True)
