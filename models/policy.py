"""The policy: the model that is trained, what it needs to speak, and the reference it is held to."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import jinja2
import torch
import transformers

from data import Prompt, Rollout, Task, UserError, nearest, seed_of
from engine.autotune import choose_engine
from engine.rollout import rollout
from harness.checkpoints import best_checkpoint
from models.adapters import AllWeights
from models.chat import reply_ids, stop_ids
from models.loading import (
    context_of,
    four_bit,
    load_pretrained,
    load_tokenizer,
    package_file,
    pick_attention,
    pick_device,
    pick_dtype,
)
from models.svd import SingularValues, SVDModel, saved_base
from models.tiny import tiny_model


def locate_model(args, task: Task, log) -> str:
    """--model, or what the task begins from instead, as a path or hub id."""
    if start := task.start_from():
        return start
    if args.model == "tiny":
        return str(tiny_model(task, args, log))
    if args.model.startswith("package:"):
        return package_file(args.model)
    path = Path(args.model).expanduser()
    if (path / "metrics.csv").is_file():
        raise UserError(f"--model {args.model} is a run folder; give one of its checkpoints: {best_checkpoint(path)}")
    if path.exists():
        return str(path)
    siblings = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = nearest(str(path), [*siblings, "tiny"])
    local = args.model.startswith(("/", ".", "~")) or args.model.endswith(".gguf") or args.model.count("/") > 1
    if local or (path.parent != Path(".") and siblings):  # a hub id has one slash at most, and no folder before it
        raise UserError(f"--model {args.model}: there is no such file or folder{hint}")
    return args.model


def no_dropout(model) -> None:
    """Dropout off for good, also in training mode (which checkpointing needs): the first ratio is exactly 1."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):  # some layers read their config's at each forward
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


@dataclasses.dataclass
class Policy:
    """The model that is trained, what it needs to speak, and the reference it is held to.

    `model` is the module that owns the adapter (or the model itself), `hf` the Hugging Face model under it.
    `reference` is None, "off" (the adapter switched off), "adapter" (a frozen second adapter) or a frozen model.
    """

    args: Any
    task: Task
    model: Any
    hf: Any
    tokenizer: Any
    device: Any
    reference: Any = None
    version: int = 0
    engine: str = "generate"
    flex: bool = False
    server: Any = None  # samples in place of the engine
    filtered_mass: float = 0.0  # probability that top-p / top-k removed in the last rollout, mean over tokens
    retries: int = 0  # rollouts that were begun anew, in smaller batches, for want of memory

    def __post_init__(self):
        self.stop_ids, self.rollout_tokens = stop_ids(self.hf, self.tokenizer), self.args.rollout_tokens
        config = self.hf.config.get_text_config()
        longest = context_of(self.hf)
        self.context = self.args.context or longest
        if self.context > longest and not hasattr(config, "rope_parameters"):
            raise UserError(f"--context {self.context}: this model has learned positions for {longest} tokens only")
        self.takes_positions = "position_ids" in inspect.signature(self.hf.forward).parameters

    @property
    def adapter(self) -> AllWeights:
        """What is trained, as one of the kinds of models/adapters.py."""
        return adapter_of(self.model, self.hf, self.args)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: the chat template's own BOS and no second one, or the tokenizer's for plain text."""
        if isinstance(prompt.messages, str):
            return self.tokenizer.encode(prompt.messages)
        return self.tokenizer.encode(self.render(prompt.messages, prompt, True), add_special_tokens=False)

    def render(self, messages: list[dict], prompt: Prompt, generation: bool) -> str:
        if self.tokenizer.chat_template is None:
            raise UserError(f"the tokenizer of {self.args.model} has no chat template; give one with --chat-template "
                            "FILE, or plain-text prompts")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, tools=prompt.meta.get("tools"),
                **self.task.template_kwargs)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the chat template of {self.args.model} refuses a prompt that begins with "
                            f"{str(messages[0])[:80]}: {error}; give another with --chat-template") from error

    def reply_ids(self, row: Rollout, reply: list[dict]) -> list[int]:
        """The chat-template suffix that shows the policy a reply, see models/chat.py."""
        return reply_ids(self, row, reply)

    def save(self, folder: Path) -> None:
        """What is trained, with the tokenizer; with --save-method merged the merged model in merged/ too."""
        self.adapter.save(folder)
        if self.args.save_method == "merged":
            self.save_merged(folder / "merged", folder)
        self.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path, checkpoint: Path | None = None, dtype: torch.dtype | None = None) -> None:
        """The whole model with its adapter merged in, which loads without PEFT and without this project; `checkpoint`
        is a folder of `save`."""
        self.adapter.save_merged(folder, checkpoint, dtype)
        self.tokenizer.save_pretrained(folder)

    def quantise(self, folder: Path) -> None:
        """Turn the bfloat16 model in a folder into an nf4 one."""
        refusal = "--save-method merged_4bit needs a CUDA device and the bitsandbytes package"
        keywords = four_bit(self.device, torch.bfloat16, refusal)
        small = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **keywords)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        small.save_pretrained(folder)

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt leaves room for a completion."""
        limit = self.context - self.args.max_new
        if self.args.max_prompt:
            limit = min(limit, self.args.max_prompt)
        return 0 < len(self.encode(prompt)) <= limit

    def sample(self, prompts: list[Prompt], n: int, temperature: float, *key) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, see `rollout`; out of memory, once more from the start in smaller batches."""
        while True:
            try:
                return rollout(self, prompts, n, temperature, seed_of(self.args.seed, "sample", *key))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.rollout_tokens <= self.args.max_new:
                    raise
            self.rollout_tokens //= 2
            self.retries += 1

    @contextlib.contextmanager
    def as_reference(self):
        """Within: `hf` of the yielded model is the reference."""
        if self.reference == "off":
            with self.model.disable_adapter():
                yield self.hf
        elif self.reference == "adapter":
            self.model.set_adapter("reference", inference_mode=True)
            try:
                yield self.hf
            finally:
                self.model.set_adapter("default")
        else:
            try:
                yield self.reference.to(self.device)
            finally:
                if self.args.ref_offload:
                    self.reference.to("cpu")


def adapter_of(model, hf, args) -> AllWeights:
    """The kind of what is trained, from the modules that were made."""
    if model is hf:
        return AllWeights(model, hf, args)
    if isinstance(model, SVDModel):
        return SingularValues(model, hf, args)
    from models.lora import Lora  # with PEFT, whose import takes seconds

    return Lora(model, hf, args)


def make_adapter(kind: str, hf, args, base: str, start: str | None, log) -> tuple[Any, Any, Any]:
    """(model, its Hugging Face model, what the reference is) of a fresh adapter, or of the one in the folder `start`.

    `base` is the path of `hf`. The reference is None, "off" (the adapter switched off), "adapter" (a frozen copy of
    the one at `start`) or a frozen model.
    """
    if kind == "svd":
        model = SVDModel(hf, base, args.cache, log)
        if start:
            model.load(start)
        return model, hf, "off"
    if kind == "lora" or start:
        from models.lora import add_lora  # with PEFT, whose import takes seconds
    if kind == "lora":
        model = add_lora(hf, args, base, start)
        return model, model.get_base_model(), "adapter" if start else "off"
    if start:  # full fine-tuning from base + adapter
        hf = add_lora(hf, args, base, start).merge_and_unload()
    hf.requires_grad_(True)
    return hf, hf, frozen_copy(hf, args) if args.beta else None


def frozen_copy(hf, args):
    reference = copy.deepcopy(hf).requires_grad_(False).eval()
    return reference.to("cpu") if args.ref_offload else reference


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a policy comes from: the weights, the adapter to go on from (None: a fresh one), the tokenizer."""

    base: str
    adapter: str | None
    tokenizer: str


