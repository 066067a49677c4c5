#!/usr/bin/env python
"""Seconds by phase, tokens per second and peak memory of a step on a random local model of a given size.

    python tests/bench/step.py --hidden 256 --layers 6 --prompt-length 64 -- --group 8 --max-new 128 --adapter lora

What follows `--` are flags of train_grpo.py. Nothing is downloaded. One JSON line; seconds are medians over the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
import transformers
from conftest import word_tokenizer

import train_grpo

TASK = '''
import random
from data import Prompt, Score, Task


class Words(Task):
    parts = ("even",)
    draws = 0

    def prompts(self, n):
        self.draws += 1
        rng = random.Random(self.draws)
        return [Prompt(" ".join(f"w{{rng.randrange(3, {vocab})}}" for _ in range({length}))) for _ in range(n)]

    def score(self, rollouts):
        shares = [sum(t % 2 == 0 for t in r.ids[r.prompt_length:]) / max(1, len(r.mask)) for r in rollouts]
        return [Score(share, {{"even": share}}) for share in shares]
'''


def sizes() -> argparse.ArgumentParser:
    """The flags that say how large the model and the steps are."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 6), ("heads", 4), ("kv-heads", 2), ("feed-forward", 1536),
                          ("vocab", 2048), ("prompt-length", 64), ("steps", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def measure(own: argparse.Namespace, flags: list[str]) -> tuple[int, int, list[dict], dict]:
    """(weights, exit code, rows without the first, summary) of a run on a random model."""
    torch.set_num_threads(own.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(
            vocab_size=own.vocab, hidden_size=own.hidden, intermediate_size=own.feed_forward,
            num_hidden_layers=own.layers, num_attention_heads=own.heads, num_key_value_heads=own.kv_heads,
            max_position_embeddings=4096, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(f"{folder}/model")
        word_tokenizer(own.vocab).save_pretrained(f"{folder}/model")
        Path(f"{folder}/words.py").write_text(TASK.format(vocab=own.vocab, length=own.prompt_length))
        with contextlib.redirect_stdout(sys.stderr):
            code = train_grpo.main([
                "--task", f"{folder}/words.py:Words", "--model", f"{folder}/model", "--out", folder, "--name", "run",
                "--steps", str(own.steps + 1), "--no-eval", "--save-every", "0", "--overlong", "keep",
                *(flag for flag in flags if flag != "--")])
        rows = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()][1:]
        summary = json.loads(Path(f"{folder}/run/summary.json").read_text())
    return sum(p.numel() for p in model.parameters()), code, rows, summary


def main() -> None:
    own, flags = sizes().parse_known_args()
    weights, code, rows, summary = measure(own, flags)
    out = {"weights_m": round(weights / 1e6, 2), "exit": code}
    out |= {key: round(statistics.median(row[key] for row in rows), 4) for key in (
        "seconds_rollout", "seconds_score", "seconds_update", "tokens", "length_mean", "tokens_per_second")}
    out["peak_resident_gb"] = summary["peak_resident_gb"]
    out["peak_cuda_gb"] = max((row["peak_memory_gb"] or 0 for row in rows), default=0)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
