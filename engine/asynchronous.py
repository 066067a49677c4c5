"""Rollouts made ahead of the trainer, by threads that have a policy of their own and fill a bounded queue of groups.

The trainer's thread alone deals prompts, decides how many groups may be on their way, and takes them; a worker's thread
rolls out one ticket after the other with the newest weights that were published. So a task is called from one thread,
but for `reply`, and what the queue does is decided by numbers that a test can write down, not by time.

How many may be on their way is AReaL's bound on staleness (arXiv 2505.24298), in groups: none is begun
that would be older than --max-version-gap when its turn comes. What is older all the same is dropped and counted.
How the loss weighs old rollouts stands in train_grpo.py (`age_of`, `decouple`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import Prompt, Rollout, TrainingFailed, rng_of

COUNTS = ("dealt", "produced", "accepted", "stale", "dropped", "full", "errors")  # since the run began
SECONDS = tuple(f"seconds_{what}_p{p}" for what in ("produce", "wait") for p in (50, 90, 99))
COLUMNS = (*(f"async_{name}" for name in COUNTS[1:]), "async_age_mean", "async_queue_use", *SECONDS)
WINDOW = 200  # rollouts and takes that the percentiles are over


@dataclasses.dataclass
class Ticket:
    """What a worker is to roll out: `n` completions of each prompt."""

    number: int
    prompts: list[Prompt]
    n: int
    temperature: float


@dataclasses.dataclass
class FinishedGroup:
    """One group from the queue, with the version of the weights that wrote it."""

    rollouts: list[Rollout]
    version: int
    filtered_mass: float


@dataclasses.dataclass
class Weights:
    """Published copies of the trained weights, in the model's order; `event` (CUDA): when they are whole."""

    version: int
    tensors: list[Tensor]
    event: Any = None


def groups_allowed(need: int, per_step: int, outstanding: int, later: int) -> int:
    """How many more groups may be begun now, so that each is young enough when its turn comes.

    `need` groups are still wanted at the trainer's version, the next `per_step` one version later, and so on;
    `outstanding` were begun and not taken yet. A group begun now may serve this step and `later` more (below 0: none).
    """
    return max(0, need + later * per_step - outstanding) if later >= 0 else 0


def at_random(dealt: int, n: int, share: float) -> int:
    """How many of the next `n` prompts are drawn at random, so that after any number it is `share` of them."""
    return int((dealt + n) * share) - int(dealt * share)


def mean_or_none(values: list) -> float | None:
    return float(np.mean(values)) if values else None


def copy_policy_model(model: nn.Module) -> nn.Module:
    """A copy of a module tree with trained weights of its own; frozen weights and buffers are the same memory.

    With a LoRA that is a second adapter on one base, which can be switched, merged and hooked apart from the first:
    plain parameters are new objects on the old memory, so that other data may be put into one tree's only.
    """
    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        if not p.requires_grad:
            shared[id(p)] = nn.Parameter(p.data, requires_grad=False) if type(p) is nn.Parameter else p
    return copy.deepcopy(model, shared).requires_grad_(False).eval()


class Aborted(Exception):
    """Raised within a worker's forward once the run ends."""


class Worker:
    """A policy of its own beside the trainer's, and the stream that it works on."""

    def __init__(self, policy, closing: threading.Event):
        model = copy_policy_model(policy.model)
        hf = policy.adapter.beside(model).hf
        self.policy = dataclasses.replace(
            policy, model=model, hf=hf, tokenizer=copy.deepcopy(policy.tokenizer), reference=None,
            server=policy.server and policy.server.beside())
        self.trained = [own for own, theirs in zip(model.parameters(), policy.model.parameters(), strict=True)
                        if theirs.requires_grad]
        self.stream = torch.cuda.Stream(policy.device) if policy.device.type == "cuda" else None

        def leave(*_) -> None:
            if closing.is_set():
                raise Aborted

        getattr(hf, "base_model", hf).register_forward_pre_hook(leave)  # each token's forward of either engine

    def refresh(self, weights: Weights) -> None:
        """Take over published weights."""
        if weights.version == self.policy.version:
            return
        if weights.event is not None:
            self.stream.wait_event(weights.event)
        with torch.no_grad():
            torch._foreach_copy_(self.trained, weights.tensors)
        if self.stream is not None:
            self.stream.synchronize()  # the published copies may be freed by another stream
        self.policy.version = weights.version

    def roll(self, ticket: Ticket, weights: Weights) -> tuple[list[FinishedGroup], int]:
        """The ticket's groups, and how often it had to begin anew for want of memory."""
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            self.refresh(weights)
            before = self.policy.retries
            rolled = self.policy.sample(ticket.prompts, ticket.n, ticket.temperature, ticket.number, 0)
        groups = [FinishedGroup(rows, self.policy.version, self.policy.filtered_mass) for rows in rolled]
        return groups, self.policy.retries - before


