"""The far side of `rewards`: compares expressions by SymPy and math-verify, in a process of its own. A script.

It imports them once, then forks a child that answers. A child that has used up its time is ended by the kernel's
timer, which counts processor time (a busy machine makes no answer wrong), and the next fork is ready in milliseconds.
A line of stdin is JSON: [seconds, answer, gold], with gold null where the answer's value is asked for. A line of stdout
has the verdict, 0 or 1 (or the value), and the seconds that are left.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from fractions import Fraction

MEMORY = 1 << 29  # bytes of address space
REL_TOL = Fraction(1, 10**9)  # as in rewards
WARM_UP = (
    (r"\frac{\pi }{2}-(a +1)(b -1)^{2}", r"\sqrt [3]{8}x ^{2}-2I "),
    ("y =-2x +|3|", r"2x_{82}=\sin (x )"),
    ("2!", r"\log _{2} 8"),
    (r"(x +1)^{2}", r"x ^{2}+2x +1"),
    (r"\frac{\sqrt {8}}{2}", r"\sqrt {2}"),
)


def main(paths: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path += paths
    out, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    for pair in WARM_UP:
        verdict(*pair)  # a fork inherits what this warms up
    print("ready", file=out, flush=True)
    while child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if -status not in (signal.SIGPROF, signal.SIGALRM, signal.SIGSEGV):  # the end of stdin, or killed from outside
            return
        print(0, 0, file=out, flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for seconds, *pair in map(json.loads, sys.stdin):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
        try:
            found = value(pair[0]) if pair[1] is None else verdict(*pair)
        except Exception:
            found = math.nan if pair[1] is None else 0.0
        left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(float(found), left, file=out, flush=True)


def parsed(*texts: str) -> list:
    """The SymPy objects of expressions that `rewards` let through."""
    from math_verify import parser
    from sympy.parsing import sympy_parser
    sympy_parser.parse_expr = symbol_or_number  # its own would evaluate the digits it is given
    config = parser.LatexExtractionConfig(normalization_config=parser.NormalizationConfig(False, boxed="none"))
    return [parser.parse(f"${x}$", [config], "no_fallback", parsing_timeout=None)[0] for x in texts]


def symbol_or_number(text: str, **_):
    from sympy import Float, Integer, Symbol
    if text.isidentifier():
        return Symbol(text)
    return Float(text) if "." in text else Integer(text)


def value(expression: str) -> float:
    """The real value of an expression without letters; NaN where it has none."""
    x = parsed(expression)[0].doit().evalf(20)
    return float(x) if x.is_Float or x.is_Integer else math.nan


def verdict(answer: str, gold: str) -> bool:
    """Whether both have one value at two points and math-verify finds them equal: it alone takes 2^-98 for 2^-99, and
    any two equations that it cannot solve for the same, so equations are equal where they have one quotient."""
    from math_verify import verify
    from sympy import Eq, Expr
    a, g = parsed(answer, gold)
    if isinstance(a, Eq) and isinstance(g, Eq):
        (a1, g1), (a2, g2) = at_two_points(a.lhs - a.rhs, g.lhs - g.rhs, a.free_symbols | g.free_symbols)
        return near(g1 / a1, g2 / a2)
    if isinstance(a, Expr) and isinstance(g, Expr):
        pairs = at_two_points(a, g, a.free_symbols | g.free_symbols)
        if not all(near(x, y) for x, y in pairs):
            return False
    return verify(g, a, float_rounding=9, timeout_seconds=None)


def at_two_points(a, g, free_symbols: set) -> list[list]:
    """The values of both expressions at one point, then at another."""
    from sympy import Rational
    letters = sorted(free_symbols, key=str)
    pairs = []
    for start in (137, 211):
        point = {s: Rational(start + 37 * n, 101) for n, s in enumerate(letters)}
        pairs.append([x.subs(point).doit().evalf(30) for x in (a, g)])
    return pairs


def near(x, y) -> bool:
    return bool(abs(x - y) <= REL_TOL * abs(y))


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]) or 0)  # taking SymPy down takes a second
