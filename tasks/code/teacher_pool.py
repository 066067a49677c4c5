"""Finished rollouts of another run or model that join the groups of a step: `prompt_NNNN.jsonl.gz` files in a folder.

    python train_grpo.py --preset code --model M --write-pool DIR --make-pool 8

makes one from any model and ends; --write-pool alone keeps the rollouts of a run; --teacher-pool mixes a pool in.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import zlib
from pathlib import Path

from data import Group, Prompt, Rollout, Score, Task, TrainingFailed, UserError, rng_of
from harness.files import written_aside

NEEDED = {"problem", "prompt_ids", "completion_ids", "prompt_length", "reward", "flags"}  # of a record


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    teacher_pool: str = ""  # folder of finished rollouts that join every group
    mix: float = 0.5  # share of a group that comes from the pool (at least one rollout from either source)
    split_every: int = 0  # steps between those that measure live and cached gradients apart; 0: never
    write_pool: str = ""  # folder that gets this run's rollouts as a pool
    make_pool: int = 0  # sample every training prompt this often into --write-pool, and end without training


class TeacherPool:
    """Reads, checks and deals the pool of a run. The n-th group's draw is seeded by n; `drawn`, `steps`: its state."""

    columns = {
        "pool_share": "--teacher-pool: share of cached rollouts",
        "pool_hack_rate": "share of the cached rollouts that are hacks",
        "pool_true_pass_rate": "share of the cached rollouts that pass the hidden tests",
    }

    def __init__(self, args):
        if args.teacher_pool and not 0 < args.mix < 1:
            raise UserError("--mix must be over 0 and under 1")
        if args.teacher_pool and args.group < 2:
            raise UserError("--teacher-pool needs --group 2 or more: one live and one finished rollout")
        if args.make_pool < 0 or (args.make_pool and not args.write_pool):
            raise UserError("--make-pool N, rollouts of each prompt, needs --write-pool DIR")
        self.args = args
        self.drawn = 0  # draws of groups so far
        self.steps = 0
        self.records: dict[str, list[dict]] = {}  # problem id -> finished rollouts
        self.written: dict[Path, set[bytes]] = {}  # file -> its lines, hashed

    def prepare(self, policy, task: Task, log=print) -> None:
        """Read the pool; prompts without one leave. UserError where it was made with another tokenizer or template."""
        if not self.args.teacher_pool:
            return
        self.records = read_pool(Path(self.args.teacher_pool))
        kept = [prompt for prompt in task.train if problem_id(prompt) in self.records]
        for prompt in kept:
            record = self.records[problem_id(prompt)][0]
            if record["prompt_ids"] != policy.encode(prompt):
                raise UserError(f"--teacher-pool {self.args.teacher_pool} was made with another tokenizer, template "
                                f"or prompt ({problem_id(prompt)}); make it again with --write-pool")
        if not kept:
            raise UserError(f"--teacher-pool {self.args.teacher_pool} holds no rollout of any training prompt")
        log(f"teacher pool: {len(kept)} of {len(task.train)} prompts have finished rollouts, the others are left out")
        task.set_prompts(kept, task.heldout_prompts)

    def finished(self) -> int:
        """Rollouts of a group that come from the pool."""
        if not self.args.teacher_pool:
            return 0
        wanted = round(self.args.group * self.args.mix)
        return min(max(1, wanted), self.args.group - 1)

    def samples_per_prompt(self) -> int:
        return self.args.group - self.finished()

    @staticmethod
    def is_cached(rollout: Rollout) -> bool:
        return rollout.version[:1] == [-1]  # what the policy sampled begins with a token of its own

    def split(self, rollouts: list[Rollout]) -> list[list[int]]:
        """Places of the live and of the cached rollouts, in the steps where they are measured apart."""
        live = [i for i, row in enumerate(rollouts) if not self.is_cached(row)]
        cached = [i for i, row in enumerate(rollouts) if self.is_cached(row)]
        due = self.args.split_every and (self.steps + 1) % self.args.split_every == 0
        return [live, cached] if due and live and cached else []

    def adjust_groups(self, groups: list[Group]) -> list[Group]:
        """Each group with its finished rollouts, whose rewards and flags are used as they are."""
        if self.args.write_pool:
            self.write(groups)
        if self.args.teacher_pool:
            for group in groups:
                self.fill(group)
        return groups

    def fill(self, group: Group) -> None:
        """Append finished rollouts of the group's prompt, drawn without replacement while there are enough."""
        records = self.records[problem_id(group.prompt)]
        order = rng_of(self.args.seed, "pool", self.drawn).permutation(len(records))
        self.drawn += 1
        for i in range(self.finished()):
            place = order[i % len(records)]
            row, score = as_rollout(records[place], group)
            group.rollouts.append(row)
            group.scores.append(score)

    def rates(self, groups: list[Group]) -> dict[str, float]:
        """The step's `columns`, none where no cached rollout joined."""
        count = 0
        cached = []  # flags
        for group in groups:
            for row, score in zip(group.rollouts, group.scores, strict=True):
                count += 1
                if self.is_cached(row):
                    cached.append(score.flags)
        if not cached:
            return {}
        hacks = sum(flags["hacked"] for flags in cached)
        passes = sum(flags["gt_pass"] for flags in cached)
        return {
            "pool_share": len(cached) / count,
            "pool_hack_rate": hacks / len(cached),
            "pool_true_pass_rate": passes / len(cached),
        }

    def write(self, groups: list[Group]) -> None:
        """Add the scored rollouts to their prompts' files. A resumed run that makes a step again adds nothing twice."""
        for group in groups:
            lines = []
            for i, (row, score) in enumerate(zip(group.rollouts, group.scores, strict=True)):
                if score.reward is not None:
                    record = as_record(row, score) | {"step": self.steps + 1, "row": i}
                    lines.append(json.dumps(record) + "\n")
            path = Path(self.args.write_pool) / f"prompt_{group.prompt.meta['index']:04d}.jsonl.gz"
            try:
                self.append(path, lines)
            except (OSError, EOFError, zlib.error) as error:
                raise TrainingFailed(f"--write-pool: {path} cannot be written: {error}") from error

    def make(self, policy, task: Task, log=print) -> None:
        """Sample every training prompt that fits, and keep what was said with its verdicts."""
        prompts = [prompt for prompt in task.train if policy.fits(prompt)]
        hacks = 0
        passes = 0
        for at in range(0, len(prompts), self.args.prompts):
            some = prompts[at : at + self.args.prompts]
            rolled = policy.sample(some, self.args.make_pool, self.args.temperature, f"pool {at}")
            groups = []
            for rows, scores in zip(rolled, task.score_all(rolled), strict=True):
                groups.append(Group(rows[0].prompt, rows, scores))
            self.write(groups)
            for group in groups:
                hacks += sum(score.flags["hacked"] for score in group.scores)
                passes += sum(score.flags["gt_pass"] for score in group.scores)
            done = min(at + self.args.prompts, len(prompts))
            log(f"{done} of {len(prompts)} prompts: {hacks} hacks, {passes} true passes")
        log(f"wrote {self.args.write_pool}; mix it into a run with --teacher-pool {self.args.write_pool}")

    def append(self, path: Path, lines: list[str]) -> None:
        """Add the lines that a file lacks; it changes whole or not at all."""
        before = path.read_bytes() if path.is_file() else b""
        if path not in self.written:
            lines_before = gzip.decompress(before).decode().splitlines(True)
            self.written[path] = {line_hash(line) for line in lines_before}
        new = [line for line in lines if line_hash(line) not in self.written[path]]
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
            added = gzip.compress("".join(new).encode(), mtime=0)
            with written_aside(path) as part:
                part.write_bytes(before + added)
            self.written[path] |= {line_hash(line) for line in new}


