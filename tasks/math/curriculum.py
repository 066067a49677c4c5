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
        self.target = target
        self.ramp = ramp
        self.min_warmup = min_warmup
        self.floor = floor
        self.thresholds = thresholds
        self.phase = "GROUNDED"
        self.steps = 0
        self.progress = 0  # steps of the ramp that are over
        self.suspended = False
        self.recent: deque[list[float | None]] = deque(maxlen=window)  # true, reward and step accuracy of a step

    def share(self) -> float:
        """Share of the next batch that is self-play."""
        if self.phase == "GROUNDED" or self.suspended or not self.target:
            return 0.0
        risen = 1.0
        if self.phase == "RAMP" and self.ramp:
            risen = min(1.0, (self.progress + 1) / self.ramp)
        return min(self.target * risen, MOST_SELF_PLAY)

    def update(self, accuracy: float | None, reward_accuracy: float | None, step_accuracy: float | None) -> None:
        """After a step: what it measured on given problems (None where it had none)."""
        self.steps += 1
        self.recent.append([accuracy, reward_accuracy, step_accuracy])
        means = [mean_of_known(values) for values in zip(*self.recent, strict=True)]
        if self.phase == "GROUNDED" and self._reliable(means):
            self.phase = "RAMP"
        elif self.phase == "RAMP" and not self.suspended:
            self.progress += 1
            if self.progress >= self.ramp:
                self.phase = "CONTINUOUS"
        self.suspended = self.phase != "GROUNDED" and means[0] is not None and means[0] < self.floor

    def _reliable(self, means: list[float | None]) -> bool:
        """Whether the ramp may begin: the warm-up is over and every accuracy reaches its threshold."""
        if not self.target or self.steps < self.min_warmup:
            return False
        reached = [(mean or 0.0) >= least for mean, least in zip(means, self.thresholds, strict=True)]
        return all(reached)

    def state_dict(self) -> dict:
        return {
            "phase": self.phase,
            "steps": self.steps,
            "progress": self.progress,
            "suspended": self.suspended,
            "recent": [list(step) for step in self.recent],
        }

    def load_state_dict(self, state: dict) -> None:
        self.phase = state["phase"]
        self.steps = state["steps"]
        self.progress = state["progress"]
        self.suspended = state["suspended"]
        self.recent.extend(state["recent"])


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are not None; None where all are."""
    known = [x for x in values if x is not None]
    return float(np.mean(known)) if known else None


# ---- the curriculum
class Curriculum:
    """Which topic and which difficulty the next question is asked for.

    Each topic keeps attempts, the success of its last 20 (the share of solutions that agree on a confirmed answer), a
    target difficulty, failures in a row (groups that the gate refused) and, where five of these paused it, until when.
    """

    START = 0.3  # target difficulty at first
    PAUSE = 10  # steps
    RECENT = 20  # attempts that a topic's success is taken over
    FLOOR = 0.02  # least share of a topic

    def __init__(self, names: Sequence[str], seed: int):
        self.seed = seed
        self.draws = 0
        self.step = 0
        self.topics = {name: self._new_topic() for name in names}
        self.rewards: deque[float] = deque(maxlen=10)  # of the last self-play groups

    def _new_topic(self) -> dict:
        return {
            "attempts": 0,
            "recent": [],
            "target": self.START,
            "failures": 0,
            "paused_until": 0,
        }

    def success(self, name: str) -> float | None:
        recent = self.topics[name]["recent"]
        return sum(recent) / len(recent) if recent else None

    def probabilities(self) -> dict[str, float]:
        """Chance of each topic: sweet spot (success 0.4 to 0.7), exploration (any) and retention (over 0.7), 0.60 /
        0.25 / 0.15; an empty set's share goes to exploration. All exploration in the first three steps."""
        active = self._active()
        sweet, easy = [], []
        for name in active:
            success = self.success(name)
            if success is None:
                continue
            if 0.4 <= success <= 0.7:
                sweet.append(name)
            elif success > 0.7:
                easy.append(name)
        sweet_weight, easy_weight = self._weights()
        p = dict.fromkeys(active, 0.0)
        for name in sweet:
            p[name] += sweet_weight / len(sweet)
        for name in easy:
            p[name] += easy_weight / len(easy)
        explored = (1 - sum(p.values())) / len(active)
        p = {name: max(share + explored, self.FLOOR) for name, share in p.items()}
        total = sum(p.values())
        return {name: share / total for name, share in p.items()}

    def _active(self) -> list[str]:
        """The topics that are not paused; all of them where every one is."""
        active = [name for name, topic in self.topics.items() if topic["paused_until"] <= self.step]
        return active or list(self.topics)

    def _weights(self) -> tuple[float, float]:
        """Shares of the sweet spot and of retention; less sweet spot where the rewards do not change any more."""
        if self.step < 3:
            return 0.0, 0.0
        stale = len(self.rewards) == 10 and np.std(self.rewards) < 0.05
        return 0.60 - 0.2 if stale else 0.60, 0.15

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
        recent = [*topic["recent"], float(success)]
        topic["recent"] = recent[-self.RECENT:]
        topic["failures"] = 0 if passed else topic["failures"] + 1
        self.rewards.append(float(reward))
        target = topic["target"]
        rate = self.success(name)
        if topic["attempts"] >= 5 and rate > 0.7:
            target += 0.03
        elif topic["attempts"] >= 5 and rate < 0.4:
            target -= 0.04
        if topic["failures"] == 3:
            target *= 0.6
        if topic["failures"] >= 5:
            topic["paused_until"] = self.step + self.PAUSE
            topic["failures"] = 0
        topic["target"] = min(1.0, max(0.05, target))

    def next_step(self) -> None:
        self.step += 1

    def state_dict(self) -> dict:
        return {"draws": self.draws, "step": self.step, "rewards": list(self.rewards), "topics": self.topics}

    def load_state_dict(self, state: dict) -> None:
        self.draws = state["draws"]
        self.step = state["step"]
        self.rewards.extend(state["rewards"])
        for name, topic in state["topics"].items():
            if name in self.topics:
                self.topics[name] = dict(topic)
