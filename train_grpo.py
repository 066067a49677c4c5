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

import dataclasses
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars; ours says for itself where it wants to be
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what --deterministic needs on CUDA
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from collections.abc import Sequence

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data import Group, Prompt, Rollout, Score, Task, TrainingFailed, UserError, load_task, rng_of
from engine.asynchronous import RolloutQueue
from engine.autotune import measure_budget
from engine.logps import TrainRow, fill_logps, micro_batches, pad, token_logps
from eval import evaluate, mean
from harness.checkpoints import Saver, keep_best, load_checkpoint, newest_checkpoint, prepare_resume, room_notes
from harness.columns import metric_columns
from harness.console import Clock, Console, first_to_last
from harness.flags import as_written, changed_flags, dry_run_args, fixed, flag, flag_of, free, printed, resolve_args
from harness.folder import Run, open_folder
from harness.scoring import judge
from harness.stop import Stop, run_command, until_the_end
from models.optimizer import Optimizer, lr_at
from models.policy import Policy, is_out_of_memory, load_policy
from models.supervised import worked_examples
from rewards import length_penalty

transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
ABOUT = __doc__.split("\n\n")[0]
SaveMethod = Literal["adapter", "lora", "merged", "merged_16bit", "merged_4bit"]


# ------------------------------------------------------------------------------------------------ flags and presets
@dataclasses.dataclass(frozen=True)
class Args:
    """Every flag of the script: one typed field each, its comment is its --help. A task adds its own `Options`.

    Smallest and largest value of a number, both allowed, stand behind its default (else they are 0 and 1e12). A resume
    may change what is `free`, which is logged, and cannot change what is `fixed`: the checkpoint has no other.
    Any other flag would make it another run, and needs --resume-override.
    """

    # run
    task: str = fixed("math")  # registered task, or path/to/file.py:Class
    name: str = free("")  # run folder under --out; empty: task and time
    out: str = free("runs")  # folder that holds the run folders
    seed: int = flag(0, -1e12, 1e12)  # the only seed: data order, sampling, adapter, everything
    steps: int = free(200)  # training steps
    deterministic: bool = free(False)  # deterministic CUDA kernels (the CPU always is)
    # data
    data: str = ""  # .jsonl, .json or .parquet file, or hub id[:config]; empty: the task's built-in problems
    eval_data: str = ""  # held-out file or hub id; empty: the hub's test split, or a part cut from --data
    eval_size: int = 100  # held-out prompts that are used
    limit: int = 0  # use only the first so many training prompts; 0: all
    max_bad_records: float = free(0.01, 0, 1)  # share of unusable records over which the run refuses to start
    reward: tuple[str, ...] = ()  # my_rewards.py:fn[=weight] with TRL's signature, repeatable (implies --task custom)
    # model
    model: str = "tiny"  # folder, hub id, .gguf file, adapter folder, package:NAME/FILE, or tiny (built in)
    adapter: Literal["lora", "svd", "none"] = fixed("lora")  # train a LoRA, singular values, or all weights
    lora_r: int = fixed(16, 1, 4096)  # LoRA rank
    lora_alpha: float = fixed(32.0, 1e-6, 1e6)  # LoRA scale: alpha / r, or alpha / sqrt(r) with --rslora
    lora_targets: tuple[str, ...] = fixed(("all-linear",))  # module names that get a LoRA
    rslora: bool = fixed(False)  # rank-stabilised LoRA scaling
    load_4bit: bool = False  # nf4 base through bitsandbytes (CUDA)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the base weights; auto: bfloat16 on CUDA, else float32
    device: Literal["auto", "cuda", "cpu", "mps"] = free("auto")  # where to run
    attn: Literal["auto", "eager", "sdpa", "flash_attention_2"] = free("auto")  # attention; auto: the fastest installed
    chat_template: str = ""  # Jinja file to use instead of the tokenizer's chat template
    trust_remote_code: bool = free(False)  # run Python code that comes with the model
    gradient_checkpointing: bool = free(False)  # recompute activations in the backward pass
    cache: bool = free(True)  # keep the warm-started tiny model in the user's cache folder
    # rollout
    prompts: int = flag(8, 1, 1e6)  # prompts a step (P)
    group: int = flag(8, 1, 1e6)  # completions a prompt (G)
    max_new: int = flag(256, 1, 1e6)  # token limit of a completion (of each turn)
    max_turns: int = flag(1, 1, 1000)  # assistant turns a rollout may take where the task replies
    max_prompt: int = 0  # token limit of a prompt; 0: what the context leaves
    context: int = 0  # token limit of prompt and completion; 0: the model's
    temperature: float = flag(1.0, 0.001, 100)  # sampling temperature
    temperature_end: float = free(-1.0, -1, 100)  # temperature at the last step, reached linearly; negative: stays
    top_p: float = flag(1.0, 1e-6, 1)  # nucleus; below 1 the trained ratio is not the sampler's (warned)
    top_k: int = 0  # 0: all tokens
    engine: Literal["auto", "fast", "generate", "http"] = free("auto")  # auto: fast, if a check agrees; http: a server
    server: str = free("")  # http engine: URL of the vLLM or SGLang server that samples
    server_model: str = free("")  # its name of the model; empty: the only one
    server_folder: str = free("")  # folder that both see, for the weights; empty: a temporary one
    cuda_graphs: bool = free(False)  # fast engine: replay a decoding step as a CUDA graph
    packed_attention: Literal["auto", "blocks", "flex"] = free("auto")  # of the update; auto: FlexAttention on CUDA
    rollout_tokens: int = free(262_144, 1, 1e12)  # most tokens (rows x length) in one generate call
    dynamic_sampling: int = flag(0, 0, 1000)  # rounds that refill constant groups with new prompts
    # asynchronous rollouts
    async_workers: int = flag(0, 0, 64)  # threads that roll out ahead of the trainer; 0: each step rolls out its own
    async_queue: int = 0  # most groups on their way and waiting; 0: what --max-version-gap can use
    async_random: float = flag(0.5, 0, 1)  # share of the workers' prompts that is drawn at random, not in order
    max_version_gap: int = 1  # groups of weights that are more versions (steps) older are dropped
    policy_sync_interval: int = flag(1, 1, 1e9)  # steps after which the workers get the trained weights
    # advantages
    advantage: Literal["group", "baseline", "mixed"] = "group"  # reward minus group mean, minus running mean, or both
    scale_rewards: Literal["group", "batch", "none"] = "group"  # what a group advantage is divided by
    advantage_clip: float = 0.0  # largest absolute advantage; 0: unlimited
    baseline_decay: float = flag(0.98, 0, 1)  # of the running mean of rewards
    baseline_scale: float = flag(1.0, 1e-09, 1e9)  # divisor of (reward - running mean)
    mixed_std: float = 0.1  # mixed: groups whose reward std is under this fall back
    mixed_fallback: Literal["zero", "baseline", "positive_baseline"] = "zero"  # mixed: what those groups get
    min_group_std: float = 0.0  # groups whose reward std is under this count as constant
    kl_on_constant_groups: bool = False  # constant groups stay in the batch for their KL gradient
    overlong: Literal["drop", "mask", "keep", "soft"] = "drop"  # truncated: out of group, masked, kept, penalised
    overlong_buffer: int = flag(64, 1, 1e6)  # soft: tokens before the limit over which the penalty grows to -1
    # loss
    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"  # mean of sequence means, mean of tokens, sum / (B x max new)
    ratio: Literal["token", "sequence", "sequence_sum"] = "token"  # importance ratio; sequence: geometric mean (GSPO)
    clip: float = flag(0.2, 0, 1)  # lower clip of the ratio (1 - clip)
    clip_high: float = flag(-1.0, -1, 1e6)  # upper clip (1 + clip_high); negative: as --clip
    dual_clip: float = 0.0  # bound on the ratio where the advantage is negative (over 1); 0: off
    cispo: bool = False  # clip the weight, not the objective: every token keeps its gradient
    beta: float = 0.04  # weight of the KL to the reference; 0: no reference
    kl: Literal["k1", "k2", "k3"] = "k3"  # KL estimator
    ref_offload: bool = free(False)  # full fine-tuning: the reference waits on the CPU
    entropy_coef: float = flag(0.0, -1000000.0, 1e6)  # entropy bonus
    top_entropy: float = flag(1.0, 1e-6, 1)  # policy gradient only on this share of most uncertain tokens (2506.01939)
    off_policy: Literal["none", "truncate", "mask"] = "none"  # correct for sampler against trainer probabilities
    off_policy_cap: float = flag(2.0, 1, 1e6)  # truncate: largest weight; mask: largest ratio either way
    old_logp: Literal["forward", "sampler"] = "forward"  # old log-probabilities, where several updates need them
    # older rollouts
    stale_discount: float = flag(0.65, 0, 1)  # weight of a rollout's loss: this to the power of its age in steps
    decoupled_ppo: bool = False  # ratio against a proximal policy, interpolated by version; weighted by behaviour
    behaviour_cap: float = flag(1.5, 1, 1e6)  # decoupled PPO: largest weight of a token
    m2_threshold: float = 0.0  # decoupled PPO: tokens with a larger squared log-ratio are masked; 0: off
    # behaviour cloning
    bc_coef: float = 0.0  # weight of the cross-entropy on the task's own right turns; 0: off
    bc_end: float = 0.03  # the weight after its decay
    bc_hold: int = 1200  # steps before its decay
    bc_decay: int = 4000  # steps of its linear decay
    bc_examples: int = flag(2, 1, 1000)  # examples a prompt
    # beta control
    beta_control: Literal["off", "gap", "kl_old", "kl_ref"] = "off"  # beta follows |new - old|, KL to old or reference
    beta_target: float = flag(0.06, 1e-09, 1e6)  # where the watched quantity is to be
    beta_min: float = 0.01  # smallest beta
    beta_max: float = 0.08  # largest beta
    hard_stop: float = flag(8.0, 1, 1e9)  # an update is left out where the watched quantity is over this many targets
    # update
    inner_epochs: int = flag(1, 1, 1000)  # passes over a batch
    minibatches: int = flag(1, 1, 1e6)  # optimizer steps a pass
    micro_tokens: int = free(0)  # most tokens in one forward and backward; 0: 1,536 on the CPU, else measured at start
    lr: float = free(5e-6, 0, 10)  # peak learning rate
    lr_end: float = free(0.1, 0, 1)  # cosine ends at this share of --lr; 1: constant
    lr_start: float = flag(0.1, 0, 1)  # warm-up starts at this share of --lr
    warmup_steps: int = 3  # steps of linear warm-up
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = fixed("adamw")  # the 8-bit ones need bitsandbytes
    adam_beta1: float = flag(0.9, 0, 0.9999999)  # decay of the first moment
    adam_beta2: float = flag(0.99, 0, 0.9999999)  # decay of the second moment
    weight_decay: float = 0.0  # decoupled, on matrices only
    max_grad_norm: float = 1.0  # gradient clipping; 0: off
    max_bad_steps: int = free(5, 1, 1e9)  # non-finite gradients in a row that end the run
    early_stop_patience: int = free(0)  # steps in a row with reward std under --early-stop-std that end the run; 0: off
    early_stop_std: float = free(0.05)  # see --early-stop-patience
    # evaluation, saving
    eval_every: int = free(5)  # steps between evaluations; 0: only before and after
    eval: bool = free(True)  # evaluate at all
    skip_initial_eval: bool = free(False)  # no evaluation before training
    eval_k: int = free(0)  # samples a held-out prompt for pass@k and maj@k; 0: greedy only
    eval_temperature: float = free(0.8, 0.001, 100)  # of those samples
    save_every: int = free(50)  # steps between checkpoints; the last step always saves
    keep_last: int = free(2)  # newest checkpoints that are kept; 0: all
    save_method: SaveMethod = free("adapter")  # merged: merged/ in each checkpoint too; _Nbit: model/ at the end
    push_to_hub: str = free("")  # hub repository that gets the model at the end
    hub_checkpoint_repo: str = free("")  # hub repository that gets every checkpoint
    report_to: Literal["none", "wandb", "tensorboard"] = free("none")  # also log there what metrics.csv gets
    save_completions: bool = free(True)  # completions/step_N.jsonl.gz

    def check(self, sources: dict[str, str]) -> None:
        """Refuse combinations that cannot work, before any model loads."""
        check_args(self, sources)


