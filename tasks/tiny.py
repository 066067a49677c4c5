"""The built-in tiny model: a Llama of 120,000 weights, warm-started on a task's demonstrations.

Nothing is downloaded: the tokenizer is trained on the task's own texts and the model on its worked examples, in about
half a minute on a CPU, and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from data import Task, UserError, rng_of, seed_of

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "tie_word_embeddings": True, "initializer_range": 0.06,
        "max_position_embeddings": 512}
WARM = {"steps": 550, "batch": 32, "lr": 6e-3, "betas": (0.9, 0.98), "vocab": 360}  # lr: cosine to 10 %


def tiny_tokenizer(texts: list[str]):
    """Byte-level BPE over `texts`; a whole number is one pre-token, so digits never merge with what is around them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\d+| ?[^\s\d]+|\s+"), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=WARM["vocab"], special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=CHATML, padding_side="left")


def warm_start(task: Task, say) -> tuple[Any, Any]:
    """The tiny model and its tokenizer after a short supervised stage on the task's demonstrations.

    The loss is on the assistant's tokens only. Everything is drawn from seed 0: every run of a sweep starts alike.
    """
    torch.set_num_threads(1)  # at this size a second thread waits more than it works
    prompts = task.demonstration_prompts()
    dialogues = [([{"role": "user", "content": p.messages}] if isinstance(p.messages, str) else p.messages, answer)
                 for p, answer in zip(prompts, task.demonstrations(prompts), strict=True)]
    tokenizer = tiny_tokenizer([m["content"] for head, tail in dialogues for m in head + tail])
    examples = [supervised_ids(tokenizer, head, tail) for head, tail in dialogues]
    torch.manual_seed(seed_of(0, "tiny"))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **TINY))
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM["lr"], betas=WARM["betas"], weight_decay=0.0)
    rng, steps = rng_of(0, "tiny-batches"), WARM["steps"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = WARM["lr"] * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        batch = [examples[i] for i in rng.integers(len(examples), size=WARM["batch"])]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
        loss = model(input_ids=ids, labels=labels).loss  # right padding: causal attention never looks at it
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 110 == 0:
            say(f"  warm start {step + 1}/{steps}, loss {loss.item():.3f}")
    return model.eval(), tokenizer


def supervised_ids(tokenizer, head: list[dict], tail: list[dict]) -> tuple[list[int], list[int]]:
    """(ids, labels) of a dialogue: labels -100 but for what the assistant says in `tail`, its end token included."""
    ids = tokenizer.apply_chat_template(head, add_generation_prompt=True, return_dict=False)
    labels, said = [-100] * len(ids), list(head)
    for message in tail:
        said = said + [message]
        generation = message is not tail[-1] and tail[len(said) - len(head)]["role"] == "assistant"
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=generation, return_dict=False)
        new = whole[len(ids):]
        spoken = len(tokenizer.encode(message["content"], add_special_tokens=False)) + 1
        assistant = message["role"] == "assistant"
        labels += [t if assistant and i < spoken else -100 for i, t in enumerate(new)]
        ids = whole
    return ids, labels


def tiny_model(task: Task, args, say) -> Path:
    """Folder of the warm-started tiny model, built on first use and cached by the hash of its recipe.

    Two runs that start at once may both build it; the first rename wins and the copies are the same.
    """
    prompts = task.demonstration_prompts()
    recipe = [TINY, WARM, CHATML, torch.__version__, transformers.__version__, inspect.getsource(warm_start),
              [[p.messages, answer] for p, answer in zip(prompts, task.demonstrations(prompts), strict=True)]]
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_grpo"
    folder = home / f"tiny-{key}"
    if args.cache and (folder / "config.json").is_file():
        return folder
    say(f"building the tiny model: warm start on {len(prompts)} demonstrations (about half a minute)")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache folder {home} cannot be made ({error}); set XDG_CACHE_HOME") from error
    build = Path(tempfile.mkdtemp(prefix="building-", dir=home))
    try:
        model, tokenizer = warm_start(task, say)
        model.save_pretrained(build)
        tokenizer.save_pretrained(build)
        if not args.cache and folder.exists():
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # another run was first: its copy is the same
            build.rename(folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder
