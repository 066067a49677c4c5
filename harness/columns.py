"""The columns of metrics.csv with their meanings, in the order in which they stand there.

What a task adds stands in its class (`Task.columns`), and the parts of the reward follow `reward_std_group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data import TASKS, Task, load_task

COLUMNS = {  # of every run
    "step": "step, from 1",
    "time": "seconds since the run began",
    "tokens": "tokens sampled in the step",
    "tokens_total": "tokens sampled so far",
    "reward_mean": "over all completions sampled in the step",
    "reward_std": "population std over the same",
    "reward_min": "smallest of them",
    "reward_max": "largest of them",
    "reward_std_group": "mean of the groups' own std: what the advantages are made of",
    "accuracy": "share of completions that are truly right; never trained on",
    "groups_used": "groups with an advantage that is not 0",
    "groups_constant": "groups without spread; they leave before any forward",
    "groups_dropped": "groups with fewer than two usable completions",
    "groups_sampled": "all groups of the step",
    "unscorable": "completions whose scoring failed; outside their group's mean and std",
    "length_mean": "sampled tokens of a completion, the stop token included",
    "length_max": "the longest completion",
    "truncated_share": "share of completions that hit the limit",
    "loss": "mean over the optimizer steps; near 0 on-policy, where advantages cancel",
    "policy_loss": "the same without KL, entropy and cloning",
    "kl": "mean over trained tokens of the estimator of KL(policy, reference), nats; blank without a reference",
    "entropy": "mean entropy of the sampling distribution, nats a token",
    "clip_low_share": "share of trained tokens under the lower clip where it binds (A < 0)",
    "clip_high_share": "share of trained tokens over the upper clip where it binds (A > 0; --cispo: either sign)",
    "ratio_mean": "importance ratio of current to old policy; 1 with a single update a batch",
    "ratio_max": "the largest of them",
    "logp_gap": "mean absolute difference of the sampler's and the trainer's log-probability, nats (0 for stale rows)",
    "grad_norm": "before clipping, mean over the optimizer steps",
    "lr": "in force in the step",
    "beta": "in force in the step",
    "temperature": "in force in the step",
    "advantage_mean": "over the batch",
    "advantage_std": "over the batch",
    "skipped_updates": "optimizer steps left out because a gradient was not finite",
    "filtered_mass": "probability that top-p and top-k cut from the sampler",
    "seconds_rollout": "of sampling (with workers: of waiting for a step's groups)",
    "seconds_score": "of scoring",
    "seconds_update": "of the update",
    "seconds_eval": "of evaluation",
    "tokens_per_second": "sampled tokens over rollout seconds (with workers: over the whole step's)",
    "peak_memory_gb": "CUDA memory; blank on the CPU (summary.json has the run's resident size)",
}
ASYNCHRONOUS = {  # --async-workers; groups are counted since the run began
    "async_produced": "groups rolled out",
    "async_accepted": "groups trained on",
    "async_stale": "groups that were too old",
    "async_dropped": "groups on their way when a run stopped",
    "async_full": "times that --async-queue held the workers back",
    "async_errors": "rollouts repeated for want of memory, and weights not handed over",
    "async_age_mean": "mean age in steps of the groups of this step",
    "async_queue_use": "share of the queue that was ready when the step asked",
    "seconds_produce_p50": "percentile 50 over the last 200 of a worker's rollout",
    "seconds_produce_p90": "percentile 90 of the same",
    "seconds_produce_p99": "percentile 99 of the same",
    "seconds_wait_p50": "percentile 50 over the last 200 of the trainer's wait for a step's groups",
    "seconds_wait_p90": "percentile 90 of the same",
    "seconds_wait_p99": "percentile 99 of the same",
}
CLONING = {  # --bc-coef
    "bc_loss": "cross-entropy of the imitated turns, nats a token",
    "bc_coef": "its weight",
}
BETA_CONTROL = {  # --beta-control
    "watched": "mean of what it watches over the step's updates",
    "hard_stops": "updates left out because it was over the limit",
}
EVAL_COLUMNS = {  # with `eval_` before them: held-out prompts, greedy; blank in steps without evaluation
    "reward": "mean reward",
    "accuracy": "share that is truly right",
    "pass_at_k": "chance that one of --eval-k samples is right, unbiased estimate",
    "maj_at_k": "share of prompts whose most frequent answer is right",
    "length_mean": "sampled tokens of a completion",
    "truncated_share": "share of completions that hit the limit",
}


def metric_columns(args, task: Task) -> list[str]:
    """The columns of a run: those of every run, of the flags that are on, of the task, and of its evaluations."""
    parts = [f"part_{name}" for name in task.parts]
    if args.overlong == "soft":
        parts.append("part_overlong")
    common = list(COLUMNS)
    split = common.index("accuracy")
    names = [*common[:split], *parts, *common[split:]]
    if args.async_workers:
        names += ASYNCHRONOUS
    if args.bc_coef:
        names += CLONING
    if args.beta_control != "off":
        names += BETA_CONTROL
    names += task.columns
    evaluated = [*EVAL_COLUMNS, *(f"part_{name}" for name in task.parts), *task.eval_columns]
    return names + [f"eval_{name}" for name in evaluated]


# ------------------------------------------------------------------------------------------------ docs/metrics.md
HEAD = """# Metrics: the columns of metrics.csv

Generated: `python -m harness.columns > docs/metrics.md`.
A run has the columns of every run, those of the flags that are on, those of its task, and `eval_…` for its evaluations.
They are fixed before the first row; a blank cell means that the step has no such number.
`metrics.jsonl` holds the same, with null for a blank.
"""


def table() -> str:
    """Glossary of every column, as Markdown: a table for every run, for each flag that adds some, and for each task."""
    parts = {"part_…": "mean of each part of the reward, after `reward_std_group`; the parts add up to the reward"}
    common = {}
    for name, meaning in COLUMNS.items():
        if name == "accuracy":
            common |= parts
        common[name] = meaning
    blocks = [
        HEAD,
        section("Every run", common),
        section("`--async-workers` (groups are counted since the run began)", ASYNCHRONOUS),
        section("`--bc-coef`", CLONING),
        section("`--beta-control`", BETA_CONTROL),
        section("Every evaluation", {f"eval_{name}": meaning for name, meaning in EVAL_COLUMNS.items()}),
    ]
    for name in sorted(TASKS):
        columns = task_columns(load_task(name))
        if columns:
            blocks.append(section(f"Task `{name}`", columns))
    return "\n".join(blocks)


def task_columns(task: type[Task]) -> dict[str, str]:
    """A task's columns with their meanings, then those that only its evaluations have."""
    columns = meanings(task.columns)
    evaluated = meanings(task.eval_columns)
    found = {}
    for name, meaning in columns.items():
        shown = f"{name}`, `eval_{name}" if name in evaluated else name
        found[shown] = meaning
    for name, meaning in evaluated.items():
        if name not in columns:
            found[f"eval_{name}"] = meaning
    return found


def meanings(columns: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Columns with their meanings, which are empty where a task gives names alone."""
    return dict(columns) if isinstance(columns, Mapping) else dict.fromkeys(columns, "")


def section(title: str, columns: Mapping[str, str]) -> str:
    """One heading and its Markdown table."""
    lines = [f"## {title}", "", "| column | meaning |", "|---|---|"]
    for name, meaning in columns.items():
        cell = meaning.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {cell} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
