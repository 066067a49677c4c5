"""The files of task nla: sidecars against the live tokenizer, the reader, documents, and making a file."""

import copy
import dataclasses
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import transformers
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from data import BadRecords, UserError
from models.tiny import tiny_tokenizer
from tasks.nla import activations as nla_data
from tasks.nla import prepare as nla_prepare
from tasks.nla.__main__ import main as nla_command
from tasks.nla.activations import Meta, load_rows, read_meta, read_rows
from tasks.nla.documents import KIND, Document, documents, randomise_slots
from tasks.nla.injection import decoder_layers
from tasks.nla.prepare import Recipe, prepare

META = Meta("m", 1, 4, "@", 34, 32, 30, 2.0, "<text>{explanation}</text> state:")
MESSAGES = [{"role": "user", "content": "explain <c><INJECT></c>"}]
ROW = {"prompt": MESSAGES, "activation_vector": [1.0, 2.0, 3.0, 4.0], "doc_id": "a"}
SHORT = ROW | {"activation_vector": [1.0]}


@pytest.fixture(scope="module")
def tokenizer():
    docs = documents(100, 0)
    texts = [d.text for d in docs]
    captions = [d.caption for d in docs]
    return tiny_tokenizer([*texts, *captions, *[nla_prepare.PROMPT] * 20])


def tiny_model(kind: str, vocab: int):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=vocab, n_embd=16, n_layer=3, n_head=2, n_positions=128)
    else:
        kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
        shape = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
        }
        config = kinds[kind](vocab_size=vocab, max_position_embeddings=128, **shape)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    """A file and its sidecar, made from generated documents by a random Llama."""
    model = tiny_model("llama", len(tokenizer))
    folder = tmp_path_factory.mktemp("nla")
    prepare(model, tokenizer, 1, documents(12, 0), folder, 0, Recipe(positions=2, batch=5), "base")
    return model, folder


def write(folder, rows, **keywords):
    path = folder / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, **keywords)
    return path


# The sidecar


def test_sidecar_of_prepare_reads_back(made, tokenizer):
    meta = read_meta(made[1], tokenizer)
    assert (meta.model, meta.layer, meta.d, meta.scale) == ("base", 1, 16, 4.0)
    for name in ("activations.parquet", "nla_meta.yaml"):
        assert read_meta(made[1] / name, tokenizer) == meta


def test_published_nested_keys_and_json_are_read(made, tokenizer, tmp_path):
    flat = yaml.safe_load((made[1] / "nla_meta.yaml").read_text())
    suffix = flat["suffix_ids"][-3:]
    nested = {
        "base_model": "base",
        "extraction_layer_index": 1,
        "d_model": 16,
        "tokens": {
            "injection_char": flat["marker"],
            "injection_token_id": flat["marker_id"],
            "injection_left_neighbor_id": flat["left_id"],
            "injection_right_neighbor_id": flat["right_id"],
            "critic_suffix_ids": suffix,
        },
        "extraction": {"mse_scale": "sqrt_d_model"},
        "prompt_templates": {"ar": flat["template"], "av": "x"},
    }
    (tmp_path / "nla_meta.json").write_text(json.dumps(nested))
    own = read_meta(made[1], tokenizer)
    expected = dataclasses.replace(own, suffix_ids=tuple(suffix))
    assert read_meta(tmp_path, tokenizer) == expected


