"""The tools, and the calls to them that a model writes: parsing and running. All of it takes linear time.

A new tool is one function with a typed signature and a docstring, put into TOOLS: its JSON schema is made from them.
"""

from __future__ import annotations

import ast
import datetime
import functools
import inspect
import itertools
import json
import math
import re
import zoneinfo
from collections.abc import Callable, Iterator

from tasks.tools.calculator import evaluate, show

LONGEST_REPLY = 200  # characters of an observation
MOST_CALLS = 256  # calls that are read in one turn
SCAN = 512  # characters within which a function-style call must close


# ------------------------------------------------------------------------------------------------ the tools
def calculate_math(expression: str) -> str:
    """
    Work out an arithmetic expression.

    Args:
        expression: The expression, for example (12+7)*3 or sqrt(16)+2
    """
    return show(evaluate(str(expression)))


UNITS = {  # what it measures, and its size in the first unit of that kind
    "km": ("length", 1000.0),
    "mile": ("length", 1609.344),
    "metre": ("length", 1.0),
    "foot": ("length", 0.3048),
    "kg": ("mass", 1.0),
    "pound": ("mass", 0.45359237),
    "celsius": ("temperature", None),
    "fahrenheit": ("temperature", None),
}
SPELLINGS = {
    "km": "km kilometer kilometers kilometre kilometres 公里 千米",
    "mile": "mile miles mi 英里",
    "metre": "metre metres meter meters m 米",
    "foot": "foot feet ft 英尺",
    "kg": "kg kgs kilogram kilograms 公斤 千克",
    "pound": "pound pounds lb lbs 磅",
    "celsius": "celsius c °c 摄氏度 摄氏",
    "fahrenheit": "fahrenheit f °f 华氏度 华氏",
}
UNIT_NAMES = {spelling: unit for unit, spellings in SPELLINGS.items() for spelling in spellings.split()}


def unit_converter(value: float, from_unit: str, to_unit: str) -> str:
    """
    Convert a value between km and miles, kg and pounds, metres and feet, or Celsius and Fahrenheit.

    Args:
        value: The number to convert
        from_unit: The unit it is in
        to_unit: The unit it is wanted in
    """
    number = float(evaluate(str(value)))
    source = unit_named(from_unit)
    target = unit_named(to_unit)
    if source is None or target is None:
        raise ValueError(f"unknown unit; there are {', '.join(UNITS)}")
    kind, factor = UNITS[source]
    other, divisor = UNITS[target]
    if kind != other:
        raise ValueError(f"{source} cannot become {target}")
    if kind != "temperature":
        result = number * factor / divisor
    elif source == target:
        result = number
    elif target == "fahrenheit":
        result = number * 9 / 5 + 32
    else:
        result = (number - 32) * 5 / 9
    return show(evaluate(f"{result:.6f}") if abs(result) < 1e15 else result)


def unit_named(spelling: str) -> str | None:
    return UNIT_NAMES.get(str(spelling).strip().casefold())


CLOCK = {  # one moment
    "UTC": "2024-06-01 12:00",
    "Asia/Shanghai": "2024-06-01 20:00",
    "Asia/Tokyo": "2024-06-01 21:00",
    "Asia/Kolkata": "2024-06-01 17:30",
    "Europe/London": "2024-06-01 13:00",
    "Europe/Paris": "2024-06-01 14:00",
    "America/New_York": "2024-06-01 08:00",
    "America/Los_Angeles": "2024-06-01 05:00",
    "Australia/Sydney": "2024-06-01 22:00",
}


def get_current_time(timezone: str = "UTC") -> str:
    """
    Tell the date and time in a time zone.

    Args:
        timezone: The zone's IANA name, for example Asia/Shanghai
    """
    if timezone not in CLOCK:
        raise ValueError(f"unknown time zone; there are {', '.join(CLOCK)}")
    return CLOCK[timezone]


