#!/usr/bin/env python
"""This project's step against TRL's GRPOTrainer (plain `generate`) on the same work, paired and interleaved.

    pip install --no-deps trl==1.16.0
    python tests/bench/step_vs_trl.py --quick            # one core, under 8 minutes
    python tests/bench/step_vs_trl.py                    # every row of the table

The workload and TRL's side are a file of their own, named by --peer. After each of TRL's optimizer steps this project
does its own on the same prompts: it rolls out for itself (same distribution), and updates on the completions that TRL
has just sampled. Ratios are medians of TRL's seconds over ours, step by step; over 1 we are faster. Memory is the peak
resident size of a process that does one side alone. The allocator is set alike for both, and each uses one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000",
               "MALLOC_TOP_PAD_": "268435456", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
ROWS = [  # the gate, then the cost curves
    ["--prompt-len", "64", "--lora", "16", "--beta", "0.04"], ["--prompt-len", "64", "--lora", "16", "--beta", "0"],
    ["--prompt-len", "64", "--beta", "0.04"], ["--prompt-len", "64", "--beta", "0"],
    ["--prompt-len", "16-112", "--lora", "16", "--beta", "0.04"],
    ["--prompt-len", "256", "--lora", "16", "--beta", "0.04"],
    ["--prompt-len", "64", "--lora", "16", "--beta", "0", "--zero-frac", "0.5"],
    ["--prompt-len", "256", "--lora", "16", "--beta", "0.04", "--vocab", "50257"],
    ["--prompt-len", "64", "--lora", "16", "--beta", "0.04", "--group", "4"],
    ["--prompt-len", "64", "--lora", "16", "--beta", "0.04", "--group", "16", "--prompts-per-step", "4"],
    ["--prompt-len", "64", "--lora", "16", "--beta", "0.04", "--max-new", "64"],
    ["--prompt-len", "64", "--lora", "16", "--beta", "0.04", "--max-new", "256"],
]


def our_policy(a, w):
    """This project's policy, optimizer and flags for a workload of the peer."""
    import torch
    import transformers

    import train_grpo
    from data import Task
    from engine.autotune import choose_engine
    from harness.flags import resolve_args
    from models.lora import add_lora
    from models.optimizer import Optimizer
    from models.policy import Policy

    flags = ["--adapter", "lora" if a.lora else "none", "--beta", str(a.beta), "--group", str(a.group), "--max-new",
             str(a.max_new), "--prompts", str(a.prompts_per_step), "--loss", a.loss, "--lr", str(a.lr), "--overlong",
             "keep", "--lora-r", str(a.lora or 1), "--lora-alpha", str(2 * (a.lora or 1)), "--warmup-steps", "0",
             "--lora-targets", *w.lora_targets]
    args = resolve_args(train_grpo.Args, flags)[0]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(w.model_dir)
    hf = transformers.AutoModelForCausalLM.from_pretrained(w.model_dir, dtype=torch.float32).eval()
    model, reference = hf, None
    if a.lora:
        model, reference = add_lora(hf, args, w.model_dir, None), "off"
    elif a.beta:
        reference = transformers.AutoModelForCausalLM.from_pretrained(w.model_dir, dtype=torch.float32)
        reference.requires_grad_(False)
    policy = Policy(args, Task(args), model, hf, tokenizer, hf.device, reference)
    policy.engine = choose_engine(policy, print)
    return policy, Optimizer(model, args)


class Ours:
    """Does this project's side of a step and keeps its seconds by stage."""

    def __init__(self, a, w):
        import train_grpo

        self.t, self.w, self.a = train_grpo, w, a
        self.policy, self.optimizer = our_policy(a, w)
        self.state = train_grpo.State(train_grpo.BetaControl(a.beta), {}, micro_tokens=1536)
        self.records: list[dict] = []
        self.stages = {}
        for name in ("fill_ref_and_old_logps", "gradients"):
            setattr(train_grpo, name, self.timed(name, getattr(train_grpo, name)))

    def timed(self, name, function):
        def wrapper(*args, **keywords):
            begin = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - begin

        return wrapper

    def step(self, texts: list[str], completions: list[list[int]] | None, number: int) -> None:
        """One step on prompts `texts`; the update is on `completions` (row order) where they are given."""
        from data import Group, Prompt, Rollout, Score

        self.stages = {}
        begin = time.perf_counter()
        groups = self.policy.sample([Prompt(text) for text in texts], self.a.group, self.a.temperature, number)
        self.stages["rollout"] = time.perf_counter() - begin
        if completions is not None:
            rows = iter(completions)
            for group in groups:
                for i, row in enumerate(group):
                    ids = next(rows)
                    n = len(ids)
                    group[i] = Rollout(row.prompt, row.ids[: row.prompt_length] + ids, [1] * n, [0.0] * n, [0.0] * n,
                                       [0] * n, "stop", [])
        middle = time.perf_counter()
        batch = [Group(rows[0].prompt, rows, [Score(self.w.reward(r.ids[r.prompt_length:], r.prompt.messages))
                                              for r in rows]) for rows in groups]
        args = self.policy.args
        self.t.set_advantages(batch, args, None)
        self.t.update(self.policy, self.optimizer, batch, args, number, self.state, print)
        self.stages["whole"] = self.stages["rollout"] + time.perf_counter() - middle
        self.records.append(self.stages)


