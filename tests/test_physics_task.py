"""Task physics: the truth earns full marks, everything else what the spec says, and the run around it."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import is_gone, read_csv, read_jsonl, until

import models.tiny
import plot_run
from data import Group, Prompt, Rollout, TrainingFailed, UserError
from sandbox.workers import Workers
from tasks.physics import task as physics
from tasks.physics.judging import score_answer
from tasks.physics.prompts import true_answer, variants, without_last_term
from tasks.physics.systems import SYSTEMS, Instance, make_instance
from tasks.physics.task import PhysicsTask
from tasks.physics.warm import read_flags

ROOT = Path(__file__).resolve().parent.parent


def make_task(**values):
    options = {field.name: field.default for field in dataclasses.fields(PhysicsTask.Options)}
    core = {
        "data": "",
        "eval_data": "",
        "eval_size": 4,
        "limit": 0,
        "seed": 1,
        "group": 4,
        "model": "tiny",
        "max_turns": 1,
    }
    return PhysicsTask(
        types.SimpleNamespace(
            **{**core, **options, "system_ids": ("spring", "damped_spring"), "instances_per_system": 2, **values}
        )
    )


def said(prompt, *texts):
    turns = [
        turn for text in texts for turn in ({"role": "assistant", "content": text}, {"role": "user", "content": "?"})
    ]
    return Rollout(prompt, [1, 2, 3], [1], [0.0], [0.0], [0], "stop", turns[:-1])


# ---- the systems
@pytest.mark.parametrize("system_id", SYSTEMS)
def test_the_true_equation_scores_full_marks_on_noiseless_data(system_id):
    for number in range(3):
        instance = make_instance(system_id, number)
        spellings = [
            instance.system.equation,
            instance.system.equation.replace("^", "**"),
            instance.system.equation.replace("-", "−").replace("*", "·"),
            true_answer(instance),
        ]
        for text in spellings:
            verdict = score_answer(text, instance)
            assert verdict["match"] >= 0.999 and verdict["correctness"] == verdict["format"] == 1, (text, verdict)
            assert verdict["recovered"] and verdict["reason"] is None
    noisy = make_instance(system_id, 0, noise=0.05)
    assert 0.98 < score_answer(noisy.system.equation, noisy)["match"] < 0.9999
    assert score_answer(noisy.system.equation, noisy)["recovered"]


@pytest.mark.parametrize("system_id", SYSTEMS)
def test_wrong_signs_and_missing_terms_earn_their_r_squared(system_id):
    for number in range(3):
        instance = make_instance(system_id, number)
        sign, missing = (score_answer(variants(system_id)[kind], instance) for kind in ("sign", "missing"))
        assert sign["match"] < 0.5 and sign["correctness"] == 0 and not sign["recovered"]
        assert missing["match"] < 0.9995 and not missing["recovered"] and missing["format"] == 1
        assert missing["correctness"] == float(missing["match"] >= 0.70)
        for verdict in (sign, missing):
            assert verdict["match_dense"] == pytest.approx(verdict["match"] ** 0.5)
            assert verdict["simplicity"] == 0 or verdict["match"] >= 0.10


def test_a_trivial_equation_earns_no_simplicity():
    for system_id in ("spring", "simple_pendulum", "rc_discharge", "exponential_decay", "logistic_growth"):
        verdict = score_answer(
            without_last_term(SYSTEMS[system_id].equation.split(" = ")[0] + " = x"), make_instance(system_id, 0)
        )
        assert verdict["format"] == 1 and verdict["match"] == verdict["simplicity"] == 0


def test_simplicity_counts_operators_and_brackets_are_free():
    spring = make_instance("spring", 0)
    assert score_answer("d2x/dt2 = -(k/m)*x", spring)["simplicity"] == pytest.approx(1 - 3 / 12)
    assert score_answer("d2x/dt2 = (-((k)/(m))*(x))", spring)["simplicity"] == pytest.approx(1 - 3 / 12)
    assert (
        score_answer("d2x/dt2 = -(k/m)*x + " + "+".join(f"1e-9*t^{n}*x" for n in range(2, 8)), spring)["simplicity"]
        == 0
    )


def test_the_mean_over_the_variables_is_taken_before_the_clip():
    prey = make_instance("lotka_volterra", 0)
    half = dataclasses.replace(prey, observed=np.stack([prey.observed[0], 1000 + prey.observed[1]]))
    assert score_answer(prey.system.equation, half)["match"] == 0


def test_instances_are_the_same_everywhere_and_parts_differ():
    make_instance.cache_clear()
    first = make_instance("damped_spring", 3, noise=0.01)
    make_instance.cache_clear()
    again = make_instance("damped_spring", 3, noise=0.01)
    assert (
        first is not again and np.array_equal(first.observed, again.observed) and first.parameters == again.parameters
    )
    other = make_instance("damped_spring", 3, "heldout", 0.01)
    assert other.parameters != first.parameters
    copied = Instance.from_plain(json.loads(json.dumps(first.plain())))
    assert np.array_equal(copied.observed, first.observed) and copied.initial == first.initial
    ratio = (first.observed - first.clean).std() / first.clean.std()
    assert 0.005 < ratio < 0.02


# ---- the task
def test_heldout_systems_and_instances_are_cut_before_training():
    task = make_task(system_ids=(), eval_size=28)
    trained = {prompt.meta["instance"].system_id for prompt in task.train}
    assert trained == set(SYSTEMS) - {"driven_damped_spring", "newton_cooling"}
    assert {prompt.meta["instance"].system_id for prompt in task.heldout()} == set(SYSTEMS)
    drawn = {
        json.dumps(prompt.meta["instance"].parameters)
        for prompt in task.train
        if len(prompt.meta["instance"].parameters) > 1
    }
    assert not drawn & {json.dumps(prompt.meta["instance"].parameters) for prompt in task.heldout()}
    assert [prompt.meta["new"] for prompt in task.heldout()].count(True) == 4


def test_the_prompt_shows_what_the_spec_asks_for():
    task = make_task(system_ids=("damped_spring",))
    text, instance = task.train[0].messages[0]["content"], task.train[0].meta["instance"]
    for wanted in (
        "x in m",
        "v = dx/dt in m/s",
        "Initial state: x =",
        "turning points",
        "sign tanh",
        '{"equation": "d2x/dt2 = ..."',
        *(f"{name} = {value:.4g}" for name, value in instance.parameters.items()),
    ):
        assert wanted in text
    table = [line.split() for line in text.split("Trajectory:\n")[1].split("\nStatistics")[0].split("\n")][1:]
    assert len(table) == 12 and float(table[0][1]) == pytest.approx(instance.observed[0, 0], rel=1e-3)
    assert "spring" not in text


def test_the_reward_is_the_weighted_sum_and_an_ablation_leaves_its_part_out():
    task = make_task()
    prompt = task.train[0]
    (full,) = task.score([said(prompt, true_answer(prompt.meta["instance"]))])
    assert full.parts == pytest.approx(
        {"match": 1, "match_dense": 0.5, "correctness": 0.5, "format": 0.1, "simplicity": 0.15}, abs=1e-3
    )
    for name in ("match_dense", "correctness", "simplicity", "format"):
        less = make_task(ablation=f"no_{name}")
        assert set(less.parts) == set(full.parts) - {name}
        (score,) = less.score([said(prompt, true_answer(prompt.meta["instance"]))])
        assert score.reward == pytest.approx(full.reward - full.parts[name])
    assert make_task(ablation="no_progress").parts == task.parts
    (none,) = task.score([said(prompt, "no idea")])
    assert none.reward == 0 and none.flags["reason"] and none.flags["correct"] is False


def test_a_refinement_shows_the_residual_and_pays_the_gain():
    task = make_task(refine_turns=2, noise=0.0)
    prompt = next(p for p in task.train if p.meta["instance"].system_id == "damped_spring")
    wrong, right = "d2x/dt2 = -(k/m)*x", SYSTEMS["damped_spring"].equation
    assert task.turns() == 3 and "progress" in task.parts
    (message,) = task.reply(said(prompt, wrong))
    verdict = score_answer(wrong, prompt.meta["instance"])
    t, name, seen, simulated = verdict["worst"]
    assert all(f"{value:.4g}" in message["content"] for value in (t, seen, simulated)) and name == "x"
    residual = np.abs(np.array(verdict["curve"]) - prompt.meta["instance"].observed)[0]
    assert t == prompt.meta["instance"].times[residual.argmax()]
    assert "cannot read" in task.reply(said(prompt, "d2x/dt2 = ?"))[0]["content"]
    assert task.reply(said(prompt, right)) is None and task.reply(said(prompt, wrong, wrong, wrong)) is None
    better, worse, same = task.score([said(prompt, wrong, right), said(prompt, right, wrong), said(prompt, right)])
    assert better.parts["progress"] == pytest.approx(0.5 * (1 - verdict["match"]), abs=1e-3)
    assert worse.parts["progress"] == pytest.approx(-better.parts["progress"]) and same.parts["progress"] == 0
    assert better.flags["correct"] and not worse.flags["correct"]
    assert make_task().reply(said(prompt, wrong)) is None


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"system_ids": ("sprnig",)}, "did you mean spring"),
        ({"heldout_systems": ("moon",)}, "unknown system"),
        ({"system_ids": (), "heldout_systems": tuple(SYSTEMS)}, "every system"),
        ({"data": "x.jsonl"}, "--data"),
        ({"instances_per_system": 0}, "--instances-per-system"),
        ({"table_rows": 1}, "--table-rows"),
        ({"noise": 2.0}, "--noise"),
        ({"refine_turns": -1}, "--refine-turns"),
        ({"weight_match": -1.0}, "--weight-match"),
        ({"noise": float("nan")}, "--noise"),
        ({"init_adapter": "a", "sft_checkpoint": "b"}, "two starting points"),
    ],
)
def test_a_mistake_is_one_sentence(values, reason):
    with pytest.raises(UserError, match=reason) as failure:
        make_task(**values)
    assert "\n" not in str(failure.value)


def test_starting_points(tmp_path, monkeypatch):
    assert any("warm start" in note for note in make_task(model="some/model").notes)
    assert not any("warm start" in note for note in make_task(model="some/model", sft_checkpoint="b").notes)
    assert make_task(sft_checkpoint="b").start_from() == "b" and make_task().start_from() == ""
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="merged model goes to --sft-checkpoint"):
        make_task(init_adapter=str(tmp_path / "a")).start_from()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    assert make_task(init_adapter=str(tmp_path / "a")).start_from() == str(tmp_path / "a")
    with pytest.raises(UserError, match="no folder and the hub gave"):
        make_task(init_adapter="no-one/no-adapter").start_from()


def test_a_run_in_which_nothing_parsed_fails_and_a_restored_count_goes_on():
    task = make_task()
    prompt = task.train[0]

    def step(text):
        rollouts = [said(prompt, text)] * 2
        task.observe([Group(prompt, rollouts, task.score(rollouts))])

    step("nothing")
    with pytest.raises(TrainingFailed, match="none of 2 rollouts"):
        task.summary([])
    step("d2x/dt2 = -(k/m)*x")
    assert "red flag" in task.summary([])[0]
    restored = make_task()
    restored.load_state_dict(json.loads(json.dumps(task.state_dict())))
    assert (restored.parsed, restored.answers) == (2, 4)


def test_metrics_of_answers_by_hand():
    task = make_task()
    prompt = task.train[0]
    rollouts = [said(prompt, text) for text in ("d2x/dt2 = -(k/m)*x", "d2x/dt2 = 1/(x*0*t+v)", "no", "d2x/dt2 = x")]
    found = task.observe([Group(prompt, rollouts, task.score(rollouts))])
    assert found["parsed_share"] == 0.75 and found["simulated_share"] == 0.5 and found["correctness"] == 0.25
    assert set(found) <= set(task.columns)


# ---- processes
def job(text, system_id="spring", curve=False):
    return {"instance": make_instance(system_id, 0).plain(), "text": text, "curve": curve}


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


def test_workers_agree_with_the_function_and_keep_the_order():
    task = make_task()
    instance = task.train[0].meta["instance"]
    texts = ["d2x/dt2 = -(k/m)*x", "?", "d2x/dt2 = -1e9*x", "d2x/dt2 = x", true_answer(instance)] * 5
    for text, result in zip(
        texts, task.judge_texts([(task.train[0], text) for text in texts], curve=True), strict=True
    ):
        assert result == json.loads(json.dumps(score_answer(text, instance)))


HANG = """
import os, time
def work(job):
    if job == "spin":
        while True: pass
    if job == "eat":
        return len(bytearray(64 << 30))
    if job == "die":
        os.kill(os.getpid(), 9)
    if job == "raise":
        raise KeyError(job)
    if job == "leave":
        raise SystemExit(1)
    return [job, os.getpid()]
