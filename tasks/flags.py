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

ROOT = Path(__file__).resolve().parent.parent
OWN = "the task's own (those of another: --task NAME --help)"


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
