"""Rollouts from a server: a small real HTTP server on this machine speaks vLLM's and SGLang's protocols.

It serves the tests' tiny model, samples with it, loads adapters and weights from disk, and can be told to misbehave.
"""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import peft
import pytest
import torch
import transformers
from conftest import make_args, make_policy, new_state, read_csv, scored
from test_engine import CHAT_PROMPTS, Replying, chat_tokenizer, plain

import models.optimizer
import train_grpo
from data import Prompt, TrainingFailed, UserError
from engine import http as http_engine
from engine.http import Server


class Served(ThreadingHTTPServer):
    """The server: `kind` decides the protocol, `faults` what goes wrong, `log` holds (path, body) of each request."""

    daemon_threads = True

    def __init__(self, folder, kind: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.log, self.faults, self.models, self.lock = kind, [], {}, {}, threading.Lock()
        self.base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.temperature_counts, self.barrier, self.live = True, None, True
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        pass  # a client that went away

    def model(self, name):
        return self.models.get(name, self.base)

    def load(self, name, path):
        if "stale" in self.faults:
            self.models[name] = self.base
        elif (path / "adapter_config.json").is_file():
            self.models[name] = peft.PeftModel.from_pretrained(copy.deepcopy(self.base), path).eval()
        else:
            self.base = transformers.AutoModelForCausalLM.from_pretrained(path).eval()

    @torch.no_grad()
    def complete(self, model, ids, room, temperature, seed, stop):
        """(ids, log-probabilities, whether a stop id ended it), and the log-probabilities of the prompt."""
        generator, said, logps = torch.Generator().manual_seed(seed or 0), [], []
        before = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        prompt = [None] + [before[i, token].item() for i, token in enumerate(ids[1:])]
        while len(said) < room:
            logits = model(input_ids=torch.tensor([ids + said])).logits[0, -1]
            p = (logits / temperature).softmax(-1) if temperature else (logits == logits.max()).float()
            said.append(int(torch.multinomial(p, 1, generator=generator)))
            shown = logits / temperature if self.temperature_counts and temperature else logits
            logps.append(shown.log_softmax(-1)[said[-1]].item())
            if said[-1] in stop:
                return said, logps, True, prompt
        return said, logps, False, prompt


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200):
        data = json.dumps(body).encode() if not isinstance(body, bytes | str) else (
            body if isinstance(body, bytes) else body.encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + 20 * ("torn" in self.server.faults)))
        if 300 <= status < 400:
            self.send_header("Location", self.server.url + "/elsewhere")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.server.log.append((self.path, None))
        if self.path == "/health":
            return self.answer("", 200)
        owner = {"id": "base", "owned_by": self.server.kind, "parent": None, "max_model_len": 64}
        return self.answer({"data": [owner]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, path = self.server, self.path
        server.log.append((path, body))
        server.key = self.headers.get("Authorization")
        if server.faults.get(path):
            return self.answer({"error": {"message": "busy or broken"}}, server.faults[path].pop(0))
        if server.barrier:
            server.barrier.wait()
        with server.lock:
            return self.answer(*ROUTES[server.kind].get(path, unknown)(server, body))


def unknown(server, body):
    return {"error": {"message": "Not Found"}}, 404


def completions(server, body):
    model = server.model(body["model"])
    ids, logps, ended, prompt = server.complete(
        model, body["prompt"], body["max_tokens"], body["temperature"], body.get("seed"),
        body.get("stop_token_ids", []))
    choice = {"index": 0, "text": "", "finish_reason": "stop" if ended else "length", "stop_reason": None,
              "token_ids": ids, "logprobs": {"token_logprobs": logps, "tokens": [""] * len(ids)}}
    if body.get("prompt_logprobs"):
        choice["prompt_logprobs"] = [value and {str(token): {"logprob": value}, "0": {"logprob": -1.0}} | {
            str(token): {"logprob": value}} for token, value in zip(body["prompt"], prompt, strict=True)]
    if not body.get("return_token_ids"):
        choice.pop("token_ids")
    return (server.faults["reply"](choice) if "reply" in server.faults and "seed" in body else {"choices": [choice]},)


def generate(server, body):
    want = body["sampling_params"]
    ids, logps, ended, prompt = server.complete(
        server.model(body.get("lora_path")), body["input_ids"], want["max_new_tokens"], want["temperature"],
        want.get("sampling_seed"), want.get("stop_token_ids", []))
    meta = {"finish_reason": {"type": "stop", "matched": ids[-1]} if ended else {"type": "length"},
            "output_token_logprobs": [[value, token, None] for value, token in zip(logps, ids, strict=True)]}
    if body["logprob_start_len"] == 0:
        meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(prompt, body["input_ids"], strict=True)]
    return ({"text": "", "output_ids": ids, "meta_info": meta},)


def loads(key):
    def load(server, body):
        from pathlib import Path

        path = Path(body.get("kwargs", body)[key])
        if not path.is_dir():
            return {"error": {"message": f"no such folder {path}"}}, 400
        server.load(body.get("lora_name"), path)
        return ("Success",) if server.kind == "vllm" else ({"success": True, "message": "ok"},)
    return load


def unload(server, body):
    return ("Success" if server.models.pop(body["lora_name"], None) else {"error": {"message": "no such adapter"}},)


ROUTES = {
    "vllm": {"/v1/completions": completions, "/v1/load_lora_adapter": loads("lora_path"),
             "/v1/unload_lora_adapter": unload, "/collective_rpc": loads("weights_path"),
             "/reset_prefix_cache": lambda server, body: ("",)},
    "sglang": {"/generate": generate, "/load_lora_adapter": loads("lora_path"), "/unload_lora_adapter": unload,
               "/update_weights_from_disk": loads("model_path")},
}


@pytest.fixture
def serve(words, monkeypatch):
    """Starts a server of the words' model; all of a test's are stopped at its end."""
    monkeypatch.setattr(http_engine, "PAUSES", (0, 0, 0))
    started = []

    def start(kind="vllm", folder=None, **values) -> Served:
        server = Served(folder or words.folder / "model", kind)
        for key, value in values.items():
            setattr(server, key, value)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        if server.live:
            server.shutdown()
            server.server_close()


def paths(server) -> list[str]:
    return [path for path, _ in server.log]


def connected(server, *flags, kind="llama", **keywords):
    """A policy around the served model, whose rollouts come from the server."""
    policy = make_policy("--engine", "http", "--server", server.url, *flags, kind=kind, **keywords)
    policy.server = Server(policy, lambda text: None)
    policy.server.connect(policy)
    return policy


def check_rows(policy, rows, temperature=1.0):
    for row in rows:
        np.testing.assert_allclose(np.array(row.logp), plain(policy.hf, row, temperature)[0] * np.array(row.mask),
                                   atol=1e-4)


LOADS = {("vllm", "lora"): "/v1/load_lora_adapter", ("sglang", "lora"): "/load_lora_adapter",
         ("vllm", "none"): "/collective_rpc", ("sglang", "none"): "/update_weights_from_disk"}


def served_policy(server, adapter: str, *flags):
    """A connected policy, with a LoRA on its layers or none."""
    policy = make_policy("--engine", "http", "--server", server.url, *flags)
    if adapter == "lora":
        policy.model = peft.get_peft_model(policy.hf, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    policy.server = Server(policy, lambda text: None)
    policy.server.connect(policy)
    return policy


def move_weights(policy, size: float = 0.3) -> None:
    """What a step does: other weights, the next version."""
    torch.manual_seed(policy.version)
    with torch.no_grad():
        for p in policy.model.parameters():
            p += size * torch.randn_like(p) * p.requires_grad
    policy.version += 1


@pytest.mark.parametrize("kind, adapter", LOADS)
def test_each_version_of_the_weights_is_on_the_server_before_it_samples(serve, tmp_path, kind, adapter):
    server = serve(kind)
    policy = served_policy(server, adapter, "--server-folder", str(tmp_path))
    for version in range(1, 4):
        move_weights(policy)
        for _ in range(2):  # the second rollout of a version, an evaluation's, reloads nothing
            ((row, _),) = policy.sample([Prompt("w5")], 2, 1.0, "t")
            check_rows(policy, [row])
        assert paths(server).count(LOADS[kind, adapter]) == 1 + version and set(row.version) == {version}
    assert len(server.models) == (adapter == "lora") and len(list(tmp_path.iterdir())) == 1  # the old ones are gone
    assert kind != "vllm" or adapter == "lora" or paths(server).count("/reset_prefix_cache") == 4


@pytest.mark.parametrize("size", [0.3, 3e-4])
def test_stale_weights_are_found_out_also_after_many_small_steps(serve, size):
    policy = served_policy(serve(faults={"stale": True}), "lora")
    with pytest.raises(TrainingFailed, match="did not take up the weights of step"):
        for _ in range(60):
            move_weights(policy, size)
            policy.server.sync(policy)


def test_whole_weights_are_for_one_policy_at_a_time(serve):
    with pytest.raises(UserError, match="--adapter lora"):
        connected(serve()).server.beside()


# ---- whole runs
def test_a_run_samples_from_the_server_with_workers_ahead_and_evaluations_between(command, words, serve, tmp_path):
    server = serve()
    ended = command(*words.flags, "--adapter", "lora", "--lora-r", 4, "--engine", "http", "--server", server.url,
                    "--async-workers", 1, "--lr", "0.02", "--off-policy", "truncate", "--steps", 3, "--eval-every", 1,
                    "--max-version-gap", 0, "--inner-epochs", 2, "--out", tmp_path, "--name", "r")
    rows = read_csv(tmp_path / "r")
    assert ended.code == 0 and len(rows) == 3 and "engine http: VLLM" in ended.out, ended.err
    assert all(abs(float(row["logp_gap"])) < 1e-4 for row in rows)  # each step's samples are its own weights'
    assert len(server.models) == 2  # the trainer's and the worker's newest


def test_the_update_from_the_servers_samples_is_that_from_local_ones(serve, words):
    flags = ("--off-policy", "truncate", "--old-logp", "sampler", "--inner-epochs", "2", "--lr", "1e-2")
    remote = connected(serve(), *flags)
    groups = remote.sample([Prompt("w5 w6"), Prompt("w9")], 4, 1.0, "t")
    check_rows(remote, [row for rows in groups for row in rows])
    weights = []
    for policy in (remote, make_policy(*flags)):
        copies = [[copy.deepcopy(row) for row in rows] for rows in groups]
        if policy is not remote:
            for row in (row for rows in copies for row in rows):
                row.logp = plain(policy.hf, row)[0].tolist()
        batch = [scored(rows, [0.0, 1.0, 2.0, 0.5]) for rows in copies]
        train_grpo.set_advantages(batch, policy.args, None)
        train_grpo.update(policy, models.optimizer.Optimizer(policy.model, policy.args), batch, policy.args, 1,
                          new_state(policy.args), print)
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], atol=1e-5, rtol=1e-4)


