"""Reading records, the registry, seeds, the sampler; and the custom task, which is data and functions alone."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tasks_contract import core_args, rollout

import data
from data import BadRecords, Group, Prompt, Sampler, Task, UserError, load_prompts, load_task, read_records
from tasks.custom import CustomTask


def write(path, lines) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def plain(record: dict) -> Prompt:
    if "prompt" not in record:
        raise ValueError("no prompt")
    return Prompt(record["prompt"])


# ---- records
def test_every_file_form_gives_the_same_records(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"p{i} é", "n": i} for i in range(5)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.parquet"):
        bad = BadRecords(name)
        assert [record for record, _ in read_records(str(tmp_path / name), bad)] == rows
        assert bad.total == 5 and bad.check(0) == []


def test_broken_lines_are_counted_by_reason_with_the_first_place(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, "{broken", "", "[1]", {"other": 1}, {"prompt": "b"}])
    prompts, notes = load_prompts(path, plain, max_bad=0.9)
    assert [prompt.messages for prompt in prompts] == ["a", "b"]
    assert notes == [f"3 of 5 records of {path} cannot be used: not a JSON object 2 (first: line 2), "
                     "no prompt 1 (first: line 5)"]
    with pytest.raises(UserError, match="not a JSON object 2 .*over --max-bad-records 0.5"):
        load_prompts(path, plain, max_bad=0.5)


@pytest.mark.parametrize("content", ["", "\n\n", "nonsense\n", "{}\n"])
def test_a_file_without_one_usable_record_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError):
        load_prompts(str(tmp_path / "a.jsonl"), plain, max_bad=1.0)


def test_missing_files_folders_and_damaged_files_are_the_users_mistake(tmp_path):
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"\x1f\x8bno")
    for name in ("missing.jsonl", "", "bad.json", "bad.parquet", "bad.jsonl.gz"):
        with pytest.raises(UserError) as error:
            load_prompts(str(tmp_path / name), plain, 1.0)
        assert "\n" not in str(error.value)


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_records_or_a_users_mistake(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    try:
        prompts, _ = load_prompts(str(path), plain, 1.0)
    except UserError:
        return
    assert prompts


def test_heldout_is_cut_once_for_all_seeds(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": str(i)} for i in range(100)])
    train, held, _ = data.train_and_heldout(core_args("custom", data=path, eval_size=30), plain)
    assert (len(train), len(held)) == (90, 10)
    again = data.train_and_heldout(core_args("custom", data=path, eval_size=30, seed=7, limit=5), plain)
    assert [p.messages for p in again[1]] == [p.messages for p in held] and len(again[0]) == 5
    assert {p.messages for p in train} | {p.messages for p in held} == {str(i) for i in range(100)}


# ---- registry and seeds
def test_a_task_is_loaded_by_name_or_file(tmp_path):
    assert issubclass(load_task("math"), Task)
    write(tmp_path / "mine.py", ["from data import Task", "class Mine(Task):", "    pass", "class Other:", "    pass"])
    write(tmp_path / "broken.py", ["import nothing_of_this_name"])
    assert load_task(f"{tmp_path}/mine.py:Mine").__name__ == "Mine"
    for spec, said in [("maths", "did you mean math"), (f"{tmp_path}/no.py:A", "no file"),
                       (f"{tmp_path}/mine.py:Other", "no class Other"), (f"{tmp_path}/broken.py:A", "fails to import")]:
        with pytest.raises(UserError, match=said):
            load_task(spec)


def test_seeds_differ_by_purpose_and_are_stable():
    seeds = {data.seed_of(seed, *key) for seed in (0, 1) for key in (("a",), ("b",), ("a", 1), ("a", 2), (1, "a"))}
    assert len(seeds) == 10 and all(0 <= seed < 2**63 for seed in seeds)
    assert data.seed_of(0, "heldout") == data.seed_of(0, "heldout")
    assert data.rng_of(3, "x").integers(1000, size=4).tolist() == data.rng_of(3, "x").integers(1000, size=4).tolist()


# ---- the sampler
@given(size=st.integers(1, 30), draws=st.lists(st.integers(1, 20), max_size=8), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_uniform_sampler_shows_every_prompt_before_any_twice(size, draws, seed):
    sampler, dealt = Sampler(size, seed, alpha=0), []
    for n in draws:
        dealt += sampler.draw(n)
    counts = Counter(dealt)
    assert len(dealt) == sum(draws)
    assert max(counts.values(), default=0) - min((counts[i] for i in range(size)), default=0) <= 1


@given(size=st.integers(1, 30), n=st.integers(1, 40), cut=st.integers(0, 5), alpha=st.sampled_from([0.0, 1.0, 2.0]))
@settings(max_examples=60, deadline=None)
def test_sampler_goes_on_where_it_was_saved(size, n, cut, alpha):
    first = Sampler(size, 3, alpha)
    for _ in range(cut):
        for i in first.draw(n):
            first.record(i, 4, i % 5)
    second = Sampler(size, 3, alpha)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drawn = [first.draw(n), first.draw(n)]
    assert drawn == [second.draw(n), second.draw(n)]
    assert all(len(d) == n and len(set(d)) == min(n, size) for d in drawn if alpha)


def test_weights_prefer_what_is_won_half_the_time():
    sampler = Sampler(5, 0, alpha=2.0)
    for index, wins in enumerate((0, 2, 4, 8)):
        sampler.record(index, 8, wins)
    assert np.allclose(sampler.weights(), [0.05, 0.25, 1.0, 0.05, 0.75])
    seen = Counter(i for _ in range(500) for i in sampler.draw(1))
    assert seen[2] > seen[1] > seen[0] and seen[4] > seen[1]


def test_sampler_refuses_no_prompts_and_other_data():
    with pytest.raises(UserError, match="no training prompts"):
        Sampler(0, 0, 1.0)
    with pytest.raises(UserError, match="3 training prompts, the data now give 4"):
        Sampler(4, 0, 1.0).load_state_dict(Sampler(3, 0, 1.0).state_dict())


# ---- the custom task
def custom(folder, records, source: str, *functions: str, **values) -> CustomTask:
    path = write(folder / "own.jsonl", records)
    (folder / "own_rewards.py").write_text(source)
    reward = tuple(f"{folder}/own_rewards.py:{function}" for function in functions)
    return CustomTask(core_args("custom", data=path, reward=reward, **{"eval_size": 0, **values}))


SPY = '''
calls = []

def spy(prompts, completions, completion_ids, answer, **columns):
    calls.append({"prompts": prompts, "completions": completions, "ids": completion_ids, "answer": answer, **columns})
    return [1.0] * len(prompts)

def state(completions, trainer_state, **columns):
    return [float(trainer_state.global_step)] * len(completions)
'''


def test_functions_see_what_trl_gives_them(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    records = [{"prompt": "text", "answer": "1"}, {"prompt": chat, "answer": "2", "extra": 3}]
    task = custom(tmp_path, records, SPY, "spy")
    by_kind = {isinstance(p.messages, str): p for p in task.prompts(2)}
    groups = [[rollout(by_kind[True], "a"), rollout(by_kind[True], "b")], [rollout(by_kind[False], "c")]]
    assert [[score.reward for score in scores] for scores in task.score_all(groups)] == [[1.0, 1.0], [1.0]]
    calls = task.functions["spy"].__globals__["calls"]
    assert len(calls) == 1
    assert calls[0]["prompts"] == ["text", "text", chat]
    assert calls[0]["completions"] == ["a", "b", [{"role": "assistant", "content": "c"}]]
    assert calls[0]["ids"] == [[3, 4, 5]] * 3
    assert calls[0]["answer"] == ["1", "1", "2"] and calls[0]["extra"] == [None, None, 3]
    assert "prompt" not in calls[0]


def test_weights_abstentions_and_equal_names(tmp_path):
    source = '''
def a(completions, **columns):
    return [2.0 if text == "x" else None for text in completions]
'''
    task = custom(tmp_path, [{"prompt": "p"}], source, "a=0.5", "a")
    assert task.parts == ("a", "a_2")
    prompt = task.prompts(1)[0]
    first, second = task.score([rollout(prompt, "x"), rollout(prompt, "y")])
    assert first.reward == 3.0 and first.parts == {"a": 1.0, "a_2": 2.0}
    assert second.reward is None and "unscorable" in second.flags


@pytest.mark.parametrize("body", ["raise KeyError('x')", "return 'ab'", "return [1.0]", "return ['a'] * 2", "return 3"])
def test_a_function_that_fails_is_the_result_of_the_step(tmp_path, body):
    task = custom(tmp_path, [{"prompt": "p"}], f"def f(completions, **columns):\n    {body}\n", "f")
    group = [rollout(task.prompts(1)[0], text) for text in "ab"]
    results = task.score_all([group, group])
    assert len(results) == 2
    for result in results:
        assert isinstance(result, Exception) or all(score.reward is None for score in result)


def test_gold_gives_the_verdict_and_not_the_reward(tmp_path):
    task = custom(tmp_path, [{"prompt": "p", "gold": 4, "answer": ""}], SPY, "spy")
    prompt = task.prompts(1)[0]
    right, wrong = task.score([rollout(prompt, "Final Answer: 4.0"), rollout(prompt, "Final Answer: 5")])
    assert (right.flags["correct"], wrong.flags["correct"]) == (True, False) and right.reward == wrong.reward == 1.0


def test_global_step_counts_steps_and_is_restored(tmp_path):
    task = custom(tmp_path, [{"prompt": "p"}], SPY, "state")
    group = [rollout(task.prompts(1)[0], "a")]
    assert task.score(group)[0].reward == 0
    task.observe([Group(group[0].prompt, group)])
    assert task.score(group)[0].reward == 1
    again = custom(tmp_path, [{"prompt": "p"}], SPY, "state")
    again.load_state_dict(task.state_dict())
    assert again.score(group)[0].reward == 1


def test_custom_mistakes_are_one_sentence(tmp_path):
    good = [{"prompt": "p"}]
    for values, said in [({"data": ""}, "needs --data"), ({"reward": ()}, "--reward my_rewards.py:fn")]:
        path = write(tmp_path / "own.jsonl", good)
        with pytest.raises(UserError, match=said):
            CustomTask(core_args("custom", **{"data": path, "reward": ("x.py:f",), **values}))
    for function in ("nothing_here", "f=heavy"):
        with pytest.raises(UserError, match="--reward"):
            custom(tmp_path, good, "def f(completions):\n    return []\n", function)
    with pytest.raises(UserError, match="no prompt 1 .*not of messages"):
        custom(tmp_path, [{"x": 1}, {"prompt": [1]}, {"prompt": 7}], SPY, "spy")


def test_custom_heldout_prompts_leave_the_training_data(tmp_path):
    held = write(tmp_path / "held.jsonl", [{"prompt": "1"}, {"prompt": "new"}])
    records = [{"prompt": str(i)} for i in range(5)]
    task = custom(tmp_path, records, SPY, "spy", eval_data=held, eval_size=9)
    assert len(task.train) == 4 and len(task.heldout()) == 2
    assert any(note.startswith("1 training prompts are also held-out") for note in task.notes)
