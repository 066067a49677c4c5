"""Programs that try to slow, kill, fool or outlive the trainer. Each test names one thing that none of them may do."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import quick, until

from data import UserError
from sandbox import programs as sandbox
from sandbox.programs import Job, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
PATIENT = 60.0  # seconds by the clock for what ends by itself, however busy the machine
HONEST = "def f(x):\n    return x + 1\nassert f(1) == 2\nprint('fine')"
# Does something that a grader must survive; none of them runs to its end unless `harmless`.
HOSTILE = {
    "endless loop": "while True: pass",
    "endless loop that ignores signals":
        "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
    "sleep": "import time; time.sleep(300)",
    "exit 0": "import sys; sys.exit(0)",
    "_exit 0": "import os; os._exit(0)",
    "exit in the middle": "print('PASS')\nraise SystemExit\nassert False",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "10 GiB of memory": "x = bytearray(10 << 30)",
    "15 GiB by a list": "x = [0] * (15 << 27)",
    "memory by many processes": "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n"
                                "        x = bytearray(b'x') * (400 << 20); time.sleep(60)\ntime.sleep(60)",
    "memory in a file": "import os\nfor i in range(100):\n    os.write(os.memfd_create('x'), b'x' * (50 << 20))",
    "10 GiB file": "f = open('big', 'wb')\nfor _ in range(10 << 10): f.write(b'x' * (1 << 20))",
    "many files": "for i in range(10 ** 6): open(f'f{i}', 'w').write('x')",
    "open files": "files = [open('/dev/null') for _ in range(10000)]",
    "1 GiB of output": "while True: print('x' * 1_000_000)",
    "binary output": "import os\nfor _ in range(2000): os.write(1, b'\\xff' * 65536)\nraise SystemExit",
    "input": "input()",
    "stdin": "import sys\nassert sys.stdin.read(1)",
    "write to ..": "open('../x', 'w').write('x')",
    "write to home": f"open({str(Path.home() / 'x')!r}, 'w').write('x')",
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=30)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that swallows errors": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads":
        "import threading, time\nfor _ in range(10000):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "child that sleeps, parent loops":
        "import os, time\nif os.fork() == 0: time.sleep(300)\nwhile True: pass",
    "child in its own session":
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(300)\n"
        "    os._exit(0)\nraise SystemExit",
    "deep recursion": "def f(): return f()\nf()",
    "deep C recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()",
    "no such syntax": "def f(:",
    "null byte": "x = '\0'\nassert x",
    "huge integer": "x = 10 ** 10 ** 10",
    "regular expression": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nraise SystemExit",
    "kill the group": "import os, signal\nos.killpg(os.getpgid(0), signal.SIGKILL)\nraise SystemExit",
}
HARMLESS = {
    "signal to the parent": "import os, signal\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError: pass",
    "background child": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(300)",
    "closed output": "import sys; sys.stdout.close()",
    "daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "listening socket": "import socket\ntry:\n    s = socket.socket(); s.bind(('0.0.0.0', 34567)); s.listen()\n"
                        "except OSError: pass",
}


@pytest.fixture(scope="module")
def box():
    return sandbox.default_sandbox()


def patient(source: str) -> Job:
    return Job(source, timeout=PATIENT)


def run(program: str, timeout: float = PATIENT):
    return sandbox.run(program, timeout)


def judge(blocks, tests, name: str, timeout: float = PATIENT):
    return sandbox.judge(blocks, tests, name, timeout=timeout)


def orphans() -> set[str]:
    """Processes of sandboxes whose parent is gone: what programs leave would be among them."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"sandbox/server.py" in words and parent == "1":
                found.add(entry.name)
    return found


def children_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_fails_in_time_and_leaves_nothing(box, name):
    with quick():
        result = box.run_job(Job(HOSTILE[name], timeout=0.6))
    assert not result.ok
    assert len(result.output.encode()) <= 3 * 65_536
    until(lambda: not children_of(box.server.pid))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_runs_to_its_end_and_leaves_nothing(box, name):
    assert box.run_job(patient(HARMLESS[name])).ok
    until(lambda: not children_of(box.server.pid))


