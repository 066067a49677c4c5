"""Supervised warm start of task `physics`: a model learns to answer prompts with the true equation.

    python -m tasks.physics sft --model Qwen/Qwen2.5-1.5B-Instruct --load-4bit --out runs/sft

Writes a LoRA adapter for `--init-adapter`, or with --merge a whole model for `--sft-checkpoint`; the log is sft.csv.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
import types
from pathlib import Path

from data import UserError
from harness.flags import command_flags
from models.supervised import Example, load_for_supervision, supervised_ids, supervised_steps
from tasks.physics.prompts import true_answer
from tasks.physics.task import PhysicsTask, TrajectoryOptions


@dataclasses.dataclass(frozen=True)
class StageFlags:
    """Flags of the supervised stage itself."""

    model: str  # folder, hub id, .gguf file or package:NAME/FILE of a causal LM
    out: str  # folder for the adapter or the model
    steps: int = 200  # optimizer steps
    batch: int = 8  # examples a step
    micro_batch: int = 4  # examples in one forward and backward
    lr: float = 2e-4  # peak learning rate, cosine to 0 after a short warm-up
    lora_r: int = 16  # LoRA rank; 0 trains all weights
    lora_alpha: float = 32  # LoRA scale
    context: int = 2048  # examples over this many tokens are left out, counted
    rslora: bool = False  # rank-stabilised scale: alpha / sqrt(r)
    load_4bit: bool = False  # nf4 base through bitsandbytes (CUDA)
    chat_template: str = ""  # Jinja file to use instead of the tokenizer's chat template
    trust_remote_code: bool = False  # run Python code that comes with the model
    merge: bool = False  # write a whole model, not an adapter
    seed: int = 0  # order of the examples, and the adapter

    def check(self) -> None:
        """UserError for values that cannot work, before any model loads."""
        if self.model == "tiny":
            raise UserError("--model tiny is made by a run, which also warms it up: python train_grpo.py --preset "
                            "physics smoke; here, give a folder or a hub id")
        if min(self.steps, self.batch, self.micro_batch) < 1 or self.lora_r < 0 or not 0 < self.lr < 1:
            raise UserError("--steps, --batch and --micro-batch must be 1 or more, --lora-r 0 or more, --lr from 0 to "
                            "1")
        if self.load_4bit and (self.lora_r == 0 or self.merge):
            raise UserError("--load-4bit trains an adapter only: give --lora-r over 0 and leave out --merge (GRPO's "
                            "--save-method merged_16bit merges at the end)")
        out = Path(self.out)
        if out.exists() and any(out.iterdir()):
            raise UserError(f"--out {self.out} is not empty; give another folder")


@dataclasses.dataclass(frozen=True)
class SftFlags(TrajectoryOptions, StageFlags):
    """Those of the stage, then the task's own that say what the prompts show."""


def read_flags(argv: list[str]) -> SftFlags:
    own = command_flags(SftFlags, argv, "python -m tasks.physics sft", __doc__)
    own.check()
    return own


def make_task(own: SftFlags) -> PhysicsTask:
    """The task with this command's flags and the task's defaults; no model is loaded for it."""
    core = {
        "data": "",
        "eval_data": "",
        "eval_size": 0,
        "limit": 0,
        "group": 1,
        "max_turns": 1,
    }
    defaults = dataclasses.asdict(PhysicsTask.Options())
    return PhysicsTask(types.SimpleNamespace(**core | defaults | dataclasses.asdict(own) | {"model": "tiny"}))


def main(argv: list[str]) -> None:
    try:
        train(read_flags(argv))
    except UserError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)


def train(own: SftFlags) -> None:
    """The supervised stage: examples, steps (each a line of OUT/sft.csv), and what is saved."""
    task = make_task(own)
    model, tokenizer = load_for_supervision(own)
    examples = fitting_examples(task, tokenizer, own.context)
    too_long = len(task.train) - len(examples)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{len(examples)} examples, {too_long} too long, {trained:,} trained weights", flush=True)
    out = Path(own.out)
    out.mkdir(parents=True, exist_ok=True)
    losses = supervised_steps(model.train(), examples, own, tokenizer.pad_token_id, print)
    with (out / "sft.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", "loss"])
        for step, loss in enumerate(losses, 1):
            table.writerow([step, f"{loss:.6g}"])
    if own.merge and own.lora_r:
        model = model.merge_and_unload()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    whole = own.merge or not own.lora_r
    print(f"wrote {out}; go on with --{'sft-checkpoint' if whole else 'init-adapter'} {out}")


def fitting_examples(task: PhysicsTask, tokenizer, context: int) -> list[Example]:
    """A training example a prompt, those of over `context` tokens left out. UserError where none is left."""
    examples = []
    for prompt in task.train:
        answer = {"role": "assistant", "content": true_answer(prompt.meta["instance"])}
        example = supervised_ids(tokenizer, prompt.messages, [answer])
        if len(example[0]) <= context:
            examples.append(example)
    if not examples:
        raise UserError(f"no example fits into {context} tokens; raise --context")
    return examples
