"""Judging speed of task physics: typical completions a second, and what one hostile equation in eight costs.

    python tests/bench/physics.py [--workers 2] [--rounds 5]

A typical batch: eight groups of eight over all systems, of which half are right in other spellings and half lack a term
or have a wrong sign; every completion is new to the caches. A hostile batch has one stiff, diverging, fast or invalid
equation in each eight. Pin the cores with `taskset -c 0,1`.
"""

import argparse
import dataclasses
import statistics
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import Prompt
from tasks.physics.judging import score_answer
from tasks.physics.prompts import variants
from tasks.physics.systems import SYSTEMS, make_instance
from tasks.physics.task import PhysicsTask

HOSTILE = [
    "1e9*sin(1e9*t)",
    "1e12*({q} - sin(t))",
    "-1e8*{q}*t",
    "exp({q}^4)*1e6",
    "{q}^9",
    "1/(t - 1)",
    "log({q} - 1e3)",
    "sign(sin(1e5*t))*1e4",
    "(({q}+1)^12+1)^0.5*tan(1e3*t)",
]


def batch(turn: int, hostile: str = "") -> list[tuple[Prompt, str]]:
    """64 completions, in every `turn` of instances and numbers that were never seen."""
    asked = []
    for group in range(8):
        system = list(SYSTEMS)[(turn * 8 + group) % len(SYSTEMS)]
        prompt = Prompt("", None, {"instance": make_instance(system, turn * 8 + group, "bench", 0.01)})
        known = variants(system)
        for row in range(8):
            kind = ("true", "true", "missing", "sign")[row % 4]
            text = known[kind].replace('"}', f' + {turn * 64 + group * 8 + row}e-9"}}')
            if hostile and row == 7:
                q, left = SYSTEMS[system].coordinates[0].name, known["true"].split(" =")[0]
                rest = "".join(f"; {part}" for part in known["true"].split("; ")[1:]) or '"}'
                text = f"{left} = {hostile.format(q=q)} + {turn}e-9{rest}"
            asked.append((prompt, text))
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    own = parser.parse_args()
    options = {field.name: field.default for field in dataclasses.fields(PhysicsTask.Options)}
    task = PhysicsTask(types.SimpleNamespace(**{
        **options, "data": "", "eval_data": "", "eval_size": 0, "limit": 0, "seed": 0, "group": 8, "model": "tiny",
        "max_turns": 1, "instances_per_system": 1, "score_workers": own.workers}))
    task.judge_texts(batch(10_000))  # the processes have started

    def seconds(asked) -> float:
        start = time.perf_counter()
        task.judge_texts(asked)
        return time.perf_counter() - start

    turn, honest, ratios = 0, [], {}
    for kind in HOSTILE:
        pairs = []
        for _ in range(own.rounds):  # the same systems, other instances
            plain, mixed = batch(turn), batch(turn + 7 * 1000, kind)
            pairs.append((seconds(plain), seconds(mixed)))
            turn += 1
        honest += [first for first, _ in pairs]
        ratios[kind] = statistics.median(second / first for first, second in pairs)
    rate = 64 / statistics.median(honest)
    start, asked = time.process_time(), batch(20_000)
    made = time.process_time() - start
    for prompt, text in asked:
        score_answer(text, prompt)
    spent = (time.process_time() - start - made) / len(asked)
    print(f"{1e3 * spent:.1f} ms of CPU time a completion: {own.workers / spent:.0f} a second on {own.workers} idle "
          "cores")
    print(f"{rate:.0f} typical completions a second with {own.workers} workers (median of {len(honest)} batches of 64)")
    for kind, ratio in ratios.items():
        print(f"{ratio:5.2f} x  an honest batch, with one in eight {kind}")
    ok = rate >= 150 and max(ratios.values()) <= 2
    print("within the limits" if ok else "OVER THE LIMITS: at least 150 a second and at most 2 x")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