# ---- sampling
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_is_asked_for_is_ids_at_the_temperature_with_every_stop_id(serve, kind):
    server = serve(kind)
    policy = connected(server, "--temperature", "0.7")
    policy.stop_ids = [1, 2, 7, 11]
    rows = [row for rows in policy.sample([Prompt("w5"), Prompt("w6 w7")], 5, 0.7, "t") for row in rows]
    check_rows(policy, rows, 0.7)
    assert {row.stop for row in rows} == {"stop", "length"}
    for row in rows:
        ends = [i for i, token in enumerate(row.ids[row.prompt_length :]) if token in policy.stop_ids]
        assert ends == ([len(row.mask) - 1] if row.stop == "stop" else [])
        assert len(row.mask) <= 8 and all(map(np.isnan, row.entropy))
    again = policy.sample([Prompt("w5"), Prompt("w6 w7")], 5, 0.7, "t")
    assert [row.ids for row in rows] == [row.ids for some in again for row in some]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_turns_go_on_with_the_ids_that_were_sampled_and_seen(serve, kind):
    server = serve(kind)
    task = Replying(make_args("--max-turns", "3", "--context", "34"), 2)
    policy = connected(server, "--max-turns", "3", "--context", "34", tokenizer=chat_tokenizer(), task=task)
    policy.stop_ids = [1, 2, *range(4, 28, 2)]
    rows = [row for some in policy.sample(CHAT_PROMPTS, 8, 1.0, "t") for row in some]
    check_rows(policy, rows)
    assert any(sum(turn["role"] == "assistant" for turn in row.turns) == 3 for row in rows)
    assert "context" in {row.stop for row in rows} and all(len(row.ids) <= 34 for row in rows)
    key = "prompt" if kind == "vllm" else "input_ids"
    sent = {tuple(body[key]) for _, body in server.log if body and key in body}
    for row in rows:
        starts = [row.prompt_length + i for i, m in enumerate(row.mask) if m and (i == 0 or not row.mask[i - 1])]
        assert all(tuple(row.ids[:start]) in sent for start in starts)