@pytest.mark.parametrize("change, word", [
    ({"marker_id": 35}, "marker"),
    ({"marker": "ab"}, "marker"),
    ({"left_id": 1}, "stands between"),
    ({"right_id": 1}, "stands between"),
    ({"template": "no slot"}, "template"),
    ({"template": "a {explana"}, "truncated"),
    ({"template": "<text>{explanation}"}, "truncated"),
    ({"template": "<text>{explanation} x"}, "truncated"),
    ({"template": "Text about a place in a document: <text>{explanation}</text>\nThe activ"}, "truncated"),
    ({"template": "{explanation} {explanation} x"}, "once"),
    ({"scale": "sqrt"}, "scale"),
    ({"scale": 0}, "scale"),
    ({"scale": True}, "scale"),
    ({"scale": float("nan")}, "scale"),
    ({"scale": [1]}, "scale"),
    ({"d": 16.0}, "d is"),
    ({"d": True}, "d is"),
    ({"layer": -1}, "layer"),
    ({"layer": None}, "lacks layer"),
    ({"model": 3}, "model"),
    ({"suffix_ids": "abc"}, "suffix_ids"),
    ({"final_norm": "yes"}, "final_norm"),
])
def test_a_sidecar_that_does_not_fit_is_refused(made, tokenizer, tmp_path, change, word):
    values = yaml.safe_load((made[1] / "nla_meta.yaml").read_text()) | change
    (tmp_path / "activations.parquet").write_bytes((made[1] / "activations.parquet").read_bytes())
    (tmp_path / "nla_meta.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=word):
        read_meta(tmp_path, tokenizer)


@pytest.mark.parametrize("name, text", [
    ("nla_meta.yaml", "a: [1"),
    ("nla_meta.yaml", "- 1"),
    ("nla_meta.json", "{"),
    ("nla_meta.yaml", "!!python/object/apply:os.system ['true']"),
    ("nla_meta.json", "[" * 100_000),
    ("other.yaml", "model: x"),
])
def test_a_broken_or_missing_sidecar_is_one_sentence(tokenizer, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError):
        read_meta(tmp_path, tokenizer)


def test_scale_is_a_number_or_sqrt_d():
    for raw, scale in (("sqrt_d", 4), ("sqrt_d_model", 4), (3, 3), (2.5, 2.5), ("1e2", 100)):
        assert nla_data.parse_scale(raw, 16, "x") == scale


# The reader


@pytest.mark.parametrize("kind", [
    pa.list_(pa.float32()),
    pa.list_(pa.float64()),
    pa.list_(pa.float16()),
    pa.large_list(pa.float32()),
    pa.list_(pa.float32(), 4),
])
def test_every_list_type_gives_the_same_float32(tmp_path, kind):
    vectors = [[1.0, -2.0, 0.5, 4.0], [0.0, 0.25, 8.0, 1.0], [3.0, 3.0, 3.0, 3.0]]
    column = pa.array(vectors).cast(kind)
    table = pa.table({"prompt": [MESSAGES] * 3, "doc_id": [1, 2, 3], "activation_vector": column})
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(table, path, row_group_size=2)
    rows = list(read_rows(path, 0, META))
    assert [row.vector.tolist() for row in rows] == vectors
    assert {row.vector.dtype for row in rows} == {np.dtype("f4")}
    assert [row.doc_id for row in rows] == ["1", "2", "3"]
    assert rows[0].prompt == [{"role": "user", "content": "explain <c>@</c>"}]


BAD = {  # reason -> values of a row that is refused for it, by column
    "has not 4 numbers": ("activation_vector", [[1.0] * 3, [1.0] * 5, [], None]),
    "zero or not finite": ("activation_vector", [
        [1.0, float("nan"), 1.0, 1.0],
        [1.0, None, 1.0, 1.0],
        [0.0] * 4,
        [1e300, 1.0, 1.0, 1.0],
        [float("-inf"), 1.0, 1.0, 1.0],
    ]),
    "no placeholder": ("prompt", [[{"role": "user", "content": "explain @"}]]),
    "several placeholders": ("prompt", [[{"role": "user", "content": "<INJECT> <INJECT>"}], [*MESSAGES, *MESSAGES]]),
    "the marker itself": ("prompt", [[{"role": "user", "content": "<INJECT> @"}]]),
    "not in a user message": ("prompt", [[{"role": "system", "content": "<INJECT>"}]]),
    "no list of messages": ("prompt", [None, [], [None], [{"role": "user", "content": None}]]),
    "no doc_id": ("doc_id", [None, ""]),
}


def test_bad_rows_are_counted_by_reason_and_their_neighbours_are_intact(tmp_path):
    rows = []
    count = 0
    for column, values in BAD.values():
        for value in values:
            rows.append(ROW | {"activation_vector": [float(count + 1)] * 4, "doc_id": f"d{count}"})
            rows.append(ROW | {column: value})
            count += 1
    bad = BadRecords("rows")
    found = list(read_rows(write(tmp_path, rows, row_group_size=7), 0, META, bad))
    assert len(found) == count
    for k, row in enumerate(found):
        assert row.doc_id == f"d{k}"
        assert row.vector.tolist() == [k + 1.0] * 4
    for part, (_, values) in BAD.items():
        counts = [n for reason, n in bad.reasons.items() if part in reason]
        assert sum(counts) == len(values)
    assert bad.total == 2 * count
    assert bad.first[next(iter(bad.reasons))] == "row 2"


def test_too_many_bad_rows_are_refused_and_few_are_a_note(tmp_path):
    path = write(tmp_path, [ROW] * 99 + [SHORT])
    rows, notes = load_rows(path, 0, META, 0.01)
    assert len(rows) == 99
    assert "has not 4 numbers 1 (first: row 100)" in notes[0]
    with pytest.raises(UserError, match="max-bad-records"):
        load_rows(path, 0, META, 0.001)


def test_max_rows_counts_usable_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path, [SHORT] + [ROW] * 5000, row_group_size=100)
    bad = BadRecords("rows")
    assert len(list(read_rows(path, 3, META, bad))) == 3
    assert bad.total == 4


