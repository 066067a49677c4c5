r"""Step chains: the sums that a solution states, whether they hold, and whether they use what they say they use.

A chain is a list of links: an expression, the result that is stated for it, and which earlier links it names. Rules
read it from the text; a small language model may read what they cannot. Expressions are plain arithmetic and are worked
out by the parser here, never by Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from harness.files import written_aside
from models.judging import load_judge
from models.loading import context_of
from rewards import STEP_LINE

LONGEST = 20_000  # characters that are read
MOST_LINKS = 64  # of a chain
DEEPEST = 40  # brackets in brackets
TOLERANCE = 1e-4  # between a stated result and its expression's value
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
TOKEN = re.compile(rf"\s*(?:({NUMBER})|(\*\*|[-+*/^()%]))")
SIGNS = [(r"\\[dt]?frac\s*\{([^{}]{1,80})\}\s*\{([^{}]{1,80})\}", r"((\1)/(\2))"), (r"\\times|\\cdot|[×·⋅∗]", "*"),
         (r"\\div|÷", "/"), (r"[−–]", "-"), (r"\\left|\\right|\\[,;!(){}\[\]]|[$€£`*]{2,}|[$€£`]", ""),
         (r"(?<=[\d)])\s*x\s*(?=[\d(])", "*"), (r"<<[^<>]{0,200}>>", ""),
         (r"(?i)%\s{0,3}of\b", "%*")]
# the unit in `4 red pens + 3 pens`
UNIT = re.compile(r"(?<=\d)\s*\\?(?:[A-Za-z]{1,20}\s{1,3}){0,3}[A-Za-z]{1,20}(?=\s{0,3}[-+*/^)=])")
SUM = re.compile(r"(?<![\w.])([-+(]{0,10}(?:\d|\.\d)[\d\s.,+\-*/^()%]{0,200}?)=\s*"
                 rf"(-?\s?(?:{NUMBER}))(?![\d^(]|\.\d)")
OPERATION = re.compile(r"[\d)%]\s*(?:[-+*/^])\s*[\d(.-]")
NAMED = re.compile(r"(?i)\bsteps?[ \t]+(\d{1,3})(?:[ \t]*(?:,|and|&)[ \t]*(?:step[ \t]+)?(\d{1,3}))?")


@dataclasses.dataclass(frozen=True)
class Link:
    """One stated sum. `uses` are the places of the earlier links that the text names, from 0."""

    expression: str
    result: float
    uses: tuple[int, ...] = ()


# ---- plain arithmetic
def evaluate(expression: str) -> float | None:
    """The finite value of a sum of numbers with + - * / ^ ** % and brackets; None for anything else."""
    expression = expression.strip()
    tokens = []
    at = 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        if not found or len(tokens) > 200:
            return None
        tokens.append(found[1].replace(",", "") if found[1] else found[2])
        at = found.end()
    try:
        parser = _Parser(tokens)
        value = parser.terms()
        return value if not parser.tokens and isinstance(value, float) and math.isfinite(value) else None
    except (IndexError, ValueError, ArithmeticError, TypeError):
        return None


class _Parser:
    """Recursive descent over tokens: terms of factors of powers of atoms. Floats only, so nothing grows."""

    def __init__(self, tokens: list[str]):
        self.tokens = deque(tokens)
        self.depth = 0

    def next_is(self, *signs: str) -> bool:
        return bool(self.tokens) and self.tokens[0] in signs

    def terms(self) -> float:
        value = self.factors()
        while self.next_is("+", "-"):
            value = value + self.factors() if self.tokens.popleft() == "+" else value - self.factors()
        return value

    def factors(self) -> float:
        value = self.power()
        while self.next_is("*", "/"):
            value = value * self.power() if self.tokens.popleft() == "*" else value / self.power()
        return value

    def power(self) -> float:
        if self.next_is("-", "+"):
            self.deeper()
            value = -self.power() if self.tokens.popleft() == "-" else self.power()
            self.depth -= 1
            return value
        value = self.atom()
        if self.next_is("^", "**"):
            self.tokens.popleft()
            self.deeper()
            value = value ** self.power()  # complex for a root of a negative number: refused at the end
            self.depth -= 1
        return value

    def atom(self) -> float:
        token = self.tokens.popleft()
        if token == "(":
            self.deeper()
            value = self.terms()
            self.depth -= 1
            if self.tokens.popleft() != ")":
                raise ValueError("bracket")
        else:
            value = float(token)
        while self.next_is("%"):
            self.tokens.popleft()
            value /= 100
        return value

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("too deep")


# ---- extraction by rules
def extract(text: str) -> list[Link]:
    """The links that a solution states as `expression = result`, in order; empty where there are none.

    A step that names an earlier step ("from Step 1") uses that step's last link.
    """
    text = text[:LONGEST]
    for pattern, sign in SIGNS:
        text = re.sub(pattern, sign, text)
    links: list[Link] = []
    last: list[int | None] = []  # the last link of each step
    for step in _steps(text):
        label = STEP_LINE.search(step)
        body = step[label.end():] if label else step
        found = _sums(body, _named_links(body, last))
        links += found
        last.append(len(links) - 1 if found else None)
    return links[:MOST_LINKS]


def _steps(text: str) -> list[str]:
    """The `Step N:` parts of a text, what stands before the first with it; the whole text where there are none."""
    starts = [m.start() for m in STEP_LINE.finditer(text)]
    cuts = [0, *starts[1:], len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def _named_links(body: str, last: list[int | None]) -> tuple[int, ...]:
    """The last links of the earlier steps that a step's text names, each once, in the order of their naming."""
    links = []
    for numbers in NAMED.findall(body):
        for number in filter(None, numbers):
            step = int(number) - 1
            if 0 <= step < len(last):
                links.append(last[step])
    return tuple(link for link in dict.fromkeys(links) if link is not None)


