r"""Equations of motion as text, read into SymPy.

What a model wrote is never evaluated. It is cut into tokens, read by a small grammar into a tree of our own, and only a
tree that keeps the limits (length, nodes, size of constants, powers, nesting) of allowed names and functions becomes
SymPy, whose own arithmetic could otherwise be kept busy for ever by 9^9^9^9. Spellings that are read:

    d2x/dt2 = …, d^2x/dt^2 = …, x'' = …, \ddot{x} = …, \frac{d^2x}{dt^2} = …, ẍ = …, x_ddot = …, d^2/dt^2 x = …
    dx/dt = v; dv/dt = …        (also on two lines, or with a comma or 'and' between)
    ^ or **, 2x, k x, kx, k(x), |v|, sin x, sin^2(x), x², ½, ·, ×, −, √, Greek letters, \frac{a}{b}, x(t), sgn, ln

Refused as ambiguous: `k/2m`, `sin 2x`, `sin x^2`, `dx/dt^2`, `2x (2)`. Euler's number is only in exp: `e` and `E`
are names. Fractional powers of negative numbers are a domain error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable
from fractions import Fraction

import sympy

from tasks.physics.equation_text import LENGTH, ParseError, one_spelling

NODES = 80  # nodes of the tree
DEPTH = 20  # brackets within brackets
POWER = 12  # largest power (of a power: their product)
CONSTANT = 1e30  # largest constant
FUNCTION_DEPTH = 4  # functions within functions
TOWER = 2  # of those, the ones that grow or oscillate


# ---- tokens and grammar
DERIVATIVE = (r"d\s*(?P<two>\^?\s*2)?\s*(?P<of>[A-Za-z]\w*?)\s*(?:\(\s*t\s*\))?\s*/\s*d\s*t(?(two)\s*\^?\s*2|(?!\w))")
TOKEN = re.compile(rf"\s*(?:(?<![A-Za-z_]){DERIVATIVE}(?:\s*\(\s*t\s*\))?"
                   r"|(?P<primed>[A-Za-z]\w*?)(?P<primes>'{1,2}|_?d?dot\b)(?:\s*\(\s*t\s*\))?"
                   r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
                   r"|(?P<sign>[-+*/^()|]))", re.A)


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


FUNCTIONS = {
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "exp": math.exp,
    "log": math.log,
    "ln": math.log,
    "sqrt": math.sqrt,
    "abs": abs,
    "Abs": abs,
    "sign": _sign,
    "tanh": math.tanh,
    "sgn": _sign,
}
GROWING = {"sin", "cos", "tan", "exp", "log", "ln", "tanh"}
ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
}
VALUES = ("number", "name", "derivative")  # kinds of tokens with which a factor may begin


@dataclasses.dataclass(frozen=True)
class Token:
    """`kind` is number, name, sign or derivative (of `order`); `slash`: a derivative written as a fraction; `gap`
    tells whether a space stood before it."""

    kind: str
    text: str
    order: int = 0
    slash: bool = False
    gap: bool = False


def tokens_of(text: str) -> list[Token]:
    """The tokens of a text in one spelling. ParseError at what is none."""
    out: list[Token] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        m = TOKEN.match(text, place)
        if m is None:
            raise ParseError(f"cannot read {text[place:].strip()[:12]!r}")
        out.append(_token(m))
        place = m.end()
    return out


def _token(m: re.Match) -> Token:
    gap = m[0][:1].isspace()
    if m["of"]:
        order = 2 if m["two"] else 1
        return Token("derivative", m["of"].replace("_", ""), order, True, gap)
    if m["primed"]:
        order = 2 if m["primes"].lstrip("_") in ("''", "ddot") else 1
        return Token("derivative", m["primed"].replace("_", ""), order, False, gap)
    kind = next(kind for kind in ("number", "name", "sign") if m[kind])
    return Token(kind, m[kind], gap=gap)


@dataclasses.dataclass(frozen=True)
class Node:
    """A tree of our own: `op` is num, sym, a function's name or one of + - * / ^ neg; what the limits need is known."""

    op: str
    children: tuple = ()
    value: float | Fraction | str | None = None  # of num and sym
    constant: float | None = None  # the value of what holds no symbol
    nodes: int = 1
    power: float = 1.0  # product of the powers that stand over each other
    depth: int = 0  # functions within functions
    tower: int = 0  # of those, the ones that grow