def test_only_a_program_that_hangs_timed_out():
    assert run("while True: pass", timeout=0.3).timed_out
    assert not run("1 / 0").timed_out
    assert not run(HONEST).timed_out


def test_run_returns_what_was_printed_and_the_exception():
    result = run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nraise ValueError('why')")
    assert "out\n" in result.output and "err\n" in result.output and "ValueError: why" in result.output
    assert run("print('é')").output == "é\n"


def test_output_is_bounded_while_it_is_read():
    result = run("import sys\nfor _ in range(3000): sys.stdout.write('x' * 10_000)\nprint('the end')")
    assert result.ok and result.output == "x" * 65_536


def test_input_is_at_its_end_at_once():
    with quick():
        assert "EOFError" in run("input()").output


def test_memory_over_the_limit_is_a_memory_error():
    assert "MemoryError" in run("x = bytearray(15 << 30)").output
    assert run("x = bytearray(300 << 20)").ok


def test_a_program_sees_no_environment_arguments_or_files_of_the_trainer(box, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    seen = box.run_job(patient("import os, sys\nprint(dict(os.environ), sys.argv, os.listdir('.'))\n"
                           "for path in ('/proc/self/environ', '/proc/1/environ', '/proc/1/cmdline'):\n"
                           "    try: print(open(path).read())\n    except OSError: print('none')"))
    assert seen.ok and seen.output == "{} [''] []\n" + "none\n" * 3
    there = box.run_job(patient(f"import os\nprint([p for p in {[str(Path(__file__)), str(Path.home() / '.ssh')]!r} "
                            "if os.path.exists(p)])"))
    assert there.output == "[]\n"


def test_no_network_not_even_to_this_machine(box):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = box.run_job(patient(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"))
        assert not result.ok and "Error" in result.output


def test_the_scratch_folder_is_private_and_empty_each_time(box):
    source = "import os, tempfile\nprint(os.listdir('.'))\nopen('a', 'w').write('x')\ntempfile.mkdtemp()"
    first, second = box.map([patient(source)] * 2)
    assert first.ok and second.ok and first.output == second.output == "[]\n"


def test_a_module_beside_the_program_does_not_shadow_what_the_grader_imports(box):
    block = "open('json.py', 'w').write('raise SystemExit(0)')\n"
    block += "open('conftest.py', 'w').write('import os; os._exit(0)')\n"
    result = judge([block + "def f(x):\n    return x"], ["import json\nassert f(1) == 2"], "f")
    assert not result.ok
    assert judge([block + "def f(x):\n    return x + 1"], ["import json\nassert f(1) == 2"], "f").ok


def test_results_come_in_order_whatever_the_programs_take(box):
    jobs = [patient(f"import time; time.sleep({0.3 if i % 3 == 0 else 0}); print({i})") for i in range(9)]
    assert [result.output for result in box.map(jobs)] == [f"{i}\n" for i in range(9)]


def test_hashes_and_random_numbers_repeat():
    source = "print(hash('a'), list({'b', 'c', 'd', 'e'}))"
    assert run(source).output == run(source).output


# ---- solutions against hidden tests
TESTS = ("assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0")
CHEATS = {
    "exits": "import sys\ndef f(x): sys.exit(0)",
    "exits at the module's level": "import os\nos._exit(0)\ndef f(x): return x",
    "equal to everything": "class E(int):\n    def __eq__(self, other): return True\n"
                           "    def __ne__(self, other): return False\ndef f(x): return E(7)",
    "an object equal to everything": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "a dictionary's lie": "class E(dict):\n    __eq__ = lambda s, o: True\ndef f(x): return E()",
    "own run_tests": "def f(x): return 0\ndef run_tests(): return True",
    "prints": "print('PASS')\nprint('{\"value\": 2}')\nimport os\nos.write(3, b'x' * 32)\ndef f(x): return 0",
    "patched builtins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
                        "builtins.__import__ = None\nbuiltins.exec = lambda *a: None\ndef f(x): return 0",
    "a trace": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x): return 0",
    "asserts off": "import sys\nsys.flags = None\n__debug__ if True else 0\ndef f(x): return 0",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)",
    "kills": "import os, signal\ndef f(x):\n    for p in range(1, 100):\n"
             "        try: os.kill(p, signal.SIGKILL)\n        except OSError: pass\n    return 0",
    "hangs up": "import os\ndef f(x):\n    os.closerange(0, 100)",
    "forged reply": "import os\ndef f(x):\n    m = b'{\"value\": 2}'\n"
                    "    os.write(4, len(m).to_bytes(4, 'little') + m)\n    return 9",
    "huge reply": "def f(x): return 'x' * (40 << 20)",
    "deep reply": "def f(x):\n    y = []\n    for _ in range(10 ** 5): y = [y]\n    return y",
    "endless iterator": "import itertools\ndef f(x): return itertools.count()",
    "raises AssertionError": "def f(x): raise AssertionError",
    "raises a BaseException": "def f(x): raise KeyboardInterrupt",
    "contains everything": "class E:\n    def __contains__(self, other): return True\ndef f(x): return E()",
    "compares as asked": "class E:\n    __lt__ = __le__ = __gt__ = __ge__ = lambda s, o: True\ndef f(x): return E()",
    "ends the test's loop": "def f(x): raise StopIteration",
    "clears what it was given": "def f(x):\n    if isinstance(x, list): x.clear()\n    return 0",
    "asks its peer": "import os, signal, socket, struct\ndef f(x):\n    s = socket.socket(fileno=os.dup(4))\n"
                     "    peer = struct.unpack('3i', s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]\n"
                     "    try: os.kill(peer, signal.SIGKILL)\n    except OSError: pass\n    return 0",
    "answers by two processes": "import os\ndef f(x):\n    return 2 if os.fork() == 0 else 0",
    "a timer": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
               "signal.setitimer(signal.ITIMER_REAL, 0.05)\ndef f(x):\n    while True: pass",
    "reads the memory": "import ctypes\ndef f(x):\n    words = b''.join([b'ass', b'ert f(-', b'1) =='])\n"
                        "    for line in open('/proc/self/maps'):\n        a, b = (int(n, 16) for n in "
                        "line.split()[0].split('-'))\n        if 'rw-p' in line and "
                        "ctypes.string_at(a, b - a).count(words) > 1: return x + 1\n    return 0",
    "reads frames": "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
                    "        for v in list(frame.f_locals.values()):\n            if isinstance(v, (list, tuple)) and "
                    "any('assert' in str(t) for t in v): return x + 1\n        frame = frame.f_back\n"
                    "    texts = [o for o in gc.get_objects() if type(o) is str]\n"
                    "    return x + 1 if any(o.startswith('assert f(') for o in texts) else 0",
    "reads files": "import os\ndef f(x):\n    for root, _, names in os.walk('.'):\n        for n in names:\n"
                   "            if 'assert f' in open(os.path.join(root, n), errors='replace').read(): return x + 1\n"
                   "    return 0",
}
# Tests that ask for less than equality, each with the cheat that would pass it.
SOFT = {"contains everything": "assert 2 in f([1])", "compares as asked": "assert 1 < f([1]) < 3",
        "ends the test's loop": "assert all(map(lambda x: f(x) == 2, [1]))",
        "clears what it was given": "data = [1]\nassert f(data) == sum(data)"}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_no_pass(name):
    result = judge([CHEATS[name]], TESTS, "f", timeout=2.0)
    assert not result.ok
    assert judge(["def f(x): return x + 1"], TESTS, "f").ok
    if name in SOFT:
        assert not judge([CHEATS[name]], [SOFT[name]], "f").ok


def test_a_right_solution_passes_and_the_first_failing_test_is_named():
    assert judge(["def f(x):\n    return x + 1"], TESTS, "f").ok
    wrong = judge(["def f(x):\n    return 3"], TESTS, "f")
    assert not wrong.ok and "test 0" in wrong.verdict and "AssertionError" in wrong.verdict
    assert "test 1" in judge(["def f(x):\n    return 2"], TESTS, "f").verdict


def test_no_tests_are_no_pass():
    assert not judge(["def f(x):\n    return 1"], [], "f").ok


@pytest.mark.parametrize("value", ["None", "True", "1.5", "float('inf')", "'é\\ud800'", "b'\\x00'", "10 ** 100", "-3",
                                   "[1, (2, {3}), {'a': [4]}]", "{(1, 2): frozenset({3})}", "1 + 2j", "range(3, 9, 2)",
                                   "__import__('fractions').Fraction(10 ** 30, 7)", "''", "[]", "()", "{}",
                                   "__import__('decimal').Decimal('-1.50')"])
def test_plain_data_crosses_unchanged(value):
    same = f"assert f({value}) == {value} and type(f({value})) is type({value})"
    assert judge(["def f(x):\n    return x"], [same], "f").ok


def test_iterators_objects_and_exceptions_cross_as_tests_expect():
    blocks = ["class P:\n    def __init__(self): self.items = [1, 2]\n    def first(self): return self.items[0]\n"
              "    def __len__(self): return 2\n"
              "def f(kind):\n    if kind == 'it': return (i * i for i in range(3))\n    if kind == 'p': return P()\n"
              "    raise ValueError('no such kind')"]
    tests = ["assert list(f('it')) == [0, 1, 4]",
             "p = f('p')\nassert p.first() == 1 and p.items == [1, 2] and len(p) == 2",
             "try:\n    f('x')\n    assert False\nexcept ValueError as e:\n    assert 'kind' in str(e)"]
    assert judge(blocks, tests, "f").ok


def test_what_a_function_changed_in_place_is_seen_where_it_returns_nothing():
    blocks = ["from collections import deque\ndef f(x, how):\n    if how == 'sort': x.sort()\n"
              "    elif how == 'count': x['n'] = [len(x)]\n    else: x.append(9)\n    return None"]
    tests = ["data = same = [3, 1, 2]\nassert f(data, 'sort') is None and data == [1, 2, 3] and same is data",
             "d = {'a': 1}\nf(d, how='count')\nassert d == {'a': 1, 'n': [1]}",
             "from collections import deque\nq = deque([1])\nf(q, 'push')\nassert q == deque([1, 9])"]
    assert judge(blocks, tests, "f").ok
    assert not judge(["def f(x, how): pass"], tests[:1], "f").ok


def test_a_demonstration_that_fails_does_not_undo_the_solution_before_it():
    right = "def f(x):\n    return x + 1"
    assert judge([right, "print(f(1))"], TESTS, "f").ok
    assert judge([right, "assert f(1) == 3"], TESTS, "f").ok
    assert not judge([right, "def f(x):\n    return 0\n1 / 0"], TESTS, "f").ok
    assert not judge([right + "\n1 / 0"], TESTS, "f").ok


# ---- many at once, and the trainer around them
def batch(size: int) -> list[Job]:
    programs = [*HOSTILE.values(), *HARMLESS.values()]
    return [Job(programs[i % len(programs)], timeout=0.3) if i % 5 else patient(HONEST) for i in range(size)]


def check_batch(box: Sandbox, size: int) -> None:
    box.map(batch(10))
    gc.collect()
    before = (len(os.listdir("/proc/self/fd")), memory(), left_files(box), ports(), orphans())
    results = box.map(batch(size))
    for i, result in enumerate(results):
        if i % 5 == 0:
            assert result.ok and result.output == "fine\n"
    until(lambda: not children_of(box.server.pid))
    del results, result
    gc.collect()
    after = (len(os.listdir("/proc/self/fd")), memory(), left_files(box), ports(), orphans())
    assert after[0] == before[0] and after[2:] == before[2:]
    assert after[1] - before[1] < 30


def left_files(box: Sandbox) -> list[str]:
    return sorted(os.listdir(box.scratch)) if box.scratch else []


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def ports() -> set[str]:
    return {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if ":8707 " in line}  # 34567


def test_a_hostile_batch_leaves_nothing_and_honest_programs_score_right():
    box = Sandbox(workers=4)
    try:
        check_batch(box, 45)
    finally:
        box.close()


@pytest.mark.slow
def test_500_hostile_programs_leave_nothing_and_honest_programs_score_right():
    box = Sandbox(workers=4)
    try:
        check_batch(box, 625)  # every fifth is honest
    finally:
        box.close()


def test_a_server_that_was_killed_is_started_again():
    box = Sandbox(workers=1)
    try:
        assert box.run_job(patient(HONEST)).ok
        box.server.kill()
        box.server.wait()
        assert box.run_job(patient(HONEST)).ok
    finally:
        box.close()


@pytest.mark.parametrize("mode", ["auto", "limits"])
def test_closing_leaves_no_process_and_no_folder(mode):
    box = Sandbox(mode, workers=2)
    server, scratch = box.server.pid, box.scratch
    assert bool(scratch) == (box.mode == "limits")  # with namespaces programs write into memory
    box.close()
    assert not Path(f"/proc/{server}").exists() and not (scratch and Path(scratch).exists())


@pytest.mark.parametrize("mode", ["auto", "limits"])
def test_programs_and_folders_end_with_a_trainer_that_is_killed(mode):
    code = (f"from sandbox.programs import Sandbox, Job\nbox = Sandbox({mode!r})\n"
            "print(box.server.pid, box.scratch, flush=True)\n"
            "box.run_job(Job('import time\\nopen(\\'x\\', \\'w\\')\\ntime.sleep(300)', timeout=100.0))")
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).resolve().parent.parent)
    server, _, scratch = trainer.stdout.readline().strip().partition(" ")
    until(lambda: any(children_of(int(child)) for child in children_of(int(server))))
    supervisor = next(child for child in children_of(int(server)) if children_of(int(child)))
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until(lambda: not Path(f"/proc/{server}").exists() and not Path(f"/proc/{supervisor}").exists())
    assert not (scratch and Path(scratch).exists())


