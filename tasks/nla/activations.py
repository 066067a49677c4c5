"""Activations and the text they come from: the files of task `nla`, and how they are read.

`python -m tasks.nla prepare` makes them (tasks/nla/prepare.py).

A parquet file has a row an activation: `prompt` (chat messages, the user's holds <INJECT>), `activation_vector` (d
floats), `doc_id`, and, where known, `text` (what an explanation may say), `source` (the document) and `quirk` (what
was planted in it, for a judge). The sidecar beside it, nla_meta.yaml or .json (or FILE.parquet.nla_meta.yaml), says
what the numbers are; its keys are those of `Meta`.
Layer K is the residual stream after decoder layer K, the first being 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from data import BadRecords, UserError, seed_of

HELD_SHARE = 0.1  # of the documents, held out from training and from both warm starts
PLACEHOLDER = "<INJECT>"
SLOT = "{explanation}"
OPTIONAL_COLUMNS = ("text", "source", "quirk")
BATCH_BYTES = 1 << 20  # of vectors decoded at once by the reader, which takes several times that


# ------------------------------------------------------------------------------------------------ the sidecar
@dataclasses.dataclass(frozen=True)
class Meta:
    """What a file of activations says about itself.

    model, layer, d   the model, the decoder layer after which the residual stream was read (0 is the first), its width
    marker, marker_id the character that stands where a vector is injected, and its token
    left_id, right_id the tokens beside it in every prompt
    scale             the norm that predictions and targets are scaled to before they are compared
    template          the reconstructor's prompt; {explanation} stands for the text. Its last token is read
    suffix_ids        the tokens of the template after {explanation}
    final_norm        whether the reconstructor keeps the model's final norm
    """

    model: str
    layer: int
    d: int
    marker: str
    marker_id: int
    left_id: int
    right_id: int
    scale: float
    template: str
    suffix_ids: tuple[int, ...] = ()
    final_norm: bool = False


# Each field's place in a sidecar: ours, then those of published NLA data sets (nla_meta.yaml with nested tables).
KEYS = {
    "model": ("model", "base_model", "extraction.base_model", "extraction.model"),
    "layer": ("layer", "extraction_layer_index", "layer_index", "extraction.layer_index"),
    "d": ("d", "d_model", "extraction.d_model"),
    "marker": ("marker", "tokens.injection_char"),
    "marker_id": ("marker_id", "tokens.injection_token_id"),
    "left_id": ("left_id", "tokens.injection_left_neighbor_id"),
    "right_id": ("right_id", "tokens.injection_right_neighbor_id"),
    "scale": ("scale", "extraction.mse_scale"),
    "template": ("template", "prompt_templates.ar", "prompt_templates.critic"),
    "suffix_ids": ("suffix_ids", "tokens.critic_suffix_ids"),
    "final_norm": ("final_norm", "extraction.final_norm"),
}
OPTIONAL = ("suffix_ids", "final_norm")


def sidecar_of(path: str | Path) -> Path:
    """The sidecar of a parquet file or a folder; a sidecar's own path is itself. UserError where there is none."""
    path = Path(path)
    endings = ("yaml", "yml", "json")
    shared = [f"nla_meta.{ending}" for ending in endings]
    if path.suffix in (".yaml", ".yml", ".json"):
        places = [path]
    elif path.is_dir():
        places = [path / name for name in shared]
    else:
        own = [f"{path.name}.nla_meta.{ending}" for ending in endings]
        places = [path.parent / name for name in own + shared]
    for place in places:
        if place.is_file():
            return place
    raise UserError(f"{path} has no sidecar: none of {', '.join(p.name for p in places)} is beside it; make the file "
                    "and its sidecar with `python -m tasks.nla prepare`")