"""


@pytest.fixture
def hang(tmp_path, monkeypatch):
    (tmp_path / "hang_jobs.py").write_text(HANG)
    monkeypatch.syspath_prepend(str(tmp_path))
    workers = Workers("hang_jobs:work", 2, 1.0)
    yield workers
    workers.close()


def test_a_job_that_hangs_dies_or_eats_memory_costs_only_itself(hang):
    jobs = ["a", "spin", "b", "eat", "c", "die", "d", "raise", "e", "leave", "f", "leave"]
    results = hang.map(jobs)
    assert [result and result[0] for result in results] == [word if len(word) == 1 else None for word in jobs]
    assert [result[0] for result in hang.map(list("fghi"))] == list("fghi")


def test_workers_that_were_killed_start_again(hang):
    assert hang.map(["a"])[0][0] == "a"
    for pid in [*children_of(hang.process.pid), hang.process.pid]:
        os.kill(pid, signal.SIGKILL)
    assert [result[0] for result in hang.map(["b", "c"])] == ["b", "c"]


def test_an_interrupted_call_leaves_no_stale_answers(hang, monkeypatch):
    hang.map(["a", "b"])
    real = hang._run

    def interrupted(jobs):
        hang._send(hang.sockets[0], ["late"], [0], {})
        raise KeyboardInterrupt

    monkeypatch.setattr(hang, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hang.map(["x"])
    monkeypatch.setattr(hang, "_run", real)
    assert [result[0] for result in hang.map(["y", "z", "w"])] == ["y", "z", "w"]


def test_a_function_that_is_missing_is_one_sentence(hang):
    workers = Workers("no_such_module:work", 2, 0.2)
    with pytest.raises(RuntimeError, match="do not start"):
        workers.map(["a"])
    workers.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, None])
def test_workers_end_with_their_owner(tmp_path, how):
    (tmp_path / "hang_jobs.py").write_text(HANG)
    script = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from sandbox.workers import Workers
w = Workers("hang_jobs:work", 2, 1.0)
print(*[r[1] for r in w.map(["a", "b"])], flush=True)
print(w.process.pid, flush=True)
{"time.sleep(3600)" if how else ""}
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(word) for word in (owner.stdout.readline() + owner.stdout.readline()).split()]
    assert len(pids) == 3
    if how:
        owner.send_signal(how)
    owner.wait()
    until(lambda: all(is_gone(pid) for pid in pids))


# ---- runs
def smoke(command, folder, *flags):
    return command("--preset", "physics", "smoke", "--out", folder, "--name", "a", "--no-save-completions", *flags)


@pytest.mark.slow
def test_a_short_smoke_run_finds_the_true_equations(command, tmp_path, monkeypatch):
    monkeypatch.setitem(models.tiny.WARM, "steps", 400)
    ended = smoke(command, tmp_path, "--steps", "24", "--eval-every", "0")
    assert ended.code == 0 and "reward_mean" in ended.out and "red flag" in ended.out
    first, last = read_jsonl(tmp_path / "a" / "eval.jsonl")
    assert last["match"] > first["match"] + 0.1 and last["correctness"] > first["correctness"]
    assert last["accuracy"] > first["accuracy"]
    rows = read_csv(tmp_path / "a")
    assert float(rows[-1]["eval_match"]) == pytest.approx(last["match"], rel=1e-4)
    curves = plot_run.read_run(tmp_path / "a").curves
    assert len(curves) == 6 and set(curves[0]) == {"title", "x_label", "x", "points", "lines"}
    names = {path.name for path in plot_run.plot_run(tmp_path / "a")}
    assert {"loss.png", "reward.png", "parts.png", "curves.png"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_smoke_run_recovers_every_system_on_every_seed(command, tmp_path, seed):
    assert smoke(command, tmp_path, "--seed", seed).code == 0
    lines = read_jsonl(tmp_path / "a" / "eval.jsonl")
    assert lines[0]["accuracy"] < 0.5 and lines[-1]["accuracy"] > 0.9
    assert lines[-1]["match"] > 0.95 > lines[0]["match"] + 0.1 and lines[-1]["correctness"] > 0.95


@pytest.fixture
def untrained(monkeypatch):
    """The tiny model after a few steps of its warm start."""
    monkeypatch.setitem(models.tiny.WARM, "steps", 20)


def test_a_run_in_which_no_rollout_parses_exits_non_zero(command, tmp_path, monkeypatch, untrained):
    monkeypatch.setattr(
        physics.PhysicsTask, "judge_texts", lambda self, asked, curve=False: [physics.FAILED for _ in asked]
    )
    ended = smoke(command, tmp_path, "--steps", "2", "--no-eval")
    assert (
        ended.code == 3
        and "none of" in ended.out
        and json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 2
    )


def test_refinement_turns_run(command, tmp_path, monkeypatch):
    monkeypatch.setitem(models.tiny.WARM, "steps", 400)
    ended = smoke(command, tmp_path, "--steps", "1", "--refine-turns", "1", "--no-eval")
    (row,) = read_csv(tmp_path / "a")
    assert ended.code == 0 and row["part_progress"] != "" and float(row["length_mean"]) > 12


def test_the_supervised_warm_start_learns_and_grpo_goes_on_from_it(command, tmp_path, capsys, untrained):
    from tasks.physics.warm import main

    task = make_task(
        prompt_style="brief", table_rows=8, system_ids=("damped_pendulum", "damped_spring", "newton_cooling")
    )
    model = models.tiny.tiny_model(task, types.SimpleNamespace(cache=True), print)
    flags = [
        "--model",
        str(model),
        "--out",
        str(tmp_path / "sft"),
        "--steps",
        "12",
        "--lr",
        "3e-3",
        "--lora-r",
        "8",
        "--system-ids",
        "spring",
        "--prompt-style",
        "brief",
        "--instances-per-system",
        "8",
    ]
    main(flags)
    with (tmp_path / "sft" / "sft.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and "not empty" in capsys.readouterr().err
    ended = smoke(
        command,
        tmp_path,
        "--adapter",
        "lora",
        "--init-adapter",
        tmp_path / "sft",
        "--steps",
        "1",
        "--no-eval",
        "--beta",
        "0.04",
    )
    assert "trained weights" in ended.out and len(read_csv(tmp_path / "a")) == 1
    assert ended.code == 0 or "could be read" in ended.out  # so few steps may teach too little


def test_score_answer_takes_a_prompt_a_dict_and_an_instance():
    instance = make_instance("spring", 0)
    prompt = Prompt("?", None, {"instance": instance})
    verdicts = [score_answer("x'' = -kx/m", some) for some in (instance, instance.plain(), prompt)]
    assert all(verdict["match"] > 0.999 for verdict in verdicts)
    assert score_answer("x'' = -kx/m", None)["reason"] and score_answer(None, instance)["reason"]


def test_a_supervised_start_from_the_tiny_model_is_refused_before_it_asks_the_hub(tmp_path):
    with pytest.raises(UserError, match="preset physics smoke"):
        read_flags(["--model", "tiny", "--out", str(tmp_path / "sft")])
