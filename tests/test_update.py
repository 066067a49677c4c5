"""The optimizer step: one gradient for any batching, an exact start, and what happens when something goes wrong."""

import copy
import hashlib
import math

import conftest
import numpy as np
import pytest
import torch
from conftest import (
    bigram_policy,
    grads_of,
    hand_rollout,
    make_args,
    make_policy,
    new_state,
    scored,
    with_flags,
)

import engine.logps
import train_grpo
from data import Prompt, TrainingFailed
from engine.logps import micro_batches, token_logps
from models.optimizer import Optimizer

PROMPTS = [Prompt("w5"), Prompt("w3 w4 w5 w6 w7 w8 w9 w10 w11 w12"), Prompt("w9 w9 w4")]
UNEQUAL = [([5], [3, 4, 1]), ([5], [6] * 7), ([3, 4, 5, 6, 7, 8], [9, 1]), ([3, 4, 5, 6, 7, 8], [3, 3, 9, 4, 7])]
RIGHT = [([5, 6], [3, 4, 1]), ([5, 6], [6] * 7), ([7, 8], [9, 1]), ([7, 8], [3, 3, 9, 4, 7])]
LEFT = [([5], [3, 4, 1]), ([5], [6, 7, 8]), ([3, 4, 5, 6, 7, 8], [9, 9, 1]), ([3, 4, 5, 6, 7, 8], [3, 9, 4])]
EQUAL = [([5, 6], [3, 4, 1]), ([5, 6], [6, 7, 8]), ([7, 8], [9, 9, 1]), ([7, 8], [3, 9, 4])]
SHAPES = {"both": UNEQUAL, "right": RIGHT, "left": LEFT, "none": EQUAL}
LOSSES = ["--loss grpo", "--loss dapo", "--loss dr_grpo"]


@pytest.fixture(autouse=True, params=["generate", "fast"])
def each_engine(request, monkeypatch):
    """Every test of this file holds for both engines, but for those marked plain."""
    if "plain" in request.keywords and request.param == "fast":
        pytest.skip("about the plain path only")
    monkeypatch.setattr(conftest, "ENGINE", request.param)


def batch_of(shape=UNEQUAL, rewards=((0.0, 1.0), (2.0, -1.0)), stops=("stop",) * 4):
    rows = [hand_rollout(*ids, stop=stop, logp=[-2.0] * len(ids[1])) for ids, stop in zip(shape, stops, strict=True)]
    return [scored(rows[:2], rewards[0]), scored(rows[2:], rewards[1])]


def policy_of(*flags, reference=False, kind="llama", dtype=torch.float64, **values):
    policy = make_policy(*flags, kind=kind, dtype=dtype, **values)
    if reference:
        policy.reference = copy.deepcopy(policy.model).requires_grad_(False)
    return policy


def gradient(policy, groups, budget, order=None, old=None):
    """(loss, gradients by name) of one optimizer step over the groups; `old`, `ref`: log-probabilities of before."""
    args = policy.args
    train_grpo.set_advantages(groups, args, None)
    rows = train_grpo.rows_to_train(groups, args)
    rows = [rows[i] for i in order] if order is not None else rows
    for row in rows:
        torch.manual_seed(sum(row.rollout.ids))  # a row's own numbers, whatever the order
        n = len(row.rollout.mask)
        row.old = -3 + 0.3 * torch.randn(n, dtype=torch.float64) if old else None
        row.ref = -3 + 0.3 * torch.randn(n, dtype=torch.float64) if args.beta else None
    sums = train_grpo.gradients(policy, Optimizer(policy.model, args), rows, args, args.beta, 1.0, budget)
    return sums["loss"], grads_of(policy.model)


def assert_same(first, second, tolerance=1e-6):
    assert first[0] == pytest.approx(second[0], rel=1e-9)
    norm = math.sqrt(sum(float(g.square().sum()) for g in first[1].values()))
    assert norm > 1e-3 and first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert (value - second[1][name]).abs().max() <= tolerance * max(1.0, norm), name


