"""Chat templates: the suffix of a reply, the id that closes a turn, the ids that end a row."""

from __future__ import annotations

import contextlib
import json

from data import Prompt, Rollout, UserError


def reply_ids(policy, row: Rollout, reply: list[dict]) -> list[int]:
    """Ids from the end of the policy's last turn to where it speaks again. What it wrote is never tokenised anew.

    The stop token that it wrote stands for the template's own, also where the template has white space before it. A
    template that shows the policy nothing of a reply is a user's error.
    """
    if isinstance(row.prompt.messages, str):
        raise UserError("a task that replies needs chat messages as its prompts, not plain text")
    mark = "replysuffixmark"
    while any(mark in message["content"] for message in reply):  # a tool may repeat what the policy wrote
        mark += "x"
    head = list(row.prompt.messages) + row.turns[:-1] + [{"role": "assistant", "content": mark}]
    rendered = policy.render(head + reply, row.prompt, True)
    suffix = rendered.rpartition(mark)[2]
    for message in reply:
        said = message["content"].strip()
        as_json = json.dumps(said, ensure_ascii=False)[1:-1]
        if said not in suffix and as_json not in suffix:
            raise UserError(f"the chat template of {policy.args.model} leaves out a message of role {message['role']}, "
                            "so the policy would never see it; give another with --chat-template FILE")
    new = policy.tokenizer.encode(suffix, add_special_tokens=False)
    for i, token in enumerate(new[:4]):
        if token == row.ids[-1]:
            return new[i + 1 :]
        if policy.tokenizer.decode([token]).strip():
            break
    return new


def closing_id(policy) -> int:
    """The id that ends an assistant's turn: what the chat template writes there, where it is a stop id, else the first
    stop id."""
    if policy.tokenizer.chat_template is not None:
        mark = "closingidmark"
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        text = policy.render(said, Prompt(said), False)
        suffix = text.rpartition(mark)[2]
        after = policy.tokenizer.encode(suffix, add_special_tokens=False)
        if mark in text and after and after[0] in policy.stop_ids:
            return after[0]
    return policy.stop_ids[0]


def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a row: the tokenizer's, the generation config's, and the one the chat template closes with."""
    found = {tokenizer.eos_token_id}
    eos = getattr(model.generation_config, "eos_token_id", None)
    found |= set(eos) if isinstance(eos, list | tuple) else {eos}
    if tokenizer.chat_template is not None:
        mark = "stopidprobe"
        with contextlib.suppress(Exception):  # a template may insist on other roles: the other two sources remain
            said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
            text = tokenizer.apply_chat_template(said, tokenize=False)
            suffix = text.rpartition(mark)[2].lstrip()
            after = tokenizer.encode(suffix, add_special_tokens=False)
            if mark in text and after and after[0] in tokenizer.added_tokens_decoder:
                found.add(after[0])
    return sorted(found - {None})
