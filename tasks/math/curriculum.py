"""The curriculum of self-play: phases, and the share of questions that the policy writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from data import rng_of

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
