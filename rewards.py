r"""Pure scorers that several tasks share: answers, format, length, repetition, weighted sums, TRL-style functions.

Answers are cleaned to one spelling. Plain numbers, words, lists, points, intervals and ratios are compared here, other
expressions of allowed tokens by math-verify, in a process of its own under a deadline and a memory limit; the rest is
text. Nothing is evaluated, and any thread may ask. Rules, gold second:
- rational values must be the same; a decimal equals a value without a finite decimal within 1e-9 of its size;
- where one side has a percent sign, inside or outside $, p% equals both p and p/100; where both have, p is p;
- money signs, units and degree signs are ignored, and so is a name before `=` where the other side has none;
- lists and sets ask for every part in any order, points and intervals in order, a ratio or a time as it is written;
- inequalities in one letter are intervals, equations are equal up to a factor.
"""
import asyncio
import contextvars
import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

TAIL, LONGEST, BRACKETS = 30_000, 512, 60  # characters read of a completion and of an answer, brackets of an answer
DEADLINE = 0.7  # seconds of processor time for an answer that math-verify has
WORKER = Path(__file__).with_name("sandbox") / "answers.py"  # run, never imported
REL_TOL = Fraction(1, 10**9)  # nobody writes ten digits by accident

# Finding the answer in a completion. Every pattern is linear: no repeat inside a repeat without a separator between.
FINAL_LINE = re.compile(r"(?im)^[ \t*#>_-]*(?:(?:so )?the )?final[ \t]+answer[ \t*_]*(?:is[ \t*_]*)?[:\uff1a](.*)$")
STEP_LINE = re.compile(r"(?im)^[ \t*#>_-]*step[ \t]+\d+[ \t*_]*:")
INSIDE = r"(?:[^{}\\]|\\.|\{" * 5 + r"[^{}]*" + r"\})*" * 5  # braces in braces
BOX = re.compile(rf"\\(?:boxed|fbox)\s{{0,9}}\{{({INSIDE})\}}", re.S)
BETWEEN_BOXES = re.compile(r"(?:[\s,;$&]|and|or|\\text\{|\}|\\q?quad|\\.){0,40}")
ANSWER_IS = re.compile(r"####(?=\s*[-+\u2212$\\(.\d])"
                       r"|(?i:\banswers?\b[^\n:=.]{0,60}?(?:\b(?:is|are|be)\b[ \t]*:?|[:=]))")
VALUE_IS = re.compile(r"=|\b(?:is|are|equals|[Ss]o)\b:?")
MARKED = re.compile(r"(?i)####|\\boxed|\\fbox|\banswers?\b")
SENTENCE_END = re.compile(r"(?<!\\)[.!?](?:\s+|$)|\n+")
BOLD = re.compile(r"(?<![\w)*])\*\*(\S(?:[^*\n]{0,200}\S)?)\*\*(?!\w)")
SCALE = (r"(?:hundred|thousand|million|billion|trillion|dozen|hal(?:f|ves)|thirds|fourths|fifths|\w+dths|tenths"
         r"|factorial|squared$|cubed$|remainder)\b")  # words that change the value before them: no units
NUMBER = re.compile(  # that stands alone: an operand, an index, an argument or a part of a word is nobody's answer
    r"(?<![Nn]egative )(?<![Mm]inus )(?<![\w.,^*/_{}\\+-])(?<![\^*/+] )(?<!\w\()(?<!\d[-\u2212] )"  # nothing before
    r"(?:(?<!\d )[-+\u2212])?(?:\\?\$)?[-\u2212]?"  # sign and money sign
    r"(?:(?:\d+ ?)?\\[dt]?frac\{-?\d{1,40}\}\{\d{1,40}\}|\d+ \d+/\d+|\d+/\d+"  # fractions
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?)"  # decimals
    r"(?:\s?\\?%)?"
    r"(?!\w|[.,]\d|\s*(?:[\^_{}!+/]|\*+\s*[\w(\\]|\((?![A-Za-z]{2,} )|\\[a-z])|\)!"  # nothing behind
    r"|\s+(?i:" + SCALE + "))")
MATHEMATICAL = re.compile(r"[\d\\$]")  # what a sentence with a value has


