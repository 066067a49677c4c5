"""Self-play: phases, curriculum, novelty, gate and question quality by hand; the math task's rewards around them."""

import json
import shutil

import pytest
from conftest import read_csv, read_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_math_task import math_task, write
from test_tasks_contract import rollout

from data import Group, UserError
from tasks.math.chains import Link, evaluate
from tasks.math.curriculum import Curriculum, Phases
from tasks.math.questions import (
    Novelty,
    Topics,
    TrigramIndex,
    agreement,
    clarity,
    clean_question,
    confirmed,
    jaccard,
    novelty,
    passes_gate,
    question_quality,
    reward_cap,
    tool_of,
    trigrams,
)
from tasks.math.self_play import Family
from tasks.math.step_judge import StepScores
from tasks.math.word_problems import judged_solutions, word_problems

GOLDS = [(question, str(steps[-1][3])) for question, steps in word_problems("train", 400)]


# ---- phases
def phases(**values) -> Phases:
    return Phases(**({"target": 0.3, "ramp": 4, "min_warmup": 2, "floor": 0.5, "window": 1,
                      "thresholds": (0.55, 0.60, 0.65)} | values))


def test_the_three_phases_and_their_shares():
    machine, seen = phases(), []
    for accuracies in [(0.9, 0.9, 0.9), (0.9, 0.9, 0.64), (0.55, 0.60, 0.65)] + [(0.9, 0.9, 0.9)] * 5:
        seen.append((machine.phase, round(machine.share(), 4)))
        machine.update(*accuracies)
    assert seen == [("GROUNDED", 0.0)] * 3 + [("RAMP", 0.075), ("RAMP", 0.15), ("RAMP", 0.225), ("RAMP", 0.3),
                                              ("CONTINUOUS", 0.3)]


@pytest.mark.parametrize("low", [(0.54, 1, 1), (1, 0.59, 1), (1, 1, 0.64), (None, 1, 1), (1, 1, None)])
def test_each_threshold_keeps_the_run_grounded(low):
    machine = phases()
    for _ in range(5):
        machine.update(*low)
    assert machine.phase == "GROUNDED" and machine.share() == 0.0


def test_self_play_is_suspended_under_the_floor_and_the_ramp_goes_on_from_there():
    machine = phases()
    for accuracy in (0.9, 0.9, 0.9, 0.49):
        machine.update(accuracy, 0.9, 0.9)
    assert (machine.phase, machine.suspended, machine.share(), machine.progress) == ("RAMP", True, 0.0, 2)
    machine.update(0.4, 0.9, 0.9)
    assert machine.suspended and machine.progress == 2
    machine.update(0.5, 0.9, 0.9)
    assert not machine.suspended and machine.share() == pytest.approx(0.3 * 3 / 4)
    again = phases()
    again.load_state_dict(json.loads(json.dumps(machine.state_dict())))
    assert again.state_dict() == machine.state_dict() and again.share() == machine.share()


def test_accuracies_are_means_over_the_window_and_given_problems_keep_their_share():
    machine = phases(window=2, min_warmup=1)
    machine.update(0.2, 1, 1)
    machine.update(0.9, 1, 1)
    assert machine.phase == "RAMP"  # 0.55
    assert phases(target=0.7, ramp=0).share() == 0.0
    full = phases(target=1.0, ramp=0, min_warmup=1)
    full.update(1, 1, 1)
    assert full.share() == pytest.approx(0.7)


# ---- curriculum
def test_success_moves_the_target_and_failures_pause_a_topic():
    curriculum = Curriculum(["a", "b"], seed=0)
    for _ in range(4):
        curriculum.record("a", 1.0, True, 0.5)
    assert curriculum.topics["a"]["target"] == 0.3
    curriculum.record("a", 1.0, True, 0.5)
    assert curriculum.topics["a"]["target"] == pytest.approx(0.33)
    for expected in (0.3, 0.3, 0.3 * 0.6, 0.18):
        curriculum.record("b", 0.0, False, 0.1)
        assert curriculum.topics["b"]["target"] == pytest.approx(expected)
    curriculum.record("b", 0.0, False, 0.1)  # the fifth attempt, under 0.4, and the fifth failure
    assert curriculum.topics["b"]["target"] == pytest.approx(0.14) and set(curriculum.probabilities()) == {"a"}
    for _ in range(Curriculum.PAUSE):
        curriculum.next_step()
    assert set(curriculum.probabilities()) == {"a", "b"}


