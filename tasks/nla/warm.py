"""The supervised stages before GRPO in task `nla`, as commands, and the tiny models of its smoke run.

    python -m tasks.nla prepare …       activations and their sidecar from a model and its texts
    python -m tasks.nla sft …           the verbalizer: activation → text (the data's, else around the position)
    python -m tasks.nla reconstruct …   the reconstructor: text → activation
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from data import Prompt, UserError, rng_of, seed_of
from models import supervised, tiny
from models.supervised import load_for_supervision, supervised_ids, supervised_steps
from models.tiny import TINY, cached, tiny_tokenizer
from tasks.nla import activations, documents, injection, reconstructor
from tasks.nla import prepare as preparation
from tasks.nla.activations import (
    HELD_SHARE,
    ActivationRow,
    Meta,
    data_file,
    load_mapping,
    load_rows,
    parse_meta,
    read_meta,
    sidecar_of,
    split_by_document,
    tokenizer_of,
)
from tasks.nla.controls import clipped, replace_words
from tasks.nla.documents import randomise_slots
from tasks.nla.injection import Injection
from tasks.nla.prepare import Recipe, prepare
from tasks.nla.reconstructor import Critic, Spec, baselines, fve, mse

MARKER = "<|act|>"
SMOKE = {"documents": 1500, "layers": 3, "layer": 2, "inject_layer": 0,
         "base": {"steps": 400, "batch": 16, "lr": 5e-3},
         "verbalizer": {"steps": 300, "batch": 16, "lr": 5e-3},
         "reconstructor": {"steps": 400, "batch": 16, "lr": 3e-3}}
TINY_RECIPE = Recipe(marker=MARKER, positions=4, prompt="say <INJECT> .", template="{explanation}\n:")


# ---- supervised stages
def wrapped(text: str) -> list[dict]:
    return [{"role": "assistant", "content": f"<explanation>{text}</explanation>"}]


def fit_verbalizer(model, tokenizer, rows: Sequence[ActivationRow], meta: Meta, inject_layer: int, own, log
                   ) -> Iterator[float]:
    """Supervised steps on the rows' texts with their vectors injected; yields each step's loss."""
    def encode(prompt: Prompt) -> list[int]:
        return tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)

    prompts = [Prompt(row.prompt, inject=row.vector) for row in rows]
    examples = [supervised_ids(tokenizer, row.prompt, wrapped(row.text)) for row in rows]
    fits = [i for i, (ids, _) in enumerate(examples) if len(ids) <= own.context]
    if not fits:
        raise UserError(f"no example fits into {own.context} tokens; raise --context")
    if len(fits) < len(rows):
        log(f"{len(rows) - len(fits)} examples of over {own.context} tokens are left out")
    injection = Injection(inject_layer, meta.marker_id, meta.left_id, meta.right_id, encode)
    injection.install(model.get_base_model() if hasattr(model, "get_base_model") else model)
    yield from supervised_steps(model, [examples[i] for i in fits], own, filler_of(tokenizer), log,
                         lambda some: injection.feed([prompts[fits[i]] for i in some]))
    injection.feed([])


def fit_reconstructor(critic: Critic, rows: Sequence[ActivationRow], steps: int, batch: int, lr: float, seed: int,
                      log: Callable[[str], None]) -> Iterator[dict[str, float]]:
    """Regression steps from the rows' texts to their vectors, cosine learning rate; yields each step's numbers."""
    ids, kept = [], []
    for row in rows:
        try:
            ids.append(critic.model.encode(row.text))
            kept.append(row.vector)
        except ValueError:
            continue
    if not kept:
        raise UserError("no text fits into the reconstructor's template")
    if len(kept) < len(rows):
        log(f"{len(rows) - len(kept)} texts are too long for the template and are left out")
    gold = torch.tensor(np.stack(kept))
    for step in range(steps):
        some = rng_of(seed, "reconstruct", step).integers(len(ids), size=batch).tolist()
        warm = min(1.0, (step + 1) / max(1, steps // 20))
        yield critic.step([ids[i] for i in some], gold[some],
                          lr * warm * 0.5 * (1 + math.cos(math.pi * step / steps)))


def held_fve(model: reconstructor.Reconstructor, texts: Sequence[str], rows: Sequence[ActivationRow]) -> float:
    """FVE of texts for the rows' vectors, against the variance of these."""
    gold, scale = torch.tensor(np.stack([row.vector for row in rows])), model.spec.scale
    error = mse(model.score([model.encode(text) for text in texts]), gold, scale).mean().item()
    return fve(error, baselines(gold, scale)[0])


