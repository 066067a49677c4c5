"""Checkpoints: folders that are whole or not there, the newest, the best, and what a resume goes on from."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from data import TrainingFailed, UserError
from harness.config import config_json
from harness.files import hash_of, strict_json, sync, write_atomic
from harness.flags import flag_of, resume_rule
from harness.folder import Run, run_rows
from harness.publish import publish


def write_folder(target: Path, fill) -> None:
    """Fill a folder under a temporary name, with a manifest of sizes and hashes, sync it, and rename it to `target`."""
    part = target.with_name(f".{target.name}.part")
    old = target.with_name(f".{target.name}.old")
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
            then = f"again in {pause} s" if pause else "the newest whole one stays"
            run.log(f"  warning: {what} could not be saved ({reason}); {then}")
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


def newest_checkpoint(folder: Path, log) -> Path | None:
    """The newest whole checkpoint, None for a run that ended before its first. What a crash left half written goes,
    what it had moved aside comes back, and what is not whole is renamed, so that no later save counts it."""
    for path in sorted((folder / "checkpoints").glob(".*")):
        target = path.with_name(path.stem[1:])
        if path.suffix == ".old" and not target.exists():
            path.rename(target)
        elif path.suffix in (".part", ".old"):
            log(f"{path} was never finished and is removed")
            shutil.rmtree(path, ignore_errors=True)
    found = checkpoints(folder)
    for path in found:
        if is_whole(path):
            return path
        aside = path.with_name(f"damaged_{path.name}")
        log(f"{path} is not whole and is passed over; it is now {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if found or list((folder / "checkpoints").glob("damaged_*")):
        raise UserError(f"{folder} has no whole checkpoint to resume from; start again with --overwrite")
    return None


def best_saved(run: Run) -> dict | None:
    """The evaluation of the weights in checkpoints/best, with its step."""
    folder = run.folder / "checkpoints" / "best"
    return json.loads((folder / "best.json").read_text()) if is_whole(folder) else None


def best_checkpoint(run: Path) -> Path:
    """checkpoints/best, else the newest. UserError where there is none."""
    found = [path for path in (run / "checkpoints" / "best", *checkpoints(run)) if path.is_dir()]
    if not found:
        raise UserError(f"{run} has no checkpoint yet; give its --model instead")
    return found[0]


def save_checkpoint(run: Run, policy, optimizer, state, args) -> None:
    """checkpoints/step_N: the weights, the optimizer and `state`, whole or not at all, after all that was logged."""
    def fill(folder: Path) -> None:
        policy.task.save(folder)
        policy.save(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "state.json").write_text(strict_json(state.saved() | {"made_with": made_with(args)}))

    run.sync()
    began = time.perf_counter()
    target = run.folder / "checkpoints" / f"step_{state.step}"
    if target.exists() and is_whole(target):
        return
    if shutil.disk_usage(run.folder).free < checkpoint_bytes(policy, optimizer):  # now, not when the disk is full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_folder(target, fill)
    size = sum(path.stat().st_size for path in target.rglob("*")) / 1e6
    seconds = time.perf_counter() - began
    run.saved = {"checkpoint_mb": size, "save_seconds": seconds}
    run.log(f"  saved {target} ({size:.1f} MB in {seconds:.2f} s)")
    if args.keep_last:
        for old in checkpoints(run.folder)[args.keep_last :]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoint_bytes(policy, optimizer) -> int:
    """What a checkpoint takes, about: two float32 moments of each trained weight, masters, and the model's own."""
    moments = 8 * optimizer.trained_weights
    masters = sum(4 * master.numel() for parameter, master in optimizer.pairs if parameter is not master)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.adapter.saved_parameters())
    return moments + masters + weights


def made_with(args) -> dict:
    """The flags that a checkpoint belongs to, as JSON has them."""
    keys = [key for key in args.__dataclass_fields__ if resume_rule(type(args), key) == "fixed"]
    return json.loads(json.dumps({key: getattr(args, key) for key in sorted({*keys, "model", "seed"})}))


