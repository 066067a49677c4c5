"""Task `nla`: a policy (the verbalizer) explains an activation in words, from which a reconstructor predicts it.

    python -m tasks.nla prepare --model Qwen/Qwen3-8B --layer 24 --text corpus.txt --out data/nla
    python -m tasks.nla reconstruct --data data/nla --out runs/nla-reconstructor --load-4bit
    python -m tasks.nla sft --model Qwen/Qwen3-8B --data data/nla --out runs/nla-verbalizer --load-4bit
    python train_grpo.py --preset nla

The prompt holds a marker where the vector is added to the residual stream (tasks/nla/injection.py). The reward is
−log of the error with which the reconstructor (tasks/nla/reconstructor.py) predicts the vector from the text between
<explanation> and </explanation>. What an activation says is bounded by what those two find in it: every evaluation
therefore shows, beside the result, what it is with the content words replaced and against another document's vector.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data import Group, Prompt, Rollout, Score, Task, TrainingFailed, UserError, rng_of
from harness.files import write_atomic
from models.loading import pick_dtype
from tasks.nla import judges, reconstructor
from tasks.nla.activations import HELD_SHARE, ActivationRow, load_rows, read_meta, split_by_document, tokenizer_of
from tasks.nla.controls import cjk_share, clipped, others, replace_words
from tasks.nla.documents import randomise_slots
from tasks.nla.injection import Injection
from tasks.nla.judges import Judge, JudgedRow, JudgeOptions
from tasks.nla.reconstructor import Critic, Reconstructor, baselines, fve, mse

NO_EXPLANATION = -2.0  # reward where there is none, an empty one, or one too long for the template
FLOOR = 1e-8  # of the error, before its logarithm
SHOWN = 3  # explanations on the console after an evaluation
TABLE = "explanations.jsonl"
TAG = re.compile(r"<(/?)explanation>")

# Columns of metrics.csv, each with its meaning; the first ones are over the explanations that could be read.
READ_COLUMNS = {
    "fve": "nla: fraction of the activations' variance that the reconstructor predicts from the explanations",
    "fve_renormalised": "nla: the older variant, against the mean brought to the target norm",
    "mse": "nla: mean normalised error of the reconstructor's prediction",
    "extraction_rate": "nla: share of completions with an explanation that could be scored",
    "cjk_share": "nla: mean share of CJK characters in the explanations",
}
CRITIC_COLUMNS = {
    "critic_loss": "nla, --train-critic: the reconstructor's error on the step's explanations before its step",
    "critic_grad_norm": "nla, --train-critic: its gradient's norm before clipping",
    "critic_skipped": "nla, --train-critic: 1 where that gradient was not finite",
}
CONTROL_COLUMNS = {
    "fve_words_replaced": "nla, control: FVE with every content word of the explanations replaced",
    "fve_other_document": "nla, control: FVE of the explanations against the vector of another document",
    "fve_gold": "nla: FVE of the data's own texts",
    "fve_gold_words_replaced": "nla, control: FVE of the data's own texts with their content words replaced",
}
JUDGE_COLUMN = "nla, --judge-evals: what the judge says of the held-out explanations"
CONTROLS_SAID = {  # on the console, after an evaluation
    "fve": "held-out FVE",
    "fve_words_replaced": "with every content word replaced",
    "fve_other_document": "against another document's vector",
    "fve_gold": "of the given texts",
    "fve_gold_words_replaced": "of these with content words replaced",
}


def extract_explanation(text: str) -> str | None:
    """The text of the first closed <explanation>…</explanation>, stripped; None where there is none or it is empty."""
    opened = None
    for tag in TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            return text[opened : tag.start()].strip() or None
    return None


def reward_of(error: float | None) -> float:
    """−log(max(error, 1e-8)) of a normalised error; −2 where there is no explanation (None)."""
    return NO_EXPLANATION if error is None else -math.log(max(error, FLOOR))


class Files(NamedTuple):
    """What a run begins with: a parquet file or its folder, the reconstructor's folder, and the warm start (or "")."""

    data: str | Path
    reconstructor: str | Path
    verbalizer: str


