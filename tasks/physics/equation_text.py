r"""Where a completion's equation of motion stands, and one spelling for the many in which it may be written.

Nothing here knows a system: the text that comes out is what `tasks.physics.equations` cuts into tokens.
"""

from __future__ import annotations

import json
import re
import unicodedata

TAIL = 20_000  # characters of a completion, from its end, in which the answer is looked for
LINE = 2000  # characters of a line
LENGTH = 400  # characters of an answer's equations
LARGEST = 1e30  # of a stated value


class ParseError(ValueError):
    """The text is no equation of this system; the message says why."""


# ---- one spelling
LETTERS = "αβγδεζηθικλμνξοπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
NAMES = ("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon "
         "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega")
GREEK = dict(zip(LETTERS, NAMES.split(), strict=True))
SIGNS = {"√": " sqrt ", "∂": "d", "µ": " mu ", "ϕ": " phi ", "ϑ": " theta "}
for characters, spelling in (
    ("\u2212\u2013\u2010\u2011", "-"),
    ("×·⋅∗∙\u2022\u2062", "*"),
    ("÷\u2044∕", "/"),
    ("’′‘", "'"),
    ("″”\"", "''"),
    ("\u00a0\u2009\u202f", " "),
    ("[{", "("),
    ("]}", ")"),
    ("\u200b\u200c\u200d\u2060\u2061\ufeff", ""),  # of no width
):
    SIGNS |= dict.fromkeys(characters, spelling)
SIGNS |= {letter: f" {name} " for letter, name in GREEK.items()}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
STYLED = {"<font>", "<wide>", "<narrow>", "<small>", "<sub>"}  # 𝑥 ｘ ﹣ ₀ are their plain characters
QUOTE = "'"
MATHS = {"cdot": "*", "times": "*", "div": "/", "ln": " log ", "to": " "} | dict.fromkeys(
    ["lvert", "rvert", "vert", "mid"], "|")
# In this order; \0 is a character that no grammar reads.
LATEX = [
    (r"\\tag\s*\*?\{[^{}]*\}|\\(?:begin|end)\s*\{\w+\*?\}|\\displaystyle\b|&", " "),
    (r"\\(?:left|right|[bB]ig[glr]{0,2}|q?quad)(?![a-z])|\\[,;:! ]|(?<!\S)~|~(?=[\\\w])", " "),
    (r"\\(?:text|mathrm|operatorname|mathit)\s*\{\s*d\s*\}|\{\s*\\rm\s+d\s*\}|\\partial\s*", "d"),
    (r"\\(?:text|mathrm|operatorname|mathit|mathbf)\s*\{\s*(\w{1,12})\s*\}", r" \1 "),
    (r"\\(d?)dot\s*(?:\{\s*\\?(\w+)\s*\}|\\?([A-Za-z]\w*))", lambda m: _primed(m[2] or m[3], m[1])),
    (r"\\[dtc]?frac\s*\{\s*(d[^{}]{0,40}(?:\{2\})?[^{}]{0,20})\}\s*\{\s*(d\s*t[^{}]{0,10}(?:\{2\})?)\s*\}", r" \1/\2 "),
    (r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r" frac {\1}{\2}"),
    (r"\\[dtc]?frac(?![a-z])", " frac "),
    (r"\\prime\s*", "'"),
    (r"\^\s*(?:\{\s*('{1,2})\s*\}|('))", r"\1\2"),
    (r"_\s*\{\s*(\w{1,9})\s*\}", r"_\1"),
    (r"\*\*", "^"),
    (r"\^\s*(?:\{\s*(\d)\s*\}|\((\d)\))", r"^\1\2"),
    (r"(?<=\w)\[|\\sqrt\s*\[", "\0"),  # x[0] is no product, a third root none that is read
    (r"\\([*_])", r"\1"),
    (r"\\([A-Za-z]+)", lambda m: MATHS.get(m[1], f" {m[1]} ")),
]
OPERATOR = r"(?<![A-Za-z_])d\s*(\^?\s*2)?\s*"  # the d of a derivative, of the second where group 1 is there
BY_TIME = r"/\s*d\s*t(?(1)\s*\^?\s*2)"
FRACTIONS = [  # on what has only round brackets
    (r"/\s*\(\s*d\s*t\s*(?:\^?\s*(2))?\s*\)(?:\s*\^?\s*(2))?", lambda m: "/dt" + (m[1] or m[2] or "")),
    (OPERATOR + r"\(\s*([A-Za-z]\w{0,9})\s*\)\s*/\s*d\s*t", r"d\1\2/dt"),
    (OPERATOR + BY_TIME + r"\s+([A-Za-z]\w{0,9})\b", lambda m: _derivative(m[2], m[1])),
    (OPERATOR + BY_TIME + r"\s*\(\s*([A-Za-z]\w{0,9})\s*\)", lambda m: _derivative(m[2], m[1])),
    (r"(?<=[A-Za-z]) +(?='|_(?:d?dot)\b)", ""),
]
LATEX_RULES = [(re.compile(pattern), to) for pattern, to in LATEX]
FRACTION_RULES = [(re.compile(pattern), to) for pattern, to in FRACTIONS]


