"""What a reply looks like to the policy: the chat template's text after its own turn, as token ids."""

from __future__ import annotations

import json

from data import Rollout, UserError


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
    suffix = policy.render(head + reply, row.prompt, True).rpartition(mark)[2]
    for message in reply:
        said = message["content"].strip()
        if said not in suffix and json.dumps(said, ensure_ascii=False)[1:-1] not in suffix:
            raise UserError(f"the chat template of {policy.args.model} leaves out a message of role {message['role']}, "
                            "so the policy would never see it; give another with --chat-template FILE")
    new = policy.tokenizer.encode(suffix, add_special_tokens=False)
    for i, token in enumerate(new[:4]):
        if token == row.ids[-1]:
            return new[i + 1 :]
        if policy.tokenizer.decode([token]).strip():
            break
    return new
