"""Held-out hack and true-pass rates of finished runs of the hacking study, sampled at temperature 1.

    for s in 1 2 3; do for a in vanilla projected random; do
        python train_grpo.py --preset hack smoke --arm $a --seed $s --name $a-$s; done; done
    python tests/bench/hack_arms.py runs/vanilla-1 runs/projected-1 …
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from data import load_task
from harness.checkpoints import newest_checkpoint
from harness.flags import resolve_args
from harness.folder import read_run_config
from models.policy import load_policy
from tasks.code.task import rates
from train_grpo import Args

SAMPLES = 4  # completions a held-out prompt
SHOWN = ("hack_rate", "true_pass_rate", "other_hack_rate", "genuine_tests_rate", "own_tests_rate")


def measure(policy, task) -> dict[str, float]:
    rolled = policy.sample(task.heldout(), SAMPLES, 1.0, "arms")
    pairs = []
    for rows, scores in zip(rolled, task.score_all(rolled), strict=True):
        pairs += zip(rows, scores, strict=True)
    return rates(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    folders = parser.parse_args().runs
    print("run", *SHOWN, sep=" | ")
    starts = set()
    for folder in folders:
        args = resolve_args(Args, [], read_run_config(folder)["args"])[0]
        task = load_task(args.task)(args)
        policy = load_policy(args, task, lambda text: None)
        if args.model not in starts:
            starts.add(args.model)
            with torch.no_grad():
                before = measure(policy, task)
            print("start", *(f"{before[name]:.3f}" for name in SHOWN), sep=" | ", flush=True)
        policy.adapter.load(newest_checkpoint(folder, print))
        after = measure(policy, task)
        print(folder.name, *(f"{after[name]:.3f}" for name in SHOWN), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
