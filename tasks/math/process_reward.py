r"""Process reward models: a number for every step of a solution, and what is made of these numbers.

Two layouts are read. Qwen2.5-Math-PRM (arXiv 2501.07301): a Qwen2 with a head of two layers and two classes, read at a
separator token behind each step. Any token-classification model, as TRL's PRMTrainer makes them: read at the last token
of the separator behind each step. The final answer is the last step, in a box.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data import UserError, seed_of
from models.supervised import fit
from models.tiny import WARM, cached, tiny_model
from rewards import FINAL_LINE, STEP_LINE, final_answer

SEPARATOR = "<extra_0>"  # of Qwen2.5-Math-PRM
SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."  # what that model was trained with
LONGEST, MOST_STEPS = 20_000, 100  # characters and steps of a solution that is still judged
GOOD = {"good", "correct", "right", "positive", "true", "yes", "+", "1", "label_1"}  # names of the class of right steps


# ---- formulas; `steps` are probabilities that a step is right, one or more, in order
def process_score(steps: Sequence[float]) -> float:
    """0.60 × last step + 0.40 × mean over steps."""
    return 0.60 * steps[-1] + 0.40 * sum(steps) / len(steps)


def step_accuracy(steps: Sequence[float]) -> float:
    """Share of steps over 0.5."""
    return sum(step > 0.5 for step in steps) / len(steps)


def lccp(steps: Sequence[float]) -> float:
    """Longest correct chain prefix: steps before the first at or under 0.5, over all steps; 1 where none fails."""
    return next((i for i, step in enumerate(steps) if step <= 0.5), len(steps)) / len(steps)


def solution_score(steps: Sequence[float]) -> float:
    """Of a solution without gold: 0.45 × last step + 0.35 × mean + 0.20 × LCCP."""
    return 0.45 * steps[-1] + 0.35 * sum(steps) / len(steps) + 0.20 * lccp(steps)


def sound_beginning(score: float, prefix: float) -> float:
    """A wrong answer's score with what its sound beginning (LCCP `prefix`) adds: never less, never over 0.55 by it."""
    return max(score, min(score + 0.15 * prefix, 0.55))


def split_steps(text: str) -> list[str]:
    r"""A solution's steps: `Step N:` lines with what follows them, else paragraphs; its final answer last, in a box.

    Empty where there is nothing to judge, or too much.
    """
    if len(text) > LONGEST:
        return []
    finals = list(FINAL_LINE.finditer(text))
    body = text[:finals[-1].start()] if finals else text
    starts = [m.start() for m in STEP_LINE.finditer(body)]
    if starts:
        cuts = [0, *starts[1:], len(body)]  # what stands before the first step belongs to it
        steps = [body[a:b].strip() for a, b in zip(cuts, cuts[1:], strict=False)]
    else:
        steps = [part.strip() for part in re.split(r"\n\s*\n", body)]
    answer = final_answer(text, strict=True)
    steps = [step for step in steps if step] + ([rf"The final answer is \boxed{{{answer}}}."] if answer else [])
    return steps if len(steps) <= MOST_STEPS else []


# ---- the models
class Qwen2ForProcessRewardModel(transformers.Qwen2PreTrainedModel):
    """The layout of Qwen/Qwen2.5-Math-PRM, without its remote code: weights `model.*`, `score.0.*`, `score.2.*`."""

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.Qwen2Model(config)
        self.score = nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.ReLU(),
                                   nn.Linear(config.hidden_size, 2))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return transformers.modeling_outputs.TokenClassifierOutput(logits=self.score(hidden))


