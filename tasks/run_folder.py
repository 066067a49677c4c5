"""The folder of a run: what is written to it, how a crash or a full disk leaves it whole, and how it is read again.

Nothing here knows of models: a checkpoint is a folder that a function fills, made whole or not at all (`write_folder`).
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import fcntl
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import numpy as np

from data import Group, Task, TrainingFailed, UserError
from tasks import async_rollouts, off_policy

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = """step time tokens tokens_total reward_mean reward_std reward_min reward_max reward_std_group accuracy
    groups_used groups_constant groups_dropped groups_sampled unscorable length_mean length_max truncated_share
    loss policy_loss kl entropy clip_low_share clip_high_share ratio_mean ratio_max logp_gap grad_norm lr beta
    temperature advantage_mean advantage_std skipped_updates filtered_mass seconds_rollout seconds_score
    seconds_update seconds_eval tokens_per_second peak_memory_gb""".split()
EVAL_COLUMNS = ["reward", "accuracy", "pass_at_k", "maj_at_k", "length_mean", "truncated_share"]


def strict_json(value: Any) -> str:
    """JSON on one line: what is not finite is null, NumPy's and torch's numbers are numbers, the rest is text."""
    def clean(x: Any) -> Any:
        if isinstance(x, dict):
            return {str(key): clean(item) for key, item in x.items()}
        if isinstance(x, list | tuple):
            return [clean(item) for item in x]
        x = x.item() if hasattr(x, "item") else x
        if isinstance(x, float) and not math.isfinite(x):
            return None
        return x if x is None or isinstance(x, bool | int | float | str) else str(x)

    return json.dumps(clean(value), allow_nan=False)


class Console:
    """Says one line at a time: to the terminal, above the bar if there is one, and to console.log once it exists."""

    def __init__(self):
        self.lines, self.path, self.bar = [], None, None

    def __call__(self, text: str) -> None:
        try:
            print(text, flush=True) if self.bar is None else self.bar.write(text)
        except BrokenPipeError:  # `| head` has seen enough; the run goes on for its folder
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        except OSError:  # a full disk behind `> log`: the line is lost, the run is not
            pass
        self.lines.append(text + "\n")
        if self.path:
            self.attach(self.path)

    def attach(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(OSError):  # what does not fit now is written with the next line
            append_whole(path, "".join(self.lines).encode())
            self.lines.clear()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync it, rename it: readers see the old one or the whole new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Add to the end of a file: all of it, or nothing where the disk has no room for all."""
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise


def hold(folder: Path) -> typing.IO:
    """The open lock file of a run folder, held by this process alone; the kernel lets it go when the process ends,
    however it ends, and no child inherits it. UserError where a living process has it."""
    try:
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            raise UserError(f"{folder} is in use by a run that is alive, {file.read().strip() or 'another process'}; "
                            "stop that one first, or give another --name") from error
    with contextlib.suppress(OSError):  # a file system without locks, or without room: the run goes on without
        file.truncate(0)
        print(f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T')}", file=file, flush=True)
    return file


def folder_exists(folder: Path) -> UserError:
    if not is_run(folder):
        return UserError(f"{folder} exists and is no run, so nothing replaces it; give another --name")
    return UserError(f"{folder} exists; go on with --resume {folder}, replace it with --overwrite, or give another "
                     "--name")


class Run:
    """The folder of a run and everything written to it but the checkpoints.

    What the disk refuses waits in memory, in order, and is written with the next piece; a checkpoint comes after all
    that was logged before it. So a full disk loses nothing if it gets room before the run ends.
    """

    def __init__(self, folder: Path, task: Task, args, say=print, lock: typing.IO | None = None):
        self.folder, self.say, self.lock, self.report = folder, say, lock, task.report
        self.waiting: list[tuple[Path, bytes, bool]] = []  # (file, bytes, whether they are added to its end)
        self.refused, self.saved = "", {"checkpoint_mb": None, "save_seconds": None}
        parts = [f"part_{name}" for name in (*task.parts, *(["overlong"] if args.overlong == "soft" else []))]
        split = COLUMNS.index("accuracy")
        evals = [*EVAL_COLUMNS, *(f"part_{name}" for name in task.parts), *task.eval_columns]
        self.columns = [*COLUMNS[:split], *parts, *COLUMNS[split:], *async_rollouts.columns(args),
                        *off_policy.columns(args), *task.columns, *(f"eval_{name}" for name in evals)]
        for name in ("completions", "plots", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)
        self.csv_path, self.jsonl_path = folder / "metrics.csv", folder / "metrics.jsonl"

    @classmethod
    def create(cls, args, task: Task, config: dict, overwrite: bool, say=print) -> Run:
        """A new folder with its config and header. It is made aside and renamed, which is exclusive: two runs that
        start at once never share one, and a run that is killed here leaves none that is half made."""
        base = Path(args.out) / (args.name or f"{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        made = base.with_name(f".{base.name}-{secrets.token_hex(4)}")
        try:
            made.mkdir(parents=True)
            run = cls(made, task, args, say, hold(made))
            write_atomic(made / "config.json", config_json(config))
            append_whole(run.csv_path, (",".join(run.columns) + "\n").encode())
            if args.name and overwrite and is_run(base):
                hold(base)
                shutil.rmtree(base.rename(made.with_name(made.name + ".old")))
            for number in itertools.count(1):
                folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
                try:
                    made.rename(folder)
                    break
                except OSError:
                    if not folder.exists():
                        raise
                    if args.name:
                        raise folder_exists(folder) from None
        except OSError as error:
            raise UserError(f"the run folder {base} cannot be made: {error}") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
        run.move(folder)
        return run

    def move(self, folder: Path) -> None:
        self.folder, self.csv_path, self.jsonl_path = folder, folder / "metrics.csv", folder / "metrics.jsonl"

    def write(self, path: Path, data: bytes, append: bool = False) -> None:
        """Write a file anew, or add to it; where that fails, with the next piece or checkpoint."""
        self.waiting.append((path, data, append))
        try:
            self.flush()
        except OSError as error:
            if sum(len(data) for _, data, _ in self.waiting) > 2**28:
                raise TrainingFailed(f"{self.folder} takes nothing any more: {error.strerror}") from error
            if str(error) != self.refused:
                self.say(f"  warning: {path} cannot be written: {error.strerror}; it is tried again at each step")
            self.refused = str(error)

    def flush(self) -> None:
        """Write what waits. Raises OSError where the disk refuses, TrainingFailed where the folder is gone."""
        if not self.folder.is_dir():
            raise TrainingFailed(f"the run folder {self.folder} is gone, and what was saved in it")
        while self.waiting:
            path, data, append = self.waiting[0]
            (append_whole if append else write_atomic)(path, data)
            self.waiting.pop(0)
        self.refused = ""

    def sync(self) -> None:
        """All that was logged is on the disk, also after a power failure."""
        self.flush()
        for path in (self.csv_path, self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                sync(path)

    def log(self, row: dict[str, Any]) -> None:
        """One step's row: the fixed columns to metrics.csv (blank where missing), all of it to metrics.jsonl."""
        def cell(value: Any) -> Any:
            value = value.item() if hasattr(value, "item") else value
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                return ""
            return format(value, ".6g") if isinstance(value, float) else value

        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([cell(row.get(name)) for name in self.columns])
        self.write(self.jsonl_path, (strict_json(row) + "\n").encode(), append=True)
        self.write(self.csv_path, line.getvalue().encode(), append=True)

    def save_completions(self, step: int, groups: list[Group]) -> None:
        lines = []
        for i, group in enumerate(groups):
            advantages = group.advantages or [None] * len(group.rollouts)
            for rollout_, score, advantage in zip(group.rollouts, group.scores, advantages, strict=True):
                asked = group.prompt.messages
                lines.append(strict_json({
                    "step": step, "group": i, "prompt": asked if isinstance(asked, str) else asked[-1]["content"],
                    "gold": group.prompt.gold, "text": rollout_.text, "reward": score.reward, "parts": score.parts,
                    "flags": score.flags, "advantage": advantage, "length": sum(rollout_.mask), "stop": rollout_.stop}))
        data = gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=5, mtime=0)
        self.write(self.folder / "completions" / f"step_{step}.jsonl.gz", data)

    def log_eval(self, step: int, metrics: dict, records: list[dict]) -> None:
        line = strict_json({"step": step, **metrics, "answers": records}) + "\n"
        self.write(self.folder / "eval.jsonl", line.encode(), append=True)
        try:
            for text in self.report(step, records, self.folder):
                self.say(text)
        except OSError as error:
            self.say(f"  warning: the task's report could not be written: {error.strerror}")

    def forget_after(self, step: int) -> None:
        """Drop what was logged past a checkpoint that is resumed, and a torn last line: steps are never repeated."""
        for path in (self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                write_atomic(path, "".join(line + "\n" for line in whole_lines(path, step)).encode())
        whole = self.csv_path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        rows = list(csv.reader(whole.splitlines()))
        self.columns = rows[0] if rows else self.columns  # those of the run, whatever the flags are now
        kept = [row for row in rows[1:] if len(row) == len(self.columns) and row[0].isdigit() and int(row[0]) <= step]
        text = "".join(",".join(row) + "\n" for row in [self.columns, *kept])
        write_atomic(self.csv_path, text.encode())
        for path in (self.folder / "completions").glob("step_*.jsonl.gz"):
            if int(path.name.split("_")[1].split(".")[0]) > step:
                path.unlink()
        for path in itertools.chain(self.folder.glob(".*.part"), (self.folder / "completions").glob(".*.part")):
            path.unlink()


def is_run(folder: Path) -> bool:
    return (folder / "metrics.csv").is_file()  # config.json is also in a model's folder


def config_json(config: dict) -> bytes:
    return json.dumps(config, indent=1).encode()


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(args) -> dict[str, str]:
    """The files that flags name (data, rewards, task, templates; of a checkpoint its manifest) -> their hashes."""
    found = {}
    values = [value if isinstance(value, tuple) else (value,) for value in dataclasses.asdict(args).values()]
    for word in (word for value in values for word in value if word and isinstance(word, str)):
        for name in (word, word.rpartition(":")[0], f"{word}/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # a text that is no path at all
                if Path(name).is_file() and not name.endswith(".gguf"):
                    found[name] = hash_of(Path(name))
    return found


def check_files(before: dict[str, str], now: dict[str, str], override: bool, say) -> None:
    """Refuse to go on with data that are not those that the run began with; changed code is said."""
    for name in sorted(name for name in before if now.get(name, before[name]) != before[name]):
        if not name.endswith(".py") and not override:
            raise UserError(f"{name} is not what it was when the run began (its sha256 differs); bring the old one "
                            "back, or go on with --resume-override")
        say(f"  warning: {name} is not what it was when the run began")


def describe_run(args, sources: dict[str, str]) -> dict:
    """What config.json holds: the resolved flags with their sources, the hashes of the files that they name, versions,
    the code's git state, the machine."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, errors="replace")
        return done.stdout.strip() if done.returncode == 0 else ""

    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "tokenizers", "numpy", "datasets", "math-verify", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    in_git = bool(shutil.which("git")) and git("rev-parse", "--show-toplevel") == str(ROOT)
    described = {
        "args": dataclasses.asdict(args), "sources": sources, "command": sys.argv, "files": file_hashes(args),
        "versions": versions, "machine": platform.platform(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {"hash": git("rev-parse", "HEAD") if in_git else "", "diff": git("diff", "HEAD") if in_git else ""}}
    return json.loads(json.dumps(described))  # tuples are lists, as in the file


def whole_lines(path: Path, last: float = math.inf) -> list[str]:
    """The lines of a .jsonl file up to a step, without those that are torn or say no step."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found += [line] if 0 <= json.loads(line)["step"] <= last else []
    return found


def run_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]


def run_evals(folder: Path) -> list[dict]:
    records = map(json.loads, whole_lines(folder / "eval.jsonl"))
    return [{k: v for k, v in record.items() if k != "answers"} for record in records]


def read_run_config(folder: Path) -> dict:
    """The config of a run that is resumed."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["args"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"--resume {folder}: no run folder with a readable config.json ({reason})") from error
    return config


def write_folder(target: Path, fill) -> None:
    """Fill a folder under a temporary name, with a manifest of sizes and hashes, sync it, and rename it to `target`."""
    part, old = (target.with_name(f".{target.name}.{what}") for what in ("part", "old"))
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        fill(part)
        files = sorted(p for p in part.rglob("*") if p.is_file())
        for path in files:
            sync(path)
        manifest = {str(path.relative_to(part)): hash_of(path) for path in files}
        write_atomic(part / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync(part)
    except Exception:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_to_save(run: Run, what: str, save, pauses=()) -> str:
    """Call `save`, once more after each of `pauses` (seconds); gives "" or why it could not be saved, which is said."""
    for pause in (*pauses, None):
        try:
            save()
            return ""
        except TrainingFailed:  # the folder is gone: no pause brings it back
            raise
        except Exception as error:  # the disk's own errors, and what torch and safetensors make of them
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
            run.say(f"  warning: {what} could not be saved ({reason}); "
                    + (f"again in {pause} s" if pause else "the newest whole one stays"))
            time.sleep(pause or 0)
    return reason


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: -int(p.name[5:]))


def is_whole(folder: Path) -> bool:
    """Whether every file of a checkpoint is there with the bytes that were written."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        return all(hash_of(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):  # the manifest itself may be damaged
        return False


def newest_checkpoint(folder: Path, say) -> Path | None:
    """The newest whole checkpoint, None for a run that ended before its first. What a crash left half written goes,
    what it had moved aside comes back, and what is not whole is renamed, so that no later save counts it."""
    for path in sorted((folder / "checkpoints").glob(".*")):
        target = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not target.exists():
            path.rename(target)
        elif path.suffix in (".part", ".old"):
            say(f"{path} was never finished and is removed")
            shutil.rmtree(path, ignore_errors=True)
    found = checkpoints(folder)
    for path in found:
        if is_whole(path):
            return path
        aside = path.with_name(f"damaged_{path.name}")
        say(f"{path} is not whole and is passed over; it is now {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if found or list((folder / "checkpoints").glob("damaged_*")):
        raise UserError(f"{folder} has no whole checkpoint to resume from; start again with --overwrite")
    return None


def best_saved(run: Run) -> dict | None:
    """The evaluation of the weights in checkpoints/best, with its step."""
    folder = run.folder / "checkpoints" / "best"
    return json.loads((folder / "best.json").read_text()) if is_whole(folder) else None


def advice(rows: list[dict], args) -> dict[str, str]:
    """What the last rows warn of: a short name -> one sentence with the flag to move."""
    last, found = rows[-1], {}
    recent = rows[-5:]

    def mean(key: str, some: list[dict]) -> float:
        values = [row[key] for row in some if row.get(key) is not None]
        return float(np.mean(values)) if values else math.nan

    constant = mean("groups_constant", recent) / max(1e-9, mean("groups_sampled", recent))
    if len(recent) == 5 and constant > 0.3:
        right = mean("accuracy", recent)
        what, data = ("hard", "easier") if right < 0.5 else ("easy", "harder") if right >= 0.5 else ("alike", "other")
        found["starvation"] = (f"{constant:.0%} of the groups are constant and teach nothing: the problems are too "
                               f"{what}; try --group {2 * args.group}, --dynamic-sampling 2, or {data} data")
    if last["truncated_share"] > 0.5:
        out = " (--overlong drop leaves them out)" if args.overlong == "drop" else ""
        found["truncation"] = (f"{last['truncated_share']:.0%} of the completions hit the limit{out}; raise --max-new "
                               f"over {args.max_new}")
    if len(rows) >= 10 and mean("entropy", recent) < 0.02 and mean("entropy", rows[:5]) > 0.1:
        found["entropy"] = "entropy has collapsed; raise --temperature, --clip-high or --entropy-coef, or lower --lr"
    if last.get("kl") is not None and last["kl"] > 10:
        found["kl"] = f"the KL to the reference is {last['kl']:.1f} nats a token; lower --lr or raise --beta"
    if last.get("filtered_mass", 0) > 0 and (args.top_p < 1 or args.top_k):  # else it is rounding
        found["filter"] = (f"--top-p / --top-k cut {last['filtered_mass']:.1%} of the probability from the sampler; "
                           "the trained ratio is the unfiltered policy's, so the gradient is off by about that")
    if len(rows) >= 20:
        gain, truth = (mean(k, rows[-10:]) - mean(k, rows[-20:-10]) for k in ("reward_mean", "accuracy"))
        if gain > 0.05 and truth < -0.05:
            found["hacking"] = "the reward rises while true accuracy falls: read completions/, the reward may be hacked"
    return found


def console_line(row: dict, args, more: tuple[str, ...]) -> str:
    def number(key: str, width: str = ".3f") -> str:
        return format(row[key], width) if row.get(key) is not None else "-"

    seconds = sum(row[f"seconds_{phase}"] for phase in ("rollout", "score", "update", "eval"))
    line = (f"step {row['step']:>{len(str(args.steps))}}/{args.steps}  reward {number('reward_mean')} ± "
            f"{number('reward_std')}  accuracy {number('accuracy')}  "
            f"groups {row['groups_used']}/{row['groups_sampled']}  length {number('length_mean', '.0f')}  "
            f"kl {number('kl', '.4f')}  entropy {number('entropy')}  grad {number('grad_norm', '.2f')}  "
            + "".join(f"{name} {number(name)}  " for name in more) + f"{seconds:.2f} s")
    if "eval_reward" in row:
        line += f"  | held-out reward {number('eval_reward')} accuracy {number('eval_accuracy')}"
    return line


def first_to_last(rows: list[dict]) -> list[str]:
    """Reward and its parts in the first and in the last row."""
    names = [name for name in rows[-1] if name == "reward_mean" or name.startswith("part_")] if rows else []
    pairs = [(name, rows[0].get(name), rows[-1][name]) for name in names]
    return [f"{name} {first:.3f} → {last:.3f}" for name, first, last in pairs if None not in (first, last)]


def best_checkpoint(run: Path) -> Path:
    """checkpoints/best, else the newest. UserError where there is none."""
    found = [path for path in (run / "checkpoints" / "best", *checkpoints(run)) if path.is_dir()]
    if not found:
        raise UserError(f"{run} has no checkpoint yet; give its --model instead")
    return found[0]