def _node(op: str, *children: Node) -> Node:
    """A node whose subtree keeps the limits."""
    nodes = 1 + sum(child.nodes for child in children)
    if nodes > NODES:
        raise ParseError(f"over {NODES} nodes")
    depth = max(child.depth for child in children)
    tower = max(child.tower for child in children)
    power = max(child.power for child in children)
    constant = _constant(op, [child.constant for child in children])
    if op in FUNCTIONS:
        depth += 1
        tower += op in GROWING
    if op == "^":
        base, exponent = children
        if "^" in _operators(exponent):
            raise ParseError("a power in a power's exponent")
        if exponent.constant is None:
            depth += 1
            tower += 1
        else:
            power = base.power * max(1.0, abs(exponent.constant))
            if power > POWER:
                raise ParseError(f"a power over {POWER}")
    if depth > FUNCTION_DEPTH or tower > TOWER:
        raise ParseError("functions nested too deep")
    return Node(op, children, None, constant, nodes, power, depth, tower)


def _operators(node: Node) -> set[str]:
    return {node.op}.union(*map(_operators, node.children))


def _constant(op: str, values: list[float | None]) -> float | None:
    """The value of an operation on constants, None where a symbol is in it. ParseError where it is none or is huge."""
    if op == "/" and values[1] == 0:
        raise ParseError("a division by zero")
    if None in values:
        return None
    evaluate = operator.neg if op == "neg" else FUNCTIONS.get(op) or ARITHMETIC[op]
    try:
        result = evaluate(*values)
        if not abs(result) <= CONSTANT:
            raise OverflowError
    except OverflowError:
        raise ParseError("a constant is too large") from None
    except (ValueError, ZeroDivisionError):
        result = 1j
    if isinstance(result, complex):
        raise ParseError(f"{'a power' if op == '^' else op} has no real value")
    return float(result)