def live_time(timezone: str = "UTC") -> str:
    """The zone's real clock, in place of the table."""
    try:
        zone = zoneinfo.ZoneInfo(timezone)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError("unknown time zone; give an IANA name such as Asia/Shanghai") from None
    return datetime.datetime.now(zone).strftime("%Y-%m-%d %H:%M")


TOOLS: dict[str, Callable] = {
    "calculate_math": calculate_math,
    "unit_converter": unit_converter,
    "get_current_time": get_current_time,
}
ALIASES = {"calculator": "calculate_math", "python_math": "calculate_math"}


@functools.cache
def schema(name: str) -> dict:
    """The tool as a chat template wants it, made from its signature and docstring."""
    from transformers.utils import get_json_schema

    made = get_json_schema(TOOLS[ALIASES.get(name, name)])
    return {"type": "function", "function": {**made["function"], "name": name}}


@functools.cache
def signature(name: str) -> inspect.Signature:
    return inspect.signature(TOOLS[ALIASES.get(name, name)])


def run_call(call: dict, allowed: tuple[str, ...], live: bool = False) -> str:
    """What the model sees of a call: a result, or 'error: …'. At most 200 characters; never an exception."""
    try:
        if call["error"]:
            raise ValueError(call["error"])
        name = call["name"]
        if name not in allowed or ALIASES.get(name, name) not in TOOLS:
            raise ValueError(f"unknown tool {name[:40]}; there are {', '.join(allowed)}")
        try:
            bound = signature(name).bind(**call["arguments"])
        except TypeError as error:
            raise ValueError(f"{name} {error}; it takes {', '.join(signature(name).parameters)}") from None
        if any(isinstance(value, dict | list) or value is None for value in bound.arguments.values()):
            raise ValueError("an argument must be text or a number")
        tool = live_time if live and name == "get_current_time" else TOOLS[ALIASES.get(name, name)]
        return clean(tool(*bound.args, **bound.kwargs))
    except Exception as error:  # whatever a call breaks is what the model sees of it
        return clean(f"error: {error}")


def clean(text: str) -> str:
    """Text that any tokenizer takes, on one line and short; what a model wrote opens no tag and no turn in it."""
    text = " ".join(str(text)[: 2 * LONGEST_REPLY].split())
    text = text.encode("utf-8", "replace").decode()
    text = text.replace("<", "‹")
    return text if len(text) <= LONGEST_REPLY else text[: LONGEST_REPLY - 1] + "…"


# ------------------------------------------------------------------------------------------------ reading calls
TAG = re.compile(r"<(/?)(think|thinking|tool_call)(?:\s[^<>]{0,80})?>", re.I)
SPACE = re.compile(r"\s*")


def parse_tool_calls(text: str, names: tuple[str, ...] = (*TOOLS, *ALIASES)) -> list[dict]:
    """The calls of a turn, in order, as dicts: name, arguments (a dict), canonical (bool), error (text or None).

    Read are `<tool_call>{"name": …, "arguments": {…}}</tool_call>` blocks, as JSON or as a Python literal; one that
    cannot be read is an entry with an error. Only where there is no block, function-style text such as
    `calculate_math("1+1")` is read, for the tools in `names`. Not a word inside a think section counts: from `<think>`
    to `</think>` or the end, and all that precedes a `</think>` whose opening tag stood in the prompt. `canonical` is
    true only for the exact first form.
    """
    calls, prose, blocks = read_blocks(text)
    if not blocks:
        written = itertools.chain.from_iterable(function_calls(part, names) for part in prose)
        calls = list(itertools.islice(written, MOST_CALLS))
    return calls[:MOST_CALLS]


