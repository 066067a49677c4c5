r"""Where a completion's equation of motion stands, and one spelling for the many in which it may be written.

Nothing here knows a system: the text that comes out is what `tasks.physics.equations` cuts into tokens.
"""

from __future__ import annotations

import json
import re
import unicodedata

TAIL, LINE = 20_000, 2000  # characters of a completion, from its end, in which the answer is looked for; of a line
LENGTH = 400  # characters of an answer's equations
LARGEST = 1e30  # of a stated value


class ParseError(ValueError):
    """The text is no equation of this system; the message says why."""


# ---- one spelling
GREEK = dict(zip("αβγδεζηθικλμνξοπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi "
    "psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega").split(), strict=True))
SIGNS = dict.fromkeys("\u2212\u2013\u2010\u2011", "-") | dict.fromkeys("×·⋅∗∙\u2022", "*") | {
    "÷": "/", "\u2044": "/", "∕": "/", "’": "'", "′": "'", "‘": "'", "″": "''", "”": "''", '"': "''", "√": " sqrt ",
    "∂": "d", "\u2062": "*", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "µ": " mu ", "ϕ": " phi ", "ϑ": " theta ",
    "[": "(", "]": ")", "{": "(", "}": ")"}
SIGNS |= dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\ufeff", "")  # of no width
SIGNS |= {letter: f" {name} " for letter, name in GREEK.items()}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
STYLED = {"<font>", "<wide>", "<narrow>", "<small>", "<sub>"}  # 𝑥 ｘ ﹣ ₀ are their plain characters
QUOTE = "'"
MATHS = {"cdot": "*", "times": "*", "div": "/", "ln": " log ", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|",
         "to": " "}
# In this order; \0 is a character that no grammar reads.
LATEX = [(re.compile(pattern), to) for pattern, to in (
    (r"\\tag\s*\*?\{[^{}]*\}|\\(?:begin|end)\s*\{\w+\*?\}|\\displaystyle\b|&", " "),
    (r"\\(?:left|right|[bB]ig[glr]{0,2}|q?quad)(?![a-z])|\\[,;:! ]|(?<!\S)~|~(?=[\\\w])", " "),
    (r"\\(?:text|mathrm|operatorname|mathit)\s*\{\s*d\s*\}|\{\s*\\rm\s+d\s*\}|\\partial\s*", "d"),
    (r"\\(?:text|mathrm|operatorname|mathit|mathbf)\s*\{\s*(\w{1,12})\s*\}", r" \1 "),
    (r"\\(d?)dot\s*(?:\{\s*\\?(\w+)\s*\}|\\?([A-Za-z]\w*))",
     lambda m: f" {m[2] or m[3]}{2 * QUOTE if m[1] else QUOTE} "),
    (r"\\[dtc]?frac\s*\{\s*(d[^{}]{0,40}(?:\{2\})?[^{}]{0,20})\}\s*\{\s*(d\s*t[^{}]{0,10}(?:\{2\})?)\s*\}", r" \1/\2 "),
    (r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r" frac {\1}{\2}"), (r"\\[dtc]?frac(?![a-z])", " frac "),
    (r"\\prime\s*", "'"), (r"\^\s*(?:\{\s*('{1,2})\s*\}|('))", r"\1\2"),
    (r"_\s*\{\s*(\w{1,9})\s*\}", r"_\1"), (r"\*\*", "^"), (r"\^\s*(?:\{\s*(\d)\s*\}|\((\d)\))", r"^\1\2"),
    (r"(?<=\w)\[|\\sqrt\s*\[", "\0"),  # x[0] is no product, a third root none that is read
    (r"\\([*_])", r"\1"), (r"\\([A-Za-z]+)", lambda m: MATHS.get(m[1], f" {m[1]} ")))]
FRACTIONS = [(re.compile(pattern), to) for pattern, to in (  # on what has only round brackets
    (r"/\s*\(\s*d\s*t\s*(?:\^?\s*(2))?\s*\)(?:\s*\^?\s*(2))?", lambda m: "/dt" + (m[1] or m[2] or "")),
    (r"(?<![A-Za-z_])d\s*(\^?\s*2)?\s*\(\s*([A-Za-z]\w{0,9})\s*\)\s*/\s*d\s*t", r"d\1\2/dt"),
    (r"(?<![A-Za-z_])d\s*(\^?\s*2)?\s*/\s*d\s*t(?(1)\s*\^?\s*2)\s+([A-Za-z]\w{0,9})\b", lambda m: (
        f"d2{m[2]}/dt2" if m[1] else f"d{m[2]}/dt")),
    (r"(?<![A-Za-z_])d\s*(\^?\s*2)?\s*/\s*d\s*t(?(1)\s*\^?\s*2)\s*\(\s*([A-Za-z]\w{0,9})\s*\)", lambda m: (
        f"d2{m[2]}/dt2" if m[1] else f"d{m[2]}/dt")),
    (r"(?<=[A-Za-z]) +(?='|_(?:d?dot)\b)", ""))]


