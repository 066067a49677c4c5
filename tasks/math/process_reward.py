r"""Process reward models: a number for every step of a solution, and what is made of these numbers.

Two layouts are read. Qwen2.5-Math-PRM (arXiv 2501.07301): a Qwen2 with a head of two layers and two classes, read at a
separator token behind each step. Any token-classification model, as TRL's PRMTrainer makes them: read at the last token
of the separator behind each step. The final answer is the last step, in a box.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from data import UserError, seed_of
from models.judging import TokenBudget, load_judge, pad_right
from models.loading import context_of, four_bit
from models.supervised import fit
from models.tiny import WARM, cached, tiny_model
from rewards import FINAL_LINE, STEP_LINE, final_answer

SEPARATOR = "<extra_0>"  # of Qwen2.5-Math-PRM
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."  # what that model was trained with
LONGEST = 20_000  # characters of a solution that is still judged
MOST_STEPS = 100
HEADS = ("score", "classifier")  # modules that are never quantised
NEEDS_4BIT = "--prm-4bit needs a CUDA device and the bitsandbytes package (pip install bitsandbytes)"
GOOD = {"good", "correct", "right", "positive", "true", "yes", "+", "1", "label_1"}  # names of the class of right steps
JUDGE = WARM | {"steps": 300, "lr": 2e-3}  # how the tiny process model is fitted


# ---- formulas; `steps` are probabilities that a step is right, one or more, in order
def process_score(steps: Sequence[float]) -> float:
    """0.60 × last step + 0.40 × mean over steps."""
    last = steps[-1]
    return 0.60 * last + 0.40 * sum(steps) / len(steps)


def step_accuracy(steps: Sequence[float]) -> float:
    """Share of steps over 0.5."""
    right = [step > 0.5 for step in steps]
    return sum(right) / len(steps)


def lccp(steps: Sequence[float]) -> float:
    """Longest correct chain prefix: steps before the first at or under 0.5, over all steps; 1 where none fails."""
    for i, step in enumerate(steps):
        if step <= 0.5:
            return i / len(steps)
    return 1.0


def solution_score(steps: Sequence[float]) -> float:
    """Of a solution without gold: 0.45 × last step + 0.35 × mean + 0.20 × LCCP."""
    last = steps[-1]
    prefix = lccp(steps)
    return 0.45 * last + 0.35 * sum(steps) / len(steps) + 0.20 * prefix


def sound_beginning(score: float, prefix: float) -> float:
    """A wrong answer's score with what its sound beginning (LCCP `prefix`) adds: never less, never over 0.55 by it."""
    raised = min(score + 0.15 * prefix, 0.55)
    return max(score, raised)