@pytest.mark.parametrize("row_group", [64, 1_000_000])
def test_memory_does_not_grow_with_the_file(tmp_path, row_group):
    numbers = np.random.default_rng(0).random(2000 * 2048, np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 2048)
    table = pa.table({"prompt": [MESSAGES] * 2000, "doc_id": ["a"] * 2000, "activation_vector": vectors})
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(table, path, row_group_size=row_group, use_dictionary=False)
    del numbers, vectors, table
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = 0
    for count, _ in enumerate(read_rows(path, 0, dataclasses.replace(META, d=2048)), 1):
        if count % 100 == 0:
            arrow = pa.total_allocated_bytes() - before
            most = max(most, arrow + tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert count == 2000
    assert most < 8 * nla_data.BATCH_BYTES < 16 << 20  # the vectors are 16 MB


def test_wrong_columns_and_files_are_one_sentence(tmp_path):
    for row in ({"prompt": "x"}, ROW | {"activation_vector": ["a"]}, ROW | {"activation_vector": 1.0}):
        with pytest.raises(UserError, match="activation_vector"):
            list(read_rows(write(tmp_path, [row]), 0, META))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no parquet PAR1")
    for path in (tmp_path / "rows.parquet", tmp_path / "none.parquet", tmp_path / "other"):
        with pytest.raises(UserError):
            list(read_rows(path, 0, META))


def rows_of(names):
    return [nla_data.ActivationRow([], np.ones(4, np.float32), name) for name in names]


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.integers(0, 30).map(str), min_size=2).filter(lambda names: len(set(names)) > 1),
       st.floats(0, 1), st.integers(0, 9))
def test_no_document_is_on_both_sides_of_the_split(names, share, seed):
    train, held = nla_data.split_by_document(rows_of(names), share, seed)
    assert train and held
    assert len(train) + len(held) == len(names)
    assert not {row.doc_id for row in train} & {row.doc_id for row in held}


def held_of(count: int) -> set[int]:
    """The documents, by number, that a split of `count` rows holds out."""
    _, held = nla_data.split_by_document(rows_of(map(str, range(count))), 0.2, 3)
    return {int(row.doc_id) for row in held}


def test_a_split_of_fewer_rows_holds_out_the_same_documents():
    few, many = (held_of(n) for n in (500, 5000))
    assert few == {number for number in many if number < 500}
    assert 60 < len(few) < 140
    with pytest.raises(UserError, match="one document"):
        nla_data.split_by_document(rows_of(["a", "a"]), 0.5, 0)


# Documents


def test_generated_documents_are_different_and_repeatable():
    docs = documents(200, 4)
    assert len({d.text for d in docs}) == 200
    assert docs == documents(200, 4)
    assert docs != documents(200, 5)
    assert documents(20, 4) == docs[:20]
    assert {d.text.count(".") for d in docs} == {1, 2}  # sentences
    for d in docs:
        for word in d.slots.values():
            assert word.lower() in d.text.lower()
            assert word in d.caption


