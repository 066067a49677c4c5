"""Adapter kinds: all weights, a LoRA, singular values. Each answers the same methods, so nobody asks which one it is.

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

import peft
import torch
import transformers
from torch import Tensor, nn

from data import UserError
from models.loading import or_user_error
from models.lora import fuse_lora
from models.svd import SVDLinear, SVDModel


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
        if dtype in (None, self.hf.dtype):
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
class Lora(AllWeights):
    """PEFT's LoRA `default` on `hf`; one named `reference` may stand beside it, frozen."""

    servers_load_it = True

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        weights = peft.load_peft_weights(str(folder), device="cpu")
        found = peft.set_peft_model_state_dict(self.model, weights, adapter_name="default")
        if found.unexpected_keys:
            raise KeyError(*found.unexpected_keys[:3])

    def save_merged(self, folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> None:
        self.merged(checkpoint).to(dtype or self.hf.dtype).save_pretrained(folder)

    def merged(self, checkpoint: Path | None) -> nn.Module:
        """A LoRA on a 4-bit base is merged into the base's own 16-bit weights, not into the rounded ones; it is read
        from `checkpoint`."""
        if not self.args.load_4bit:
            return copy.deepcopy(self.model).merge_and_unload(adapter_names=["default"])
        base = transformers.AutoModelForCausalLM.from_pretrained(
            self.model.peft_config["default"].base_model_name_or_path, dtype=torch.bfloat16,
            trust_remote_code=self.args.trust_remote_code)
        return peft.PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()

    @contextlib.contextmanager
    def merged_in(self) -> Iterator[None]:
        """A bfloat16 or 4-bit base cannot hold the sum exactly, so there the adapter stays beside it; so it does where
        a weight is shared, and where an adapter is more than its product (DoRA, a bias)."""
        layers = [layer for layer in self.model.modules() if hasattr(layer, "lora_A") and "default" in layer.lora_A]
        layers = [layer for layer in layers if not layer.disable_adapters]
        owners = collections.Counter(id(p) for _, p in self.model.named_parameters(remove_duplicate=False))
        for layer in layers:
            weight = layer.get_base_layer().weight
            more = layer.lora_variant.get("default") or layer.lora_bias.get("default")
            if weight.dtype != torch.float32 or owners[id(weight)] > 1 or more:
                yield
                return
        with merged_weights(layers):
            yield

    def saved_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def beside(self, model: nn.Module) -> AllWeights:
        return type(self)(model, model.get_base_model(), self.args)


@dataclasses.dataclass(frozen=True)
class SingularValues(Lora):
    """The differences of singular values of models/svd.py."""

    servers_load_it = False

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        self.model.load(folder)

    def merged(self, checkpoint: Path | None) -> nn.Module:
        return self.model.merged()

    @contextlib.contextmanager
    def merged_in(self) -> Iterator[None]:
        layers = [layer for layer in self.model.modules() if isinstance(layer, SVDLinear)]
        if any(layer.disable_adapters or layer.weight.dtype != torch.float32 for layer in layers):
            yield
            return
        with merged_weights(layers):
            yield


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


def adapter_of(model, hf, args) -> AllWeights:
    """The kind of what is trained, from the modules that were made."""
    if model is hf:
        return AllWeights(model, hf, args)
    if isinstance(model, SVDModel):
        return SingularValues(model, hf, args)
    return Lora(model, hf, args)


# ---- making one
def make_adapter(kind: str, hf, args, base: str, start: str | None, log) -> tuple[Any, Any, Any]:
    """(model, its Hugging Face model, what the reference is) of a fresh adapter, or of the one in the folder `start`.

    `base` is the path of `hf`. The reference is None, "off" (the adapter switched off), "adapter" (a frozen copy of
    the one at `start`) or a frozen model.
    """
    if kind == "svd":
        model = SVDModel(hf, base, args.cache, log)
        if start:
            model.load(start)
        return model, hf, "off"
    if kind == "lora":
        model = add_lora(hf, args, base, start)
        return model, model.get_base_model(), "adapter" if start else "off"
    if start:  # full fine-tuning from base + adapter
        hf = add_lora(hf, args, base, start).merge_and_unload()
    hf.requires_grad_(True)
    return hf, hf, frozen_copy(hf, args) if args.beta else None


def frozen_copy(hf, args):
    reference = copy.deepcopy(hf).requires_grad_(False).eval()
    return reference.to("cpu") if args.ref_offload else reference


def add_lora(hf, args, base: str, start: str | None):
    """A fresh LoRA, or the one at `start` with a frozen second copy named `reference` as the KL anchor."""
    if start:
        model = or_user_error(start, lambda: peft.PeftModel.from_pretrained(hf, start, is_trainable=True))
        or_user_error(start, lambda: model.load_adapter(start, adapter_name="reference", is_trainable=False))
        model.set_adapter("default")
        return fuse_lora(in_one_order(model))
    targets = args.lora_targets[0] if args.lora_targets == ("all-linear",) else list(args.lora_targets)
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, use_rslora=args.rslora, target_modules=targets,
                             lora_dropout=0.0, task_type="CAUSAL_LM")
    try:
        model = peft.get_peft_model(hf, config)  # LoRA weights are float32 whatever the base is
    except ValueError as error:
        raise UserError(f"--lora-targets {' '.join(args.lora_targets)} do not fit this model: {error}") from error
    model.peft_config["default"].base_model_name_or_path = base
    return fuse_lora(in_one_order(model))


def in_one_order(model):
    """PEFT keeps a set of target modules, whose order in adapter_config.json would differ from process to process."""
    config = model.peft_config["default"]
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    return model
