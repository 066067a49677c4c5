"""Self-play: when the policy may write its own problems, about what, how good they are, and which may be trained on.

Difficulty is one scale everywhere, from 0 (everyone solves it) to 1. All draws come from `rng_of`; every class gives
its state as plain JSON types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from data import Group, Prompt, Rollout, Score, rng_of
from rewards import final_answer, step_format
from tasks.math.curriculum import Curriculum, Phases, mean_of_known
from tasks.math.process_reward import solution_score
from tasks.math.questions import (
    Novelty,
    Topics,
    agreement,
    clarity,
    clean_question,
    confirmed,
    novelty,
    passes_gate,
    question_quality,
    reward_cap,
)

GIVEN_FROM = 0.8  # a target difficulty from which a given problem is used instead
MOST_TOLD = 1000  # questions whose topic by the policy's word is kept


# ---- all of it together
@dataclasses.dataclass(eq=False)
class Family:
    """The questions that were written from one instruction, the dropped ones among them."""

    prompt: Prompt
    rollouts: list[Rollout]


def is_own(prompt: Prompt) -> bool:
    """Whether it is a question of the policy's own."""
    return prompt.meta.get("self_play", False)


def as_user(text: str, meta: dict) -> Prompt:
    return Prompt([{"role": "user", "content": text}], None, meta)


def with_limit(policy, max_new: int):
    """The policy as it is now, but with another limit on what it writes."""
    return dataclasses.replace(policy, args=dataclasses.replace(policy.args, max_new=max_new, max_turns=1))


def capped(parts: dict[str, float], cap: float) -> dict[str, float]:
    """Reward parts in the same proportion, whose sum is `cap` at most."""
    total = sum(parts.values())
    share = min(1.0, cap / total) if total > 0 else 1.0
    return {name: part * share for name, part in parts.items()}


