"""Task `nla`: a policy (the verbalizer) explains an activation in words, from which a reconstructor predicts it.

    python -m tasks.nla prepare --model Qwen/Qwen3-8B --layer 24 --text corpus.txt --out data/nla
    python -m tasks.nla reconstruct --data data/nla --out runs/nla-reconstructor --load-4bit
    python -m tasks.nla sft --model Qwen/Qwen3-8B --data data/nla --out runs/nla-verbalizer --load-4bit
    python train_grpo.py --preset nla

The prompt holds a marker where the vector is added to the residual stream (tasks/nla/injection.py). The reward is −log of
the error with which the reconstructor (tasks/nla/reconstructor.py) predicts the vector from the text between
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
from typing import Any

import numpy as np
import torch

from data import Group, Prompt, Rollout, Score, Task, TrainingFailed, UserError, rng_of
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
    eval_columns = ("fve", "fve_renormalised", "mse", "extraction_rate", "cjk_share", "fve_words_replaced",
                    "fve_other_document", "fve_gold", "fve_gold_words_replaced")

    def __init__(self, args):
        super().__init__(args)
        self.check(args)
        self.columns = ("fve", "fve_renormalised", "mse", "extraction_rate", "cjk_share",
                        *(("critic_loss", "critic_grad_norm", "critic_skipped") if args.train_critic else ()))
        self.notes += judges.check(args)
        self.eval_columns = (*NlaTask.eval_columns, *judges.columns(args.judge_evals))
        self.judged_by = Judge(args) if args.judge_evals else None
        self.generated = not args.data
        source, self.reconstructor_folder, self.start = args.data, args.reconstructor, args.verbalizer
        if not args.data:  # the shipped generator, a tiny model, and its warm starts
            from tasks.nla.warm import tiny_folder

            tiny = tiny_folder(args.cache, print)
            source, self.reconstructor_folder = tiny / "activations.parquet", args.reconstructor or tiny / "reconstructor"
            self.start = args.verbalizer or (str(tiny) if args.model == "tiny" else "")
        self.meta = read_meta(source, tokenizer_of(self.start or args.model))
        rows, notes = load_rows(source, args.max_rows, self.meta, args.max_bad_records)
        train, held = split_by_document(rows, HELD_SHARE, 0)
        if args.eval_data:
            held, more = load_rows(args.eval_data, 0, self.meta, args.max_bad_records)
            known = {row.doc_id for row in rows}
            train, held, notes = rows, [row for row in held if row.doc_id not in known], notes + more
        order = rng_of(0, "heldout").permutation(len(held))[: args.eval_size]
        held = [held[i] for i in sorted(order)]
        self.notes += notes
        self.deal([self.prompt(row) for row in (train[: args.limit] if args.limit else train)],
                  [self.prompt(row, held=True) for row in held])
        scale = self.meta.scale
        self.baselines = {side: baselines(torch.tensor(np.stack([p.inject for p in prompts])), scale)
                          for side, prompts in (("train", self.train), ("held", self.held)) if prompts}
        self.policy = self.critic = self.model = None
        self.controls: dict[str, float] = {}
        self.judged: list[str] = []  # what the judge could not judge, for the report
        if not self.start and args.data:
            self.notes.append("warning: --verbalizer names no warm start: GRPO begins from a model that never saw an "
                              "activation, which is noise (python -m tasks.nla sft makes one)")

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
        self.policy, meta = policy, self.meta
        self.injection = Injection(self.args.inject_layer, meta.marker_id, meta.left_id, meta.right_id, policy.encode)
        copied = [policy.reference] if isinstance(policy.reference, torch.nn.Module) else []
        width = policy.hf.config.get_text_config().hidden_size
        if width != meta.d:
            raise UserError(f"the activations have {meta.d} numbers and --model {self.args.model} has {width}; give "
                            f"the model that they come from ({meta.model}), or make them with this one")
        for hf in (policy.hf, *copied):
            self.injection.install(hf)
        trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
        if self.args.adapter == "lora":
            own = {name for name, _ in policy.model.named_parameters() if "lora_" in name and ".default." in name}
            assert trained == own, "the policy trains its adapter `default`, all of it and nothing else"
        assert not any(p.requires_grad for hf in copied for p in hf.parameters()), "the anchor is frozen"
        self.load_reconstructor()
        own = self.model.trainable()
        assert "head.weight" in own and not set(map(id, own.values())) & {id(p) for p in policy.model.parameters()}

    def on_forward(self, prompts: list[Prompt]) -> None:
        self.injection.feed(prompts)

    def load_reconstructor(self) -> Reconstructor:
        if self.model is None:
            device = self.policy.device if self.policy else torch.device("cpu")
            dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
            self.model = reconstructor.load(self.reconstructor_folder, device, dtype, self.args.load_4bit)
            spec, meta = self.model.spec, self.meta
            if (spec.layer, spec.template) != (meta.layer, meta.template) or not math.isclose(spec.scale, meta.scale):
                raise UserError(f"{self.reconstructor_folder} was made for layer {spec.layer}, scale {spec.scale:g} and another "
                                f"template than the data's (layer {meta.layer}, scale {meta.scale:g}); make one for "
                                "these data")
            if self.args.train_critic:
                self.critic = Critic(self.model, self.args.critic_lr, self.args.critic_tokens,
                                     self.args.critic_max_norm)
        return self.model

    # ---- judging
    def errors(self, texts: Sequence[str | None], gold: Sequence[np.ndarray]) -> list[float | None]:
        """The normalised error of each text's prediction; None where there is no text, or too long a one."""
        model, ids = self.load_reconstructor(), []
        for text in texts:
            try:
                ids.append(model.encode(text) if text is not None else None)
            except ValueError:
                ids.append(None)
        known = [i for i, row in enumerate(ids) if row is not None]
        if not known:
            return [None] * len(ids)
        found = mse(model.score([ids[i] for i in known]), torch.tensor(np.stack([gold[i] for i in known])),
                    self.meta.scale).tolist()
        by_place = dict(zip(known, found, strict=True))
        return [by_place.get(i) for i in range(len(ids))]

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        return self.score_all([rollouts])[0]

    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score]]:
        rollouts = [rollout for group in groups for rollout in group]
        texts = [extract_explanation(rollout.text) for rollout in rollouts]
        errors = self.errors(texts, [rollout.prompt.inject for rollout in rollouts])
        scores = iter([self.judge(rollout, text, error)
                       for rollout, text, error in zip(rollouts, texts, errors, strict=True)])
        return [[next(scores) for _ in group] for group in groups]

    def judge(self, rollout: Rollout, text: str | None, error: float | None) -> Score:
        if error is not None and not math.isfinite(error):
            return Score.unscorable("the reconstructor's prediction is not finite")
        flags: dict[str, Any] = {"answer": text, "extracted": error is not None, "mse": error, "fve": None}
        if error is not None:
            raw, older = self.baselines["held" if rollout.prompt.meta["held"] else "train"]
            flags |= {"fve": fve(error, raw), "fve_renormalised": fve(error, older), "cjk": cjk_share(text)}
        return Score(reward_of(error), {"reconstruction": reward_of(error)}, flags)

    # ---- after a step
    @staticmethod
    def shares(groups: list[Group]) -> dict[str, float]:
        """Means over the explanations that could be read, and how many could."""
        flags = [score.flags for group in groups for score in group.scores if score.reward is not None]
        known = [flag for flag in flags if flag["extracted"]]
        names = {"fve": "fve", "fve_renormalised": "fve_renormalised", "mse": "mse", "cjk_share": "cjk"}
        means = {name: float(np.mean([flag[key] for flag in known])) for name, key in names.items()} if known else {}
        return means | ({"extraction_rate": len(known) / len(flags)} if flags else {})

    def observe(self, groups: list[Group]) -> dict[str, float]:
        row = self.shares(groups)
        pairs = [(score.flags["answer"], rollout.prompt.inject) for group in groups
                 for rollout, score in zip(group.rollouts, group.scores, strict=True)
                 if score.reward is not None and score.flags["extracted"]]
        if self.critic and pairs:  # the texts alone: no gradient of this reaches the policy
            rows = [self.model.encode(text) for text, _ in pairs]
            found = self.critic.step(rows, torch.tensor(np.stack([vector for _, vector in pairs])))
            row |= {f"critic_{name}": value for name, value in found.items()}
        return row

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """What the held-out explanations reconstruct, and the controls: the same with the content words replaced, and
        against the vector of another document; where the data have texts, these as explanations too."""
        row, raw = self.shares(groups), self.baselines["held"][0]
        found = [(group.scores[0].flags["answer"], group.prompt) for group in groups
                 if group.scores[0].flags.get("extracted")]
        texts, vectors = [text for text, _ in found], [prompt.inject for _, prompt in found]
        gold = [group.prompt for group in groups if group.prompt.gold]
        controls = {"fve_words_replaced": (self.replaced(texts), vectors),
                    "fve_other_document": (texts, [prompt.inject for _, prompt in others(found)]),
                    "fve_gold": ([p.gold for p in gold], [p.inject for p in gold]),
                    "fve_gold_words_replaced": (self.replaced([p.gold for p in gold]), [p.inject for p in gold])}
        for name, (said, meant) in controls.items():
            errors = [error for error in self.errors(said, meant) if error is not None] if meant else []
            row |= {name: fve(float(np.mean(errors)), raw)} if errors else {}
        self.controls, self.judged = row, []
        asked = [JudgedRow(text, prompt.meta["source"], prompt.meta["quirk"]) for text, prompt in found]
        for name in self.args.judge_evals:
            row |= judges.evaluate(name, self.judged_by, asked, self.judged.append)
        return row

    def replaced(self, texts: list[str]) -> list[str]:
        return [randomise_slots(text, 0) for text in texts] if self.generated else replace_words(texts, 0)

    def eval_fields(self, index: int, group: Group) -> dict[str, Any]:
        return {"mse": group.scores[0].flags.get("mse"), "fve": group.scores[0].flags.get("fve")}

    def report(self, step: int, records: list[dict], folder: Path) -> list[str]:
        """Add the held-out explanations to the run's table, one JSON line each; say the controls and three of them.

        Lines of a step that is made again (after a resume) are replaced.
        """
        path = folder / TABLE
        old = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        rows = [{"step": step, **{key: record[key] for key in ("index", "reward", "mse", "fve")},
                 "text": record["answer"] or record["text"], "gold": record["gold"]} for record in records]
        kept = [line for line in old if step_of(line) < step]
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(line + "\n" for line in [*kept, *map(json.dumps, rows)]), encoding="utf-8")
        part.replace(path)
        said = {"fve": "held-out FVE", "fve_words_replaced": "with every content word replaced",
                "fve_other_document": "against another document's vector", "fve_gold": "of the given texts",
                "fve_gold_words_replaced": "of these with content words replaced"}
        lines = ["  " + ", ".join(f"{text} {self.controls[key]:.3f}" for key, text in said.items()
                                  if key in self.controls)]
        for row in rows[:SHOWN]:
            number = "none" if row["fve"] is None else f"{row['fve']:.2f}"
            lines.append(f"    {row['index']}: FVE {number}  {clipped(row['text'])}"
                         + (f"  | given: {clipped(row['gold'])}" if row["gold"] else ""))
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

    def ended(self, rows: list[dict]) -> list[str]:
        if len(rows) >= 20 and all(row.get("extraction_rate") == 0 for row in rows):
            raise TrainingFailed("no completion held an <explanation>…</explanation>: nothing was learned; begin from "
                                 "a warm start (python -m tasks.nla sft), or raise --max-new")
        return ["reading guide: FVE says how well the text lets the vector be rebuilt, not that what it says is true; "
                "where it stays as high with every content word replaced, the words carry the kind of place, not its "
                "content; against another document's vector it should be under 0"]


def step_of(line: str) -> float:
    """The step of a table's line, infinite where the line is torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


def same_adapters(model) -> bool:
    """Whether the adapters `default` and `reference` of a PEFT model are equal, tensor by tensor."""
    weights = dict(model.named_parameters())
    pairs = [(p, weights.get(name.replace(".default.", ".reference."))) for name, p in weights.items()
             if ".default." in name]
    return bool(pairs) and all(other is not None and torch.equal(p, other) for p, other in pairs)
