"""PEFT's LoRA layers with fewer passes over their outputs."""

from __future__ import annotations

import functools

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


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
