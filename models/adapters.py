"""Adapter kinds: all weights (here), a LoRA (models/lora.py), singular values (models/svd.py). Each answers the same
methods, so nobody asks which one it is; models/policy.py makes them.

    save(folder)            what is trained, as PEFT, transformers or models/svd.py write it
    load(folder)            the same, back into the model
    save_merged(folder, …)  a plain Hugging Face model with the adapter in its weights
    merged_in()             a context: the adapter is part of the model's own weights, for a rollout
    saved_parameters()      the parameters that `save` writes
    beside(model)           the same kind around a copy of the model
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class AllWeights:
    """Full fine-tuning: `model`, which owns the trained weights, is `hf`, the Hugging Face model, itself."""

    model: Any
    hf: Any
    args: Any

    servers_load_it = False  # whether an inference server takes it as an adapter on its own base

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        saved = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.hf.dtype, trust_remote_code=self.args.trust_remote_code)
        self.hf.load_state_dict(saved.state_dict())

    def save_merged(self, folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> None:
        """Write the model without adapter, in `dtype` (None: its own). `checkpoint` is a folder of `save`."""
        if dtype is None:
            self.hf.save_pretrained(folder)
        else:
            self.merged(checkpoint).to(dtype).save_pretrained(folder)

    def merged(self, checkpoint: Path | None) -> nn.Module:
        """A copy of the model with the adapter in its weights."""
        return copy.deepcopy(self.hf)

    @contextlib.contextmanager
    def merged_in(self) -> Iterator[None]:
        yield

    def saved_parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def beside(self, model: nn.Module) -> AllWeights:
        return AllWeights(model, model, self.args)


@dataclasses.dataclass(frozen=True)
class BesideWeights(AllWeights):
    """An adapter beside the frozen weights of `hf`. Its kind says how it is saved, loaded and merged into a copy, and
    which layers a rollout may merge."""

    def save_merged(self, folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> None:
        model = self.merged(checkpoint)
        if dtype is not None:
            model = model.to(dtype)
        model.save_pretrained(folder)

    def layers_to_merge(self) -> list:
        """The layers whose adapter is a product on top of their weight; none where one of them has more than that."""
        raise NotImplementedError

    @contextlib.contextmanager
    def merged_in(self) -> Iterator[None]:
        """A bfloat16 or 4-bit base cannot hold the sum exactly, so there the adapter stays beside it; so it does where
        a weight is shared, and where an adapter is more than its product."""
        layers = self.layers_to_merge()
        if not can_be_merged(self.model, layers):
            yield
            return
        with merged_weights(layers):
            yield

    def saved_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def beside(self, model: nn.Module) -> AllWeights:
        return type(self)(model, model.get_base_model(), self.args)


def can_be_merged(model, layers: list) -> bool:
    """Whether the layers' weights hold the sum with an adapter exactly: float32, and of one layer alone."""
    owners = collections.Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    weights = [layer.get_base_layer().weight for layer in layers]
    return all(weight.dtype == torch.float32 and owners[id(weight)] == 1 for weight in weights)


@contextlib.contextmanager
def merged_weights(layers: list) -> Iterator[None]:
    """Within: each layer's adapter is part of its weight, which comes back from a copy, not by subtraction."""
    weights = [layer.get_base_layer().weight for layer in layers]
    saved: list[Tensor] = [weight.data for weight in weights]
    try:
        for layer, weight in zip(layers, weights, strict=True):
            weight.data = weight.data + layer.get_delta_weight("default")
            layer._disable_adapters = True
        yield
    finally:
        for layer, weight, before in zip(layers, weights, saved, strict=True):
            weight.data = before
            layer._disable_adapters = False
