"""A small blocking Redis client for payloads: pipelined SET and GET without copies.

One connection serves one thread at a time. After any error the connection is closed
and never used again: a reply that was not read would otherwise answer the next call.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from criticalkv.shared.errors import ConfigError, StoreFullError, StoreUnavailableError

_T = TypeVar("_T")
_CRLF = b"\r\n"
_SHORTEST_REPLY = 5  # "$-1\r\n"


@dataclass(frozen=True)
class Location:
    """Where Redis is, parsed from a redis://, rediss:// or unix:// URL."""

    path: str = ""
    host: str = ""
    port: int = 6379
    tls: bool = False
    username: str = ""
    password: str = ""
    database: int = 0

    @classmethod
    def parse(cls, url: str) -> Location:
        """Parse a URL.

        Raises:
            ConfigError: if it is not one of the three kinds. The URL is not repeated,
                since it may hold a password.
        """
        try:
            parts = urlsplit(url)
            query = parse_qs(parts.query)
            if parts.scheme not in ("redis", "rediss", "unix"):
                raise ValueError("the scheme must be redis, rediss or unix")
            unix = parts.scheme == "unix"
            database = query.get("db", [""])[0] or ("" if unix else parts.path.strip("/"))
            return cls(
                path=unquote(parts.path) if unix else "",
                host="" if unix else parts.hostname or "localhost",
                port=parts.port or 6379,
                tls=parts.scheme == "rediss",
                username=unquote(parts.username or ""),
                password=unquote(parts.password or ""),
                database=int(database or 0),
            )
        except ValueError as error:
            raise ConfigError(f"store.redis_url: {error}", param="store.redis_url") from None


class DataConnection:
    """One socket to Redis. Every operation has a timeout; see the module's text."""

    def __init__(self, location: Location, timeout_s: float) -> None:
        """Connect, authenticate and select the database.

        Raises:
            StoreUnavailableError: if Redis does not answer within `timeout_s`.
        """
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

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None:
        """Store values under keys, each expiring after `ttl_ms`.

        Raises:
            StoreFullError: if Redis is out of memory; some values may be stored.
            StoreUnavailableError: if the connection fails.
        """
        tail = _CRLF + _bulk("PX") + _bulk(str(ttl_ms))
        for key, value in items:
            head = b"*5\r\n" + _bulk("SET") + _bulk(key) + b"$%d\r\n" % len(value)
            self._send([head, value, tail])
        errors = [reply for reply in (self._line() for _ in items) if reply != b"+OK"]
        if errors:
            raise _redis_error(errors[0])

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Read values of known length; None where the key is gone or has another length.

        Args:
            wanted: (key, length in bytes ≥ 1) each.

        Raises:
            StoreUnavailableError: if the connection fails.
        """
        self._send([b"".join(b"*2\r\n" + _bulk("GET") + _bulk(key) for key, _ in wanted)])
        return [self._value(length) for _, length in wanted]

    def _value(self, length: int) -> bytes | None:
        head = b"$%d\r\n" % length
        got = self._receive(_SHORTEST_REPLY)
        if got == b"$-1\r\n":
            return None
        if len(head) > len(got):
            got += self._receive(len(head) - len(got))
        if not got.startswith(head):
            return self._other_length(got)
        ahead = got[len(head) :]  # of a value so short that its first bytes came along
        value = ahead + self._receive(length - len(ahead)) if ahead else self._receive(length)
        if self._receive(2) != _CRLF:
            raise StoreUnavailableError("Redis sent a malformed reply")
        return value

    def _other_length(self, got: bytes) -> bytes | None:
        # A value that is not ours, or an error. Not worth resynchronizing.
        if got.startswith(b"-"):
            raise _redis_error(got + self._line())
        raise LengthMismatch("a stored value has an unexpected length")

    def _command(self, *words: str) -> None:
        self._send([b"*%d\r\n" % len(words) + b"".join(_bulk(word) for word in words)])
        reply = self._line()
        if not reply.startswith(b"+"):
            raise _redis_error(reply)

    def _send(self, parts: list[bytes]) -> None:
        views = [memoryview(part) for part in parts]
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.sendall(b"".join(parts))
                return
            while views:
                sent = self._socket.sendmsg(views)
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except OSError as error:
            raise StoreUnavailableError(f"Redis does not take data: {error}") from error

    def _receive(self, length: int) -> bytes:
        # MSG_WAITALL fills one bytes object: no second copy.
        try:
            got = self._socket.recv(length, self._flags)
            if len(got) == length:
                return got
            parts = [got]
            while got and (length := length - len(got)):
                got = self._socket.recv(length, self._flags)
                parts.append(got)
        except OSError as error:
            raise StoreUnavailableError(f"Redis does not answer: {error}") from error
        if length:
            raise StoreUnavailableError("Redis closed the connection")
        return b"".join(parts)

    def _line(self) -> bytes:
        got = self._receive(_SHORTEST_REPLY)
        while not got.endswith(_CRLF):
            got += self._receive(1)
        return got[:-2]


class LengthMismatch(Exception):
    """A stored value is not of the length that its manifest says."""


class DataPool:
    """Idle connections, handed to one user at a time."""

    def __init__(self, location: Location, timeout_s: float, max_idle: int = 16) -> None:
        self._location = location
        self._timeout_s = timeout_s
        self._max_idle = max_idle
        self._idle: list[DataConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None:
        """As DataConnection.set_many, on any connection."""
        self._use(lambda connection: connection.set_many(items, ttl_ms))

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """As DataConnection.get_many, on any connection; a wrong length reads as None."""
        try:
            return self._use(lambda connection: connection.get_many(wanted))
        except LengthMismatch:
            return [None] * len(wanted)

    def close(self) -> None:
        """Close what is idle; what is in use closes when given back."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _use(self, operation: Callable[[DataConnection], _T]) -> _T:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._run(connection, operation)
            except StoreUnavailableError:
                # An idle connection may have died with an old Redis: once more, afresh.
                self._drop_idle()
        return self._run(DataConnection(self._location, self._timeout_s), operation)

    def _run(self, connection: DataConnection, operation: Callable[[DataConnection], _T]) -> _T:
        try:
            result = operation(connection)
        except BaseException:
            connection.close()
            raise
        self._give(connection)
        return result

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _give(self, connection: DataConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.close()


def _connect(location: Location, timeout_s: float) -> socket.socket:
    try:
        if location.path:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(timeout_s)
            plain.connect(location.path)
        else:
            plain = socket.create_connection((location.host, location.port), timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise StoreUnavailableError(f"Redis is not reachable: {error}") from error
    if location.tls:
        context = ssl.create_default_context()
        return context.wrap_socket(plain, server_hostname=location.host)
    # MSG_WAITALL needs a blocking socket; the kernel's own timeouts bound each call.
    plain.settimeout(None)
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    return plain


def _bulk(word: str) -> bytes:
    data = word.encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _redis_error(reply: bytes) -> StoreFullError | StoreUnavailableError:
    if reply.startswith(b"-OOM"):
        return StoreFullError("Redis is out of memory", retry_after_s=1.0)
    # Never the whole reply: Redis may repeat arguments in it.
    return StoreUnavailableError(f"Redis refused: {reply[1:40].decode(errors='replace')}")
