#!/usr/bin/env python
"""The engine on one GPU: is it right, and what is it worth against the plain path of Hugging Face.

    tests/bench/gpu.sh                                   # one GPU, under 8 minutes, no network
    python tests/bench/gpu.py --device cpu --sizes 0.001 # the script itself, on a CPU

First the correctness: a small float32 model gives the same tokens for the same random numbers, log-probabilities to
1e-4 and gradients to 1e-5 relative, for every way of the fast engine against the plain one. Then one table: seconds of
rollout, reference pass and update, and peak memory, of a step of P x G rows on random models (bfloat16, LoRA 16), each
way against `--engine generate`, which is `model.generate` and padded forwards.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
import transformers
from conftest import word_tokenizer

import harness.flags
import models.lora
import models.optimizer
import models.policy
import train_grpo
from data import Group, Prompt, Score, Task
from engine import autotune
from engine.logps import TrainRow, token_logps

SHAPES = {  # hidden, layers, heads, by billions of weights
    "0.001": (64, 2, 4), "0.1": (768, 12, 12), "0.5": (1024, 24, 16), "1.5": (1536, 28, 12)}
WAYS = {"generate": [], "fast, blocks": ["--packed-attention", "blocks"], "fast, flex": ["--packed-attention", "flex"],
        "fast, flex, graphs": ["--packed-attention", "flex", "--cuda-graphs"]}


def make_policy(hidden: int, layers: int, heads: int, vocab: int, dtype, device, flags: list[str]):
    """A random Qwen2-like policy with a LoRA that is not zero."""
    torch.manual_seed(0)
    kv = heads // 4 if heads % 4 == 0 else heads // 2
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=int(hidden * 5.5), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=8192, initializer_range=0.05,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    common = ["--overlong", "keep", "--lora-alpha", "16", "--beta", "0.04"]
    args = harness.flags.resolve_args(train_grpo.Args, [*common, *flags])[0]
    hf = transformers.AutoModelForCausalLM.from_config(config).to(device=device, dtype=dtype).eval()
    model = models.lora.add_lora(hf, args, "random", None)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    policy = models.policy.Policy(args, Task(args), model, hf, word_tokenizer(vocab), torch.device(device), "off")
    policy.engine = autotune.choose_engine(policy, print)
    return policy


def flags_of(way: str, device: str, *more: str) -> list[str] | None:
    """The flags of a way; None where this device has not got it."""
    if "graphs" in way and device == "cpu":
        return None
    if "flex" in way and device == "cpu":  # its backward pass is for GPUs
        return None
    return ["--engine", "generate" if way == "generate" else "fast", *WAYS[way], *more]


def gradient(policy, rows) -> torch.Tensor:
    policy.model.zero_grad()
    logp, _ = token_logps(policy, policy.hf, rows, 1.0)
    (logp.sum() / len(rows)).backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])


def check(device: str) -> bool:
    """Every way against the plain path, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [Prompt(" ".join(f"w{3 + (7 * i + j) % 500}" for j in range(5 + 11 * i))) for i in range(3)]
    good, expected = True, None
    for way in WAYS:
        flags = flags_of(way, device, "--max-new", "40")
        if flags is None:
            continue
        policy = make_policy(64, 2, 4, 512, torch.float32, device, flags)
        groups = policy.sample(prompts, 4, 1.0, 1)
        sampled = [row for group in groups for row in group]
        if expected is None:
            expected = [row.ids for row in sampled]
            fixed = [TrainRow(row, 1.0) for row in sampled]
            with torch.no_grad():
                logp = token_logps(policy, policy.hf, fixed, 1.0)[0]
            grad = gradient(policy, fixed)
        same = sum(row.ids == ids for row, ids in zip(sampled, expected, strict=True))
        with torch.no_grad():
            gap = (token_logps(policy, policy.hf, fixed, 1.0)[0] - logp).abs().max().item()
        other = gradient(policy, fixed)
        relative = ((other - grad).norm() / grad.norm()).item()
        fine = same == len(expected) and gap < 1e-4 and relative < 1e-5
        good &= fine
        print(f"{'right' if fine else 'WRONG'}: {way}: {same} of {len(expected)} rows with the same tokens, "
              f"log-probabilities within {gap:.1e}, gradient within {relative:.1e}", flush=True)
    return good


def seconds_of(work, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(size: str, way: str, a) -> dict | None:
    """Seconds by phase, the best of --steps after one that does not count, and GB."""
    flags = flags_of(way, a.device, "--max-new", str(a.max_new), "--group", str(a.group))
    if flags is None:
        return None
    hidden, layers, heads = SHAPES[size]
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    policy = make_policy(hidden, layers, heads, a.vocab, dtype, a.device, flags)
    args = policy.args
    budget = autotune.measure_budget(policy, print) if a.device == "cuda" else 1536
    optimizer = models.optimizer.Optimizer(policy.model, args)
    if a.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    words = [[f"w{3 + (31 * i + j) % (a.vocab - 3)}" for j in range(a.prompt)] for i in range(a.prompts)]
    prompts = [Prompt(" ".join(row)) for row in words]
    times = {"rollout": [], "reference": [], "update": []}
    for step in range(a.steps + 1):
        out = []
        times["rollout"].append(seconds_of(
            lambda s=step, o=out: o.extend(policy.sample(prompts, a.group, 1.0, s)), a.device))
        groups = [Group(rows[0].prompt, rows, [Score(float(i % 3)) for i in range(len(rows))]) for rows in out]
        train_grpo.set_advantages(groups, args, None)
        rows = train_grpo.rows_to_train(groups, args)
        times["reference"].append(seconds_of(
            lambda r=rows: train_grpo.fill_ref_and_old_logps(policy, [r], args, 1.0, budget), a.device))
        times["update"].append(seconds_of(
            lambda r=rows: train_grpo.gradients(policy, optimizer, r, args, args.beta, 1.0, budget), a.device))
        optimizer.step(1e-6)
        optimizer.zero()
    best = {name: min(values[1:]) for name, values in times.items()}
    gigabytes = torch.cuda.max_memory_allocated() / 2**30 if a.device == "cuda" else float("nan")
    return best | {"whole": sum(best.values()), "memory": gigabytes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sizes", nargs="+", default=["0.1", "0.5", "1.5"], choices=list(SHAPES))
    for name, default in (("vocab", 32_768), ("prompt", 256), ("prompts", 8), ("group", 8), ("max-new", 192),
                          ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        print("error: this PyTorch finds no CUDA device", file=sys.stderr)
        return 2
    good = check(a.device)
    print(f"\nrandom models, {a.prompts} x {a.group} rows, prompt {a.prompt}, at most {a.max_new} new tokens, "
          f"vocabulary {a.vocab:,}; seconds (ratio against generate)")
    print(f"{'B weights':>9}  {'way':<20}{'rollout':>16}{'reference':>16}{'update':>16}{'whole':>16}{'GB':>8}")
    for size in a.sizes:
        plain = None
        for way in WAYS:
            found = measure(size, way, a)
            if found is None:
                continue
            plain = plain or found
            cells = "".join(f"{f'{found[k]:.2f} ({plain[k] / found[k]:.2f} x)':>16}"
                            for k in ("rollout", "reference", "update", "whole"))
            print(f"{size:>9}  {way:<20}{cells}{found['memory']:>8.1f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
