"""LoRA: made, saved, merged and loaded by PEFT, with fewer passes over the layers' outputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path

import peft
import torch
import transformers
from peft.tuners.lora import Linear
from torch import Tensor, nn

from data import UserError
from models.adapters import BesideWeights
from models.loading import or_user_error


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


@dataclasses.dataclass(frozen=True)
class Lora(BesideWeights):
    """PEFT's LoRA `default` on `hf`; one named `reference` may stand beside it, frozen."""

    servers_load_it = True

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)

    def load(self, folder: Path) -> None:
        weights = peft.load_peft_weights(str(folder), device="cpu")
        found = peft.set_peft_model_state_dict(self.model, weights, adapter_name="default")
        if found.unexpected_keys:
            raise KeyError(*found.unexpected_keys[:3])

    def merged(self, checkpoint: Path | None) -> nn.Module:
        """A LoRA on a 4-bit base is merged into the base's own 16-bit weights, not into the rounded ones; it is read
        from `checkpoint`."""
        if not self.args.load_4bit:
            return copy.deepcopy(self.model).merge_and_unload(adapter_names=["default"])
        base = transformers.AutoModelForCausalLM.from_pretrained(
            self.model.peft_config["default"].base_model_name_or_path, dtype=torch.bfloat16,
            trust_remote_code=self.args.trust_remote_code)
        return peft.PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()

    def layers_to_merge(self) -> list:
        layers = [layer for layer in self.model.modules() if hasattr(layer, "lora_A") and "default" in layer.lora_A]
        layers = [layer for layer in layers if not layer.disable_adapters]
        for layer in layers:
            if layer.lora_variant.get("default") or layer.lora_bias.get("default"):  # DoRA, a bias
                return []
        return layers


# ---- the layer's forward
def fuse_lora(model):
    """Let the model's plain LoRA layers add their product to the base's output within one matrix product.

    y = W x + s B (A x), with s at the rank's side: PEFT's own forward makes B (A x), its multiple and the sum as three
    tensors of the output's size, and two more in the backward pass. Parameters, merging and saving stay PEFT's.
    """
    for layer in model.modules():
        if type(layer) is Linear:
            layer.forward = functools.partial(_forward, layer)
    return model


def _forward(self, x: Tensor, *args, **keywords) -> Tensor:
    """(…, in) -> (…, out). Whatever is not one plain adapter beside its base in one dtype is PEFT's."""
    name = self.active_adapters[0] if len(self.active_adapters) == 1 else ""
    if args or keywords or self.disable_adapters or self.merged or not _plain(self, name, x):
        return type(self).forward(self, x, *args, **keywords)
    rows = x.flatten(0, -2)  # (n, in): the base's output is then no view, and the sum is taken in its place
    low = self.lora_A[name](rows) * self.scaling[name]
    out = self.base_layer(rows).addmm_(low, self.lora_B[name].weight.t())
    return out.unflatten(0, x.shape[:-1])


def _plain(self, name: str, x: Tensor) -> bool:
    """Whether the product can be added in place: no variant, bias, dropout or autocast, and nobody looks in between."""
    if name not in self.lora_A or name in self.lora_variant or x.dim() < 2:
        return False
    if torch.is_autocast_enabled(x.device.type) or getattr(self.lora_dropout[name], "p", 0) != 0:
        return False
    a, b, base = self.lora_A[name], self.lora_B[name], self.get_base_layer()
    if b.bias is not None or not x.dtype == a.weight.dtype == base.weight.dtype:
        return False
    return not (has_hooks(base) or has_hooks(b))


def has_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
