"""Loss, gradient and metrics of one small batch against a plain-Python computation, token by token.

The model is a table of logits, so that every probability is a softmax of one row; old, sampler and reference are
other tables. Gradients are central differences of the plain-Python loss with respect to each table entry.
"""

import functools
import math
import random
import statistics

import numpy as np
import pytest
import torch
from conftest import bigram_policy, hand_rollout, make_args, new_state, scored

import train_grpo
from models.optimizer import Optimizer

V = 6
RNG = random.Random(5)


def moved(table: tuple, by: float) -> tuple:
    return tuple(tuple(x + by * RNG.gauss(0, 1) for x in row) for row in table)


NEW = moved(((0.0,) * V,) * V, 1.0)
OLD = moved(NEW, 0.35)
SAMPLER = moved(OLD, 0.5)
REF = moved(NEW, 0.6)
PROMPTS = [[3, 4], [3, 4], [5], [5]]
COMPLETIONS = [[3, 5, 1], [4, 4, 3, 2, 5], [4], [3, 3, 5, 4]]
MASKS = [[1, 1, 1], [1, 1, 0, 0, 1], [1], [1, 1, 1, 1]]  # the second holds an observation
REWARDS = [[1.0, 0.25], [0.5, -1.0]]
STOPS = ["stop", "stop", "stop", "length"]
ENTROPY = [[0.9, 0.1, 0.5], [0.8, 0.2, 0.0, 0.0, 1.3], [1.1], [0.3, 1.2, 0.7, 0.4]]


@functools.cache
def log_p(table: tuple, i: int) -> list[float]:
    """log p of each completion token of rollout i under a table, given as a tuple of rows."""
    seen = PROMPTS[i] + COMPLETIONS[i]
    out = []
    for k in range(len(PROMPTS[i]), len(seen)):
        row = table[seen[k - 1]]
        out.append(row[seen[k]] - math.log(sum(math.exp(x) for x in row)))
    return out


def entropies(table: tuple, i: int) -> list[float]:
    seen, out = PROMPTS[i] + COMPLETIONS[i], []
    for k in range(len(PROMPTS[i]), len(seen)):
        z = sum(math.exp(x) for x in table[seen[k - 1]])
        out.append(-sum(math.exp(x) / z * math.log(math.exp(x) / z) for x in table[seen[k - 1]]))
    return out


def groups_of():
    rows = [hand_rollout(PROMPTS[i], COMPLETIONS[i], mask=MASKS[i], stop=STOPS[i],
                         logp=[x * m for x, m in zip(log_p(SAMPLER, i), MASKS[i], strict=True)]) for i in range(4)]
    for row, values in zip(rows, ENTROPY, strict=True):
        row.entropy = list(values)
    return [scored(rows[:2], REWARDS[0]), scored(rows[2:], REWARDS[1])]


def advantages_by_hand(args) -> list[float]:
    everything = REWARDS[0] + REWARDS[1]
    out = []
    for group in REWARDS:
        mean, std = sum(group) / 2, statistics.pstdev(group)
        scale = {"group": std + 1e-4, "batch": statistics.pstdev(everything) + 1e-4, "none": 1.0}[args.scale_rewards]
        out += [(r - mean) / scale for r in group]
    return out


