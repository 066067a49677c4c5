"""A reward model over whole conversations: a Hugging Face sequence classifier with one score."""

from __future__ import annotations

import jinja2
import torch
import transformers
from torch import Tensor

from data import Rollout, UserError


class RewardModel:
    """`scores` gives one number a conversation, in the model's own units."""

    def __init__(self, flag: str, path: str, device: torch.device, dtype: torch.dtype, budget: int = 16_384):
        self.device, self.budget = device, budget
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            self.model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        except Exception as error:  # hub, torch, safetensors: each has its own classes
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{flag} {path} cannot be loaded: {type(error).__name__}: {reason}") from error
        if self.model.config.num_labels != 1:
            raise UserError(f"{flag} {path} has {self.model.config.num_labels} labels; a reward model gives one score "
                            "(num_labels 1)")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # by which it finds the last token of a row
        self.model = self.model.to(device).eval().requires_grad_(False)
        config = self.model.config.get_text_config()
        self.longest = getattr(config, "max_position_embeddings", None) or 10**9

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
        out, order = [0.0] * len(rows), sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        while order:
            width = len(rows[order[0]])
            some, order = order[: max(1, self.budget // width)], order[max(1, self.budget // width) :]
            for i, score in zip(some, self.logits([rows[i] for i in some], width).tolist(), strict=True):
                out[i] = score
        return out

    def logits(self, rows: list[list[int]], width: int) -> Tensor:
        """(b,) scores of rows of ids, padded on the right to `width`."""
        filler = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [filler] * (width - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()
