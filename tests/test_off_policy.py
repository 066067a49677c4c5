"""Older rollouts in the loss, the beta control and behaviour cloning, against numbers worked out by hand."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import bigram_policy, hand_rollout, make_args, new_state, read_csv, scored
from hypothesis import given, settings
from hypothesis import strategies as st
from test_harness_folder import same_log
from test_loss import MASKS, NEW, REF, SAMPLER, groups_of, log_p
from test_tasks_contract import core_args
from test_tools_task import model

import models.policy
import train_grpo
from data import Prompt, Rollout
from engine.logps import TrainRow
from models.optimizer import Optimizer
from models.supervised import worked_examples
from models.tiny import tiny_tokenizer
from tasks.tools.calculator import calculate
from tasks.tools.calls import parse_tool_calls
from tasks.tools.task import ToolTask
from train_grpo import (
    BetaControl,
    age_of,
    beta_control_sums,
    cloning_coefficient,
    cloning_loss,
    cloning_rows,
    decouple,
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
    rows = [TrainRow(of_version(1, 1, 1), 0.0), TrainRow(of_version(0, 0), 0.0, old=t([-7.0, -8.0])[0])]
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
    sums = beta_control_sums(new, old, ref, mask)
    assert float(sums["watch_gap"]) == pytest.approx(0.7)
    assert float(sums["watch_kl_old"]) == pytest.approx(-0.5 + 0.2)
    assert float(sums["watch_kl_ref"]) == pytest.approx(math.exp(0.5) - 0.5 - 1)
    assert "watch_kl_ref" not in beta_control_sums(new, old, None, mask)
    far = beta_control_sums(t([-50.0]), t([-1.0]), t([0.0]), t([1]))
    assert float(far["watch_kl_ref"]) == pytest.approx(math.exp(20) - 21)


def run_control(values, beta=0.04):
    control, betas = BetaControl(beta), []
    for value in values:
        control = control.after(value, 0.06, 0.01, 0.08)
        betas.append(control.beta)
        assert BetaControl(**json.loads(json.dumps(dataclasses.asdict(control)))) == control  # as a checkpoint has it
    return betas, control


def test_beta_moves_after_every_fourth_update_and_only_outside_the_band():
    betas, control = run_control([0.5] * 8)
    assert betas == pytest.approx([0.04] * 3 + [0.04 * 1.12] * 4 + [0.04 * 1.12**2])
    assert control.updates == 8 and control.average == pytest.approx(0.5)
    assert run_control([0.0] * 4)[0][-1] == pytest.approx(0.04 / 1.12)
    assert run_control([0.06 * 1.24] * 4)[0][-1] == 0.04 and run_control([0.06 * 1.26] * 4)[0][-1] > 0.04
    assert run_control([0.06 * 0.81] * 4)[0][-1] == 0.04 and run_control([0.06 * 0.79] * 4)[0][-1] < 0.04


def test_the_watched_quantity_is_averaged():
    _, control = run_control([0.10, 0.20, 0.00])
    assert control.average == pytest.approx(0.9 * (0.9 * 0.10 + 0.1 * 0.20) + 0.1 * 0.00)


def test_beta_stays_within_its_bounds():
    assert run_control([9.0] * 100)[0][-1] == 0.08 and run_control([-9.0] * 100)[0][-1] == 0.01


# ---- behaviour cloning
def test_the_coefficient_is_held_and_then_decays():
    points = {1: 0.16, 1200: 0.16, 3200: 0.095, 5200: 0.03, 9999: 0.03}
    for step, value in points.items():
        assert cloning_coefficient(step, 0.16, 0.03, 1200, 4000) == pytest.approx(value)
    assert cloning_coefficient(3, 0.16, 0.03, 2, 0) == 0.03


def short_tools(*flags):
    """A policy around a random model that speaks with the tools task, in short questions."""
    task = ToolTask(core_args("tools", limit=40, tool_questions="short", tools_instruction="", max_turns=3))
    texts = [prompt.messages[-1]["content"] for prompt in task.train] + ["user assistant tool"]
    tokenizer = tiny_tokenizer(texts)
    args = make_args("--task", "tools", "--max-turns", "3", "--max-new", "200", *flags)
    hf = model(len(tokenizer))
    return models.policy.Policy(args, task, hf, hf, tokenizer, hf.device), task


def asking(task, *expressions, gold=None, allowed=None):
    text = "Compute " + " and ".join(expressions)
    names = ["calculate_math"] if allowed is None else allowed
    meta = {"tools": [], "allowed": names, "expressions": list(expressions)}
    return Prompt([{"role": "user", "content": text}], gold or [str(task_value(e)) for e in expressions], meta)


def task_value(expression):
    value = calculate(expression)
    return int(value) if value == int(value) else value


def test_the_right_turns_are_canonical_calls_and_then_the_answer():
    _, task = short_tools()
    prompt = asking(task, "1+2", "3*4")
    row = Rollout(prompt, [], [], [], [], [], "stop", [])
    calls = task.worked_turn(row)
    assert [(c["arguments"]["expression"], c["canonical"]) for c in parse_tool_calls(calls)] == [
        ("1+2", True), ("3*4", True)]
    row.turns = [{"role": "assistant", "content": calls}]
    row.turns += task.reply(row)
    assert task.worked_turn(row) == "<answer>3, 12</answer>"
    row.turns.append({"role": "assistant", "content": "<answer>3, 12</answer>"})
    assert task.worked_turn(row) is None
    assert task.score([row])[0].flags["correct"] and task.score([row])[0].flags["canonical"] == 1


@pytest.mark.parametrize("gold, answer", [(["3.0", "12"], "3.0, 12"), (["15"], "3, 12")])
def test_the_answer_has_the_gold_values_where_their_count_agrees_else_the_tools(gold, answer):
    policy, task = short_tools()
    found = worked_examples(policy, asking(task, "1+2", "3*4", gold=gold), 2)
    assert found[1].turns[-1]["content"] == f"<answer>{answer}</answer>"


@pytest.mark.parametrize("expressions, allowed", [((), None), (("1+2",), []), (("1/0",), None), (("9**9**9",), None)])
def test_what_cannot_be_worked_is_not_imitated(expressions, allowed):
    policy, task = short_tools()
    prompt = asking(task, *expressions, gold=["1"], allowed=allowed)
    assert worked_examples(policy, prompt, 2) == []


def test_examples_have_the_ids_of_a_rollout_and_one_target_each():
    policy, task = short_tools()
    prompt = asking(task, "1+2", "3*4")
    calls, answer = worked_examples(policy, prompt, 2)
    targets = [policy.tokenizer.decode([t for t, m in zip(row.ids[row.prompt_length :], row.mask, strict=True) if m])
               for row in (calls, answer)]
    assert targets == [calls.turns[0]["content"] + "<|im_end|>", "<answer>3, 12</answer><|im_end|>"]
    whole = policy.tokenizer.apply_chat_template(prompt.messages + answer.turns, tokenize=False)
    assert policy.tokenizer.decode(answer.ids) == whole.rstrip("\n")
    assert answer.ids[: len(calls.ids)] == calls.ids
    assert len(worked_examples(policy, prompt, 1)) == 1


def test_the_cross_entropy_is_a_mean_over_targets_then_examples():
    policy, task = short_tools("--bc-coef", "0.16", "--bc-hold", "2", "--bc-decay", "0")
    prompts = [asking(task, "1+2", "3*4"), asking(task, "7-5")]
    rows = cloning_rows(policy, prompts, policy.args)
    assert len(rows) == 4
    expected = []
    for row in rows:
        ids, mask = row.rollout.ids, [0] * row.rollout.prompt_length + row.rollout.mask
        logp = policy.hf(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        terms = [-float(logp[i - 1, ids[i]]) for i in range(len(ids)) if mask[i]]
        expected.append(sum(terms) / len(terms))
    for batch_size in (1, 4):
        parts = [cloning_loss(policy, rows[i : i + batch_size]).detach() for i in range(0, 4, batch_size)]
        assert float(sum(parts)) == pytest.approx(sum(expected) / 4, rel=1e-5)


# ---- in the update
AGES = [0, 1, 2, 4]  # of the four rows, at version 5
ADVANTAGES = [0.7, -1.2, 1.5, -0.4]


def aged_groups():
    groups = groups_of()
    rows = [r for g in groups for r in g.rollouts]
    for row, age in zip(rows, AGES, strict=True):
        row.version = [5 - age if m else -1 for m in row.mask]
    groups[0].advantages, groups[1].advantages = ADVANTAGES[:2], ADVANTAGES[2:]
    return groups


def aged_loss(args, table):
    """The policy loss by hand; what stands under a stop-gradient is taken at NEW."""
    tokens, total = sum(map(sum, MASKS)), 0.0
    for i, (age, a) in enumerate(zip(AGES, ADVANTAGES, strict=True)):
        now, still, wrote = log_p(table, i), log_p(NEW, i), log_p(SAMPLER, i)
        weight = 0.65**age * (1 / tokens if args.loss == "dapo" else 1 / (4 * sum(MASKS[i])))
        for t in (t for t in range(len(now)) if MASKS[i][t]):
            start, trust = (wrote[t] if age else still[t]), 1.0
            if args.decoupled_ppo and age:
                gap = still[t] - wrote[t]
                start = wrote[t] + (age - 1) / age * gap
                trust = min(math.exp(start - wrote[t]), args.behaviour_cap)
                trust *= not args.m2_threshold or gap * gap <= args.m2_threshold
            r = math.exp(now[t] - start)
            total -= weight * trust * min(r * a, min(max(r, 0.8), 1.2) * a)
    return total


@pytest.mark.parametrize("flags", ["", "--decoupled-ppo", "--decoupled-ppo --m2-threshold 0.15 --loss dapo",
                                   "--decoupled-ppo --behaviour-cap 1.05", "--loss dapo"])
def test_the_loss_and_gradient_of_older_rows_by_hand(flags):
    policy = bigram_policy(NEW, "--beta", "0", *flags.split())
    policy.version, args = 5, policy.args
    rows = train_grpo.rows_to_train(aged_groups(), args, policy.version)
    train_grpo.fill_ref_and_old_logps(policy, [rows], args, 1.0, 10**9)
    sums = train_grpo.gradients(policy, Optimizer(policy.model, args), rows, args, args.beta, 1.0, 30)
    assert sums["loss"] == pytest.approx(aged_loss(args, NEW), abs=1e-6)
    gradient = policy.model.table.grad
    for i, j in ((3, 4), (5, 1), (4, 4), (4, 2)):
        up, down = ([list(row) for row in NEW] for _ in range(2))
        up[i][j], down[i][j] = NEW[i][j] + 1e-5, NEW[i][j] - 1e-5
        slope = (aged_loss(args, tuple(map(tuple, up))) - aged_loss(args, tuple(map(tuple, down)))) / 2e-5
        assert float(gradient[i, j]) == pytest.approx(slope, abs=1e-6)
    assert float(gradient.abs().max()) > 1e-3


def test_an_update_that_moves_too_far_is_left_out_and_counted_and_beta_goes_on():
    for target, stopped in ((0.001, 1), (10.0, 0)):
        policy = bigram_policy(NEW, "--beta", "0.04", "--beta-control", "gap", "--beta-target", str(target),
                               reference=REF)
        policy.version, args = 5, policy.args
        state = new_state(args, beta_control=BetaControl(args.beta, updates=3))
        before = policy.model.table.detach().clone()
        row = train_grpo.update(policy, Optimizer(policy.model, args), aged_groups(), args, 6, state, print)
        assert torch.equal(policy.model.table, before) == bool(stopped)
        assert (row["hard_stops"], row["skipped_updates"], row["beta"]) == (stopped, 0, 0.04)
        assert row["watched"] == pytest.approx(state.beta_control.average) and row["watched"] > 0.008
        assert state.beta_control.beta == pytest.approx(0.04 * (1.12 if stopped else 1 / 1.12))
        assert state.bad_in_a_row == 0


def test_cloning_trains_also_where_every_group_is_constant():
    policy, task = short_tools("--bc-coef", "0.5", "--beta", "0")
    prompt = asking(task, "1+2", "3*4")
    group = scored([hand_rollout(policy.encode(prompt), [5, 6], prompt=prompt) for _ in range(2)], [1.0, 1.0])
    args = policy.args
    train_grpo.set_advantages([group], args, None)
    optimizer = Optimizer(policy.model, args)
    rows = [train_grpo.update(policy, optimizer, [group], args, n, new_state(args), print) for n in (1, 2, 3, 4)]
    assert rows[-1]["bc_loss"] < rows[0]["bc_loss"] and rows[0]["loss"] == pytest.approx(0.5 * rows[0]["bc_loss"])
    assert rows[0]["bc_coef"] == 0.5 and rows[0]["grad_norm"] > 0


def test_a_resume_goes_on_with_the_beta_that_was_reached(words, command, tmp_path):
    flags = [*words.flags, "--eval-every", "3", "--skip-initial-eval", "--adapter", "lora", "--beta", "0.04",
             "--beta-control", "kl_ref", "--inner-epochs", "2", "--steps", "6", "--save-every", "3", "--out", tmp_path]
    assert command(*flags, "--name", "whole").code == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_6")
    assert command("--resume", tmp_path / "cut").code == 0
    same_log(tmp_path / "whole", tmp_path / "cut")
    rows, states = read_csv(tmp_path / "cut"), []
    for name in ("whole", "cut"):
        states.append(json.loads((tmp_path / name / "checkpoints" / "step_6" / "state.json").read_text()))
    assert states[0]["beta_control"] == states[1]["beta_control"] and states[0]["beta_control"]["updates"] == 12
    assert [float(row["beta"]) * 1.12 ** (i // 2) for i, row in enumerate(rows)] == pytest.approx([0.04] * 6, rel=1e-5)
    assert all(row["watched"] and row["hard_stops"] == "0" for row in rows)
