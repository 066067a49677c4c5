"""What a run was started with: config.json, and whether the files that its flags name are still the same."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from data import UserError
from harness.files import hash_of

ROOT = Path(__file__).resolve().parent.parent


def config_json(config: dict) -> bytes:
    return json.dumps(config, indent=1).encode()


def file_hashes(args) -> dict[str, str]:
    """The files that flags name (data, rewards, task, templates; of a checkpoint its manifest) -> their hashes."""
    words: list[str] = []
    for value in dataclasses.asdict(args).values():
        words += value if isinstance(value, tuple) else [value]
    found: dict[str, str] = {}
    for word in words:
        if not isinstance(word, str) or not word:
            continue
        for name in (word, word.rpartition(":")[0], f"{word}/manifest.json"):
            with contextlib.suppress(OSError, ValueError):  # a text that is no path at all
                if Path(name).is_file() and not name.endswith(".gguf"):
                    found[name] = hash_of(Path(name))
    return found


def check_files(before: dict[str, str], now: dict[str, str], override: bool, log) -> None:
    """Refuse to go on with data that are not those that the run began with; changed code is said."""
    changed = [name for name, digest in before.items() if now.get(name, digest) != digest]
    for name in sorted(changed):
        if not name.endswith(".py") and not override:
            raise UserError(f"{name} is not what it was when the run began (its sha256 differs); bring the old one "
                            "back, or go on with --resume-override")
        log(f"  warning: {name} is not what it was when the run began")


def describe_run(args, sources: dict[str, str]) -> dict:
    """What config.json holds: the resolved flags with their sources, the hashes of the files that they name, versions,
    the code's git state, the machine."""
    described = {
        "args": dataclasses.asdict(args),
        "sources": sources,
        "command": sys.argv,
        "files": file_hashes(args),
        "versions": versions(),
        "machine": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": git_state(),
    }
    return json.loads(json.dumps(described))  # tuples are lists, as in the file


def versions() -> dict[str, str]:
    """Of Python and the libraries that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "tokenizers", "numpy", "datasets", "math-verify", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state() -> dict[str, str]:
    """The commit of this project and what differs from it; empty where it is no clone of its own."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, errors="replace")
        return done.stdout.strip() if done.returncode == 0 else ""

    if not shutil.which("git") or git("rev-parse", "--show-toplevel") != str(ROOT):
        return {"hash": "", "diff": ""}
    return {"hash": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD")}


def read_run_config(folder: Path) -> dict:
    """The config of a run that is resumed."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["args"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"--resume {folder}: no run folder with a readable config.json ({reason})") from error
    return config
