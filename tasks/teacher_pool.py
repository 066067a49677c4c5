"""Finished rollouts of another run or model that join the groups of a step: `prompt_NNNN.jsonl.gz` files in a folder.

    python -m tasks.coding make-pool --model M --out DIR [-n 8] [flags of train_grpo.py, presets too]

writes one from any model; --write-pool keeps the rollouts of a run as one; --teacher-pool mixes one into a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path

from data import Group, Rollout, Score, Task, TrainingFailed, UserError, load_task, rng_of


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    teacher_pool: str = ""  # folder of finished rollouts that join every group
    mix: float = 0.5  # share of a group that comes from the pool (at least one rollout from either source)
    split_every: int = 0  # steps between those that measure live and cached gradients apart; 0: never
    write_pool: str = ""  # folder that gets this run's rollouts as a pool


class TeacherPool:
    """Reads, checks and deals the pool of a run. The n-th group's draw is seeded by n; `drawn`, `steps`: its state."""

    columns = ("pool_share", "pool_hack_rate", "pool_true_pass_rate")

    def __init__(self, args):
        if args.teacher_pool and not 0 < args.mix < 1:
            raise UserError("--mix must be over 0 and under 1")
        if args.teacher_pool and args.group < 2:
            raise UserError("--teacher-pool needs --group 2 or more: one live and one finished rollout")
        self.args, self.drawn, self.steps = args, 0, 0
        self.records: dict[str, list[dict]] = {}  # problem id -> finished rollouts
        self.written: dict[Path, set[bytes]] = {}  # file -> its lines, hashed

    def prepare(self, policy, task: Task, say=print) -> None:
        """Read the pool; prompts without one leave. UserError where it was made with another tokenizer or template."""
        if not self.args.teacher_pool:
            return
        self.records = read_pool(Path(self.args.teacher_pool))
        kept = [prompt for prompt in task.train if prompt.meta["problem"]["id"] in self.records]
        for prompt in kept:
            record = self.records[prompt.meta["problem"]["id"]][0]
            if record["prompt_ids"] != policy.encode(prompt):
                raise UserError(f"--teacher-pool {self.args.teacher_pool} was made with another tokenizer, template "
                                f"or prompt ({prompt.meta['problem']['id']}); make it again with --write-pool")
        if not kept:
            raise UserError(f"--teacher-pool {self.args.teacher_pool} holds no rollout of any training prompt")
        say(f"teacher pool: {len(kept)} of {len(task.train)} prompts have finished rollouts, the others are left out")
        task.deal(kept, task.held)

    def finished(self) -> int:
        """Rollouts of a group that come from the pool."""
        if not self.args.teacher_pool:
            return 0
        return min(max(1, round(self.args.group * self.args.mix)), self.args.group - 1)

    def live(self) -> int:
        return self.args.group - self.finished()

    @staticmethod
    def is_cached(rollout: Rollout) -> bool:
        return rollout.version[:1] == [-1]  # what the policy sampled begins with a token of its own

    def split(self, rollouts: list[Rollout]) -> list[list[int]]:
        """Places of the live and of the cached rollouts, in the steps where they are measured apart."""
        places = [[i for i, row in enumerate(rollouts) if self.is_cached(row) == cached] for cached in (False, True)]
        due = self.args.split_every and (self.steps + 1) % self.args.split_every == 0
        return places if due and all(places) else []

    def regroup(self, groups: list[Group]) -> list[Group]:
        """Each group with its finished rollouts, whose rewards and flags are used as they are."""
        if self.args.write_pool:
            self.write(groups)
        for group in groups if self.args.teacher_pool else ():
            records = self.records[group.prompt.meta["problem"]["id"]]
            picked = rng_of(self.args.seed, "pool", self.drawn).permutation(len(records))
            self.drawn += 1
            for i in range(self.finished()):
                row, score = as_rollout(records[picked[i % len(records)]], group)
                group.rollouts.append(row)
                group.scores.append(score)
        return groups

    def rates(self, groups: list[Group]) -> dict[str, float]:
        pairs = [(r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)]
        flags = [s.flags for r, s in pairs if self.is_cached(r)]
        if not flags:
            return {}
        return {"pool_share": len(flags) / len(pairs), "pool_hack_rate": sum(f["hacked"] for f in flags) / len(flags),
                "pool_true_pass_rate": sum(f["gt_pass"] for f in flags) / len(flags)}

    def write(self, groups: list[Group]) -> None:
        """Add the scored rollouts to their prompts' files. A resumed run that makes a step again adds nothing twice."""
        for group in groups:
            problem = group.prompt.meta["problem"]["id"]
            lines = [json.dumps({
                "problem": problem, "prompt_ids": row.ids[: row.prompt_length], "prompt_length": row.prompt_length,
                "completion_ids": row.ids[row.prompt_length :], "logp": row.logp, "entropy": row.entropy,
                "stop": row.stop, "text": row.text, "reward": score.reward, "parts": score.parts, "flags": score.flags,
                "step": self.steps + 1, "row": i}) + "\n"
                for i, (row, score) in enumerate(zip(group.rollouts, group.scores, strict=True))
                if score.reward is not None]
            path = Path(self.args.write_pool) / f"prompt_{group.prompt.meta['index']:04d}.jsonl.gz"
            try:
                self.append(path, lines)
            except (OSError, EOFError, zlib.error) as error:
                raise TrainingFailed(f"--write-pool: {path} cannot be written: {error}") from error

    def append(self, path: Path, lines: list[str]) -> None:
        """Add the lines that a file lacks; it changes whole or not at all."""
        before = path.read_bytes() if path.is_file() else b""
        if path not in self.written:
            self.written[path] = {line_hash(line) for line in gzip.decompress(before).decode().splitlines(True)}
        new = [line for line in lines if line_hash(line) not in self.written[path]]
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(before + gzip.compress("".join(new).encode(), mtime=0))
            os.replace(part, path)
            self.written[path] |= {line_hash(line) for line in new}


