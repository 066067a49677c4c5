"""Supervised warm start of task `physics`: a model learns to answer prompts with the true equation.

    python -m tasks.physics sft --model Qwen/Qwen2.5-1.5B-Instruct --load-4bit --out runs/sft

Writes a LoRA adapter for `--init-adapter`, or with --merge a whole model for `--sft-checkpoint`; the log is sft.csv.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
import types
import typing
from pathlib import Path

from data import UserError
from models.supervised import load_for_supervision, supervised_ids, supervised_steps
from tasks.physics.prompts import true_answer
from tasks.physics.task import PhysicsTask

OWN = "system_ids heldout_systems instances_per_system noise table_rows prompt_style".split()  # of the task's flags


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


def main(argv: list[str]) -> None:
    try:
        own = read_flags(argv)
        task = make_task(own)
        model, tokenizer = load_for_supervision(own)
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
            for step, loss in enumerate(supervised_steps(model.train(), examples, own, tokenizer.pad_token_id, print), 1):
                log.writerow([step, f"{loss:.6g}"])
        model = model.merge_and_unload() if own.merge and own.lora_r else model
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        print(f"wrote {out}; go on with --{'sft-checkpoint' if own.merge or not own.lora_r else 'init-adapter'} {out}")
    except UserError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)