def _sums(body: str, uses: tuple[int, ...]) -> list[Link]:
    """Sums of one step; `2*3=6+1=7` is two of them. Its named results belong to its first sum that has any of them."""
    links = []
    for line in body.splitlines():
        line = UNIT.sub(" ", line)
        at = 0
        while found := SUM.search(line, at):
            at = found.start(2)  # the result may begin the next sum
            expression = found[1].strip()
            if OPERATION.search(expression) and evaluate(expression) is not None:
                result = float(re.sub(r"[\s,]", "", found[2]))
                links.append(Link(expression, result, () if links else uses))
    return links


def parse_links(reply: str) -> list[Link]:
    """The links in an extractor model's reply: a JSON list of {"expression", "result", "uses": [1, …]} (from 1)."""
    start, end = reply.find("["), reply.rfind("]")
    try:
        records = json.loads(reply[start:end + 1])
        return _links_of(records[:MOST_LINKS])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):  # int(1e999) overflows
        return []


def _links_of(records: list[dict]) -> list[Link]:
    links: list[Link] = []
    for record in records:
        uses = [int(use) for use in record.get("uses") or ()]
        earlier = tuple(use - 1 for use in uses if 0 < use <= len(links))
        result = float(str(record["result"]).replace(",", ""))
        if math.isfinite(result):
            links.append(Link(str(record["expression"])[:200], result, earlier))
    return links


# ---- scores
def link_scores(links: Sequence[Link]) -> list[float]:
    """For each link 0.6 × [its result holds] + 0.4 × [the results it names occur in it], 0.5 where it names none."""
    scores = []
    for link in links:
        used = _uses_named(link, links) if link.uses else 0.5
        scores.append(0.6 * _holds(link) + 0.4 * used)
    return scores


def arithmetic(links: Sequence[Link]) -> float:
    """Share of stated results within 1e-4 of their expression's value; 0.5 without any."""
    return _share([_holds(link) for link in links])


def dependency(links: Sequence[Link]) -> float:
    """Share of the links that name earlier results in which these really occur; 0.5 where none names any."""
    return _share([_uses_named(link, links) for link in links if link.uses])


def integrity(links: Sequence[Link]) -> float:
    """0.6 × arithmetic + 0.4 × dependency."""
    return 0.6 * arithmetic(links) + 0.4 * dependency(links)


def chain_lccp(links: Sequence[Link]) -> float:
    """Longest correct chain prefix: links before the first whose result does not hold, over all; 0.5 without any."""
    if not links:
        return 0.5
    for i, link in enumerate(links):
        if not _holds(link):
            return i / len(links)
    return 1.0


def chain_score(links: Sequence[Link]) -> float:
    """The chain's share of the reward, from 0 to 1: 0.30 × integrity + 0.20 × LCCP, over 0.50."""
    weighted = 0.30 * integrity(links) + 0.20 * chain_lccp(links)
    return weighted / 0.50


def _share(verdicts: list[bool]) -> float:
    return sum(verdicts) / len(verdicts) if verdicts else 0.5


def _holds(link: Link) -> bool:
    value = evaluate(link.expression)
    return value is not None and abs(value - link.result) <= TOLERANCE


def _uses_named(link: Link, links: Sequence[Link]) -> bool:
    """Whether the results of all links that it names, but for their sign, are numbers of its expression."""
    numbers = [float(n.replace(",", "")) for n in re.findall(NUMBER, link.expression)]
    for use in link.uses:
        named = abs(links[use].result)
        if not any(abs(number - named) <= TOLERANCE for number in numbers):
            return False
    return True


