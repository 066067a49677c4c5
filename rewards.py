"""Pure scorers that several tasks share: answers, format, length, repetition, weighted sums, TRL-style functions.

Answers are compared without running them. A small parser with an allow-list of notation (LaTeX or plain) computes
values: exact fractions where all is rational, complex floats otherwise, and fixed pseudo-random numbers for letters, so
that two expressions are equal when they agree at each of those points. No eval, no algebra system, no child process:
the work is bounded by the length of the text, its nesting and the bits of a value, so a hostile answer costs
milliseconds in any thread. What is over a bound or outside the notation (integrals, limits, sums) is compared as text.

Rules of equality, gold second:
- rational values must be the same; a decimal equals a fraction that does not terminate, or a value with roots, pi, e or
  functions, within 1e-9 of its size (0.3333 is not 1/3, 3.14 is not pi);
- percent, inside or outside $: where one side has a percent sign, p% equals both p and p/100; where both have, p is p;
- money signs, units and degree signs are ignored, and so is a name before `=` where the other side has none;
- gold lists and sets ask for every part in any order, points and intervals for every part in order;
- inequalities in one letter are intervals, equations are equal up to a factor, a ratio or a time must be as written.
"""
import asyncio
import cmath
import importlib.util
import inspect
import math
import numbers
import random
import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

TAIL = 30_000  # characters of a completion that are looked at, from its end
LONGEST = 512  # characters of an answer that are read as mathematics
BITS = 8_192  # of a numerator or denominator: 9**9**9 has a thousand million
DEEPEST = 30  # nested brackets, powers and functions
POINTS = 3  # numbers tried for each letter
REL_TOL = 1e-9  # floats err by about 1e-15 an operation, and nobody writes ten digits by accident

# Finding the answer in a completion. Every pattern is linear: no repeat inside a repeat without a separator between.

FINAL_LINE = re.compile(
    r"(?im)^[ \t*#>_-]*(?:(?:so )?the )?final[ \t]+answer[ \t*_]*(?:is[ \t*_]*)?[:\uff1a][ \t*_]*(.*)$")
BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.S)
BETWEEN_BOXES = re.compile(r"(?:[\s,;$&]|and|or|\\text\{|\}|\\q?quad|\\.)*")
ANSWER_IS = re.compile(r"(?i)\banswers?\b[^\n:=.]{0,60}?(?:\b(?:is|are)\b[ \t]*:?|[:=])")
VALUE_IS = re.compile(r"=|\b(?:is|are|equals)\b:?")
REASON = re.compile(r",\s+(?!and\b|or\b)(?=[a-z]{2,})|\s+(?:because|since|which|so|as)\b")
LEAD = re.compile(r"(?i)^(?:[a-z]{2,}[,:]?\s+)+")
SENTENCE_END = re.compile(r"(?<!\\)[.!?](?:\s+|$)|\n+")
BOLD = re.compile(r"(?<![\w)*])\*\*(\S(?:[^*\n]{0,200}\S)?)\*\*(?!\w)")
MATH_SPAN = re.compile(r"(?<!\\)\$((?:\\\$|[^$\n]){1,200})\$|\\\(([^\n]{1,200}?)\\\)|\\\[([^\n]{1,200}?)\\\]")
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
FRACTION = r"(?:\d+ ?)?\\[dt]?frac\{-?\d{1,40}\}\{\d{1,40}\}|\d+ \d+/\d+|\d+/\d+"
NUMBER = re.compile(rf"[-+\u2212]?(?:\\?\$)?[-\u2212]?(?:{FRACTION}|{DIGITS})(?:\s?\\?%)?")
OPERAND_BEFORE = re.compile(r"[\w.,]$|[\^*/_{\\+]\s*$|\w\($")
OPERAND_AFTER = re.compile(r"\w|[.,]\d|\s*(?:[\^_{}!+/]|\*+\s*[\w(\\]|\()|\)!")


def final_answer(text: str, strict: bool = False) -> str | None:
    """The answer a completion ends on, as written: the last `Final Answer:` line, else the last box (boxes with only
    commas, spaces or "and" between them are one list). `strict` stops there; else the last `#### x`, the last "answer
    is x", the text itself if it is mathematics, or the last number of the prose; None where there is nothing. Linear
    time, in the last TAIL characters."""
    text = text[-TAIL:]
    for line in reversed(list(FINAL_LINE.finditer(text))[-20:]):
        found = line[1].strip(" \t*_\r")
        if not found:  # a heading with the answer under it
            found = next((x for x in text[line.end():][:1000].splitlines() if x.strip(" \t*_")), "")
        if found := _last_boxes(found) or _bare(found):
            return found
    if (boxed := _last_boxes(text)) or strict:
        return boxed
    for line in reversed(re.findall(r"####[ \t]*([^\n]{1,300})", text)[-5:]):  # a markdown heading is no answer
        if not _has_words(_node(_bare(line))):
            return _bare(line)
    anchors = [m.end() for m in ANSWER_IS.finditer(text)]
    if anchors and (said := text[anchors[-1]:][:1000].strip(" \t\n*")):
        return _sentence_value(said)
    if len(text) <= LONGEST and text.strip() and not _has_words(_node(text)):
        return _bare(text)
    return _prose_value(text)