def _primed(name: str, second: str) -> str:
    return f" {name}{QUOTE}{QUOTE} " if second else f" {name}{QUOTE} "


def _derivative(name: str, second: str | None) -> str:
    return f"d2{name}/dt2" if second else f"d{name}/dt"


def one_spelling(text: str) -> str:
    """ASCII with `^`, round brackets and names of Greek letters; derivatives are spelt `d2x/dt2`, `dx/dt` or `x'`."""
    text = re.sub(r"\s+", " ", text)
    text = unicodedata.normalize("NFD", text)
    text = "".join(map(_plain, text))
    text = re.sub(r"(\w)(?:\u0307\u0307|\u0308)", r" \1'' ", text)
    text = re.sub(r"(\w)\u0307", r" \1' ", text)
    text = re.sub(r"\u2014(?=\S)", "-", text)  # a dash of the prose has spaces around it
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^({m[0].translate(SUPERSCRIPTS)})", text)
    text = re.sub(r"(?<!\d)(?<!\d )[¼½¾]", lambda m: f"({unicodedata.numeric(m[0])})", text)
    for pattern, to in LATEX_RULES:
        text = pattern.sub(to, text)
    text = unicodedata.normalize("NFC", text)
    text = "".join(SIGNS.get(character, character) for character in text)
    text = re.sub(r"\s+", " ", text)
    for pattern, to in FRACTION_RULES:
        text = pattern.sub(to, text)
    return text


def _plain(character: str) -> str:
    if character.isascii():
        return character
    kind = unicodedata.decomposition(character).partition(" ")[0]
    return unicodedata.normalize("NFKC", character) if kind in STYLED else character


# ---- the answer within a completion
DERIVATIVE = (r"(?:(?<![A-Za-z_])d\s*(?:\^?\s*2)?\s*[A-Za-z]\w{0,9}?\s*(?:\(\s*t\s*\))?\s*/\s*d\s*t(?:\s*\^?\s*2)?"
              r"|(?<![A-Za-z_'])[A-Za-z]\w{0,9}?(?:'{1,2}(?![A-Za-z'])|_?d?dot\b))(?:\s*\(\s*t\s*\))?")
LEFT_SIDE = re.compile(rf"[A-Za-z]\w{{0,9}}\s*=\s*{DERIVATIVE}\s*(?:$|[;,.])|{DERIVATIVE}\s*(?P<closed>\)?)\s*:?=")
SOMEWHERE = re.compile(DERIVATIVE)
EPILOGUE = re.compile(r"(?:[,.;]?\s+|[,;]\s*)\(?(?:where|with|for|which|describing|that|because|since|as|in)\b.*"
                      r"|\s(?:#|//(?=\s+[A-Za-z]{3}))\s.*"
                      r"|(?:(?<!\d)\.|\.(?=\s+[A-Z][a-z]))\s.*|(?:[.,;`$\s。]|\\[)\\\]])+$")
