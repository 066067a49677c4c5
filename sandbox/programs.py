"""Runs programs that a model wrote, where nothing they do can slow, kill or fool the trainer.

`run` executes one program; `judge` runs a solution and its hidden tests in two processes that share nothing but a
channel for plain data, so that the solution can neither see what is expected nor end, patch or imitate the tests. A
pass is a random number that only this process knows, handed back after the last test. See `sandbox.server` for how.

Isolation, the first that passes a check at the start: `bwrap` where it is on the PATH, then user namespaces of our own
(both: no network, a read-only file system without home, an empty scratch folder in memory), then `limits` (time,
memory, processes, no sockets, no signals; a root user becomes nobody; files by Landlock where the kernel has it).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from data import UserError
from sandbox.roles import receive, send

SERVER = Path(__file__).with_name("server.py")
MEMORY_MB = 1024
MODES = ("bwrap", "namespaces", "limits")
TIMED_OUT = 124  # see sandbox.server
# What every isolation must keep from a program; prints what it got.
PROBE = """
import os, socket
reach = []
try:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).connect(("127.0.0.1", {port}))
    reach.append("network")
except OSError:
    pass
for path in {hidden!r}:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).close()
        reach.append("home")
    except OSError:
        pass
try:
    open({outside!r}, "w")
    reach.append("files")
except OSError:
    pass
open("scratch", "w").write("x")
children = []
try:
    for _ in range(40):
        child = os.fork()
        if child == 0:
            import time
            time.sleep(1)
            os._exit(0)
        children.append(child)
    reach.append("processes")
except OSError:
    pass
print(*reach)
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """One program, or a solution with its tests where `tests` is not None.

    source    the program; for a solution a tuple of blocks that run one after the other
    call      a function of the program that is called after it
    stand_in  a source whose function `name` takes the place of the program's own before the call
    setup     source that runs before the solution and before its tests
    main      whether the program's __name__ is "__main__"
    """

    source: str | tuple[str, ...]
    tests: tuple[str, ...] | None = None
    name: str = ""
    setup: str = ""
    call: str = ""
    stand_in: str = ""
    timeout: float = 3.0
    memory_mb: int = MEMORY_MB
    main: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """How a program ended. `ok`: it (or its last test) ran to the end. `output`: stdout and stderr, 64 KiB at most.

    `verdict` is what the tests said of a failure; `code` the exit code, or 128 + the signal that ended it.
    """

    ok: bool
    timed_out: bool
    output: str
    verdict: str = ""
    code: int = 0