def _bare(text: str) -> str:
    text = BOLD.sub(r"\1", text.strip().strip("`").strip())
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) else text


def _last_boxes(text: str) -> str | None:
    boxes: list = []  # (start, start and end of content), in the order they close
    unclosed: list = []  # for each open brace: its box's start and content, or None
    for m in BOX_TOKEN.finditer(text):
        if m[0] == "}" and unclosed:
            if box := unclosed.pop():
                boxes.append((*box, m.start()))
        elif m[0][-1] == "{" and m[0] != "\\{":
            unclosed.append((m.start(), m.end()) if m[0] != "{" else None)
    parts, start = [], len(text)
    for begin, inside, end in reversed(boxes):
        if parts and (not 0 < start - end <= 40 or not BETWEEN_BOXES.fullmatch(text, end + 1, start)):
            break
        start, content = begin, text[inside:end].strip()
        for _ in range(3):  # a box in a box
            content = re.sub(r"^\\(?:boxed|fbox)\s*\{(.*)\}$", r"\1", content, flags=re.S).strip()
        if content and parts[-1:] != [content]:  # the same box twice is one answer
            parts.append(content)
    return ",".join(reversed(parts)) or None


def _sentence_value(said: str) -> str:
    """What "the answer is …" says: all of it where that reads as mathematics, else its first number, else its words."""
    said = _bare(SENTENCE_END.split(BOLD.sub(r"\1", said), maxsplit=1)[0])
    clause = REASON.split(said, maxsplit=1)[0].strip()
    for candidate in (said, clause):
        if candidate and not _has_words(_node(candidate)):
            return candidate
    return (_numbers(clause) or [clause or said])[0]


def _numbers(text: str) -> list[str]:
    """Numbers of a text that stand alone: an operand, an index, an argument or a part of a word is nobody's answer."""
    found = []
    for m in NUMBER.finditer(text):
        before, after = text[max(0, m.start() - 9):m.start()], text[m.end():m.end() + 9]
        difference = m[0][0] in "-+\u2212" and re.search(r"\d\s*$", before)
        if not (difference or OPERAND_BEFORE.search(before) or OPERAND_AFTER.match(after)):
            found.append(m[0].lstrip("+"))
    return found


@lru_cache(maxsize=1024)
def _prose_value(text: str) -> str | None:
    text = BOLD.sub(r"\1", text[-4_000:])
    sentences = [s for s in SENTENCE_END.split(text) if re.search(r"[\d\\$]", s)]
    for sentence in reversed(sentences[-30:]):
        for m in list(MATH_SPAN.finditer(sentence))[-1:]:
            inside = next(g for g in m.groups() if g)
            if not _numbers(sentence[m.end():]) and not _has_words(_node(inside)):
                return inside.strip()
        told = LEAD.sub("", sentence.strip())
        if re.search(r"[<>≤≥]|\\[lg]e", told) and not _has_words(_node(told)):
            return told
        tail = max((m.end() for m in VALUE_IS.finditer(sentence)), default=0)
        if tail and (said := _bare(sentence[tail:])) and not _has_words(_node(said)):
            return said
        if found := _numbers(sentence):
            return found[-1]
    return None


# Reading an answer: text -> node. A node is ("value", values, percent, letters), ("text", words), ("list" or "set",
# nodes), ("tuple", open, nodes, close), ("rows", rows), ("ratio", nodes), ("equation", name, node, differences),
# ("relation", sign, differences) or ("based", digits, base). Values and differences hold one number for each point.

