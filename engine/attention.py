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
    fold = heads // k.shape[1]
    if key not in masks:
        seen = distance >= 0
        if window:
            seen &= distance < window
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        if m > 1:
            mask = mask.repeat(1, fold, 1)
        masks[key] = mask[:, None]
    q = q.reshape(b, k.shape[1], fold * m, d)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[key], scale=scaling)
    return out.reshape(b, heads, m, v.shape[-1]).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ the KV cache
class Cache:
    """Keys and values of many rows, (B, K, S, d) a layer, and how many tokens of each row they hold."""

    def __init__(self, rows: int, capacity: int, device):
        self.capacity, self.device = capacity, device
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.graphs: dict[int, tuple] = {}

    def feed(self, hf, new: list[list[int]]) -> Tensor:
        """Feed row i the tokens new[i], one or more; returns the hidden state (B, D) after each row's last."""
        counts = torch.tensor([len(ids) for ids in new])
        ends = counts.cumsum(0)
        starts = ends - counts
        row = torch.repeat_interleave(torch.arange(len(new)), counts)
        place = torch.arange(len(row)) - starts[row]
        row = row.to(self.device)
        place = place.to(self.device)
        counts = counts.to(self.device)
        position = self.length[row] + place
        most = int(counts.max())
        self.longest = int((self.length + counts).max())
        asking = self.length[:, None] + torch.arange(most, device=self.device)  # (B, m), padded queries too
        keys = torch.arange(self.longest, device=self.device)
        distance = asking[:, :, None] - keys
        self.length = self.length + counts
        step = CacheStep(self, row, place, most, position, distance, self.longest)
        flat = [token for ids in new for token in ids]
        hidden = layout_forward(hf, torch.tensor(flat, device=self.device), position, step)
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
        distance = position[:, None, None] - torch.arange(seen, device=self.device)
        step = CacheStep(self, row, None, 1, position, distance, seen)
        self.length += 1
        hidden = layout_forward(hf, token, position, step)
        return hf.get_output_embeddings()(hidden)

    def capture(self, hf, token: Tensor, seen: int) -> tuple:
        """The graph of `one_each` at this `seen`, with the tensors that it reads and writes."""
        fed, before, stream = token.clone(), self.length.clone(), torch.cuda.Stream()
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
        fillers = iter([i for i in alive if i >= n])
        order = [i if i in staying else next(fillers) for i in range(n)]
        gaps = [i for i in range(n) if order[i] != i]
        moved = [order[i] for i in gaps]
        for layer, pair in self.layers.items():
            for x in pair:
                x[gaps, :, : self.longest] = x[moved, :, : self.longest]
            keys, values = pair
            self.layers[layer] = keys[:n], values[:n]
        self.length, self.graphs = self.length[order], {}
        self.longest = min(int(self.length.max()), self.capacity)
        return order

    def copy_rows(self, to: Tensor, cache: Cache, of: Tensor) -> None:
        """Make the rows `to` (b,) what the rows `of` (b,) of another cache are."""
        seen = min(cache.longest, self.capacity)
        self.length[to] = cache.length[of]
        for layer, (keys, values) in cache.layers.items():
            if layer not in self.layers:
                rows = len(self.length)
                self.layers[layer] = (
                    keys.new_zeros(rows, keys.shape[1], self.capacity, keys.shape[3]),
                    values.new_zeros(rows, values.shape[1], self.capacity, values.shape[3]),
                )
            own_keys, own_values = self.layers[layer]
            own_keys[to, :, :seen] = keys[of, :, :seen]
            own_values[to, :, :seen] = values[of, :, :seen]

    def write(self, layer: int, row: Tensor, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the keys and values (K, N, d) of N tokens into a layer; returns all of it, (B, K, capacity, d) each."""
        if layer not in self.layers:
            rows = len(self.length)
            self.layers[layer] = (
                k.new_zeros(rows, len(k), self.capacity, k.shape[-1]),
                v.new_zeros(rows, len(v), self.capacity, v.shape[-1]),
            )
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
        by_token = q.transpose(0, 1)  # (N, H, d)
        if self.place is None:
            queries = by_token[:, :, None]
            out = masked_attention(queries, keys, values, self.distance, scaling, window, self.masks, window)
            return out[:, 0]
        heads, _, size = q.shape
        padded = q.new_zeros(len(keys), self.most, heads, size)
        padded[self.row, self.place] = by_token
        queries = padded.transpose(1, 2)
        out = masked_attention(queries, keys, values, self.distance, scaling, window, self.masks, window)
        return out[self.row, self.place]


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
        out.copy_rows(torch.tensor(to, device=out.device), cache, torch.tensor(of, device=out.device))
    out.longest = min(int(out.length.max()), capacity)
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
            prompt = spans.setdefault((rollout.prompt, *asked), range(before, before + length))
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
            some = [(own, prompt) for own, prompt in rest if len(own) >= 0.6 * len(longest)]
            rest = rest[len(some) :]
            queries = padded_places([own for own, _ in some], device)
            keys = padded_places([[*prompt, *own] for own, prompt in some], device)
            real_keys = keys >= 0
            key_position = self.position[keys].where(real_keys, UNSEEN)
            distance = self.position[queries][:, :, None] - key_position[:, None]
            block = queries.clamp(min=0), keys.clamp(min=0), distance
            self.blocks.append(block)
            flat = queries.flatten()
            real = (flat >= 0).nonzero()[:, 0]
            self.place[flat[real]] = base + real
            base += len(flat)

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        outs = []
        for i, (queries, keys, distance) in enumerate(self.blocks):
            asking = gathered(q, queries)
            key = gathered(k, keys)
            value = gathered(v, keys)
            out = masked_attention(asking, key, value, distance, scaling, window, self.masks, (i, window))
            outs.append(out.flatten(0, 1))
        return torch.cat(outs).index_select(0, self.place)

    # ---- FlexAttention
    def number_segments(self, device) -> None:
        """Number (N,) of each token's segment, and of its prompt's."""
        number_of: dict[int, int] = {}  # of a prompt's segment, by where it begins
        own: list[int] = []
        prompt: list[int] = []
        for i, (span, before) in enumerate(self.segments):
            if not before:
                number_of[span.start] = i
            start = before.start if before else span.start
            own += [i] * len(span)
            prompt += [number_of[start]] * len(span)
        self.own = torch.tensor(own, device=device)
        self.prompt = torch.tensor(prompt, device=device)

    def attend_flex(self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Blocks of keys that no query of a block sees are skipped by the kernel."""
        def sees(b, h, i, j):
            distance = self.position[i] - self.position[j]
            near = (distance >= 0) & (distance < farthest)
            same = self.own[j] == self.own[i]
            of_prompt = self.own[j] == self.prompt[i]
            return near & (same | of_prompt)

        farthest = window or UNSEEN
        if window not in self.masks:
            n = len(self.ids)
            self.masks[window] = flex_attention.create_block_mask(sees, None, None, n, n, device=q.device)
        mask = self.masks[window]
        kernel = compiled_flex() if q.is_cuda else flex_attention.flex_attention
        out = kernel(q[None], k[None], v[None], block_mask=mask, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


def padded_places(rows: list, device) -> Tensor:
    """Places in the row of tokens, (b, m), -1 in the padding."""
    tensors = [torch.tensor(row, device=device) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=-1)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """x (H, N, d) at places (b, m) -> (b, H, m, d)."""
    rows = x.index_select(1, index.flatten())
    return rows.view(x.shape[0], *index.shape, x.shape[-1]).transpose(0, 1)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention.flex_attention, dynamic=True)
