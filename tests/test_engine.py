"""What is sampled, what is recorded of it, and that a plain forward finds the same log-probabilities.

The independent computation is `plain`: one row at a time, no padding, no cache, the whole logits.
"""

import copy
import math
import types

import conftest
import numpy as np
import pytest
import torch
import transformers
from conftest import WordTask, hand_rollout, make_args, make_policy, random_model, with_flags, word_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.logps
import engine.rollout
import models.loading
import models.policy
from data import Prompt, Task, TrainingFailed, UserError
from engine import attention, autotune
from engine.logps import TrainRow, micro_batches, token_logps
from engine.rollout import draw, keep_top

PROMPTS = [Prompt("w5"), Prompt("w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"), Prompt("w9 w9 w4")]
CHAT = ("{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}")
EVEN = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26]


def chat_tokenizer(template=CHAT, pad="<pad>", bos=None):
    """Ids: 0 <pad>, 1 <eos>, 2 <end> (closes a turn), w3 … w27, 28 <s>, 29 <user>, 30 <assistant>, 31 <tool>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["<pad>", "<eos>", "<end>", *(f"w{i}" for i in range(3, 28)), "<s>", "<user>", "<assistant>", "<tool>"]
    raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        raw.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 28)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad, eos_token="<eos>", bos_token=bos, chat_template=template)
    tokenizer.add_tokens(["<end>", "<user>", "<assistant>", "<tool>"], special_tokens=True)
    return tokenizer


@torch.no_grad()
def plain(hf, row, temperature=1.0) -> np.ndarray:
    """log p of every token after the prompt, and (second) the entropy there."""
    logits = hf(input_ids=torch.tensor([row.ids])).logits[0].double() / temperature
    logp = logits.log_softmax(-1)
    at = range(row.prompt_length, len(row.ids))
    return (np.array([logp[k - 1, row.ids[k]].item() for k in at]),
            np.array([-(logp[k - 1].exp() * logp[k - 1]).sum().item() for k in at]))


def check_recorded(policy, rows, temperature=1.0):
    for row in rows:
        logp, entropy = plain(policy.hf, row, temperature)
        mask = np.array(row.mask)
        np.testing.assert_allclose(np.array(row.logp), logp * mask, atol=1e-4)
        np.testing.assert_allclose(np.array(row.entropy), entropy * mask, atol=1e-4)


@pytest.fixture(autouse=True, params=["generate", "fast"])
def each_engine(request, monkeypatch):
    """Every test of this file holds for both engines, but for those marked plain."""
    if "plain" in request.keywords and request.param == "fast":
        pytest.skip("about the plain path only")
    monkeypatch.setattr(conftest, "ENGINE", request.param)


def sampled(policy, n=6, temperature=1.0, prompts=PROMPTS):
    return [row for group in policy.sample(prompts, n, temperature, 1) for row in group]


def check_ends(policy, rows):
    """A row ends with its first stop token, which is part of it, or at the limit without any."""
    for row in rows:
        said = row.ids[row.prompt_length:]
        assert row.mask == [1] * len(said) and 1 <= len(said) <= policy.args.max_new
        stops = [t for t, token in enumerate(said) if token in policy.stop_ids]
        if row.stop == "stop":
            assert stops == [len(said) - 1] and not row.truncated
        else:
            assert not stops and row.stop == "length" and row.truncated and len(said) == policy.args.max_new


# ---- what the sampler records
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "mistral"])
def test_recorded_logp_and_entropy_equal_a_plain_forward(kind):
    policy = make_policy(kind=kind)
    rows = sampled(policy)
    check_recorded(policy, rows)
    check_ends(policy, rows)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_recorded_logp_is_that_of_the_distribution_at_the_temperature(temperature):
    policy = make_policy()
    rows = sampled(policy, temperature=temperature)
    check_recorded(policy, rows, temperature)
    forward = [TrainRow(row, 1.0) for row in rows]
    logp, entropy = token_logps(policy, policy.hf, forward, temperature, entropy=True)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(logp[i, : len(row.mask)].detach(), row.logp, atol=1e-4)
        np.testing.assert_allclose(entropy[i, : len(row.mask)].detach(), row.entropy, atol=1e-4)


def test_with_several_stop_ids_a_row_ends_at_any_of_them():
    model = random_model()
    model.generation_config.eos_token_id = EVEN
    policy = models.policy.Policy(make_args(), WordTask(make_args()), model, model, word_tokenizer(), model.device)
    assert policy.stop_ids == sorted({1, *EVEN})
    rows = sampled(policy, 20)
    check_ends(policy, rows)
    check_recorded(policy, rows)
    assert len({row.ids[-1] for row in rows if row.stop == "stop"}) > 3
    assert {len(row.mask) for row in rows} > {1, 2, 3}


def test_where_pad_is_eos_rows_keep_their_first_eos_and_nothing_after_it():
    policy = make_policy(tokenizer=word_tokenizer(pad="<eos>"))
    policy.stop_ids = [1, *EVEN]
    assert policy.tokenizer.pad_token_id == policy.tokenizer.eos_token_id == 1
    rows = sampled(policy, 20)
    check_ends(policy, rows)
    check_recorded(policy, rows)
    assert any(row.ids[-1] == 1 for row in rows)


def test_rows_that_end_at_once_and_rows_that_never_end():
    policy = make_policy()
    policy.stop_ids = list(range(32))
    rows = sampled(policy)
    check_ends(policy, rows)
    check_recorded(policy, rows)
    assert {len(row.mask) for row in rows} == {1}
    policy.stop_ids = []
    rows = sampled(policy)
    check_ends(policy, rows)
    check_recorded(policy, rows)
    assert {len(row.mask) for row in rows} == {policy.args.max_new} and all(row.truncated for row in rows)


def test_a_policy_token_equal_to_pad_counts_like_any_other():
    policy = make_policy()
    rows = sampled(policy, 40)
    with_pad = [row for row in rows if 0 in row.ids[row.prompt_length:]]
    assert with_pad and all(row.mask == [1] * len(row.mask) for row in with_pad)
    check_recorded(policy, with_pad)


def test_nothing_of_the_models_generation_config_reaches_the_sampler():
    own = make_policy()
    asking = make_policy()
    asking.hf.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=7, top_p=0.8, repetition_penalty=1.3, temperature=0.3, min_new_tokens=6, eos_token_id=1,
        no_repeat_ngram_size=1, suppress_tokens=[4, 5], begin_suppress_tokens=[6], forced_eos_token_id=1, num_beams=3,
        max_length=3, min_p=0.2, typical_p=0.5, bad_words_ids=[[9]], renormalize_logits=True)
    before = asking.hf.generation_config
    rows = sampled(asking, 20)
    check_recorded(asking, rows)
    assert [row.ids for row in rows] == [row.ids for row in sampled(own, 20)]
    assert asking.hf.generation_config is before and before.top_k == 7


@pytest.mark.plain
def test_the_generation_config_is_restored_also_after_a_failure():
    policy = make_policy()
    before, policy.engine = policy.hf.generation_config, "generate"
    policy.hf.generate = lambda **_: {}["broken"]
    with pytest.raises(KeyError):
        sampled(policy)
    assert policy.hf.generation_config is before


def test_greedy_takes_the_argmax_and_records_temperature_one():
    policy = make_policy()
    rows = sampled(policy, 1, temperature=0.0)
    for row in rows:
        with torch.no_grad():
            logits = policy.hf(input_ids=torch.tensor([row.ids])).logits[0]
        best = logits.argmax(-1).tolist()
        assert row.ids[row.prompt_length:] == best[row.prompt_length - 1 : -1]
    check_recorded(policy, rows, 1.0)
    again = sampled(policy, 1, temperature=0.0)
    assert [vars(row) for row in again] == [vars(row) for row in rows]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_rows_tokens_do_not_depend_on_the_rows_around_it(kind):
    together = sampled(make_policy(kind=kind))
    apart = sampled(make_policy("--rollout-tokens", "1", kind=kind))
    pairs = sampled(make_policy("--rollout-tokens", "50", kind=kind))
    assert [r.ids for r in together] == [r.ids for r in apart] == [r.ids for r in pairs]


def test_the_seed_and_the_key_decide_what_is_sampled():
    policy = make_policy()
    first = sampled(policy)
    assert [r.ids for r in sampled(policy)] == [r.ids for r in first]
    assert [r.ids for g in policy.sample(PROMPTS, 6, 1.0, 2) for r in g] != [r.ids for r in first]
    assert [r.ids for r in sampled(make_policy("--seed", "9"))] != [r.ids for r in first]
    assert len({tuple(r.ids) for r in first[:6]}) > 1  # the rows of a group differ


def test_rollouts_come_in_prompt_order_with_the_version_of_the_weights():
    policy = make_policy()
    policy.version = 17
    groups = policy.sample(PROMPTS, 3, 1.0, 1)
    assert [len(group) for group in groups] == [3, 3, 3]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert all(row.prompt is prompt and row.ids[: row.prompt_length] == policy.encode(prompt) for row in group)
        assert all(row.version == [17] * len(row.mask) for row in group)


@pytest.mark.plain
@pytest.mark.parametrize("checkpointing", [False, True])
def test_generation_is_in_eval_mode_with_the_cache_on(checkpointing):
    policy = make_policy()
    expected = [row.ids for row in sampled(policy)]
    if checkpointing:
        policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy.model.train()
    seen = []
    policy.hf.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["input_ids"].shape[1], module.training)), with_kwargs=True)
    assert [row.ids for row in sampled(policy)] == expected
    assert [n for n, _ in seen] == [12] + [1] * (len(seen) - 1) and len(seen) > 2
    assert not any(training for _, training in seen) and not policy.model.training


def test_broken_weights_end_the_training_with_a_reason():
    policy = make_policy()
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingFailed, match="not finite"):
        sampled(policy)


# ---- the draw itself
LOGITS = torch.tensor([2.0, 0.5, -1.0, 0.0, 1.5, -3.0, 0.3, 1.0])


def drawn(n, temperature, top_k=0, top_p=1.0, logits=LOGITS):
    uniforms = torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    names = ("tokens", "logp", "entropy", "filtered")
    values = draw(logits.expand(n, -1), uniforms[:, 0], temperature, top_k, top_p)
    return types.SimpleNamespace(**dict(zip(names, values, strict=True)))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(temperature):
    n, weights = 6000, np.exp(LOGITS.double().numpy() / temperature)
    expected = n * weights / weights.sum()
    counts = np.bincount(drawn(n, temperature).tokens.numpy(), minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees of freedom, 99.9 %


def test_filtered_tokens_are_never_drawn_and_the_others_keep_their_odds():
    n, p = 6000, np.exp(LOGITS.double().numpy())
    kept = np.array([0, 4, 7])  # the three largest
    some = drawn(n, 1.0, top_k=3)
    counts = np.bincount(some.tokens.numpy(), minlength=8)
    expected = n * p[kept] / p[kept].sum()
    assert counts.sum() == counts[kept].sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, 99.9 %
    assert some.filtered.numpy() == pytest.approx(1 - p[kept].sum() / p.sum(), abs=1e-6)
    token = some.tokens.numpy()
    assert some.logp.numpy() == pytest.approx(np.log(p / p.sum())[token], abs=1e-5)  # before the filter


def test_without_a_filter_the_filtered_mass_is_exactly_zero():
    policy = make_policy()
    sampled(policy)
    assert policy.filtered_mass == 0
    sampled(policy, temperature=0.0)
    assert policy.filtered_mass == 0


@pytest.mark.parametrize("top_k, top_p, kept", [
    (0, 1.0, [0.4, 0.3, 0.2, 0.1]), (2, 1.0, [0.4, 0.3]), (9, 1.0, [0.4, 0.3, 0.2, 0.1]), (0, 0.65, [0.4, 0.3]),
    (0, 0.75, [0.4, 0.3, 0.2]), (0, 1e-6, [0.4]),
    (2, 0.5, [0.4]),  # top-k first: 0.4 is 57 % of what is left; the other way round 0.3 would stay
])
def test_top_k_comes_before_top_p(top_k, top_p, kept):
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    out = keep_top(p, top_k, top_p)[0]
    assert sorted(out[out > 0].tolist(), reverse=True) == kept


@pytest.mark.parametrize("u, token", [(0.0, 1), (0.2999, 1), (0.3001, 2), (0.9999, 2), (1.0 - 2**-53, 2)])
def test_the_ends_of_the_uniform_interval_never_reach_an_impossible_token(u, token):
    logits = torch.tensor([[-math.inf, math.log(0.3), math.log(0.7), -math.inf]])
    drawn_token, _, entropy, _ = draw(logits, torch.tensor([u], dtype=torch.float64), 1.0, 0, 1.0)
    assert drawn_token.item() == token and entropy.isfinite().all()


def test_the_filtered_mass_of_a_rollout_is_reported():
    policy = make_policy("--top-k", "3")
    rows = sampled(policy)
    check_recorded(policy, rows)  # still the unfiltered policy's
    masses = []
    for row in rows:
        with torch.no_grad():
            p = policy.hf(input_ids=torch.tensor([row.ids])).logits[0].softmax(-1)
        masses += [1 - p[k].topk(3).values.sum().item() for k in range(row.prompt_length - 1, len(row.ids) - 1)]
    assert policy.filtered_mass == pytest.approx(np.mean(masses), abs=1e-5) and policy.filtered_mass > 0.05


# ---- log-probabilities of the update
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "mistral"])
def test_a_short_row_has_its_unpadded_logp_next_to_long_ones(kind):
    policy = make_policy(kind=kind)
    rows = [hand_rollout([5], [6, 7]), hand_rollout(list(range(3, 15)), [4]), hand_rollout([9, 9], [3, 0, 0, 0, 5, 1])]
    logp, entropy = token_logps(policy, policy.hf, [TrainRow(r, 0.0) for r in rows], 0.8, entropy=True)
    for i, row in enumerate(rows):
        expected, spread = plain(policy.hf, row, 0.8)
        np.testing.assert_allclose(logp[i, : len(row.mask)].detach(), expected, atol=1e-4)
        np.testing.assert_allclose(entropy[i, : len(row.mask)].detach(), spread, atol=1e-4)


@pytest.mark.plain
def test_logits_are_made_for_completion_positions_only():
    policy = make_policy()
    shapes = []
    policy.hf.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    token_logps(policy, policy.hf, [TrainRow(hand_rollout(list(range(3, 23)), [4, 5, 1]), 0.0)], 1.0)
    assert shapes == [(1, 4, 32)]


def test_chunks_change_neither_values_nor_gradients():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 11, dtype=torch.float64), torch.randint(11, (3, 7))
    found = []
    for chunk in (1, 4, 1000):
        x = logits.clone().requires_grad_(True)
        logp, entropy = engine.logps.chunked_logps(lambda y: y, x.flatten(0, 1), targets.flatten(), 0.7, True, chunk)
        (logp.sum() + 2 * entropy.sum()).backward()
        found.append((logp.detach(), entropy.detach(), x.grad))
    for parts in zip(*found, strict=True):
        assert torch.allclose(parts[0], parts[1], atol=1e-14) and torch.allclose(parts[0], parts[2], atol=1e-14)


def test_an_impossible_token_elsewhere_in_the_vocabulary_leaves_entropy_and_gradient_finite():
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    logp, entropy = engine.logps.chunked_logps(lambda x: x, logits[0], torch.tensor([1]), 1.0, True)
    (logp.sum() + entropy.sum()).backward()
    assert entropy.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize("budget", [1, 10, 25, 60, 10_000])
def test_micro_batches_hold_every_row_once_within_the_budget(budget):
    rng = np.random.default_rng(0)
    rows = [TrainRow(hand_rollout([3] * rng.integers(1, 12), [4] * rng.integers(1, 9)), 0.0) for _ in range(13)]
    batches = micro_batches(rows, budget, False)
    assert sorted(map(id, (row for batch in batches for row in batch))) == sorted(map(id, rows))
    for batch in batches:
        width = max(r.rollout.prompt_length for r in batch) + max(len(r.rollout.mask) for r in batch)
        assert len(batch) == 1 or width * len(batch) <= budget
    assert len(batches) == (13 if budget == 1 else 1 if budget == 10_000 else len(batches))


# ---- prompts
def test_one_bos_where_template_and_tokenizer_both_add_it():
    policy = make_policy(tokenizer=chat_tokenizer("<s> " + CHAT, bos="<s>"))
    ids = policy.encode(Prompt([{"role": "user", "content": "w5 w6"}]))
    assert ids == [28, 29, 5, 6, 2, 30]
    assert policy.encode(Prompt("w5 w6")) == [28, 5, 6]  # plain text gets the tokenizer's


def test_a_template_without_bos_gets_none():
    policy = make_policy(tokenizer=chat_tokenizer(bos="<s>"))
    assert policy.encode(Prompt([{"role": "user", "content": "w5"}])) == [29, 5, 2, 30]


def test_a_missing_chat_template_names_the_flag():
    with pytest.raises(UserError, match="--chat-template"):
        make_policy().encode(Prompt([{"role": "user", "content": "w5"}]))


def test_the_end_of_turn_of_the_template_is_a_stop_id():
    policy = make_policy(tokenizer=chat_tokenizer())
    assert policy.tokenizer.eos_token_id == 1 and policy.stop_ids == [1, 2]


def test_a_template_that_refuses_the_probe_leaves_the_other_stop_ids():
    assert make_policy(tokenizer=chat_tokenizer("{{ raise_exception('no') }}")).stop_ids == [1]


def test_a_template_that_drops_the_probes_text_adds_no_stop_id():
    template = "<s> {% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} {% endif %}{% endfor %}"
    tokenizer = chat_tokenizer(template, bos="<s>")
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    assert make_policy(tokenizer=tokenizer).stop_ids == [1]


@pytest.mark.parametrize("flags, words, fits", [
    ("", 56, True), ("", 57, False), ("--max-prompt 5", 5, True), ("--max-prompt 5", 6, False),
    ("--context 20", 12, True), ("--context 20", 13, False), ("", 0, False)])
def test_a_prompt_fits_where_it_leaves_room_for_a_whole_completion(flags, words, fits):
    policy = make_policy(*flags.split())  # 64 positions, 8 new tokens
    assert policy.fits(Prompt(" ".join(["w5"] * words))) == fits


# ---- several turns
class Replying(Task):
    """Answers the first `times` turns with a tool's result and a question."""

    parts = ("even",)

    def __init__(self, args, times=1, answer=(("tool", "w7 w8"), ("user", "w9"))):
        super().__init__(args)
        self.times, self.answer, self.seen = times, answer, []

    def reply(self, rollout):
        turns = sum(turn["role"] == "assistant" for turn in rollout.turns)
        self.seen.append(turns)
        return [{"role": r, "content": c} for r, c in self.answer] if turns <= self.times else None