CHARACTERS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/",
    "²": "^2", "³": "^3", "√": "\\sqrt ", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "\u00a0": " ", "\u2009": " ", "⁄": "/",
    "\u202f": " ", "\uff0c": ",", "\uff1a": ":", "\uff08": "(", "\uff09": ")", "º": "°", "≈": "=",
    "$": "", "€": "", "£": "",
})
COMMANDS = {
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠",
    "neq": "≠", "approx": "=", "in": "∈", "cup": "∪", "pm": "±", "mp": "∓", "infty": "∞", "cdot": "*", "times": "*",
    "div": "/", "circ": "°", "degree": "°", "pi": "π", "colon": ":", "lbrace": "⦃", "rbrace": "⦄", "langle": "(",
    "rangle": ")", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "dfrac": "\\frac",
    "tfrac": "\\frac", "cfrac": "\\frac", "dbinom": "\\binom", "tbinom": "\\binom", "displaystyle": " ", "quad": " ",
    "qquad": " ", "left": "", "right": "", "big": "", "Big": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "",
}
SIGNS = {"**": "^", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "\\{": "⦃", "\\}": "⦄", "\\%": "%", "{,}": ","}
SIGN = re.compile(r"(?<!\\)(?:" + "|".join(map(re.escape, SIGNS)) + ")")
GREEK = set("alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi "
            "chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell".split())
FUNCTIONS: dict[str, Callable] = {
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh,
    "tanh": cmath.tanh, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "cot": lambda z: 1 / cmath.tan(z),
    "sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z), "exp": cmath.exp, "ln": cmath.log,
    "log": cmath.log10,
}
FUNCTION = r"\\?(" + "|".join(FUNCTIONS) + r")(?![a-z])"
STYLED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname)\s*\{([^{}]*)\}"
                    r"(\s*\^\s*\{?[23]\}?)?")
WORD = (r"(?:(?!sqrt|frac|sinh?\b|cosh?\b|tanh?\b|theta\b|alpha\b|beta\b)[a-z]{4,}|[ckm]m|[km]?g|ft|in|lbs?|oz|mph|hrs?"
        r"|min|secs?|[ap]\.?m\b\.?|of|per|sq|the|all|cup|men|day|ml|usd|km/h|m/s|m|s)")
UNIT = re.compile(rf"(?i)(?<=[\d)}}°])(?:\s+|(?=[a-z]{{2}})|[-/])\(?{WORD}"
                  rf"(?:[\s/-]+{WORD}){{0,6}}(?:\s*\^\s*\{{?[23]\}}?)?\)?$")
WORDS_ONLY = re.compile(r"(?i)[a-z .,'’-]*[a-z]{3}[a-z .,'’-]*")
PROSE = re.compile(r"(?i)(?<![\\a-z])(?:is|it|so|he|we|if|to|of|at|in|on|be|she|has|the|are|was|for|her|his|get|not)"
                   r"(?![a-z])")
NAME = re.compile(r"\\?[A-Za-z](?:_\{?\w+\}?)?(?:'?\([A-Za-z](?:,[A-Za-z])*\))?|[A-Za-z ]{2,60}"
                  r"|\([A-Za-z](?:,\s*[A-Za-z])+\)")
MIXED = re.compile(r"\s+(\d+)/(\d+)(?![\d.])|\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
MATRIX = re.compile(r"\\begin\s*\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.S)
FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "=": "=", "≠": "≠"}


class _Unreadable(ArithmeticError):
    """Not in the notation, or over a bound."""


UNREADABLE = (ArithmeticError, ValueError)  # with _Unreadable: division by zero, overflow, outside a function's domain


@lru_cache(maxsize=16_384)
def _node(text: str) -> tuple:
    if len(text) > LONGEST:
        return ("text", text.strip())
    cleaned = _clean(text)
    try:
        return _read(cleaned)
    except UNREADABLE:
        return _words(cleaned)


def _clean(s: str) -> str:
    """One spelling for every sign, spacing gone, styled text as plain text, a unit after the last number dropped."""
    s = re.sub(r"\\+\$", "", s).translate(CHARACTERS).strip()
    if "\\begin" not in s:
        s = s.replace("\\\\", "\\")  # a JSON escape too many
    s = re.sub(r"(?<!\\)\\[!,]\s*", "", s)
    s = SIGN.sub(lambda m: SIGNS[m[0]], s)
    s = re.sub(r"(?<!\\)\\[;: ()\[\]]|~", " ", s)

    def plain(m: re.Match) -> str:
        word = m[1].strip().lower()
        if word in ("and", "or", ",", "percent", "%"):
            return f" {word} "
        # text right behind a value is its unit, with the unit's power
        return "" if m.string[:m.start()].rstrip()[-1:] in tuple("0123456789)}°") else f" {m[1]} {m[2] or ''}"

    s = re.sub(r"\\mathbb\s*\{?\s*R\s*\}?", "(-∞,∞)", STYLED.sub(plain, s))
    s = re.sub(r"\\([A-Za-z]+)", lambda m: COMMANDS.get(m[1], m[0]), s)
    s = re.sub(r"\^\s*(?:\{\s*°\s*\}|°)", "°", s)
    s = re.sub(r"(?i)\s*\b(?:percent(?:age)?|per cent|pct)\b", "%", re.sub(r"(?i)\binf(?:inity)?\b", "∞", s))
    s = re.sub(r"(?i)(?:\s*,)?\s*\b(?:and|or)\b\s*", ",", s)
    s = UNIT.sub("", s.strip().rstrip(".,;").strip()).strip()
    if not re.search(r"[()\[\]⦃⦄]", s):  # in brackets a comma separates, outside `1,234` is a number
        s = re.sub(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])", lambda m: m[1] + m[2].replace(",", ""), s)
    return re.sub(r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?![\d/ ])", lambda m: m[1] + m[2].replace(" ", ""), s)


