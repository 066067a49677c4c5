"""AdamW on float32 masters of weights of any precision, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from data import UserError


class Optimizer:
    """AdamW on float32 master copies of the trained weights.

    A bfloat16 weight cannot take an update under 2^-9 of itself, which at lr 5e-6 is all of them; its master can.
    Gradients are summed in the master's precision. Weights that are float32 already are their own master.
    """

    def __init__(self, model, args):
        self.pairs = []
        for parameter in (p for p in model.parameters() if p.requires_grad):
            own = parameter.dtype in (torch.float32, torch.float64)
            master = parameter if own else parameter.detach().float().clone().requires_grad_(True)
            self.pairs.append((parameter, master))
            if not own:
                parameter.register_post_accumulate_grad_hook(lambda p, m=master: accumulate(p, m))
        masters = [m for _, m in self.pairs]
        groups = [{"params": [m for m in masters if m.ndim >= 2], "weight_decay": args.weight_decay},
                  {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0}]
        keywords = {"lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2)}
        groups = [group for group in groups if group["params"]]
        if args.optimizer == "adamw":
            fused = all(m.device.type == "cuda" for m in masters)
            self.inner = torch.optim.AdamW(groups, fused=fused, **keywords)
        else:
            self.inner = bitsandbytes_optimizer(args)(groups, **keywords)

    @property
    def trained_weights(self) -> int:
        """How many numbers are trained."""
        return sum(master.numel() for _, master in self.pairs)

    def zero(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    def clip(self, limit: float) -> float:
        """The gradient's norm before clipping; not finite where any element is not."""
        grads = [m.grad for _, m in self.pairs if m.grad is not None]
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        if limit:
            torch.nn.utils.clip_grads_with_norm_([m for _, m in self.pairs], limit, norm)
        return float(norm)

    def step(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        for parameter, master in self.pairs:
            if parameter is not master:
                parameter.data.copy_(master.data)

    def state_dict(self) -> dict:
        return {"inner": self.inner.state_dict(), "masters": [m.detach() for p, m in self.pairs if p is not m]}

    def load_state_dict(self, state: dict) -> None:
        self.inner.load_state_dict(state["inner"])
        masters = [m for p, m in self.pairs if p is not m]
        for master, saved in zip(masters, state["masters"], strict=True):
            master.data.copy_(saved)


def accumulate(parameter: Tensor, master: Tensor) -> None:
    """Move a low-precision gradient into its master's sum, as soon as it is whole."""
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def bitsandbytes_optimizer(args):
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(f"--optimizer {args.optimizer} needs bitsandbytes (pip install bitsandbytes)") from error
    return {"adamw8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw8bit": bitsandbytes.optim.PagedAdamW8bit}[
        args.optimizer]


def cosine(share: float, end: float) -> float:
    """Cosine from 1 to `end` as `share` goes from 0 to 1."""
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))


def lr_at(step: int, args) -> float:
    """Learning rate of a step, 1 to --steps: linear from lr_start over the warm-up, then cosine to lr_end."""
    if step <= args.warmup_steps:
        return args.lr * (args.lr_start + (1 - args.lr_start) * (step - 1) / args.warmup_steps)
    decay_steps = max(1, args.steps - 1 - args.warmup_steps)
    share = (step - 1 - args.warmup_steps) / decay_steps
    return args.lr * cosine(share, args.lr_end)