class RolloutQueue:
    """The queue, its workers and its books. Made where the policy has the weights that the run goes on from.

    `take` and `publish` are the trainer's; `work` is a worker's. With `start` the workers are threads; a test calls
    `work` itself, in place of `wait`.
    """

    def __init__(self, policy, task, args, log: Callable[[str], None], state: dict | None = None):
        self.policy, self.task, self.args, self.log = policy, task, args, log
        self.capacity = args.async_queue or args.prompts * (args.max_version_gap + 1)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.numbers = 0  # tickets so far
        if state:
            self.counts |= state["counts"]
            self.counts["dropped"] += state["outstanding"]
            self.numbers = state["numbers"]
        self.need = 0  # groups wanted at this version
        self.outstanding = 0  # groups begun and not taken
        self.tickets: deque[Ticket] = deque()
        self.ready: deque[FinishedGroup] = deque()
        self.condition = threading.Condition()
        self.closing = threading.Event()
        self.error: BaseException | None = None
        self.weights = Weights(policy.version, [])
        self.seconds: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("produce", "wait")}
        self.ages: list[int] = []
        self.use: list[float] = []
        self.workers = [Worker(policy, self.closing) for _ in range(args.async_workers)]
        self.threads: list[threading.Thread] = []

    def start(self) -> RolloutQueue:
        self.threads = [threading.Thread(target=self.run, args=(worker,), name=f"rollouts-{i}", daemon=True)
                        for i, worker in enumerate(self.workers)]
        for thread in self.threads:
            thread.start()
        return self

    # ---- the trainer's side
    def take(self, n: int, step: int, temperature: float, check: Callable[[], None]) -> list[list[Rollout]]:
        """The next `n` groups that are young enough, first made first taken. While it waits it calls `check`, which
        raises where the run is to stop; what ended a worker is raised here."""
        began = time.perf_counter()
        masses: list[float] = []
        taken: list[list[Rollout]] = []
        self.need = n
        self.use.append(len(self.ready) / self.capacity)
        while self.need:
            self.issue_tickets(step, temperature)
            made = self.next_ready(check)
            self.outstanding -= 1
            age = self.policy.version - made.version
            if age > self.args.max_version_gap:
                self.counts["stale"] += 1
                continue
            self.need -= 1
            self.counts["accepted"] += 1
            self.ages.append(age)
            masses.append(made.filtered_mass)
            taken.append(made.rollouts)
        self.seconds["wait"].append(time.perf_counter() - began)
        self.policy.filtered_mass = float(np.mean(masses)) if masses else 0.0
        self.issue_tickets(step, temperature)  # the workers go on during the update
        return taken

    def next_ready(self, check: Callable[[], None]) -> FinishedGroup:
        began, told = time.perf_counter(), 0
        while True:
            check()
            if time.perf_counter() - began >= 60 * (told + 1):  # a worker that hangs is not ended, but said
                told += 1
                self.log(f"waiting for rollouts for {60 * told} s; the workers are at {', '.join(self.places())}")
            with self.condition:
                if self.error is not None:
                    self.log("a rollout worker failed:\n" + "".join(traceback.format_exception(self.error)).rstrip())
                    raise self.error
                if self.ready:
                    return self.ready.popleft()
                if not self.outstanding:
                    raise TrainingFailed("no rollout can be young enough: the workers' weights are "
                                         f"{self.policy.version - self.weights.version} versions old, because newer "
                                         "ones were not finite (NaN or Inf); lower --lr")
                if self.threads and not any(thread.is_alive() for thread in self.threads):
                    raise TrainingFailed("every rollout worker has ended, and the trainer waits for groups")
                self.wait()

    def places(self) -> list[str]:
        """Where each worker's thread is, as file:line."""
        frames = sys._current_frames()
        stacks = [traceback.extract_stack(frames[t.ident]) for t in self.threads if t.ident in frames]
        return [f"{stack[-1].filename}:{stack[-1].lineno}" for stack in stacks]

    def wait(self) -> None:
        """Until a worker has something to tell, or half a second; the condition is held before and after."""
        self.condition.wait(0.5)

    def issue_tickets(self, step: int, temperature: float) -> None:
        """Issue tickets for as many groups as may be begun now: by age, by the queue's bound, and by the run's end."""
        args, lag = self.args, self.policy.version - self.weights.version
        later = min(args.max_version_gap - lag, args.steps - step)  # none for steps that will not be
        allowed = groups_allowed(self.need, args.prompts, self.outstanding, later)
        if allowed > self.capacity - self.outstanding:
            self.counts["full"] += 1
            allowed = max(0, self.capacity - self.outstanding)
        chunk = -(-args.prompts // args.async_workers)
        while allowed > 0:
            prompts = self.draw(min(chunk, allowed))
            allowed -= len(prompts)
            self.outstanding += len(prompts)
            self.numbers += 1
            ticket = Ticket(self.numbers, prompts, self.task.samples_per_prompt(), temperature)
            with self.condition:
                self.tickets.append(ticket)
                self.condition.notify_all()

    def draw(self, n: int) -> list[Prompt]:
        """`n` prompts: in the task's own order, and at random where the task deals from a list."""
        dealt = self.counts["dealt"]
        self.counts["dealt"] += n
        train = self.task.train
        some = at_random(dealt, n, self.args.async_random) if train else 0
        prompts: list[Prompt] = []
        if n > some:
            prompts += self.task.prompts(n - some)
        if some:
            rng = rng_of(self.args.seed, "random prompts", dealt)
            prompts += [train[i] for i in rng.integers(len(train), size=some)]
        return prompts

    def publish(self) -> None:
        """Hand the policy's weights to the workers, who take them before their next ticket. What is not finite is not
        handed on, said, and counted as an error."""
        tensors = [p.detach() for p in self.policy.model.parameters() if p.requires_grad]
        if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
            self.counts["errors"] += 1
            self.log(f"  warning: the weights of step {self.policy.version} are not finite (NaN or Inf) and are not "
                     "handed to the rollout workers")
            return
        weights = Weights(self.policy.version, [tensor.clone() for tensor in tensors])
        if self.policy.device.type == "cuda":
            weights.event = torch.cuda.Event()
            weights.event.record()
        with self.condition:
            self.weights = weights

    def metrics(self) -> dict[str, float | None]:
        """The values of COLUMNS: counts since the run began, the rest since the last call or over a window."""
        with self.condition:
            row: dict[str, float | None] = {f"async_{name}": self.counts[name] for name in COUNTS[1:]}
            seconds = {name: list(values) for name, values in self.seconds.items()}
        row["async_age_mean"] = mean_or_none(self.ages)
        row["async_queue_use"] = mean_or_none(self.use)
        self.ages, self.use = [], []
        for name, values in seconds.items():
            for p in (50, 90, 99):
                row[f"seconds_{name}_p{p}"] = float(np.percentile(values, p)) if values else None
        return row

    def state_dict(self) -> dict:
        """The books as plain JSON types. A resume drops what was on its way, and counts it."""
        with self.condition:
            return {"counts": dict(self.counts), "numbers": self.numbers, "outstanding": self.outstanding}

    def close(self, seconds: float = 9.0) -> None:
        """End the workers: each leaves at its next forward. The trainer does not wait longer than `seconds`."""
        self.closing.set()
        with self.condition:
            self.condition.notify_all()
        until = time.perf_counter() + seconds
        for thread in self.threads:
            thread.join(max(0.0, until - time.perf_counter()))

    # ---- a worker's side
    def work(self, worker: Worker) -> bool:
        """Roll out one ticket, waiting for it; False where the run ends instead."""
        with self.condition:
            self.condition.wait_for(lambda: self.tickets or self.closing.is_set())
            if self.closing.is_set():
                return False
            ticket, weights = self.tickets.popleft(), self.weights
        began = time.perf_counter()
        made, again = worker.roll(ticket, weights)
        with self.condition:
            self.ready += made
            self.counts["produced"] += len(made)
            self.counts["errors"] += again
            self.seconds["produce"].append(time.perf_counter() - began)
            self.condition.notify_all()
        return True

    def run(self, worker: Worker) -> None:
        try:
            while self.work(worker):
                pass
        except Aborted:
            pass
        except BaseException as error:  # whatever it is, the trainer must hear of it
            with self.condition:
                self.error = error
                self.condition.notify_all()
