"""The reconstructor predicts from the stated state, alone as in a batch, and loads only what fits it."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import random_model, word_tokenizer
from safetensors.torch import load_file, save_file

from data import UserError
from tasks.nla import reconstructor
from tasks.nla.reconstructor import Critic, Spec, baselines, fve, mse, normalise

CPU, TEMPLATE = torch.device("cpu"), "w3 w4 {explanation} w9"
SCALE = 32**0.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random model of each kind on disk, by kind."""
    found = {}
    for kind in ("llama", "qwen2", "gpt2"):
        found[kind] = tmp_path_factory.mktemp(kind)
        random_model(kind).save_pretrained(found[kind])
        word_tokenizer().save_pretrained(found[kind])
    return found


def spec_of(folder, **values) -> Spec:
    return Spec(**{"model": str(folder), "layer": 0, "scale": SCALE, "template": TEMPLATE, **values})


def built(folder, **values):
    return reconstructor.build(spec_of(folder, **values), CPU, torch.float32)


# ---- the numbers, by hand
def test_the_error_is_that_of_normalised_vectors():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    assert normalise(a, 2**0.5).tolist() == pytest.approx([0.6 * 2**0.5, 0.8 * 2**0.5])
    assert mse(a, b, 2**0.5).item() == pytest.approx(2 * (1 - 0.8))  # at √d twice one minus the cosine
    assert mse(a, b, 1.0).item() == pytest.approx((0.36 + 0.04) / 2)
    assert mse(a, -a, 2**0.5).item() == pytest.approx(4.0)


def test_both_baselines_and_fve_by_hand():
    """Directions (1, 0) and (0, 1) at norm 2: the mean is (1, 1), at norm 2 it is (√2, √2)."""
    raw, older = baselines(torch.tensor([[5.0, 0.0], [0.0, 3.0]]), 2.0)
    assert raw == pytest.approx(1.0)
    assert older == pytest.approx(((2 - 2**0.5) ** 2 + 2) / 2)
    assert fve(0.25, raw) == pytest.approx(0.75) and fve(raw, raw) == 0.0 and fve(3.0, raw) == pytest.approx(-2.0)


