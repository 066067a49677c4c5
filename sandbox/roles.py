"""What runs inside a sandbox: a program, or a solution that answers calls, or its tests. Stdlib only.

Messages are length-prefixed JSON. Between solution and tests only plain data cross, by value, and nothing that runs.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import json
import socket
import struct
import sys
import traceback
import types

FRAME = 16 << 20  # largest message between two processes
ITEMS = 100_000  # most items that are drawn from an iterator
# Exceptions of a solution that tests see as a RuntimeError: what would pass for a test's own, or end its loop early.
NOT_RAISED = (AssertionError, UnicodeError, StopIteration, StopAsyncIteration)


# ---- messages
def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket) -> bytes | None:
    """The next message; None at the end of the stream or where its length is a lie."""
    head = _exactly(sock, 4)
    size = struct.unpack("<I", head)[0] if head else FRAME + 1
    return _exactly(sock, size) if size <= FRAME else None


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# ---- roles
def run_program(job: dict) -> bool:
    """Run a source to its end, then the function `call` of it where there is one.

    `stand_in`: a source whose function `name` takes the place of the program's own before the call.
    """
    module = types.ModuleType(job["module"])
    module.__dict__["__builtins__"] = builtins
    sys.modules[job["module"]] = module
    try:
        exec(compile(job["source"], "<program>", "exec"), module.__dict__)
        if job["stand_in"]:
            other: dict = {"__name__": "stand_in"}
            exec(compile(job["stand_in"], "<stand-in>", "exec"), other)
            module.__dict__[job["name"]] = other[job["name"]]
        return not job["call"] or module.__dict__[job["call"]]() is not False
    except BaseException as error:
        complain(error)
        return False


def complain(error: BaseException) -> None:
    """The traceback as Python prints it, without this file's part in it."""
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))


def serve(job: dict, channel: socket.socket) -> bool:
    """Run the blocks of a solution and answer calls of its function until the tests hang up.

    A block that fails after the function is defined, and defines it not, is a demonstration: it is passed over.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    try:
        exec(compile(job["setup"], "<setup>", "exec"), space)
        space.pop(job["name"], None)
        for block in job["blocks"]:
            try:
                exec(compile(block, "<solution>", "exec"), space)
            except Exception as error:
                if job["name"] not in space or f"def {job['name']}" in block:
                    raise
                complain(error)
        objects = [space[job["name"]]]
    except BaseException as error:
        complain(error)
        send(channel, json.dumps({"fatal": f"{type(error).__name__}: {error}"[:500]}).encode())
        return False
    send(channel, b"{}")
    while (request := receive(channel)) is not None:
        send(channel, answer(json.loads(request), objects))
    return True


def answer(request: list, objects: list) -> bytes:
    try:
        what, index, args, keywords = request
        target = objects[index]
        args, keywords = [decode(x) for x in args], {name: decode(x) for name, x in keywords.items()}
        value = target(*args, **keywords) if what == "call" else getattr(target, args[0])
        reply = {"value": encode(value, objects)}
        if value is None and (after := [encode(x, objects) for x in args]) != request[2]:
            reply["changed"] = after
        reply = json.dumps(reply).encode()
        if len(reply) > FRAME:
            raise ValueError("the result is too large")
        return reply
    except BaseException as error:
        return json.dumps({"error": type(error).__name__, "text": str(error)[:500]}).encode()


class Remote:
    """In the tests: an object of the solution. Calls and attributes go over; comparisons, `in` and arithmetic do not,
    where an object could agree with whatever it is given."""

    def __init__(self, channel: socket.socket, index: int):
        object.__setattr__(self, "_link", (channel, index))

    def _ask(self, what: str, args, keywords):
        channel, index = object.__getattribute__(self, "_link")
        send(channel, json.dumps([what, index, [encode(x) for x in args],
                                  {name: encode(x) for name, x in keywords.items()}]).encode())
        reply = receive(channel)
        if reply is None:
            raise RuntimeError("the solution ended")
        reply = json.loads(reply)
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in NOT_RAISED:
                kind = RuntimeError
            try:
                raise kind(str(reply.get("text")))
            except TypeError:  # UnicodeDecodeError and the like want five arguments
                raise RuntimeError(str(reply.get("text"))) from None
        for mine, theirs in zip(args, reply.get("changed", ()), strict=False):
            put_back(mine, decode(theirs, lambda i: Remote(channel, i)))
        return decode(reply["value"], lambda i: Remote(channel, i))

    def __call__(self, *args, **keywords):
        return self._ask("call", args, keywords)

    def __getattr__(self, name: str):
        return self._ask("attribute", (name,), {})

    def _special(name):  # noqa: N805
        return lambda self, *args: self._ask("attribute", (name,), {})(*args)

    __len__, __getitem__, __iter__, __next__, __str__, __repr__, __bool__ = map(
        _special, "__len__ __getitem__ __iter__ __next__ __str__ __repr__ __bool__".split())


def put_back(mine, theirs) -> None:
    """Give an argument the content that the solution left in it."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, collections.deque):
        mine.clear()
        mine.extend(theirs)
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def run_tests(job: dict, channel: socket.socket) -> bool:
    """The hidden tests, one after the other, against the solution in the other process. Stops at the first failure."""
    ready = json.loads(receive(channel) or b'{"fatal": "the solution ended"}')
    if "fatal" in ready:
        print(f"the solution does not load: {ready['fatal']}")
        return False
    space: dict = {"__name__": "tests"}
    try:
        exec(compile(job["setup"], "<setup>", "exec"), space)
        space[job["name"]] = Remote(channel, 0)
        for number, test in enumerate(job["tests"]):
            exec(compile(test, f"<test {number}>", "exec"), space)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"{where.filename} line {where.lineno}: {type(error).__name__}: {str(error)[:300]}")
        return False
    return bool(job["tests"])


