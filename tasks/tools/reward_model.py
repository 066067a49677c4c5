"""A reward model over whole conversations: a Hugging Face sequence classifier with one score."""

from __future__ import annotations

import jinja2
import torch
import transformers
from torch import Tensor

from data import Rollout, UserError
from models.judging import TokenBudget, context_of, load_judge, pad_right


class RewardModel:
    """`scores` gives one number a conversation, in the model's own units."""

    def __init__(self, flag: str, path: str, device: torch.device, dtype: torch.dtype, budget: int = 16_384):
        self.device = device
        self.budget = TokenBudget(budget)
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained
        self.model, self.tokenizer = load_judge(flag, path, classifier, device, dtype)
        if self.model.config.num_labels != 1:
            raise UserError(f"{flag} {path} has {self.model.config.num_labels} labels; a reward model gives one score "
                            "(num_labels 1)")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # by which it finds the last token of a row
        self.longest = context_of(self.model)

    def encode(self, rollout: Rollout) -> list[int]:
        """The conversation under the model's own chat template; where it knows no tool's role, a tool is a user.

        What is too long loses its beginning.
        """
        said = rollout.prompt.messages
        messages = [*([{"role": "user", "content": said}] if isinstance(said, str) else said), *rollout.turns]
        as_users = [{**message, "role": "user" if message["role"] == "tool" else message["role"]}
                    for message in messages]
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(text)[-self.longest :]
        for some in (messages, as_users):
            try:
                shown = self.tokenizer.apply_chat_template(some, tokenize=False)
            except (jinja2.TemplateError, TypeError):
                continue
            if all(message["content"].strip() in shown for message in some):
                return self.tokenizer.encode(shown, add_special_tokens=False)[-self.longest :]
        return self.tokenizer.encode(text)[-self.longest :]

    @torch.no_grad()
    def scores(self, rollouts: list[Rollout]) -> list[float]:
        """One score a rollout, in batches of at most `budget` tokens of similar length."""
        rows = [self.encode(rollout) or [self.tokenizer.pad_token_id] for rollout in rollouts]
        return self.budget.map([len(row) for row in rows], lambda batch: self.logits([rows[i] for i in batch]).tolist())

    def logits(self, rows: list[list[int]]) -> Tensor:
        """(b,) scores of rows of ids."""
        ids, mask = pad_right(rows, self.tokenizer.pad_token_id, self.device)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