# Words of a formula; a line with others is prose.
WORDS = {*GREEK.values(), "sin", "cos", "tan", "exp", "log", "sqrt", "abs", "Abs", "sgn", "sign", "tanh", "frac"}
FACTOR = re.compile(r"(?<=[\w)])\s*[-+*/^=|(]+\s*$|(?<![A-Za-z'])[A-Za-z0-9)]\s*$|[-+]\s*$")
BULLET = re.compile(r"^\s*(?:[-*+>]|\d{1,2}[.)])\s+")
EMPHASIS = re.compile(r"(?<![\w)\]}*])(\*{2,3})(?=[^\s*])(.{1,400}?)(?<=[^\s*])\1(?=[\s.,:;!?)]|$)")
QUOTED = re.compile(r"(?<!\w)[\"“]([^\"“”=\n]{1,60}=[^\"“”\n]{1,400})[\"”]")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
TAG = re.compile(r"</?[A-Za-z]\w{0,19}>")
BAD_ESCAPE = re.compile(r'\\(?![\\"/bfnrtu])')
SWALLOWED = {"\t": r"\t", "\x0c": r"\f", "\x08": r"\b", "\r": r"\r"}  # \theta, \frac, \beta, \rho in JSON


def read_answer(text: str) -> tuple[str, dict[str, float]]:
    """The equation that a completion ends on and the parameter values it states. ParseError without an equation.

    The last JSON object with an `equation` counts, in prose or in a code fence; without one, the last lines that are
    equations (or the last of them, where several are of the same derivative). `params` are numbers by name; what is no
    finite number among them is left out.
    """
    text = text[-TAIL:]
    decoder = json.JSONDecoder(strict=False)
    opened = [m.start() for m in re.finditer(r"\{", text)]
    for start in opened[:-200:-1]:
        answer = _json_at(decoder, text[start:])
        if not isinstance(answer, dict):
            continue
        answer = {str(key).lower(): value for key, value in answer.items()}
        written = answer.get("equation", answer.get("equations"))
        if written is not None:
            written = _text_of(written)
            return _equations(_unwrapped(written)) or written, _numbers(answer.get("params"))
    if found := _equations(_unwrapped(text)):
        return found, {}
    raise ParseError("no JSON answer and no equation")


def _text_of(written) -> str:
    """What a JSON answer has for its equation, as text: one string or a list of them."""
    if isinstance(written, list) and all(isinstance(line, str) for line in written):
        written = "; ".join(written)
    if not isinstance(written, str):
        raise ParseError("the equation in the JSON answer is no text")
    for character, spelling in SWALLOWED.items():
        written = re.sub(character + r"(?=[A-Za-z])", lambda _, s=spelling: s, written)
    if len(written) > LENGTH:
        raise ParseError(f"over {LENGTH} characters")
    return written


def _unwrapped(text: str) -> list[str]:
    """The lines of a text; what a box, quotation marks or tags hold stands on lines of its own."""
    boxes = list(BOXED.finditer(text))[-20:]
    for box in reversed(boxes):
        depth = 1
        end = box.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        closed = depth == 0
        inside = text[box.end() : end - 1 if closed else end]
        text = f"{text[: box.start()]}\n{inside}\n{text[end:]}"
    text = QUOTED.sub(r"\n\1\n", text)
    return TAG.sub("\n", text).splitlines()


def _equations(lines: list[str]) -> str:
    """The last lines that are equations, in one spelling and without the words around them, joined by semicolons."""
    lines = _whole_lines(lines[-400:])
    for pattern in (LEFT_SIDE, SOMEWHERE):
        taken = _last_equations(lines, pattern)
        if taken:
            return "; ".join(taken)
    return ""