# ---- one gradient
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_same_for_every_micro_batch_budget_order_and_padding(shape, loss):
    policy = policy_of("--beta", "0.1", "--entropy-coef", "0.05", *loss.split())
    whole = gradient(policy, batch_of(SHAPES[shape]), 10**6, old=True)
    sizes = set()
    for budget in (1, 12, 18, 30, 10**6):
        for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
            groups = batch_of(SHAPES[shape])
            assert_same(whole, gradient(policy, groups, budget, order, old=True))
        train_grpo.set_advantages(groups, policy.args, None)
        sizes |= {max(map(len, micro_batches(train_grpo.rows_to_train(groups, policy.args), budget, False)))}
    assert {1, 2, 4} <= sizes


@pytest.mark.parametrize("flags", ["--ratio sequence", "--ratio sequence_sum", "--cispo", "--off-policy truncate",
                                   "--top-entropy 0.5", "--overlong mask"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_the_gradient_is_the_same_for_every_budget_with_every_variant(flags, kind):
    policy = policy_of("--beta", "0.1", *flags.split(), kind=kind)
    stops = ("stop", "stop", "stop", "length")
    found = [gradient(policy, batch_of(stops=stops), budget, old=True) for budget in (1, 30, 10**6)]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_the_gradient_norm_and_loss_are_those_of_four_single_rows_in_single_precision():
    for loss in LOSSES:
        policy = policy_of(*loss.split(), dtype=torch.float32)
        one, four = gradient(policy, batch_of(), 10**6), gradient(policy, batch_of(), 1)
        norms = [math.sqrt(sum(float(g.square().sum()) for g in grads.values())) for _, grads in (one, four)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5) and one[0] == pytest.approx(four[0], abs=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_samples_gradient_does_not_depend_on_its_neighbours(kind):
    policy = policy_of("--loss", "dr_grpo", "--scale-rewards", "none", kind=kind)
    groups = batch_of()
    train_grpo.set_advantages(groups, policy.args, None)
    rows = train_grpo.rows_to_train(groups, policy.args)
    optimizer = Optimizer(policy.model, policy.args)
    for neighbours in ([0, 1], [0, 2], [0, 1, 2, 3]):
        for row in rows[1:]:
            row.advantage = 0.0  # only the first row's loss is left
        train_grpo.gradients(policy, optimizer, [rows[i] for i in neighbours], policy.args, 0.0, 1.0, 10**6)
        together = 0.0, grads_of(policy.model)
        train_grpo.gradients(policy, optimizer, rows[:1], policy.args, policy.args.beta, 1.0, 10**6)
        assert_same((0.0, grads_of(policy.model)), together, 1e-12)


def test_changing_one_row_changes_only_its_own_logps():
    policy = policy_of(kind="gpt2")
    before = engine.logps.TrainRow(hand_rollout([5], [3, 4]), 0.0)
    for other in ([9, 9, 9, 9, 9, 9, 9], [3]):
        after = engine.logps.TrainRow(hand_rollout([7, 7, 7], other), 0.0)
        logp, _ = token_logps(policy, policy.hf, [before, after], 1.0)
        alone, _ = token_logps(policy, policy.hf, [before], 1.0)
        assert torch.allclose(logp[0, :2], alone[0], atol=1e-12)


def test_gradient_checkpointing_gives_the_same_gradient_and_leaves_eval_mode():
    plain, saving = policy_of(), policy_of("--gradient-checkpointing")
    saving.hf.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(gradient(plain, batch_of(), 30), gradient(saving, batch_of(), 30), 1e-12)
    assert not saving.model.training


# ---- constant groups, masked rows
def run_update(policy, groups, step=1, optimizer=None, state=None):
    optimizer = optimizer or Optimizer(policy.model, policy.args)
    state = new_state(policy.args) if state is None else state
    for row in (row for group in groups for row in group.rollouts):
        row.version = [policy.version] * len(row.version)  # its own rollouts: none is stale
    train_grpo.set_advantages(groups, policy.args, None)
    return train_grpo.update(policy, optimizer, groups, policy.args, step, state, print)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_weights(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_without_beta_a_constant_group_costs_no_forward_and_moves_nothing():
    policy = bigram_policy(np.eye(8).tolist())
    before = policy.model.table.detach().clone()
    row = run_update(policy, batch_of(rewards=((1.0, 1.0), (0.5, 0.5))))
    assert policy.model.calls == [] and torch.equal(policy.model.table, before)
    assert row["loss"] is None and row["grad_norm"] is None and row["skipped_updates"] == 0


def test_a_constant_group_next_to_a_live_one_is_not_forwarded():
    policy = bigram_policy(np.eye(10).tolist(), "--beta", "0.1", reference=np.eye(10).tolist())
    run_update(policy, batch_of(rewards=((1.0, 1.0), (0.5, 0.7))))
    assert sum(shape[0] for shape in policy.model.calls) == 2
    assert sum(shape[0] for shape in policy.reference.calls) == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_leaving_constant_groups_out_changes_nothing_without_beta(loss):
    groups = ((1.0, 1.0), (0.5, 0.7))
    out = gradient(policy_of(*loss.split()), batch_of(rewards=groups), 10**6)
    kept = gradient(policy_of("--kl-on-constant-groups", *loss.split()), batch_of(rewards=groups), 10**6)
    assert_same(out, kept, 1e-15)


@pytest.mark.parametrize("flag, moves", [([], False), (["--kl-on-constant-groups"], True)])
def test_a_constant_group_has_a_kl_gradient_only_where_it_is_asked_for(flag, moves):
    policy = bigram_policy(np.eye(10).tolist(), "--beta", "0.1", "--loss", "dapo", *flag,
                           reference=np.zeros((10, 10)).tolist())
    before = policy.model.table.detach().clone()
    row = run_update(policy, batch_of(rewards=((1.0, 1.0), (0.5, 0.5))))
    assert torch.equal(policy.model.table, before) != moves and (row["kl"] is not None) == moves
    if moves:
        assert row["policy_loss"] == 0 and row["loss"] == pytest.approx(0.1 * row["kl"]) and row["kl"] > 0


def test_an_auxiliary_group_is_trained_without_kl():
    def gradient_at(beta, auxiliary):
        policy = policy_of("--overlong", "keep", "--beta", str(beta), reference=True)
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.05)  # away from the reference: the KL has a gradient
        groups = batch_of()
        for group in groups:
            group.auxiliary = auxiliary
        return gradient(policy, groups, 999)[1]

    plain, held = gradient_at(0.0, False), gradient_at(0.5, False)
    apart = gradient_at(0.5, True)
    assert any((plain[name] - held[name]).abs().max() > 1e-6 for name in plain)
    assert all(torch.allclose(plain[name], apart[name], atol=1e-12) for name in plain)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_whose_rows_are_all_masked_makes_no_update(loss):
    policy = bigram_policy(np.eye(10).tolist(), "--overlong", "mask", *loss.split())
    before = policy.model.table.detach().clone()
    row = run_update(policy, batch_of(stops=("length",) * 4))
    assert torch.equal(policy.model.table, before) and policy.model.calls == [] and row["loss"] is None


def test_a_row_without_a_completion_is_left_out():
    policy = bigram_policy(np.eye(10).tolist())
    groups = [scored([hand_rollout([3], []), hand_rollout([3], [4])], [0.0, 1.0])]
    assert run_update(policy, groups)["loss"] is not None and policy.model.calls == [(1, 2)]


# ---- several updates a batch
@pytest.mark.parametrize("epochs, parts", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_inner_epochs_and_minibatches_count_the_optimizer_steps(epochs, parts):
    policy = bigram_policy(np.eye(10).tolist(), "--inner-epochs", str(epochs), "--minibatches", str(parts))
    optimizer = Optimizer(policy.model, policy.args)
    rates = []
    step = optimizer.inner.step
    optimizer.inner.step = lambda: (rates.append(optimizer.inner.param_groups[0]["lr"]), step())
    run_update(policy, batch_of(), optimizer=optimizer, step=2)
    assert len(rates) == epochs * parts and set(rates) == {train_grpo.lr_at(2, policy.args)}
    assert policy.version == 2


def test_every_epoch_deals_whole_groups_once_in_an_order_of_its_own():
    args = make_args("--minibatches", "3", "--inner-epochs", "4")
    groups = list(range(8))
    epochs = [[train_grpo.minibatch(groups, args, 1, epoch, part) for part in range(3)] for epoch in range(4)]
    for parts in epochs:
        assert sorted(sum(parts, [])) == groups and sorted(map(len, parts)) == [2, 3, 3]
    assert len({str(parts) for parts in epochs}) == 4
    assert train_grpo.minibatch(groups, args, 1, 0, 0) == epochs[0][0]


def recorded(policy, groups, monkeypatch):
    """(old, ref, ratio) of every row in each optimizer step."""
    seen, inner = [], train_grpo.gradients

    def spy(policy, optimizer, rows, *rest):
        seen.append([(row.rollout, row.old, row.ref) for row in rows])
        return inner(policy, optimizer, rows, *rest)

    monkeypatch.setattr(train_grpo, "gradients", spy)
    result = run_update(policy, groups)
    return seen, result


def test_old_logps_are_those_from_before_the_first_update_in_all_epochs(monkeypatch):
    policy = policy_of("--inner-epochs", "3", "--minibatches", "2", "--lr", "0.01", "--beta", "0.1", reference=True)
    groups = batch_of()
    before = {id(r): token_logps(policy, policy.hf, [engine.logps.TrainRow(r, 0.0)], 1.0)[0][0].detach()
              for g in groups for r in g.rollouts}
    seen, _ = recorded(policy, groups, monkeypatch)
    assert len(seen) == 6
    for rows in seen:
        for rollout, old, ref in rows:
            assert torch.allclose(old, before[id(rollout)], atol=1e-10)
            assert torch.allclose(ref, before[id(rollout)], atol=1e-10)


def test_one_update_a_batch_spends_no_forward_on_old_logps():
    policy = bigram_policy(np.eye(10).tolist())
    run_update(policy, batch_of())
    assert len(policy.model.calls) == 1
    policy = bigram_policy(np.eye(10).tolist(), "--inner-epochs", "2")
    run_update(policy, batch_of())
    assert len(policy.model.calls) == 3  # old, and two updates
    policy = bigram_policy(np.eye(10).tolist(), "--inner-epochs", "2", "--old-logp", "sampler")
    run_update(policy, batch_of())
    assert len(policy.model.calls) == 2


def test_the_samplers_own_logps_serve_as_old_ones(monkeypatch):
    policy = policy_of("--inner-epochs", "2", "--old-logp", "sampler")
    seen, _ = recorded(policy, batch_of(), monkeypatch)
    assert all(old.tolist() == rollout.logp for rows in seen for rollout, old, _ in rows)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sampler_and_update_agree_on_the_logps_of_a_rollout(kind, temperature):
    policy = policy_of("--temperature", str(temperature), kind=kind, dtype=torch.float32)
    rolled = policy.sample(PROMPTS, 4, temperature, 1)
    groups = [scored(rows, [0.0, 1.0, 0.5, 0.2]) for rows in rolled]
    for group in groups:
        for row in group.rollouts:
            row.stop = "stop"
    assert run_update(policy, groups)["logp_gap"] < 1e-5


def test_the_reference_is_taken_at_the_sampling_temperature():
    policy = policy_of("--temperature", "0.6", "--beta", "0.1", reference=True)
    assert run_update(policy, batch_of())["kl"] == 0.0


# ---- the start: ratio exactly 1, KL exactly 0
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("flags", ["", "--inner-epochs 2 --lr 0", "--gradient-checkpointing --inner-epochs 2 --lr 0"])
def test_full_fine_tuning_starts_with_ratio_one_and_kl_zero(kind, flags):
    policy = policy_of("--beta", "0.1", *flags.split(), reference=True, kind=kind, dtype=torch.float32)
    if policy.args.gradient_checkpointing:
        policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    row = run_update(policy, batch_of())
    assert (row["ratio_mean"], row["ratio_max"], row["kl"]) == (1.0, 1.0, 0.0)
    assert row["clip_low_share"] == row["clip_high_share"] == 0


def digest(model):
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(tensor.double().numpy().tobytes())
    return state.hexdigest()


def test_updates_never_change_the_reference_and_the_kl_then_grows():
    policy = policy_of("--beta", "0.1", "--lr", "0.01", "--warmup-steps", "0", reference=True, dtype=torch.float32)
    optimizer, before = Optimizer(policy.model, policy.args), digest(policy.reference)
    kls = [run_update(policy, batch_of(), step, optimizer)["kl"] for step in (1, 2, 3)]
    assert digest(policy.reference) == before != digest(policy.model)
    assert kls[0] == 0 < kls[1] < kls[2]


def test_the_offloaded_reference_gives_the_same_kl():
    policy = policy_of("--beta", "0.1", "--ref-offload", reference=True)
    assert run_update(policy, batch_of())["kl"] == 0.0 and next(policy.reference.parameters()).device.type == "cpu"


# ---- clipping, weight decay, direction
def test_the_step_raises_the_probability_of_the_better_completion():
    policy = policy_of("--lr", "0.001", "--warmup-steps", "0")
    groups = batch_of()
    rows = [engine.logps.TrainRow(r, 0.0) for g in groups for r in g.rollouts]
    before = [token_logps(policy, policy.hf, [row], 1.0)[0].sum().item() for row in rows]
    run_update(policy, groups)
    after = [token_logps(policy, policy.hf, [row], 1.0)[0].sum().item() for row in rows]
    assert after[1] - after[0] > before[1] - before[0] and after[2] - after[3] > before[2] - before[3]


@pytest.mark.parametrize("limit", [0.001, 0.0, 1e6])
def test_clipping_scales_the_gradient_to_the_limit_and_reports_the_norm_before(limit):
    policy = policy_of("--max-grad-norm", str(limit))
    _, grads = gradient(policy, batch_of(), 10**6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    optimizer = Optimizer(policy.model, policy.args)
    gradient(policy, batch_of(), 10**6)
    assert optimizer.clip(limit) == pytest.approx(norm)
    clipped = math.sqrt(sum(float(g.square().sum()) for g in grads_of(policy.model).values()))
    assert clipped == pytest.approx(limit if 0 < limit < norm else norm, rel=1e-4)


def test_weight_decay_is_decoupled_and_on_matrices_only():
    policy = policy_of("--weight-decay", "0.5", dtype=torch.float32, kind="gpt2")
    optimizer, before = Optimizer(policy.model, policy.args), weights_of(policy.model)
    for _, master in optimizer.pairs:
        master.grad = torch.zeros_like(master)
    optimizer.step(0.1)
    for name, p in policy.model.named_parameters():
        factor = 0.95 if p.ndim >= 2 else 1.0
        assert torch.allclose(p, before[name] * factor, atol=1e-7), name


def test_one_adamw_step_by_hand():
    policy = bigram_policy([[1.0, -2.0], [0.5, 3.0]], "--adam-beta1", "0.8", "--adam-beta2", "0.9")
    optimizer = Optimizer(policy.model, policy.args)
    m = v = 0.0
    x = 1.0
    for t, g in enumerate((0.3, -0.7, 0.2), 1):
        policy.model.table.grad = torch.full((2, 2), g, dtype=torch.float64)
        optimizer.step(0.01)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x -= 0.01 * (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-8)
        assert policy.model.table[0, 0].item() == pytest.approx(x, abs=1e-12)


# ---- bfloat16 weights
def constant_gradient(optimizer, parameters, steps, rate):
    for _ in range(steps):
        for p in parameters:
            (p * torch.ones_like(p)).sum().backward()
        optimizer.step(rate)
        optimizer.zero()


@pytest.mark.parametrize("rate", [1e-6, 5e-6])
def test_bfloat16_weights_move_at_small_learning_rates_through_their_masters(rate):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    torch.nn.init.normal_(model.weight, std=0.02)
    start = model.weight.detach().clone()
    naive = torch.nn.Parameter(start.clone())
    optimizer = Optimizer(model, make_args("--lr", str(rate)))
    constant_gradient(optimizer, [model.weight], 100, rate)
    assert model.weight.dtype == torch.bfloat16 and (model.weight != start).float().mean() > 0.5
    expected = start.float() - 100 * rate  # Adam's step of a constant gradient is the learning rate
    assert torch.allclose(optimizer.pairs[0][1].detach(), expected, atol=rate)

    control = torch.optim.AdamW([naive], lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(100):
        naive.grad = torch.ones_like(naive)
        control.step()
    assert (naive != start).float().mean() < 0.25


def test_bfloat16_gradients_are_summed_in_float32():
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model, make_args())
    for scale in (1.0, *[2.0**-10] * 64):  # in bfloat16 the small ones would be lost
        (model.weight * scale).sum().backward()
    assert model.weight.grad is None
    assert torch.equal(optimizer.pairs[0][1].grad, torch.full((4, 4), 1 + 64 * 2.0**-10))


def test_a_bfloat16_update_runs_and_the_weights_are_the_rounded_masters():
    policy = policy_of("--lr", "0.001", "--warmup-steps", "0", "--beta", "0.1", reference=True, dtype=torch.bfloat16)
    optimizer = Optimizer(policy.model, policy.args)
    row = run_update(policy, batch_of(), optimizer=optimizer)
    assert row["ratio_max"] == 1.0 and row["kl"] == 0.0 and row["grad_norm"] > 0
    for parameter, master in optimizer.pairs:
        assert master.dtype == torch.float32 and torch.equal(parameter, master.bfloat16())


def test_the_masters_survive_a_save_and_load():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = Optimizer(model, make_args())
    constant_gradient(optimizer, list(model.parameters()), 3, 1e-5)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model = copy.deepcopy(model)
    other = Optimizer(other_model, make_args())
    other.load_state_dict(saved)
    for one, two in ((optimizer, model), (other, other_model)):
        constant_gradient(one, list(two.parameters()), 3, 1e-5)
    for (p, m), (q, n) in zip(optimizer.pairs, other.pairs, strict=True):
        assert torch.equal(p, q) and torch.equal(m, n)


# ---- gradients that are not finite
class Poison:
    """Writes a value into one gradient element at chosen calls of the task's hook."""

    def __init__(self, policy, values):
        self.values, self.calls = values, 0
        policy.task.on_gradients = self

    def __call__(self, policy):
        value = self.values.get(self.calls)
        self.calls += 1
        if value is not None:
            next(p for p in policy.model.parameters() if p.grad is not None).grad.view(-1)[0] = value
        return {}


def moments(optimizer):
    state = optimizer.inner.state_dict()["state"]
    return {(i, k): v.clone() for i, s in state.items() for k, v in s.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(value):
    policy = policy_of("--lr", "0.01", dtype=torch.float32)
    optimizer, state = Optimizer(policy.model, policy.args), new_state(policy.args)
    Poison(policy, {1: value})
    assert run_update(policy, batch_of(), 1, optimizer, state)["skipped_updates"] == 0
    weights, adam = weights_of(policy.model), moments(optimizer)
    row = run_update(policy, batch_of(), 2, optimizer, state)
    assert (row["skipped_updates"], row["loss"], row["grad_norm"], state.bad_in_a_row) == (1, None, None, 1)
    assert same_weights(weights, weights_of(policy.model)) and same_weights(adam, moments(optimizer))
    row = run_update(policy, batch_of(), 3, optimizer, state)
    assert row["skipped_updates"] == state.bad_in_a_row == 0 and math.isfinite(row["grad_norm"])
    assert not same_weights(weights, weights_of(policy.model))
    assert all(value.isfinite().all() for value in weights_of(policy.model).values())


def test_the_step_after_a_bad_one_is_as_if_it_had_not_been():
    results = []
    for poison in ({1: math.nan}, {}):
        policy = policy_of("--lr", "0.01", dtype=torch.float32)
        optimizer, state = Optimizer(policy.model, policy.args), new_state(policy.args)
        Poison(policy, poison)
        for step in (1, 2, 3) if poison else (1, 3):
            run_update(policy, batch_of(), step, optimizer, state)
        results.append(weights_of(policy.model))
    assert same_weights(*results)


def test_bfloat16_masters_are_guarded_too():
    policy = policy_of("--lr", "0.01", dtype=torch.bfloat16)
    optimizer, state = Optimizer(policy.model, policy.args), new_state(policy.args)
    run_update(policy, batch_of(), 1, optimizer, state)
    policy.task.on_gradients = lambda _: optimizer.pairs[0][1].grad.view(-1)[:1].fill_(math.nan) is None or {}
    before = [(p.clone(), m.clone()) for p, m in optimizer.pairs]
    assert run_update(policy, batch_of(), 2, optimizer, state)["skipped_updates"] == 1
    assert all(torch.equal(p, q) and torch.equal(m, n)
               for (p, m), (q, n) in zip(optimizer.pairs, before, strict=True))


def test_bad_gradients_in_a_row_end_the_training_and_a_good_one_starts_the_count_anew():
    policy = policy_of("--max-bad-steps", "3", dtype=torch.float32)
    optimizer, state = Optimizer(policy.model, policy.args), new_state(policy.args)
    Poison(policy, dict.fromkeys((0, 1, 3, 4, 5), math.nan))
    for step in range(1, 6):
        run_update(policy, batch_of(), step, optimizer, state)
    assert state.bad_in_a_row == 2
    weights = weights_of(policy.model)
    with pytest.raises(TrainingFailed, match="3 gradients in a row"):
        run_update(policy, batch_of(), 6, optimizer, state)
    assert same_weights(weights, weights_of(policy.model))


# ---- out of memory
def failing(monkeypatch, fail, error=torch.OutOfMemoryError):
    """micro_loss that runs out of memory where `fail(number of the call, rows)` says so, after a forward."""
    inner, calls = train_grpo.micro_loss, []

    def spy(policy, batch, args, beta, temperature, sums):
        calls.append(len(batch))
        loss = inner(policy, batch, args, beta, temperature, sums)
        if fail(len(calls), len(batch)):
            raise error("out of memory")
        return loss

    monkeypatch.setattr(train_grpo, "micro_loss", spy)
    return calls


@pytest.mark.plain
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_halves_the_budget_and_the_gradient_is_undisturbed(monkeypatch, nth, error):
    quiet = policy_of("--beta", "0.1", "--micro-tokens", "20", reference=True, dtype=torch.float64)
    expected = run_update(quiet, batch_of())
    policy = policy_of("--beta", "0.1", "--micro-tokens", "20", reference=True, dtype=torch.float64)
    calls = failing(monkeypatch, lambda call, rows: call == nth, error)
    optimizer, state, said = Optimizer(policy.model, policy.args), new_state(policy.args), []
    groups = batch_of()
    train_grpo.set_advantages(groups, policy.args, None)
    row = train_grpo.update(policy, optimizer, groups, policy.args, 1, state, said.append)
    assert state.micro_tokens == 10 and len(said) == 1 and "10" in said[0] and len(calls) == nth + 4
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    for name, value in weights_of(quiet.model).items():
        assert torch.allclose(value, weights_of(policy.model)[name], atol=1e-9), name


def test_out_of_memory_on_every_large_batch_goes_down_to_what_fits(monkeypatch):
    policy = policy_of("--micro-tokens", "8192")
    calls = failing(monkeypatch, lambda call, rows: rows > 1)
    state = new_state(policy.args)
    assert run_update(policy, batch_of(), state=state)["grad_norm"] > 0
    assert calls[-4:] == [1, 1, 1, 1] and state.micro_tokens < 20


def test_out_of_memory_in_the_reference_forward_is_repeated_too(monkeypatch):
    policy = policy_of("--beta", "0.1", "--inner-epochs", "2", "--lr", "0", reference=True)
    inner, failed = engine.logps.fill_logps, []

    def spy(policy, hf, rows, field, temperature, budget):
        if budget > 4096:
            failed.append(field)
            raise torch.OutOfMemoryError("out of memory")
        inner(policy, hf, rows, field, temperature, budget)

    monkeypatch.setattr(train_grpo, "fill_logps", spy)
    state = new_state(policy.args)
    row = run_update(policy, batch_of(), state=state)
    assert failed == ["ref"] and state.micro_tokens == 4096 and row["kl"] == 0 and row["ratio_max"] == 1


def test_out_of_memory_with_single_rows_ends_the_training(monkeypatch):
    policy = policy_of("--micro-tokens", "64")
    failing(monkeypatch, lambda call, rows: True)
    weights = weights_of(policy.model)
    with pytest.raises(TrainingFailed, match="single row"):
        run_update(policy, batch_of())
    assert same_weights(weights, weights_of(policy.model))


def test_another_runtime_error_is_not_taken_for_missing_memory(monkeypatch):
    policy = policy_of()
    failing(monkeypatch, lambda call, rows: True, RuntimeError)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_update(policy, batch_of())


# ---- against an independent implementation, with a transformer
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_the_gradient_of_a_transformer_equals_a_textbook_grpo(beta):
    policy = policy_of("--beta", str(beta), reference=bool(beta))
    if beta:
        with torch.no_grad():
            for p in policy.reference.parameters():
                p.mul_(1.05)
    groups = batch_of()
    optimizer = Optimizer(policy.model, with_flags(policy.args, max_grad_norm=0.0))
    grads = {}
    policy.task.on_gradients = lambda p: grads.update(grads_of(p.model)) or {}
    run_update(policy, groups, optimizer=optimizer)

    model = policy_of().model  # the same weights, from before the update
    loss = 0.0
    for group, rewards in zip(groups, ((0.0, 1.0), (2.0, -1.0)), strict=True):
        mean, std = np.mean(rewards), np.std(rewards)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            ids = torch.tensor([rollout.ids])
            take = range(rollout.prompt_length, len(rollout.ids))
            logp = torch.stack([model(ids).logits[0, k - 1].log_softmax(-1)[ids[0, k]] for k in take])
            term = (logp - logp.detach()).exp() * (reward - mean) / (std + 1e-4)
            if beta:
                with torch.no_grad():
                    ref = torch.stack([policy.reference(ids).logits[0, k - 1].log_softmax(-1)[ids[0, k]] for k in take])
                term = term - beta * ((ref - logp).exp() - (ref - logp) - 1)
            loss = loss - term.mean() / 4
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, grads[name], atol=1e-6), name