def read_meta(path: str | Path, tokenizer) -> Meta:
    """The sidecar of `path`, checked against the live tokenizer and, where there is one, the first row's prompt.

    UserError for a missing key, a wrong type, an unknown scale, a truncated template, and where the marker or its
    neighbours have other token ids now.
    """
    place = sidecar_of(path)
    meta = parse_meta(load_mapping(place), place)
    check_template(meta, tokenizer, place)
    ids = tokenizer.encode(meta.marker, add_special_tokens=False)
    if ids[-1:] != [meta.marker_id] or tokenizer.decode(ids[:-1]).strip():  # some tokenizers put a space before it
        raise UserError(f"{place}: the marker {meta.marker!r} is token {meta.marker_id} there and {ids} for this "
                        "model's tokenizer; make the file with this model")
    parquet = data_file(path, must=False)
    rows = [] if parquet is None else list(read_rows(parquet, 1, meta))
    for first in rows:
        left, right = neighbours(tokenizer, first.prompt, meta.marker_id, str(place))
        if (left, right) != (meta.left_id, meta.right_id):
            raise UserError(f"{place}: the marker stands between tokens {meta.left_id} and {meta.right_id} there, and "
                            f"between {left} and {right} for this tokenizer and chat template; make the file with this "
                            "model")
    return meta


def load_mapping(place: Path) -> dict:
    """A YAML or JSON file's mapping. UserError where it is not one."""
    import yaml

    try:
        text = place.read_text(encoding="utf-8-sig")
        raw = json.loads(text) if place.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{place} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{place} must hold a mapping of names to values")
    return raw


def parse_meta(raw: dict, place: str | Path) -> Meta:
    """The fields of a sidecar, by type and range. UserError names the first that cannot be used."""
    found: dict[str, Any] = {}
    for name, keys in KEYS.items():
        values = [value_at(raw, key) for key in keys]
        known = [value for value in values if value is not None]
        if known:
            found[name] = known[0]
        elif name not in OPTIONAL:
            raise UserError(f"{place} lacks {name} (or {keys[1]})")
    for name in ("layer", "d", "marker_id", "left_id", "right_id"):
        value = found[name]
        least = 1 if name == "d" else 0
        if type(value) is not int or value < least:
            raise UserError(f"{place}: {name} is {value!r}, it must be a whole number from {least}")
    for name in ("model", "marker", "template"):
        value = found[name]
        if not isinstance(value, str) or not value:
            raise UserError(f"{place}: {name} is {value!r}, it must be text")
    found["scale"] = parse_scale(found["scale"], found["d"], place)
    suffix = found.get("suffix_ids", ())
    if not isinstance(suffix, list | tuple) or any(type(i) is not int for i in suffix):
        raise UserError(f"{place}: suffix_ids is {suffix!r}, it must be a list of token ids")
    if not isinstance(found.get("final_norm", False), bool):
        raise UserError(f"{place}: final_norm is {found['final_norm']!r}, it must be true or false")
    return Meta(**found | {"suffix_ids": tuple(suffix)})


