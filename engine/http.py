"""Rollouts from an inference server: `--engine http --server URL`, for vLLM or SGLang, whose protocols these are:

- vLLM: `/v1/completions` with token ids as the prompt, `return_token_ids` and `logprobs`; `/v1/load_lora_adapter` and
  `/v1/unload_lora_adapter`, or, for whole weights, `/collective_rpc` (`reload_weights`) and `/reset_prefix_cache`;
- SGLang: `/generate` with `input_ids` and `return_logprob`; `/load_lora_adapter` and `/unload_lora_adapter`, or
  `/update_weights_from_disk`.

The log-probabilities of the update come from the local model as ever; the server only samples. Ids go in and come
back, and no text is tokenised. What a server says is checked: at the start its model against the local one, after
each reload whether it answers with the new weights, in each reply that ids and log-probabilities belong together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from data import Prompt, Rollout, TrainingFailed, UserError
from engine.client import Client, NoReply, Refused

PAUSES = (0.5, 1, 2, 4, 8)  # seconds before a request is tried again
TIMEOUT = 600  # seconds for one reply
MOST_AT_ONCE = 256  # requests in flight
WRONG_MODEL = 0.3  # nats, mean over the probe's tokens, above which the server has another model
PROBE = "The capital of France is Paris. 12 + 30 = 42, and 7 * 6 = 42 as well: def add(a, b): return a + b"
BUSY = (408, 425, 429, 500, 502, 503, 504)


@dataclasses.dataclass
class Sampled:
    """One completion: ids, their log-probabilities under the distribution that was sampled, whether it ended."""

    ids: list[int]
    logp: list[float]
    ended: bool


class Server:
    """A vLLM or SGLang server that samples for a policy. `fail` makes the error of the moment from a sentence."""

    def __init__(self, policy, log):
        args = policy.args
        self.url, self.client = args.server.rstrip("/").removesuffix("/v1"), Client()
        self.log, self.fail = log, UserError
        self.name = self.loaded = ""  # the base model's name there; the adapter's that is in use
        self.version: int | None = None  # of the weights that it has
        self.floor, self.trusted = 1e-4, None  # noise of the comparison; local values when they were last seen there
        self.owned = None if args.server_folder else tempfile.TemporaryDirectory(prefix="grpo-weights-")
        self.folder = Path(args.server_folder or self.owned.name)
        self.tag = secrets.token_hex(3)
        self.adapter = policy.adapter.servers_load_it

    def beside(self) -> Server:
        """A second one, with an adapter of its own on the same server, for another copy of the policy."""
        if not self.adapter:
            raise UserError("--engine http serves one set of whole weights at a time; use --adapter lora, or "
                            "--async-workers 0")
        other = copy.copy(self)
        other.tag, other.loaded, other.version, other.trusted = secrets.token_hex(3), "", None, None
        return other

    # ---- requests
    def ask(self, path: str, body: dict | None = None):
        """The reply to one request, as JSON where it is JSON. Tried again, after PAUSES, where the server is busy or
        away. Raises Refused for what it will not do, and `fail` where it stays away."""
        key = os.environ.get("OPENAI_API_KEY", "")
        reason = ""
        for pause in (*PAUSES, None):
            try:
                return parse(self.client.ask(self.url + path, body, key=key, seconds=TIMEOUT))
            except Refused as error:
                if error.status not in BUSY:
                    raise
                reason = f"HTTP {error.status} {error.said}"
            except (NoReply, ValueError) as error:  # refused, reset, timed out, torn
                reason = str(error)
            if pause is not None:
                time.sleep(pause)
        raise self.fail(f"the server {self.url} does not answer {path} ({reason[:150]}); start it again"
                        + (" and go on with --resume" if self.fail is TrainingFailed else " or mend --server"))

    def must(self, path: str, body: dict | None, hint: str):
        """As `ask`, a refusal being the end, with a hint."""
        try:
            reply = self.ask(path, body)
        except Refused as error:
            raise self.fail(f"the server {self.url} refuses {path} ({refusal(error)}); {hint}") from None
        if isinstance(reply, dict) and reply.get("success") is False:
            said = reply.get("message") or reply.get("error_message")
            raise self.fail(f"the server {self.url} could not do {path} ({said}); {hint}")
        return reply

    # ---- the start
    def connect(self, policy) -> None:
        """Health, kind, model; then the weights go there and its log-probabilities are compared with the local ones."""
        self.must("/health", None, "is it an inference server?")
        found = self.find_model(policy.args.server_model)
        self.name = found["id"]
        self.kind = SGLang if found.get("owned_by") == "sglang" else VLLM
        longest = found.get("max_model_len")
        if isinstance(longest, int) and longest < policy.context:
            self.log(f"the server's context of {longest} tokens is shorter than the model's and holds")
            policy.context = longest
        policy.rollout_tokens = max(policy.rollout_tokens, 1 << 22)  # it makes its own batches
        self.sync(policy)
        self.check_temperature(policy)
        self.fail = TrainingFailed
        self.log(f"engine http: {self.kind.__name__} at {self.url}, model {self.name}, log-probabilities within "
                 f"{self.floor:.2g} of the local ones")

    def find_model(self, wanted: str) -> dict:
        """What the server says of its model of this name, or of its first base model where none is wanted."""
        reply = self.must("/v1/models", None, "--server must be a vLLM or SGLang server")
        listed = reply.get("data") if isinstance(reply, dict) else None
        models = [model for model in listed or [] if isinstance(model, dict)]
        if not wanted:
            wanted = next((model["id"] for model in models if not model.get("parent")), "")
        for model in models:
            if model.get("id") == wanted:
                return model
        names = ", ".join(str(model.get("id")) for model in models)
        raise UserError(f"--server-model {wanted}: the server {self.url} serves {names or 'no model'}")

    def check_temperature(self, policy) -> None:
        """What is sampled at a temperature must come with the log-probabilities of that temperature."""
        args = policy.args
        temperature = 1.0
        for used in (args.temperature_end, args.temperature):
            if used > 0 and used != 1.0:
                temperature = used
        ids = probe_ids(policy)
        row = self.sample(policy, ids, 8, temperature, 1)
        gaps = {}
        for t in {temperature, 1.0}:
            local = local_logps(policy, ids + row.ids, t)
            gaps[t] = gap(local[-len(row.ids) :], row.logp)
        differs = gaps[temperature] > 2 * self.floor + 1e-3
        if differs and gaps[1.0] < 0.5 * gaps[temperature]:
            raise UserError(f"the server's log-probabilities are not those of --temperature {temperature:g} but of 1; "
                            f"{self.kind.temperature_hint}")
        if gaps[temperature] > WRONG_MODEL:
            raise UserError(f"the log-probabilities that the server {self.url} gives for its tokens are not the "
                            f"model's (they differ by {gaps[temperature]:.2g} nats); does it serve --model?")

    # ---- weights
    def sync(self, policy) -> None:
        """Bring the weights of the policy to the server, unless it has them, and see that it answers with them."""
        if self.version == policy.version:
            return
        name, before, old = f"grpo-{self.tag}-{policy.version}", self.loaded, self.version
        folder = (self.folder / name).resolve()
        if self.adapter:
            policy.adapter.save(folder)
            self.kind.load_adapter(self, name, str(folder))
        else:
            policy.save_merged(folder)
            self.kind.load_weights(self, str(folder), policy.version)
        self.loaded = name
        self.check_weights(policy)
        self.version = policy.version
        if before and self.adapter:
            self.must(self.kind.unload, {"lora_name": before}, "it holds an adapter for each step otherwise")
        if old is not None:
            shutil.rmtree(self.folder / f"grpo-{self.tag}-{old}", ignore_errors=True)

    def check_weights(self, policy) -> None:
        """Compare the log-probabilities of a fixed text there with the local ones.

        A step moves them by less than the two implementations may differ, so the server is held to have the new
        weights where it is nearer to them than to those that it was last seen with, once these are far enough apart.
        """
        ids = probe_ids(policy)
        there, here = self.kind.prompt_logps(self, ids), local_logps(policy, ids, 1.0)
        if len(there) != len(here):
            raise self.fail(f"the server {self.url} gave {len(there)} log-probabilities for {len(here)} tokens")
        now = gap(here, there)
        moved = self.trusted is not None and gap(here, self.trusted) > 4 * self.floor
        if moved and now > gap(self.trusted, there):
            raise self.fail(f"the server {self.url} did not take up the weights of step {policy.version}: it answers "
                            f"with older ones; is its prefix cache reset, and does it see {self.folder} "
                            "(--server-folder)?")
        if not now < WRONG_MODEL:
            raise self.fail(f"the server {self.url} does not serve this model: its log-probabilities differ from the "
                            f"local ones by {now:.2g} nats a token; start it with --model {policy.args.model}")
        if self.trusted is None:
            self.floor = max(self.floor, now)
        if moved or self.trusted is None:
            self.trusted = here

    # ---- sampling
    def fill(self, policy, rows: list[Rollout], buffer, temperature: float) -> None:
        """One turn of the rows: what the server samples goes into `buffer`. The rows' requests run side by side."""
        if any(row.prompt.inject is not None for row in rows):
            raise UserError("--engine http cannot add an activation to the residual stream; use --engine auto")
        room = buffer.max_new.tolist()
        seeds = [int(u * 2**31) for u in buffer.uniforms[:, 0].tolist()]
        asking = [i for i in range(len(rows)) if room[i] > 0]
        jobs = [lambda i=i: self.sample(policy, rows[i].ids, room[i], temperature, seeds[i]) for i in asking]
        unknown = float("nan")
        filters = policy.args.top_p < 1 or policy.args.top_k
        for i, got in zip(asking, side_by_side(jobs), strict=True):
            n = len(got.ids)
            buffer.tokens[i, :n] = torch.tensor(got.ids)
            buffer.logp[i, :n] = torch.tensor(got.logp)
            buffer.entropy[i, :n] = unknown
            buffer.filtered[i, :n] = unknown if filters else 0.0
            buffer.length[i] = n
            buffer.ended[i] = got.ended

    def sample(self, policy, ids: list[int], room: int, temperature: float, seed: int) -> Sampled:
        """One completion of at most `room` tokens."""
        args = policy.args
        try:
            reply = self.ask(*self.kind.request(self, ids, room, temperature, seed, policy.stop_ids, args))
        except Refused as error:
            raise self.fail(f"the server {self.url} refuses to sample ({refusal(error)})") from None
        try:
            got = self.kind.read(reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.fail(f"the server {self.url} sent no token ids with their log-probabilities: {error!r}; "
                            f"{self.kind.ids_hint}") from None
        self.check_sampled(got, room, vocabulary_size(policy))
        return dataclasses.replace(got, ended=got.ended or got.ids[-1] in policy.stop_ids)

    def check_sampled(self, got: Sampled, room: int, vocabulary: int) -> None:
        """Ids of the vocabulary, at most `room` of them, with a log-probability each; anything else ends the run."""
        if not 0 < len(got.ids) <= room or len(got.ids) != len(got.logp):
            raise self.fail(f"the server {self.url} sent {len(got.ids)} ids and {len(got.logp)} log-probabilities "
                            f"where at most {room} of each were asked for")
        if not all(type(token) is int and 0 <= token < vocabulary for token in got.ids):
            raise self.fail(f"the server {self.url} sent an id outside the vocabulary of {vocabulary}; its tokenizer "
                            "is not the model's")
        if not all(is_logp(value) for value in got.logp):
            raise self.fail(f"the server {self.url} sent log-probabilities that are none")


# ------------------------------------------------------------------------------------------------ the two protocols
class VLLM:
    """vLLM's OpenAI-compatible server."""

    unload = "/v1/unload_lora_adapter"
    ids_hint = "vLLM 0.10.2 or newer has return_token_ids"
    temperature_hint = "start vLLM with --logprobs-mode processed_logprobs"

    @staticmethod
    def request(server: Server, ids: list[int], room: int, temperature: float, seed: int, stop: list[int], args
                ) -> tuple[str, dict]:
        return "/v1/completions", {
            "model": server.loaded if server.adapter else server.name, "prompt": ids, "max_tokens": room, "n": 1,
            "temperature": temperature, "top_p": args.top_p, "top_k": args.top_k or -1, "min_p": 0.0, "seed": seed,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": stop,
            "ignore_eos": True, "skip_special_tokens": False, "logprobs": 0, "return_token_ids": True,
            "add_special_tokens": False}

    @staticmethod
    def read(reply: dict) -> Sampled:
        (choice,) = reply["choices"]
        if choice.get("token_ids") is None:
            raise ValueError("token_ids is missing")
        return Sampled(list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]),
                       choice["finish_reason"] == "stop")

    @staticmethod
    def prompt_logps(server: Server, ids: list[int]) -> list[float]:
        """log p of each of the ids but the first."""
        reply = server.must("/v1/completions", {
            "model": server.loaded if server.adapter else server.name, "prompt": ids, "max_tokens": 1,
            "temperature": 1.0, "prompt_logprobs": 1, "add_special_tokens": False}, "it must serve the same model")
        with reading(server):
            values = reply["choices"][0]["prompt_logprobs"][1:]
            return [float(value[str(token)]["logprob"]) for value, token in zip(values, ids[1:], strict=True)]

    @staticmethod
    def load_adapter(server: Server, name: str, folder: str) -> None:
        server.must("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder},
                    "start vLLM with --enable-lora, --max-lora-rank at least --lora-r and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; it must see --server-folder")

    @staticmethod
    def load_weights(server: Server, folder: str, version: int) -> None:
        server.must("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}},
                    "start vLLM with VLLM_SERVER_DEV_MODE=1; it must see --server-folder; or train a LoRA")
        server.must("/reset_prefix_cache", {}, "start vLLM with VLLM_SERVER_DEV_MODE=1")


