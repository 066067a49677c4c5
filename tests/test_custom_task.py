"""Bring your own: reward functions with TRL's signature, own data and own tasks, in whole runs; and how they fail."""

import json
import shutil

import pytest
from conftest import read_csv, read_jsonl

REWARDS = '''
import asyncio
import re


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def even(completions, **kwargs):
    words = [re.findall(r"\\d+", text_of(c)) for c in completions]
    return [sum(int(w) % 2 == 0 for w in found) / max(1, len(found)) for found in words]


def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_characters(completions, **kwargs):
    return [float(len(c)) for c in completions]


def chat_format(completions, **kwargs):
    contents = [c[0]["content"] for c in completions]
    assert all(c[0]["role"] == "assistant" for c in completions)
    return [1.0 if re.match(r"^w1.*", content) else 0.0 for content in contents]


def against_column(completions, ground_truth, **kwargs):
    return [1.0 if truth in c else 0.0 for c, truth in zip(completions, ground_truth)]


def of_one_kind(prompts, completions, kind, **kwargs):
    assert all(isinstance(p, str) and p.startswith("w") for p in prompts)
    return [float(len(c)) if k == "long" else None for c, k in zip(completions, kind)]


async def awaited(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return even(completions)


def scheduled(completions, trainer_state, **kwargs):
    return [value * (1 + trainer_state.global_step) for value in even(completions)]


def no_rest(prompts, completions):
    return even(completions)


class Judge:
    def __call__(self, completions, **kwargs):
        return even(completions)


judge = Judge()


def raises(completions, **kwargs):
    raise ConnectionError("the judge is down")


def raises_differently(completions, **kwargs):
    raise ConnectionError(f"request {id(object())} {completions[0]!r} failed")


def raises_for_one(completions, **kwargs):
    if any("w9" in c for c in completions):
        raise ValueError("w9 cannot be judged")
    return even(completions)


def gives_none(completions, **kwargs):
    return [None] * len(completions)


def gives_nan(completions, **kwargs):
    return [float("nan") if i % 4 == 0 else value for i, value in enumerate(even(completions))]


def gives_some_none(completions, **kwargs):
    return [None if i % 4 == 0 else value for i, value in enumerate(even(completions))]


def gives_infinity(completions, **kwargs):
    return [float("inf") if i % 4 == 0 else value for i, value in enumerate(even(completions))]


def too_short(completions, **kwargs):
    return [1.0]


def too_long(completions, **kwargs):
    return [1.0] * (len(completions) + 1)


def a_string(completions, **kwargs):
    return "good"


def strings(completions, **kwargs):
    return ["1.0"] * len(completions)


def a_number(completions, **kwargs):
    return 1.0


def nothing(completions, **kwargs):
    pass


def asks_for_more(completions, solution, **kwargs):
    return even(completions)
'''


