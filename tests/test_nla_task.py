"""Task nla: rewards and controls by hand; the anchor, the critic and the table over runs and resumes; the commands."""

import json
import math
import types
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from conftest import read_csv, read_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from nla_files import nla_files
from safetensors.torch import load_file
from test_tasks_contract import core_args, rollout

from data import Group, UserError
from tasks.nla import task as nla
from tasks.nla import warm as nla_warm
from tasks.nla.__main__ import main as nla_command
from tasks.nla.controls import WORD, cjk_share, others, replace_words
from tasks.nla.task import NlaTask, extract_explanation, reward_of


# ---- what an explanation is, and what it earns
@pytest.mark.parametrize("text, found", [
    ("<explanation>a cup</explanation>", "a cup"),
    ("thinking … <explanation>\n a\ncup </explanation> and more", "a\ncup"),
    ("<explanation>first</explanation><explanation>second</explanation>", "first"),
    ("<explanation>draft <explanation>final</explanation>", "final"),
    ("</explanation><explanation>x</explanation>", "x"),
    ("<explanation></explanation>", None),
    ("<explanation> \n</explanation>", None),
    ("<explanation>never closed", None),
    ("no tags", None),
    ("", None),
    ("a</explanation>", None),
    ("<EXPLANATION>x</EXPLANATION>", None),
    ("< explanation>x</explanation>", None),
])
def test_the_text_between_the_tags_is_the_explanation(text, found):
    assert extract_explanation(text) == found


def test_the_reward_is_minus_the_logarithm_of_the_error():
    assert reward_of(1.0) == 0
    assert reward_of(math.exp(-3)) == pytest.approx(3.0)
    assert reward_of(0.0) == reward_of(1e-12) == pytest.approx(-math.log(1e-8))
    assert reward_of(None) == -2.0


def test_the_share_of_cjk_characters():
    assert cjk_share("ab 漢字") == 0.5
    assert cjk_share("한") == 1.0
    assert cjk_share("") == cjk_share("é ü") == 0.0


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["The cat sat on 12 mats", "Anna bought lamps", "Paris, 1999: rain falls", "of the"]),
                min_size=2, unique=True))
def test_every_content_word_is_replaced_by_one_of_its_kind_from_another_text(texts):
    out = replace_words(texts, 0)
    assert out == replace_words(texts, 0)
    for text, new in zip(texts, out, strict=True):
        assert WORD.sub("#", text) == WORD.sub("#", new)  # all else stays
        rest = [other for other in texts if other != text]
        pool = set(WORD.findall(" ".join(rest)))
        for a, b in zip(WORD.findall(text), WORD.findall(new), strict=True):
            assert a[0].isdigit() == b[0].isdigit()
            assert a[0].isupper() == b[0].isupper()
            assert b == a or b in pool


# ---- the task
def task_args(**values):
    files = nla_files()
    own = {"model": files.model, "data": files.data, "reconstructor": files.reconstructor, "eval_size": 8}
    return core_args("nla", **own | values)


def explained(prompt, text: str):
    """A rollout whose explanation is `text`."""
    return rollout(prompt, f"<explanation>{text}</explanation>")


def test_no_document_is_in_training_and_held_out():
    task = NlaTask(task_args())
    train = {prompt.meta["doc_id"] for prompt in task.train}
    held = {prompt.meta["doc_id"] for prompt in task.heldout_prompts}
    assert train and held
    assert not train & held
    assert all(prompt.inject.shape == (32,) for prompt in task.train + task.heldout_prompts)


def test_scores_are_those_of_the_normalised_error():
    """A text's prediction against its vector, computed here from the reconstructor's own state."""
    task = NlaTask(task_args())
    prompt = task.train[0]
    model = task.load_reconstructor()
    texts = ["Anna bought lamps", "", "word " * 2000]
    good, none, long = task.score([explained(prompt, text) for text in texts])
    with torch.no_grad():
        state = model.predict([model.encode(texts[0])])[0].numpy()
    length = np.linalg.norm(state) * np.linalg.norm(prompt.inject)
    cosine = float(state @ prompt.inject / length)
    error = 2 * (1 - cosine)
    assert good.flags["mse"] == pytest.approx(error, abs=1e-5)
    assert good.reward == pytest.approx(-math.log(error), abs=1e-4)
    assert good.parts == {"reconstruction": good.reward}
    assert none.reward == long.reward == -2.0
    vectors = np.stack([p.inject for p in task.train])
    vectors *= 32**0.5 / np.linalg.norm(vectors, axis=1, keepdims=True)
    variance = ((vectors - vectors.mean(0)) ** 2).mean()
    assert good.flags["fve"] == pytest.approx(1 - good.flags["mse"] / variance, abs=1e-4)