class SelfPlay:
    """Writes questions with the policy, scores their solutions, and keeps phases, curriculum and novelty.

    `make_prompt(question, gold, **meta)` is the one place where a question becomes a prompt. A written question's
    `meta` has `self_play`, `topic`, `target`, `found` (the topic that it is about), `novelty` and `family`.
    """

    COLUMNS: ClassVar[dict[str, str]] = {
        "phase": "phase in which the step was sampled",
        "self_play_share": "share of own problems that the phase allows",
        "suspended": "1 while self-play is suspended",
        "self_play_groups": "own problems in the step",
        "question_reward": "mean quality of the own problems",
        "question_novelty": "mean novelty of the own problems",
        "gate_share": "share of the own problems that the gate let pass (refused ones count as unscorable)",
        "target_difficulty": "mean over the topics of the difficulty that is asked for, 0 to 1",
        "questions_dropped": "written questions that were too short, cut off or too long for the context",
    }

    def __init__(self, args, train: list[Prompt], make_prompt: Callable[..., Prompt]):
        self.args = args
        self.make_prompt = make_prompt
        questions = [prompt.meta["question"] for prompt in train]
        topics = [prompt.meta.get("topic") for prompt in train]
        self.topics = Topics(list(zip(questions, topics, strict=True)))
        self.curriculum = Curriculum(self.topics.names, args.seed)
        self.novelty = Novelty(questions)
        thresholds = (args.ramp_accuracy, args.ramp_reward_accuracy, args.ramp_step_accuracy)
        self.phases = Phases(args.self_play, args.selfplay_ramp, args.min_warmup, args.grounded_floor,
                             args.phase_window, thresholds)
        self.told: dict[str, str] = {}  # topics that the policy has named, by question
        self.dropped = 0  # questions of this step that could not be put to the policy

    # ---- questions
    def instruction(self, topic: str, target: float) -> Prompt:
        """What asks the policy for a question about a topic, of a target difficulty."""
        text = self.args.question_instruction
        text = text.replace("{topic}", topic)
        text = text.replace("{difficulty}", f"{target:.1f}")
        return as_user(text, {"topic": topic, "target": target})

    def write(self, policy, n: int, call: int) -> list[Prompt]:
        """Questions for the self-play slots of a batch of `n`, at most as many; dropped ones are not replaced."""
        each = self.args.q_group_size
        share = self.phases.share()
        luck = rng_of(self.args.seed, "self-play", call).random()
        count = int(share * n / each + luck)  # right in the mean, whatever n and share are
        asked = self._instructions(min(count, n // each), policy)
        if not asked:
            return []
        writer = with_limit(policy, self.args.question_tokens)
        written = writer.sample(asked, each, self.args.question_temperature, "question", call)
        prompts = []
        for prompt, rollouts in zip(asked, written, strict=True):
            family = Family(prompt, rollouts)
            for rollout in rollouts:
                question = self._question(family, rollout, policy)
                if question is None:
                    self.dropped += 1
                else:
                    prompts.append(question)
        self._find_topics(prompts, policy, call)
        return prompts

    def _instructions(self, count: int, policy) -> list[Prompt]:
        """`count` draws of the curriculum, without those that a given problem takes the place of."""
        asked = []
        for _ in range(count):
            topic, target = self.curriculum.draw()
            if target >= GIVEN_FROM:
                continue
            prompt = self.instruction(topic, target)
            if policy.fits(prompt):
                asked.append(prompt)
        return asked

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

    def _find_topics(self, prompts: list[Prompt], policy, call: int) -> None:
        """Fill in `found`: the topic by the policy's own word where --topic-classifier asks it, else by the words."""
        if self.args.topic_classifier == "policy":
            self._ask_topics([prompt.meta["question"] for prompt in prompts], policy, call)
        for prompt in prompts:
            question = prompt.meta["question"]
            prompt.meta["found"] = self.told.get(question) or self.topics.classify(question)

    def _ask_topics(self, questions: list[str], policy, call: int) -> None:
        """Let the policy name the topics of the questions that it has not been asked about, and keep its answers."""
        names = ", ".join(self.topics.names)
        asked = []
        for question in dict.fromkeys(questions):
            text = (f"Which of these topics is the problem about: {names}? Answer with the topic alone.\n\n"
                    f"Problem: {question}")
            prompt = as_user(text, {"question": question})
            if question not in self.told and policy.fits(prompt):
                asked.append(prompt)
        answers = with_limit(policy, 16).sample(asked, 1, 0.0, "topic", call) if asked else []
        for prompt, (answer,) in zip(asked, answers, strict=True):
            topic = self._first_named(answer.text.lower())
            if topic is not None:
                self.told[prompt.meta["question"]] = topic
        newest = list(self.told.items())[-MOST_TOLD:]
        self.told = dict(newest)

    def _first_named(self, text: str) -> str | None:
        """The topic that a text in lower case names first; None where it names none."""
        named = [(text.find(name.lower()), name) for name in self.topics.names if name.lower() in text]
        return min(named)[1] if named else None

    # ---- scores
    def score(self, rollouts: list[Rollout], steps: list[Sequence[float]]) -> list[Score]:
        """Scores of one question's solutions from their steps' scores: 0.40 × question + 0.60 × solution, capped."""
        meta = rollouts[0].prompt.meta
        answers = [final_answer(rollout.text, strict=True) for rollout in rollouts]
        values = confirmed(answers, meta["topic"])
        agree = agreement(values)
        success = sum(agree) / len(agree)
        solvable = sum(value is not None for value in values) / len(values)
        on_topic = float(meta["found"] == meta["topic"])
        quality = question_quality(on_topic, 1 - success, meta["target"], clarity(meta["question"]), solvable,
                                   novelty(*meta["novelty"]))
        scores = []
        for rollout, answer, own in zip(rollouts, answers, steps, strict=True):
            form = step_format(rollout.text)
            parts = {"question": 0.40 * quality, "solution": 0.60 * solution_score(own)}
            parts = capped(parts, reward_cap(form, meta["novelty"][0]))
            flags = {
                "self_play": True,
                "gate": passes_gate(agree),
                "agreement": success,
                "question_quality": quality,
                "answer": answer,
                "has_answer": answer is not None,
                "format": form,
            }
            scores.append(Score(sum(parts.values()), parts, flags))
        return scores

    def adjust_groups(self, groups: list[Group]) -> list[Group]:
        """Refused groups become unscorable; with --q-group-size, the questions of an instruction become a group."""
        own = [group for group in groups if is_own(group.prompt)]
        beside = self._question_groups(own) if self.args.q_group_size > 1 else []
        for group in own:
            for score in group.scores:
                score.flags["reward"] = score.reward
                if not score.flags.get("gate"):
                    score.flags.setdefault("unscorable", "the verification gate refused the question")
                    score.reward = None
                    score.parts = {}
        return groups + beside

    @staticmethod
    def _question_groups(own: list[Group]) -> list[Group]:
        """A group an instruction: its questions, with the mean reward of their solutions; 0 where it was dropped."""
        means: dict[Rollout, float | None] = {}  # by written question
        families: dict[Family, None] = {}
        for group in own:
            means[group.prompt.meta["written"]] = mean_of_known(score.reward for score in group.scores)
            families[group.prompt.meta["family"]] = None
        out = []
        for family in families:
            scores = []
            for rollout in family.rollouts:
                reward = means.get(rollout, 0.0)
                scores.append(Score(reward, {} if reward is None else {"solutions": reward}))
            out.append(Group(family.prompt, family.rollouts, scores, auxiliary=True))
        return out

    def observe(self, own: list[Group], measured: tuple[float | None, float | None, float | None]) -> dict:
        """After a step: its self-play groups, and what was measured on its given problems; returns the columns."""
        for group in own:
            first = group.scores[0].flags
            reward = mean_of_known(score.flags.get("reward") for score in group.scores)
            self.curriculum.record(group.prompt.meta["topic"], first.get("agreement", 0.0), first.get("gate", False),
                                   reward or 0.0)
        row = self._row(own)
        self.dropped = 0
        if own:
            self.curriculum.next_step()
        self.phases.update(*measured)
        return row

    def _row(self, own: list[Group]) -> dict:
        """The columns, of the phase in which the step was sampled."""
        first = [group.scores[0].flags for group in own]
        judged = [flags for flags in first if "agreement" in flags]
        targets = [topic["target"] for topic in self.curriculum.topics.values()]
        return {
            "phase": self.phases.phase,
            "self_play_share": self.phases.share(),
            "suspended": int(self.phases.suspended),
            "self_play_groups": len(own),
            "question_reward": mean_of_known(flags["question_quality"] for flags in judged),
            "question_novelty": mean_of_known(novelty(*group.prompt.meta["novelty"]) for group in own),
            "gate_share": mean_of_known(float(flags["gate"]) for flags in judged),
            "target_difficulty": float(np.mean(targets)),
            "questions_dropped": self.dropped,
        }

    def state_dict(self) -> dict:
        return {
            "phases": self.phases.state_dict(),
            "curriculum": self.curriculum.state_dict(),
            "novelty": self.novelty.state_dict(),
            "told": self.told,
        }

    def load_state_dict(self, state: dict) -> None:
        self.phases.load_state_dict(state["phases"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.novelty.load_state_dict(state["novelty"])
        self.told = dict(state["told"])