def check_args(args, sources: dict[str, str]) -> None:
    """Combinations of flags that cannot work."""
    def name(key: str) -> str:
        return as_written(args, key, sources)

    if args.group < 2 and args.advantage != "baseline":
        raise UserError(f"{name('group')} cannot give group advantages; use --group 2 or more, or --advantage baseline")
    if 0 < args.dual_clip <= 1:
        raise UserError(f"{name('dual_clip')} must be over 1 (or 0: off)")
    if args.minibatches > args.prompts:
        raise UserError(f"{name('minibatches')} is more than --prompts {args.prompts}; a minibatch holds whole groups")
    if args.cispo and args.ratio != "token":
        raise UserError(f"{name('cispo')} works on token ratios; leave out --ratio {args.ratio}")
    if 0 <= args.temperature_end < 1e-3:
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
    if args.async_workers and args.cuda_graphs:
        raise UserError(f"{name('async_workers')} cannot run beside a capture of CUDA graphs; leave out --cuda-graphs")
    if args.async_workers and args.policy_sync_interval > args.max_version_gap + 1:
        raise UserError(f"{name('policy_sync_interval')} makes every group older than --max-version-gap "
                        f"{args.max_version_gap}; use --max-version-gap {args.policy_sync_interval - 1} or more")
    if args.decoupled_ppo and args.off_policy != "none":
        raise UserError(f"{name('decoupled_ppo')} corrects for the sampler itself; leave out --off-policy")
    if args.m2_threshold and not args.decoupled_ppo:
        raise UserError(f"{name('m2_threshold')} belongs to --decoupled-ppo; add that")
    if args.beta_control != "off" and not args.beta:
        raise UserError(f"{name('beta_control')} needs a --beta over 0 to begin with")
    if args.beta_min > args.beta_max:
        raise UserError(f"{name('beta_min')} is more than --beta-max {args.beta_max:g}")