def tiny_files(args) -> Files:
    """Without --data: the shipped generator's activations, a tiny model and its warm starts. Where no earlier run left
    them in the cache, they are made: three models are trained for about a minute and a half."""
    from tasks.nla.warm import tiny_folder

    tiny = tiny_folder(args.cache, print)
    start = str(tiny) if args.model == "tiny" else ""
    return Files(tiny / "activations.parquet", args.reconstructor or tiny / "reconstructor", args.verbalizer or start)


class NlaTask(Task):
    """Prompts that hold an activation each; the reward is how well the explanation lets it be reconstructed."""

    @dataclasses.dataclass(frozen=True)
    class Options(JudgeOptions):
        reconstructor: str = ""  # folder of the reconstructor (python -m tasks.nla reconstruct)
        verbalizer: str = ""  # begin from this warm start, adapter or model (python -m tasks.nla sft)
        inject_layer: int = 1  # decoder layer after which the vector is added; 0 is the first
        max_rows: int = 0  # read only the first so many activations of --data; 0: all
        train_critic: bool = False  # train the reconstructor too, a step a step, on the step's explanations
        critic_lr: float = 1e-5  # its learning rate
        critic_tokens: int = 8192  # most tokens in one of its micro-batches
        critic_max_norm: float = 1.0  # clipping of its gradient; 0: off

    parts = ("reconstruction",)
    template_kwargs = {"enable_thinking": False}
    columns = READ_COLUMNS | CRITIC_COLUMNS
    eval_columns = READ_COLUMNS | CONTROL_COLUMNS

    def __init__(self, args):
        super().__init__(args)
        self.check(args)
        if not args.train_critic:
            self.columns = READ_COLUMNS
        self.notes += judges.check(args)
        judge_columns = judges.columns(args.judge_evals)
        self.eval_columns = NlaTask.eval_columns | dict.fromkeys(judge_columns, JUDGE_COLUMN)
        self.judged_by = Judge(args) if args.judge_evals else None
        self.generated = not args.data
        self.policy = self.critic = self.model = None
        self.controls: dict[str, float] = {}
        self.judged: list[str] = []  # what the judge could not judge, for the report

        files = tiny_files(args) if self.generated else Files(args.data, args.reconstructor, args.verbalizer)
        self.reconstructor_folder = files.reconstructor
        self.start = files.verbalizer
        self.meta = read_meta(files.data, tokenizer_of(self.start or args.model))
        train, held = self.load_activations(files.data)
        if args.limit:
            train = train[: args.limit]
        self.set_prompts([self.prompt(row) for row in train], [self.prompt(row, held=True) for row in held])
        self.baselines = {}
        for side, prompts in (("train", self.train), ("held", self.heldout_prompts)):
            if prompts:
                vectors = np.stack([prompt.inject for prompt in prompts])
                self.baselines[side] = baselines(torch.tensor(vectors), self.meta.scale)
        if not self.start and args.data:
            self.notes.append("warning: --verbalizer names no warm start: GRPO begins from a model that never saw an "
                              "activation, which is noise (python -m tasks.nla sft makes one)")

    def load_activations(self, source: str | Path) -> tuple[list[ActivationRow], list[ActivationRow]]:
        """(training rows, held-out rows): those of --eval-data where it is given, else of documents that are split off;
        of either at most --eval-size, in the file's order."""
        args = self.args
        rows, notes = load_rows(source, args.max_rows, self.meta, args.max_bad_records)
        train, held = split_by_document(rows, HELD_SHARE, 0)
        self.notes += notes
        if args.eval_data:
            held, notes = load_rows(args.eval_data, 0, self.meta, args.max_bad_records)
            self.notes += notes
            known = {row.doc_id for row in rows}
            held = [row for row in held if row.doc_id not in known]
            train = rows
        order = rng_of(0, "heldout").permutation(len(held))[: args.eval_size]
        return train, [held[i] for i in sorted(order)]

    @staticmethod
    def check(args) -> None:
        if args.data and not args.reconstructor:
            raise UserError("--reconstructor names no folder; make one with python -m tasks.nla reconstruct --data "
                            f"{args.data} --out FOLDER")
        if args.data and args.model == "tiny":
            raise UserError("--model tiny explains the activations of its own generator; leave out --data, or name the "
                            "model that --data comes from")
        if args.inject_layer < 0 or args.max_rows < 0 or args.critic_tokens < 1 or args.critic_max_norm < 0:
            raise UserError("--inject-layer, --max-rows and --critic-max-norm must be 0 or more, --critic-tokens 1 or "
                            "more")
        if not 0 < args.critic_lr < 1:
            raise UserError(f"--critic-lr {args.critic_lr} must be over 0 and under 1")

    def prompt(self, row: ActivationRow, held: bool = False) -> Prompt:
        meta = {"doc_id": row.doc_id, "source": row.source, "quirk": row.quirk, "held": held}
        return Prompt(row.prompt, row.text, meta, row.vector)

    def start_from(self) -> str:
        return self.start

    # ---- the models
    def prepare_model(self, policy) -> None:
        """Hook the policy and its reference; load the reconstructor beside them; assert what is trained."""
        self.policy = policy
        meta = self.meta
        width = policy.hf.config.get_text_config().hidden_size
        if width != meta.d:
            raise UserError(f"the activations have {meta.d} numbers and --model {self.args.model} has {width}; give "
                            f"the model that they come from ({meta.model}), or make them with this one")
        self.injection = Injection(self.args.inject_layer, meta.marker_id, meta.left_id, meta.right_id, policy.encode)
        self.injection.install(policy.hf)
        if isinstance(policy.reference, torch.nn.Module):
            self.injection.install(policy.reference)
        self.load_reconstructor()
        self.assert_what_is_trained()

    def assert_what_is_trained(self) -> None:
        """The policy's own weights and the reconstructor's, apart, and nothing of the anchor."""
        policy = self.policy
        if self.args.adapter == "lora":
            for name, p in policy.model.named_parameters():
                own = "lora_" in name and ".default." in name
                assert p.requires_grad == own, "the policy trains its adapter `default`, all of it and nothing else"
        if isinstance(policy.reference, torch.nn.Module):
            assert not any(p.requires_grad for p in policy.reference.parameters()), "the anchor is frozen"
        critic = self.model.trainable()
        shared = set(critic.values()) & set(policy.model.parameters())
        assert "head.weight" in critic and not shared

    def on_forward(self, prompts: list[Prompt]) -> None:
        self.injection.feed(prompts)

    def load_reconstructor(self) -> Reconstructor:
        if self.model is not None:
            return self.model
        args = self.args
        meta = self.meta
        device = self.policy.device if self.policy else torch.device("cpu")
        folder = self.reconstructor_folder
        self.model = reconstructor.load(folder, device, pick_dtype("auto", device), args.load_4bit)
        spec = self.model.spec
        same_prompt = (spec.layer, spec.template) == (meta.layer, meta.template)
        if not same_prompt or not math.isclose(spec.scale, meta.scale):
            raise UserError(f"{folder} was made for layer {spec.layer}, scale {spec.scale:g} and another template than "
                            f"the data's (layer {meta.layer}, scale {meta.scale:g}); make one for these data")
        if args.train_critic:
            self.critic = Critic(self.model, args.critic_lr, args.critic_tokens, args.critic_max_norm)
        return self.model

    # ---- judging
    def errors(self, texts: Sequence[str | None], gold: Sequence[np.ndarray]) -> list[float | None]:
        """The normalised error of each text's prediction; None where there is no text, or too long a one."""
        model = self.load_reconstructor()
        found: list[float | None] = [None] * len(texts)
        known, ids = [], []
        for place, text in enumerate(texts):
            if text is None:
                continue
            try:
                ids.append(model.encode(text))
            except ValueError:
                continue
            known.append(place)
        if not known:
            return found
        vectors = torch.tensor(np.stack([gold[place] for place in known]))
        errors = mse(model.score(ids), vectors, self.meta.scale).tolist()
        for place, error in zip(known, errors, strict=True):
            found[place] = error
        return found

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        return self.score_all([rollouts])[0]

    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score]]:
        rollouts = [rollout for group in groups for rollout in group]
        texts = [extract_explanation(rollout.text) for rollout in rollouts]
        errors = self.errors(texts, [rollout.prompt.inject for rollout in rollouts])
        scores = map(self.judge, rollouts, texts, errors)
        return [[next(scores) for _ in group] for group in groups]

    def judge(self, rollout: Rollout, text: str | None, error: float | None) -> Score:
        if error is not None and not math.isfinite(error):
            return Score.unscorable("the reconstructor's prediction is not finite")
        flags: dict[str, Any] = {"answer": text, "extracted": error is not None, "mse": error, "fve": None}
        if error is not None:
            side = "held" if rollout.prompt.meta["held"] else "train"
            raw, older = self.baselines[side]
            flags["fve"] = fve(error, raw)
            flags["fve_renormalised"] = fve(error, older)
            flags["cjk"] = cjk_share(text)
        reward = reward_of(error)
        return Score(reward, {"reconstruction": reward}, flags)

    # ---- after a step
    @staticmethod
    def shares(groups: list[Group]) -> dict[str, float]:
        """Means over the explanations that could be read, and how many could."""
        flags = [score.flags for group in groups for score in group.scores if score.reward is not None]
        known = [flag for flag in flags if flag["extracted"]]
        row: dict[str, float] = {}
        if known:
            for name in ("fve", "fve_renormalised", "mse"):
                row[name] = float(np.mean([flag[name] for flag in known]))
            row["cjk_share"] = float(np.mean([flag["cjk"] for flag in known]))
        if flags:
            row["extraction_rate"] = len(known) / len(flags)
        return row

    def observe(self, groups: list[Group]) -> dict[str, float]:
        row = self.shares(groups)
        texts, vectors = [], []
        for group in groups:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                if score.reward is not None and score.flags["extracted"]:
                    texts.append(score.flags["answer"])
                    vectors.append(rollout.prompt.inject)
        if self.critic and texts:  # the texts alone: no gradient of this reaches the policy
            ids = [self.model.encode(text) for text in texts]
            found = self.critic.step(ids, torch.tensor(np.stack(vectors)))
            row |= {f"critic_{name}": value for name, value in found.items()}
        return row

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """What the held-out explanations reconstruct, and the controls: the same with the content words replaced, and
        against the vector of another document; where the data have texts, these as explanations too."""
        row = self.shares(groups)
        found = []
        for group in groups:
            flags = group.scores[0].flags
            if flags.get("extracted"):
                found.append((flags["answer"], group.prompt))
        for name, (texts, vectors) in self.control_texts(found, groups).items():
            known = [error for error in self.errors(texts, vectors) if error is not None] if texts else []
            if known:
                row[name] = fve(float(np.mean(known)), self.baselines["held"][0])
        self.controls = row
        self.judged = []
        asked = [JudgedRow(text, prompt.meta["source"], prompt.meta["quirk"]) for text, prompt in found]
        for name in self.args.judge_evals:
            row |= judges.evaluate(name, self.judged_by, asked, self.judged.append)
        return row

    def control_texts(self, found: list[tuple[str, Prompt]], groups: list[Group]) -> dict[str, tuple[list, list]]:
        """Column -> texts and the vectors that they are held against."""
        texts = [text for text, _ in found]
        vectors = [prompt.inject for _, prompt in found]
        other = [prompt.inject for _, prompt in others(found)]
        given = [group.prompt for group in groups if group.prompt.gold]
        gold = [prompt.gold for prompt in given]
        gold_vectors = [prompt.inject for prompt in given]
        return {
            "fve_words_replaced": (self.replaced(texts), vectors),
            "fve_other_document": (texts, other),
            "fve_gold": (gold, gold_vectors),
            "fve_gold_words_replaced": (self.replaced(gold), gold_vectors),
        }

    def replaced(self, texts: list[str]) -> list[str]:
        return [randomise_slots(text, 0) for text in texts] if self.generated else replace_words(texts, 0)

    def eval_fields(self, index: int, group: Group) -> dict[str, Any]:
        flags = group.scores[0].flags
        return {"mse": flags.get("mse"), "fve": flags.get("fve")}

    def report(self, step: int, records: list[dict], folder: Path) -> list[str]:
        """Add the held-out explanations to the run's table, one JSON line each; say the controls and three of them.

        Lines of a step that is made again (after a resume) are replaced.
        """
        rows = [table_row(step, record) for record in records]
        write_table(folder / TABLE, step, rows)
        said = [f"{text} {self.controls[key]:.3f}" for key, text in CONTROLS_SAID.items() if key in self.controls]
        lines = ["  " + ", ".join(said)]
        for row in rows[:SHOWN]:
            number = "none" if row["fve"] is None else f"{row['fve']:.2f}"
            given = f"  | given: {clipped(row['gold'])}" if row["gold"] else ""
            lines.append(f"    {row['index']}: FVE {number}  {clipped(row['text'])}{given}")
        return lines + [f"  {note}" for note in self.judged]

    # ---- state
    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        if self.policy and self.policy.reference == "adapter" and same_adapters(self.policy.model):
            print("WARNING: the adapter that was resumed is identical to its reference: the run that it comes from "
                  "taught it nothing, or the wrong checkpoint was loaded", file=sys.stderr, flush=True)

    def save(self, folder: Path) -> None:
        """The critic with its optimizer, before the policy and in the same checkpoint, which is whole or not at all."""
        if self.critic:
            self.critic.save(folder / "critic")

    def load(self, folder: Path) -> None:
        if self.critic:
            self.critic.load(folder / "critic")

    def summary(self, rows: list[dict]) -> list[str]:
        if len(rows) >= 20 and all(row.get("extraction_rate") == 0 for row in rows):
            raise TrainingFailed("no completion held an <explanation>…</explanation>: nothing was learned; begin from "
                                 "a warm start (python -m tasks.nla sft), or raise --max-new")
        return ["reading guide: FVE says how well the text lets the vector be rebuilt, not that what it says is true; "
                "where it stays as high with every content word replaced, the words carry the kind of place, not its "
                "content; against another document's vector it should be under 0"]


def table_row(step: int, record: dict) -> dict[str, Any]:
    """A held-out prompt's record of eval.jsonl as a row of the run's table."""
    return {
        "step": step,
        "index": record["index"],
        "reward": record["reward"],
        "mse": record["mse"],
        "fve": record["fve"],
        "text": record["answer"] or record["text"],
        "gold": record["gold"],
    }


def write_table(path: Path, step: int, rows: list[dict]) -> None:
    """Put the rows of a step behind those of earlier steps, whole or not at all."""
    old = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = [line for line in old if step_of(line) < step]
    lines += map(json.dumps, rows)
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())


def step_of(line: str) -> float:
    """The step of a table's line, infinite where the line is torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


def same_adapters(model) -> bool:
    """Whether the adapters `default` and `reference` of a PEFT model are equal, tensor by tensor."""
    weights = dict(model.named_parameters())
    names = [name for name in weights if ".default." in name]
    for name in names:
        other = weights.get(name.replace(".default.", ".reference."))
        if other is None or not torch.equal(weights[name], other):
            return False
    return bool(names)
