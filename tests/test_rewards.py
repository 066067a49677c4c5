"""Format, length, repetition, weighted sums and TRL-style reward functions: each test names one property."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import quick

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rewards import (  # noqa: E402
    call_reward,
    length_penalty,
    load_reward,
    number,
    repetition,
    step_format,
    value,
    weighted_sum,
)


@pytest.mark.parametrize(
    "text, value",
    [
        ("", 0),
        ("Step 1: a", 0.35),
        ("Step 1: a\nStep 2: b", 0.7),
        ("Step 1: a\nStep 2: b\nStep 3: c\nFinal Answer: 5", 1),
        ("Final Answer: 5", 0.3),
        ("**Step 1:** a\n## Step 2: b\n**Final Answer:** 5", 1),
        ("so Step 1: a", 0),
        ("Step one: a", 0),
        ("  step 1: a\nSTEP 2: b", 0.7),
        ("Step 1 a\nStep 2 b", 0),
        ("**Step 1**: a", 0.35),
    ],
)
def test_step_format(text, value):
    assert step_format(text) == pytest.approx(value)


@pytest.mark.parametrize("length, value", [(0, 0), (80, 0), (90, -0.5), (100, -1), (101, -1), (10**6, -1), (81, -0.05)])
def test_length_penalty_is_soft_within_the_buffer(length, value):
    assert length_penalty(length, limit=100, buffer=20) == pytest.approx(value)


def test_length_penalty_without_a_buffer_is_a_step():
    assert length_penalty(100, 100, 0) == 0 and length_penalty(101, 100, 0) == -1


@pytest.mark.parametrize(
    "text, value", [("", 0), ("a b", 0), ("a b c d e", 0), ("a a a a a", 2 / 3), ("a b c a b c", 0.25), ("!!!!", 0.5)]
)
def test_repetition_is_the_share_of_repeated_n_grams(text, value):
    assert repetition(text) == pytest.approx(value)


def test_repetition_of_a_megabyte_is_linear():
    with quick(2):
        assert repetition("over and over " * 70_000) > 0.99


def test_weighted_parts_add_up_to_the_reward():
    reward, parts = weighted_sum({"correct": 1.0, "format": 0.3}, {"correct": 0.85, "format": 0.15, "unused": 1.0})
    assert parts == {"correct": 0.85, "format": pytest.approx(0.045)}
    assert reward == sum(parts.values())


def test_a_part_without_a_weight_is_an_error():
    with pytest.raises(ValueError, match="'format' has no weight"):
        weighted_sum({"format": 1.0}, {})


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "import dataclasses\n"
        "@dataclasses.dataclass\nclass C:\n    x: int = 0\n"
        "limit = 5\n"
        "def short(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
        "async def later(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    return file


def test_load_reward(user_file):
    name, weight, fn = load_reward(f"{user_file}:short=0.5")
    assert (name, weight, fn(completions=["abc"])) == ("short", 0.5, [-3])
    assert load_reward(f"{user_file}:later")[1] == 1.0
    assert load_reward(f"{user_file}:short=-2e-1")[1] == -0.2


@pytest.mark.parametrize(
    "spec, message",
    [
        ("my_rewards.py", "not of the form"),
        ("{}:", "not of the form"),
        ("nowhere.py:f", "nowhere.py does not exist"),
        ("{}:shirt", "has no function shirt, it has later, short"),
        ("{}:limit", "has no function limit"),
        ("{}:short=big", "finite number"),
        ("{}:short=nan", "finite number"),
        ("{}:short=", "finite number"),
    ],
)
def test_a_wrong_reward_flag_is_one_sentence(user_file, spec, message):
    with pytest.raises(ValueError, match=message) as error:
        load_reward(spec.format(user_file))
    assert "\n" not in str(error.value)


def test_two_functions_of_a_file_share_its_state(tmp_path):
    file = tmp_path / "shared.py"
    file.write_text("seen = []\ndef put(**k):\n    seen.append(1)\ndef count(**k):\n    return len(seen)\n")
    put, count = (load_reward(f"{file}:{name}")[2] for name in ("put", "count"))
    put()
    assert count() == 1


@pytest.mark.parametrize("source", ["import not_a_module_at_all", "1/0", "def f(:", "raise SystemExit(3)"])
def test_a_reward_file_that_fails_to_import_says_so(tmp_path, source):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ValueError, match="importing .* failed with"):
        load_reward(f"{tmp_path / 'bad.py'}:f")


DATA = {
    "prompts": ["p", "q"],
    "completions": ["a", "bb"],
    "completion_ids": [[1], [2, 3]],
    "columns": {"answer": ["a", "c"], "level": [1, 2]},
}


def test_a_function_with_kwargs_gets_everything():
    seen = {}

    def fn(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [1, None]

    assert call_reward(fn, **DATA, trainer_state=SimpleNamespace(global_step=7)) == [1.0, None]
    assert seen.keys() == {"prompts", "completions", "completion_ids", "trainer_state", "answer", "level"}
    assert seen["trainer_state"].global_step == 7 and seen["completion_ids"] == [[1], [2, 3]]


def test_a_function_without_kwargs_gets_what_it_names():
    assert call_reward(
        lambda completions, level, bonus=1: [len(c) + x + bonus for c, x in zip(completions, level, strict=True)],
        **DATA,
    ) == [3, 5]


def test_an_async_function_is_awaited(user_file):
    assert call_reward(load_reward(f"{user_file}:later")[2], **DATA) == [1.0, 0.0]


def test_nan_and_infinity_do_not_apply():
    assert call_reward(lambda completions: [math.nan, math.inf], **DATA) == [None, None]


def test_arrays_and_tensors_are_results_too():
    numpy = pytest.importorskip("numpy")
    assert call_reward(lambda completions: numpy.array([1, 2]), **DATA) == [1.0, 2.0]
    assert call_reward(lambda completions: [numpy.float32(0.5), numpy.int64(2)], **DATA) == [0.5, 2.0]
    torch = pytest.importorskip("torch")
    assert call_reward(lambda completions: torch.tensor([0.5, float("nan")]), **DATA) == [0.5, None]
    assert call_reward(lambda completions: [torch.tensor(0.5), torch.tensor([2])], **DATA) == [0.5, 2.0]


@pytest.mark.parametrize(
    "result, message",
    [
        ([1.0], "returned 1 values, .* list of 2"),
        (None, "a NoneType"),
        (1.0, "a float"),
        (["1", 2], "returned '1'"),
        ([True, False], "returned True"),
        ("ab", "a str"),
        ([[1], [2]], r"returned \[1\]"),
        ({"a": 1}, "a dict"),
        ([1j, 1], "1j"),
    ],
)
def test_a_wrong_result_names_the_function_and_what_it_returned(result, message):
    def mine(completions):
        return result

    with pytest.raises(ValueError, match=f"reward function mine .*{message}"):
        call_reward(mine, **DATA)


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="asks for 'gold', not among answer"):
        call_reward(lambda completions, gold: [0, 0], **DATA)


@pytest.mark.parametrize("text, expected", [
    ("1,234", 1234), (r"2\sqrt{4}", 4), ("7/(1+1)", 3.5), ("5!", 120), ("x+1", None), ("1/0", None),
    (r"\sqrt{-1}", None),
    ("inf", None), ("9**9**9**9", None), ("__import__('os')", None), ("1=2", None), ("(1,2)", None), ("", None)])
def test_value_is_a_finite_number_or_none(text, expected):
    assert value(text) == (None if expected is None else pytest.approx(expected))
    assert value(text, 0.0) is None or number(text) is not None  # without time only plain numbers