def test_what_limits_alone_leaves_open_is_told_and_the_rest_is_shut():
    box = Sandbox("limits", workers=1)
    places = ["/tmp/left", "/dev/shm/left", "/var/tmp/left", str(Path.home() / "left"), "../left"]
    source = (f"opened = []\nfor path in {places!r}:\n    try: opened.append(open(path, 'w'))\n"
              f"    except OSError: pass\ntry: opened.append(open({__file__!r}))\nexcept OSError: pass\n"
              "open('own', 'w').write('x')\nassert not opened, opened\n")
    nested = "import os\nfor _ in range(40):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\nopen('x', 'w')"
    try:
        told = "their own" in box.describe()
        results = box.map(map(patient, (source, nested, "import threading, datetime, math, collections")))
        assert results[0].ok == told and results[1].ok and results[2].ok
        assert os.listdir(box.scratch) == []
    finally:
        box.close()


@pytest.mark.parametrize("mode", ["namespaces", "limits"])
def test_each_isolation_that_works_here_ends_what_its_programs_start(mode):
    try:
        box = Sandbox(mode, workers=2)
    except UserError as error:
        pytest.skip(str(error))
    try:
        names = ["child in its own session", "fork bomb", "10 GiB of memory", "endless loop", "network",
                 "kill everything"]
        for name, result in zip(names, box.map([Job(HOSTILE[name], timeout=0.5) for name in names]), strict=True):
            assert not result.ok, name
        assert box.run_job(patient(HONEST)).ok
        until(lambda: not children_of(box.server.pid))
    finally:
        box.close()


def test_require_refuses_limits_alone(monkeypatch):
    monkeypatch.setattr(Sandbox, "_probe", lambda self: "" if self.mode == "limits" else "not here")
    with pytest.raises(UserError, match="--sandbox require: .*bwrap: not here; namespaces: not here"):
        Sandbox("require")
    box = Sandbox("auto")
    try:
        assert box.mode == "limits" and "namespaces: not here" in box.describe()
    finally:
        box.close()


def test_the_memory_limit_is_clipped_to_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 18}[name])  # 2 GiB
    assert sandbox.clipped_memory(1024, workers=4) == 256
    assert sandbox.clipped_memory(100, workers=4) == 100
