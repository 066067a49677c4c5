"""How an answer is read, integrated and scored, in a process of its own."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from data import Prompt
from tasks.physics.equation_text import ParseError, read_answer
from tasks.physics.equations import Equation
from tasks.physics.simulation import SimulationFailed, r_squared, simulate
from tasks.physics.systems import Instance

COMPONENTS = ("match", "match_dense", "correctness", "simplicity", "format")
CORRECT = 0.70  # R² that is correct
NOT_TRIVIAL = 0.10  # R² that earns simplicity
OPERATORS = 12  # operators that earn none of it
RECOVERED = 0.999  # R² against the noiseless trajectory of an equation that is the true one


NOTHING = dict.fromkeys(COMPONENTS, 0.0) | {  # of an answer from which no trajectory follows
    "reason": None,
    "parsed": False,
    "equation": None,
    "recovered": False,
    "worst": None,
    "curve": None,
}
FAILED = NOTHING | {"reason": "over the limits of time or memory"}


class Measured(NamedTuple):
    """A simulation: why it failed or None, R² against the observed and the noiseless trajectory, the simulated one."""

    reason: str | None
    r2: float = 0.0
    clean_r2: float = 0.0
    curve: np.ndarray | None = None


# ---- judging one answer
_measured: OrderedDict[tuple, Measured] = OrderedDict()  # by instance and canonical equation, the newest last


def measure(equation: Equation, instance: Instance) -> Measured:
    """An equation's trajectory and how well it fits; the last 4,096 are kept."""
    observation = (instance.observed.tobytes(), instance.times.tobytes())
    values = (*instance.parameters.items(), *instance.initial.items())
    key = (instance.key, equation.canonical, *observation, *values)
    if key not in _measured:
        try:
            found = simulate(equation, instance.parameters, instance.initial, instance.times)
            observed = r_squared(found, instance.observed)
            _measured[key] = Measured(None, observed, r_squared(found, instance.clean), found)
        except SimulationFailed as reason:
            _measured[key] = Measured(f"the simulation failed: {reason}")
        while len(_measured) > 4096:
            _measured.popitem(last=False)
    return _measured[key]


def score_answer(text: str, instance: Instance | dict | Prompt) -> dict[str, Any]:
    """Judges a completion. Never raises, and takes well under a second whatever the text is.

    Returns the components, each in [0, 1] and without its weight; `reason` (None, or why there is no match at all);
    `parsed`; `equation` (its normal form); `recovered`; `worst` (time, coordinate, observed and simulated value where
    the residual is largest, in units of the coordinate's standard deviation); `curve` (coordinates, samples).
    """
    result: dict[str, Any] = dict(NOTHING)
    try:
        if isinstance(instance, Prompt):
            instance = instance.meta["instance"]
        elif isinstance(instance, dict):
            instance = Instance.from_plain(instance)
        written, stated = read_answer(text)
        own = {name: value for name, value in stated.items() if value != instance.parameters.get(name)}
        equation = instance.system.parse(written, own)
        result["parsed"] = True
        result["equation"] = equation.canonical
        found = measure(equation, instance)
    except ParseError as reason:
        return result | {"reason": f"no equation: {reason}"}
    except (RecursionError, MemoryError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        return result | {"reason": f"no equation: {type(error).__name__}"}
    result["reason"] = found.reason
    if found.curve is None:
        return result
    simplicity = 0.0
    if found.r2 >= NOT_TRIVIAL:
        simplicity = max(0.0, 1 - equation.operators / OPERATORS)
    return result | {
        "match": found.r2,
        "match_dense": found.r2**0.5,
        "correctness": float(found.r2 >= CORRECT),
        "simplicity": simplicity,
        "format": 1.0,
        "recovered": found.clean_r2 >= RECOVERED,
        "worst": worst_residual(instance, found.curve),
        "curve": found.curve.tolist(),
    }


def worst_residual(instance: Instance, curve: np.ndarray) -> list:
    """Time, coordinate, observed and simulated value where the residual is largest, in standard deviations."""
    deviation = np.maximum(instance.observed.std(axis=1, keepdims=True), 1e-30)
    residual = np.abs(curve - instance.observed) / deviation
    row, column = np.unravel_index(np.argmax(residual), residual.shape)
    time = float(instance.times[column])
    name = instance.system.coordinates[row].name
    return [time, name, float(instance.observed[row, column]), float(curve[row, column])]


def score_job(job: dict[str, Any]) -> dict[str, Any]:
    """What a worker does: `score_answer`, with the curve only where it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = score_answer(job["text"], job["instance"])
    return result if job["curve"] else result | {"curve": None}