def test_the_requests_of_a_step_are_in_flight_together(serve):
    server = serve()
    policy = connected(server)
    server.barrier = threading.Barrier(6)
    assert len(policy.sample([Prompt("w5"), Prompt("w7")], 3, 1.0, "t")[1]) == 3


def test_a_shorter_context_of_the_server_holds(serve):
    policy = connected(serve())
    assert policy.context == 64


# ---- what can go wrong
def test_a_busy_server_is_asked_again(serve):
    server = serve(faults={"/v1/completions": [503, 429, 500], "/v1/load_lora_adapter": []})
    policy = connected(server)
    server.faults["/v1/completions"] = [503, 502, 503]
    check_rows(policy, policy.sample([Prompt("w5")], 1, 1.0, "t")[0])


def test_no_server_is_one_sentence(command, words, tmp_path, monkeypatch):
    monkeypatch.setattr(http_engine, "PAUSES", (0,))
    ended = command(*words.flags, "--engine", "http", "--server", "http://127.0.0.1:9", "--out", tmp_path)
    assert ended.code == 2 and "does not answer /health" in ended.err and len(ended.err.splitlines()) == 1


def test_a_server_that_wants_a_key_is_given_it(serve, monkeypatch):
    server = serve(faults={"/v1/completions": [401]})
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        connected(server)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    connected(server)
    assert server.key == "Bearer k"


