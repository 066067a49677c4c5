"""What the model sees: prompts, rollouts, scores, the one task interface, and reading records.

This module imports nothing of the project (the registry imports a task by name, when one is asked for).
"""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import hashlib
import importlib
import importlib.util
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np


class UserError(Exception):
    """A user's mistake. Its text is one sentence that names the fix; the command ends with exit code 2."""


class TrainingFailed(Exception):
    """The training cannot go on; its text says why. The command ends with exit code 3."""


# ------------------------------------------------------------------------------------------------ the interface
@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One problem. `messages` are chat messages, or a plain string that is fed as it stands, without a template.

    `gold` is whatever the task's scorer compares with; `meta` holds anything else (`tools`: schemas for the chat
    template). `inject` is an optional activation (D,) that the task adds to the residual stream.
    """

    messages: list[dict] | str
    gold: Any = None
    meta: dict = dataclasses.field(default_factory=dict)
    inject: Any = None


@dataclasses.dataclass(eq=False)
class Rollout:
    """One sampled conversation. With L prompt tokens and T tokens after them:

    ids      (L + T,) prompt, everything the policy wrote, everything it was shown in between
    mask     (T,) 1 where the policy sampled the token, 0 for an observation
    logp     (T,) log-probability under the distribution that was sampled (nats; 0 for observations)
    entropy  (T,) entropy of that distribution (nats; NaN where the sampler could not tell)
    version  (T,) optimizer step of the weights that wrote the token, -1 for observations
    stop     'stop' (a stop id), 'length' (the token limit), 'context' (no room left), 'unfinished' (turns ran out)
    turns    the messages that followed the prompt: the policy's and the replies to them
    """

    prompt: Prompt
    ids: list[int]
    mask: list[int]
    logp: list[float]
    entropy: list[float]
    version: list[int]
    stop: str
    turns: list[dict]

    def __post_init__(self):
        lengths = {len(self.mask), len(self.logp), len(self.entropy), len(self.version)}
        assert len(lengths) == 1 and len(self.mask) <= len(self.ids), "mask, logp, entropy and version are one length"

    @property
    def prompt_length(self) -> int:
        return len(self.ids) - len(self.mask)

    @property
    def text(self) -> str:
        """What the policy wrote, its turns joined by newlines."""
        return "\n".join(turn["content"] for turn in self.turns if turn["role"] == "assistant")

    @property
    def truncated(self) -> bool:
        return self.stop in ("length", "context")


@dataclasses.dataclass
class Score:
    """The judgement of one rollout. `parts` are named numbers that add up to `reward`; `flags` are watched only.

    `reward` None means unscorable: the rollout leaves its group's statistics and is not trained on.
    Flags with a meaning to the loop and to evaluation: `correct` (bool, the true verdict behind `accuracy`) and
    `answer` (str or None, what maj@k votes on).
    """

    reward: float | None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def unscorable(cls, reason: str) -> Score:
        return cls(None, {}, {"unscorable": reason})


@dataclasses.dataclass(eq=False)
class Group:
    """A prompt, its rollouts, and what the step finds out about them, row by row.

    An `auxiliary` group is one that a task adds beside the step's prompts (questions that the policy wrote): it is
    trained without KL and stays out of the reward columns.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    scores: list[Score] = dataclasses.field(default_factory=list)
    advantages: list[float] = dataclasses.field(default_factory=list)
    auxiliary: bool = False


class ModelHooks:
    """Where a task looks into the model and its gradient: nla adds activations, code projects the gradient."""

    def prepare_model(self, policy) -> None:
        """Once, before the optimizer exists: hooks, directions. `policy` has model, tokenizer and sample()."""

    def on_forward(self, prompts: list[Prompt]) -> None:
        """Before any forward that feeds prompt tokens: the prompts of its rows, in row order (for `inject`)."""

    def split(self, rollouts: list[Rollout]) -> list[list[int]]:
        """Indices of an optimizer step's rollouts by source, whose gradients are summed one source after the other,
        with `on_part` after each; empty: all at once."""
        return []

    def on_logps(self, rollouts: list[Rollout], logp) -> None:
        """Log-probabilities (b, T) of a micro-batch's sampled tokens under the current weights, 0 elsewhere."""

    def on_part(self, policy) -> None:
        """The gradients so far, after a source of `split`."""

    def on_gradients(self, policy) -> dict[str, float]:
        """When the step's gradients are whole, before the guard and clipping; may change them; returns metrics."""
        return {}


