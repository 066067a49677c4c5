"""Task `math`: problems with a known answer, from GSM8K, MATH, chat or plain records, or from the built-in generator.

Reward: 0.85 × correct + 0.15 × format. The built-in word problems need no network; with their worked examples the tiny
model learns the arithmetic, and GRPO has to find out that finishing the work pays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np

from data import (
    Group,
    Prompt,
    Rollout,
    Score,
    Task,
    UserError,
    is_local,
    load_prompts,
    rng_of,
    seed_of,
    train_and_heldout,
)
from rewards import check_golds, equivalent, final_answer, number, partial_credit, step_format

INSTRUCTION = ("Solve the problem step by step. Write each step on a line of its own that begins with its number, "
               "'Step 1:', 'Step 2:' and so on. End with the line 'Final Answer:' followed by the answer alone.")
CORRECT, FORMAT = 0.85, 0.15  # weights of the reward parts


class MathTask(Task):
    """Math problems with a gold answer.

    A prompt's `gold` is the answer as text. Its `meta` holds `question` (text), for training prompts `index` (row in
    the sampler), and for word problems `steps`, the careful solution as (left, operator, right, result) tuples.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        math_max_level: int = 3  # keep MATH records up to this level that have a numeric answer; 0 keeps all of them
        partial_credit: bool = False  # a wrong number earns min(0.85, 1 / (1 + 2·|p - g| / max(|g|, 1))) as `correct`
        math_instruction: str = INSTRUCTION  # the system message of every prompt; empty leaves it out
        sampling_alpha: float = 2.0  # how strongly prompts that are won about half the time are preferred; 0 is uniform

    parts = ("correct", "format")
    columns = ("answer_share",)
    eval_columns = ("answer_share",)

    def __init__(self, args):
        super().__init__(args)
        if not args.sampling_alpha >= 0 or args.math_max_level < 0:
            raise UserError("--sampling-alpha and --math-max-level must be 0 or more")
        self.left_out: Counter[str] = Counter()  # records filtered by choice, by reason
        self.unequal: list[str] = []  # golds that the scorer would not accept as their own answer
        # The process that compares symbols takes seconds to start: meanwhile the model loads.
        threading.Thread(target=equivalent, args=(r"\sqrt{8}", r"2\sqrt{2}"), daemon=True).start()
        train, held = self._load()
        train = self._without_heldout(train, held)
        if not train and args.data != args.eval_data:
            raise UserError("no training prompts are left; check --data, --math-max-level and --limit"
                            + (f" ({self._left_out()})" if self.left_out else ""))
        self.deal(train, held, args.sampling_alpha)
        if self.left_out:
            self.notes.append(f"filtered: {self._left_out()} (--math-max-level {args.math_max_level})")
        if self.unequal:
            shown = ", ".join(repr(gold[:60]) for gold in self.unequal[:5])
            self.notes.append(f"{len(self.unequal)} golds do not equal themselves and were dropped: {shown}")

    # ---- data
    def _load(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and held-out prompts, before the overlap is taken out."""
        args = self.args
        only_evaluated = is_local(args.data) and args.data == args.eval_data
        if args.data and not only_evaluated:
            train, held, notes = train_and_heldout(args, self._convert)
            self.notes += notes
        else:
            train = [] if only_evaluated else self._word_prompts("train", args.limit or MAX_PROBLEMS["train"])
            held = self._heldout_file() if args.eval_data else self._word_prompts("heldout", args.eval_size)
        return [p for p in train if p is not None], [p for p in held if p is not None]

    def _heldout_file(self) -> list[Prompt | None]:
        """--eval-size prompts of --eval-data, the same ones in every run."""
        held, notes = load_prompts(self.args.eval_data, self._convert, self.args.max_bad_records, split="test")
        self.notes += notes
        picked = rng_of(0, "heldout").permutation(len(held))[: self.args.eval_size]
        return [held[i] for i in sorted(picked)]

    def _convert(self, record: dict) -> Prompt | None:
        """The prompt of a record, None where it is left out by choice. Raises ValueError(reason) for a bad one."""
        question, gold = question_and_gold(record)
        if reason := self._filter(record, gold):
            self.left_out[reason] += 1
            return None
        if check_golds([gold]):
            self.unequal.append(gold)
            raise ValueError("gold does not equal itself")
        return self._prompt(question, gold)

    def _filter(self, record: dict, gold: str) -> str | None:
        """Why a MATH record (one with a solution or a level) is left out; None where it stays."""
        limit = self.args.math_max_level
        if limit == 0 or not ("level" in record or "solution" in record):
            return None
        level = record.get("level")
        digits = re.search(r"\d+", str(level))
        if level is not None and (digits is None or int(digits[0]) > limit):
            return f"level over {limit}" if digits else "level unknown"
        return None if is_numeric(gold) else "gold not numeric"

    def _left_out(self) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())

    def _prompt(self, question: str, gold: str, **meta) -> Prompt:
        """The one place where a problem becomes messages."""
        messages = [{"role": "user", "content": question}]
        if self.args.math_instruction:
            messages.insert(0, {"role": "system", "content": self.args.math_instruction})
        return Prompt(messages, gold, {"question": question, **meta})

    def _word_prompts(self, part: str, count: int) -> list[Prompt]:
        problems = word_problems(part, min(count, MAX_PROBLEMS[part]))
        return [self._prompt(question, str(steps[-1][3]), steps=steps) for question, steps in problems]

    def _without_heldout(self, train: list[Prompt], held: list[Prompt]) -> list[Prompt]:
        seen = {same_question(prompt) for prompt in held}
        kept = [prompt for prompt in train if same_question(prompt) not in seen]
        if kept and len(kept) < len(train):
            self.notes.append(f"{len(train) - len(kept)} training questions are also held-out ones and were removed")
        return kept

    # ---- judging
    def score(self, rollouts: list[Rollout]) -> list[Score]:
        verdicts: dict[str | None, bool] = {None: False}  # answers repeat within a group
        return [self._score_one(rollout, verdicts) for rollout in rollouts]

    def _score_one(self, rollout: Rollout, verdicts: dict[str | None, bool]) -> Score:
        try:
            text, gold = rollout.text, rollout.prompt.gold
            answer = final_answer(text, strict=True)
            if answer not in verdicts:
                verdicts[answer] = bool(equivalent(answer, gold))
            correct, form = verdicts[answer], step_format(text)
            value = 1.0 if correct else 0.0
            if self.args.partial_credit and not correct and answer is not None:
                value = partial_credit(answer, gold)
        except Exception as error:  # whatever a completion breaks is that completion's result
            flags = {"correct": False, "answer": None, "has_answer": False, "error": f"{type(error).__name__}: {error}"}
            return Score(0.0, {"correct": 0.0, "format": 0.0}, flags)
        parts = {"correct": CORRECT * value, "format": FORMAT * form}
        flags = {"correct": correct, "gt_match": correct, "answer": answer, "has_answer": answer is not None,
                 "format": form}
        return Score(sum(parts.values()), parts, flags)

    def observe(self, groups: list[Group]) -> dict[str, float]:
        for group in groups:
            verdicts = [score.flags["correct"] for score in group.scores if "correct" in score.flags]
            self.sampler.record(group.prompt.meta["index"], len(verdicts), sum(verdicts))
        return self.observe_eval(groups)

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """Share of completions that state a final answer."""
        flags = [score.flags for group in groups for score in group.scores if "has_answer" in score.flags]
        return {"answer_share": float(np.mean([flag["has_answer"] for flag in flags]))} if flags else {}

    # ---- the warm start
    def demonstration_prompts(self) -> list[Prompt]:
        return self._word_prompts("train", MAX_PROBLEMS["train"])

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        """Worked examples of word problems, deliberately imperfect (see `demonstration`)."""
        return [[{"role": "assistant", "content": demonstration(prompt.meta["question"], prompt.meta["steps"])}]
                for prompt in prompts]


# ---- records
def question_and_gold(record: dict) -> tuple[str, str]:
    """The question and gold answer of a GSM8K, MATH, chat or plain record. Raises ValueError(reason) without them."""
    if record.get("messages") is not None:
        question, gold = _chat_question_and_gold(record["messages"])
    else:
        question = next((record[key] for key in ("question", "problem", "prompt") if record.get(key)), None)
        gold = next((record[key] for key in ("gold", "answer") if record.get(key) is not None), None)
        if gold is None and isinstance(record.get("solution"), str):
            gold = final_answer(record["solution"], strict=True)
    if question is None:
        raise ValueError("no question")
    if not isinstance(question, str):
        raise ValueError("question is not text")
    if gold is None:
        raise ValueError("no gold")
    if isinstance(gold, bool) or not isinstance(gold, (str, int, float)) or (
            isinstance(gold, float) and not math.isfinite(gold)):
        raise ValueError("gold is neither text nor a number")
    question, gold = question.strip(), str(gold).strip()
    if "####" in gold:  # GSM8K: the solution, then '#### 1,234'
        gold = re.sub(r"(?<=\d),(?=\d{3}\b)", "", gold.rpartition("####")[2].strip())
    if not question or not gold:
        raise ValueError("no gold" if question else "no question")
    return question, gold


def _chat_question_and_gold(messages) -> tuple[str | None, str | None]:
    """First user turn (after 'Problem:' where that stands), and the final answer of the last assistant turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of messages")
    question = next((m.get("content") for m in messages if m.get("role") == "user"), None)
    reply = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), None)
    if isinstance(question, str):
        question = question.partition("Problem:")[2] if "Problem:" in question else question
    if not isinstance(reply, str):
        return question, None
    return question, reply if "####" in reply else final_answer(reply, strict=True)


