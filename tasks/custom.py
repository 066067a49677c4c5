"""Task `custom`: your own prompts (--data) judged by your own functions (--reward), which have TRL's signature.

A function written for TRL's GRPOTrainer runs unchanged: `fn(prompts, completions, completion_ids, **columns)` gives a
number or None (it abstains) for each row, and is called once for all rows of a step. Text prompts are fed as they
stand and their completions are strings; conversational ones are message lists, their completions lists of one message.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable

from data import Group, Prompt, Rollout, Score, Task, UserError, train_and_heldout, without_heldout
from harness.scoring import blame
from rewards import BadReward, call_reward, equivalent, final_answer, load_reward, weighted_sum

NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # what TRL does not pass on as a column either


class CustomTask(Task):
    """Records with a `prompt` (text, or a list of messages) and any other columns, which reach the reward functions.

    A prompt's `meta` holds `columns` (the record's other fields) and, for training prompts, `index`. Its `gold` is
    the `gold` column where there is one: it only feeds the `correct` flag, the reward is the functions' alone.
    """

    def __init__(self, args):
        super().__init__(args)
        if not args.data:
            raise UserError("--task custom needs --data, a file or hub id whose records have a prompt")
        if not args.reward:
            raise UserError("--task custom needs at least one reward function: --reward my_rewards.py:fn[=weight]")
        self.functions: dict[str, Callable] = {}
        self.weights: dict[str, float] = {}
        for spec in args.reward:
            self._add_reward(spec)
        self.parts = tuple(self.functions)
        train, heldout, notes = train_and_heldout(args, convert)
        self.notes += dict.fromkeys(notes)  # a file that is both --data and --eval-data is reported once
        # Functions get the same columns in every step, None where a record lacks one.
        self.column_names = sorted({name for prompt in train + heldout for name in prompt.meta["columns"]})
        train, notes = without_heldout(train, heldout, prompt_text, "prompts")
        self.notes += notes
        if not train and args.data != args.eval_data:
            raise UserError(f"no training prompts of {args.data} are left beside the held-out ones")
        self.steps = 0  # steps observed so far: the functions' trainer_state.global_step
        self.set_prompts(train, heldout)

    def _add_reward(self, spec: str) -> None:
        try:
            name, weight, function = load_reward(spec)
        except ValueError as error:
            raise UserError(f"--{error}") from error  # it begins with "reward" and the spec
        unique = name
        n = 1
        while unique in self.functions:
            n += 1
            unique = f"{name}_{n}"
        self.functions[unique] = function
        self.weights[unique] = weight

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        result = self.score_all([rollouts])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score] | Exception]:
        """One call a function for all rows of the step, as TRL does.

        Where a function raises, a call for each row, so that a completion's fault is its own; where the first eight of
        those raise too, the function is what is broken and the others are not tried.
        """
        rows = [row for group in groups for row in group]
        try:
            scores = iter(self._judge(rows))
            return [[next(scores) for _ in group] for group in groups]
        except UserError:
            raise
        except BadReward as error:
            return [error] * len(groups)
        except Exception as error:
            return self._judge_each(groups, error)

    def _judge_each(self, groups: list[list[Rollout]], error: Exception) -> list[list[Score] | Exception]:
        out = []
        tried = 0
        failed = 0
        for group in groups:
            scores = []
            for row in group:
                try:
                    scores += self._judge([row])
                except Exception as own:
                    failed += 1
                    scores.append(Score.unscorable(blame(own)))
                tried += 1
                if tried == failed == 8:
                    return [error] * len(groups)
            out.append(scores)
        return out

    def _judge(self, rows: list[Rollout]) -> list[Score]:
        values = self._call(rows) if rows else {}
        scores = []
        for i, row in enumerate(rows):
            own = {name: values[name][i] for name in values}
            scores.append(self._score_row(row, own))
        return scores

    def _call(self, rows: list[Rollout]) -> dict[str, list[float | None]]:
        """Each function's values, one a row."""
        prompts = [row.prompt.messages for row in rows]
        completions = [completion_of(row) for row in rows]
        ids = [row.ids[row.prompt_length :] for row in rows]
        columns = {name: [row.prompt.meta["columns"].get(name) for row in rows] for name in self.column_names}
        state = types.SimpleNamespace(global_step=self.steps)
        values = {}
        for name, function in self.functions.items():
            values[name] = call_reward(function, prompts, completions, ids, columns, state)
        return values

    def _score_row(self, row: Rollout, values: dict[str, float | None]) -> Score:
        parts = {name: value for name, value in values.items() if value is not None}
        if not parts:
            return Score.unscorable("every reward function returned None")
        reward, parts = weighted_sum(parts, self.weights)
        if row.prompt.gold is None:
            return Score(reward, parts)
        answer = final_answer(row.text)
        correct = bool(equivalent(answer, row.prompt.gold))
        return Score(reward, parts, {"correct": correct, "answer": answer})

    def observe(self, groups: list[Group]) -> dict[str, float]:
        self.steps += 1
        return {}

    def state_dict(self) -> dict:
        return {"steps": self.steps, **super().state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        super().load_state_dict(state)


def completion_of(row: Rollout) -> str | list[dict]:
    """Text where the prompt is text, else a list of one message."""
    if isinstance(row.prompt.messages, str):
        return row.text
    return [{"role": "assistant", "content": row.text}]


def convert(record: dict) -> Prompt:
    """The prompt of a record. Raises ValueError(reason) where it has none or one of another type."""
    prompt = record.get("prompt")
    if prompt is None or prompt == "" or prompt == []:
        raise ValueError("no prompt")
    if not isinstance(prompt, str | list):
        raise ValueError("prompt is neither text nor a list of messages")
    if isinstance(prompt, list) and not all(map(is_message, prompt)):
        raise ValueError("prompt is a list, but not of messages with role and content")
    gold = record.get("gold")
    columns = {name: value for name, value in record.items() if name not in NOT_COLUMNS}
    return Prompt(prompt, None if gold is None else str(gold), {"columns": columns})


def is_message(value) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list)


def prompt_text(prompt: Prompt) -> str:
    """What two records of one prompt share."""
    return json.dumps(prompt.messages, sort_keys=True, default=str)