def one_spelling(text: str) -> str:
    """ASCII with `^`, round brackets and names of Greek letters; derivatives are spelt `d2x/dt2`, `dx/dt` or `x'`."""
    text = "".join(map(_plain, unicodedata.normalize("NFD", re.sub(r"\s+", " ", text))))
    text = re.sub(r"(\w)(?:\u0307\u0307|\u0308)", r" \1'' ", text)
    text = re.sub(r"(\w)\u0307", r" \1' ", text)
    text = re.sub(r"\u2014(?=\S)", "-", text)  # a dash of the prose has spaces around it
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^({m[0].translate(SUPERSCRIPTS)})", text)
    text = re.sub(r"(?<!\d)(?<!\d )[¼½¾]", lambda m: f"({unicodedata.numeric(m[0])})", text)
    for pattern, to in LATEX:
        text = pattern.sub(to, text)
    text = re.sub(r"\s+", " ", "".join(SIGNS.get(c, c) for c in unicodedata.normalize("NFC", text)))
    for pattern, to in FRACTIONS:
        text = pattern.sub(to, text)
    return text


def _plain(character: str) -> str:
    kind = "" if character.isascii() else unicodedata.decomposition(character).partition(" ")[0]
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
    for start in [m.start() for m in re.finditer(r"\{", text)][:-200:-1]:
        answer = _json_at(decoder, text[start:])
        answer = {str(key).lower(): value for key, value in answer.items()} if isinstance(answer, dict) else {}
        if (found := answer.get("equation", answer.get("equations"))) is not None:
            if isinstance(found, list) and all(isinstance(line, str) for line in found):
                found = "; ".join(found)
            if not isinstance(found, str):
                raise ParseError("the equation in the JSON answer is no text")
            for character, spelling in SWALLOWED.items():
                found = re.sub(character + r"(?=[A-Za-z])", lambda _, s=spelling: s, found)
            if len(found) > LENGTH:
                raise ParseError(f"over {LENGTH} characters")
            return _equations(_unwrapped(found)) or found, _numbers(answer.get("params"))
    if found := _equations(_unwrapped(text)):
        return found, {}
    raise ParseError("no JSON answer and no equation")


def _unwrapped(text: str) -> list[str]:
    """The lines of a text; what a box, quotation marks or tags hold stands on lines of its own."""
    for box in reversed(list(BOXED.finditer(text))[-20:]):
        depth, end = 1, box.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = f"{text[: box.start()]}\n{text[box.end() : end - (depth == 0)]}\n{text[end:]}"
    return TAG.sub("\n", QUOTED.sub(r"\n\1\n", text)).splitlines()


def _equations(lines: list[str]) -> str:
    """The last lines that are equations, in one spelling and without the words around them, joined by semicolons."""
    lines = _whole_lines(lines[-400:])
    for pattern in (LEFT_SIDE, SOMEWHERE):
        taken, sides = [], set()
        for line in reversed(lines):
            found = pattern.search(line) if "=" in line else None
            if not found:
                if taken and re.search(r"\w", line):
                    break
                continue
            factor = FACTOR.search(line[: found.start()])  # m*x'' = … is no equation for x''
            side, start = _side(found[0]), factor.start() if factor else found.start()
            if taken and (factor or side in sides):
                break
            sides.add(side)
            if pattern is LEFT_SIDE and found["closed"] and not factor:  # (dx/dt) = …
                line = line[: found.start("closed")] + line[found.end("closed"):]
            taken.insert(0, EPILOGUE.sub("", line[start:]).strip())
        if taken:
            return "; ".join(taken)
    return ""


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
    out = []
    for line in lines:
        if "=" not in line and out and "=" in out[-1] and re.search(r"[\w)|';]\s*$", out[-1]):
            more = EPILOGUE.sub("", one_spelling(line[:LINE])).strip()
            words = {word for word in re.findall("[A-Za-z]{3,}", more) if not word.endswith("dot")}
            if more[:1] in ("+", "-", "*", "/") and re.search(r"\w", more) and words <= WORDS:
                out[-1] = f"{out[-1].rstrip(' ;')} {more}"[:LINE]
                continue
        out.append(_one_line(line[:LINE]) if "=" in line else line)
    return out


def _one_line(line: str) -> str:
    return one_spelling(EMPHASIS.sub(r"\2", BULLET.sub("", line).replace("\\\\", ";")))


def _json_at(decoder: json.JSONDecoder, text: str):
    for repair in (lambda: text, lambda: BAD_ESCAPE.sub(r"\\\\", text[:4000]), lambda: re.sub(
            r"(?<=[{\[,:\s])'(?!')|(?<!')'(?=\s*[,:}\]])", '"', re.sub(r",(?=\s*[}\]])", "", text[:4000]))):
        try:
            return decoder.raw_decode(repair())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _numbers(params) -> dict[str, float]:
    """The finite numbers of a JSON object, at most 20, under names that an equation can hold."""
    found = {}
    for name, value in list(params.items())[:20] if isinstance(params, dict) else ():
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d.]{1,20}(?:e[-+]?\d{1,2})?\s*", value, re.I):
            value = float(value) if value.count(".") < 2 and any(map(str.isdigit, value)) else None
        usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        name = GREEK.get(name, name.removeprefix("\\"))
        if usable and re.fullmatch(r"[A-Za-z]\w{0,19}", name) and name.isascii():
            found[name] = float(value)
    return found