def test_a_batch_of_groups_scores_as_each_alone():
    task = NlaTask(task_args())
    groups = [[explained(prompt, "lamps " * i) for i in range(4)] for prompt in task.train[:3]]
    together = [score.reward for scores in task.score_all(groups) for score in scores]
    alone = [task.score([row])[0].reward for rows in groups for row in rows]
    np.testing.assert_allclose(together, alone, atol=1e-4)


def judged(task, prompts, texts) -> list[Group]:
    groups = []
    for prompt, text in zip(prompts, texts, strict=True):
        row = rollout(prompt, text)
        groups.append(Group(prompt, [row], task.score([row])))
    return groups


def test_the_columns_are_means_over_what_could_be_read():
    task = NlaTask(task_args())
    texts = ["<explanation>lamps 漢字字</explanation>", "nothing", "<explanation>Anna</explanation>"]
    groups = judged(task, task.train[:3], texts)
    row = task.observe(groups)
    first = groups[0].scores[0].flags
    last = groups[2].scores[0].flags
    assert set(row) == set(task.columns)
    assert row["mse"] == pytest.approx((first["mse"] + last["mse"]) / 2)
    assert row["fve"] == pytest.approx((first["fve"] + last["fve"]) / 2)
    assert row["extraction_rate"] == pytest.approx(2 / 3)
    assert row["cjk_share"] == pytest.approx(3 / 8 / 2)


def test_the_controls_replace_words_and_documents(monkeypatch):
    """Errors are looked up in a table, so each control's FVE is known."""
    task = NlaTask(task_args())
    prompts = task.heldout_prompts[:3]
    asked = []

    def errors(texts, gold):
        vectors = [vector.tobytes() for vector in gold]
        asked.append((list(texts), vectors))
        return [0.5] * len(texts)

    said = ["Anna saw lamps", "Anna saw boats", "Anna saw cups"]
    groups = judged(task, prompts, [f"<explanation>{text}</explanation>" for text in said])
    monkeypatch.setattr(task, "errors", errors)
    row = task.observe_eval(groups)
    own = [prompt.inject.tobytes() for prompt in prompts]
    golds = [prompt.gold for prompt in prompts]
    replaced, other, gold, gold_replaced = asked
    assert replaced[1] == own
    assert "lamps" not in replaced[0][0]
    assert other[0] == said
    assert all(a != b for a, b in zip(other[1], own, strict=True))
    assert gold == (golds, own)
    assert gold_replaced[0] != gold[0]
    expected = 1 - 0.5 / task.baselines["held"][0]
    for name in ("fve_words_replaced", "fve_other_document", "fve_gold", "fve_gold_words_replaced"):
        assert row[name] == pytest.approx(expected)
    assert set(row) == set(task.eval_columns)


JUDGE = {"judge_url": "http://127.0.0.1:9", "judge_model": "none", "judge_key_env": ""}  # nothing listens there


def test_the_judge_is_asked_with_the_rows_own_source_and_quirk(monkeypatch):
    task = NlaTask(task_args(judge_evals=("confusion",), **JUDGE))
    seen = []

    def evaluate(name, judge, rows, log):
        seen.extend(rows)
        return {}

    task.heldout_prompts[0].meta.update(quirk="it rhymes", source="Anna")
    monkeypatch.setattr("tasks.nla.judges.evaluate", evaluate)
    task.observe_eval(judged(task, task.heldout_prompts[:2], ["<explanation>Anna</explanation>"] * 2))
    first, second = seen
    assert (first.source, first.quirk) == ("Anna", "it rhymes")
    assert (second.source, second.quirk) == (task.heldout_prompts[1].meta["source"], None)


def test_a_judge_that_does_not_answer_is_recorded_and_the_evaluation_goes_on():
    task = NlaTask(task_args(judge_evals=("hallucination",), judge_retries=0, **JUDGE))
    groups = judged(task, task.heldout_prompts[:2], ["<explanation>Anna</explanation>"] * 2)
    row = task.observe_eval(groups)
    assert row["hallucination_judged"] == 0
    assert row["hallucination_failed"] == 2
    assert row["clean_rate"] is None
    assert set(row) == set(task.eval_columns)
    assert "were not judged" in task.judged[0]


