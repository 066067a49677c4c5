"""What the loss does about rollouts of older weights, right turns that are imitated beside it, and a beta that follows
how far the policy moves: pure functions on tensors and on plain state.

Letters as in train_grpo.py: b rows and T tokens of a micro-batch. `age` of a token: trainer's version less the version
of the weights that wrote it. `engine` is the module of that name, which tasks do not import; `Row` is its class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data import Prompt, Rollout, Task, UserError

DECAY, EVERY, FACTOR, BAND = 0.90, 4, 1.12, (0.80, 1.25)  # of the beta control


RANGES = {"stale_discount": (0, 1), "behaviour_cap": (1, 1e6), "bc_examples": (1, 1000), "beta_target": (1e-9, 1e6),
          "hard_stop": (1, 1e9)}


@dataclasses.dataclass(frozen=True)
class Flags:
    # older rollouts
    stale_discount: float = 0.65  # weight of a rollout's loss: this to the power of its age in steps
    decoupled_ppo: bool = False  # ratio against a proximal policy, interpolated by version; weighted by behaviour
    behaviour_cap: float = 1.5  # decoupled PPO: largest weight of a token
    m2_threshold: float = 0.0  # decoupled PPO: tokens with a larger squared log-ratio are masked; 0: off
    # behaviour cloning
    bc_coef: float = 0.0  # weight of the cross-entropy on the task's own right turns; 0: off
    bc_end: float = 0.03  # the weight after its decay
    bc_hold: int = 1200  # steps before its decay
    bc_decay: int = 4000  # steps of its linear decay
    bc_examples: int = 2  # examples a prompt
    # beta control
    beta_control: Literal["off", "gap", "kl_old", "kl_ref"] = "off"  # beta follows |new - old|, KL to old or reference
    beta_target: float = 0.06  # where the watched quantity is to be
    beta_min: float = 0.01  # smallest beta
    beta_max: float = 0.08  # largest beta
    hard_stop: float = 8.0  # an update is left out where the watched quantity is over this many targets


def check(args, name: Callable[[str], str]) -> None:
    """UserError for flags that cannot work together; `name` gives a flag as the user wrote it."""
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


def columns(args) -> list[str]:
    """Columns of metrics.csv that these flags add."""
    return ["bc_loss", "bc_coef"] * bool(args.bc_coef) + ["watched", "hard_stops"] * (args.beta_control != "off")


# ---- age
def age_of(rollout: Rollout, now: int) -> int:
    """Age of a rollout's oldest sampled token; 0 where its version is not known (below 0)."""
    known = [v for v, m in zip(rollout.version, rollout.mask, strict=True) if m and v >= 0]
    return max(0, now - min(known)) if known else 0


def token_ages(rollouts: Sequence[Rollout], now: int, dtype, device) -> Tensor:
    """Age of every token (b, T), 0 where it is not known and in the padding."""
    ages = [torch.tensor([max(0, now - v) if v >= 0 else 0 for v in r.version], dtype=dtype) for r in rollouts]
    return pad_sequence(ages, batch_first=True).to(device)


def old_logps(batch: Sequence, new: Tensor) -> Tensor:
    """Log-probabilities (b, T) that the ratio starts from; the current ones `new` where a row has no others."""
    old = new.detach().clone()
    for row, values in zip(batch, old, strict=True):
        if row.old is not None:
            values[: len(row.old)] = row.old
    return old


# ---- decoupled PPO
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