CHAT_PROMPTS = [Prompt([{"role": "user", "content": "w5"}]), Prompt([{"role": "user", "content": "w5 w6 w7 w8 w9"}])]


def replying(*flags, times=1, stop=EVEN, kind="llama", **values):
    task = Replying(make_args(*flags), times, **values)
    policy = make_policy(*flags, tokenizer=chat_tokenizer(), task=task, kind=kind)
    policy.stop_ids = sorted({1, 2, *stop})
    return policy, task


def observation_spans(row):
    """(start, end) in the completion of each run of observation tokens."""
    edges = np.flatnonzero(np.diff([1, *row.mask, 1]))
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.plain
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_reply_becomes_observation_tokens_between_two_turns(kind):
    policy, _ = replying("--max-turns", "3", kind=kind)
    seen = []
    policy.hf.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([kwargs["input_ids"], kwargs["attention_mask"]]), with_kwargs=True)
    rows = sampled(policy, 12, prompts=CHAT_PROMPTS)
    prefills = {tuple(i[m.bool()].tolist()) for ids, mask in seen if ids.shape == mask.shape
                for i, m in zip(ids, mask, strict=True)}
    two = [row for row in rows if 0 in row.mask]
    assert len(two) > 4 and any(row.ids[-1] != 2 for row in two)
    for row in two:
        ((start, end),) = observation_spans(row)
        said = row.ids[row.prompt_length:]
        shown = [2, 31, 7, 8, 2, 29, 9, 2, 30]  # closes the turn, the tool's turn, the user's, and opens the next
        assert said[start:end] == (shown[1:] if said[start - 1] == 2 else shown)
        assert said[start - 1] in policy.stop_ids
        assert row.version[start:end] == [-1] * (end - start) and set(row.logp[start:end]) == {0.0}
        assert tuple(row.ids[: row.prompt_length + end]) in prefills  # exactly what the model was fed
        assert [turn["role"] for turn in row.turns] == ["assistant", "tool", "user", "assistant"]
    assert all(row.stop in ("stop", "length") for row in rows)
    policy.hf._forward_pre_hooks.clear()
    check_recorded(policy, rows)


