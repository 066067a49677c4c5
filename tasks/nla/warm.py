"""The supervised stages before GRPO in task `nla`, as commands, and the tiny models of its smoke run.

    python -m tasks.nla prepare …       activations and their sidecar from a model and its texts
    python -m tasks.nla sft …           the verbalizer: activation → text (the data's, else around the position)
    python -m tasks.nla reconstruct …   the reconstructor: text → activation
"""

from __future__ import annotations

import csv
import dataclasses
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import transformers

from data import Prompt, UserError, seed_of
from harness.flags import command_flags
from models import judging, supervised, tiny
from models.loading import best_device, pick_dtype
from models.supervised import (
    cosine_lr,
    load_for_supervision,
    random_batches,
    supervised_ids,
    supervised_loop,
    supervised_steps,
)
from models.tiny import TINY, cached, sources, tiny_tokenizer
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
SMOKE = {
    "documents": 1500,
    "layers": 3,
    "layer": 2,
    "inject_layer": 0,
    "base": {"steps": 400, "batch": 16, "lr": 5e-3},
    "verbalizer": {"steps": 300, "batch": 16, "lr": 5e-3},
    "reconstructor": {"steps": 400, "batch": 16, "lr": 3e-3},
}
TINY_RECIPE = Recipe(marker=MARKER, positions=4, prompt="say <INJECT> .", template="{explanation}\n:")
Log = Callable[[str], None]
Rows = Sequence[ActivationRow]


# ---- supervised stages
def wrapped(text: str) -> list[dict]:
    """The messages that answer with an explanation."""
    return [{"role": "assistant", "content": f"<explanation>{text}</explanation>"}]


