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

CALLS, SECONDS = 2000, 0.8  # evaluations of the right-hand side, and wall time, of one simulation
BLOW_UP = 1e9  # times the largest initial value (at least 1)
RTOL, ATOL = 1e-4, 1e-6  # true equations lose under 1e-5 of R² by them; ATOL times the size of the initial values


class SimulationFailed(Exception):
    """The equation has no trajectory within the limits; the message says why."""


class _Code(PythonCodePrinter):
    """Python for floats: a power of a negative number is an error, not a complex number."""

    def _print_Pow(self, expr, **_):
        base, exponent = self._print(expr.base), expr.exp
        if exponent == -1:
            return f"(1/({base}))"
        if exponent.is_Integer:
            return f"(({base})**{self._print(exponent)})" if exponent > 0 else f"(1/({base})**{-exponent})"
        return f"power({base}, {self._print(exponent)})"

    def _print_sign(self, expr):
        return f"sign({self._print(expr.args[0])})"


def _power(base: float, exponent: float) -> float:
    return math.sqrt(base) if exponent == 0.5 else math.pow(base, exponent)


@functools.lru_cache(maxsize=1024)
def compiled(expressions: tuple[sympy.Expr, ...], names: tuple[str, ...]):
    """A function of floats, in the order of `names`, that returns the list of the expressions' values."""
    printer = _Code({"fully_qualified_modules": False, "allow_unknown_functions": True, "order": "none"})
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
    values = {**values, **dict(equation.declared)}
    n, size = len(equation.orders), len(equation.states)
    moving = [i for i, order in enumerate(equation.orders) if order == 2]
    try:
        function = compiled(equation.expressions, ("t", *equation.states, *equation.constants))
    except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:
        raise SimulationFailed(f"{type(error).__name__} while compiling") from None
    constants = [float(values.get(name, math.nan)) for name in equation.constants]
    start = np.array([initial[name] for name in equation.states], dtype=float)
    scale = max(1.0, float(np.abs(start).max()))
    deadline, count = time.perf_counter() + SECONDS, 0

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
        if n == size:
            return result
        out, velocity = [], n
        for i in range(n):
            out.append(state[velocity] if i in moving else result[i])
            velocity += i in moving
        return out + [result[i] for i in moving]

    try:
        solved = solve_ivp(slope, (times[0], times[-1]), start, method=_Quiet, t_eval=times, rtol=rtol,
                           atol=rtol / RTOL * ATOL * scale)
    except (ZeroDivisionError, ValueError, TypeError):
        raise SimulationFailed("outside the domain of a function, or a division by zero") from None
    except OverflowError:
        raise SimulationFailed("overflow") from None
    if not solved.success or solved.y.shape[1] != len(times) or not np.isfinite(solved.y).all():
        raise SimulationFailed(str(solved.message))
    return solved.y[:n]


def r_squared(simulated: np.ndarray, observed: np.ndarray) -> float:
    """1 - residual sum of squares / total sum of squares, a mean over the rows, clipped to [0, 1]."""
    with np.errstate(over="ignore"):
        residual = np.square(simulated - observed).sum(axis=1)
    total = np.square(observed - observed.mean(axis=1, keepdims=True)).sum(axis=1)
    return float(np.clip((1 - residual / np.maximum(total, 1e-30)).mean(), 0.0, 1.0))
