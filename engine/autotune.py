"""Which engine, attention and micro-batches suit a model on its machine: tried before training, not assumed.

`policy` is `models.policy.Policy`.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from data import Prompt, Rollout, UserError
from engine.attention import install_attention
from engine.http import Server
from engine.logps import TrainRow, micro_batches, token_logps
from engine.rollout import TurnBuffer, decode

FAULTS = (NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, ValueError, IndexError, ImportError)


def choose_engine(policy, log) -> str:
    """'fast' where this model's fast path gives what its plain path gives, on rollouts of a few random tokens."""
    args = policy.args
    if args.engine == "http":  # the log-probabilities stay here
        policy.server = Server(policy, log)
        policy.server.connect(policy)
    if args.engine == "generate":
        return "generate"
    rows = probe_rollouts(policy)
    try:
        install(policy)
        check_fast(policy, rows)
    except FAULTS as error:
        if args.engine == "fast":
            raise UserError(f"--engine fast does not work with {args.model}: {error}; use --engine auto") from error
        policy.engine = "generate"
        log(f"engine generate: the fast one does not fit this model ({type(error).__name__}: {str(error)[:150]})")
        return "generate"
    automatic = args.packed_attention == "auto" and policy.device.type == "cuda"
    if automatic or args.packed_attention == "flex":
        policy.flex = choose_flex(policy, rows, log)
    return "fast"


def probe_rollouts(policy) -> list[Rollout]:
    """Two rollouts of each of two prompts of random tokens."""
    vocabulary = min(policy.hf.get_output_embeddings().weight.shape[0], len(policy.tokenizer))
    ids = np.random.default_rng(0).integers(vocabulary, size=14).tolist()
    rows = []
    for own in (ids[:5], ids[5:]):
        prompt = Prompt("", meta={"ids": own})
        for _ in range(2):
            rows.append(Rollout(prompt, list(own), [], [], [], [], "", []))
    return rows


def install(policy) -> None:
    """Let the policy and its reference attend by layouts. Raises where their attention cannot."""
    models = [policy.hf]
    if isinstance(policy.reference, torch.nn.Module):
        models.append(policy.reference)
    installed = [install_attention(model) for model in models]
    if not all(installed):
        raise NotImplementedError(f"its attention is {policy.hf.config._attn_implementation}")


@torch.no_grad()
def check_fast(policy, rows: list[Rollout]) -> None:
    """Write the rows by the fast path, and take their log-probabilities. Raises where the plain path gives others."""
    buffer = TurnBuffer(rows, [6] * 4, torch.full((4, 6), 0.5), policy, 1.0)
    buffer.stop = buffer.stop[:0]
    decode(policy, rows, buffer, {})
    buffer.append_to(rows, policy)
    close_enough(policy, rows, buffer.logp)
    policy.engine = "fast"
    packed, _ = token_logps(policy, policy.hf, as_train_rows(rows), 1.0)
    close_enough(policy, rows, packed)


def as_train_rows(rows: list[Rollout]) -> list[TrainRow]:
    return [TrainRow(row, 0.0) for row in rows]


def close_enough(policy, rows: list[Rollout], logp: Tensor) -> None:
    """Raises where log-probabilities (b, T) of the rows are not those of the plain path."""
    chosen, policy.engine = policy.engine, "generate"
    with torch.no_grad():
        expected, _ = token_logps(policy, policy.hf, as_train_rows(rows), 1.0)
    policy.engine = chosen
    gap = (expected - logp).abs().mean().item()
    precision = next(policy.hf.parameters()).dtype
    most = 0.05 if precision in (torch.bfloat16, torch.float16) else 1e-3
    if not gap < most:
        raise NotImplementedError(f"log-probabilities differ by {gap:.2g}")


def choose_flex(policy, rows: list[Rollout], log) -> bool:
    """Whether FlexAttention works here, forward and backward, on a few rows."""
    policy.flex = True
    try:
        logp, _ = token_logps(policy, policy.hf, as_train_rows(rows), 1.0)
        if policy.device.type == "cuda":
            logp.sum().backward()
        close_enough(policy, rows, logp.detach())
        return True
    except (*FAULTS, torch._dynamo.exc.TorchDynamoException) as error:
        if policy.args.packed_attention == "flex":
            raise UserError(f"--packed-attention flex does not work here: {str(error)[:200]}") from error
        log(f"packed attention by gathered blocks: FlexAttention fails here ({type(error).__name__})")
        return False
    finally:
        policy.model.zero_grad(set_to_none=True)


def measure_budget(policy, log, fallback: int = 16_384) -> int:
    """The micro-batch budget, in tokens, with the most tokens a second forward and backward.

    It is doubled from 2,048 on made-up rows of the run's own shape until that gains less than a twentieth or memory
    runs out. Before any training: the gradients that it makes are thrown away. With --deterministic `fallback`: a
    measurement is not repeatable.
    """
    args = policy.args
    best = fallback if args.deterministic else 2048
    rate, budget = 0.0, 2048
    while not args.deterministic and budget <= 131_072:
        batch = micro_batches(made_up_rows(policy, budget), budget, policy.engine == "fast")[0]
        try:
            for _ in range(2):  # the first may compile
                begin = time.perf_counter()
                forward_and_backward(policy, batch)
            seconds = time.perf_counter() - begin
            now = budget / seconds
        except (RuntimeError, MemoryError):
            break
        finally:
            policy.model.zero_grad(set_to_none=True)
        if now < 1.05 * rate:
            break
        best, rate, budget = budget, now, 2 * budget
    measured = f", measured: {rate:,.0f} tokens a second" if rate else ""
    log(f"--micro-tokens {best}{measured}")
    return best


def made_up_rows(policy, budget: int) -> list[TrainRow]:
    """Rows of the run's own shape, of at least `budget` tokens."""
    length = max(1, min(policy.args.max_new, policy.context // 2))
    group = policy.args.group
    rows = []
    for _ in range(1 + budget // (length * (group + 1))):
        prompt = Prompt("")
        for _ in range(group):
            ones = [[1] * length for _ in range(4)]
            rows.append(TrainRow(Rollout(prompt, [5] * 2 * length, *ones, "", []), 0.0))
    return rows


def forward_and_backward(policy, batch: list[TrainRow]) -> None:
    logp, _ = token_logps(policy, policy.hf, batch, 1.0)
    logp.sum().backward()
    gradient = next(p.grad for p in policy.model.parameters() if p.grad is not None)
    float(gradient.sum())  # waits for the GPU
