"""Advantages, what leaves the batch, and what each row weighs, by hand."""

import contextlib
import math
import statistics
import types

import pytest
from conftest import Bigram, WordTask, hand_rollout, make_args, scored, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

import harness.console
import models.policy
import train_grpo
from data import Prompt, Score, Task, UserError
from rewards import length_penalty

EPS = 1e-4


def group(*rewards, stops=None, lengths=None):
    """One rollout a reward, of two tokens unless said otherwise."""
    lengths, stops = lengths or [2] * len(rewards), stops or ["stop"] * len(rewards)
    rows = [hand_rollout([3], [4] * n, stop=stop) for n, stop in zip(lengths, stops, strict=True)]
    return scored(rows, list(rewards))


def advantages(*groups, baseline=None, flags=""):
    args = make_args(*flags.split())
    train_grpo.set_advantages(list(groups), args, baseline)
    return [g.advantages for g in groups]


def same(got, expected):
    assert len(got) == len(expected)
    for row, wanted in zip(got, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-12, nan_ok=True)


def test_a_group_advantage_is_the_z_score_with_population_std():
    # mean 2, population std sqrt((1 + 0 + 0 + 1) / 4)
    std = math.sqrt(0.5)
    same(advantages(group(1.0, 2.0, 2.0, 3.0)), [[-1 / (std + EPS), 0, 0, 1 / (std + EPS)]])


def test_group_advantages_do_not_see_the_level_of_the_rewards():
    low, high = advantages(group(0.0, 1.0), group(10.0, 11.0))
    assert low == high == pytest.approx([-0.5 / (0.5 + EPS), 0.5 / (0.5 + EPS)])


def test_scaling_by_batch_divides_by_the_std_of_all_rewards():
    std = statistics.pstdev([0.0, 1.0, 2.0, 6.0])
    same(advantages(group(0.0, 1.0), group(2.0, 6.0), flags="--scale-rewards batch"),
         [[-0.5 / (std + EPS), 0.5 / (std + EPS)], [-2 / (std + EPS), 2 / (std + EPS)]])


def test_no_scaling_leaves_the_difference_from_the_mean():
    same(advantages(group(0.0, 1.0), group(2.0, 6.0), flags="--scale-rewards none"), [[-0.5, 0.5], [-2, 2]])


def test_an_unscorable_rollout_leaves_its_groups_mean_and_std():
    for scale in ("group", "batch", "none"):
        flags = f"--scale-rewards {scale}"
        (with_gap,) = advantages(group(1.0, None, 3.0), flags=flags)
        (without,) = advantages(group(1.0, 3.0), flags=flags)
        assert [with_gap[0], with_gap[2]] == without and math.isnan(with_gap[1])


def test_a_constant_group_has_advantages_of_exactly_zero():
    values = 0.1 + 0.2, 0.3, 0.3  # equal but for a rounding
    assert advantages(group(*values))[0] == [0.0, 0.0, 0.0]
    assert train_grpo.is_constant(group(*values), make_args())
    assert not train_grpo.is_constant(group(0.3, 0.301), make_args())


def test_min_group_std_makes_groups_constant():
    flags = "--min-group-std 0.2"
    same(advantages(group(0.0, 0.3), group(0.0, 0.5), flags=flags),
         [[0, 0], [-0.25 / (0.25 + EPS), 0.25 / (0.25 + EPS)]])
    assert train_grpo.is_constant(group(0.0, 0.3), make_args(*flags.split()))


@pytest.mark.parametrize("rewards", [(1.0,), (1.0, None), (None, None)])
def test_a_group_with_fewer_than_two_usable_rows_has_no_advantage_and_is_not_trained(rewards):
    g = group(*rewards)
    assert all(math.isnan(a) for a in advantages(g)[0])
    assert train_grpo.rows_to_train([g], make_args()) == []
    assert train_grpo.group_std(g, make_args()) is None


def test_a_group_of_one_needs_the_baseline():
    with pytest.raises(UserError, match="--group 1 cannot give group advantages"):
        make_args("--group", "1")
    with pytest.raises(UserError, match="--group"):
        make_args("--group", "1", "--advantage", "mixed")
    assert make_args("--group", "1", "--advantage", "baseline").group == 1
    same(advantages(group(1.0), group(0.0), baseline=0.25, flags="--advantage baseline --group 1"), [[0.75], [-0.25]])