def final_answer(text: str, strict: bool = False) -> str | None:
    """The answer a completion ends on, as written: the last `Final Answer:` line, else the last box or list of boxes.
    If not `strict`, else the last `#### x` or "answer is x", all of a mathematical text, or the last value in prose."""
    text = text[-TAIL:]
    marked = _final_line(text) or _last_boxes(text)
    if marked or strict:
        return marked
    announced = _announced(text)
    if announced is not None:
        return announced
    return _bare(text) if _is_math(text) else _last_value(text)


def _final_line(text: str) -> str | None:
    for line in reversed(list(FINAL_LINE.finditer(text))[-20:]):
        found = line[1].strip(" \t*_\r")
        if not found:  # under a bare heading on the next line
            below = text[line.end():][:1000]
            found = below.strip(" \t*_\r\n").partition("\n")[0]
        found = _last_boxes(found) or _bare(found)
        if found:
            return found
    return None


def _announced(text: str) -> str | None:
    """What follows the last `####` or "answer is": a mathematical sentence whole, else its first number."""
    ends = [m.end() for m in ANSWER_IS.finditer(text)]
    if not ends:
        return None
    after = BOLD.sub(r"\1", text[ends[-1]:][:1000]).strip(" \t\n*")
    if not after:
        return None
    said = _bare(SENTENCE_END.split(after, maxsplit=1)[0])
    if _is_math(said) or "\\begin" in said:
        return said
    numbers = NUMBER.findall(said)
    return numbers[0] if numbers else said


def _last_value(text: str) -> str | None:
    """The value on which the last of thirty sentences with one ends."""
    sentences = SENTENCE_END.split(BOLD.sub(r"\1", text[-4000:]))
    sentences = [s for s in sentences if MATHEMATICAL.search(s)]
    for sentence in sentences[:-31:-1]:
        said = _bare(_after_verb(sentence, len(sentence)))
        found = [said] if _is_math(said) else NUMBER.findall(sentence)
        if found:
            return found[-1].lstrip("+")
    return None


def _after_verb(sentence: str, default: int) -> str:
    ends = (m.end() for m in VALUE_IS.finditer(sentence))
    return sentence[max(ends, default=default):]


def _bare(text: str) -> str:
    text = BOLD.sub(r"\1", text.strip().strip("`").strip())
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) else text


def _last_boxes(text: str) -> str | None:
    parts, start = [], len(text)
    for box in reversed(list(BOX.finditer(text))[-20:]):
        if parts and not BETWEEN_BOXES.fullmatch(text, box.end(), start):
            break
        start = box.start()
        content = _last_boxes(box[1]) or box[1].strip()
        if content and parts[-1:] != [content]:  # the same box twice is one answer
            parts.append(content)
    return ",".join(reversed(parts)) or None


# One spelling for every notation; ⦃ ⦄ are the braces of sets, ¦ ends the rows of matrices
CHARACTERS = str.maketrans("\u2212\u2013\u2014\u2010\u2011×·⋅÷⁄\u00a0\u2009\u202f\uff0c\uff1a\uff08\uff09º≈",
                           "-----***//   ,:()°=", "$€£")
COMMAND_NAMES = {
    "≤": "le leq leqslant", "≥": "ge geq geqslant", "<": "lt", ">": "gt", "≠": "ne neq", "=": "approx", "∈": "in",
    "∪": "cup", "±": "pm", "∓": "mp", "∞": "infty", "*": "cdot times", "/": "div", "°": "circ degree", "π": "pi",
    ":": "colon", "⦃": "lbrace", "⦄": "rbrace", "|": "lvert rvert vert", "\\frac": "dfrac tfrac cfrac", "(": "langle",
    ")": "rangle", "\\binom": "dbinom tbinom", " ": "displaystyle quad qquad", "": "left right big Big bigl bigr"}
