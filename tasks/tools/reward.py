"""The reward of the task `tools`: what happened in a rollout, and its weighted components."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

from data import Rollout
from rewards import repetition
from tasks.tools.calculator import NORMAL_PROSE, calculate, same_expression
from tasks.tools.calls import ALIASES, parse_tool_calls

PREFERRED = "calculate_math"
CALCULATORS = (PREFERRED, *ALIASES)

# What a component is multiplied by; the preset's table [tools.reward] changes any of them.
WEIGHTS = {
    "base": -0.10,
    "length": 0.10,
    "coverage": 9.0,
    "exact": 9.0,
    "tool_success": 0.60,
    "call_coverage": 0.60,
    "calls_order": 0.60,
    "calls_set": 0.20,
    "calls_exact": 0.20,
    "values_order": 2.40,
    "values_set": 0.80,
    "values_exact": 0.80,
    "preferred_tool": 0.70,
    "right_tool": 0.70,
    "call_count": 0.30,
    "canonical": 0.25,
    "refers": 0.45,
    "failed": -0.55,
    "wrong_tool": -0.55,
    "over_calling": -0.25,
    "under_calling": -0.35,
    "no_tool": -1.50,
    "alias_only": -0.35,
    "extra": -0.55,
    "missing": -0.70,
    "wrong_order": -1.20,
    "repeated_call": -0.20,
    "repeated_text": -0.80,
    "unfinished": -0.80,
    "malformed": -0.50,
    "tag": 0.90,
    "one_tag": 0.80,
    "no_tag": -1.0,
}
# What is no factor: values at the start and the end of a schedule, its steps, caps, and most counted of each kind.
LIMITS = {
    "no_tag_start": 0.30,
    "no_tag_end": 1.50,
    "no_tag_steps": 100,
    "no_tag_cap": 2.0,
    "inexact_cap_start": 4.0,
    "inexact_cap_end": 3.5,
    "uncovered_cap_start": 0.5,
    "uncovered_cap_end": 0.0,
    "cap_steps": 300,
    "clip": 12.0,
    "most_failed": 4,
    "most_wrong": 4,
    "most_over": 6,
    "most_under": 6,
    "most_extra": 6,
    "most_missing": 6,
    "most_repeated": 4,
    "most_malformed": 40,
    "longest_answer": 96,
}
PARTS = (*WEIGHTS, "cap", "clip", "reward_model")  # the last is what a reward model adds


# ------------------------------------------------------------------------------------------------ what happened
@dataclasses.dataclass
class Events:
    """What the reward looks at in one rollout. `calls` are those that were run, with a `result` each."""

    calls: list[dict]
    answer: str | None
    tags: int  # <answer> sections outside thoughts
    malformed: int
    text: str  # the policy's, without calls
    unfinished: bool


ENDS = r"(?:ing)?(?:\s[^<>]{0,80})?>"
THOUGHT = re.compile(rf"<think{ENDS}.*?(?:</think{ENDS}|\Z)", re.I | re.S)
LATE_END = re.compile(rf"</think{ENDS}", re.I)
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
BLOCK = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.S)


def read_events(rollout: Rollout) -> Events:
    """Calls with what was answered to them, and the answer of the last turn."""
    calls = []
    said = []
    tags = 0
    malformed = 0
    answer = None
    for i, turn in enumerate(rollout.turns):
        if turn["role"] != "assistant":
            continue
        results = tool_results(rollout.turns[i + 1 :])
        if results:
            asked = parse_tool_calls(turn["content"])
            calls += [{**call, "result": result} for call, result in zip(asked, results, strict=False)]
        spoken = without_thoughts(turn["content"])
        found = ANSWER.findall(spoken)
        tags += len(found)
        answer = found[-1].strip() if found else None
        malformed += unpaired(spoken, "answer") + unpaired(spoken, "tool_call")
        said.append(BLOCK.sub(" ", spoken))
    return Events(calls, answer, tags, malformed, "\n".join(said), rollout.stop == "unfinished")


def tool_results(turns: list[dict]) -> list[str]:
    """What the tools said right behind a turn."""
    answers = itertools.takewhile(lambda turn: turn["role"] == "tool", turns)
    return [turn["content"] for turn in answers]


def unpaired(text: str, tag: str) -> int:
    return abs(text.count(f"<{tag}>") - text.count(f"</{tag}>"))


def without_thoughts(text: str) -> str:
    """The text outside think sections; what precedes a closing tag without an opening one is a thought too."""
    return LATE_END.split(THOUGHT.sub(" ", text))[-1]


# ---- values
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+")
SPLITS = (re.compile(r"[，、;；\n]|,(?![0-9]{3}(?![0-9]))"), re.compile(r"[,，、;；\n]"))


# What makes a number in an item another one: a denial, a bound, a magnitude, signs that NUMBER does not read.
OTHER = re.compile(r"""\b(?:not|no|never|neither|nor|without|except|cannot|wrong|incorrect|false|or
    |than|least|most|under|over|above|below|thousand|million|billion|trillion|hundred|dozen)\b|(?<=[0-9])\s?(?:k|bn)\b
    |n['’]t\b|[不非否没無无万亿億萬]|千(?![克米])|百(?!分)|[<>!≠≤≥^√∛∞]|[²³¹⁰⁴-⁹½⅓⅔¼¾⅕⅙⅛]
    |[0-9]\s?[*x/]\s?$""", re.I | re.X)
SIGNED = re.compile(r"\b(?:minus|negative)\s+(?=[0-9])|负\s?(?=[0-9])", re.I)
MORE_THAN_A_NUMBER = re.compile(r"[0-9][-/:][0-9]|(?![0-9])\d")
MOST_WORDS = 6  # beside its number, of an item that still states it


def value_of(text: str) -> float | str:
    """What a gold or an item of an answer says: its only number, or the one after its last '=', else the text.

    An item that does not plainly state its number, such as 'not 19', 'x != 19', '19 million' or 'over 19', is a text.
    """
    text = SIGNED.sub("-", " ".join(text.translate(NORMAL_PROSE).split()))
    if OTHER.search(text):
        return text.casefold()
    text = text.rpartition("=")[2].strip("`*$ .。")
    numbers = NUMBER.findall(text)
    words = len(text.split())
    # a date, a time, digits of another script or a second number make it a text
    if len(numbers) != 1 or words > MOST_WORDS + 1 or MORE_THAN_A_NUMBER.search(text):
        return text.casefold()
    return float(numbers[0].replace(",", ""))


def same_value(a: float | str, b: float | str) -> bool:
    """Numbers within 1e-6 of each other, relatively; texts equal."""
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))


def place_of(value, given: list, begin: int = 0) -> int | None:
    """Where `given` has the value, from `begin` on."""
    return next((i for i in range(begin, len(given)) if same_value(value, given[i])), None)


def in_order(wanted: list, given: list) -> int:
    """How many of `wanted` are found in `given`, each after the one before."""
    at = 0
    found = 0
    for value in wanted:
        place = place_of(value, given, at)
        if place is not None:
            at = place + 1
            found += 1
    return found


def unmatched(wanted: list, given: list) -> int:
    """How many of `wanted` have no partner in `given`, whatever the order."""
    left = list(given)
    missing = 0
    for value in wanted:
        place = place_of(value, left)
        if place is None:
            missing += 1
        else:
            left.pop(place)
    return missing


def read_answer(answer: str | None, gold: list) -> list[float | str]:
    """The items of an answer; a comma before three digits is read in the way that matches more of the gold."""
    if not answer:
        return []
    readings = []
    for split in SPLITS:
        items = split.split(answer[:4000])[:200]
        readings.append([value_of(item) for item in items if item.strip()])
    return max(readings, key=lambda items: (in_order(gold, items), -len(items)))


# ------------------------------------------------------------------------------------------------ components
def answer_components(events: Events, gold: list) -> dict[str, float]:
    items = read_answer(events.answer, gold)
    matched = in_order(gold, items)
    missing = unmatched(gold, items)
    extra = unmatched(items, gold)
    said = len(events.answer or "")
    returned = [value_of(call["result"]) for call in events.calls if succeeded(call)]
    refers = matched > 0 and any(same_value(x, y) for x in items for y in returned)
    exact = bool(gold) and matched == len(gold) == len(items)
    wrong_order = bool(gold) and missing == extra == 0 and matched < len(gold)
    return {
        "base": 1.0,
        "length": 1.0 if 1 <= said <= LIMITS["longest_answer"] else -3.0,
        "coverage": matched / len(gold) if gold else 0.0,
        "exact": float(exact),
        "refers": float(refers),
        "extra": extra,
        "missing": missing,
        "wrong_order": float(wrong_order),
        "tag": float(events.tags > 0),
        "one_tag": float(events.tags == 1),
        "no_tag": float(events.tags == 0),
    }


def succeeded(call: dict) -> bool:
    return not call["result"].startswith("error")


def call_components(events: Events, expressions: list[str], gold: list) -> dict[str, float]:
    """For a prompt with arithmetic: what was called against what should have been."""
    calls = events.calls
    to_calculator = [call for call in calls if call["name"] in CALCULATORS]
    preferred = sum(call["name"] == PREFERRED for call in calls)
    canonical = sum(call["canonical"] for call in calls)
    nameless = sum(not call["name"] for call in calls)
    wanted = [same_expression(text) for text in expressions]
    n = max(1, len(calls))
    return expression_components(wanted, to_calculator) | value_components(expressions, gold, to_calculator) | {
        "tool_success": sum(map(succeeded, calls)) / n,
        "preferred_tool": preferred / n,
        "right_tool": len(to_calculator) / n,
        "call_count": float(len(calls) == len(wanted)),
        "canonical": canonical / n,
        "wrong_tool": len(calls) - len(to_calculator) - nameless,
        "over_calling": max(0, len(calls) - len(wanted)),
        "under_calling": max(0, len(wanted) - len(calls)),
        "no_tool": float(not calls),
        "alias_only": float(bool(to_calculator) and preferred == 0),
    }


def expression_components(wanted: list[str], to_calculator: list[dict]) -> dict[str, float]:
    """The expressions that were called, against the question's."""
    called = [same_expression(str(call["arguments"].get("expression", ""))) for call in to_calculator]
    shared = set(wanted) & set(called)
    either = set(wanted) | set(called)
    return {
        "call_coverage": len(shared) / len(set(wanted)),
        "calls_order": in_order(wanted, called) / len(wanted),
        "calls_set": len(shared) / len(either),
        "calls_exact": float(called == wanted),
    }


def value_components(expressions: list[str], gold: list, to_calculator: list[dict]) -> dict[str, float]:
    """The values that came back, against the gold ones, or where those are not one an expression, the computed ones."""
    values = gold
    if len(gold) != len(expressions):
        values = [value for value in map(computed, expressions) if value is not None]
    returned = [value_of(call["result"]) for call in to_calculator if succeeded(call)]
    ordered = in_order(values, returned)
    same = unmatched(values, returned) == unmatched(returned, values) == 0
    return {
        "values_order": ordered / max(1, len(values)),
        "values_set": float(same),
        "values_exact": float(same and ordered == len(values)),
    }


def computed(expression: str) -> float | None:
    try:
        return calculate(expression)
    except ValueError:
        return None


def components(events: Events, expressions: list[str], gold: list) -> dict[str, float]:
    """Every component before its weight: shares and verdicts from 0 to 1, or counts."""
    found = dict.fromkeys(WEIGHTS, 0.0) | answer_components(events, gold)
    if expressions:
        found |= call_components(events, expressions, gold)
    different = {json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in events.calls}
    return found | {
        "failed": sum(not succeeded(call) for call in events.calls),
        "repeated_call": len(events.calls) - len(different),
        "repeated_text": repetition(events.text),
        "unfinished": float(events.unfinished),
        "malformed": events.malformed,
    }


MOST = {  # the limit up to which a component counts
    "failed": "most_failed",
    "wrong_tool": "most_wrong",
    "over_calling": "most_over",
    "under_calling": "most_under",
    "extra": "most_extra",
    "missing": "most_missing",
    "repeated_call": "most_repeated",
    "malformed": "most_malformed",
}


def at_step(first: float, last: float, steps: float, step: int) -> float:
    """A value that moves linearly from `first` to `last` over `steps`."""
    return first + (last - first) * min(1.0, step / max(1.0, steps))


def reward(found: dict[str, float], weights: dict[str, float], step: int, tag: str) -> dict[str, float]:
    """The weighted parts of the reward, which add up to it: components, then what the caps and the clip took away.

    `weights` are WEIGHTS | LIMITS as the run has them; `tag` is 'soft', 'semi_hard' or 'hard' and `step` the training
    step, which moves the caps and the price of a missing answer tag.
    """
    w = weights
    parts = {}
    for name, value in found.items():
        counted = min(value, w[MOST[name]]) if name in MOST else value
        parts[name] = w[name] * counted
    parts["no_tag"] *= at_step(w["no_tag_start"], w["no_tag_end"], w["no_tag_steps"], step)
    total = sum(parts.values())
    caps = [total]
    if not found["exact"]:
        caps.append(at_step(w["inexact_cap_start"], w["inexact_cap_end"], w["cap_steps"], step))
    if not found["coverage"]:
        caps.append(at_step(w["uncovered_cap_start"], w["uncovered_cap_end"], w["cap_steps"], step))
    if found["no_tag"] and tag != "soft":
        nothing = tag == "hard" and step >= w["no_tag_steps"]
        caps.append(0.0 if nothing else w["no_tag_cap"])
    capped = min(caps)
    clipped = max(-w["clip"], min(w["clip"], capped))
    return parts | {"cap": capped - total, "clip": clipped - capped}
