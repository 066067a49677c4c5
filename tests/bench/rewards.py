"""Rates of the math task's judging on one core: grounded scores a second, and novelty queries by the size of the index.

    taskset -c 0 python tests/bench/rewards.py [--data train.jsonl]

A twentieth of the completions are hostile. Questions are those of --data (GSM8K's form), filled up with ones that put
the halves of two together.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from test_tasks_contract import HOSTILE, core_args, rollout

from data import rng_of
from rewards import equivalent
from tasks.math.questions import TrigramIndex, jaccard, trigrams
from tasks.math.task import MathTask


def honest_completion(gold: int, rng) -> str:
    """A right answer in one of three spellings, or a wrong one."""
    wrong = gold + int(rng.integers(1, 9))
    spellings = (gold, wrong, f"{gold}.0", rf"\frac{{{2 * gold}}}{{2}}")
    answer = spellings[int(rng.integers(4))]
    a = rng.integers(99)
    b = rng.integers(99)
    total = rng.integers(99)
    return f"Step 1: {a}+{b}={total}\nStep 2: so\nFinal Answer: {answer}"


def grounded_scores(count: int) -> None:
    task = MathTask(core_args("math", math_instruction=""))
    assert equivalent(r"\sqrt{8}", r"2\sqrt{2}")  # its process takes seconds to start, once
    rng = rng_of(0, "bench")
    rows = []
    for i, prompt in enumerate(task.prompts(500) * (count // 500)):
        text = honest_completion(int(prompt.gold), rng)
        if i % 20 == 0:
            place = rng.integers(len(HOSTILE))
            text = HOSTILE[int(place)]
        rows.append(rollout(prompt, text))
    start = time.perf_counter()
    cpu = time.process_time()
    for at in range(0, len(rows), 8):
        task.score(rows[at:at + 8])
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    hostile = len(rows) // 20
    by_clock = len(rows) / seconds
    by_cpu = len(rows) / cpu
    print(f"grounded scores: {len(rows)} ({hostile} of hostile completions) in {seconds:.2f} s, "
          f"{by_clock:.0f} a second; {by_cpu:.0f} a second of this process's CPU time")


def questions_of(path: str, count: int) -> list[str]:
    rng = rng_of(0, "questions")
    if path:
        lines = Path(path).read_text().splitlines()
        known = [json.loads(line)["question"] for line in lines]
    else:
        known = [p.meta["question"] for p in MathTask(core_args("math")).train]
    out = list(dict.fromkeys(known))[:count]
    while len(out) < count:
        first, second = rng.integers(len(known), size=2)
        a = known[int(first)].split()
        b = known[int(second)].split()
        words = a[:len(a) // 2] + b[len(b) // 2:]
        out.append(" ".join(words))
    return out


def novelty_queries(path: str) -> None:
    rng = rng_of(0, "queries")
    for size in (1250, 2500, 5000, 10_000):
        texts = questions_of(path, size)
        start = time.process_time()
        index = TrigramIndex(texts)
        built = time.process_time() - start
        queries = []
        for i in rng.integers(size, size=100):
            words = texts[int(i)].split()
            third = len(words) // 3
            other = texts[int(rng.integers(size))]
            words[:third] = other.split()[:third]
            queries.append(" ".join(words))
        start = time.process_time()
        found = [index.nearest(query) for query in queries]
        each = (time.process_time() - start) / len(queries)
        sets = [trigrams(text) for text in texts]
        start = time.process_time()
        for i in range(5):
            grams = trigrams(queries[i])
            best = max(jaccard(grams, other) for other in sets)
            assert abs(found[i] - best) < 1e-12
        brute = (time.process_time() - start) / 5
        print(f"novelty: {size} questions, built in {built:.2f} s, a query {each * 1e3:.2f} ms of CPU time "
              f"(all pairs {brute * 1e3:.1f} ms)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="questions for the index: a .jsonl with `question` [word problems]")
    parser.add_argument("--scores", type=int, default=10_000, help="grounded scores [10000]")
    given = parser.parse_args()
    grounded_scores(given.scores)
    novelty_queries(given.data)
