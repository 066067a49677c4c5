"""The supervised loop of all warm starts, and the rows that it learns from."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch.nn.utils.rnn import pad_sequence

from data import Prompt, Rollout, UserError, rng_of
from engine.rollout import extend, takes_turn
from models.loading import load_pretrained, load_tokenizer, package_file


def fit(model, recipe: dict, lengths: list[int], loss_of: Callable[[list[int]], torch.Tensor], log) -> None:
    """AdamW over the recipe's steps on batches of example indices, the learning rate falling as a cosine to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=recipe["betas"], weight_decay=0.0,
                                  fused=True)
    batches = length_batches(lengths, recipe["batch"])
    for step in range(recipe["steps"]):
        optimizer.param_groups[0]["lr"] = recipe["lr"] * 0.5 * (1 + math.cos(math.pi * step / recipe["steps"]))
        loss = loss_of(next(batches))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            log(f"{step + 1}/{recipe['steps']}, loss {loss.item():.3f}")


def length_batches(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Endless batches of indices, each of about one length: eight batches are drawn, sorted, and dealt in any order."""
    rng = rng_of(0, "tiny-batches")
    while True:
        drawn = sorted(rng.integers(len(lengths), size=8 * size).tolist(), key=lambda i: lengths[i])
        for part in rng.permutation(8):
            yield drawn[part * size : (part + 1) * size]


def supervised_ids(tokenizer, head: list[dict], tail: list[dict]) -> tuple[list[int], list[int]]:
    """(ids, labels) of a dialogue: labels -100 but for what the assistant says in `tail`, its end token included."""
    ids = tokenizer.apply_chat_template(head, add_generation_prompt=True, return_dict=False)
    labels, said = [-100] * len(ids), list(head)
    for message in tail:
        said = said + [message]
        generation = message is not tail[-1] and tail[len(said) - len(head)]["role"] == "assistant"
        whole = tokenizer.apply_chat_template(said, add_generation_prompt=generation, return_dict=False)
        new = whole[len(ids):]
        spoken = len(tokenizer.encode(message["content"], add_special_tokens=False)) + 1
        assistant = message["role"] == "assistant"
        labels += [t if assistant and i < spoken else -100 for i, t in enumerate(new)]
        ids = whole
    return ids, labels


def worked_examples(policy, prompt: Prompt, most: int) -> list[Rollout]:
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
        extend(row, ids, 0, [0.0] * len(ids), [0.0] * len(ids), -1)
        row.turns.append({"role": "assistant", "content": text})
        mask = [0] * before + [1] * len(ids)
        found.append(dataclasses.replace(row, ids=list(row.ids), mask=mask, logp=list(row.logp),
                                         entropy=list(row.entropy), version=list(row.version), turns=list(row.turns)))
        if not takes_turn(policy, row, len(found) < turns):
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


TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load_for_supervision(own: argparse.Namespace):
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


def supervised_steps(model, examples: list[tuple[list[int], list[int]]], own: argparse.Namespace, pad: int, log, feed=None):
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
            log(f"step {step + 1}/{own.steps}  loss {total:.4f}")
        yield total
