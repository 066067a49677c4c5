"""Questions that the policy writes: their topics, quality, novelty and the gate they pass."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from rewards import FINAL_LINE, STEP_LINE, number, repetition, value
from tasks.math.chains import evaluate

SHORTEST = 10  # characters of a question


# ---- topics
KEYWORDS = {
    "geometry": "area perimeter triangle circle square rectangle angle radius diameter volume cube polygon side length",
    "probability": "probability chance likely dice die coin random randomly odds",
    "counting": "ways arrangements arrange combinations permutations choose committee distinct order",
    "number theory": "prime divisor divisible multiple remainder factor digits integer gcd lcm modulo",
    "algebra": "equation solve x y variable polynomial function f root expression linear quadratic",
    "fractions": "fraction half third quarter fourth fifths numerator denominator",
    "percentages": "percent percentage % discount interest tax tip",
    "ratios": "ratio proportion proportional scale",
    "rates": "speed mph hour hours minutes miles per rate km distance travels",
    "money": "dollars dollar cost costs price pays spend spends $ cents buys sells earns",
    "arithmetic": "total altogether left more fewer many sum difference times each",
}
WORDS = re.compile(r"[a-z]+|[%$]")


class Topics:
    """Names of topics, and the topic of a question: by naive Bayes over the words that labelled questions have
    or lack, where the data have labels, else by keywords."""

    def __init__(self, labelled: Sequence[tuple[str, str | None]]):
        labels = [(text, topic) for text, topic in labelled if topic]
        self.counts: dict[str, Counter[str]] = {}
        self.sizes: Counter[str] = Counter()
        if 2 * len(labels) > len(labelled):
            for text, topic in labels:
                self.counts.setdefault(topic, Counter()).update(set(WORDS.findall(text.lower())))
                self.sizes[topic] += 1
        self.names = sorted(self.counts) or sorted(KEYWORDS)
        vocabulary = sorted({word for counts in self.counts.values() for word in counts})
        self.vocabulary = set(vocabulary)
        self.absent = {topic: sum(math.log(1 - self._share(topic, word)) for word in vocabulary)
                       for topic in self.counts}  # log-likelihood of a text without any of the words
        self.keywords = {name: set(words.split()) for name, words in KEYWORDS.items()}

    def classify(self, text: str) -> str:
        words = set(WORDS.findall(text[:4000].lower()))
        if not self.counts:
            hits = {name: len(words & keys) for name, keys in self.keywords.items()}
            best = max(hits.values())
            return next(name for name, n in hits.items() if n == best) if best else "arithmetic"
        known = sorted(words & self.vocabulary)

        def likelihood(topic: str) -> float:
            shares = [self._share(topic, word) for word in known]
            return math.log(self.sizes[topic]) + self.absent[topic] + sum(math.log(p / (1 - p)) for p in shares)

        return max(self.names, key=likelihood)

    def _share(self, topic: str, word: str) -> float:
        """Share of a topic's questions that have a word, smoothed."""
        return (self.counts[topic][word] + 0.1) / (self.sizes[topic] + 0.2)


def tool_of(topic: str) -> str | None:
    """What checks the answers of a topic: 'arithmetic', 'sympy', or None for geometry, which no tool confirms."""
    if "geometry" in topic.lower():
        return None
    plain = ("arithmetic", "addition", "subtraction", "mixed", "money", "rates", "percent", "fraction", "ratio")
    return "arithmetic" if any(word in topic.lower() for word in plain) else "sympy"


# ---- the verification gate
def confirmed(answers: Sequence[str | None], topic: str, seconds: float = 1.5) -> list[float | None]:
    """Each answer's value where the topic's tool confirms it as a finite number, else None.

    Plain arithmetic here reads numbers only; SymPy works in a process of its own, `seconds` for all of them together.
    """
    tool, known, until = tool_of(topic), {None: None}, time.monotonic() + seconds
    for answer in answers:
        if answer in known:
            continue
        if tool == "sympy":
            left = until - time.monotonic()
            known[answer] = value(answer, 0.5) if left > 0 else None
        elif tool == "arithmetic":
            plain = number(answer)
            known[answer] = evaluate(answer.strip("$ .")) if plain is None else plain
        else:
            known[answer] = None
    return [known[answer] for answer in answers]


def agreement(values: Sequence[float | None]) -> list[bool]:
    """Which of the values belong to the most frequent one (the first of several); none where all are None."""
    best: list[bool] = [False] * len(values)
    for v in dict.fromkeys(x for x in values if x is not None):
        same = [x is not None and abs(x - v) <= 1e-9 * max(1.0, abs(v)) for x in values]
        best = same if sum(same) > sum(best) else best
    return best


def passes_gate(agree: Sequence[bool]) -> bool:
    """At least half of the solutions agree on a confirmed answer."""
    return sum(agree) * 2 >= len(agree) > 0


