"""The contract that every registered task keeps. A new task adds a factory here."""

import dataclasses
import json
import types

import pytest
from conftest import quick
from nla_files import nla_files

import data
from data import Group, Prompt, Rollout, Score, load_task
from rewards import equivalent

REWARDS = '''
def length(completions, **columns):
    return [float(len(text)) / (1 + len(text)) for text in completions]

def named(prompts, completions, word, **columns):
    return [None if w is None else float(w in text) for w, text in zip(word, completions)]
'''


def core_args(task: str, **values) -> types.SimpleNamespace:
    options = {field.name: field.default for field in dataclasses.fields(load_task(task).Options)}
    core = {"data": "", "eval_data": "", "eval_size": 20, "limit": 0, "max_bad_records": 0.01, "seed": 1, "group": 4,
            "reward": (), "model": "tiny", "max_turns": 1, "load_4bit": False, "adapter": "none", "cache": True}
    return types.SimpleNamespace(**{"task": task, **core, **options, **values})


def nla_args(folder):
    files = nla_files()
    return core_args("nla", model=files.model, data=files.data, reconstructor=files.reconstructor, eval_size=8)


def math_args(folder):
    return core_args("math")


def custom_args(folder):
    records = [{"prompt": f"say {i}", "word": "a" if i % 3 else None, "gold": str(i)} for i in range(60)]
    (folder / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "own_rewards.py").write_text(REWARDS)
    rewards = f"{folder}/own_rewards.py"
    return core_args("custom", data=str(folder / "own.jsonl"), reward=(f"{rewards}:length=0.5", f"{rewards}:named"))


def code_args(folder):
    return core_args("code", problems="formulas")


def physics_args(folder):
    return core_args("physics", system_ids=("spring", "rc_discharge", "lotka_volterra"), instances_per_system=20)


def tools_args(folder):
    return core_args("tools", limit=300)


FACTORIES = {"math": math_args, "custom": custom_args, "code": code_args, "physics": physics_args,
             "tools": tools_args, "nla": nla_args}
HOSTILE = ["", " \n\t", "\ud800 lone \udfff", "{" * 5000, "\\boxed{" * 3000 + "}" * 3000, "1" * 1_000_000,
           "Final Answer: " + "(" * 4000, "Final Answer: 9**9**9**9", "Final Answer: __import__('os').system('x')",
           "Step 1: " * 100_000, "\x00\x1b[31m", "d2x/dt2 = 9**9**9**9",
           '{"equation": "d2x/dt2 = exp(1e9*x^12)*sin(1e9*t)"}',
           '{"equation": ' * 2000, "Final Answer: \\frac{1}{0}", "Final Answer: nan", "</s><|im_end|>"]


def rollout(prompt: Prompt, text: str, stop: str = "stop") -> Rollout:
    turns = [{"role": "assistant", "content": text}]
    return Rollout(prompt, [1, 2, 3, 4, 5], [1, 1, 1], [0.0] * 3, [0.0] * 3, [0] * 3, stop, turns)


@pytest.fixture(params=sorted(FACTORIES))
def args(request, tmp_path):
    return FACTORIES[request.param](tmp_path)


@pytest.fixture
def task(args):
    return load_task(args.task)(args)


def messages_of(prompts) -> list:
    return [as_text(prompt) for prompt in prompts]


def as_text(prompt: Prompt) -> str:
    """What the policy is given: the messages, and the activation where there is one."""
    vector = "" if prompt.inject is None else str(prompt.inject.tolist())
    return json.dumps(prompt.messages, sort_keys=True) + vector


def check_scores(task, rollouts, scores):
    assert len(scores) == len(rollouts)
    for score in scores:
        assert isinstance(score, Score)
        json.dumps(score.flags, allow_nan=False)
        if score.reward is not None:
            assert abs(score.reward - sum(score.parts.values())) < 1e-9
            assert set(score.parts) <= set(task.parts)


def test_every_registered_task_has_a_factory():
    assert set(FACTORIES) == set(data.TASKS)


def test_prompts_are_dealt_the_same_for_a_seed(args):
    first, second = load_task(args.task)(args), load_task(args.task)(args)
    for n in (1, 5, 8):
        dealt = first.prompts(n)
        assert len(dealt) == n and all(isinstance(prompt, Prompt) for prompt in dealt)
        assert messages_of(dealt) == messages_of(second.prompts(n))
    other = load_task(args.task)(types.SimpleNamespace(**{**vars(args), "seed": 2}))
    assert messages_of(other.prompts(14)) != messages_of(load_task(args.task)(args).prompts(14))