class ProcessRewardModel:
    """A loaded process reward model; `score` gives the probability that each step of a solution is right."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype, load_4bit: bool = False,
                 separator: str = "", budget: int = 16_384):
        self.path, self.device, self.budget = path, device, budget
        try:
            self.model = load_model(path, device, dtype, load_4bit)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        except UserError:
            raise
        except Exception as error:  # hub, torch, safetensors: each has its own classes
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"--prm {path} cannot be loaded: {type(error).__name__}: {reason}; name another, or "
                            "--prm none") from error
        config = self.model.config
        self.separator = separator or (SEPARATOR if SEPARATOR in self.tokenizer.get_vocab() else "\n")
        self.separator_ids = self.tokenizer.encode(self.separator, add_special_tokens=False)
        if not self.separator_ids:
            raise UserError(f"--prm-separator {separator!r} gives no token in the tokenizer of {path}")
        self.longest = getattr(config, "max_position_embeddings", None) or 10**9
        labels = {i: str(name).lower() for i, name in (config.id2label or {}).items()}
        self.good = next((int(i) for i, name in labels.items() if name in GOOD), -1)
        # no text of a policy may pass for a mark of the layout
        marks = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab(), SEPARATOR} - {""}
        self.marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))

    def encode(self, question: str, steps: list[str]) -> tuple[list[int], list[int]]:
        """Ids of question and steps, and the place that is read for each step."""
        question, *steps = (self.marks.sub(" ", text) for text in (question, *steps))
        ids = self._encode_question(question)
        places = []
        for step in steps:
            step = step.replace(self.separator, " ") if self.separator.isspace() else step
            ids += self.tokenizer.encode(step, add_special_tokens=False) + self.separator_ids
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
        rows = [self.encode(*problem) if problem[1] else ([], []) for problem in problems]
        out: list[list[float] | None] = [None] * len(rows)
        order = sorted((i for i, (ids, _) in enumerate(rows) if 0 < len(ids) <= self.longest),
                       key=lambda i: len(rows[i][0]))
        while order:
            longest = len(rows[order[-1]][0])
            batch = order[-max(1, self.budget // longest):]
            try:
                results = self._forward([rows[i] for i in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self.budget = longest * (len(batch) // 2)
                torch.cuda.empty_cache()
                continue
            del order[-len(batch):]
            for i, result in zip(batch, results, strict=True):
                out[i] = result
        return out

    def _forward(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (tokens, _) in enumerate(rows):  # filled on the right: a causal model never sees it
            ids[row, :len(tokens)], mask[row, :len(tokens)] = torch.tensor(tokens), 1
        logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits.float()
        right = logits.sigmoid()[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., self.good]
        right = right.nan_to_num(0.0).cpu()
        return [right[row, places].tolist() for row, (_, places) in enumerate(rows)]


def load_model(path: str, device: torch.device, dtype: torch.dtype, load_4bit: bool):
    """The model of a folder or hub id, frozen. UserError where it is no token classifier, or 4 bits cannot be had."""
    keywords = {"dtype": dtype, "output_loading_info": True}
    if load_4bit:
        if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("--prm-4bit needs a CUDA device and the bitsandbytes package (pip install bitsandbytes)")
        keywords["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=["score", "classifier"])
        keywords["device_map"] = {"": device}
    config, _ = transformers.PreTrainedConfig.get_config_dict(path)
    if "Qwen2ForProcessRewardModel" in (config.get("architectures") or ()):
        config = transformers.Qwen2Config.from_dict({k: v for k, v in config.items() if k != "auto_map"})
        model, info = Qwen2ForProcessRewardModel.from_pretrained(path, config=config, **keywords)
    else:
        model, info = transformers.AutoModelForTokenClassification.from_pretrained(path, **keywords)
    if info["missing_keys"]:
        raise UserError(f"--prm {path} is no process reward model: it lacks {sorted(info['missing_keys'])[0]}; name a "
                        "token-classification model, or --prm none")
    model = model if load_4bit else model.to(device)
    return model.eval().requires_grad_(False)
JUDGE = WARM | {"steps": 300, "lr": 2e-3}  # of the tiny process model


def tiny_process_model(task, args, log) -> Path:
    """Folder of the tiny process reward model: the tiny model with a head of two classes, fitted to tell right steps
    of the task's `judged_examples` from wrong ones. Cached like the tiny model."""
    start, examples = tiny_model(task, args, log), task.judged_examples()
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
    head = {"num_labels": 2, "id2label": {0: "wrong", 1: "right"}, "label2id": {"wrong": 0, "right": 1}}
    model = transformers.LlamaForTokenClassification.from_pretrained(start, **head)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge = ProcessRewardModel(str(folder), torch.device("cpu"), torch.float32)
    rows = [(*judge.encode(question, steps), verdicts) for question, steps, verdicts in examples]
    model = judge.model.requires_grad_(True)
    def loss_of(batch: list[int]) -> torch.Tensor:
        ids, places, verdicts = zip(*(rows[i] for i in batch), strict=True)
        lengths = [len(x) for x in ids]
        ids = pad_sequence([torch.tensor(x) for x in ids], batch_first=True, padding_value=tokenizer.pad_token_id)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask).logits
        read = torch.cat([logits[row, at] for row, at in enumerate(places)])
        return torch.nn.functional.cross_entropy(read, torch.tensor([int(v) for row in verdicts for v in row]))

    fit(model, JUDGE, [len(ids) for ids, _, _ in rows], loss_of, lambda text: log(f"  process model {text}"))
    model.save_pretrained(folder)
