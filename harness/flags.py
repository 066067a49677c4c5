"""Flags from a dataclass and values from presets: one typed field a flag, its comment the help, TOML between."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal

from data import TASKS, UserError, load_task, nearest
from harness.folder import read_run_config

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
        flags = [option for action in self._actions for option in action.option_strings]
        hint = ""
        if wrong := re.search(r"unrecognized arguments: (-[^\s=]+)", message):
            flag = wrong[1]
            owners = [name for name in TASKS if flag in map(flag_of, field_types(load_task(name).Options))]
            hint = f" (a flag of --task {' and '.join(owners)})" if owners else nearest(flag, flags)
        raise UserError(f"{message}{hint}")


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
    title, found = "", {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        for line in inspect.getsource(base).splitlines():
            if match := re.match(r"    (?:# (.+)|(\w+):)", line):
                title, found = (match[1], found) if match[1] else (title, found | {match[2]: title})
    return found


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> its type, resolved through the modules of a dataclass and its bases."""
    types: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        types |= {k: v for k, v in typing.get_type_hints(base).items() if k in base.__dict__.get("__annotations__", {})}
    return types


def build_parser(cls: type, own: type, description: str = "", complete: bool = True) -> Parser:
    """The parser of the flags of `cls`, those of its base `own` under the headings that they stand under there."""
    parser = Parser(prog="train_grpo.py", allow_abbrev=False, add_help=complete, description=description)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own takes -1e-3 for a flag
    add = parser.add_argument
    add("--preset", nargs="+", action="extend", default=[], metavar="NAME",
        help="presets (configs/NAME.toml or a path), applied from left to right")
    add("--resume", metavar="RUN", default="", help="go on with runs/NAME from its newest whole checkpoint")
    add("--resume-override", action="store_true", help="let --resume change flags or data that make it another run")
    add("--overwrite", action="store_true", help="replace an existing run folder of this name")
    add("--list-presets", action="store_true", help="print the presets, each with its header")
    add("--print-config", action="store_true", help="print the resolved values and where each came from")
    add("--dry-run", action="store_true", help="load everything, do one tiny step in a temporary folder, stop")
    types, notes, groups, group_of = field_types(cls), comments(cls), {}, sections(own)
    for field in dataclasses.fields(cls):
        flag, kind = flag_of(field.name), types[field.name]
        keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            keywords["choices"] = typing.get_args(kind)
        elif typing.get_origin(kind) is tuple:
            keywords |= {"action": "extend", "nargs": "+", "metavar": "VALUE"}
        else:
            keywords |= {"type": kind, "metavar": kind.__name__.upper()}
        default, title = field.default if field.default != "" else "none", group_of.get(field.name, OWN)
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        group.add_argument(flag, help=f"{notes.get(field.name, '')} [{default}]".replace("%", "%%"), **keywords)
    return parser


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
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise UserError(f"{where}: {key} = {value!r}{nearest(str(value), typing.get_args(kind))} must be one of "
                            f"{', '.join(typing.get_args(kind))}")
        return value
    if typing.get_origin(kind) is tuple:
        if not (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
            raise UserError(f"{where}: {key} = {value!r} must be a list of strings")
        return tuple(value)
    right = (int, float) if kind is float else kind
    if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where}: {key} = {value!r} must be {'a number' if kind is float else kind.__name__}")
    return kind(value)


def layer(values: dict[str, Any], types: dict[str, Any], task: str, where: str) -> dict[str, Any]:
    """A preset's values, checked. A table named after the run's task adds to them; other tasks' do not count, nor do
    those named after an overlay, see `preset_layers`."""
    flat = {k: v for k, v in values.items() if not isinstance(v, dict)}
    for table, content in values.items():
        if isinstance(content, dict):
            if table not in TASKS and not (ROOT / "configs" / f"{table}.toml").is_file():
                raise UserError(f"{where}: unknown table [{table}]{nearest(table, TASKS)}")
            for key, value in content.items() if table == task else ():
                # a table within, as [tools.reward], is the option tools_reward: a list of NAME=VALUE
                flat |= {f"{table}_{key}": [f"{k}={v}" for k, v in value.items()]} if isinstance(value, dict) else {
                    key: value}
    for key in flat:
        if key not in types:
            raise UserError(f"{where}: unknown key {key}{nearest(key, types)}")
    return {k: check_type(k, v, types[k], where) for k, v in flat.items()}


def preset_layers(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """(where from, values) of each preset, from left to right. A table [smoke] in a preset holds what it is to be under
    the overlay `smoke`: it counts where that comes later, and right after it."""
    layers: list[tuple[str, dict[str, Any]]] = []
    for name in names:
        before = list(layers)
        layers.append((f"preset {name}", read_preset(name)))
        layers += [(f"{where} [{name}]", values[name]) for where, values in before
                   if isinstance(values.get(name), dict) and name not in TASKS]
    return layers


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def changed_flags(args, base: dict) -> list[str]:
    """The flags whose values differ from those of a run's config."""
    return [key for key in base if json.dumps(getattr(args, key)) != json.dumps(base[key])]


def print_config(args, sources: dict[str, str]) -> int:
    for key, value in dataclasses.asdict(args).items():
        print(f"{key} = {value!r}  # {sources[key]}")
    return 0


def list_presets() -> int:
    for path in sorted((ROOT / "configs").glob("*.toml")):
        header = list(itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
        print(path.stem, *(line.lstrip("# ") for line in header), sep="\n    ")
    return 0


def args_class(core: type, task: str) -> type:
    """The flags `core` joined with the flags of a task."""
    options = load_task(task).Options
    if not dataclasses.is_dataclass(options):
        raise UserError(f"--task {task}: its Options must be a dataclass, @dataclasses.dataclass(frozen=True)")
    clash = {f.name for f in dataclasses.fields(options)} & {f.name for f in dataclasses.fields(core)}
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
    base = read_run_config(Path(first.resume))["args"] if first.resume else base or {}
    layers = preset_layers(first.preset)
    layers += [("the run's config.json", base)] if base else []
    given = vars(first)
    task = given.get("task")
    for where, values in reversed(layers):
        task = task or check_type("task", values.get("task", ""), str, where)
    reward = given.get("reward") or any(values.get("reward") for _, values in layers)
    task = task or ("custom" if reward else core.task)
    if reward and not issubclass(load_task(task), load_task("custom")):
        raise UserError(f"--reward is for --task custom, not for --task {task}; use --task custom")
    cls = args_class(core, task)
    types, command = field_types(cls), build_parser(cls, core, description).parse_args(argv)
    values, sources = {"task": task}, {f.name: "default" for f in dataclasses.fields(cls)}
    sources["task"] = "implied by --reward" if reward else "default"
    for where, content in layers:
        checked = layer(content, types, task, where)
        values |= checked
        sources |= dict.fromkeys(checked, where)
    flags = {k: v for k, v in vars(command).items() if k in types}
    values |= {k: tuple(v) if isinstance(v, list) else v for k, v in flags.items()}
    sources |= dict.fromkeys(flags, "flag")
    args = cls(**values)
    check_ranges(core, args, sources)
    args.check(sources)
    if first.resume:
        check_resume(args, base, command)
    return args, sources, command


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