def test_a_turn_cut_at_the_limit_gets_no_reply():
    policy, task = replying("--max-turns", "3", stop=[])
    policy.stop_ids = []
    rows = sampled(policy, 3, prompts=CHAT_PROMPTS)
    assert task.seen == [] and all(row.stop == "length" and 0 not in row.mask for row in rows)


def test_a_reply_after_the_last_turn_leaves_the_row_unfinished():
    policy, _ = replying("--max-turns", "2", times=9)
    rows = sampled(policy, 8, prompts=CHAT_PROMPTS)
    assert "unfinished" in {row.stop for row in rows} <= {"unfinished", "length"}
    for row in rows:
        assert sum(turn["role"] == "assistant" for turn in row.turns) <= 2 and row.mask[-1] == 1
        assert row.stop != "unfinished" or not row.truncated
    single, _ = replying("--max-turns", "1", times=9)
    assert {row.stop for row in sampled(single, 8, prompts=CHAT_PROMPTS)} <= {"unfinished", "length"}


def test_an_observation_without_room_stops_the_row_and_is_not_added():
    policy, _ = replying("--max-turns", "3", "--context", "16", times=9)
    rows = sampled(policy, 8, prompts=CHAT_PROMPTS[:1])
    stopped = [row for row in rows if row.stop == "context"]
    assert stopped and all(row.truncated and len(row.ids) <= 16 for row in rows if row.stop == "context")
    check_recorded(policy, rows)


