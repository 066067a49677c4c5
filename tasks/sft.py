"""Supervised warm start of task `physics`: a model learns to answer prompts with the true equation.

    python -m tasks.physics sft --model Qwen/Qwen2.5-1.5B-Instruct --load-4bit --out runs/sft

Writes a LoRA adapter for `--init-adapter`, or with --merge a whole model for `--sft-checkpoint`; the log is sft.csv.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import sys
import types
import typing
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from data import UserError, rng_of
from tasks.loading import load_pretrained, load_tokenizer, package_file
from tasks.physics import PhysicsTask, true_answer
from tasks.tiny import supervised_ids

OWN = "system_ids heldout_systems instances_per_system noise table_rows prompt_style".split()  # of the task's flags
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_flags(argv: list[str]) -> argparse.Namespace:
    """This command's flags and the task's own, with the task's defaults."""
    parser = argparse.ArgumentParser(prog="python -m tasks.physics sft", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="folder, hub id, .gguf file or package:NAME/FILE of a causal LM")
    add("--out", required=True, help="folder for the adapter or the model")
    add("--steps", type=int, default=200, help="optimizer steps [200]")
    add("--batch", type=int, default=8, help="examples a step [8]")
    add("--micro-batch", type=int, default=4, help="examples in one forward and backward [4]")
    add("--lr", type=float, default=2e-4, help="peak learning rate, cosine to 0 after a short warm-up [2e-4]")
    add("--lora-r", type=int, default=16, help="LoRA rank; 0 trains all weights [16]")
    add("--lora-alpha", type=float, default=32, help="LoRA scale [32]")
    add("--context", type=int, default=2048, help="examples over this many tokens are left out, counted [2048]")
    add("--rslora", action="store_true", help="rank-stabilised scale: alpha / sqrt(r)")
    add("--load-4bit", action="store_true", help="nf4 base through bitsandbytes (CUDA)")
    add("--chat-template", default="", help="Jinja file to use instead of the tokenizer's chat template")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    add("--merge", action="store_true", help="write a whole model, not an adapter")
    add("--seed", type=int, default=0, help="order of the examples, and the adapter [0]")
    hints = typing.get_type_hints(PhysicsTask.Options)
    for field in dataclasses.fields(PhysicsTask.Options):
        if field.name in OWN:
            several = typing.get_origin(hints[field.name]) is tuple
            add("--" + field.name.replace("_", "-"), default=field.default, nargs="*" if several else None,
                type=str if several or type(field.default) is str else type(field.default), help=f"[{field.default}]")
    own = parser.parse_args(argv)
    if own.model == "tiny":
        raise UserError("--model tiny is made by a run, which also warms it up: python train_grpo.py --preset physics "
                        "smoke; here, give a folder or a hub id")
    if min(own.steps, own.batch, own.micro_batch) < 1 or own.lora_r < 0 or not 0 < own.lr < 1:
        raise UserError("--steps, --batch and --micro-batch must be 1 or more, --lora-r 0 or more, --lr from 0 to 1")
    if own.load_4bit and (own.lora_r == 0 or own.merge):
        raise UserError("--load-4bit trains an adapter only: give --lora-r over 0 and leave out --merge (GRPO's "
                        "--save-method merged_16bit merges at the end)")
    if Path(own.out).exists() and any(Path(own.out).iterdir()):
        raise UserError(f"--out {own.out} is not empty; give another folder")
    return own


def make_task(own: argparse.Namespace) -> PhysicsTask:
    defaults = {field.name: field.default for field in dataclasses.fields(PhysicsTask.Options)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(own).items()}
    core = {"data": "", "eval_data": "", "eval_size": 0, "limit": 0, "group": 1, "max_turns": 1, "model": "tiny"}
    return PhysicsTask(types.SimpleNamespace(**{**core, **defaults, **given, "model": "tiny"}))


def load(own: argparse.Namespace):
    """(model, tokenizer): the trained weights are float32, the others bfloat16 on CUDA."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda" and own.lora_r and torch.cuda.is_bf16_supported()
    path = package_file(own.model) if own.model.startswith("package:") else own.model
    tokenizer = load_tokenizer(path, own)
    model = load_pretrained(path, own, device, torch.bfloat16 if half else torch.float32)
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {own.model} has no chat template; take an instruct model or give "
                        "--chat-template")
    torch.manual_seed(own.seed)
    if own.lora_r:
        import peft

        present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        targets = [name for name in TARGETS if name in present] or "all-linear"
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=own.lora_r, lora_alpha=own.lora_alpha, target_modules=targets, lora_dropout=0.0,
            use_rslora=own.rslora, task_type="CAUSAL_LM"))
        model.peft_config["default"].base_model_name_or_path = path
    return model, tokenizer


def train(model, examples: list[tuple[list[int], list[int]]], own: argparse.Namespace, pad: int, say, feed=None):
    """Cross-entropy on the answers' tokens (labels not -100), a mean over the tokens of each step. Yields the loss.

    `feed` is told the indices of the examples of each forward before it.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=own.lr, weight_decay=0.0)
    order: list[int] = []
    for step in range(own.steps):
        while len(order) < own.batch:
            order += rng_of(own.seed, "sft", step, len(order)).permutation(len(examples)).tolist()
        picked, order = order[: own.batch], order[own.batch :]
        warm = min(1.0, (step + 1) / max(1, own.steps // 20))
        optimizer.param_groups[0]["lr"] = own.lr * warm * 0.5 * (1 + math.cos(math.pi * step / own.steps))
        spoken, total = sum(label != -100 for i in picked for label in examples[i][1]), 0.0
        for some in (picked[i : i + own.micro_batch] for i in range(0, len(picked), own.micro_batch)):
            ids, labels = (pad_sequence([torch.tensor(examples[i][k]) for i in some], batch_first=True,
                                        padding_value=filler).to(model.device) for k, filler in ((0, pad), (1, -100)))
            if feed:
                feed(some)
            logits = model(input_ids=ids).logits[:, :-1]  # right padding: causal attention never sees it
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / spoken
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 10 == 0:
            say(f"step {step + 1}/{own.steps}  loss {total:.4f}")
        yield total


def main(argv: list[str]) -> None:
    try:
        own = read_flags(argv)
        task = make_task(own)
        model, tokenizer = load(own)
        dialogues = [(prompt.messages, [{"role": "assistant", "content": true_answer(prompt.meta["instance"])}])
                     for prompt in task.train]
        every = [supervised_ids(tokenizer, *dialogue) for dialogue in dialogues]
        examples = [example for example in every if len(example[0]) <= own.context]
        if not examples:
            raise UserError(f"no example fits into {own.context} tokens; raise --context")
        print(f"{len(examples)} examples, {len(every) - len(examples)} too long, "
              f"{sum(p.numel() for p in model.parameters() if p.requires_grad):,} trained weights", flush=True)
        out = Path(own.out)
        out.mkdir(parents=True, exist_ok=True)
        with (out / "sft.csv").open("w", newline="") as file:
            log = csv.writer(file, lineterminator="\n")
            log.writerow(["step", "loss"])
            for step, loss in enumerate(train(model.train(), examples, own, tokenizer.pad_token_id, print), 1):
                log.writerow([step, f"{loss:.6g}"])
        model = model.merge_and_unload() if own.merge and own.lora_r else model
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        print(f"wrote {out}; go on with --{'sft-checkpoint' if own.merge or not own.lora_r else 'init-adapter'} {out}")
    except UserError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