@pytest.fixture(scope="module")
def own(words, tmp_path_factory):
    """A folder with text.jsonl, chat.jsonl and rewards.py."""
    folder = tmp_path_factory.mktemp("own")
    records = [{"prompt": f"w{3 + i % 20} w{4 + i % 7}", "ground_truth": f"w{3 + i % 29}", "gold": str(i),
                "kind": "long" if i % 2 else "short"} for i in range(80)]
    chats = [{**record, "prompt": [{"role": "system", "content": "w3"}, {"role": "user", "content": record["prompt"]}]}
             for record in records]
    for name, lines in (("text", records), ("chat", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def train(words, own, command, tmp_path):
    """Runs with reward functions (`name` or `name=weight`); gives how it ended and the run folder."""
    def run(*functions, data="text", flags=()):
        ended = command(*words.model, "--data", own / f"{data}.jsonl", "--reward",
                        *[f"{own / 'rewards.py'}:{function}" for function in functions], "--eval-size", "4",
                        "--out", tmp_path, "--name", "a", *flags)
        return ended, tmp_path / "a"

    return run


# ---- functions that work
@pytest.mark.parametrize("data", ["text", "chat"])
@pytest.mark.parametrize("function", ["even", "awaited", "scheduled", "no_rest", "by_tokens", "judge"])
def test_a_function_with_trl_s_signature_runs_on_text_and_on_messages(train, function, data):
    ended, folder = train(function, data=data)
    assert ended.code == 0
    part = next(name for name in read_csv(folder)[0] if name.startswith("part_"))
    for row in read_csv(folder):
        assert float(row[part]) == pytest.approx(float(row["reward_mean"])) and row["unscorable"] == "0"
    assert any(float(row["reward_std"]) > 0 for row in read_csv(folder))


def test_completions_of_messages_are_messages(train):
    assert train("chat_format", data="chat")[0].code == 0


def test_token_ids_are_those_of_the_completion(train):
    _, folder = train("by_tokens")
    for record in read_jsonl(folder / "completions" / "step_1.jsonl.gz"):
        assert record["reward"] == record["length"]


def test_text_completions_are_strings_and_other_fields_are_columns(train):
    ended, folder = train("by_characters", "against_column=3")
    assert ended.code == 0
    for record in read_jsonl(folder / "completions" / "step_1.jsonl.gz"):
        assert record["parts"]["by_characters"] == len(record["text"])
        assert record["reward"] == pytest.approx(sum(record["parts"].values()))
        assert record["parts"]["against_column"] in (0, 3)


def test_a_row_that_no_function_judges_is_unscorable_and_the_others_are_not(train):
    ended, folder = train("of_one_kind", flags=["--steps", "4", "--prompts", "4"])
    assert ended.code == 0
    records = [record for path in (folder / "completions").iterdir() for record in read_jsonl(path)]
    assert any(record["reward"] is None for record in records)
    for record in records:
        assert (record["reward"] is None) == ("unscorable" in record["flags"])
        assert record["reward"] is not None or record["advantage"] is None


def test_the_step_reaches_the_function(train):
    _, folder = train("scheduled", flags=["--steps", "3"])
    assert max(record["reward"] for record in read_jsonl(folder / "completions" / "step_3.jsonl.gz")) > 1


def test_the_gold_column_gives_accuracy_and_no_reward(train, own):
    ended, folder = train("even")
    assert ended.code == 0
    assert all(row["accuracy"] != "" for row in read_csv(folder))


def test_an_own_run_is_resumed_with_its_functions(train, command):
    _, folder = train("even=0.5", "by_tokens=0.1")
    ended = command("--resume", folder, "--steps", "3")
    assert ended.code == 0 and [row["step"] for row in read_csv(folder)] == ["1", "2", "3"]


# ---- functions that fail
@pytest.mark.parametrize("function, reason", [
    ("raises", "the judge is down"), ("gives_none", "None"), ("too_short", "too_short returned 1 values"),
    ("too_long", "too_long returned"), ("a_string", "a_string returned a str"), ("strings", "strings returned '1.0'"),
    ("a_number", "a_number returned a float"), ("nothing", "nothing returned a NoneType"),
    ("asks_for_more", "'solution'"),
])
def test_a_function_that_judges_nothing_ends_the_run_with_its_reason(train, function, reason):
    ended, folder = train(function)
    assert ended.code == 3 and reason in ended.out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"].startswith("failed") and reason in summary["status"]


def test_a_function_that_fails_for_all_ends_the_run_without_a_traceback(train):
    ended, _ = train("raises", flags=["--no-eval"])
    assert ended.code == 3 and "Traceback" not in ended.out + ended.err


def test_failures_that_differ_only_in_their_words_end_the_run_too(train):
    ended, _ = train("raises_differently", flags=["--no-eval"])
    assert ended.code == 3


@pytest.mark.parametrize("function", ["gives_nan", "gives_some_none", "gives_infinity"])
def test_what_is_no_finite_number_is_unscorable_and_the_run_goes_on(train, function):
    ended, folder = train(function)
    assert ended.code == 0
    for row in read_csv(folder):
        assert row["unscorable"] == "2" and 0 <= float(row["reward_mean"]) <= 1 and row["loss"] != ""
    for record in read_jsonl(folder / "completions" / "step_1.jsonl.gz")[::4]:
        assert record["reward"] is None and record["advantage"] is None


def test_one_completion_that_cannot_be_judged_does_not_end_the_run(train):
    ended, folder = train("raises_for_one", flags=["--steps", "6", "--group", "8"])
    assert ended.code == 0
    unscorable = [int(row["unscorable"]) for row in read_csv(folder)]
    assert max(unscorable) > 0 and min(unscorable) < 16


def test_a_task_that_fails_for_some_groups_goes_on_and_counts_them(words, command, tmp_path):
    path = tmp_path / "sometimes.py"
    path.write_text(words.file.read_text() + "\n\nclass Own(Words):\n    def score(self, rollouts):\n"
                    "        if rollouts[0].prompt.messages.startswith('w3 '):\n"
                    "            raise RuntimeError('a bad group')\n        return super().score(rollouts)\n")
    ended = command("--task", f"{path}:Own", *words.model, "--steps", "6", "--out", tmp_path, "--name", "a")
    assert ended.code == 0
    rows = read_csv(tmp_path / "a")
    assert {row["unscorable"] for row in rows} == {"0", "4"}
    assert all(row["groups_dropped"] == ("1" if row["unscorable"] == "4" else "0") for row in rows)


def test_a_task_that_fails_for_every_group_ends_the_run(words, command, tmp_path):
    path = tmp_path / "never.py"
    path.write_text(words.file.read_text() + "\n\nclass Own(Words):\n    def score(self, rollouts):\n"
                    "        raise RuntimeError(f'nothing to say of {rollouts[0].prompt.messages}')\n")
    ended = command("--task", f"{path}:Own", *words.model, "--no-eval", "--out", tmp_path, "--name", "a")
    assert ended.code == 3 and "nothing to say" in ended.out


# ---- data
def records_file(folder, good: int, *broken: str):
    path = folder / "data.jsonl"
    lines = [json.dumps({"prompt": f"w{3 + i % 20}"}) for i in range(good)]
    path.write_text("\n".join([*lines[:7], *broken, *lines[7:]]) + "\n")
    return path


def with_data(words, own, path, tmp_path) -> list:
    return [*words.model, "--data", path, "--reward", f"{own / 'rewards.py'}:even", "--out", tmp_path, "--name", "a"]


def test_a_few_broken_records_are_counted_by_reason_and_the_run_goes_on(words, own, command, tmp_path):
    path = records_file(tmp_path, 400, '{"prompt": "w', "[1, 2]", '{"prompts": "w5"}')
    ended = command(*with_data(words, own, path, tmp_path))
    assert ended.code == 0
    assert "3 of 403 records" in ended.out and "not a JSON object 2 (first: line 8)" in ended.out
    assert "no prompt 1 (first: line 10)" in ended.out
    assert "3 of 403 records" in (tmp_path / "a" / "console.log").read_text()


def test_more_broken_records_than_allowed_refuse_the_run(words, own, command, tmp_path):
    path = records_file(tmp_path, 97, "{", "{", '{"prompt": 5}')
    flags = with_data(words, own, path, tmp_path)
    ended = command(*flags)
    assert ended.code == 2 and len(ended.err.splitlines()) == 1 and not (tmp_path / "a").exists()
    assert "3 of 100 records" in ended.err and "--max-bad-records 0.01" in ended.err
    assert command(*flags, "--max-bad-records", "0.03", "--steps", "0").code == 0


@pytest.mark.parametrize("content, reason", [("", "no records"), ("\n\n", "no records"), ("{}\n", "no prompt"),
                                             ("\x00\xff\n", "not a JSON object")])
def test_a_file_without_a_usable_record_is_refused(words, own, command, tmp_path, content, reason):
    (tmp_path / "data.jsonl").write_text(content)
    ended = command(*with_data(words, own, tmp_path / "data.jsonl", tmp_path))
    assert ended.code == 2 and reason in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("words_, named", [
    (["--task", "custom"], "--data"), (["--task", "custom", "--data", "{own}/text.jsonl"], "--reward"),
    (["--data", "{own}/text.jsonl", "--reward", "{own}/nowhere.py:even"], "nowhere.py"),
    (["--data", "{own}/text.jsonl", "--reward", "{own}/rewards.py:evven"], "evven"),
    (["--data", "{own}/text.jsonl", "--reward", "{own}/rewards.py"], "rewards.py"),
    (["--data", "{own}/text.jsonl", "--reward", "{own}/rewards.py:even=much"], "much"),
    (["--data", "{own}", "--reward", "{own}/rewards.py:even"], "folder"),
    (["--data", "{own}/text.jsonl", "--eval-data", "{own}/no.jsonl", "--reward", "{own}/rewards.py:even"], "no.jsonl"),
])
def test_what_is_missing_is_named(own, command, words_, named):
    ended = command(*[word.format(own=own) for word in words_])
    assert ended.code == 2 and named in ended.err and len(ended.err.splitlines()) == 1


# ---- own tasks
FROZEN = "    @dataclasses.dataclass(frozen=True)\n"
OPTIONS = "    class Options:\n        {} = 1.0  # mine\n"


@pytest.mark.parametrize("body, named", [
    ("class Own(Words):\n" + FROZEN + OPTIONS.format("lr: float"), "lr"),
    ("class Own(Words):\n" + OPTIONS.format("mine: float"), "dataclass"),
    ("class Own:\n    pass\n", "Own"), ("Own = 5\n", "Own"), ("class Other(Words):\n    pass\n", "Own"),
    ("raise RuntimeError('two\\nlines')\n", "two"), ("def broken(:\n", "own.py"),
])
def test_an_own_task_that_cannot_be_used_is_one_sentence(words, command, tmp_path, body, named):
    path = tmp_path / "own.py"
    path.write_text(words.file.read_text() + "\n\nimport dataclasses\n" + body)
    ended = command("--task", f"{path}:Own", *words.model, "--out", tmp_path)
    assert ended.code == 2 and named in ended.err and len(ended.err.splitlines()) == 1


def test_an_own_task_adds_flags_with_help_presets_and_values_in_the_config(words, command, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(words.file.read_text() + '''

import dataclasses


class Own(Words):
    @dataclasses.dataclass(frozen=True)
    class Options:
        bonus: float = 0.0  # what every completion gets on top

    parts = ("even", "first", "bonus")

    def score(self, rollouts):
        scores = super().score(rollouts)
        for score in scores:
            score.parts["bonus"] = self.args.bonus
            score.reward += self.args.bonus
        return scores
''')
    flags = ["--task", f"{path}:Own", *words.model, "--no-eval", "--out", tmp_path]
    assert "what every completion gets on top" in command(*flags, "--help").out
    (tmp_path / "mine.toml").write_text("bonus = 2\n")
    assert command(*flags, "--preset", tmp_path / "mine.toml", "--name", "a").code == 0
    assert {row["part_bonus"] for row in read_csv(tmp_path / "a")} == {"2"}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["args"]["bonus"] == 2.0 and "mine.toml" in config["sources"]["bonus"]
    assert command("--resume", tmp_path / "a", "--steps", "3").code == 0


def test_prompts_that_leave_no_room_are_counted_at_the_start(words, own, command, tmp_path):
    path = tmp_path / "data.jsonl"
    prompts = ["w3 w4"] * 30 + [" ".join(["w5"] * 61)] * 2
    path.write_text("".join(json.dumps({"prompt": prompt, "n": i}) + "\n" for i, prompt in enumerate(prompts)))
    ended = command(*with_data(words, own, path, tmp_path), "--eval-size", "0")
    assert ended.code == 0 and "2 prompts leave no room for 5 new tokens (context 64)" in ended.out


def test_messages_for_a_model_without_a_chat_template_are_refused(words, own, command, tmp_path):
    shutil.copytree(words.folder / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    ended = command(*words.model, "--model", tmp_path / "model", "--data", own / "chat.jsonl", "--reward",
                    f"{own / 'rewards.py'}:even", "--out", tmp_path, "--name", "a")
    assert ended.code == 2 and "--chat-template" in ended.err and len(ended.err.splitlines()) == 1
    assert not (tmp_path / "a").exists()