class Grammar:
    """A recursive descent over the tokens of one right-hand side."""

    def __init__(self, tokens: list[Token], names: dict[str, str], derivatives: dict[tuple[str, int], str]):
        """`names` maps each name that may occur to its symbol, `derivatives` each (name, order) to its symbol."""
        self.names = names
        self.derivatives = derivatives
        self.tokens: list[Token] = []
        for i, token in enumerate(tokens):
            called = i + 1 < len(tokens) and tokens[i + 1].text == "("
            if token.kind == "derivative" and not token.slash:
                self.tokens += self._split_derivative(token)
            elif token.kind == "name":
                self.tokens += self._split_name(token, called)
            else:
                self.tokens.append(token)
        self.place = 0
        self.level = 0
        self.bars = 0

    def _split_derivative(self, token: Token) -> list[Token]:
        """bx' is b times x' where there is only one way to read it."""
        coordinates = {name for name, _ in self.derivatives}
        for of in coordinates:
            if not token.text.endswith(of) or token.text == of:
                continue
            ways = list(_ways(token.text.removesuffix(of), tuple(self.names), False))
            if len(ways) == 1:
                return [*_written_together(token.gap, ways[0]), dataclasses.replace(token, text=of, gap=False)]
        return [token]

    def _split_name(self, token: Token, called: bool) -> list[Token]:
        """A word that is several names written together (kx, mg, Lsin) becomes those names."""
        if token.text in self.names or token.text in FUNCTIONS or token.text == "frac":
            return [token]
        bare = token.text.replace("_", "")
        if bare in self.names or bare in FUNCTIONS:
            return [dataclasses.replace(token, text=bare)]
        ways = list(_ways(token.text, tuple(self.names), called))
        if len(ways) != 1:
            raise ParseError(f"{'an unknown name' if not ways else 'ambiguous'}: {token.text[:20]}")
        return _written_together(token.gap, ways[0])

    def peek(self, ahead: int = 0) -> str:
        """The text of a sign, or the kind of any other token; empty at the end."""
        if self.place + ahead >= len(self.tokens):
            return ""
        token = self.tokens[self.place + ahead]
        return token.text if token.kind == "sign" else token.kind

    def take(self, wanted: str = "") -> Token:
        there = self.peek()
        if not there or (wanted and there != wanted):
            before = self.tokens[self.place].text[:12] if there else "the end"
            raise ParseError(f"{wanted or 'a value'} is missing before {before}")
        self.place += 1
        return self.tokens[self.place - 1]

    def whole(self) -> Node:
        tree = self.sum()
        if self.peek():
            raise ParseError(f"cannot read from {self.tokens[self.place].text[:12]!r} on")
        return tree

    def sum(self) -> Node:
        self.level += 1
        if self.level > DEPTH:
            raise ParseError(f"over {DEPTH} brackets within brackets")
        tree = self.product()
        while self.peek() in ("+", "-"):
            op = self.take().text
            tree = _node(op, tree, self.product())
        self.level -= 1
        return tree

    def product(self) -> Node:
        tree = self.signed(self.power)
        divided = False
        while True:
            upcoming = self.peek()
            if upcoming in ("*", "/"):
                op = self.take().text
                tree = _node(op, tree, self.signed(self.power))
                divided = op == "/"
            elif upcoming in VALUES or upcoming == "(" or (upcoming == "|" and not self.bars):
                self.check_unsigned(divided)
                tree = _node("*", tree, self.power())
            else:
                return tree

    def check_unsigned(self, divided: bool) -> None:
        """ParseError where a product without a sign, before the token that is next, could mean something else."""
        token = self.tokens[self.place]
        if divided and not token.gap:
            raise ParseError(f"ambiguous: a product without a sign after a division, before {token.text[:12]}")
        rest = self.tokens[self.place :]
        number_in_brackets = [t.kind for t in rest] == ["sign", "number", "sign"] and rest[1].text.isdigit()
        if token.gap and number_in_brackets:
            raise ParseError("ambiguous: a number in brackets at the end, a factor or the equation's number")
        if token.kind == "number" and self.tokens[self.place - 1].kind == "number":
            raise ParseError("two numbers side by side")

    def signed(self, operand: Callable[[], Node]) -> Node:
        """Any number of signs, then what `operand` reads."""
        signs = 0
        while self.peek() in ("+", "-"):
            signs += self.take().text == "-"
        tree = operand()
        return _node("neg", tree) if signs % 2 else tree

    def power(self) -> Node:
        base = self.primary()
        first = self.tokens[self.place - 1]
        if self.peek() != "^":
            return base
        if first.kind == "derivative" and first.slash:
            raise ParseError(f"ambiguous: d{first.text}/dt^…; write (d{first.text}/dt)^2")
        self.take()
        exponent = self.signed(self.primary)
        if self.peek() == "^":
            raise ParseError("a power in a power's exponent")
        return _node("^", base, exponent)

    def primary(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "derivative":
            return self.derivative(token)
        if token.kind == "name":
            return self.name(token.text)
        if token.text == "(":
            self.place -= 1
            return self.bracket()
        if token.text == "|":
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.take("|")
            return _node("abs", tree)
        raise ParseError(f"a value is missing before {token.text}")

    def derivative(self, token: Token) -> Node:
        symbol = self.derivatives.get((token.text, token.order))
        if symbol is None:
            order = "a second" if token.order == 2 else "a first"
            raise ParseError(f"{order} derivative of {token.text[:20]}, which is no part of the state")
        return Node("sym", value=symbol)

    def name(self, text: str) -> Node:
        r"""A symbol, also written x(t), a function with its argument, or \frac with its parts."""
        if text == "frac":
            return _node("/", self.part(), self.part())
        if text not in self.names:
            return self.call(text)
        if [self.peek(i) for i in range(3)] == ["(", "name", ")"] and self.tokens[self.place + 1].text == "t":
            self.place += 3
        return Node("sym", value=self.names[text])

    def part(self) -> Node:
        r"""A part of \frac: brackets, or a single name or digit."""
        if self.peek() == "number" and len(self.tokens[self.place].text) > 1:
            raise ParseError("frac needs brackets")
        return self.bracket() if self.peek() not in ("number", "name") else self.primary()

    def bracket(self) -> Node:
        self.take("(")
        bars = self.bars
        self.bars = 0
        tree = self.sum()
        self.bars = bars
        self.take(")")
        return tree

    def call(self, name: str) -> Node:
        """`sin(…)`, `sin^2(…)`, or `sin x` with a single name or number."""
        exponent = None
        if self.peek() == "^":
            self.take()
            exponent = self.signed(self.primary)
            if exponent.constant is None or exponent.constant < 1:  # sin^-1 is the inverse to some
                raise ParseError(f"ambiguous: a power of {name}")
        if self.peek() == "(":
            argument = self.bracket()
        elif self.peek() in VALUES:
            argument = self.primary()
            if self.peek() in VALUES or self.peek() in ("^", "("):
                raise ParseError(f"ambiguous: write {name}(…) with brackets")
        else:
            raise ParseError(f"{name} needs brackets around its argument")
        tree = _node(name, argument)
        return tree if exponent is None else _node("^", tree, exponent)


def _written_together(gap: bool, words: list[str]) -> list[Token]:
    """Tokens of names without spaces between; `gap` tells whether one stood before the first."""
    return [Token("name", word, gap=gap and i == 0) for i, word in enumerate(words)]


def _ways(word: str, names: tuple[str, ...], called: bool) -> Iterable[list[str]]:
    """The ways to read a word as names written together; where a bracket follows, the last may be a function."""
    if len(word) > 30:
        return
    known = [name for name in names if word.startswith(name)]
    for name in known:
        rest = word[len(name):]
        if not rest:
            yield [name]
        elif called and rest in FUNCTIONS:
            yield [name, rest]
        else:
            yield from ([name, *more] for more in _ways(rest, names, called))


def _number(text: str) -> Node:
    digits, _, exponent = text.lower().partition("e")
    shift = int((exponent or "0")[:6])
    if len(digits) > 25 or abs(shift) > 30 or abs(float(text)) > CONSTANT:
        raise ParseError("a number is too long or too large")
    return Node("num", value=Fraction(text), constant=float(text))


# ---- SymPy
SYMPY_NAMES = {"ln": "log", "abs": "Abs", "sgn": "sign"}


def _sympy(node: Node) -> sympy.Expr:
    """The tree as SymPy. Functions stay as they are: only sums, products and powers are brought into a normal form."""
    if node.op == "num":
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node.op == "sym":
        return sympy.pi if node.value == "pi" else sympy.Symbol(node.value)
    parts = list(map(_sympy, node.children))
    if node.op == "sqrt":
        return sympy.Pow(parts[0], sympy.Rational(1, 2))
    if node.op in FUNCTIONS:
        name = SYMPY_NAMES.get(node.op, node.op)
        return getattr(sympy, name)(parts[0], evaluate=False)
    if node.op == "neg":
        return sympy.Mul(-1, parts[0])
    a, b = parts
    if node.op == "/":
        return sympy.Mul(a, sympy.Pow(b, -1))
    if node.op == "-":
        return sympy.Add(a, sympy.Mul(-1, b))
    kind = {"+": sympy.Add, "*": sympy.Mul, "^": sympy.Pow}[node.op]
    return kind(a, b)


def _expression(tree: Node) -> sympy.Expr:
    found = _sympy(tree)
    if found.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo, sympy.I):
        raise ParseError("a division by zero, or no real value")
    return found


