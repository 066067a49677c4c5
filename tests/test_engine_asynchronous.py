"""Rollouts made ahead of the trainer: the books under scripted schedules, without threads or time, and whole runs."""

import copy
import dataclasses
import json
import os
import shutil
import signal
import threading

import peft
import pytest
import torch
from conftest import WordTask, make_policy, read_csv, read_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_harness_folder import without_times

import harness.checkpoints
import harness.flags
import harness.stop
import train_grpo
from data import Prompt, Task, TrainingFailed, UserError
from engine.asynchronous import COLUMNS, RolloutQueue, at_random, copy_policy_model, groups_allowed

CSV_TIMES = {name for name in COLUMNS if name.startswith("seconds_")}


# ---- how many, which
@pytest.mark.parametrize("need, per_step, outstanding, later, expected", [
    (4, 4, 0, 0, 4),  # the trainer waits, and nothing may be older: just what it waits for
    (0, 4, 0, 0, 0),  # it updates: whatever begins now would be a version old
    (0, 4, 0, 1, 4),  # one version older is allowed: the next step's
    (4, 4, 0, 1, 8), (4, 4, 5, 1, 3), (4, 4, 9, 1, 0), (1, 4, 0, 0, 1), (0, 4, 3, 2, 5),
    (4, 4, 0, -1, 0),  # the weights are too old already
])
def test_how_many_groups_may_be_begun(need, per_step, outstanding, later, expected):
    assert groups_allowed(need, per_step, outstanding, later) == expected


