#!/usr/bin/env python
"""Lockstep turns with a key-value cache that is carried on, against encoding each turn anew, and one row at a time.

    python tests/bench/turns.py --rows 32 --turns 3

A random local model talks to a task that answers each turn with a tool's message; the three ways sample the same
tokens, which is checked. One JSON line: seconds (the least of --repeats; on a CPU the processor's, so that other work
on the machine does not count) and ratios. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
import transformers
from conftest import make_args, word_tokenizer

import engine.rollout
import models.policy
from data import Prompt, Rollout, Task
from engine.autotune import choose_engine

DEFAULTS = {  # of the flags
    "rows": 32,
    "prompts": 4,
    "turns": 3,
    "hidden": 256,
    "layers": 6,
    "vocab": 2048,
    "prompt-length": 200,
    "max-new": 96,
    "repeats": 1,
    "threads": 1,
}
CHAT = ("{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}w3 {% endif %}")


class Answers(Task):
    """Answers every turn with 40 words."""

    def reply(self, rollout):
        return [{"role": "tool", "content": " ".join(f"w{5 + i % 90}" for i in range(40))}]


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_policy(own: argparse.Namespace, device: str) -> models.policy.Policy:
    """A random Llama on the fast engine, whose turns have 40 tokens on average."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=own.vocab, hidden_size=own.hidden, intermediate_size=4 * own.hidden, num_hidden_layers=own.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.05,
        pad_token_id=0, eos_token_id=1, bos_token_id=None)
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    args = make_args("--max-turns", str(own.turns), "--max-new", str(own.max_new), "--device", device)
    tokenizer = word_tokenizer(own.vocab)
    tokenizer.chat_template = CHAT
    policy = models.policy.Policy(args, Answers(args), model, model, tokenizer, torch.device(device))
    policy.engine = choose_engine(policy, print)
    policy.stop_ids = list(range(1, own.vocab, 40))
    return policy


def fresh_rows(policy: models.policy.Policy, own: argparse.Namespace) -> list[Rollout]:
    """--rows rollouts before their first turn, of --prompts different prompts."""
    prompts = []
    for p in range(own.prompts):
        text = " ".join(f"w{3 + (7 * i + 11 * p) % 900}" for i in range(own.prompt_length))
        prompts.append(Prompt([{"role": "user", "content": text}]))
    rows = []
    for i in range(own.rows):
        prompt = prompts[i * own.prompts // own.rows]
        rows.append(Rollout(prompt, policy.encode(prompt), [], [], [], [], "", []))
    return rows


def lockstep(policy: models.policy.Policy, rows: list[Rollout]) -> None:
    engine.rollout.converse(policy, rows, range(len(rows)), 1.0, 0)


def anew(policy: models.policy.Policy, rows: list[Rollout]) -> None:
    """As `lockstep`, but no turn finds the cache of the one before."""
    decode = engine.rollout.decode
    engine.rollout.decode = lambda policy, rows, buffer, kv_rows: decode(policy, rows, buffer, {})
    try:
        lockstep(policy, rows)
    finally:
        engine.rollout.decode = decode


def one_by_one(policy: models.policy.Policy, rows: list[Rollout]) -> None:
    for i, row in enumerate(rows):
        engine.rollout.converse(policy, [row], range(i, i + 1), 1.0, 0)


@torch.no_grad()
def measure(policy: models.policy.Policy, own: argparse.Namespace) -> tuple[dict[str, float], int]:
    """The least seconds of each way, and the tokens that each of them sampled."""
    on_gpu = policy.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    seconds = {}
    said = {}
    for _ in range(own.repeats):
        for way in (lockstep, anew, one_by_one):
            rows = fresh_rows(policy, own)
            begin = clock()
            way(policy, rows)
            if on_gpu:
                torch.cuda.synchronize()
            took = clock() - begin
            seconds[way.__name__] = min(seconds.get(way.__name__, took), took)
            said[way.__name__] = [row.ids for row in rows]
    assert said["lockstep"] == said["anew"] == said["one_by_one"], "the three ways sampled different tokens"
    return seconds, sum(sum(row.mask) for row in rows)


def main() -> None:
    own = read_flags()
    torch.set_num_threads(own.threads)
    policy = make_policy(own, "cuda" if torch.cuda.is_available() else "cpu")
    seconds, written = measure(policy, own)
    print(json.dumps({
        "rows": own.rows,
        "turns": own.turns,
        "written_tokens": written,
        "engine": policy.engine,
        "seconds": {way: round(took, 2) for way, took in seconds.items()},
        "against_encoding_anew": round(seconds["anew"] / seconds["lockstep"], 2),
        "against_one_at_a_time": round(seconds["one_by_one"] / seconds["lockstep"], 2),
    }))


if __name__ == "__main__":
    main()
