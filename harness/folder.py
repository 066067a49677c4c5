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
import io
import itertools
import json
import math
import os
import platform
import secrets
import shutil
import time
import typing
from pathlib import Path
from typing import Any

from data import Group, Task, TrainingFailed, UserError
from harness.config import check_files, config_json, describe_run, read_run_config
from harness.console import Console, advice, console_line
from harness.files import append_whole, strict_json, sync, write_atomic
from harness.publish import Reporter, check_packages


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

    def __init__(self, folder: Path, task: Task, columns: list[str], log: Console, lock: typing.IO | None = None):
        self.folder, self.log, self.lock, self.report = folder, log, lock, task.report
        self.columns = columns
        self.rows: list[dict] = []  # of metrics.jsonl
        self.evals: list[dict] = []  # of eval.jsonl, without the answers
        self.warned: dict[str, int] = {}  # kind of advice -> the step in which it was given last
        self.began = time.time()
        self.waiting: list[tuple[Path, bytes, bool]] = []  # (file, bytes, whether they are added to its end)
        self.refused, self.saved = "", {"checkpoint_mb": None, "save_seconds": None}
        for name in ("completions", "plots", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)
        self.csv_path, self.jsonl_path = folder / "metrics.csv", folder / "metrics.jsonl"

    @classmethod
    def create(cls, args, task: Task, columns: list[str], config: dict, overwrite: bool, log: Console) -> Run:
        """A new folder with its config and header. It is made aside and renamed, which is exclusive: two runs that
        start at once never share one, and a run that is killed here leaves none that is half made."""
        base = Path(args.out) / (args.name or f"{Path(args.task).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        made = base.with_name(f".{base.name}-{secrets.token_hex(4)}")
        try:
            made.mkdir(parents=True)
            run = cls(made, task, columns, log, hold(made))
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
                self.log(f"  warning: {path} cannot be written: {error.strerror}; it is tried again at each step")
            self.refused = str(error)

    def flush(self) -> None:
        """Write what waits. Raises OSError where the disk refuses, TrainingFailed where the folder is gone."""
        if not self.folder.is_dir():
            raise TrainingFailed(f"the run folder {self.folder} is gone, and what was saved in it")
        while self.waiting:
            path, data, append = self.waiting[0]
            if append:
                append_whole(path, data)
            else:
                write_atomic(path, data)
            self.waiting.pop(0)
        self.refused = ""

    def sync(self) -> None:
        """All that was logged is on the disk, also after a power failure."""
        self.flush()
        for path in (self.csv_path, self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                sync(path)

    def begin(self, args, step: int, seconds: float) -> None:
        """Before the first step, or the first after `step` of a resume, which took `seconds` so far: what was logged
        already, and where rows go besides the folder."""
        self.rows, self.evals = run_rows(self.folder), run_evals(self.folder)
        self.began = self.log.began - seconds
        self.log.attach(self.folder / "console.log")
        self.reporter = Reporter(args, self.folder, dataclasses.asdict(args), step, self.log)

    def seconds(self) -> float:
        """Seconds since the run began, without those between a stop and its resume."""
        return time.time() - self.began

    def log_step(self, row: dict[str, Any], groups: list[Group], args) -> None:
        """One step's row and completions to the files."""
        row["time"] = self.seconds()
        self.rows.append(row)
        self.write_row(row)
        if args.save_completions:
            self.save_completions(row["step"], groups)

    def tell_step(self, row: dict[str, Any], args, shown: tuple[str, ...]) -> None:
        """The same row to the tracker and to the console, which shows the columns `shown` too and warns."""
        self.reporter.send_row(row)
        self.log(console_line(row, args, shown))
        self.log.advance()
        for kind, text in advice(self.rows, args).items():
            if row["step"] - self.warned.get(kind, -math.inf) >= 25:
                self.warned[kind] = row["step"]
                self.log(f"  warning: {text}")

    def write_row(self, row: dict[str, Any]) -> None:
        """The fixed columns to metrics.csv (blank where missing), all of it to metrics.jsonl."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([csv_cell(row.get(name)) for name in self.columns])
        self.write(self.jsonl_path, (strict_json(row) + "\n").encode(), append=True)
        self.write(self.csv_path, line.getvalue().encode(), append=True)

    def save_completions(self, step: int, groups: list[Group]) -> None:
        """completions/step_N.jsonl.gz: a line a completion."""
        lines = []
        for i, group in enumerate(groups):
            advantages = group.advantages or [None] * len(group.rollouts)
            for rollout, score, advantage in zip(group.rollouts, group.scores, advantages, strict=True):
                messages = group.prompt.messages
                lines.append(strict_json({
                    "step": step,
                    "group": i,
                    "prompt": messages if isinstance(messages, str) else messages[-1]["content"],
                    "gold": group.prompt.gold,
                    "text": rollout.text,
                    "reward": score.reward,
                    "parts": score.parts,
                    "flags": score.flags,
                    "advantage": advantage,
                    "length": sum(rollout.mask),
                    "stop": rollout.stop,
                }))
        data = gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=5, mtime=0)
        self.write(self.folder / "completions" / f"step_{step}.jsonl.gz", data)

    def log_eval(self, step: int, metrics: dict, records: list[dict]) -> None:
        self.evals.append({"step": step, **metrics})
        line = strict_json({"step": step, **metrics, "answers": records}) + "\n"
        self.write(self.folder / "eval.jsonl", line.encode(), append=True)
        try:
            for text in self.report(step, records, self.folder):
                self.log(text)
        except OSError as error:
            self.log(f"  warning: the task's report could not be written: {error.strerror}")

    def forget_after(self, step: int) -> None:
        """Drop what was logged past a checkpoint that is resumed, and a torn last line: steps are never repeated."""
        for path in (self.jsonl_path, self.folder / "eval.jsonl"):
            if path.exists():
                write_atomic(path, "".join(line + "\n" for line in whole_lines(path, step)).encode())
        whole = self.csv_path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        header, *rows = list(csv.reader(whole.splitlines())) or [self.columns]
        self.columns = header  # those of the run, whatever the flags are now
        lines = [header]
        for row in rows:
            if len(row) == len(header) and row[0].isdigit() and int(row[0]) <= step:
                lines.append(row)
        text = "".join(",".join(row) + "\n" for row in lines)
        write_atomic(self.csv_path, text.encode())
        for path in (self.folder / "completions").glob("step_*.jsonl.gz"):
            if int(path.name.split("_")[1].split(".")[0]) > step:
                path.unlink()
        for path in itertools.chain(self.folder.glob(".*.part"), (self.folder / "completions").glob(".*.part")):
            path.unlink()


def csv_cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float):
        return "" if value is None else value
    return format(value, ".6g") if math.isfinite(value) else ""


def is_run(folder: Path) -> bool:
    return (folder / "metrics.csv").is_file()  # config.json is also in a model's folder


def open_folder(folder: Path, args, sources: dict[str, str], command, log) -> tuple[typing.IO | None, dict]:
    """The lock of a run folder that is there, and the config of this start. UserError where the folder is taken, is no
    run, or holds a run of other data; all of it before a model is loaded."""
    if command.dry_run and command.resume:
        raise UserError("--dry-run makes one step of a new run; leave out --resume")
    there = bool(args.name) and folder.exists()
    if there and not command.resume and not (command.overwrite and is_run(folder)):
        raise folder_exists(folder)
    check_packages(args)
    lock = hold(folder) if command.resume or there else None
    config = describe_run(args, sources)
    if command.resume:
        before = read_run_config(folder)
        check_files(before.get("files", {}), config["files"], command.resume_override, log)
        earlier = {key: value for key, value in before.items() if key != "history" and value != config.get(key)}
        config["history"] = [*before.get("history", []), earlier]  # of each start what differs from the next
    return lock, config


def whole_lines(path: Path, last: float = math.inf) -> list[str]:
    """The lines of a .jsonl file up to a step, without those that are torn or say no step."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if 0 <= json.loads(line)["step"] <= last:
                found.append(line)
    return found


def run_rows(folder: Path) -> list[dict]:
    """The rows of a run's steps."""
    return [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]


def run_evals(folder: Path) -> list[dict]:
    """The evaluations of a run, without the answers."""
    records = [json.loads(line) for line in whole_lines(folder / "eval.jsonl")]
    for record in records:
        record.pop("answers", None)
    return records
