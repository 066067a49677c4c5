"""What a trajectory's prompt says, and worked examples of the answer."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np

from data import seed_of
from tasks.physics.equations import left_side
from tasks.physics.systems import SYSTEMS, Coordinate, Instance, System

# ---- the prompt
GRAMMAR = ("The right-hand side may use the variables, t, the parameters, numbers, + - * / ^, brackets, and sin cos "
           "tan exp log sqrt abs sign tanh.")


def short(value: float) -> str:
    return f"{value:.4g}"


def left_sides(system: System) -> list[str]:
    return [left_side(q.name, q.order) for q in system.coordinates]


def full_prompt(instance: Instance, rows: int) -> str:
    """The problem in words: variables, parameters, initial state, a table, statistics, and the form of the answer."""
    system = instance.system
    variables = "; ".join(variable_text(q) for q in system.coordinates)
    initial = ", ".join(f"{name} = {short(value)}" for name, value in instance.initial.items())
    parameters = []
    for name, value in instance.parameters.items():
        unit = system.parameters[name][2]
        parameters.append(f"{name} = {short(value)} {unit}")
    equations = [f"{left} = ..." for left in left_sides(system)]
    seconds = short(instance.times[-1])
    samples = len(instance.times)
    form = {
        "equation": "; ".join(equations),
        "params": dict.fromkeys(instance.parameters, "..."),
        "rationale": "...",
    }
    lines = [
        f"A physical system was observed for {seconds} s ({samples} samples).",
        f"Variables: {variables}; t in s.",
        f"Parameters: {', '.join(parameters)}.",
        f"Initial state: {initial}.",
        "Trajectory:",
        *table_lines(instance, rows),
        "Statistics:",
    ]
    for q, values in zip(system.coordinates, instance.observed, strict=True):
        lines.append(f"{q.name}: {describe(instance.times, values)}")
    lines += [
        f"Find the equation of motion. {GRAMMAR}",
        "Answer with one JSON object of this form:",
        json.dumps(form),
    ]
    return "\n".join(lines)


def variable_text(q: Coordinate) -> str:
    """A coordinate with its unit, and its velocity where it has one."""
    if not q.velocity:
        return f"{q.name} in {q.unit}"
    return f"{q.name} in {q.unit}, {q.velocity} = d{q.name}/dt in {q.unit}/s"


def table_lines(instance: Instance, rows: int) -> list[str]:
    """The observed trajectory at about `rows` times, evenly spaced, under a line of names."""
    names = [q.name for q in instance.system.coordinates]
    lines = [" ".join(["t", *names])]
    last = len(instance.times) - 1
    for i in np.unique(np.linspace(0, last, rows).round().astype(int)):
        values = [instance.times[i], *instance.observed[:, i]]
        lines.append(" ".join(map(short, values)))
    return lines


def describe(times: np.ndarray, values: np.ndarray) -> str:
    """Statistics of a trajectory that hint at its kind: range, end, turning points, period and decay of the peaks."""
    smooth = np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, mode="valid")
    turns = turning_points(smooth, 0.05 * (values.max() - values.min()))
    lowest = times[values.argmin()]
    highest = times[values.argmax()]
    facts = [
        f"mean {short(values.mean())}",
        f"std {short(values.std())}",
        f"min {short(values.min())} at t = {short(lowest)}",
        f"max {short(values.max())} at t = {short(highest)}",
        f"last {short(values[-1])}",
        f"turning points {len(turns)}",
    ]
    if len(turns) > 2:
        period = 2 * float(np.diff(times[turns]).mean())
        swings = np.abs(np.diff(smooth[turns]))
        decay = swings[-1] / max(swings[0], 1e-12)
        facts.append(f"mean period {short(period)}")
        facts.append(f"last swing / first swing {short(decay)}")
    return ", ".join(facts)


def turning_points(smooth: np.ndarray, far: float) -> list[int]:
    """Where a smoothed trajectory turns; one that is no further than `far` from the turn before it is the noise's."""
    slope = np.sign(np.diff(smooth))
    turns = np.flatnonzero(slope[1:] * slope[:-1] < 0) + 1
    kept = []
    for j, i in enumerate(turns):
        if j == 0 or abs(smooth[i] - smooth[turns[j - 1]]) > far:
            kept.append(i)
    return kept


def brief_prompt(instance: Instance, rows: int) -> str:
    """The same facts in few tokens, two digits each: for a tiny model."""
    known = instance.initial | instance.parameters
    facts = [f"{name} {value:.2g}" for name, value in known.items()]
    lines = [", ".join(facts)]
    picked = np.linspace(0, len(instance.times) - 1, rows).round().astype(int)
    for q, values in zip(instance.system.coordinates, instance.observed, strict=True):
        series = [f"{value:.2g}" for value in values[picked]]
        lines.append(f"{q.name}: {' '.join(series)}")
    return "\n".join(lines)


# ---- worked answers
def true_answer(instance: Instance) -> str:
    """The answer that the supervised warm start teaches."""
    answer = {
        "equation": instance.system.equation,
        "params": instance.parameters,
        "rationale": f"This is {instance.system.title}.",
    }
    return json.dumps(answer)


def without_last_term(equation: str) -> str:
    """The equation without the last term of its last right-hand side; 0 where it has only one."""
    head, _, right = equation.rpartition(" = ")
    depth = cut = 0
    for i, character in enumerate(right):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and right[i : i + 3] in (" + ", " - "):
            cut = i
    return f"{head} = {right[:cut] or 0}"


@functools.cache
def variants(system_id: str) -> dict[str, str]:
    """Answers to a system in few characters: the true one, one without a term, one with a wrong sign, a broken one."""
    system = SYSTEMS[system_id]
    true = system.parse(system.equation)
    missing = system.parse(without_last_term(system.equation))
    negated = tuple(-e for e in true.expressions)
    sign = dataclasses.replace(true, expressions=negated)
    found = {}
    for name, equation in (("true", true), ("missing", missing), ("sign", sign)):
        found[name] = json.dumps({"equation": equation.canonical})
    found["broken"] = found["true"].removesuffix('"}') + "("
    return found


def demonstration(instance: Instance, place: int) -> str:
    """A worked example for the tiny model: 25 % are right, 45 % lack a term, 20 % have a wrong sign, 10 % are broken.

    So a model that imitates them can write the true equation, but mostly does not: that it pays is what GRPO finds.
    `place` makes the examples of one instance differ: there is nothing to learn by heart.
    """
    luck = seed_of(0, "physics demonstration", instance.key, place) / 2**63
    answers = variants(instance.system_id)
    if luck < 0.25:
        return answers["true"]
    if luck < 0.70:
        return answers["missing"]
    if luck < 0.90:
        return answers["sign"]
    return answers["broken"]