def _as_written(e: sympy.Expr) -> sympy.Expr:
    """With symbols for the numbers that are not whole, which `count_ops` would take for divisions; sqrt a function."""
    if e.is_Rational and not e.is_Integer:
        return sympy.Symbol(f"c{abs(e)}") * sympy.sign(e)
    if e.is_Pow:
        base = _as_written(e.base)
        if abs(e.exp) == sympy.S.Half:
            return sympy.Function("sqrt")(base) ** (2 * e.exp)
        return base**e.exp
    if not e.args:
        return e
    parts = map(_as_written, e.args)
    return e.func(*parts) if e.is_Add or e.is_Mul else e.func(*parts, evaluate=False)


@dataclasses.dataclass(frozen=True)
class Equation:
    """The equations of motion of a system: of each coordinate's highest derivative, in the system's order."""

    expressions: tuple[sympy.Expr, ...]
    states: tuple[str, ...]  # coordinates, then the velocities of those of second order
    orders: tuple[int, ...]
    constants: tuple[str, ...]  # names of parameters and declared constants, sorted
    declared: tuple[tuple[str, float], ...] = ()  # values that the answer states itself and uses

    @functools.cached_property
    def canonical(self) -> str:
        """One text for all spellings."""
        coordinates = self.states[: len(self.orders)]
        parts = []
        for q, order, e in zip(coordinates, self.orders, self.expressions, strict=True):
            right = str(e).replace("**", "^")
            parts.append(f"{left_side(q, order)} = {right}")
        parts += [f"{name} = {value:g}" for name, value in self.declared]
        return "; ".join(parts)

    @functools.cached_property
    def operators(self) -> float:
        """Operators and functions in the normal form, as `sympy.count_ops` counts them, a mean over the equations.

        A number is no operator, whether or not it is whole (2.5*x has one, like 2*x), and a square root is one.
        """
        counts = [sympy.count_ops(_as_written(e)) for e in self.expressions]
        return sum(counts) / len(counts)


def left_side(name: str, order: int) -> str:
    """The highest derivative of a coordinate as it is spelt in normal form."""
    return f"d2{name}/dt2" if order == 2 else f"d{name}/dt"