def test_a_later_turn_is_cut_where_the_context_ends():
    policy, _ = replying("--max-turns", "2", "--context", "22", stop=[*EVEN, *range(3, 27)])  # one-token turns
    policy.stop_ids = [4, 6, 8, 10]
    rows = sampled(policy, 30, prompts=CHAT_PROMPTS[:1])
    assert any(row.stop == "context" and row.mask[-1] == 1 for row in rows)
    assert all(len(row.ids) <= 22 for row in rows)
    check_recorded(policy, rows)


def test_absolute_positions_are_never_passed_by_a_row_next_to_one_with_more_room():
    policy = make_policy(kind="gpt2")  # 64 positions
    policy.stop_ids = []
    short, long = sampled(policy, 1, prompts=[Prompt("w5"), Prompt(" ".join(["w5"] * 60))])
    assert (short.stop, long.stop, len(long.ids)) == ("length", "context", 64)
    check_recorded(policy, [short, long])


def test_a_prompt_that_leaves_no_room_is_refused():
    policy = make_policy()
    with pytest.raises(UserError, match="context|--max-new"):
        sampled(policy, 1, prompts=[Prompt("w5"), Prompt(" ".join(["w5"] * 70))])


def test_a_reply_to_a_plain_text_prompt_is_an_error_that_says_so():
    policy, _ = replying("--max-turns", "2", stop=range(32))
    with pytest.raises(UserError, match="plain"):
        sampled(policy, 2, prompts=[Prompt("w5")])