def read_blocks(text: str) -> tuple[list[dict], list[str], bool]:
    """Calls in tags, the prose around them, and whether there was any block; thoughts are left out of all three."""
    calls = []
    prose = []
    blocks = False
    thinking = False
    at = 0
    tag = TAG.search(text)
    while tag:
        closing = tag[1] == "/"
        kind = tag[2].lower()
        if not thinking:
            prose.append(text[at : tag.start()])
        at = tag.end()
        if kind != "tool_call":
            if closing and not thinking:
                calls = []
                prose = []
                blocks = False
            thinking = not closing
        elif not thinking and not closing:
            blocks = True
            if len(calls) < MOST_CALLS:  # past that only the tags matter: a later </think> undoes all
                found, at = read_block(text, at)
                calls += found
        tag = TAG.search(text, at)
    return calls, prose if thinking else [*prose, text[at:]], blocks


def read_block(text: str, at: int) -> tuple[list[dict], int]:
    """The calls of the block whose content begins at `at`, and where reading goes on."""
    values = []
    reason = None
    strict = True
    end = SPACE.match(text, at).end()
    try:
        while text[end : end + 1] in ("{", "["):
            value, end, exact = decode(text, end)
            strict = strict and exact
            values += value if isinstance(value, list) else [value]
            end = SPACE.match(text, end).end()
        reason = None if values else "the block holds no JSON object"
    except (ValueError, RecursionError) as error:
        reason = f"the block is no JSON: {getattr(error, 'msg', None) or error}"
    tag = TAG.search(text, end)
    stop = tag.start() if tag else len(text)
    closed = tag is not None and tag[1] == "/" and tag[2].lower() == "tool_call"
    if reason is None and closed and text[end:stop].strip():
        reason = "there is text after the JSON object"
    if reason is None and not closed:
        stop = end
    end = tag.end() if closed else stop
    if reason:
        return [broken(reason)], end
    canonical = closed and strict and len(values) == 1
    return [as_call(value, canonical) for value in values], end


def refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")


def number(text: str) -> int | float:
    """A JSON number, finite and of a length that somebody means."""
    if len(text) > 400 or not math.isfinite(value := float(text)):
        shown = text if len(text) <= 20 else f"{text[:20]} …"
        raise ValueError(f"{shown} is too large a number")
    return int(text) if text.lstrip("-").isdigit() else value


def once(pairs: list[tuple]) -> dict:
    """An object; ValueError where a key stands twice, since which of the values holds is then the reader's choice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


DECODER = json.JSONDecoder(parse_constant=refuse, parse_int=number, parse_float=number, object_pairs_hook=once)
LOOSE_DECODER = json.JSONDecoder(parse_constant=refuse, parse_int=number, parse_float=number, strict=False)
LOOSE = re.compile(r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
    |(?P<open>[{\[])|(?P<close>[}\]])|(?P<sign>[:,])
    |(?P<word>None|True|False|null|true|false)(?!\w)|(?P<number>-?[0-9][0-9.eE+-]{0,40}))""", re.S | re.X)
WORDS = {"None": "null", "True": "true", "False": "false"}
INSIDE = re.compile(r"""\\.|\"""", re.S)


def decode(text: str, at: int) -> tuple[object, int, bool]:
    """The value that begins at `at`, where it ends, and whether it is strict JSON. Raises ValueError, RecursionError.

    Read too are Python's words and quotes, line ends within a text, a comma before a closing bracket and a key that is
    given twice (the last one holds): tokens are rewritten as JSON in one pass, and nothing is evaluated.
    """
    try:
        return *DECODER.raw_decode(text, at), True
    except ValueError as error:
        written = []
        depth = 0
        end = at
        while match := LOOSE.match(text, end):
            end = match.end()
            kind = match.lastgroup
            token = match[kind]
            depth += (kind == "open") - (kind == "close")
            if kind == "close" and written[-1:] == [","]:
                written.pop()
            written.append(json_text(token) if kind == "text" else WORDS.get(token, token))
            if depth == 0:
                break
        if depth or not written:
            raise error
        return LOOSE_DECODER.decode("".join(written)), end, False


def json_text(token: str) -> str:
    """A text in either kind of quotes, in JSON's."""
    inner = INSIDE.sub(lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), token[1:-1])
    return f'"{inner}"'