class Sandbox:
    """Programs in isolation, `workers` at once. `mode`: auto, require (refuses `limits`), or one of MODES."""

    def __init__(self, mode: str = "auto", workers: int = 0):
        self.workers = workers or len(os.sched_getaffinity(0))
        self.lock, self.server, self.control = threading.Lock(), None, None
        self.pool = concurrent.futures.ThreadPoolExecutor(self.workers, "sandbox")
        self.scratch = ""  # the folder of the programs' folders; with namespaces these are in memory
        self.mode, self.refused, self.reach = "", {}, set()
        asked = MODES if mode == "auto" else MODES[:2] if mode == "require" else (mode,)
        for self.mode in asked:
            self.refused[self.mode] = self._probe()
            if not self.refused[self.mode]:
                break
            self.close_server()
        else:
            self.close()
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise UserError(f"--sandbox {mode}: programs cannot be isolated here ({reasons}); install bubblewrap, "
                            "allow user namespaces, or take --sandbox limits on a machine that holds nothing of value")
        atexit.register(self.close)

    def describe(self) -> str:
        """One sentence: which isolation programs get, and why no better one."""
        said = {"bwrap": "bubblewrap: no network, read-only files, home hidden",
                "namespaces": "user namespaces: no network, read-only files, home hidden",
                "limits": "limits on time, memory and processes, no sockets: programs can "
                + ("read and write files" if self.reach else "read and write no files but their own")}
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items() if reason)
        return f"sandbox {said[self.mode]}" + (f" (not {why})" if why and self.mode == "limits" else "")

    def _probe(self) -> str:
        """Why this isolation does not hold here; empty where it does."""
        if self.mode == "bwrap" and not shutil.which("bwrap"):
            return "not on the PATH"
        if self.mode == "limits" and sys.platform != "linux":
            return "needs Linux"
        with socket.socket() as listener, tempfile.TemporaryDirectory(prefix="sandbox-probe-") as outside:
            os.chmod(outside, 0o777)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            source = PROBE.format(port=listener.getsockname()[1], hidden=hidden_paths(), outside=f"{outside}/file")
            try:
                result = self.run_job(Job(source, timeout=5.0))
            except (OSError, RuntimeError) as error:
                return str(error)
        self.reach = set(result.output.split())
        held = self.reach <= ({"home", "files"} if self.mode == "limits" else set())
        return "" if result.ok and held else f"a program reaches {result.output.strip()[-200:] or 'nothing'}"

    def start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self.scratch = tempfile.mkdtemp(prefix="sandbox-") if self.mode == "limits" else ""
            command = [sys.executable, "-P", "-s", "-S", str(SERVER), "--server", str(theirs.fileno()), self.mode,
                       shutil.which("bwrap") or "", self.scratch]
            self.server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={"PYTHONHASHSEED": "0"}, cwd="/",
                                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL, start_new_session=True)
            theirs.close()
            said = ours.recv(4096)
            if said != b"ready":
                self.server.wait()
                raise RuntimeError(said.decode() or "its server does not start")
            self.control = socket.socket(fileno=ours.detach())

    def close_server(self) -> None:
        if self.control is not None:
            self.control.close()  # at which the server ends and clears up
        if self.server is not None:
            try:
                self.server.wait(3)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.server, self.control, self.scratch = None, None, ""

    def close(self) -> None:
        """End the server and whatever still runs."""
        atexit.unregister(self.close)
        self.pool.shutdown(cancel_futures=True)
        self.close_server()

    def map(self, jobs: Sequence[Job]) -> list[Result]:
        """The results of many jobs, in their order, `workers` at once."""
        return list(self.pool.map(self.run_job, jobs))

    def run_job(self, job: Job) -> Result:
        """Run one job; a server that was killed from outside is started again, once."""
        for attempt in range(2):
            ours, theirs = socket.socketpair()
            try:
                with ours, theirs:
                    self._launch(job, theirs)
                    theirs.close()
                    return self._converse(job, ours)
            except OSError:
                if attempt:
                    raise

    def _launch(self, job: Job, theirs: socket.socket) -> None:
        header = {"processes": 1 if job.tests is None else 2, "seconds": job.timeout,
                  "memory_mb": clipped_memory(job.memory_mb, self.workers)}
        with self.lock:
            if self.server is None or self.server.poll() is not None:
                self.close_server()
                self.start_server()
            socket.send_fds(self.control, [json.dumps(header).encode()], [theirs.fileno()])

    def _converse(self, job: Job, ours: socket.socket) -> Result:
        nonce = secrets.token_bytes(32)
        if job.tests is None:
            parts = [{"role": "program", "source": job.source, "call": job.call, "stand_in": job.stand_in,
                      "name": job.name, "module": "__main__" if job.main else "program"}]
        else:
            parts = [{"role": "solution", "blocks": job.source, "setup": job.setup, "name": job.name},
                     {"role": "tests", "tests": job.tests, "setup": job.setup, "name": job.name}]
        for part in parts:
            send(ours, json.dumps(part).encode())
        send(ours, nonce)
        ours.settimeout(job.timeout + 30)
        answer = receive(ours)
        if answer is None:
            raise ConnectionError("the sandbox's server ended")
        report = json.loads(answer)
        ok = secrets.compare_digest(report["proof"], nonce.hex())
        late = not ok and TIMED_OUT in report["codes"]
        verdict = report["output"][-1].strip()[-500:] if job.tests is not None else ""
        return Result(ok, late, report["output"][0], verdict, report["codes"][-1])


def hidden_paths() -> list[str]:
    """What a program must not see: this file, and all of home that does not lead to the standard library."""
    home, needed = Path.home(), Path(os.__file__).parents
    entries = list(home.iterdir()) if home.is_dir() else []
    return [__file__, *(str(path) for path in entries if path not in needed)]


def clipped_memory(megabytes: int, workers: int) -> int:
    """A program's memory limit in MiB: no more than an equal part of half of what the machine or container has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()) >> 20)
        except (OSError, ValueError):  # "max": no limit
            continue
    return max(64, min(megabytes, total // (2 * workers)))


_default: Sandbox | None = None
_default_lock = threading.Lock()


def default_sandbox() -> Sandbox:
    """The sandbox that `run` uses and a task shares: made at the first call."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Sandbox()
        return _default


def run(program: str, timeout: float = 3.0, memory_mb: int = MEMORY_MB) -> Result:
    """Run a program. `ok` means that it ran past its last line: not exit code 0, and no exception.

    A program could forge that proof about itself, as tests in its own process always can; `judge` is for verdicts.
    """
    return default_sandbox().run_job(Job(program, timeout=timeout, memory_mb=memory_mb))


def judge(blocks: Sequence[str], tests: Sequence[str], name: str, setup: str = "", timeout: float = 3.0) -> Result:
    """Whether the function `name` of a solution passes all hidden `tests` (sources of assert statements).

    The tests see plain data by value: numbers, text, bytes, None, containers and iterators of these. What a function
    that returns None changed in its arguments is put back into them; a test that passes it a function cannot pass.
    """
    return default_sandbox().run_job(Job(tuple(blocks), tuple(tests), name, setup, timeout=timeout))