def by_hand(args, table, frozen, old=None) -> dict:
    """The loss and every metric of the batch. `frozen`: the table inside a stop-gradient. `old`: None where it is
    the current policy's own."""
    a = advantages_by_hand(args)
    trained = [i for i in range(4) if not (args.overlong == "mask" and STOPS[i] == "length")]
    tokens = sum(sum(MASKS[i]) for i in trained)
    high = 1 + (args.clip if args.clip_high < 0 else args.clip_high)
    chosen = sorted((e for i in trained for e, m in zip(ENTROPY[i], MASKS[i], strict=True) if m), reverse=True)
    chosen = chosen[: round(args.top_entropy * len(chosen))]
    sums = dict.fromkeys(("policy", "kl_loss", "bonus", "kl", "ratio", "low", "up", "gap"), 0.0)
    ratios = []
    for i in trained:
        length = sum(MASKS[i])
        weight = {"grpo": 1 / length / len(trained), "dapo": 1 / tokens, "dr_grpo": 1 / (4 * args.max_new)}[args.loss]
        new, still, base, ref, spread = (log_p(table, i), log_p(frozen, i), log_p(frozen if old is None else old, i),
                                         log_p(REF, i), entropies(table, i))
        sampled = log_p(SAMPLER, i)
        where = [t for t in range(len(new)) if MASKS[i][t]]
        for t in where:
            difference = new[t] - base[t]
            if args.ratio == "sequence":
                difference = sum(new[u] - base[u] for u in where) / length
            if args.ratio == "sequence_sum":
                difference = sum(new[u] - base[u] for u in where)
            r = math.exp(difference)
            if args.cispo:
                objective = min(math.exp(still[t] - base[t]), high) * a[i] * new[t]
            else:
                objective = min(r * a[i], min(max(r, 1 - args.clip), high) * a[i])
                if args.dual_clip and a[i] < 0:
                    objective = max(objective, args.dual_clip * a[i])
            mismatch = math.exp(base[t] - sampled[t])
            if args.off_policy == "truncate":
                objective *= min(mismatch, args.off_policy_cap)
            if args.off_policy == "mask":
                objective *= mismatch if 1 / args.off_policy_cap <= mismatch <= args.off_policy_cap else 0.0
            if ENTROPY[i][t] not in chosen:
                objective = 0.0
            d = ref[t] - new[t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[args.kl]
            sums["policy"] -= weight * objective
            sums["kl_loss"] += weight * kl
            sums["bonus"] += weight * spread[t]
            sums["kl"] += kl
            sums["ratio"] += r
            sums["low"] += r < 1 - args.clip and a[i] < 0 and not args.cispo
            sums["up"] += r > high and (a[i] > 0 or (args.cispo and a[i] < 0))  # CISPO caps the weight of either sign
            sums["gap"] += abs(base[t] - sampled[t])
            ratios.append(r)
    loss = sums["policy"] + args.beta * sums["kl_loss"] - args.entropy_coef * sums["bonus"]
    return {"loss": loss, "policy_loss": sums["policy"], "kl": sums["kl"] / tokens if args.beta else None,
            "clip_low_share": sums["low"] / tokens, "clip_high_share": sums["up"] / tokens,
            "ratio_mean": sums["ratio"] / tokens, "ratio_max": max(ratios), "logp_gap": sums["gap"] / tokens}


def gradient_by_hand(args, old) -> np.ndarray:
    def loss(i, j, by):
        if not any(i in [*p[-1:], *c[:-1]] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)):
            return 0.0  # no token follows this one
        table = [list(row) for row in NEW]
        table[i][j] += by
        return by_hand(args, tuple(map(tuple, table)), NEW, old)["loss"]

    return np.array([[(loss(i, j, 1e-5) - loss(i, j, -1e-5)) / 2e-5 for j in range(V)] for i in range(V)])


def measured(*flags, old=OLD, budget=10**9):
    """(args, loss, gradient) of the script for the same batch."""
    policy = bigram_policy(NEW, "--beta", "0.07", "--max-grad-norm", "0", *flags)
    args, groups = policy.args, groups_of()
    train_grpo.set_advantages(groups, args, None)
    rows = train_grpo.rows_to_train(groups, args)
    index = {id(r): i for i, r in enumerate(r for g in groups for r in g.rollouts)}
    for row in rows:
        i = index[id(row.rollout)]
        row.old = None if old is None else torch.tensor(log_p(old, i), dtype=torch.float64)
        row.ref = torch.tensor(log_p(REF, i), dtype=torch.float64) if args.beta else None
    sums = train_grpo.gradients(policy, Optimizer(policy.model, args), rows, args, args.beta, 1.0, budget)
    return args, sums["loss"], policy.model.table.grad.numpy()