# ---- the quality of a question
def clean_question(text: str) -> str | None:
    """A written question as it is put to the policy; None where it is too short to be one."""
    text = re.sub(r"(?i)^\s*(?:problem|question)\s*:\s*", "", text.strip()).strip()
    return text if len(text) >= SHORTEST else None


ASKS = re.compile(r"(?i)\?\s*$|\b(?:find|calculate|determine|compute|what|how (?:many|much|long|far|old))\b")


def clarity(question: str) -> float:
    """A quarter each: it asks for something; it has 6 to 120 words and repeats itself in under half; it has a number;
    it holds no solution."""
    words = question.split()
    checks = (ASKS.search(question), 6 <= len(words) <= 120 and repetition(question) < 0.5, re.search(r"\d", question),
              not (STEP_LINE.search(question) or FINAL_LINE.search(question) or re.search(r"\\boxed|####", question)))
    return sum(map(bool, checks)) / 4


def novelty(data: float, session: float) -> float:
    """0.6 against the training questions + 0.4 against the last questions of the run."""
    return 0.6 * data + 0.4 * session


def question_quality(topic: float, measured: float, target: float, clear: float, solvable: float, new: float) -> float:
    """0.25 topic + 0.15 difficulty fit + 0.20 clarity + 0.20 solvability + 0.20 novelty, all from 0 to 1.

    The fit is 1 − 2·|measured − target|, 0 at least. Where no solution is valid (`solvable` 0) the quality is 0.
    """
    fit = max(0.0, 1 - 2 * abs(measured - target))
    return 0.25 * topic + 0.15 * fit + 0.20 * clear + 0.20 * solvable + 0.20 * new if solvable > 0 else 0.0


def reward_cap(form: float, data_novelty: float) -> float:
    """The most that a solution of an own question earns: 0.30 where its format is under 0.5; 0.35 where the question is
    nearly one of the data (novelty under 0.20), 0.55 where it is like none of them (over 0.85)."""
    return min(0.30 if form < 0.5 else 1.0, 0.35 if data_novelty < 0.20 else 0.55 if data_novelty > 0.85 else 1.0)


# ---- novelty
def trigrams(text: str) -> set[str]:
    text = " ".join(text.casefold().split())[:2000]
    return {text[i:i + 3] for i in range(len(text) - 2)} or {text}


class TrigramIndex:
    """The highest Jaccard similarity of character-trigram sets to any indexed text, by an inverted index.

    A text with more in common than the best so far must share one of the query's rarer trigrams (the prefix filter of
    Chaudhuri et al. 2006), so the long lists of the common ones are mostly not read.
    """

    def __init__(self, texts: Iterable[str]):
        self.sets = [trigrams(text) for text in texts]
        places: dict[str, list[int]] = defaultdict(list)
        for i, grams in enumerate(self.sets):
            for gram in grams:
                places[gram].append(i)
        self.places = {gram: np.array(found, dtype=np.int32) for gram, found in places.items()}
        self.sizes = np.array([len(grams) for grams in self.sets])

    def nearest(self, text: str) -> float:
        """0 to 1; 0 where nothing is indexed."""
        query, best = trigrams(text), 0.0
        known = sorted((gram for gram in query if gram in self.places), key=lambda gram: (len(self.places[gram]), gram))
        counts = np.zeros(len(self.sets), dtype=np.int32)
        for done, gram in enumerate(known, 1):
            counts[self.places[gram]] += 1
            left = len(known) - done
            if done % 8 and left:
                continue
            # an upper bound on each text's similarity: all that is left in common
            common = counts + left
            bound = common / (self.sizes + len(query) - common).clip(min=1)
            best = max(best, jaccard(query, self.sets[int(bound.argmax())]))
            unseen = left / max(len(query), 1)
            open_ = np.flatnonzero((bound > best) & (counts > 0))
            if left and best > unseen and len(open_) <= 64:
                return max([best, *(jaccard(query, self.sets[i]) for i in open_)])
        return best


def jaccard(a: set[str], b: set[str]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common) if common else 0.0


class Novelty:
    """1 − the highest similarity: to the training questions, and to the last 500 questions of this run."""

    SESSION = 500

    def __init__(self, questions: Iterable[str]):
        self.data = TrigramIndex(questions)
        self.texts: deque[str] = deque(maxlen=self.SESSION)
        self.grams: deque[set[str]] = deque(maxlen=self.SESSION)

    def add(self, question: str) -> tuple[float, float]:
        """(against the data, against the run) of a question, which then belongs to the run."""
        grams = trigrams(question)
        session = max((jaccard(grams, other) for other in self.grams), default=0.0)
        self._keep(question)
        return 1 - self.data.nearest(question), 1 - session

    def _keep(self, question: str) -> None:
        self.texts.append(question[:2000])
        self.grams.append(trigrams(question))

    def state_dict(self) -> dict:
        return {"texts": list(self.texts)}

    def load_state_dict(self, state: dict) -> None:
        for text in state["texts"]:
            self._keep(text)