COMMANDS = {name: sign for sign, names in COMMAND_NAMES.items() for name in names.split()}
SIGNS = {"**": "^", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "\\{": "⦃", "\\}": "⦄", "\\%": "%", "{,}": ",",
         "²": "^2", "³": "^3", "√": "\\sqrt ", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"}
SIGN = re.compile(r"(?<!\\)(?:" + "|".join(map(re.escape, SIGNS)) + ")")
STYLE = r"\\(?:text(?:bf|it|rm|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname)\s*\{"  # behind a value: its unit
WORD = (rf"(?:(?!{SCALE})(?!sqrt|frac|sinh?\b|cosh?\b|tanh?\b|theta\b|alpha\b|beta\b)[a-z]{{4,}}"
        r"|[ckm]m|[km]?g|ft|in|lbs?|oz|mph|hrs?|min|secs?|[ap]\.?m\b\.?|of|per|sq|the|all|cup|men|day|ml|usd|km/h|m/s|m|s)")
UNIT = re.compile(rf"(?i)(?<=[\d)}}°])(?:\s+|(?=[a-z]{{2}})|[-/])\(?{WORD}"
                  rf"(?:[\s/-]+{WORD}){{0,6}}(?: *\^\s*\{{?[23]\}}?)?\)?$")
UNIT_TEXT = rf"(?<=[\d)}}°])\s*{STYLE}(?!\s*(?:and|or|,|percent|%)\s*}})[^{{}}]*}}(?: *\^\s*\{{?[23]\}}?)?"
WRAPPED = re.compile(rf"{STYLE}({INSIDE})\}}\.?", re.S)
POWER = {"hundred": "10^2", "thousand": "10^3", "million": "10^6", "billion": "10^9", "trillion": "10^12",
         "dozen": "12"}
MULTIPLE = re.compile(rf"(?i)(?<![\d.,])(\d{{1,9}}(?:\.\d{{1,9}})?)\s*(?:\\text\{{\s*|\s)({'|'.join(POWER)})\b\}}?")


def _multiple(m: re.Match) -> str:
    return f"{m[1]}*{POWER[m[2].lower()]}"


def _sign(m: re.Match) -> str:
    return SIGNS[m[0]]


def _command(m: re.Match) -> str:
    return COMMANDS.get(m[1], m[0])


def _joined(m: re.Match) -> str:
    """The digits of a number without what separates its thousands."""
    return re.sub("[ ,]", "", m[0])


def _compiled(*steps: tuple) -> list[tuple]:
    return [(re.compile(pattern), replacement) for pattern, replacement in steps]


def _replaced(steps: list[tuple], s: str) -> str:
    for pattern, replacement in steps:
        s = pattern.sub(replacement, s)
    return s


# The steps of one spelling, in the order in which they are taken.
NUMBER_WORDS = _compiled(
    (r"(?i)(?<![\d)] )\b(?:negative|minus)\s+(?=[\d.\\])", "-"),
    (MULTIPLE, _multiple),  # 3 million
)
NOTATION = _compiled(
    (r"\\[!,]\s*", ""),  # thin spaces
    (r"\b[pb]?matrix|array\}\{[lcr|]*|(?<=\\end\{)array", "pmatrix"),
    (SIGN, _sign),
    (r"\\[;: ()\[\]]|~", " "),  # other spaces and the marks of mathematics in text
    (UNIT_TEXT, ""),
    (STYLE + r"([^{}]*)\}", r" \1 "),  # other text
    (r"\\mathbb\s*\{?\s*R\s*\}?", "(-∞,∞)"),
    (r"\\([A-Za-z]+)", _command),
)
WORDS = _compiled(
    (r"\^\s*(?:\{\s*°\s*\}|°)", "°"),  # ^\circ
    (r"(?i)(?:\s*,)?\s*\b(?:and|or)\b\s*", ","),
    (r"(?i)\binf(?:inity)?\b", "∞"),
    (r"(?i)\s*\b(?:percent(?:age)?|per cent|pct)\b", "%"),
    (r"°\s*[CF]\b", "°"),
    (r"(?<![\w)}])\+ ?(?=∞)", ""),
)
SPACES = _compiled(
    (r"_\{(\w)\}", r"_\1"),
    (r"\s*([^\w\s])\s*", r"\1"),  # around signs
)
MONEY = re.compile(r"\\+\$")
SET = re.compile(r"\{[^{}\\]*,[^{}]*\}")  # written with the braces of a group
BRACKET = re.compile(r"[()\[\]⦃⦄]")
COMMA_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
SPACE_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d/ ])")
TRIGONOMETRY = re.compile("sin|cos|tan|cot|sec|csc")
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*°")