def split_steps(text: str) -> list[str]:
    r"""A solution's steps: `Step N:` lines with what follows them, else paragraphs; its final answer last, in a box.

    Empty where there is nothing to judge, or too much.
    """
    if len(text) > LONGEST:
        return []
    final_lines = list(FINAL_LINE.finditer(text))
    body = text[: final_lines[-1].start()] if final_lines else text
    starts = [m.start() for m in STEP_LINE.finditer(body)]
    if starts:
        cuts = [0, *starts[1:], len(body)]  # what stands before the first step belongs to it
        parts = [body[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    else:
        parts = re.split(r"\n\s*\n", body)
    steps = [part.strip() for part in parts if part.strip()]
    answer = final_answer(text, strict=True)
    if answer:
        steps.append(rf"The final answer is \boxed{{{answer}}}.")
    return steps if len(steps) <= MOST_STEPS else []


# ---- the models
class Qwen2ForProcessRewardModel(transformers.Qwen2PreTrainedModel):
    """The layout of Qwen/Qwen2.5-Math-PRM, without its remote code: weights `model.*`, `score.0.*`, `score.2.*`."""

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.Qwen2Model(config)
        width = config.hidden_size
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return transformers.modeling_outputs.TokenClassifierOutput(logits=self.score(hidden))


class ProcessRewardModel:
    """A loaded process reward model; `score` gives the probability that each step of a solution is right."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, load_4bit: bool = False,
                 separator: str = "", budget: int = 16_384):
        self.path = path
        self.device = device
        self.budget = TokenBudget(budget)
        quantized = four_bit(device, dtype, NEEDS_4BIT, HEADS) if load_4bit else None
        self.model, self.tokenizer = load_judge("--prm", path, load_process_model, device, dtype, quantized,
                                                advice="; name another, or --prm none")
        self.separator = separator or self._usual_separator()
        self.separator_ids = self.tokenizer.encode(self.separator, add_special_tokens=False)
        if not self.separator_ids:
            raise UserError(f"--prm-separator {separator!r} gives no token in the tokenizer of {path}")
        self.longest = context_of(self.model)
        self.good = class_of_right_steps(self.model.config)
        # no text of a policy may pass for a mark of the layout
        marks = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab(), SEPARATOR} - {""}
        longest_first = sorted(marks, key=len, reverse=True)
        self.marks = re.compile("|".join(map(re.escape, longest_first)))

    def _usual_separator(self) -> str:
        return SEPARATOR if SEPARATOR in self.tokenizer.get_vocab() else "\n"

    def encode(self, question: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Ids of question and steps, and the place that is read for each step."""
        ids = self._encode_question(self.marks.sub(" ", question))
        places = []
        for step in steps:
            step = self.marks.sub(" ", step)
            if self.separator.isspace():
                step = step.replace(self.separator, " ")
            ids += self.tokenizer.encode(step, add_special_tokens=False)
            ids += self.separator_ids
            places.append(len(ids) - 1)
        return ids, places

    def _encode_question(self, question: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(question + "\n")
        messages = [{"role": "user", "content": question}]
        if self.separator == SEPARATOR:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def score(self, problems: list[tuple[str, list[str]]]) -> list[list[float] | None]:
        """For each (question, steps) the steps' probabilities; None without steps or where it is too long to read."""
        readable = {}  # by index: ids and places
        for i, (question, steps) in enumerate(problems):
            if not steps:
                continue
            ids, places = self.encode(question, steps)
            if len(ids) <= self.longest:
                readable[i] = ids, places
        rows = list(readable.values())
        lengths = [len(ids) for ids, _ in rows]
        found = self.budget.map(lengths, lambda batch: self._forward([rows[i] for i in batch]))
        scores = dict(zip(readable, found, strict=True))
        return [scores.get(i) for i in range(len(problems))]

    def _forward(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """The probabilities at the places of each of the rows (ids, places)."""
        ids, mask = pad_right([ids for ids, _ in rows], 0, self.device)
        logits = self.model(input_ids=ids, attention_mask=mask).logits.float()  # (b, n, classes)
        if logits.shape[-1] == 1:
            right = logits.sigmoid()[..., 0]
        else:
            right = logits.softmax(-1)[..., self.good]
        right = right.nan_to_num(0.0).cpu()
        read = []
        for row, (_, places) in zip(right, rows, strict=True):
            read.append(row[places].tolist())
        return read


def class_of_right_steps(config) -> int:
    """Index of the class whose label names right steps; the last one where no label does."""
    labels = config.id2label or {}
    for i, label in labels.items():
        if str(label).lower() in GOOD:
            return int(i)
    return -1


def load_process_model(path: str, **keywords) -> nn.Module:
    """The model of a folder or hub id. UserError where it is no token classifier."""
    config, _ = transformers.PreTrainedConfig.get_config_dict(path)
    if "Qwen2ForProcessRewardModel" in (config.get("architectures") or ()):
        config.pop("auto_map", None)  # names the remote code
        config = transformers.Qwen2Config.from_dict(config)
        model, info = Qwen2ForProcessRewardModel.from_pretrained(
            path, config=config, output_loading_info=True, **keywords)
    else:
        model, info = transformers.AutoModelForTokenClassification.from_pretrained(
            path, output_loading_info=True, **keywords)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"--prm {path} is no process reward model: it lacks {missing[0]}; name a "
                        "token-classification model, or --prm none")
    return model


# ---- the tiny process model
def tiny_process_model(task, args, log) -> Path:
    """Folder of the tiny process reward model: the tiny model with a head of two classes, fitted to tell right steps
    of the task's `judged_examples` from wrong ones. Cached like the tiny model."""
    start = tiny_model(task, args, log)
    examples = task.judged_examples()
    recipe = [start.name, JUDGE, Path(__file__).read_text(), examples]

    def build(folder: Path) -> None:
        log(f"building the tiny process model: fit on {len(examples)} solutions (about half a minute)")
        fit_process_model(start, folder, examples, log)

    return cached("tiny-prm", recipe, build, args.cache)


def fit_process_model(start: Path, folder: Path, examples: list[tuple[str, list[str], list[bool]]], log) -> None:
    """Fit a token classifier, begun from the causal model at `start`, at the separators of the judged steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed_of(0, "tiny process model"))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(start)
    tokenizer.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
    model = transformers.LlamaForTokenClassification.from_pretrained(
        start, num_labels=2, id2label={0: "wrong", 1: "right"}, label2id={"wrong": 0, "right": 1})
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    cpu = torch.device("cpu")
    judge = ProcessRewardModel(str(folder), cpu, torch.float32)
    rows = []  # (ids, places, verdicts)
    for question, steps, verdicts in examples:
        ids, places = judge.encode(question, steps)
        rows.append((ids, places, torch.tensor(verdicts).long()))
    model = judge.model.requires_grad_(True)

    def loss_of(batch: list[int]) -> Tensor:
        """Cross-entropy at the separators, a mean over the steps of the batch."""
        some = [rows[i] for i in batch]
        ids, mask = pad_right([ids for ids, _, _ in some], tokenizer.pad_token_id)
        logits = model(input_ids=ids, attention_mask=mask).logits
        read = [logits[row, places] for row, (_, places, _) in enumerate(some)]
        verdicts = [right for _, _, right in some]
        return nn.functional.cross_entropy(torch.cat(read), torch.cat(verdicts))

    lengths = [len(ids) for ids, _, _ in rows]
    fit(model, JUDGE, lengths, loss_of, lambda text: log(f"  process model {text}"))
    model.save_pretrained(folder)
