"""Files that are whole or not there: written aside and renamed, or added to in one piece."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` for a library to write to; at the end it is renamed to `path`, which appears whole or stays
    as it was."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def cache_home() -> Path:
    """The user's cache folder of this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_grpo"


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


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