@lru_cache(maxsize=16_384)
def _clean(s: str) -> str:
    s = MONEY.sub("", s).translate(CHARACTERS).strip()
    while m := WRAPPED.fullmatch(s):
        s = m[1].strip()
    if SET.fullmatch(s):
        s = f"⦃{s[1:-1]}⦄"
    s = _replaced(NUMBER_WORDS, s)
    s = s.replace("\\\\", "¦" if "\\begin" in s else "\\")  # a JSON escape too many
    s = _replaced(NOTATION, s)
    if not BRACKET.search(s):  # in brackets a comma separates, outside `1,234` is a number
        s = COMMA_THOUSANDS.sub(_joined, s)
    s = _replaced(WORDS, s)
    s = s.strip().rstrip(".,;").strip()
    s = UNIT.sub("", s).strip()
    s = DEGREES.sub(r"(\1*π/180)" if TRIGONOMETRY.search(s) else r"\1", s)
    s = SPACE_THOUSANDS.sub(_joined, s)
    return _replaced(SPACES, " ".join(s.split()))


# Reading a cleaned answer: what may stand before `=`, inequalities in one letter, plain numbers
NAME = re.compile(
    r"[^A-Za-z]+|(?:\\[A-Za-z]+|[A-Za-z])(?:_\{?\w+\}?)?(?:\([A-Za-z,]+\))?|[A-Za-z ]{2,60}|\([A-Za-z,]+\)")
RANGE = re.compile(r"(?:([^<≤>≥=≠,]+)([<≤]))?(\\?[A-Za-z]+(?:_\w+)?)(?:([<≤])([^<≤>≥=≠,]+))?")
REAL = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
SCIENTIFIC = re.compile(r"^(-?[\d.]+)\*10\^\{?(-?\d{1,3})\}?$")
TEX_FRACTION = re.compile(rf"\\frac ?(?:\{{(-?{REAL})\}}|(\d))(?:\{{(-?{REAL})\}}|(\d))")
TURNED = str.maketrans(">≥", "<≤")
UPPER, LOWER = str.maketrans("±∓", "+-"), str.maketrans("±∓", "-+")
EXACT = re.compile(rf"([+-]?) ?(?:(\d+) (?=\d+/))?(-?{REAL})(?:/(-?{REAL}))?(%?)")