def _words(s: str) -> tuple:
    s = re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(s.lower().split()))
    return ("text", s.strip(" .,:;!?*'\"()"))


def _depths(s: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(accumulate((c in "([{⦃") - (c in ")]}⦄") for c in s))


def _split(s: str, marks: str) -> list[str]:
    """Parts of `s` between marks that stand outside all brackets."""
    cuts = [i for i, depth in enumerate(_depths(s)) if depth == 0 and s[i] in marks]
    return [s[a + 1:b] for a, b in zip([-1, *cuts], [*cuts, len(s)], strict=True)]


def _read(s: str, depth: int = 0) -> tuple:
    s = s.strip()
    if not s or depth > 8:
        raise _Unreadable
    if WORDS_ONLY.fullmatch(s) and s.lower() not in ("sqrt", "exp") and "," not in s:
        return _words(s)
    if m := MATRIX.fullmatch(s):
        rows = m[2].strip("\\ \n").split("\\\\")
        return ("rows", tuple(tuple(_read(x, depth + 1) for x in row.split("&")) for row in rows))
    for marks in ("∪", ",;"):
        if len(parts := _split(s, marks)) > 1:
            return ("list", _read_all(parts, depth))
    if len(parts := _split(s, "∈")) == 2:
        return _read(parts[1], depth + 1)
    if len(sides := _split(s, "=<>≤≥≠")) > 1:
        return _read_relation(sides, re.findall("[=<>≤≥≠]", s), depth)
    if s[0] in "([⦃" and s[-1] in ")]⦄" and min(_depths(s)[:-1]) > 0:
        parts = _split(s[1:-1], ",;")
        if s[0] == "⦃":
            return ("set", _read_all(parts, depth))
        return ("tuple", s[0], _read_all(parts, depth), s[-1]) if len(parts) > 1 else _read(s[1:-1], depth + 1)
    if "±" in s or "∓" in s:
        return ("list", tuple(_read(s.translate({177: a, 8723: b}), depth + 1) for a, b in ("+-", "-+")))
    if len(parts := _split(s, ":")) > 1:
        return ("ratio", tuple(_value(p) for p in parts))
    if m := re.fullmatch(r"(\d[\dA-Fa-f]*)_\{?(\d{1,2})\}?", s):
        return ("based", m[1].lower(), m[2])
    return _value(s)


def _read_all(parts: list[str], depth: int) -> tuple:
    nodes = [_read(p, depth + 1) for p in parts]
    return tuple(x for n in nodes for x in (n[1] if n[0] == "list" else (n,)))  # 1 ± 2 is two


def _value(s: str) -> tuple:
    if PROSE.search(s):
        raise _Unreadable  # not the product of its letters
    percent = s.rstrip().endswith("%")
    s = s.strip().rstrip("%")
    first = _Expression(s, 0)
    values = [first.whole()]
    values += [_Expression(s, k).whole() if first.letters else values[0] for k in range(1, POINTS)]
    return ("value", tuple(values), percent, frozenset(first.letters))


def _read_relation(sides: list[str], signs: list[str], depth: int) -> tuple:
    sides = [x.strip() for x in sides]
    if len(signs) != len(sides) - 1:
        raise _Unreadable
    if set(signs) == {"="}:
        left, right = sides[0], sides[-1]
        if not NAME.fullmatch(left) and NAME.fullmatch(right):
            left, right = right, left
        try:
            differences = _differences(left, right)
        except UNREADABLE:
            differences = None
        named = NAME.fullmatch(left) or differences and not _value(left)[3]
        if not named and not differences:
            raise _Unreadable
        name, node = (left.replace(" ", ""), _read(right, depth + 1)) if named else (None, None)
        return ("equation", name, node, differences)
    if len(sides) == 2:
        left, right = sides
        sign = signs[0]
        if NAME.fullmatch(right) and not NAME.fullmatch(left):
            left, right, sign = right, left, FLIPPED[sign]
        if NAME.fullmatch(left) and sign != "≠":
            end = _read(right, depth + 1)
            infinite = _value("∞" if sign in ">≥" else "-∞")
            return ("tuple", "(" if sign in "<≤>" else "[", (end, infinite) if sign in ">≥" else (infinite, end),
                    "]" if sign == "≤" else ")")
        if sign in ">≥":
            left, right, sign = right, left, FLIPPED[sign]
        return ("relation", sign, _differences(left, right))
    if len(sides) == 3 and NAME.fullmatch(sides[1]):
        low, high = _read(sides[0], depth + 1), _read(sides[2], depth + 1)
        if set(signs) <= {">", "≥"}:
            low, high, signs = high, low, [FLIPPED[x] for x in reversed(signs)]
        if set(signs) <= {"<", "≤"}:
            return ("tuple", "[" if signs[0] == "≤" else "(", (low, high), "]" if signs[1] == "≤" else ")")
    raise _Unreadable


def _differences(left: str, right: str) -> tuple:
    return tuple(a - b for a, b in zip(_value(left)[1], _value(right)[1], strict=True))


class _Expression:
    """A recursive-descent reader that computes as it goes, at one point: a letter is a fixed pseudo-random fraction."""

    def __init__(self, text: str, point: int):
        self.text, self.at, self.point = text, 0, point
        self.depth, self.degrees, self.letters = 0, False, set()

    def whole(self):
        value = self.sum()
        if self.peek():
            raise _Unreadable
        return value

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at:self.at + 1]

    def take(self, pattern: str) -> re.Match | None:
        self.peek()
        if m := re.compile(pattern).match(self.text, self.at):
            self.at = m.end()
        return m

    def sum(self):
        self.depth += 1
        if self.depth > DEEPEST:
            raise _Unreadable
        value = self.term()
        while m := self.take(r"[+-]"):
            other = self.term()
            value = _bounded(value + other if m[0] == "+" else value - other)
        self.depth -= 1
        return value

    def term(self):
        value = self.signed()
        while c := self.peek():
            if m := self.take(r"[*/]"):
                other = self.signed()
                value = _bounded(value * other if m[0] == "*" else value / other)
            elif c.isalpha() or c in "\\({[∞":
                value = _bounded(value * self.power())
            elif c.isdigit() or c == ".":
                raise _Unreadable  # two numbers side by side
            else:
                break
        return value

    def signed(self):
        m = self.take(r"[+-](?:\s*[+-]){0,9}")
        value = self.power()
        return -value if m and m[0].count("-") % 2 else value

    def power(self):
        value = self.atom()
        while m := self.take(r"[!%°^]"):
            if m[0] == "!":
                if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 500):
                    raise _Unreadable
                value = _bounded(Fraction(math.factorial(int(value))))
            elif m[0] == "%":
                value = value / 100
            elif m[0] == "°":
                self.degrees = True
            else:
                self.depth += 1
                if self.depth > DEEPEST:
                    raise _Unreadable
                value = _power(value, self.signed())
                self.depth -= 1
        return value

    def atom(self):
        c = self.peek()
        if c.isdigit() or c == ".":
            return self.number()
        if c and c in "([{":
            return self.group()
        if c == "|":
            value = abs(self.group())
            return value if isinstance(value, Fraction) else complex(value)
        if m := self.take(FUNCTION):
            return self.function(m[1])
        if self.take(r"\\?sqrt"):
            index = self.group() if self.peek() == "[" else Fraction(2)
            return _root(self.argument(r"\d+"), index)
        if m := self.take(r"\\(frac|binom)(?![a-z])"):
            a, b = self.argument(r"\d"), self.argument(r"\d")
            return _bounded(a / b) if m[1] == "frac" else _binomial(a, b)
        if self.take(r"π|pi(?![a-z])"):
            return complex(math.pi)
        if m := self.take(r"(?:\\([A-Za-z]+)|([A-Za-z]|∞)(?![A-Za-z]{3}))(?:_(\{\w+\}|\w))?'{0,2}"):
            if m[1] and m[1] not in GREEK:
                raise _Unreadable
            if not m[3] and m[2] in ("i", "e"):
                return 1j if m[2] == "i" else complex(math.e)
            self.letters.add(m[0])
            return _point(m[0].replace("{", "").replace("}", ""), self.point)
        raise _Unreadable

    def number(self):
        m = self.take(DIGITS.replace(r"\d+(?:\.\d+)?", r"\d+(?:\.\d*)?"))
        if not m:
            raise _Unreadable
        value = Fraction(m[0].replace(",", ""))
        if m[0].isdigit():  # 2 1/2 and 2\frac12 are mixed numbers
            mixed = MIXED.match(self.text, self.at)
            if mixed:
                a, b = (int(x) for x in mixed.groups() if x)
                if a < b:
                    self.at = mixed.end()
                    value += Fraction(a, b)
        return _bounded(value)

    def group(self):
        closing = {"(": ")", "[": "]", "{": "}", "|": "|"}[self.peek()]
        self.at += 1
        value = self.sum()
        if self.peek() != closing:
            raise _Unreadable
        self.at += 1
        return value

    def argument(self, digits: str):
        if self.peek() == "{":
            return self.group()
        if m := self.take(digits):  # \frac12 is 1/2
            return Fraction(m[0])
        return self.atom()

    def function(self, name: str):
        base = self.argument(r"\d+") if self.take("_") else None
        power = self.argument(r"-?\d+") if self.take(r"\^") else None
        degrees, self.degrees = self.degrees, False
        value = self.power()
        bare = self.text[self.at - 1] not in ")}"
        while bare and (self.peek().isalpha() or self.peek() == "\\") and not self.take(f"(?={FUNCTION})"):
            value = value * self.power()  # \cos 2x
        value = complex(value) * (math.pi / 180 if self.degrees else 1)
        self.degrees = degrees
        result = FUNCTIONS[name](value)
        if base is not None:
            result = cmath.log(value) / cmath.log(complex(base))
        return _bounded(result if power is None else _power(result, power))


