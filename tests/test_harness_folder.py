"""The run folder, stopping and resuming: what a user finds on disk after, during and instead of a whole run."""

import collections
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import chaos
import pytest
import torch
from conftest import ROOT, make_args, read_csv, read_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

import harness.checkpoints
import harness.console
import harness.files
import harness.flags
import harness.folder
import models.optimizer
import models.policy
import plot_run
import train_grpo
from data import Task, load_task

TIMES = {"time", "seconds_rollout", "seconds_score", "seconds_update", "seconds_eval", "tokens_per_second",
         "peak_memory_gb"}


class Killed(BaseException):
    """Stands for a process that ends between two instructions."""


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def log_of(folder: Path) -> dict:
    """All that a run leaves but times: equal for equal runs."""
    folder = Path(folder)
    completions = {path.name: path.read_bytes() for path in (folder / "completions").iterdir()}
    newest = harness.checkpoints.checkpoints(folder)[0]
    weights = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    return {"csv": without_times(read_csv(folder)), "jsonl": without_times(read_jsonl(folder / "metrics.jsonl")),
            "evals": read_jsonl(folder / "eval.jsonl"), "completions": completions, "weights": weights}


def same_log(a: Path, b: Path) -> None:
    first, second = log_of(a), log_of(b)
    for name, content in first.items():
        assert content == second[name], name


def after_step(monkeypatch, step: int, act) -> None:
    """Calls `act` when the row of a step has been written."""
    log = harness.folder.Run.write_row

    def watched(self, row):
        log(self, row)
        if row["step"] == step:
            act()

    monkeypatch.setattr(harness.folder.Run, "write_row", watched)


def within_step(monkeypatch, step: int, act) -> None:
    """Calls `act` while a step's completions are judged."""
    collect, judge = train_grpo.collect, train_grpo.score_groups
    now = []

    def collecting(policy, task, args, at, *rest):
        now.append(at)
        return collect(policy, task, args, at, *rest)

    def judging(*given):
        if now[-1] == step:
            act()
        return judge(*given)

    monkeypatch.setattr(train_grpo, "collect", collecting)
    monkeypatch.setattr(train_grpo, "score_groups", judging)


def raise_killed():
    raise Killed


