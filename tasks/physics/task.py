"""Task `physics`: the equation of motion from a sampled trajectory.

A prompt shows a trajectory of a physical system (`tasks.physics.systems`), the completion answers with a differential
equation, which is read (`tasks.physics.equations`), integrated (`tasks.physics.simulation`) and compared, in processes
of their own (`sandbox.workers`). Data are drawn from seeds: nothing is downloaded.

    python -m tasks.physics sft --model Qwen/Qwen2.5-1.5B-Instruct --out runs/sft      # supervised warm start
    python train_grpo.py --preset physics --init-adapter runs/sft
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data import Group, Prompt, Rollout, Score, Task, TrainingFailed, UserError
from sandbox.workers import shared_workers
from tasks.physics.equation_text import TAIL
from tasks.physics.judging import COMPONENTS, CORRECT, FAILED, RECOVERED
from tasks.physics.prompts import brief_prompt, demonstration, full_prompt, short
from tasks.physics.systems import SYSTEMS, Instance, make_instance, system_of

Ablation = Literal["none", "no_match_dense", "no_correctness", "no_simplicity", "no_format", "no_progress"]
SHOWN = 6  # held-out prompts whose trajectories go to eval.jsonl, and from there into the plots

# Columns of metrics.csv, each with its meaning.
COLUMNS = {
    "parsed_share": "physics: share of completions that are an equation of the system",
    "simulated_share": "physics: share of completions that can also be integrated",
    "match": "physics: mean R² of the simulated against the observed trajectory, clipped to [0, 1]",
    "correctness": "physics: share of completions with R² ≥ 0.70",
}
NEW_SYSTEMS = {"match_new_systems": "physics: `match` on the systems that are held out whole"}


# ---- the task
@dataclasses.dataclass(frozen=True)
class TrajectoryOptions:
    """Which trajectories there are, and what a prompt shows of one; the supervised stage has these flags too."""

    system_ids: tuple[str, ...] = ()  # systems to train on; empty: all but --heldout-systems
    heldout_systems: tuple[str, ...] = ("driven_damped_spring", "newton_cooling")  # only in evaluation
    instances_per_system: int = 32  # training instances (parameters, initial state, noise) of each system
    noise: float = 0.01  # of the observation, as a share of each variable's standard deviation
    table_rows: int = 12  # samples of the trajectory that a prompt shows
    prompt_style: Literal["full", "brief"] = "full"  # brief: few tokens, for a tiny model


class PhysicsTask(Task):
    """Equations of motion from trajectories.

    A prompt's `gold` is the true equation; its `meta` holds `instance` (Instance) and `new` (its system is held out).
    """

    @dataclasses.dataclass(frozen=True)
    class Options(TrajectoryOptions):
        ablation: Ablation = "none"  # leave a component out; no_progress is another name of the full set
        refine_turns: int = 0  # further turns in which the model sees its R² and may improve its equation
        weight_match: float = 1.0  # weight of R²
        weight_match_dense: float = 0.5  # weight of the square root of R²
        weight_correctness: float = 0.5  # weight of R² >= 0.70
        weight_simplicity: float = 0.2  # weight of 1 - operators / 12
        weight_format: float = 0.1  # weight of an answer that can be read and simulated
        weight_progress: float = 0.5  # weight of the gain in R² from the first turn to the last (--refine-turns)
        init_adapter: str = ""  # begin from this LoRA adapter (folder or hub id), as --model with an adapter does
        sft_checkpoint: str = ""  # begin from this merged model (folder or hub id), as --model does
        score_workers: int = 0  # processes that judge completions; 0: one a core, at most 16

    columns = COLUMNS
    eval_columns = COLUMNS | NEW_SYSTEMS

    def __init__(self, args):
        super().__init__(args)
        self._check(args)
        names = list(COMPONENTS)
        if args.refine_turns:
            names.append("progress")
        left_out = "" if args.ablation == "no_progress" else args.ablation.removeprefix("no_")
        self.parts = tuple(name for name in names if name != left_out)
        self.weights = {name: getattr(args, f"weight_{name}") for name in self.parts}
        self.workers = shared_workers("tasks.physics.judging:score_job", args.score_workers)
        self.workers.start()  # their imports take a second: meanwhile the model loads
        self.parsed = 0
        self.answers = 0
        self.new = [] if args.system_ids else list(args.heldout_systems)
        known = list(args.system_ids) or [name for name in SYSTEMS if name not in self.new]
        train = [self._prompt(name, i, "train") for i in range(args.instances_per_system) for name in known]
        turn = [*known, *self.new]
        held = []
        for i in range(args.eval_size):
            number, place = divmod(i, len(turn))
            held.append(self._prompt(turn[place], number, "heldout"))
        if args.limit:
            train = train[: args.limit]
        self.set_prompts(train, held)
        if self.new:
            self.notes.append(f"{', '.join(self.new)} are held out whole: only evaluation shows them")
        warmed = args.init_adapter or args.sft_checkpoint or args.model == "tiny"
        if not warmed and not Path(args.model).exists():
            self.notes.append("warning: neither --init-adapter nor --sft-checkpoint is given: GRPO begins from a model "
                              "that has seen no answer of this form (python -m tasks.physics sft makes a warm start)")

    @staticmethod
    def _check(args) -> None:
        for name in (*args.system_ids, *args.heldout_systems):
            system_of(name)
        if not args.system_ids and not set(SYSTEMS) - set(args.heldout_systems):
            raise UserError("--heldout-systems holds every system out; leave one for training")
        if args.data or args.eval_data:
            raise UserError("task physics draws its own trajectories; leave out --data and --eval-data")
        if args.instances_per_system < 1 or args.table_rows < 2 or min(args.refine_turns, args.score_workers) < 0:
            raise UserError("--instances-per-system must be 1 or more, --table-rows 2 or more, --refine-turns and "
                            "--score-workers 0 or more")
        if not 0 <= args.noise <= 1:
            raise UserError(f"--noise {args.noise} is a share of the signal, from 0 to 1")
        for name in (*COMPONENTS, "progress"):
            if not 0 <= getattr(args, f"weight_{name}") < 1e6:
                raise UserError("the weights of the reward components (--weight-match and so on) must be 0 or more")
        if args.init_adapter and args.sft_checkpoint:
            raise UserError("--init-adapter and --sft-checkpoint are two starting points; give one of them")

    def _prompt(self, system_id: str, number: int, part: str) -> Prompt:
        instance = make_instance(system_id, number, part, self.args.noise)
        write = full_prompt if self.args.prompt_style == "full" else brief_prompt
        messages = [{"role": "user", "content": write(instance, self.args.table_rows)}]
        meta = {"instance": instance, "new": system_id in self.new}
        return Prompt(messages, instance.system.equation, meta)

    def start_from(self) -> str:
        """The model, or the adapter on its base, that --init-adapter or --sft-checkpoint names."""
        name = self.args.init_adapter or self.args.sft_checkpoint
        if not self.args.init_adapter:
            return name
        if not (Path(name) / "adapter_config.json").is_file():
            name = download_adapter(name)
        return name

    def turns(self) -> int:
        return max(self.args.max_turns, 1 + self.args.refine_turns)

    # ---- judging
    def judge_texts(self, asked: list[tuple[Prompt, str]], curve: bool = False) -> list[dict[str, Any]]:
        """`score_answer` of each, in the workers; equal questions are asked once."""
        jobs: dict[tuple, dict[str, Any]] = {}  # by instance and what of a text counts
        keys = []
        for prompt, text in asked:
            instance = prompt.meta["instance"]
            key = (instance.key, text[-TAIL:])
            keys.append(key)
            if key not in jobs:
                jobs[key] = {"instance": instance.plain(), "text": key[1], "curve": curve}
        results = dict(zip(jobs, self.workers.map(list(jobs.values())), strict=True))
        return [results[key] or FAILED for key in keys]

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        return self.score_all([rollouts])[0]

    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score]]:
        rollouts = [rollout for group in groups for rollout in group]
        said = [answers_of(rollout) or [""] for rollout in rollouts]
        first = self.judge_texts([(r.prompt, texts[0]) for r, texts in zip(rollouts, said, strict=True)])
        last = first
        if any(len(texts) > 1 for texts in said):
            last = self.judge_texts([(r.prompt, texts[-1]) for r, texts in zip(rollouts, said, strict=True)])
        scores = map(self._score, first, last)
        return [[next(scores) for _ in group] for group in groups]

    def _score(self, first: dict[str, Any], last: dict[str, Any]) -> Score:
        values = {name: last[name] for name in COMPONENTS}
        values["progress"] = last["match"] - first["match"]
        parts = {name: weight * values[name] for name, weight in self.weights.items()}
        flags = {
            "correct": last["recovered"],
            "answer": last["equation"],
            "match": last["match"],
            "parsed": last["parsed"],
            "simulated": last["format"] > 0,
            "reason": last["reason"],
        }
        return Score(sum(parts.values()), parts, flags)

    def reply(self, rollout: Rollout) -> list[dict] | None:
        """A refinement: the last equation, its R² and where it fails, until it fits or the turns are used up."""
        said = answers_of(rollout)
        if len(said) > self.args.refine_turns:
            return None
        (result,) = self.judge_texts([(rollout.prompt, said[-1])])
        if result["match"] >= RECOVERED:
            return None
        if result["worst"] is None:
            text = f"No trajectory follows from your answer ({result['reason']})."
        else:
            t, name, seen, simulated = result["worst"]
            text = (f"Your equation {result['equation']} has R^2 = {result['match']:.3f}. The residual is largest at "
                    f"t = {short(t)}: {name} is {short(seen)} there, your equation gives {short(simulated)}.")
        return [{"role": "user", "content": text + " Improve it and answer with one JSON object of the same form."}]

    # ---- metrics
    def observe(self, groups: list[Group]) -> dict[str, float]:
        flags = [score.flags for group in groups for score in group.scores]
        self.parsed += sum(bool(flag.get("parsed")) for flag in flags)
        self.answers += len(flags)
        return shares(flags)

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        flags = [score.flags for group in groups for score in group.scores]
        row = shares(flags)
        new = [score.flags["match"] for group in groups for score in group.scores if group.prompt.meta["new"]]
        if new:
            row["match_new_systems"] = float(np.mean(new))
        return row

    def eval_fields(self, index: int, group: Group) -> dict[str, Any]:
        """For the first held-out prompts the observed trajectory and the answer's, which the plots show."""
        if index >= SHOWN:
            return {}
        instance: Instance = group.prompt.meta["instance"]
        turns = group.rollouts[0].turns
        answer = turns[-1]["content"] if turns else ""
        (found,) = self.judge_texts([(group.prompt, answer)], curve=True)
        names = [q.name for q in instance.system.coordinates]
        curves = {
            "title": f"{instance.system_id}  R² {found['match']:.2f}",
            "x_label": "t (s)",
            "x": instance.times.tolist(),
            "points": dict(zip(names, instance.observed.tolist(), strict=True)),
            "lines": dict(zip(names, found["curve"], strict=True)) if found["curve"] else {},
        }
        return {"curves": curves}

    def summary(self, rows: list[dict]) -> list[str]:
        """How to read what the run printed. TrainingFailed where no rollout ever parsed."""
        if self.answers and not self.parsed:
            raise TrainingFailed(f"none of {self.answers} rollouts could be read as an equation of motion: nothing was "
                                 "learned; look at completions/, raise --max-new, or begin from a warm start "
                                 "(python -m tasks.physics sft)")
        return ["reading guide: match and correctness up is what counts; format up alone means that answers can be "
                "read and no more; simplicity up with match down means that short equations are preferred to right "
                "ones; loss down without reward up is a red flag; eval_match far under part_match: learned by heart"]

    def state_dict(self) -> dict:
        return super().state_dict() | {"parsed": self.parsed, "answers": self.answers}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.parsed, self.answers = state["parsed"], state["answers"]

    # ---- the warm start
    def demonstration_prompts(self) -> list[Prompt]:
        """Eight times each of 64 training instances of the run's systems: no held-out one."""
        systems = dict.fromkeys(prompt.meta["instance"].system_id for prompt in self.train)
        return [self._prompt(name, i, "train") for i in range(64) for name in systems] * 8

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        answers = [demonstration(prompt.meta["instance"], place) for place, prompt in enumerate(prompts)]
        return [[{"role": "assistant", "content": answer}] for answer in answers]


