"""Task `tools`: arithmetic and look-up questions that the policy answers by calling tools over several turns.

The leaves: `calculator` (arithmetic and where it stands in prose), `calls` (the tools and reading calls), `questions`
(samples and the generator), `reward` (what happened in a rollout and what it is worth), `reward_model`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Literal

import numpy as np

from data import Group, Prompt, Rollout, Score, Task, UserError, nearest, rng_of, train_and_heldout, without_heldout
from tasks.tools.calls import ALIASES, TOOLS, parse_tool_calls, run_call, schema
from tasks.tools.questions import Question, read_sample, synthetic
from tasks.tools.reward import LIMITS, PARTS, WEIGHTS, components, read_events, reward, succeeded, value_of

INSTRUCTION = ("Use the tools for every calculation and look-up: one call for each value. When you have them all, end "
               "with the values alone, in the order asked, between <answer> and </answer>, separated by commas.")
MAX_QUESTIONS = {"train": 4000, "heldout": 1000}
MOST_CALLS = 16  # calls of one turn that are run
HASTY = 0.55  # share of the worked examples that answer the first value only
BROKEN = 0.55  # share of the worked examples whose first call lacks its last operand
# Components of the reward that a rollout's flags repeat.
WATCHED = ("coverage", "call_coverage", "right_tool", "preferred_tool", "canonical", "call_count", "repeated_call",
           "tag", "one_tag", "unfinished")
# Columns that are means of a flag: over all rollouts, and over those of questions with arithmetic.
MEANS = {
    "exact_match": "correct",
    "coverage": "coverage",
    "answer_tag_rate": "tag",
    "one_tag_rate": "one_tag",
    "unfinished_rate": "unfinished",
    "calls_mean": "calls",
    "turns_mean": "turns",
}
ARITHMETIC_MEANS = {
    "call_coverage_rate": "call_coverage",
    "right_tool_rate": "right_tool",
    "preferred_tool_rate": "preferred_tool",
    "canonical_rate": "canonical",
    "call_count_rate": "call_count",
}


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
    columns = {
        "exact_match": "share of answers whose values are exactly the gold ones in order",
        "coverage": "share of gold values found in order",
        "tool_success_rate": "share of calls that a tool answered without an error",
        "call_coverage_rate": "questions with arithmetic: share of their expressions that were called",
        "right_tool_rate": "questions with arithmetic: mean share of a rollout's calls to a calculator",
        "preferred_tool_rate": "the same, to a calculator by its first name",
        "canonical_rate": "questions with arithmetic: mean share of a rollout's calls in the exact form",
        "no_tool_rate": "questions with arithmetic: share of rollouts without a call",
        "call_count_rate": "questions with arithmetic: share of rollouts with just as many calls as expressions",
        "repeated_call_rate": "share of calls that repeat another of the rollout",
        "answer_tag_rate": "share of rollouts with an <answer>",
        "one_tag_rate": "share of rollouts with exactly one <answer>",
        "unfinished_rate": "share of rollouts that still wanted a tool at the last turn",
        "answer_length": "characters of the answer",
        "calls_mean": "calls of a rollout",
        "turns_mean": "assistant turns of a rollout",
    }
    eval_columns = columns

    def __init__(self, args):
        super().__init__(args)
        self.weights = read_weights(args.tools_reward)
        self.step = 0
        self.judge = None
        self.allowed = tuple(dict.fromkeys(args.allowed_tools))
        if args.tool_aliases:
            self.allowed += tuple(ALIASES)
        known = [*TOOLS, *ALIASES]
        for name in self.allowed:
            if name not in known:
                raise UserError(f"--allowed-tools {name}: unknown tool{nearest(name, TOOLS)}; there are "
                                f"{', '.join(known)}")
        self.left_out: Counter[str] = Counter()
        if args.data:
            train, heldout, notes = train_and_heldout(args, self._convert)
            self.notes += notes
        else:
            train = self._built_in("train", args.limit)
            heldout = self._built_in("heldout", args.eval_size)
        train, notes = without_heldout(train, heldout, question_of, "questions")
        self.notes += notes
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())
        if not train:
            left_out = f"; left out: {reasons}" if reasons else ""
            raise UserError("no training prompts are left; check --data, --limit and the filters (--require-gold, "
                            f"--math-only, --allowed-tools){left_out}")
        if reasons:
            self.notes.append(f"left out: {reasons}")
        self.set_prompts(train, heldout)

    def prepare_model(self, policy) -> None:
        if self.args.tool_reward_model:
            from tasks.tools.reward_model import RewardModel

            self.judge = RewardModel("--tool-reward-model", self.args.tool_reward_model, policy.device,
                                     policy.hf.dtype)

    # ---- data
    def _convert(self, record: dict) -> Prompt | None:
        """The prompt of a sample, None where a filter leaves it out. Raises ValueError(reason) for a bad one."""
        question = read_sample(record)
        reason = self._filtered(question)
        if reason:
            self.left_out[reason] += 1
            return None
        names = question.tools or list(self.allowed)
        messages = question.messages
        if self.args.tools_instruction and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.args.tools_instruction}, *messages]
        meta = {
            "tools": [schema(name) for name in names],
            "allowed": list(names),
            "expressions": question.expressions,
        }
        return Prompt(messages, question.gold, meta)

    def _filtered(self, question: Question) -> str:
        """Why a question is left out by choice; "" where it is not."""
        if self.args.require_gold and not question.gold:
            return "no gold"
        if self.args.math_only and not question.expressions:
            return "filtered: no arithmetic"
        if set(question.tools) - set(self.allowed):
            return "unsupported tool"
        return ""

    def _built_in(self, part: str, count: int) -> list[Prompt]:
        most = MAX_QUESTIONS[part]
        if part == "train" and not count:
            count = most
        samples = synthetic(part, min(count, most), self.args.tool_questions == "short")
        if self.args.clock == "live":  # the generator's times are those of the table
            samples = (sample for sample in samples if not sample["answers"][0].startswith("2024-"))
        return [prompt for prompt in map(self._convert, samples) if prompt is not None]

    # ---- turns
    def reply(self, rollout: Rollout) -> list[dict] | None:
        """A tool message for each call of the last turn, or None where it has none."""
        calls = parse_tool_calls(rollout.turns[-1]["content"])
        allowed = self._callable(rollout.prompt)
        messages = []
        for call in calls[:MOST_CALLS]:
            messages.append(tool_says(call, allowed, run_call(call, allowed, self.args.clock == "live")))
        if len(calls) > MOST_CALLS:
            refusal = f"error: only the first {MOST_CALLS} calls of a turn are run"
            messages.append(tool_says(calls[MOST_CALLS], allowed, refusal))
        return messages or None

    def _callable(self, prompt: Prompt) -> tuple[str, ...]:
        """The names that a call may use."""
        allowed = tuple(prompt.meta["allowed"])
        if not self.args.tool_aliases:
            return allowed
        aliases = [name for name, tool in ALIASES.items() if tool in allowed and name not in allowed]
        return (*allowed, *aliases)

    # ---- judging
    def score(self, rollouts: list[Rollout]) -> list[Score]:
        judged = self.judge.scores(rollouts) if self.judge else [0.0] * len(rollouts)
        return [self._score_one(rollout, opinion) for rollout, opinion in zip(rollouts, judged, strict=True)]

    def _score_one(self, rollout: Rollout, opinion: float) -> Score:
        if not math.isfinite(opinion):
            return Score.unscorable("the reward model gave no finite score")
        expressions = rollout.prompt.meta["expressions"]
        gold = [value_of(value) for value in rollout.prompt.gold]
        try:
            events = read_events(rollout)
            found = components(events, expressions, gold)
            parts = reward(found, self.weights, self.step, self.args.answer_tag)
            parts["reward_model"] = max(-1.0, min(1.0, opinion))
        except Exception as error:  # whatever a completion breaks is that completion's result
            least = -self.weights["clip"]
            reason = f"{type(error).__name__}: {error}"[:300]
            return Score(least, {"clip": least}, {"correct": False, "answer": None, "error": reason})
        flags = {
            "correct": bool(found["exact"]),
            "answer": events.answer,
            "arithmetic": bool(expressions),
            "calls": len(events.calls),
            "calls_right": sum(map(succeeded, events.calls)),
            "turns": sum(turn["role"] == "assistant" for turn in rollout.turns),
        }
        flags |= {name: found[name] for name in WATCHED}
        return Score(sum(parts.values()), parts, flags)

    def observe(self, groups: list[Group]) -> dict[str, float]:
        self.step += 1
        return self.observe_eval(groups)

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """The rates of `columns`. Those of tools are over questions with arithmetic (success: over all calls)."""
        flags = [score.flags for group in groups for score in group.scores if "calls" in score.flags]
        if not flags:
            return {}
        out = means(flags, MEANS)
        sums = [flag for flag in flags if flag["arithmetic"]]
        if sums:
            out |= means(sums, ARITHMETIC_MEANS)
            out["no_tool_rate"] = mean([flag["calls"] == 0 for flag in sums])
        out["answer_length"] = mean([len(flag["answer"] or "") for flag in flags])
        calls = sum(flag["calls"] for flag in flags)
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
        if rng.random() < HASTY:
            expressions = expressions[:1]
        written = list(expressions)
        if rng.random() < BROKEN:
            written[0] = written[0].rstrip("0123456789)")
        said = "\n".join(call_text(expression) for expression in written)
        asked = {"role": "assistant", "content": said}
        replies = self.reply(Rollout(prompt, [], [], [], [], [], "stop", [asked]))
        values = ["0" if is_error(message) else message["content"] for message in replies]
        return [asked, *replies, {"role": "assistant", "content": answer_text(values)}]

    # ---- behaviour cloning
    def worked_turn(self, rollout: Rollout) -> str | None:
        """The canonical calls of the question's expressions, then the answer: the gold values where there is one for
        each call, else what the tools gave. None where there is nothing to call, or a call fails."""
        if not rollout.turns:
            return self._worked_calls(rollout)
        gold = rollout.prompt.gold
        given = [turn for turn in rollout.turns if turn["role"] == "tool"]
        if len(rollout.turns) != 1 + len(given) or any(map(is_error, given)):
            return None
        values = [turn["content"] for turn in given]
        return answer_text(gold if len(gold) == len(values) else values)

    def _worked_calls(self, rollout: Rollout) -> str | None:
        text = "\n".join(map(call_text, rollout.prompt.meta["expressions"]))
        calls = {"role": "assistant", "content": text}
        given = self.reply(dataclasses.replace(rollout, turns=[calls]))
        if not given or any(map(is_error, given)):
            return None
        return text


def tool_says(call: dict, allowed: tuple[str, ...], text: str) -> dict:
    name = call["name"] if call["name"] in allowed else "error"
    return {"role": "tool", "name": name, "content": text}


def is_error(message: dict) -> bool:
    return message["content"].startswith("error")


def mean(values: list) -> float:
    return float(np.mean(values))


def means(flags: list[dict], names: dict[str, str]) -> dict[str, float]:
    """For each column the mean of its flag."""
    return {column: mean([flag[name] for flag in flags]) for column, name in names.items()}


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
        kind = "finite and not negative" if name in LIMITS else "finite"
        negative = name in LIMITS and weights[name] < 0
        if negative or not math.isfinite(weights[name]):
            raise UserError(f"--tools-reward {change}: it must be {kind}")
    return weights
