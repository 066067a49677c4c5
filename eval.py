"""Evaluation on held-out prompts: greedy accuracy, pass@k and maj@k, inside a run and as a command.

    python eval.py --model runs/NAME --task math --data test.jsonl -n 50 -k 4 --out eval.jsonl

Any flag of train_grpo.py may follow. A model that is a run folder or a checkpoint in one is evaluated with that run's
task, instruction, data and limits; flags override them.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # Ctrl-C while the libraries load ends without a traceback
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import Group, Prompt, Rollout, Score, Task, UserError, load_task
from harness.checkpoints import best_checkpoint
from harness.flags import Parser, printed, resolve_args
from harness.folder import strict_json, write_atomic
from harness.scoring import judge
from harness.stop import run_command
from models.policy import load_policy
from rewards import equivalent

ALL = 10**9  # --eval-size where every prompt is wanted

Sample = Callable[[list[Prompt], int, float, str], list[list[Rollout]]]
Metrics = dict[str, float | None]


# ---- metrics
def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples is right, from n samples of which c are: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), as a product. Raises ValueError outside
    0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: list[str | None], correct: list[bool]) -> bool:
    """Whether the most frequent answer is right. Equivalent answers vote together, None does not vote.

    A tie goes to the answer that was seen first; its first sample's verdict counts.
    """
    classes: list[list[int]] = []  # indices of equivalent answers
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        for members in classes:
            first = answers[members[0]]
            if answer == first or equivalent(answer, first):
                members.append(i)
                break
        else:
            classes.append([i])
    return bool(classes) and correct[max(classes, key=len)[0]]


def mean(values) -> float | None:
    """The mean of the numbers among `values`, None where there is none."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def evaluate(task: Task, sample: Sample, prompts: list[Prompt], k: int = 0, temperature: float = 0.8
             ) -> tuple[Metrics, list[dict], list[Group]]:
    """Metrics, one record a prompt, and the greedy groups (one rollout each).

    `sample(prompts, n, temperature, key)` gives n rollouts a prompt; temperature 0 is greedy, `key` names the purpose
    for the seed. With k > 0, k samples a prompt at `temperature` give pass@k and maj@k. A metric that cannot be
    computed (no `correct` flags, no prompts) is None. Lengths are in tokens that the policy wrote.
    """
    if not prompts:
        return _metrics(task, [], [], k), [], []
    greedy = judge(task, sample(prompts, 1, 0.0, "eval-greedy"))
    records = [_record(i, group) | task.eval_fields(i, group) for i, group in enumerate(greedy)]
    if k > 0:
        sampled = judge(task, sample(prompts, k, temperature, "eval-k"))
        for record, group in zip(records, sampled, strict=True):
            record["texts"] = [rollout.text for rollout in group.rollouts]
            record["answers"] = [score.flags.get("answer") for score in group.scores]
            record["answers_correct"] = [_verdict(score) for score in group.scores]
    return _metrics(task, greedy, records, k), records, greedy


def _verdict(score: Score) -> bool | None:
    """Whether a completion is right, None where nobody can say."""
    correct = score.flags.get("correct")
    if correct is None or score.reward is None:
        return None
    return bool(correct)


def _question(prompt: Prompt) -> str | None:
    """The text of a prompt, or its last user message."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    for message in reversed(prompt.messages):
        if message["role"] == "user":
            return message["content"]
    return None


def _record(index: int, group: Group) -> dict[str, Any]:
    """The line of eval.jsonl of one held-out prompt, from its greedy rollout."""
    rollout = group.rollouts[0]
    score = group.scores[0]
    return {
        "index": index,
        "question": _question(group.prompt),
        "gold": group.prompt.gold,
        "text": rollout.text,
        "answer": score.flags.get("answer"),
        "correct": _verdict(score),
        "reward": score.reward,
        "parts": score.parts,
        "stop": rollout.stop,
    }


def _metrics(task: Task, greedy: list[Group], records: list[dict], k: int) -> Metrics:
    """The metrics of an evaluation, from its greedy groups and its records; pass@k and maj@k are None for k = 0."""
    rollouts = [group.rollouts[0] for group in greedy]
    scores = [group.scores[0] for group in greedy]
    metrics = {
        "reward": mean(score.reward for score in scores),
        "accuracy": mean(record["correct"] for record in records),
        "pass_at_k": pass_curve(records, [k])[0] if k else None,
        "maj_at_k": mean(_majority_of(record) for record in records) if k else None,
        "length_mean": mean(sum(rollout.mask) for rollout in rollouts),
        "truncated_share": mean(rollout.truncated for rollout in rollouts),
        "n": len(greedy),
        "unscorable": sum(score.reward is None for score in scores),
    }
    for name in task.parts:
        metrics[f"part_{name}"] = mean(score.parts.get(name) for score in scores)
    for name, value in task.observe_eval(greedy).items():
        metrics[name] = mean([value])  # None where it is not finite
    return metrics


def pass_curve(records: list[dict], ks: list[int]) -> list[float | None]:
    """pass@k for each of `ks`, over the prompts; samples without a verdict do not count."""
    counts = []  # (samples, right ones) of each prompt
    for record in records:
        verdicts = [verdict for verdict in record["answers_correct"] if verdict is not None]
        if verdicts:
            counts.append((len(verdicts), sum(verdicts)))
    return [mean(pass_at_k(n, c, min(k, n)) for n, c in counts) for k in ks]


def _majority_of(record: dict) -> bool | None:
    """maj@k of one prompt: whether the majority of its samples with a verdict is right, None where there is none."""
    answers, verdicts = [], []
    for answer, verdict in zip(record["answers"], record["answers_correct"], strict=True):
        if verdict is not None:
            answers.append(answer)
            verdicts.append(verdict)
    return majority(answers, verdicts) if verdicts else None


# ---- the command
def read_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's flags, and the rest, which train_grpo.py knows. Raises UserError for a wrong value."""
    parser = Parser(prog="eval.py", allow_abbrev=False, description=__doc__, epilog="And any flag of train_grpo.py.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, hub id, run folder or checkpoint [train_grpo.py's default]")
    parser.add_argument("--task", help="registered task or path/to/file.py:Class [the run's]")
    parser.add_argument("--data", help="what is evaluated: file or hub id [the held-out prompts of the run or task]")
    parser.add_argument("-n", type=int, default=0, metavar="N", help="prompts, drawn by a fixed seed; 0: all [0]")
    parser.add_argument("-k", type=int, default=0, metavar="K", help="samples a prompt for pass@k and maj@k [0]")
    parser.add_argument("--temperature", type=float, default=0.8, help="of those samples [0.8]")
    parser.add_argument("--out", default="eval.jsonl", help="one JSON line a prompt [eval.jsonl]")
    own, rest = parser.parse_known_args(argv)
    if own.n < 0 or own.k < 0 or not 0 < own.temperature < math.inf:
        raise UserError("-n and -k must be 0 or more, and --temperature over 0")
    return own, rest


