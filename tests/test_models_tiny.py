"""The smoke preset learns, a reward that says nothing teaches nothing, and the warm-started tiny model is kept."""

import itertools
import json
import multiprocessing
import random
from pathlib import Path

import pytest
import transformers
from conftest import read_csv, read_jsonl
from test_tasks_contract import core_args

import models.tiny
from data import load_task
from tasks.math.task import MathTask
from tasks.math.word_problems import MAX_PROBLEMS


# ---- learning
def accuracies(folder: Path) -> list[float]:
    """Held-out greedy accuracy at every evaluation, the one before training first."""
    return [line["accuracy"] for line in read_jsonl(folder / "eval.jsonl")]


SHORT = ["--preset", "smoke", "--steps", "30", "--eval-every", "0", "--no-save-completions"]


def test_a_short_smoke_run_learns_to_finish_the_work(command, tmp_path):
    ended = command(*SHORT, "--out", tmp_path, "--name", "smoke")
    assert ended.code == 0
    first, last = accuracies(tmp_path / "smoke")
    assert first < 0.5
    assert last - first >= 0.3
    rows = read_csv(tmp_path / "smoke")
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(1, 31))
    assert all(float(row["grad_norm"]) > 0 for row in rows[:5])


def ignore_the_text(task: type, monkeypatch) -> None:
    """Rewards drawn at random take the place of the task's; what evaluation reads of a score stays as it is."""
    judge = task.score_all
    luck = random.Random(0)

    def score_all(self, groups):
        scored = judge(self, groups)
        for score in itertools.chain(*scored):
            if score.reward is not None:
                first = next(iter(score.parts))
                score.reward = luck.random()
                score.parts = dict.fromkeys(score.parts, 0.0) | {first: score.reward}
        return scored

    monkeypatch.setattr(task, "score_all", score_all)


def test_a_reward_that_ignores_the_text_teaches_nothing(command, tmp_path, monkeypatch):
    ignore_the_text(MathTask, monkeypatch)
    assert command(*SHORT, "--steps", "16", "--out", tmp_path, "--name", "control").code == 0
    first, last = accuracies(tmp_path / "control")
    assert last - first <= 0.1
    assert all(float(row["grad_norm"]) > 0 for row in read_csv(tmp_path / "control"))


@pytest.mark.slow
@pytest.mark.parametrize("preset, metric", [("tools", "accuracy"), ("physics", "accuracy"), ("nla", "fve")])
def test_a_reward_that_ignores_the_text_teaches_no_task_anything(command, tmp_path, monkeypatch, preset, metric):
    ignore_the_text(load_task(preset), monkeypatch)
    ended = command("--preset", preset, "smoke", "--eval-every", "0", "--out", tmp_path, "--name", "control")
    assert ended.code == 0
    first, *_, last = [line[metric] for line in read_jsonl(tmp_path / "control" / "eval.jsonl")]
    assert last - first <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_smoke_run_solves_its_task_on_every_seed(command, tmp_path, seed):
    assert command("--preset", "smoke", "--seed", seed, "--out", tmp_path, "--name", "smoke").code == 0
    values = accuracies(tmp_path / "smoke")
    assert values[0] <= 0.3
    assert values[-1] >= 0.9


# ---- the tiny model's cache
def warm_start(task, log):
    """Stands for the warm start: the same kind of model and tokenizer, untrained."""
    prompts = task.demonstration_prompts()[:50]
    tokenizer = models.tiny.tiny_tokenizer([prompt.messages[-1]["content"] for prompt in prompts])
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **models.tiny.TINY)
    model = transformers.LlamaForCausalLM(config)
    log("built")
    return model, tokenizer


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder and a warm start without the training; gives the folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models.tiny, "warm_start", warm_start)
    monkeypatch.setitem(MAX_PROBLEMS, "train", 200)
    return tmp_path / "cache" / "train_grpo"


def tiny(use_cache: bool = True) -> tuple[Path, list[str]]:
    """The tiny model's folder and what was said of its building."""
    args = core_args("math", math_max_level=0, math_instruction="", sampling_alpha=0.0, cache=use_cache, eval_size=10)
    said = []
    return models.tiny.tiny_model(load_task("math")(args), args, said.append), said


def test_the_tiny_model_is_built_once(cache):
    folder, said = tiny()
    assert "built" in said and folder.parent == cache
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again, said = tiny()
    assert again == folder and "built" not in said
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_no_cache_builds_the_tiny_model_again(cache):
    folder, _ = tiny()
    (folder / "model.safetensors").write_bytes(b"")
    again, said = tiny(use_cache=False)
    assert again == folder and "built" in said
    assert transformers.AutoModelForCausalLM.from_pretrained(again).num_parameters() > 0


def test_another_recipe_is_another_model(cache, monkeypatch):
    first, _ = tiny()
    monkeypatch.setitem(models.tiny.WARM, "steps", 7)
    second, said = tiny()
    assert first != second and "built" in said and first.is_dir()


def test_nothing_half_built_is_left_or_used(cache, monkeypatch):
    def fail(task, log):
        raise KeyboardInterrupt

    monkeypatch.setattr(models.tiny, "warm_start", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(models.tiny, "warm_start", warm_start)
    assert "built" in tiny()[1]


def build(barrier, results):
    models.tiny.warm_start = warm_start
    barrier.wait()
    folder, said = tiny()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    results.put((str(folder), "built" in said, model.num_parameters()))


def test_processes_that_start_at_once_all_get_the_tiny_model(cache):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    results = context.Queue()
    processes = [context.Process(target=build, args=(barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    ended = [results.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    folders = {folder for folder, _, _ in ended}
    sizes = {size for _, _, size in ended}
    assert len(folders) == 1 and len(sizes) == 1
    assert [path.name for path in cache.iterdir()] == [Path(ended[0][0]).name]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_cached_model_that_lacks_a_file_is_built_again(cache, file):
    folder, _ = tiny()
    (folder / file).unlink()
    again, said = tiny()
    assert "built" in said and (again / file).is_file()


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch, command):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ended = command("--preset", "smoke", "--out", tmp_path / "runs")
    assert ended.code == 2 and "XDG_CACHE_HOME" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_a_task_without_demonstrations_cannot_warm_start_the_tiny_model(words, command, tmp_path):
    ended = command("--task", f"{words.file}:Words", "--model", "tiny", "--out", tmp_path)
    assert ended.code == 2 and "demonstrations" in ended.err
    assert not list(tmp_path.iterdir())


def test_the_tiny_model_is_the_one_that_was_described():
    config = transformers.LlamaConfig(vocab_size=360, **models.tiny.TINY)
    assert 100_000 < transformers.LlamaForCausalLM(config).num_parameters() < 150_000


def test_the_cached_folder_is_a_whole_model_with_its_tokenizer(cache):
    folder, _ = tiny()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.chat_template
    text = "Tom has 12 pens.\nHow many?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
