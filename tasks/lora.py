"""PEFT's LoRA layers with fewer passes over their outputs."""

from __future__ import annotations

import types

import torch
from peft.tuners.lora import Linear


def fuse_lora(model):
    """Let the model's plain LoRA layers add their product to the base's output within one matrix product.

    y = W x + s B (A x), with s at the rank's side: PEFT's own forward makes B (A x), its multiple and the sum as three
    tensors of the output's size, and two more in the backward pass. Parameters, merging and saving stay PEFT's.
    """
    for layer in model.modules():
        if type(layer) is Linear and not layer.lora_variant and not any(layer.lora_bias.values()):
            layer.forward = types.MethodType(_forward, layer)
    return model


def _forward(self, x: torch.Tensor, *args, **keywords) -> torch.Tensor:
    """(…, in) -> (…, out). Whatever is not the one adapter `default`, beside its base in one dtype, is PEFT's."""
    active = self.active_adapters
    if args or keywords or self.disable_adapters or self.merged or len(active) != 1 or active[0] not in self.lora_A:
        return type(self).forward(self, x, *args, **keywords)
    a, b = self.lora_A[active[0]], self.lora_B[active[0]]
    if not x.dtype == a.weight.dtype == self.get_base_layer().weight.dtype:
        return type(self).forward(self, x)
    rows = x.flatten(0, -2)  # of a row of tokens the base's output is then no view, and the sum is taken in its place
    low = a(rows) * self.scaling[active[0]]
    return self.base_layer(rows).addmm_(low, b.weight.t()).unflatten(0, x.shape[:-1])
