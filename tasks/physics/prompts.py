"""What a trajectory's prompt says, and worked examples of the answer."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np

from data import seed_of
from tasks.physics.systems import SYSTEMS, Instance, System

# ---- the prompt
GRAMMAR = ("The right-hand side may use the variables, t, the parameters, numbers, + - * / ^, brackets, and sin cos "
           "tan exp log sqrt abs sign tanh.")


def short(value: float) -> str:
    return f"{value:.4g}"


def left_sides(system: System) -> list[str]:
    return [f"d2{q.name}/dt2" if q.order == 2 else f"d{q.name}/dt" for q in system.coordinates]


def full_prompt(instance: Instance, rows: int) -> str:
    """The problem in words: variables, parameters, initial state, a table, statistics, and the form of the answer."""
    system = instance.system
    variables = [f"{q.name} in {q.unit}" + (f", {q.velocity} = d{q.name}/dt in {q.unit}/s" if q.velocity else "")
                 for q in system.coordinates]
    parameters = [f"{name} = {short(value)} {system.parameters[name][2]}" for name, value in
                  instance.parameters.items()]
    picked = np.unique(np.linspace(0, len(instance.times) - 1, rows).round().astype(int))
    table = [" ".join(["t", *(q.name for q in system.coordinates)])] + [
        " ".join([short(instance.times[i]), *map(short, instance.observed[:, i])]) for i in picked]
    statistics = [f"{q.name}: {describe(instance.times, values)}"
                  for q, values in zip(system.coordinates, instance.observed, strict=True)]
    form = {"equation": "; ".join(f"{left} = ..." for left in left_sides(system)),
            "params": dict.fromkeys(instance.parameters, "..."), "rationale": "..."}
    return "\n".join([
        f"A physical system was observed for {short(instance.times[-1])} s ({len(instance.times)} samples).",
        f"Variables: {'; '.join(variables)}; t in s.", f"Parameters: {', '.join(parameters)}.",
        f"Initial state: {', '.join(f'{name} = {short(value)}' for name, value in instance.initial.items())}.",
        "Trajectory:", *table, "Statistics:", *statistics,
        "Find the equation of motion. " + GRAMMAR, "Answer with one JSON object of this form:", json.dumps(form)])


def describe(times: np.ndarray, values: np.ndarray) -> str:
    """Statistics of a trajectory that hint at its kind: range, end, turning points, period and decay of the peaks."""
    smooth = np.convolve(np.pad(values, 2, mode="edge"), np.ones(5) / 5, mode="valid")
    slope = np.sign(np.diff(smooth))
    turns = np.flatnonzero(slope[1:] * slope[:-1] < 0) + 1
    far = 0.05 * (values.max() - values.min())
    turns = [i for j, i in enumerate(turns) if j == 0 or abs(smooth[i] - smooth[turns[j - 1]]) > far]  # not the noise's
    text = (f"mean {short(values.mean())}, std {short(values.std())}, min {short(values.min())} at t = "
            f"{short(times[values.argmin()])}, max {short(values.max())} at t = {short(times[values.argmax()])}, "
            f"last {short(values[-1])}, turning points {len(turns)}")
    if len(turns) > 2:
        period = 2 * float(np.diff(times[turns]).mean())
        swings = np.abs(np.diff(smooth[turns]))
        text += f", mean period {short(period)}, last swing / first swing {short(swings[-1] / max(swings[0], 1e-12))}"
    return text


def brief_prompt(instance: Instance, rows: int) -> str:
    """The same facts in few tokens, two digits each: for a tiny model."""
    facts = [f"{name} {value:.2g}" for name, value in (instance.initial | instance.parameters).items()]
    picked = np.linspace(0, len(instance.times) - 1, rows).round().astype(int)
    series = [f"{q.name}: {' '.join(f'{v:.2g}' for v in values[picked])}" for q, values in
              zip(instance.system.coordinates, instance.observed, strict=True)]
    return "\n".join([", ".join(facts), *series])


# ---- worked answers
def true_answer(instance: Instance) -> str:
    """The answer that the supervised warm start teaches."""
    return json.dumps({"equation": instance.system.equation, "params": instance.parameters,
                       "rationale": f"This is {instance.system.title}."})


def without_last_term(equation: str) -> str:
    """The equation without the last term of its last right-hand side; 0 where it has only one."""
    head, _, right = equation.rpartition(" = ")
    depth, cut = 0, 0
    for i, character in enumerate(right):
        depth += (character == "(") - (character == ")")
        if depth == 0 and right[i : i + 3] in (" + ", " - "):
            cut = i
    return f"{head} = {right[:cut] or 0}"


@functools.cache
def variants(system_id: str) -> dict[str, str]:
    """Answers to a system in few characters: the true one, one without a term, one with a wrong sign, a broken one."""
    system = SYSTEMS[system_id]
    true = system.parse(system.equation)
    sign = dataclasses.replace(true, expressions=tuple(-e for e in true.expressions))
    texts = {"true": true.canonical, "missing": system.parse(without_last_term(system.equation)).canonical,
             "sign": sign.canonical}
    spelt = {name: json.dumps({"equation": text}) for name, text in texts.items()}
    return spelt | {"broken": spelt["true"].removesuffix('"}') + "("}


def demonstration(instance: Instance, place: int) -> str:
    """A worked example for the tiny model: 25 % are right, 45 % lack a term, 20 % have a wrong sign, 10 % are broken.

    So a model that imitates them can write the true equation, but mostly does not: that it pays is what GRPO finds.
    `place` makes the examples of one instance differ: there is nothing to learn by heart.
    """
    luck = seed_of(0, "physics demonstration", instance.key, place) / 2**63
    kind = "true" if luck < 0.25 else "missing" if luck < 0.70 else "sign" if luck < 0.90 else "broken"
    return variants(instance.system_id)[kind]