def test_captions_tell_the_slots_the_last_word_and_what_follows():
    bought = [d for d in documents(50, 0) if d.caption.split()[1] == "bought"]
    doc = bought[0]
    kinds = ("name", "number", "colour", "item", "place")
    name, number, colour, item, place = map(doc.slots.get, kinds)
    head = f"{name} bought {number} {colour} {item} in {place}."
    assert doc.text == f"{head} Now the {colour} {item} from {place} belong to {name}."
    cut = doc.text.index(f" {item} from")
    assert doc.caption_at(cut) == f"after {colour}: item; {name} bought {number} {colour} {item}, {place}"
    assert min(doc.cuts) == len(head) + 4
    assert doc.cuts[len(doc.text) - 1] == "end"


def test_randomised_slots_change_every_content_word_and_nothing_else():
    for i, doc in enumerate(documents(40, 1)):
        text = doc.caption_at(next(iter(doc.cuts)))
        other = randomise_slots(text, i)
        assert other == randomise_slots(text, i)
        for old, new in zip(text.split(), other.split(), strict=True):
            word = old.strip(".,;:")
            swapped = new.strip(".,;:")
            if word in KIND:
                assert swapped != word
                assert KIND[swapped] == KIND[word]
            else:
                assert old == new
    first, second = randomise_slots("Two lamps, two lamps", 3).lower().split(", ")
    assert first == second
    assert randomise_slots("Anna has lamps", 0, share=0.0) == "Anna has lamps"
    assert randomise_slots("the annals of Limas", 0) == "the annals of Limas"


# Making a file


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("layer", [0, 2])
def test_stored_vectors_are_the_layers_residual_whatever_the_batch(tokenizer, kind, layer):
    model = tiny_model(kind, len(tokenizer))
    texts = [tokenizer.encode(d.text) for d in documents(3, 0)]
    windows = [ids[: 9 + i] for i, ids in enumerate(texts)]
    places = [[4, 8], [5], [0, 9]]
    seen = []

    def keep(module, inputs, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    handle = decoder_layers(model)[layer].register_forward_hook(keep)
    for ids in windows:
        model(input_ids=torch.tensor([ids]))
    handle.remove()
    found = nla_prepare.residuals(model, layer, windows, places)
    for vectors, hidden, at in zip(found, seen, places, strict=True):
        np.testing.assert_allclose(vectors, hidden[0, at].detach().numpy(), atol=1e-5)
    if layer < 2:  # of the last layer, transformers gives the state after the final norm
        states = model(input_ids=torch.tensor([windows[0]]), output_hidden_states=True).hidden_states
        expected = states[layer + 1][0, places[0]].detach().numpy()
        np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_a_made_file_holds_the_state_that_its_caption_speaks_of(made, tokenizer):
    model, folder = made
    meta = read_meta(folder, tokenizer)
    rows, notes = load_rows(folder, 0, meta, 0.0)
    docs = {d.doc_id: d for d in documents(12, 0)}
    assert len(rows) == 24
    assert not notes
    for row in rows[:6]:
        doc = docs[row.doc_id]
        differences = []
        for end in doc.cuts:
            if doc.caption_at(end) == row.text:
                ids = tokenizer.encode(doc.text[:end])
                (states,) = nla_prepare.residuals(model, 1, [ids], [[len(ids) - 1]])
                differences.append(np.abs(row.vector - states[0]).max())
        assert min(differences) < 1e-5
        assert row.source == doc.text


def test_long_documents_are_cut_and_text_is_what_stands_around_the_position(tokenizer, tmp_path):
    model = tiny_model("llama", len(tokenizer))
    text = " ".join(d.text for d in documents(20, 0))
    recipe = Recipe(positions=3, context=40, first=4, around=6, batch=2)
    prepare(model, tokenizer, 0, [Document(text), Document("no")], tmp_path, 0, recipe, "m")
    rows, _ = load_rows(tmp_path, 0, read_meta(tmp_path, tokenizer), 0.0)
    assert len(rows) > 30
    assert len({row.doc_id for row in rows}) == 1
    for row in rows:
        assert row.text in row.source
        assert row.source in text
        assert len(row.source) < len(text) / 4
        assert 1 < len(tokenizer.encode(row.text)) <= 15


def test_each_window_begins_with_the_bos_and_no_position_is_on_it(tokenizer):
    bos = transformers.PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer))
    bos.backend_tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)])
    text = documents(1, 0)[0].text
    plain = tokenizer.encode(text)
    windows = list(nla_prepare.cut(Document(text), bos, Recipe(99, 10, 0), 0))
    assert len(windows) > 2
    assert {window.ids[0] for window in windows} == {1}
    assert [i for window in windows for i in window.ids[1:]] == [*plain, 2]
    assert [window.ids[at] for window in windows for at in window.places] == plain
    sources = "".join(window.source for window in windows)
    assert sources.replace(" ", "") == text.replace(" ", "")


