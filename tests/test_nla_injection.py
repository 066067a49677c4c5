"""An injected vector changes the residual at its marker by the stated amount, and nothing else, in every path.

The independent computation is `residual_and_logits`: a copy of the model with a hook made by hand, one row at a time.
"""

import copy
import types

import numpy as np
import peft
import pytest
import torch
from conftest import WordTask, hand_rollout, make_policy, random_model

from data import Prompt, TrainingFailed, UserError
from engine import attention
from engine.logps import TrainRow, token_logps
from tasks.nla.injection import EPSILON, Injection, added, decoder_layers

LEFT, MARKER, RIGHT = 21, 20, 22
KINDS = ["llama", "qwen2", "gpt2"]


def prompt_of(text: str, seed: int | None) -> Prompt:
    vector = None if seed is None else np.random.default_rng(seed).normal(size=32).astype(np.float32)
    return Prompt(text, inject=vector)


def prompts() -> list[Prompt]:
    """Of three lengths, the marker at three places; the second has no vector and no marker."""
    return [
        prompt_of("w5 w21 w20 w22", 1),
        prompt_of("w9 w4", None),
        prompt_of("w3 w4 w5 w7 w21 w20 w22 w6 w6", 2),
    ]


class InjectingTask(WordTask):
    """The task's side of the interface: it hands the prompts of a forward to the injection."""

    def prepare_model(self, policy):
        self.injection = Injection(0, MARKER, LEFT, RIGHT, policy.encode)
        self.injection.install(policy.hf)

    def on_forward(self, prompts):
        self.injection.feed(prompts)


def injecting_policy(kind="llama", fast=False, **keywords):
    policy = make_policy(kind=kind, **keywords)
    policy.task = InjectingTask(policy.args)
    policy.task.prepare_model(policy)
    if fast:
        assert attention.install_attention(policy.hf)
        policy.engine = "fast"
    return policy


def residual_and_logits(hf, ids, prompt):
    """What layer 1 receives, (n, D), and the logits (n, V), of one row alone; the vector by a hook made by hand."""
    hf = copy.deepcopy(hf)
    seen = []
    for module in hf.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    layers = decoder_layers(hf)

    def add(module, args, output):
        if prompt.inject is not None:
            at = list(ids).index(MARKER)
            v = torch.tensor(prompt.inject)
            h = output[0, at].clone()
            output[0, at] = h + h.norm() * v / (v.norm() + EPSILON)
        return output

    layers[0].register_forward_hook(add)
    layers[1].register_forward_pre_hook(lambda m, a, k: seen.append(received(a, k)[0]), with_kwargs=True)
    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([ids])).logits[0].clone()
    logits[:, MARKER] = -torch.inf
    return seen[0], logits


def received(args, keywords) -> torch.Tensor:
    """The hidden states (b, n, D) that a layer is called with."""
    return args[0] if args else keywords["hidden_states"]


def expected_logps(hf, row) -> torch.Tensor:
    """(T,) log-probabilities of what follows a row's prompt, by `residual_and_logits`."""
    _, logits = residual_and_logits(hf, row.ids, row.prompt)
    n = row.prompt_length
    sampled = torch.tensor(row.ids[n:])
    return logits[n - 1 : -1].log_softmax(-1).gather(-1, sampled[:, None])[:, 0]


def watch(hf) -> list[torch.Tensor]:
    """The list that gets what layer 1 receives in each forward."""
    seen = []

    def keep(module, args, keywords):
        seen.append(received(args, keywords).detach().clone())

    decoder_layers(hf)[1].register_forward_pre_hook(keep, with_kwargs=True)
    return seen


def rows_of(some) -> list[TrainRow]:
    """Two completions a prompt, of other lengths; one says the marker between its neighbours."""
    said = [[7, 8, 9], [LEFT, MARKER, RIGHT, 5, 6], [4], [3, 3], [9, 8, 7, 6, 5], [11, 12]]
    rows = []
    for i, prompt in enumerate(some):
        ids = [int(word[1:]) for word in prompt.messages.split()]
        for tail in said[2 * i : 2 * i + 2]:
            row = hand_rollout(ids, tail, prompt=prompt)
            rows.append(TrainRow(row, 0.0))
    return rows


