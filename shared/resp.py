"""A small blocking Redis client for payloads: pipelined SET and GET without copies.

One connection serves one thread at a time. After any error the connection is closed
and never used again: a reply that was not read would otherwise answer the next call.
"""

from __future__ import annotations

import functools
import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from criticalkv.shared.errors import StoreFullError, StoreUnavailableError
from criticalkv.shared.redis_location import Location as Location

_T = TypeVar("_T")
_CRLF = b"\r\n"
_SHORTEST_REPLY = 5  # "$-1\r\n"
_LONGEST_LINE = 4096
_ASKING = b"*1\r\n$6\r\nASKING\r\n"

RETRY_AFTER_S = 1.0
FAILOVER_S = 5.0
"""How long a call waits for another server to take over."""
MOVING = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")
"""Refusals that end by themselves when a server has taken over or is ready."""


class Unreachable(StoreUnavailableError):
    """No connection, or it broke."""


class TimedOut(Unreachable):
    """No answer in time."""


class Moving(StoreUnavailableError):
    """A server that is none just now: demoted, loading, or without its cluster."""


class NobodyLeads(Moving, Unreachable):
    """No Sentinel answers: worth waiting for, and if that was in vain no answer at all."""


class Redirected(StoreUnavailableError):
    """The key is on another node of the cluster."""

    def __init__(self, host: str, port: int, asking: bool) -> None:
        super().__init__("Redis is a cluster; use redis+cluster://")
        self.host = host
        self.port = port
        self.asking = asking


class LengthMismatch(Exception):
    """A stored value is not of the length that its manifest says."""


