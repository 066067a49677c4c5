"""Step chains: plain arithmetic, extraction by rules and by a model, scores worked out by hand, calibration."""


import pytest
import torch
from conftest import quick, random_model
from hypothesis import given
from hypothesis import strategies as st

from data import UserError
from models.tiny import tiny_tokenizer
from tasks.math.chains import (
    Calibration,
    Extractor,
    Link,
    arithmetic,
    chain_lccp,
    chain_score,
    dependency,
    evaluate,
    extract,
    integrity,
    link_scores,
    parse_links,
)


@pytest.mark.parametrize("text, expected", [
    ("4+3", 7), ("2*(3+4)-1", 13), ("-2^2", -4), ("2^3^2", 512), ("2**3", 8), ("1,200/4", 300), ("50%*80", 40),
    ("7/2", 3.5), (".5*4", 2), ("-(-3)", 3), ("1/0", None), ("9^9^9^9", None), ("(-8)^.5", None), ("2+", None),
    ("(1", None), ("1 2", None), ("", None), ("x+1", None), ("__import__('os')", None), ("(" * 999, None),
    ("-" * 999 + "1", None), ("1+" * 500 + "1", None)])
def test_evaluate(text, expected):
    assert evaluate(text) == (None if expected is None else pytest.approx(expected))


@given(st.text(alphabet="0123456789+-*/^(). %", max_size=40))
def test_any_text_has_a_finite_value_or_none(text):
    value = evaluate(text)
    assert value is None or abs(value) < float("inf")


@pytest.mark.parametrize("text, links", [
    ("Step 1: 4+3=7\nStep 2: 7-2=5", [Link("4+3", 7), Link("7-2", 5)]),
    ("Step 1: 4+3=7\nStep 2: take the 7 from Step 1: 7-2 = 5.", [Link("4+3", 7), Link("7-2", 5, (0,))]),
    ("He has 4 red pens + 3 pens = 7 pens.", [Link("4   +   3", 7)]),
    ("It costs $1,200 × 2 = $2,400", [Link("1,200 * 2", 2400)]),
    (r"\frac{6}{3} \times 2 = 4", [Link("((6)/(3)) * 2", 4)]),
    ("48/2=<<48/2=24>>24 clips", [Link("48/2", 24)]), ("2*3=6+1=7", [Link("2*3", 6), Link("6+1", 7)]),
    ("50% of 80 = 40", [Link("50%* 80", 40)]), ("x = 5 and y = 7", []), ("no sums", []), ("5 = 5", [])])
def test_rules_read_stated_sums(text, links):
    found = extract(text)
    assert [(x.result, x.uses, evaluate(x.expression)) for x in found] == [
        (x.result, x.uses, evaluate(x.expression)) for x in links]


@pytest.mark.parametrize("text", ["(" * 20_000, "1" * 20_000, "1 " * 10_000, "1 a" * 7000, "1+" * 10_000 + "=2",
                                  "Step 1: " * 3000, "<<" * 10_000, "\\frac{" * 4000, "1" + " " * 20_000, "=1" * 9000])
def test_hostile_texts_are_read_in_little_time(text):
    with quick(2):
        extract(text)


# ---- scores
CHAIN = [Link("4+3", 7), Link("7*2", 14, (0,)), Link("14-1", 12, (1,)), Link("5+1", 6, (0,))]


def test_scores_by_hand():
    assert arithmetic(CHAIN) == 0.75  # 14-1 is not 12
    assert dependency(CHAIN) == pytest.approx(2 / 3)  # 5+1 does not use the 7 that it names
    assert integrity(CHAIN) == pytest.approx(0.6 * 0.75 + 0.4 * 2 / 3)
    assert chain_lccp(CHAIN) == 0.5
    assert chain_score(CHAIN) == pytest.approx((0.3 * integrity(CHAIN) + 0.2 * 0.5) / 0.5)
    assert link_scores(CHAIN) == pytest.approx([0.8, 1.0, 0.4, 0.6])


def test_where_nothing_can_be_said_each_score_is_a_half():
    assert arithmetic([]) == dependency([]) == integrity([]) == chain_lccp([]) == 0.5
    assert dependency([Link("1+1", 2)]) == 0.5


def test_results_hold_within_a_ten_thousandth():
    assert arithmetic([Link("1/3", 0.3333)]) == 1.0 and arithmetic([Link("1/3", 0.333)]) == 0.0


# ---- by a model
def test_replies_are_json_lists_or_nothing():
    reply = 'Sure: [{"expression": "4+3", "result": "7", "uses": []}, {"expression": "7-2", "result": 5, "uses": [1]}]'
    assert parse_links(reply) == [Link("4+3", 7), Link("7-2", 5, (0,))]
    for bad in ("", "[", '[{"result": 1}]', '[{"expression": "1", "result": "nan"}]', "[1]",
                '[{"expression": "1", "result": 1, "uses": [1e999]}]', "[" * 50_000):
        assert parse_links(bad) == []


def test_the_extractor_is_asked_where_rules_find_nothing_and_remembers(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(["List every calculation. Solution: seven"])
    tokenizer.save_pretrained(tmp_path / "model")
    random_model(vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    extractor = Extractor(str(tmp_path / "model"), torch.device("cpu"), torch.float32, tmp_path / "cache")
    asked = []
    monkeypatch.setattr(extractor, "_ask", lambda text: asked.append(text) or '[{"expression": "4+3", "result": 7}]')
    assert extractor("Step 1: 1+1=2") == [Link("1+1", 2)] and not asked
    assert extractor("seven") == extractor("seven") == [Link("4+3", 7)]
    assert asked == ["seven"]
    monkeypatch.undo()
    assert extractor("nothing to read") == []  # a random model's reply is no chain
    with pytest.raises(UserError, match="--extractor-model"):
        Extractor(str(tmp_path / "missing"))


# ---- calibration
def filled(chain_follows: bool, missing: int) -> Calibration:
    calibration = Calibration()
    for i in range(50):
        good = i % 2 == 0
        links = [] if i < missing else [Link("1+1", 2 if good or not chain_follows else 3)] + [Link("2+2", 4 + i % 3)]
        calibration.add(links, 0.9 if good else 0.1)
    return calibration


def test_chains_replace_the_process_model_only_where_they_agree_with_it():
    assert filled(True, 0).active and filled(True, 10).active
    assert not filled(True, 11).active  # extraction under 80 %
    assert not filled(False, 0).active and filled(False, 0).pearson() < 0.7
    early = Calibration()
    for i in range(49):
        early.add([Link("1+1", 2 + i % 2)], 1.0 - i % 2)
    assert not early.active and early.pearson() == pytest.approx(1.0)
    early.add([Link("1+1", 2)], 1.0)
    assert early.active


def test_every_fourth_solution_is_compared_and_the_window_survives_a_resume():
    calibration = filled(True, 11)
    assert [calibration.due() for _ in range(8)] == [False, False, False, True] * 2
    again = Calibration()
    again.load_state_dict(calibration.state_dict())
    assert again.state_dict() == calibration.state_dict() and again.pearson() == calibration.pearson()
