"""Reads what a run has logged so far: metrics.csv and eval.jsonl, also while they are written. Imports no torch."""

import csv
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Run:
    """What is on disk of one run: columns of equal length, one entry a step; steps and values of evaluations; `curves`
    of the last one's answers: title, x_label, x, and y by name for `points` and for `lines`."""

    name: str
    columns: dict[str, list[float | None]]
    evals: dict[str, tuple[list[float], list[float | None]]]
    curves: list[dict] = field(default_factory=list)
    phases: dict[float, str] = field(default_factory=dict)  # step -> what begins there, of a run that has a `phase`

    def series(self, metric: str) -> tuple[list[float], list[float], list[int]]:
        """Steps, values (NaN in a gap), and where a value has no neighbour; empty lists where there is no value.
        What is measured now and then comes without the blanks between, and every place of it is in the third list."""
        steps, values = self.evals.get(metric) or (self.columns["step"], self.columns.get(metric, []))
        there = {i: y for i, y in enumerate(values) if y is not None}
        alone = [i for i in there if i - 1 not in there and i + 1 not in there]
        if metric.startswith("eval_") or len(alone) == len(there):
            return [steps[i] for i in there], list(there.values()), list(range(len(there)))
        return steps, [there.get(i, math.nan) for i in range(len(steps))], alone


def number(value: object) -> float | None:
    """A finite float, or None for anything else: a blank, text, NaN, and 1e100 and more, which no axis can hold."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(value) if abs(float(value)) < 1e100 else None


def read_rows(path: Path) -> tuple[list[str], dict[float, dict[str, str]]]:
    """Header and rows by step of a metrics.csv. A line without its newline is still being written and is left out."""
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    header, *rows = [next(csv.reader([line]), []) for line in lines] or [[]]  # a torn quote swallows no line after it
    by_step = {}
    for i, row in enumerate(rows, start=1):
        values = {"step": str(i)} | dict(zip(header, row, strict=False))
        if len(row) == len(header) and (step := number(values["step"])) is not None:
            by_step[step] = values  # a resumed run writes a step again: its last row counts
    return header, dict(sorted(by_step.items()))


def read_records(path: Path) -> list[dict]:
    """The records of an eval.jsonl in the order of their steps; a torn line is left out."""
    by_step = {}
    for line in path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            by_step[number(record["step"])] = record
    return [by_step[step] for step in sorted(by_step.keys() - {None})]


def read_run(folder: str | Path) -> Run:
    """Reads a run folder, finished or not. ValueError, one sentence, where it is no run or has not begun."""
    if not (folder := Path(folder)).is_dir():
        raise ValueError(f"there is no run folder {folder}.")
    if not (folder / "metrics.csv").exists():
        inside = [str(path.parent) for path in sorted(folder.glob("*/metrics.csv"))]
        hint = f"name some of the runs inside: {', '.join(inside)}" if inside else "it has no metrics.csv"
        raise ValueError(f"{folder} is not a run folder; {hint}.")
    header, rows = read_rows(folder / "metrics.csv")
    if not header:
        raise ValueError(f"{folder / 'metrics.csv'} is empty: the run has not come to its first step.")
    columns = {name: [number(row[name]) for row in rows.values()] for name in ["step", *header]}
    named = [(step, row["phase"]) for step, row in rows.items() if row.get("phase")]
    phases = dict(new for old, new in zip([(0, ""), *named], named, strict=False) if old[1] != new[1])
    records = read_records(folder / "eval.jsonl")
    steps = [number(record["step"]) for record in records]
    evals = {"eval_" + key.removeprefix("eval_"): (steps, [number(record.get(key)) for record in records])
             for key in {key: 0 for record in records for key in record if key != "step"}}
    curves = [answer["curves"] for answer in [{}, *records][-1].get("answers", []) if "curves" in answer]
    return Run(folder.resolve().name, columns, evals, curves, phases)
