"""Evaluation: the estimators against brute force, the metrics of a played policy, the command's files and flags."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tasks_contract import core_args, rollout

import eval as evaluation
import train_grpo
from data import Prompt, Score, Task, TrainingFailed, UserError
from tasks.math.task import MathTask


# ---- estimators
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(max_examples=100, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert evaluation.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_large_counts_and_wrong_ones():
    exact = 1 - math.comb(9_000, 500) / math.comb(10_000, 500)
    assert evaluation.pass_at_k(10_000, 1_000, 500) == pytest.approx(exact, abs=1e-12)
    assert evaluation.pass_at_k(200, 0, 100) == 0 and evaluation.pass_at_k(200, 101, 100) == 1
    for n, c, k in [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1), (0, 0, 1)]:
        with pytest.raises(ValueError, match="pass@k"):
            evaluation.pass_at_k(n, c, k)


@pytest.mark.parametrize("answers, correct, expected", [
    (["1", "2", "2"], [True, False, False], False),
    (["0.5", "3", "1/2"], [True, False, True], True),  # equivalent answers vote together
    (["2", "1"], [False, True], False),  # a tie goes to the one seen first
    (["1", "2", "2", "1"], [True, False, False, True], True),
    ([None, None, "1"], [False, False, True], True),  # None does not vote
    ([None], [False], False), ([], [], False),
])
def test_majority(answers, correct, expected):
    assert evaluation.majority(answers, correct) is expected


# ---- evaluate
class Played(Task):
    """Scores a text that is a JSON object {"reward", "correct", "answer"} as it says."""

    parts = ("text",)
    eval_columns = ("seen",)

    def score(self, rollouts):
        return [self.score_one(**json.loads(r.text)) for r in rollouts]

    def score_one(self, reward=None, broken=False, cut=False, **flags):
        if broken:
            raise RuntimeError("broken")
        return Score.unscorable("no") if reward is None else Score(reward, {"text": reward}, flags)

    def observe_eval(self, groups):
        return {"seen": float(len(groups))}


def play(script: dict):
    """A sampler that gives the rollouts of `script[purpose][prompt]`, and notes how it was called."""
    calls = []

    def sample(prompts, n, temperature, key):
        calls.append((len(prompts), n, temperature, key))
        rows = script[key]
        assert all(len(row) == n for row in rows)
        return [[rollout(p, json.dumps(said), "length" if said.get("cut") else "stop") for said in row]
                for p, row in zip(prompts, rows, strict=True)]

    sample.calls = calls
    return sample


def said(correct: bool, answer: str | None = "1", **more) -> dict:
    return {"reward": float(correct), "correct": correct, "answer": answer, **more}


PROMPTS = [Prompt([{"role": "system", "content": "s"}, {"role": "user", "content": "q0"}], "1"), Prompt("q1", "1")]


def test_metrics_and_records_of_a_played_policy():
    sample = play({
        "eval-greedy": [[said(True)], [said(False, "2", cut=True)]],
        "eval-k": [[said(True), said(True, "1.0"), said(False, "2"), said(False, "3")],
                   [said(False, "2"), said(False, None), said(True), said(False, "2")]]})
    metrics, records, groups = evaluation.evaluate(Played(None), sample, PROMPTS, k=4, temperature=0.7)
    assert sample.calls == [(2, 1, 0.0, "eval-greedy"), (2, 4, 0.7, "eval-k")]
    assert metrics == {"reward": 0.5, "accuracy": 0.5, "pass_at_k": 1.0, "maj_at_k": 0.5, "length_mean": 3.0,
                       "truncated_share": 0.5, "n": 2, "unscorable": 0, "part_text": 0.5, "seen": 2.0}
    assert [len(group.rollouts) for group in groups] == [1, 1]
    assert [r["question"] for r in records] == ["q0", "q1"] and [r["correct"] for r in records] == [True, False]
    assert records[0]["answers"] == ["1", "1.0", "2", "3"]
    assert records[1]["answers_correct"] == [False, False, True, False]
    assert evaluation.pass_curve(records, [1, 2, 4]) == pytest.approx([0.375, (5 / 6 + 0.5) / 2, 1.0])


def test_what_cannot_be_computed_is_none():
    rows = [[{"reward": 1.0}], [{"reward": None}]]
    sample = play({"eval-greedy": rows, "eval-k": rows})
    metrics, records, _ = evaluation.evaluate(Played(None), sample, PROMPTS, k=1)
    assert metrics["accuracy"] is metrics["pass_at_k"] is metrics["maj_at_k"] is None
    assert (metrics["reward"], metrics["unscorable"], metrics["n"]) == (1.0, 1, 2)
    assert records[1]["reward"] is None
    empty, records, groups = evaluation.evaluate(Played(None), sample, [], k=1)
    assert records == groups == [] and empty["n"] == 0 and empty["reward"] is None
    assert set(empty) == set(metrics)


def test_a_group_that_cannot_be_scored_is_unscorable_and_all_of_them_an_error():
    one, both = [[{"broken": True}], [said(True)]], [[{"broken": True}]] * 2
    metrics, _, _ = evaluation.evaluate(Played(None), play({"eval-greedy": one}), PROMPTS)
    assert (metrics["unscorable"], metrics["accuracy"]) == (1, 1.0)
    with pytest.raises(TrainingFailed, match="broken"):
        evaluation.evaluate(Played(None), play({"eval-greedy": both}), PROMPTS)


def test_math_task_is_evaluated_with_its_own_reward():
    task = MathTask(core_args("math", eval_size=6))

    def sample(prompts, n, temperature, key):
        answers = [p.gold if i % 2 else 99 for i, p in enumerate(prompts)]
        return [[rollout(p, f"Final Answer: {a}") for _ in range(n)] for p, a in zip(prompts, answers, strict=True)]

    metrics, records, _ = evaluation.evaluate(task, sample, task.heldout(), k=2)
    assert metrics["accuracy"] == metrics["pass_at_k"] == metrics["maj_at_k"] == 0.5
    assert metrics["reward"] == pytest.approx(0.425 + 0.15 * 0.3) and metrics["answer_share"] == 1.0
    assert metrics["part_correct"] == pytest.approx(0.425)
    assert all("How many" in record["question"] for record in records)


# ---- the command
def test_records_are_strict_json_lines_and_appear_whole(tmp_path):
    records = [{"gold": {1, 2}, "reward": math.nan, "text": "\ud800", "parts": {"a": math.inf, "b": (1, None)}}]
    evaluation.write_records(tmp_path / "new" / "eval.jsonl", records)
    lines = (tmp_path / "new" / "eval.jsonl").read_text().splitlines()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["eval.jsonl"]
    assert json.loads(lines[0]) == {"gold": "{1, 2}", "reward": None, "text": "\ud800",
                                    "parts": {"a": None, "b": [1, None]}}
    with pytest.raises(UserError, match="--out"):
        evaluation.write_records(tmp_path, records)


def test_a_run_gives_its_best_checkpoint_else_its_newest(tmp_path):
    run = tmp_path / "runs" / "a"
    for step in (2, 10):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{step}" / "config.json").write_text('{"model_type": "llama"}')
    (run / "checkpoints" / "step_11.tmp").mkdir()
    (run / "config.json").write_text(json.dumps({"args": {"task": "math", "math_instruction": "i", "chat": None}}))
    values = {"task": "math", "math_instruction": "i"}
    assert evaluation.find_run(str(run)) == (str(run / "checkpoints" / "step_10"), values)
    (run / "checkpoints" / "best").mkdir()
    assert evaluation.find_run(str(run)) == (str(run / "checkpoints" / "best"), values)
    step = str(run / "checkpoints" / "step_2")
    assert evaluation.find_run(step) == (step, values)
    assert evaluation.find_run("tiny") == ("tiny", {})
    assert evaluation.find_run(str(tmp_path)) == (str(tmp_path), {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"args": {}}')
    with pytest.raises(UserError, match="no checkpoint"):
        evaluation.find_run(str(tmp_path / "empty"))


def test_own_flags_are_taken_and_the_rest_is_passed_on():
    own, rest = evaluation.read_flags(["--model", "m", "-n", "5", "-k4", "--max-new", "64", "--preset", "a", "b"])
    assert (own.model, own.n, own.k, own.temperature, own.out) == ("m", 5, 4, 0.8, "eval.jsonl")
    assert rest == ["--max-new", "64", "--preset", "a", "b"]
    for flags in (["-k", "x"], ["-n", "-1"], ["--temperature", "0"], ["--temperature", "nan"]):
        with pytest.raises(UserError):
            evaluation.read_flags(flags)


def resolved(*argv: str) -> train_grpo.Args:
    """The flags of an evaluation command."""
    args, _, _ = evaluation.resolve(train_grpo.Args, *evaluation.read_flags(list(argv)))
    return args


def test_flags_resolve_over_the_runs_own(tmp_path):
    held = tmp_path / "held.jsonl"
    run = tmp_path / "a"
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    values = {"task": "math", "math_instruction": "mine", "max_new": 33, "eval_size": 17, "model": "base", "name": "a"}
    (run / "config.json").write_text(json.dumps({"args": values}))
    args = resolved("--model", str(run))
    assert (args.math_instruction, args.max_new, args.eval_size) == ("mine", 33, 17)
    assert args.model == str(run / "checkpoints" / "step_1")
    args = resolved("--model", str(run), "--data", str(held), "--max-new", "9")
    assert (args.data, args.eval_data, args.max_new) == (str(held), str(held), 9) and args.eval_size >= 10**6
    args = resolved("--model", str(run), "--task", "custom", "--reward", "f.py:g", "-n", "3", "--data", str(held))
    assert (args.task, args.max_new, args.eval_size, args.reward) == ("custom", 33, 3, ("f.py:g",))


def test_the_table_has_a_line_a_metric(capsys):
    records = [{"answers": ["1"] * 6, "answers_correct": [True] + [False] * 5}]
    metrics = {"accuracy": 0.25, "pass_at_k": 1.0, "maj_at_k": None, "n": 4, "part_format": 0.1}
    evaluation.print_table(metrics, records, 6, 1.5)
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines == {"accuracy": "0.25", "pass@1": "0.1667", "pass@2": "0.3333", "pass@4": "0.6667", "pass@6": "1",
                     "maj@6": "-", "n": "4", "part_format": "0.1", "seconds": "1.5"}
