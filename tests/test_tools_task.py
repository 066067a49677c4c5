"""Task `tools`: samples in all shapes, the generator, every component of the reward, and a rollout's exact ids."""

import dataclasses
import json
import types

import pytest
from conftest import make_policy, read_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tasks_contract import core_args
from test_tools_calls import block, call_of

import engine.logps
import engine.rollout
import harness.flags
import train_grpo
from data import Group, Prompt, Rollout, UserError
from models.chat import reply_ids
from models.tiny import tiny_tokenizer
from tasks.tools.calculator import evaluate, extract_expressions, show
from tasks.tools.questions import read_sample, synthetic
from tasks.tools.reward import LIMITS, MOST, PARTS, WEIGHTS, components, read_events, reward, value_of
from tasks.tools.task import ToolTask, read_weights

# ---- samples
TOOL = {"name": "calculate_math", "description": "d", "parameters": {"type": "object", "properties": {}}}
ASK = "Compute 1+2 and 3*4."


@pytest.mark.parametrize("record", [
    {"messages": [{"role": "user", "content": ASK}]},
    {"conversations": [{"from": "human", "value": ASK}]},
    {"conversations": [{"role": "user", "content": ASK}, {"role": "assistant", "content": ""}]},
    {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": "3"}]},
    {"prompt": ASK},
    {"question": ASK},
    {"query": ASK},
    {"prompt": [{"role": "user", "content": ASK}]},
    {"messages": json.dumps([{"role": "user", "content": ASK}])},
])
def test_every_shape_of_a_question_is_read(record):
    question = read_sample({**record, "gt": [3, 12]})
    assert question.messages == [{"role": "user", "content": ASK}] and question.expressions == ["1+2", "3*4"]


@pytest.mark.parametrize("tools", [
    [TOOL], TOOL, json.dumps(TOOL), json.dumps([TOOL]), [json.dumps(TOOL)], [{"type": "function", "function": TOOL}],
    [{**TOOL, "parameters": json.dumps(TOOL["parameters"])}], "[\"calculate_math\"]",
])
def test_every_shape_of_tools_is_read(tools):
    for key in ("tools", "functions"):
        assert read_sample({"prompt": ASK, key: tools}).tools == ["calculate_math"]
        inside = {"messages": [{"role": "user", "content": ASK, key: tools}]}
        assert read_sample(inside).tools == ["calculate_math"]


@pytest.mark.parametrize("key", ["gt", "answer", "answers", "label"])
@pytest.mark.parametrize("value, gold", [
    (3, ["3"]),
    ("x", ["x"]),
    ([3.5, "", None, " 4 "], ["3.5", "4"]),
    ("", []),
    ([], []),
])
def test_gold_is_a_list(key, value, gold):
    assert read_sample({"prompt": ASK, key: value}).gold == gold


@pytest.mark.parametrize("record, reason", [
    ({}, "no question"),
    ({"messages": 3}, "list"),
    ({"messages": [3]}, "list"),
    ({"prompt": ""}, "no question"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    ({"prompt": ASK, "tools": "{"}, "JSON"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "text"),
    ({"prompt": ASK, "gt": {"a": 1}}, "gold"),
    ({"prompt": ASK, "tools": [{"x": 1}]}, "name"),
    ({"prompt": ASK, "gt": [True]}, "gold"),
    ({"prompt": ASK, "tools": [{**TOOL, "parameters": "{"}]}, "JSON"),
    ({"messages": "{"}, "JSON"),
])
def test_a_bad_sample_says_why(record, reason):
    with pytest.raises(ValueError, match=reason):
        read_sample(record)


def write(folder, records) -> str:
    (folder / "d.jsonl").write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return str(folder / "d.jsonl")


def test_samples_are_left_out_by_reason_and_counted(tmp_path):
    good = [{"prompt": f"Compute {i}+1.", "gt": i + 1} for i in range(40)]
    others = [
        {"prompt": "Compute 1*1."},
        {"prompt": "Hello", "gt": 1},
        {"prompt": ASK, "gt": 1, "tools": ["browser"]},
    ]
    path = write(tmp_path, good + others)
    task = ToolTask(core_args("tools", data=path, math_only=True))
    assert task.left_out == {"no gold": 1, "filtered: no arithmetic": 1, "unsupported tool": 1}
    assert any("no gold: 1" in note for note in task.notes)
    assert len(task.train) + len(task.heldout_prompts) == 40
    path = write(tmp_path, others[:1] * 2)
    with pytest.raises(UserError, match="no gold: 2"):
        ToolTask(core_args("tools", data=path))
    path = write(tmp_path, ["{bad\n"])
    with pytest.raises(UserError, match="not a JSON object 1"):
        ToolTask(core_args("tools", data=path))


def test_a_sample_offers_its_tools_only(tmp_path):
    records = [{"prompt": f"Compute {i}+1.", "gt": 1, "tools": [TOOL]} for i in range(30)]
    task = ToolTask(core_args("tools", data=write(tmp_path, records)))
    (prompt,) = task.prompts(1)
    assert prompt.meta["allowed"] == ["calculate_math"]
    (tool,) = prompt.meta["tools"]
    assert tool["function"]["name"] == "calculate_math"


@pytest.mark.parametrize("easy", [False, True])
def test_the_generator_is_right_and_its_parts_are_apart(easy):
    train = list(synthetic("train", 300, easy))
    heldout = list(synthetic("heldout", 300, easy))
    for sample in train + heldout:
        values = [show(evaluate(e)) for e in extract_expressions(sample["question"])]
        assert values in ([], sample["answers"])
    assert not asked_in(train) & asked_in(heldout) - {()}
    assert train[:10] == list(synthetic("train", 10, easy))
    if not easy:
        assert {len(expressions) for expressions in asked_in(train + heldout)} == {0, 1, 2, 3}
        chinese = [sample for sample in train if any(sign >= "\u4e00" for sign in sample["question"])]
        assert 0.3 < len(chinese) / 300 < 0.7


def asked_in(samples) -> set[tuple[str, ...]]:
    """The expressions of each question, sorted; () where it has none."""
    return {tuple(sorted(extract_expressions(sample["question"]))) for sample in samples}


# ---- the reward
PROMPT = Prompt([{"role": "user", "content": ASK}], ["3", "12"], {
    "allowed": ["calculate_math", "unit_converter", "calculator"], "expressions": ["1+2", "3*4"]})
DEFAULTS = {**WEIGHTS, **LIMITS}
BARE = ToolTask.__new__(ToolTask)  # replies need its flags only
BARE.args = core_args("tools")
CALLS = block(call_of("1+2")) + block(call_of("3*4"))
RIGHT = (CALLS, "<answer>3, 12</answer>")


def talk(*said: str, prompt: Prompt = PROMPT, stop: str = "stop") -> Rollout:
    """A rollout of these assistant turns; the calls of all but an unfinished last one are answered."""
    row = Rollout(prompt, [1], [], [], [], [], stop, [])
    for i, text in enumerate(said):
        row.turns.append({"role": "assistant", "content": text})
        if i + 1 < len(said):
            row.turns += BARE.reply(row) or []
    return row


def found_in(*said: str, prompt: Prompt = PROMPT, stop: str = "stop") -> dict:
    gold = [value_of(value) for value in prompt.gold]
    events = read_events(talk(*said, prompt=prompt, stop=stop))
    return components(events, prompt.meta["expressions"], gold)


def worth(*said: str, step: int = 0, tag: str = "semi_hard", **keywords) -> float:
    found = found_in(*said, **keywords)
    return sum(reward(found, DEFAULTS, step, tag).values())


PERFECT = {  # the others are 0
    "base", "length", "coverage", "exact", "tool_success", "call_coverage", "calls_order", "calls_set", "calls_exact",
    "values_order", "values_set", "values_exact", "preferred_tool", "right_tool", "call_count", "canonical", "refers",
    "tag", "one_tag",
}


def test_a_right_rollout_has_every_good_component_and_no_penalty():
    found = found_in(*RIGHT)
    assert {name: value for name, value in found.items() if value} == dict.fromkeys(PERFECT, 1)


def answered(answer: str) -> tuple[str, str]:
    return CALLS, f"<answer>{answer}</answer>"


def called(*calls: str) -> tuple[str, str]:
    return "".join(calls), "<answer>3, 12</answer>"


ONE, TWO = block(call_of("1+2")), block(call_of("3*4"))
KM = block({"name": "unit_converter", "arguments": {"value": 1, "from_unit": "km", "to_unit": "mile"}})


@pytest.mark.parametrize("said, name, value", [
    (answered("3"), "coverage", 0.5),
    (answered("3"), "exact", 0),
    (answered("3"), "missing", 1),
    (answered("3, 12, 5, 6"), "extra", 2),
    (answered("3, 12, 5"), "exact", 0),
    (answered("12, 3"), "wrong_order", 1),
    (answered("12, 3"), "coverage", 0.5),
    (answered("1+2=3; 3*4 = 12"), "exact", 1),
    (answered("3，12"), "exact", 1),
    (answered("5, 6"), "coverage", 0),
    (answered("5, 6"), "refers", 0),
    (answered("x" * 97), "length", -3),
    (answered(""), "length", -3),
    ((CALLS, "3, 12"), "no_tag", 1),
    ((CALLS, "3, 12"), "tag", 0),
    ((CALLS, "<answer>1</answer><answer>3, 12</answer>"), "one_tag", 0),
    ((CALLS, "<answer>1</answer><answer>3, 12</answer>"), "exact", 1),
    ((CALLS, "<answer>3, 12"), "malformed", 1),
    ((CALLS, "<think><answer>3, 12</answer></think>"), "tag", 0),
    (called(ONE), "call_coverage", 0.5),
    (called(ONE), "under_calling", 1),
    (called(ONE), "call_count", 0),
    (called(ONE), "values_order", 0.5),
    (called(ONE, TWO, KM), "over_calling", 1),
    (called(ONE, KM), "wrong_tool", 1),
    (called(ONE, KM), "right_tool", 0.5),
    (called(TWO, ONE), "calls_order", 0.5),
    (called(TWO, ONE), "calls_set", 1),
    (called(TWO, ONE), "calls_exact", 0),
    (called(TWO, ONE), "values_set", 1),
    (called(TWO, ONE), "values_exact", 0),
    (called(ONE, ONE), "repeated_call", 1),
    (called(ONE, block(call_of("3*"))), "failed", 1),
    (called(ONE, block("{")), "failed", 1),
    (called(ONE, block("{")), "tool_success", 0.5),
    (called(ONE, block(call_of("3*4", "calculator"))), "preferred_tool", 0.5),
    (called(block(call_of("1+2", "calculator"))), "alias_only", 1),
    (("<answer>3, 12</answer>",), "no_tool", 1),
    (called('calculate_math("1+2") calculate_math("3*4")'), "canonical", 0),
    (called('calculate_math("1+2") calculate_math("3*4")'), "calls_exact", 1),
    (called("<tool_call>" + ONE + TWO), "malformed", 1),
    (("a b c a b c",), "repeated_text", 0.25),
])
def test_each_component_by_hand(said, name, value):
    assert found_in(*said)[name] == pytest.approx(value)


@pytest.mark.parametrize("text, value", [
    ("19", 19),
    ("１９", 19),
    ("−19", -19),
    ("负19", -19),
    ("minus 19", -19),
    ("$1,200.50", 1200.5),
    ("19 km", 19),
    ("5 千米", 5),
    ("the answer is 19", 19),
    ("1+2=3", 3),
    ("\\boxed{19}", 19),
    ("≈3.33", 3.33),
    ("=-4", -4),
    ("19.", 19),
    ("amount 19", 19),
    ("19 points", 19),
])
def test_an_item_states_its_number(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize("text", [
    "not 19", "NOT 19", "x != 19", "x ≠ 19", "isn't 19", "不是19", "并非19", "19 is wrong", "over 19", "less than 19",
    "at least 19", "<19", "19²", "√19", "19½", "19!", "19 million", "19万", "19k", "19 or so", "19 (not 20)", "19^",
    "1 234", "٣19", "I first thought that it could be 19", "never 19", "without 19", "19 thousand", "isn’t 19",
])
def test_an_item_that_denies_bounds_or_scales_its_number_does_not_state_it(text):
    assert isinstance(value_of(text), str)


def test_a_rollout_that_still_wants_a_tool_is_unfinished():
    assert found_in(ONE, stop="unfinished")["unfinished"] == 1


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_each_weight_moves_its_own_component_only(name):
    found = dict.fromkeys(WEIGHTS, 1.0)
    weights = {**DEFAULTS, name: WEIGHTS[name] + 1}
    plain = reward(found, DEFAULTS, 0, "soft")
    moved = reward(found, weights, 0, "soft")
    assert {part for part in WEIGHTS if plain[part] != moved[part]} == {name}


@pytest.mark.parametrize("name", sorted(MOST))
def test_a_penalty_counts_at_most_so_many(name):
    found = dict.fromkeys(WEIGHTS, 0.0) | {name: 1000.0}
    most = LIMITS[MOST[name]]
    parts = reward(found, DEFAULTS, 0, "soft")
    assert parts[name] == WEIGHTS[name] * most


@pytest.mark.parametrize("said, step, tag, value", [
    (RIGHT, 0, "semi_hard", 12.0),
    (answered("3"), 0, "soft", 4.0),
    (answered("3"), 300, "soft", 3.5),
    (answered("3"), 150, "soft", 3.75),
    (answered("7"), 0, "soft", 0.5),
    (answered("7"), 300, "soft", 0.0),
])
def test_caps_and_clip(said, step, tag, value):
    assert worth(*said, step=step, tag=tag) == pytest.approx(value)


def test_a_missing_tag_costs_more_with_time_and_caps():
    found = dict.fromkeys(WEIGHTS, 0.0) | {"no_tag": 1.0, "exact": 1.0, "coverage": 1.0}
    prices = [reward(found, DEFAULTS, step, "soft")["no_tag"] for step in (0, 50, 100, 900)]
    assert prices == pytest.approx([-0.3, -0.9, -1.5, -1.5])
    for tag, expected in (("semi_hard", [2, 2]), ("hard", [2, 0])):
        totals = [sum(reward(found, DEFAULTS, step, tag).values()) for step in (99, 100)]
        assert totals == pytest.approx(expected)


WORDS = st.sampled_from([
    "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<think>", ONE, TWO, KM, "7", ",", "5, 6", "=", "sure",
    "calculator(", "\n", "99999999", "{", "1e400", "３",
])
SPEECH = st.lists(WORDS, max_size=8).map(" ".join) | st.text(max_size=20)
CONVERSATIONS = st.lists(SPEECH, min_size=1, max_size=3)
STEPS = st.sampled_from([0, 50, 400])
TAGS = st.sampled_from(["soft", "semi_hard", "hard"])


@settings(max_examples=150, deadline=None)
@given(CONVERSATIONS, STEPS, TAGS)
def test_no_gibberish_is_worth_more_than_an_honest_right_rollout(said, step, tag):
    parts = reward(found_in(*said), DEFAULTS, step, tag)
    assert set(parts) <= set(PARTS)
    assert sum(parts.values()) <= 4.0 < worth(*RIGHT, step=step, tag=tag)


@pytest.mark.parametrize("spam", [", ".join(map(str, range(2000))), "3 12 " * 50, "3 or 12", "12" * 3000, "," * 90_000])
def test_an_answer_that_lists_everything_is_not_exact(spam):
    assert worth(CALLS, f"<answer>{spam}</answer>") <= 4.0


@pytest.mark.parametrize("change, named", [
    ("exatc=1", "exact"),
    ("exact=x", "number"),
    ("exact=nan", "finite"),
    ("clip=-1", "not negative"),
    ("exact", "number"),
])
def test_a_wrong_weight_is_refused(change, named):
    with pytest.raises(UserError, match=named):
        read_weights((change,))


def test_the_presets_table_of_weights_reaches_the_task(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('task = "tools"\n[tools]\nmath_only = true\n[tools.reward]\nexact = 5\nclip = 7.5\n')
    args = harness.flags.resolve_args(train_grpo.Args, ["--preset", str(path)])[0]
    assert args.tools_reward == ("exact=5", "clip=7.5") and args.math_only
    assert read_weights(args.tools_reward)["clip"] == 7.5
    args = harness.flags.resolve_args(train_grpo.Args, ["--preset", str(path), "--tools-reward", "tag=2"])[0]
    assert args.tools_reward == ("tag=2",)


# ---- a reward model
@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A random tiny reward model on disk, whose scores are as large as `scale` makes them."""
    import torch
    import transformers

    text = [ASK, CALLS, "<answer>3, 12</answer> user tool assistant"]
    tokenizer = tiny_tokenizer(text * 3)

    def make(scale: float, labels: int = 1) -> str:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_labels=labels,
            num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, max_position_embeddings=512)
        made = transformers.LlamaForSequenceClassification(config)
        folder = tmp_path_factory.mktemp("judge")
        made.score.weight.data.mul_(scale)
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return make


def test_a_reward_model_adds_its_score_held_to_one(judge):
    import torch

    task = ToolTask(core_args("tools", limit=20, eval_size=1, tool_questions="short"))
    rows = [talk(*RIGHT), talk("no")]
    plain = task.score(rows)
    hf = types.SimpleNamespace(dtype=torch.float32)
    policy = types.SimpleNamespace(device=torch.device("cpu"), hf=hf)
    for scale in (1.0, 1e4):
        task.args = core_args("tools", tool_reward_model=judge(scale))
        task.prepare_model(policy)
        raw = task.judge.scores(rows)
        alone = [task.judge.scores([row])[0] for row in rows]
        assert raw == pytest.approx(alone, abs=1e-4 * scale)
        assert raw[0] != raw[1]
        clipped = [max(-1.0, min(1.0, value)) for value in raw]
        assert scale == 1.0 or set(map(abs, clipped)) == {1.0}
        for before, after, value in zip(plain, task.score(rows), clipped, strict=True):
            assert after.reward == pytest.approx(before.reward + value)
            assert after.reward == pytest.approx(sum(after.parts.values()))
    task.judge.model.score.weight.data.fill_(float("nan"))
    assert [score.reward for score in task.score(rows)] == [None, None]


def test_a_classifier_is_no_reward_model(judge):
    import torch

    from tasks.tools.reward_model import RewardModel

    with pytest.raises(UserError, match="one score"):
        RewardModel("--tool-reward-model", judge(1.0, labels=2), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="cannot be loaded"):
        RewardModel("--tool-reward-model", "/nowhere", torch.device("cpu"), torch.float32)


# ---- turns
def test_calls_are_answered_in_order_and_within_bounds():
    task = ToolTask(core_args("tools", limit=50, tool_questions="short"))
    prompt = dataclasses.replace(task.prompts(1)[0], meta=PROMPT.meta)
    row = talk(CALLS + block("{"), prompt=prompt)
    replies = task.reply(row)
    first, second, third = (message["content"] for message in replies)
    assert (first, second) == ("3", "12")
    assert third.startswith("error: ")
    assert {message["role"] for message in replies} == {"tool"}
    finished = talk("<answer>3</answer>", prompt=prompt)
    assert task.reply(finished) is None
    many = talk(ONE * 1000, prompt=prompt)
    assert len(task.reply(many)) == 17


def test_rates_are_those_of_the_rollouts():
    task = ToolTask(core_args("tools", limit=50, tool_questions="short"))
    failing = called(ONE, block(call_of("3*")))
    rows = [talk(*RIGHT), talk(*failing), talk("<answer>3, 12</answer>")]
    group = Group(PROMPT, rows, task.score(rows))
    rates = task.observe_eval([group])
    assert set(rates) == set(task.columns)
    assert rates["exact_match"] == 1
    assert rates["tool_success_rate"] == 0.75
    assert rates["no_tool_rate"] == pytest.approx(1 / 3)
    assert rates["calls_mean"] == pytest.approx(4 / 3)
    assert rates["call_count_rate"] == pytest.approx(2 / 3)


def test_the_ids_are_those_that_were_sampled_and_seen(monkeypatch):
    """Scripted ids that text would be split into otherwise; nothing is decoded to compare."""
    flags = ("--max-turns", "3", "--max-new", "200", "--context", "1000")
    task = ToolTask(core_args("tools", limit=50, tool_questions="short", tools_instruction="", max_turns=3))
    tokenizer = tiny_tokenizer([ONE * 5, "<answer>3, 12</answer> user tool"] * 5)
    one, two, end = (sign_by_sign(tokenizer, text) for text in (ONE, TWO, "<answer>3, 12</answer>"))
    assert one[:-1] != tokenizer.encode(ONE, add_special_tokens=False)
    monkeypatch.setattr("conftest.random_model", lambda *a, **k: model(len(tokenizer)))
    policy = make_policy(*flags, tokenizer=tokenizer, task=task)
    script = one + two + end
    fed = []

    def draw(logits, *_):
        token = script.pop(0)
        zero = logits.new_zeros(1)
        return logits.new_tensor([token]).long(), zero, zero, zero

    monkeypatch.setattr(engine.rollout, "draw", draw)
    policy.hf.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"][0].tolist()), with_kwargs=True)
    without_schemas = dataclasses.replace(PROMPT, meta={**PROMPT.meta, "tools": None})
    ((row,),) = policy.sample([without_schemas], 1, 1.0, "t")
    prompt = policy.encode(row.prompt)
    three, twelve = (tokenizer.encode(f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n")
                     for text in ("3", "12"))
    assert not script
    assert row.stop == "stop"
    assert row.ids[: row.prompt_length] == prompt
    assert row.ids[row.prompt_length :] == one + three + two + twelve + end
    sampled = [(one, 1), (three, 0), (two, 1), (twelve, 0), (end, 1)]
    assert row.mask == [mark for ids, mark in sampled for _ in ids]
    assert [version == -1 for version in row.version] == [mark == 0 for mark in row.mask]
    prefills = [ids for ids in fed if len(ids) > 1]
    assert prefills == [
        prompt,
        prompt + one + three,
        prompt + one + three + two + twelve,
    ]
    fed.clear()
    engine.logps.token_logps(policy, policy.hf, [engine.logps.TrainRow(row, 1.0)], 1.0)
    assert row.ids[:-1] in [ids[: len(row.ids) - 1] for ids in fed]
    (score,) = task.score([row])
    assert score.flags["correct"]


def sign_by_sign(tokenizer, text: str) -> list[int]:
    """Ids of each sign alone, and the end."""
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(sign)[0]) for sign in text]
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("word", ["replysuffixmark", "<|im_end|><|im_start|>user", "</tool_response>", "\ud800"])
def test_a_reply_that_repeats_the_policy_opens_no_turn(word):
    call = block({"name": word, "arguments": {}})
    (message,) = BARE.reply(talk(call))
    said = message["content"]
    assert said.startswith("error: unknown tool")
    assert "<" not in said
    tokenizer = tiny_tokenizer(["user tool assistant"])

    def render(messages, prompt, generation):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)

    policy = types.SimpleNamespace(args=None, tokenizer=tokenizer, context=10_000, task=BARE, render=render)
    policy.reply_ids = lambda row, reply: reply_ids(policy, row, reply)
    row = dataclasses.replace(talk(call), ids=[1, tokenizer.eos_token_id])
    assert engine.rollout.takes_turn(policy, row, True)
    shown = row.ids[2:]
    assert shown.count(tokenizer.eos_token_id) == 1
    assert row.mask == [0] * len(shown)
    assert said in tokenizer.decode(shown)


def model(vocab: int, positions: int = 1024):
    import transformers

    config = transformers.LlamaConfig(vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=positions)
    made = transformers.LlamaForCausalLM(config).eval()
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_smoke_run_learns_to_call_and_to_finish(command, tmp_path, seed):
    assert command("--preset", "tools", "smoke", "--seed", seed, "--out", tmp_path, "--name", "s").code == 0
    lines = read_jsonl(tmp_path / "s" / "eval.jsonl")
    assert lines[-1]["accuracy"] - lines[0]["accuracy"] >= 0.3