def test_baseline_advantages_are_the_distance_from_the_running_mean_over_the_scale():
    same(advantages(group(1.0, 4.0), group(2.0, None), baseline=1.0, flags="--advantage baseline --baseline-scale 3"),
         [[0.0, 1.0], [1 / 3, math.nan]])


def test_the_first_baseline_is_the_mean_of_the_batch():
    same(advantages(group(1.0, 4.0), group(2.0, 5.0), flags="--advantage baseline"), [[-2, 1], [-1, 2]])


@pytest.mark.parametrize("fallback, flat", [
    ("zero", [0, 0]), ("baseline", [1.0 - 1.02, 1.04 - 1.02]), ("positive_baseline", [0.0, 1.04 - 1.02])])
def test_mixed_advantages_fall_back_where_the_group_is_flat(fallback, flat):
    # the first group's std 0.02 is under --mixed-std 0.1, the second's 0.5 is not
    same(advantages(group(1.0, 1.04), group(1.0, 2.0), baseline=1.02,
                    flags=f"--advantage mixed --mixed-fallback {fallback}"),
         [flat, [-0.5 / (0.5 + EPS), 0.5 / (0.5 + EPS)]])


def test_the_advantage_clip_bounds_both_sides_and_keeps_nan():
    same(advantages(group(0.0, 1.0, 10.0, None), flags="--advantage-clip 1.2 --scale-rewards none"),
         [[-1.2, -1.2, 1.2, math.nan]])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_group_advantages_have_mean_zero_and_are_ordered_as_the_rewards(rewards):
    (values,) = advantages(group(*rewards))
    assert sum(values) == pytest.approx(0, abs=1e-6) and all(abs(v) <= len(rewards) for v in values)
    assert [a for _, a in sorted(zip(rewards, values, strict=True))] == sorted(values)


# ---- truncated completions
STOPS = ["stop", "length", "stop", "context"]


def test_overlong_drop_takes_truncated_rows_out_of_the_group():
    (values,) = advantages(group(1.0, 9.0, 3.0, -9.0, stops=STOPS), flags="--overlong drop")
    assert values == pytest.approx([-1 / (1 + EPS), math.nan, 1 / (1 + EPS), math.nan], nan_ok=True)


@pytest.mark.parametrize("mode", ["mask", "keep", "soft"])
def test_the_other_overlong_modes_keep_truncated_rows_in_the_statistics(mode):
    rewards, flags = (1.0, 9.0, 3.0, -9.0), f"--overlong {mode} --overlong-buffer 4"
    (values,) = advantages(group(*rewards, stops=STOPS), flags=flags)
    std = statistics.pstdev(rewards)
    assert values == pytest.approx([(r - 1.0) / (std + EPS) for r in rewards])


@pytest.mark.parametrize("mode, trained", [("drop", 2), ("mask", 2), ("keep", 4), ("soft", 4)])
def test_overlong_decides_which_rows_are_trained(mode, trained):
    args, g = make_args("--overlong", mode, "--overlong-buffer", "4"), group(1.0, 9.0, 3.0, -9.0, stops=STOPS)
    train_grpo.set_advantages([g], args, None)
    rows = train_grpo.rows_to_train([g], args)
    assert len(rows) == trained
    assert trained == 4 or not any(row.rollout.truncated for row in rows)


@pytest.mark.parametrize("length, penalty", [(1, 0), (4, 0), (5, -0.25), (6, -0.5), (8, -1)])
def test_the_soft_penalty_grows_over_the_last_tokens_before_the_limit(length, penalty):
    assert length_penalty(length, 8, 4) == penalty
    args = make_args("--overlong", "soft", "--overlong-buffer", "4")
    rows = [hand_rollout([3], [4] * length), hand_rollout([3], [4])]

    class Half(WordTask):
        def score(self, rollouts):
            return [Score(0.5, {"even": 0.5}), Score.unscorable("no reason")]

    (scored_group,) = train_grpo.score_groups(Half(args), [rows], args)
    assert scored_group.scores[0].reward == 0.5 + penalty
    assert sum(scored_group.scores[0].parts.values()) == scored_group.scores[0].reward
    assert scored_group.scores[1].reward is None