# ---- what is read
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("layer, final_norm", [(0, False), (1, False), (1, True)])
def test_with_the_identity_head_it_gives_the_layers_normalised_state(folders, kind, layer, final_norm):
    model, hf = built(folders[kind], layer=layer, final_norm=final_norm), random_model(kind)
    ids, seen = [3, 4, 11, 12, 9], []
    assert kind == "qwen2" or model.encode("w11 w12") == ids  # transformers gives a Qwen2 folder its own tokenizer
    layers = hf.base_model.layers if kind != "gpt2" else hf.base_model.h
    layers[layer].register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        last = hf.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        expected = normalise((last if final_norm else seen[0])[0, -1], SCALE)
        found = model.predict([ids])[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.norm().item() == pytest.approx(SCALE, rel=1e-5) and model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_batch_gives_what_one_by_one_gives(folders, kind):
    model = built(folders[kind], lora_r=2)
    torch.nn.init.normal_(model.head.weight)
    rows = [model.encode(" ".join(f"w{3 + (i * j) % 20}" for j in range(1, 2 + i))) for i in range(9)]
    alone = torch.cat([model.score([row]) for row in rows])
    np.testing.assert_allclose(model.score(rows), alone, atol=1e-4)
    np.testing.assert_allclose(model.score(rows, budget=25), alone, atol=1e-4)


# ---- templates and texts
@pytest.mark.parametrize("template", ["w3 w4", "w3 {explanation}", "w3 {explanation}  ", "w3 {explanatio",
                                      "{explanation} {explanation} w9"])
def test_a_truncated_template_is_refused(folders, template):
    with pytest.raises(UserError, match="template"):
        built(folders["llama"], template=template)


def test_a_text_that_does_not_fit_is_never_cut(folders):
    model = built(folders["llama"])  # a context of 64
    assert len(model.encode(" ".join(["w5"] * 61))) == 64
    with pytest.raises(ValueError, match="65 tokens"):
        model.encode(" ".join(["w5"] * 62))


def test_a_text_cannot_write_the_marks_of_the_layout(folders):
    model = built(folders["llama"])
    assert model.encode("w11 <eos> w12") == model.encode("w11 w12")


def test_a_tail_that_merges_with_the_text_is_refused(folders):
    with pytest.raises(UserError, match="merges"):
        built(folders["llama"], template="w3 {explanation}5").encode("w1")


# ---- saving and loading
@pytest.mark.parametrize("lora_r", [0, 2])
def test_what_was_saved_comes_back(folders, tmp_path, lora_r):
    model = built(folders["llama"], lora_r=lora_r)
    with torch.no_grad():
        for p in model.trainable().values():
            p.add_(0.1 * torch.randn_like(p))
    model.save(tmp_path)
    again = reconstructor.load(tmp_path, CPU, torch.float32)
    assert again.spec == model.spec
    np.testing.assert_array_equal(again.score([[3, 4, 9]]), model.score([[3, 4, 9]]))
    trained = set(load_file(tmp_path / "reconstructor.safetensors"))
    assert trained == set(again.trainable()) and "head.weight" in trained
    assert (lora_r == 0) == all(p.requires_grad for p in again.parameters())
    assert lora_r == 0 or all("lora_" in name or name == "head.weight" for name in trained)


@pytest.mark.parametrize("change, said", [
    (lambda t: t.pop(next(n for n in t if "lora_A" in n)), "is missing"),
    (lambda t: t.update(other=torch.zeros(2)), "other is unexpected"),
    (lambda t: t.update({"head.weight": torch.zeros(2, 2)}), "has shape"),
])
def test_tensors_that_do_not_fit_are_an_error(folders, tmp_path, change, said):
    built(folders["llama"], lora_r=2).save(tmp_path)
    tensors = load_file(tmp_path / "reconstructor.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "reconstructor.safetensors")
    with pytest.raises(UserError, match=said):
        reconstructor.load(tmp_path, CPU, torch.float32)


def test_a_reconstructor_of_a_4bit_base_is_refused_on_a_16bit_one(folders, tmp_path):
    model = built(folders["llama"], lora_r=2)
    model.spec = dataclasses.replace(model.spec, load_4bit=True)
    model.save(tmp_path)
    with pytest.raises(UserError, match="trained on a 4-bit base and is wrong on a 16-bit one"):
        reconstructor.load(tmp_path, CPU, torch.float32, load_4bit=False)
    with pytest.raises(UserError, match="4-bit base"):  # nor in silence where 4 bits cannot be had
        reconstructor.load(tmp_path, CPU, torch.float32)


def test_other_mistakes_are_one_sentence(folders, tmp_path):
    with pytest.raises(UserError, match="layer 2 is no layer"):
        built(folders["llama"], layer=2)
    with pytest.raises(UserError, match="cannot be loaded"):
        built(tmp_path / "none")
    with pytest.raises(UserError, match="tasks.nla reconstruct"):
        reconstructor.load(tmp_path, CPU, torch.float32)
    with pytest.raises(UserError, match="cannot be trained"):
        built(folders["llama"], load_4bit=True)


# ---- its training
def test_micro_batches_change_nothing_and_a_gradient_that_is_not_finite_changes_nothing_at_all(folders):
    rows, gold = [[3, 4, 11, 9], [3, 4, 12, 13, 14, 9], [3, 9]], torch.randn(3, 32)
    whole, parts = (Critic(built(folders["llama"]), 1e-2, budget) for budget in (1000, 1))
    first, second = whole.step(rows, gold), parts.step(rows, gold)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5) and first["skipped"] == 0
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    with torch.no_grad():
        own = mse(built(folders["llama"]).score(rows), gold, SCALE)
    assert first["loss"] == pytest.approx(own.mean().item(), rel=1e-5)
    before = {name: p.detach().clone() for name, p in whole.model.trainable().items()}
    assert whole.step(rows, gold * torch.nan)["skipped"] == 1
    assert all(torch.equal(p, before[name]) for name, p in whole.model.trainable().items())
    assert whole.step(rows, gold)["loss"] < first["loss"]


def test_a_checkpoint_without_the_critics_optimizer_is_an_error(folders, tmp_path):
    critic = Critic(built(folders["llama"]), 1e-2)
    critic.save(tmp_path)
    critic.load(tmp_path)
    (tmp_path / "optimizer.pt").unlink()
    with pytest.raises(UserError, match="no optimizer of the critic"):
        critic.load(tmp_path)