def line_hash(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=16).digest()


def problem_id(prompt: Prompt) -> str:
    return prompt.meta["problem"]["id"]


def read_pool(folder: Path) -> dict[str, list[dict]]:
    """Problem id -> its finished rollouts. UserError where there is none, or a record lacks something."""
    records: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("prompt_*.jsonl.gz")):
        try:
            for line in gzip.decompress(path.read_bytes()).decode().splitlines():
                record = json.loads(line)
                check_record(record)
                records.setdefault(record["problem"], []).append(record)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"--teacher-pool: {path} cannot be used: {error}") from error
    if not records:
        raise UserError(f"--teacher-pool {folder}: there is no prompt_NNNN.jsonl.gz with a rollout in it")
    return records


def check_record(record: dict) -> None:
    """ValueError(reason) where a record is no finished rollout."""
    if missing := NEEDED - record.keys():
        raise ValueError(f"a record without {', '.join(sorted(missing))}")
    if not record["completion_ids"] or record["prompt_length"] != len(record["prompt_ids"]):
        raise ValueError("a record whose lengths do not agree")


def as_record(row: Rollout, score: Score) -> dict:
    """A scored rollout as a pool keeps it."""
    return {
        "problem": problem_id(row.prompt),
        "prompt_ids": row.ids[: row.prompt_length],
        "prompt_length": row.prompt_length,
        "completion_ids": row.ids[row.prompt_length :],
        "logp": row.logp,
        "entropy": row.entropy,
        "stop": row.stop,
        "text": row.text,
        "reward": score.reward,
        "parts": score.parts,
        "flags": score.flags,
    }


def as_rollout(record: dict, group: Group) -> tuple[Rollout, Score]:
    """A finished rollout and its score, as the step sees them. Its version is -1: other weights wrote it."""
    said = record["completion_ids"]
    unknown = [0.0] * len(said)
    row = Rollout(
        group.prompt,
        ids=record["prompt_ids"] + said,
        mask=[1] * len(said),
        logp=list(record.get("logp") or unknown),
        entropy=list(record.get("entropy") or unknown),
        version=[-1] * len(said),
        stop=record.get("stop", "stop"),
        turns=[{"role": "assistant", "content": record.get("text", "")}],
    )
    parts = record.get("parts") or {"correct": record["reward"]}
    flags = record["flags"] | {"source": "pool"}
    return row, Score(record["reward"], dict(parts), flags)
