"""Records from files and from the hub, one at a time; `data.read_records` chooses between them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from data import BadRecords, UserError


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
