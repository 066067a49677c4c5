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
        self.counts: dict[str, Counter[str]] = {}  # by topic: questions that have a word
        self.sizes: Counter[str] = Counter()  # by topic: questions
        self.vocabulary: set[str] = set()
        self.keywords = {name: set(words.split()) for name, words in KEYWORDS.items()}
        with_topic = [pair for pair in labelled if pair[1]]
        if 2 * len(with_topic) > len(labelled):
            for text, topic in with_topic:
                self._count(text, topic)
        self.names = sorted(self.counts) or sorted(KEYWORDS)
        self.absent = {topic: self._log_absent(topic) for topic in self.counts}

    def _count(self, text: str, topic: str) -> None:
        words = set(WORDS.findall(text.lower()))
        self.counts.setdefault(topic, Counter()).update(words)
        self.sizes[topic] += 1
        self.vocabulary |= words

    def _log_absent(self, topic: str) -> float:
        """Log-likelihood of a text without any word of the vocabulary."""
        shares = [self._share(topic, word) for word in sorted(self.vocabulary)]
        return sum(math.log(1 - p) for p in shares)

    def classify(self, text: str) -> str:
        """The most likely topic, the first of several; arithmetic where there are neither labels nor keywords."""
        words = set(WORDS.findall(text[:4000].lower()))
        if self.counts:
            known = sorted(words & self.vocabulary)
            return max(self.names, key=lambda topic: self._log_likelihood(topic, known))
        hits = {name: len(words & keys) for name, keys in self.keywords.items()}
        best = max(hits, key=hits.get)
        return best if hits[best] else "arithmetic"

    def _log_likelihood(self, topic: str, words: list[str]) -> float:
        """Of a text with these words of the vocabulary and no others, and of its topic."""
        shares = [self._share(topic, word) for word in words]
        log_odds = [math.log(p / (1 - p)) for p in shares]
        return math.log(self.sizes[topic]) + self.absent[topic] + sum(log_odds)

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
    tool = tool_of(topic)
    until = time.monotonic() + seconds
    known: dict[str | None, float | None] = {None: None}
    for answer in answers:
        if answer not in known:
            known[answer] = _confirmed_value(answer, tool, until - time.monotonic())
    return [known[answer] for answer in answers]


def _confirmed_value(answer: str, tool: str | None, seconds_left: float) -> float | None:
    if tool == "sympy":
        return value(answer, 0.5) if seconds_left > 0 else None
    if tool == "arithmetic":
        plain = number(answer)
        return evaluate(answer.strip("$ .")) if plain is None else plain
    return None


def agreement(values: Sequence[float | None]) -> list[bool]:
    """Which of the values belong to the most frequent one (the first of several); none where all are None."""
    best = [False] * len(values)
    for candidate in dict.fromkeys(values):
        if candidate is None:
            continue
        same = [x is not None and _nearly_equal(x, candidate) for x in values]
        if sum(same) > sum(best):
            best = same
    return best


def _nearly_equal(x: float, y: float) -> bool:
    return abs(x - y) <= 1e-9 * max(1.0, abs(y))


def passes_gate(agree: Sequence[bool]) -> bool:
    """At least half of the solutions agree on a confirmed answer."""
    return sum(agree) * 2 >= len(agree) > 0


# ---- the quality of a question
LABEL = re.compile(r"(?i)^\s*(?:problem|question)\s*:\s*")
ASKS = re.compile(r"(?i)\?\s*$|\b(?:find|calculate|determine|compute|what|how (?:many|much|long|far|old))\b")
BOX = re.compile(r"\\boxed|####")


def clean_question(text: str) -> str | None:
    """A written question as it is put to the policy; None where it is too short to be one."""
    text = LABEL.sub("", text.strip()).strip()
    return text if len(text) >= SHORTEST else None




def clarity(question: str) -> float:
    """A quarter each: it asks for something; it has 6 to 120 words and repeats itself in under half; it has a number;
    it holds no solution."""
    words = len(question.split())
    checks = [
        ASKS.search(question),
        6 <= words <= 120 and repetition(question) < 0.5,
        re.search(r"\d", question),
        not any(pattern.search(question) for pattern in (STEP_LINE, FINAL_LINE, BOX)),
    ]
    return sum(map(bool, checks)) / 4


def novelty(data: float, session: float) -> float:
    """0.6 against the training questions + 0.4 against the last questions of the run."""
    return 0.6 * data + 0.4 * session


def question_quality(topic: float, measured: float, target: float, clear: float, solvable: float, new: float) -> float:
    """0.25 topic + 0.15 difficulty fit + 0.20 clarity + 0.20 solvability + 0.20 novelty, all from 0 to 1.

    The fit is 1 − 2·|measured − target|, 0 at least. Where no solution is valid (`solvable` 0) the quality is 0.
    """
    if solvable <= 0:
        return 0.0
    fit = max(0.0, 1 - 2 * abs(measured - target))
    return 0.25 * topic + 0.15 * fit + 0.20 * clear + 0.20 * solvable + 0.20 * new


def reward_cap(form: float, data_novelty: float) -> float:
    """The most that a solution of an own question earns: 0.30 where its format is under 0.5; 0.35 where the question is
    nearly one of the data (novelty under 0.20), 0.55 where it is like none of them (over 0.85)."""
    cap = 0.30 if form < 0.5 else 1.0
    if data_novelty < 0.20:
        cap = min(cap, 0.35)
    elif data_novelty > 0.85:
        cap = min(cap, 0.55)
    return cap


# ---- novelty
def trigrams(text: str) -> set[str]:
    """The character trigrams of a text, whatever its case and spacing; a shorter text is one of its own."""
    text = " ".join(text.casefold().split())
    text = text[:2000]
    grams = {text[i:i + 3] for i in range(len(text) - 2)}
    return grams or {text}


class TrigramIndex:
    """Inverted index of character trigrams: the highest Jaccard similarity of trigram sets to any indexed text."""

    def __init__(self, texts: Iterable[str]):
        postings: dict[str, list[int]] = defaultdict(list)
        sizes = []
        for i, text in enumerate(texts):
            grams = trigrams(text)
            sizes.append(len(grams))
            for gram in grams:
                postings[gram].append(i)
        self.sizes = np.array(sizes)
        self.postings = {gram: np.array(found, dtype=np.int32) for gram, found in postings.items()}

    def nearest(self, text: str) -> float:
        """0 to 1; 0 where nothing is indexed."""
        query = trigrams(text)
        found = [self.postings[gram] for gram in query if gram in self.postings]
        if not found:
            return 0.0
        common = np.bincount(np.concatenate(found), minlength=len(self.sizes))
        similarity = common / (self.sizes + len(query) - common)
        return float(similarity.max())


def jaccard(a: set[str], b: set[str]) -> float:
    """Size of the intersection over that of the union."""
    common = len(a & b)
    if common == 0:
        return 0.0
    return common / (len(a) + len(b) - common)


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
        similarities = [jaccard(grams, other) for other in self.grams]
        data = 1 - self.data.nearest(question)
        session = 1 - max(similarities, default=0.0)
        self._keep(question)
        return data, session

    def _keep(self, question: str) -> None:
        self.texts.append(question[:2000])
        self.grams.append(trigrams(question))

    def state_dict(self) -> dict:
        return {"texts": list(self.texts)}

    def load_state_dict(self, state: dict) -> None:
        for text in state["texts"]:
            self._keep(text)