def fed_tokens(policy):
    """Counts, forward by forward, the tokens that the decoder is fed."""
    counts = []
    policy.hf.get_input_embeddings().register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    return counts


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_a_later_turn_feeds_the_cache_only_what_was_added(kind):
    policy, _ = replying("--max-turns", "4", times=3, kind=kind)
    if policy.engine != "fast":
        pytest.skip("the plain path starts each turn anew")
    counts = fed_tokens(policy)
    rows = sampled(policy, 12, prompts=CHAT_PROMPTS)
    assert sum(sum(turn["role"] == "assistant" for turn in row.turns) > 2 for row in rows) > 4
    prompts = sum(len(policy.encode(prompt)) for prompt in CHAT_PROMPTS)
    written = sum(len(row.mask) for row in rows)
    fed = sum(counts) - prompts
    assert written - len(rows) * 4 <= fed <= written + 0.5 * sum(len(row.mask) for row in rows)  # and rows that ended
    replay = make_policy("--max-turns", "4", tokenizer=chat_tokenizer(), task=Replying(policy.args, 3), kind=kind)
    replay.engine, replay.stop_ids = "generate", policy.stop_ids
    assert [row.ids for row in rows] == [row.ids for row in sampled(replay, 12, prompts=CHAT_PROMPTS)]
    check_recorded(policy, rows)


