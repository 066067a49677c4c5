"""HTTP client for JSON interfaces: one reply to one request, in a bounded time, or the reason why there is none.

On httpx2. No redirect is followed, so that the key goes to no other host; proxies and certificates are those of the
environment. What a failure means, and whether another try may help, is for the caller to say.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
import math
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import httpx2

SAID_BYTES = 1 << 16  # of what a server says of an error


class Refused(Exception):
    """The server answered with another status than success; the message is that and what it said, short. `retry_after`:
    its header of that name."""

    def __init__(self, status: int, said: str, retry_after: str | None = None):
        super().__init__(f"{status}: {said}")
        self.status, self.said, self.retry_after = status, said, retry_after


class NoReply(Exception):
    """No server, no connection, or one that broke; `kind` is the name of the error below."""

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind


class TimedOut(NoReply):
    """The reply was not there in time."""


class TornReply(NoReply):
    """The reply began and broke off."""


class TooLong(NoReply):
    """The reply has more bytes than were allowed."""


class Client:
    """Asks from any number of threads, each request on a connection of its own. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.lock = threading.Lock()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.is_shut = False

    @functools.cached_property
    def http(self) -> httpx2.Client:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Connection": "close", "Accept-Encoding": "identity"}  # a compressed reply could be of any length
        return httpx2.Client(headers=headers, limits=limits, follow_redirects=False)

    def ask(self, url: str, body: Any = None, *, key: str = "", seconds: float, longest: float = math.inf) -> bytes:
        """The reply to a GET, or to a POST of `body` as JSON; `key` goes as a bearer token. It takes `seconds` and
        `longest` bytes at most. Raises Refused or NoReply."""
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        end = self.clock() + seconds
        try:
            with self.http.stream(method, url, content=content, headers=headers, timeout=seconds,
                                  extensions={"trace": self._remember}) as reply:
                if not reply.is_success:
                    raise self._refusal(reply, end)
                return self._receive(reply, end, longest)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, ImportError) as error:
            raise no_reply(error) from error

    def _receive(self, reply: httpx2.Response, end: float, longest: float) -> bytes:
        """The bytes of a reply. Raises NoReply."""
        data = b""
        try:
            for chunk in reply.iter_raw():
                data += chunk
                if len(data) > longest:
                    raise TooLong("the reply is too long")
                if self.clock() > end:  # each chunk came in time, the whole does not
                    raise TimedOut("timed out")
        except httpx2.RemoteProtocolError as error:
            raise TornReply(str(error), type(error).__name__) from error
        return data

    def _refusal(self, reply: httpx2.Response, end: float) -> Refused:
        said = b""
        with contextlib.suppress(httpx2.HTTPError, NoReply):  # the status says enough
            said = self._receive(reply, end, SAID_BYTES)
        return Refused(reply.status_code, message_of(said), reply.headers.get("Retry-After"))

    def _remember(self, event: str, info: dict) -> None:
        """httpx2's trace: keep the socket of each connection that was made."""
        if not event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            return
        made = info["return_value"].get_extra_info("socket")
        with self.lock:
            self.sockets.add(made)
            if self.is_shut:
                hang_up(made)

    def shut(self) -> None:
        """End every connection at once, so that the threads that wait there go on; the client is of no use then."""
        with self.lock:
            self.is_shut = True
            for made in list(self.sockets):
                hang_up(made)


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def no_reply(error: Exception) -> NoReply:
    """The failure of a request in words. An error of what was sent is named only: its text may show the key."""
    kind = type(system_error(error) or error).__name__
    if isinstance(error, httpx2.TimeoutException):
        return TimedOut(str(error) or "timed out", kind)
    if isinstance(error, httpx2.LocalProtocolError | UnicodeError):
        return NoReply(kind, kind)
    return NoReply(str(error) or kind, kind)


def system_error(error: BaseException | None) -> OSError | None:
    """The operating system's error, such as ConnectionRefusedError, that one of the library stands for."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def message_of(data: bytes) -> str:
    """What a server says of an error, short."""
    text = data.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        said = said.get("error", said)
        text = said.get("message") or said.get("detail", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(text).split())[:200]


def retry_after(text: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Seconds to wait by a Retry-After header, a number or a date (RFC 9110, 10.2.3); None where it says nothing."""
    text = (text or "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now())
    return None