def find_source(args, task: Task, log) -> Source:
    """What stands at --model (or at what the task begins from): a model, or an adapter's folder with its base."""
    path = locate_model(args, task, log)
    config = Path(path) / "adapter_config.json"
    if config.is_file():
        base = json.loads(config.read_text()).get("base_model_name_or_path")
        if not base:
            raise UserError(f"--model {path}: its adapter_config.json names no base model (base_model_name_or_path)")
        if args.adapter == "svd":
            raise UserError(f"--model {path} is a LoRA adapter; leave out --adapter svd")
        own_tokenizer = (Path(path) / "tokenizer_config.json").is_file()
        return Source(base, path, path if own_tokenizer else base)
    singular = saved_base(path)
    if singular:
        if args.adapter != "svd":
            raise UserError(f"--model {path} is an SVD adapter; add --adapter svd")
        return Source(singular, path, path)
    return Source(path, None, path)


def load_policy(args, task: Task, log=print) -> Policy:
    """The policy with its adapter and its reference, before any training."""
    device = pick_device(args)
    dtype = pick_dtype(args.dtype, device)
    attention = pick_attention(args, device, dtype)
    source = find_source(args, task, log)
    tokenizer = load_tokenizer(source.tokenizer, args)
    extra = {"attn_implementation": attention} if attention else {}
    base = load_pretrained(source.base, args, device, dtype, **extra)
    if device.type == "cpu" and base.num_parameters() < 5e6:
        torch.set_num_threads(1)  # its operations are too short to share: a second thread waits more than it works
    torch.manual_seed(seed_of(args.seed, "adapter"))
    no_dropout(base)
    model, hf, reference = make_adapter(args.adapter, base, args, source.base, source.adapter, log)
    no_dropout(model)
    if args.gradient_checkpointing:
        hf.activation_checkpointing_enable({"use_reentrant": False})
    policy = Policy(args, task, model.eval(), hf, tokenizer, device, reference)
    task.prepare_model(policy)
    policy.engine = choose_engine(policy, log)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and not any(".reference." in name for name in trained), "the policy is trained, its anchor is not"
    return policy