@lru_cache(maxsize=4096)
def _point(letter: str, k: int) -> Fraction:
    draw = random.Random(f"{letter} {k}")
    # of both signs, near 1 so that powers and exponentials stay small
    return Fraction(draw.randint(101, 997), 331) * (-1 if k == 1 else 1)


def _bounded(value):
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
            raise _Unreadable
    elif not cmath.isfinite(value):
        raise _Unreadable
    return value


def _power(base, exponent):
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * max(bits - 1, 0) > BITS or abs(exponent) > 10**6:
                raise _Unreadable
            return base ** int(exponent)
        if exponent.denominator == 2:
            return _power(_root(base, Fraction(2)), exponent * 2)
    return _bounded(complex(base) ** complex(exponent))


def _root(value, index):
    if index == 2 and isinstance(value, Fraction) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if Fraction(top * top, bottom * bottom) == value:
            return Fraction(top, bottom)
    if isinstance(value, Fraction) and value < 0 and isinstance(index, Fraction) and index % 2 == 1:
        return -_root(-value, index)
    return _bounded(complex(value) ** (1 / complex(index)))


def _binomial(n, k):
    if not all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 2000 for x in (n, k)):
        raise _Unreadable
    return _bounded(Fraction(math.comb(int(n), int(k))))


# Comparing