NUMERIC = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\d+/\d+"
                     r"|\d*\\[dt]?frac(?:\{-?\d+\}\{-?\d+\}|\d\d))")


def is_numeric(gold: str) -> bool:
    """Whether a gold is an integer, a decimal or a fraction, money and percent signs aside."""
    bare = re.sub(r"\\[!,;]|\\?[\s$%]", "", gold).removesuffix(".")
    return NUMERIC.fullmatch(bare) is not None and number(gold) is not None


def same_question(prompt: Prompt) -> str:
    """What two wordings of one question share: neither case nor spacing counts."""
    return " ".join(prompt.meta["question"].casefold().split())


# ---- word problems
MAX_PROBLEMS = {"train": 4000, "heldout": 1000}
NAMES = ("Tom", "Mia", "Sam", "Ana", "Ben", "Eva")
ITEMS = ("pens", "cups", "eggs", "hats", "keys", "nuts")
VERBS = {"+": ("buys {} more", "finds {} more", "gets {} more"), "-": ("gives away {}", "loses {}", "sells {}")}
Steps = list[tuple[int, str, int, int]]  # (left, operator, right, result), each left the result before it


@functools.cache
def split_expressions() -> dict[str, dict[int, list[Steps]]]:
    """All a ± b (± c) with operands 1 to 7 and no negative result, as part -> number of steps -> expressions.

    The split, about 15 % held out, is by expression and the same in every run: whatever its wording, no held-out one is
    trained on. Each single sum of a held-out expression still occurs in two training ones: what is held out is the
    problem, not the arithmetic.
    """
    every = [work_out(operands, operators) for count in (1, 2)
             for operands in itertools.product(range(1, 8), repeat=count + 1)
             for operators in itertools.product("+-", repeat=count)]
    every = [steps for steps in every if all(step[3] >= 0 for step in steps)]
    left = Counter(step for steps in every for step in steps)  # how often a sum occurs in training
    split: dict[str, dict[int, list[Steps]]] = {"train": {1: [], 2: []}, "heldout": {1: [], 2: []}}
    goal = {count: round(0.15 * sum(len(steps) == count for steps in every)) for count in (1, 2)}
    for i in rng_of(0, "word problems").permutation(len(every)):
        steps = every[i]
        held = len(split["heldout"][len(steps)]) < goal[len(steps)] and all(left[step] > 2 for step in steps)
        split["heldout" if held else "train"][len(steps)].append(steps)
        left.subtract(steps if held else [])
    return split