def check_task(args, task: type[Task]) -> None:
    """UserError where the task lacks what the flags ask of it, before it reads its data or fits a model."""
    if args.bc_coef and task.worked_turn is Task.worked_turn:
        raise UserError(f"--bc-coef {args.bc_coef:g}: task {args.task} has no right turns to imitate (worked_turn); "
                        "use --bc-coef 0")
    if args.async_workers and task.on_forward is not Task.on_forward:
        raise UserError(f"--async-workers {args.async_workers}: task {args.task} hooks into the model's forward "
                        "(on_forward), which two threads cannot share; use --async-workers 0")


# ------------------------------------------------------------------------------------------------ advantages
def usable(rollout: Rollout, score: Score, args) -> bool:
    """Whether a rollout counts in its group's mean and std."""
    dropped = args.overlong == "drop" and rollout.truncated
    return score.reward is not None and not dropped


def usable_rewards(group: Group, args) -> list[float]:
    """A group's rewards, NaN where a rollout does not count."""
    pairs = zip(group.rollouts, group.scores, strict=True)
    return [score.reward if usable(rollout, score, args) else math.nan for rollout, score in pairs]


def known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def group_std(group: Group, args) -> float | None:
    """Population std of a group's usable rewards; None where there are too few to compare."""
    rewards = known(usable_rewards(group, args))
    fewest = 1 if args.advantage == "baseline" else 2
    return float(np.std(rewards)) if len(rewards) >= fewest else None


def is_constant(group: Group, args) -> bool:
    """No usable spread: nothing to learn from the comparison. (1e-8: equal floats may have a std of one ulp.)"""
    std = group_std(group, args)
    if std is None or args.advantage == "baseline":  # a running mean compares a group with others, spread or not
        return std is None
    if std < args.min_group_std:
        return True
    trained = args.advantage == "mixed" and args.mixed_fallback != "zero"
    return std <= 1e-8 and not trained


def set_advantages(groups: list[Group], args, baseline: float | None) -> None:
    """Fill in `advantages`; NaN marks a rollout that is outside its group's statistics and is not trained on."""
    seen = known([reward for group in groups for reward in usable_rewards(group, args)])
    if baseline is None:
        baseline = float(np.mean(seen)) if seen else 0.0
    batch_std = float(np.std(seen)) if seen else 0.0
    for group in groups:
        advantages = group_advantages(group, args, baseline, batch_std)
        if args.advantage_clip:
            advantages = np.clip(advantages, -args.advantage_clip, args.advantage_clip)
        group.advantages = advantages.tolist()


def group_advantages(group: Group, args, baseline: float, batch_std: float) -> np.ndarray:
    """Advantages (G,) of one group: reward minus group mean (GRPO), minus the running mean `baseline`, or both."""
    rewards = np.array(usable_rewards(group, args))
    std = group_std(group, args)
    from_baseline = (rewards - baseline) / args.baseline_scale
    if args.advantage == "baseline":
        return from_baseline
    if std is None:
        return rewards * math.nan
    if is_constant(group, args):
        return 0 * rewards
    if args.advantage == "mixed" and std < args.mixed_std:
        if args.mixed_fallback == "zero":
            return 0 * rewards
        return from_baseline if args.mixed_fallback == "baseline" else np.maximum(from_baseline, 0)
    scale = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[args.scale_rewards]
    return (rewards - np.nanmean(rewards)) / scale


def moved_baseline(baseline: float | None, sampled: list[Group], args) -> float | None:
    """The running mean of rewards after a step: of those that the advantages compare, so what --overlong drop leaves
    out is no part of it."""
    seen = known([reward for group in sampled if not group.auxiliary for reward in usable_rewards(group, args)])
    if not seen:
        return baseline
    now = float(np.mean(seen))
    before = now if baseline is None else baseline
    return args.baseline_decay * before + (1 - args.baseline_decay) * now


def rows_to_train(groups: list[Group], args, now: int = 0) -> list[TrainRow]:
    """The rows of one optimizer step, each with its weight: the loss's normaliser times the staleness discount.

    `now` is the version of the weights. Rows outside the statistics, and truncated ones under --overlong mask, do not
    count. Rows whose whole group has advantage 0 count in the normaliser: leaving them out changes only the time (and
    their KL and entropy gradients).
    """
    counted: list[TrainRow] = []
    kept: list[TrainRow] = []
    for group in groups:
        rows = [TrainRow(rollout, advantage, anchored=not group.auxiliary)
                for rollout, advantage in zip(group.rollouts, group.advantages, strict=True)
                if is_trained(rollout, advantage, args)]
        counted += rows
        if args.kl_on_constant_groups or any(row.advantage != 0 for row in rows):
            kept += rows
    tokens = sum(row.tokens for row in counted)
    slots = sum(len(group.rollouts) for group in groups) * args.max_new
    for row in counted:
        if args.loss == "grpo":
            row.weight = 1 / (row.tokens * len(counted))
        elif args.loss == "dapo":
            row.weight = 1 / tokens
        else:
            row.weight = 1 / slots
        row.weight *= args.stale_discount ** age_of(row.rollout, now)
    if args.top_entropy < 1 and kept:
        select_uncertain(kept, counted, args.top_entropy)
    return kept