def _has_words(node: tuple) -> bool:
    if node and isinstance(node[0], str) and node[0] in ("text", "value"):
        return node[0] == "text"
    return any(_has_words(x) for x in node if isinstance(x, tuple))


def _close(a, b) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        if a == b:
            return True
        # 0.3333333333 for 1/3, but never one terminating decimal for another
        return _terminates(a) != _terminates(b) and abs(a - b) <= Fraction(REL_TOL) * abs(b)
    try:
        a, b = complex(a), complex(b)
    except OverflowError:
        return False
    return abs(a - b) <= max(REL_TOL * max(abs(a), abs(b)), 1e-14)


def _terminates(x: Fraction) -> bool:
    return pow(10, x.denominator.bit_length(), x.denominator) == 0


def _same_values(a: tuple, g: tuple) -> bool:
    pairs = list(zip(a[1], g[1], strict=True))
    if all(_close(x, y) for x, y in pairs):
        return True
    scaled = a[2] != g[2] and [(x, 100 * y) if a[2] else (100 * x, y) for x, y in pairs]
    return bool(scaled) and all(_close(x, y) for x, y in scaled)


def _proportional(a: tuple | None, g: tuple | None, positive: bool = False) -> bool:
    if not a or not g or not all(a) or not all(g):
        return False
    ratios = [x / y for x, y in zip(a, g, strict=True)]
    return all(_close(r, ratios[0]) for r in ratios) and (not positive or complex(ratios[0]).real > 0)