def answers_of(rollout: Rollout) -> list[str]:
    """What the policy said in its turns."""
    return [turn["content"] for turn in rollout.turns if turn["role"] == "assistant"]


def shares(flags: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of answers that could be read, and that could also be simulated; mean R²; share with R² >= 0.70."""
    if not flags:
        return {}
    match = np.array([flag.get("match", 0.0) for flag in flags])
    parsed = [bool(flag.get("parsed")) for flag in flags]
    simulated = [bool(flag.get("simulated")) for flag in flags]
    return {
        "parsed_share": float(np.mean(parsed)),
        "simulated_share": float(np.mean(simulated)),
        "match": float(match.mean()),
        "correctness": float((match >= CORRECT).mean()),
    }


def download_adapter(name: str) -> str:
    """A local folder of the adapter `name` on the hub."""
    if Path(name).exists():
        raise UserError(f"--init-adapter {name} holds no adapter_config.json; a merged model goes to --sft-checkpoint")
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"])
    except Exception as error:  # offline, unknown, gated: the hub raises a class for each
        raise UserError(f"--init-adapter {name} is no folder and the hub gave no such adapter "
                        f"({type(error).__name__}: {str(error).strip()[:150]})") from error
    if not (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"--init-adapter {name} is no adapter; a merged model goes to --sft-checkpoint")
    return folder
