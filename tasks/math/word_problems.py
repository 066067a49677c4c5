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
FAULTS = ("operator", "operand", "result", "answer")
Steps = list[tuple[int, str, int, int]]  # (left, operator, right, result), each left the result before it


@functools.cache
def split_expressions() -> dict[str, dict[int, list[Steps]]]:
    """All a ± b (± c) with operands 1 to 7 and no negative result, as part -> number of steps -> expressions.

    The split, about 15 % held out, is by expression and the same in every run: whatever its wording, no held-out one is
    trained on. Each single sum of a held-out expression still occurs in two training ones: what is held out is the
    problem, not the arithmetic.
    """
    every = _expressions()
    lengths = Counter(len(steps) for steps in every)
    left = Counter(itertools.chain(*every))  # how often a sum occurs in training
    train: dict[int, list[Steps]] = {1: [], 2: []}
    heldout: dict[int, list[Steps]] = {1: [], 2: []}
    for i in rng_of(0, "word problems").permutation(len(every)):
        steps = every[i]
        count = len(steps)
        goal = round(0.15 * lengths[count])
        if len(heldout[count]) < goal and all(left[step] > 2 for step in steps):
            heldout[count].append(steps)
            left.subtract(steps)
        else:
            train[count].append(steps)
    return {"train": train, "heldout": heldout}


def _expressions() -> list[Steps]:
    every = []
    for count in (1, 2):
        for operands in itertools.product(range(1, 8), repeat=count + 1):
            for operators in itertools.product("+-", repeat=count):
                steps = work_out(operands, operators)
                if _no_negative(steps):
                    every.append(steps)
    return every


def _no_negative(steps: Steps) -> bool:
    return all(result >= 0 for _, _, _, result in steps)


def work_out(operands, operators) -> Steps:
    """The steps of operands joined by operators, from left to right."""
    steps = []
    left = operands[0]
    for operator, right in zip(operators, operands[1:], strict=True):
        result = _apply(left, operator, right)
        steps.append((left, operator, right, result))
        left = result
    return steps


def _apply(left: int, operator: str, right: int) -> int:
    return left + right if operator == "+" else left - right


def _parts(steps: Steps) -> tuple[list[int], list[str]]:
    """Operands and operators: what `work_out` made the steps from."""
    operands = [steps[0][0]]
    operators = []
    for _, operator, right, _ in steps:
        operands.append(right)
        operators.append(operator)
    return operands, operators


def step_lines(steps: Steps) -> list[str]:
    lines = []
    for i, (left, operator, right, result) in enumerate(steps, 1):
        lines.append(f"Step {i}: {left}{operator}{right}={result}")
    return lines


def word_problems(part: str, count: int) -> Iterator[tuple[str, Steps]]:
    """`count` different problems as (question, steps); every fifth has one step, the others two.

    A smaller `count` gives the beginning of a larger one, in every run.
    """
    pools = split_expressions()[part]
    rng = rng_of(0, "wordings", part)
    seen: set[str] = set()
    while len(seen) < count:
        pool = pools[1 if len(seen) % 5 == 4 else 2]
        steps = pool[rng.integers(len(pool))]
        question = _wording(steps, rng)
        if question not in seen:
            seen.add(question)
            yield question, steps


def _wording(steps: Steps, rng) -> str:
    name = NAMES[rng.integers(len(NAMES))]
    items = ITEMS[rng.integers(len(ITEMS))]
    events = []
    for _, operator, right, _ in steps:
        verb = VERBS[operator][rng.integers(3)]
        events.append(verb.format(right))
    owned = steps[0][0]
    unit = items.removesuffix("s") if owned == 1 else items
    return f"{name} has {owned} {unit}, {', then '.join(events)}. How many {items} now?"


def demonstration(question: str, steps: Steps) -> str:
    """A worked example: 30 % are careful, 65 % hasty (stop after the first step), 5 % have one wrong operator.

    So a model that imitates them is able to finish the work, but mostly does not: that is what GRPO has to find out.
    """
    luck = seed_of(0, "demonstration", question) / 2**63
    if 0.30 <= luck < 0.95:
        steps = steps[:1]
    elif luck >= 0.95:
        at = seed_of(0, "slip", question) % len(steps)
        steps = _wrong_operator(steps, at)
    return "\n".join([*step_lines(steps), f"Final Answer: {steps[-1][3]}"])


def _wrong_operator(steps: Steps, at: int) -> Steps:
    """The steps with another operator in one place, worked out with it; unchanged where all would turn negative."""
    operands, right_operators = _parts(steps)
    for place in (at, *range(len(steps))):
        operators = list(right_operators)
        operators[place] = "-" if operators[place] == "+" else "+"
        wrong = work_out(operands, operators)
        if _no_negative(wrong):
            return wrong
    return steps


# ---- questions, for self-play
def topic_of(steps: Steps) -> str:
    operators = {step[1] for step in steps}
    if len(operators) > 1:
        return "mixed"
    return "addition" if operators == {"+"} else "subtraction"


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
        luck = rng.random()
        written = list(steps)
        answer = steps[-1][3]
        if 0.45 <= luck < 0.85:
            written = steps[:1]
            answer = written[-1][3]
        elif luck >= 0.85:
            written, answer = _spoilt(steps, rng)
        verdicts = [step == asked for step, asked in zip(written, steps, strict=False)]
        verdicts.append(answer == steps[-1][3])
        yield question, step_lines(written), str(answer), verdicts


def _spoilt(steps: Steps, rng) -> tuple[Steps, int]:
    """The steps with one fault that what follows is worked out from, and the answer that comes of it."""
    at = int(rng.integers(len(steps)))
    fault = FAULTS[rng.integers(len(FAULTS))]
    if fault == "answer":
        return list(steps), max(0, steps[-1][3] + _slip(rng))
    if fault == "operator":
        wrong = _wrong_operator(steps, at)
        return wrong, wrong[-1][3]
    operands, operators = _parts(steps)
    slip = 0
    if fault == "operand":
        operands[at + 1] = 1 + (operands[at + 1] + int(rng.integers(6))) % 7
    else:
        slip = _slip(rng)
    written = []
    left = operands[0]
    for i, (operator, right) in enumerate(zip(operators, operands[1:], strict=True)):
        result = _apply(left, operator, right)
        if i == at:
            result += slip
        result = max(0, result)
        written.append((left, operator, right, result))
        left = result
    return written, left


def _slip(rng) -> int:
    return int(rng.choice([-2, -1, 1, 2]))