def filler_of(tokenizer) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


# ---- the smoke run's models
def tiny_folder(use_cache: bool, log: Callable[[str], None]) -> Path:
    """Folder of the tiny verbalizer, with its base, reconstructor and activations in it: built once, then cached."""
    sources = [__file__, activations.__file__, documents.__file__, preparation.__file__, injection.__file__,
               reconstructor.__file__, supervised.__file__, tiny.__file__]
    recipe = [SMOKE, torch.__version__, transformers.__version__, *(Path(source).read_text() for source in sources)]
    return cached("tiny-nla", recipe, lambda folder: build_tiny(folder, log), use_cache)


def build_tiny(folder: Path, log: Callable[[str], None]) -> None:
    """A language model of generated documents, activations of it, and both warm starts. The verbalizer's is short: it
    learns the form and the kind of place, and little of what the vector holds, which is left to GRPO."""
    torch.set_num_threads(1)  # at this size a second thread waits more than it works
    log("building the tiny model, its activations and both warm starts (about a minute and a half)")
    docs = documents.documents(SMOKE["documents"], 0)
    captions = [doc.caption_at(end) for doc in docs for end in doc.cuts]
    texts = [doc.text for doc in docs] + [wrapped(text)[0]["content"] for text in captions[:2000]]
    tokenizer = tiny_tokenizer([*texts, "say . user assistant \n:"])
    tokenizer.add_special_tokens({"additional_special_tokens": [MARKER]})
    base, path = fit_base(docs, tokenizer, log), folder / "base"
    for model in (base, tokenizer):
        model.save_pretrained(path)
    data = prepare(base, tokenizer, SMOKE["layer"], docs, folder / "activations.parquet", 0, TINY_RECIPE, "base")
    meta = read_meta(data, tokenizer)
    train, held = split_by_document(load_rows(data, 0, meta, 0.0)[0], HELD_SHARE, 0)

    recipe = SMOKE["reconstructor"]
    spec = Spec(str(path), meta.layer, meta.scale, meta.template)
    torch.manual_seed(seed_of(0, "tiny reconstructor"))
    critic = Critic(reconstructor.build(spec, torch.device("cpu"), torch.float32), recipe["lr"])
    for _ in fit_reconstructor(critic, train, recipe["steps"], recipe["batch"], recipe["lr"], 0, log):
        pass
    critic.model.spec = dataclasses.replace(spec, model="../base")  # the folder is renamed when it is whole
    critic.model.save(folder / "reconstructor")
    given = [row.text for row in held]
    log(f"  reconstructor: held-out FVE {held_fve(critic.model, given, held):.3f} from the captions, "
        f"{held_fve(critic.model, [randomise_slots(text, 0) for text in given], held):.3f} with their content words "
        "replaced")

    own = types.SimpleNamespace(**SMOKE["verbalizer"], micro_batch=SMOKE["verbalizer"]["batch"], seed=0, context=512)
    for _ in fit_verbalizer(base.train(), tokenizer, train, meta, SMOKE["inject_layer"], own, quiet(log, "verbalizer")):
        pass
    for model in (base.eval(), tokenizer):
        model.save_pretrained(folder)


def fit_base(docs, tokenizer, log):
    """A three-layer Llama that predicts the documents' tokens."""
    torch.manual_seed(seed_of(0, "tiny nla"))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **{**TINY, "num_hidden_layers": SMOKE["layers"]}))
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    ids = [tokenizer.encode(doc.text) for doc in docs]
    own = types.SimpleNamespace(**SMOKE["base"], micro_batch=SMOKE["base"]["batch"], seed=0)
    for _ in supervised_steps(model.train(), [(row, row) for row in ids], own, tokenizer.pad_token_id, quiet(log, "base")):
        pass
    return model.eval()


def quiet(log: Callable[[str], None], name: str) -> Callable[[str], None]:
    """Every hundredth step of a supervised stage."""
    def tell(text: str) -> None:
        if re.match(r"step \d*00/", text):
            log(f"  {name}: {text}")

    return tell


