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
import re
from collections.abc import Callable, Iterable
from fractions import Fraction

import sympy

from tasks.physics.equation_text import LENGTH, ParseError, one_spelling

NODES, DEPTH = 80, 20  # nodes of the tree, brackets within brackets
POWER, CONSTANT = 12, 1e30  # largest power (of a power: their product), largest constant
FUNCTION_DEPTH, TOWER = 4, 2  # functions within functions: any, and those that grow or oscillate


# ---- tokens and grammar
DERIVATIVE = (r"d\s*(?P<two>\^?\s*2)?\s*(?P<of>[A-Za-z]\w*?)\s*(?:\(\s*t\s*\))?\s*/\s*d\s*t(?(two)\s*\^?\s*2|(?!\w))")
TOKEN = re.compile(rf"\s*(?:(?<![A-Za-z_]){DERIVATIVE}(?:\s*\(\s*t\s*\))?"
                   r"|(?P<primed>[A-Za-z]\w*?)(?P<primes>'{1,2}|_?d?dot\b)(?:\s*\(\s*t\s*\))?|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
                   r"|(?P<sign>[-+*/^()|]))", re.A)
FUNCTIONS = {"sin": math.sin, "cos": math.cos, "tan": math.tan, "exp": math.exp, "log": math.log, "ln": math.log,
             "sqrt": math.sqrt, "abs": abs, "Abs": abs, "sign": lambda x: float((x > 0) - (x < 0)), "tanh": math.tanh}
FUNCTIONS["sgn"] = FUNCTIONS["sign"]
GROWING = {"sin", "cos", "tan", "exp", "log", "ln", "tanh"}


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
    out, place = [], 0
    text = text.rstrip()
    while place < len(text):
        m = TOKEN.match(text, place)
        if m is None:
            raise ParseError(f"cannot read {text[place:].strip()[:12]!r}")
        gap = m[0][:1].isspace()
        if m["of"]:
            out.append(Token("derivative", m["of"].replace("_", ""), 2 if m["two"] else 1, True, gap))
        elif m["primed"]:
            order = 2 if m["primes"].lstrip("_") in ("''", "ddot") else 1
            out.append(Token("derivative", m["primed"].replace("_", ""), order, False, gap))
        else:
            kind = next(kind for kind in ("number", "name", "sign") if m[kind])
            out.append(Token(kind, m[kind], gap=gap))
        place = m.end()
    return out


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
    depth, tower, power = (max(getattr(child, key) for child in children) for key in ("depth", "tower", "power"))
    constant = _constant(op, [child.constant for child in children])
    if op in FUNCTIONS:
        depth, tower = depth + 1, tower + (op in GROWING)
    if op == "^":
        base, exponent = children
        if "^" in _operators(exponent):
            raise ParseError("a power in a power's exponent")
        if exponent.constant is None:
            depth, tower = depth + 1, tower + 1
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
    a, b = (values + [0.0])[:2]
    try:
        if op in FUNCTIONS:
            result = FUNCTIONS[op](a)
        else:
            result = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b, "^": lambda: a**b,
                      "neg": lambda: -a}[op]()
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
        self.tokens, self.names, self.derivatives = self._split_words(tokens, names, derivatives), names, derivatives
        self.place, self.level, self.bars = 0, 0, 0

    def _split_words(self, tokens: list[Token], names: dict[str, str], derivatives: dict) -> list[Token]:
        """Words that are several names written together (kx, mg, Lsin) become those names."""
        out = []
        for i, token in enumerate(tokens):
            if token.kind == "derivative" and not token.slash:  # bx'
                for of in {name for name, _ in derivatives if token.text.endswith(name) and token.text != name}:
                    ways = list(_ways(token.text.removesuffix(of), tuple(names), False))
                    if len(ways) == 1:
                        out += [Token("name", word, gap=token.gap and j == 0) for j, word in enumerate(ways[0])]
                        token = dataclasses.replace(token, text=of, gap=False)
                        break
            if token.kind != "name" or token.text in names or token.text in FUNCTIONS or token.text == "frac":
                out.append(token)
                continue
            bare = token.text.replace("_", "")
            if bare in names or bare in FUNCTIONS:
                out.append(dataclasses.replace(token, text=bare))
                continue
            called = i + 1 < len(tokens) and tokens[i + 1].text == "("
            ways = list(_ways(token.text, tuple(names), called))
            if len(ways) != 1:
                raise ParseError(f"{'an unknown name' if not ways else 'ambiguous'}: {token.text[:20]}")
            out += [dataclasses.replace(token, text=word, gap=token.gap and j == 0) for j, word in enumerate(ways[0])]
        return out

    def peek(self, ahead: int = 0) -> str:
        """The text of a sign, or the kind of any other token; empty at the end."""
        if self.place + ahead >= len(self.tokens):
            return ""
        token = self.tokens[self.place + ahead]
        return token.text if token.kind == "sign" else token.kind

    def take(self, wanted: str = "") -> Token:
        if not self.peek() or (wanted and self.peek() != wanted):
            there = self.tokens[self.place].text if self.peek() else "the end"
            raise ParseError(f"{wanted or 'a value'} is missing before {there[:12]}")
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
        while self.peek() in ("+", "-") and self.peek():
            tree = _node(self.take().text, tree, self.product())
        self.level -= 1
        return tree

    def product(self) -> Node:
        tree, divided = self.signed(self.power), False
        while next_ := self.peek():
            if next_ in ("*", "/"):
                tree, divided = _node(self.take().text, tree, self.signed(self.power)), next_ == "/"
            elif next_ in ("number", "name", "derivative", "(") or (next_ == "|" and not self.bars):
                token = self.tokens[self.place]
                if divided and not token.gap:
                    raise ParseError(f"ambiguous: a product without a sign after a division, before {token.text[:12]}")
                end = self.tokens[self.place:]
                if token.gap and [t.kind for t in end] == ["sign", "number", "sign"] and end[1].text.isdigit():
                    raise ParseError("ambiguous: a number in brackets at the end, a factor or the equation's number")
                if next_ == "number" and self.tokens[self.place - 1].kind == "number":
                    raise ParseError("two numbers side by side")
                tree = _node("*", tree, self.power())
            else:
                break
        return tree

    def signed(self, operand: Callable[[], Node]) -> Node:
        """Any number of signs, then what `operand` reads."""
        signs = 0
        while self.peek() in ("+", "-") and self.peek():
            signs += self.take().text == "-"
        tree = operand()
        return _node("neg", tree) if signs % 2 else tree

    def power(self) -> Node:
        base, first = self.primary(), self.tokens[self.place - 1]
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
            symbol = self.derivatives.get((token.text, token.order))
            if symbol is None:
                raise ParseError(f"{'a second' if token.order == 2 else 'a first'} derivative of {token.text[:20]}, "
                                 "which is no part of the state")
            return Node("sym", value=symbol)
        if token.kind == "name":
            if token.text == "frac":
                return _node("/", self.part(), self.part())
            if token.text in self.names:
                if [self.peek(i) for i in range(3)] == ["(", "name", ")"] and self.tokens[self.place + 1].text == "t":
                    self.place += 3  # x(t)
                return Node("sym", value=self.names[token.text])
            return self.call(token.text)
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

    def part(self) -> Node:
        r"""A part of \frac: brackets, or a single name or digit."""
        if self.peek() == "number" and len(self.tokens[self.place].text) > 1:
            raise ParseError("frac needs brackets")
        return self.bracket() if self.peek() not in ("number", "name") else self.primary()

    def bracket(self) -> Node:
        self.take("(")
        bars, self.bars = self.bars, 0
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
        elif self.peek() in ("number", "name", "derivative"):
            argument = self.primary()
            if self.peek() in ("^", "number", "name", "derivative", "("):
                raise ParseError(f"ambiguous: write {name}(…) with brackets")
        else:
            raise ParseError(f"{name} needs brackets around its argument")
        tree = _node(name, argument)
        return tree if exponent is None else _node("^", tree, exponent)


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
    if len(digits) > 25 or abs(int((exponent or "0")[:6])) > 30 or abs(float(text)) > CONSTANT:
        raise ParseError("a number is too long or too large")
    return Node("num", value=Fraction(text), constant=float(text))