class WarmStart:
    """What a task can show a model before GRPO, or beside it: the supervised warm start and --bc-coef."""

    def start_from(self) -> str:
        """A model, or an adapter on its base, to begin from instead of --model; empty: --model."""
        return ""

    def demonstration_prompts(self) -> list[Prompt]:
        """The prompts that the warm start draws from (never a held-out one)."""
        raise UserError("--model tiny, the default, learns from a task's demonstrations, and "
                        f"{type(self).__name__} has none; name a model with --model")

    def demonstrations(self, prompts: list[Prompt]) -> list[list[dict]]:
        """For each prompt the messages that follow it in a worked example: the supervised warm start's data."""
        raise NotImplementedError

    def worked_turn(self, rollout: Rollout) -> str | None:
        """The right next turn of a conversation, what --bc-coef imitates; None: there is none, or it is not known."""
        return None


class Reports:
    """What a task adds to evaluations, logs and checkpoints."""

    columns: ClassVar[Mapping[str, str] | Sequence[str]] = ()  # names that `observe` returns, with their meanings
    eval_columns: ClassVar[Mapping[str, str] | Sequence[str]] = ()  # names that `observe_eval` returns
    console: ClassVar[tuple[str, ...]] = ()  # columns that the console's line of a step shows too

    def observe_eval(self, groups: list[Group]) -> dict[str, float]:
        """Further metrics of an evaluation's greedy groups."""
        return {}

    def eval_fields(self, index: int, group: Group) -> dict[str, Any]:
        """Further fields of a held-out prompt's record in eval.jsonl; `curves` are drawn by plot_run.py (see there)."""
        return {}

    def report(self, step: int, records: list[dict], folder: Path) -> list[str]:
        """After an evaluation of a run: lines for the console; may write files of its own into the run's folder."""
        return []

    def summary(self, rows: list[dict]) -> list[str]:
        """Lines for the console at the run's end. Raises TrainingFailed where the run came to nothing."""
        return []

    def save(self, folder: Path) -> None:
        """Write what is no plain JSON (a critic's tensors) into a checkpoint that is being made, before the policy's
        weights; the checkpoint is kept whole or not at all."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. KeyError, OSError or UserError where it does not fit."""