def test_rows_that_left_the_batch_go_on_from_their_own_keys_in_the_next_turn():
    policy, _ = replying("--max-turns", "3", times=2, stop=[5, 9, 14])  # lengths differ, so rows leave one by one
    rows = sampled(policy, 20, prompts=CHAT_PROMPTS)
    first = [next((i for i, m in enumerate(row.mask) if not m), None) for row in rows]
    assert len({n for n in first if n}) >= 4
    check_recorded(policy, rows)


def test_the_key_of_a_batch_does_not_decide_the_draws_of_several_turns():
    together = sampled(replying("--max-turns", "3", times=2)[0], 8, prompts=CHAT_PROMPTS)
    apart = sampled(replying("--max-turns", "3", "--rollout-tokens", "1", times=2)[0], 8, prompts=CHAT_PROMPTS)
    assert [row.ids for row in together] == [row.ids for row in apart]


def test_a_replayed_step_reads_and_writes_the_same_tensors_each_time(monkeypatch):
    expected = [row.ids for row in sampled(make_policy("--max-new", "30"), 12)]
    captured = []

    def capture(cache, hf, token, seen):
        """What a CUDA graph does: the operations of one_each at the addresses of its first tensors."""
        captured.append((len(token), seen))
        fed, length, out = token.clone(), cache.length, []

        class Graph:
            @staticmethod
            def replay():
                assert cache.length is length
                logits = cache.one_each(hf, fed, seen)
                out[0].copy_(logits) if out else out.append(logits.clone())

        before = length.clone()
        Graph.replay()
        length.copy_(before)
        return Graph, fed, out[0]

    monkeypatch.setattr(attention.Cache, "capture", capture)
    policy = make_policy("--max-new", "30")
    policy.args = with_flags(policy.args, cuda_graphs=True)
    assert [row.ids for row in sampled(policy, 12)] == expected
    if policy.engine == "fast":
        assert len(captured) == len({rows for rows, _ in captured}) and {seen for _, seen in captured} == {42}


