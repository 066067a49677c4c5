"""Small files of task `nla` that several tests share: a random model, activations of it, and a reconstructor."""

import atexit
import functools
import shutil
import tempfile
import types
from pathlib import Path

import torch
import transformers
from conftest import random_model

from models.tiny import tiny_tokenizer
from tasks.nla import reconstructor
from tasks.nla.activations import read_meta
from tasks.nla.documents import documents
from tasks.nla.prepare import prepare
from tasks.nla.reconstructor import Spec
from tasks.nla.warm import MARKER, TINY_RECIPE

CPU = torch.device("cpu")


@functools.cache
def nla_files(kind: str = "llama", rows: int = 100) -> types.SimpleNamespace:
    """folder (the model and its tokenizer), data (activations of generated documents), reconstructor (a LoRA of random
    numbers with the identity head); removed when the process ends."""
    home = Path(tempfile.mkdtemp(prefix="nla-test-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    docs = documents(rows, 0)
    tokenizer = tiny_tokenizer([doc.text for doc in docs] + ["<explanation>say . user assistant</explanation>\n:"])
    tokenizer.add_special_tokens({"additional_special_tokens": [MARKER]})
    torch.manual_seed(0)
    model = random_model(kind, vocab=len(tokenizer))
    if kind == "llama":
        model.config.max_position_embeddings = 512
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    for part in (model, tokenizer):
        part.save_pretrained(home / "model")
    data = prepare(model, tokenizer, 0, docs, home / "data", 0, TINY_RECIPE, str(home / "model"))
    meta = read_meta(data, tokenizer)
    spec = Spec(str(home / "model"), 0, meta.scale, meta.template, lora_r=2)
    judge = reconstructor.build(spec, CPU, torch.float32)
    with torch.no_grad():
        for name, p in judge.trainable().items():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    judge.save(home / "reconstructor")
    return types.SimpleNamespace(home=home, model=str(home / "model"), data=str(data), meta=meta, tokenizer=tokenizer,
                                 reconstructor=str(home / "reconstructor"))