class Task(ModelHooks, WarmStart, Reports):
    """The interface between the loop and a problem. A newcomer's task overrides `prompts` and `heldout` (or calls
    `set_prompts` in `__init__`) and `score`; what few tasks need is in the three classes above. A task is built from
    the resolved flags, to which `Options` adds its own, and owns its data."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Flags of this task, in the style of `Args`: one typed field a flag, its comment is the help."""

    parts: ClassVar[tuple[str, ...]] = ()  # of the reward, so that the columns are known before the first row
    template_kwargs: ClassVar[dict] = {}  # passed to the chat template, e.g. {"enable_thinking": False}

    def __init__(self, args):
        self.args = args
        self.notes: list[str] = []  # one sentence each, for the console at the start (dropped records and the like)
        self.train: list[Prompt] = []
        self.heldout_prompts: list[Prompt] = []
        self.run_folder: Path | None = None  # of the run, once there is one
        self.sampler: Sampler | None = None

    def prompts(self, n: int) -> list[Prompt]:
        """The next `n` training prompts."""
        if self.sampler is None:
            raise UserError("no training prompts are left: those of --data are those of --eval-data")
        return [self.train[i] for i in self.sampler.draw(n)]

    def heldout(self) -> list[Prompt]:
        """The fixed evaluation prompts: no training prompt is among them."""
        return self.heldout_prompts

    def turns(self) -> int:
        """Assistant turns that a rollout may take where the task replies."""
        return self.args.max_turns

    def reply(self, rollout: Rollout) -> list[dict] | None:
        """The messages that follow the policy's last turn (a tool's answer, a refinement), or None: it is over.

        With --async-workers it is called from several threads at once, so it changes nothing of the task."""
        return None

    def score(self, rollouts: list[Rollout]) -> list[Score]:
        """Judge a whole group. A completion that breaks its own scoring gets that as its result, not an exception."""
        raise NotImplementedError

    def observe(self, groups: list[Group]) -> dict[str, float]:
        """After the step: curriculum, critic, metrics (the names in `columns`)."""
        return {}

    def state_dict(self) -> dict:
        """Everything that decides which prompts come next, as plain JSON types."""
        return {"sampler": self.sampler.state_dict() if self.sampler else None}

    def load_state_dict(self, state: dict) -> None:
        if self.sampler and state["sampler"]:
            self.sampler.load_state_dict(state["sampler"])

    def set_prompts(self, train: list[Prompt], heldout: list[Prompt], alpha: float = 0.0) -> None:
        """Make these the prompts, with a sampler begun anew; each training prompt's `meta["index"]` is its place."""
        self.train = [dataclasses.replace(prompt, meta={**prompt.meta, "index": i}) for i, prompt in enumerate(train)]
        self.heldout_prompts = heldout
        self.alpha = alpha
        self.sampler = Sampler(len(train), self.args.seed, alpha) if train else None

    def drop_prompts(self, usable: Callable[[Prompt], bool]) -> int:
        """Drop the prompts that are not `usable` (too long for the context); returns how many were dropped."""
        train = [prompt for prompt in self.train if usable(prompt)]
        heldout = [prompt for prompt in self.heldout_prompts if usable(prompt)]
        dropped = len(self.train) + len(self.heldout_prompts) - len(train) - len(heldout)
        if self.train and not train:
            raise UserError("no training prompt fits; check --max-prompt, --max-new and the model's context length")
        if dropped:
            self.set_prompts(train, heldout, self.alpha)
        return dropped

    def samples_per_prompt(self) -> int:
        """Completions that are sampled for each prompt; fewer than --group where `adjust_groups` adds finished ones."""
        return self.args.group

    def adjust_groups(self, groups: list[Group]) -> list[Group]:
        """The scored groups as the advantages see them: finished rollouts may join one, auxiliary groups may follow."""
        return groups

    def score_all(self, groups: list[list[Rollout]]) -> list[list[Score] | Exception]:
        """Judge the groups of a step; overridden where a batch is cheaper. A failure is that group's result."""
        results: list[list[Score] | Exception] = []
        for group in groups:
            try:
                results.append(self.score(group))
            except UserError:
                raise
            except Exception as error:
                results.append(error)
        return results


# ------------------------------------------------------------------------------------------------ task registry
TASKS = {
    "math": "tasks.math.task:MathTask",
    "nla": "tasks.nla.task:NlaTask",
    "code": "tasks.code.task:CodeTask",
    "custom": "tasks.custom:CustomTask",
    "physics": "tasks.physics.task:PhysicsTask",
    "tools": "tasks.tools.task:ToolTask",
}


def load_task(spec: str) -> type[Task]:
    """The task class for a registered name or `path/to/file.py:Class`."""
    if spec in TASKS:
        module, _, name = TASKS[spec].partition(":")
        return getattr(importlib.import_module(module), name)
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--task {spec}: unknown task{nearest(spec, TASKS)}; give one of {', '.join(TASKS)} "
                        "or path/to/file.py:Class")
    if not Path(path).is_file():
        raise UserError(f"--task {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up by name
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"--task {spec}: {path} fails to import: {type(error).__name__}: {error}") from error
    task = getattr(module, name, None)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise UserError(f"--task {spec}: {path} has no class {name} that derives from data.Task")
    return task


def nearest(name: str, names) -> str:
    """' (did you mean X?)', or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


# ------------------------------------------------------------------------------------------------ randomness
def seed_of(seed: int, *key: int | str) -> int:
    """A 63-bit seed for one purpose. Every draw of a run comes from a generator seeded by (run seed, purpose, step, …),
    never from a stream, so that a resume has nothing to restore."""
    digest = hashlib.blake2b(json.dumps([seed, *key]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rng_of(seed: int, *key: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose, see `seed_of`."""
    return np.random.default_rng(seed_of(seed, *key))