def test_heldout_is_fixed_and_apart_from_training(args, task):
    other = load_task(args.task)(types.SimpleNamespace(**{**vars(args), "seed": 2}))
    held = task.heldout()
    assert 0 < len(held) <= args.eval_size
    assert messages_of(held) == messages_of(other.heldout()) == messages_of(task.heldout())
    dealt = {as_text(prompt) for _ in range(50) for prompt in task.prompts(20)}
    assert not dealt & {as_text(prompt) for prompt in held}


def test_a_group_gets_one_score_a_rollout(task):
    for prompt in task.prompts(3) + task.heldout()[:2]:
        texts = ["Step 1: a\nStep 2: b\nFinal Answer: 3", f"Final Answer: {prompt.gold}", "a", ""]
        rollouts = [rollout(prompt, text) for text in texts]
        check_scores(task, rollouts, task.score(rollouts))
        both = task.score_all([rollouts, rollouts[:2]])
        assert [len(scores) for scores in both] == [4, 2]
        check_scores(task, rollouts, both[0])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_completion_costs_under_a_second(task, text):
    prompt = task.prompts(1)[0]
    task.score([rollout(prompt, "warm up")])
    assert equivalent(r"\sqrt{8}", r"2\sqrt{2}")  # its process takes seconds to start, once
    rollouts = [rollout(prompt, text, "length"), rollout(prompt, "ordinary")]
    with quick():
        scores = task.score(rollouts)
    check_scores(task, rollouts, scores)


def test_a_restored_task_goes_on_with_the_same_prompts(args, task):
    for step in range(4):
        prompts = task.prompts(6)
        answers = [p.gold if (i + step) % 2 else "x" for i, p in enumerate(prompts)]
        groups = [Group(p, [rollout(p, f"Final Answer: {a}")]) for p, a in zip(prompts, answers, strict=True)]
        for group in groups:
            group.scores = task.score(group.rollouts)
        assert set(task.observe(groups)) <= set(task.columns)
        assert set(task.observe_eval(groups)) <= set(task.eval_columns)
    state = json.loads(json.dumps(task.state_dict(), allow_nan=False))
    restored = load_task(args.task)(args)
    restored.load_state_dict(state)
    for _ in range(3):
        assert messages_of(restored.prompts(7)) == messages_of(task.prompts(7))
    assert restored.state_dict() == task.state_dict()


def test_reply_is_none_or_messages(task):
    for prompt in task.prompts(2):
        reply = task.reply(rollout(prompt, "Final Answer: 1"))
        assert reply is None or all(isinstance(m["role"], str) and "content" in m for m in reply)


def test_a_worked_conversation_ends_and_is_right(task):
    """What --bc-coef imitates: turns of text, with the task's own replies between them."""
    for prompt in task.prompts(4):
        row, turns = rollout(prompt, ""), []
        row.turns = turns
        while (text := task.worked_turn(row)) is not None:
            assert isinstance(text, str) and text and len(turns) < 20
            turns.append({"role": "assistant", "content": text})
            turns += task.reply(row) or []
        if turns:
            assert task.score([row])[0].flags["correct"]


def test_keep_drops_what_is_not_usable(task):
    shortest = min(len(as_text(prompt)) for prompt in task.heldout())
    assert task.drop_prompts(lambda prompt: True) == 0
    dropped = task.drop_prompts(lambda prompt: len(as_text(prompt)) <= shortest)
    assert dropped > 0
    assert all(len(as_text(prompt)) <= shortest for prompt in task.prompts(30) + task.heldout())
    with pytest.raises(data.UserError):
        task.drop_prompts(lambda prompt: False)


def test_demonstrations_follow_their_prompts(task):
    try:
        prompts = task.demonstration_prompts()[:200]
    except data.UserError:
        pytest.skip("this task has no demonstrations")
    worked = task.demonstrations(prompts)
    assert worked == task.demonstrations(prompts) and len(worked) == len(prompts)
    assert not {as_text(prompt) for prompt in prompts} & {as_text(prompt) for prompt in task.heldout()}
    verdicts = []
    for prompt, messages in zip(prompts, worked, strict=True):
        assert messages and all(isinstance(m["content"], str) and isinstance(m["role"], str) for m in messages)
        text = "\n".join(m["content"] for m in messages if m["role"] == "assistant")
        verdicts.append(task.score([rollout(prompt, text)])[0].flags["correct"])
    assert any(verdicts)