class SGLang:
    """SGLang's native interface."""

    unload = "/unload_lora_adapter"
    ids_hint = "is it SGLang's own /generate?"
    temperature_hint = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"

    @staticmethod
    def request(server: Server, ids: list[int], room: int, temperature: float, seed: int, stop: list[int], args
                ) -> tuple[str, dict]:
        sampling = {"max_new_tokens": room, "temperature": temperature, "top_p": args.top_p, "top_k": args.top_k or -1,
                    "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": stop, "skip_special_tokens": False,
                    "no_stop_trim": True, "sampling_seed": seed}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True,
                             "logprob_start_len": -1, **({"lora_path": server.loaded} if server.adapter else {})}

    @staticmethod
    def read(reply: dict) -> Sampled:
        reply = reply[0] if isinstance(reply, list) else reply
        meta = reply["meta_info"]
        if meta["finish_reason"]["type"] not in ("stop", "length"):
            raise ValueError(f"the request ended by {meta['finish_reason']}")
        entries = meta["output_token_logprobs"]
        if not entries:
            raise ValueError("output_token_logprobs is empty")
        ids = [entry[1] for entry in entries]
        logp = [entry[0] for entry in entries]
        return Sampled(ids, logp, meta["finish_reason"]["type"] == "stop")

    @staticmethod
    def prompt_logps(server: Server, ids: list[int]) -> list[float]:
        reply = server.must("/generate", {
            "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}, "return_logprob": True,
            "logprob_start_len": 0, **({"lora_path": server.loaded} if server.adapter else {})},
            "it must serve the same model")
        with reading(server):
            entries = reply["meta_info"]["input_token_logprobs"][1:]
            if [entry[1] for entry in entries] != ids[1:]:
                raise ValueError("other ids than those that were sent")
            return [float(entry[0]) for entry in entries]

    @staticmethod
    def load_adapter(server: Server, name: str, folder: str) -> None:
        server.must("/load_lora_adapter", {"lora_name": name, "lora_path": folder},
                    "start SGLang with --enable-lora, --max-lora-rank at least --lora-r and --lora-target-modules "
                    "all; it must see --server-folder")

    @staticmethod
    def load_weights(server: Server, folder: str, version: int) -> None:
        server.must("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version),
                                                  "flush_cache": True}, "it must see --server-folder")