# ---- the packed update's attention
LENGTHS = [([5, 6, 7], n) for n in (1, 2, 9, 3)] + [([8], n) for n in (30, 1, 12)] + [(list(range(3, 20)), 5)]


@pytest.mark.parametrize("window", [None, 4])
def test_flex_attention_sees_what_the_gathered_blocks_see(window):
    torch.manual_seed(0)
    rows = [TrainRow(hand_rollout(prompt, [4 + i % 20 for i in range(n)], prompt=Prompt(str(prompt))), 0.0)
            for prompt, n in LENGTHS]
    shared = {tuple(row.rollout.ids[: row.rollout.prompt_length]): row.rollout.prompt for row in rows}
    for row in rows:
        row.rollout.prompt = shared[tuple(row.rollout.ids[: row.rollout.prompt_length])]
    plans = [attention.PackedLayout([row.rollout for row in rows], torch.device("cpu"), flex) for flex in (False, True)]
    n = len(plans[0].ids)
    assert n == 3 + 1 + 17 + sum(length - 1 for _, length in LENGTHS) and plans[1].ids.equal(plans[0].ids)
    q, k, v = torch.randn(4, n, 16), torch.randn(2, n, 16), torch.randn(2, n, 16)
    first, second = (plan.attend(0, q, k, v, None, window) for plan in plans)
    assert (first - second).abs().max() < 1e-5


def test_a_block_holds_segments_of_similar_length_and_every_token_once():
    rows = [TrainRow(hand_rollout(prompt, [4] * n), 0.0) for prompt, n in LENGTHS]
    plan = attention.PackedLayout([row.rollout for row in rows], torch.device("cpu"), False)
    assert sorted(plan.place.tolist()) == sorted(set(plan.place.tolist())) and len(plan.place) == len(plan.ids)
    padded = sum(q.numel() for q, _, _ in plan.blocks)
    assert padded <= len(plan.ids) / 0.6