def work_out(operands, operators) -> Steps:
    steps, left = [], operands[0]
    for operator, right in zip(operators, operands[1:], strict=True):
        result = left + right if operator == "+" else left - right
        steps.append((left, operator, right, result))
        left = result
    return steps


def word_problems(part: str, count: int) -> Iterator[tuple[str, Steps]]:
    """`count` different problems as (question, steps); every fifth has one step, the others two.

    A smaller `count` gives the beginning of a larger one, in every run.
    """
    pools = split_expressions()[part]
    rng, seen = rng_of(0, "wordings", part), set()
    while len(seen) < count:
        pool = pools[1 if len(seen) % 5 == 4 else 2]
        steps = pool[rng.integers(len(pool))]
        name, items = NAMES[rng.integers(len(NAMES))], ITEMS[rng.integers(len(ITEMS))]
        events = [VERBS[operator][rng.integers(3)].format(right) for _, operator, right, _ in steps]
        owned = items if steps[0][0] != 1 else items.removesuffix("s")
        question = f"{name} has {steps[0][0]} {owned}, {', then '.join(events)}. How many {items} now?"
        if question not in seen:
            seen.add(question)
            yield question, steps


def demonstration(question: str, steps: Steps) -> str:
    """A worked example: 30 % are careful, 65 % hasty (stop after the first step), 5 % have one wrong operator.

    So a model that imitates them is able to finish the work, but mostly does not: that is what GRPO has to find out.
    """
    luck = seed_of(0, "demonstration", question) / 2**63
    if 0.30 <= luck < 0.95:
        steps = steps[:1]
    elif luck >= 0.95:
        steps = _wrong_operator(steps, at=seed_of(0, "slip", question) % len(steps))
    lines = [f"Step {i}: {a}{operator}{b}={result}" for i, (a, operator, b, result) in enumerate(steps, 1)]
    return "\n".join([*lines, f"Final Answer: {steps[-1][3]}"])


def _wrong_operator(steps: Steps, at: int) -> Steps:
    """The steps with another operator in one place, worked out with it; unchanged where all would turn negative."""
    operands = [steps[0][0], *(step[2] for step in steps)]
    for place in (at, *range(len(steps))):
        operators = [step[1] for step in steps]
        operators[place] = "-" if operators[place] == "+" else "+"
        wrong = work_out(operands, operators)
        if all(step[3] >= 0 for step in wrong):
            return wrong
    return steps
