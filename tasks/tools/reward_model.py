"""A reward model over whole conversations: a Hugging Face sequence classifier with one score."""

from __future__ import annotations

import jinja2
import torch
import transformers
from torch import Tensor

from data import Rollout, UserError
from models.judging import TokenBudget, load_judge, pad_right
from models.loading import context_of


class RewardModel:
    """`scores` gives one number a conversation, in the model's own units."""

    def __init__(self, flag: str, path: str, device: torch.device, dtype: torch.dtype, budget: int = 16_384):
        self.device = device
        self.budget = TokenBudget(budget)
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained
        self.model, self.tokenizer = load_judge(flag, path, classifier, device, dtype)
        labels = self.model.config.num_labels
        if labels != 1:
            raise UserError(f"{flag} {path} has {labels} labels; a reward model gives one score (num_labels 1)")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # by which it finds the last token of a row
        self.longest = context_of(self.model)

    def encode(self, rollout: Rollout) -> list[int]:
        """The conversation under the model's own chat template; where it knows no tool's role, a tool is a user.

        What is too long loses its beginning.
        """
        said = rollout.prompt.messages
        if isinstance(said, str):
            said = [{"role": "user", "content": said}]
        messages = [*said, *rollout.turns]
        shown = self.shown(messages)
        if shown is not None:
            return self.tokenizer.encode(shown, add_special_tokens=False)[-self.longest :]
        text = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return self.tokenizer.encode(text)[-self.longest :]

    def shown(self, messages: list[dict]) -> str | None:
        """The text that the chat template makes of all messages; None where there is none, or it shows not all."""
        if self.tokenizer.chat_template is None:
            return None
        without_tools = [as_user(message) for message in messages]
        for some in (messages, without_tools):
            try:
                shown = self.tokenizer.apply_chat_template(some, tokenize=False)
            except (jinja2.TemplateError, TypeError):
                continue
            missing = [message for message in some if message["content"].strip() not in shown]
            if not missing:
                return shown
        return None

    @torch.no_grad()
    def scores(self, rollouts: list[Rollout]) -> list[float]:
        """One score a rollout, in batches of at most `budget` tokens of similar length."""
        empty = [self.tokenizer.pad_token_id]
        rows = [self.encode(rollout) or empty for rollout in rollouts]
        lengths = [len(row) for row in rows]
        return self.budget.map(lengths, lambda batch: self.logits([rows[i] for i in batch]).tolist())

    def logits(self, rows: list[list[int]]) -> Tensor:
        """(b,) scores of rows of ids."""
        ids, mask = pad_right(rows, self.tokenizer.pad_token_id, self.device)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()


def as_user(message: dict) -> dict:
    """A tool's message as the user's, for a template that knows no tool's role."""
    return {**message, "role": "user"} if message["role"] == "tool" else message