# ---- SymPy
def _sympy(node: Node) -> sympy.Expr:
    """The tree as SymPy. Functions stay as they are: only sums, products and powers are brought into a normal form."""
    if node.op == "num":
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node.op == "sym":
        return sympy.pi if node.value == "pi" else sympy.Symbol(node.value)
    a, b = (*map(_sympy, node.children), None)[:2]
    if node.op in FUNCTIONS:
        if node.op == "sqrt":
            return sympy.Pow(a, sympy.Rational(1, 2))
        kind = {"ln": "log", "abs": "Abs", "sgn": "sign"}.get(node.op, node.op)
        return getattr(sympy, kind)(a, evaluate=False)
    if node.op == "/":
        return sympy.Mul(a, sympy.Pow(b, -1))
    if node.op == "-":
        return sympy.Add(a, sympy.Mul(-1, b))
    return {"+": lambda: sympy.Add(a, b), "*": lambda: sympy.Mul(a, b), "^": lambda: sympy.Pow(a, b),
            "neg": lambda: sympy.Mul(-1, a)}[node.op]()


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
        return sympy.Function("sqrt")(base) ** (2 * e.exp) if abs(e.exp) == sympy.S.Half else base**e.exp
    if e.is_Add or e.is_Mul:
        return e.func(*map(_as_written, e.args))
    return e.func(*map(_as_written, e.args), evaluate=False) if e.args else e