# ---- the formula
def test_the_direction_is_added_at_the_residuals_own_norm():
    h, v = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    np.testing.assert_allclose(added(h, v).numpy(), [3.0, 9.0], rtol=1e-6)
    assert added(h, torch.zeros(2)).tolist() == [3.0, 4.0]
    assert added(h.bfloat16(), v).dtype == torch.bfloat16


# ---- one vector at one place, the same in every path
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True], ids=["padded", "packed"])
def test_the_update_forward_injects_at_the_markers_and_nowhere_else(kind, fast):
    policy = injecting_policy(kind, fast)
    rows = rows_of(prompts())
    seen = watch(policy.hf)
    logp = token_logps(policy, policy.hf, rows, 1.0)[0]
    rollouts = [row.rollout for row in rows]
    for i, row in enumerate(rollouts):
        expected = expected_logps(policy.hf, row)
        np.testing.assert_allclose(logp[i, : len(row.mask)].detach(), expected, atol=1e-4)
    if fast:  # one row of tokens: each prompt once, then its completions but for their last tokens
        states = []
        before = None
        for row in rollouts:
            residual, _ = residual_and_logits(policy.hf, row.ids, row.prompt)
            start = row.prompt_length if row.prompt is before else 0
            states.append(residual[start:-1])
            before = row.prompt
        np.testing.assert_allclose(seen[0][0], torch.cat(states), atol=1e-5)
    else:
        longest = max(row.prompt_length for row in rollouts)
        for i, row in enumerate(rollouts):
            residual, _ = residual_and_logits(policy.hf, row.ids, row.prompt)
            left = longest - row.prompt_length
            np.testing.assert_allclose(seen[0][i, left : left + len(row.ids)], residual, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True], ids=["generate", "fast"])
def test_a_rollout_injects_in_the_prompt_and_never_in_a_cached_step(kind, fast):
    policy = injecting_policy(kind, fast)
    some = prompts()
    for prompt, group in zip(some, policy.sample(some, 2, 1.0, "x"), strict=True):
        for row in group:
            assert row.prompt is prompt
            np.testing.assert_allclose(row.logp, expected_logps(policy.hf, row), atol=1e-4)