def load_checkpoint(policy, optimizer, path: Path, override: bool = False) -> dict[str, Any]:
    """Weights, optimizer, task and state from a checkpoint; the reference stays what the run began from."""
    state = json.loads((path / "state.json").read_text())
    own = made_with(policy.args)
    for key, value in state.get("made_with", {}).items():
        if key in own and value != own[key] and not (override and key in ("model", "seed")):
            raise UserError(f"{path} is a checkpoint of another run: it was made with {flag_of(key)} {value}, not "
                            f"{own[key]}")
    try:
        policy.adapter.load(path)
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location=policy.device, weights_only=True))
        policy.task.load_state_dict(state["task"])
        policy.task.load(path)
    except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{path} does not fit --model {policy.args.model} and this task: {reason}") from error
    policy.version = state["step"]
    return state


class Saver:
    """When a run's checkpoints are written. `whole`: nothing of the state is half done and all of it is logged, so that
    no checkpoint is ahead of the log."""

    def __init__(self, run: Run, policy, optimizer, state, args):
        self.run, self.policy, self.optimizer, self.state, self.args = run, policy, optimizer, state, args
        self.whole = True
        self.due = False

    @contextlib.contextmanager
    def applying(self, updates: int):
        """Within, weights change; a failure among several updates leaves the batch half applied. After it the state is
        whole again once the step is logged."""
        self.whole = updates == 1
        yield
        self.whole = False

    def save(self, pauses: tuple[float, ...] = ()) -> str:
        """Write a checkpoint; "" or why it could not be written, tried again after each of `pauses` (seconds)."""
        def write() -> None:
            save_checkpoint(self.run, self.policy, self.optimizer, self.state, self.args)

        return try_to_save(self.run, f"a checkpoint of step {self.state.step}", write, pauses)

    def save_at_the_end(self) -> str:
        """As `save`, with patience: there is no later one."""
        return self.save(SAVE_PAUSES)

    def save_if_due(self, last: bool) -> None:
        """Every --save-every steps; the last step's is written at the end. What could not be saved is due again."""
        self.due = self.due or bool(self.args.save_every) and self.state.step % self.args.save_every == 0
        if self.due and not last:
            self.due = bool(self.save())
            if not self.due:
                self.publish(last=False)

    def publish(self, last: bool) -> None:
        """Hand the newest checkpoint on, see harness/publish.py."""
        newest = checkpoints(self.run.folder)[0]
        publish(self.policy, self.run.folder, newest, self.state.step, last, self.run.log)


SAVE_PAUSES = (1, 5)  # seconds before the last save is tried again


def keep_best(run: Run, policy, result: dict, state) -> None:
    """checkpoints/best: the weights of the best evaluation after step 0, and which that was."""
    reward = result["reward"]
    if reward is None or (state.best is not None and reward <= state.best):
        return

    def fill(folder: Path) -> None:
        policy.save(folder)
        (folder / "best.json").write_text(strict_json(result))

    target = run.folder / "checkpoints" / "best"
    if not try_to_save(run, f"{target} of step {result['step']}", lambda: write_folder(target, fill), SAVE_PAUSES):
        state.best = reward


def prepare_resume(run: Run, args, config: dict, state) -> None:
    """Bring the folder to the state of the checkpoint that is resumed. UserError where it cannot be written."""
    rows = len(run_rows(run.folder))
    if state.step == 0 and 0 < args.save_every < rows:
        raise UserError(f"{run.folder} has {rows} rows, but its checkpoints are gone; start again with "
                        "--overwrite")
    try:
        run.forget_after(state.step)
        write_atomic(run.folder / "config.json", config_json(config))
        best = best_saved(run)
    except OSError as error:
        raise UserError(f"--resume {run.folder}: {error.filename or 'a file'}: {error.strerror}") from error
    state.best = best["reward"] if best else None


def room_notes(run: Run, policy, optimizer, args) -> list[str]:
    """A warning where the disk has no room for the checkpoints that this run keeps."""
    kept = args.keep_last or args.steps // max(1, args.save_every)
    needed = checkpoint_bytes(policy, optimizer) * (2 + kept)  # and the best one, and the one that is being written
    free = shutil.disk_usage(run.folder).free
    if free > needed:
        return []
    return [f"  warning: {run.folder} has {free / 1e9:.1f} GB free, and the run's checkpoints may take "
            f"{needed / 1e9:.1f} GB; free some, or lower --keep-last"]
