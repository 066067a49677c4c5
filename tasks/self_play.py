"""Self-play: when the policy may write its own problems, about what, how good they are, and which may be trained on.

Difficulty is one scale everywhere, from 0 (everyone solves it) to 1. All draws come from `rng_of`; every class gives
its state as plain JSON types.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from data import Group, Prompt, Rollout, Score, rng_of
from rewards import FINAL_LINE, STEP_LINE, final_answer, number, repetition, step_format, value
from tasks.chains import evaluate
from tasks.process_reward import solution_score

SHORTEST = 10  # characters of a question
GIVEN_FROM = 0.8  # a target difficulty from which a given problem is used instead
MOST_SELF_PLAY = 0.7  # at least 30 % of a batch are given problems


# ---- phases
class Phases:
    """GROUNDED → RAMP → CONTINUOUS, and a suspension whenever the policy loses its footing on given problems.

    Accuracies are means over the last `window` steps. `target` is the share of self-play slots when the ramp is over.
    """

    def __init__(self, target: float, ramp: int, min_warmup: int, floor: float, window: int,
                 thresholds: tuple[float, float, float]):
        self.target, self.ramp, self.min_warmup = target, ramp, min_warmup
        self.floor, self.thresholds = floor, thresholds
        self.phase, self.steps, self.progress, self.suspended = "GROUNDED", 0, 0, False
        self.recent: deque[list[float | None]] = deque(maxlen=window)  # true, reward and step accuracy of a step

    def share(self) -> float:
        """Share of the next batch that is self-play."""
        if self.phase == "GROUNDED" or self.suspended or not self.target:
            return 0.0
        risen = min(1.0, (self.progress + 1) / self.ramp) if self.phase == "RAMP" and self.ramp else 1.0
        return min(self.target * risen, MOST_SELF_PLAY)

    def update(self, accuracy: float | None, reward_accuracy: float | None, step_accuracy: float | None) -> None:
        """After a step: what it measured on given problems (None where it had none)."""
        self.steps += 1
        self.recent.append([accuracy, reward_accuracy, step_accuracy])
        now = [_mean(values) for values in zip(*self.recent, strict=True)]
        if self.phase == "GROUNDED":
            if self.target and self.steps >= self.min_warmup and all(
                    (x or 0.0) >= least for x, least in zip(now, self.thresholds, strict=True)):
                self.phase = "RAMP"
        elif self.phase == "RAMP" and not self.suspended:
            self.progress += 1
            if self.progress >= self.ramp:
                self.phase = "CONTINUOUS"
        self.suspended = self.phase != "GROUNDED" and now[0] is not None and now[0] < self.floor

    def state_dict(self) -> dict:
        return {"phase": self.phase, "steps": self.steps, "progress": self.progress, "suspended": self.suspended,
                "recent": [list(step) for step in self.recent]}

    def load_state_dict(self, state: dict) -> None:
        self.phase, self.steps, self.progress = state["phase"], state["steps"], state["progress"]
        self.suspended = state["suspended"]
        self.recent.extend(state["recent"])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return float(np.mean(known)) if known else None


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


# ---- the curriculum
class Curriculum:
    """Which topic and which difficulty the next question is asked for.

    Each topic keeps attempts, the success of its last 20 (the share of solutions that agree on a confirmed answer), a
    target difficulty, failures in a row (groups that the gate refused) and, where five of these paused it, until when.
    """

    START, PAUSE, RECENT, FLOOR = 0.3, 10, 20, 0.02  # target at first; steps of a pause; attempts; least share

    def __init__(self, names: Sequence[str], seed: int):
        self.seed, self.draws, self.step = seed, 0, 0
        self.topics = {name: {"attempts": 0, "recent": [], "target": self.START, "failures": 0, "paused_until": 0}
                       for name in names}
        self.rewards: deque[float] = deque(maxlen=10)  # of the last self-play groups

    def success(self, name: str) -> float | None:
        recent = self.topics[name]["recent"]
        return sum(recent) / len(recent) if recent else None

    def probabilities(self) -> dict[str, float]:
        """Chance of each topic: sweet spot (success 0.4 to 0.7), exploration (any) and retention (over 0.7), 0.60 /
        0.25 / 0.15; an empty set's share goes to exploration. All exploration in the first three steps."""
        active = [n for n, t in self.topics.items() if t["paused_until"] <= self.step] or list(self.topics)
        known = {n: self.success(n) for n in active}
        sweet = [n for n, s in known.items() if s is not None and 0.4 <= s <= 0.7]
        easy = [n for n, s in known.items() if s is not None and s > 0.7]
        weights = {"sweet": 0.60, "easy": 0.15}
        if self.step < 3:
            weights = {"sweet": 0.0, "easy": 0.0}
        elif len(self.rewards) == 10 and np.std(self.rewards) < 0.05:
            weights["sweet"] -= 0.2
        p = dict.fromkeys(active, 0.0)
        for key, names in (("sweet", sweet), ("easy", easy)):
            for name in names:
                p[name] += weights[key] / len(names)
        rest = 1 - sum(p.values())
        p = {name: max(share + rest / len(active), self.FLOOR) for name, share in p.items()}
        total = sum(p.values())
        return {name: share / total for name, share in p.items()}

    def draw(self) -> tuple[str, float]:
        """(topic, target difficulty) of the next question."""
        self.draws += 1
        p = self.probabilities()
        name = rng_of(self.seed, "topic", self.draws).choice(list(p), p=list(p.values()))
        return str(name), self.topics[str(name)]["target"]

    def record(self, name: str, success: float, passed: bool, reward: float) -> None:
        """The outcome of a question: share of agreeing solutions, whether the gate let it pass, mean reward."""
        topic = self.topics[name]
        topic["attempts"] += 1
        topic["recent"] = [*topic["recent"], float(success)][-self.RECENT:]
        topic["failures"] = 0 if passed else topic["failures"] + 1
        self.rewards.append(float(reward))
        rate = self.success(name)
        if topic["attempts"] >= 5 and rate > 0.7:
            topic["target"] += 0.03
        elif topic["attempts"] >= 5 and rate < 0.4:
            topic["target"] -= 0.04
        if topic["failures"] == 3:
            topic["target"] *= 0.6
        if topic["failures"] >= 5:
            topic["paused_until"], topic["failures"] = self.step + self.PAUSE, 0
        topic["target"] = min(1.0, max(0.05, topic["target"]))

    def next_step(self) -> None:
        self.step += 1

    def state_dict(self) -> dict:
        return {"draws": self.draws, "step": self.step, "rewards": list(self.rewards), "topics": self.topics}

    def load_state_dict(self, state: dict) -> None:
        self.draws, self.step = state["draws"], state["step"]
        self.rewards.extend(state["rewards"])
        self.topics |= {name: dict(topic) for name, topic in state["topics"].items() if name in self.topics}


