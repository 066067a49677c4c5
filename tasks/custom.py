"""Task `custom`: your own prompts (--data) judged by your own functions (--reward), which have TRL's signature.

A function written for TRL's GRPOTrainer runs unchanged: `fn(prompts, completions, completion_ids, **columns)` gives a
number or None (it abstains) for each row, and is called once for all rows of a step. Text prompts are fed as they
stand and their completions are strings; conversational ones are message lists, their completions lists of one message.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable

from data import Group, Prompt, Rollout, Score, Task, UserError, train_and_heldout
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
        train, held, notes = train_and_heldout(args, convert)
        self.notes += dict.fromkeys(notes)  # a file that is both --data and --eval-data is reported once
        # Functions get the same columns in every step, None where a record lacks one.
        self.column_names = sorted({name for prompt in train + held for name in prompt.meta["columns"]})
        seen = {same_prompt(prompt) for prompt in held}
        kept = [prompt for prompt in train if same_prompt(prompt) not in seen]
        if kept and len(kept) < len(train):
            self.notes.append(f"{len(train) - len(kept)} training prompts are also held-out ones and were removed")
        if not kept and args.data != args.eval_data:
            raise UserError(f"no training prompts of {args.data} are left beside the held-out ones")
        self.steps = 0  # steps observed so far: the functions' trainer_state.global_step
        self.deal(kept, held)

    def _add_reward(self, spec: str) -> None:
        try:
            name, weight, function = load_reward(spec)
        except ValueError as error:
            raise UserError(f"--{error}") from error  # it begins with "reward" and the spec
        unique, n = name, 1
        while unique in self.functions:
            n += 1
            unique = f"{name}_{n}"
        self.functions[unique], self.weights[unique] = function, weight

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
        except Exception as error:
            return [error] * len(groups) if isinstance(error, BadReward) else self._judge_each(groups, error)

    def _judge_each(self, groups: list[list[Rollout]], error: Exception) -> list[list[Score] | Exception]:
        out, tried, failed = [], 0, 0
        for group in groups:
            out.append([])
            for row in group:
                try:
                    out[-1] += self._judge([row])
                except Exception as own:
                    failed += 1
                    out[-1].append(Score.unscorable(blame(own)))
                tried += 1
                if tried == failed == 8:
                    return [error] * len(groups)
        return out

    def _judge(self, rows: list[Rollout]) -> list[Score]:
        values = self._call(rows) if rows else {}
        return [self._score_row(row, {name: values[name][i] for name in values}) for i, row in enumerate(rows)]

    def _call(self, rows: list[Rollout]) -> dict[str, list[float | None]]:
        """Each function's values, one a row."""
        prompts = [row.prompt.messages for row in rows]
        completions = [row.text if isinstance(row.prompt.messages, str)
                       else [{"role": "assistant", "content": row.text}] for row in rows]
        ids = [row.ids[row.prompt_length:] for row in rows]
        columns = {name: [row.prompt.meta["columns"].get(name) for row in rows] for name in self.column_names}
        state = types.SimpleNamespace(global_step=self.steps)
        return {name: call_reward(function, prompts, completions, ids, columns, state)
                for name, function in self.functions.items()}

    def _score_row(self, row: Rollout, values: dict[str, float | None]) -> Score:
        parts = {name: value for name, value in values.items() if value is not None}
        if not parts:
            return Score.unscorable("every reward function returned None")
        reward, parts = weighted_sum(parts, self.weights)
        if row.prompt.gold is None:
            return Score(reward, parts)
        answer = final_answer(row.text)
        return Score(reward, parts, {"correct": bool(equivalent(answer, row.prompt.gold)), "answer": answer})

    def observe(self, groups: list[Group]) -> dict[str, float]:
        self.steps += 1
        return {}

    def state_dict(self) -> dict:
        return {"steps": self.steps, **super().state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]
        super().load_state_dict(state)


def convert(record: dict) -> Prompt:
    """The prompt of a record. Raises ValueError(reason) where it has none or one of another type."""
    prompt, gold = record.get("prompt"), record.get("gold")
    if prompt is None or prompt == "" or prompt == []:
        raise ValueError("no prompt")
    if isinstance(prompt, list):
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str)
                   and isinstance(m.get("content"), str | list) for m in prompt):
            raise ValueError("prompt is a list, but not of messages with role and content")
    elif not isinstance(prompt, str):
        raise ValueError("prompt is neither text nor a list of messages")
    columns = {name: value for name, value in record.items() if name not in NOT_COLUMNS}
    return Prompt(prompt, None if gold is None else str(gold), {"columns": columns})


def same_prompt(prompt: Prompt) -> str:
    return json.dumps(prompt.messages, sort_keys=True, default=str)