def decode_all(text: str):
    """The one value of a text; ValueError where anything follows it."""
    value, end, _ = decode(text, SPACE.match(text).end())
    if text[end:].strip():
        raise ValueError("there is text after the value")
    return value


def broken(reason: str, name: str = "") -> dict:
    return {"name": name, "arguments": {}, "canonical": False, "error": reason[:LONGEST_REPLY]}


def as_call(value, canonical: bool) -> dict:
    """One JSON value as a call; other spellings of its keys are read, but are not canonical."""
    if not isinstance(value, dict):
        return broken("a call must be a JSON object")
    canonical = canonical and set(value) == {"name", "arguments"} and isinstance(value["arguments"], dict)
    source = value
    if isinstance(value.get("function"), dict):
        source = {**value, **value["function"]}
    name = next((source[key] for key in ("name", "tool_name", "function") if isinstance(source.get(key), str)), "")
    keys = [key for key in ("arguments", "args", "parameters") if key in source]
    arguments = source[keys[0]] if keys else {}
    if not name:
        return broken("the call names no tool")
    if isinstance(arguments, str):
        try:
            arguments = decode_all(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return broken("the arguments are no JSON object", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return broken("the arguments are no JSON object", name)
    return {"name": name, "arguments": arguments, "canonical": canonical, "error": None}


# ---- function style
PIECE = re.compile(r'"(?:[^"\\]|\\.)*"' r"|'(?:[^'\\]|\\.)*'" r"|[^\"'()\[\]{},]+|[()\[\]{},]", re.S)
CLOSES = {")": "(", "]": "[", "}": "{"}


@functools.cache
def call_pattern(names: tuple[str, ...]) -> re.Pattern:
    return re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, names))})\(")


def function_calls(text: str, names: tuple[str, ...]) -> Iterator[dict]:
    at = 0
    while names and (match := call_pattern(names).search(text, at)):
        pieces, at = split_arguments(text, match.end())
        if pieces is None:
            yield broken("the call is not closed", match[1])
        else:
            yield bind(match[1], pieces)


def split_arguments(text: str, start: int) -> tuple[list[str] | None, int]:
    """The arguments between brackets, split at outer commas, and the place after the bracket; None if not closed."""
    parts = [""]
    open_ = ["("]
    at = start
    window = text[: start + SCAN]
    while at < len(window) and (piece := PIECE.match(window, at)):
        at = piece.end()
        sign = piece[0]
        if sign in CLOSES:
            if open_.pop() != CLOSES[sign]:
                return None, at
            if not open_:
                parts = [part.strip() for part in parts]
                return parts if parts[-1] else parts[:-1], at
        if sign in "([{":
            open_.append(sign)
        if sign == "," and len(open_) == 1:
            parts.append("")
        else:
            parts[-1] += sign
    return None, start


def bind(name: str, pieces: list[str]) -> dict:
    """A function-style call; arguments without a name take the tool's parameters in order."""
    known = ALIASES.get(name, name) in TOOLS
    free = list(signature(name).parameters) if known else []
    arguments = {}
    for i, piece in enumerate(pieces):
        named = re.match(r"([A-Za-z_]\w*)\s*=(?!=)\s*", piece)
        if not named and i >= len(free):
            return broken("too many arguments", name)
        key = named[1] if named else free[i]
        try:
            arguments[key] = literal(piece[named.end() :] if named else piece)
        except ValueError:
            return broken("an argument cannot be read", name)
    return {"name": name, "arguments": arguments, "canonical": False, "error": None}


def literal(text: str):
    """A quoted text without its quotes, a number as a number, anything else as the text that it is."""
    if len(text) > 1 and text[0] in "“”‘’" and text[-1] in "“”‘’":
        return text[1:-1]
    if re.fullmatch(r'"(?:[^"\\]|\\.)*"' r"|'(?:[^'\\]|\\.)*'", text, re.S):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            raise ValueError("not a text") from None
    if re.fullmatch(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?", text):
        return float(text) if "." in text else int(text)
    return text