@given(st.floats(0, 1), st.lists(st.integers(1, 7), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_the_share_at_random_holds_after_any_number_of_draws(share, draws):
    dealt = chance = 0
    for n in draws:
        some = at_random(dealt, n, share)
        assert 0 <= some <= n
        dealt, chance = dealt + n, chance + some
        assert abs(chance - share * dealt) <= 1


# ---- a second adapter on one base
def lora_policy(*flags):
    policy = make_policy(*flags)
    torch.manual_seed(3)
    model = peft.get_peft_model(policy.hf, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    policy.model, policy.hf = model.eval(), model.get_base_model()
    return policy


def test_the_second_adapter_shares_the_base_and_nothing_else():
    policy = lora_policy()
    other = copy_policy_model(policy.model)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = policy.model(ids).logits
        assert torch.equal(other(ids).logits, before)
        for (name, mine), theirs in zip(policy.model.named_parameters(), other.parameters(), strict=True):
            assert (mine.data_ptr() == theirs.data_ptr()) == (not mine.requires_grad), name
        with other.disable_adapter():  # one tree's switch does not reach the other's
            assert torch.equal(policy.model(ids).logits, before)
        for parameter in (p for p, q in zip(other.parameters(), policy.model.parameters(), strict=True)
                          if q.requires_grad):
            parameter.mul_(2)
        assert torch.equal(policy.model(ids).logits, before) and not torch.equal(other(ids).logits, before)


def test_a_merge_in_one_tree_leaves_the_others_base_as_it_was():
    policy = lora_policy()
    policy.engine, model = "fast", copy_policy_model(policy.model)
    other = dataclasses.replace(policy, model=model, hf=model.get_base_model())
    with torch.no_grad(), other.adapter.merged_in():
        merged = [layer.get_base_layer().weight.clone() for layer in lora_layers(model)]
        plain = [layer.get_base_layer().weight.clone() for layer in lora_layers(policy.model)]
    assert not any(torch.equal(a, b) for a, b in zip(merged, plain, strict=True))
    assert all(torch.equal(a.get_base_layer().weight, b) for a, b in zip(lora_layers(policy.model), plain, strict=True))


def lora_layers(model):
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")]


def test_hooks_and_tied_weights_go_with_their_tree():
    policy = make_policy()
    policy.hf.lm_head.weight = policy.hf.model.embed_tokens.weight
    seen = []
    policy.hf.model.register_forward_hook(lambda *_: seen.append(1))
    other = copy_policy_model(policy.model)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert other.lm_head.weight.data_ptr() != policy.hf.lm_head.weight.data_ptr()  # trained: a copy
    other(torch.tensor([[3]]))
    assert seen == [1]


# ---- the books under a scripted schedule
class Listed(WordTask):
    """Eight prompts in order, which are also the list that random ones come from."""

    prompts = Task.prompts

    def __init__(self, args):
        super().__init__(args)
        self.set_prompts([Prompt(f"w{3 + i}") for i in range(8)], [])


def make_ahead(*flags, state=None, version=0, said=None):
    policy = make_policy("--prompts", "2", "--group", "2", "--max-new", "3", "--async-workers", "1", "--async-random",
                         "0", *flags)
    policy.version = version
    policy.task = Listed(policy.args)
    ahead = RolloutQueue(policy, policy.task, policy.args, (said if said is not None else []).append, state)
    ahead.wait = lambda: ahead.work(ahead.workers[0])  # instead of waiting for a thread: one ticket is rolled out
    return ahead


def train(ahead, step, publish=True):
    """A step of the trainer after its groups were taken: other weights, a version on."""
    with torch.no_grad():
        for parameter in ahead.policy.model.parameters():
            parameter.add_(0.01)
    ahead.policy.version = step
    if publish:
        ahead.publish()


def take(ahead, step, n=2, check=lambda: None):
    return ahead.take(n, step, 1.0, check)


def books(ahead):
    return {name: value for name, value in ahead.counts.items() if value}


def words_of(groups):
    return [group[0].prompt.messages for group in groups]


def test_with_no_gap_nothing_is_begun_before_it_is_wanted():
    ahead = make_ahead("--max-version-gap", "0", "--steps", "3")
    for step in (1, 2, 3):
        groups = take(ahead, step)
        assert [r.version for g in groups for r in g] == [[step - 1] * len(r.mask) for g in groups for r in g]
        assert (len(ahead.tickets), len(ahead.ready), ahead.outstanding) == (0, 0, 0)
        train(ahead, step)
    assert books(ahead) == {"dealt": 6, "produced": 6, "accepted": 6}
    assert ahead.ages == [0] * 6


def test_with_a_gap_of_one_the_next_step_is_on_its_way_during_the_update():
    ahead = make_ahead("--max-version-gap", "1", "--steps", "3")
    assert words_of(take(ahead, 1)) == ["w" + str(3 + i) for i in order(ahead)[:2]]
    assert len(ahead.tickets) == 1 and ahead.outstanding == 2
    ahead.work(ahead.workers[0])  # while the trainer updates: with the weights of version 0
    train(ahead, 1)
    second = take(ahead, 2)
    assert {v for g in second for r in g for v in r.version} == {0} and ahead.ages == [0, 0, 1, 1]
    assert words_of(second) == ["w" + str(3 + i) for i in order(ahead)[2:4]]
    train(ahead, 2)
    take(ahead, 3)  # nobody worked during that update: the newest weights are used
    assert ahead.ages[4:] == [0, 0]
    assert not ahead.tickets and not ahead.outstanding  # nothing for a fourth step, which will not be
    assert books(ahead) == {"dealt": 6, "produced": 6, "accepted": 6}


def order(ahead):
    return Listed(ahead.args).sampler.draw(8)


def test_what_is_too_old_is_dropped_counted_and_made_anew():
    ahead = make_ahead("--max-version-gap", "1", "--steps", "9")
    take(ahead, 1)
    ahead.work(ahead.workers[0])
    train(ahead, 1)
    train(ahead, 2)  # as if a step had gone by without these groups
    groups = take(ahead, 3)
    assert ahead.counts["stale"] == 2 and {v for g in groups for r in g for v in r.version} == {2}
    assert books(ahead) == {"dealt": 8, "produced": 6, "accepted": 4, "stale": 2}


def test_the_queue_is_bounded_and_says_when_that_held_a_worker_back():
    ahead = make_ahead("--max-version-gap", "3", "--async-queue", "3", "--steps", "9")
    take(ahead, 1)
    assert ahead.outstanding == 3 and ahead.counts["full"] > 0
    before = ahead.counts["full"]
    wide = make_ahead("--max-version-gap", "3", "--steps", "9")
    take(wide, 1)
    assert wide.outstanding == 6 and wide.counts["full"] == 0 and before > 0
    assert wide.metrics()["async_queue_use"] == 0.0


def test_the_weights_are_handed_over_at_the_interval_only():
    ahead = make_ahead("--max-version-gap", "2", "--policy-sync-interval", "2", "--steps", "9")
    for step in range(1, 5):
        take(ahead, step)
        train(ahead, step, publish=step % 2 == 0)
    assert ahead.weights.version == 4 and max(ahead.ages) <= 2 and ahead.counts["stale"] == 0


def test_a_worker_samples_from_the_weights_that_were_published():
    ahead = make_ahead("--max-version-gap", "0", "--steps", "9")
    take(ahead, 1)
    train(ahead, 1)
    now = {name: value.clone() for name, value in ahead.policy.model.state_dict().items()}
    with torch.no_grad():
        for parameter in ahead.policy.model.parameters():
            parameter.zero_()  # what the trainer does later is not seen
    take(ahead, 2)
    for name, value in ahead.workers[0].policy.model.state_dict().items():
        assert torch.equal(value, now[name]), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_handed_over(bad):
    said = []
    ahead = make_ahead("--max-version-gap", "0", "--steps", "9", said=said)
    take(ahead, 1)
    before = copy.deepcopy(ahead.workers[0].policy.model.state_dict())
    with torch.no_grad():
        next(ahead.policy.model.parameters())[0, 0] = bad
    train(ahead, 1)
    assert ahead.weights.version == 0 and ahead.counts["errors"] == 1 and "not finite" in said[0]
    with pytest.raises(TrainingFailed, match="not finite"):  # no group can be young enough: the trainer does not wait
        take(ahead, 2)
    for name, value in ahead.workers[0].policy.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_half_of_the_prompts_come_in_order_and_half_at_random():
    ahead = make_ahead("--max-version-gap", "0", "--async-random", "0.5", "--prompts", "4", "--steps", "9")
    dealt = [words_of(take(ahead, step, 4)) for step in (1, 2)]
    inside = Listed(ahead.args).sampler.draw(4)
    assert [word for words in dealt for word in words[:2]] == [f"w{3 + i}" for i in inside]
    again = make_ahead("--max-version-gap", "0", "--async-random", "0.5", "--prompts", "4", "--steps", "9")
    assert words_of(take(again, 1, 4)) == dealt[0]


def test_a_task_without_a_list_deals_all_in_its_own_order():
    ahead = make_ahead("--async-random", "1")
    ahead.task.train = []
    ahead.task.prompts = lambda n: [Prompt("w9")] * n
    assert words_of(take(ahead, 1)) == ["w9", "w9"]


def test_a_resume_drops_what_was_on_its_way_and_counts_it():
    ahead = make_ahead("--max-version-gap", "2", "--steps", "9")
    take(ahead, 1)
    ahead.work(ahead.workers[0])
    state = json.loads(json.dumps({"task": ahead.task.state_dict(), "ahead": ahead.state_dict()}))
    assert state["ahead"]["outstanding"] == 4
    resumed = make_ahead("--max-version-gap", "2", "--steps", "9", state=state["ahead"], version=1)
    resumed.task.load_state_dict(state["task"])
    assert resumed.counts["dropped"] == 4 and resumed.outstanding == 0 and not resumed.ready
    assert words_of(take(resumed, 2)) == words_of_next(ahead)  # the order goes on behind what was dealt
    assert resumed.numbers > state["ahead"]["numbers"]  # and no ticket's seed comes twice
    books_ = resumed.counts
    assert books_["dealt"] == books_["accepted"] + books_["stale"] + books_["dropped"] + resumed.outstanding


def words_of_next(ahead):
    return [prompt.messages for prompt in ahead.task.prompts(2)]


def test_what_a_worker_raises_is_raised_where_the_trainer_waits():
    said = []
    ahead = make_ahead("--max-version-gap", "1", said=said)
    ahead.workers[0].policy.sample = lambda *_: {}["no such rollout"]
    ahead.wait = lambda: ahead.run(ahead.workers[0])
    with pytest.raises(KeyError, match="no such rollout"):
        take(ahead, 1)
    assert "Traceback" in said[0] and "test_engine_asynchronous.py" in said[0]


def test_workers_that_have_all_ended_are_noticed():
    ahead = make_ahead()
    ahead.threads = [threading.Thread(target=lambda: None)]  # never started: not alive
    with pytest.raises(TrainingFailed, match="every rollout worker has ended"):
        take(ahead, 1)


def test_a_stop_is_seen_while_the_trainer_waits():
    ahead, asked = make_ahead(), []
    ahead.wait = lambda: None

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise harness.stop.Stopped

    with pytest.raises(harness.stop.Stopped):
        take(ahead, 1, check=check)


def test_a_closing_run_ends_a_rollout_at_its_next_forward():
    ahead = make_ahead("--max-new", "8")
    forwards, hf = [], ahead.workers[0].policy.hf

    def closes(*_):
        forwards.append(1)
        if len(forwards) == 2:
            ahead.closing.set()

    hf.register_forward_pre_hook(closes)
    ahead.need = 2
    ahead.issue_tickets(1, 1.0)
    ahead.run(ahead.workers[0])
    assert len(forwards) == 2 and ahead.error is None and not ahead.ready


def test_seconds_and_counts_become_columns():
    ahead = make_ahead("--max-version-gap", "1", "--steps", "9")
    take(ahead, 1)
    row = ahead.metrics()
    assert set(row) == set(COLUMNS) and row["async_accepted"] == 2 and row["async_age_mean"] == 0.0
    ahead.seconds["wait"].clear()
    ahead.seconds["wait"].extend([0.0, 1.0, 2.0, 3.0, 4.0])
    row = ahead.metrics()
    assert (row["seconds_wait_p50"], row["seconds_wait_p90"], row["seconds_wait_p99"]) == pytest.approx((2, 3.6, 3.96))
    assert row["async_age_mean"] is None  # nothing was taken since


@pytest.mark.parametrize("flag, needs", [("--async-workers", "on_forward"), ("--bc-coef", "worked_turn")])
def test_a_task_that_does_not_fit_a_flag_is_refused_before_the_model_is_loaded(words, command, tmp_path, flag, needs):
    file = tmp_path / "injects.py"
    file.write_text(words.file.read_text() + "\n\n    def on_forward(self, prompts):\n        pass\n")
    ended = command("--task", f"{file}:Words", "--model", tmp_path / "none", flag, "1")
    assert ended.code == 2 and needs in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("flags, word", [
    ("--async-workers 1 --policy-sync-interval 3 --max-version-gap 1", "--max-version-gap 2 or more"),
    ("--decoupled-ppo --off-policy mask", "leave out --off-policy"), ("--m2-threshold 0.1", "--decoupled-ppo"),
    ("--beta-control gap --beta 0", "--beta over 0"), ("--beta-min 0.5", "--beta-max"),
    ("--async-random 2", "outside 0 to 1"),
])
def test_flags_that_cannot_work_together_are_refused(flags, word):
    with pytest.raises(UserError, match=word):
        harness.flags.resolve_args(train_grpo.Args, flags.split())


# ---- whole runs
@pytest.fixture
def run(words, command, tmp_path, monkeypatch):
    """Runs the words task with further flags; (how it ended, its folder). At its end it waits for its workers, however
    busy the machine is."""
    monkeypatch.setattr(RolloutQueue.close, "__defaults__", (threading.TIMEOUT_MAX / 2,))

    def go(name, *flags, file=None):
        task = ["--task", f"{file}:Words"] if file else words.flags[:2]
        ended = command(*task, *words.flags[2:], "--async-random", "0", "--out", tmp_path, "--name", name, *flags)
        return ended, tmp_path / name
    return go


def without_books(rows):
    return [{name: value for name, value in row.items() if not name.startswith("async") and name not in CSV_TIMES}
            for row in without_times(rows)]


@pytest.mark.parametrize("adapter", ["none", "lora", "svd"])
def test_a_worker_with_no_gap_trains_as_no_worker_does(run, adapter, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--adapter", adapter, "--beta", "0.1", "--steps", "3", "--no-eval", "--decoupled-ppo"]
    folders = [run(f"w{n}", *flags, "--async-workers", n, "--max-version-gap", "0")[1] for n in (0, 1)]
    first, second = (without_books(read_jsonl(folder / "metrics.jsonl")) for folder in folders)
    assert len(first) == 3 and first == second
    assert read_csv(folders[1])[-1]["async_accepted"] == "6" and "async_accepted" not in read_csv(folders[0])[-1]
    for path in (harness.checkpoints.checkpoints(folders[0])[0]).glob("*.safetensors"):
        assert path.read_bytes() == (harness.checkpoints.checkpoints(folders[1])[0] / path.name).read_bytes()


def test_a_run_with_workers_ahead_resumes_and_its_books_add_up(run, command):
    ended, folder = run("a", "--async-workers", "2", "--max-version-gap", "2", "--steps", "4", "--save-every", "2",
                        "--prompts", "2")
    assert ended.code == 0, ended.err
    rows = read_csv(folder)
    assert len(rows) == 4 and rows[-1]["async_accepted"] == "8" and all(row["seconds_wait_p99"] for row in rows)
    shutil.rmtree(folder / "checkpoints" / "step_4")
    ended = command("--resume", folder, "--steps", "5")
    assert ended.code == 0, ended.err
    state = json.loads((folder / "checkpoints" / "step_5" / "state.json").read_text())
    books_ = state["ahead"]["counts"]
    assert books_["accepted"] == 10
    assert books_["dealt"] == books_["accepted"] + books_["stale"] + books_["dropped"] + state["ahead"]["outstanding"]
    assert [row["step"] for row in read_csv(folder)] == list("12345")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]


def test_a_worker_that_raises_ends_the_run_with_its_traceback(run, words, tmp_path):
    file = tmp_path / "broken.py"
    broken = "\n\n    def reply(self, rollout):\n        raise LookupError('no tool')\n"
    file.write_text(words.file.read_text() + broken)
    with pytest.raises(LookupError, match="no tool"):
        run("a", "--async-workers", "1", "--max-turns", "2", "--no-eval", file=file)
    log = (tmp_path / "a" / "console.log").read_text()
    assert "Traceback" in log and "broken.py" in log and "LookupError: no tool" in log
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]


def test_ctrl_c_while_the_trainer_waits_saves_and_ends_every_thread(run, monkeypatch):
    taken = RolloutQueue.next_ready

    def interrupted(self, check):
        if self.policy.version == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(self, check)

    monkeypatch.setattr(RolloutQueue, "next_ready", interrupted)
    ended, folder = run("a", "--async-workers", "2", "--max-version-gap", "1", "--steps", "4")
    assert ended.code == 130 and len(read_csv(folder)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts")]
