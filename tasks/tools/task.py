"""Task `tools`: arithmetic and look-up questions that the policy answers by calling tools over several turns.

The leaves: `calculator` (arithmetic and where it stands in prose), `tool_calls` (the tools and reading calls),
`tool_data` (samples and the generator), `tool_reward` (what happened in a rollout and what it is worth).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Literal

import numpy as np

from data import Group, Prompt, Rollout, Score, Task, UserError, nearest, rng_of, train_and_heldout
from tasks.tools.calls import ALIASES, TOOLS, parse_tool_calls, run_call, schema
from tasks.tools.questions import read_sample, synthetic
from tasks.tools.reward import LIMITS, PARTS, WEIGHTS, components, read_events, reward, succeeded, value_of

__all__ = ["ToolTask", "calculate", "extract_expressions", "parse_tool_calls"]

INSTRUCTION = ("Use the tools for every calculation and look-up: one call for each value. When you have them all, end "
               "with the values alone, in the order asked, between <answer> and </answer>, separated by commas.")
MAX_QUESTIONS = {"train": 4000, "heldout": 1000}
MOST_CALLS = 16  # calls of one turn that are run


class ToolTask(Task):
    """Questions whose values tools can find.

    A prompt's `gold` is the list of its values as text. Its `meta` holds `tools` (schemas for the chat template),
    `allowed` (names that a call may use), `expressions` (those in the question, in order) and, for training prompts,
    `index`.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        require_gold: bool = True  # leave out samples without a gold value
        math_only: bool = False  # keep only questions that hold an arithmetic expression
        allowed_tools: tuple[str, ...] = ("calculate_math", "unit_converter", "get_current_time")  # samples may name
        tool_aliases: bool = False  # calculator and python_math are further names of calculate_math
        clock: Literal["fixed", "live"] = "fixed"  # get_current_time: a fixed table, so that runs repeat, or the clock
        tool_questions: Literal["full", "short"] = "full"  # built-in questions: all kinds, or short sums only
        tools_instruction: str = INSTRUCTION  # the system message of every prompt that has none; empty leaves it out
        answer_tag: Literal["soft", "semi_hard", "hard"] = "semi_hard"  # cap on the reward without <answer>: none, 2, 0
        tool_reward_model: str = ""  # sequence classifier (folder or hub id) whose score, clipped to ±1, is added
        tools_reward: tuple[str, ...] = ()  # NAME=VALUE of the reward's weights and limits; a preset's [tools.reward]

    parts = PARTS
    columns = ("exact_match", "coverage", "tool_success_rate", "call_coverage_rate", "right_tool_rate",
               "preferred_tool_rate", "canonical_rate", "no_tool_rate", "call_count_rate", "repeated_call_rate",
               "answer_tag_rate", "one_tag_rate", "unfinished_rate", "answer_length", "calls_mean", "turns_mean")
    eval_columns = columns

    def __init__(self, args):
        super().__init__(args)
        self.weights = read_weights(args.tools_reward)
        self.step, self.judge = 0, None
        self.allowed = tuple(dict.fromkeys(args.allowed_tools)) + (tuple(ALIASES) if args.tool_aliases else ())
        for name in self.allowed:
            if name not in (*TOOLS, *ALIASES):
                raise UserError(f"--allowed-tools {name}: unknown tool{nearest(name, TOOLS)}; there are "
                                f"{', '.join([*TOOLS, *ALIASES])}")
        self.left_out: Counter[str] = Counter()
        if args.data:
            train, held, notes = train_and_heldout(args, self._convert)
            self.notes += notes
        else:
            train, held = self._built_in("train", args.limit), self._built_in("heldout", args.eval_size)
        asked = {question_of(prompt) for prompt in held}
        kept = [prompt for prompt in train if question_of(prompt) not in asked]
        if len(kept) < len(train):
            self.notes.append(f"{len(train) - len(kept)} training questions are also held-out ones and were removed")
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())
        if not kept:
            raise UserError("no training prompts are left; check --data, --limit and the filters (--require-gold, "
                            f"--math-only, --allowed-tools){f'; left out: {reasons}' if reasons else ''}")
        if reasons:
            self.notes.append(f"left out: {reasons}")
        self.deal(kept, held)

    def prepare_model(self, policy) -> None:
        if self.args.tool_reward_model:
            from tasks.tools.reward_model import RewardModel

            self.judge = RewardModel("--tool-reward-model", self.args.tool_reward_model, policy.device,
                                     policy.hf.dtype)

    # ---- data
    def _convert(self, record: dict) -> Prompt | None:
        """The prompt of a sample, None where a filter leaves it out. Raises ValueError(reason) for a bad one."""
        question = read_sample(record)
        reason = ("no gold" if self.args.require_gold and not question.gold else
                  "filtered: no arithmetic" if self.args.math_only and not question.expressions else
                  "unsupported tool" if set(question.tools) - set(self.allowed) else None)
        if reason:
            self.left_out[reason] += 1
            return None
        names = tuple(question.tools) or self.allowed
        messages = question.messages
        if self.args.tools_instruction and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.args.tools_instruction}, *messages]
        return Prompt(messages, question.gold, {"tools": [schema(name) for name in names], "allowed": list(names),
                                                "expressions": question.expressions})

    def _built_in(self, part: str, count: int) -> list[Prompt]:
        samples = synthetic(part, min(count or MAX_QUESTIONS[part], MAX_QUESTIONS[part]) if part == "train" else
                            min(count, MAX_QUESTIONS[part]), self.args.tool_questions == "short")
        if self.args.clock == "live":  # the generator's times are those of the table
            samples = (sample for sample in samples if not sample["answers"][0].startswith("2024-"))
        return [prompt for prompt in map(self._convert, samples) if prompt is not None]

    # ---- turns
    def reply(self, rollout: Rollout) -> list[dict] | None:
        """A tool message for each call of the last turn, or None where it has none."""
        calls = parse_tool_calls(rollout.turns[-1]["content"])
        allowed, live = tuple(rollout.prompt.meta["allowed"]), self.args.clock == "live"
        if self.args.tool_aliases:
            allowed = (*allowed, *(name for name in ALIASES if ALIASES[name] in allowed and name not in allowed))
        replies = [run_call(call, allowed, live) for call in calls[:MOST_CALLS]]
        names = [call["name"] if call["name"] in allowed else "error" for call in calls]
        if len(calls) > MOST_CALLS:
            replies.append(f"error: only the first {MOST_CALLS} calls of a turn are run")
        return [{"role": "tool", "name": name, "content": text}
                for name, text in zip(names, replies, strict=False)] or None

    # ---- judging
    def score(self, rollouts: list[Rollout]) -> list[Score]:
        judged = self.judge.scores(rollouts) if self.judge else [0.0] * len(rollouts)
        return [self._score_one(rollout, opinion) for rollout, opinion in zip(rollouts, judged, strict=True)]

    def _score_one(self, rollout: Rollout, opinion: float) -> Score:
        if not math.isfinite(opinion):
            return Score.unscorable("the reward model gave no finite score")
        meta, gold = rollout.prompt.meta, [value_of(value) for value in rollout.prompt.gold]
        try:
            events = read_events(rollout)
            found = components(events, meta["expressions"], gold)
            parts = reward(found, self.weights, self.step, self.args.answer_tag)
            parts["reward_model"] = max(-1.0, min(1.0, opinion))
        except Exception as error:  # whatever a completion breaks is that completion's result
            return Score(-self.weights["clip"], {"clip": -self.weights["clip"]},
                         {"correct": False, "answer": None, "error": f"{type(error).__name__}: {error}"[:300]})
        flags = {"correct": bool(found["exact"]), "answer": events.answer, "arithmetic": bool(meta["expressions"]),
                 "calls": len(events.calls), "calls_right": sum(map(succeeded, events.calls)),
                 "turns": sum(turn["role"] == "assistant" for turn in rollout.turns)}
        flags |= {name: found[name] for name in ("coverage", "call_coverage", "right_tool", "preferred_tool",
        "canonical",
                                                 "call_count", "repeated_call", "tag", "one_tag", "unfinished")}
        return Score(sum(parts.values()), parts, flags)

    def observe(self, groups: list[Group]) -> dict[str, float]:
        self.step += 1
        return self.observe_eval(groups)

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """The rates of `columns`. Those of tools are over questions with arithmetic (success: over all calls)."""
        flags = [score.flags for group in groups for score in group.scores if "calls" in score.flags]
        sums = [flag for flag in flags if flag["arithmetic"]]
        calls = sum(flag["calls"] for flag in flags)
        shares = {"exact_match": (flags, "correct"), "coverage": (flags, "coverage"), "answer_tag_rate": (flags, "tag"),
                  "one_tag_rate": (flags, "one_tag"), "unfinished_rate": (flags, "unfinished"),
                  "calls_mean": (flags, "calls"), "turns_mean": (flags, "turns"),
                  "call_coverage_rate": (sums, "call_coverage"), "right_tool_rate": (sums, "right_tool"),
                  "preferred_tool_rate": (sums, "preferred_tool"), "canonical_rate": (sums, "canonical"),
                  "call_count_rate": (sums, "call_count")}
        out = {name: float(np.mean([flag[key] for flag in some])) for name, (some, key) in shares.items() if some}
        if sums:
            out["no_tool_rate"] = float(np.mean([flag["calls"] == 0 for flag in sums]))
        if flags:
            out["answer_length"] = float(np.mean([len(flag["answer"] or "") for flag in flags]))
        if calls:
            out["tool_success_rate"] = sum(flag["calls_right"] for flag in flags) / calls
            out["repeated_call_rate"] = sum(flag["repeated_call"] for flag in flags) / calls
        return out

    # ---- what comes next
    def state_dict(self) -> dict:
        return {**super().state_dict(), "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.step = state["step"]

    # ---- the warm start
    def demonstration_prompts(self) -> list[Prompt]:
        return [prompt for prompt in self._built_in("train", 0) if prompt.meta["expressions"]]

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        return [self._demonstration(prompt) for prompt in prompts]

    def _demonstration(self, prompt: Prompt) -> list[dict]:
        """A worked example, deliberately imperfect: so a model that imitates it can do the work, but mostly does not.

        Of questions for several values, 45 % are careful and 55 % hasty (the first value only). In 55 % of all, careful
        or not, the first call lacks its last operand, which the calculator refuses, and 0 stands for its value.
        """
        expressions = list(prompt.meta["expressions"])
        rng = rng_of(0, "demonstration", prompt.messages[-1]["content"])
        if rng.random() < 0.55:
            expressions = expressions[:1]
        written = list(expressions)
        if rng.random() < 0.55:
            written[0] = written[0].rstrip("0123456789)")
        said = "\n".join(call_text(expression) for expression in written)
        row = Rollout(prompt, [], [], [], [], [], "stop", [{"role": "assistant", "content": said}])
        replies = self.reply(row)
        values = ["0" if message["content"].startswith("error") else message["content"] for message in replies]
        return [row.turns[0], *replies, {"role": "assistant", "content": answer_text(values)}]

    # ---- behaviour cloning
    def worked_turn(self, rollout: Rollout) -> str | None:
        """The canonical calls of the question's expressions, then the answer: the gold values where there is one for
        each call, else what the tools gave. None where there is nothing to call, or a call fails."""
        expressions, gold = rollout.prompt.meta["expressions"], rollout.prompt.gold
        if not rollout.turns:
            calls = {"role": "assistant", "content": "\n".join(map(call_text, expressions))}
            given = self.reply(dataclasses.replace(rollout, turns=[calls])) or [{"content": "error"}]
            return None if any(turn["content"].startswith("error") for turn in given) else calls["content"]
        given = [turn["content"] for turn in rollout.turns if turn["role"] == "tool"]
        if len(rollout.turns) != 1 + len(given) or any(value.startswith("error") for value in given):
            return None
        return answer_text(gold if len(gold) == len(given) else given)


def call_text(expression: str) -> str:
    """The canonical call of an expression."""
    value = {"name": "calculate_math", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(value, ensure_ascii=False)}</tool_call>"


def answer_text(values: list[str]) -> str:
    return f"<answer>{', '.join(values)}</answer>"


def question_of(prompt: Prompt) -> str:
    """What two wordings of one question share: neither case nor spacing counts."""
    return " ".join(prompt.messages[-1]["content"].casefold().split())


def read_weights(changes: tuple[str, ...]) -> dict[str, float]:
    """The reward's weights and limits with NAME=VALUE changes."""
    weights = {**WEIGHTS, **LIMITS}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in weights:
            raise UserError(f"--tools-reward {change}: unknown weight {name}{nearest(name, weights)}")
        try:
            weights[name] = float(value)
        except ValueError:
            raise UserError(f"--tools-reward {change}: {value!r} is no number") from None
        if not math.isfinite(weights[name]) or (name in LIMITS and weights[name] < 0):
            kind = "finite and not negative" if name in LIMITS else "finite"
            raise UserError(f"--tools-reward {change}: it must be {kind}")
    return weights
