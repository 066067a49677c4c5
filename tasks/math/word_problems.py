"""Word problems with worked examples, for the tiny model: solutions, questions, and steps for its process model.

They need no network. All texts are drawn from seed 0, so that every run of a sweep has the same ones.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

from data import rng_of, seed_of

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


# ---- questions, for self-play
def topic_of(steps: Steps) -> str:
    operators = {step[1] for step in steps}
    return "mixed" if len(operators) > 1 else "addition" if operators == {"+"} else "subtraction"


def difficulty_of(steps: Steps) -> float:
    """On the scale from 0 to 1: 0.3 for one step, 0.6 for two."""
    return 0.3 * len(steps)


# ---- steps, for the tiny process model
def judged_solutions(count: int) -> Iterator[tuple[str, list[str], str, list[bool]]]:
    """`count` solutions as (question, steps, answer, which of the steps and of the answer are right).

    45 % are careful, 40 % hasty (they stop after the first step), 15 % wrong somewhere: an operator, an operand, a
    result, or the answer alone. A step is right where it is the one that the question asks for and its result holds.
    """
    for question, steps in word_problems("train", count):
        rng = rng_of(0, "judged", question)
        written, luck = list(steps), rng.random()
        answer = steps[-1][3]
        if 0.45 <= luck < 0.85:
            written = steps[:1]
            answer = written[-1][3]
        elif luck >= 0.85:
            written, answer = _spoilt(steps, rng)
        lines = [f"Step {i}: {a}{operator}{b}={result}" for i, (a, operator, b, result) in enumerate(written, 1)]
        verdicts = [step in steps[i:i + 1] for i, step in enumerate(written)]
        yield question, lines, str(answer), [*verdicts, answer == steps[-1][3]]


def _spoilt(steps: Steps, rng) -> tuple[Steps, int]:
    """The steps with one fault that what follows is worked out from, and the answer that comes of it."""
    at, fault = int(rng.integers(len(steps))), rng.integers(4)
    if fault == 3:
        return list(steps), max(0, steps[-1][3] + int(rng.choice([-2, -1, 1, 2])))
    if fault == 0:
        wrong = _wrong_operator(steps, at)
        return wrong, wrong[-1][3]
    operands, operators = [steps[0][0], *(step[2] for step in steps)], [step[1] for step in steps]
    slip = 0
    if fault == 1:
        operands[at + 1] = 1 + (operands[at + 1] + int(rng.integers(6))) % 7
    else:
        slip = int(rng.choice([-2, -1, 1, 2]))
    written, left = [], operands[0]
    for i, (operator, right) in enumerate(zip(operators, operands[1:], strict=True)):
        result = max(0, (left + right if operator == "+" else left - right) + (slip if i == at else 0))
        written.append((left, operator, right, result))
        left = result
    return written, left
