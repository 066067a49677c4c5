"""What the task `tools` asks: samples of many shapes as questions, and a generator that needs no data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator

from data import rng_of
from tasks.tools.calculator import evaluate, extract_expressions, show
from tasks.tools.calls import CLOCK, TOOLS, unit_converter

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
         "tool": "tool", "function": "tool", "function_call": "assistant", "observation": "tool", "developer": "system"}


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
    return Question(messages, read_tools(record), read_gold(record), extract_expressions(messages[-1]["content"]))


def read_messages(record: dict) -> list[dict]:
    turns = next((record[key] for key in ("messages", "conversations") if record.get(key)), None)
    if turns is None:
        text = next((record[key] for key in ("prompt", "question", "query") if record.get(key)), None)
        turns = text if isinstance(text, list) else [{"role": "user", "content": text}]
    if isinstance(turns, str):
        turns = as_json(turns, "messages")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("messages is not a list of messages")
    messages = []
    for turn in turns:
        role = ROLES.get(str(turn.get("role") or turn.get("from")).casefold())
        content = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), "")
        if role is None or not isinstance(content, str):
            raise ValueError("a message has no known role" if role is None else "a message is not text")
        messages.append({"role": role, "content": content.strip()})
    asked = [i for i, message in enumerate(messages) if message["role"] == "user" and message["content"]]
    if not asked:
        raise ValueError("no question")
    return messages[: asked[-1] + 1]  # what follows is an answer: empty, or one that is not to be seen


def read_tools(record: dict) -> list[str]:
    """Names of the tools of a sample: on it or on a message; a list, one object, or JSON text of either."""
    names = []
    turns = next((record[key] for key in ("messages", "conversations") if isinstance(record.get(key), list)), [])
    for holder in (record, *(turn for turn in turns if isinstance(turn, dict))):
        for key in ("tools", "functions"):
            tools = holder.get(key)
            if isinstance(tools, str) and tools.strip():
                tools = as_json(tools, "tools")
            for tool in tools if isinstance(tools, list) else [tools] if tools else []:
                tool = as_json(tool, "tools") if isinstance(tool, str) and tool.lstrip()[:1] == "{" else tool
                names.append(tool_name(tool))
    return list(dict.fromkeys(names))


def tool_name(tool) -> str:
    """The name in a wrapped or a bare schema, or a name that stands alone; its parameters are checked too."""
    if isinstance(tool, str):
        return tool
    bare = tool.get("function", tool) if isinstance(tool, dict) else None
    if isinstance(bare, str):
        return bare
    if not isinstance(bare, dict) or not isinstance(bare.get("name"), str):
        raise ValueError("a tool has no name")
    if isinstance(bare.get("parameters"), str) and bare["parameters"].strip():
        as_json(bare["parameters"], "tool parameters")
    return bare["name"]


def as_json(text: str, what: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is no JSON") from None


def read_gold(record: dict) -> list[str]:
    """Gold values as text; a scalar is one, empty ones are dropped."""
    gold = next((record[key] for key in ("gt", "answer", "answers", "label") if record.get(key) is not None), [])
    out = []
    for value in gold if isinstance(gold, list | tuple) else [gold]:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("gold is not finite")
        if isinstance(value, dict | list | bool):
            raise ValueError("gold is neither text nor a number")
        text = "" if value is None else show(value) if isinstance(value, int | float) else str(value).strip()
        out += [text] if text else []
    return out


# ------------------------------------------------------------------------------------------------ the generator
ENGLISH = {
    "open": ("", "Please ", "Hi, ", "Could you ", "Quick question: ", "For my homework, ", "I need help: ", "Now ",
             "Before we go on, ", "Using a tool, "),
    "ask": ("compute {}", "calculate {}", "work out {}", "evaluate {}", "find the value of {}", "tell me what {} is",
            "give me the result of {}", "determine {}"),
    "close": (".", ", please.", " and give only the value.", " for me.", " exactly."), "and": " and ", "comma": ", "}
CHINESE = {
    "open": ("", "请", "请帮我", "麻烦你", "帮忙", "我想知道，", "作业题：", "现在请", "快速问题：", "用工具"),
    "ask": ("计算{}", "算一下{}", "求{}的值", "算出{}的结果", "求出{}", "得出{}是多少", "计算出{}等于多少",
    "给出{}的答案"),
    "close": ("。", "，谢谢。", "，只给出结果。", "，要准确。", "？"), "and": "和", "comma": "，"}
CONVERSIONS = (("km", "miles", "公里", "英里"), ("miles", "km", "英里", "公里"), ("kg", "pounds", "公斤", "磅"),
               ("pounds", "kg", "磅", "公斤"), ("metres", "feet", "米", "英尺"), ("feet", "metres", "英尺", "米"),
               ("Celsius", "Fahrenheit", "摄氏度", "华氏度"), ("Fahrenheit", "Celsius", "华氏度", "摄氏度"))
CITIES = {"Asia/Shanghai": ("Shanghai", "上海"), "Asia/Tokyo": ("Tokyo", "东京"), "Europe/London": ("London", "伦敦"),
          "Europe/Paris": ("Paris", "巴黎"), "America/New_York": ("New York", "纽约"),
          "Asia/Kolkata": ("Kolkata", "加尔各答"), "America/Los_Angeles": ("Los Angeles", "洛杉矶"),
          "Australia/Sydney": ("Sydney", "悉尼")}


def expression(rng, easy: bool) -> str:
    """One arithmetic expression; the easy ones are a single sum, difference or product of small numbers."""
    if easy:
        return f"{rng.integers(1, 13)}{'+-*'[rng.integers(3)]}{rng.integers(1, 13)}"
    a, b, c = (int(n) for n in rng.integers(2, 1000, size=3))
    small, root = int(rng.integers(2, 12)), int(rng.integers(2, 40))
    shapes = (f"{a}+{b}*{small}", f"({a}+{b})*{small}", f"{a}-{b}+{c}", f"{a}*{b}", f"{a}*{small}-{b}", f"{a}+{b}",
              f"({a}-{b})*({c}+{small})", f"{a * small}/{small}", f"sqrt({root * root})+{a}",
              f"{small}**{root % 5 + 2}", f"{a}%{small}", f"({a}+{b}+{c})/{2 ** (small % 4 + 1)}")
    return shapes[rng.integers(len(shapes))]


def sentence(rng, words: dict, asked: str) -> str:
    """One of the several hundred wordings of a request in a language."""
    pick = [words[key][rng.integers(len(words[key]))] for key in ("open", "ask", "close")]
    if pick[0] == "Could you ":
        pick[2] = "?"
    text = pick[0] + pick[1].format(asked) + pick[2]
    return text[0].upper() + text[1:]


def arithmetic(rng, words: dict, easy: bool) -> tuple[str, list[str]]:
    """A request for one to three values, in words or (easy) in a short form."""
    expressions: list[str] = []
    count = 1 + int(rng.integers(4) > 0) if easy else 1 + int(rng.integers(3))
    while len(expressions) < count:
        made = expression(rng, easy)
        expressions += [made] if made not in expressions else []
    asked = words["comma"].join(expressions[:-1]) + (words["and"] if len(expressions) > 1 else "") + expressions[-1]
    text = f"Compute {asked}." if easy else sentence(rng, words, asked)
    return text, [show(evaluate(made)) for made in expressions]


def look_up(rng, chinese: bool) -> tuple[str, list[str], str]:
    """A conversion or the time in a city: question, gold, the tool that knows it."""
    if rng.integers(2):
        units, value = CONVERSIONS[rng.integers(len(CONVERSIONS))], int(rng.integers(2, 500))
        asked = (f"{value}{units[2]}等于多少{units[3]}" if chinese else f"{value} {units[0]} in {units[1]}")
        gold, tool = unit_converter(value, units[0], units[1]), "unit_converter"
    else:
        zone = list(CITIES)[rng.integers(len(CITIES))]
        asked = f"{CITIES[zone][1]}现在的时间" if chinese else f"the current date and time in {CITIES[zone][0]}"
        gold, tool = CLOCK[zone], "get_current_time"
    opened = (("", "请问", "帮我查一下", "麻烦查一下", "我想知道") if chinese
              else ("", "Please tell me ", "I would like to know ", "Look up ", "Can you find "))
    text = opened[rng.integers(len(opened))] + asked + ("？" if chinese else "?" if rng.integers(2) else ".")
    return text[0].upper() + text[1:], [gold], tool


def synthetic(part: str, count: int, easy: bool) -> Iterator[dict]:
    """`count` different samples in the plain shape (`question`, `tools`, `answers`); a smaller count is a beginning.

    A quarter are look-ups; the tools that are offered are the right one and, in two of three, one or two distractors.
    With `easy`, all are short English sums. The parts share no question.
    """
    rng, seen = rng_of(0, "tool questions", part, easy), set()
    names, held = list(TOOLS), part == "heldout"
    while len(seen) < count:
        chinese, tool = not easy and bool(rng.integers(2)), "calculate_math"
        if not easy and rng.integers(4) == 0:
            question, gold, tool = look_up(rng, chinese)
        else:
            question, gold = arithmetic(rng, CHINESE if chinese else ENGLISH, easy)
        offered = [tool, *(n for n in (names[i] for i in rng.permutation(3)) if n != tool)][: 1 + int(rng.integers(3))]
        # the side of a question is decided by its values: no wording of it is on both
        side = rng_of(0, "side", *sorted(extract_expressions(question) or [tool, *gold])).integers(8) == 0
        if question not in seen and side == held:
            seen.add(question)
            yield {"question": question, "tools": sorted(offered), "answers": gold}
