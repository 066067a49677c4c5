"""What the task `tools` asks: samples of many shapes as questions, and a generator that needs no data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from data import rng_of
from tasks.tools.calculator import evaluate, extract_expressions, show
from tasks.tools.calls import CLOCK, TOOLS, unit_converter

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
GOLD_KEYS = ("gt", "answer", "answers", "label")


# ------------------------------------------------------------------------------------------------ samples
@dataclasses.dataclass(frozen=True)
class Question:
    """A sample in one form: `messages` to answer, the `tools` it names (empty: all), `gold` values as text.

    The last message is the user's, and `expressions` are those of its text, in order.
    """

    messages: list[dict]
    tools: list[str]
    gold: list[str]
    expressions: list[str]


def read_sample(record: dict) -> Question:
    """A sample in any of the accepted shapes. Raises ValueError(reason)."""
    messages = read_messages(record)
    expressions = extract_expressions(messages[-1]["content"])
    return Question(messages, read_tools(record), read_gold(record), expressions)


def first_of(record: dict, *keys: str):
    """The value under the first of the keys that holds something, else None."""
    for key in keys:
        if record.get(key):
            return record[key]
    return None


def read_messages(record: dict) -> list[dict]:
    turns = first_of(record, "messages", "conversations")
    if turns is None:
        text = first_of(record, "prompt", "question", "query")
        turns = text if isinstance(text, list) else [{"role": "user", "content": text}]
    if isinstance(turns, str):
        turns = as_json(turns, "messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("messages is not a list of messages")
    messages = [read_turn(turn) for turn in turns]
    asked = [i for i, message in enumerate(messages) if message["role"] == "user" and message["content"]]
    if not asked:
        raise ValueError("no question")
    return messages[: asked[-1] + 1]  # what follows is an answer: empty, or one that is not to be seen


def read_turn(turn: dict) -> dict:
    said = turn.get("role") or turn.get("from")
    role = ROLES.get(str(said).casefold())
    if role is None:
        raise ValueError("a message has no known role")
    content = turn.get("content")
    if content is None:
        content = turn.get("value")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise ValueError("a message is not text")
    return {"role": role, "content": content.strip()}


def read_tools(record: dict) -> list[str]:
    """Names of the tools of a sample: on it or on a message; a list, one object, or JSON text of either."""
    turns = []
    for key in ("messages", "conversations"):
        if isinstance(record.get(key), list):
            turns = [turn for turn in record[key] if isinstance(turn, dict)]
            break
    names = []
    for holder in (record, *turns):
        for key in ("tools", "functions"):
            names += map(tool_name, as_list(holder.get(key)))
    return list(dict.fromkeys(names))


def as_list(tools) -> list:
    """The tools of one field, whose value may be JSON text, and an empty one none."""
    if isinstance(tools, str) and tools.strip():
        tools = as_json(tools, "tools")
    if not tools:
        return []
    return tools if isinstance(tools, list) else [tools]


def tool_name(tool) -> str:
    """The name in a schema (wrapped, bare, or JSON text), or that stands alone; its parameters are checked too."""
    if isinstance(tool, str) and tool.lstrip()[:1] == "{":
        tool = as_json(tool, "tools")
    if isinstance(tool, str):
        return tool
    bare = tool.get("function", tool) if isinstance(tool, dict) else None
    if isinstance(bare, str):
        return bare
    if not isinstance(bare, dict) or not isinstance(bare.get("name"), str):
        raise ValueError("a tool has no name")
    parameters = bare.get("parameters")
    if isinstance(parameters, str) and parameters.strip():
        as_json(parameters, "tool parameters")
    return bare["name"]


def as_json(text: str, what: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is no JSON") from None


def read_gold(record: dict) -> list[str]:
    """Gold values as text; a scalar is one, empty ones are dropped."""
    gold = next((record[key] for key in GOLD_KEYS if record.get(key) is not None), [])
    values = gold if isinstance(gold, list | tuple) else [gold]
    texts = [gold_text(value) for value in values]
    return [text for text in texts if text]


def gold_text(value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("gold is not finite")
    if isinstance(value, dict | list | bool):
        raise ValueError("gold is neither text nor a number")
    if value is None:
        return ""
    return show(value) if isinstance(value, int | float) else str(value).strip()


# ------------------------------------------------------------------------------------------------ the generator
ENGLISH = {
    "open": ("", "Please ", "Hi, ", "Could you ", "Quick question: ", "For my homework, ", "I need help: ", "Now ",
             "Before we go on, ", "Using a tool, "),
    "ask": ("compute {}", "calculate {}", "work out {}", "evaluate {}", "find the value of {}", "tell me what {} is",
            "give me the result of {}", "determine {}"),
    "close": (".", ", please.", " and give only the value.", " for me.", " exactly."),
    "and": " and ",
    "comma": ", ",
    "look up": ("", "Please tell me ", "I would like to know ", "Look up ", "Can you find "),
}
CHINESE = {
    "open": ("", "请", "请帮我", "麻烦你", "帮忙", "我想知道，", "作业题：", "现在请", "快速问题：", "用工具"),
    "ask": ("计算{}", "算一下{}", "求{}的值", "算出{}的结果", "求出{}", "得出{}是多少", "计算出{}等于多少",
            "给出{}的答案"),
    "close": ("。", "，谢谢。", "，只给出结果。", "，要准确。", "？"),
    "and": "和",
    "comma": "，",
    "look up": ("", "请问", "帮我查一下", "麻烦查一下", "我想知道"),
}
CONVERSIONS = (  # from and to, in English and in Chinese
    ("km", "miles", "公里", "英里"),
    ("miles", "km", "英里", "公里"),
    ("kg", "pounds", "公斤", "磅"),
    ("pounds", "kg", "磅", "公斤"),
    ("metres", "feet", "米", "英尺"),
    ("feet", "metres", "英尺", "米"),
    ("Celsius", "Fahrenheit", "摄氏度", "华氏度"),
    ("Fahrenheit", "Celsius", "华氏度", "摄氏度"),
)
CITIES = {
    "Asia/Shanghai": ("Shanghai", "上海"),
    "Asia/Tokyo": ("Tokyo", "东京"),
    "Europe/London": ("London", "伦敦"),
    "Europe/Paris": ("Paris", "巴黎"),
    "America/New_York": ("New York", "纽约"),
    "Asia/Kolkata": ("Kolkata", "加尔各答"),
    "America/Los_Angeles": ("Los Angeles", "洛杉矶"),
    "Australia/Sydney": ("Sydney", "悉尼"),
}


def draw(rng, choices):
    return choices[rng.integers(len(choices))]


def expression(rng, easy: bool) -> str:
    """One arithmetic expression; the easy ones are a single sum, difference or product of small numbers."""
    if easy:
        left = rng.integers(1, 13)
        sign = draw(rng, "+-*")
        return f"{left}{sign}{rng.integers(1, 13)}"
    a, b, c = (int(n) for n in rng.integers(2, 1000, size=3))
    small = int(rng.integers(2, 12))
    root = int(rng.integers(2, 40))
    shapes = (
        f"{a}+{b}*{small}",
        f"({a}+{b})*{small}",
        f"{a}-{b}+{c}",
        f"{a}*{b}",
        f"{a}*{small}-{b}",
        f"{a}+{b}",
        f"({a}-{b})*({c}+{small})",
        f"{a * small}/{small}",
        f"sqrt({root * root})+{a}",
        f"{small}**{root % 5 + 2}",
        f"{a}%{small}",
        f"({a}+{b}+{c})/{2 ** (small % 4 + 1)}",
    )
    return draw(rng, shapes)


def sentence(rng, words: dict, asked: str) -> str:
    """One of the several hundred wordings of a request in a language."""
    begin = draw(rng, words["open"])
    ask = draw(rng, words["ask"])
    end = draw(rng, words["close"])
    if begin == "Could you ":
        end = "?"
    return capitalised(begin + ask.format(asked) + end)


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def arithmetic(rng, words: dict, easy: bool) -> tuple[str, list[str]]:
    """A request for one to three values, in words or (easy) in a short form."""
    expressions: list[str] = []
    count = 1 + int(rng.integers(4) > 0) if easy else 1 + int(rng.integers(3))
    while len(expressions) < count:
        made = expression(rng, easy)
        if made not in expressions:
            expressions.append(made)
    asked = expressions[-1]
    if count > 1:
        asked = words["comma"].join(expressions[:-1]) + words["and"] + asked
    text = f"Compute {asked}." if easy else sentence(rng, words, asked)
    return text, [show(evaluate(made)) for made in expressions]


def look_up(rng, chinese: bool) -> tuple[str, list[str], str]:
    """A conversion or the time in a city: question, gold, the tool that knows it."""
    if rng.integers(2):
        source, target, source_zh, target_zh = draw(rng, CONVERSIONS)
        value = int(rng.integers(2, 500))
        asked = f"{value}{source_zh}等于多少{target_zh}" if chinese else f"{value} {source} in {target}"
        gold = unit_converter(value, source, target)
        tool = "unit_converter"
    else:
        zone = draw(rng, list(CITIES))
        city, city_zh = CITIES[zone]
        asked = f"{city_zh}现在的时间" if chinese else f"the current date and time in {city}"
        gold = CLOCK[zone]
        tool = "get_current_time"
    begin = draw(rng, CHINESE["look up"] if chinese else ENGLISH["look up"])
    if chinese:
        end = "？"
    else:
        end = "?" if rng.integers(2) else "."
    return capitalised(begin + asked + end), [gold], tool


def synthetic(part: str, count: int, easy: bool) -> Iterator[dict]:
    """`count` different samples in the plain shape (`question`, `tools`, `answers`); a smaller count is a beginning.

    A quarter are look-ups; the tools that are offered are the right one and, in two of three, one or two distractors.
    With `easy`, all are short English sums. The parts share no question.
    """
    rng = rng_of(0, "tool questions", part, easy)
    seen = set()
    while len(seen) < count:
        chinese = not easy and bool(rng.integers(2))
        if not easy and rng.integers(4) == 0:
            question, gold, tool = look_up(rng, chinese)
        else:
            question, gold = arithmetic(rng, CHINESE if chinese else ENGLISH, easy)
            tool = "calculate_math"
        tools = offered(rng, tool)
        if question not in seen and is_heldout(question, tool, gold) == (part == "heldout"):
            seen.add(question)
            yield {"question": question, "tools": sorted(tools), "answers": gold}


def offered(rng, tool: str) -> list[str]:
    """The right tool, and none, one or two others."""
    names = list(TOOLS)
    shuffled = [names[i] for i in rng.permutation(3)]
    others = [name for name in shuffled if name != tool]
    return [tool, *others[: rng.integers(3)]]


def is_heldout(question: str, tool: str, gold: list[str]) -> bool:
    """The side of a question, an eighth held out: it is decided by its values, so no wording of it is on both."""
    values = extract_expressions(question) or [tool, *gold]
    return rng_of(0, "side", *sorted(values)).integers(8) == 0