def _last_equations(lines: list[str], pattern: re.Pattern) -> list[str]:
    """From the end on the lines in which the pattern is found, each of another derivative, up to one of prose."""
    taken: list[str] = []
    sides = set()
    for line in reversed(lines):
        found = pattern.search(line) if "=" in line else None
        if not found:
            if taken and re.search(r"\w", line):
                break
            continue
        factor = FACTOR.search(line[: found.start()])  # m*x'' = … is no equation for x''
        side = _side(found[0])
        start = factor.start() if factor else found.start()
        if taken and (factor or side in sides):
            break
        sides.add(side)
        if pattern is LEFT_SIDE and found["closed"] and not factor:  # (dx/dt) = …
            line = line[: found.start("closed")] + line[found.end("closed") :]
        taken.insert(0, EPILOGUE.sub("", line[start:]).strip())
    return taken


def _side(left: str) -> tuple[str, int]:
    """Name and order of the derivative that a left-hand side is, in any of its spellings; else the text and 0."""
    text = re.sub(r"\(\s*t\s*\)|[\s^():=]", "", left)
    if found := re.fullmatch(r"d(2?)(\w+)/dt2?", text):
        return found[2], 2 if found[1] else 1
    if found := re.fullmatch(r"(\w+?)(?:('{1,2})|_?(d?dot))", text):
        return found[1], 2 if found[2] == "''" or found[3] == "ddot" else 1
    return text, 0


def _whole_lines(lines: list[str]) -> list[str]:
    """Those with an equation in one spelling; a line that begins with a sign and is no prose goes on with it."""
    out: list[str] = []
    for line in lines:
        if "=" in line:
            out.append(_one_line(line[:LINE]))
            continue
        more = _continuation(out[-1], line) if out else ""
        if more:
            begun = out[-1].rstrip(" ;")
            out[-1] = f"{begun} {more}"[:LINE]
        else:
            out.append(line)
    return out


def _continuation(before: str, line: str) -> str:
    """What of a line goes on with the equation in the line before it; empty: nothing."""
    if "=" not in before or not re.search(r"[\w)|';]\s*$", before):
        return ""
    more = EPILOGUE.sub("", one_spelling(line[:LINE])).strip()
    words = {word for word in re.findall("[A-Za-z]{3,}", more) if not word.endswith("dot")}
    term = more[:1] in ("+", "-", "*", "/") and re.search(r"\w", more)
    return more if term and words <= WORDS else ""


def _one_line(line: str) -> str:
    return one_spelling(EMPHASIS.sub(r"\2", BULLET.sub("", line).replace("\\\\", ";")))


def _json_at(decoder: json.JSONDecoder, text: str):
    """The JSON value that a text begins with, common mistakes repaired; None where there is none."""
    for repair in (str, _escaped, _double_quoted):
        try:
            return decoder.raw_decode(repair(text))[0]
        except (ValueError, RecursionError):
            continue
    return None


def _escaped(text: str) -> str:
    """JSON whose strings hold LaTeX with single backslashes."""
    return BAD_ESCAPE.sub(r"\\\\", text[:4000])


def _double_quoted(text: str) -> str:
    """JSON with quotation marks as Python writes them, and commas before a closing bracket."""
    text = re.sub(r",(?=\s*[}\]])", "", text[:4000])
    return re.sub(r"(?<=[{\[,:\s])'(?!')|(?<!')'(?=\s*[,:}\]])", '"', text)


def _numbers(params) -> dict[str, float]:
    """The finite numbers of a JSON object, at most 20, under names that an equation can hold."""
    found: dict[str, float] = {}
    if not isinstance(params, dict):
        return found
    for name, value in list(params.items())[:20]:
        if isinstance(value, str):
            value = _number_in(value)
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not abs(value) <= LARGEST:
            continue
        name = GREEK.get(name, name.removeprefix("\\"))
        if re.fullmatch(r"[A-Za-z]\w{0,19}", name) and name.isascii():
            found[name] = float(value)
    return found


def _number_in(text: str) -> float | None:
    """The number that a text is, None where it is something else."""
    if not re.fullmatch(r"\s*[-+]?[\d.]{1,20}(?:e[-+]?\d{1,2})?\s*", text, re.I):
        return None
    one_point = text.count(".") < 2
    return float(text) if one_point and any(map(str.isdigit, text)) else None