# ---- the micro-batch budget
def measured(policy, monkeypatch, seconds):
    """The budget that is chosen where a forward and backward of a budget takes seconds(budget)."""
    clock, sizes = [0.0], []

    def logps(policy, hf, batch, temperature):
        tokens = sum(len(row.rollout.ids) for row in batch)
        sizes.append(tokens)
        clock[0] += seconds(len(sizes) - 1)
        return sum(p.sum() for p in policy.model.parameters()), None

    monkeypatch.setattr(autotune, "token_logps", logps)
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: clock[0])
    said = []
    return autotune.measure_budget(policy, said.append), said


def test_the_budget_grows_while_it_pays(monkeypatch):
    policy = make_policy("--group", "4")
    assert measured(policy, monkeypatch, lambda call: 1.0 if call < 6 else 4.0)[0] == 8192  # two calls a budget
    assert all(p.grad is None for p in policy.model.parameters())


def test_the_budget_stops_where_memory_ends(monkeypatch):
    def seconds(call):
        if call >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    policy = make_policy("--group", "4")
    assert measured(policy, monkeypatch, seconds)[0] == 4096
    assert all(p.grad is None for p in policy.model.parameters())


def test_a_deterministic_run_does_not_measure(monkeypatch):
    policy = make_policy("--deterministic")
    assert measured(policy, monkeypatch, lambda call: 1 / 0)[0] == 16_384


@pytest.mark.parametrize("flag", ["--cuda-graphs"])
def test_a_flag_for_cuda_is_refused_without_it(flag):
    with pytest.raises(UserError, match="CUDA"):
        models.loading.pick_device(make_args(flag))


@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), st.integers(1, 5))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_rows_that_stay_in_a_cache_keep_what_it_held_of_them(stays, longest):
    cache = attention.Cache(len(stays), 6, "cpu")
    cache.layers = {layer: (torch.randn(len(stays), 2, 6, 3), torch.randn(len(stays), 2, 6, 3)) for layer in (0, 1)}
    cache.length, cache.longest = torch.randint(1, longest + 1, (len(stays),)), longest
    alive = [i for i, stay in enumerate(stays) if stay]
    before, length = copy.deepcopy(cache.layers), cache.length.clone()
    order = cache.keep_rows(alive)
    assert sorted(order) == alive and cache.length.tolist() == length[order].tolist()
    assert cache.longest == max(cache.length)
    for layer, pair in cache.layers.items():
        for now, was in zip(pair, before[layer], strict=True):
            assert torch.equal(now[:, :, : cache.longest], was[order][:, :, : cache.longest])


def test_the_entropy_of_large_logits_is_exact_and_never_negative():
    torch.manual_seed(0)
    logits = torch.randn(64, 2000) * 4 + 30
    for temperature in (1.0, 0.05):
        exact = (logits.double() / temperature).log_softmax(-1)
        entropy = draw(logits, torch.rand(64, dtype=torch.float64), temperature, 0, 1.0)[2]
        targets = torch.zeros(64, dtype=torch.long)
        again = engine.logps.chunked_logps(lambda x: x, logits, targets, temperature, True)[1]
        for found in (entropy, again):
            assert (found + (exact.exp() * exact).sum(-1)).abs().max() < 1e-4 and found.min() >= -1e-6


def test_turns_hold_no_more_memory_than_their_rows_need(monkeypatch):
    """What is kept of a turn is no larger than its rows' keys and values up to the longest."""
    kept = []
    decode = engine.rollout.decode

    def looking(policy, rows, buffer, kv_rows):
        left = decode(policy, rows, buffer, kv_rows)
        caches = {kv.cache for kv in left.values()}
        tensors = [(cache, x) for cache in caches for pair in cache.layers.values() for x in pair]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for _, x in tensors}
        needed = sum(x[:, :, : cache.longest].numel() * x.element_size() for cache, x in tensors)
        kept.append((sum(storages.values()), needed, len(left), len(rows)))
        return left

    monkeypatch.setattr(engine.rollout, "decode", looking)
    policy, _ = replying("--max-turns", "3", times=2, stop=[5, 9, 14])
    if policy.engine != "fast":
        pytest.skip("keeps nothing")
    sampled(policy, 24, prompts=CHAT_PROMPTS)
    assert len(kept) > 1 and all(held == rows for _, _, held, rows in kept)
    assert all(stored <= 1.3 * needed for stored, needed, *_ in kept), kept
