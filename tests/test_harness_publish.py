"""Trackers, merged models and hub pushes: what is asked for is there, and no failure of theirs ends a run."""

import importlib.util
import json
import os
import sys
import types

import pytest
import torch
import transformers
from conftest import make_policy, read_csv, read_jsonl

from harness import publish

EXTRA = os.environ.get("TRACKER_PACKAGES", "/tmp/physicspkg")  # a folder of trackers that are not in the environment


@pytest.fixture
def trackers(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, EXTRA])
    importlib.invalidate_caches()


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_tensorboard_gets_every_number_of_every_row(words, command, tmp_path, trackers):
    needs("tensorboard")
    ended = command(*words.flags, "--out", tmp_path, "--name", "a", "--report-to", "tensorboard")
    assert ended.code == 0 and "report" not in ended.out
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    rows = read_csv(tmp_path / "a")
    for name in ("reward_mean", "loss", "part_even", "eval_reward", "lr"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        wanted = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert logged == pytest.approx(wanted, rel=1e-5, abs=1e-6) and logged


def test_wandb_offline_gets_the_rows(words, command, tmp_path, trackers, monkeypatch):
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ended = command(*words.flags, "--out", tmp_path, "--name", "a", "--report-to", "wandb")
    assert ended.code == 0 and "--report-to wandb is off" not in ended.out
    (file,) = (tmp_path / "a" / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"reward_mean" in data and b"part_even" in data and b"eval_reward" in data


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(words, command, tmp_path, monkeypatch):
    class Writer:
        def __init__(self, *_, **__):
            pass

        def add_scalar(self, *_):
            raise OSError("disk full")

        def close(self):
            raise OSError("disk full")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(publish.importlib.util, "find_spec", lambda name: True)
    ended = command(*words.flags, "--out", tmp_path, "--name", "a", "--report-to", "tensorboard")
    assert ended.code == 0 and ended.out.count("reporting is off") == 1 and len(read_csv(tmp_path / "a")) == 2


def test_a_tracker_that_is_missing_is_one_sentence(words, command, tmp_path, monkeypatch):
    monkeypatch.setattr(publish.importlib.util, "find_spec", lambda name: None)
    for flags in (["--report-to", "wandb"], ["--report-to", "tensorboard"], ["--save-method", "merged_4bit"]):
        ended = command(*words.flags, "--out", tmp_path, *flags)
        assert ended.code == 2 and len(ended.err.splitlines()) == 1 and flags[0] in ended.err
    assert not list(tmp_path.iterdir())


def test_a_merged_model_is_one_model_that_says_what_the_adapter_said(words, command, tmp_path):
    flags = [flag for flag in words.flags if flag not in ("--adapter", "none")]
    ended = command(*flags, "--lr", "1e-2", "--out", tmp_path, "--name", "a", "--save-method", "merged_16bit")
    assert ended.code == 0 and not (tmp_path / "a" / "model" / "adapter_config.json").exists()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(words.folder / "model", dtype=torch.float32)
    import peft

    tuned = peft.PeftModel.from_pretrained(base, str(tmp_path / "a" / "checkpoints" / "step_2"))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        said, wanted = merged(ids).logits, tuned(ids).logits
        with tuned.disable_adapter():
            before = tuned(ids).logits
    assert (said - wanted).abs().max() < 0.1 * wanted.abs().max()  # bfloat16 keeps eight bits
    assert (said - wanted).abs().mean() < (before - wanted).abs().mean()


def test_merging_leaves_the_policy_as_it_was(tmp_path):
    policy = make_policy()
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    publish.write_model(policy, tmp_path, tmp_path / "model", "merged_16bit")
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32 for name, p in policy.model.named_parameters())


def hub(monkeypatch, upload):
    fake = types.SimpleNamespace(create_repo=lambda *_, **__: None, upload_folder=upload)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)


def test_pushes_are_recorded_with_step_and_commit(tmp_path, monkeypatch):
    uploads = []

    def upload(repo_id, folder_path, path_in_repo, commit_message):
        uploads.append((repo_id, path_in_repo))
        return types.SimpleNamespace(oid=f"c{len(uploads)}")

    hub(monkeypatch, upload)
    policy, said = make_policy("--push-to-hub", "me/final", "--hub-checkpoint-repo", "me/steps"), []
    publish.publish(policy, tmp_path, tmp_path / "step_5", 5, False, said.append)
    publish.publish(policy, tmp_path, tmp_path / "step_9", 9, True, said.append)
    assert uploads == [("me/steps", "step_5"), ("me/steps", "step_9"), ("me/final", "step_9")]
    records = read_jsonl(tmp_path / "hub.jsonl")
    assert [(r["step"], r["repo"], r["commit"]) for r in records] == [
        (5, "me/steps", "c1"), (9, "me/steps", "c2"), (9, "me/final", "c3")]


def test_a_push_that_fails_never_fails_the_run(tmp_path, monkeypatch):
    def upload(**_):
        raise ConnectionError("no network")

    hub(monkeypatch, upload)
    said = []
    publish.publish(make_policy("--hub-checkpoint-repo", "me/x"), tmp_path, tmp_path / "step_1", 1, True, said.append)
    (record,) = read_jsonl(tmp_path / "hub.jsonl")
    assert "no network" in record["error"] and "commit" not in record and "the run goes on" in said[0]


def test_a_push_that_hangs_does_not_hold_the_run(tmp_path, monkeypatch):
    import threading

    release = threading.Event()
    hub(monkeypatch, lambda **_: release.wait())
    monkeypatch.setattr(publish, "PUSH_SECONDS", 0.05)
    said = []
    publish.push(tmp_path, tmp_path / "step_1", "me/x", 1, said.append)
    release.set()
    assert "takes long" in said[0]


def test_a_run_without_a_network_ends_well_and_says_that_the_push_failed(words, command, tmp_path):
    ended = command(*words.flags, "--out", tmp_path, "--name", "a", "--hub-checkpoint-repo", "me/x")
    assert ended.code == 0 and "the push to me/x failed" in ended.out
    assert "error" in json.loads((tmp_path / "a" / "hub.jsonl").read_text().splitlines()[0])


def test_a_merge_that_fails_leaves_the_earlier_model(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    policy = make_policy("--save-method", "merged_16bit")

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(policy, "save_merged", fail)
    said = []
    publish.publish(policy, tmp_path, tmp_path / "step_1", 1, True, said.append)
    assert "no room" in said[0] and (tmp_path / "model" / "config.json").read_text() == "{}"
