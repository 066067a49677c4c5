"""Texts that an explanation is held against: other words, other rows, no text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data import Prompt, rng_of

CJK = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
WORD = re.compile(r"[^\W\d_]{4,}|\d+")


def cjk_share(text: str) -> float:
    """Share of CJK characters among those that are not blank."""
    written = re.sub(r"\s", "", text)
    return len(CJK.findall(text)) / max(1, len(written))


def replace_words(texts: Sequence[str], seed: int) -> list[str]:
    """The texts with every content word (four letters or more, or a number) replaced by one of another text, of the
    same kind (capitalised, lower case, number) where there is any: the control for texts of any origin."""
    pools: dict[str, list[tuple[str, int]]] = {}
    for i, text in enumerate(texts):
        for word in WORD.findall(text):
            pools.setdefault(kind_of(word), []).append((word, i))
    out = []
    for i, text in enumerate(texts):
        rng = rng_of(seed, "replaced words", i)

        def swap(match: re.Match, i=i, rng=rng) -> str:
            pool = pools[kind_of(match[0])]
            for _ in range(8):  # by rejection: nearly all words of a pool are another text's and another word
                word, owner = pool[int(rng.integers(len(pool)))]
                if owner != i and word != match[0]:
                    return word
            return match[0]

        out.append(WORD.sub(swap, text))
    return out


def kind_of(word: str) -> str:
    """Which words may take a word's place."""
    if word[0].isdigit():
        return "number"
    return "name" if word[0].isupper() else "word"


def others(found: list[tuple[Any, Prompt]]) -> list[tuple[Any, Prompt]]:
    """For each pair, the next one that is of another document (itself where there is none)."""
    out = []
    for i, pair in enumerate(found):
        own = pair[1].meta["doc_id"]
        following = found[i + 1 :] + found[:i]
        different = [other for other in following if other[1].meta["doc_id"] != own]
        out.append(different[0] if different else pair)
    return out


def clipped(text: str, most: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
