"""Processes that call one function on JSON values: parallel, limited in CPU time and memory, gone with their owner.

A template process imports the function once and forks `n` children; each answers jobs on a socket of its own. A job
that outlives its limit kills its child (the kernel's timer does, also within C code); the template forks the next one
in milliseconds and the job's result is None. Everything ends when the owner's end of the sockets closes: at its exit,
its crash or its kill. The workers have their own session, so that Ctrl-C reaches only the owner.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

MEMORY = 2 << 30  # bytes of address space of a worker
BROKE = 3  # exit code of a child that could not go on after a job


class Workers:
    """`n` processes for the function that `target` names as module:function. Started by the first call, or `start`."""

    def __init__(self, target: str, n: int, seconds: float):
        self.target, self.n, self.seconds = target, n, seconds
        self.sockets: list[socket.socket] = []
        self.process: subprocess.Popen | None = None
        self.lock, self.jobs_sent = threading.RLock(), 0

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        with self.lock:
            if self.sockets:
                return
            pairs = [socket.socketpair() for _ in range(self.n)]
            self.sockets = [ours for ours, _ in pairs]
            theirs = [end.fileno() for _, end in pairs]
            paths = [os.path.abspath(path) for path in sys.path]
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            job = json.dumps([self.target, self.seconds, theirs, paths])
            self.process = subprocess.Popen(
                [sys.executable, "-I", os.path.abspath(__file__), job], pass_fds=theirs, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, **threads})
            for _, end in pairs:
                end.close()

    def close(self) -> None:
        with self.lock:
            for end in self.sockets:
                end.close()
            if self.process:
                self.process.wait()
            self.sockets, self.process = [], None

    def map(self, jobs: list[Any]) -> list[Any]:
        """The function's result of each job; None where it broke the limits or raised.

        RuntimeError where the processes cannot be started (a package that the function needs is missing).
        """
        with self.lock:
            for _ in range(2):  # again where the whole tree was killed from outside
                self.start()
                results, alive = self._run(jobs)
                if alive:
                    return results
                self.close()
        raise RuntimeError(f"the processes that run {self.target} do not start: see that requirements.txt is installed")

    def _run(self, jobs: list[Any]) -> tuple[list[Any], bool]:
        results, waiting, busy = [None] * len(jobs), list(range(len(jobs)))[::-1], {}
        buffers = dict.fromkeys(self.sockets, b"")
        with selectors.DefaultSelector() as selector:
            for end in self.sockets[: len(jobs)]:
                selector.register(end, selectors.EVENT_READ)
                if not (_drain(end) and self._send(end, jobs, waiting, busy)):
                    return results, False
            while busy:
                for end in [key.fileobj for key, _ in selector.select()]:
                    try:
                        data = end.recv(1 << 16)
                    except OSError:
                        data = b""
                    if not data:
                        return results, False
                    *lines, buffers[end] = (buffers[end] + data).split(b"\n")
                    for number, value in map(json.loads, lines):
                        if end in busy and number in (None, busy[end][0]):  # None: the child died of the job
                            results[busy.pop(end)[1]] = value
                    if end not in busy and waiting and not self._send(end, jobs, waiting, busy):
                        return results, False
        return results, True

    def _send(self, end: socket.socket, jobs: list[Any], waiting: list[int], busy: dict) -> bool:
        place = waiting.pop()
        self.jobs_sent += 1  # a reply to an earlier call, which an exception cut short, is known by its number
        busy[end] = (self.jobs_sent, place)
        try:
            end.sendall(json.dumps([self.jobs_sent, jobs[place]]).encode() + b"\n")
        except OSError:
            return False
        return True


def _drain(end: socket.socket) -> bool:
    """Drops replies to a call that an exception cut short; False where the other end is closed."""
    try:
        while data := end.recv(1 << 16, socket.MSG_DONTWAIT):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@functools.cache
def _shared(target: str, n: int, seconds: float, _owner: int) -> Workers:
    return Workers(target, n, seconds)


def shared_workers(target: str, n: int = 0, seconds: float = 1.0) -> Workers:
    """The workers of this process for a function; `n` 0: one a core it may run on, at most 16."""
    return _shared(target, n or min(16, len(os.sched_getaffinity(0))), seconds, os.getpid())


# ---- within the workers
def _template(target: str, seconds: float, ends: list[int], paths: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = paths
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    children = {_fork(function, seconds, end, ends, False): end for end in ends}
    while children:
        pid, status = os.wait()
        end = children.pop(pid)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == BROKE:
            children[_fork(function, seconds, end, ends, True)] = end


def _fork(function: Callable, seconds: float, end: int, ends: list[int], died: bool) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        for other in ends:
            if other != end:
                os.close(other)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = BROKE
        _answer(function, seconds, socket.socket(fileno=end), died)
        code = 0
    except OSError:  # the owner has gone
        code = 0
    finally:
        os._exit(code)


def _answer(function: Callable, seconds: float, end: socket.socket, died: bool) -> None:
    lines = end.makefile("rb")
    if died:
        end.sendall(b"[null, null]\n")
    for line in lines:
        number, job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time: a busy machine fails nothing
        signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
        try:
            reply = json.dumps([number, function(job)], allow_nan=False)
        except Exception:
            reply = json.dumps([number, None])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        end.sendall(reply.encode() + b"\n")


if __name__ == "__main__":
    _template(*json.loads(sys.argv[1]))
    os._exit(0)