def test_topics_are_drawn_from_sweet_spot_exploration_and_retention():
    curriculum = Curriculum(["sweet", "easy", "hard", "new"], seed=0)
    for name, success in (("sweet", 0.5), ("easy", 0.9), ("hard", 0.1)):
        curriculum.record(name, success, True, 0.3)
    assert set(curriculum.probabilities().values()) == {0.25}
    for _ in range(3):
        curriculum.next_step()
    p = curriculum.probabilities()
    assert p == pytest.approx({"sweet": 0.6 + 0.0625, "easy": 0.15 + 0.0625, "hard": 0.0625, "new": 0.0625})
    curriculum.rewards.extend([0.3] * 10)  # nothing changes any more
    assert curriculum.probabilities()["sweet"] == pytest.approx(0.4 + 0.45 / 4)


def test_every_topic_keeps_two_percent_and_draws_repeat():
    curriculum = Curriculum([f"t{i}" for i in range(30)], seed=3)
    curriculum.step = 9
    curriculum.record("t0", 0.5, True, 0.3)
    p = curriculum.probabilities()
    assert min(p.values()) >= 0.02 / 1.5 and sum(p.values()) == pytest.approx(1)
    drawn = [curriculum.draw() for _ in range(20)]
    again = Curriculum([f"t{i}" for i in range(30)], seed=3)
    again.load_state_dict(json.loads(json.dumps(curriculum.state_dict())) | {"draws": 0})
    assert [again.draw() for _ in range(20)] == drawn


# ---- novelty
TEXT = st.text(alphabet="abcd ", max_size=30)


@given(st.lists(TEXT, max_size=30), TEXT)
@settings(max_examples=150, deadline=None)
def test_the_index_finds_the_highest_similarity(texts, query):
    expected = max((jaccard(trigrams(query), trigrams(text)) for text in texts), default=0.0)
    assert TrigramIndex(texts).nearest(query) == pytest.approx(expected)


def test_novelty_by_hand():
    assert trigrams("Abcd  e") == {"abc", "bcd", "cd ", "d e"}
    assert jaccard({"abc", "bcd"}, {"bcd", "cde", "def"}) == 0.25
    store = Novelty(["abcd"])
    assert store.add("abcd") == (0.0, 1.0)
    assert store.add("abce") == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert novelty(0.5, 1.0) == pytest.approx(0.7)
    for i in range(600):
        store.add(f"question {i}")
    assert len(store.texts) == len(store.grams) == 500
    again = Novelty(["abcd"])
    again.load_state_dict(json.loads(json.dumps(store.state_dict())))
    assert again.add("question 600?") == store.add("question 600?")


# ---- topics and the gate
def test_topics_come_from_labels_or_keywords():
    topics = Topics([("Tom buys 3", "plus"), ("Tom finds 3", "plus"), ("Ana buys 2", "plus"), ("Ana loses 2", "minus"),
                     ("Ana sells 2", "minus"), ("Tom loses 1", "minus"), ("Ana sells 2, then finds 1", "both"),
                     ("Tom loses 1, then buys 2", "both"), ("Ana finds 1, then loses 2", "both")])
    assert topics.names == ["both", "minus", "plus"]
    assert [topics.classify(text) for text in ("Tom buys 9", "Ana loses 1", "Ana loses 3, then finds 7")] == [
        "plus", "minus", "both"]
    words = Topics([("What is the area of a circle?", None)])
    assert words.classify("the area of a triangle with radius 2") == "geometry" and words.classify("zz") == "arithmetic"


