"""What several tests share: random tiny models with a word-level tokenizer, and rollouts made by hand."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import transformers

import train_grpo
from data import Prompt, Rollout, Task

torch.set_num_threads(1)  # several small models: a second thread waits more than it works


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --run-slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class WordTask(Task):
    """Ten plain-text prompts of words w3 … w9; the reward is the share of even token ids."""

    parts = ("even",)

    def prompts(self, n):
        return [Prompt(f"w{3 + i % 7} w{4 + i % 5}", meta={"index": i}) for i in range(n)]

    def heldout(self):
        return [Prompt("w5 w6 w7")]


def word_tokenizer(vocab: int = 32, pad: str = "<pad>", eos: str = "<eos>"):
    """Ids: 0 <pad>, 1 <eos>, 2 <end>, then w3, w4, …; text is split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, vocab)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=pad, eos_token=eos)


def random_model(kind: str = "llama", vocab: int = 32, dtype=torch.float32, seed: int = 0):
    """A random model whose next-token distribution depends clearly on its context."""
    torch.manual_seed(seed)
    shared = {"vocab_size": vocab, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared)
    else:
        name = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}[kind]
        config = getattr(transformers, name)(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, initializer_range=0.3, **shared)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def make_args(*flags: str):
    """Resolved flags for tests: no files, few tokens."""
    return train_grpo.resolve_args(["--task", "math", "--adapter", "none", "--beta", "0", "--max-new", "8", *flags])[0]


def make_policy(*flags: str, kind: str = "llama", dtype=torch.float32, tokenizer=None, task=None, seed: int = 0):
    """A Policy around a random model, on the CPU."""
    args = make_args(*flags)
    model = random_model(kind, dtype=dtype, seed=seed)
    return train_grpo.Policy(args, task or WordTask(args), model, model, tokenizer or word_tokenizer(), model.device)


def hand_rollout(prompt_ids, completion_ids, *, mask=None, logp=None, stop="stop", prompt=None) -> Rollout:
    n = len(completion_ids)
    return Rollout(prompt or Prompt("w3"), [*prompt_ids, *completion_ids], list(mask or [1] * n),
                   list(logp or [0.0] * n), [0.0] * n, [0] * n, stop, [{"role": "assistant", "content": ""}])


def with_flags(args, **values):
    return dataclasses.replace(args, **values)