def is_trained(rollout: Rollout, advantage: float, args) -> bool:
    masked = args.overlong == "mask" and rollout.truncated
    return not math.isnan(advantage) and bool(rollout.mask) and not masked


def select_uncertain(kept: list[TrainRow], counted: list[TrainRow], share: float) -> None:
    """Mark the tokens of the rows whose entropy is among the highest `share` of the step (2506.01939, eq. 5)."""
    entropies = []
    for row in counted:
        entropies += [e for e, sampled in zip(row.rollout.entropy, row.rollout.mask, strict=True) if sampled]
    threshold = np.nanquantile(entropies, 1 - share)
    for row in kept:
        row.uncertain = [entropy >= threshold for entropy in row.rollout.entropy]


# ------------------------------------------------------------------------------------------------ the loss
def upper_clip(args) -> float:
    return 1 + (args.clip_high if args.clip_high >= 0 else args.clip)


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
    high = upper_clip(args)
    if args.cispo:
        loss = -ratio.detach().clamp(max=high) * a * new
    else:
        loss = -torch.minimum(ratio * a, ratio.clamp(1 - args.clip, high) * a)
        if args.dual_clip:
            loss = torch.where(a < 0, torch.minimum(loss, -args.dual_clip * a), loss)
    if args.off_policy != "none":
        loss = loss * sampler_correction(old, sampler, args)
    return loss, ratio.detach()


def sampler_correction(old: Tensor, sampler: Tensor, args) -> Tensor:
    """Importance weight (b, T) of the trainer's against the sampler's log-probabilities, truncated or masked."""
    weight = (old - sampler).detach().exp()
    if args.off_policy == "truncate":
        return weight.clamp(max=args.off_policy_cap)
    inside = (weight <= args.off_policy_cap) & (weight >= 1 / args.off_policy_cap)
    return torch.where(inside, weight, 0.0)


def kl_divergence(new: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy, reference); http://joschu.net/blog/kl-approx.html. The gap is held to ±20."""
    gap = (ref - new).clamp(-20, 20)
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    return gap.exp() - gap - 1


def age_of(rollout: Rollout, now: int) -> int:
    """Age of a rollout's oldest sampled token, in versions of the weights; 0 where its version is not known."""
    sampled = [version for version, mask in zip(rollout.version, rollout.mask, strict=True) if mask and version >= 0]
    return max(0, now - min(sampled)) if sampled else 0


def token_ages(rollouts: Sequence[Rollout], now: int, dtype, device) -> Tensor:
    """Age of every token (b, T), 0 where it is not known and in the padding."""
    ages = [[max(0, now - version) if version >= 0 else 0 for version in rollout.version] for rollout in rollouts]
    return pad(ages, 0, dtype, device)


def old_logps(batch: Sequence[TrainRow], new: Tensor) -> Tensor:
    """Log-probabilities (b, T) that the ratio starts from; the current ones `new` where a row has no others."""
    old = new.detach().clone()
    for row, values in zip(batch, old, strict=True):
        if row.old is not None:
            values[: len(row.old)] = row.old
    return old


def decouple(new: Tensor, old: Tensor, age: Tensor, cap: float, m2_threshold: float) -> tuple[Tensor, Tensor]:
    """Proximal log-probabilities and the weight of each token's loss, both (b, T) and without gradient.

    Decoupled PPO (arXiv 2110.00641) takes the ratio against a proximal policy and weights by proximal over behaviour.
    The proximal policy, one version before the current one, is interpolated log-linearly by version, without a forward:
    alpha = (v_prox - v_behaviour) / max(v_now - v_behaviour, 1), v_prox = v_now - 1, held to [0, 1]. The weight
    exp(prox - old) is at most `cap`, and 0 where (new - old)² is over `m2_threshold` (0: nowhere).
    """
    gap = new.detach() - old
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0, 1)
    proximal = old + alpha * gap
    weight = (proximal - old).clamp(max=20).exp().clamp(max=cap)
    if m2_threshold:
        weight = torch.where(gap.square() > m2_threshold, 0.0, weight)
    return proximal, weight


class Sums(dict):
    """Running sums and maxima over the tokens of a step, so that nothing is logged from the last micro-batch alone."""

    def add(self, **values) -> None:
        for key, value in values.items():
            if key.endswith("_max"):
                self[key] = max(self.get(key, -math.inf), float(value))
            else:
                self[key] = self.get(key, 0.0) + float(value)


def micro_loss(policy: Policy, rows: list[TrainRow], args, beta: float, temperature: float, sums: Sums) -> Tensor:
    """The micro-batch's share of the optimizer step's loss; adds what is logged to `sums`."""
    rollouts = [row.rollout for row in rows]
    new, entropy = token_logps(policy, policy.hf, rows, temperature, entropy=args.entropy_coef != 0)
    policy.task.on_logps(rollouts, new.detach())
    like = {"dtype": new.dtype, "device": policy.device}
    mask = pad([rollout.mask for rollout in rollouts], 0, **like)
    sampler = pad([rollout.logp for rollout in rollouts], 0.0, **like)
    advantage = torch.tensor([row.advantage for row in rows], **like)
    weight = torch.tensor([row.weight for row in rows], **like)[:, None]

    # the surrogate
    old = old_logps(rows, new)
    if args.decoupled_ppo:
        ages = token_ages(rollouts, policy.version, **like)
        proximal, behaviour = decouple(new, old, ages, args.behaviour_cap, args.m2_threshold)
        loss, ratio = policy_loss(new, proximal, sampler, advantage, mask, args)
        loss = loss * behaviour
    else:
        loss, ratio = policy_loss(new, old, sampler, advantage, mask, args)
    if rows[0].uncertain is not None:
        loss = loss * pad([row.uncertain for row in rows], False, **like)
    surrogate = (loss * mask * weight).sum()
    total = surrogate

    # the KL to the reference
    ref = None
    if rows[0].ref is not None:
        ref = pad_sequence([row.ref for row in rows], batch_first=True)
        kl = kl_divergence(new, ref, args.kl)
        anchored = torch.tensor([row.anchored for row in rows], **like)[:, None]
        total = total + beta * (kl * mask * weight * anchored).sum()
        sums.add(kl=(kl.detach() * mask).sum())

    # the entropy bonus
    if entropy is not None:
        total = total - args.entropy_coef * (entropy * mask * weight).sum()

    sums.add(tokens=mask.sum(), policy_loss=surrogate.detach(), loss=total.detach())
    sums.add(ratio=(ratio * mask).sum(), ratio_max=ratio[mask > 0].max())
    sums.add(gap=((old - sampler).abs() * mask).sum())
    sums.add(**clip_counts(ratio, advantage, mask, args))
    if args.beta_control != "off":
        sums.add(**beta_control_sums(new, old, ref, mask))
    return total


