"""Programs graded a second, beside what starting as many bare Python processes costs on this machine.

    python tests/bench/grade.py [N] [WORKERS]
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from sandbox.programs import Job, Sandbox
from tasks.code.grading import Grader, Rules
from tasks.code.task import fenced, problems


def seconds(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def honest_responses(count: int) -> list[tuple]:
    some, responses = problems(), []
    for i in range(count):
        problem = some[i % len(some)]
        text = f"# {i}\n{problem['canonical_solution']}"
        responses.append((fenced(text), problem))
    return responses


def start_pythons(count: int, workers: int) -> None:
    command = [sys.executable, "-I", "-S", "-c", "pass"]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: subprocess.run(command), range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=120, help="programs [120]")
    parser.add_argument("workers", nargs="?", type=int, default=2, help="at once [2]")
    given = parser.parse_args()
    count, workers = given.count, given.workers
    box = Sandbox(workers=workers)
    honest = honest_responses(count)
    print(box.describe())
    for _ in range(3):
        starts = seconds(lambda: start_pythons(count, workers))
        runs = seconds(lambda: box.map([Job("x = 1")] * count))
        graded = seconds(lambda: Grader(Rules(), box).grade_all(honest))
        print(f"a second: {count / starts:.0f} starts; {count / runs:.0f} programs ({runs / starts:.2f} x a start); "
              f"{count / graded:.0f} honest responses (two processes, {graded / starts / 2:.2f} x)")
    box.close()


if __name__ == "__main__":
    main()