# ---- weights: the normaliser of the optimizer step
def weights(flags, *groups):
    args = make_args(*flags.split())
    train_grpo.set_advantages(list(groups), args, 0.0)
    return [row.weight for row in train_grpo.rows_to_train(list(groups), args)]


@pytest.mark.parametrize("loss, expected", [
    ("grpo", [1 / (3 * 4), 1 / (1 * 4)]),  # sequence means over the four rows that count, constant ones too
    ("dapo", [1 / 10, 1 / 10]),  # 3 + 1 + 2 + 4 tokens
    ("dr_grpo", [1 / (6 * 8), 1 / (6 * 8)]),  # every sampled row, --max-new 8
])
def test_the_normaliser_counts_constant_groups_but_not_rows_outside_the_statistics(loss, expected):
    live, constant = group(0.0, 1.0, lengths=[3, 1]), group(1.0, 1.0, lengths=[2, 4])
    lost = group(None, 2.0, lengths=[5, 6])
    assert weights(f"--loss {loss}", live, constant, lost) == pytest.approx(expected)
    kept = weights(f"--loss {loss} --kl-on-constant-groups", live, constant, lost)
    assert len(kept) == 4 and kept[:2] == pytest.approx(expected)


@pytest.mark.parametrize("loss, expected", [("grpo", 1 / (2 * 2)), ("dapo", 1 / 6), ("dr_grpo", 1 / (4 * 8))])
def test_masked_truncated_rows_leave_the_denominator(loss, expected):
    rows = group(0.0, 1.0, 2.0, 3.0, stops=STOPS, lengths=[2, 8, 4, 8])
    found = weights(f"--loss {loss} --overlong mask", rows)
    assert len(found) == 2 and found[0] == pytest.approx(expected)


def test_observation_tokens_leave_the_denominator():
    rows = [hand_rollout([3], [4, 5, 6, 1], mask=[1, 0, 0, 1]), hand_rollout([3], [4, 1])]
    assert weights("--loss dapo", scored(rows, [0.0, 1.0])) == [1 / 4, 1 / 4]
    assert weights("--loss grpo", scored(rows, [0.0, 1.0])) == [1 / 4, 1 / 4]


def test_top_entropy_selects_among_the_sampled_tokens_of_the_step():
    args = make_args("--top-entropy", "0.5")
    rows = [hand_rollout([3], [4, 5, 1], mask=[1, 0, 1]), hand_rollout([3], [4, 1])]
    rows[0].entropy, rows[1].entropy = [0.1, 9.0, 0.7], [0.5, 0.2]  # 9.0 is an observation's and does not count
    g = scored(rows, [0.0, 1.0])
    train_grpo.set_advantages([g], args, None)
    first, second = train_grpo.rows_to_train([g], args)
    assert [u for u, m in zip(first.uncertain, rows[0].mask, strict=True) if m] == [False, True]
    assert second.uncertain == [True, False]


# ---- dynamic sampling
class Scripted(Task):
    """Prompts counted up; the reward of each rollout stands in the script."""

    parts = ("even",)

    def __init__(self, args, script):
        super().__init__(args)
        self.script, self.asked, self.dealt = script, [], 0

    def prompts(self, n):
        self.asked.append(n)
        self.dealt += n
        return [Prompt("w3", meta={"index": i}) for i in range(self.dealt - n, self.dealt)]

    def score(self, rollouts):
        return [Score(r, {"even": r}) for r in self.script[rollouts[0].prompt.meta["index"]]]


class FakePolicy:
    def __init__(self):
        self.keys = []

    def sample(self, prompts, n, temperature, *key):
        self.keys.append(key)
        return [[hand_rollout([3], [4], prompt=prompt) for _ in range(n)] for prompt in prompts]


LIVE, FLAT = (0.0, 1.0), (1.0, 1.0)