def test_only_the_forward_that_feeds_the_prompt_is_touched():
    """In a rollout of `generate` the prefill differs at the marker by the stated vector; no later step is touched."""
    policy = injecting_policy()
    prompt = prompts()[2]
    changed = []

    def compare(module, args, output, inject=policy.task.injection.inject):
        new = inject(module, args, output)
        if new is not None:
            at = torch.nonzero((new != output).any(-1))
            assert at.tolist() == [[0, 5], [1, 5]]
            expected = added(output[:, 5], torch.tensor(prompt.inject))
            np.testing.assert_array_equal(new[:, 5], expected)
        changed.append(new is not None)
        return new

    layer = decoder_layers(policy.hf)[0]
    layer._forward_hooks.clear()
    layer.register_forward_hook(compare)
    policy.sample([prompt], 2, 1.0, "x")
    assert len(changed) > 2
    assert changed[0] and not any(changed[1:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_finds_the_same_place(side):
    policy = injecting_policy()
    prompt = prompts()[0]
    ids = [5, LEFT, MARKER, RIGHT]
    seen = watch(policy.hf)
    rows = torch.zeros(1, 7, dtype=torch.long)
    mask = torch.zeros_like(rows)
    own = slice(3, 7) if side == "left" else slice(0, 4)
    rows[0, own] = torch.tensor(ids)
    mask[0, own] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    policy.task.on_forward([prompt])
    with torch.no_grad():
        policy.hf(input_ids=rows, attention_mask=mask, position_ids=positions)
    residual, _ = residual_and_logits(policy.hf, ids, prompt)
    np.testing.assert_allclose(seen[0][0, own], residual, atol=1e-5)


@pytest.mark.parametrize("fast", [False, True], ids=["padded", "packed"])
def test_lora_and_gradient_checkpointing_get_the_same_vectors_and_gradients(fast):
    def gradients(checkpointing: bool):
        policy = injecting_policy(fast=fast)
        rows = rows_of(prompts())
        torch.manual_seed(1)
        policy.model = peft.get_peft_model(policy.hf, peft.LoraConfig(r=2, target_modules="all-linear"))
        policy.hf = policy.model.get_base_model()
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
        if checkpointing:
            policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.train()
        logp = token_logps(policy, policy.hf, rows, 1.0)[0]
        logp[torch.isfinite(logp)].sum().backward()
        for i, train_row in enumerate(rows):
            row = train_row.rollout
            expected = expected_logps(policy.hf.eval(), row)
            np.testing.assert_allclose(logp[i, : len(row.mask)].detach(), expected, atol=1e-3)
        return {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}

    plain = gradients(False)
    recomputed = gradients(True)
    assert plain.keys() == recomputed.keys()
    assert any(g.abs().sum() > 0 for g in plain.values())
    for name in plain:
        np.testing.assert_allclose(plain[name], recomputed[name], atol=1e-4)


def test_a_second_adapter_as_reference_sees_the_same_residual():
    policy = injecting_policy()
    rows = rows_of(prompts())[:1]
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    policy.model = peft.get_peft_model(policy.hf, config)
    policy.model.add_adapter("reference", config)
    policy.hf = policy.model.get_base_model()
    policy.reference = "adapter"
    seen = watch(policy.hf)
    with torch.no_grad(), policy.as_reference() as hf:
        token_logps(policy, hf, rows, 1.0)
    row = rows[0].rollout
    residual, _ = residual_and_logits(policy.hf, row.ids, row.prompt)
    np.testing.assert_allclose(seen[0][0, : len(residual)], residual, atol=1e-5)


def test_a_copied_model_has_its_hooks_replaced():
    policy = injecting_policy()
    rows = rows_of(prompts())[:1]
    copied = copy.deepcopy(policy.hf)
    policy.task.injection.install(copied)
    policy.task.injection.install(copied)  # twice is once
    hooks = []
    for module in copied.modules():
        hooks += module._forward_hooks.values()
        hooks += module._forward_pre_hooks.values()
    assert [hook.__self__ for hook in hooks] == [policy.task.injection] * 3
    with torch.no_grad():
        first = token_logps(policy, policy.hf, rows, 1.0)[0]
        second = token_logps(policy, copied, rows, 1.0)[0]
    assert torch.equal(first, second)


# ---- mistakes
def test_a_marker_without_vector_and_a_vector_without_marker_are_errors():
    injection = injecting_policy().task.injection
    wrong = [
        prompt_of("w5 w21 w20 w22", None),
        prompt_of("w5 w6", 1),
        prompt_of("w21 w20 w22 w21 w20 w22", 1),
        prompt_of("w5 w20 w22", 1),
    ]
    for prompt in wrong:
        with pytest.raises(TrainingFailed, match="markers"):
            injection.feed([prompt])


def test_rows_that_are_not_those_announced_are_an_error():
    policy = injecting_policy()
    prompt = prompts()[0]
    policy.task.on_forward([prompt])
    with pytest.raises(TrainingFailed, match="astray"):
        policy.hf(input_ids=torch.tensor([[5, LEFT, MARKER, RIGHT]] * 2))
    with pytest.raises(TrainingFailed, match="marker"):
        policy.hf(input_ids=torch.tensor([[5, LEFT, MARKER, 6]]))
    with pytest.raises(TrainingFailed, match="no token ids"):
        policy.hf(inputs_embeds=torch.zeros(1, 4, 32))
    policy.task.on_forward([])
    policy.hf(input_ids=torch.tensor([[5, LEFT, MARKER, 6]]))


def test_a_layer_that_is_not_there_is_a_users_mistake():
    model = random_model()
    with pytest.raises(UserError, match="--inject-layer 2"):
        Injection(2, MARKER, LEFT, RIGHT, list).install(model)
    odd = types.SimpleNamespace(base_model=torch.nn.Linear(2, 2), config=model.config)
    with pytest.raises(UserError, match="cannot be found"):
        decoder_layers(odd)


# ---- the marker as an output
@pytest.mark.parametrize("fast", [False, True], ids=["generate", "fast"])
def test_the_marker_is_never_written(fast):
    policy = injecting_policy(fast=fast)
    with torch.no_grad():  # a model that would say little else
        policy.hf.get_output_embeddings().weight[MARKER] *= 50
    ids = []
    for group in policy.sample(prompts(), 8, 1.0, "x"):
        for row in group:
            ids += row.ids[row.prompt_length :]
    assert len(ids) > 50 and MARKER not in ids