# ------------------------------------------------------------------------------------------------ reading records
class BadRecords:
    """Counts unusable records by reason and remembers where the first of each was."""

    def __init__(self, source: str):
        self.source, self.total = source, 0
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, where: str) -> None:
        self.reasons[reason] += 1
        self.first.setdefault(reason, where)

    def describe(self) -> str:
        """'3 of 10 records of f.jsonl cannot be used: not JSON 2 (first: line 4), no gold 1 (first: line 7)'."""
        reasons = ", ".join(f"{why} {n} (first: {self.first[why]})" for why, n in self.reasons.most_common())
        return f"{self.reasons.total()} of {self.total} records of {self.source} cannot be used: {reasons}"

    def check(self, limit: float) -> list[str]:
        """The note for the console. Raises where none is usable or more than the share `limit` is not."""
        bad = self.reasons.total()
        if self.total == 0:
            raise UserError(f"{self.source} holds no records")
        if bad == self.total or bad > limit * self.total:
            raise UserError(f"{self.describe()}; over --max-bad-records {limit:g}")
        return [self.describe()] if bad else []


def read_records(source: str, bad: BadRecords, split: str = "train") -> Iterator[tuple[dict, str]]:
    """Yields (record, where it stands) from a local .jsonl(.gz), .json or .parquet file, else from the hub.

    A hub id may name its configuration, `openai/gsm8k:main`. A line that is not a JSON object is counted in `bad`.
    """
    path = Path(source)
    if path.is_dir():
        raise UserError(f"{source} is a folder; name a .jsonl, .json or .parquet file in it")
    if path.is_file():
        yield from from_file(path, bad)
    elif path.suffix in (".jsonl", ".json", ".parquet", ".gz") or source.startswith(("/", ".", "~")):
        raise UserError(f"there is no data file {source}")
    else:
        yield from from_hub(source, bad, split)


def load_prompts(source: str, convert: Callable[[dict], Prompt | None], max_bad: float, split: str = "train"
                 ) -> tuple[list[Prompt], list[str]]:
    """All usable prompts of a source, and notes on the ones that are not.

    `convert` turns a record into a Prompt, or None where it is left out by choice, or raises ValueError(reason).
    """
    bad, out = BadRecords(source), []
    for record, where in read_records(source, bad, split):
        try:
            out.append(convert(record))
        except ValueError as reason:
            bad.add(str(reason), where)
    return [prompt for prompt in out if prompt is not None], bad.check(max_bad)


def train_and_heldout(args, convert: Callable[[dict], Prompt | None]) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Training and held-out prompts of --data / --eval-data, and notes.

    Held-out prompts come from --eval-data, else from the hub data set's test split, else they are cut from the
    local file by seed (at most a tenth of it). --eval-size of them are kept, drawn by seed 0 so that every run of a
    sweep is measured on the same ones.
    """
    train, notes = load_prompts(args.data, convert, args.max_bad_records)
    order = rng_of(0, "heldout")
    if args.eval_data or not is_local(args.data):
        source = args.eval_data or args.data
        held, more = load_prompts(source, convert, args.max_bad_records, split="test")
        notes += more
        picked = order.permutation(len(held))[: args.eval_size]
        held = [held[i] for i in sorted(picked)]
    else:
        count = min(args.eval_size, len(train) // 10) if args.eval_size else 0
        picked = set(order.permutation(len(train))[:count].tolist())
        held = [prompt for i, prompt in enumerate(train) if i in picked]
        train = [prompt for i, prompt in enumerate(train) if i not in picked]
        notes.append((f"{count} held-out prompts were cut from {args.data}" if count else "nothing is held out")
                     + "; --eval-data names a file of their own")
    return train[: args.limit or None], held, notes


def without_heldout(train: list[Prompt], heldout: list[Prompt], key: Callable[[Prompt], str], noun: str
                    ) -> tuple[list[Prompt], list[str]]:
    """Decontamination: the training prompts whose `key` no held-out one has, and the note on the others, called `noun`
    (none where none is left: then both are the same data)."""
    seen = {key(prompt) for prompt in heldout}
    kept = [prompt for prompt in train if key(prompt) not in seen]
    removed = len(train) - len(kept)
    notes = [f"{removed} training {noun} are also held-out ones and were removed"] if kept and removed else []
    return kept, notes


def from_file(path: Path, bad: BadRecords) -> Iterator[tuple[dict, str]]:
    """(record, where it stands) of a .jsonl(.gz), .json or .parquet file."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
            lines = (row for batch in batches for row in batch.to_pylist())
        elif path.suffix == ".json":
            lines = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(lines, list):
                raise UserError(f"{path} must hold a JSON list of records")
        else:
            with path.open("rb") as magic:
                opener = gzip.open if magic.read(2) == b"\x1f\x8b" else open
            lines = opener(path, "rt", encoding="utf-8-sig", errors="replace")
        for number, line in enumerate(lines, 1):
            if isinstance(line, str) and not line.strip():
                continue
            bad.total += 1
            try:
                record = json.loads(line) if isinstance(line, str) else line
                json.dumps(record, ensure_ascii=False, default=str).encode()  # half a surrogate pair is no text
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record, f"line {number}"
            else:
                bad.add("not a JSON object", f"line {number}")
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def from_hub(source: str, bad: BadRecords, split: str) -> Iterator[tuple[dict, str]]:
    """(record, where it stands) of a hub data set, `name` or `name:configuration`."""
    from datasets import load_dataset

    name, _, config = source.partition(":")
    try:
        rows = load_dataset(name, config or None, split=split)
    except Exception as error:  # offline, unknown id, gated: datasets raises a different class for each
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{source} (split {split}) is no local file and the hub gave no such data set "
                        f"({type(error).__name__}: {reason}); give a local file with --data / --eval-data") from error
    for number, record in enumerate(rows, 1):
        bad.total += 1
        yield record, f"row {number}"