def test_the_other_vector_is_never_one_of_the_same_document():
    def of(name):
        prompt = types.SimpleNamespace(meta={"doc_id": name[0]})
        return name, prompt

    found = [of("a1"), of("a2"), of("b1")]
    assert [name for name, _ in others(found)] == ["b1", "b1", "a1"]
    assert [name for name, _ in others(found[:2])] == ["a1", "a2"]


@pytest.mark.parametrize("values, said", [
    ({"reconstructor": ""}, "tasks.nla reconstruct"),
    ({"model": "tiny"}, "--model tiny"),
    ({"inject_layer": -1}, "--inject-layer"),
    ({"critic_lr": 0.0}, "--critic-lr"),
    ({"data": "/nowhere/x.parquet"}, "sidecar|no data file"),
    ({"critic_tokens": 0}, "--critic-tokens"),
])
def test_mistakes_are_one_sentence(values, said):
    with pytest.raises(UserError, match=said):
        NlaTask(task_args(**values))


def test_a_reconstructor_for_other_data_is_refused(tmp_path):
    files = nla_files()
    for path in Path(files.reconstructor).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    place = tmp_path / "reconstructor.json"
    spec = json.loads(place.read_text())
    place.write_text(json.dumps(spec | {"scale": 3.0}))
    with pytest.raises(UserError, match="scale 3"):
        NlaTask(task_args(reconstructor=str(tmp_path))).load_reconstructor()
    with pytest.raises(UserError, match="16-bit"):
        NlaTask(task_args(load_4bit=True)).load_reconstructor()