@lru_cache(maxsize=16_384)
def _exact(s: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number (integer, decimal, fraction, mixed, scientific) and whether it is a percentage."""
    plain = TEX_FRACTION.sub(r" \1\2/\3\4", SCIENTIFIC.sub(r"\1e\2", s))
    m = EXACT.fullmatch(plain.strip())
    if not m:
        return None
    sign, whole, numerator, denominator, percent = m.groups()
    below = Fraction(denominator or 1)
    if not below:
        return None
    value = Fraction(numerator) / below
    if whole and int(whole):
        if not 0 < value < 1:
            return None
        value += int(whole)
    return -value if sign == "-" else value, percent == "%"


def _split(s: str, marks: str) -> list[str]:
    """Parts of `s` between marks that stand outside all brackets."""
    parts, start, depth = [], 0, 0
    for i, c in enumerate(s):
        if c in "([{⦃":
            depth += 1
        elif c in ")]}⦄":
            depth -= 1
        if c in marks and depth == 0:
            parts.append(s[start:i])
            start = i + 1
    return [*parts, s[start:]]


@lru_cache(maxsize=16_384)
def _shape(s: str) -> tuple[str, list, str]:
    """Opening sign, parts, closing sign: no signs for a list, a set or a single thing, : for a ratio."""
    if sum(map(s.count, "([{⦃")) > BRACKETS:
        return "", [s], ""
    parts = _split(s, ",;∪")
    if len(parts) > 1:
        return "", _both_signs(parts), ""
    s = _split(s, "∈")[-1]
    if interval := _interval(s):
        return interval
    ratio = _split(s, ":")
    if len(ratio) > 1:
        return ":", ratio, ""
    one_pair = s[:1] in ("(", "[", "⦃") and _split(s, ")]⦄")[1:] == [""]  # of brackets around all
    if not one_pair:
        return "", _both_signs([s]), ""
    parts = _split(s[1:-1], ",;")
    if s[0] == "⦃":
        return "", _both_signs(parts), ""
    return (s[0], parts, s[-1]) if len(parts) > 1 else _shape(parts[0])


def _interval(s: str) -> tuple[str, list, str] | None:
    """The shape of inequalities in one letter."""
    if re.search("[>≥]", s) and not re.search("[<≤]", s):  # 5>x is x<5
        turned = re.split("([>≥])", s)[::-1]
        s = "".join(turned).translate(TURNED)
    m = RANGE.fullmatch(s)
    if not m or not (m[2] or m[4]):
        return None
    opening = "[" if m[2] == "≤" else "("
    closing = "]" if m[4] == "≤" else ")"
    return opening, [m[1] or "-∞", m[5] or "∞"], closing


def _both_signs(parts: list[str]) -> list[str]:
    """The parts, 1 ± 2 as two things."""
    found = []
    for part in parts:
        found += dict.fromkeys((part.translate(UPPER), part.translate(LOWER)))
    return found


def _unnamed(s: str) -> str:
    """The value of `x=5`, `5=x` or `2+3=5`, all else as it is."""
    sides = _split(s, "=")
    first, last = sides[0], sides[-1]
    if first == "":  # ≈5
        return last
    p, q = _exact(first), _exact(last)
    if p and q and p[1] == q[1] and abs(p[0] - q[0]) > abs(q[0]) / 100:  # 6=5 says neither
        return s
    if len(_split(s, ",;∪<>≤≥≠")) > 1:
        return s
    if NAME.fullmatch(first):
        return last
    return first if NAME.fullmatch(last) and re.search("[A-Za-z]", last) else s


MATRIX = re.compile(r"[(\[]?\\begin\{pmatrix\}(.*?)\\end\{pmatrix\}[)\]]?")


def _same(a: str, g: str) -> bool:
    """Whether a cleaned answer equals a cleaned gold."""
    if a == g:
        return a != ""
    if "\\begin" in a or "\\begin" in g:
        return _same_matrix(a, g)
    if ("=" in a) != ("=" in g):
        a, g = _unnamed(a), _unnamed(g)
    a_open, a_parts, a_close = _shape(a)
    g_open, g_parts, g_close = _shape(g)
    if (a_open, len(a_parts), a_close) != (g_open, len(g_parts), g_close):
        return False
    if a_parts == [a] and g_parts == [g]:
        return _same_thing(a, g)
    if g_open:
        return all(map(_same, a_parts, g_parts))
    left = list(a_parts)
    for wanted in g_parts:
        match = next((x for x in left if _same(x, wanted)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_matrix(a: str, g: str) -> bool:
    found = [MATRIX.fullmatch(_unnamed(s)) for s in (a, g)]
    if not all(found):
        return False
    a_rows, g_rows = [m[1].strip("¦ ").split("¦") for m in found]
    if [row.count("&") for row in a_rows] != [row.count("&") for row in g_rows]:
        return False
    a_cells, g_cells = ["&".join(rows).split("&") for rows in (a_rows, g_rows)]
    return all(_same(p.strip(), q.strip()) for p, q in zip(a_cells, g_cells, strict=True))


def _same_thing(a: str, g: str) -> bool:
    p, q = _exact(a), _exact(g)
    if p and q:
        return _same_number(*p, *q)
    answer, gold = _latex(a), _latex(g)
    if answer and gold:
        return ("=" in answer) == ("=" in gold) and _left.get() > 0 and _ask(answer, gold) == 1
    if answer or gold:
        return False
    a, g = (x.lower().strip(" .,:;!?*'\"()") for x in (a, g))
    return a == g != ""


def _same_number(p: Fraction, p_percent: bool, q: Fraction, q_percent: bool) -> bool:
    scale = Fraction(1)
    if p_percent != q_percent:
        scale = Fraction(100) if q_percent else Fraction(1, 100)
    # 0.3333333333 is 1/3, but never one terminating decimal another
    tolerance = REL_TOL * abs(q) if _terminates(p) != _terminates(q) else 0
    return abs(p - q) <= tolerance or abs(p * scale - q) <= tolerance


def _terminates(x: Fraction) -> bool:
    """Whether a fraction is a finite decimal: whether its denominator divides a power of ten."""
    return pow(10, x.denominator.bit_length(), x.denominator) == 0


def _is_math(text: str) -> bool:
    s = _unnamed(_clean(text)) if len(text) <= LONGEST else ""
    if MATRIX.fullmatch(s):
        return True
    parts = _shape(s)[1]
    if parts == [s]:
        return bool(_exact(s) or _latex(s))
    return all(map(_is_math, parts))


FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sqrt sin cos tan cot sec csc exp ln log frac binom".split()
GREEK = "alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi omega Gamma Delta Sigma Phi Omega".split()
TEX = {"π": "\\pi ", "pi": "\\pi ", "∞": "\\infty ", "≤": "\\leq ", "≥": "\\geq ", "≠": "\\neq ", "i": " I "}
TEX |= {x: f" {x} " for x in "abcemnpqrstuvwxyz"}
KNOWN = "|".join([*FUNCTIONS, *GREEK, "pi"])
TOKEN = re.compile(rf"(?:\\?({KNOWN})|([A-Za-zπ∞≤≥≠]))(?:_(\w|\{{\w{{1,9}}\}}))?|[^\s\d.+*/^=<>|!(){{}}\[\]-]")
REFUSED = re.compile(  # words; huge powers, towers, factorials, binomials; numbers side by side
    r"(?<![\\A-Za-z])(?i:is|it|so|he|we|if|to|of|at|in|on|be|she|has|the|are|was|for|her|get|not)(?![A-Za-z])|.{161}"
    rf"|(?<![\\A-Za-z])(?>{KNOWN})(?!{KNOWN})[a-z]{{2}}"
    rf"|^[A-Za-z .'’-]*[A-Za-z]{{3}}[A-Za-z .'’-]*$|(?<![A-Za-z])(?!{KNOWN})[A-Za-z]{{4}}"
    r"|\^\{-?\d{4}|\^\{[^{}]*(?:\d\}?|\})\^|(?:\d{4}|[5-9]\d\d)!|\W!|\\binom(?!(?:\{\w{1,3}\}){2})"
    r"|\d(?<!_\d) \.?\d|[)\]]\.?\d|(?<![A-Za-z\\])[A-Za-z] ?\d|=.*=|[-+*/^=]$|^$")


LONG_ARGUMENT = re.compile(r"(\^|\\?sqrt)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
SHORT_ARGUMENT = re.compile(r"(\^|\\?sqrt) ?(-?(?:\d+(?:\.\d+)?|[A-Za-zπ](?![A-Za-z])))")
PRODUCT = re.compile(r"(?<!_\d)(?<=[\d)])\(")
ODD_ROOT = re.compile(r"\\sqrt\[(\d*[13579])\]\{-(\d+)\}")


def _token(m: re.Match) -> str:
    """A token as LaTeX; the null character where none is allowed."""
    name = m[1] or m[2] or ""
    index = (m[3] or "").strip("{}")
    if not name:
        return "\0"
    if name in FUNCTIONS:
        return f"\\{name}_{{{index}}} " if index else f"\\{name} "
    # math-verify folds case and reads dx and Γ in ways of its own: other letters go under a number
    place = int.from_bytes((name + index).encode())
    return TEX.get(name + index, f" x_{{{place}}} ")


@lru_cache(maxsize=16_384)
def _latex(s: str) -> str | None:
    """A cleaned expression as LaTeX from allowed tokens; None for words, code and what may be huge."""
    s = LONG_ARGUMENT.sub(r"\1{\2}", s)
    s = SHORT_ARGUMENT.sub(r"\1{\2}", s)
    s = PRODUCT.sub("*(", s)  # math-verify adds 2(3)
    s = ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", s)  # the real one
    if REFUSED.search(s) or any(s.count(a) != s.count(b) for a, b in ("()", "[]", "{}")):
        return None
    tex = TOKEN.sub(_token, s)
    return None if "\0" in tex else tex


# math-verify in a process of its own, see WORKER; it ends with its stdin, so with us.
_worker: subprocess.Popen | None = None
_lock = threading.Lock()
_left = contextvars.ContextVar("seconds left for an answer, in each thread", default=DEADLINE)
os.register_at_fork(after_in_child=lambda: globals().update(_worker=None, _lock=threading.Lock()))


def _started_worker() -> subprocess.Popen:
    command = [sys.executable, "-I", str(WORKER), *filter(None, sys.path)]
    worker = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True)  # which keeps Ctrl-C from it
    if worker.stdout.readline() != b"ready\n":
        raise RuntimeError("answers are compared by math-verify: pip install math-verify==0.9.0")
    return worker


def _ask(answer: str, gold: str | None) -> float:
    """math-verify's verdict on two expressions, 0 or 1; without a gold the answer's value, NaN where it has none. 0
    where it fails or takes too long: then no time is left."""
    global _worker
    with _lock:
        for _ in range(2):  # again where the worker was killed from outside
            worker, _worker = _worker, None  # back after its reply: a late one, after Ctrl-C, answers no other question
            if not worker or worker.poll() is not None:
                worker = _started_worker()
            try:
                worker.stdin.write(json.dumps([_left.get(), answer, gold]).encode() + b"\n")
                if reply := worker.stdout.readline().split():
                    _worker = worker
                    _left.set(float(reply[1]))
                    return float(reply[0])
            except BrokenPipeError:
                pass
            finally:
                if _worker is None:
                    worker.kill()
                    worker.wait()
    return math.nan if gold is None else 0.0


def equivalent(answer: str | None, gold: str) -> bool:
    """Whether an answer (bare, LaTeX, or a sentence that says it) equals the gold by the rules at the top of this file.
    From any thread, under a second for a hostile text. RuntimeError only where math-verify is needed and missing."""
    answer, gold = _stated(answer or ""), _stated(gold)
    _left.set(DEADLINE)
    if max(len(answer), len(gold)) > LONGEST:
        return answer == gold
    return _equivalent(answer, gold)


def _stated(text: str) -> str:
    if len(text) <= LONGEST and not MARKED.search(text):
        return _bare(text)
    return final_answer(text) or ""


@lru_cache(maxsize=16_384)
def _equivalent(answer: str, gold: str) -> bool:
    a, g = _clean(answer), _clean(gold)
    if gold == "":
        return False
    if answer == gold or _same(a, g):
        return True
    if _is_math(answer) or not _is_math(gold) or CODE.search(answer):
        return False
    return _same(_clean(_only_value(answer)), g)  # words, perhaps a sentence for a mathematical gold


CODE = re.compile(rf"\\begin|&|__|[(=]\s*[\"'`]|\b(?:lambda|import)\b|(?<![\\A-Za-z])(?!(?:{KNOWN})\()[A-Za-z]\w+\(")


def _only_value(text: str) -> str:
    """What a sentence says, "" where its last part names several numbers (`5 (not 4)`, `1 2 3`): that is a list."""
    sentences = [s for s in SENTENCE_END.split(text) if re.search(r"\d", s)]
    last = _after_verb(sentences[-1], 0) if sentences else ""
    said = final_answer(text) or ""
    several = len(set(NUMBER.findall(last))) > 1
    return "" if several and NUMBER.fullmatch(said) else said


def check_golds(golds: Iterable[str]) -> list[str]:
    """Golds that no completion can match: put into a final-answer line or a box and graded, they fail themselves."""
    return [gold for gold in golds if not _matches_itself(gold)]


def _matches_itself(gold: str) -> bool:
    asked = final_answer(gold) if MARKED.search(gold) else gold
    if not asked:
        return False
    forms = (f"Final Answer: {asked}", f"\\boxed{{{asked}}}")
    return all(equivalent(final_answer(form, strict=True), gold) for form in forms)


def number(text: str | None) -> float | None:
    """The value of a plain number ("1,234", "2 1/2", "x = 1e3"; "28%" is 28), or None."""
    s = _clean(_bare((text or "")[:LONGEST]))
    parts = _shape(_unnamed(s))[1]
    exact = _exact(",".join(parts))
    return float(exact[0]) if exact and abs(exact[0]) < 10**300 else None


@lru_cache(maxsize=16_384)
def value(text: str, seconds: float = DEADLINE) -> float | None:
    """The finite real value of a plain number (as `number` reads it) or of an expression that SymPy evaluates within
    `seconds` in the process of its own ("2\\sqrt{3}", "7/(1+1)"); None for all else."""
    plain = number(text)
    if plain is not None or len(text) > LONGEST or seconds <= 0:
        return plain
    expression = _latex(_unnamed(_clean(_bare(text))))
    if not expression or RELATION.search(expression):
        return None
    _left.set(seconds)
    found = _ask(expression, None)
    return found if math.isfinite(found) and _left.get() > 0 else None


RELATION = re.compile(r"[=<>]|\\(?:leq|geq|neq|in)\b")


def partial_credit(answer: str | None, gold: str) -> float:
    """1 for the right answer; for a wrong number p and gold g min(0.85, 1 / (1 + 2·|p − g| / max(|g|, 1))); else 0."""
    if equivalent(answer, gold):
        return 1.0
    p, g = number(answer), number(gold)
    if p is None or g is None:
        return 0.0
    return min(0.85, 1 / (1 + 2 * abs(p - g) / max(abs(g), 1)))


def step_format(text: str) -> float:
    """0.7·s + 0.3·[has a final-answer line]; s = 1, 0.5, 0 for two or more, one, no lines that begin `Step N:`."""
    text = text[-TAIL:]
    steps = min(len(STEP_LINE.findall(text)), 2)
    ends = bool(FINAL_LINE.search(text))
    return 0.7 * steps / 2 + 0.3 * ends


def length_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in tokens: linear from 0 at limit − buffer to −1."""
    if length > limit:
        return -1.0
    return min(0.0, (limit - buffer - length) / max(buffer, 1))


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


def load_reward(spec: str) -> tuple[str, float, Callable]:
    """`my_rewards.py:fn` or `my_rewards.py:fn=0.5` -> (name, weight, function). ValueError with the fix."""
    path, _, rest = spec.rpartition(":")
    name, equals, weight = rest.partition("=")
    file = Path(path).expanduser()
    if not path or not name.isidentifier():
        raise ValueError(f"reward {spec!r} is not of the form my_rewards.py:function or my_rewards.py:function=weight")
    if equals and not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,2})?", weight, re.I):
        raise ValueError(f"reward {spec!r} has the weight {weight!r}: write a finite number after the =")
    if not file.is_file() or file.suffix != ".py":
        what = "is no .py file" if file.is_file() else f"does not exist (looked from {Path.cwd()})"
        raise ValueError(f"reward {spec!r}: {file} {what}")
    known = vars(_module_of(spec, file))
    fn = known.get(name)
    if not callable(fn):
        own = sorted(k for k, v in known.items() if inspect.isfunction(v) and v.__module__ == known["__name__"])
        raise ValueError(f"reward {spec!r}: {file} has no function {name}, it has {', '.join(own) or 'none'}")
    return name, float(weight) if equals else 1.0, fn