# ---- beta control
def moved(new: Tensor, old: Tensor, ref: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
    """Sums over a micro-batch's tokens of what the beta control may watch."""
    gap = (new.detach() - old) * mask
    sums = {"watch_gap": gap.abs().sum(), "watch_kl_old": -gap.sum()}
    if ref is not None:
        d = ((ref - new.detach()) * mask).clamp(-20, 20)
        sums["watch_kl_ref"] = (d.exp() - d - 1).sum()
    return sums


def new_control(beta: float) -> dict:
    """The state of a beta control before its first update."""
    return {"beta": beta, "average": None, "updates": 0}


def control_beta(state: dict, value: float, target: float, low: float, high: float) -> dict:
    """The state after an update whose watched quantity was `value`: it is averaged, and after every fourth update beta
    grows by at most FACTOR where the average is over 1.25 × target, shrinks likewise under 0.80 × target, and stays
    within [low, high]."""
    average = value if state["average"] is None else DECAY * state["average"] + (1 - DECAY) * value
    beta, updates = state["beta"], state["updates"] + 1
    if updates % EVERY == 0 and not BAND[0] * target <= average <= BAND[1] * target:
        beta *= min(FACTOR, max(1 / FACTOR, average / target))
    return {"beta": min(max(beta, low), high), "average": average, "updates": updates}


def too_far(sums: dict, state: dict, args, moves: list[float]) -> bool:
    """Whether an update with these sums is to be left out; `state["beta_control"]` goes on, `moves` gets what it saw.

    What is not finite neither moves beta nor stops anything here: the guard on gradients is for that.
    """
    value = sums.get(f"watch_{args.beta_control}", math.nan) / max(1, sums.get("tokens", 0))
    if not math.isfinite(value):
        return False
    moves.append(value)
    state["beta_control"] = control_beta(state["beta_control"], value, args.beta_target, args.beta_min, args.beta_max)
    return value > args.hard_stop * args.beta_target


def metrics(sums: dict, updates: int, moves: list[float], args, coefficient: float) -> dict[str, float | None]:
    """What a step's updates add to its row: the beta in force and, where they are on, the mean cross-entropy of what
    was imitated with its weight, the mean of what is watched, and the updates that were left out."""
    row = {"beta": args.beta}
    if args.bc_coef:
        row |= {"bc_loss": sums["bc_loss"] / updates if "bc_loss" in sums else None, "bc_coef": coefficient}
    if args.beta_control != "off":
        far = [value for value in moves if value > args.hard_stop * args.beta_target]
        row |= {"watched": sum(moves) / len(moves) if moves else None, "hard_stops": len(far)}
    return row


# ---- behaviour cloning
def cloning_coefficient(step: int, start: float, end: float, hold: int, decay: int) -> float:
    """Weight of behaviour cloning in step 1, 2, …: `start` for `hold` steps, then linearly to `end` over `decay`."""
    share = min(1.0, max(0, step - hold) / decay) if decay else float(step > hold)
    return start + share * (end - start)


def clones(policy, engine, prompts: Sequence[Prompt], args, step: int) -> tuple[list, float]:
    """Rows of the right turns that a step imitates, --bc-examples of each prompt at most, and their coefficient.

    A row's `weight` is 1 over the number of rows and its target tokens: a mean over tokens, then over examples.
    """
    if not args.bc_coef:
        return [], 0.0
    found = [row for prompt in prompts for row in worked_examples(policy, engine, prompt, args.bc_examples)]
    rows = [engine.Row(row, 0.0, weight=1 / (len(found) * sum(row.mask))) for row in found]
    return rows, cloning_coefficient(step, args.bc_coef, args.bc_end, args.bc_hold, args.bc_decay)


def cloning_loss(policy, engine, batch: list) -> Tensor:
    """The batch's share of the cross-entropy on the rows' targets, at temperature 1."""
    logp, _ = engine.token_logps(policy, policy.hf, batch, 1.0)  # 0 outside the targets
    weight = torch.tensor([row.weight for row in batch], dtype=logp.dtype, device=logp.device)
    return -(logp * weight[:, None]).sum()


def worked_examples(policy, engine, prompt: Prompt, most: int) -> list[Rollout]:
    """A rollout for each right turn, up to it, whose mask is 1 on that turn's tokens alone. Those that leave the
    context, or are longer than a turn may be, are left out with what follows."""
    row = Rollout(prompt, policy.encode(prompt), [], [], [], [], "stop", [])
    start, found, turns = len(row.ids), [], policy.task.turns()
    while len(found) < most:
        text = policy.task.worked_turn(row)
        ids = [] if text is None else [*policy.tokenizer.encode(text, add_special_tokens=False), closing_id(policy)]
        if not ids or len(ids) > policy.args.max_new or len(row.ids) + len(ids) > policy.context:
            break
        before = len(row.ids) - start
        engine.extend(row, ids, 0, [0.0] * len(ids), [0.0] * len(ids), -1)
        row.turns.append({"role": "assistant", "content": text})
        mask = [0] * before + [1] * len(ids)
        found.append(dataclasses.replace(row, ids=list(row.ids), mask=mask, logp=list(row.logp),
                                         entropy=list(row.entropy), version=list(row.version), turns=list(row.turns)))
        if not engine.takes_turn(policy, row, len(found) < turns):
            break
    return found


def closing_id(policy) -> int:
    """The id that ends an assistant's turn: what the chat template writes there, where it is a stop id, else the first
    stop id."""
    if policy.tokenizer.chat_template is not None:
        mark = "closingidmark"
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        text = policy.render(said, Prompt(said), False)
        after = policy.tokenizer.encode(text.rpartition(mark)[2], add_special_tokens=False)
        if mark in text and after and after[0] in policy.stop_ids:
            return after[0]
    return policy.stop_ids[0]
