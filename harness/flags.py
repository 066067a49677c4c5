"""Flags from a dataclass and values from presets: one typed field a flag, its comment the help, TOML between."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal

from data import TASKS, UserError, load_task, nearest
from harness.config import read_run_config

ROOT = Path(__file__).resolve().parent.parent
OWN = "the task's own (those of another: --task NAME --help)"


def flag(default: Any, low: float = 0, high: float = 1e12, resume: str = "refused") -> Any:
    """A field of a flag class: its default, a number's smallest and largest value, both allowed, and whether a resume
    may change it ("free", "fixed", or "refused" without --resume-override)."""
    return dataclasses.field(default=default, metadata={"range": (low, high), "resume": resume})


def free(default: Any, low: float = 0, high: float = 1e12) -> Any:
    """A flag that a resume may change; the change is logged."""
    return flag(default, low, high, "free")


def fixed(default: Any, low: float = 0, high: float = 1e12) -> Any:
    """A flag that a resume cannot change: the checkpoint has no other."""
    return flag(default, low, high, "fixed")


def resume_rule(cls: type, key: str) -> str:
    """What `flag` says of a field: "free", "fixed" or "refused"; that of a task's own flags is "refused"."""
    return cls.__dataclass_fields__[key].metadata.get("resume", "refused")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, with the nearest right flag."""

    def error(self, message: str):
        wrong = re.search(r"unrecognized arguments: (-[^\s=]+)", message)
        if not wrong:
            raise UserError(message)
        flag = wrong[1]
        owners = [name for name in TASKS if flag in task_flags(name)]
        if owners:
            raise UserError(f"{message} (a flag of --task {' and '.join(owners)})")
        known = [option for action in self._actions for option in action.option_strings]
        raise UserError(f"{message}{nearest(flag, known)}")


def task_flags(task: str) -> set[str]:
    """The flags that a registered task adds."""
    return {flag_of(name) for name in field_types(load_task(task).Options)}


@functools.cache
def comments(cls: type) -> dict[str, str]:
    """Field name -> the comment on its line, for a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) and base.__module__ != "types":
            with contextlib.suppress(OSError, TypeError):
                found |= dict(re.findall(r"^ +(\w+):.*?  # (.*)$", inspect.getsource(base), re.M))
    return found


@functools.cache
def sections(cls: type) -> dict[str, str]:
    """Field of a dataclass, or of its bases -> the comment line that it stands under."""
    title = ""
    found: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        for line in inspect.getsource(base).splitlines():
            heading = re.match(r"    # (.+)", line)
            field = re.match(r"    (\w+):", line)
            if heading:
                title = heading[1]
            elif field:
                found[field[1]] = title
    return found


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> its type, resolved through the modules of a dataclass and its bases."""
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = base.__dict__.get("__annotations__", {})
        hints = typing.get_type_hints(base)
        types |= {name: hints[name] for name in hints if name in own}
    return types


def build_parser(cls: type, own: type, description: str = "", complete: bool = True) -> Parser:
    """The parser of the flags of `cls`, those of its base `own` under the headings that they stand under there."""
    parser = Parser(prog="train_grpo.py", allow_abbrev=False, add_help=complete, description=description)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own takes -1e-3 for a flag
    add_switches(parser)
    types, notes, titles = field_types(cls), comments(cls), sections(own)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        title = titles.get(field.name, OWN)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = "none" if field.default == "" else field.default
        note = f"{notes.get(field.name, '')} [{default}]".replace("%", "%%")
        groups[title].add_argument(flag_of(field.name), dest=field.name, default=argparse.SUPPRESS, help=note,
                                   **keywords_of(types[field.name]))
    return parser


def add_switches(parser: Parser) -> None:
    """What the command does beside its flags."""
    add = parser.add_argument
    add("--preset", nargs="+", action="extend", default=[], metavar="NAME",
        help="presets (configs/NAME.toml or a path), applied from left to right")
    add("--resume", metavar="RUN", default="", help="go on with runs/NAME from its newest whole checkpoint")
    add("--resume-override", action="store_true", help="let --resume change flags or data that make it another run")
    add("--overwrite", action="store_true", help="replace an existing run folder of this name")
    add("--list-presets", action="store_true", help="print the presets, each with its header")
    add("--print-config", action="store_true", help="print the resolved values and where each came from")
    add("--dry-run", action="store_true", help="load everything, do one tiny step in a temporary folder, stop")


def keywords_of(kind: Any) -> dict[str, Any]:
    """What argparse needs to read a flag of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return {"action": "extend", "nargs": "+", "metavar": "VALUE"}
    return {"type": kind, "metavar": kind.__name__.upper()}