def send(number: int):
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def done(words, tmp_path_factory):
    """A finished run of three steps, with an evaluation at step 2 and at the end."""
    out = tmp_path_factory.mktemp("runs")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = train_grpo.main([*words.flags, "--steps", "3", "--eval-every", "2", "--save-every", "2", "--out",
                                str(out), "--name", "done", "--seed", "1"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert code == 0
    return out / "done"


@pytest.fixture
def copy(done, tmp_path):
    """A copy of the finished run that a test may damage."""
    shutil.copytree(done, tmp_path / "copy")
    return tmp_path / "copy"


# ---- what is in the folder
def test_the_folder_holds_what_was_promised(done):
    names = {path.name for path in done.iterdir()}
    assert names == {"config.json", "metrics.csv", "metrics.jsonl", "completions", "eval.jsonl", "console.log",
                     "summary.json", "plots", "checkpoints", "run.lock"}
    assert sorted(path.name for path in (done / "completions").iterdir()) == [f"step_{n}.jsonl.gz" for n in (1, 2, 3)]
    assert {path.name for path in (done / "checkpoints").iterdir()} == {"step_2", "step_3", "best"}
    assert any((done / "plots").iterdir())


def test_every_row_has_as_many_cells_as_the_header(done):
    lines = (done / "metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    assert len(header) == len(set(header)) and {"step", "reward_mean", "reward_std", "accuracy"} <= set(header)
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    assert all(len(line.split(",")) == len(header) for line in lines)


def test_every_cell_is_a_number_or_blank(done):
    for row in read_csv(done):
        for name, cell in row.items():
            assert cell == "" or abs(float(cell)) < 1e12, name


def test_columns_of_the_specification_are_there(done):
    for wanted in ("step time tokens reward_mean reward_std reward_min reward_max accuracy part_even part_first seen "
                   "groups_used groups_constant groups_dropped length_mean length_max truncated_share loss policy_loss "
                   "kl entropy clip_low_share clip_high_share ratio_mean grad_norm lr beta temperature advantage_mean "
                   "advantage_std seconds_rollout seconds_score seconds_update seconds_eval tokens_per_second "
                   "peak_memory_gb eval_reward eval_accuracy eval_part_even").split():
        assert wanted in read_csv(done)[0]


def test_the_header_is_written_before_the_first_row(words, command, tmp_path, monkeypatch):
    after_step(monkeypatch, 1, raise_killed)
    seen = []
    log = harness.folder.Run.write_row
    monkeypatch.setattr(harness.folder.Run, "write_row", lambda self, row: (seen.append(self.csv_path.read_text()),
                                                                  log(self, row)))
    with pytest.raises(Killed):
        command(*words.flags, "--out", tmp_path, "--name", "a")
    assert seen[0].endswith("\n") and seen[0].split(",")[0] == "step"
    assert (tmp_path / "a" / "metrics.csv").read_text().startswith(seen[0])


def test_evaluation_columns_are_blank_where_there_is_none(done):
    rows = read_csv(done)
    names = [name for name in rows[0] if name.startswith("eval_")]
    assert names
    assert all(rows[0][name] == "" for name in names)
    assert all(row["eval_reward"] != "" and row["eval_accuracy"] != "" for row in rows[1:])


def test_the_csv_and_the_jsonl_tell_the_same(done):
    for cells, row in zip(read_csv(done), read_jsonl(done / "metrics.jsonl"), strict=True):
        for name, cell in cells.items():
            value = row.get(name)
            assert (cell == "") == (value is None), name
            assert value is None or float(cell) == pytest.approx(float(value), rel=1e-5), name


def test_saved_completions_hold_text_reward_parts_flags_and_advantage(done):
    rows = read_csv(done)
    for step in (1, 2, 3):
        records = read_jsonl(done / "completions" / f"step_{step}.jsonl.gz")
        assert len(records) == 8 and [record["group"] for record in records] == [0] * 4 + [1] * 4
        for record in records:
            assert record["step"] == step and record["prompt"].startswith("w") and isinstance(record["text"], str)
            assert record["reward"] == pytest.approx(sum(record["parts"].values()))
            assert set(record["parts"]) == {"even", "first"} and isinstance(record["flags"]["correct"], bool)
            assert 1 <= record["length"] <= 5 and record["stop"] in ("stop", "length")
        rewards = [record["reward"] for record in records]
        assert sum(rewards) / 8 == pytest.approx(float(rows[step - 1]["reward_mean"]), rel=1e-5)
        for first in (0, 4):
            group = records[first : first + 4]
            mean = sum(record["reward"] for record in group) / 4
            assert all((record["advantage"] > 0) == (record["reward"] > mean + 1e-9) for record in group)
            assert sum(record["advantage"] for record in group) == pytest.approx(0, abs=1e-6)


def test_the_config_holds_values_sources_versions_and_the_state_of_the_code(done):
    config = json.loads((done / "config.json").read_text())
    assert config["args"]["steps"] == 3 and config["sources"]["steps"] == "flag"
    assert config["sources"]["clip"] == "default" and set(config["args"]) == set(config["sources"])
    assert config["versions"]["torch"] == torch.__version__ and "transformers" in config["versions"]
    assert re.fullmatch(r"[0-9a-f]{40}", config["git"]["hash"]) or not (ROOT / ".git").exists()
    assert isinstance(config["git"]["diff"], str)


def test_the_config_is_written_where_git_is_not_installed(words, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert harness.folder.describe_run(make_args(), {})["git"] == {"hash": "", "diff": ""}


def test_the_summary_tells_how_the_run_ended(done):
    summary = json.loads((done / "summary.json").read_text())
    evals = read_jsonl(done / "eval.jsonl")
    assert summary["status"] == "done" and summary["steps"] == 3
    assert summary["first_eval"]["step"] == 0 and summary["last_eval"]["step"] == 3
    assert summary["best_eval"]["reward"] == max(line["reward"] for line in evals)
    assert [line["step"] for line in evals] == [0, 2, 3] and len(evals[0]["answers"]) == 4


def test_the_console_log_has_every_step_and_no_carriage_return(done):
    text = (done / "console.log").read_bytes()
    assert b"\r" not in text and b"\x1b" not in text
    for step in (1, 2, 3):
        assert re.search(rb"^step %d/3 " % step, text, re.M)


def test_a_checkpoint_is_a_model_that_transformers_loads(done):
    import transformers

    for name in ("step_3", "best"):
        model = transformers.AutoModelForCausalLM.from_pretrained(done / "checkpoints" / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(done / "checkpoints" / name)
        assert model.config.vocab_size == 32 and tokenizer.encode("w5") == [5]


def test_no_temporary_file_is_left(done):
    assert not [path for path in done.rglob("*") if path.name.startswith(".")]


# ---- odd metrics
def own_task(words, folder: Path, body: str, name: str = "own") -> list[str]:
    """Flags of a task that is `Words` but for `body`."""
    path = folder / f"{name}.py"
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(words.file.read_text() + f"\n\nclass Own(Words):\n{indented}")
    return ["--task", f"{path}:Own", *words.model, "--out", str(folder), "--name", name]


def test_a_metric_that_appears_at_step_2_is_kept_and_breaks_nothing(words, command, tmp_path):
    flags = own_task(words, tmp_path, "def observe(self, groups):\n"
                     "    seen = super().observe(groups)\n"
                     "    return seen if self.seen < 3 else seen | {'late': 7.5}")
    assert command(*flags, "--steps", "3").code == 0
    rows = read_jsonl(tmp_path / "own" / "metrics.jsonl")
    assert [row.get("late") for row in rows] == [None, 7.5, 7.5]
    assert len(read_csv(tmp_path / "own")) == 3 and "late" not in read_csv(tmp_path / "own")[0]


KINDS = {  # a metric as a task may give it -> its cell, its value in metrics.jsonl
    "float('nan')": ("", None), "float('inf')": ("", None), "None": ("", None), "1e-30": ("1e-30", 1e-30),
    "numpy.float32('nan')": ("", None), "numpy.float32(0.5)": ("0.5", 0.5), "numpy.int64(3)": ("3", 3),
    "torch.tensor(0.25)": ("0.25", 0.25), "torch.tensor(float('nan'))": ("", None),
}


def test_a_metric_of_any_kind_is_a_number_or_blank(words, command, tmp_path):
    values = ", ".join(f"'m{i}': {value}" for i, value in enumerate(KINDS))
    flags = own_task(words, tmp_path, f"columns = tuple(f'm{{i}}' for i in range({len(KINDS)}))\n\n"
                     f"def observe(self, groups):\n    import numpy, torch\n    return {{{values}}}")
    assert command(*flags, "--steps", "1", "--no-eval").code == 0
    (cells,), (row,) = read_csv(tmp_path / "own"), read_jsonl(tmp_path / "own" / "metrics.jsonl")
    for i, (value, (cell, kept)) in enumerate(KINDS.items()):
        assert (cells[f"m{i}"], row[f"m{i}"]) == (cell, kept), value


def test_parts_are_logged_in_one_order_whatever_the_hash_seed():
    from conftest import hand_rollout

    from data import Group, Prompt, Score

    names = [f"p{i}" for i in range(20)]
    group = Group(Prompt("w3"), [hand_rollout([3], [4])], [Score(1.0, dict.fromkeys(names, 0.05))], [0.0])
    row = train_grpo.step_metrics([group], [group], make_args())
    assert [name for name in row if name.startswith("part_")] == [f"part_{name}" for name in sorted(names)]


# ---- folders that exist
def test_an_existing_folder_is_refused_and_left_alone(words, command, copy, monkeypatch):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    monkeypatch.setattr(train_grpo, "load_policy", lambda *_: pytest.fail("the model was loaded first"))
    ended = command(*words.flags, "--out", copy.parent, "--name", copy.name)
    assert ended.code == 2 and "--resume" in ended.err and "--overwrite" in ended.err and str(copy) in ended.err
    assert len(ended.err.splitlines()) == 1
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_overwrite_starts_a_run_folder_anew(words, command, copy):
    assert command(*words.flags, "--steps", "1", "--out", copy.parent, "--name", copy.name, "--overwrite").code == 0
    assert [row["step"] for row in read_csv(copy)] == ["1"]
    assert [path.name for path in (copy / "completions").iterdir()] == ["step_1.jsonl.gz"]


@pytest.mark.parametrize("file", ["thesis.tex", "config.json"])  # the second: a folder that holds a model
def test_overwrite_never_deletes_a_folder_that_is_no_run(words, command, tmp_path, file):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text("{}")
    ended = command(*words.flags, "--out", tmp_path, "--name", "mine", "--overwrite")
    assert ended.code == 2 and (tmp_path / "mine" / file).read_text() == "{}"


def test_overwrite_of_nothing_is_a_new_run(words, command, tmp_path):
    assert command(*words.flags, "--steps", "0", "--out", tmp_path, "--name", "a", "--overwrite").code == 0


@pytest.mark.parametrize("name", [[], ["--name", "a"]])
def test_an_out_that_is_a_file_is_refused(words, command, tmp_path, name):
    (tmp_path / "file").write_text("")
    ended = command(*words.flags, "--out", tmp_path / "file", *name)
    assert ended.code == 2 and str(tmp_path / "file") in ended.err


def test_runs_that_start_in_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    args = make_args("--out", str(tmp_path))
    made, barrier = [], threading.Barrier(8)

    def create():
        barrier.wait()
        made.append(harness.folder.Run.create(args, Task(args), ["step"], {}, False, print).folder)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8 and all((folder / "metrics.csv").is_file() for folder in made)
    assert min(made).name == "math-20260101-000000"


def test_an_automatic_name_says_the_task(words, command, tmp_path):
    assert command(*words.flags, "--steps", "0", "--out", tmp_path / "new" / "deep").code == 0
    (folder,) = (tmp_path / "new" / "deep").iterdir()
    assert re.fullmatch(r"words-\d{8}-\d{6}", folder.name)


# ---- a run that can be read while it goes on
def test_each_step_can_be_read_as_soon_as_it_ends(words, command, tmp_path, monkeypatch):
    seen = []

    def look():
        text = (tmp_path / "a" / "metrics.csv").read_text()
        lines = (tmp_path / "a" / "metrics.jsonl").read_text()
        assert text.endswith("\n") and lines.endswith("\n")
        seen.append((text.splitlines()[-1].split(",")[0], json.loads(lines.splitlines()[-1])["step"]))

    line = harness.console.console_line
    monkeypatch.setattr(harness.folder, "console_line", lambda *given: (look(), line(*given))[1])
    assert command(*words.flags, "--steps", "3", "--out", tmp_path, "--name", "a").code == 0
    assert seen == [("1", 1), ("2", 2), ("3", 3)]


@pytest.fixture(scope="module")
def killed(words, tmp_path_factory):
    """A run as a process of its own whose output goes to a file, killed after some steps: (folder, output)."""
    out = tmp_path_factory.mktemp("killed")
    child = os.fork()
    if child == 0:
        chaos.child_main([*words.flags, "--steps", "5000", "--save-every", "3", "--eval-every", "4", "--out", out,
                          "--name", "a"], out / "said")
    path = out / "a" / "metrics.csv"
    while not (path.exists() and path.read_bytes().count(b"\n") > 8):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    chaos.exit_code(child)
    return out / "a", (out / "said").read_bytes()


def test_without_a_terminal_there_are_no_carriage_returns(killed):
    assert re.search(rb"^step +5/5000 ", killed[1], re.M)
    assert b"\r" not in killed[1] and b"\x1b" not in killed[1]


def test_after_a_kill_every_line_but_the_last_is_whole(killed):
    folder = killed[0]
    for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]:
        assert json.loads(line)["step"]
    lines = (folder / "metrics.csv").read_text().split("\n")
    assert len({line.count(",") for line in lines[:-1]}) == 1


def test_a_killed_run_goes_on_as_if_nothing_had_been(killed, words, command, tmp_path):
    shutil.copytree(killed[0], tmp_path / "a")
    steps = 12 + len(read_csv(tmp_path / "a"))
    for name, more in (("a", ["--resume", tmp_path / "a"]), ("b", [*words.flags, "--out", tmp_path, "--name", "b"])):
        # the schedule's end is that of the killed run: the comparison stops both runs early
        with pytest.MonkeyPatch.context() as patch:
            after_step(patch, steps, send(signal.SIGTERM))
            ended = command(*more, "--steps", "5000", "--save-every", "3", "--eval-every", "4")
        assert ended.code == 143, name
    same_log(tmp_path / "a", tmp_path / "b")


# ---- the same seed, another seed
def test_one_seed_gives_one_run_and_another_seed_another(words, command, done, tmp_path):
    flags = [*words.flags, "--steps", "3", "--eval-every", "2", "--save-every", "2", "--out", tmp_path]
    assert command(*flags, "--name", "same", "--seed", "1").code == 0
    same_log(done, tmp_path / "same")
    assert command(*flags, "--name", "other", "--seed", "2").code == 0
    first, other = without_times(read_csv(done)), without_times(read_csv(tmp_path / "other"))
    assert all(a["reward_mean"] != b["reward_mean"] or a["loss"] != b["loss"] for a, b in zip(first, other,
                                                                                             strict=True))


# ---- resume
VARIANTS = {
    "full": [],
    "lora": ["--adapter", "lora", "--beta", "0.1", "--lr", "1e-2"],
    "a reference, inner epochs": ["--beta", "0.1", "--inner-epochs", "2", "--minibatches", "2", "--off-policy",
                                  "truncate"],
    "dynamic sampling, temperature": ["--dynamic-sampling", "2", "--min-group-std", "0.2", "--temperature-end", "0.5"],
    "running mean, entropy": ["--advantage", "mixed", "--mixed-std", "0.2", "--mixed-fallback", "baseline",
                              "--top-entropy", "0.5"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_stopped_and_then_killed_ends_like_one_that_was_not(words, command, tmp_path, variant):
    flags = [*words.flags, "--steps", "6", "--save-every", "2", "--eval-every", "3", "--warmup-steps", "2",
             *VARIANTS[variant], "--out", tmp_path]
    assert command(*flags, "--name", "whole").code == 0
    with pytest.MonkeyPatch.context() as patch:  # its prompts of step 4 are drawn, sampled and lost
        within_step(patch, 4, send(signal.SIGTERM))
        assert command(*flags, "--name", "broken").code == 143
    assert (tmp_path / "broken" / "checkpoints" / "step_3").is_dir()
    with pytest.MonkeyPatch.context() as patch:  # step 5 is logged, the newest checkpoint is of step 4
        after_step(patch, 5, raise_killed)
        with pytest.raises(Killed):
            command("--resume", tmp_path / "broken")
    assert len(read_csv(tmp_path / "broken")) == 5
    ended = command("--resume", tmp_path / "broken")
    assert ended.code == 0 and "resumed at step 4" in ended.out
    same_log(tmp_path / "whole", tmp_path / "broken")


def test_a_lora_that_began_from_an_adapter_keeps_its_reference_over_a_resume(words, command, tmp_path):
    lora = ["--adapter", "lora", "--beta", "0.1", "--lr", "1e-2", "--out", tmp_path]
    assert command(*words.flags, *lora, "--name", "first").code == 0
    flags = [*words.flags, *lora, "--steps", "4", "--save-every", "2", "--model",
             tmp_path / "first" / "checkpoints" / "step_2"]
    assert command(*flags, "--name", "whole").code == 0
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 3, raise_killed)
        with pytest.raises(Killed):
            command(*flags, "--name", "killed")
    assert command("--resume", tmp_path / "killed").code == 0
    same_log(tmp_path / "whole", tmp_path / "killed")
    assert float(read_csv(tmp_path / "whole")[0]["kl"]) == 0 < float(read_csv(tmp_path / "whole")[3]["kl"])


def test_a_resume_has_one_header_and_each_step_once(words, command, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 3, raise_killed)
        with pytest.raises(Killed):
            command(*words.flags, "--steps", "4", "--save-every", "2", "--out", tmp_path, "--name", "a")
    before = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    assert command("--resume", tmp_path / "a").code == 0
    after = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    assert after[:3] == before[:3]  # the header and the rows that the checkpoint knows, to the byte
    assert [line.split(",")[0] for line in after] == ["step", "1", "2", "3", "4"]
    assert [row["step"] for row in read_jsonl(tmp_path / "a" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_repaired_by_a_resume(command, copy, cut):
    whole = without_times(read_csv(copy))
    shutil.rmtree(copy / "checkpoints" / "step_3")
    for name in ("metrics.csv", "metrics.jsonl", "eval.jsonl"):
        path = copy / name
        path.write_bytes(path.read_bytes()[:-cut])
    assert command("--resume", copy).code == 0
    assert without_times(read_csv(copy)) == whole
    assert [row["step"] for row in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_jsonl(copy / "eval.jsonl")] == [0, 2, 3]


@functools.cache
def args_and_task(folder: Path) -> tuple:
    args, *_ = harness.flags.resolve_args(train_grpo.Args, [], json.loads((folder / "config.json").read_text())["args"])
    return args, load_task(args.task)(args)


@settings(max_examples=20, deadline=None, database=None)
@given(cut=st.integers(0, 4000), noise=st.binary(max_size=6))
def test_logs_cut_anywhere_are_whole_lines_after_a_resume(done, tmp_path_factory, cut, noise):
    folder = tmp_path_factory.mktemp("cut")
    for name in ("metrics.csv", "metrics.jsonl", "eval.jsonl", "config.json"):
        data = (done / name).read_bytes()
        (folder / name).write_bytes(data if name == "config.json" else data[: max(0, len(data) - cut)] + noise)
    header = (done / "metrics.csv").read_bytes().split(b"\n")[0] + b"\n"
    if not (folder / "metrics.csv").read_bytes().startswith(header):
        return  # a checkpoint is never older than the header
    args, task = args_and_task(done)
    harness.folder.Run(folder, task, [], print).forget_after(2)
    assert [row["step"] for row in read_csv(folder)] in ([], ["1"], ["1", "2"])
    for name in ("metrics.jsonl", "eval.jsonl"):
        steps = [row["step"] for row in read_jsonl(folder / name)]
        assert steps == sorted(set(steps)) and all(step <= 2 for step in steps)


def test_a_resume_with_flags_that_add_columns_keeps_the_earlier_rows(command, copy):
    header = (copy / "metrics.csv").read_text().splitlines()[0]
    soft = ["--overlong", "soft", "--overlong-buffer", "2", "--resume-override"]
    assert command("--resume", copy, "--steps", "4", *soft).code == 0
    assert (copy / "metrics.csv").read_text().splitlines()[0] == header
    assert [row["step"] for row in read_csv(copy)] == ["1", "2", "3", "4"]


def test_a_resume_of_a_finished_run_changes_no_row(command, copy):
    before = log_of(copy)
    assert command("--resume", copy).code == 0
    assert log_of(copy) == before


def test_more_steps_go_on_from_the_end(command, copy):
    assert command("--resume", copy, "--steps", "5").code == 0
    assert [row["step"] for row in read_csv(copy)] == ["1", "2", "3", "4", "5"]
    seen = [float(row["seen"]) for row in read_csv(copy)]
    assert seen == sorted(seen) and seen[-1] == 10
    assert [float(row["tokens_total"]) for row in read_csv(copy)] == list(
        itertools.accumulate(float(row["tokens"]) for row in read_csv(copy)))


def test_an_evaluation_first_asked_for_by_a_resume_does_not_pass_as_one_before_training(words, command, tmp_path):
    flags = [*words.flags, "--no-eval", "--out", tmp_path, "--name", "a"]
    assert command(*flags).code == 0
    assert command("--resume", tmp_path / "a", "--steps", "3", "--eval").code == 0
    assert [line["step"] for line in read_jsonl(tmp_path / "a" / "eval.jsonl")] == [3]


@pytest.mark.parametrize("words_", [["nowhere"], ["."], ["file"]])
def test_a_resume_of_what_is_no_run_is_refused(command, tmp_path, monkeypatch, words_):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    ended = command("--resume", *words_)
    assert ended.code == 2 and "--resume" in ended.err and len(ended.err.splitlines()) == 1


def test_a_run_whose_checkpoints_were_deleted_cannot_be_resumed_and_keeps_its_log(command, copy):
    before = (copy / "metrics.csv").read_bytes()
    shutil.rmtree(copy / "checkpoints")
    ended = command("--resume", copy)
    assert ended.code == 2 and "its checkpoints are gone" in ended.err
    assert (copy / "metrics.csv").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_ends_alike(words, command, done, tmp_path):
    flags = [*words.flags, "--steps", "3", "--eval-every", "2", "--save-every", "2", "--seed", "1", "--out", tmp_path]
    with pytest.MonkeyPatch.context() as patch:
        after_step(patch, 1, raise_killed)
        with pytest.raises(Killed):
            command(*flags, "--name", "a")
    assert command("--resume", tmp_path / "a").code == 0
    same_log(done, tmp_path / "a")


@pytest.mark.parametrize("change", [["--adapter", "lora"], ["--model", "tiny"], ["--optimizer", "adamw8bit"]])
def test_a_resume_cannot_change_what_the_checkpoint_was_made_with(command, copy, change):
    ended = command("--resume", copy, "--steps", "4", *change)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1
    assert change[0] in ended.err and "the run began with" in ended.err


def test_a_dry_run_of_a_resume_leaves_the_run_alone(command, copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert command("--resume", copy, "--dry-run").code == 2
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


# ---- signals
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_finishes_the_phase_saves_and_ends(words, command, tmp_path, monkeypatch, number, code):
    within_step(monkeypatch, 2, send(number))
    ended = command(*words.flags, "--steps", "9", "--out", tmp_path, "--name", "a")
    assert ended.code == code and f"--resume {tmp_path / 'a'}" in ended.out
    assert harness.checkpoints.is_whole(tmp_path / "a" / "checkpoints" / "step_1")
    assert [row["step"] for row in read_csv(tmp_path / "a")] == ["1"]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"].startswith("stopped")
    monkeypatch.undo()
    assert command("--resume", tmp_path / "a", "--steps", "3").code == 0


def test_a_signal_before_the_first_step_leaves_a_run_that_can_be_resumed(words, command, tmp_path, monkeypatch):
    evaluation = train_grpo.evaluate_and_log
    monkeypatch.setattr(train_grpo, "evaluate_and_log", lambda *given: (send(signal.SIGINT)(), evaluation(*given))[1])
    assert command(*words.flags, "--out", tmp_path, "--name", "a").code == 130
    monkeypatch.undo()
    assert command("--resume", tmp_path / "a").code == 0
    assert command(*words.flags, "--out", tmp_path, "--name", "b").code == 0
    same_log(tmp_path / "a", tmp_path / "b")


def in_a_fork(work) -> int:
    """Runs `work` in a fork of this process; gives its exit code, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        gc.freeze()
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            os._exit(0)
        except BaseException:
            os._exit(99)
    return chaos.exit_code(child)


@pytest.mark.parametrize("first, second, code", [(signal.SIGINT, signal.SIGINT, 130),
                                                 (signal.SIGINT, signal.SIGTERM, 143)])
def test_a_second_signal_while_saving_ends_at_once_and_the_earlier_checkpoint_is_whole(
        words, command, tmp_path, first, second, code):
    def work():
        patch = pytest.MonkeyPatch()
        within_step(patch, 4, send(first))
        save = models.policy.Policy.save

        def saving(policy, folder):
            save(policy, folder)
            if "step_3" in str(folder):
                send(second)()
                time.sleep(3600)

        patch.setattr(models.policy.Policy, "save", saving)
        train_grpo.main([*words.flags, "--steps", "9", "--save-every", "2", "--out", str(tmp_path), "--name", "a"])

    assert in_a_fork(work) == code
    assert not (tmp_path / "a" / "checkpoints" / "step_3").exists()
    ended = command("--resume", tmp_path / "a", "--steps", "4")
    assert ended.code == 0 and "resumed at step 2" in ended.out
    assert ".step_3.part" in ended.out  # what was never finished is named
    assert [row["step"] for row in read_csv(tmp_path / "a")] == ["1", "2", "3", "4"]


# ---- checkpoints that are not whole
def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json", "config.json"])
@pytest.mark.parametrize("harm", ["flipped", "missing", "cut", "empty"])
def test_a_damaged_checkpoint_is_not_whole(copy, file, harm):
    path = copy / "checkpoints" / "step_3" / file
    if harm == "flipped":
        flip(path)
    elif harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -1 if harm == "cut" else 0])
    assert not harness.checkpoints.is_whole(path.parent)
    said = []
    assert harness.checkpoints.newest_checkpoint(copy, said.append).name == "step_2"
    assert str(path.parent) in said[0]


def test_a_damaged_checkpoint_is_passed_over_and_named_by_a_resume(command, copy):
    flip(copy / "checkpoints" / "step_3" / "optimizer.pt")
    whole = log_of(copy)
    ended = command("--resume", copy)
    assert ended.code == 0 and "step_3 is not whole" in ended.out and "resumed at step 2" in ended.out
    assert log_of(copy) == whole and harness.checkpoints.is_whole(copy / "checkpoints" / "step_3")


@pytest.fixture(scope="module")
def saver(words, done):
    """Saves checkpoints of the finished run's model: a function of (run folder, step)."""
    config = json.loads((done / "config.json").read_text())["args"]
    args, *_ = harness.flags.resolve_args(train_grpo.Args, [], config)
    policy = models.policy.load_policy(args, load_task(args.task)(args))
    optimizer = models.optimizer.Optimizer(policy.model, args)
    state = train_grpo.State(train_grpo.BetaControl(args.beta), {}, 8192)
    state.load(harness.checkpoints.load_checkpoint(policy, optimizer, done / "checkpoints" / "step_3"))

    def save(folder, step, keep_last=2):
        run = harness.folder.Run(folder, policy.task, [], print)
        harness.checkpoints.save_checkpoint(run, policy, optimizer, dataclasses.replace(state, step=step),
                                            dataclasses.replace(args, keep_last=keep_last))

    return save


def die_at(number: int) -> None:
    """Ends this process at the number-th call that changes the disk."""
    calls = itertools.count(1)

    def watch(owner, name):
        real = getattr(owner, name)

        def watched(*given, **named):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **named)

        setattr(owner, name, watched)

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"),
                        (Path, "rename"), (Path, "replace"), (Path, "write_text"), (torch, "save")):
        watch(owner, name)


def test_a_process_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(saver, tmp_path, monkeypatch):
    monkeypatch.setattr(models.policy.Policy, "save", lambda _, folder: (folder / "weights").write_text("1"))
    finished = False
    for number in range(1, 200):
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        for step in (1, 2):
            saver(folder, step)

        def work(folder=folder, number=number):
            die_at(number)
            saver(folder, 3)

        code = in_a_fork(work)
        said = []
        newest = harness.checkpoints.newest_checkpoint(folder, said.append)
        assert newest.name in ("step_2", "step_3") and harness.checkpoints.is_whole(newest)
        saver(folder, 4)  # and what was left is no hindrance
        assert harness.checkpoints.newest_checkpoint(folder, said.append).name == "step_4"
        shutil.rmtree(folder)
        if code == 0:
            finished = True
            break
        assert code == -signal.SIGKILL
    assert finished and number > 10


@pytest.mark.parametrize("keep, left", [(1, {6}), (2, {4, 6}), (0, {2, 4, 6})])
def test_so_many_newest_checkpoints_are_kept(words, command, tmp_path, keep, left):
    assert command(*words.flags, "--no-eval", "--steps", "6", "--save-every", "2", "--keep-last", keep, "--out",
                   tmp_path, "--name", "a").code == 0
    assert {int(path.name[5:]) for path in (tmp_path / "a" / "checkpoints").glob("step_*")} == left


def test_the_best_checkpoint_survives_a_crash_while_it_is_replaced(words, command, copy):
    best = copy / "checkpoints" / "best"
    weights = (best / "model.safetensors").read_bytes()
    best.rename(best.with_name(".best.old"))
    best.with_name(".best.part").mkdir()
    assert command("--resume", copy).code == 0
    assert (best / "model.safetensors").read_bytes() == weights
    assert not list(best.parent.glob(".*"))


# ---- warnings
def rows_of(count: int = 1, **columns) -> list[dict]:
    """Made-up rows: every column a number, or a list with one number a row."""
    plain = {"truncated_share": 0.0, "groups_constant": 0, "groups_sampled": 8, "accuracy": 0.5, "entropy": 1.0,
             "kl": 0.01, "reward_mean": 0.5, "filtered_mass": 0.0}
    return [{name: value[i] if isinstance(value, list) else value for name, value in (plain | columns).items()}
            for i in range(count)]


def advised(rows, *flags) -> dict[str, str]:
    return harness.console.advice(rows, make_args("--max-new", "24", *flags))


def test_an_ordinary_run_is_left_in_peace():
    for count in (1, 5, 10, 20, 40):
        assert advised(rows_of(count)) == {}


def test_every_completion_truncated_warns_with_the_share_and_the_flag(words, command, tmp_path):
    ended = command(*words.flags, "--max-new", "1", "--out", tmp_path, "--name", "a")
    assert ended.code == 0
    rows = read_csv(tmp_path / "a")
    if all(float(row["truncated_share"]) == 1 for row in rows):
        assert re.search(r"warning: 100%.*--max-new", ended.out)
    text = advised(rows_of(1, truncated_share=1.0))["truncation"]
    assert "100%" in text and "--max-new" in text and "24" in text


def test_truncation_of_half_or_less_is_no_warning():
    assert "truncation" not in advised(rows_of(1, truncated_share=0.5))
    assert "51%" in advised(rows_of(1, truncated_share=0.51))["truncation"]


@pytest.mark.parametrize("accuracy, word", [(0.02, "hard"), (0.98, "easy")])
def test_starvation_says_whether_the_problems_are_too_hard_or_too_easy(accuracy, word):
    text = advised(rows_of(5, groups_constant=4, accuracy=accuracy))["starvation"]
    assert "50%" in text and word in text and "--dynamic-sampling" in text
    assert "starvation" not in advised(rows_of(4, groups_constant=4))
    assert "starvation" in advised(rows_of(5, groups_constant=4, accuracy=None))


def test_entropy_collapse_is_a_fall_and_not_a_low_start():
    assert "--temperature" in advised(rows_of(20, entropy=[1.0] * 10 + [0.001] * 10))["entropy"]
    assert "entropy" not in advised(rows_of(20, entropy=0.001))


def test_a_kl_blow_up_names_the_flags():
    text = advised(rows_of(1, kl=25.0))["kl"]
    assert "25" in text and "--lr" in text and "--beta" in text
    assert advised(rows_of(1, kl=None)) == {}


def test_reward_up_while_accuracy_down_is_called_hacking():
    up, down = [0.1] * 10 + [0.6] * 10, [0.6] * 10 + [0.1] * 10
    assert "hack" in advised(rows_of(20, reward_mean=up, accuracy=down))["hacking"]
    assert "hacking" not in advised(rows_of(20, reward_mean=up, accuracy=up))
    assert "hacking" not in advised(rows_of(20, reward_mean=up, accuracy=None))


def test_a_filter_is_warned_of_only_where_one_is_set():
    assert "1.0%" in advised(rows_of(1, filtered_mass=0.01), "--top-p", "0.9")["filter"]
    assert advised(rows_of(1, filtered_mass=1e-8)) == {}


def test_a_warning_is_not_repeated_at_every_step(words, command, tmp_path):
    ended = command(*words.flags, "--max-new", "2", "--steps", "8", "--no-eval", "--out", tmp_path, "--name", "a")
    assert ended.out.count("--max-new over") == 1


# ---- a run that ends early or makes nothing
def test_rewards_without_spread_end_the_run_early(words, command, tmp_path):
    flags = own_task(words, tmp_path, "def score(self, rollouts):\n"
                     "    return [Score(0.5, {'even': 0.5}) for _ in rollouts]")
    ended = command(*flags, "--steps", "50", "--early-stop-patience", "3", "--no-eval")
    assert ended.code == 0 and len(read_csv(tmp_path / "own")) == 3
    assert "stopped early" in json.loads((tmp_path / "own" / "summary.json").read_text())["status"]
    assert harness.checkpoints.is_whole(tmp_path / "own" / "checkpoints" / "step_3")


def test_a_dry_run_leaves_nothing_behind(words, command, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    ended = command(*words.flags, "--name", "a", "--dry-run")
    assert ended.code == 0 and "step 1/1" in ended.out
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "here").iterdir())


def test_a_run_of_no_steps_evaluates_and_ends(words, command, tmp_path):
    ended = command(*words.flags, "--steps", "0", "--out", tmp_path, "--name", "a")
    assert ended.code == 0 and read_csv(tmp_path / "a") == []
    assert [line["step"] for line in read_jsonl(tmp_path / "a" / "eval.jsonl")] == [0]


def test_pictures_that_fail_do_not_fail_the_run(words, command, tmp_path, monkeypatch):
    def fail(folder):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plot_run, "plot_run", fail)
    ended = command(*words.flags, "--out", tmp_path, "--name", "a")
    assert ended.code == 0 and "no fonts" in ended.out


def test_the_saved_completions_can_be_switched_off(words, command, tmp_path):
    assert command(*words.flags, "--no-save-completions", "--out", tmp_path, "--name", "a").code == 0
    assert not list((tmp_path / "a" / "completions").iterdir())


def test_gradients_that_are_never_finite_end_the_run_with_a_usable_checkpoint(words, command, tmp_path, monkeypatch):
    clip = models.optimizer.Optimizer.clip
    calls = itertools.count(1)
    monkeypatch.setattr(models.optimizer.Optimizer, "clip",
                        lambda self, limit: clip(self, limit) if next(calls) < 3 else float("nan"))
    ended = command(*words.flags, "--steps", "9", "--max-bad-steps", "2", "--out", tmp_path, "--name", "a")
    assert ended.code == 3 and "step 4" in ended.out
    rows = read_csv(tmp_path / "a")
    assert [row["skipped_updates"] for row in rows] == ["0", "0", "1"]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"].startswith("failed")
    monkeypatch.undo()
    assert command("--resume", tmp_path / "a", "--steps", "5").code == 0
    assert [row["step"] for row in read_csv(tmp_path / "a")] == ["1", "2", "3", "4", "5"]


def test_a_checkpoint_takes_any_dictionary_of_a_task(tmp_path):
    state = train_grpo.State(train_grpo.BetaControl(0.1), {"seen": collections.Counter(a=2),
                                                           "runs": collections.defaultdict(list, b=[1])}, 64)
    saved = json.loads(harness.files.strict_json(state.saved()))
    assert saved["task"] == {"seen": {"a": 2}, "runs": {"b": [1]}}
    assert saved["beta_control"] == {"beta": 0.1, "average": None, "updates": 0}
    other = train_grpo.State(train_grpo.BetaControl(0.5), {}, 1)
    other.load(saved | {"made_with": {}})
    assert other.beta_control == state.beta_control and other.micro_tokens == 64