def parse(text: str, coordinates, parameters: Iterable[str], declared: dict[str, float] | None = None) -> Equation:
    """Reads the equations of a system. `coordinates` have a name, an order (1 or 2) and, of order 2, a velocity.

    `declared` are values that the answer states; they may name further constants. Raises ParseError.
    """
    sides = _sides(text, 2 * sum(q.order for q in coordinates))
    reserved = {"t", "pi"} | {name for q in coordinates for name in (q.name, q.velocity)}
    stated = {}
    for name, value in (declared or {}).items():
        if name not in reserved and name not in FUNCTIONS:
            stated[name] = value
    constants = sorted({*parameters, *stated})
    symbols = {name: name for name in ("t", "pi", *constants, *(q.name for q in coordinates))}
    moving = [q for q in coordinates if q.order == 2]

    velocities = {q.velocity: q.name for q in moving}  # name of a velocity, also the answer's own -> coordinate
    motions = [pair for pair in sides if not _names_velocity(*pair, moving, symbols, velocities)]
    own_names = {q.name: q.velocity for q in moving}
    names = symbols | {alias: own_names[of] for alias, of in velocities.items()}
    derivatives = {(q.name, 1): q.velocity for q in moving}
    found: dict[str, sympy.Expr] = {}
    for left, right in motions:
        name = _coordinate_of(left, coordinates, velocities)
        expression = _expression(Grammar(tokens_of(right), names, derivatives).whole())
        if found.setdefault(name, expression) != expression:
            raise ParseError(f"two equations for {name}")
    if missing := [q.name for q in coordinates if q.name not in found]:
        raise ParseError(f"no equation of motion for {', '.join(missing)}")

    expressions = tuple(found[q.name] for q in coordinates)
    used = {str(symbol) for e in expressions for symbol in e.free_symbols}
    own_values = sorted((name, value) for name, value in stated.items() if name in used)
    states = [q.name for q in coordinates] + [q.velocity for q in moving]
    orders = tuple(q.order for q in coordinates)
    return Equation(expressions, tuple(states), orders, tuple(constants), tuple(own_values))


def _sides(text: str, most: int) -> list[tuple[list[Token], str]]:
    """The statements of an answer, at most `most`: the tokens of the left-hand side, and the right-hand side."""
    if len(text) > LENGTH:
        raise ParseError(f"over {LENGTH} characters")
    parts = [part.strip() for part in re.split(r";|\n|,|\\\\|\band\b", text)]
    statements = [part for part in parts if part]
    if not 1 <= len(statements) <= most:
        raise ParseError(f"{len(statements)} equations")
    pairs = [one_spelling(part).replace("==", "=").replace(":=", "=").split("=") for part in statements]
    if any(len(pair) != 2 for pair in pairs):
        raise ParseError("an equation has a left-hand side, one = and a right-hand side")
    return [(tokens_of(left), right) for left, right in pairs]


def _names_velocity(left: list[Token], right: str, moving, symbols: dict, velocities: dict) -> bool:
    """Whether a statement is `dx/dt = v` or `v = dx/dt`; the name for the velocity is added to `velocities`.

    `moving` are the coordinates of second order.
    """
    if len(left) != 1:
        return False
    second = {q.name for q in moving}
    first, other = left[0], tokens_of(right)
    if len(other) == 1:
        for derivative, name in ((first, other[0]), (other[0], first)):
            if not _is_velocity(derivative, second):
                continue
            if name.kind != "name":
                break
            bare = name.text.replace("_", "")
            taken = velocities.get(bare, derivative.text) != derivative.text
            if taken or name.text in symbols or name.text in FUNCTIONS:
                raise ParseError(f"{name.text[:20]} cannot name the velocity of {derivative.text}")
            velocities[bare] = derivative.text
            return True
    if _is_velocity(first, second):
        raise ParseError(f"d{first.text}/dt must be the velocity: {first.text} is of second order")
    return False


def _is_velocity(token: Token, second: set[str]) -> bool:
    """Whether a token is the first derivative of a coordinate of second order."""
    return token.kind == "derivative" and token.order == 1 and token.text in second


def _coordinate_of(left: list[Token], coordinates, velocities: dict[str, str]) -> str:
    """The coordinate whose highest derivative a left-hand side is."""
    if [token.text for token in left[1:]] == ["(", "t", ")"]:
        left = left[:1]
    if len(left) == 1 and left[0].kind == "derivative":
        token = left[0]
        if token.order == 1 and token.text in velocities:
            return velocities[token.text]
        for q in coordinates:
            if (q.name, q.order) == (token.text, token.order):
                return q.name
    wanted = ", ".join(left_side(q.name, q.order) for q in coordinates)
    raise ParseError(f"the left-hand side is not {wanted}")
