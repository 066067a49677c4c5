"""The math task: its records, its word problems, its reward."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tasks_contract import core_args, rollout

from data import Group, UserError
from rewards import equivalent, final_answer
from tasks.math import given as given_problems
from tasks.math import task as math_reasoning
from tasks.math import word_problems as words
from tasks.math.records import is_numeric, question_and_gold
from tasks.math.task import MathTask
from tasks.math.word_problems import demonstration, split_expressions, word_problems

SHARED = Path(__file__).parents[2] / "shared" / "data"


def write(path: Path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def math_task(**values) -> MathTask:
    return MathTask(core_args("math", **values))


def numbered(n: int, start: int = 0) -> list[dict]:
    return [{"question": f"What is {i} + 0?", "answer": str(i)} for i in range(start, start + n)]


# ---- records
@pytest.mark.parametrize("record, question, gold", [
    ({"question": "How many?", "answer": "So 2*600=1200.\n#### 1,200"}, "How many?", "1200"),
    ({"question": "How many?", "answer": "#### -1,234,567 "}, "How many?", "-1234567"),
    ({"question": "q", "gold": 7}, "q", "7"),
    ({"prompt": "q", "answer": "1/2"}, "q", "1/2"),
    ({"problem": "q", "solution": r"first \boxed{1}, then \boxed{\frac{1}{2}}."}, "q", r"\frac{1}{2}"),
    ({"problem": "q", "solution": r"\boxed{1}", "answer": "2"}, "q", "2"),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Be brief.\nProblem: 1+1?"},
                   {"role": "assistant", "content": "Step 1: 1+1=2\nFinal Answer: 2"}]}, "1+1?", "2"),
    ({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": r"\boxed{2}"}]}, "1+1?", "2"),
])
def test_record_forms(record, question, gold):
    assert question_and_gold(record) == (question, gold)


@pytest.mark.parametrize("record, reason", [
    ({"answer": "1"}, "no question"), ({"question": " ", "answer": "1"}, "no question"), ({"question": "q"}, "no gold"),
    ({"question": "q", "answer": "#### "}, "no gold"), ({"problem": "q", "solution": "no box"}, "no gold"),
    ({"question": ["q"], "answer": "1"}, "question is not text"), ({"messages": "hi"}, "messages is not"),
    ({"question": "q", "answer": [1]}, "neither text nor a number"), ({"messages": []}, "no question"),
    ({"messages": [{"role": "user", "content": "q"}]}, "no gold"),
])
def test_bad_records_name_their_reason(record, reason):
    with pytest.raises(ValueError, match=reason):
        question_and_gold(record)


ANY_VALUE = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20),
                         lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
                         max_leaves=5)


@given(st.dictionaries(st.sampled_from(["question", "problem", "answer", "gold", "solution", "messages"]), ANY_VALUE))
@settings(max_examples=100, deadline=None)
def test_any_record_gives_text_or_a_reason(record):
    try:
        question, gold = question_and_gold(record)
    except ValueError as error:
        assert str(error)
    else:
        assert question and gold and isinstance(question, str) and isinstance(gold, str)


def test_bad_records_are_counted_and_over_the_limit_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [*numbered(8), {"question": "q"}, {"answer": "1"}])
    task = math_task(data=path, max_bad_records=0.5)
    assert any("2 of 10 records" in note and "no gold 1" in note for note in task.notes)
    with pytest.raises(UserError, match="--max-bad-records"):
        math_task(data=path)


def test_math_records_are_filtered_by_level_and_numeric_gold(tmp_path):
    golds = [("3", 1), (r"\frac{1}{2}", 2), (r"\dfrac{3}{4}", "Level 3"), ("-7", 3), ("0.25", 1), ("1/3", 2),
             ("3", 4), ("x+1", 1), (r"(1, 2)", 2), ("5", "Level ?")]
    records = [{"problem": f"p{i}", "solution": rf"\boxed{{{gold}}}", "level": level}
               for i, (gold, level) in enumerate(golds)]
    path = write(tmp_path / "math.jsonl", records)
    task = math_task(data=path, eval_size=0)
    assert sorted(p.meta["question"] for p in task.train) == ["p0", "p1", "p2", "p3", "p4", "p5"]
    note = next(note for note in task.notes if note.startswith("filtered"))
    assert "level over 3: 1" in note and "gold not numeric: 2" in note and "level unknown: 1" in note
    assert len(math_task(data=path, eval_size=0, math_max_level=0).train) == 10


def test_numeric_golds():
    for gold in ("7", "-7", "1,234", r"10,\!000", "0.5", ".5", "3/4", "$5", r"\$18.90", r"28\%", r"\frac{1}{2}",
                 r"-\dfrac{3}{4}", r"\frac12", r"11\frac{1}{2}"):
        assert is_numeric(gold), gold
    for gold in (r"\sqrt{2}", r"2\pi", "x", "(1, 2)", "1,2", r"\infty", "", r"\text{Evelyn}", "3i", "1000_2", "1/0"):
        assert not is_numeric(gold), gold


def test_a_gold_that_does_not_equal_itself_is_dropped_and_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(given_problems, "check_golds", lambda golds: [gold for gold in golds if gold == "3"])
    task = math_task(data=write(tmp_path / "a.jsonl", numbered(20)), max_bad_records=0.1)
    assert "3" not in [p.gold for p in task.train + task.heldout()]
    assert any("gold does not equal itself 1" in note for note in task.notes)
    assert any("1 golds do not equal themselves" in note and "'3'" in note for note in task.notes)


def test_heldout_questions_leave_the_training_data(tmp_path):
    train = write(tmp_path / "train.jsonl", numbered(20))
    held = write(tmp_path / "held.jsonl", [{"question": "what IS  3 + 0?", "answer": "3"}, *numbered(5, 100)])
    task = math_task(data=train, eval_data=held)
    assert len(task.heldout()) == 6 and len(task.train) == 19
    assert any(note.startswith("1 training questions are also held-out") for note in task.notes)


def test_a_file_can_be_evaluated_alone(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(30))
    task = math_task(data=path, eval_data=path, eval_size=12)
    assert len(task.heldout()) == 12 and task.state_dict() == {"sampler": None}
    with pytest.raises(UserError, match="no training prompts"):
        task.prompts(1)


def test_other_data_still_give_word_problem_demonstrations(tmp_path):
    task = math_task(data=write(tmp_path / "a.jsonl", numbered(30)))
    prompts = task.demonstration_prompts()
    assert len(task.demonstrations(prompts[:10])) == 10 and "How many" in prompts[0].meta["question"]


def test_instruction_is_the_system_message_or_absent():
    assert [m["role"] for m in math_task().prompts(1)[0].messages] == ["system", "user"]
    assert [m["role"] for m in math_task(math_instruction="").prompts(1)[0].messages] == ["user"]
    with pytest.raises(UserError, match="--sampling-alpha"):
        math_task(sampling_alpha=-1.0)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent")
def test_real_data_load_whole():
    gsm8k = {"data": str(SHARED / "gsm8k/train.jsonl"), "eval_data": str(SHARED / "gsm8k/test.jsonl")}
    task = math_task(**gsm8k, max_bad_records=0.0)
    assert len(task.train) == 7473 and len(task.heldout()) == 20
    path = str(next((SHARED / "math500").glob("*.jsonl")))
    task = math_task(data=path, eval_data=path, eval_size=500, math_max_level=0, max_bad_records=0.0)
    assert len(task.heldout()) == 500


# ---- word problems
def test_word_problems_split_by_expression():
    train = list(word_problems("train", 2000))
    held = list(word_problems("heldout", 500))
    assert train[:300] == list(word_problems("train", 300))
    assert not {str(steps) for _, steps in train} & {str(steps) for _, steps in held}
    assert len({question for question, _ in train + held}) == 2500
    assert Counter(len(steps) for _, steps in train) == {2: 1600, 1: 400}
    for operations in (1, 2):
        sizes = [len(split_expressions()[part][operations]) for part in ("train", "heldout")]
        assert 0.1 < sizes[1] / sum(sizes) < 0.2


def test_every_sum_of_a_heldout_expression_occurs_in_two_training_ones():
    sums = {part: Counter(step for group in split_expressions()[part].values() for steps in group for step in steps)
            for part in ("train", "heldout")}
    assert all(sums["train"][step] >= 2 for step in sums["heldout"])


def test_word_problem_golds_follow_from_their_text():
    for question, steps in word_problems("heldout", 200):
        numbers = [int(word.strip(",.")) for word in question.split() if word.strip(",.").isdigit()]
        assert numbers == [steps[0][0], *(step[2] for step in steps)] and all(1 <= n <= 7 for n in numbers)
        total = numbers[0]
        for event, n in zip(question.split(", ")[1:], numbers[1:], strict=True):
            total += n if any(verb in event for verb in ("buys", "finds", "gets")) else -n
            assert total >= 0
        assert total == steps[-1][3]


def test_demonstrations_are_imperfect_as_described():
    kinds = Counter()
    for question, steps in word_problems("train", 4000):
        text = demonstration(question, steps)
        lines = text.splitlines()
        for line in lines[:-1]:
            sum_, _, result = line.partition(": ")[2].partition("=")
            a, operator, b = next(sum_.partition(o) for o in "+-" if o in sum_)
            assert int(result) == (int(a) + int(b) if operator == "+" else int(a) - int(b)) >= 0
        assert final_answer(text, strict=True) == lines[-2].partition("=")[2]
        if len(steps) == 2:
            right = equivalent(final_answer(text, strict=True), str(steps[-1][3]))
            kinds["hasty" if len(lines) == 2 else "careful" if right else "wrong"] += 1
    shares = {kind: count / kinds.total() for kind, count in kinds.items()}
    assert abs(shares["careful"] - 0.30) < 0.03 and abs(shares["hasty"] - 0.65) < 0.03
    assert abs(shares["wrong"] - 0.05) < 0.02


def test_demonstration_example(monkeypatch):
    question, steps = "q", [(4, "+", 3, 7), (7, "-", 2, 5)]
    texts = {}
    for name, luck in {"careful": 0.1, "hasty": 0.5, "wrong": 0.97}.items():
        monkeypatch.setattr(words, "seed_of", lambda *key, luck=luck: int(luck * 2**63) & ~1)
        texts[name] = demonstration(question, steps)
    assert texts == {"careful": "Step 1: 4+3=7\nStep 2: 7-2=5\nFinal Answer: 5",
                     "hasty": "Step 1: 4+3=7\nFinal Answer: 7",
                     "wrong": "Step 1: 4+3=7\nStep 2: 7+2=9\nFinal Answer: 9"}


# ---- reward
def scored(task, text, prompt=None):
    return task.score([rollout(prompt or task.heldout()[0], text)])[0]


def test_reward_of_given_answers():
    task = math_task()
    gold = task.heldout()[0].gold
    full = scored(task, f"Step 1: a\nStep 2: b\nFinal Answer: {gold}")
    assert full.reward == pytest.approx(1.0) and full.parts == pytest.approx({"correct": 0.85, "format": 0.15})
    assert full.flags["correct"] is True and full.flags["has_answer"] and full.flags["answer"] == gold
    assert scored(task, f"so \\boxed{{{gold}}}").reward == pytest.approx(0.85)
    assert scored(task, f"Step 1: a\nFinal Answer: {gold}").reward == pytest.approx(0.85 + 0.15 * (0.35 + 0.3))
    nothing = scored(task, f"It is {gold}.")
    assert nothing.reward == 0 and nothing.flags["answer"] is None and nothing.flags["correct"] is False


def test_partial_credit_leaves_the_verdict_exact():
    exact, partial = math_task(), math_task(partial_credit=True)
    near = str(int(exact.heldout()[0].gold) + 1)
    assert scored(exact, f"Final Answer: {near}").parts["correct"] == 0
    score = scored(partial, f"Final Answer: {near}")
    assert 0 < score.parts["correct"] < 0.85 and score.flags["correct"] is False
    assert scored(partial, "no answer").parts["correct"] == 0


def test_a_failure_in_one_completion_is_its_own_result(monkeypatch):
    task = math_task()
    prompt = task.prompts(1)[0]

    def breaks(answer, gold):
        if answer == "13.5":
            raise RecursionError("too deep")
        return answer == gold

    monkeypatch.setattr(math_reasoning, "equivalent", breaks)
    bad, good = task.score([rollout(prompt, "Final Answer: 13.5"), rollout(prompt, f"Final Answer: {prompt.gold}")])
    assert bad.reward == 0 and "RecursionError" in bad.flags["error"]
    assert good.flags["correct"] is True


def test_observe_records_wins_and_the_share_of_answers():
    task = math_task()
    prompt = task.prompts(1)[0]
    rollouts = [rollout(prompt, text) for text in (f"Final Answer: {prompt.gold}", "Final Answer: 99", "")]
    group = Group(prompt, rollouts, task.score(rollouts))
    assert task.observe([group]) == {"answer_share": pytest.approx(2 / 3)}
    index = prompt.meta["index"]
    assert (task.sampler.tries[index], task.sampler.wins[index]) == (3, 1)
    assert task.observe_eval([]) == {}


def test_limit_and_eval_size_are_kept():
    task = math_task(limit=50, eval_size=7)
    assert (len(task.train), len(task.heldout())) == (50, 7)


# ---- columns
def test_every_column_has_a_meaning_and_a_run_has_those_of_what_is_switched_on(tmp_path):
    for meanings in (MathTask.columns, MathTask.eval_columns):
        assert all(0 < len(meaning) <= 110 for meaning in meanings.values())
    plain, full = math_task(), math_task(prm="given", chain_scoring="shadow", self_play=0.3)
    assert list(plain.columns) == ["answer_share"]
    assert list(plain.eval_columns) == ["answer_share", "format", "final_answer_accuracy"]
    assert list(full.columns) == [name for name in MathTask.columns if name != "math_share"]
    assert full.eval_columns == MathTask.eval_columns
    own = math_task(self_play=0.3)
    assert list(own.columns)[:4] == ["answer_share", "step_accuracy", "lccp", "phase"]
    assert own.parts == ("correct", "format", "question", "solution")
