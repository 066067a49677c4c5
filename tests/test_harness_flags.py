"""What a user meets on the command line before anything is trained: flags, presets, their errors."""

import dataclasses
import json
import math
import os
import re
import runpy
import subprocess
import sys
import typing

import chaos
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import harness.flags
import train_grpo
from data import TASKS, UserError, load_task
from harness.flags import comments, field_types, resolve_args
from train_grpo import Args

FIELDS = {field.name: field for field in dataclasses.fields(Args)}
KINDS = field_types(Args)
PRESETS = sorted((ROOT / "configs").glob("*.toml"))


def refused(*argv) -> str:
    """The one sentence that refuses these flags."""
    with pytest.raises(UserError) as error:
        resolve_args(train_grpo.Args, [str(word) for word in argv])
    text = str(error.value)
    assert "\n" not in text and text
    return text


def preset(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text)
    return path


def resolved(*argv):
    args, sources, _ = resolve_args(train_grpo.Args, [str(word) for word in argv])
    return args, sources


def test_a_flag_of_another_task_is_named_as_such():
    assert "a flag of --task nla" in refused("--task", "math", "--judge-evals", "hallucination")
    assert "a flag of" not in refused("--learningrate", "3")


# ---- as a process
def as_a_script(words: list[str], out: str, err: str) -> typing.NoReturn:
    """train_grpo.py as the whole rest of a forked child, as a shell runs it: its output goes to files."""
    def work() -> None:
        sys.argv[1:] = words
        runpy.run_path(train_grpo.__file__, run_name="__main__")

    chaos.end_in_child(work, (out, err))


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What the shell sees of wrong commands: name -> exit code, stdout, stderr."""
    folder = tmp_path_factory.mktemp("shell")
    preset(folder, "learning_rat = 1e-3\n", "misspelt.toml")
    good = json.dumps({"question": "1+1?", "answer": "2"})
    (folder / "broken.jsonl").write_text("".join(f"{good}\n" for _ in range(9)) + '{"question": "1+\n')
    commands = {
        "bad number": ["--preset", "smoke", "--lr", "1e-3x"],
        "misspelt flag": ["--presett", "smoke"],
        "misspelt preset": ["--preset", "smok"],
        "misspelt key": ["--preset", "misspelt.toml"],
        "group of one": ["--preset", "smoke", "--group", "1"],
        "missing file": ["--preset", "smoke", "--data", "missing.jsonl"],
        "broken lines": ["--preset", "smoke", "--data", "broken.jsonl"],
    }
    children = []
    for i, words in enumerate(commands.values()):
        children.append(os.fork())
        if children[-1] == 0:
            os.chdir(folder)
            as_a_script(words, f"{i}.out", f"{i}.err")
    codes = [chaos.exit_code(child) for child in children]
    ended = {case: (codes[i], (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text())
             for i, case in enumerate(commands)}
    assert not (folder / "runs").exists()
    return ended


@pytest.mark.parametrize("case, names", [
    ("bad number", ["--lr", "1e-3x"]),
    ("misspelt flag", ["--presett", "did you mean --preset?"]),
    ("misspelt preset", ["smok", "did you mean smoke?"]),
    ("misspelt key", ["learning_rat", "misspelt.toml"]),
    ("group of one", ["--group 1", "--advantage baseline"]),
    ("missing file", ["missing.jsonl"]),
    ("broken lines", ["broken.jsonl", "1 of 10 records", "not a JSON object 1", "line 10", "--max-bad-records 0.01"]),
])
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(processes, case, names):
    code, out, err = processes[case]
    lines = err.splitlines()
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert "Traceback" not in out
    for name in names:
        assert name in lines[0]


# ---- flags
@pytest.mark.parametrize("words", [["--lr=1e-6"], ["--lr", "1e-6"], ["--lr", "0.000001"]])
def test_a_number_after_a_blank_or_an_equals_sign(words):
    assert resolved(*words)[0].lr == 1e-6


def test_a_switch_is_turned_off_by_its_no_form():
    assert resolved()[0].eval is True
    args, sources = resolved("--no-eval")
    assert args.eval is False and sources["eval"] == "flag"


@pytest.mark.parametrize("text", ["-0.5", "-1", "-1e-3", "-.5", "-5E-1"])
def test_negative_numbers_are_values(text):
    assert resolved("--entropy-coef", text)[0].entropy_coef == float(text)
    assert resolved(f"--entropy-coef={text}")[0].entropy_coef == float(text)


def test_a_repeatable_flag_collects_its_values():
    args, _ = resolved("--lora-targets", "q_proj", "k_proj", "--lora-targets", "v_proj")
    assert args.lora_targets == ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize("words, named", [
    (["--lrr", "1"], ["--lrr", "--lr"]), (["--no-evall"], ["--no-evall", "--no-eval"]),
    (["--lr_end", "1"], ["--lr_end", "--lr-end"]), (["--adpater=none"], ["--adpater", "--adapter"]),
    (["--steps", "1e3"], ["--steps", "1e3"]), (["--steps", "3.0"], ["--steps", "3.0"]), (["--steps"], ["--steps"]),
    (["--adapter", "lorra"], ["--adapter", "lorra", "lora"]), (["--eval=no"], ["--eval"]),
    (["--preset"], ["--preset"]), (["--resume"], ["--resume"]), (["--preset", "nope"], ["nope", "smoke"]),
    (["--preset", "nowhere/mine.toml"], ["nowhere/mine.toml"]), (["--task", "mth"], ["mth", "math"]),
    (["--task", "nowhere.py:Mine"], ["nowhere.py"]), (["smoke"], ["smoke"]), (["--ste", "3"], ["--ste", "--steps"]),
])
def test_a_wrong_word_is_named_with_what_is_right(words, named):
    text = refused(*words)
    for name in named:
        assert name in text


@pytest.mark.parametrize("words", [
    ["--lr", "nan"], ["--lr", "inf"], ["--lr", "-1e-6"], ["--beta", "nan"], ["--steps", "-1"], ["--temperature", "0"],
    ["--temperature=-inf"], ["--top-p", "0"], ["--top-p", "1.5"], ["--clip", "2"], ["--max-bad-records", "1.1"],
    ["--max-new", "0"], ["--prompts", "0"], ["--adam-beta1", "1"], ["--warmup-steps", "-1"], ["--eval-size", "-5"],
    ["--keep-last", "-1"], ["--lora-r", "0"], ["--inner-epochs", "0"], ["--sampling-alpha", "nan"],
])
def test_a_value_outside_its_range_is_refused_with_flag_and_value(words, tmp_path):
    flag, value = words[0].split("=") if len(words) == 1 else words
    if flag == "--sampling-alpha":  # the task's own flag is checked where the task is made
        with pytest.raises(UserError, match=flag):
            load_task("math")(resolved(*words)[0])
        return
    text = refused(*words)
    assert flag in text and re.search(r"to", text)
    assert f"{float(value):g}" in text or value in text or str(float(value)) in text


@pytest.mark.parametrize("words, named", [
    (["--group", "1"], ["--group 1", "--advantage baseline"]),
    (["--group", "1", "--advantage", "mixed"], ["--group 1"]),
    (["--dual-clip", "0.5"], ["--dual-clip 0.5"]), (["--dual-clip", "1"], ["--dual-clip 1"]),
    (["--minibatches", "9", "--prompts", "8"], ["--minibatches 9", "--prompts 8"]),
    (["--cispo", "--ratio", "sequence"], ["--cispo", "--ratio sequence"]),
    (["--cispo", "--ratio", "sequence_sum"], ["--cispo", "--ratio sequence_sum"]),
    (["--temperature-end", "0"], ["--temperature-end 0"]),
    (["--load-4bit", "--adapter", "none"], ["--load-4bit", "--adapter lora"]),
    (["--overlong", "soft", "--overlong-buffer", "65", "--max-new", "64"], ["--overlong-buffer 65", "--max-new 64"]),
    (["--name", "a/b"], ["--name a/b"]), (["--name", ".."], ["--name .."]), (["--name", "."], ["--name ."]),
    (["--reward", "f.py:fn", "--task", "math"], ["--reward", "--task"]),
])
def test_an_impossible_combination_is_refused(words, named):
    text = refused(*words)
    for name in named:
        assert name in text


@pytest.mark.parametrize("words", [
    ["--group", "1", "--advantage", "baseline"], ["--dual-clip", "3"], ["--minibatches", "8", "--prompts", "8"],
    ["--cispo", "--ratio", "token"], ["--temperature-end", "-1"], ["--temperature-end", "0.5"], ["--load-4bit"],
    ["--overlong", "soft", "--overlong-buffer", "64", "--max-new", "64"], ["--clip-high", "-1"], ["--seed", "-3"],
    ["--overlong-buffer", "65", "--max-new", "64"],
])
def test_its_possible_neighbour_is_accepted(words):
    resolved(*words)


def test_a_reward_function_implies_the_custom_task():
    args, sources = resolved("--reward", "f.py:fn")
    assert args.task == "custom" and "reward" in sources["task"]


# ---- presets
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_of_the_project_resolves_and_begins_with_its_command(path):
    args, _ = resolved("--preset", path.stem)
    assert isinstance(args, Args)
    first = path.read_text().splitlines()[0]
    assert first.startswith("#") and f"--preset {path.stem}" in first


@pytest.mark.parametrize("path", [path for path in PRESETS if path.stem != "smoke"], ids=lambda path: path.stem)
def test_smoke_as_an_overlay_makes_any_preset_tiny(path):
    args, _ = resolved("--preset", path.stem, "smoke")
    own, smoke = resolved("--preset", path.stem)[0], resolved("--preset", "smoke")[0]
    assert args.model == "tiny" and args.steps <= smoke.steps and args.max_new <= 64
    assert args.task == own.task


def test_presets_apply_from_left_to_right_and_flags_over_all(tmp_path):
    a = preset(tmp_path, "lr = 1e-3\nsteps = 7\ngroup = 3\n", "a.toml")
    b = preset(tmp_path, "steps = 9\ngroup = 5\n", "b.toml")
    for words in (["--group", "6", "--preset", a, b], ["--preset", a, "--preset", b, "--group", "6"]):
        args, sources = resolved(*words)
        assert (args.lr, args.steps, args.group, args.prompts) == (1e-3, 9, 6, Args.prompts)
        assert sources["lr"].endswith("a.toml") and sources["steps"].endswith("b.toml")
        assert sources["group"] == "flag" and sources["prompts"] == "default"
    assert resolved("--preset", b, a)[0].steps == 7


def test_a_flag_that_repeats_the_default_still_beats_a_preset(tmp_path):
    path = preset(tmp_path, "steps = 7\neval = false\n")
    args, _ = resolved("--preset", path, "--steps", Args.steps, "--eval")
    assert args.steps == Args.steps and args.eval is True


def test_toml_numbers_without_a_point_or_with_an_exponent_are_numbers(tmp_path):
    args, _ = resolved("--preset", preset(tmp_path, "lr = 5e-6\nbeta = 0\nlora_alpha = 16\nseed = -2\n"))
    assert (args.lr, args.beta, args.lora_alpha, args.seed) == (5e-6, 0.0, 16.0, -2)
    assert all(type(value) is float for value in (args.lr, args.beta, args.lora_alpha))


@pytest.mark.parametrize("line, named", [
    ('lr = "5e-6"', ["lr", "5e-6"]), ("steps = 3.5", ["steps", "3.5"]), ("steps = 3.0", ["steps", "3.0"]),
    ("steps = true", ["steps", "True"]), ("lr = true", ["lr", "True"]), ("eval = 1", ["eval", "1"]),
    ('eval = "no"', ["eval", "no"]), ("name = 5", ["name", "5"]), ("adapter = 5", ["adapter", "5", "lora"]),
    ('adapter = "lorra"', ["adapter", "lorra", "did you mean lora"]), ('lora_targets = "q"', ["lora_targets", "q"]),
    ("lora_targets = [1]", ["lora_targets", "1"]), ("steps = [1]", ["steps", "[1]"]), ("lr = nan", ["lr", "nan"]),
    ("lr = -1", ["lr", "-1"]), ("group = 1", ["group", "1"]), ("grop = 2", ["grop", "group"]),
    ("lr-end = 0.5", ["lr-end", "lr_end"]), ("lr = 1979-05-27", ["lr"]), ("[mathh]\nx = 1", ["mathh", "math"]),
    ("[math]\npartial_credti = true", ["partial_credti", "partial_credit"]), ("[math]\nlr = [2]", ["lr", "[2]"]),
    ("lr = 1e-3\nlr = 1e-4", []), ("lr = ", []), ("[math.reward]\nx = 1", ["reward"]),
    ("task = 5", ["task", "5"]), ("task = [1]", ["task"]),
])
def test_a_wrong_line_of_a_preset_names_key_and_file(tmp_path, line, named):
    text = refused("--preset", preset(tmp_path, line + "\n"))
    for name in ["mine.toml", *named]:
        assert name in text


def test_a_preset_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00lr = 1")
    assert "mine.toml" in refused("--preset", tmp_path / "mine.toml")


def test_a_table_counts_for_its_own_task_only(tmp_path):
    path = preset(tmp_path, "[math]\npartial_credit = true\nlr = 1e-3\n[custom]\nlr = 1e-4\nwrong_here = 1\n")
    args, _ = resolved("--preset", path)
    assert args.partial_credit is True and args.lr == 1e-3
    assert "wrong_here" in refused("--preset", path, "--task", "custom")


def test_a_later_layer_decides_the_task(tmp_path):
    custom, plain = preset(tmp_path, 'task = "custom"\n', "c.toml"), preset(tmp_path, "steps = 3\n", "p.toml")
    assert resolved("--preset", custom, plain)[0].task == "custom"
    args, sources = resolved("--preset", custom, plain, "--task", "math")
    assert args.task == "math" and sources["task"] == "flag"


def test_a_task_takes_no_flag_of_another(tmp_path):
    assert "--partial-credit" in refused("--task", "custom", "--partial-credit")


# ---- what is printed
def test_print_config_shows_every_value_and_its_source(command, tmp_path):
    path = preset(tmp_path, "steps = 7\n")
    ended = command("--preset", path, "--lr", "1e-6", "--print-config")
    lines = dict(line.split(" = ", 1) for line in ended.out.splitlines())
    assert ended.code == 0 and set(FIELDS) <= set(lines)
    assert lines["lr"] == "1e-06  # flag" and lines["group"] == "8  # default"
    assert lines["steps"].startswith("7  # ") and "mine.toml" in lines["steps"]


def test_print_config_of_a_wrong_command_is_refused(command):
    assert command("--print-config", "--group", "1").code == 2


def test_list_presets_shows_each_with_its_header(command):
    ended = command("--list-presets")
    assert ended.code == 0
    for path in PRESETS:
        assert re.search(rf"^{path.stem}$", ended.out, re.M)
        header = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
        assert header[0] in ended.out


@pytest.mark.parametrize("task", sorted(TASKS))
def test_help_lists_every_flag_with_a_line_of_help(capsys, task):
    with pytest.raises(SystemExit) as ended:
        train_grpo.main(["--task", task, "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    cls = harness.flags.args_class(train_grpo.Args, task)
    notes = comments(cls)
    for field in dataclasses.fields(cls):
        assert f"--{field.name.replace('_', '-')}" in text
        assert len(notes[field.name]) > 5 and "".join(notes[field.name].split()) in text
    for switch in ("--preset", "--resume", "--overwrite", "--list-presets", "--print-config", "--dry-run"):
        assert switch in text


RANGES = {field.name: field.metadata["range"] for field in dataclasses.fields(Args)
          if field.metadata and type(field.default) in (int, float)}


def test_every_range_belongs_to_a_number():
    assert len(RANGES) > 40
    for name, (low, high) in RANGES.items():
        assert low <= FIELDS[name].default <= high


# ---- random values
COMBINED = {"task", "name", "reward", "group", "minibatches", "prompts", "dual_clip", "cispo", "ratio", "load_4bit",
            "adapter", "temperature_end", "overlong", "overlong_buffer", "max_new", "decoupled_ppo", "off_policy",
            "m2_threshold", "beta", "beta_control", "beta_min", "beta_max", "async_workers", "cuda_graphs",
            "policy_sync_interval", "max_version_gap", "engine", "server"}  # not free of each other
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12)


def values_of(name: str):
    kind, (low, high) = KINDS[name], RANGES.get(name, (0, 1e12))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(math.ceil(low), math.floor(high))
    if kind is float:
        return st.floats(low, high)
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return st.lists(TEXT.filter(lambda text: not text.startswith("-")), min_size=1, max_size=3).map(tuple)
    return TEXT


RANDOM = st.fixed_dictionaries({}, optional={name: values_of(name) for name in FIELDS if name not in COMBINED})


def as_flag(name: str, value) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    return [flag, *value] if isinstance(value, tuple) else [f"{flag}={value!r}" if isinstance(value, float)
                                                            else f"{flag}={value}"]


def as_toml(name: str, value) -> str:
    if isinstance(value, tuple):
        return f"{name} = {json.dumps(list(value), ensure_ascii=False)}"
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


@settings(max_examples=25, deadline=None, database=None)
@given(RANDOM)
def test_any_valid_values_are_the_same_through_flags_and_through_a_preset(tmp_path_factory, values):
    args, sources = resolved(*[word for name, value in values.items() for word in as_flag(name, value)])
    path = tmp_path_factory.mktemp("preset") / "random.toml"
    path.write_text("\n".join(as_toml(name, value) for name, value in values.items()), encoding="utf-8")
    from_preset, _ = resolved("--preset", path)
    for name, field in FIELDS.items():
        wanted = values.get(name, field.default)
        assert getattr(args, name) == getattr(from_preset, name) == wanted
        assert sources[name] == ("flag" if name in values else "default")


@settings(max_examples=25, deadline=None, database=None)
@given(st.lists(st.text(max_size=8) | st.sampled_from(
    [f"--{name.replace('_', '-')}" for name in FIELDS] + ["--preset", "smoke", "1", "-1", "=", "--"]), max_size=4))
def test_any_words_are_resolved_or_refused_in_one_sentence(words):
    try:
        resolve_args(train_grpo.Args, words)
    except UserError as error:
        assert str(error)
    except SystemExit:
        assert {"-h", "--help"} & set(words)


def test_a_preset_says_what_it_is_under_an_overlay(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('task = "math"\nsteps = 300\nmodel = "some/model"\n[smoke]\nsteps = 7\nlimit = 9\n')
    alone, *_ = harness.flags.resolve_args(train_grpo.Args, ["--preset", str(own)])
    assert (alone.steps, alone.limit, alone.model) == (300, 0, "some/model")
    both, sources, _ = harness.flags.resolve_args(train_grpo.Args, ["--preset", str(own), "smoke"])
    assert (both.steps, both.limit, both.model) == (7, 9, "tiny") and sources["steps"] == f"preset {own} [smoke]"
    other_way, *_ = harness.flags.resolve_args(train_grpo.Args, ["--preset", "smoke", str(own)])
    assert (other_way.steps, other_way.limit) == (300, 0)
    own.write_text("[smok]\nsteps = 7\n")
    with pytest.raises(UserError, match=r"unknown table \[smok\]"):
        harness.flags.resolve_args(train_grpo.Args, ["--preset", str(own)])


@pytest.mark.parametrize("preset", ["math", "selfplay"])
def test_math_presets_and_their_tiny_selves_resolve(preset):
    real, *_ = harness.flags.resolve_args(train_grpo.Args, ["--preset", preset])
    tiny, *_ = harness.flags.resolve_args(train_grpo.Args, ["--preset", preset, "smoke"])
    assert real.prm_4bit and "PRM" in real.prm and real.math_data
    assert (tiny.model, tiny.prm, tiny.prm_4bit, tiny.math_data) == ("tiny", "tiny", False, "")


def test_a_tasks_flag_named_check_is_a_flag_like_others(tmp_path):
    (tmp_path / "own.py").write_text("import dataclasses\nfrom data import Task\n\n\nclass Own(Task):\n"
                                     "    @dataclasses.dataclass(frozen=True)\n    class Options:\n"
                                     "        check: bool = True  # whether to\n")
    task = ["--task", f"{tmp_path / 'own.py'}:Own"]
    args, *_ = resolve_args(train_grpo.Args, [*task, "--no-check"])
    assert args.check is False
    with pytest.raises(UserError, match="dual-clip"):
        resolve_args(train_grpo.Args, [*task, "--dual-clip", "0.5"])


def test_the_command_starts_without_peft():
    code = "import sys, train_grpo; print('peft' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