def test_no_redirect_takes_the_key_elsewhere(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server = serve(faults={"/v1/completions": [307]})
    with pytest.raises(UserError, match="307"):
        connected(server)
    assert "/v1/completions" in paths(server) and "/elsewhere" not in paths(server)


@pytest.mark.parametrize("key", ["sk\nX-Evil: 1", "sk-\u2603"])
def test_a_key_that_no_header_can_hold_is_one_sentence_without_it(serve, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server = serve()
    with pytest.raises(UserError, match="does not answer") as raised:
        connected(server)
    assert "sk" not in str(raised.value) and not server.log


@pytest.mark.parametrize("flags", [["--engine", "http"], ["--server", "http://x"]])
def test_the_engine_and_its_server_go_together(command, flags):
    assert "go together" in command(*flags).err


def test_a_server_that_dies_ends_the_run_with_its_weights_saved(command, words, serve, tmp_path):
    server = serve()
    count = [0]

    def dies(choice):
        count[0] += 1
        if count[0] > 20:
            server.shutdown()  # this is a thread of its own: it ends the one that takes requests, and waits for that
            server.server_close()
            server.live = False
            return b"{"
        return {"choices": [choice]}

    server.faults["reply"] = dies
    ended = command(*words.flags, "--engine", "http", "--server", server.url, "--steps", 9, "--no-eval", "--save-every",
                    0, "--out", tmp_path, "--name", "r")
    assert ended.code == 3 and "does not answer" in ended.out + ended.err and "--resume" in ended.out + ended.err
    assert "Traceback" not in ended.err
    (saved,) = (tmp_path / "r" / "checkpoints").glob("step_*")
    assert saved.name == f"step_{len(read_csv(tmp_path / 'r'))}"
    again = serve()
    ended = command("--resume", tmp_path / "r", "--server", again.url, "--steps", 5)
    assert ended.code == 0 and [row["step"] for row in read_csv(tmp_path / "r")] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("reply, named", [
    (lambda choice: {"choices": [{**choice, "token_ids": None}]}, "no token ids"),
    (lambda choice: {"choices": [{**choice, "logprobs": None}]}, "no token ids"),
    (lambda choice: {"choices": []}, "no token ids"), (lambda choice: "hello", "no token ids"),
    (lambda choice: [], "no token ids"),
    (lambda choice: {"choices": [{**choice, "token_ids": [40] * len(choice["token_ids"])}]}, "vocabulary"),
    (lambda choice: {"choices": [{**choice, "token_ids": ["5"] * len(choice["token_ids"])}]}, "vocabulary"),
    (lambda choice: {"choices": [{**choice, "token_ids": choice["token_ids"] * 9}]}, "at most"),
    (lambda choice: {"choices": [{**choice, "token_ids": [], "logprobs": {"token_logprobs": []}}]}, "at most"),
    (lambda choice: {"choices": [{**choice, "logprobs": {"token_logprobs": [None] * len(choice["token_ids"])}}]},
     "are none"),
    (lambda choice: {"choices": [{**choice, "logprobs": {"token_logprobs": [-30.0] * len(choice["token_ids"])}}]},
     "does it serve --model"),
    (lambda choice: b"{", "does not answer"),
])
def test_a_malformed_reply_is_one_sentence(serve, reply, named):
    with pytest.raises(UserError, match=named):
        connected(serve(faults={"reply": reply}))


def test_a_reply_that_breaks_off_is_one_sentence(serve):
    server = serve()
    policy = connected(server)
    server.faults["torn"] = True
    with pytest.raises(TrainingFailed, match="does not answer"):
        policy.sample([Prompt("w5")], 1, 1.0, "t")


def test_another_model_is_refused(serve, tmp_path, words):
    from conftest import random_model
    random_model(seed=5).save_pretrained(tmp_path)
    server = serve(folder=tmp_path)
    server.load = lambda name, path: None
    with pytest.raises(UserError, match="does not serve this model"):
        connected(server)


def test_a_model_that_is_not_served_is_refused(serve):
    with pytest.raises(UserError, match="serves base"):
        connected(serve(), "--server-model", "other")


@pytest.mark.parametrize("kind, hint", [("vllm", "processed_logprobs"), ("sglang", "RETURN_ORIGINAL_LOGPROB")])
def test_log_probabilities_of_another_temperature_are_refused(serve, kind, hint):
    with pytest.raises(UserError, match=hint):
        connected(serve(kind, temperature_counts=False), "--temperature", "0.6")


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_without_adapters_is_told_how_to_start(serve, command, words, tmp_path, status):
    server = serve(faults={"/v1/load_lora_adapter": [status]})
    ended = command(*words.flags, "--adapter", "lora", "--engine", "http", "--server", server.url, "--out", tmp_path,
                    "--name", "r")
    assert ended.code == 2 and "--enable-lora" in ended.err and "busy or broken" in ended.err