def clip_counts(ratio: Tensor, advantage: Tensor, mask: Tensor, args) -> dict[str, Tensor]:
    """How many trained tokens are beyond the clip on the side where it binds."""
    trained = mask > 0
    below = trained & (ratio < 1 - args.clip)
    above = trained & (ratio > upper_clip(args))
    sign = advantage.sign()[:, None]
    if args.cispo:  # it caps the weight of either sign from above, and bounds none from below
        return {"clip_low": below.new_zeros(()), "clip_high": (above & (sign != 0)).sum()}
    return {"clip_low": (below & (sign < 0)).sum(), "clip_high": (above & (sign > 0)).sum()}


# ---- adaptive KL coefficient
DECAY, EVERY, FACTOR, BAND = 0.90, 4, 1.12, (0.80, 1.25)


@dataclasses.dataclass(frozen=True)
class BetaControl:
    """An adaptive KL coefficient: `beta` in force, the running `average` of what is watched, updates so far."""

    beta: float
    average: float | None = None
    updates: int = 0

    def after(self, value: float, target: float, low: float, high: float) -> BetaControl:
        """The control after an update whose watched quantity was `value`: it is averaged, and after every fourth update
        beta grows by at most FACTOR where the average is over 1.25 × target, shrinks likewise under 0.80 × target, and
        stays within [low, high]."""
        average = value
        if self.average is not None:
            average = DECAY * self.average + (1 - DECAY) * value
        beta = self.beta
        updates = self.updates + 1
        low_band, high_band = BAND
        if updates % EVERY == 0 and not low_band * target <= average <= high_band * target:
            change = max(1 / FACTOR, average / target)
            beta *= min(FACTOR, change)
        beta = min(max(beta, low), high)
        return BetaControl(beta, average, updates)


def beta_control_sums(new: Tensor, old: Tensor, ref: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
    """Sums over a micro-batch's tokens of what the adaptive KL coefficient may watch."""
    gap = (new.detach() - old) * mask
    sums = {"watch_gap": gap.abs().sum(), "watch_kl_old": -gap.sum()}
    if ref is not None:
        sums["watch_kl_ref"] = (kl_divergence(new.detach(), ref, "k3") * mask).sum()
    return sums


def watched(sums: Sums, args) -> float:
    """The watched quantity of one optimizer step, a mean over its tokens; NaN where nothing is watched."""
    return sums.get(f"watch_{args.beta_control}", math.nan) / max(1, sums.get("tokens", 0))


def is_too_far(value: float, args) -> bool:
    """Whether an optimizer step whose watched quantity is `value` is left out."""
    return math.isfinite(value) and value > args.hard_stop * args.beta_target


# ---- behaviour cloning
def cloning_coefficient(step: int, start: float, end: float, hold: int, decay: int) -> float:
    """Weight of behaviour cloning in step 1, 2, …: `start` for `hold` steps, then linearly to `end` over `decay`."""
    if step <= hold:
        return start
    share = min(1.0, (step - hold) / decay) if decay else 1.0
    return start + share * (end - start)


def cloning_rows(policy: Policy, prompts: Sequence[Prompt], args) -> list[TrainRow]:
    """The right turns that a step imitates, --bc-examples of each prompt at most.

    A row's `weight` is 1 over the number of rows and its target tokens: a mean over tokens, then over examples.
    """
    examples: list[Rollout] = []
    for prompt in prompts:
        examples += worked_examples(policy, prompt, args.bc_examples)
    rows = [TrainRow(example, 0.0) for example in examples]
    for row in rows:
        row.weight = 1 / (len(rows) * row.tokens)
    return rows


def cloning_loss(policy: Policy, batch: list[TrainRow]) -> Tensor:
    """The batch's share of the cross-entropy on the rows' targets, at temperature 1."""
    logp, _ = token_logps(policy, policy.hf, batch, 1.0)  # 0 outside the targets
    weight = torch.tensor([row.weight for row in batch], dtype=logp.dtype, device=logp.device)
    return -(logp * weight[:, None]).sum()


# ------------------------------------------------------------------------------------------------ the update
def temperature_at(step: int, args) -> float:
    """Sampling temperature of a step: linear from --temperature to --temperature-end."""
    if args.temperature_end < 0:
        return args.temperature
    change = args.temperature_end - args.temperature
    return args.temperature + change * (step - 1) / max(1, args.steps - 1)


def update(policy: Policy, optimizer: Optimizer, groups: list[Group], args, step: int, state: State, log) -> dict:
    """All optimizer steps of one batch; returns what metrics.csv shows of them.

    `state.micro_tokens` is the current micro-batch budget; out of memory halves it for the rest of the run.
    """
    temperature = temperature_at(step, args)
    beta = args.beta if args.beta_control == "off" else state.beta_control.beta
    cloned: list[TrainRow] = []
    bc_coef = 0.0
    if args.bc_coef:
        cloned = cloning_rows(policy, [group.prompt for group in groups], args)
        bc_coef = cloning_coefficient(step, args.bc_coef, args.bc_end, args.bc_hold, args.bc_decay)

    def prepare() -> None:
        fill_ref_and_old_logps(policy, batches, args, temperature, state.micro_tokens)

    def accumulate() -> Sums:
        return gradients(policy, optimizer, rows, args, beta, temperature, state.micro_tokens, cloned, bc_coef)

    batches = train_batches(groups, args, step, policy.version)
    with_smaller_batches(prepare, state, log)
    results, hooked, norms, sums = [], [], [], Sums()
    for rows in batches:
        if not rows and not cloned:
            continue
        result = with_smaller_batches(accumulate, state, log)
        results.append(result)
        hooked.append(policy.task.on_gradients(policy))
        norm = guarded_step(optimizer, result, args, step, state)
        if norm is not None:
            norms.append(norm)
            sums.add(**result)
    policy.version = step

    watches = [watched(result, args) for result in results]
    stopped = sum(is_too_far(value, args) for value in watches)
    row = update_metrics(sums, norms, len(results) - len(norms) - stopped)
    row["beta"] = beta
    if args.bc_coef:
        row["bc_loss"] = sums["bc_loss"] / max(1, len(norms)) if "bc_loss" in sums else None
        row["bc_coef"] = bc_coef
    if args.beta_control != "off":
        row["watched"] = mean(watches)
        row["hard_stops"] = stopped
    return row | means(hooked)


def train_batches(groups: list[Group], args, step: int, version: int) -> list[list[TrainRow]]:
    """The rows of each optimizer step: --inner-epochs passes over the batch in --minibatches parts."""
    batches = []
    for epoch in range(args.inner_epochs):
        for part in range(args.minibatches):
            some = minibatch(groups, args, step, epoch, part)
            batches.append(rows_to_train(some, args, version))
    return batches


def guarded_step(optimizer: Optimizer, result: Sums, args, step: int, state: State) -> float | None:
    """Clip the gradient and take the step; returns the gradient's norm, None where weights and moments stay as they
    are: where the update moved the policy too far (--hard-stop), or where a gradient is not finite."""
    norm = optimizer.clip(args.max_grad_norm)
    value = watched(result, args)
    if math.isfinite(value):  # what is not finite moves no beta: the guard on gradients is for that
        state.beta_control = state.beta_control.after(value, args.beta_target, args.beta_min, args.beta_max)
    stepped = False
    if not is_too_far(value, args):
        stepped = math.isfinite(norm) and math.isfinite(result["loss"])
        state.bad_in_a_row = 0 if stepped else state.bad_in_a_row + 1
    if stepped:
        optimizer.step(lr_at(step, args))
    optimizer.zero()
    if state.bad_in_a_row >= args.max_bad_steps:
        raise TrainingFailed(f"{args.max_bad_steps} gradients in a row were not finite, last at step {step}; lower "
                             "--lr, raise --beta, or look at the rewards; the weights are as before the first")
    return norm if stepped else None


def means(found: list[dict[str, float | None]]) -> dict[str, float | None]:
    """The mean of each number over the dictionaries that have it."""
    columns: dict[str, list] = {}
    for numbers in found:
        for name, value in numbers.items():
            columns.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in columns.items()}


