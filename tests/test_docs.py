"""README and docs: short enough, and nothing in them that the code does not have."""

import dataclasses
import re

import pytest
from conftest import ROOT

import harness.flags
from data import TASKS, load_task
from harness.columns import table
from train_grpo import Args

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Of other programs: vLLM's and SGLang's servers, and pip.
FOREIGN = {"--enable-lora", "--max-lora-rank", "--logprobs-mode", "--model-path", "--lora-target-modules", "--no-deps"}
COMMANDS = [  # those that read their own flags
    "eval.py",
    "plot_run.py",
    *("tasks/nla/" + name for name in ("prepare.py", "warm.py", "activations.py")),
    *("tasks/physics/" + name for name in ("warm.py", "task.py")),
    "tests/chaos.py",
    *(f"tests/bench/{path.name}" for path in sorted((ROOT / "tests" / "bench").glob("*.py"))),
]


def flag_names() -> set[str]:
    """Every flag: of train_grpo.py, of a task, of a command; those that are true or false with `--no-` too."""
    names = {"--help"}
    for cls in (Args, *(load_task(task).Options for task in TASKS)):
        for field in dataclasses.fields(cls):
            names.add(harness.flags.flag_of(field.name))
            if isinstance(field.default, bool):
                names.add("--no-" + field.name.replace("_", "-"))
    parser = harness.flags.Parser(add_help=False)
    harness.flags.add_switches(parser)
    for action in parser._actions:
        names.update(action.option_strings)
    for command in COMMANDS:
        source = (ROOT / command).read_text(encoding="utf-8")
        names.update(re.findall(r'"(--[a-z][a-z0-9-]*)"', source))
        fields = re.findall(r"^    (\w+): (?:int|float|str|bool|Literal|tuple)", source, re.MULTILINE)
        names.update(map(harness.flags.flag_of, fields))
        sizes = re.findall(r'\("(\w[\w-]*)", \d+\)|"(\w[\w-]*)": \d+', source)  # sizes of a bench's random model
        names.update(f"--{first or second}" for first, second in sizes)
    return names


def test_metrics_are_generated():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == table(), "run: python -m harness.columns > docs/metrics.md"


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    prose = [line for line in lines if not line.startswith(("|", " ", "python"))]
    assert [line for line in prose if len(line) > 120] == []


def test_readme_keeps_the_test_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text[text.index("<!-- test command -->") :]
    command = re.search(r"^python3.*$", block, re.MULTILINE)
    assert command and command[0].endswith("-m pytest")


def test_files_of_the_tree_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"^## The house\n\n```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert tree
    names = [line.split()[0] for line in tree[1].splitlines()]
    tasks = re.search(r"^tasks/ +(.*)$", tree[1], re.MULTILINE)
    names += [f"tasks/{name}" for name in re.findall(r"\w+(?:/|\.py)", tasks[1])]
    assert len(names) >= 18
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_named_files_and_functions_exist(name):
    """`path/to/file.py`, and `path/to/file.py:function`, as they stand in code spans."""
    text = (ROOT / name).read_text(encoding="utf-8")
    wrong = []
    for file, thing in re.findall(r"`((?:\w+/)*\w+\.(?:py|sh|toml))(?::(\w+))?[^`]*`", text):
        if file.startswith("my_") or file == "file.py":
            continue
        found = [ROOT / file] if (ROOT / file).exists() else list((ROOT / "engine").glob(file))
        source = "".join(path.read_text(encoding="utf-8") for path in found)
        if not found or (thing and not re.search(rf"^\s*(?:def|class) {thing}\b", source, re.MULTILINE)):
            wrong.append(f"{file}:{thing}")
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_flags_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    own = {harness.flags.flag_of(key) for diff in diffs for key in re.findall(r"^\+    (\w+):", diff, re.MULTILINE)}
    named = set(re.findall(r"(?<![\w<!-])--[a-z][a-z0-9-]*", text))
    named = {flag for flag in named if not flag.endswith("-")}  # families, `--weight-…`
    assert named - flag_names() - FOREIGN - own == set()


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_no_page_is_lost():
    """README or another page links to each."""
    linked = set()
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+\.md)\)", page.read_text(encoding="utf-8")):
            linked.add((page.parent / link).resolve())
    assert [name for name, page in zip(NAMES, PAGES, strict=True) if page.resolve() not in linked] == ["README.md"]