# ---- the commands
def read_flags(command: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m tasks.nla {command}", allow_abbrev=False)
    add, verbal = parser.add_argument, command == "sft"
    add("--data", required=True, help="activations (python -m tasks.nla prepare): the file or its folder")
    add("--model", required=verbal, default="", help="the verbalizer's base" if verbal else "its base [the sidecar's]")
    add("--out", required=True, help="folder that is written")
    add("--steps", type=int, default=1000, help="optimizer steps [1000]")
    add("--batch", type=int, default=32, help="examples a step [32]")
    add("--lr", type=float, default=1e-4 if verbal else 2e-4, help="peak learning rate, then cosine")
    add("--lora-r", type=int, default=128, help="LoRA rank; 0 trains all weights [128]")
    add("--lora-alpha", type=float, default=16, help="LoRA scale, rank-stabilised: alpha / sqrt(r) [16]")
    add("--load-4bit", action="store_true", help="nf4 base through bitsandbytes (CUDA)")
    add("--max-rows", type=int, default=0, help="read only the first so many rows; 0: all [0]")
    add("--seed", type=int, default=0, help="order of the examples, and the adapter [0]")
    if verbal:
        add("--chat-template", default="", help="Jinja file to use instead of the tokenizer's chat template")
        add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
        add("--inject-layer", type=int, default=1, help="decoder layer after which the vector is added [1]")
        add("--micro-batch", type=int, default=4, help="examples in one forward and backward [4]")
        add("--context", type=int, default=2048, help="examples over this many tokens are left out, counted [2048]")
    else:
        add("--micro-tokens", type=int, default=8192, help="most tokens in one forward and backward [8192]")
        add("--final-norm", action="store_true", help="apply the base's final norm to the state")
    own = parser.parse_args(argv)
    if min(own.steps, own.batch) < 1 or own.lora_r < 0 or not 0 < own.lr < 1 or own.max_rows < 0:
        raise UserError("--steps and --batch must be 1 or more, --lora-r and --max-rows 0 or more, --lr from 0 to 1")
    if Path(own.out).exists() and any(Path(own.out).iterdir()):
        raise UserError(f"--out {own.out} is not empty; give another folder")
    return own


def rows_with_text(own, tokenizer) -> tuple[Meta, list[ActivationRow], list[ActivationRow]]:
    """The sidecar, and the training and held-out rows that have a text."""
    meta = read_meta(own.data, tokenizer)
    rows, notes = load_rows(data_file(own.data), own.max_rows, meta, 0.01)
    for note in notes:
        print("note:", note)
    sides = [[row for row in side if row.text] for side in split_by_document(rows, HELD_SHARE, 0)]
    if not sides[0]:
        raise UserError(f"{own.data} has no column `text`, which is what a warm start learns from; make the file with "
                        "python -m tasks.nla prepare")
    return meta, *sides


def log_steps(out: Path, rows: Iterator, log=print, names: Sequence[str] = ("loss",)) -> None:
    """Run the steps; each is a line of OUT/warm.csv."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "warm.csv").open("w", newline="") as file:
        log = csv.writer(file, lineterminator="\n")
        log.writerow(["step", *names])
        for step, row in enumerate(rows, 1):
            log.writerow([step, *(f"{row[name]:.6g}" for name in names)] if isinstance(row, dict) else
                         [step, f"{row:.6g}"])
            if isinstance(row, dict) and (step == 1 or step % 50 == 0):
                log(f"step {step}  " + "  ".join(f"{name} {row[name]:.4f}" for name in names))


def verbalizer_command(own: argparse.Namespace) -> None:
    own.rslora = True
    model, tokenizer = load_for_supervision(own)
    meta, train, _ = rows_with_text(own, tokenizer)
    out = Path(own.out)
    log_steps(out, fit_verbalizer(model.train(), tokenizer, train, meta, own.inject_layer, own, print))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}; go on with --verbalizer {out}")


def reconstructor_command(own: argparse.Namespace) -> None:
    place = sidecar_of(own.data)
    name = own.model or parse_meta(load_mapping(place), place).model
    meta, train, held = rows_with_text(own, tokenizer_of(name))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(seed_of(own.seed, "reconstructor"))
    spec = Spec(name, meta.layer, meta.scale, meta.template, own.final_norm or meta.final_norm, own.load_4bit,
                own.lora_r, own.lora_alpha)
    critic, out = Critic(reconstructor.build(spec, device, dtype), own.lr, own.micro_tokens), Path(own.out)
    log_steps(out, fit_reconstructor(critic, train, own.steps, own.batch, own.lr, own.seed, print),
              names=("loss", "grad_norm"))
    critic.model.save(out)
    if held:
        given = [row.text for row in held]
        print(f"held-out FVE {held_fve(critic.model, given, held):.3f} from the texts, "
              f"{held_fve(critic.model, replace_words(given, 0), held):.3f} with their content words replaced, "
              f"e.g. {clipped(given[0])}")
    print(f"wrote {out}; go on with --reconstructor {out}")