# ---- extraction by a model
class Extractor:
    """Rules first; where they find nothing, a small language model, whose replies are kept on disk by solution hash."""

    PROMPT = ('List every calculation of this solution as JSON: [{"expression": "4+3", "result": 7, "uses": []}, …]. '
              '"uses" holds the numbers of the earlier entries whose results it takes. JSON only.\n\nSolution:\n')

    def __init__(self, path: str = "", device=None, dtype=None, folder: Path | None = None):
        self.path = path
        self.model = None
        self.folder = None
        if not path:
            return
        causal = transformers.AutoModelForCausalLM.from_pretrained
        self.model, self.tokenizer = load_judge("--extractor-model", path, causal, device, dtype)
        if folder is not None:
            self.folder = folder / hashlib.sha256(f"{path}\n{self.PROMPT}".encode()).hexdigest()[:16]
            self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, text: str) -> list[Link]:
        """The links of a solution; empty where neither rules nor model find any."""
        links = extract(text)
        if links or self.model is None or not text.strip():
            return links
        file = self._file_of(text)
        if file is not None and file.is_file():
            with contextlib.suppress(OSError, ValueError):  # a torn file is asked again
                return parse_links(json.dumps(json.loads(file.read_text())))
        try:
            links = parse_links(self._ask(text))
        except RuntimeError:  # out of memory, or a text that it cannot take: no chain is found in this solution
            return []
        if file is not None:
            self._store(links, file)
        return links

    def _file_of(self, text: str) -> Path | None:
        """Where the reply for a solution is kept; None where none is kept."""
        if self.folder is None:
            return None
        name = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        return self.folder / f"{name}.json"

    def _store(self, links: list[Link], file: Path) -> None:
        records = []
        for link in links:
            uses = [use + 1 for use in link.uses]
            records.append({"expression": link.expression, "result": link.result, "uses": uses})
        with written_aside(file) as part:  # two runs may write it at once
            part.write_text(json.dumps(records))

    def _ask(self, text: str) -> str:
        """The model's reply, greedy; a prompt that is too long loses its beginning."""
        asked = self.PROMPT + text[:4000]
        templated = self.tokenizer.chat_template is not None
        if templated:
            messages = [{"role": "user", "content": asked}]
            asked = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(asked, return_tensors="pt", add_special_tokens=not templated).input_ids
        ids = ids.to(self.model.device)
        context = context_of(self.model)
        room = min(512, context // 2)
        ids = ids[:, room - context:]
        pad = self.tokenizer.pad_token_id
        if pad is None:
            pad = self.tokenizer.eos_token_id
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=room,
                                  pad_token_id=pad)
        return self.tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True)


# ---- may the chains replace the process model?
class Calibration:
    """Compares chain scores with the process model's over the last 50 solutions, and decides once."""

    WINDOW = 50  # solutions that are compared
    PEARSON = 0.70  # least correlation of chain and process scores
    EXTRACTION = 0.80  # least share of solutions with a chain

    def __init__(self, active: bool = False):
        self.active = active
        self.seen = 0
        self.last: deque[tuple[float | None, float]] = deque(maxlen=self.WINDOW)  # (chain, None without one; process)

    def due(self) -> bool:
        """Counts a solution; whether it is one of every four that are compared."""
        self.seen += 1
        return self.seen % 4 == 0

    def add(self, links: Sequence[Link], process: float) -> None:
        """Another solution's links and process score; chains become active where they agree over the whole window."""
        chain = chain_score(links) if links else None
        self.last.append((chain, process))
        if len(self.last) < self.WINDOW or self.extraction() < self.EXTRACTION:
            return
        pearson = self.pearson()
        if pearson is not None and pearson >= self.PEARSON:
            self.active = True

    def pearson(self) -> float | None:
        """Correlation over the window; None under ten pairs or where one side does not vary."""
        pairs = [pair for pair in self.last if pair[0] is not None]
        if len(pairs) < 10:
            return None
        chain, process = np.array(pairs).T
        if chain.std() < 1e-9 or process.std() < 1e-9:
            return None
        return float(np.corrcoef(chain, process)[0, 1])

    def extraction(self) -> float | None:
        """Share of the window's solutions in which a chain was found."""
        if not self.last:
            return None
        found = [chain is not None for chain, _ in self.last]
        return sum(found) / len(found)

    def state_dict(self) -> dict:
        return {"active": self.active, "seen": self.seen, "last": [list(pair) for pair in self.last]}

    def load_state_dict(self, state: dict) -> None:
        self.active = state["active"]
        self.seen = state["seen"]
        self.last.extend((chain, process) for chain, process in state["last"])