# ------------------------------------------------------------------------------------------------ small parts
@contextlib.contextmanager
def reading(server: Server) -> Iterator[None]:
    """Within: a reply that lacks what it must hold is an error in one sentence."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise server.fail(f"the server {server.url} gives no log-probabilities of a prompt: {error!r}") from None


def parse(data: bytes):
    """The reply as JSON, or as text where it is a plain acknowledgement; a torn JSON reply is a ValueError."""
    text = data.decode("utf-8", "replace").strip()
    return json.loads(text) if text[:1] in ("{", "[") else text


def refusal(error: Refused) -> str:
    """What the server said, and what helps where it wants a key."""
    hint = "; set OPENAI_API_KEY to its key" if error.status in (401, 403) else ""
    return f"{error}{hint}"


def side_by_side(jobs: list[Callable]) -> list:
    """The results of all jobs, in order, run in threads; the first failure ends the rest."""
    if not jobs:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(MOST_AT_ONCE, len(jobs))) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def is_logp(value) -> bool:
    """Whether it is a finite number that rounding may have brought a little over 0."""
    return isinstance(value, int | float) and math.isfinite(value) and value < 1e-3


def vocabulary_size(policy) -> int:
    return policy.hf.get_output_embeddings().weight.shape[0]


def probe_ids(policy) -> list[int]:
    """The ids of PROBE, or of nothing in particular where the tokenizer does not know its words."""
    ids = policy.tokenizer.encode(PROBE, add_special_tokens=False)[:64]
    if len(set(ids)) > 4:
        return ids
    vocabulary = min(vocabulary_size(policy), len(policy.tokenizer))
    return [1 + (7 * i) % (vocabulary - 1) for i in range(16)]


@torch.no_grad()
def local_logps(policy, ids: list[int], temperature: float) -> list[float]:
    """log p of each of the ids but the first under the local policy."""
    inputs = torch.tensor([ids], device=policy.device)
    policy.task.on_forward([Prompt("")])
    output = policy.hf(input_ids=inputs, use_cache=False)
    policy.task.on_forward([])
    logits = output.logits[0, :-1].float()
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, inputs[0, 1:, None])[:, 0].tolist()


def gap(a: list[float], b: list[float]) -> float:
    """Mean absolute difference."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return sum(differences) / max(1, len(differences))
