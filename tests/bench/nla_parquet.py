"""The reader of activations on a file of 1 GB: time to the first row and to the last, and memory.

    taskset -c 0 python tests/bench/nla_parquet.py [--gb 1] [--d 4096] [--folder /tmp]

Two files of random vectors are made on the spot and deleted after, one in row groups of 1,000 rows, one in a single row
group. Each is read in a process of its own. Memory is what the process holds over what it held before the first
row: after a tenth of the file, and at its highest (VmHWM), so Linux only.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tasks.nla.activations import Meta, read_rows

PROMPT = [{"role": "user", "content": "Explain <concept><INJECT></concept>."}]


def make(path: Path, rows: int, d: int, row_group: int) -> None:
    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    schema = pa.schema([
        ("prompt", pa.list_(message)),
        ("activation_vector", pa.list_(pa.float32())),
        ("doc_id", text),
        ("unused", text),
    ])
    rng = np.random.default_rng(0)

    def batch(first: int, count: int) -> pa.RecordBatch:
        numbers = pa.array(rng.standard_normal(count * d, np.float32))
        edges = pa.array(range(0, count * d + 1, d), pa.int32())
        vectors = pa.ListArray.from_arrays(edges, numbers)
        prompts = pa.array([PROMPT] * count, schema.field(0).type)
        ids = [f"document {first + i}" for i in range(count)]
        unused = ["x" * 2000] * count
        return pa.record_batch([prompts, vectors, ids, unused], schema=schema)

    with pa.parquet.ParquetWriter(path, schema, use_dictionary=False) as file:
        if row_group < rows:
            for first in range(0, rows, row_group):
                count = min(row_group, rows - first)
                file.write_batch(batch(first, count), row_group_size=row_group)
        else:
            table = pa.Table.from_batches([batch(0, rows)])
            file.write_table(table, row_group_size=rows)


def memory(name: str) -> float:
    """MB that the process holds (VmRSS), or held at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    kilobytes = re.search(rf"{name}:\s+(\d+)", status)[1]
    return int(kilobytes) / 1024


def read(path: Path, d: int) -> None:
    meta = Meta("m", 0, d, "@", 1, 1, 1, 1.0, "")
    before = memory("VmRSS")
    start = time.perf_counter()
    start_cpu = time.process_time()
    total = pa.parquet.ParquetFile(path).metadata.num_rows
    for count, _ in enumerate(read_rows(path, 0, meta), 1):
        if count == 1:
            first = time.perf_counter() - start
            first_cpu = time.process_time() - start_cpu
        if count == total // 10:
            early = memory("VmHWM") - before
    seconds = time.perf_counter() - start
    cpu = time.process_time() - start_cpu
    most = memory("VmHWM") - before
    size = path.stat().st_size / 2**30
    print(f"{path.name}: {size:.2f} GB, {count} rows; first row after {first:.2f} s ({first_cpu:.2f} s of CPU time), "
          f"whole file {seconds:.1f} s ({cpu:.1f} s); memory over the start: {early:.0f} MB at most in the first "
          f"tenth, {most:.0f} MB in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--d", type=int, default=4096)
    parser.add_argument("--folder", default=None, help="where the files are made [the system's temporary folder]")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.read:
        return read(Path(own.read), own.d)
    rows = int(own.gb * 2**30 / (4 * own.d))
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        for row_group in (1000, rows):
            path = Path(folder) / f"row groups of {row_group}.parquet"
            make(path, rows, own.d, row_group)
            os.sync()
            command = [sys.executable, __file__, "--read", str(path), "--d", str(own.d)]
            subprocess.run(command, check=True)
            path.unlink()


if __name__ == "__main__":
    main()