def find_run(model: str) -> tuple[str, dict]:
    """(the model to load, the values of the run it belongs to, none where it belongs to none).

    Of a run folder, `checkpoints/best` is taken, else the newest step. Raises UserError where it has neither.
    """
    path = Path(model)
    if not path.is_dir():
        return model, {}
    for folder in (path, *path.absolute().parents[:3]):
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and isinstance(config.get("args"), dict):
            values = {name: value for name, value in config["args"].items() if value is not None}
            return str(best_checkpoint(path) if folder == path else path), values
    return model, {}


def resolve(core: type, own: argparse.Namespace, rest: list[str]):
    """The flags of train_grpo.py (the class `core`) for this evaluation, as `resolve_args` gives them."""
    flags = [*rest, "--beta", "0"]  # evaluation needs no reference
    base = {}
    if own.model is not None:
        model, base = find_run(own.model)
        flags += ["--model", model]
    if own.data is not None:
        flags += ["--data", own.data, "--eval-data", own.data, "--eval-size", str(own.n or ALL)]
    elif own.n:
        flags += ["--eval-size", str(own.n)]
    if own.task is not None:
        flags += ["--task", own.task]
        if base.get("task", own.task) != own.task:  # the run's other task has flags that this one lacks
            shared = core.__dataclass_fields__.keys() - {"reward"}
            base = {name: base[name] for name in base.keys() & shared}
    args, sources, command = resolve_args(core, flags, base)
    for switch in ("resume", "overwrite", "dry_run"):
        if getattr(command, switch):
            raise UserError(f"--{switch.replace('_', '-')} is for train_grpo.py, an evaluation has none")
    return args, sources, command


def print_table(metrics: Metrics, records: list[dict], k: int, seconds: float) -> None:
    """A line a metric, with pass@1, 2, 4, … k of the `k` samples a prompt; `seconds` the evaluation took."""
    rows = {"accuracy": metrics["accuracy"]}
    if k:
        ks = [2**i for i in range(k.bit_length()) if 2**i < k] + [k]
        for samples, value in zip(ks, pass_curve(records, ks), strict=True):
            rows[f"pass@{samples}"] = value
        rows[f"maj@{k}"] = metrics["maj_at_k"]
    for name, value in metrics.items():
        if name not in ("accuracy", "pass_at_k", "maj_at_k"):
            rows[name] = value
    rows["seconds"] = seconds
    width = max(map(len, rows))
    for name, value in rows.items():
        text = "-" if value is None else f"{value:.4g}"
        if isinstance(value, int):
            text = f"{value:d}"  # a count, with all its digits
        print(f"{name:{width}}  {text}")


def write_records(path: Path, records: list[dict]) -> None:
    """One strict JSON line a record; the file appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(strict_json(record) + "\n" for record in records).encode())
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error}") from error


def main(core: type, argv: list[str] | None = None) -> int:
    """The command; `core` is train_grpo's `Args`, whose flags may follow its own."""
    own, rest = read_flags(sys.argv[1:] if argv is None else argv)
    args, sources, command = resolve(core, own, rest)
    if printed(args, sources, command):
        return 0
    out = Path(own.out)
    if out.name == "eval.jsonl" and (out.parent / "metrics.csv").is_file():
        raise UserError(f"--out {out} is a run's own log; give another file")
    task = load_task(args.task)(args)
    for note in task.notes:
        print(note)
    if not task.heldout():
        raise UserError("there are no held-out prompts to evaluate; name a file of them with --data")
    policy = load_policy(args, task)
    prompts = [prompt for prompt in task.heldout() if policy.fits(prompt)]
    if not prompts:
        raise UserError("no held-out prompt leaves room for an answer; lower --max-new or raise --context")
    too_long = len(task.heldout()) - len(prompts)
    if too_long:
        print(f"{too_long} prompts are too long for the context and are left out")
    print(f"evaluating {args.model} on {len(prompts)} prompts", flush=True)
    start = time.perf_counter()
    metrics, records, _ = evaluate(task, policy.sample, prompts, own.k, own.temperature)
    write_records(out, records)
    print_table(metrics, records, own.k, time.perf_counter() - start)
    print(f"wrote {own.out}")
    return 0


if __name__ == "__main__":
    from train_grpo import Args

    run_command(lambda: main(Args))