# ---- all of it together
@dataclasses.dataclass
class Family:
    """The questions that were written from one instruction, the dropped ones among them."""

    prompt: Prompt
    rollouts: list[Rollout]


def with_limit(policy, max_new: int):
    """The policy as it is now, but with another limit on what it writes."""
    return dataclasses.replace(policy, args=dataclasses.replace(policy.args, max_new=max_new, max_turns=1))


class SelfPlay:
    """Writes questions with the policy, scores their solutions, and keeps phases, curriculum and novelty.

    `make_prompt(question, gold, **meta)` is the one place where a question becomes a prompt. A written question's
    `meta` has `self_play`, `topic`, `target`, `found` (the topic that it is about), `novelty` and `family`.
    """

    COLUMNS = ("phase", "self_play_share", "suspended", "self_play_groups", "question_reward", "question_novelty",
               "gate_share", "target_difficulty", "questions_dropped")

    def __init__(self, args, train: list[Prompt], make_prompt: Callable[..., Prompt]):
        self.args, self.make_prompt = args, make_prompt
        self.topics = Topics([(p.meta["question"], p.meta.get("topic")) for p in train])
        self.curriculum = Curriculum(self.topics.names, args.seed)
        self.novelty = Novelty(p.meta["question"] for p in train)
        thresholds = (args.ramp_accuracy, args.ramp_reward_accuracy, args.ramp_step_accuracy)
        self.phases = Phases(args.self_play, args.selfplay_ramp, args.min_warmup, args.grounded_floor,
                             args.phase_window, thresholds)
        self.told: dict[str, str] = {}  # topics that the policy has named, by question
        self.dropped = 0  # questions of this step that could not be put to the policy

    # ---- questions
    def instruction(self, topic: str, target: float) -> Prompt:
        text = self.args.question_instruction.replace("{topic}", topic).replace("{difficulty}", f"{target:.1f}")
        return Prompt([{"role": "user", "content": text}], None, {"topic": topic, "target": target})

    def write(self, policy, n: int, call: int) -> list[Prompt]:
        """Questions for the self-play slots of a batch of `n`, at most as many; dropped ones are not replaced."""
        each, share = self.args.q_group_size, self.phases.share()
        luck = rng_of(self.args.seed, "self-play", call).random()
        count = min(int(share * n / each + luck), n // each)  # right in the mean, whatever n and share are
        asked = [self.instruction(topic, target) for topic, target in (self.curriculum.draw() for _ in range(count))
                 if target < GIVEN_FROM]
        asked = [prompt for prompt in asked if policy.fits(prompt)]
        if not asked:
            return []
        writer = with_limit(policy, self.args.question_tokens)
        rolled = writer.sample(asked, each, self.args.question_temperature, "question", call)
        prompts = []
        for prompt, rollouts in zip(asked, rolled, strict=True):
            family = Family(prompt, rollouts)
            prompts += [self._question(family, rollout, policy) for rollout in rollouts]
        known = [prompt for prompt in prompts if prompt is not None]
        self.dropped += len(prompts) - len(known)
        self._classify(known, policy, call)
        return known

    def _question(self, family: Family, rollout: Rollout, policy) -> Prompt | None:
        question = None if rollout.truncated else clean_question(rollout.text)
        if question is None:
            return None
        meta = family.prompt.meta | {"self_play": True, "family": family, "written": rollout}
        prompt = self.make_prompt(question, None, **meta)
        if not policy.fits(prompt):
            return None
        prompt.meta["novelty"] = self.novelty.add(question)
        return prompt

    def _classify(self, prompts: list[Prompt], policy, call: int) -> None:
        """Fill in `found`: the topic by the policy's own word where --topic-classifier asks it, else by the words."""
        if self.args.topic_classifier == "policy":
            names = ", ".join(self.topics.names)
            new = list(dict.fromkeys(p.meta["question"] for p in prompts if p.meta["question"] not in self.told))
            asked = [Prompt([{"role": "user", "content": f"Which of these topics is the problem about: {names}? Answer "
                                                         f"with the topic alone.\n\nProblem: {q}"}]) for q in new]
            usable = [(q, prompt) for q, prompt in zip(new, asked, strict=True) if policy.fits(prompt)]
            asked = [prompt for _, prompt in usable]
            rolled = with_limit(policy, 16).sample(asked, 1, 0.0, "topic", call) if asked else []
            for (question, _), rows in zip(usable, rolled, strict=True):
                said = rows[0].text.lower()
                named = sorted((said.find(name.lower()), name) for name in self.topics.names if name.lower() in said)
                if named:
                    self.told[question] = named[0][1]
            self.told = dict(list(self.told.items())[-1000:])
        for prompt in prompts:
            question = prompt.meta["question"]
            prompt.meta["found"] = self.told.get(question) or self.topics.classify(question)

    # ---- scores
    def score(self, rollouts: list[Rollout], steps: list[Sequence[float]]) -> list[Score]:
        """Scores of one question's solutions from their steps' scores: 0.40 × question + 0.60 × solution, capped."""
        meta = rollouts[0].prompt.meta
        answers = [final_answer(rollout.text, strict=True) for rollout in rollouts]
        values = confirmed(answers, meta["topic"])
        agree = agreement(values)
        success = sum(agree) / len(agree)
        solvable = sum(v is not None for v in values) / len(values)
        quality = question_quality(float(meta["found"] == meta["topic"]), 1 - success, meta["target"],
                                   clarity(meta["question"]), solvable, novelty(*meta["novelty"]))
        scores = []
        for rollout, answer, own in zip(rollouts, answers, steps, strict=True):
            parts = {"question": 0.40 * quality, "solution": 0.60 * solution_score(own)}
            form, total = step_format(rollout.text), sum(parts.values())
            share = min(1.0, reward_cap(form, meta["novelty"][0]) / total) if total > 0 else 1.0
            parts = {name: part * share for name, part in parts.items()}
            flags = {"self_play": True, "gate": passes_gate(agree), "agreement": success, "question_quality": quality,
                     "answer": answer, "has_answer": answer is not None, "format": form}
            scores.append(Score(sum(parts.values()), parts, flags))
        return scores

    def regroup(self, groups: list[Group]) -> list[Group]:
        """Refused groups become unscorable; with --q-group-size, the questions of an instruction become a group."""
        own = [group for group in groups if group.prompt.meta.get("self_play")]
        beside = self._question_groups(own) if self.args.q_group_size > 1 else []
        for group in own:
            for score in group.scores:
                score.flags["reward"] = score.reward
                if not score.flags.get("gate"):
                    score.flags.setdefault("unscorable", "the verification gate refused the question")
                    score.reward, score.parts = None, {}
        return groups + beside

    @staticmethod
    def _question_groups(own: list[Group]) -> list[Group]:
        """A group an instruction: its questions, with the mean reward of their solutions; 0 where it was dropped."""
        means = {id(group.prompt.meta["written"]): _mean(score.reward for score in group.scores) for group in own}
        families = {id(group.prompt.meta["family"]): group.prompt.meta["family"] for group in own}
        out = []
        for family in families.values():
            rewards = [means.get(id(rollout), 0.0) for rollout in family.rollouts]
            scores = [Score(reward, {} if reward is None else {"solutions": reward}) for reward in rewards]
            out.append(Group(family.prompt, family.rollouts, scores, auxiliary=True))
        return out

    def observe(self, own: list[Group], measured: tuple[float | None, float | None, float | None]) -> dict:
        """After a step: its self-play groups, and what was measured on its given problems; returns the columns."""
        flags = [group.scores[0].flags for group in own if "agreement" in group.scores[0].flags]
        for group in own:
            first = group.scores[0].flags
            reward = _mean(score.flags.get("reward") for score in group.scores)
            self.curriculum.record(group.prompt.meta["topic"], first.get("agreement", 0.0), first.get("gate", False),
                                   reward or 0.0)
        targets = [topic["target"] for topic in self.curriculum.topics.values()]
        row = {"phase": self.phases.phase, "self_play_share": self.phases.share(),
               "suspended": int(self.phases.suspended), "self_play_groups": len(own),
               "question_reward": _mean(flag["question_quality"] for flag in flags),
               "question_novelty": _mean(novelty(*group.prompt.meta["novelty"]) for group in own),
               "gate_share": _mean(float(flag["gate"]) for flag in flags),
               "target_difficulty": float(np.mean(targets)), "questions_dropped": self.dropped}
        self.dropped = 0
        if own:
            self.curriculum.next_step()
        self.phases.update(*measured)
        return row

    def state_dict(self) -> dict:
        return {"phases": self.phases.state_dict(), "curriculum": self.curriculum.state_dict(),
                "novelty": self.novelty.state_dict(), "told": self.told}

    def load_state_dict(self, state: dict) -> None:
        self.phases.load_state_dict(state["phases"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.novelty.load_state_dict(state["novelty"])
        self.told = dict(state["told"])