def paired(peer, a) -> dict:
    """Ratios of one row: TRL's step, then ours, and so on."""
    import trl

    w, seen = peer.workload(a), {}
    ours = Ours(a, w)
    original = trl.GRPOTrainer._generate_single_turn

    def recording(self, *args, **keywords):
        out = original(self, *args, **keywords)
        seen["completions"] = [list(map(int, ids)) for ids in out[0]]
        return out

    trl.GRPOTrainer._generate_single_turn = recording

    def after_step(i: int) -> None:
        texts = w.prompts[i * a.prompts_per_step : (i + 1) * a.prompts_per_step]
        ours.step(texts, seen["completions"], i + 1)

    records, _ = peer.run_trl(a, w, after_step)
    trl.GRPOTrainer._generate_single_turn = original
    names = {"rollout": ["generate"], "update": ["forward", "loss_math", "backward"], "reference": ["ref_logps"]}
    theirs = [{k: sum(r["stages"].get(s, 0.0) for s in stages) for k, stages in names.items()} | {"whole": r["s"]}
              for r in records][a.warmup:]
    own = [{"rollout": r["rollout"], "update": r.get("gradients", 0.0), "whole": r["whole"],
            "reference": r.get("fill_ref_and_old_logps", 0.0)} for r in ours.records][a.warmup:]
    out = {"prompt": a.prompt_len, "group": a.group, "max_new": a.max_new, "vocab": a.vocab, "lora": a.lora,
           "beta": a.beta, "constant": a.zero_frac, "engine": ours.policy.engine}
    for name in ("rollout", "update", "reference", "whole"):
        pairs = [(x[name], y[name]) for x, y in zip(theirs, own, strict=True) if x[name] > 0 and y[name] > 0]
        if pairs and (name != "reference" or a.beta):
            out[name] = round(statistics.median(x / y for x, y in pairs), 2)
            out[f"{name}_s"] = [round(statistics.median(z), 3) for z in zip(*pairs, strict=True)]
    return out


def alone(peer, a, side: str) -> float:
    """Peak resident GB of a process that does two steps of one side."""
    w = peer.workload(a)
    if side == "trl":
        peer.run_trl(a, w)
    else:
        ours = Ours(a, w)
        for i in range(a.steps + a.warmup):
            ours.step(w.prompts[i * a.prompts_per_step : (i + 1) * a.prompts_per_step], None, i + 1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=str(ROOT.parent / "shared" / "bench" / "peer_trl.py"),
                        help="file of the workload and of TRL's side, no part of this repository [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="the first row only, with memory")
    parser.add_argument("--steps", type=int, help="paired steps a row, after one that does not count [5; --quick: 3]")
    parser.add_argument("--alone", choices=["trl", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    own = parser.parse_args()
    own.steps = own.steps or (3 if own.quick else 5)
    if not Path(own.peer).is_file():
        parser.exit(2, f"error: there is no file {own.peer}, the workload and TRL's side; name it with --peer\n")
    if importlib.util.find_spec("trl") is None:
        parser.exit(2, "error: TRL is not installed: pip install --no-deps trl==1.16.0\n")
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    sys.path[:0] = [str(ROOT), str(Path(own.peer).parent)]
    import peer_trl

    if own.row:  # a process of its own: what ran before must not count as its memory
        a = peer_trl.parser().parse_args([*json.loads(own.row), "--steps", str(own.steps)])
        with_stdout_apart = os.dup(1)
        os.dup2(2, 1)
        result = alone(peer_trl, a, own.alone) if own.alone else paired(peer_trl, a)
        os.write(with_stdout_apart, (json.dumps(result) + "\n").encode())
        return
    results = []
    for row in ROWS[:1] if own.quick else ROWS:
        result = child(own, row, None, own.steps)
        if own.quick or "50257" in row:
            trl, ours = (child(own, row, side, 1) for side in ("trl", "ours"))
            result |= {"memory": round(ours / trl, 2), "memory_gb": [round(trl, 2), round(ours, 2)]}
        results.append(result)
        print(json.dumps(result), flush=True)
    if own.quick:
        print(json.dumps({key: results[0].get(key) for key in ("rollout", "update", "whole", "memory")}))


def child(own: types.SimpleNamespace, row: list[str], side: str | None, steps: int):
    command = [sys.executable, __file__, "--peer", own.peer, "--row", json.dumps(row), "--steps", str(steps)]
    done = subprocess.run(command + (["--alone", side] if side else []), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])


if __name__ == "__main__":
    main()
