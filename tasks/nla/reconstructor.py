"""The reconstructor: a model that predicts an activation from the text that explains it.

Its body is the first K + 1 decoder layers of a causal LM, its head a bias-free linear map in float32. What is trained
(LoRA tensors or all weights, and the head) is saved as one file of tensors beside `reconstructor.json`.
Letters: b texts, n tokens, D hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data import UserError
from models.judging import TokenBudget, load_judge, pad_right
from models.loading import context_of, four_bit

MOST_TOKENS = 1024  # of an explanation in the template
NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
NEEDS_4BIT = ("this reconstructor was trained on a 4-bit base and is wrong on a 16-bit one; it needs a CUDA device and "
              "the bitsandbytes package")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a saved reconstructor was made with; all of it decides what its tensors mean."""

    model: str  # folder or hub id of the base; a relative path is looked for beside the saved one first
    layer: int  # K: the state after this decoder layer is read
    scale: float  # norm of normalised activations
    template: str  # the prompt, with {explanation}
    final_norm: bool = False  # whether the base's final norm is applied to the state
    load_4bit: bool = False
    lora_r: int = 0  # 0: all weights are trained
    lora_alpha: float = 16.0


def normalise(x: Tensor, scale: float) -> Tensor:
    """x (…, D) at norm `scale`, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (scale / x.norm(dim=-1, keepdim=True).clamp(min=1e-12))


def mse(prediction: Tensor, gold: Tensor, scale: float) -> Tensor:
    """Mean squared error (…,) of both at norm `scale`; at scale √D it is 2·(1 − cosine)."""
    return (normalise(prediction, scale) - normalise(gold, scale)).square().mean(-1)


def baselines(activations: Tensor, scale: float) -> tuple[float, float]:
    """What predicting one vector for all (n, D) costs: the mean squared distance of the normalised activations from
    their mean (the raw variance), and, the older variant, from their mean at norm `scale`."""
    x = normalise(activations, scale)
    middle = x.mean(0)
    variance = (x - middle).square().mean()
    older = (x - normalise(middle, scale)).square().mean()
    return variance.item(), older.item()


def fve(error: float, baseline: float) -> float:
    """Fraction of variance explained: 1 − mse / baseline."""
    return 1 - error / max(baseline, 1e-12)


class Reconstructor(nn.Module):
    """prediction = head(normalise(state of the last token)); the state is brought to the target norm before the head.

    That bounds the head's input and keeps bfloat16 training finite. At first the head is the identity.
    """

    def __init__(self, base: nn.Module, tokenizer, spec: Spec):
        super().__init__()
        before, _, after = spec.template.partition("{explanation}")
        if not after.strip() or "{explanation}" in after:
            raise UserError("the reconstructor's prompt template must hold {explanation} once and text after it (the "
                            f"state of its last token is read); this one is {spec.template!r}")
        self.base = base
        self.tokenizer = tokenizer
        self.spec = spec
        d = base.config.get_text_config().hidden_size
        self.head = nn.Linear(d, d, bias=False, dtype=torch.float32)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(d))
        self.head.to(next(base.parameters()).device)
        self.longest = min(MOST_TOKENS, context_of(base))
        self.tail = self.tokenizer.encode(spec.template.replace("{explanation}", "a"))[-1:]  # its state is read
        marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} - {""}
        self.marks = sorted(marks, key=len, reverse=True)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in the template. ValueError where they are too many: a cut prompt would be read at
        another place than the template's end."""
        if len(text) > 64 * self.longest:
            raise ValueError(f"{len(text)} characters, more than {self.longest} tokens may have")
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        for mark in self.marks:  # no text of a policy may pass for a mark of the layout
            text = text.replace(mark, " ")
        ids = self.tokenizer.encode(self.spec.template.replace("{explanation}", text))
        if len(ids) > self.longest:
            raise ValueError(f"{len(ids)} tokens in the template, over {self.longest}")
        if ids[-1:] != self.tail:
            raise UserError("the tokenizer merges the end of the reconstructor's prompt template with the text before "
                            "it; let the template end with a token of its own")
        return ids

    def predict(self, rows: Sequence[list[int]]) -> Tensor:
        """(b, D) float32 from token ids, one forward."""
        ids, mask = pad_right(rows, 0, self.device)
        last = mask.sum(1) - 1  # (b,)
        state = self.base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return self.head(normalise(state[torch.arange(len(rows), device=self.device), last], self.spec.scale))

    @torch.no_grad()
    def score(self, rows: Sequence[list[int]], budget: int = 16_384) -> Tensor:
        """Predictions (b, D), on the CPU, in batches of at most `budget` padded tokens, of similar length."""
        lengths = [len(row) for row in rows]
        found = TokenBudget(budget).map(lengths, lambda some: self.predict([rows[i] for i in some]).float().cpu())
        return torch.stack(found) if found else torch.zeros(0, self.head.out_features)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The tensors that are trained, and so saved, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.trainable().items()}
        save_file(tensors, folder / "reconstructor.safetensors")
        spec = json.dumps(dataclasses.asdict(self.spec), indent=1)
        (folder / "reconstructor.json").write_text(spec)

    def load_tensors(self, folder: Path) -> None:
        """Trained tensors from a folder. UserError where one is missing, unexpected or of another shape."""
        try:
            saved = load_file(folder / "reconstructor.safetensors")
        except Exception as error:  # safetensors has its own class for a broken file
            raise UserError(f"{folder} holds no readable reconstructor: {type(error).__name__}: {error}") from error
        own = self.trainable()
        wrong = [f"{name} is missing" for name in own.keys() - saved.keys()]
        wrong += [f"{name} is unexpected" for name in saved.keys() - own.keys()]
        for name in own.keys() & saved.keys():
            there = tuple(saved[name].shape)
            here = tuple(own[name].shape)
            if there != here:
                wrong.append(f"{name} has shape {there}, not {here}")
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise UserError(f"{folder} does not fit this reconstructor: {min(wrong)}{more}")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(saved[name])