def fit_verbalizer(model, tokenizer, rows: Rows, meta: Meta, own, log: Log) -> Iterator[float]:
    """Supervised steps on the rows' texts with their vectors injected; yields each step's loss.

    `own` has the stage's flags (steps, batch, micro_batch, lr, seed, context, inject_layer).
    """
    def encode(prompt: Prompt) -> list[int]:
        return tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)

    prompts, examples = [], []
    for row in rows:
        example = supervised_ids(tokenizer, row.prompt, wrapped(row.text))
        if len(example[0]) <= own.context:
            examples.append(example)
            prompts.append(Prompt(row.prompt, inject=row.vector))
    if not examples:
        raise UserError(f"no example fits into {own.context} tokens; raise --context")
    if len(examples) < len(rows):
        log(f"{len(rows) - len(examples)} examples of over {own.context} tokens are left out")
    injection = Injection(own.inject_layer, meta.marker_id, meta.left_id, meta.right_id, encode)
    injection.install(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def feed(some: list[int]) -> None:
        injection.feed([prompts[i] for i in some])

    yield from supervised_steps(model, examples, own, filler_of(tokenizer), log, feed)
    injection.feed([])


def fit_reconstructor(critic: Critic, rows: Rows, own, log: Log) -> Iterator[dict[str, float]]:
    """Regression steps from the rows' texts to their vectors, cosine learning rate; yields each step's numbers.

    `own` has the stage's flags (steps, batch, lr, seed).
    """
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

    def update(batch: list[int], lr: float) -> dict[str, float]:
        return critic.step([ids[i] for i in batch], gold[batch], lr)

    batches = random_batches(len(ids), own.batch, own.seed, "reconstruct")
    return supervised_loop(own.steps, cosine_lr(own.lr, own.steps, own.steps // 20), batches, update)


def held_fve(model: reconstructor.Reconstructor, texts: Sequence[str], rows: Rows) -> float:
    """FVE of texts for the rows' vectors, against the variance of these."""
    gold = torch.tensor(np.stack([row.vector for row in rows]))
    scale = model.spec.scale
    predictions = model.score([model.encode(text) for text in texts])
    variance, _ = baselines(gold, scale)
    return fve(mse(predictions, gold, scale).mean().item(), variance)


def filler_of(tokenizer) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


# ---- the smoke run's models
def tiny_folder(use_cache: bool, log: Log) -> Path:
    """Folder of the tiny verbalizer, with its base, reconstructor and activations in it: built once, then cached."""
    files = [__file__]
    for module in (activations, documents, preparation, injection, reconstructor, judging, supervised, tiny):
        files.append(module.__file__)
    return cached("tiny-nla", [SMOKE, *sources(files)], lambda folder: build_tiny(folder, log), use_cache)


def stage(name: str, **more) -> types.SimpleNamespace:
    """What a supervised stage of the smoke run is told in place of a command's flags."""
    recipe = SMOKE[name]
    return types.SimpleNamespace(**recipe, micro_batch=recipe["batch"], seed=0, **more)


def run_all(steps: Iterator) -> None:
    """Every step of a supervised stage."""
    for _ in steps:
        pass


def build_tiny(folder: Path, log: Log) -> None:
    """A language model of generated documents, activations of it, and both warm starts. The verbalizer's is short: it
    learns the form and the kind of place, and little of what the vector holds, which is left to GRPO."""
    torch.set_num_threads(1)  # at this size a second thread waits more than it works
    log("building the tiny model, its activations and both warm starts (about a minute and a half)")
    docs = documents.documents(SMOKE["documents"], 0)
    tokenizer = fit_tokenizer(docs)
    base = fit_base(docs, tokenizer, log)
    path = folder / "base"
    base.save_pretrained(path)
    tokenizer.save_pretrained(path)
    data = prepare(base, tokenizer, SMOKE["layer"], docs, folder / "activations.parquet", 0, TINY_RECIPE, "base")
    meta = read_meta(data, tokenizer)
    rows, _ = load_rows(data, 0, meta, 0.0)
    train, held = split_by_document(rows, HELD_SHARE, 0)
    fit_tiny_reconstructor(folder, meta, train, held, log)
    own = stage("verbalizer", context=512, inject_layer=SMOKE["inject_layer"])
    run_all(fit_verbalizer(base.train(), tokenizer, train, meta, own, quiet(log, "verbalizer")))
    base.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fit_tokenizer(docs: list[documents.Document]):
    """The tiny model's tokenizer, trained on the documents and on explanations of them."""
    captions = [doc.caption_at(end) for doc in docs for end in doc.cuts]
    texts = [doc.text for doc in docs]
    texts += [wrapped(text)[0]["content"] for text in captions[:2000]]
    tokenizer = tiny_tokenizer([*texts, "say . user assistant \n:"])
    tokenizer.add_special_tokens({"additional_special_tokens": [MARKER]})
    return tokenizer


def fit_base(docs: list[documents.Document], tokenizer, log: Log):
    """A three-layer Llama that predicts the documents' tokens."""
    torch.manual_seed(seed_of(0, "tiny nla"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = TINY | {"num_hidden_layers": SMOKE["layers"]}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **ids, **shape)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**ids)
    texts = [tokenizer.encode(doc.text) for doc in docs]
    examples = [(row, row) for row in texts]  # each token is a label
    run_all(supervised_steps(model.train(), examples, stage("base"), tokenizer.pad_token_id, quiet(log, "base")))
    return model.eval()


def fit_tiny_reconstructor(folder: Path, meta: Meta, train: Rows, held: Rows, log: Log) -> None:
    """The reconstructor on the base in `folder`, saved beside it; tells its FVE on held-out captions."""
    own = stage("reconstructor")
    spec = Spec(str(folder / "base"), meta.layer, meta.scale, meta.template)
    torch.manual_seed(seed_of(0, "tiny reconstructor"))
    critic = Critic(reconstructor.build(spec, torch.device("cpu"), torch.float32), own.lr)
    run_all(fit_reconstructor(critic, train, own, log))
    critic.model.spec = dataclasses.replace(spec, model="../base")  # the folder is renamed when it is whole
    critic.model.save(folder / "reconstructor")
    given = [row.text for row in held]
    replaced = [randomise_slots(text, 0) for text in given]
    log(f"  reconstructor: held-out FVE {held_fve(critic.model, given, held):.3f} from the captions, "
        f"{held_fve(critic.model, replaced, held):.3f} with their content words replaced")


def quiet(log: Log, name: str) -> Log:
    """Every hundredth step of a supervised stage."""
    def tell(text: str) -> None:
        if re.match(r"step \d*00/", text):
            log(f"  {name}: {text}")

    return tell


# ---- the commands
@dataclasses.dataclass(frozen=True)
class StageFlags:
    """Flags of both warm starts."""

    data: str  # activations (python -m tasks.nla prepare): the file or its folder
    out: str  # folder that is written
    steps: int = 1000  # optimizer steps
    batch: int = 32  # examples a step
    lora_r: int = 128  # LoRA rank; 0 trains all weights
    lora_alpha: float = 16  # LoRA scale, rank-stabilised: alpha / sqrt(r)
    load_4bit: bool = False  # nf4 base through bitsandbytes (CUDA)
    max_rows: int = 0  # read only the first so many rows; 0: all
    seed: int = 0  # order of the examples, and the adapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbalizerFlags(StageFlags):
    """Those of `sft`."""

    model: str  # the verbalizer's base
    lr: float = 1e-4  # peak learning rate, then cosine
    chat_template: str = ""  # Jinja file to use instead of the tokenizer's chat template
    trust_remote_code: bool = False  # run Python code that comes with the model
    inject_layer: int = 1  # decoder layer after which the vector is added
    micro_batch: int = 4  # examples in one forward and backward
    context: int = 2048  # examples over this many tokens are left out, counted
    rslora: ClassVar[bool] = True  # as the reconstructor's


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReconstructorFlags(StageFlags):
    """Those of `reconstruct`."""

    model: str = ""  # its base; empty: the sidecar's
    lr: float = 2e-4  # peak learning rate, then cosine
    micro_tokens: int = 8192  # most tokens in one forward and backward
    final_norm: bool = False  # apply the base's final norm to the state


def read_flags(cls: type, command: str, argv: list[str]):
    """A stage's flags, checked: UserError for what cannot work, before any model loads."""
    own = command_flags(cls, argv, f"python -m tasks.nla {command}")
    if min(own.steps, own.batch) < 1 or own.lora_r < 0 or not 0 < own.lr < 1 or own.max_rows < 0:
        raise UserError("--steps and --batch must be 1 or more, --lora-r and --max-rows 0 or more, --lr from 0 to 1")
    out = Path(own.out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {own.out} is not empty; give another folder")
    return own


def rows_with_text(own: StageFlags, tokenizer) -> tuple[Meta, Rows, Rows]:
    """The sidecar, and the training and held-out rows that have a text."""
    meta = read_meta(own.data, tokenizer)
    rows, notes = load_rows(data_file(own.data), own.max_rows, meta, 0.01)
    for note in notes:
        print("note:", note)
    train, held = split_by_document(rows, HELD_SHARE, 0)
    train = [row for row in train if row.text]
    held = [row for row in held if row.text]
    if not train:
        raise UserError(f"{own.data} has no column `text`, which is what a warm start learns from; make the file with "
                        "python -m tasks.nla prepare")
    return meta, train, held


def log_steps(out: Path, names: Sequence[str], rows: Iterator[Sequence[float]]) -> Iterator[Sequence[float]]:
    """The rows as they come, each a line of OUT/warm.csv."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "warm.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *names])
        for step, row in enumerate(rows, 1):
            table.writerow([step, *(f"{value:.6g}" for value in row)])
            yield row


def verbalizer_command(argv: list[str]) -> None:
    """`sft`: the verbalizer's warm start."""
    own = read_flags(VerbalizerFlags, "sft", argv)
    model, tokenizer = load_for_supervision(own)
    meta, train, _ = rows_with_text(own, tokenizer)
    out = Path(own.out)
    losses = fit_verbalizer(model.train(), tokenizer, train, meta, own, print)
    run_all(log_steps(out, ["loss"], ([loss] for loss in losses)))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"wrote {out}; go on with --verbalizer {out}")


def reconstructor_command(argv: list[str]) -> None:
    """`reconstruct`: the reconstructor, and how well it does on held-out texts."""
    own = read_flags(ReconstructorFlags, "reconstruct", argv)
    place = sidecar_of(own.data)
    name = own.model or parse_meta(load_mapping(place), place).model
    meta, train, held = rows_with_text(own, tokenizer_of(name))
    device = best_device()
    torch.manual_seed(seed_of(own.seed, "reconstructor"))
    spec = Spec(name, meta.layer, meta.scale, meta.template, own.final_norm or meta.final_norm, own.load_4bit,
                own.lora_r, own.lora_alpha)
    critic = Critic(reconstructor.build(spec, device, pick_dtype("auto", device)), own.lr, own.micro_tokens)
    out = Path(own.out)
    found = fit_reconstructor(critic, train, own, print)
    rows = log_steps(out, ["loss", "grad_norm"], ((row["loss"], row["grad_norm"]) for row in found))
    for step, (loss, norm) in enumerate(rows, 1):
        if step == 1 or step % 50 == 0:
            print(f"step {step}  loss {loss:.4f}  grad_norm {norm:.4f}")
    critic.model.save(out)
    if held:
        given = [row.text for row in held]
        print(f"held-out FVE {held_fve(critic.model, given, held):.3f} from the texts, "
              f"{held_fve(critic.model, replace_words(given, 0), held):.3f} with their content words replaced, "
              f"e.g. {clipped(given[0])}")
    print(f"wrote {out}; go on with --reconstructor {out}")
