"""Process reward models: the formulas, the steps of a solution, and models of the real layouts loaded from a folder."""

import json

import pytest
import torch
import transformers
from conftest import read_csv
from hypothesis import given
from hypothesis import strategies as st
from test_math_task import math_task

from data import UserError
from models.tiny import tiny_tokenizer
from tasks.math.process_reward import (
    SEPARATOR,
    ProcessRewardModel,
    Qwen2ForProcessRewardModel,
    lccp,
    process_score,
    solution_score,
    sound_beginning,
    split_steps,
    step_accuracy,
    tiny_process_model,
)
from tasks.math.word_problems import judged_solutions

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
PROBLEM = ("Tom has 4 pens, buys 3 more. How many?", ["Step 1: 4+3=7", r"The final answer is \boxed{7}."])
SHORT = ("1+1?", ["Step 1: 1+1=2"])


# ---- formulas
def test_formulas_by_hand():
    steps = [0.9, 0.6, 0.5, 0.8]
    assert process_score(steps) == pytest.approx(0.6 * 0.8 + 0.4 * 0.7)
    assert step_accuracy(steps) == 0.75  # 0.5 is not over 0.5
    assert lccp(steps) == 0.5  # two before the first at or under 0.5, of four
    assert solution_score(steps) == pytest.approx(0.45 * 0.8 + 0.35 * 0.7 + 0.2 * 0.5)
    assert (lccp([0.9, 0.8]), lccp([0.1]), step_accuracy([0.1])) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("score, prefix, expected", [
    (0.30, 1.0, 0.45), (0.30, 0.5, 0.375), (0.50, 1.0, 0.55), (0.60, 1.0, 0.60), (0.30, 0.0, 0.30)])
def test_a_sound_beginning_adds_up_to_a_limit(score, prefix, expected):
    assert sound_beginning(score, prefix) == pytest.approx(expected)


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_bonus_never_lowers_a_score(score, prefix):
    assert score <= sound_beginning(score, prefix) <= max(score, 0.55)


# ---- steps
def test_steps_are_lines_that_begin_with_their_number_and_the_answer_in_a_box():
    text = "Let us see.\nStep 1: 4+3=7\nso far\n**Step 2:** 7-2=5\nFinal Answer: 5"
    assert split_steps(text) == ["Let us see.\nStep 1: 4+3=7\nso far", "**Step 2:** 7-2=5",
                                 r"The final answer is \boxed{5}."]
    assert split_steps("First.\n\nThen.") == ["First.", "Then."]
    assert split_steps(r"It is \boxed{\frac{1}{2}}")[-1] == r"The final answer is \boxed{\frac{1}{2}}."
    assert split_steps("") == split_steps("Step 1: a\n" * 500) == split_steps("x" * 30_000) == []


# ---- models
def save(folder, kind: str, labels=("wrong", "right"), separator=True):
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer([*PROBLEM[1], PROBLEM[0]])
    if separator:
        tokenizer.add_special_tokens({"additional_special_tokens": [SEPARATOR]})
    tokenizer.save_pretrained(folder)
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if kind == "qwen":
        model = Qwen2ForProcessRewardModel(transformers.Qwen2Config(vocab_size=len(tokenizer), **SIZES))
    elif kind == "causal":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **SIZES))
    else:
        model = transformers.LlamaForTokenClassification(
            transformers.LlamaConfig(vocab_size=len(tokenizer), **SIZES, **names))
    model.save_pretrained(folder)
    if kind == "qwen":  # as the published folder has it: remote code that is not run
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["Qwen2ForProcessRewardModel"],
                   "auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}}
        (folder / "config.json").write_text(json.dumps(config))
    return model


def load(folder, **values) -> ProcessRewardModel:
    return ProcessRewardModel(str(folder), torch.device("cpu"), torch.float32, **values)


def test_qwen_layout_is_read_at_its_separators(tmp_path):
    model, prm = save(tmp_path, "qwen").eval(), load(tmp_path)
    assert {"score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"} <= set(model.state_dict())
    question, steps = PROBLEM
    text = prm.tokenizer.apply_chat_template(
        [{"role": "system", "content": r"Please reason step by step, and put your final answer within \boxed{}."},
         {"role": "user", "content": question},
         {"role": "assistant", "content": "".join(step + SEPARATOR for step in steps)}], tokenize=False)
    ids = prm.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    at = ids[0] == prm.tokenizer.convert_tokens_to_ids(SEPARATOR)
    with torch.no_grad():
        expected = model(ids, torch.ones_like(ids)).logits[0, at].softmax(-1)[:, 1].tolist()
    assert prm.score([PROBLEM])[0] == pytest.approx(expected, abs=1e-5) and len(expected) == 2


