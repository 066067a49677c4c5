"""Step scores of solutions: by the process reward model, by step chains, and the calibration between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from data import Group, Rollout
from harness.files import cache_home
from tasks.math.chains import Calibration, Extractor, Link, chain_lccp, integrity, link_scores
from tasks.math.process_reward import (
    ProcessRewardModel,
    lccp,
    process_score,
    split_steps,
    step_accuracy,
)

PROCESS_COLUMNS = {
    "process": "the process score, 0.6 last step + 0.4 mean over steps, of given problems",
    "process_last": "its one side: probability that the last step is right",
    "process_mean": "its other side: mean probability that a step is right",
}
STEP_COLUMNS = {
    "step_accuracy": "share of steps over 0.5 (by the process model, else by the chains)",
    "lccp": "steps before the first that is not over 0.5, over all (by the process model, else by the chains)",
}
CHAIN_COLUMNS = {
    "chain_integrity": "0.6 stated sums that hold + 0.4 named results that occur; blank in the shadow",
    "chain_lccp": "stated sums before the first that does not hold, over all; blank in the shadow",
    "chain_found": "share of solutions that state any sum; blank in the shadow",
}
CALIBRATION_COLUMNS = {
    "chain_pearson": "correlation of chain and process scores over the last 50 compared solutions",
    "chain_extraction": "share of these solutions in which a chain was found",
    "chain_active": "1 once the chains take the place of the process scores",
}


@dataclasses.dataclass(frozen=True)
class StepScores:
    """What was read of a solution; None where it is not used or could not be read."""

    steps: list[float] | None = None  # probabilities that its steps are right, by the process model
    links: list[Link] | None = None  # its chain

    def values(self, prefer_chain: bool) -> Sequence[float]:
        """A score of each step: the probabilities, else those of the chain; 0.5 where nothing can be said."""
        if self.steps is not None and not prefer_chain:
            return self.steps
        return link_scores(self.links or []) or [0.5]


class StepJudge:
    """Reads the steps of solutions with whatever is switched on; `read` gives `StepScores`, `flags` what is logged.

    `always_chains` asks for chains wherever there are no process scores, for questions without gold.
    """

    def __init__(self, args, always_chains: bool):
        self.args = args
        self.always_chains = always_chains
        self.prm: ProcessRewardModel | None = None
        self.extractor = Extractor()
        self.calibration = Calibration(active=args.chain_scoring == "on")

    def load(self, policy, prm: str) -> None:
        """The process model of folder or hub id `prm` ("none": none) and the extractor, on the policy's device."""
        args = self.args
        dtype = policy.hf.dtype
        if prm != "none":
            self.prm = ProcessRewardModel(prm, policy.device, dtype, args.prm_4bit, args.prm_separator,
                                          args.prm_tokens)
        if args.extractor_model:
            home = cache_home() / "chains" if args.cache else None
            self.extractor = Extractor(args.extractor_model, policy.device, dtype, home)

    # ---- reading
    def read(self, rollouts: Iterable[Rollout]) -> dict[Rollout, StepScores]:
        """The step scores of each rollout; empty where nothing reads steps.

        A rollout on which the process model fails has no probabilities; where it fails on all of them, so does the run.
        """
        if self.prm is None and not self.always_chains and self.args.chain_scoring == "off":
            return {}
        solutions = {rollout: (rollout.prompt.meta["question"], rollout.text) for rollout in rollouts}
        distinct = list(dict.fromkeys(solutions.values()))  # completions repeat within a group
        if self.prm is None:
            steps = [None] * len(distinct)
        else:
            steps = self._probabilities(distinct)
        found = {}
        for solution, probabilities in zip(distinct, steps, strict=True):
            links = self.extractor(solution[1]) if self._needs_chain(probabilities) else None
            found[solution] = StepScores(probabilities, links)
        return {rollout: found[solution] for rollout, solution in solutions.items()}

    def _needs_chain(self, probabilities: list[float] | None) -> bool:
        """Whether a solution's chain is read now; in the shadow, `calibrate` reads every fourth."""
        if self.calibration.active or self.prm is None:
            return True
        return probabilities is None and self.always_chains

    def _probabilities(self, solutions: list[tuple[str, str]]) -> list[list[float] | None]:
        """By the process model, of each (question, text)."""
        problems = [(question, split_steps(text)) for question, text in solutions]
        try:
            return self.prm.score(problems)
        except Exception as error:  # one that the model cannot read must not cost the others theirs
            alone = []
            failed = 0
            for problem in problems:
                try:
                    alone += self.prm.score([problem])
                except Exception:
                    alone.append(None)
                    failed += 1
            if failed == len(problems):
                raise error
            return alone

    # ---- what is logged
    def flags(self, scores: StepScores) -> dict[str, float]:
        """The step, process and chain columns of one solution, as far as they are known."""
        flags: dict[str, float] = {}
        links = scores.links
        if links is not None and self.args.chain_scoring != "off":
            flags["chain_integrity"] = integrity(links)
            flags["chain_lccp"] = chain_lccp(links)
            flags["chain_found"] = bool(links)
        steps = scores.steps
        if steps:
            flags["process"] = process_score(steps)
            flags["process_last"] = steps[-1]
            flags["process_mean"] = sum(steps) / len(steps)
        values = steps or link_scores(links or [])
        if values:
            flags["step_accuracy"] = step_accuracy(values)
            flags["lccp"] = lccp(values)
        return flags

    def calibrate(self, groups: list[Group]) -> None:
        """Compare the chains of every fourth solution of the groups with its process score; see `Calibration`."""
        for group in groups:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                if "process" in score.flags and self.calibration.due():
                    self.calibration.add(self.extractor(rollout.text), score.flags["process"])

    def calibration_row(self) -> dict[str, float | None]:
        return {
            "chain_pearson": self.calibration.pearson(),
            "chain_extraction": self.calibration.extraction(),
            "chain_active": int(self.calibration.active),
        }
