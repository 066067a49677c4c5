"""The built-in tiny model: a Llama of 120,000 weights, warm-started on a task's demonstrations.

Nothing is downloaded: the tokenizer is trained on the task's own texts and the model on its worked examples, in about
half a minute on a CPU, and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from data import Task, UserError, rng_of, seed_of
from tasks.process_reward import SEPARATOR, ProcessRewardModel

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "tie_word_embeddings": True, "initializer_range": 0.06,
        "max_position_embeddings": 512}
JUDGE = {"steps": 300, "lr": 2e-3}  # of the tiny process model
WARM = {"steps": 1000, "batch": 16, "lr": 6e-3, "betas": (0.9, 0.98), "vocab": 384}  # lr: cosine to 0


def tiny_tokenizer(texts: list[str]):
    """Byte-level BPE over `texts`. A whole number is one pre-token, so digits never merge with what is around them; the
    space before a number belongs to the word before it, which keeps sequences short."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\d+| ?[^\s\d]+(?: (?=\d))?|\s+"), behavior="isolated")
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
    tokenizer = tiny_tokenizer([m[key] for head, tail in dialogues for m in head + tail for key in ("role", "content")])
    examples = [supervised_ids(tokenizer, head, tail) for head, tail in dialogues]
    torch.manual_seed(seed_of(0, "tiny"))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **TINY))
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)

    def loss_of(batch: list[int]) -> torch.Tensor:
        ids, labels = zip(*(examples[i] for i in batch), strict=True)
        ids = pad_sequence([torch.tensor(x) for x in ids], batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = pad_sequence([torch.tensor(x) for x in labels], batch_first=True, padding_value=-100)[:, 1:]
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # right padding: causal attention never sees it
        spoken = labels != -100
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[spoken]), labels[spoken])

    fit(model, WARM, [len(ids) for ids, _ in examples], loss_of, lambda text: say(f"  warm start {text}"))
    return model.eval(), tokenizer


def fit(model, recipe: dict, lengths: list[int], loss_of: Callable[[list[int]], torch.Tensor], say) -> None:
    """AdamW over the recipe's steps on batches of example indices, the learning rate falling as a cosine to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=WARM["betas"], weight_decay=0.0,
                                  fused=True)
    batches = length_batches(lengths)
    for step in range(recipe["steps"]):
        optimizer.param_groups[0]["lr"] = recipe["lr"] * 0.5 * (1 + math.cos(math.pi * step / recipe["steps"]))
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            say(f"{step + 1}/{recipe['steps']}, loss {loss.item():.3f}")


def length_batches(lengths: list[int]) -> Iterator[list[int]]:
    """Endless batches of indices, each of about one length: eight batches are drawn, sorted, and dealt in any order."""
    rng, size = rng_of(0, "tiny-batches"), WARM["batch"]
    while True:
        drawn = sorted(rng.integers(len(lengths), size=8 * size).tolist(), key=lambda i: lengths[i])
        for part in rng.permutation(8):
            yield drawn[part * size : (part + 1) * size]


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
    """Folder of the warm-started tiny model, built on first use and cached by the hash of its recipe."""
    prompts = task.demonstration_prompts()
    recipe = [TINY, WARM, CHATML, torch.__version__, transformers.__version__, Path(__file__).read_text(),
              [[p.messages, answer] for p, answer in zip(prompts, task.demonstrations(prompts), strict=True)]]

    def build(folder: Path) -> None:
        say(f"building the tiny model: warm start on {len(prompts)} demonstrations (about half a minute)")
        model, tokenizer = warm_start(task, say)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached("tiny", recipe, build, args.cache)


def tiny_process_model(task, args, say) -> Path:
    """Folder of the tiny process reward model: the tiny model with a head of two classes, fitted to tell right steps
    of the task's `judged_examples` from wrong ones. Cached like the tiny model."""
    start, examples = tiny_model(task, args, say), task.judged_examples()
    recipe = [start.name, JUDGE, Path(__file__).read_text(), examples]

    def build(folder: Path) -> None:
        say(f"building the tiny process model: fit on {len(examples)} solutions (about half a minute)")
        fit_process_model(start, folder, examples, say)

    return cached("tiny-prm", recipe, build, args.cache)


def fit_process_model(start: Path, folder: Path, examples: list[tuple[str, list[str], list[bool]]], say) -> None:
    """Fit a token classifier, begun from the causal model at `start`, at the separators of the judged steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed_of(0, "tiny process model"))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(start)
    tokenizer.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
    head = {"num_labels": 2, "id2label": {0: "wrong", 1: "right"}, "label2id": {"wrong": 0, "right": 1}}
    model = transformers.LlamaForTokenClassification.from_pretrained(start, **head)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge = ProcessRewardModel(str(folder), torch.device("cpu"), torch.float32)
    rows = [(*judge.encode(question, steps), verdicts) for question, steps, verdicts in examples]
    model = judge.model.requires_grad_(True)
    def loss_of(batch: list[int]) -> torch.Tensor:
        ids, places, verdicts = zip(*(rows[i] for i in batch), strict=True)
        lengths = [len(x) for x in ids]
        ids = pad_sequence([torch.tensor(x) for x in ids], batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask).logits
        read = torch.cat([logits[row, at] for row, at in enumerate(places)])
        return torch.nn.functional.cross_entropy(read, torch.tensor([int(v) for row in verdicts for v in row]))

    fit(model, JUDGE, [len(ids) for ids, _, _ in rows], loss_of, lambda text: say(f"  process model {text}"))
    model.save_pretrained(folder)


def cached(kind: str, recipe: list, build, use_cache: bool) -> Path:
    """The folder that `build` fills with a model, in the user's cache under the hash of its recipe.

    Two runs that start at once may both build it; the first rename wins and the copies are the same.
    """
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_grpo"
    folder = home / f"{kind}-{key}"

    def usable() -> bool:  # a cache folder may be cleaned file by file
        files = ("config.json", "model.safetensors", "tokenizer.json")
        return use_cache and all((folder / file).is_file() for file in files)

    if usable():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache folder {home} cannot be made ({error}); set XDG_CACHE_HOME") from error
    part = Path(tempfile.mkdtemp(prefix="building-", dir=home))
    try:
        build(part)
        if folder.exists() and not usable():
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # another run was first: its copy is the same
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