class DataClient(Protocol):
    """What moves payloads; see DataPool."""

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None: ...

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]: ...

    def location_of(self, key: str) -> Location: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class DataConnection:
    """One socket to Redis. Every operation has a timeout; see the module's text."""

    def __init__(self, location: Location, timeout_s: float) -> None:
        """Connect, authenticate and select the database.

        Args:
            timeout_s: limit of connecting and of each operation as a whole.

        Raises:
            StoreUnavailableError: if Redis does not answer in time, or refuses the user.
        """
        self._timeout_s = timeout_s
        self._ahead = b""  # received, not yet taken
        self._deadline = time.monotonic() + timeout_s
        self._socket = _connect(location, timeout_s)
        tls = isinstance(self._socket, ssl.SSLSocket)
        self._flags = 0 if tls else socket.MSG_WAITALL  # TLS sockets refuse flags
        try:
            if location.password:
                user = [location.username] if location.username else []
                self._command("AUTH", *user, location.password)
            if location.database:
                self._command("SELECT", str(location.database))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket. Idempotent, callable from any thread."""
        self._socket.close()

    def set_many(
        self, items: Sequence[tuple[str, bytes]], ttl_ms: int, asking: bool = False
    ) -> None:
        """Store values under keys, each expiring after `ttl_ms`.

        Args:
            asking: a node of the cluster is still being given these keys.

        Raises:
            StoreFullError: if Redis is out of memory; some values may be stored.
            StoreUnavailableError: if the connection fails, or Redis refuses.
        """
        self._deadline = time.monotonic() + self._timeout_s
        before, tail = _ASKING if asking else b"", _CRLF + _bulk("PX") + _bulk(str(ttl_ms))
        for key, value in items:
            head = before + b"*5\r\n" + _bulk("SET") + _bulk(key) + b"$%d\r\n" % len(value)
            self._send([head, value, tail])
        replies = [self._line() for _ in range(len(items) * (1 + asking))]
        errors = [reply for reply in replies if reply != b"+OK"]
        if errors:
            raise _redis_error(errors[0])

    def get_many(
        self, wanted: Sequence[tuple[str, int]], asking: bool = False
    ) -> list[bytes | None]:
        """Read values of known length; None where the key is gone.

        Args:
            wanted: (key, length in bytes ≥ 1) each.
            asking: as in `set_many`.

        Raises:
            LengthMismatch: if a value has another length.
            StoreUnavailableError: if the connection fails, or Redis refuses.
        """
        self._deadline = time.monotonic() + self._timeout_s
        before = _ASKING if asking else b""
        self._send([b"".join(before + b"*2\r\n" + _bulk("GET") + _bulk(key) for key, _ in wanted)])
        last = len(wanted) - 1
        return [
            self._value(length, asking, more=at < last) for at, (_, length) in enumerate(wanted)
        ]

    def _value(self, length: int, asking: bool, *, more: bool = False) -> bytes | None:
        # Two system calls per value, not four: `more` = another value's head comes next.
        if asking and (reply := self._line()) != b"+OK":
            raise _redis_error(reply)
        head = b"$%d\r\n" % length
        if self._peek(_SHORTEST_REPLY).startswith(b"$-1\r\n"):
            self._take(_SHORTEST_REPLY)
            return None
        if not self._peek(len(head)).startswith(head):
            return self._other_length()
        self._take(len(head))
        value = self._take(length)  # what of a short one came along with its head
        if len(value) < length:
            value = value + self._receive(length - len(value)) if value else self._receive(length)
        self._peek(2, most=2 + len(head) if more and not asking else 2)
        if self._take(2) != _CRLF:
            raise Unreachable("Redis sent a malformed reply")
        return value

    def _other_length(self) -> bytes | None:
        # A value that is not ours, or an error. Not worth resynchronizing.
        if self._ahead.startswith(b"-"):
            line = self._line()
            if line.startswith(b"-WRONGTYPE"):
                raise LengthMismatch("a stored value is of another type")
            raise _redis_error(line)
        raise LengthMismatch("a stored value has an unexpected length")

    def _command(self, *words: str) -> None:
        self._send([b"*%d\r\n" % len(words) + b"".join(_bulk(word) for word in words)])
        reply = self._line()
        if not reply.startswith(b"+"):
            raise _redis_error(reply)

    def _send(self, parts: list[bytes]) -> None:
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.sendall(b"".join(parts))
                return
            views = [memoryview(part) for part in parts]
            while views:
                self._check_deadline()
                sent = self._socket.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise _broken("Redis does not take data", error) from error

    def _receive(self, length: int) -> bytes:
        # MSG_WAITALL fills one bytes object: no second copy.
        parts: list[bytes] = []
        try:
            while True:
                self._check_deadline()
                got = self._socket.recv(length, self._flags)
                if len(got) == length and not parts:
                    return got
                parts.append(got)
                length -= len(got)
                if not got or not length:
                    break
        except OSError as error:
            raise _broken("Redis does not answer", error) from error
        if length:
            raise Unreachable("Redis closed the connection", retry_after_s=RETRY_AFTER_S)
        return b"".join(parts)

    def _line(self) -> bytes:
        got = self._peek(_SHORTEST_REPLY)
        while _CRLF not in got:
            if len(got) > _LONGEST_LINE:
                raise Unreachable("Redis sent a malformed reply")
            got = self._peek(len(got) + 1)
        return self._take(got.index(_CRLF) + 2)[:-2]

    def _peek(self, least: int, most: int = 0) -> bytes:
        """Return what has arrived and is not taken: `least` bytes, up to `most` without a wait."""
        missing = least - len(self._ahead)
        if missing > 0 and most > least:
            self._ahead += self._some(most - len(self._ahead))
            missing = least - len(self._ahead)
        if missing > 0:
            self._ahead += self._receive(missing)
        return self._ahead

    def _take(self, most: int) -> bytes:
        """Take up to `most` bytes of what has arrived."""
        taken, self._ahead = self._ahead[:most], self._ahead[most:]
        return taken

    def _some(self, most: int) -> bytes:
        self._check_deadline()
        try:
            return self._socket.recv(most)
        except OSError as error:
            raise _broken("Redis does not answer", error) from error

    def _check_deadline(self) -> None:
        # A peer that sends a byte now and then never runs into the socket's own timeout.
        if time.monotonic() > self._deadline:
            raise TimedOut("Redis does not answer in time", retry_after_s=RETRY_AFTER_S)


class DataPool:
    """A bounded number of connections to one server, handed to one user at a time."""

    def __init__(
        self,
        location: Location | Callable[[], Location],
        timeout_s: float,
        max_connections: int = 16,
    ) -> None:
        """Prepare it; nothing connects yet.

        Args:
            location: the server, or who knows it when a connection is made.
            timeout_s: limit of each operation, and of waiting for a connection.
        """
        self._locate = location if callable(location) else lambda: location
        self._timeout_s = timeout_s
        self._turns = threading.BoundedSemaphore(max_connections)
        self._idle: list[DataConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None:
        """As DataConnection.set_many, on any connection."""
        self.use(lambda connection: connection.set_many(items, ttl_ms))

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """As DataConnection.get_many, on any connection; a wrong length reads as None."""
        try:
            return self.use(lambda connection: connection.get_many(wanted))
        except LengthMismatch:
            return [None] * len(wanted)

    def location_of(self, key: str) -> Location:  # noqa: ARG002 (it has all keys)
        """Return the server that has a key. Raises StoreUnavailableError if it is unknown."""
        return self._locate()

    def forget(self) -> None:
        """Close what is idle: it may lead to a server that is none any more."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close what is idle; what is in use closes when given back."""
        with self._lock:
            self._closed = True
        self.forget()

    def use(self, operation: Callable[[DataConnection], _T]) -> _T:
        """Run an operation that may be repeated.

        Once more if an old connection turns out to have died, and for FAILOVER_S while
        the server is being replaced.
        """
        with self._turn():
            pauses = backoff(FAILOVER_S)
            while True:
                idle = self._take()
                try:
                    return self._run(idle or self._connect(), operation)
                except Moving:
                    self.forget()  # they lead to the same server
                    if (pause := next(pauses, None)) is None:
                        raise
                    time.sleep(pause)
                except Unreachable as error:
                    self.forget()
                    if idle is None or isinstance(error, TimedOut):
                        raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._turns.acquire(timeout=self._timeout_s):
            raise busy()
        try:
            yield
        finally:
            self._turns.release()

    def _take(self) -> DataConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> DataConnection:
        return DataConnection(self._locate(), self._timeout_s)

    def _run(self, connection: DataConnection, operation: Callable[[DataConnection], _T]) -> _T:
        try:
            result = operation(connection)
        except BaseException:
            connection.close()
            raise
        self._give(connection)
        return result

    def _give(self, connection: DataConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def busy() -> StoreUnavailableError:
    """Return the error of a call that waited in vain for a connection."""
    return StoreUnavailableError("all connections to Redis are in use", retry_after_s=RETRY_AFTER_S)


def backoff(total_s: float) -> Iterator[float]:
    """Yield growing pauses, in seconds, until `total_s` have passed."""
    until = time.monotonic() + total_s
    for step in itertools.count():
        if time.monotonic() > until:
            return
        yield min(0.05 * 2**step, 0.5)


def _connect(location: Location, timeout_s: float) -> socket.socket:
    plain: socket.socket | None = None
    try:
        plain = _plain(location, timeout_s)
        if location.tls:
            context = tls_context(location.ca)
            return context.wrap_socket(plain, server_hostname=location.host)
    except OSError as error:
        if plain is not None:
            plain.close()
        raise _broken("Redis is not reachable", error) from error
    # MSG_WAITALL needs a blocking socket; the kernel's own timeouts bound each call.
    plain.settimeout(None)
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    return plain


def _plain(location: Location, timeout_s: float) -> socket.socket:
    if not location.path:
        plain = socket.create_connection((location.host, location.port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain
    plain = socket.socket(socket.AF_UNIX)
    try:
        plain.settimeout(timeout_s)
        plain.connect(location.path)
    except BaseException:
        plain.close()
        raise
    return plain


@functools.lru_cache(maxsize=8)
def tls_context(ca: str) -> ssl.SSLContext:
    """Return how servers are verified: against a PEM file, or the system's authorities."""
    return ssl.create_default_context(cafile=ca or None)


def _bulk(word: str) -> bytes:
    data = word.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _broken(what: str, error: OSError) -> Unreachable:
    slow = isinstance(error, TimeoutError | BlockingIOError)
    text = error.strerror or type(error).__name__
    return (TimedOut if slow else Unreachable)(f"{what}: {text}", retry_after_s=RETRY_AFTER_S)


def _redis_error(reply: bytes) -> StoreFullError | StoreUnavailableError:
    # Never the whole reply: Redis may repeat arguments in it.
    code, *rest = reply[1:].decode(errors="replace").split(" ")
    if code == "OOM":
        return StoreFullError("Redis is out of memory", retry_after_s=RETRY_AFTER_S)
    if code in MOVING:
        return Moving(f"Redis refused: {code}", retry_after_s=RETRY_AFTER_S)
    host, _, port = rest[-1].rpartition(":") if rest else ("", "", "")
    if code in ("MOVED", "ASK") and port.isdecimal():
        return Redirected(host, int(port), asking=code == "ASK")
    return StoreUnavailableError(f"Redis refused: {code[:20]}")
