"""Questions and golds of math records."""

from __future__ import annotations

import math
import re

from data import Prompt
from rewards import final_answer, number


# ---- records
def question_and_gold(record: dict) -> tuple[str, str]:
    """The question and gold answer of a GSM8K, MATH, chat or plain record. Raises ValueError(reason) without them."""
    if record.get("messages") is not None:
        question, gold = _chat_question_and_gold(record["messages"])
    else:
        question = next((record[key] for key in ("question", "problem", "prompt") if record.get(key)), None)
        gold = next((record[key] for key in ("gold", "answer") if record.get(key) is not None), None)
        if gold is None and isinstance(record.get("solution"), str):
            gold = final_answer(record["solution"], strict=True)
    if question is None:
        raise ValueError("no question")
    if not isinstance(question, str):
        raise ValueError("question is not text")
    if gold is None:
        raise ValueError("no gold")
    if isinstance(gold, bool) or not isinstance(gold, (str, int, float)) or (
            isinstance(gold, float) and not math.isfinite(gold)):
        raise ValueError("gold is neither text nor a number")
    question, gold = question.strip(), str(gold).strip()
    if "####" in gold:  # GSM8K: the solution, then '#### 1,234'
        gold = re.sub(r"(?<=\d),(?=\d{3}\b)", "", gold.rpartition("####")[2].strip())
    if not question or not gold:
        raise ValueError("no gold" if question else "no question")
    return question, gold


def _chat_question_and_gold(messages) -> tuple[str | None, str | None]:
    """First user turn (after 'Problem:' where that stands), and the final answer of the last assistant turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of messages")
    question = next((m.get("content") for m in messages if m.get("role") == "user"), None)
    reply = next((m.get("content") for m in reversed(messages) if m.get("role") == "assistant"), None)
    if isinstance(question, str):
        question = question.partition("Problem:")[2] if "Problem:" in question else question
    if not isinstance(reply, str):
        return question, None
    return question, reply if "####" in reply else final_answer(reply, strict=True)


NUMERIC = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+|\d+/\d+"
                     r"|\d*\\[dt]?frac(?:\{-?\d+\}\{-?\d+\}|\d\d))")


def is_numeric(gold: str) -> bool:
    """Whether a gold is an integer, a decimal or a fraction, money and percent signs aside."""
    bare = re.sub(r"\\[!,;]|\\?[\s$%]", "", gold).removesuffix(".")
    return NUMERIC.fullmatch(bare) is not None and number(gold) is not None


def same_question(prompt: Prompt) -> str:
    """What two wordings of one question share: neither case nor spacing counts."""
    return " ".join(prompt.meta["question"].casefold().split())
