"""The built-in tiny model: a Llama of 120,000 weights, warm-started on a task's demonstrations.

Nothing is downloaded: the tokenizer is trained on the task's own texts and the model on its worked examples, in about
half a minute on a CPU, and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from data import Task, UserError, seed_of
from engine.logps import pad
from harness.files import cache_home
from models import supervised
from models.supervised import fit, supervised_ids

CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 192, "tie_word_embeddings": True, "initializer_range": 0.06,
        "max_position_embeddings": 512}
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


def warm_start(task: Task, log) -> tuple[Any, Any]:
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
        ids = pad(ids, tokenizer.pad_token_id, torch.long, model.device)
        labels = pad(labels, -100, torch.long, model.device)[:, 1:]
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # right padding: causal attention never sees it
        spoken = labels != -100
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[spoken]), labels[spoken])

    fit(model, WARM, [len(ids) for ids, _ in examples], loss_of, lambda text: log(f"  warm start {text}"))
    return model.eval(), tokenizer


def tiny_model(task: Task, args, log) -> Path:
    """Folder of the warm-started tiny model, built on first use and cached by the hash of its recipe."""
    prompts = task.demonstration_prompts()
    answers = task.demonstrations(prompts)
    examples = [[prompt.messages, answer] for prompt, answer in zip(prompts, answers, strict=True)]
    recipe = [TINY, WARM, CHATML, *sources([__file__, supervised.__file__]), examples]

    def build(folder: Path) -> None:
        log(f"building the tiny model: warm start on {len(prompts)} demonstrations (about half a minute)")
        model, tokenizer = warm_start(task, log)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached("tiny", recipe, build, args.cache)


def sources(files: list[str]) -> list[str]:
    """What decides a built model beside its recipe: the text of these source files, and the libraries' versions."""
    return [torch.__version__, transformers.__version__, *(Path(file).read_text() for file in files)]


def cached(kind: str, recipe: list, build, use_cache: bool) -> Path:
    """The folder that `build` fills with a model, in the user's cache under the hash of its recipe.

    Two runs that start at once may both build it; the first rename wins and the copies are the same.
    """
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    home = cache_home()
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
