"""What several tests share: random tiny models with a word-level tokenizer, and rollouts made by hand."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gzip
import json
import os
import signal
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import hypothesis
import torch
import transformers

import harness.flags
import harness.stop
import models.policy
import plot_run
import train_grpo
from data import Group, Prompt, Rollout, Score, Task
from engine import attention

harness.flags.args_class = functools.cache(harness.flags.args_class)
hypothesis.settings.register_profile(  # a busy machine is no fault of what is tested
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")
torch.set_num_threads(1)  # several small models: a second thread waits more than it works


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: --run-slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@contextlib.contextmanager
def quick(seconds: float = 1.0):
    """What is within takes less processor time of this process. The clock, which a busy machine holds up, counts for
    nothing; what hangs without computing is ended by the suite's own time-out."""
    used = time.process_time()
    yield
    assert time.process_time() - used < seconds


def until(condition, pause: float = 0.01) -> None:
    """Wait for an event, however long a busy machine takes; the suite's own time-out ends what never comes."""
    while not condition():
        time.sleep(pause)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie, which nobody has waited for yet, has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


class WordTask(Task):
    """Ten plain-text prompts of words w3 … w9; the reward is the share of even token ids."""

    parts = ("even",)

    def prompts(self, n):
        return [Prompt(f"w{3 + i % 7} w{4 + i % 5}", meta={"index": i}) for i in range(n)]

    def heldout(self):
        return [Prompt("w5 w6 w7")]


def word_tokenizer(vocab: int = 32, pad: str = "<pad>", eos: str = "<eos>"):
    """Ids: 0 <pad>, 1 <eos>, 2 <end>, then w3, w4, …; text is split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, vocab)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=pad, eos_token=eos)


def random_model(kind: str = "llama", vocab: int = 32, dtype=torch.float32, seed: int = 0):
    """A random model whose next-token distribution depends clearly on its context."""
    torch.manual_seed(seed)
    shared = {"vocab_size": vocab, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared)
    else:
        name = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "mistral": "MistralConfig"}[kind]
        config = getattr(transformers, name)(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, initializer_range=0.3, **shared)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def make_args(*flags: str):
    """Resolved flags for tests: no files, few tokens."""
    common = ["--task", "math", "--adapter", "none", "--beta", "0", "--max-new", "8"]
    return harness.flags.resolve_args(train_grpo.Args, [*common, *flags])[0]


ENGINE = "generate"  # of the policies that make_policy makes; a test file may run its tests with each


def make_policy(*flags: str, kind: str = "llama", dtype=torch.float32, tokenizer=None, task=None, seed: int = 0):
    """A Policy around a random model, on the CPU."""
    args = make_args(*flags)
    model = random_model(kind, dtype=dtype, seed=seed)
    if ENGINE == "fast":
        assert attention.install_attention(model)
    return models.policy.Policy(args, task or WordTask(args), model, model, tokenizer or word_tokenizer(), model.device,
                             engine=ENGINE)


def hand_rollout(prompt_ids, completion_ids, *, mask=None, logp=None, stop="stop", prompt=None) -> Rollout:
    n = len(completion_ids)
    return Rollout(prompt or Prompt("w3"), [*prompt_ids, *completion_ids], list(mask or [1] * n),
                   list(logp or [0.0] * n), [0.0] * n, [0] * n, stop, [{"role": "assistant", "content": ""}])


def with_flags(args, **values):
    return dataclasses.replace(args, **values)


WORDS_TASK = '''
from data import Prompt, Sampler, Score, Task


class Words(Task):
    """Plain-text prompts of words; the reward is the share of even words, and a little for a large first one."""

    parts = ("even", "first")
    columns = ("seen",)

    def __init__(self, args):
        super().__init__(args)
        self.sampler, self.seen = Sampler(12, args.seed, alpha=0), 0

    def prompts(self, n):
        return [Prompt(f"w{3 + i} w{4 + i % 5}") for i in self.sampler.draw(n)]

    def heldout(self):
        return [Prompt(f"w{20 + i} w5 w7") for i in range(4)]

    def score(self, rollouts):
        scores = []
        for row in rollouts:
            words = [int(word[1:]) for word in row.text.split() if word[1:].isdigit()]
            even = sum(word % 2 == 0 for word in words) / max(1, len(words))
            parts = {"even": even, "first": 0.1 * bool(words and words[0] > 16)}
            scores.append(Score(sum(parts.values()), parts, {"correct": even > 0.5}))
        return scores

    def observe(self, groups):
        self.seen += len(groups)
        return {"seen": self.seen}

    def state_dict(self):
        return {"sampler": self.sampler.state_dict(), "seen": self.seen}

    def load_state_dict(self, state):
        self.sampler.load_state_dict(state["sampler"])
        self.seen = state["seen"]
'''
CHAT = ("{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}<end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}w3{% endif %}")


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A random model on disk, a task whose rewards differ within its groups, and flags for a short run of both."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    random_model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "words.py").write_text(WORDS_TASK)
    model = ["--model", str(folder / "model"), "--adapter", "none", "--beta", "0", "--lr", "1e-3", "--prompts", "2",
             "--group", "4", "--max-new", "5", "--overlong", "keep", "--steps", "2"]
    return types.SimpleNamespace(folder=folder, model=model, file=folder / "words.py",
                                 flags=["--task", f"{folder / 'words.py'}:Words", *model])


PLOT_RUN = plot_run.plot_run


@dataclasses.dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """Runs the command line within this process, without pictures."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*argv, main=train_grpo.main) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
            if plot_run.plot_run is PLOT_RUN:  # unless a test has put something else there
                patch.setattr(plot_run, "plot_run", lambda folder: [])
            harness.stop.run_command(lambda: main([str(word) for word in argv]))
        return Ended(ended.value.code, *capsys.readouterr())

    yield run
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def read_csv(folder) -> list[dict[str, str]]:
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path) -> list[dict]:
    """The records of a file in which every line is strict JSON."""
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    path = Path(path)
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Bigram(torch.nn.Module):
    """A language model whose logits are one row of a table: its probabilities can be worked out by hand."""

    def __init__(self, table, dtype=torch.float64):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table, dtype=dtype))
        self.config = types.SimpleNamespace(max_position_embeddings=64)
        self.config.get_text_config = lambda: self.config
        self.generation_config = types.SimpleNamespace(eos_token_id=1)
        self.calls = []

    def forward(self, input_ids, attention_mask=None, use_cache=False, logits_to_keep=0):
        self.calls.append(tuple(input_ids.shape))
        return types.SimpleNamespace(logits=self.table[input_ids])


def bigram_policy(table, *flags: str, reference=None):
    """A Policy around a Bigram, in float64; `reference` is the table of a frozen one."""
    args = make_args(*flags)
    model = Bigram(table)
    frozen = Bigram(reference).requires_grad_(False) if reference is not None else None
    return models.policy.Policy(args, WordTask(args), model, model, word_tokenizer(), torch.device("cpu"), frozen)


def new_state(args, **values) -> train_grpo.State:
    """The part of the loop's state that an update reads and writes."""
    known = {"beta_control": train_grpo.BetaControl(args.beta), "task": {}, "micro_tokens": args.micro_tokens or 8192}
    return train_grpo.State(**known | values)


def grads_of(model) -> dict:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def scored(rollouts, rewards):
    """A group of these rollouts with these rewards, None where unscorable."""
    return Group(rollouts[0].prompt, list(rollouts), [Score(r, {"even": r} if r is not None else {}) for r in rewards])