def is_local(source: str) -> bool:
    """Whether a data source is a file (or looks like one) rather than a hub id."""
    return Path(source).is_file() or source.endswith((".jsonl", ".json", ".parquet", ".gz"))


# ------------------------------------------------------------------------------------------------ which prompt next
class Sampler:
    """Deals training indices without replacement within a draw, more often where the policy wins about half.

    Weight of a prompt seen before: max((1 - 2·|win rate - 0.5|)^alpha, 0.05); 0.75 where unseen. alpha 0 is uniform:
    then every prompt comes once before any comes twice.
    """

    def __init__(self, size: int, seed: int, alpha: float):
        if size == 0:
            raise UserError("no training prompts are left; check --data, --limit and the counts of dropped records")
        self.size, self.seed, self.alpha = size, seed, alpha
        self.draws = self.dealt = 0
        self.tries = np.zeros(size, dtype=np.int64)
        self.wins = np.zeros(size, dtype=np.int64)

    def draw(self, n: int) -> list[int]:
        """`n` indices; they are distinct unless there are fewer than `n` prompts."""
        self.draws += 1
        if self.alpha == 0:
            out = []
            for place in range(self.dealt, self.dealt + n):
                epoch, i = divmod(place, self.size)
                if not out or i == 0:
                    order = rng_of(self.seed, "epoch", epoch).permutation(self.size)
                out.append(int(order[i]))
            self.dealt += n
            return out
        rng, out = rng_of(self.seed, "draw", self.draws), []
        while len(out) < n:  # exponential keys: a weighted sample without replacement (Efraimidis and Spirakis 2006)
            keys = rng.exponential(size=self.size) / self.weights()
            out += np.argsort(keys, kind="stable")[: n - len(out)].tolist()
        return out

    def weights(self) -> np.ndarray:
        rate = self.wins / np.maximum(self.tries, 1)
        informative = np.maximum((1 - 2 * np.abs(rate - 0.5)) ** self.alpha, 0.05)
        return np.where(self.tries > 0, informative, 0.75)

    def record(self, index: int, tries: int, wins: int) -> None:
        self.tries[index] += tries
        self.wins[index] += wins

    def state_dict(self) -> dict:
        seen = np.flatnonzero(self.tries)
        counts = [[int(i), int(self.tries[i]), int(self.wins[i])] for i in seen]
        return {"size": self.size, "draws": self.draws, "dealt": self.dealt, "counts": counts}

    def load_state_dict(self, state: dict) -> None:
        if state["size"] != self.size:
            raise UserError(f"the checkpoint has {state['size']} training prompts, the data now give {self.size}")
        self.draws, self.dealt = state["draws"], state["dealt"]
        for index, tries, wins in state["counts"]:
            self.tries[index], self.wins[index] = tries, wins