def collected(script, *flags, prompts=3):
    args = make_args("--group", "2", "--prompts", str(prompts), *flags)
    task, policy = Scripted(args, script), FakePolicy()
    stop = types.SimpleNamespace(check=lambda: None, scoring=contextlib.nullcontext)
    batch, sampled = train_grpo.collect(policy, task, args, 7, harness.console.Clock(), stop)
    indices = ([g.prompt.meta["index"] for g in groups] for groups in (batch, sampled))
    return *indices, task.asked, policy.keys


def test_without_dynamic_sampling_constant_groups_stay_in_the_batch():
    assert collected([FLAT, LIVE, FLAT]) == ([0, 1, 2], [0, 1, 2], [3], [(7, 0)])


def test_dynamic_sampling_asks_for_as_many_prompts_as_there_are_constant_groups():
    batch, sampled, asked, keys = collected([FLAT, LIVE, FLAT, LIVE, LIVE], "--dynamic-sampling", "2")
    assert (batch, sampled, asked) == ([1, 3, 4], [0, 1, 2, 3, 4], [3, 2])
    assert keys == [(7, 0), (7, 1)]  # each round draws from its own seed


def test_dynamic_sampling_stops_after_its_rounds_and_fills_up_with_constant_groups():
    batch, sampled, asked, _ = collected([FLAT] * 4 + [LIVE] + [FLAT] * 9, "--dynamic-sampling", "2")
    assert asked == [3, 3, 2] and sampled == list(range(8))
    assert batch == [4, 0, 1]


def test_dynamic_sampling_samples_once_where_no_group_is_constant():
    assert collected([LIVE] * 3, "--dynamic-sampling", "5")[2] == [3]


def test_baseline_advantages_learn_from_groups_without_spread_so_none_is_replaced():
    batch, _, asked, _ = collected([FLAT, LIVE, FLAT] * 3, "--dynamic-sampling", "2", "--advantage", "baseline")
    assert asked == [3] and batch == [0, 1, 2]


def test_groups_without_spread_are_not_counted_as_constant_where_they_are_trained_on():
    args = make_args("--advantage", "baseline")
    groups = [group(1.0, 1.0), group(0.0, 0.0)]
    train_grpo.set_advantages(groups, args, 0.5)
    row = train_grpo.step_metrics(groups, groups, args)
    assert (row["groups_constant"], row["groups_used"]) == (0, 2)


# ---- schedules
def test_the_learning_rate_by_hand():
    args = make_args("--lr", "1", "--lr-start", "0.1", "--warmup-steps", "3", "--lr-end", "0.2", "--steps", "8")
    cosine = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * share)) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert [train_grpo.lr_at(step, args) for step in range(1, 9)] == pytest.approx([0.1, 0.4, 0.7, *cosine])
    assert cosine[0] == 1 and cosine[2] == pytest.approx(0.6) and cosine[-1] == pytest.approx(0.2)


def test_the_learning_rate_without_warm_up_or_decay():
    args = make_args("--lr", "1", "--warmup-steps", "0", "--lr-end", "1", "--steps", "3")
    assert [train_grpo.lr_at(step, args) for step in (1, 2, 3)] == [1, 1, 1]
    assert train_grpo.lr_at(1, make_args("--lr", "1", "--warmup-steps", "0", "--steps", "1")) == 1


def test_the_temperature_moves_linearly_to_its_end():
    args = make_args("--temperature", "1.2", "--temperature-end", "0.8", "--steps", "5")
    assert [train_grpo.temperature_at(step, args) for step in range(1, 6)] == pytest.approx([1.2, 1.1, 1.0, 0.9, 0.8])
    assert train_grpo.temperature_at(3, make_args("--temperature", "0.7")) == 0.7


@pytest.mark.parametrize("flags", [("--temperature", "0"), ("--temperature-end", "0"), ("--temperature", "-1")])
def test_training_at_temperature_zero_is_refused(flags):
    with pytest.raises(UserError, match=flags[0]):
        make_args(*flags)


def test_a_policy_without_position_ids_or_length_limit_is_recognised():
    args = make_args("--context", "40")
    model = Bigram([[0.0, 0.0], [0.0, 0.0]])
    policy = models.policy.Policy(args, WordTask(args), model, model, word_tokenizer(), "cpu")
    assert not policy.takes_positions and policy.context == 40
