#!/usr/bin/env python
"""How much of the rollout hides behind the update when a worker rolls out ahead, on a random local model.

    python tests/bench/overlap.py --hidden 256 --layers 6 -- --group 8 --max-new 64 --adapter lora

What follows `--` are flags of train_grpo.py. The same steps are run without a worker, and with one at each
--max-version-gap of --gaps. One JSON line a run: seconds are medians over the steps, `hidden` is 1 - waited / rolled.
Two CPU cores at least, or a GPU: on one core nothing can overlap.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step import measure, sizes


def main() -> None:
    parser = sizes()
    parser.add_argument("--gaps", type=int, nargs="*", default=[1, 2], help="values of --max-version-gap")
    own, flags = parser.parse_known_args()
    alone = None
    for gap in (None, *own.gaps):
        ahead = [] if gap is None else ["--async-workers", "1", "--max-version-gap", str(gap)]
        _, code, rows, _ = measure(own, [*flags, *ahead])

        def median(key: str, rows=rows) -> float:
            return statistics.median(row[key] for row in rows)

        step = statistics.median(b["time"] - a["time"] for a, b in zip(rows, rows[1:], strict=False))
        alone = alone or step
        waited = median("seconds_rollout")
        rolled = waited if gap is None else rows[-1]["seconds_produce_p50"]
        out = {"workers": int(gap is not None), "gap": gap, "exit": code, "rolled": rolled, "waited": waited,
               "update": median("seconds_update"), "step": step, "hidden": 1 - waited / rolled, "faster": alone / step,
               "age": None if gap is None else statistics.fmean(row["async_age_mean"] for row in rows)}
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in out.items()}), flush=True)


if __name__ == "__main__":
    main()
