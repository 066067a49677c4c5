"""How an answer is read, integrated and scored, in a process of its own."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import numpy as np

from data import Prompt
from tasks.physics.equation_text import ParseError, read_answer
from tasks.physics.equations import Equation
from tasks.physics.simulation import SimulationFailed, r_squared, simulate
from tasks.physics.systems import Instance, system_of

COMPONENTS = ("match", "match_dense", "correctness", "simplicity", "format")
CORRECT, NOT_TRIVIAL, OPERATORS = 0.70, 0.10, 12  # R² that is correct; that earns simplicity; operators that earn none
RECOVERED = 0.999  # R² against the noiseless trajectory of an equation that is the true one


# ---- judging one answer
def parse_equation(text: str, system_id: str) -> Equation:
    """The equation in a completion, for a system. ValueError with a reason where there is none."""
    written, stated = read_answer(text)
    return system_of(system_id).parse(written, stated)


_measured: OrderedDict[tuple, tuple] = OrderedDict()  # by instance and canonical equation, the newest last


def measure(equation: Equation, instance: Instance) -> tuple[str | None, float, float, np.ndarray | None]:
    """(why the simulation failed or None, R² against the observed and the noiseless trajectory, the simulated one)."""
    key = (instance.key, equation.canonical, instance.observed.tobytes(), instance.times.tobytes(),
           *instance.parameters.items(), *instance.initial.items())
    if key not in _measured:
        try:
            found = simulate(equation, instance.parameters, instance.initial, instance.times)
            result = (None, r_squared(found, instance.observed), r_squared(found, instance.clean), found)
        except SimulationFailed as reason:
            result = (f"the simulation failed: {reason}", 0.0, 0.0, None)
        _measured[key] = result
        while len(_measured) > 4096:
            _measured.popitem(last=False)
    return _measured[key]


def score_answer(text: str, instance: Instance | dict | Prompt) -> dict[str, Any]:
    """Judges a completion. Never raises, and takes well under a second whatever the text is.

    Returns the components, each in [0, 1] and without its weight; `reason` (None, or why there is no match at all);
    `parsed`; `equation` (its normal form); `recovered`; `worst` (time, coordinate, observed and simulated value where
    the residual is largest, in units of the coordinate's standard deviation); `curve` (coordinates, samples).
    """
    result: dict[str, Any] = dict.fromkeys(COMPONENTS, 0.0) | {
        "reason": None, "parsed": False, "equation": None, "recovered": False, "worst": None, "curve": None}
    try:
        if isinstance(instance, Prompt):
            instance = instance.meta["instance"]
        elif isinstance(instance, dict):
            instance = Instance.from_plain(instance)
        written, stated = read_answer(text)
        own = {name: value for name, value in stated.items() if value != instance.parameters.get(name)}
        equation = instance.system.parse(written, own)
        result |= {"parsed": True, "equation": equation.canonical}
        result["reason"], r2, clean, found = measure(equation, instance)
    except ParseError as reason:
        return result | {"reason": f"no equation: {reason}"}
    except (RecursionError, MemoryError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        return result | {"reason": f"no equation: {type(error).__name__}"}
    if found is None:
        return result
    residual = np.abs(found - instance.observed) / np.maximum(instance.observed.std(axis=1, keepdims=True), 1e-30)
    row, column = np.unravel_index(np.argmax(residual), residual.shape)
    return result | {
        "match": r2, "match_dense": r2**0.5, "correctness": float(r2 >= CORRECT), "format": 1.0,
        "simplicity": max(0.0, 1 - equation.operators / OPERATORS) if r2 >= NOT_TRIVIAL else 0.0,
        "recovered": clean >= RECOVERED, "curve": found.tolist(),
        "worst": [float(instance.times[column]), instance.system.coordinates[row].name,
                  float(instance.observed[row, column]), float(found[row, column])]}


def score_job(job: dict[str, Any]) -> dict[str, Any]:
    """What a worker does: `score_answer`, with the curve only where it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = score_answer(job["text"], job["instance"])
    return result if job["curve"] else result | {"curve": None}


FAILED = dict.fromkeys(COMPONENTS, 0.0) | {"reason": "over the limits of time or memory", "parsed": False,
                                           "equation": None, "recovered": False, "worst": None, "curve": None}
