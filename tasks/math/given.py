"""Given problems: the records that are read, those that are left out, and the mixture that two sources are dealt in."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from data import Prompt, Sampler, is_local, load_prompts, rng_of, seed_of, train_and_heldout, without_heldout
from rewards import check_golds
from tasks.math.records import is_numeric, question_and_gold, same_question
from tasks.math.word_problems import MAX_PROBLEMS, topic_of, word_problems


def math_prompt(args, question: str, gold: str | None, **meta) -> Prompt:
    """The one place where a problem becomes messages."""
    messages = [{"role": "user", "content": question}]
    if args.math_instruction:
        messages.insert(0, {"role": "system", "content": args.math_instruction})
    return Prompt(messages, gold, {"question": question, **meta})


def word_prompts(args, part: str, count: int) -> list[Prompt]:
    """`count` word problems of "train" or "heldout", as many as there are at most."""
    prompts = []
    for question, steps in word_problems(part, min(count, MAX_PROBLEMS[part])):
        gold = str(steps[-1][3])
        prompts.append(math_prompt(args, question, gold, steps=steps, topic=topic_of(steps)))
    return prompts


def is_mixed_in(prompt: Prompt) -> bool:
    """Whether it comes from --math-data."""
    return prompt.meta.get("source") == "math"


# ---- reading
class GivenProblems:
    """Training and held-out prompts of --data, --math-data and --eval-data, else word problems, and notes on them."""

    def __init__(self, args):
        self.args = args
        self.notes: list[str] = []
        self.left_out: Counter[str] = Counter()  # records filtered by choice, by reason
        self.unequal: list[str] = []  # golds that the scorer would not accept as their own answer

    def load(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and held-out prompts; no question is in both."""
        train, heldout = self._first_source()
        train += self._second_source()
        train, notes = without_heldout(train, heldout, same_question, "questions")
        self.notes += notes
        return train, heldout

    def reasons(self) -> str:
        """'level over 3: 12, gold not numeric: 2'; empty where nothing is filtered."""
        return ", ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())

    def notes_on_filters(self) -> list[str]:
        """One sentence each on records that were filtered and on golds that were dropped."""
        notes = []
        if self.left_out:
            notes.append(f"filtered: {self.reasons()} (--math-max-level {self.args.math_max_level})")
        if self.unequal:
            shown = ", ".join(repr(gold[:60]) for gold in self.unequal[:5])
            notes.append(f"{len(self.unequal)} golds do not equal themselves and were dropped: {shown}")
        return notes

    def _first_source(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and held-out prompts of --data and --eval-data, before the overlap is taken out."""
        args = self.args
        only_evaluated = is_local(args.data) and args.data == args.eval_data
        if args.data and not only_evaluated:
            train, heldout, notes = train_and_heldout(args, self._convert)
            self.notes += notes
            return train, heldout
        train = [] if only_evaluated else word_prompts(args, "train", args.limit or MAX_PROBLEMS["train"])
        heldout = self._heldout_file() if args.eval_data else word_prompts(args, "heldout", args.eval_size)
        return train, heldout

    def _heldout_file(self) -> list[Prompt]:
        """--eval-size prompts of --eval-data, the same ones in every run."""
        heldout, notes = load_prompts(self.args.eval_data, self._convert, self.args.max_bad_records, split="test")
        self.notes += notes
        picked = rng_of(0, "heldout").permutation(len(heldout))
        picked = picked[: self.args.eval_size]
        return [heldout[i] for i in sorted(picked)]

    def _second_source(self) -> list[Prompt]:
        """The prompts of --math-data."""
        if not self.args.math_data:
            return []
        prompts, notes = load_prompts(self.args.math_data, self._convert, self.args.max_bad_records)
        self.notes += notes
        return [dataclasses.replace(prompt, meta={**prompt.meta, "source": "math"}) for prompt in prompts]

    def _convert(self, record: dict) -> Prompt | None:
        """The prompt of a record, None where it is left out by choice. Raises ValueError(reason) for a bad one."""
        question, gold = question_and_gold(record)
        reason = self._filter(record, gold)
        if reason:
            self.left_out[reason] += 1
            return None
        if check_golds([gold]):
            self.unequal.append(gold)
            raise ValueError("gold does not equal itself")
        meta = {}
        topics = [record[key] for key in ("topic", "type", "subject") if isinstance(record.get(key), str)]
        if topics and topics[0]:
            meta["topic"] = topics[0].strip().lower()
        return math_prompt(self.args, question, gold, **meta)

    def _filter(self, record: dict, gold: str) -> str | None:
        """Why a MATH record (one with a solution or a level) is left out; None where it stays."""
        limit = self.args.math_max_level
        if limit == 0 or not ("level" in record or "solution" in record):
            return None
        level = record.get("level")
        if level is not None:
            digits = re.search(r"\d+", str(level))
            if digits is None:
                return "level unknown"
            if int(digits[0]) > limit:
                return f"level over {limit}"
        return None if is_numeric(gold) else "gold not numeric"


# ---- dealing
class Mixture:
    """Data mixing of two sources, each with a sampler of its own; the share of the second may rise in a ramp.

    The prompts of --math-data stand from index `boundary` on.
    """

    COLUMNS = {"math_share": "share of the step's given problems that came from --math-data"}
    RAMP = 10  # steps

    def __init__(self, args, prompts: list[Prompt], alpha: float):
        self.args = args
        mixed_in = [is_mixed_in(prompt) for prompt in prompts]
        self.boundary = mixed_in.index(True)
        self.first: Sampler | None = None  # where --data gives nothing to train on
        if self.boundary:
            self.first = Sampler(self.boundary, args.seed, alpha)
        self.second = Sampler(sum(mixed_in), seed_of(args.seed, "math data"), alpha)

    def share(self, step: int) -> float:
        """Share of given problems that a step, from 1, takes from --math-data."""
        args = self.args
        if args.math_mix_late < 0:
            return args.math_mix
        risen = min(1.0, max(0.0, (step - args.math_ramp_start) / self.RAMP))
        return args.math_mix + risen * (args.math_mix_late - args.math_mix)

    def draw(self, n: int, step: int, call: int) -> list[int]:
        """Indices of the next `n` prompts, those of --data first."""
        luck = rng_of(self.args.seed, "mix", call).random()
        from_second = int(self.share(step) * n + luck)  # right in the mean
        if self.first is None:
            from_second = n
        indices = []
        if from_second < n:
            indices += self.first.draw(n - from_second)
        indices += [self.boundary + i for i in self.second.draw(from_second)]
        return indices

    def record(self, index: int, tries: int, wins: int) -> None:
        if index < self.boundary:
            self.first.record(index, tries, wins)
        else:
            self.second.record(index - self.boundary, tries, wins)