def _same(a: tuple, g: tuple) -> bool:
    """Whether the answer's node equals the gold's."""
    kinds = a[0], g[0]
    if "equation" in kinds:
        if kinds == ("equation", "equation"):
            return _proportional(a[3], g[3]) or _same_name(a[1], g[1]) and _same(a[2], g[2])
        named = a if a[0] == "equation" else g
        return named[1] is not None and (_same(a[2], g) if named is a else _same(a, g[2]))
    if a[0] in ("list", "set") and len(a[1]) == 1:
        return _same(a[1][0], g)
    if g[0] in ("list", "set"):
        if len(g[1]) == 1:
            return _same(a, g[1][0])
        parts = a[2] if a[0] == "tuple" and g[0] == "list" else a[1] if a[0] in ("list", "set") else ()
        left = list(parts)
        for item in g[1] if len(left) == len(g[1]) else ():
            match = next((i for i, x in enumerate(left) if _same(x, item)), None)
            if match is None:
                return False
            del left[match]
        return bool(parts) and not left
    if g[0] == "tuple":
        if a[0] == "list" and g[1] == "(" and g[3] == ")":
            a = ("tuple", "(", a[1], ")")
        return a[0] == "tuple" and (a[1], a[3]) == (g[1], g[3]) and _all_same(a[2], g[2])
    if kinds == ("rows", "rows"):
        return len(a[1]) == len(g[1]) and all(map(_all_same, a[1], g[1]))
    if kinds == ("relation", "relation"):
        return a[1] == g[1] and _proportional(a[2], g[2], positive=a[1] != "≠")
    if kinds == ("ratio", "ratio"):
        return _all_same(a[1], g[1])
    if kinds == ("value", "value"):
        return _same_values(a, g)
    return a == g and a != ("text", "")


def _same_name(a: str | None, g: str | None) -> bool:
    # "Total = 5" and "we get x = 5" name no other letter
    return a is not None and g is not None and (a == g or any(len(x) > 2 and x.isalpha() for x in (a, g)))


def _all_same(a: tuple, g: tuple) -> bool:
    return len(a) == len(g) and all(map(_same, a, g))


MARKED = re.compile(r"(?i)####|\\boxed|\\fbox|\banswers?\b")
PLAIN = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?")


def _stripped(text: str) -> str:
    return _bare(text) if len(text) <= LONGEST and not MARKED.search(text) else final_answer(text) or ""


def equivalent(answer: str | None, gold: str) -> bool:
    """Whether an answer (bare, LaTeX, or a sentence that says it) equals the gold by the rules at the top of this file.
    Never raises, from any thread; a hostile text costs milliseconds."""
    if answer is None:
        return False
    answer, gold = _stripped(answer), _stripped(gold)
    if PLAIN.fullmatch(answer) and PLAIN.fullmatch(gold):
        return Fraction(answer) == Fraction(gold)
    return bool(answer and gold) and _equivalent(answer, gold)


@lru_cache(maxsize=16_384)
def _equivalent(answer: str, gold: str) -> bool:
    if answer == gold:
        return True
    read, wanted = _node(answer), _node(gold)
    if _same(read, wanted):
        return True
    if _has_words(read) and not _has_words(wanted):  # a sentence for a mathematical gold
        said = _prose_value(answer)
        return said is not None and said != answer and _same(_node(said), wanted)
    return False


def check_golds(golds: Iterable[str]) -> list[str]:
    """Golds that no completion can match: put into a final-answer line or a box and graded, they fail themselves."""
    wrong = []
    for gold in golds:
        asked = final_answer(gold) if MARKED.search(gold) else gold
        if not (asked and equivalent(final_answer(f"Final Answer: {asked}", strict=True), gold)
                and equivalent(final_answer(f"\\boxed{{{asked}}}", strict=True), gold)):
            wrong.append(gold)
    return wrong


def number(text: str | None) -> float | None:
    """The numeric value of a plain answer ("1,234", "2 1/2", "28%" is 28), or None."""
    node = _node(_stripped(text or ""))
    if node[0] == "equation" and node[1] is not None:
        node = node[2]
    if node[0] != "value" or node[3]:
        return None
    try:
        value = complex(node[1][0])
    except OverflowError:
        return None
    return value.real if abs(value.imag) <= 1e-12 * abs(value) else None


def partial_credit(answer: str | None, gold: str) -> float:
    """1 for the right answer; for a wrong number p and gold g min(0.85, 1 / (1 + 2·|p − g| / max(|g|, 1))); else 0."""
    if equivalent(answer, gold):
        return 1.0
    p, g = number(answer), number(gold)
    return 0.0 if p is None or g is None else min(0.85, 1 / (1 + 2 * abs(p - g) / max(abs(g), 1)))


# Format, length, repetition, sums

STEP_LINE = re.compile(r"(?im)^[ \t*#>_-]*step[ \t]+\d+[ \t*_]*:")


