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
from engine.rollout import Draws, decode

FAULTS = (NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, ValueError, IndexError, ImportError)


def choose_engine(policy, log) -> str:
    """'fast' where this model's fast path gives what its plain path gives, on rollouts of a few random tokens."""
    args, hf = policy.args, policy.hf
    if args.engine == "http":  # the log-probabilities stay here
        policy.server = Server(policy, log)
        policy.server.connect(policy)
    if args.engine == "generate":
        return "generate"
    vocabulary = min(hf.get_output_embeddings().weight.shape[0], len(policy.tokenizer))
    ids = np.random.default_rng(0).integers(vocabulary, size=14).tolist()
    rows = [Rollout(p, list(p.meta["ids"]), [], [], [], [], "", [])
            for p in (Prompt("", meta={"ids": ids[:5]}), Prompt("", meta={"ids": ids[5:]})) for _ in range(2)]
    try:
        models = [hf] + [policy.reference] * isinstance(policy.reference, torch.nn.Module)
        if not min(install_attention(model) for model in models):
            raise NotImplementedError(f"its attention is {hf.config._attn_implementation}")
        with torch.no_grad():
            draws = Draws(rows, [6] * 4, torch.full((4, 6), 0.5), policy, 1.0)
            draws.stop = draws.stop[:0]
            decode(policy, rows, draws, {})
            draws.write(rows, policy)
            close_enough(policy, rows, draws.logp)
            policy.engine = "fast"
            packed = token_logps(policy, hf, [TrainRow(row, 0.0) for row in rows], 1.0)[0]
            close_enough(policy, rows, packed)
    except FAULTS as error:
        if args.engine == "fast":
            raise UserError(f"--engine fast does not work with {args.model}: {error}; use --engine auto") from error
        log(f"engine generate: the fast one does not fit this model ({type(error).__name__}: {str(error)[:150]})")
        return "generate"
    if args.packed_attention == "flex" or (args.packed_attention == "auto" and policy.device.type == "cuda"):
        policy.flex = choose_flex(policy, rows, log)
    return "fast"


def close_enough(policy, rows: list[Rollout], logp: Tensor) -> None:
    """Raises where log-probabilities (b, T) of the rows are not those of the plain path."""
    chosen, policy.engine = policy.engine, "generate"
    with torch.no_grad():
        expected = token_logps(policy, policy.hf, [TrainRow(row, 0.0) for row in rows], 1.0)[0]
    policy.engine = chosen
    gap = (expected - logp).abs().mean().item()
    if not gap < (0.05 if next(policy.hf.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-3):
        raise NotImplementedError(f"log-probabilities differ by {gap:.2g}")


def choose_flex(policy, rows: list[Rollout], log) -> bool:
    """Whether FlexAttention works here, forward and backward, on a few rows."""
    policy.flex = True
    try:
        logp = token_logps(policy, policy.hf, [TrainRow(row, 0.0) for row in rows], 1.0)[0]
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
    args, best, rate, budget = policy.args, fallback if policy.args.deterministic else 2048, 0.0, 2048
    length = max(1, min(args.max_new, policy.context // 2))
    while not args.deterministic and budget <= 131_072:
        prompts = [Prompt("") for _ in range(1 + budget // (length * (args.group + 1)))]
        rows = [TrainRow(Rollout(p, [5] * 2 * length, *([1] * length for _ in range(4)), "", []), 0.0)
                for p in prompts for _ in range(args.group)]
        batch = micro_batches(rows, budget, policy.engine == "fast")[0]
        try:
            for _ in range(2):  # the first may compile
                begin = time.perf_counter()
                token_logps(policy, policy.hf, batch, 1.0)[0].sum().backward()
                float(next(p.grad for p in policy.model.parameters() if p.grad is not None).sum())  # waits for the GPU
            now = budget / (time.perf_counter() - begin)
        except (RuntimeError, MemoryError):
            break
        finally:
            policy.model.zero_grad(set_to_none=True)
        if now < 1.05 * rate:
            break
        best, rate, budget = budget, now, 2 * budget
    log(f"--micro-tokens {best}" + (f", measured: {rate:,.0f} tokens a second" if rate else ""))
    return best