def fill_ref_and_old_logps(policy: Policy, batches: list[list[TrainRow]], args, temperature: float, budget: int
                           ) -> None:
    """Give every row the log-probabilities that it is compared with: the reference's, and, where the weights move
    within the batch, those from before the first of its updates (with a single update they equal the current ones)."""
    every = [row for batch in batches for row in batch]
    rows = {row.rollout: row for row in every}  # one of each rollout
    distinct = list(rows.values())
    if args.beta and distinct:
        with policy.as_reference() as hf:
            fill_logps(policy, hf, distinct, "ref", temperature, budget)
    several = len(batches) > 1
    if several and args.old_logp == "forward":
        fill_logps(policy, policy.hf, distinct, "old", temperature, budget)
    for row in every:
        first = rows[row.rollout]
        row.ref, row.old = first.ref, first.old
        stale = age_of(row.rollout, policy.version) > 0  # its weights are gone, the sampler's word is left
        if stale or (several and args.old_logp == "sampler"):
            row.old = torch.tensor(row.rollout.logp, device=policy.device)


def minibatch(groups: list[Group], args, step: int, epoch: int, part: int) -> list[Group]:
    """The groups of one optimizer step: whole groups, shuffled anew each epoch."""
    if args.minibatches == 1:
        return groups
    order = rng_of(args.seed, "minibatch", step, epoch).permutation(len(groups))
    return [groups[i] for i in np.array_split(order, args.minibatches)[part]]


def with_smaller_batches(work, state: State, log):
    """Run `work`; where memory runs out, halve the micro-batch budget and run it again from its start."""
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if state.micro_tokens <= 1:
                raise TrainingFailed("out of memory with a single row: lower --max-new, use --gradient-checkpointing "
                                     "or --load-4bit") from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        state.micro_tokens //= 2
        log(f"out of memory: the update is repeated with --micro-tokens {state.micro_tokens}")


def gradients(policy: Policy, optimizer: Optimizer, rows: list[TrainRow], args, beta: float, temperature: float,
              budget: int, cloned: Sequence[TrainRow] = (), bc_coef: float = 0.0) -> Sums:
    """Accumulate the gradient of one optimizer step over its micro-batches, and of what is imitated beside it."""
    optimizer.zero()
    sums = Sums()
    packed = policy.engine == "fast"
    policy.model.train(args.gradient_checkpointing)  # checkpointing works in training mode only; dropout is off
    sources = policy.task.split([row.rollout for row in rows])
    parts = [[rows[i] for i in source] for source in sources] or [rows]
    for part in parts:
        for batch in micro_batches(part, budget, packed):
            micro_loss(policy, batch, args, beta, temperature, sums).backward()
        policy.task.on_part(policy)
    for batch in micro_batches(cloned, budget, packed):
        loss = cloning_loss(policy, batch)
        (bc_coef * loss).backward()
        sums.add(bc_loss=loss.detach(), loss=bc_coef * loss.detach())
    policy.model.eval()
    return sums


def update_metrics(sums: Sums, norms: list[float], skipped: int) -> dict[str, float | None]:
    """Means over tokens and optimizer steps; None where nothing was trained."""
    tokens, updates = sums.get("tokens"), max(1, len(norms))

    def by_token(key: str) -> float | None:
        return sums[key] / tokens if tokens and key in sums else None

    return {
        "loss": sums["loss"] / updates if "loss" in sums else None,
        "policy_loss": sums["policy_loss"] / updates if tokens else None,
        "kl": by_token("kl"),
        "clip_low_share": by_token("clip_low"),
        "clip_high_share": by_token("clip_high"),
        "ratio_mean": by_token("ratio"),
        "ratio_max": sums.get("ratio_max"),
        "logp_gap": by_token("gap"),
        "grad_norm": float(np.mean(norms)) if norms else None,
        "skipped_updates": skipped,
    }


