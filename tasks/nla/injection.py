"""Injection: an activation is added to the residual stream where a prompt holds a marker token.

One `Injection` serves every model that runs a task's prompts (policy, reference). Letters: b rows, n tokens of a row,
D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from data import Prompt, TrainingFailed, UserError

EPSILON = 1e-9


def decoder_layers(hf) -> nn.ModuleList:
    """The decoder layers of a Hugging Face causal LM (or of its base model): Llama, Qwen, GPT-2, GPT-NeoX and alike."""
    count = hf.config.get_text_config().num_hidden_layers
    found = [m for m in hf.base_model.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise UserError(f"the decoder layers of a {type(hf).__name__} cannot be found; take a Llama-, Qwen- or "
                        "GPT-2-style model")
    return found[0]


def added(h: Tensor, v: Tensor) -> Tensor:
    """h + ‖h‖ · v / (‖v‖ + 1e-9) over the last axis: the vector's direction at the residual's own norm.

    h and v are (..., D); the sum is made in float32 or wider and returned in h's type.
    """
    wide = torch.promote_types(h.dtype, torch.float32)
    x = h.to(wide)
    v = v.to(wide)
    length = v.norm(dim=-1, keepdim=True) + EPSILON
    return (x + x.norm(dim=-1, keepdim=True) * v / length).to(h.dtype)


def remove_hooks(module: nn.Module) -> None:
    """Take the hooks of any injection off a module."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Injection):
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


@dataclasses.dataclass
class Pending:
    """What the next forward over prompt tokens is to inject: prompts in row order, some with a vector.

    places   for each prompt the marker's offset from its first token; None: it has no vector
    vectors  (k, D) of those that have one, in row order
    """

    places: list[int | None]
    vectors: Tensor | None


class Injection:
    """Adds each prompt's vector after decoder layer `layer`, at its marker between `left_id` and `right_id`.

    `encode` gives a prompt's token ids. The marker is found by its place in the prompt, counted from the prompt's
    first token, so nothing that a completion says is ever touched. `feed` names the prompts of the next forwards;
    a forward of one token a row is a cached decoding step and passes. Anything else that does not fit (another number
    of rows, a marker or neighbour that is not where it should be) raises TrainingFailed.
    """

    def __init__(self, layer: int, marker_id: int, left_id: int, right_id: int,
                 encode: Callable[[Prompt], Sequence[int]]):
        self.layer = layer
        self.encode = encode
        self.triple = (left_id, marker_id, right_id)
        self.pending = Pending([], None)
        self.index: Tensor | None = None  # (2, k) row and column of each vector in the forward that runs

    def __deepcopy__(self, memo) -> Injection:
        """Itself: the hooks of a copied model are fed with it, and do not copy what `encode` belongs to."""
        return self

    def install(self, hf) -> None:
        """Hook a causal LM; hooks of any earlier injection (a copied model brings its original's) are replaced."""
        layers = decoder_layers(hf)
        if not 0 <= self.layer < len(layers):
            last = len(layers) - 1
            raise UserError(f"--inject-layer {self.layer} is no layer of this model, which has {len(layers)} (0 to "
                            f"{last})")
        for module in hf.modules():
            remove_hooks(module)
        hf.base_model.register_forward_pre_hook(self.locate, with_kwargs=True)
        layers[self.layer].register_forward_hook(self.inject)
        hf.get_output_embeddings().register_forward_hook(self.suppress)

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """The prompts of the next forwards, in row order; none: nothing is injected."""
        places = [self.place(prompt) for prompt in prompts]
        vectors = [torch.as_tensor(prompt.inject) for prompt in prompts if prompt.inject is not None]
        self.pending = Pending(places, torch.stack(vectors) if vectors else None)

    def place(self, prompt: Prompt) -> int | None:
        """The marker's offset in a prompt, None where it has no vector. The count of markers must agree with that."""
        if "marker_at" not in prompt.meta:
            ids = list(self.encode(prompt))
            triples = list(zip(ids, ids[1:], ids[2:], strict=False))
            found = [i + 1 for i, triple in enumerate(triples) if triple == self.triple]
            vectors = int(prompt.inject is not None)
            if len(found) != vectors:
                raise TrainingFailed(f"a prompt holds {len(found)} injection markers between their neighbours and "
                                     f"{vectors} vectors; both must be one (check the sidecar's marker and the chat "
                                     "template)")
            prompt.meta["marker_at"] = found[0] if found else None
        return prompt.meta["marker_at"]

    # ---- hooks
    def locate(self, module, args, keywords) -> None:
        """Before the base model: where in this forward's ids (b, n) each vector goes."""
        self.index = None
        if self.pending.vectors is None:
            return
        first = args[0] if args else None
        ids = keywords.get("input_ids", first)
        if ids is None:
            raise TrainingFailed("vectors are to be injected, but the forward got no token ids")
        if ids.shape[-1] == 1:
            return
        starts = self.starts(ids, keywords.get("attention_mask"), keywords.get("position_ids"))
        places = self.pending.places
        if len(starts) != len(places):
            raise TrainingFailed(f"a forward over {len(starts)} prompts was announced as one over {len(places)}; their "
                                 "vectors would go astray")
        index = []
        for (row, column), place in zip(starts, places, strict=True):
            if place is not None:
                index.append([row, column + place])
        row, at = torch.tensor(index).T.to(ids.device)
        last = ids.shape[1] - 1
        seen = torch.stack([ids[row, (at + step).clamp(max=last)] for step in (-1, 0, 1)], 1)
        expected = torch.tensor(self.triple, device=ids.device)
        if not (seen == expected).all():
            raise TrainingFailed(f"{len(index)} vectors were to be injected, but not every marker with its neighbours "
                                 "is where its prompt has it")
        self.index = torch.stack([row, at])

    @staticmethod
    def starts(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[tuple[int, int]]:
        """(row, column) of each prompt's first token: by the mask of a padded batch, by position 0 in a packed row."""
        if mask is not None and mask.ndim == 2:
            first = mask.to(torch.uint8).argmax(-1)  # the first 1
            return list(enumerate(first.tolist()))
        if mask is None or positions is None:
            return [(row, 0) for row in range(len(ids))]
        columns = (positions[0] == 0).nonzero()[:, 0]
        return [(0, column) for column in columns.tolist()]

    def inject(self, module, args, output):
        """After the layer: its output h (b, n, D), alone or first of a tuple, with the vectors added."""
        if self.index is None:
            return None
        if isinstance(output, tuple):
            return (self.injected(output[0]), *output[1:])
        return self.injected(output)

    def injected(self, h: Tensor) -> Tensor:
        row, at = self.index.to(h.device)
        vectors = self.pending.vectors.to(h.device)
        return h.index_put((row, at), added(h[row, at], vectors))

    def suppress(self, module, args, logits: Tensor) -> Tensor:
        """After the output layer: the marker is never written, so its logit (…, V) is -inf in every path alike."""
        logits[..., self.triple[1]] = -torch.inf
        return logits