# ---- runs
@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A warm start: a LoRA of random numbers on the random model."""
    files = nla_files()
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(files.model)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    model.peft_config["default"].base_model_name_or_path = files.model
    model.save_pretrained(folder)
    files.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def flags(adapter, tmp_path, monkeypatch):
    """Flags of a short run in which every text counts as an explanation, for a random model writes no tags."""
    files = nla_files()
    monkeypatch.setattr(nla, "extract_explanation", lambda text: text.strip() or None)
    return [
        *("--task", "nla", "--model", files.model, "--verbalizer", adapter),
        *("--data", files.data, "--reconstructor", files.reconstructor, "--inject-layer", "0"),
        *("--lora-r", "2", "--prompts", "2", "--group", "3", "--max-new", "6", "--overlong", "keep"),
        *("--lr", "1e-2", "--beta", "0.04", "--train-critic", "--critic-lr", "1e-3"),
        *("--eval-size", "4", "--eval-every", "2", "--save-every", "2", "--out", tmp_path),
    ]


@pytest.fixture
def policies(monkeypatch):
    """The policies of the runs, in order."""
    found = []
    prepare = NlaTask.prepare_model

    def keep(self, policy):
        found.append(policy)
        prepare(self, policy)

    monkeypatch.setattr(NlaTask, "prepare_model", keep)
    return found


def adapter_of(policy, name: str) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, named as in its file."""
    infix = f".{name}."
    return {key.replace(infix, "."): p for key, p in policy.model.named_parameters() if infix in key}


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors of the same names are equal."""
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_policy_and_critic_resume_together_and_the_anchor_never_moves(command, flags, policies, adapter, tmp_path):
    """A run that is stopped and resumed ends with the bytes of an unbroken one, in policy and critic."""
    constant = [*flags, "--lr-end", "1", "--warmup-steps", "0"]
    assert command(*constant, "--steps", "3", "--name", "whole").code == 0
    assert command(*constant, "--steps", "2", "--name", "parts").code == 0
    ended = command("--resume", tmp_path / "parts", "--steps", "3")
    assert ended.code == 0
    assert "identical to its reference" not in ended.err
    whole, parts = (tmp_path / run / "checkpoints" / "step_3" for run in ("whole", "parts"))
    for name in ("adapter_model.safetensors", "critic/reconstructor.safetensors", "critic/optimizer.pt"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    rows = read_csv(tmp_path / "whole")
    assert float(rows[0]["kl"]) == 0.0
    assert float(rows[-1]["kl"]) > 0
    for row in rows:
        assert float(row["critic_loss"]) > 0
        assert float(row["critic_skipped"]) == 0
        assert 0 < float(row["extraction_rate"]) <= 1
        assert row["fve"] and row["mse"]
    before = load_file(Path(nla_files().reconstructor) / "reconstructor.safetensors")
    after = load_file(whole / "critic" / "reconstructor.safetensors")
    assert not same_tensors(before, after)
    saved = load_file(adapter / "adapter_model.safetensors")
    for policy in policies:
        anchor = adapter_of(policy, "reference")
        assert same_tensors(anchor, saved)
        assert not same_tensors(anchor, adapter_of(policy, "default"))
    lines = read_jsonl(tmp_path / "parts" / nla.TABLE)
    places = [(line["step"], line["index"]) for line in lines]
    assert places == [(step, index) for step in (0, 2, 3) for index in range(4)]
    assert set(lines[0]) == {"step", "index", "reward", "mse", "fve", "text", "gold"}


def test_a_resumed_adapter_that_is_its_reference_is_a_loud_warning(command, flags, tmp_path):
    idle = [word if word != "1e-2" else "0" for word in flags]
    assert command(*idle, "--steps", "1", "--name", "idle", "--no-eval").code == 0
    ended = command("--resume", tmp_path / "idle", "--steps", "2")
    assert ended.code == 0
    assert "WARNING" in ended.err
    assert "identical to its reference" in ended.err


def test_the_critic_sends_no_gradient_to_the_policy(flags, policies, command, tmp_path, monkeypatch):
    grads = []
    observe = NlaTask.observe

    def watched(self, groups):
        weights = list(self.policy.model.parameters())
        before = [p.detach().clone() for p in weights]
        row = observe(self, groups)
        assert all(map(torch.equal, before, weights))
        grads.extend(p.grad for p in weights)
        return row

    monkeypatch.setattr(NlaTask, "observe", watched)
    assert command(*flags, "--steps", "1", "--name", "one", "--no-eval").code == 0
    assert grads and all(grad is None for grad in grads)


def test_full_fine_tuning_hooks_its_copied_reference_too(flags, policies, command, tmp_path):
    files = nla_files()
    own = [*flags, "--adapter", "none", "--verbalizer", files.model, "--steps", "2", "--name", "full"]
    assert command(*own, "--no-eval").code == 0
    rows = read_csv(tmp_path / "full")
    assert float(rows[0]["kl"]) == 0.0  # without the vectors it would differ at once
    assert float(rows[1]["kl"]) > 0
    fresh = transformers.AutoModelForCausalLM.from_pretrained(files.model)
    reference = policies[0].reference
    for p, q in zip(reference.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- the warm starts
def test_both_warm_starts_are_commands_whose_results_a_run_takes(command, tmp_path, capsys):
    files = nla_files()
    small = ["--data", files.data, "--steps", "3", "--batch", "4", "--lora-r", "2"]
    nla_command(["reconstruct", *small, "--out", str(tmp_path / "r")])
    verbalizer = ["--model", files.model, "--inject-layer", "0"]
    nla_command(["sft", *small, *verbalizer, "--out", str(tmp_path / "v")])
    assert "held-out FVE" in capsys.readouterr().out
    for name in ("r", "v"):
        lines = (tmp_path / name / "warm.csv").read_text().splitlines()
        assert len(lines) == 1 + 3
    warmed = ["--verbalizer", tmp_path / "v", "--reconstructor", tmp_path / "r"]
    ended = command("--task", "nla", "--model", files.model, "--data", files.data, *warmed, "--inject-layer", "0",
                    "--dry-run", "--out", tmp_path)
    assert ended.code == 0, ended.err
    with pytest.raises(SystemExit) as stopped:
        nla_command(["reconstruct", *small, "--out", str(tmp_path / "r")])
    assert stopped.value.code == 2
    assert "not empty" in capsys.readouterr().err


def test_the_smoke_models_are_built_and_run(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(nla_warm.SMOKE, "documents", 60)
    for name in ("base", "verbalizer", "reconstructor"):
        monkeypatch.setitem(nla_warm.SMOKE[name], "steps", 3)
    ended = command("--preset", "nla", "smoke", "--steps", "1", "--eval-size", "3", "--out", tmp_path, "--name", "tiny")
    assert ended.code == 0, ended.err
    assert "content words replaced" in ended.out
    assert "given: " in ended.out
    (folder,) = (tmp_path / "cache" / "train_grpo").iterdir()
    made = {p.name for p in folder.iterdir()}
    assert {"base", "reconstructor", "activations.parquet", "model.safetensors"} <= made


def test_help_is_no_mistake_and_says_what_each_flag_does(capsys):
    cases = [
        (["--help"], 0, "usage"),
        (["prepare", "--help"], 0, "windows in one forward [8]"),
        (["no-such"], 2, "usage"),
    ]
    for argv, code, words in cases:
        with pytest.raises(SystemExit) as end:
            nla_command(argv)
        printed = capsys.readouterr()
        assert end.value.code == code
        assert words in (printed.err if code else printed.out)
