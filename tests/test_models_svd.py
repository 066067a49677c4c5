"""The SVD adapter: what δ = 0 is, its gradient, its files; the directions of hacking and the projection."""

import copy
import dataclasses
import math
import shutil

import pytest
import safetensors.torch
import torch
import transformers

import data
import harness.flags
import models.optimizer
import models.policy
import train_grpo
from data import Prompt, UserError
from engine import attention
from engine.logps import TrainRow, token_logps
from models.svd import SingularValues, SVDModel, decompositions
from tasks.code import hack_directions as H
from tests.conftest import WordTask, hand_rollout, make_args, make_policy, random_model, word_tokenizer

IDS = torch.tensor([[3, 9, 14, 4, 22, 7]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapted(kind="llama", dtype=torch.float32, seed=0):
    hf = random_model(kind, dtype=dtype, seed=seed)
    return SVDModel(hf, "random", log=lambda text: None), hf


def logits(hf):
    return hf(IDS).logits


def distance(a, b):
    """The largest absolute difference."""
    return (a - b).abs().max()


def stir(model, scale=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.layers.values():
            layer.delta.copy_(torch.randn_like(layer.delta) * scale)


def svd_policy(*flags):
    args = make_args("--adapter", "svd", *flags)
    model, hf = adapted()
    return models.policy.Policy(args, WordTask(args), model.eval(), hf, word_tokenizer(), hf.device, "off")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_delta_zero_is_the_base_bit_for_bit_and_another_delta_is_not(kind):
    base = random_model(kind)
    model, hf = adapted(kind)
    assert len(model.layers) == {"llama": 14, "qwen2": 14, "gpt2": 8}[kind]
    assert torch.equal(logits(hf), logits(base))
    stir(model)
    assert distance(logits(hf), logits(base)) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(hf), logits(base))


def test_only_delta_is_trained_and_it_is_float32():
    model, _ = adapted(dtype=torch.bfloat16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 14
    for name, parameter in trained.items():
        assert name.endswith(".delta")
        assert parameter.dtype == torch.float32


def test_the_gradient_agrees_with_finite_differences():
    model, hf = adapted("gpt2", dtype=torch.float64)  # Llama's norms compute in float32 whatever the weights are
    stir(model)

    def loss():
        return logits(hf).log_softmax(-1)[0, :, 5].sum()

    for name in list(model.layers)[::3]:
        delta = model.layers[name].delta
        delta.data = delta.data.double()
        (gradient,) = torch.autograd.grad(loss(), delta)
        for i in (0, 3):
            step = torch.zeros_like(delta)
            step[i] = 1e-5
            with torch.no_grad():
                delta += step
                up = loss()
                delta -= 2 * step
                numeric = (up - loss()) / 2e-5
                delta += step
            assert abs(numeric - gradient[i]) < 1e-5 * max(1, abs(numeric))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_merged_model_equals_the_live_one_and_loads_alone(kind, tmp_path):
    model, hf = adapted(kind)
    stir(model)
    SingularValues(model, hf, None).save_merged(tmp_path / "merged")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert distance(logits(alone), logits(hf)) < 1e-5


def test_deltas_come_back_from_a_folder_and_not_on_other_weights(tmp_path):
    model, hf = adapted()
    stir(model)
    model.save_pretrained(tmp_path)
    again, hf_again = adapted()
    again.load(tmp_path)
    assert torch.equal(logits(hf), logits(hf_again))
    other, _ = adapted(seed=5)
    with pytest.raises(UserError, match="other weights"):
        other.load(tmp_path)


def test_decompositions_are_cached_and_a_damaged_file_is_made_again(tmp_path):
    said = []
    base = random_model()
    modules = {"q": base.model.layers[0].self_attn.q_proj}
    first = decompositions(modules, "m", "hash", True, said.append)
    (file,) = (tmp_path / "cache" / "train_grpo").glob("svd-*.safetensors")
    before = file.stat().st_mtime_ns
    again = decompositions(modules, "m", "hash", True, said.append)
    assert torch.equal(first["q"][0], again["q"][0])
    assert file.stat().st_mtime_ns == before
    assert not said
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(bytes(damaged))
    mended = decompositions(modules, "m", "hash", True, said.append)
    assert "damaged" in said[0]
    assert torch.equal(mended["q"][1], first["q"][1])
    u, vh = mended["q"]
    weight = modules["q"].weight.detach()
    values = torch.diag(u.T @ weight @ vh.T)
    assert torch.allclose(u @ torch.diag(values) @ vh, weight, atol=1e-5)


def test_the_reference_is_delta_zero_and_the_rollout_merge_leaves_no_trace():
    policy = svd_policy()
    base = random_model()
    stir(policy.model)
    with policy.as_reference() as hf:
        assert torch.equal(logits(hf), logits(base))
    live = logits(policy.hf)
    assert attention.install_attention(policy.hf)
    policy.engine = "fast"
    with policy.adapter.merged_in():
        assert all(layer.disable_adapters for layer in policy.model.layers.values())
        assert torch.allclose(logits(policy.hf), live, atol=1e-4)
    assert torch.allclose(logits(policy.hf), live, atol=1e-6)
    *asked, before_last, last = IDS[0].tolist()
    row = hand_rollout(asked, [before_last, last])
    logps = []
    for policy.engine in ("fast", "generate"):
        logps.append(token_logps(policy, policy.hf, [TrainRow(row, 1.0)], 1.0)[0])
    assert torch.allclose(*logps, atol=1e-5)


def test_four_bit_weights_are_refused_in_one_sentence():
    with pytest.raises(UserError, match="--load-4bit True .*--adapter lora"):
        make_args("--adapter", "svd", "--load-4bit")


def test_a_run_with_the_adapter_resumes_exports_and_is_evaluated(words, command, tmp_path):
    flags = svd_flags(words, tmp_path, "--beta", "0.1", "--lr", "1e-2", "--save-method", "merged", "--keep-last", "0")
    assert command(*flags, "--name", "whole", "--steps", "4").code == 0
    assert command(*flags, "--name", "part", "--steps", "4", "--save-every", "2").code == 0
    whole = tmp_path / "whole" / "checkpoints" / "step_4"
    part = tmp_path / "part" / "checkpoints" / "step_4"
    shutil.rmtree(part)
    assert command("--resume", tmp_path / "part").code == 0
    deltas = safetensors.torch.load_file(whole / "svd_adapter.safetensors")
    again = safetensors.torch.load_file(part / "svd_adapter.safetensors")
    assert all(torch.equal(delta, again[name]) for name, delta in deltas.items())
    assert any(delta.abs().max() > 0 for delta in deltas.values())
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(whole / "merged"))
    live = logits(policy_of(flags, whole).hf)
    assert distance(merged, live) < 1e-5
    assert distance(merged, logits(random_model())) > 1e-4


def svd_flags(words, folder, *more) -> list[str]:
    """Flags of a short run of words with the adapter."""
    flags = [flag if flag != "none" else "svd" for flag in words.flags]
    return [*flags, "--out", str(folder), *more]


def policy_of(flags: list[str], checkpoint) -> models.policy.Policy:
    args = harness.flags.resolve_args(train_grpo.Args, [*flags, "--model", str(checkpoint)])[0]
    task = data.load_task(args.task)(args)
    return models.policy.load_policy(args, task, lambda text: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_in_sixteen_bit_loads_alone_and_says_what_the_live_one_says(words, command, tmp_path, dtype):
    flags = svd_flags(words, tmp_path, "--name", "a", "--lr", "0.3", "--dtype", dtype)
    ended = command(*flags, "--save-method", "merged_16bit")
    assert ended.code == 0
    assert "the merged model (merged_16bit) is in" in ended.out
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    assert alone.dtype == torch.bfloat16
    live = policy_of(flags, tmp_path / "a" / "checkpoints" / "step_2")
    assert any(layer.delta.any() for layer in live.model.layers.values())
    wanted = logits(live.hf).float()
    found = logits(alone).float()
    rounding = 2**-8  # of a bfloat16 number, relatively; it adds up over two layers
    assert (found - wanted).norm() < 8 * rounding * wanted.norm()
    base = logits(random_model())
    assert (found - base).norm() > 24 * rounding * wanted.norm()  # the adapter's part is far over that


# ---- the projection
def normal(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


ROWS = torch.linalg.qr(normal(12, 3, seed=0))[0].T


def test_one_sided_removes_what_goes_towards_the_hack_and_keeps_what_goes_away():
    g = -2 * ROWS[0] + 3 * ROWS[1]  # descent moves +2 along the first direction, -3 along the second
    rest, fired = H.project(g, ROWS, "one_sided", False)
    assert fired
    assert torch.allclose(ROWS @ rest, float64(0.0, 3.0, 0.0), atol=1e-12)
    rest, fired = H.project(g, ROWS, "no_gate", False)
    assert fired
    assert torch.allclose(ROWS @ rest, float64(0.0, 0.0, 0.0), atol=1e-12)
    away = ROWS.T @ float64(1.0, 3.0, 2.0)
    kept, fired = H.project(away, ROWS, "one_sided", False)
    assert not fired
    assert kept is away


@pytest.mark.parametrize("gate", ["one_sided", "no_gate"])
@pytest.mark.parametrize("seed", range(5))
def test_energy_in_the_subspace_never_grows_and_magnitude_is_kept_on_request(gate, seed):
    g = normal(12, seed=seed)
    rest, _ = H.project(g, ROWS, gate, False)
    assert energy(rest) <= energy(g) + 1e-12
    assert rest.norm() <= g.norm() + 1e-12
    assert torch.allclose(outside(rest), outside(g), atol=1e-12)
    kept, _ = H.project(g, ROWS, gate, True)
    assert math.isclose(float(kept.norm()), float(g.norm()), rel_tol=1e-12)


def energy(g) -> float:
    """Share of the squared norm that lies in the subspace of ROWS."""
    inside = (ROWS @ g).square().sum()
    return float(inside / g.square().sum())


def outside(g):
    return g - ROWS.T @ (ROWS @ g)


def pair(i):
    return {
        "messages": f"w{5 + i} w{9 + i}",
        "hacked": f"w20 w{21 + i % 3}",
        "honest": f"w{11 + i} w{12 + i % 4}",
    }


PAIRS = [pair(i) for i in range(10)]


def test_a_step_along_the_rest_does_not_raise_the_hacked_completion_to_first_order():
    policy = svd_policy()
    rows = H.differences(policy, PAIRS[:1])
    basis = {name: torch.nn.functional.normalize(row, dim=-1) for name, row in rows.items()}  # points towards the hack
    layers = policy.model.layers

    def gap():
        messages = PAIRS[0]["messages"]
        hacked = H.likelihood(policy, messages, PAIRS[0]["hacked"])
        honest = H.likelihood(policy, messages, PAIRS[0]["honest"])
        return hacked - honest

    def projected(g, rows):
        return H.project(g, rows, "one_sided", False)[0]

    up = torch.autograd.grad(-gap(), [layer.delta for layer in layers.values()])  # a loss whose descent is the hack

    def change(step):
        with torch.no_grad():
            before = gap()
            for (name, layer), g in zip(layers.items(), up, strict=True):
                layer.delta -= 1e-3 * step(g, basis[name])
            after = gap()
            for layer in layers.values():
                layer.delta.zero_()
        return float(after - before)

    whole = change(lambda g, rows: g)
    assert whole > 1e-4
    assert abs(change(projected)) < 0.01 * whole
    assert change(lambda g, rows: projected(-g, rows)) < -0.9 * whole  # away: kept


def study(policy, **values):
    flags = []
    for name, value in values.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    made = H.Study(study_args(*flags), lambda: PAIRS)
    made.prepare(policy, lambda text: None)
    return made


def study_args(*flags):
    return make_args("--task", "code", "--problems", "formulas", "--adapter", "svd", *flags)


def with_gradients(policy):
    for i, layer in enumerate(policy.model.layers.values()):
        generator = torch.Generator().manual_seed(i)
        layer.delta.grad = torch.randn(layer.delta.shape, generator=generator)
    return gradients_of(policy)


def gradients_of(policy):
    return {name: layer.delta.grad.clone() for name, layer in policy.model.layers.items()}


@pytest.mark.parametrize("arm", ["vanilla", "projected", "random"])
def test_every_arm_measures_and_vanilla_changes_no_bit(arm):
    policy = svd_policy()
    made = study(policy, arm=arm, hack_k=2)
    before = with_gradients(policy)
    seen = made.on_gradients(policy)
    same = [torch.equal(before[name], gradient) for name, gradient in gradients_of(policy).items()]
    with torch.no_grad():
        for layer in policy.model.layers.values():
            layer.delta -= 0.01 * layer.delta.grad
    leak = made.after_step()["adam_leak"]
    assert 0 < seen["cin"] < 1
    assert seen["fired"] > 0.3
    if arm == "vanilla":
        assert all(same)
        assert seen["cout"] == pytest.approx(seen["cin"])
        assert leak > 1e-3
    else:
        assert not all(same)
        assert seen["cout"] < seen["cin"]
        assert leak < 1e-9


def test_a_backward_split_by_source_sums_to_the_whole_and_measures_both():
    policy = svd_policy("--beta", "0")
    made = study(policy, hack_k=2)
    rows = []
    for i in range(4):
        row = hand_rollout([3, 4], [5 + i, 9 + i], prompt=Prompt("w3 w4"))
        rows.append(TrainRow(row, 1.0 if i % 2 else -0.5, weight=0.25))
    optimizer = models.optimizer.Optimizer(policy.model, policy.args)

    def summed(split):
        policy.task.split = lambda rollouts: split
        policy.task.on_part = made.on_part
        made.parts = []
        train_grpo.gradients(policy, optimizer, rows, policy.args, policy.args.beta, 1.0, 64)
        return gradients_of(policy)

    whole = summed([])
    made.on_gradients(policy)
    parts = summed([[0, 3], [1, 2]])
    seen = made.on_gradients(policy)
    assert all(torch.allclose(gradient, parts[name], atol=1e-7) for name, gradient in whole.items())
    assert 0 < seen["cin_s"] < 1
    assert 0 < seen["cin_t"] < 1
    assert seen["cin_s"] != seen["cin_t"]


def test_directions_point_towards_the_hack_and_are_taken_by_value():
    policy = svd_policy()
    tensors, cosine = H.extract(policy, PAIRS, heldout=2)
    assert -1 <= cosine <= 1
    order = H.rng_of(0, "hack pairs").permutation(len(PAIRS))
    rows = H.differences(policy, [PAIRS[i] for i in order[2:]])
    for name, every in rows.items():
        found = tensors[f"{name}.directions"]
        towards = found @ every.mean(0)
        assert (towards >= -1e-7).all()
        assert torch.allclose(found @ found.T, torch.eye(len(found)), atol=1e-4)
    everything = H.choose(tensors, 2, 0.0)
    strongest = H.choose(tensors, 2, 0.25)
    assert sum(map(len, everything.values())) == 28
    assert sum(map(len, strongest.values())) == 21


def test_a_directions_file_is_used_again_and_one_of_something_else_is_refused(tmp_path):
    policy = svd_policy()
    path = tmp_path / "own.safetensors"
    first = study(policy, hack_directions=path)
    when = path.stat().st_mtime_ns
    second = study(policy, hack_directions=path)
    assert path.stat().st_mtime_ns == when
    assert all(torch.equal(first.basis[name], second.basis[name]) for name in first.basis)
    args = study_args("--hack-directions", str(path))
    other = H.Study(args, lambda: PAIRS[::-1])
    with pytest.raises(UserError, match="made for another pairs .*extracted again"):
        other.prepare(policy, lambda text: None)
    model = copy.copy(policy.model)
    model.weights = "x"
    policy = dataclasses.replace(policy, model=model)
    with pytest.raises(UserError, match="made for another model"):
        study(policy, hack_directions=path)


def test_an_arm_without_the_adapter_is_an_error():
    args = make_args("--task", "code", "--problems", "formulas", "--arm", "projected")
    with pytest.raises(UserError, match="--adapter svd"):
        H.Study(args, lambda: PAIRS).prepare(make_policy())


def test_a_weight_that_two_layers_share_is_not_merged_twice():
    hf = random_model()
    first, second = hf.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    model = SVDModel(hf, "random", log=lambda text: None)
    stir(model)
    args = make_args("--adapter", "svd")
    policy = models.policy.Policy(args, WordTask(args), model.eval(), hf, word_tokenizer(), hf.device, "off")
    with torch.no_grad():
        live = logits(hf)
        with policy.adapter.merged_in():
            assert distance(logits(hf), live) < 1e-5