@pytest.mark.parametrize("topic, answers, values", [
    ("arithmetic", ["7", "1,200", "3/4", "2+5", "x", None, "nan", "1/0", "9**9**9**9", "__import__('os')"],
     [7, 1200, 0.75, 7, None, None, None, None, None, None]),
    ("algebra", ["7", r"2\sqrt{4}", "x", r"\frac{1}{0}", r"\sqrt{-1}"], [7, 4, None, None, None]),
    ("geometry", ["7"], [None])])
def test_tools_confirm_finite_numbers(topic, answers, values):
    assert confirmed(answers, topic) == [None if v is None else pytest.approx(v) for v in values]
    assert tool_of(topic) == {"arithmetic": "arithmetic", "algebra": "sympy", "geometry": None}[topic]


def test_the_gate_asks_half_of_the_solutions_to_agree():
    assert agreement([7.0, 5.0, 7.0, None]) == [True, False, True, False]
    assert passes_gate([True, False, True, False]) and not passes_gate([True, False, False])
    assert agreement([None, None]) == [False, False] and not passes_gate([False, False]) and not passes_gate([])


# ---- quality
def test_question_quality_by_hand():
    quality = question_quality(topic=1.0, measured=0.5, target=0.3, clear=0.75, solvable=0.5, new=0.4)
    assert quality == pytest.approx(0.25 + 0.15 * 0.6 + 0.20 * 0.75 + 0.20 * 0.5 + 0.20 * 0.4)
    assert question_quality(1.0, 1.0, 0.3, 1.0, 0.5, 1.0) == pytest.approx(0.25 + 0 + 0.2 + 0.1 + 0.2)  # no fit
    assert question_quality(1.0, 0.3, 0.3, 1.0, 0.0, 1.0) == 0.0


@pytest.mark.parametrize("form, new, cap", [(0.49, 0.5, 0.30), (0.5, 0.5, 1.0), (1, 0.19, 0.35), (1, 0.86, 0.55),
                                            (0.2, 0.86, 0.30), (1, 0.20, 1.0), (1, 0.85, 1.0)])
def test_caps(form, new, cap):
    assert reward_cap(form, new) == cap


def test_clarity_and_the_shortest_question():
    assert clarity("Tom has 4 pens and buys 3 more. How many pens now?") == 1.0
    assert clarity("Pens") == 0.25 and clarity("How many?\nFinal Answer: 7") == 0.5
    assert clarity("Tom has 4 pens and buys 3.\nStep 1: 4+3=7\nHow many now?") == 0.75
    assert clean_question("too short") is None and clean_question(" ten chars ") is None
    assert clean_question("Question: ten chars!") == "ten chars!"


# ---- the math task
GIVEN = [{"question": f"What is {i} + {j}?", "answer": str(i + j), "type": "Sums"} for i in range(6) for j in range(6)]


def own_task(tmp_path, **values):
    return math_task(data=write(tmp_path / "d.jsonl", GIVEN), **({"self_play": 0.3, "group": 2} | values))


def own_group(task, answers, question="Tom has 4 pens and buys 3 more. How many pens now?", written=None, family=None):
    meta = {"self_play": True, "topic": "sums", "target": 0.3, "found": "sums",
            "novelty": (0.5, 1.0), "written": written, "family": family}
    prompt = task.prompt(question, None, **meta)
    rows = [rollout(prompt, f"Step 1: 4+3=7\nStep 2: 7+0=7\nFinal Answer: {answer}") for answer in answers]
    return Group(prompt, rows, task.score(rows))


def test_rewards_with_a_process_model_by_hand(tmp_path):
    task = own_task(tmp_path)
    right = task.reward_parts(True, 1.0, 1.0, StepScores([0.9, 0.6]))
    assert right == pytest.approx({"correct": 0.5, "process": 0.4 * (0.6 * 0.6 + 0.4 * 0.75), "format": 0.1,
                                   "beginning": 0.0})
    wrong = task.reward_parts(False, 0.0, 1.0, StepScores([0.9, 0.2]))
    assert sum(wrong.values()) == pytest.approx(0.4 * (0.6 * 0.2 + 0.4 * 0.55) + 0.1 + 0.15 * 0.5)
    assert task.reward_parts(True, 1.0, 1.0, StepScores()) == {"correct": 0.85, "format": 0.15}
    task.step_judge.calibration.active = True
    links = [Link("4+3", 7), Link("7-2", 6)]
    assert task.reward_parts(True, 1.0, 0.0, StepScores([0.9], links)) == pytest.approx(
        {"correct": 0.5, "integrity": 0.3 * (0.6 * 0.5 + 0.4 * 0.5), "chain_lccp": 0.2 * 0.5})