def line_hash(line: str) -> bytes:
    return hashlib.blake2b(line.encode(), digest_size=16).digest()


def read_pool(folder: Path) -> dict[str, list[dict]]:
    """Problem id -> its finished rollouts. UserError where there is none, or a record lacks something."""
    needed = {"problem", "prompt_ids", "completion_ids", "prompt_length", "reward", "flags"}
    records: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("prompt_*.jsonl.gz")):
        try:
            for line in gzip.decompress(path.read_bytes()).decode().splitlines():
                record = json.loads(line)
                if missing := needed - record.keys():
                    raise ValueError(f"a record without {', '.join(sorted(missing))}")
                if not record["completion_ids"] or record["prompt_length"] != len(record["prompt_ids"]):
                    raise ValueError("a record whose lengths do not agree")
                records.setdefault(record["problem"], []).append(record)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"--teacher-pool: {path} cannot be used: {error}") from error
    if not records:
        raise UserError(f"--teacher-pool {folder}: there is no prompt_NNNN.jsonl.gz with a rollout in it")
    return records


def as_rollout(record: dict, group: Group) -> tuple[Rollout, Score]:
    """A finished rollout and its score, as the step sees them. Its version is -1: other weights wrote it."""
    said, count = record["completion_ids"], len(record["completion_ids"])
    row = Rollout(group.prompt, record["prompt_ids"] + said, [1] * count, list(record.get("logp") or [0.0] * count),
                  list(record.get("entropy") or [0.0] * count), [-1] * count, record.get("stop", "stop"),
                  [{"role": "assistant", "content": record.get("text", "")}])
    parts = record.get("parts") or {"correct": record["reward"]}
    return row, Score(record["reward"], dict(parts), dict(record["flags"]) | {"source": "pool"})


# ---- the command
def main(argv: list[str]) -> int:
    """make-pool: sample every training prompt that fits, n times, and keep what was said with its verdicts."""
    import train_grpo

    parser = argparse.ArgumentParser(prog="python -m tasks.coding make-pool", allow_abbrev=False)
    parser.add_argument("--out", required=True, help="folder that gets the pool")
    parser.add_argument("-n", type=int, default=8, help="rollouts of each prompt")
    own, rest = parser.parse_known_args(argv)
    if own.n < 1:
        raise UserError("-n must be 1 or more")
    rest += ["--task", "code", "--write-pool", own.out, "--beta", "0", "--arm", "vanilla"]
    args = train_grpo.resolve_args(rest)[0]
    task = load_task(args.task)(args)
    policy = train_grpo.load_policy(args, task, print)
    prompts = [prompt for prompt in task.train if policy.fits(prompt)]
    if not prompts:
        raise UserError("no training prompt fits; check --data, --max-new and the model's context length")
    hacks = passes = 0
    for at in range(0, len(prompts), args.prompts):
        rolled = policy.sample(prompts[at : at + args.prompts], own.n, args.temperature, f"pool {at}")
        groups = [Group(rows[0].prompt, rows, scores)
                  for rows, scores in zip(rolled, task.score_all(rolled), strict=True)]
        task.pool.write(groups)
        flags = [score.flags for group in groups for score in group.scores]
        hacks, passes = hacks + sum(f["hacked"] for f in flags), passes + sum(f["gt_pass"] for f in flags)
        print(f"{min(at + args.prompts, len(prompts))} of {len(prompts)} prompts: {hacks} hacks, {passes} true passes",
              flush=True)
    print(f"wrote {own.out}; mix it in with --teacher-pool {own.out}")
    return 0