# ------------------------------------------------------------------------------------------------ one step's parts
def score_groups(task: Task, rolled: list[list[Rollout]], args) -> list[Group]:
    """Scored groups, see `judge`, with the soft penalty on long completions where it is asked for (DAPO, eq. 13)."""
    groups = judge(task, rolled)
    if args.overlong != "soft":
        return groups
    limit = args.max_new * task.turns()
    for group in groups:
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            if score.reward is not None:
                penalty = length_penalty(sum(rollout.mask), limit, args.overlong_buffer)
                score.parts["overlong"] = penalty
                score.reward += penalty
    return groups


def collect(policy: Policy, task: Task, args, step: int, clock: Clock, stop: Stop, queue: RolloutQueue | None = None
            ) -> tuple[list[Group], list[Group]]:
    """The step's batch of P groups, and all groups that were sampled for it.

    With --dynamic-sampling, constant groups are replaced from new prompts; they come back only to fill the batch.
    """
    kept: list[Group] = []
    sampled: list[Group] = []
    temperature = temperature_at(step, args)
    for turn in range(1 + args.dynamic_sampling):
        missing = args.prompts - len(kept)
        with clock("rollout"):
            if queue:
                rolled = queue.take(missing, step, temperature, stop.check)
            else:
                rolled = policy.sample(task.prompts(missing), task.samples_per_prompt(), temperature, step, turn)
        stop.check()
        with clock("score"), stop.scoring():
            groups = task.adjust_groups(score_groups(task, rolled, args))
        stop.check()
        sampled += groups
        kept += [group for group in groups if not (group.auxiliary or is_constant(group, args))]
        if len(kept) == args.prompts:
            break
    if not args.dynamic_sampling:
        return sampled, sampled
    auxiliary = [group for group in sampled if group.auxiliary]
    constant = [group for group in sampled if is_constant(group, args) and not group.auxiliary]
    return kept + constant[: args.prompts - len(kept)] + auxiliary, sampled


def step_metrics(batch: list[Group], sampled: list[Group], args) -> dict[str, Any]:
    """What is known before the update. Rewards, accuracy and lengths are those of everything that was sampled."""
    sampled = [group for group in sampled if not group.auxiliary]
    rollouts = [rollout for group in sampled for rollout in group.rollouts]
    scores = [score for group in sampled for score in group.scores]
    rewards = [score.reward for score in scores if score.reward is not None]
    lengths = [sum(rollout.mask) for rollout in rollouts]
    verdicts = [score.flags.get("correct") for score in scores]
    verdicts = [bool(verdict) for verdict in verdicts if verdict is not None]
    stds = [group_std(group, args) for group in sampled]
    compared = [group for group, std in zip(sampled, stds, strict=True) if std is not None]
    advantages = known([advantage for group in batch for advantage in group.advantages])
    used = [group for group in batch if any(known(group.advantages))]
    metrics = {
        "reward_mean": statistic(np.mean, rewards),
        "reward_std": statistic(np.std, rewards),
        "reward_min": statistic(min, rewards),
        "reward_max": statistic(max, rewards),
        "reward_std_group": statistic(np.mean, [std for std in stds if std is not None]),
        "accuracy": statistic(np.mean, verdicts),
        "tokens": sum(lengths),
        "length_mean": statistic(np.mean, lengths),
        "length_max": max(lengths, default=0),
        "truncated_share": statistic(np.mean, [rollout.truncated for rollout in rollouts]),
        "unscorable": len(scores) - len(rewards),
        "entropy": statistic(np.mean, sampled_entropies(rollouts)),
        "groups_sampled": len(sampled),
        "groups_constant": sum(is_constant(group, args) for group in compared),
        "groups_dropped": len(sampled) - len(compared),
        "groups_used": len(used),
        "advantage_mean": statistic(np.mean, advantages),
        "advantage_std": statistic(np.std, advantages),
    }
    for name in sorted({name for score in scores for name in score.parts}):
        values = [score.parts[name] for score in scores if name in score.parts]
        metrics[f"part_{name}"] = statistic(np.mean, values)
    return metrics


def statistic(of, values: list) -> float | None:
    """A statistic of numbers, None where there are none."""
    return float(of(values)) if values else None


def sampled_entropies(rollouts: list[Rollout]) -> list[float]:
    """Entropies at the tokens that the policy sampled, where the sampler could tell them."""
    found = []
    for rollout in rollouts:
        found += known([entropy for entropy, m in zip(rollout.entropy, rollout.mask, strict=True) if m])
    return found


# ------------------------------------------------------------------------------------------------ the loop
@dataclasses.dataclass
class State:
    """What the run carries from step to step, as plain JSON types: a checkpoint's state.json."""

    beta_control: BetaControl
    task: dict  # its `state_dict`
    micro_tokens: int  # current micro-batch budget
    step: int = 0  # the last whole one
    baseline: float | None = None  # running mean of rewards
    bad_in_a_row: int = 0  # gradients that were not finite
    flat_in_a_row: int = 0  # steps without spread in their rewards
    best: float | None = None  # reward of the best evaluation after step 0
    tokens_total: int = 0
    seconds: float = 0.0
    ahead: dict | None = None  # the asynchronous workers' books

    def saved(self) -> dict:
        """What a checkpoint holds of it; a task's own dictionaries stay as they are."""
        return vars(self) | {"beta_control": vars(self.beta_control)}

    def load(self, saved: dict) -> None:
        """Take over what a checkpoint holds."""
        for field in dataclasses.fields(self):
            if field.name in saved:
                setattr(self, field.name, saved[field.name])
        self.beta_control = BetaControl(**saved["beta_control"])