def test_own_solutions_are_scored_by_hand(tmp_path):
    task = own_task(tmp_path)
    group = own_group(task, ["7", "7", "8", "x"])
    quality = question_quality(1.0, 0.5, 0.3, 1.0, 0.75, 0.7)
    solution = 0.45 * 0.8 + 0.35 * 0.8 + 0.20 * 1.0  # two sums that hold and name no earlier result
    for score in group.scores:
        assert score.reward == pytest.approx(0.4 * quality + 0.6 * solution) == sum(score.parts.values())
        assert "correct" not in score.flags and score.flags["gate"]
    capped = own_group(task, ["7", "7"])
    capped.prompt.meta["novelty"] = (0.1, 1.0)
    assert task.score(capped.rollouts)[0].reward == pytest.approx(0.35)


def test_a_refused_group_is_not_trained_and_a_question_group_follows(tmp_path):
    task = own_task(tmp_path, q_group_size=3)
    asked = task.own.instruction("sums", 0.3)
    written = [rollout(asked, text) for text in ("first question", "second question", "bad")]
    family = Family(asked, written)
    good = own_group(task, ["7", "7", "7", "1"], written=written[0], family=family)
    refused = own_group(task, ["1", "2", "3", "4"], written=written[1], family=family)
    means = [sum(s.reward for s in g.scores) / 4 for g in (good, refused)]
    groups = task.adjust_groups([good, refused])
    assert len(groups) == 3 and groups[2].auxiliary and groups[2].rollouts == written
    assert [s.reward for s in groups[2].scores] == pytest.approx([*means, 0.0])
    assert all(s.reward is None and not s.parts for s in refused.scores) and good.scores[0].reward is not None
    row = task.observe(groups)
    assert row["phase"] == "GROUNDED" and row["gate_share"] == 0.5 and row["self_play_groups"] == 2
    assert 0 < row["question_reward"] < 1


def fake_policy(text):
    """Stands for the policy: writes `text` for every prompt, however long it may be."""
    import dataclasses

    @dataclasses.dataclass
    class Fake:
        args: object
        limits: list

        def fits(self, prompt):
            return True

        def sample(self, prompts, n, temperature, *key):
            self.limits.append((self.args.max_new, n, temperature))
            return [[rollout(prompt, text) for _ in range(n)] for prompt in prompts]

    limits = dataclasses.make_dataclass("Limits", ["max_new", "max_turns"])
    return Fake(limits(300, 1), [])


def ramped(task, text):
    task.policy = fake_policy(text)
    task.own.phases.phase = "CONTINUOUS"
    return task


def test_self_play_slots_are_a_share_and_spread_over_the_batch(tmp_path):
    task = ramped(own_task(tmp_path), "Ana has 12 marbles and loses 5 of them. How many are left?")
    batches = [[bool(p.meta.get("self_play")) for p in task.prompts(8)] for _ in range(50)]
    assert all(len(batch) == 8 and sum(batch) in (2, 3) for batch in batches)
    assert sum(map(sum, batches)) / 400 == pytest.approx(0.3, abs=0.03)
    assert len({tuple(batch) for batch in batches}) > 20
    assert task.policy.limits[0] == (128, 1, 1.1)