class Critic:
    """Trains a reconstructor: one optimizer step on a batch of explanations and the activations that they explain.

    Micro-batches, clipping and the guard against gradients that are not finite are those of the policy's update; the
    optimizer is 8-bit where bitsandbytes runs.
    """

    def __init__(self, model: Reconstructor, lr: float, budget: int = 8192, max_norm: float = 1.0):
        self.model = model
        self.lr = lr
        self.budget = budget  # padded tokens of a micro-batch
        self.max_norm = max_norm  # 0: no clipping
        self.weights = list(model.trainable().values())
        kind = torch.optim.AdamW
        if model.device.type == "cuda" and importlib.util.find_spec("bitsandbytes"):
            import bitsandbytes

            kind = bitsandbytes.optim.AdamW8bit
        self.optimizer = kind(self.weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rows: Sequence[list[int]], gold: Tensor, lr: float | None = None) -> dict[str, float]:
        """One step on token ids of b texts and gold (b, D): loss (the mean normalised error), the gradient's norm
        before clipping, and 1 where it was not finite and weights and moments stay as they are."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr if lr is None else lr
        total, gold = 0.0, gold.to(self.model.device)
        for some in TokenBudget(self.budget).batches([len(row) for row in rows]):
            error = mse(self.model.predict([rows[i] for i in some]), gold[some], self.model.spec.scale)
            (error.sum() / len(rows)).backward()
            total += error.sum().item() / len(rows)
        limit = self.max_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.weights, limit).item()
        finite = math.isfinite(norm) and math.isfinite(total)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": total, "grad_norm": norm, "skipped": 1 - finite}

    def save(self, folder: Path) -> None:
        self.model.save(folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Weights and moments of a checkpoint. UserError where they are not there: never an older critic in silence."""
        self.model.load_tensors(folder)
        path = folder / "optimizer.pt"
        if not path.is_file():
            raise UserError(f"{folder} holds no optimizer of the critic (optimizer.pt)")
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        self.optimizer.load_state_dict(state)


def load_base(spec: Spec, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The frozen base of a reconstructor, without its later layers, its output layer and perhaps its final norm; and
    its tokenizer."""
    quantized = four_bit(device, dtype, NEEDS_4BIT) if spec.load_4bit else None
    weights = dtype if spec.lora_r else torch.float32
    first_layers = functools.partial(load_first_layers, spec)
    return load_judge("the reconstructor's base", spec.model, first_layers, device, weights, quantized)


def load_first_layers(spec: Spec, path: str, **keywords) -> nn.Module:
    """The first K + 1 decoder layers of the causal LM at `path`; `keywords` go to `from_pretrained`."""
    config = transformers.AutoConfig.from_pretrained(path)
    own = config.get_text_config()
    if not 0 <= spec.layer < own.num_hidden_layers:
        raise UserError(f"layer {spec.layer} is no layer of {path}, which has {own.num_hidden_layers} (0 to "
                        f"{own.num_hidden_layers - 1})")
    own.num_hidden_layers = spec.layer + 1
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[: spec.layer + 1]
    base = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, **keywords).base_model
    if not spec.final_norm:
        norms = [name for name, _ in base.named_children() if name in NORMS]
        if len(norms) != 1:
            raise UserError(f"the final norm of a {type(base).__name__} cannot be found; use --final-norm")
        setattr(base, norms[0], nn.Identity())
    return base


def build(spec: Spec, device: torch.device, dtype: torch.dtype) -> Reconstructor:
    """A reconstructor at its start: identity head, and a fresh LoRA, or all weights trained where lora_r is 0."""
    if spec.load_4bit and not spec.lora_r:
        raise UserError("4-bit weights cannot be trained; give the reconstructor a LoRA (--lora-r over 0)")
    base, tokenizer = load_base(spec, device, dtype)
    if spec.lora_r:
        import peft

        config = peft.LoraConfig(
            r=spec.lora_r,
            lora_alpha=spec.lora_alpha,
            use_rslora=True,
            target_modules="all-linear",
            lora_dropout=0.0,
        )
        base = peft.get_peft_model(base, config)
    else:
        base.requires_grad_(True)
    return Reconstructor(base, tokenizer, spec).eval()


def read_spec(folder: Path) -> Spec:
    try:
        return Spec(**json.loads((folder / "reconstructor.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder} holds no reconstructor (reconstructor.json): {error}; make one with "
                        "python -m tasks.nla reconstruct") from error


def load(folder: str | Path, device: torch.device, dtype: torch.dtype, load_4bit: bool | None = None) -> Reconstructor:
    """A saved reconstructor. `load_4bit` is what the caller would load: another than it was trained on is refused."""
    folder = Path(folder)
    spec = read_spec(folder)
    if load_4bit is not None and load_4bit != spec.load_4bit:
        trained, wanted = ("4-bit", "16-bit") if spec.load_4bit else ("16-bit", "4-bit")
        raise UserError(f"{folder} was trained on a {trained} base and is wrong on a {wanted} one; load the base as it "
                        "was trained, or train another (python -m tasks.nla reconstruct)")
    beside = folder / spec.model
    if beside.is_dir():
        spec = dataclasses.replace(spec, model=str(beside))
    model = build(spec, device, dtype)
    model.load_tensors(folder)
    return model