def set_up(args, sources: dict[str, str], command, log: Console):
    """0. The run's folder and lock, its task, policy and optimizer, and where a resume goes on."""
    folder = Path(command.resume or Path(args.out) / args.name)
    lock, config = open_folder(folder, args, sources, command, log)
    if args.deterministic:  # even switching it off imports half of PyTorch: three seconds
        torch.use_deterministic_algorithms(True)
    check_task(args, load_task(args.task))
    task = load_task(args.task)(args)
    for note in task.notes:
        log(note)
    policy = load_policy(args, task, log)
    dropped = task.drop_prompts(policy.fits)
    if dropped:
        limit = f", --max-prompt {args.max_prompt}" if args.max_prompt else ""
        log(f"{dropped} prompts leave no room for {args.max_new} new tokens (context {policy.context}{limit}) and were "
            "dropped")
    budget = args.micro_tokens or (1536 if policy.device.type == "cpu" else measure_budget(policy, log))
    optimizer = Optimizer(policy.model, args)  # after the measurement, whose gradients its hooks would keep
    state = State(BetaControl(args.beta), task.state_dict(), budget)
    columns = metric_columns(args, task)
    if command.resume:
        run = Run(folder, task, columns, log, lock)
        newest = newest_checkpoint(folder, log)
        if newest:
            state.load(load_checkpoint(policy, optimizer, newest, command.resume_override))
        prepare_resume(run, args, config, state)
        notes = resume_notes(args, config, state)
    else:
        run = Run.create(args, task, columns, config, command.overwrite, log)
        notes = room_notes(run, policy, optimizer, args)
    task.run_folder = run.folder
    run.begin(args, state.step, state.seconds)
    log(f"{run.folder}: task {args.task}, model {args.model} on {policy.device}, {optimizer.trained_weights:,} trained "
        f"weights, engine {policy.engine}" + (f", resumed at step {state.step}" if command.resume else ""))
    for note in notes:
        log(note)
    return run, task, policy, optimizer, state


def resume_notes(args, config: dict, state: State) -> list[str]:
    """What a resume changes, and what that does."""
    before = config["history"][-1].get("args", {})
    changed = changed_flags(args, before)
    notes = []
    if changed:
        moves = [f"{flag_of(key)} {before[key]} -> {getattr(args, key)}" for key in changed]
        notes.append(f"changed by this resume: {', '.join(moves)}")
    if state.step >= args.steps:
        notes.append(f"nothing is left to do: the run has its {state.step} steps; --steps gives it more")
    elif {"steps", "lr", "lr_end", "temperature_end"} & set(changed):
        first = state.step + 1
        notes.append(f"the learning rate goes from {lr_at(first, args):.3g} at step {first} to "
                     f"{lr_at(args.steps, args):.3g} at step {args.steps}")
    return notes


def evaluate_and_log(run: Run, policy: Policy, task: Task, args, step: int) -> dict[str, Any]:
    """Metrics on the held-out prompts, the same seeds at every step; a line of eval.jsonl."""
    found, records, _ = evaluate(task, policy.sample, task.heldout(), args.eval_k, args.eval_temperature)
    run.log_eval(step, found, records)
    return found


def evaluate_before_training(run: Run, policy: Policy, task: Task, args, log) -> None:
    """The score of the untrained policy, on the console too."""
    found = evaluate_and_log(run, policy, task, args, 0)
    told = []
    for name in ("reward", "accuracy"):
        if found[name] is not None:
            told.append(f"{name} {found[name]:.3f}")
    log(f"before training: held-out {', '.join(told)}" if told else "nothing is held out to evaluate on")


def main(argv: list[str] | None = None) -> int:
    log = Console()
    args, sources, command = resolve_args(Args, sys.argv[1:] if argv is None else argv, description=ABOUT)
    if printed(args, sources, command):
        return 0
    if command.dry_run:
        scratch = tempfile.TemporaryDirectory(prefix="dry-run-")
        args = dry_run_args(args, scratch.name)

    # 0. the run's folder, task, policy, optimizer and state
    run, task, policy, optimizer, state = set_up(args, sources, command, log)
    saver = Saver(run, policy, optimizer, state, args)
    stop = Stop(saver.save)
    queue = RolloutQueue(policy, task, args, log, state.ahead).start() if args.async_workers else None

    with until_the_end(run, saver, stop, queue, args.steps) as ending:
        if args.eval and not args.skip_initial_eval and not run.evals and state.step == 0:
            evaluate_before_training(run, policy, task, args, log)

        for step in range(state.step + 1, args.steps + 1):
            clock = Clock()
            stop.check()

            # 1-3. sample P prompts, roll out G completions of each, score them
            batch, sampled = collect(policy, task, args, step, clock, stop, queue)

            # 4. advantages; groups without any leave here and cost no forward
            set_advantages(batch, args, state.baseline)

            # 5-7. micro-batches by token budget, task's gradient hook, guard, clip, step
            row = step_metrics(batch, sampled, args) | {"filtered_mass": policy.filtered_mass}
            with saver.applying(updates=args.inner_epochs * args.minibatches), clock("update"):
                row |= update(policy, optimizer, batch, args, step, state, log)
            if queue and step % args.policy_sync_interval == 0:
                queue.publish()

            # 8. the task looks at what happened; what the next step needs of this one
            row |= task.observe(sampled)
            state.baseline = moved_baseline(state.baseline, sampled, args)
            flat = row["reward_std"] is not None and row["reward_std"] < args.early_stop_std
            state.flat_in_a_row = state.flat_in_a_row + 1 if flat else 0
            state.step, state.task = step, task.state_dict()
            state.tokens_total += row["tokens"]
            state.seconds = run.seconds()
            if queue:
                state.ahead = queue.state_dict()
                row |= queue.metrics()
            early = 0 < args.early_stop_patience <= state.flat_in_a_row
            last = step == args.steps or early

            # 9. evaluate, one row, one completions file, checkpoint
            failure = None
            if args.eval and (last or (args.eval_every and step % args.eval_every == 0)):
                try:
                    with clock("eval"):
                        found = evaluate_and_log(run, policy, task, args, step)
                except TrainingFailed as error:  # after this step's row is written
                    failure = error
                else:
                    row |= {f"eval_{name}": value for name, value in found.items()}
                    keep_best(run, policy, {"step": step, **found}, state)
            row |= {"step": step, "lr": lr_at(step, args), "temperature": temperature_at(step, args),
                    "tokens_total": state.tokens_total}
            row |= clock.metrics(row["tokens"], queue is not None)
            run.log_step(row, sampled, args)
            saver.whole = True
            run.tell_step(row, args, task.console)
            if failure:
                raise failure
            saver.save_if_due(last)
            if early:
                ending.status = (f"stopped early: reward std under {args.early_stop_std} for "
                                 f"{args.early_stop_patience} steps")
                break
        for line in [*first_to_last(run.rows), *task.summary(run.rows)]:
            log(line)
    return ending.code


if __name__ == "__main__":
    run_command(main)
