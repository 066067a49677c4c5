"""An equation of motion as a trajectory: integrated on the observed times, under limits that hold in any thread.

The limits are counted in the right-hand side, where the integrator comes back to us: no signals, no watching thread.
"""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import sympy
from scipy.integrate import LSODA, solve_ivp
from sympy.printing.pycode import PythonCodePrinter

from tasks.physics.equations import FUNCTIONS, Equation

CALLS = 2000  # evaluations of the right-hand side in one simulation
SECONDS = 0.8  # wall time of one simulation
BLOW_UP = 1e9  # times the largest initial value (at least 1)
RTOL = 1e-4  # true equations lose under 1e-5 of R² by it and by ATOL
ATOL = 1e-6  # times the size of the initial values


class SimulationFailed(Exception):
    """The equation has no trajectory within the limits; the message says why."""


class _Code(PythonCodePrinter):
    """Python for floats: a power of a negative number is an error, not a complex number."""

    def _print_Pow(self, expr, **_):
        base = self._print(expr.base)
        exponent = expr.exp
        if exponent == -1:
            return f"(1/({base}))"
        if exponent.is_Integer and exponent <= 0:
            return f"(1/({base})**{-exponent})"
        written = self._print(exponent)
        return f"(({base})**{written})" if exponent.is_Integer else f"power({base}, {written})"

    def _print_sign(self, expr):
        return f"sign({self._print(expr.args[0])})"


def _power(base: float, exponent: float) -> float:
    return math.sqrt(base) if exponent == 0.5 else math.pow(base, exponent)


@functools.lru_cache(maxsize=1024)
def compiled(expressions: tuple[sympy.Expr, ...], names: tuple[str, ...]):
    """A function of floats, in the order of `names`, that returns the list of the expressions' values."""
    settings = {"fully_qualified_modules": False, "allow_unknown_functions": True, "order": "none"}
    printer = _Code(settings)
    table = FUNCTIONS | {"power": _power, "pi": math.pi}
    symbols = [sympy.Symbol(name) for name in names]
    return sympy.lambdify(symbols, list(expressions), modules=[table], printer=printer, cse=False)


class _Quiet(LSODA):
    """LSODA (Petzold 1983) whose failures are exceptions; SciPy's are warnings, which threads cannot catch safely."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        integrator = self._lsoda_solver._integrator
        run = integrator.runner

        def runner(*inner):
            result = run(*inner)
            if result[2] < 0:
                raise SimulationFailed(integrator.messages.get(result[2], "the integrator gave up").lower())
            return result

        integrator.runner = runner


def simulate(equation: Equation, values: dict[str, float], initial: dict[str, float], times: np.ndarray,
             rtol: float = RTOL, calls: int = CALLS) -> np.ndarray:
    """Trajectories of the coordinates at `times`, shape (coordinates, len(times)), from `initial` at times[0].

    `initial` has every state by name; `values` are the parameters'; those
    that the answer states itself come before them. Raises SimulationFailed.
    """
    values = values | dict(equation.declared)
    n = len(equation.orders)
    try:
        function = compiled(equation.expressions, ("t", *equation.states, *equation.constants))
    except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:
        raise SimulationFailed(f"{type(error).__name__} while compiling") from None
    constants = [float(values.get(name, math.nan)) for name in equation.constants]
    start = np.array([initial[name] for name in equation.states], dtype=float)
    scale = max(1.0, float(np.abs(start).max()))
    first_order = n == len(equation.states)
    deadline = time.perf_counter() + SECONDS
    count = 0

    def slope(t: float, y: np.ndarray) -> list[float]:
        nonlocal count
        count += 1
        if count > calls:
            raise SimulationFailed("too many steps: stiff, or too fast for the sampling")
        if count % 50 == 0 and time.perf_counter() > deadline:
            raise SimulationFailed("out of time")
        state = y.tolist()
        result = function(t, *state, *constants)
        if not all(map(math.isfinite, result)):
            raise SimulationFailed("a value that is not finite")
        if max(map(abs, state)) > BLOW_UP * scale:
            raise SimulationFailed("blows up")
        return result if first_order else derivatives(equation.orders, result, state)

    span = (times[0], times[-1])
    atol = rtol / RTOL * ATOL * scale
    try:
        solved = solve_ivp(slope, span, start, method=_Quiet, t_eval=times, rtol=rtol, atol=atol)
    except (ZeroDivisionError, ValueError, TypeError):
        raise SimulationFailed("outside the domain of a function, or a division by zero") from None
    except OverflowError:
        raise SimulationFailed("overflow") from None
    whole = solved.success and solved.y.shape[1] == len(times)
    if not whole or not np.isfinite(solved.y).all():
        raise SimulationFailed(str(solved.message))
    return solved.y[:n]


def derivatives(orders: tuple[int, ...], highest: list[float], state: list[float]) -> list[float]:
    """The state's derivative: of a coordinate of second order its velocity, and that one's is the right-hand side."""
    velocities = iter(state[len(orders) :])
    out = []
    accelerations = []
    for order, value in zip(orders, highest, strict=True):
        if order == 2:
            out.append(next(velocities))
            accelerations.append(value)
        else:
            out.append(value)
    return out + accelerations


def r_squared(simulated: np.ndarray, observed: np.ndarray) -> float:
    """1 - residual sum of squares / total sum of squares, a mean over the rows, clipped to [0, 1]."""
    with np.errstate(over="ignore"):
        residual = np.square(simulated - observed).sum(axis=1)
    total = np.square(observed - observed.mean(axis=1, keepdims=True)).sum(axis=1)
    mean = (1 - residual / np.maximum(total, 1e-30)).mean()
    return float(np.clip(mean, 0.0, 1.0))
