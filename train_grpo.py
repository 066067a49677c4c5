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
import dataclasses
import errno
import inspect
import json
import math
import resource
import shutil
import sys
import tempfile
import time
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

import engine
import plot_run
from data import (
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
from engine import Row, fill_logps, micro_batches, pad, rollout, token_logps
from eval import evaluate, judge
from rewards import length_penalty
from tasks import async_rollouts, attention, off_policy, publish, turns
from tasks.engine_choice import choose_engine, measure_budget
from tasks.flags import (
    build_parser,
    changed_flags,
    check_type,
    field_types,
    flag_of,
    layer,
    list_presets,
    preset_layers,
    print_config,
)
from tasks.loading import load_pretrained, load_tokenizer, or_user_error, package_file
from tasks.optimizer import Optimizer
from tasks.run_folder import (
    Console,
    Run,
    advice,
    best_checkpoint,
    best_saved,
    check_files,
    checkpoints,
    config_json,
    console_line,
    describe_run,
    first_to_last,
    folder_exists,
    hold,
    is_run,
    is_whole,
    newest_checkpoint,
    read_run_config,
    run_evals,
    run_rows,
    strict_json,
    try_to_save,
    write_atomic,
    write_folder,
)
from tasks.svd_adapter import SVDModel, saved_base
from tasks.tiny import tiny_model

transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
ROOT = Path(__file__).resolve().parent
SaveMethod = Literal["adapter", "lora", "merged", "merged_16bit", "merged_4bit"]


# ------------------------------------------------------------------------------------------------ flags and presets
@dataclasses.dataclass(frozen=True)
class Args(async_rollouts.Flags, off_policy.Flags):
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
    engine: Literal["auto", "fast", "generate", "http"] = "auto"  # auto: fast, where a check agrees; http: a server
    server: str = ""  # http engine: URL of the vLLM or SGLang server that samples
    server_model: str = ""  # its name of the model; empty: the only one
    server_folder: str = ""  # folder that both see, for the weights; empty: a temporary one
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
RANGES: dict[str, tuple[float, float]] = async_rollouts.RANGES | off_policy.RANGES | {
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
    deterministic trust_remote_code cache server server_model server_folder
    out name save_method push_to_hub hub_checkpoint_repo report_to""".split())


def args_class(task: str) -> type:
    """`Args` joined with the flags of a task."""
    options = load_task(task).Options
    if not dataclasses.is_dataclass(options):
        raise UserError(f"--task {task}: its Options must be a dataclass, @dataclasses.dataclass(frozen=True)")
    clash = {f.name for f in dataclasses.fields(options)} & {f.name for f in dataclasses.fields(Args)}
    if clash:
        raise UserError(f"--task {task}: its Options repeat flags of train_grpo.py: {', '.join(sorted(clash))}")
    return dataclasses.make_dataclass("Args", [], bases=(options, Args), frozen=True)


def resolve_args(argv: list[str], base: dict | None = None) -> tuple[Any, dict[str, str], argparse.Namespace]:
    """Resolved flags, where each came from, and the command's own switches.

    Order: defaults < presets from left to right < `base` (a run's config on resume) < flags.
    """
    # the task decides which other flags there are
    first, _ = build_parser(Args, Args, complete=False).parse_known_args(argv)
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
    types, command = field_types(cls), build_parser(cls, Args, __doc__.split("\n\n")[0]).parse_args(argv)
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
    if (args.engine == "http") != bool(args.server):
        raise UserError("--engine http and --server URL go together: a server samples, or the local engine does")
    if "/" in args.name or args.name in (".", ".."):
        raise UserError(f"{name('name')} is a folder's name under --out, without slashes")
    async_rollouts.check(args, name)
    off_policy.check(args, name)


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
    if args.model.startswith("package:"):
        return package_file(args.model)
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
    plans: Any = attention  # what the fast engine attends by
    reply_ids: Any = turns.reply_ids  # the ids that show it a reply
    flex: bool = False
    server: Any = None  # samples in place of the engine
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
            after = tokenizer.encode(text.rpartition(mark)[2].lstrip(), add_special_tokens=False)
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
    policy.engine = choose_engine(policy, engine, say)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and not any(".reference." in n for n in trained), "the policy is trained and its anchor is not"
    return policy


def add_adapter(hf, args, base: str, start: str | None):
    """A fresh LoRA, or the one at `start` with a frozen second copy named `reference` as the KL anchor."""
    import peft

    from tasks.lora import fuse_lora

    if start:
        model = or_user_error(start, lambda: peft.PeftModel.from_pretrained(hf, start, is_trainable=True))
        or_user_error(start, lambda: model.load_adapter(start, adapter_name="reference", is_trainable=False))
        model.set_adapter("default")
        return fuse_lora(in_one_order(model))
    targets = args.lora_targets[0] if args.lora_targets == ("all-linear",) else list(args.lora_targets)
    config = peft.LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, use_rslora=args.rslora, target_modules=targets,
                             lora_dropout=0.0, task_type="CAUSAL_LM")
    try:
        model = peft.get_peft_model(hf, config)  # LoRA weights are float32 whatever the base is
    except ValueError as error:
        raise UserError(f"--lora-targets {' '.join(args.lora_targets)} do not fit this model: {error}") from error
    model.peft_config["default"].base_model_name_or_path = base
    return fuse_lora(in_one_order(model))


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


def rows_to_train(groups: list[Group], args, now: int = 0) -> list[Row]:
    """The rows of one optimizer step of the version `now`, each with its share of the loss; older ones with less of it.

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
        row.weight *= args.stale_discount ** off_policy.age_of(row.rollout, now)
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
    policy.task.on_logps(rollouts, new.detach())
    mask = pad([r.mask for r in rollouts], 0, real, device)
    sampler = pad([r.logp for r in rollouts], 0.0, real, device)
    weight = torch.tensor([row.weight for row in batch], dtype=real, device=device)[:, None]
    advantage = torch.tensor([row.advantage for row in batch], dtype=real, device=device)
    old = start = off_policy.old_logps(batch, new)
    if args.decoupled_ppo:
        ages = off_policy.token_ages(rollouts, policy.version, real, device)
        start, trust = off_policy.decouple(new, old, ages, args.behaviour_cap, args.m2_threshold)
    loss, ratio = policy_loss(new, start, sampler, advantage, mask, args)
    loss = loss * trust if args.decoupled_ppo else loss
    if batch[0].uncertain is not None:
        loss = loss * pad([row.uncertain for row in batch], False, real, device)
    share = (loss * mask * weight).sum()
    total, ref = share, None
    if batch[0].ref is not None:
        ref = torch.nn.utils.rnn.pad_sequence([row.ref for row in batch], batch_first=True)
        kl = kl_divergence(new, ref, args.kl)
        held = torch.tensor([row.anchored for row in batch], dtype=real, device=device)[:, None]
        total = total + args.beta * (kl * mask * weight * held).sum()
        sums.add(kl=(kl.detach() * mask).sum())
    if args.beta_control != "off":
        sums.add(**off_policy.moved(new, old, ref, mask))
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


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error))


def update(policy: Policy, optimizer: Optimizer, groups: list[Group], args, step: int, state: dict, say) -> dict:
    """All optimizer steps of one batch; returns what metrics.csv shows of them.

    `state["micro_tokens"]` is the current micro-batch budget; out of memory halves it for the rest of the run.
    """
    temperature, sums, norms, extra, skipped, moves = temperature_at(step, args), Sums(), [], {}, 0, []
    if args.beta_control != "off":
        args = dataclasses.replace(args, beta=state["beta_control"]["beta"])
    cloned, coefficient = off_policy.clones(policy, engine, [group.prompt for group in groups], args, step)
    batches = [rows_to_train(minibatch(groups, args, step, epoch, part), args, policy.version)
               for epoch in range(args.inner_epochs) for part in range(args.minibatches)]
    with_smaller_batches(lambda: anchor(policy, batches, args, temperature, state["micro_tokens"]), state, say)
    for batch in (batch for batch in batches if batch or cloned):
        result = with_smaller_batches(lambda rows=batch: gradients(
            policy, optimizer, rows, args, temperature, state["micro_tokens"], cloned, coefficient), state, say)
        extra = policy.task.on_gradients(policy)
        norm = optimizer.clip(args.max_grad_norm)
        if off_policy.too_far(result, state, args, moves):
            pass  # a hard stop: weights and moments stay as they are
        elif math.isfinite(norm) and math.isfinite(result["loss"]):
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
    more = off_policy.metrics(sums, max(1, len(norms)), moves, args, coefficient)
    return update_metrics(sums, norms, skipped) | more | extra


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
        if off_policy.age_of(row.rollout, policy.version):  # the policy that wrote it is gone: its word is what is left
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


def gradients(policy: Policy, optimizer: Optimizer, rows: list[Row], args, temperature: float, budget: int,
              cloned: list[Row] = (), coefficient: float = 0.0) -> Sums:
    """Accumulate the gradient of one optimizer step over its micro-batches, and of what is imitated beside it."""
    optimizer.zero()
    sums = Sums()
    policy.model.train(args.gradient_checkpointing)  # checkpointing works in training mode only; dropout is off
    parts = [[rows[i] for i in part] for part in policy.task.split([row.rollout for row in rows])]
    for part in parts or [rows]:
        for batch in micro_batches(part, budget, policy.engine == "fast"):
            micro_loss(policy, batch, args, temperature, sums).backward()
        policy.task.on_part(policy)
    for batch in micro_batches(cloned, budget, policy.engine == "fast"):
        loss = off_policy.cloning_loss(policy, engine, batch)
        (coefficient * loss).backward()
        sums.add(bc_loss=loss.detach(), loss=coefficient * loss.detach())
    policy.model.eval()
    return sums


def update_metrics(sums: Sums, norms: list[float], skipped: int) -> dict[str, float | None]:
    """Means over tokens and optimizer steps; None where nothing was trained."""
    tokens, updates = sums.get("tokens"), max(1, len(norms))

    def mean(key: str) -> float | None:
        return sums[key] / tokens if tokens and key in sums else None

    return {
        "loss": sums["loss"] / updates if "loss" in sums else None,
        "policy_loss": sums["policy_loss"] / updates if tokens else None,
        "kl": mean("kl"), "clip_low_share": mean("clip_low"), "clip_high_share": mean("clip_high"),
        "ratio_mean": mean("ratio"), "ratio_max": sums.get("ratio_max"), "logp_gap": mean("gap"),
        "grad_norm": float(np.mean(norms)) if norms else None, "skipped_updates": skipped,
    }


# ------------------------------------------------------------------------------------------------ the run folder
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


def checkpoint_bytes(policy: Policy, optimizer: Optimizer) -> int:
    """What a checkpoint takes, about: two float32 moments of each trained weight, masters, and the model's own."""
    trained = sum(master.numel() * (8 if p is master else 12) for p, master in optimizer.pairs)
    return trained + sum(p.numel() * p.element_size() for p in policy.model.parameters()
                         if p.requires_grad or policy.model is policy.hf)


def made_with(args) -> dict:
    return json.loads(json.dumps({key: getattr(args, key) for key in sorted(FIXED | {"model", "seed"})}))


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

    @property
    def whole(self) -> float:
        return time.perf_counter() - self.start

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


def collect(policy: Policy, task: Task, args, step: int, clock: Clock, stop: Stop, ahead=None
            ) -> tuple[list[Group], list[Group]]:
    """The step's batch of P groups, and all groups that were sampled for it.

    With --dynamic-sampling, constant groups are replaced from new prompts; they come back only to fill the batch.
    """
    kept: list[Group] = []
    sampled: list[Group] = []
    for turn in range(1 + args.dynamic_sampling):
        with clock("rollout"):
            n, temperature = args.prompts - len(kept), temperature_at(step, args)
            rolled = (ahead.take(n, step, temperature, stop.check) if ahead else
                      policy.sample(task.prompts(n), task.live(), temperature, step, turn))
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
    entropies = [e for r, _ in pairs for e, m in zip(r.entropy, r.mask, strict=True) if m and not math.isnan(e)]
    stds = [std for std in (group_std(g, args) for g in sampled) if std is not None]
    advantages = [a for g in batch for a in g.advantages if not math.isnan(a)]

    def of(fn, values):
        return float(fn(values)) if values else None

    row = {"reward_mean": of(np.mean, rewards), "reward_std": of(np.std, rewards), "reward_min": of(min, rewards),
           "reward_max": of(max, rewards), "reward_std_group": of(np.mean, stds), "accuracy": of(np.mean, verdicts),
           "tokens": sum(lengths), "length_mean": of(np.mean, lengths), "length_max": max(lengths, default=0),
           "truncated_share": of(np.mean, [r.truncated for r, _ in pairs]), "unscorable": len(pairs) - len(rewards),
           "entropy": of(np.mean, entropies), "groups_sampled": len(sampled),
           "groups_constant": sum(is_constant(g, args) and group_std(g, args) is not None for g in sampled),
           "groups_dropped": sum(group_std(g, args) is None for g in sampled),
           "groups_used": sum(any(a != 0 and not math.isnan(a) for a in g.advantages) for g in batch),
           "advantage_mean": of(np.mean, advantages), "advantage_std": of(np.std, advantages)}
    names = sorted({name for _, s in pairs for name in s.parts})
    return row | {f"part_{name}": of(np.mean, [s.parts[name] for _, s in pairs if name in s.parts]) for name in names}


def run_evaluation(policy: Policy, task: Task, args, step: int) -> tuple[dict, list[dict]]:
    """Metrics and answers on the held-out prompts; the same seeds at every step."""
    def sample(prompts, n, temperature, key):
        return policy.sample(prompts, n, temperature, key)

    metrics, records, _ = evaluate(task, sample, task.heldout(), args.eval_k, args.eval_temperature)
    return metrics, records


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
    off_policy.check_task(args, load_task(args.task))
    task = load_task(args.task)(args)
    for note in task.notes:
        say(note)
    policy = load_policy(args, task, say)
    dropped = task.keep(policy.fits)
    if dropped:
        say(f"{dropped} prompts leave no room for {args.max_new} new tokens (context {policy.context}"
            f"{f', --max-prompt {args.max_prompt}' if args.max_prompt else ''}) and were dropped")
    micro_tokens = args.micro_tokens or (1536 if policy.device.type == "cpu" else measure_budget(policy, engine, say))
    optimizer = Optimizer(policy.model, args)
    state = {"step": 0, "task": task.state_dict(), "baseline": None, "micro_tokens": micro_tokens,
             "bad_in_a_row": 0, "flat_in_a_row": 0, "best": None, "tokens_total": 0, "seconds": 0.0,
             "beta_control": off_policy.new_control(args.beta), "ahead": None}
    if command.resume:
        run = Run(folder, task, args, say, lock)
        resumed = newest_checkpoint(folder, say)
        if resumed:
            state |= load_checkpoint(policy, optimizer, resumed, command.resume_override)
        prepare_resume(run, args, config, state)
        began -= state["seconds"]
    else:
        run = Run.create(args, task, config, command.overwrite, say)
    task.folder = run.folder
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
    ahead = async_rollouts.Ahead(policy, task, args, say, state["ahead"]).start() if args.async_workers else None
    rows, evals, warned = run_rows(run.folder), run_evals(run.folder), {}
    status, code, whole, due = "done", 0, True, False
    say.bar = tqdm(total=args.steps, initial=state["step"], disable=None, leave=False)
    try:
        if args.eval and not args.skip_initial_eval and not evals and state["step"] == 0:
            metrics, records = run_evaluation(policy, task, args, 0)
            run.log_eval(0, metrics, records)
            evals.append({"step": 0, **metrics})
            known = [f"{k} {metrics[k]:.3f}" for k in ("reward", "accuracy") if metrics[k] is not None]
            say(f"before training: held-out {', '.join(known)}" if known else "nothing is held out to evaluate on")

        for step in range(state["step"] + 1, args.steps + 1):
            clock, failure = Clock(), None
            stop.check()

            # 1-3. sample P prompts, roll out G completions of each, score them
            batch, sampled = collect(policy, task, args, step, clock, stop, ahead)

            # 4. advantages; groups without any leave here and cost no forward
            set_advantages(batch, args, state["baseline"])

            # 5-7. micro-batches by token budget, task's gradient hook, guard, clip, step
            row = step_metrics(batch, sampled, args) | {"filtered_mass": policy.filtered_mass}
            whole = args.inner_epochs * args.minibatches == 1  # else a failure may leave the batch half applied
            with clock("update"):
                row |= update(policy, optimizer, batch, args, step, state, say)
            if ahead and step % args.policy_sync_interval == 0:
                ahead.publish()
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
            if ahead:
                state["ahead"], row = ahead.state_dict(), row | ahead.metrics()
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
                    "lr": lr_at(step, args), "temperature": temperature_at(step, args),
                    **{f"seconds_{k}": v for k, v in clock.seconds.items()},
                    "tokens_per_second": row["tokens"] / max(1e-9, clock.whole if ahead else clock.seconds["rollout"]),
                    "peak_memory_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None}
            rows.append(row)
            run.log(row)
            if args.save_completions:
                run.save_completions(step, sampled)
            whole = True
            reporter.log(row)
            say(console_line(row, args, task.console))
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
        if ahead:
            ahead.close()
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
