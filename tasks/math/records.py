"""Questions and golds of math records."""

from __future__ import annotations

import math
import re

from data import Prompt
from rewards import final_answer, number

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")


def question_and_gold(record: dict) -> tuple[str, str]:
    """The question and gold answer of a GSM8K, MATH, chat or plain record. Raises ValueError(reason) without them."""
    if record.get("messages") is not None:
        question, gold = _chat_question_and_gold(record["messages"])
    else:
        question, gold = _plain_question_and_gold(record)
    if question is None:
        raise ValueError("no question")
    if not isinstance(question, str):
        raise ValueError("question is not text")
    if gold is None:
        raise ValueError("no gold")
    if not _is_text_or_number(gold):
        raise ValueError("gold is neither text nor a number")
    question = question.strip()
    gold = str(gold).strip()
    if "####" in gold:  # GSM8K: the solution, then '#### 1,234'
        gold = gold.rpartition("####")[2].strip()
        gold = THOUSANDS.sub("", gold)
    if not question:
        raise ValueError("no question")
    if not gold:
        raise ValueError("no gold")
    return question, gold


def _plain_question_and_gold(record: dict) -> tuple:
    """What stands in the fields of a record that is no chat, of any type; None where nothing does."""
    questions = [record[key] for key in ("question", "problem", "prompt") if record.get(key)]
    golds = [record[key] for key in ("gold", "answer") if record.get(key) is not None]
    if not golds and isinstance(record.get("solution"), str):
        golds = [final_answer(record["solution"], strict=True)]
    return (questions or [None])[0], (golds or [None])[0]


def _is_text_or_number(gold) -> bool:
    if isinstance(gold, float):
        return math.isfinite(gold)
    return isinstance(gold, (str, int)) and not isinstance(gold, bool)


def _chat_question_and_gold(messages) -> tuple[str | None, str | None]:
    """First user turn (after 'Problem:' where that stands), and the final answer of the last assistant turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of messages")
    asked = [m.get("content") for m in messages if m.get("role") == "user"]
    replies = [m.get("content") for m in messages if m.get("role") == "assistant"]
    question = asked[0] if asked else None
    reply = replies[-1] if replies else None
    if isinstance(question, str) and "Problem:" in question:
        question = question.partition("Problem:")[2]
    if not isinstance(reply, str):
        return question, None
    gold = reply if "####" in reply else final_answer(reply, strict=True)
    return question, gold


NUMERIC = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\d+/\d+"
                     r"|\d*\\[dt]?frac(?:\{-?\d+\}\{-?\d+\}|\d\d))")


def is_numeric(gold: str) -> bool:
    """Whether a gold is an integer, a decimal or a fraction, money and percent signs aside."""
    bare = re.sub(r"\\[!,;]|\\?[\s$%]", "", gold).removesuffix(".")
    return NUMERIC.fullmatch(bare) is not None and number(gold) is not None


def same_question(prompt: Prompt) -> str:
    """What two wordings of one question share: neither case nor spacing counts."""
    return " ".join(prompt.meta["question"].casefold().split())
