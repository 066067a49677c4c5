"""Makes the files of task `nla` from any model, a layer and texts: `python -m tasks.nla prepare`.

    python -m tasks.nla prepare --model Qwen/Qwen3-8B --layer 24 --text corpus.txt --out data/nla
    python -m tasks.nla prepare --model DIR --layer 1 --text generated --documents 2000 --out data/toy

The files are described in tasks/nla/activations.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from data import BadRecords, UserError, read_records, rng_of
from harness.files import written_aside
from harness.flags import command_flags
from models.loading import best_device, load_pretrained, load_tokenizer, package_file, pick_dtype
from tasks.nla.activations import (
    PLACEHOLDER,
    SLOT,
    Meta,
    check_template,
    neighbours,
    parse_scale,
    put_marker,
    sidecar_of,
    suffix_of,
)
from tasks.nla.documents import Document, documents
from tasks.nla.injection import decoder_layers

PROMPT = (f"An activation of a language model: <concept>{PLACEHOLDER}</concept>\nSay what the text is about where the "
          "activation was taken and what may come next, between <explanation> and </explanation>.")
TEMPLATE = f"Text about a place in a document: <text>{SLOT}</text>\nThe activation there:"
MARKERS = "㈎㊗※¤§¶†@|~^"  # what `prepare` tries for the marker: rare, and one token in most vocabularies
ROW_GROUP = 512  # rows of a written row group


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How `prepare` cuts and reads documents."""

    positions: int = 1  # positions drawn in each window of a document
    context: int = 512  # longest window of a document, in tokens
    first: int = 4  # no position before this token: the first ones attend to little, and the very first is a sink
    around: int = 32  # tokens on either side of the position that make up `text` where there is no caption
    batch: int = 8  # windows in one forward
    marker: str = ""  # injection character; empty: the first that is one token
    prompt: str = PROMPT  # what the verbalizer is asked; <INJECT> once
    template: str = TEMPLATE  # what the reconstructor reads; {explanation} once
    scale: str = "sqrt_d"  # target norm: a number or sqrt_d
    max_rows: int = 0  # stop after this many rows; 0: all


class _Done(Exception):
    """Ends a forward after the layer that is read."""