def test_useless_questions_and_high_targets_fall_back_to_given_problems(tmp_path):
    task = ramped(own_task(tmp_path), "short")
    assert not any(p.meta.get("self_play") for _ in range(5) for p in task.prompts(8)) and task.own.dropped > 5
    task = ramped(own_task(tmp_path), "Ana has 12 marbles and loses 5 of them. How many are left?")
    for topic in task.own.curriculum.topics.values():
        topic["target"] = 0.8
    assert not any(p.meta.get("self_play") for _ in range(5) for p in task.prompts(8)) and not task.policy.limits


def test_the_policy_may_say_what_a_question_is_about(tmp_path):
    task = ramped(own_task(tmp_path, topic_classifier="policy"), "It is about sums, 12 of them. How many?")
    prompt = next(p for p in task.prompts(8) if p.meta.get("self_play"))
    assert prompt.meta["found"] == "sums" and prompt.meta["question"] in task.own.told
    asked = len(task.policy.limits)
    task.prompts(8)
    assert [limit for limit, *_ in task.policy.limits[asked:]] == [128]  # the answer is kept


def test_math_data_are_mixed_in_along_their_ramp(tmp_path):
    second = write(tmp_path / "m.jsonl", [{"problem": f"m{i}", "solution": rf"\boxed{{{i}}}", "level": 1}
                                          for i in range(40)])
    task = math_task(data=write(tmp_path / "d.jsonl", GIVEN), math_data=second, math_mix=0.25, math_mix_late=0.75,
                     math_ramp_start=10)
    def share(step):
        task.step = step - 1
        return sum(p.meta.get("source") == "math" for _ in range(20) for p in task.prompts(8)) / 160

    assert share(10) == 0.25 and share(15) == pytest.approx(0.5) and share(20) == share(99) == 0.75
    prompt = next(p for p in task.prompts(8) if p.meta.get("source") == "math")
    answer = rollout(prompt, f"Final Answer: {prompt.gold}")
    task.observe([Group(prompt, [answer], task.score([answer]))])
    assert task.mixture.second.wins.sum() == 1 and task.sampler.tries.sum() == 0
    again = math_task(data=str(tmp_path / "d.jsonl"), math_data=second, math_mix=0.25)
    again.load_state_dict(json.loads(json.dumps(task.state_dict())))
    assert again.state_dict() == task.state_dict()
    assert task.drop_prompts(lambda p: p.meta.get("source") != "math") == 40 and task.mixture is None


def test_options_that_cannot_work_are_refused():
    for bad in ({"self_play": 0.8}, {"math_mix": 1.5}, {"chain_scoring": "shadow"}, {"q_group_size": 2},
                {"math_mix_late": 0.5}, {"question_temperature": 0.0}):
        with pytest.raises(UserError, match="--"):
            math_task(**bad)


class FakeProcessModel:
    """Stands for a process model that fails on some texts."""

    def __init__(self, breaks):
        self.breaks = breaks

    def score(self, problems):
        if any(self.breaks(question, steps) for question, steps in problems):
            raise RuntimeError("cannot read this")
        return [[0.9] * len(steps) or None for _, steps in problems]


def test_a_failing_process_model_costs_only_the_solution_that_it_fails_on(tmp_path):
    task = math_task(prm="given")
    prompt = task.prompts(1)[0]
    rows = [rollout(prompt, f"Step 1: a\nFinal Answer: {answer}") for answer in (prompt.gold, "13")]
    task.step_judge.prm = FakeProcessModel(lambda question, steps: "13" in steps[-1])
    good, bad = task.score_all([rows])[0]
    assert "process" in good.parts and set(bad.parts) == {"correct", "format"}
    task.step_judge.prm = FakeProcessModel(lambda question, steps: True)
    with pytest.raises(RuntimeError):
        task.score_all([rows])


def test_shadow_chains_change_nothing_until_they_agree(tmp_path):
    task = math_task(prm="given", chain_scoring="shadow")
    task.step_judge.prm = FakeProcessModel(lambda question, steps: False)
    prompt = task.prompts(1)[0]
    rows = [rollout(prompt, "Step 1: 1+1=2\nFinal Answer: 2")] * 8
    group = Group(prompt, rows, task.score(rows))
    assert "integrity" not in group.scores[0].parts
    assert task.observe([group])["chain_active"] == 0 and len(task.step_judge.calibration.last) == 2
    task.step_judge.calibration.active = True
    assert set(task.score(rows)[0].parts) == {"correct", "integrity", "chain_lccp"}


