"""The LoRA layers with fewer passes give what PEFT's own give, or are PEFT's own."""

import copy
import pickle

import peft
import pytest
import torch
from conftest import random_model

from models.lora import fuse_lora

IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4]])


def lora(kind="qwen2", dtype=torch.float32, **config):
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False} | config
    return peft.get_peft_model(random_model(kind, dtype=dtype), peft.LoraConfig(**settings))


def gradients(model, ids=IDS):
    model.zero_grad()
    logits = model(ids).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def near(model, other) -> bool:
    (a, before), (b, after) = gradients(model), gradients(other)
    assert before.keys() == after.keys() and all("lora_" in name for name in before)
    return bool((a - b).abs().max() <= 1e-5 * a.abs().max()) and all(
        (before[name] - after[name]).norm() <= 1e-5 * before[name].norm() for name in before)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
def test_logits_and_gradients_are_those_of_peft(kind):
    model = lora(kind)
    fused = fuse_lora(copy.deepcopy(model))
    assert any("forward" in vars(module) for module in fused.modules()) and near(model, fused)


def test_with_gradient_checkpointing_too():
    model = lora().train()
    fused = fuse_lora(copy.deepcopy(model))
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    fused.enable_input_require_grads()
    assert near(model, fused)


def test_a_switched_off_a_merged_and_another_adapter_are_followed():
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    fused = fuse_lora(copy.deepcopy(model))
    with torch.no_grad():
        for adapter in ("default", "other"):
            for one in (model, fused):
                one.set_adapter(adapter)
            torch.testing.assert_close(fused(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
        with model.disable_adapter(), fused.disable_adapter():
            assert torch.equal(fused(IDS).logits, model(IDS).logits)
        model.base_model.set_adapter(["default", "other"])
        fused.base_model.set_adapter(["default", "other"])
        assert torch.equal(fused(IDS).logits, model(IDS).logits)  # two at once: PEFT's own
        fused.merge_adapter()
        torch.testing.assert_close(fused(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["q_proj"]}])
def test_other_kinds_of_lora_are_left_to_peft(config):
    model = lora(**config)
    assert torch.equal(fuse_lora(copy.deepcopy(model))(IDS).logits, model(IDS).logits)


def test_an_adapter_of_another_precision_than_its_base_is_left_to_peft():
    model = lora(dtype=torch.bfloat16)
    fused = fuse_lora(copy.deepcopy(model))
    assert {p.dtype for name, p in fused.named_parameters() if "lora_" in name} == {torch.float32}
    assert torch.equal(fused(IDS).logits, model(IDS).logits)


def test_a_copy_of_the_model_reads_its_own_weights():
    fused = fuse_lora(lora())
    twin = copy.deepcopy(fused)
    before = fused(IDS).logits
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert torch.equal(fused(IDS).logits, before) and not torch.equal(twin(IDS).logits, before)


def test_what_looks_at_the_base_layer_sees_what_peft_shows_it():
    model = lora()
    fused, seen = fuse_lora(copy.deepcopy(model)), {}
    for name, one in (("peft", model), ("fused", fused)):
        layer = one.get_base_model().model.layers[1].mlp.down_proj
        layer.base_layer.register_forward_hook(lambda m, given, out, name=name: seen.setdefault(name, out.clone()))
        one(IDS)
    assert torch.allclose(seen["peft"], seen["fused"], atol=1e-5) and seen["fused"].dim() == 3


def test_dropout_and_autocast_are_left_to_peft():
    model = lora(lora_dropout=0.5).train()
    fused = fuse_lora(copy.deepcopy(model))
    torch.manual_seed(1)
    before = model(IDS).logits
    torch.manual_seed(1)
    assert torch.equal(fused(IDS).logits, before)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.eval()(IDS).logits.shape == before.shape


def test_a_fused_model_can_be_pickled():
    fused = fuse_lora(lora())
    assert torch.equal(pickle.loads(pickle.dumps(fused))(IDS).logits, fused(IDS).logits)