def check(*flags, old=OLD):
    args, loss, gradient = measured("--overlong", "keep", *flags, old=old)
    assert loss == pytest.approx(by_hand(args, NEW, NEW, old)["loss"], abs=1e-12)
    np.testing.assert_allclose(gradient, gradient_by_hand(args, old), atol=1e-8)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_sum"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_value_and_gradient_by_hand_for_every_loss_ratio_and_kl(loss, ratio, kl):
    check("--loss", loss, "--ratio", ratio, "--kl", kl)


@pytest.mark.parametrize("flags", [
    "--scale-rewards batch", "--scale-rewards none", "--clip 0.05", "--clip 0.1 --clip-high 0.4", "--clip-high 0",
    "--dual-clip 1.05", "--dual-clip 1.05 --clip 0.05 --ratio sequence_sum", "--cispo", "--cispo --clip-high 0.05",
    "--off-policy truncate --off-policy-cap 1.1", "--off-policy mask --off-policy-cap 1.3",
    "--off-policy truncate --cispo", "--entropy-coef 0.3", "--entropy-coef -0.3 --loss dapo", "--top-entropy 0.45",
    "--top-entropy 0.45 --off-policy mask --ratio sequence --loss dr_grpo", "--beta 0", "--overlong mask",
    "--overlong mask --loss dapo", "--overlong mask --loss dr_grpo",
])
def test_value_and_gradient_by_hand_for_every_variant(flags):
    check(*flags.split())


@pytest.mark.parametrize("flags", ["", "--cispo", "--ratio sequence", "--ratio sequence_sum --loss dapo",
                                   "--off-policy truncate", "--off-policy mask", "--entropy-coef 0.1"])
def test_value_and_gradient_by_hand_where_old_is_the_current_policy(flags):
    check(*flags.split(), old=None)


def test_the_variants_are_told_apart_by_this_batch():
    variants = ["", "--loss dapo", "--loss dr_grpo", "--ratio sequence", "--ratio sequence_sum", "--kl k1", "--kl k2",
                "--scale-rewards batch", "--scale-rewards none", "--clip 0.05", "--clip-high 0.01", "--dual-clip 1.05",
                "--cispo", "--off-policy truncate --off-policy-cap 1.1", "--off-policy mask --off-policy-cap 1.3",
                "--entropy-coef 0.3", "--top-entropy 0.45", "--beta 0", "--overlong mask"]
    losses = [round(measured("--overlong", "keep", *flags.split())[1], 9) for flags in variants]
    assert len(set(losses)) == len(variants)


def one_token(ratio: float, advantage: float, *flags, gap: float = 0.0):
    """(loss, d loss / d log p) of one token, `gap` being old minus sampler log-probability."""
    new = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    loss, _ = train_grpo.policy_loss(new, old, old - gap, torch.tensor([advantage], dtype=torch.float64),
                                     torch.ones(1, 1, dtype=torch.float64), make_args(*flags))
    loss.sum().backward()
    return loss.item(), new.grad.item()


@pytest.mark.parametrize("ratio, advantage, flags, loss, slope", [
    (1.1, 2.0, "", -2.2, -2.2),
    (1.5, 2.0, "", -2.4, 0.0),  # above 1 + 0.2, and it was good
    (1.5, -2.0, "", 3.0, 3.0),  # above, and it was bad: full gradient back
    (0.5, 2.0, "", -1.0, -1.0),
    (0.5, -2.0, "", 1.6, 0.0),  # below 1 - 0.2, and it was bad
    (1.25, 2.0, "--clip-high 0.28", -2.5, -2.5),
    (1.3, 2.0, "--clip-high 0.28", -2.56, 0.0),
    (4.0, -2.0, "--dual-clip 3", 6.0, 0.0),
    (2.0, -2.0, "--dual-clip 3", 4.0, 4.0),
    (4.0, 2.0, "--dual-clip 3", -2.4, 0.0),
    (1.5, 2.0, "--cispo", -1.2 * 2 * (math.log(1.5) - 1), -2.4),  # weight clipped at 1.2, gradient kept
    (0.5, -2.0, "--cispo", 0.5 * 2 * (math.log(0.5) - 1), 1.0),
])
def test_one_token_by_hand(ratio, advantage, flags, loss, slope):
    assert one_token(ratio, advantage, *flags.split()) == pytest.approx((loss, slope), abs=1e-12)