# ---- a run
def test_a_resumed_self_play_run_equals_the_whole_one(words, command, tmp_path):
    flags = ["--task", "math", *words.model, "--steps", "6", "--save-every", "3", "--keep-last", "0", "--self-play",
             "0.6", "--q-group-size", "2", "--min-warmup", "1", "--ramp-accuracy", "0", "--ramp-reward-accuracy", "0",
             "--ramp-step-accuracy", "0", "--grounded-floor", "0", "--selfplay-ramp", "2", "--math-instruction", "",
             "--prompts", "8", "--question-instruction", "w9 {topic} {difficulty}", "--question-tokens", "40",
             "--max-new", "12", "--entropy-coef", "0.1", "--kl-on-constant-groups", "--limit", "40", "--eval-size", "5"]
    assert command(*flags, "--out", tmp_path, "--name", "whole").code == 0
    whole = tmp_path / "whole"
    assert [row["phase"] for row in read_csv(whole)] == ["GROUNDED", "RAMP", "RAMP"] + ["CONTINUOUS"] * 3
    assert sum(int(row["self_play_groups"]) for row in read_csv(whole)) > 5
    shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "step_6")
    assert command("--resume", tmp_path / "killed").code == 0

    def rows(folder):
        timed = ("time", "seconds_", "tokens_per_second")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_csv(folder)]

    assert rows(tmp_path / "killed") == rows(whole)
    for step in (4, 5, 6):
        name = f"completions/step_{step}.jsonl.gz"
        assert read_jsonl(tmp_path / "killed" / name) == read_jsonl(whole / name)
    states = [json.loads((folder / "checkpoints/step_6/state.json").read_text())["task"]
              for folder in (whole, tmp_path / "killed")]
    assert states[0] == states[1] and states[0]["self_play"]["novelty"]["texts"]


def test_demonstrations_write_questions_where_the_policy_is_to_write_some():
    task = math_task(self_play=0.3)
    asked = [p for p in task.demonstration_prompts() if "writes" in p.meta]
    assert 300 < len(asked) < 1000 and not any("writes" in p.meta for p in math_task().demonstration_prompts())
    worked = task.demonstrations(asked)
    assert [m[0]["content"] for m in worked[:50]] == [p.meta["writes"] for p in asked[:50]]
    assert {p.meta["topic"] for p in asked} == {"addition", "mixed", "subtraction"}
    own = [task.own.topics.classify(p.meta["writes"]) == p.meta["topic"] for p in asked]
    assert sum(own) > 0.95 * len(own)


def test_judged_solutions_know_which_of_their_steps_are_right():
    for question, lines, answer, right in judged_solutions(400):
        sums = [line.partition(": ")[2].partition("=") for line in lines]
        assert len(right) == len(lines) + 1
        for (expression, _, result), verdict in zip(sums, right, strict=False):
            assert not verdict or evaluate(expression) == float(result)
        gold = dict(GOLDS)[question]
        assert right[-1] == (answer == gold)


@pytest.mark.slow
@pytest.mark.parametrize("floor, suspended", [("0.5", {"0"}), ("1.01", {"0", "1"})])
def test_the_tiny_run_goes_through_its_phases(command, tmp_path, floor, suspended):
    ended = command("--preset", "selfplay", "smoke", "--grounded-floor", floor, "--out", tmp_path, "--name", "r")
    assert ended.code == 0
    rows = read_csv(tmp_path / "r")
    reached = ["GROUNDED", "RAMP", "CONTINUOUS"] if floor == "0.5" else ["GROUNDED", "RAMP"]
    assert list(dict.fromkeys(row["phase"] for row in rows)) == reached
    assert {row["suspended"] for row in rows} == suspended
    assert (sum(int(row["self_play_groups"]) for row in rows) > 20) == (floor == "0.5")
