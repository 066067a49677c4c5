"""What the judging models share: loader, batches by a token budget, padding on the right."""

import pytest
import torch
import transformers
from conftest import random_model, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from data import UserError
from models.judging import TokenBudget, load_judge, pad_right

CPU = torch.device("cpu")
causal = transformers.AutoModelForCausalLM.from_pretrained


# ---- loading
def test_a_judge_is_frozen_and_in_evaluation_mode(tmp_path):
    random_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_judge("--judge", str(tmp_path), causal, CPU, torch.bfloat16)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert tokenizer.encode("w3 w4") == word_tokenizer().encode("w3 w4")


@pytest.mark.parametrize("lacks", ["everything", "model", "tokenizer"])
def test_what_cannot_be_loaded_is_one_sentence(tmp_path, lacks):
    if lacks == "model":
        word_tokenizer().save_pretrained(tmp_path)
    if lacks == "tokenizer":
        random_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--judge /.* cannot be loaded: \w+: .*; or none$") as raised:
        load_judge("--judge", str(tmp_path), causal, CPU, torch.float32, advice="; or none")
    assert len(str(raised.value).splitlines()) == 1


def test_the_loaders_own_sentence_is_kept(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)

    def refuses(path, **keywords):
        raise UserError("no judge")

    with pytest.raises(UserError, match="^no judge$"):
        load_judge("--judge", str(tmp_path), refuses, CPU, torch.float32)


# ---- batches
@settings(max_examples=50)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_batches_hold_every_row_once_within_the_budget(lengths, budget):
    found = list(TokenBudget(budget).batches(lengths))
    assert sorted(i for some in found for i in some) == list(range(len(lengths)))
    assert all(len(some) == 1 or len(some) * max(lengths[i] for i in some) <= budget for some in found)
    assert [lengths[i] for some in found for i in some] == sorted(lengths, reverse=True)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_results_come_in_the_rows_order_from_the_same_batches(lengths, budget):
    seen = []

    def judge(batch):
        seen.append(batch)
        return [(i, lengths[i]) for i in batch]

    assert TokenBudget(budget).map(lengths, judge) == list(enumerate(lengths))
    assert seen == list(TokenBudget(budget).batches(lengths))


def test_out_of_memory_halves_the_budget_for_good_and_a_single_row_raises():
    batches = []

    def judge(batch):
        batches.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("full")
        return [i * i for i in batch]

    budget = TokenBudget(100)
    assert budget.map([10] * 12, judge) == [i * i for i in range(12)]
    assert batches == [10, 5, 2, 2, 2, 2, 2, 2] and budget.budget == 20
    batches.clear()
    budget.map([10] * 4, judge)
    assert batches == [2, 2]

    def never(batch):
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        budget.map([10] * 4, never)


# ---- padding
@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(1, 90), max_size=9), min_size=1, max_size=5).filter(any), st.integers(0, 90))
def test_padding_fills_on_the_right_and_the_mask_tells_it(rows, filler):
    ids, mask = pad_right(rows, filler)
    assert ids.dtype == mask.dtype == torch.long and ids.shape == mask.shape == (len(rows), max(map(len, rows)))
    for row, padded, kept in zip(rows, ids.tolist(), mask.tolist(), strict=True):
        assert padded == row + [filler] * (len(padded) - len(row))
        assert kept == [1] * len(row) + [0] * (len(padded) - len(row))


def test_a_padded_batch_gives_what_one_row_at_a_time_gives():
    model, rows = random_model(), [[3, 4, 5, 6, 7], [8, 9], [10]]
    ids, mask = pad_right(rows, 0)
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).logits
        for row, logits in zip(rows, together, strict=True):
            alone = model(input_ids=torch.tensor([row])).logits[0]
            torch.testing.assert_close(logits[: len(row)], alone, atol=1e-5, rtol=1e-5)
