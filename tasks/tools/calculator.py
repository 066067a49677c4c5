"""Arithmetic that a model writes: `calculate` works an expression out, `extract_expressions` finds it in prose.

Nothing is ever evaluated by Python: a parsed tree is walked by an allow-list, and whatever would grow beyond a bound is
refused before it is computed. Both take linear time in the text.
"""

from __future__ import annotations

import ast
import math
import operator
import re

LONGEST = 256  # characters of an expression
BOUND = 300  # largest power of ten of any value on the way
MOST = 8  # expressions that are taken from one text

FULL_WIDTH = {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | {"\u3000": " "}
SIGNS = FULL_WIDTH | {
    "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "﹣": "-",
    "【": "(", "】": ")", "［": "(", "］": ")",
}
NORMAL = str.maketrans(SIGNS)
NORMAL_PROSE = str.maketrans({key: value for key, value in SIGNS.items() if value not in ",.;:!?"} | {"．": "."})

YEAR, MONTH, DAY = r"(?:19|20)[0-9]{2}", r"(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12][0-9]|3[01])"
DATE = (rf"(?<![0-9.*/%^+\-])(?:{YEAR}-{MONTH}-{DAY}|{YEAR}/{MONTH}/{DAY}"
        rf"|{DAY}-{DAY}-{YEAR}|{DAY}/{DAY}/{YEAR})(?![0-9.])")


# ------------------------------------------------------------------------------------------------ working it out
def calculate(expression: str) -> float:
    """The value of an arithmetic expression. ValueError, with a reason that a model can use, for anything else.

    + - * / // % ** (also ^), signs, brackets, pi, e, sqrt sin cos tan log exp abs round; full-width signs and digits.
    """
    return float(evaluate(expression))


def evaluate(expression: str) -> int | float:
    """As `calculate`, but whole numbers stay exact."""
    if not isinstance(expression, str):
        raise ValueError("the expression must be text")
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    text = " ".join(expression.translate(NORMAL).split())
    if not text:
        raise ValueError("the expression is empty")
    if re.search(DATE, text):
        raise ValueError("a date is no arithmetic")
    if strange := re.search(r"[^0-9A-Za-z_.+\-*/%^(), ]", text):
        raise ValueError(f"unknown sign {strange[0]!r}")
    if re.search(r"%\s*(?:[+\-*/%)]|$)", text):
        raise ValueError("% is the remainder of a division; write a percentage as a fraction")
    if letters := re.search(r"(?<![0-9A-Za-z_])[0-9.]+(?![eE][+-]?[0-9])[A-Za-z_]\w*", text):
        raise ValueError(f"a sign is missing in {letters[0][:20]!r}")
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval")
        return bounded(walk(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("not a valid arithmetic expression") from None
    except (OverflowError, TypeError):
        raise ValueError("the result is too large") from None


def bounded(value) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is not a finite number")
    if abs(value) > 10**BOUND and value != float(10**BOUND):  # which is a hair over
        raise ValueError("the result is too large")
    return value


def power(a, b):
    """a ** b, refused before it is computed where it would pass the bound."""
    if a == 0 and b < 0:
        raise ValueError("division by zero")
    if a < 0 and b != int(b):
        raise ValueError("a fractional power of a negative number")
    if a != 0 and math.log10(abs(a)) * b > BOUND:
        raise ValueError("the power is too large")
    return a**b


def product(a, b):
    if a != 0 and b != 0 and math.log10(abs(a)) + math.log10(abs(b)) > BOUND:
        raise ValueError("the product is too large")
    return a * b


def rounded(x, digits=0):
    if digits != int(digits) or abs(digits) > 15:
        raise ValueError("round takes a whole number of digits, at most 15")
    return round(x, int(digits)) if digits else round(x)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
}
FUNCTIONS = {  # with the most arguments that each takes
    "sqrt": (math.sqrt, 1),
    "sin": (math.sin, 1),
    "cos": (math.cos, 1),
    "tan": (math.tan, 1),
    "log": (math.log, 2),
    "exp": (math.exp, 1),
    "abs": (abs, 1),
    "round": (rounded, 2),
}
CONSTANTS = {"pi": math.pi, "e": math.e}


def walk(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return bounded(node.value)
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = walk(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return bounded(OPERATORS[type(node.op)](walk(node.left), walk(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise ValueError(f"unknown function {node.func.id[:20]}; there are {', '.join(FUNCTIONS)}")
        function, most = FUNCTIONS[node.func.id]
        if not 1 <= len(node.args) <= most:
            raise ValueError(f"{node.func.id} takes {'1 argument' if most == 1 else f'1 to {most} arguments'}")
        return bounded(function(*map(walk, node.args)))
    if isinstance(node, ast.Name):
        raise ValueError(f"unknown name {node.id[:20]}")
    raise ValueError("not a valid arithmetic expression")


def show(value: int | float) -> str:
    """A value as a tool says it: whole numbers exactly, others with 12 significant digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def same_expression(text: str) -> str:
    """What two spellings of one expression share: neither spaces, full-width signs nor outer brackets count."""
    text = re.sub(r"\s+", "", text[:LONGEST].translate(NORMAL)).replace("^", "**")
    while text.startswith("(") and closes_at(text) == len(text) - 1:
        text = text[1:-1]
    return text


def closes_at(text: str) -> int:
    """Where the bracket that begins the text is closed; -1 if nowhere."""
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return i
    return -1


# ------------------------------------------------------------------------------------------------ finding it
TOKEN = re.compile(rf"""
    (?P<space>[ \t]+(?![-*+])) | (?P<open>\() | (?P<close>\)) | (?P<comma>,)
  | (?P<gap>^[ \t]*[-*+][ \t]+(?=\S) | (?=[0-9]){DATE} | (?<![0-9:])[0-9]{{1,2}}:[0-9]{{2}}(?::[0-9]{{2}})?
        | [0-9]+(?:\.[0-9]+){{2,}} )
  | (?P<odd>[√∛²³¹⁰⁴-⁹½⅓¼°!∞∑] | %(?=[ \t]*(?:[+\-*/%)]|$)) | (?:(?![0-9])\d)[\d.]* )
  | (?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?
        | (?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
  | (?P<function>(?:{"|".join(FUNCTIONS)})[ \t]*\()
  | (?P<constant>(?:pi|e)(?![A-Za-z0-9_]))
  | (?P<word>[A-Za-z_]\w*?(?=[^A-Za-z0-9_]|$)(?:-[A-Za-z0-9_]+)*)
  | (?P<sign>\*\*|//|[+\-*/%^])
  | (?P<blank>[ \t]+) | (?P<other>(?:[!-':-@\[-`{{-~\n\r]|\.(?![0-9]))++ | [\s\S])
""", re.X | re.M)


class Frame:
    """One open bracket (or the text itself): the chain of operands that is being read in it."""

    __slots__ = ("opened", "function", "chains", "start", "end", "counts", "pending", "sign", "commas", "poisoned")

    def __init__(self, opened: int, function: bool = False, poisoned: bool = False):
        self.opened = opened  # place of the bracket
        self.function = function  # whether it opens a function's arguments
        self.poisoned = poisoned  # what is read here is part of something else
        self.chains = 0
        self.commas = 0
        self.clear()

    def clear(self) -> None:
        self.start = self.end = self.sign = None  # places of tokens; `sign`: a sign that may begin the chain
        self.counts = False  # whether the chain is more than a number
        self.pending = False  # whether it ends with a sign, so that an operand must follow

    def holds_operands(self) -> bool:
        """Whether it holds one chain (of a function: one an argument) and nothing else."""
        if self.poisoned or self.pending or self.start is None:
            return False
        return self.chains == 1 + self.commas


class Finder:
    """Reads tokens once, from left to right, and keeps the longest chains that are expressions."""

    def __init__(self):
        self.tokens: list[str] = []
        self.found: list[tuple[int, str]] = []
        self.stack = [Frame(-1)]
        self.spoiled = 0  # so many of the lowest frames are spoiled, which is done when they come to the top

    def finish(self, frame: Frame) -> None:
        """The chain of a frame ends here; it is kept if it is more than a number."""
        if frame.counts and not frame.poisoned and not frame.commas:
            text = "".join(self.tokens[frame.start : frame.end + 1])
            if len(text) <= LONGEST:
                self.found.append((frame.start, text))
        frame.clear()
        frame.commas = 0

    def gap(self) -> None:
        """Prose: no bracket that is open here can become part of an expression."""
        for frame in self.stack[self.spoiled :]:
            self.finish(frame)
        self.stack = [Frame(-1)]
        self.spoiled = 0

    def spoil(self) -> None:
        """Something changes the value of its neighbours: nothing that is open here is what it seems."""
        self.spoiled = len(self.stack)
        self.settle()

    def settle(self) -> None:
        if len(self.stack) <= self.spoiled:
            self.stack[-1].clear()
            self.stack[-1].poisoned = True
            self.spoiled = len(self.stack) - 1

    def operand(self, start: int, end: int, counts: bool) -> None:
        frame = self.stack[-1]
        if frame.pending:
            frame.end = end
            frame.counts = True
            frame.pending = False
            return
        if frame.start is not None:
            self.finish(frame)
            frame.poisoned = False
        frame.start = start if frame.sign is None else frame.sign
        frame.end = end
        frame.counts = counts
        frame.sign = None
        frame.chains += 1

    def sign(self, at: int, text: str) -> None:
        frame = self.stack[-1]
        if frame.start is not None and not frame.pending:
            frame.pending = True
        elif text in "+-" and (frame.pending or frame.start is None):
            frame.sign = at if frame.start is None and frame.sign is None else frame.sign
        else:  # a sign without its left side: what follows is part of something else
            self.finish(frame)
            frame.poisoned = True

    def close(self, at: int) -> None:
        if len(self.stack) == 1:
            self.gap()
            return
        frame = self.stack[-1]
        if frame.holds_operands():
            self.stack.pop()
            self.settle()
            self.operand(frame.opened, at, frame.counts or frame.function)
        else:
            self.finish(frame)
            self.stack.pop()
            self.settle()
            self.finish(self.stack[-1])
            self.stack[-1].poisoned = True

    def comma(self) -> None:
        frame = self.stack[-1]
        if frame.function and frame.start is not None and not frame.pending and frame.commas == 0:
            frame.commas = 1
            first = frame.counts
            frame.clear()
            frame.counts = first
        else:
            self.gap()

    def read(self, text: str) -> None:
        joined = False  # the token before is an operand and nothing stands between
        for match in TOKEN.finditer(text):
            kind = match.lastgroup
            token = match[0]
            before = joined
            joined = kind in ("number", "constant")
            if kind in ("space", "blank"):
                continue
            if before and kind in ("number", "constant", "open", "function"):  # 2(3+4): what it means is not written
                self.spoil()
            at = len(self.tokens)
            self.tokens.append(re.sub(r"[ \t]+", "", token))
            if kind == "number" and "," in token:
                self.tokens[-1] = token.replace(",", "")
                kind = "gap" if self.stack[-1].function else kind
            if kind in ("number", "constant"):
                self.operand(at, at, False)
            elif kind == "sign":
                self.sign(at, token)
            elif kind in ("open", "function"):
                self.stack.append(Frame(at, kind == "function", self.stack[-1].poisoned and before))
            elif kind == "close":
                self.close(at)
                joined = self.stack[-1].end == at and self.stack[-1].counts  # (1) alone may number what follows
            elif kind == "comma":
                self.comma()
            elif kind == "odd":
                self.spoil()
            else:
                self.gap()
        self.gap()


def extract_expressions(text: str) -> list[str]:
    """The arithmetic expressions of a Chinese or English text, in order, the longest where two overlap.

    At most 8 and none twice, without spaces and in plain signs (`（2+3）×4` gives `(2+3)*4`). A number alone, a date, a
    time of day or part of an equation with letters is none.
    """
    finder = Finder()
    finder.read(text.translate(NORMAL_PROSE))
    return list(dict.fromkeys(found for _, found in sorted(finder.found)))[:MOST]