# ---- values that cross between solution and tests: plain data by value, as JSON with tags; nothing that runs
CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque, "list": list}


def encode(x, objects: list | None = None):
    """Plain data as JSON. Another object becomes a handle in `objects`, or a TypeError where there is no such list."""
    if x is None or x is True or x is False or type(x) in (str, float):
        return x
    if isinstance(x, int):
        return int(x) if abs(x) < 1 << 60 else {"int": hex(x)}
    if isinstance(x, str | float):
        return str.__str__(x) if isinstance(x, str) else float(x)
    if isinstance(x, dict):
        return {"dict": [[encode(k, objects), encode(v, objects)] for k, v in dict.items(x)]}
    for name, kind in CONTAINERS.items():
        if isinstance(x, kind):
            return {name: [encode(item, objects) for item in kind.__iter__(x)]}
    if isinstance(x, bytes | bytearray):
        return {"bytes": bytes(x).hex()}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    if isinstance(x, range):
        return {"range": [x.start, x.stop, x.step]}
    if isinstance(x, fractions.Fraction):
        return {"fraction": [encode(int(x.numerator)), encode(int(x.denominator))]}
    if isinstance(x, decimal.Decimal):
        return {"decimal": decimal.Decimal.__str__(x)}
    if objects is None:
        raise TypeError(f"a {type(x).__name__} cannot be passed to a solution")
    if hasattr(x, "__next__"):
        items = []
        for item in x:
            items.append(encode(item, objects))
            if len(items) > ITEMS:
                raise ValueError("an iterator with too many items")
        return {"iterator": items}
    objects.append(x)
    return {"object": len(objects) - 1}


def decode(x, remote=None):
    if not isinstance(x, dict):
        return x
    (tag, value), = x.items()
    if tag in CONTAINERS:
        return CONTAINERS[tag](decode(item, remote) for item in value)
    if tag == "dict":
        return {decode(k, remote): decode(v, remote) for k, v in value}
    if tag == "iterator":
        return iter([decode(item, remote) for item in value])
    if tag == "object" and remote:
        return remote(int(value))
    plain = {"int": lambda: int(value, 16), "bytes": lambda: bytes.fromhex(value), "range": lambda: range(*value),
             "complex": lambda: complex(*value), "decimal": lambda: decimal.Decimal(value),
             "fraction": lambda: fractions.Fraction(*map(decode, value))}
    return plain[tag]()