def preset_path(name: str) -> Path:
    known = {path.stem: path for path in sorted((ROOT / "configs").glob("*.toml"))}
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise UserError(f"--preset {name}: there is no such file")
        return Path(name)
    if name not in known:
        raise UserError(f"--preset {name}: unknown preset{nearest(name, known)}; there are {', '.join(known)}")
    return known[name]


def read_preset(name: str) -> dict[str, Any]:
    path = preset_path(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is no valid TOML: {error}") from error


def check_type(key: str, value: Any, kind: Any, where: str) -> Any:
    """The value as its flag's type, or an error that names key and file."""
    wrong = f"{where}: {key} = {value!r}"
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise UserError(f"{wrong}{nearest(str(value), choices)} must be one of {', '.join(choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        if not (isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)):
            raise UserError(f"{wrong} must be a list of strings")
        return tuple(value)
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{wrong} must be {'a number' if kind is float else kind.__name__}")
    return kind(value)


def layer(values: dict[str, Any], types: dict[str, Any], task: str, where: str) -> dict[str, Any]:
    """A preset's values, checked. A table named after the run's task adds to them; other tasks' do not count, nor do
    those named after an overlay, see `preset_layers`."""
    flat = {key: value for key, value in values.items() if not isinstance(value, dict)}
    for table, content in values.items():
        if not isinstance(content, dict):
            continue
        if table not in TASKS and not (ROOT / "configs" / f"{table}.toml").is_file():
            raise UserError(f"{where}: unknown table [{table}]{nearest(table, TASKS)}")
        if table == task:
            flat |= task_table(table, content)
    for key in flat:
        if key not in types:
            raise UserError(f"{where}: unknown key {key}{nearest(key, types)}")
    return {key: check_type(key, value, types[key], where) for key, value in flat.items()}


def task_table(task: str, content: dict[str, Any]) -> dict[str, Any]:
    """A task's table with flat keys: a table within, as [tools.reward], is the option tools_reward, a list of
    NAME=VALUE."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat[f"{task}_{key}"] = [f"{name}={number}" for name, number in value.items()]
        else:
            flat[key] = value
    return flat


def preset_layers(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(where from, values) of each preset, from left to right. A table [smoke] in a preset holds what it is to be under
    the overlay `smoke`: it counts where that comes later, and right after it."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        before = list(layers)
        layers.append((f"preset {name}", read_preset(name)))
        for where, values in before:
            if isinstance(values.get(name), dict) and name not in TASKS:
                layers.append((f"{where} [{name}]", values[name]))
    return layers


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def changed_flags(args, base: dict) -> list[str]:
    """The flags whose values differ from those of a run's config."""
    return [key for key in base if json.dumps(getattr(args, key)) != json.dumps(base[key])]


def printed(args, sources: dict[str, str], command) -> bool:
    """Print what --list-presets or --print-config ask for; whether one did, so that nothing else is to be done."""
    if command.list_presets:
        list_presets()
    elif command.print_config:
        print_config(args, sources)
    return command.list_presets or command.print_config


def print_config(args, sources: dict[str, str]) -> None:
    """Every flag with its value and where that came from."""
    for key, value in dataclasses.asdict(args).items():
        print(f"{key} = {value!r}  # {sources[key]}")


def list_presets() -> None:
    """Print every preset with the comment that it begins with."""
    for path in sorted((ROOT / "configs").glob("*.toml")):
        print(path.stem)
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            print("    " + line.lstrip("# "))


def args_class(core: type, task: str) -> type:
    """The flags `core` joined with the flags of a task."""
    options = load_task(task).Options
    if not dataclasses.is_dataclass(options):
        raise UserError(f"--task {task}: its Options must be a dataclass, @dataclasses.dataclass(frozen=True)")
    clash = {field.name for field in dataclasses.fields(options)} & set(core.__dataclass_fields__)
    if clash:
        raise UserError(f"--task {task}: its Options repeat flags of train_grpo.py: {', '.join(sorted(clash))}")
    return dataclasses.make_dataclass("Args", [], bases=(options, core), frozen=True)


def resolve_args(
    core: type, argv: list[str], base: dict | None = None, description: str = ""
) -> tuple[Any, dict[str, str], argparse.Namespace]:
    """Resolved flags, where each came from, and the command's own switches.

    Order: defaults < presets from left to right < `base` (a run's config on resume) < flags.
    """
    # the task decides which other flags there are
    first, _ = build_parser(core, core, complete=False).parse_known_args(argv)
    if first.resume:
        base = read_run_config(Path(first.resume))["args"]
    layers = preset_layers(first.preset)
    if base:
        layers.append(("the run's config.json", base))
    task, implied = task_of(core, vars(first), layers)
    cls = args_class(core, task)
    types = field_types(cls)
    command = build_parser(cls, core, description).parse_args(argv)

    values: dict[str, Any] = {"task": task}
    sources = {field.name: "default" for field in dataclasses.fields(cls)}
    if implied:
        sources["task"] = "implied by --reward"
    for where, content in layers:
        checked = layer(content, types, task, where)
        values |= checked
        sources |= dict.fromkeys(checked, where)
    for key, value in vars(command).items():
        if key in types:
            values[key] = tuple(value) if isinstance(value, list) else value
            sources[key] = "flag"
    args = cls(**values)
    check_ranges(core, args, sources)
    core.check(args, sources)  # not a task's flag of that name
    if first.resume:
        check_resume(args, base, command)
    return args, sources, command


def task_of(core: type, given: dict[str, Any], layers: list[tuple[str, dict]]) -> tuple[str, bool]:
    """The run's task, and whether --reward implies it."""
    task = given.get("task")
    for where, values in reversed(layers):
        task = task or check_type("task", values.get("task", ""), str, where)
    reward = given.get("reward") or any(values.get("reward") for _, values in layers)
    if not task:
        task = "custom" if reward else core.task
    if reward and not issubclass(load_task(task), load_task("custom")):
        raise UserError(f"--reward is for --task custom, not for --task {task}; use --task custom")
    return task, bool(reward)


def as_written(args, key: str, sources: dict[str, str]) -> str:
    """A flag with its value, and the preset that it comes from."""
    source = f" ({sources[key]})" if sources.get(key, "").startswith("preset") else ""
    return f"{flag_of(key)} {getattr(args, key)}{source}"


def check_ranges(core: type, args, sources: dict[str, str]) -> None:
    """UserError for a number outside its range."""
    for field in dataclasses.fields(core):
        value = getattr(args, field.name)
        if type(value) not in (int, float):
            continue
        low, high = field.metadata.get("range", (0, 1e12))
        if not low <= value <= high:  # NaN fails both comparisons
            raise UserError(f"{as_written(args, field.name, sources)} is outside {low:g} to {high:g}")


def check_resume(args, base: dict, command) -> None:
    """A resume goes on with the run's own flags: what would make it another run is refused by name."""
    given = [flag_of(key) for key in ("preset", "name", "out", "overwrite") if getattr(command, key, None)]
    if given:
        raise UserError(f"--resume goes on in {command.resume} with the run's own flags; leave out {', '.join(given)}")
    for key in changed_flags(args, base):
        began = f"{flag_of(key)} {getattr(args, key)}: the run began with {base[key]}, and a resume cannot change it"
        rule = resume_rule(type(args), key)
        if rule == "fixed":
            raise UserError(began)
        if rule != "free" and not command.resume_override:
            raise UserError(f"{began} without --resume-override: it would be another run")


def dry_run_args(args, folder: str):
    """One tiny step in a temporary folder."""
    return dataclasses.replace(args, out=folder, name="dry", steps=1, prompts=min(2, args.prompts), minibatches=1,
                               max_new=min(8, args.max_new), overlong="keep", eval_size=2, eval_k=0)


# ---- other commands than train_grpo.py
def command_parser(cls: type, prog: str, description: str = "") -> argparse.ArgumentParser:
    """The parser of a command whose flags are the fields of the frozen dataclass `cls`, each with its comment as help.

    A field without default is required, a bool is a switch, a tuple takes any number of values.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    types = field_types(cls)
    notes = comments(cls)
    for field in dataclasses.fields(cls):
        kind = types[field.name]
        note = notes[field.name]
        keywords = command_keywords(kind)
        if field.default is dataclasses.MISSING:
            keywords["required"] = True
        else:
            keywords["default"] = field.default
            if kind is not bool and field.default not in ("", ()):
                note += f" [{field.default}]"
        keywords["help"] = note.replace("%", "%%")
        parser.add_argument(flag_of(field.name), dest=field.name, **keywords)
    return parser


def command_keywords(kind: Any) -> dict[str, Any]:
    """What argparse needs to read a flag of this type, for `command_parser`."""
    if kind is bool:
        return {"action": "store_true"}
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return {"nargs": "*"}
    return {"type": kind}


def command_flags(cls: type, argv: list[str], prog: str, description: str = "") -> Any:
    """A command's flags as an instance of the frozen dataclass `cls`; a mistake ends the process as argparse does."""
    values = vars(command_parser(cls, prog, description).parse_args(argv))
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)
