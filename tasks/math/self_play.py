"""Self-play: when the policy may write its own problems, about what, how good they are, and which may be trained on.

Difficulty is one scale everywhere, from 0 (everyone solves it) to 1. All draws come from `rng_of`; every class gives
its state as plain JSON types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from data import Group, Prompt, Rollout, Score, rng_of
from rewards import final_answer, step_format
from tasks.math.curriculum import Curriculum, Phases, _mean
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
