"""Supervised learning: the one loop of all warm starts, and the examples that it learns from.

The loop owns the order of things; what differs between warm starts comes in as three small functions: `lr_of` (the
learning rate of a step), `batches` (indices of examples) and `update` (one optimizer step, which a stage may own).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from data import Prompt, Rollout, UserError, rng_of
from engine.logps import pad
from engine.rollout import extend, takes_turn
from models.chat import closing_id
from models.loading import best_device, load_pretrained, load_tokenizer, package_file, pick_dtype

IGNORED = -100  # label of a token that no loss is taken on, as in `cross_entropy`
CLIP = 1.0  # largest norm of a warm start's gradient
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Batch = list[int]  # indices of examples
Example = tuple[list[int], list[int]]  # ids and labels, of one length
Schedule = Callable[[int], float]  # step, from 0 -> learning rate
Update = Callable[[Batch, float], Any]  # one optimizer step on a batch at a learning rate -> what is logged of it


# ---- the loop
def supervised_loop(steps: int, lr_of: Schedule, batches: Iterator[Batch], update: Update) -> Iterator[Any]:
    """The supervised loop: `steps` optimizer steps on batches of example indices; yields what each update returns."""
    for step in range(steps):
        yield update(next(batches), lr_of(step))


def cosine_lr(peak: float, steps: int, warmup: int = 0) -> Schedule:
    """Learning-rate schedule: step -> linear warm-up over `warmup` steps, times a cosine from `peak` to 0."""

    def lr_of(step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, warmup))
        return peak * warm * 0.5 * (1 + math.cos(math.pi * step / steps))

    return lr_of


def clipped_update(optimizer: torch.optim.Optimizer, weights: Iterable, backward: Callable[[Batch], float]) -> Update:
    """An optimizer step with clipping at norm 1. `backward` adds a batch's gradients and returns its loss."""
    weights = list(weights)

    def update(batch: Batch, lr: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = backward(batch)
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return update


def length_batches(lengths: list[int], size: int) -> Iterator[Batch]:
    """Endless batches of indices, each of about one length: eight batches are drawn, sorted, and dealt in any order."""
    rng = rng_of(0, "tiny-batches")
    while True:
        drawn = rng.integers(len(lengths), size=8 * size).tolist()
        drawn.sort(key=lambda i: lengths[i])
        for part in rng.permutation(8):
            yield drawn[part * size : (part + 1) * size]


def epoch_batches(count: int, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of indices: every example once, in a new order, before any a second time."""
    order: list[int] = []
    for step in itertools.count():
        while len(order) < size:
            order += rng_of(seed, "sft", step, len(order)).permutation(count).tolist()
        yield order[:size]
        order = order[size:]


def random_batches(count: int, size: int, seed: int, purpose: str) -> Iterator[Batch]:
    """Endless batches of indices, drawn with replacement."""
    for step in itertools.count():
        yield rng_of(seed, purpose, step).integers(count, size=size).tolist()


# ---- two stages on it
def fit(model, recipe: dict, lengths: list[int], loss_of: Callable[[Batch], torch.Tensor], log) -> None:
    """AdamW over a tiny model's recipe (steps, batch, lr, betas), one forward a batch of similar lengths."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe["lr"], betas=recipe["betas"], weight_decay=0.0, fused=True)

    def backward(batch: Batch) -> float:
        loss = loss_of(batch)
        loss.backward()
        return loss.item()

    steps = recipe["steps"]
    batches = length_batches(lengths, recipe["batch"])
    update = clipped_update(optimizer, model.parameters(), backward)
    losses = supervised_loop(steps, cosine_lr(recipe["lr"], steps), batches, update)
    for step, loss in enumerate(losses, 1):
        if step % 200 == 0:
            log(f"{step}/{steps}, loss {loss:.3f}")


def supervised_steps(model, examples: list[Example], own, filler: int, log, feed=None) -> Iterator[float]:
    """Cross-entropy on the answers' tokens (labels not -100), a mean over the tokens of each step. Yields the loss.

    `examples` are (ids, labels); `own` has steps, batch, micro_batch, lr and seed; `feed` is told the indices of the
    examples of each forward before it.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=own.lr, weight_decay=0.0)

    def backward(batch: Batch) -> float:
        spoken = sum(label != IGNORED for i in batch for label in examples[i][1])
        total = 0.0
        for start in range(0, len(batch), own.micro_batch):
            some = batch[start : start + own.micro_batch]
            ids = pad([examples[i][0] for i in some], filler, torch.long, model.device)  # causal: never seen
            labels = pad([examples[i][1] for i in some], IGNORED, torch.long, model.device)
            if feed:
                feed(some)
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
            gold = labels[:, 1:].flatten()
            summed = torch.nn.functional.cross_entropy(logits, gold, ignore_index=IGNORED, reduction="sum")
            loss = summed / spoken
            loss.backward()
            total += loss.item()
        return total

    batches = epoch_batches(len(examples), own.batch, own.seed)
    update = clipped_update(optimizer, weights, backward)
    losses = supervised_loop(own.steps, cosine_lr(own.lr, own.steps, own.steps // 20), batches, update)
    for step, loss in enumerate(losses, 1):
        if step == 1 or step % 10 == 0:
            log(f"step {step}/{own.steps}  loss {loss:.4f}")
        yield loss


# ---- examples
def supervised_ids(tokenizer, head: list[dict], tail: list[dict]) -> Example:
    """(ids, labels) of a dialogue: labels -100 but for what the assistant says in `tail`, its end token included."""
    ids = tokenizer.apply_chat_template(head, add_generation_prompt=True, return_dict=False)
    labels = [IGNORED] * len(ids)
    said = list(head)
    for place, message in enumerate(tail):
        said = said + [message]
        assistant_next = place + 1 < len(tail) and tail[place + 1]["role"] == "assistant"
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=assistant_next, return_dict=False)
        new = whole[len(ids) :]
        spoken = 0
        if message["role"] == "assistant":
            spoken = len(tokenizer.encode(message["content"], add_special_tokens=False)) + 1
        silent = len(new[spoken:])
        labels += new[:spoken]
        labels += [IGNORED] * silent
        ids = whole
    return ids, labels


def worked_examples(policy, prompt: Prompt, most: int) -> list[Rollout]:
    """A rollout for each right turn, up to it, whose mask is 1 on that turn's tokens alone. Those that leave the
    context, or are longer than a turn may be, are left out with what follows."""
    row = Rollout(prompt, policy.encode(prompt), [], [], [], [], "stop", [])
    start = len(row.ids)
    turns = policy.task.turns()
    found: list[Rollout] = []
    while len(found) < most:
        text = policy.task.worked_turn(row)
        if text is None:
            break
        ids = policy.tokenizer.encode(text, add_special_tokens=False)
        ids.append(closing_id(policy))
        if len(ids) > policy.args.max_new or len(row.ids) + len(ids) > policy.context:
            break
        before = len(row.ids) - start
        zeros = [0.0] * len(ids)
        extend(row, ids, 0, zeros, zeros, -1)
        row.turns.append({"role": "assistant", "content": text})
        mask = [0] * before + [1] * len(ids)
        found.append(copied(row, mask))
        if not takes_turn(policy, row, len(found) < turns):
            break
    return found


def copied(row: Rollout, mask: list[int]) -> Rollout:
    """A rollout as it stands, with another mask; what is added to `row` later is not in it."""
    return dataclasses.replace(
        row,
        mask=mask,
        ids=list(row.ids),
        logp=list(row.logp),
        entropy=list(row.entropy),
        version=list(row.version),
        turns=list(row.turns),
    )


# ---- the model of a command
def load_for_supervision(own):
    """(model, tokenizer) of a warm start's flags: the trained weights are float32, the others bfloat16 on CUDA."""
    device = best_device()
    dtype = pick_dtype("auto", device) if own.lora_r else torch.float32
    path = package_file(own.model) if own.model.startswith("package:") else own.model
    tokenizer = load_tokenizer(path, own)
    model = load_pretrained(path, own, device, dtype)
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {own.model} has no chat template; take an instruct model or give "
                        "--chat-template")
    torch.manual_seed(own.seed)
    if own.lora_r:
        import peft

        present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        targets = [name for name in TARGETS if name in present] or "all-linear"
        config = peft.LoraConfig(
            r=own.lora_r,
            lora_alpha=own.lora_alpha,
            target_modules=targets,
            lora_dropout=0.0,
            use_rslora=own.rslora,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, config)
        model.peft_config["default"].base_model_name_or_path = path
    return model, tokenizer