@pytest.mark.parametrize("gap, flags, factor", [
    (math.log(3.0), "--off-policy truncate", 2.0), (math.log(0.1), "--off-policy truncate", 0.1),
    (math.log(3.0), "--off-policy mask", 0.0), (math.log(0.4), "--off-policy mask", 0.0),
    (math.log(1.5), "--off-policy mask", 1.5), (math.log(3.0), "--off-policy none", 1.0),
])
def test_off_policy_weight_of_one_token(gap, flags, factor):
    assert one_token(1.1, 2.0, *flags.split(), gap=gap) == pytest.approx((-2.2 * factor, -2.2 * factor), abs=1e-12)


@pytest.mark.parametrize("kl, value, slope", [
    ("k1", -0.3, 1.0), ("k2", 0.045, -0.3), ("k3", math.exp(0.3) - 1.3, 1 - math.exp(0.3))])
def test_kl_estimator_of_one_token(kl, value, slope):
    new = torch.tensor([-1.3], dtype=torch.float64, requires_grad=True)
    out = train_grpo.kl_divergence(new, torch.tensor([-1.0], dtype=torch.float64), kl)
    out.sum().backward()
    assert (out.item(), new.grad.item()) == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_expected_kl_estimate_is_the_exact_divergence_or_close(kl):
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.45, 0.33, 0.22]))
    exact = (p * (p / q).log()).sum()
    estimate = (p * train_grpo.kl_divergence(p.log(), q.log(), kl)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-9 if kl != "k2" else 0.1)


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_sum"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_enormous_log_ratio_gives_no_nan_gradient(ratio, advantage):
    new = torch.full((1, 4), 0.0, requires_grad=True)
    old = torch.full((1, 4), -100.0)
    loss, r = train_grpo.policy_loss(new, old, old, torch.tensor([advantage]), torch.ones(1, 4),
                                     make_args("--ratio", ratio))
    loss.sum().backward()
    assert loss.isfinite().all() and r.isfinite().all() and new.grad.isfinite().all()


@pytest.mark.parametrize("flags", ["", "--loss dapo --ratio sequence", "--loss dr_grpo --kl k1 --clip 0.1",
                                   "--ratio sequence_sum --kl k2", "--beta 0", "--overlong mask",
                                   "--cispo --entropy-coef 0.2", "--clip 0.05 --clip-high 0.3"])
def test_every_metric_of_the_update_by_hand(flags):
    policy = bigram_policy(NEW, "--beta", "0.07", "--overlong", "keep", "--inner-epochs", "2", "--old-logp", "sampler",
                           "--lr", "0", "--max-grad-norm", "0.01", *flags.split(), reference=REF)
    args, groups = policy.args, groups_of()
    train_grpo.set_advantages(groups, args, None)
    optimizer = Optimizer(policy.model, args)
    row = train_grpo.update(policy, optimizer, groups, args, 1, new_state(args), print)
    expected = by_hand(args, NEW, NEW, SAMPLER) | {"skipped_updates": 0, "beta": args.beta}
    expected["grad_norm"] = float(np.sqrt((gradient_by_hand(args, SAMPLER) ** 2).sum()))  # before clipping
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-7)), name