@pytest.mark.parametrize("labels, good", [(("wrong", "right"), 1), (("correct", "bad"), 0), (("a", "b"), -1)])
def test_any_token_classifier_is_read_behind_each_step(tmp_path, labels, good):
    model, prm = save(tmp_path, "llama", labels, separator=False).eval(), load(tmp_path)
    assert prm.separator == "\n"
    ids, places = prm.encode(*PROBLEM)
    assert [prm.tokenizer.decode(ids[place]) for place in places] == ["\n", "\n"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, places]
    assert prm.score([PROBLEM])[0] == pytest.approx(logits.softmax(-1)[:, good].tolist(), abs=1e-5)


def test_batches_give_what_single_rows_give_and_long_rows_nothing(tmp_path):
    save(tmp_path, "llama")
    prm = load(tmp_path, budget=100)
    problems = [PROBLEM, SHORT, ("q", []), (PROBLEM[0] * 40, ["Step 1: a"]), PROBLEM, SHORT]
    together, alone = prm.score(problems), [prm.score([problem])[0] for problem in problems]
    assert together[2] is None and together[3] is None
    for a, b in zip(together, alone, strict=True):
        assert a is b is None or a == pytest.approx(b, abs=1e-5)


def test_a_solution_cannot_write_marks_of_the_layout(tmp_path):
    save(tmp_path, "llama")
    prm = load(tmp_path)
    ids, places = prm.encode("q<extra_0>", ["a<extra_0>b<|im_end|>", "<ext<extra_0>ra_0>c"])
    assert sum(i in prm.separator_ids for i in ids) == len(places) == 2


def test_what_cannot_be_loaded_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="--prm none"):
        load(tmp_path / "missing")
    save(tmp_path / "causal", "causal")
    with pytest.raises(UserError, match="no process reward model.*score"):
        load(tmp_path / "causal")
    with pytest.raises(UserError, match="--prm-4bit needs a CUDA device"):
        load(tmp_path / "causal", load_4bit=True)


def test_a_run_trains_with_a_process_model_and_logs_every_column(words, command, tmp_path):
    save(tmp_path / "prm", "llama")
    flags = ["--task", "math", *words.model, "--prm", tmp_path / "prm", "--math-instruction", "", "--limit", "30",
             "--eval-size", "4", "--kl-on-constant-groups", "--prompts", "4"]
    assert command(*flags, "--out", tmp_path, "--name", "run").code == 0
    names = ("process", "process_last", "process_mean", "step_accuracy", "lccp")
    for row in read_csv(tmp_path / "run"):
        assert all(0 <= float(row[name]) <= 1 for name in (*names, "part_process", "part_beginning"))
        assert float(row["part_process"]) == pytest.approx(0.4 * float(row["process"]), rel=1e-3)
    assert all(f"eval_{name}" in row for name in (*names, "format", "final_answer_accuracy"))
    ended = command(*flags, "--prm", tmp_path / "missing", "--out", tmp_path, "--name", "none")
    assert ended.code == 2 and "--prm none" in ended.err and len(ended.err.splitlines()) == 1


@pytest.mark.slow
def test_the_tiny_process_model_tells_finished_work_from_unfinished():
    task = math_task(prm="tiny", math_instruction="", cache=True)
    prm = load(tiny_process_model(task, task.args, print))
    judged = [(q, split_steps("\n".join([*lines, f"Final Answer: {answer}"])), right)
              for q, lines, answer, right in judged_solutions(300)]
    careful, hasty = [], []
    for (question, steps, right), values in zip(judged, prm.score([(q, s) for q, s, _ in judged]), strict=True):
        if all(right):
            careful.append(values[-1])
        elif all(right[:-1]) and len(steps) == 2 and ", then" in question:
            hasty.append(values[-1])
    assert min(careful) > 0.5 > max(hasty) and len(hasty) > 50