def step_format(text: str) -> float:
    """0.7·s + 0.3·[has a final-answer line]; s = 1, 0.5, 0 for two or more, one, no lines that begin `Step N:`."""
    steps = len(STEP_LINE.findall(text))
    return 0.7 * min(steps, 2) / 2 + 0.3 * bool(FINAL_LINE.search(text))


def length_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (eq. 13 of arXiv 2503.14476), all in tokens: 0 up to limit − buffer, then linear
    down to −1 at the limit, and −1 over it."""
    if length > limit:
        return -1.0
    return 0.0 if length <= limit - buffer else (limit - buffer - length) / buffer


def repetition(text: str, n: int = 3) -> float:
    """Share, 0 to 1, of the text's n-grams (words and signs) that occurred before in it. Linear time."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def weighted_sum(parts: dict[str, float], weights: dict[str, float]) -> tuple[float, dict[str, float]]:
    """The reward and its weighted parts, which add up to it. ValueError where a part has no weight."""
    if missing := sorted(parts.keys() - weights.keys()):
        raise ValueError(f"reward part {missing[0]!r} has no weight: give it one (0 switches it off)")
    weighted = {name: weights[name] * value for name, value in parts.items()}
    return sum(weighted.values()), weighted


# Reward functions with TRL's signature

def load_reward(spec: str) -> tuple[str, float, Callable]:
    """`my_rewards.py:fn` or `my_rewards.py:fn=0.5` -> (name, weight, function). ValueError with the fix."""
    path, colon, rest = spec.rpartition(":")
    name, equals, weight = rest.partition("=")
    file = Path(path).expanduser()
    if not colon or not name.isidentifier():
        raise ValueError(f"reward {spec!r} is not of the form my_rewards.py:function or my_rewards.py:function=weight")
    try:
        value = float(weight) if equals else 1.0
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"reward {spec!r} has the weight {weight!r}: write a finite number after the =")
    if not file.is_file():
        raise ValueError(f"reward {spec!r}: there is no file {file}, give a path from {Path.cwd()}")
    module_name = f"_reward_file_{abs(hash(str(file.resolve())))}"
    module_spec = importlib.util.spec_from_file_location(module_name, file)
    if module_spec is None:
        raise ValueError(f"reward {spec!r}: {file} is not a Python file, its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it loads
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(f"reward {spec!r}: importing {file} failed with {type(error).__name__}: {error}") from error
    fn = getattr(module, name, None)
    if fn is None:
        known = sorted(k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module_name)
        raise ValueError(f"reward {spec!r}: {file} has no {name}, it has {', '.join(known) or 'no functions'}")
    if not callable(fn):
        raise ValueError(f"reward {spec!r}: {name} in {file} is a {type(fn).__name__}, it must be a function")
    return name, value, fn


def call_reward(fn: Callable, prompts: list, completions: list, completion_ids: list, columns: dict[str, list],
                trainer_state: SimpleNamespace | None = None) -> list[float | None]:
    """Calls fn with prompts, completions, completion_ids, trainer_state and the columns by name, as TRL does: all of
    them where it takes **kwargs, else those its signature names; waits for an async one. One float for each completion,
    None where the function gives None, NaN or an infinity (it does not apply). ValueError for any other result."""
    name = getattr(fn, "__name__", type(fn).__name__)
    given = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids,
             "trainer_state": trainer_state or SimpleNamespace(global_step=0)}
    wanted = inspect.signature(fn).parameters.values()
    lacking = [p.name for p in wanted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
               and p.name not in given]
    if lacking:
        known = ", ".join(sorted(given))
        raise ValueError(f"reward function {name} asks for {lacking[0]!r}, but the data has only {known}")
    if not any(p.kind is p.VAR_KEYWORD for p in wanted):
        given = {p.name: given[p.name] for p in wanted if p.name in given}
    result = fn(**given)
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    result = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(result, list | tuple) or len(result) != len(completions):
        what = f"{len(result)} values" if isinstance(result, list | tuple) else f"a {type(result).__name__}"
        raise ValueError(f"reward function {name} returned {what}, "
                         f"it must return a list of {len(completions)} numbers or None")
    return [_reward_value(x, name) for x in result]


async def _wait(awaitable):
    return await awaitable


def _reward_value(x, name: str) -> float | None:
    x = x.item() if hasattr(x, "item") and getattr(x, "size", 1) == 1 or hasattr(x, "numel") and x.numel() == 1 else x
    if x is None:
        return None
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise ValueError(f"reward function {name} returned {x!r:.80} for a completion, it must return a number or None")
    return float(x) if math.isfinite(x) else None