def value_at(raw: dict, key: str) -> Any:
    """What stands in nested mappings at a key with dots; None where nothing does."""
    value: Any = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def parse_scale(raw: Any, d: int, place: str | Path) -> float:
    """The target norm: a number over 0, or `sqrt_d` (published: sqrt_d_model)."""
    if raw in ("sqrt_d", "sqrt_d_model"):
        return math.sqrt(d)
    try:
        scale = math.nan if isinstance(raw, bool) else float(raw)  # YAML reads 1e2 as text
    except (TypeError, ValueError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise UserError(f"{place}: scale is {raw!r}, it must be a number over 0 or sqrt_d")
    return scale


def check_template(meta: Meta, tokenizer, place: Path) -> None:
    """Refuses a template that was cut off: the state of its last token would be another one than at training."""
    head, found, tail = meta.template.partition(SLOT)
    if not found or SLOT in tail:
        raise UserError(f"{place}: the template must hold {SLOT} once (is it truncated?): {meta.template[-60:]!r}")
    if not tail.strip():
        raise UserError(f"{place}: the template ends with {SLOT} (is it truncated?); the token that is read must "
                        "follow the explanation")
    unclosed = [tag for tag in re.findall(r"<(\w+)>", head) if f"</{tag}>" not in tail]
    if tail.count("<") != tail.count(">"):
        unclosed.append("…")
    if unclosed:
        raise UserError(f"{place}: the template is truncated, <{unclosed[0]}> is not closed: {meta.template[-60:]!r}")
    now = tuple(suffix_of(tokenizer, meta.template))
    if meta.suffix_ids and now[-len(meta.suffix_ids):] != meta.suffix_ids:
        raise UserError(f"{place}: the template ends in tokens {list(now)} for this tokenizer, not in "
                        f"{list(meta.suffix_ids)} (is it truncated, or from another tokenizer?)")


def suffix_of(tokenizer, template: str) -> list[int]:
    """The token ids of what follows {explanation} in a template."""
    return tokenizer.encode(template.partition(SLOT)[2], add_special_tokens=False)


def neighbours(tokenizer, messages: list[dict], marker_id: int, where: str = "the prompt") -> tuple[int, int]:
    """The token ids left and right of the marker in a rendered prompt. UserError unless it is there exactly once."""
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template; take an instruct model or give --chat-template FILE")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    count = ids.count(marker_id)
    at = ids.index(marker_id) if count else 0
    if count != 1 or not 0 < at < len(ids) - 1:
        raise UserError(f"{where}: the marker's token {marker_id} is {count} times in the rendered prompt; it must be "
                        "there once, with a token on either side")
    return ids[at - 1], ids[at + 1]


# ------------------------------------------------------------------------------------------------ the reader
@dataclasses.dataclass(frozen=True, eq=False)
class ActivationRow:
    """One activation: `prompt` has the marker where the file has <INJECT>; `vector` is (d,) float32."""

    prompt: list[dict]
    vector: np.ndarray
    doc_id: str
    text: str | None = None
    source: str | None = None
    quirk: str | None = None


def data_file(path: str | Path, must: bool = True) -> Path | None:
    """The parquet file that `path` means: itself, or the only one in the folder (of a sidecar)."""
    path = Path(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        path = path.parent
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if len(files) == 1 and files[0].is_file():
        return files[0]
    if must:
        raise UserError(f"{path} holds {len(files)} parquet files; name one" if path.is_dir() else
                        f"there is no data file {path}")
    return None


def read_rows(path: str | Path, max_rows: int, meta: Meta, bad: BadRecords | None = None) -> Iterator[ActivationRow]:
    """Yields up to `max_rows` usable rows (0: all), read row group by row group and in batches within one: only the
    columns that are needed, never the whole file. Rows that cannot be used are counted by reason in `bad`.

    UserError where the file or a column is missing, or is no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet

    path, bad = data_file(path), bad or BadRecords(str(path))
    try:
        # A buffered stream: a row group may hold the whole file, and its columns are then not read at once.
        file = pa.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        columns = _columns(file.schema_arrow, path)
        count = max(1, min(1024, BATCH_BYTES // (4 * meta.d), max_rows or 1024))
        given = 0
        at = 0
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(count, row_groups=[group], columns=columns):
                for row in _rows_of(batch, at, meta, bad):
                    yield row
                    given += 1
                    if given == max_rows:
                        return
                at += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def load_rows(path: str | Path, max_rows: int, meta: Meta, max_bad: float) -> tuple[list[ActivationRow], list[str]]:
    """The usable rows of a file and notes on the others; UserError where more than the share `max_bad` is not."""
    bad = BadRecords(str(path))
    rows = list(read_rows(path, max_rows, meta, bad))
    return rows, bad.check(max_bad)


def _columns(schema, path: Path) -> list[str]:
    import pyarrow.types as types

    missing = [name for name in ("prompt", "activation_vector", "doc_id") if name not in schema.names]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}; it has {', '.join(schema.names)}")
    kind = schema.field("activation_vector").type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
        raise UserError(f"{path}: activation_vector is of type {kind}, it must be a list of numbers")
    return [name for name in ("prompt", "activation_vector", "doc_id", *OPTIONAL_COLUMNS) if name in schema.names]


def _rows_of(batch, at: int, meta: Meta, bad: BadRecords) -> Iterator[ActivationRow]:
    """The usable rows of a record batch, whose first row has the number `at` in the file."""
    vectors, edges, missing = _vectors_of(batch.column("activation_vector"))
    others = batch.select([name for name in batch.schema.names if name != "activation_vector"]).to_pylist()
    last: tuple[Any, Any] = (None, None)  # equal prompts are one object
    for i, record in enumerate(others):
        bad.total += 1
        try:
            vector = vectors[edges[i] : edges[i + 1]]
            if len(vector) != meta.d or i in missing:
                raise ValueError(f"activation_vector has not {meta.d} numbers")
            if not np.isfinite(vector).all() or not vector.any():
                raise ValueError("activation_vector is zero or not finite")
            if record["doc_id"] in (None, ""):
                raise ValueError("no doc_id")
            if record["prompt"] != last[0]:
                last = record["prompt"], put_marker(record["prompt"], meta.marker)
            texts = {}
            for name in OPTIONAL_COLUMNS:
                value = record.get(name)
                texts[name] = value if isinstance(value, str) else None
            row = ActivationRow(last[1], vector.copy(), str(record["doc_id"]), **texts)
        except ValueError as reason:
            bad.add(str(reason), f"row {at + i + 1}")
            continue
        yield row


def _vectors_of(column) -> tuple[np.ndarray, np.ndarray, set[int]]:
    """Of a column of lists all numbers in float32, the edges of the rows' shares of them, and the rows without a list.

    Row i has numbers[edges[i] : edges[i + 1]].
    """
    size = len(column)
    if hasattr(column, "offsets"):
        edges = np.from_dlpack(column.offsets)  # to_numpy would import pandas: a second before the first row
    else:  # lists of one size
        edges = (column.offset + np.arange(size + 1)) * column.type.list_size
    flat = column.values
    numbers = flat.to_numpy(zero_copy_only=False) if flat.null_count else np.from_dlpack(flat)
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite and is counted as bad
        numbers = numbers.astype(np.float32)
    missing = {i for i in range(size) if not column[i].is_valid} if column.null_count else set()
    return numbers, edges, missing


def put_marker(messages: Any, marker: str) -> list[dict]:
    """Chat messages with the marker in place of <INJECT>. ValueError(reason) where that cannot be done."""
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise ValueError("prompt is no list of messages with role and content")
    count = sum(message["content"].count(PLACEHOLDER) for message in messages)
    if count != 1:
        raise ValueError("several placeholders in the prompt" if count else "no placeholder in the prompt")
    if any(marker in message["content"] for message in messages):
        raise ValueError("the marker itself is in the prompt")
    out = []
    for message in messages:
        text = message["content"]
        if PLACEHOLDER in text and message["role"] != "user":
            raise ValueError("the placeholder is not in a user message")
        out.append({"role": message["role"], "content": text.replace(PLACEHOLDER, marker)})
    return out


def is_message(m: Any) -> bool:
    """Whether something is a chat message: role and content, both text."""
    return isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)


def split_by_document(rows: list[ActivationRow], held_share: float, seed: int
                      ) -> tuple[list[ActivationRow], list[ActivationRow]]:
    """(training rows, held-out rows): no document has rows in both.

    A document is held out by its own hash and the seed, so that a split of more rows, or of fewer, holds out the same
    ones: what a warm start trained on is never evaluated later. UserError where all rows are of one document.
    """
    ids = sorted({row.doc_id for row in rows}, key=lambda name: seed_of(seed, "held-out document", name))
    if len(ids) < 2:
        raise UserError("all rows are of one document; held-out rows need a document of their own")
    count = sum(seed_of(seed, "held-out document", name) < held_share * 2**63 for name in ids)
    some = min(max(count, 1), len(ids) - 1)
    held = set(ids[:some])
    train = [row for row in rows if row.doc_id not in held]
    return train, [row for row in rows if row.doc_id in held]


def tokenizer_of(model: str):
    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except Exception as error:  # hub, tokenizers: each has its own classes
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model {model}: no tokenizer can be loaded from there ({type(error).__name__}: {reason}); "
                        "task nla takes a folder or a hub id") from error