def parse_expression(text: str, names: Iterable[str]) -> sympy.Expr:
    """An expression over the declared `names`, each a plain symbol whatever it means elsewhere (E, I, S, beta, lambda).

    Raises ParseError. The text of what it returns is read as the same expression again.
    """
    if len(text) > LENGTH:
        raise ParseError(f"over {LENGTH} characters")
    names = {"pi": "pi"} | {name: name for name in names}
    return _expression(Grammar(tokens_of(one_spelling(text)), names, {}).whole())


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
        left = [f"d2{q}/dt2" if n == 2 else f"d{q}/dt" for q, n in zip(self.states, self.orders, strict=False)]
        text = "; ".join(f"{q} = {e}" for q, e in zip(left, self.expressions, strict=True)).replace("**", "^")
        return text + "".join(f"; {name} = {value:g}" for name, value in self.declared)

    @functools.cached_property
    def operators(self) -> float:
        """Operators and functions in the normal form, as `sympy.count_ops` counts them, a mean over the equations.

        A number is no operator, whether or not it is whole (2.5*x has one, like 2*x), and a square root is one.
        """
        return sum(sympy.count_ops(_as_written(e)) for e in self.expressions) / len(self.expressions)


def parse(text: str, coordinates, parameters: Iterable[str], declared: dict[str, float] | None = None) -> Equation:
    """Reads the equations of a system. `coordinates` have a name, an order (1 or 2) and, of order 2, a velocity.

    `declared` are values that the answer states; they may name further constants. Raises ParseError.
    """
    if len(text) > LENGTH:
        raise ParseError(f"over {LENGTH} characters")
    statements = [part.strip() for part in re.split(r";|\n|,|\\\\|\band\b", text) if part.strip()]
    if not 1 <= len(statements) <= 2 * sum(q.order for q in coordinates):
        raise ParseError(f"{len(statements)} equations")
    sides = [one_spelling(part).replace("==", "=").replace(":=", "=").split("=") for part in statements]
    if any(len(pair) != 2 for pair in sides):
        raise ParseError("an equation has a left-hand side, one = and a right-hand side")
    reserved = {"t", "pi"} | {name for q in coordinates for name in (q.name, q.velocity)}
    declared = {k: v for k, v in (declared or {}).items() if k not in reserved and k not in FUNCTIONS}
    constants = sorted({*parameters, *declared})
    symbols = {"t": "t", "pi": "pi"} | {name: name for name in constants} | {q.name: q.name for q in coordinates}
    velocities = {q.velocity: q.name for q in coordinates if q.order == 2}
    sides = [(tokens_of(left), right) for left, right in sides]
    motions = [pair for pair in sides if not _names_velocity(*pair, coordinates, symbols, velocities)]
    names = symbols | {alias: _by_name(coordinates, q).velocity for alias, q in velocities.items()}
    derivatives = {(q.name, 1): q.velocity for q in coordinates if q.order == 2}
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
    stated = tuple(sorted((name, value) for name, value in declared.items() if name in used))
    states = (*(q.name for q in coordinates), *(q.velocity for q in coordinates if q.order == 2))
    return Equation(expressions, states, tuple(q.order for q in coordinates), tuple(constants), stated)


def _by_name(coordinates, name: str):
    return next(q for q in coordinates if q.name == name)


def _names_velocity(left: list[Token], right: str, coordinates, symbols: dict, velocities: dict) -> bool:
    """Whether a statement is `dx/dt = v` or `v = dx/dt`; the name for the velocity is added to `velocities`."""
    second = {q.name for q in coordinates if q.order == 2}
    if len(left) != 1:
        return False
    right = tokens_of(right)
    pair = (left[0], right[0]) if len(right) == 1 else (left[0], left[0])
    for derivative, name in (pair, pair[::-1]):
        if derivative.kind == "derivative" and derivative.order == 1 and derivative.text in second:
            if name.kind != "name":
                break
            bare = name.text.replace("_", "")
            if velocities.get(bare, derivative.text) != derivative.text or name.text in symbols | FUNCTIONS:
                raise ParseError(f"{name.text[:20]} cannot name the velocity of {derivative.text}")
            velocities[bare] = derivative.text
            return True
    if left[0].kind == "derivative" and left[0].order == 1 and left[0].text in second:
        raise ParseError(f"d{left[0].text}/dt must be the velocity: {left[0].text} is of second order")
    return False


def _coordinate_of(left: list[Token], coordinates, velocities: dict[str, str]) -> str:
    """The coordinate whose highest derivative a left-hand side is."""
    if len(left) == 4 and [token.text for token in left[1:]] == ["(", "t", ")"]:
        left = left[:1]
    token = left[0] if len(left) == 1 else None
    if token is not None and token.kind == "derivative":
        if token.order == 1 and token.text in velocities:
            return velocities[token.text]
        if (token.text, token.order) in {(q.name, q.order) for q in coordinates}:
            return token.text
    wanted = ", ".join(f"d2{q.name}/dt2" if q.order == 2 else f"d{q.name}/dt" for q in coordinates)
    raise ParseError(f"the left-hand side is not {wanted}")
