"""Task `math`: problems with a known answer, then problems of the policy's own.

Given problems come from GSM8K, MATH, chat or plain records, or from the built-in generator (tasks/math/given.py), and
are judged by their gold and, with --prm, by a process reward model (tasks/math/step_judge.py). With --self-play the
policy also writes questions (tasks/math/self_play.py) once it is reliable on given ones.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import ClassVar, Literal

from data import Group, Prompt, Rollout, Score, Task, UserError, rng_of
from rewards import equivalent, final_answer, partial_credit, step_format
from tasks.math.chains import chain_lccp, integrity
from tasks.math.curriculum import mean_of_known
from tasks.math.given import GivenProblems, Mixture, is_mixed_in, math_prompt, word_prompts
from tasks.math.process_reward import lccp, process_score, sound_beginning, split_steps, tiny_process_model
from tasks.math.self_play import SelfPlay, is_own
from tasks.math.step_judge import (
    CALIBRATION_COLUMNS,
    CHAIN_COLUMNS,
    PROCESS_COLUMNS,
    STEP_COLUMNS,
    StepJudge,
    StepScores,
)
from tasks.math.word_problems import MAX_PROBLEMS, demonstration, difficulty_of, judged_solutions

INSTRUCTION = ("Solve the problem step by step. Write each step on a line of its own that begins with its number, "
               "'Step 1:', 'Step 2:' and so on. End with the line 'Final Answer:' followed by the answer alone.")
QUESTION = ("Write one new math word problem. Topic: {topic}. Difficulty: {difficulty}, on a scale from 0 (everyone "
            "solves it) to 1 (nobody does). State only the problem, in one paragraph that ends with the question, "
            "with all the numbers it needs and a single number as its answer. Do not solve it.")
ANSWER_COLUMNS = {"answer_share": "share of completions that state a final answer"}
EVAL_COLUMNS = {
    **ANSWER_COLUMNS,
    "format": "mean format score",
    "final_answer_accuracy": "share of the stated final answers that are right",
}


class MathTask(Task):
    """Math problems with a gold answer, and questions of the policy's own.

    A prompt's `gold` is the answer as text, None for an own question. Its `meta` holds `question` (text), for given
    training prompts `index` (row in the sampler), `topic` where the data name one, `source` "math" for those of
    --math-data, and for word problems `steps`, the careful solution as (left, operator, right, result) tuples.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        math_max_level: int = 3  # keep MATH records up to this level that have a numeric answer; 0 keeps all of them
        partial_credit: bool = False  # a wrong number earns min(0.85, 1 / (1 + 2·|p - g| / max(|g|, 1))) as `correct`
        math_instruction: str = INSTRUCTION  # the system message of every prompt; empty leaves it out
        sampling_alpha: float = 2.0  # how strongly prompts that are won about half the time are preferred; 0 is uniform
        math_data: str = ""  # second source (MATH records): file or hub id[:config], mixed into --data
        math_mix: float = 0.3  # share of each batch's given problems that come from --math-data
        math_mix_late: float = -1.0  # that share after a ramp of ten steps; negative: stays
        math_ramp_start: int = 0  # step at which the ramp to --math-mix-late begins
        prm: str = "none"  # process reward model: folder, hub id, tiny (built in), or none
        prm_4bit: bool = False  # nf4 weights for it through bitsandbytes (CUDA)
        prm_separator: str = ""  # text behind each step that it reads; empty: <extra_0>, or newline without that
        prm_tokens: int = 16_384  # most tokens (rows x length) in one of its forwards
        chain_scoring: Literal["off", "shadow", "on"] = "off"  # step chains in place of the process term
        extractor_model: str = ""  # small language model that reads the chains which rules cannot
        self_play: float = 0.0  # share of the batch that is problems of the policy's own; 0: none
        selfplay_ramp: int = 20  # steps over which that share rises
        min_warmup: int = 10  # steps on given problems alone, at least
        ramp_accuracy: float = 0.55  # true accuracy from which the ramp begins
        ramp_reward_accuracy: float = 0.60  # and share of solutions with a reward of 0.5 or more
        ramp_step_accuracy: float = 0.65  # and step accuracy (of the process model, else of the chains)
        grounded_floor: float = 0.50  # true accuracy under which self-play is suspended
        phase_window: int = 5  # steps over which these accuracies are averaged
        q_group_size: int = 1  # questions from one instruction; over 1 their tokens are trained too
        question_instruction: str = QUESTION  # what asks for a question, with {topic} and {difficulty}
        question_tokens: int = 128  # token limit of a question
        question_temperature: float = 1.1  # at which questions are sampled
        topic_classifier: Literal["words", "policy"] = "words"  # who says what a question is about

    columns: ClassVar[dict[str, str]] = {
        **ANSWER_COLUMNS,
        **PROCESS_COLUMNS,
        **STEP_COLUMNS,
        **CHAIN_COLUMNS,
        **Mixture.COLUMNS,
        **CALIBRATION_COLUMNS,
        **SelfPlay.COLUMNS,
    }
    eval_columns: ClassVar[dict[str, str]] = {**EVAL_COLUMNS, **PROCESS_COLUMNS, **STEP_COLUMNS, **CHAIN_COLUMNS}

    def __init__(self, args):
        super().__init__(args)
        check_options(args)
        # The process that compares symbols takes seconds to start: meanwhile the model loads.
        threading.Thread(target=equivalent, args=(r"\sqrt{8}", r"2\sqrt{2}"), daemon=True).start()
        given = GivenProblems(args)
        train, heldout = given.load()
        if not train and args.data != args.eval_data:
            reasons = given.reasons()
            raise UserError("no training prompts are left; check --data, --math-max-level and --limit"
                            + (f" ({reasons})" if reasons else ""))
        self.notes += given.notes + given.notes_on_filters()
        self.set_prompts(train, heldout, args.sampling_alpha)
        self.policy = None
        self.calls = 0  # of `prompts`
        self.step = 0  # steps that are over
        self.own = SelfPlay(args, self.train, self.prompt) if args.self_play else None
        self.step_judge = StepJudge(args, always_chains=self.own is not None)
        self.read_steps: dict[Rollout, StepScores] = {}  # of the step that is being scored
        self._name_columns()

    def _name_columns(self) -> None:
        """Parts and columns of what is switched on."""
        has_prm = self.args.prm != "none"
        has_chains = self.args.chain_scoring != "off"
        parts = ["correct", "format"]
        steps: dict[str, str] = {}
        if has_prm:
            parts += ["process", "beginning"]
            steps |= PROCESS_COLUMNS
        if has_prm or self.own:
            steps |= STEP_COLUMNS
        if has_chains:
            parts += ["integrity", "chain_lccp"]
            steps |= CHAIN_COLUMNS
        if self.own:
            parts += ["question", "solution"]
        columns = ANSWER_COLUMNS | steps
        if self.mixture:
            columns |= Mixture.COLUMNS
        if has_chains:
            columns |= CALIBRATION_COLUMNS
        if self.own:
            columns |= SelfPlay.COLUMNS
        self.parts = tuple(parts)
        self.step_columns = steps
        self.columns = columns
        self.eval_columns = EVAL_COLUMNS | steps

    def prepare_model(self, policy) -> None:
        self.policy = policy
        prm = self.args.prm
        if prm == "tiny":
            prm = str(tiny_process_model(self, self.args, print))
        self.step_judge.load(policy, prm)

    # ---- which prompts
    def prompt(self, question: str, gold: str | None, **meta) -> Prompt:
        return math_prompt(self.args, question, gold, **meta)

    def set_prompts(self, train: list[Prompt], heldout: list[Prompt], alpha: float = 0.0) -> None:
        """The prompts of --math-data follow the others; with any of them, `mixture` deals and has all samplers."""
        train = sorted(train, key=is_mixed_in)
        super().set_prompts(train, heldout, alpha)
        self.mixture: Mixture | None = None
        if train and is_mixed_in(train[-1]):
            self.mixture = Mixture(self.args, train, alpha)
            self.sampler = self.mixture.first

    def prompts(self, n: int) -> list[Prompt]:
        """The next `n`: own questions in the phase's share, spread at random, and given problems."""
        if not self.own and not self.mixture:
            return super().prompts(n)
        self.calls += 1
        chosen = self.own.write(self.policy, n, self.calls) if self.own else []
        chosen = chosen + self._given(n - len(chosen))
        places = rng_of(self.args.seed, "slots", self.calls).permutation(n).tolist()
        batch = dict(zip(places, chosen, strict=True))
        return [batch[place] for place in range(n)]

    def _given(self, n: int) -> list[Prompt]:
        if self.mixture is None:
            return super().prompts(n)
        indices = self.mixture.draw(n, self.step + 1, self.calls)
        return [self.train[i] for i in indices]

    # ---- judging
    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score] | Exception]:
        """Judge the groups of a step; the process model reads the steps of all of them in common batches."""
        self.read_steps = self.step_judge.read([rollout for group in groups for rollout in group])
        try:
            return super().score_all(groups)
        finally:
            self.read_steps = {}

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        """Scores of a group by its gold and its steps; an own question has no gold, see `SelfPlay.score`."""
        known = self.read_steps or self.step_judge.read(rollouts)
        steps = [known.get(rollout, StepScores()) for rollout in rollouts]
        if is_own(rollouts[0].prompt):
            return self._score_own(rollouts, steps)
        verdicts: dict[str | None, bool] = {None: False}  # answers repeat within a group
        return [self._score_given(rollout, verdicts, own) for rollout, own in zip(rollouts, steps, strict=True)]

    def _score_given(self, rollout: Rollout, verdicts: dict[str | None, bool], steps: StepScores) -> Score:
        """The score of a solution of a given problem; see `reward_parts` for the reward."""
        try:
            gold = rollout.prompt.gold
            answer = final_answer(rollout.text, strict=True)
            if answer not in verdicts:
                verdicts[answer] = bool(equivalent(answer, gold))
            correct = verdicts[answer]
            form = step_format(rollout.text)
            value = 1.0 if correct else 0.0
            if self.args.partial_credit and not correct and answer is not None:
                value = partial_credit(answer, gold)
            parts = self.reward_parts(correct, value, form, steps)
        except Exception as error:  # whatever a completion breaks is that completion's result
            flags = {"correct": False, "answer": None, "has_answer": False, "error": f"{type(error).__name__}: {error}"}
            return Score(0.0, {"correct": 0.0, "format": 0.0}, flags)
        flags = {
            "correct": correct,
            "gt_match": correct,
            "answer": answer,
            "has_answer": answer is not None,
            "format": form,
            **self.step_judge.flags(steps),
        }
        return Score(sum(parts.values()), parts, flags)

    def reward_parts(self, correct: bool, value: float, form: float, steps: StepScores) -> dict[str, float]:
        """The reward of a solution whose answer is `correct` and earns `value`, and whose format is `form`.

        0.50 × value + 0.40 × process + 0.10 × format, and what a wrong answer's sound beginning adds; without process
        scores 0.85 × value + 0.15 × format; with chains 0.50 × value + 0.30 × integrity + 0.20 × LCCP.
        """
        if self.step_judge.calibration.active and steps.links is not None:
            return {
                "correct": 0.50 * value,
                "integrity": 0.30 * integrity(steps.links),
                "chain_lccp": 0.20 * chain_lccp(steps.links),
            }
        if steps.steps is None:
            return {"correct": 0.85 * value, "format": 0.15 * form}
        parts = {
            "correct": 0.50 * value,
            "process": 0.40 * process_score(steps.steps),
            "format": 0.10 * form,
        }
        before = sum(parts.values())
        after = before if correct else sound_beginning(before, lccp(steps.steps))
        return {**parts, "beginning": after - before}

    def _score_own(self, rollouts: list[Rollout], steps: list[StepScores]) -> list[Score]:
        """Solutions of an own question: by the process model, or by the chains where they took its place."""
        prefer_chains = self.step_judge.calibration.active
        scores = self.own.score(rollouts, [own.values(prefer_chains) for own in steps])
        for score, own in zip(scores, steps, strict=True):
            score.flags |= self.step_judge.flags(own)
        return scores

    def adjust_groups(self, groups: list[Group]) -> list[Group]:
        return self.own.adjust_groups(groups) if self.own else groups

    # ---- after the step
    def observe(self, groups: list[Group]) -> dict[str, float]:
        groups = [group for group in groups if not group.auxiliary]
        own = [group for group in groups if is_own(group.prompt)]
        given = [group for group in groups if not is_own(group.prompt)]
        for group in given:
            self._record(group)
        row = answer_share(groups) | self._step_means(given)
        if self.args.chain_scoring != "off":
            if self._compares_chains():
                self.step_judge.calibrate(given)
            row |= self.step_judge.calibration_row()
        if self.mixture:
            mixed_in = [is_mixed_in(group.prompt) for group in given]
            row["math_share"] = sum(mixed_in) / max(1, len(given))
        if self.own:
            row |= self.own.observe(own, measured(given, row.get("step_accuracy")))
        self.step += 1
        return row

    def _record(self, group: Group) -> None:
        """Tell the sampler how often the policy wins a given problem."""
        verdicts = [score.flags["correct"] for score in group.scores if "correct" in score.flags]
        sampler = self.mixture or self.sampler
        sampler.record(group.prompt.meta["index"], len(verdicts), sum(verdicts))

    def _compares_chains(self) -> bool:
        """Whether chains are held against the process scores: from the ramp on, until they take their place."""
        if self.step_judge.calibration.active:
            return False
        return self.own is None or self.own.phases.phase != "GROUNDED"

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """Shares of completions that state a final answer and whose final answer is right, format, and step means."""
        flags = [score.flags for group in groups for score in group.scores if "has_answer" in score.flags]
        if not flags:
            return {}
        row = answer_share(groups)
        row["format"] = mean_of_known(flag.get("format") for flag in flags)
        row["final_answer_accuracy"] = mean_of_known(flag.get("correct") for flag in flags if flag["has_answer"])
        return row | self._step_means(groups)

    def _step_means(self, groups: list[Group]) -> dict[str, float]:
        """Means of the step scores over the solutions that have them."""
        flags = [score.flags for group in groups for score in group.scores]
        means = {}
        for name in self.step_columns:
            mean = mean_of_known(flag.get(name) for flag in flags)
            if mean is not None:
                means[name] = mean
        return means

    # ---- state
    def state_dict(self) -> dict:
        state = super().state_dict()
        if self.mixture or self.own or self.args.chain_scoring != "off":
            state["calls"] = self.calls
            state["step"] = self.step
            state["calibration"] = self.step_judge.calibration.state_dict()
        if self.mixture:
            state["math_sampler"] = self.mixture.second.state_dict()
        if self.own:
            state["self_play"] = self.own.state_dict()
        return state

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.calls = state.get("calls", 0)
        self.step = state.get("step", 0)
        if "calibration" in state:
            self.step_judge.calibration.load_state_dict(state["calibration"])
        if self.mixture and "math_sampler" in state:
            self.mixture.second.load_state_dict(state["math_sampler"])
        if self.own and "self_play" in state:
            self.own.load_state_dict(state["self_play"])

    # ---- the warm start
    def demonstration_prompts(self) -> list[Prompt]:
        """Word problems, and where the policy is to write questions, instructions to write one."""
        prompts = word_prompts(self.args, "train", MAX_PROBLEMS["train"])
        if self.own:
            examples = prompts[: len(prompts) // 8]
            prompts += [self._writing_prompt(example) for example in examples]
        return prompts

    def _writing_prompt(self, example: Prompt) -> Prompt:
        """An instruction to write the example's question, of a difficulty near its own."""
        question = example.meta["question"]
        topic = example.meta["topic"]
        low = 0.3 if topic == "mixed" else difficulty_of(example.meta["steps"])
        target = rng_of(0, "difficulty", question).uniform(low - 0.3, max(low, 0.6) + 0.2)
        asked = self.own.instruction(topic, max(0.05, target))
        asked.meta["writes"] = question
        return asked

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        """Worked examples of word problems, deliberately imperfect (see `demonstration`), and written questions."""
        worked = []
        for prompt in prompts:
            meta = prompt.meta
            text = meta["writes"] if "writes" in meta else demonstration(meta["question"], meta["steps"])
            worked.append([{"role": "assistant", "content": text}])
        return worked

    def judged_examples(self) -> list[tuple[str, list[str], list[bool]]]:
        """What the tiny process model learns from: (question, steps with the boxed answer last, which are right)."""
        examples = []
        for question, lines, answer, verdicts in judged_solutions(MAX_PROBLEMS["train"]):
            solution = "\n".join([*lines, f"Final Answer: {answer}"])
            examples.append((question, split_steps(solution), verdicts))
        return examples


def answer_share(groups: list[Group]) -> dict[str, float]:
    """Share of completions that state a final answer; empty without any."""
    stated = mean_of_known(score.flags.get("has_answer") for group in groups for score in group.scores)
    return {} if stated is None else {"answer_share": stated}


def measured(given: list[Group], step_accuracy: float | None) -> tuple[float | None, float | None, float | None]:
    """What the phases of self-play go by: true accuracy, share of rewards of 0.5 or more, step accuracy."""
    scores = [score for group in given for score in group.scores]
    accuracy = mean_of_known(score.flags.get("correct") for score in scores)
    well_paid = mean_of_known(score.reward >= 0.5 for score in scores if score.reward is not None)
    return accuracy, well_paid, step_accuracy


def check_options(args) -> None:
    """Values outside their range and combinations that cannot work."""
    if not args.sampling_alpha >= 0 or args.math_max_level < 0:
        raise UserError("--sampling-alpha and --math-max-level must be 0 or more")
    for name in ("math_mix", "self_play", "ramp_accuracy", "ramp_reward_accuracy", "ramp_step_accuracy"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is a share, from 0 to 1")
    if args.self_play > 0.7:
        raise UserError(f"--self-play {args.self_play} leaves under 30 % given problems; use 0.7 or less")
    if args.math_mix_late > 1 or not args.question_temperature > 0:
        raise UserError("--math-mix-late is a share, from 0 to 1, and --question-temperature is over 0")
    for name in ("prm_tokens", "question_tokens", "q_group_size", "phase_window"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be 1 or more")
    if args.chain_scoring == "shadow" and args.prm == "none":
        raise UserError("--chain-scoring shadow compares the chains with a process model; give one with --prm, or use "
                        "--chain-scoring on")
    if args.math_mix_late >= 0 and not args.math_data:
        raise UserError("--math-mix-late mixes --math-data in; name a file or hub id with --math-data")
    if args.q_group_size > 1 and not args.self_play:
        raise UserError("--q-group-size groups the policy's own questions; it needs --self-play")