@torch.no_grad()
def residuals(model, layer: int, windows: list[list[int]], places: list[list[int]]) -> list[np.ndarray]:
    """For each window of token ids the residual stream after decoder layer `layer` at its places: (places, d) float32.

    One right-padded forward that ends at that layer. The last layer's is read before the final norm.
    """
    width = max(map(len, windows))
    ids = torch.zeros(len(windows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        ids[row, : len(window)] = torch.tensor(window)
        mask[row, : len(window)] = 1
    kept: list[torch.Tensor] = []

    def keep(module, inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        for row, at in enumerate(places):
            kept.append(hidden[row, torch.tensor(at, device=hidden.device)])
        raise _Done

    handle = decoder_layers(model)[layer].register_forward_hook(keep)
    try:
        model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
    except _Done:
        pass
    finally:
        handle.remove()
    return [rows.float().cpu().numpy() for rows in kept]


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of a document: its token ids, positions drawn in it, what an explanation of each may say, its text."""

    ids: list[int]
    places: list[int]
    texts: list[str]
    source: str


def cut(document: Document, tokenizer, recipe: Recipe, seed: int) -> Iterator[Window]:
    """The windows of a document in which a position can be drawn; each begins with the BOS where there is one."""
    encoded = tokenizer(document.text, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    spans = encoded["offset_mapping"]
    has_bos = bool(ids) and spans[0][0] == spans[0][1]  # special tokens stand for no text
    bos = ids[:1] if has_bos else []

    def text_of(first: int, last: int) -> str:
        """The document's text from one token to another, both included."""
        return document.text[spans[first][0] : spans[last][1] or None]

    def allowed(i: int, start: int) -> bool:
        """Whether a position may be drawn at token i of the window that begins at token `start`."""
        begin, end = spans[i]
        if i - start < recipe.first or end <= begin:
            return False
        return end in document.cuts if document.cuts else True

    for number, start in enumerate(range(len(bos), len(ids), recipe.context)):
        last = min(start + recipe.context, len(ids)) - 1
        places = [i for i in range(start, last + 1) if allowed(i, start)]
        rng = rng_of(seed, "position", document.doc_id, number)
        picked = sorted(rng.permutation(places)[: recipe.positions].tolist())
        if not picked:
            continue
        texts = []
        for i in picked:
            if document.cuts:
                texts.append(document.caption_at(spans[i][1]))
            else:
                around = text_of(max(start, i - recipe.around), min(last, i + recipe.around))
                texts.append(around.strip())
        within = [i - start + len(bos) for i in picked]
        yield Window(bos + ids[start : last + 1], within, texts, text_of(start, last))


def prepare(model, tokenizer, layer: int, docs: Iterable[Document], out: str | Path, seed: int,
            recipe: Recipe | None = None, name: str = "", log: Callable[[str], None] = lambda text: None) -> Path:
    """Writes activations.parquet and nla_meta.yaml into the folder `out` (or a .parquet file and its own sidecar).

    Cuts each document into windows, draws positions, and stores the residual after decoder layer `layer` there, in the
    model's own precision. Rows are written as they come, ROW_GROUP at a time. Returns the parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet

    recipe, out = recipe or Recipe(), Path(out)
    meta = new_meta(model, tokenizer, layer, recipe, name)
    path = out if out.suffix == ".parquet" else out / "activations.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = pa.string()
    schema = pa.schema([("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
                        ("activation_vector", pa.list_(pa.float32())), ("doc_id", text), ("text", text),
                        ("source", text)])
    prompt = [{"role": "user", "content": recipe.prompt}]
    written = 0
    with written_aside(path) as part:
        with pa.parquet.ParquetWriter(part, schema, compression="zstd", use_dictionary=False) as file:
            for rows in chunks(_activations(model, tokenizer, layer, docs, seed, recipe), ROW_GROUP):
                file.write_table(pa.Table.from_pylist([{"prompt": prompt, **row} for row in rows], schema))
                written += len(rows)
                log(f"{written} rows")
        if not written:
            raise UserError(f"no document has a token past --first {recipe.first}; give longer documents")
        sidecar = path.with_name("nla_meta.yaml" if path != out else f"{path.name}.nla_meta.yaml")
        sidecar.write_text(dump_meta(meta, recipe.scale), encoding="utf-8")
    return path


def new_meta(model, tokenizer, layer: int, recipe: Recipe, name: str = "") -> Meta:
    """The sidecar's values for a model and its tokenizer. UserError where they cannot be used."""
    count, d = len(decoder_layers(model)), model.config.get_text_config().hidden_size
    if not 0 <= layer < count:
        raise UserError(f"--layer {layer}: the model has layers 0 to {count - 1}")
    if not tokenizer.is_fast:
        raise UserError("prepare needs a fast tokenizer (one that tells where in the text each token stands)")
    if recipe.prompt.count(PLACEHOLDER) != 1:
        raise UserError(f"--prompt must hold {PLACEHOLDER} once")
    tried: list[str] = []
    for marker in [recipe.marker] if recipe.marker else MARKERS:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        try:
            if not ids or ids[-1] == tokenizer.unk_token_id or tokenizer.decode(ids[-1:]).strip() != marker:
                raise UserError(f"{marker!r} is no single token")
            messages = put_marker([{"role": "user", "content": recipe.prompt}], marker)
            left, right = neighbours(tokenizer, messages, ids[-1])
        except (UserError, ValueError) as error:
            tried.append(str(error))
            continue
        meta = Meta(name or model.config._name_or_path, layer, d, marker, ids[-1], left, right,
                    parse_scale(recipe.scale, d, "--scale"), recipe.template,
                    tuple(suffix_of(tokenizer, recipe.template)))
        check_template(meta, tokenizer, Path("--template"))
        return meta
    raise UserError(f"no marker can be used ({tried[0]}); give one with --marker: a rare character that is one token")


def dump_meta(meta: Meta, scale: str | float) -> str:
    """A sidecar as YAML; `scale` as it was given."""
    import yaml

    values = dataclasses.asdict(meta) | {"scale": scale, "suffix_ids": list(meta.suffix_ids)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)


def _activations(model, tokenizer, layer: int, docs: Iterable[Document], seed: int, recipe: Recipe) -> Iterator[dict]:
    model.eval()
    given = 0
    windows = ((document.doc_id, window) for document in docs for window in cut(document, tokenizer, recipe, seed))
    for some in chunks(windows, recipe.batch):
        found = residuals(model, layer, [window.ids for _, window in some], [window.places for _, window in some])
        for (doc_id, window), vectors in zip(some, found, strict=True):
            for text, vector in zip(window.texts, vectors, strict=True):
                if given == recipe.max_rows > 0:
                    return
                given += 1
                yield {"activation_vector": vector, "doc_id": doc_id, "text": text, "source": window.source}


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one of what is left."""
    some: list = []
    for item in items:
        some.append(item)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


# ------------------------------------------------------------------------------------------------ the command
def read_documents(source: str, field: str, bad: BadRecords) -> Iterator[Document]:
    """The documents of a text file (paragraphs between blank lines), or of the records of a file or hub data set."""
    if Path(source).is_file() and Path(source).suffix in (".txt", ".md"):
        lines: list[str] = []
        try:
            with Path(source).open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.strip():
                        lines.append(line)
                    elif lines:
                        yield Document("".join(lines).strip())
                        lines = []
        except OSError as error:
            raise UserError(f"--text {source} cannot be read: {error}") from error
        if lines:
            yield Document("".join(lines).strip())
        return
    for record, where in read_records(source, bad):
        if isinstance(record.get(field), str) and record[field].strip():
            yield Document(record[field].strip())
        else:
            bad.add(f"no text in {field!r}", where)


@dataclasses.dataclass(frozen=True)
class SourceFlags:
    """Flags of the command itself."""

    model: str  # folder, hub id, .gguf file or package:NAME/FILE of a causal LM
    layer: int  # decoder layer whose output is stored; 0 is the first
    text: str  # a .txt (paragraphs), .jsonl, .json or .parquet file, a hub id, or `generated`
    out: str  # folder for activations.parquet and nla_meta.yaml
    text_field: str = "text"  # field of a record that holds its text
    documents: int = 0  # use this many documents; 0: all, of `generated` 2000
    load_4bit: bool = False  # nf4 through bitsandbytes (CUDA)
    chat_template: str = ""  # Jinja file to use instead of the tokenizer's chat template
    trust_remote_code: bool = False  # run Python code that comes with the model
    seed: int = 0  # of the positions and the generator
    max_bad_records: float = 0.01  # share of unusable records that ends the command


@dataclasses.dataclass(frozen=True)
class PrepareFlags(Recipe, SourceFlags):
    """The command's own, then those of the recipe, which it is."""

    def check(self) -> None:
        """UserError for what cannot work, before any model loads."""
        whole = min(self.first, self.around, self.documents, self.max_rows)
        if min(self.positions, self.context, self.batch) < 1 or whole < 0:
            raise UserError("--positions, --context and --batch must be 1 or more; --first, --around, --documents and "
                            "--max-rows 0 or more")
        if self.first >= self.context:
            raise UserError("--first must be under --context")
        if self.model == "tiny":
            raise UserError("--model tiny: the built-in model is made for a task, and task nla makes its activations "
                            "itself (python train_grpo.py --preset nla smoke); give a folder, a hub id, a .gguf file "
                            "or package:NAME/FILE")


def prepare_command(argv: list[str]) -> None:
    """`prepare`: the files of a model, a layer and texts."""
    own = command_flags(PrepareFlags, argv, "python -m tasks.nla prepare", __doc__)
    own.check()
    bad = BadRecords(own.text)
    if own.text == "generated":
        docs: Iterable[Document] = documents(own.documents or 2000, own.seed)
    else:
        every = read_documents(own.text, own.text_field, bad)
        first = list(itertools.islice(every, 1))  # a file that is missing is said before a model is loaded
        docs = itertools.islice(itertools.chain(first, every), own.documents or None)
    device = best_device()
    path = package_file(own.model) if own.model.startswith("package:") else own.model
    tokenizer = load_tokenizer(path, own)
    model = load_pretrained(path, own, device, pick_dtype("auto", device))
    path = prepare(model, tokenizer, own.layer, docs, own.out, own.seed, own, own.model, print)
    if bad.total:
        for note in bad.check(own.max_bad_records):
            print("note:", note)
    print(f"wrote {path} and {sidecar_of(path).name}")