def test_a_file_is_the_same_again_and_row_groups_are_bounded(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(nla_prepare, "ROW_GROUP", 5)
    model = tiny_model("llama", len(tokenizer))
    tables = []
    for batch in (1, 4):
        recipe = Recipe(batch=batch, max_rows=11)
        place = tmp_path / f"{batch}" / "a.parquet"
        made = prepare(model, tokenizer, 1, documents(12, 0), place, 7, recipe, "m")
        file = pa.parquet.ParquetFile(made)
        assert file.num_row_groups == 3
        assert file.metadata.num_rows == 11
        assert sorted(path.name for path in place.parent.iterdir()) == ["a.parquet", "a.parquet.nla_meta.yaml"]
        tables.append(file.read().drop_columns(["activation_vector"]))
    assert tables[0] == tables[1]


@pytest.mark.parametrize("layer, recipe, word", [
    (3, {}, "layers 0 to 2"),
    (-1, {}, "layers 0 to 2"),
    (0, {"marker": "lamps chairs"}, "marker"),
    (0, {"prompt": "no place"}, "INJECT"),
    (0, {"template": "cut <text>{explanation}"}, "truncated"),
    (0, {"scale": "much"}, "scale"),
    (0, {"first": 500}, "longer documents"),
])
def test_what_cannot_be_made_is_one_sentence_and_leaves_nothing(tokenizer, tmp_path, layer, recipe, word):
    with pytest.raises(UserError, match=word):
        prepare(tiny_model("llama", len(tokenizer)), tokenizer, layer, documents(3, 0), tmp_path, 0, Recipe(**recipe))
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_a_file_from_a_text_and_from_records(made, tokenizer, tmp_path, capsys):
    made[0].save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    docs = documents(6, 0)
    paragraphs = [d.text.replace(". ", ".\n") for d in docs]
    records = [json.dumps({"body": d.text}) for d in docs] + ['{"body": 1}']
    text = tmp_path / "corpus.txt"
    text.write_text("\n\n\n".join(paragraphs) + "\n")
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("\n".join(records) + "\n")
    shared = ["prepare", "--model", str(tmp_path / "model"), "--layer", "1"]
    nla_command([*shared, "--text", str(text), "--out", str(tmp_path / "a")])
    nla_command([*shared, "--text", str(lines), "--text-field", "body", "--out", str(tmp_path / "b"),
                 "--max-bad-records", "0.5"])
    assert "no text in 'body' 1 (first: line 7)" in capsys.readouterr().out
    for folder in (tmp_path / "a", tmp_path / "b"):
        rows, _ = load_rows(folder, 0, read_meta(folder, tokenizer), 0.0)
        assert len({row.doc_id for row in rows}) == 6
    for wrong in (["--layer", "9"], ["--text", "none.txt"], ["--positions", "0"], ["--model", "nowhere/at/all"]):
        with pytest.raises(SystemExit) as stop:
            nla_command([*shared, "--text", str(text), "--out", str(tmp_path / "c"), *wrong])
        err = capsys.readouterr().err
        assert stop.value.code == 2
        assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("model, text, said", [("tiny", "generated", "--preset nla smoke"),
                                               ("no-model", "missing.jsonl", "no data file missing.jsonl")])
def test_the_command_refuses_what_it_cannot_use_before_it_loads_a_model(model, text, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        nla_command(["prepare", "--model", model, "--layer", "0", "--text", text, "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in err and len(err.splitlines()) == 1