def test_the_metrics_of_the_update_do_not_depend_on_micro_batches():
    rows = []
    for budget in ("1", "9", "1000"):
        policy = bigram_policy(NEW, "--beta", "0.07", "--overlong", "keep", "--inner-epochs", "2", "--old-logp",
                               "sampler", "--micro-tokens", budget, reference=REF)
        groups = groups_of()
        train_grpo.set_advantages(groups, policy.args, None)
        optimizer = Optimizer(policy.model, policy.args)
        rows.append(train_grpo.update(policy, optimizer, groups, policy.args, 1, new_state(policy.args), print))
    for name in rows[0]:
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-9), name
        assert rows[2][name] == pytest.approx(rows[0][name], rel=1e-9), name


def test_tokens_of_rows_without_advantage_are_not_counted_as_clipped():
    policy = bigram_policy(NEW, "--kl-on-constant-groups", "--clip", "0.01")
    groups = groups_of()
    for group in groups:
        group.advantages = [0.0, 0.0]
    rows = train_grpo.rows_to_train(groups, policy.args)
    for i, row in enumerate(rows):
        row.old = torch.tensor(log_p(OLD, i), dtype=torch.float64)
    args = policy.args
    sums = train_grpo.gradients(policy, Optimizer(policy.model, args), rows, args, args.beta, 1.0, 1000)
    assert sums["clip_low"] == sums["clip_high"] == 0


def test_every_metric_of_the_step_by_hand():
    args = make_args()
    first, second = groups_of()
    constant = scored([hand_rollout([3], [4, 1]), hand_rollout([3], [5, 5, 1])], [0.5, 0.5])
    lost = scored([hand_rollout([3], [4] * 8, stop="length"), hand_rollout([3], [4])], [2.0, None])
    for row in constant.rollouts + lost.rollouts:
        row.entropy = [0.5] * len(row.mask)
    for score, verdict in zip(first.scores, (True, False), strict=True):
        score.flags["correct"] = verdict
    constant.scores[0].flags["correct"] = True
    sampled = [first, second, constant, lost]
    train_grpo.set_advantages(sampled, args, None)
    row = train_grpo.step_metrics(sampled, sampled, args)

    rewards = [1.0, 0.25, 0.5, -1.0, 0.5, 0.5, 2.0]  # scorable ones, dropped or not
    lengths = [3, 3, 1, 4, 2, 3, 8, 1]
    spread = (1.0 - 0.25) / 2
    a = spread / (spread + 1e-4)
    # the second group's truncated row is dropped, which leaves one row: no comparison; so in the last group
    advantages = [a, -a, 0.0, 0.0]
    entropies_seen = [0.9, 0.1, 0.5, 0.8, 0.2, 1.3, 1.1, 0.3, 1.2, 0.7, 0.4] + [0.5] * 14
    expected = {
        "reward_mean": 3.75 / 7, "reward_std": statistics.pstdev(rewards), "reward_min": -1.0, "reward_max": 2.0,
        "reward_std_group": (spread + 0.0) / 2, "accuracy": 2 / 3, "tokens": 25, "length_mean": 25 / 8,
        "length_max": 8, "truncated_share": 2 / 8, "unscorable": 1, "entropy": statistics.mean(entropies_seen),
        "groups_sampled": 4, "groups_constant": 1, "groups_dropped": 2, "groups_used": 1,
        "advantage_mean": 0.0, "advantage_std": statistics.pstdev(advantages), "part_even": 3.75 / 7}
    assert sum(lengths) == 25 and sum(rewards) == 3.75
    assert row.keys() == expected.keys()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, abs=1e-12), name


def test_a_step_without_any_usable_row_has_no_metrics_but_counts():
    args = make_args()
    group = scored([hand_rollout([3], [4]), hand_rollout([3], [4])], [None, None])
    train_grpo.set_advantages([group], args, None)
    row = train_grpo.step_metrics([group], [group], args)
    assert row["reward_mean"] is None and row["advantage_std"] is None and row["groups_used"] == 0
    assert row["unscorable"] == 2 and row["groups_dropped"] == 1