def _module_of(spec: str, file: Path) -> ModuleType:
    key = f"_reward_file_{hash((file.resolve(), file.stat().st_mtime_ns))}"  # two functions of a file share its state
    if key not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(key, file)
        sys.modules[key] = importlib.util.module_from_spec(module_spec)  # dataclasses look it up while it loads
        try:
            module_spec.loader.exec_module(sys.modules[key])
        except (Exception, SystemExit) as e:
            del sys.modules[key]
            raise ValueError(f"reward {spec!r}: importing {file} failed with {type(e).__name__}: {e}") from e
    return sys.modules[key]


class BadReward(ValueError):
    """A reward function is at fault itself, whatever the completions were."""


def call_reward(fn: Callable, prompts: list, completions: list, completion_ids: list, columns: dict[str, list],
                trainer_state: SimpleNamespace | None = None) -> list[float | None]:
    """Calls fn as TRL does, with prompts, completions, completion_ids, trainer_state and the columns by name: all where
    it takes **kwargs, else those it names; waits for an async one. A float for each completion, None where fn gives
    None, NaN or an infinity (it does not apply). BadReward for any other result."""
    name = getattr(fn, "__name__", type(fn).__name__)
    given = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "trainer_state": trainer_state or SimpleNamespace(global_step=0),
    }
    result = fn(**_named_arguments(fn, name, given))
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != len(completions):
        what = f"{len(result)} values" if isinstance(result, list | tuple) else f"a {type(result).__name__}"
        raise BadReward(f"reward function {name} returned {what}, not a list of {len(completions)} numbers or None")
    values = [x.item() if hasattr(x, "item") else x for x in result]
    for x in values:
        if x is not None and type(x) not in (int, float):
            raise BadReward(f"reward function {name} returned {x!r:.80}, it must return a number or None for each")
    return [None if x is None or not math.isfinite(x) else float(x) for x in values]


def _named_arguments(fn: Callable, name: str, given: dict) -> dict:
    """What fn asks for of what is given: all where it takes **kwargs. BadReward where it asks for more."""
    wanted = inspect.signature(fn).parameters.values()
    for p in wanted:
        required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if required and p.name not in given:
            raise BadReward(f"reward function {name} asks for {p.name!r}, not among {', '.join(sorted(given))}")
    if any(p.kind is p.VAR_KEYWORD for p in wanted):
        return given
    return {p.name: given[p.name] for p in wanted if p.name in given}
