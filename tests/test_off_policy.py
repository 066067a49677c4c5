"""Older rollouts in the loss, the beta control and behaviour cloning, against numbers worked out by hand."""

import json
import math

import pytest
import torch
from conftest import hand_rollout
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Row
from tasks.off_policy import (
    age_of,
    cloning_coefficient,
    control_beta,
    decouple,
    moved,
    new_control,
    old_logps,
    token_ages,
)


def t(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def of_version(*versions, mask=None):
    row = hand_rollout([3], [4] * len(versions), mask=mask)
    row.version = list(versions)
    return row


# ---- age
def test_the_age_is_that_of_the_oldest_sampled_token():
    assert age_of(of_version(4, 4), 7) == 3
    assert age_of(of_version(7, -1, 5, mask=[1, 0, 1]), 7) == 2
    assert age_of(of_version(7, 7), 7) == 0
    assert age_of(of_version(-1, -1), 7) == 0  # other weights wrote it: nothing is known
    assert token_ages([of_version(7, -1, 5, mask=[1, 0, 1]), of_version(6)], 7, torch.float64, "cpu").tolist() == [
        [0, 0, 2], [1, 0, 0]]


def test_a_row_without_old_log_probabilities_starts_from_the_current_ones():
    new = t([-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]).requires_grad_(True)
    rows = [Row(of_version(1, 1, 1), 0.0), Row(of_version(0, 0), 0.0, old=t([-7.0, -8.0])[0])]
    old = old_logps(rows, new)
    assert old.tolist() == [[-1.0, -2.0, -3.0], [-7.0, -8.0, 0.0]] and not old.requires_grad


# ---- decoupled PPO
def test_the_proximal_policy_lies_between_behaviour_and_current_by_version():
    """alpha is (age - 1) / age, 0 for what is fresh: 0, 0, 1/2, 2/3, 3/4 for ages 0 to 4."""
    new, old = t([-1.0] * 5), t([-2.2] * 5)
    proximal, weight = decouple(new, old, t([0, 1, 2, 3, 4]), 100.0, 0.0)
    assert proximal[0].tolist() == pytest.approx([-2.2, -2.2, -1.6, -1.4, -1.3])
    assert weight[0].tolist() == pytest.approx([1.0, 1.0, math.exp(0.6), math.exp(0.8), math.exp(0.9)])


def test_the_behaviour_weight_is_capped_from_above_only():
    _, weight = decouple(t([-1.0, -3.0]), t([-2.2, -1.0]), t([2, 2]), 1.5, 0.0)
    assert weight[0].tolist() == pytest.approx([1.5, math.exp(-1.0)])  # exp(0.6) = 1.82 is over the cap


def test_tokens_whose_squared_log_gap_is_over_the_threshold_are_masked():
    new, old = t([-1.0, -1.0, -1.0, -1.0]), t([-1.1, -1.3, -0.8, -1.0])  # squares 0.01, 0.09, 0.04, 0
    _, weight = decouple(new, old, t([1, 1, 1, 1]), 1.5, 0.05)
    assert weight[0].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert decouple(new, old, t([1, 1, 1, 1]), 1.5, 0.0)[1][0].tolist() == [1.0] * 4


def test_neither_the_proximal_policy_nor_the_weight_has_a_gradient():
    new = t([-1.0, -2.0]).requires_grad_(True)
    proximal, weight = decouple(new, t([-2.0, -2.5]), t([3, 2]), 1.5, 0.0)
    assert not proximal.requires_grad and not weight.requires_grad


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.integers(0, 9)), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_the_proximal_log_probability_is_never_outside_the_two(tokens):
    new, old, age = (torch.tensor([values], dtype=torch.float64) for values in zip(*tokens, strict=True))
    proximal, weight = decouple(new, old, age, 1.5, 0.0)
    low, high = torch.minimum(new, old) - 1e-9, torch.maximum(new, old) + 1e-9
    assert ((proximal >= low) & (proximal <= high)).all() and (weight <= 1.5).all() and (weight > 0).all()


# ---- beta control
def test_what_the_control_watches():
    new, old, ref, mask = t([-1.0, -2.0, -9.0]), t([-1.5, -1.8, -1.0]), t([-0.5, -2.0, -1.0]), t([1, 1, 0])
    sums = moved(new, old, ref, mask)
    assert float(sums["watch_gap"]) == pytest.approx(0.7)
    assert float(sums["watch_kl_old"]) == pytest.approx(-0.5 + 0.2)
    assert float(sums["watch_kl_ref"]) == pytest.approx(math.exp(0.5) - 0.5 - 1)
    assert "watch_kl_ref" not in moved(new, old, None, mask)
    assert float(moved(t([-50.0]), t([-1.0]), t([0.0]), t([1]))["watch_kl_ref"]) == pytest.approx(math.exp(20) - 21)


def run_control(values, beta=0.04):
    state, betas = new_control(beta), []
    for value in values:
        state = json.loads(json.dumps(control_beta(state, value, 0.06, 0.01, 0.08)))
        betas.append(state["beta"])
    return betas, state


def test_beta_moves_after_every_fourth_update_and_only_outside_the_band():
    betas, state = run_control([0.5] * 8)
    assert betas == pytest.approx([0.04] * 3 + [0.04 * 1.12] * 4 + [0.04 * 1.12**2])
    assert state["updates"] == 8 and state["average"] == pytest.approx(0.5)
    assert run_control([0.0] * 4)[0][-1] == pytest.approx(0.04 / 1.12)
    assert run_control([0.06 * 1.24] * 4)[0][-1] == 0.04 and run_control([0.06 * 1.26] * 4)[0][-1] > 0.04
    assert run_control([0.06 * 0.81] * 4)[0][-1] == 0.04 and run_control([0.06 * 0.79] * 4)[0][-1] < 0.04


def test_the_watched_quantity_is_averaged():
    _, state = run_control([0.10, 0.20, 0.00])
    assert state["average"] == pytest.approx(0.9 * (0.9 * 0.10 + 0.1 * 0.20) + 0.1 * 0.00)


def test_beta_stays_within_its_bounds():
    assert run_control([9.0] * 100)[0][-1] == 0.08 and run_control([-9.0] * 100)[0][-1] == 0.01


# ---- behaviour cloning
def test_the_coefficient_is_held_and_then_decays():
    points = {1: 0.16, 1200: 0.16, 3200: 0.095, 5200: 0.03, 9999: 0.03}
    for step, value in points.items():
        assert cloning_coefficient(step, 0.16, 0.03, 1200, 4000) == pytest.approx(value)
    assert cloning_coefficient(3, 0.16, 0.03, 2, 0) == 0.03
