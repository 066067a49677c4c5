"""Task `math`: problems with a known answer, then problems of the policy's own.

Given problems come from GSM8K, MATH, chat or plain records, or from the built-in generator, and are judged by their
gold and, with --prm, by a process reward model. With --self-play the policy also writes questions (tasks/math/self_play.py)
once it is reliable on given ones.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from data import (
    Group,
    Prompt,
    Rollout,
    Sampler,
    Score,
    Task,
    UserError,
    is_local,
    load_prompts,
    rng_of,
    seed_of,
    train_and_heldout,
)
from rewards import check_golds, equivalent, final_answer, partial_credit, step_format
from tasks.math.chains import Calibration, Extractor, Link, chain_lccp, integrity, link_scores
from tasks.math.process_reward import (
    ProcessRewardModel,
    lccp,
    process_score,
    sound_beginning,
    split_steps,
    step_accuracy,
)
from tasks.math.records import is_numeric, question_and_gold, same_question
from tasks.math.self_play import SelfPlay
from tasks.math.word_problems import (
    MAX_PROBLEMS,
    demonstration,
    difficulty_of,
    judged_solutions,
    topic_of,
    word_problems,
)

INSTRUCTION = ("Solve the problem step by step. Write each step on a line of its own that begins with its number, "
               "'Step 1:', 'Step 2:' and so on. End with the line 'Final Answer:' followed by the answer alone.")
QUESTION = ("Write one new math word problem. Topic: {topic}. Difficulty: {difficulty}, on a scale from 0 (everyone "
            "solves it) to 1 (nobody does). State only the problem, in one paragraph that ends with the question, "
            "with all the numbers it needs and a single number as its answer. Do not solve it.")
PROCESS = ("process", "process_last", "process_mean", "step_accuracy", "lccp")
CHAINS = ("chain_integrity", "chain_lccp", "chain_found")


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
        chain_scoring: Literal["off", "shadow", "on"] = "off"  # step chains instead of the process term; see README
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

    def __init__(self, args):
        super().__init__(args)
        check_options(args)
        self.left_out: Counter[str] = Counter()  # records filtered by choice, by reason
        self.unequal: list[str] = []  # golds that the scorer would not accept as their own answer
        # The process that compares symbols takes seconds to start: meanwhile the model loads.
        threading.Thread(target=equivalent, args=(r"\sqrt{8}", r"2\sqrt{2}"), daemon=True).start()
        train, held = self._load()
        train = self._without_heldout([*train, *self._second_source()], held)
        if not train and args.data != args.eval_data:
            raise UserError("no training prompts are left; check --data, --math-max-level and --limit"
                            + (f" ({self._left_out()})" if self.left_out else ""))
        self.deal(train, held, args.sampling_alpha)
        if self.left_out:
            self.notes.append(f"filtered: {self._left_out()} (--math-max-level {args.math_max_level})")
        if self.unequal:
            shown = ", ".join(repr(gold[:60]) for gold in self.unequal[:5])
            self.notes.append(f"{len(self.unequal)} golds do not equal themselves and were dropped: {shown}")
        self.policy = self.prm = None
        self.calls = self.step = 0  # of `prompts`, and steps that are over
        self.extractor = Extractor()
        self.calibration = Calibration(active=args.chain_scoring == "on")
        self.own = SelfPlay(args, self.train, self._prompt) if args.self_play else None
        self.judged: dict[int, tuple] = {}  # id of a rollout of the step -> its steps' and its chain's scores
        self._name_columns()

    def _name_columns(self) -> None:
        """Parts and columns of what is switched on."""
        has_prm, has_chains = self.args.prm != "none", self.args.chain_scoring != "off"
        self.parts = ("correct", "format", *(("process", "beginning") if has_prm else ()),
                      *(("integrity", "chain_lccp") if has_chains else ()),
                      *(("question", "solution") if self.own else ()))
        steps = PROCESS if has_prm else PROCESS[3:] if self.own else ()
        chains = CHAINS if has_chains else ()
        self.columns = ("answer_share", *steps, *chains, *(("math_share",) if self.math_sampler else ()),
                        *(("chain_pearson", "chain_extraction", "chain_active") if has_chains else ()),
                        *(SelfPlay.COLUMNS if self.own else ()))
        self.eval_columns = ("answer_share", "format", "final_answer_accuracy", *steps, *chains)

    def prepare_model(self, policy) -> None:
        args, self.policy = self.args, policy
        dtype = policy.hf.dtype
        if args.prm != "none":
            path = args.prm
            if path == "tiny":
                from tasks.math.process_reward import tiny_process_model

                path = str(tiny_process_model(self, args, print))
            self.prm = ProcessRewardModel(path, policy.device, dtype, args.prm_4bit, args.prm_separator,
                                          args.prm_tokens)
        if args.extractor_model:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_grpo" / "chains"
            self.extractor = Extractor(args.extractor_model, policy.device, dtype, home if args.cache else None)

    # ---- data
    def _load(self) -> tuple[list[Prompt], list[Prompt]]:
        """Training and held-out prompts, before the overlap is taken out."""
        args = self.args
        only_evaluated = is_local(args.data) and args.data == args.eval_data
        if args.data and not only_evaluated:
            train, held, notes = train_and_heldout(args, self._convert)
            self.notes += notes
        else:
            train = [] if only_evaluated else self._word_prompts("train", args.limit or MAX_PROBLEMS["train"])
            held = self._heldout_file() if args.eval_data else self._word_prompts("heldout", args.eval_size)
        return [p for p in train if p is not None], [p for p in held if p is not None]

    def _second_source(self) -> list[Prompt]:
        """The prompts of --math-data."""
        if not self.args.math_data:
            return []
        prompts, notes = load_prompts(self.args.math_data, self._convert, self.args.max_bad_records)
        self.notes += notes
        return [dataclasses.replace(p, meta={**p.meta, "source": "math"}) for p in prompts if p is not None]

    def deal(self, train: list[Prompt], held: list[Prompt], alpha: float = 0.0) -> None:
        """With --math-data two samplers: `sampler` over the first `first` prompts, `math_sampler` over the others."""
        train = sorted(train, key=lambda prompt: prompt.meta.get("source") == "math")
        super().deal(train, held, alpha)
        self.math_sampler: Sampler | None = None
        self.first = sum(prompt.meta.get("source") != "math" for prompt in train)
        if self.first < len(train):
            seed = seed_of(self.args.seed, "math data")
            self.sampler = Sampler(self.first, self.args.seed, alpha) if self.first else None
            self.math_sampler = Sampler(len(train) - self.first, seed, alpha)

    # ---- which prompts
    def prompts(self, n: int) -> list[Prompt]:
        """The next `n`: own questions in the phase's share, spread at random, and given problems."""
        if not (self.own or self.math_sampler):
            return super().prompts(n)
        self.calls += 1
        written = self.own.write(self.policy, n, self.calls) if self.own else []
        places = rng_of(self.args.seed, "slots", self.calls).permutation(n)
        chosen = [*written, *self._given(n - len(written))]
        return [prompt for _, prompt in sorted(zip(places.tolist(), chosen, strict=True), key=lambda pair: pair[0])]

    def _given(self, n: int) -> list[Prompt]:
        if self.math_sampler is None:
            return super().prompts(n)
        luck = rng_of(self.args.seed, "mix", self.calls).random()
        second = n if self.sampler is None else int(self.math_share() * n + luck)  # right in the mean
        drawn = self.sampler.draw(n - second) if second < n else []
        return [self.train[i] for i in drawn + [self.first + i for i in self.math_sampler.draw(second)]]

    def math_share(self) -> float:
        """Share of given problems that the next step takes from --math-data."""
        args = self.args
        risen = min(1.0, max(0.0, (self.step + 1 - args.math_ramp_start) / 10)) if args.math_mix_late >= 0 else 0.0
        return args.math_mix + risen * (args.math_mix_late - args.math_mix)

    # ---- records
    def _heldout_file(self) -> list[Prompt | None]:
        """--eval-size prompts of --eval-data, the same ones in every run."""
        held, notes = load_prompts(self.args.eval_data, self._convert, self.args.max_bad_records, split="test")
        self.notes += notes
        picked = rng_of(0, "heldout").permutation(len(held))[: self.args.eval_size]
        return [held[i] for i in sorted(picked)]

    def _convert(self, record: dict) -> Prompt | None:
        """The prompt of a record, None where it is left out by choice. Raises ValueError(reason) for a bad one."""
        question, gold = question_and_gold(record)
        if reason := self._filter(record, gold):
            self.left_out[reason] += 1
            return None
        if check_golds([gold]):
            self.unequal.append(gold)
            raise ValueError("gold does not equal itself")
        topic = next((record[key] for key in ("topic", "type", "subject") if isinstance(record.get(key), str)), None)
        return self._prompt(question, gold, **({"topic": topic.strip().lower()} if topic else {}))

    def _filter(self, record: dict, gold: str) -> str | None:
        """Why a MATH record (one with a solution or a level) is left out; None where it stays."""
        limit = self.args.math_max_level
        if limit == 0 or not ("level" in record or "solution" in record):
            return None
        level = record.get("level")
        digits = re.search(r"\d+", str(level))
        if level is not None and (digits is None or int(digits[0]) > limit):
            return f"level over {limit}" if digits else "level unknown"
        return None if is_numeric(gold) else "gold not numeric"

    def _left_out(self) -> str:
        return ", ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())

    def _prompt(self, question: str, gold: str | None, **meta) -> Prompt:
        """The one place where a problem becomes messages."""
        messages = [{"role": "user", "content": question}]
        if self.args.math_instruction:
            messages.insert(0, {"role": "system", "content": self.args.math_instruction})
        return Prompt(messages, gold, {"question": question, **meta})

    def _word_prompts(self, part: str, count: int) -> list[Prompt]:
        problems = word_problems(part, min(count, MAX_PROBLEMS[part]))
        return [self._prompt(question, str(steps[-1][3]), steps=steps, topic=topic_of(steps))
                for question, steps in problems]

    def _without_heldout(self, train: list[Prompt], held: list[Prompt]) -> list[Prompt]:
        seen = {same_question(prompt) for prompt in held}
        kept = [prompt for prompt in train if same_question(prompt) not in seen]
        if kept and len(kept) < len(train):
            self.notes.append(f"{len(train) - len(kept)} training questions are also held-out ones and were removed")
        return kept

    # ---- judging
    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score] | Exception]:
        """Judge the groups of a step; the process model reads the steps of all of them in common batches."""
        self.judged = self._judge_steps([row for group in groups for row in group])
        try:
            return super().score_all(groups)
        finally:
            self.judged = {}

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        judged = self.judged or self._judge_steps(rollouts)
        if rollouts[0].prompt.meta.get("self_play"):
            return self._score_own(rollouts, judged)
        verdicts: dict[str | None, bool] = {None: False}  # answers repeat within a group
        return [self._score_one(rollout, verdicts, *judged.get(id(rollout), (None, None))) for rollout in rollouts]

    def _judge_steps(self, rows: list[Rollout]) -> dict[int, tuple[list[float] | None, list[Link] | None]]:
        """For each rollout its steps' probabilities by the process model and its chain, None where they are not used.

        A rollout on which the process model fails has no probabilities; where it fails on all of them, so does the run.
        """
        if self.prm is None and not self.own and self.args.chain_scoring == "off":
            return {}
        found: dict[tuple[str, str], tuple] = {}  # completions repeat within a group
        for row in rows:
            found.setdefault((row.prompt.meta["question"], row.text), (None, None))
        steps = self._process(list(found)) if self.prm is not None else [None] * len(found)
        needed = self.calibration.active or self.prm is None  # in the shadow, `observe` reads every fourth
        for key, values in zip(found, steps, strict=True):
            found[key] = (values, self.extractor(key[1]) if needed or values is None and self.own else None)
        return {id(row): found[row.prompt.meta["question"], row.text] for row in rows}

    def _process(self, problems: list[tuple[str, str]]) -> list[list[float] | None]:
        split = [(question, split_steps(text)) for question, text in problems]
        try:
            return self.prm.score(split)
        except Exception as error:  # one that the model cannot read must not cost the others theirs
            alone, failed = [], 0
            for problem in split:
                try:
                    alone += self.prm.score([problem])
                except Exception:
                    alone.append(None)
                    failed += 1
            if failed == len(split):
                raise error
            return alone

    def _score_one(self, rollout: Rollout, verdicts: dict[str | None, bool], steps: list[float] | None,
                   links: list[Link] | None) -> Score:
        """The score of a solution of a given problem; see `_parts` for the reward."""
        try:
            text, gold = rollout.text, rollout.prompt.gold
            answer = final_answer(text, strict=True)
            if answer not in verdicts:
                verdicts[answer] = bool(equivalent(answer, gold))
            correct, form = verdicts[answer], step_format(text)
            value = 1.0 if correct else 0.0
            if self.args.partial_credit and not correct and answer is not None:
                value = partial_credit(answer, gold)
            parts = self._parts(correct, value, form, steps, links)
        except Exception as error:  # whatever a completion breaks is that completion's result
            flags = {"correct": False, "answer": None, "has_answer": False, "error": f"{type(error).__name__}: {error}"}
            return Score(0.0, {"correct": 0.0, "format": 0.0}, flags)
        flags = {"correct": correct, "gt_match": correct, "answer": answer, "has_answer": answer is not None,
                 "format": form} | self._step_flags(steps, links)
        return Score(sum(parts.values()), parts, flags)

    def _parts(self, correct: bool, value: float, form: float, steps: list[float] | None, links: list[Link] | None
               ) -> dict[str, float]:
        """0.50 × correct + 0.40 × process + 0.10 × format, and what a wrong answer's sound beginning adds; without
        process scores 0.85 × correct + 0.15 × format; with chains 0.50 × correct + 0.30 × integrity + 0.20 × LCCP."""
        if self.calibration.active and links is not None:
            return {"correct": 0.50 * value, "integrity": 0.30 * integrity(links),
                    "chain_lccp": 0.20 * chain_lccp(links)}
        if steps is None:
            return {"correct": 0.85 * value, "format": 0.15 * form}
        parts = {"correct": 0.50 * value, "process": 0.40 * process_score(steps), "format": 0.10 * form}
        before = sum(parts.values())
        return parts | {"beginning": 0.0 if correct else sound_beginning(before, lccp(steps)) - before}

    def _step_flags(self, steps: list[float] | None, links: list[Link] | None) -> dict[str, float]:
        flags: dict[str, float] = {}
        if links is not None and self.args.chain_scoring != "off":
            flags = {"chain_integrity": integrity(links), "chain_lccp": chain_lccp(links), "chain_found": bool(links)}
        if steps:
            flags |= {"process": process_score(steps), "process_last": steps[-1],
                      "process_mean": sum(steps) / len(steps)}
        steps = steps or link_scores(links or [])
        return flags | ({"step_accuracy": step_accuracy(steps), "lccp": lccp(steps)} if steps else {})

    def _score_own(self, rollouts: list[Rollout], judged: dict[int, tuple]) -> list[Score]:
        """Solutions of an own question: by the process model, or by the chains where they took its place."""
        def values(row: Rollout) -> Sequence[float]:
            steps, links = judged[id(row)]
            return link_scores(links or []) or [0.5] if steps is None or self.calibration.active else steps

        scores = self.own.score(rollouts, [values(row) for row in rollouts])
        for row, score in zip(rollouts, scores, strict=True):
            score.flags |= self._step_flags(*judged[id(row)])
        return scores

    def regroup(self, groups: list[Group]) -> list[Group]:
        return self.own.regroup(groups) if self.own else groups

    # ---- after the step
    def observe(self, groups: list[Group]) -> dict[str, float]:
        groups = [group for group in groups if not group.auxiliary]
        given = [group for group in groups if not group.prompt.meta.get("self_play")]
        for group in given:
            verdicts = [score.flags["correct"] for score in group.scores if "correct" in score.flags]
            index = group.prompt.meta["index"]
            sampler = self.sampler if index < self.first else self.math_sampler
            sampler.record(index if index < self.first else index - self.first, len(verdicts), sum(verdicts))
        row = self._answer_share(groups) | self._step_means(given)
        if self.args.chain_scoring != "off":
            row |= self._calibrate(given)
        if self.math_sampler:
            row["math_share"] = sum(group.prompt.meta.get("source") == "math" for group in given) / max(1, len(given))
        if self.own:
            flags = [score.flags for group in given for score in group.scores if "correct" in score.flags]
            rewards = [score.reward for group in given for score in group.scores if score.reward is not None]
            measured = (_mean([flag["correct"] for flag in flags]), _mean([reward >= 0.5 for reward in rewards]),
                        row.get("step_accuracy"))
            row |= self.own.observe([group for group in groups if group.prompt.meta.get("self_play")], measured)
        self.step += 1
        return row

    def _calibrate(self, given: list[Group]) -> dict[str, float]:
        """Chains beside the process model's scores, on every fourth solution from the ramp on; see `Calibration`."""
        if not self.calibration.active and (self.own is None or self.own.phases.phase != "GROUNDED"):
            for row, score in ((r, s) for g in given for r, s in zip(g.rollouts, g.scores, strict=True)):
                if "process" in score.flags and self.calibration.due():
                    self.calibration.add(self.extractor(row.text), score.flags["process"])
        return {"chain_pearson": self.calibration.pearson(), "chain_extraction": self.calibration.extraction(),
                "chain_active": int(self.calibration.active)}

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """Shares of completions that state a final answer and whose final answer is right, format, and step means."""
        flags = [score.flags for group in groups for score in group.scores if "has_answer" in score.flags]
        if not flags:
            return {}
        stated = [flag["correct"] for flag in flags if flag["has_answer"] and "correct" in flag]
        extra = {"format": _mean([flag["format"] for flag in flags if "format" in flag]),
                 "final_answer_accuracy": _mean(stated)}
        return self._answer_share(groups) | extra | self._step_means(groups)

    @staticmethod
    def _answer_share(groups: list[Group]) -> dict[str, float]:
        """Share of completions that state a final answer."""
        flags = [score.flags for group in groups for score in group.scores if "has_answer" in score.flags]
        return {"answer_share": float(np.mean([flag["has_answer"] for flag in flags]))} if flags else {}

    def _step_means(self, groups: list[Group]) -> dict[str, float]:
        """Means of the step scores over the solutions that have them."""
        flags = [score.flags for group in groups for score in group.scores]
        names = [name for name in (*PROCESS, *CHAINS) if name in self.columns]
        values = {name: [flag[name] for flag in flags if name in flag] for name in names}
        return {name: float(np.mean(some)) for name, some in values.items() if some}

    # ---- state
    def state_dict(self) -> dict:
        state = super().state_dict()
        if self.math_sampler or self.own or self.args.chain_scoring != "off":
            state |= {"calls": self.calls, "step": self.step, "calibration": self.calibration.state_dict()}
        if self.math_sampler:
            state["math_sampler"] = self.math_sampler.state_dict()
        return state | ({"self_play": self.own.state_dict()} if self.own else {})

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.calls, self.step = state.get("calls", 0), state.get("step", 0)
        if "calibration" in state:
            self.calibration.load_state_dict(state["calibration"])
        if self.math_sampler and "math_sampler" in state:
            self.math_sampler.load_state_dict(state["math_sampler"])
        if self.own and "self_play" in state:
            self.own.load_state_dict(state["self_play"])

    # ---- the warm start
    def demonstration_prompts(self) -> list[Prompt]:
        """Word problems, and where the policy is to write questions, instructions to write one."""
        solving = self._word_prompts("train", MAX_PROBLEMS["train"])
        return solving + (self._writing_prompts(solving[:len(solving) // 8]) if self.own else [])

    def _writing_prompts(self, examples: list[Prompt]) -> list[Prompt]:
        prompts = []
        for example in examples:
            low = difficulty_of(example.meta["steps"]) if example.meta["topic"] != "mixed" else 0.3
            target = rng_of(0, "difficulty", example.meta["question"]).uniform(low - 0.3, max(low, 0.6) + 0.2)
            asked = self.own.instruction(example.meta["topic"], max(0.05, target))
            asked.meta["writes"] = example.meta["question"]
            prompts.append(asked)
        return prompts

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        """Worked examples of word problems, deliberately imperfect (see `demonstration`), and written questions."""
        texts = [p.meta["writes"] if "writes" in p.meta else demonstration(p.meta["question"], p.meta["steps"])
                 for p in prompts]
        return [[{"role": "assistant", "content": text}] for text in texts]

    def judged_examples(self) -> list[tuple[str, list[str], list[bool]]]:
        """What the tiny process model learns from: (question, steps with the boxed answer last, which are right)."""
        return [(question, split_steps("\n".join([*lines, f"Final Answer: {answer}"])), verdicts)
                for question, lines, answer, verdicts in judged_solutions(MAX_PROBLEMS["train"])]


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


def _mean(values: list) -> float | None:
    return float(np.mean(values)) if values else None
