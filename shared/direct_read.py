"""Reading segments straight from the store's Redis, where the store says they are.

The store's own reader may only GET. Everything read is verified by the caller; what
fails here says only that this way is closed.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.errors import DeadlineError, NodeMissingError, StoreUnavailableError
from criticalkv.shared.frames import segment_head
from criticalkv.shared.redis_location import Location
from criticalkv.shared.resp import DataConnection, LengthMismatch, TimedOut, Unreachable

log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
"""Asked for in one go while as much is being read."""
CONNECT_TIMEOUT_S = 2.0
IDLE_CONNECTIONS = 8
"""Kept for each server."""
STALL_S = 3.0
"""Longest silence of a connection before the read goes on through the store."""
IDLE_S = 30.0
"""Connections to a server that no read has gone to for this long are closed."""
_TIMER_S = 0.02
"""The kernel's timers may be this early."""
CLOSED_S = 30.0
"""How long nothing is read directly after it has failed."""


class DirectClosed(Exception):
    """Redis cannot be read from here: the store itself has to send the segments."""


@dataclass(frozen=True)
class Wanted:
    """One segment to read: its index, its key, and what its frame begins with and holds."""

    index: int
    key: str
    head: bytes
    nbytes: int

    @classmethod
    def of(cls, node_id: str, attempt: str, index: int, nbytes: int) -> Wanted:
        """Describe segment `index`, of `nbytes` payload bytes."""
        head = segment_head(index, nbytes)
        key = f"ckv:{{{node_id}}}:s:{attempt}:{index}"
        return cls(index, key, head, len(head) + nbytes)


class DirectReads:
    """All direct reads of one client: its connections, and whether the way is open."""

    def __init__(self, ca: str = "") -> None:
        """Prepare; nothing connects yet.

        Args:
            ca: certificate authority of a Redis behind TLS, PEM file; "" = the system's.
        """
        self._ca = ca
        self._lock = threading.Lock()
        self._idle: dict[Location, list[_Connection]] = {}
        self._used: dict[Location, float] = {}
        self._closed_until = 0.0
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether a direct read is worth trying."""
        return time.monotonic() >= self._closed_until

    def location(self, offered: pb.RedisLocation) -> Location | None:
        """Return a location that the store offers; None if it is not safe to go there."""
        location = Location(
            path=offered.path,
            host=offered.host,
            port=offered.port,
            tls=offered.tls,
            username=offered.username,
            password=offered.password,
            database=offered.database,
            ca=self._ca,
        )
        if location.private:
            return location
        self.failed("it is on another machine without TLS and a password")
        return None

    def frames(
        self, location: Location, wanted: Sequence[Wanted], deadline: float
    ) -> Iterator[bytes]:
        """Yield the frames of segments, in order.

        Args:
            deadline: of all of it, by time.monotonic().

        Raises:
            NodeMissingError: if a segment is gone, or is not what was asked for.
            DeadlineError: if they do not all come in time.
            DirectClosed: if Redis does not serve us; frames may have come before.
        """
        try:
            yield from self._frames(location, wanted, deadline)
        except TimedOut as error:
            if time.monotonic() >= deadline - _TIMER_S:
                raise DeadlineError("the read did not finish before its deadline") from error
            raise self._closing(error) from error
        except StoreUnavailableError as error:
            raise self._closing(error) from error

    def _frames(
        self, location: Location, wanted: Sequence[Wanted], deadline: float
    ) -> Iterator[bytes]:
        done = 0
        while True:
            lent = _Lent(self, location, deadline)
            try:
                with lent as connection:
                    for frame in connection.frames(wanted[done:], deadline):
                        done += 1
                        yield frame
                return
            except TimedOut:
                raise
            except Unreachable:
                # An old connection may have died with an old Redis: once more, afresh.
                if not lent.was_idle:
                    raise

    def failed(self, why: str) -> None:
        """Note that nothing can be read directly, and warn of it once in a while."""
        with self._lock:
            if self.open:
                log.warning(
                    "the store's Redis cannot be read directly (%s); reading through the store "
                    "for %.0f s",
                    why,
                    CLOSED_S,
                )
            self._closed_until = time.monotonic() + CLOSED_S

    def close(self) -> None:
        """Close idle connections; those in use close when their read ends. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def take(self, location: Location) -> _Connection | None:
        """Return an idle connection, if there is one."""
        with self._lock:
            idle = self._idle.get(location)
            return idle.pop() if idle else None

    def give(self, location: Location, connection: _Connection) -> None:
        """Keep a connection with no reply outstanding for the next read."""
        with self._lock:
            idle, surplus = self._idle.setdefault(location, []), self._left(location)
            keep = not self._closed and len(idle) < IDLE_CONNECTIONS
            (idle if keep else surplus).append(connection)
        for one in surplus:
            one.close()

    def _left(self, current: Location) -> list[_Connection]:
        """Take out the connections to servers that no read goes to any more."""
        now = time.monotonic()
        self._used[current] = now
        gone = [at for at, used in self._used.items() if now - used > IDLE_S]
        for at in gone:
            del self._used[at]
        return [connection for at in gone for connection in self._idle.pop(at, [])]

    def _closing(self, error: StoreUnavailableError) -> DirectClosed:
        self.failed(error.message)
        return DirectClosed(error.message)


class _Connection(DataConnection):
    """A connection that answers one batch while the next is under way."""

    def frames(self, wanted: Sequence[Wanted], deadline: float) -> Iterator[bytes]:
        """Yield frames. Raises as DirectReads.frames, with typed errors of `resp`."""
        self._deadline = deadline
        batches = list(_batches(wanted))
        for at, batch in enumerate(batches):
            self._limit()
            if not at:
                self._ask(batch)
            if at + 1 < len(batches):
                self._ask(batches[at + 1])
            for segment in batch:
                self._limit()
                yield self._frame(segment, more=segment is not wanted[-1])

    def _limit(self) -> None:
        # Each operation of the socket ends soon enough to read through the store instead.
        left = min(max(self._deadline - time.monotonic(), 0.001), STALL_S)
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(left)
            return
        timeval = struct.pack("ll", int(left), int(left % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def _ask(self, batch: Sequence[Wanted]) -> None:
        words = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(s.key), s.key.encode()) for s in batch]
        self._send([b"".join(words)])

    def _frame(self, segment: Wanted, more: bool) -> bytes:
        try:
            frame = self._value(segment.nbytes, False, more=more)
        except LengthMismatch:
            frame = None
        if frame is None or not frame.startswith(segment.head):
            raise NodeMissingError(f"segment {segment.index} is gone")
        return frame


class _Lent:
    """A connection for one read. It is kept only if the read came to its end."""

    def __init__(self, reads: DirectReads, location: Location, deadline: float) -> None:
        self._reads = reads
        self._location = location
        self._deadline = deadline
        self.was_idle = False

    def __enter__(self) -> _Connection:
        idle = self._reads.take(self._location)
        self.was_idle = idle is not None
        self._connection = idle or self._connect()
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._reads.give(self._location, self._connection)
        else:
            self._connection.close()

    def _connect(self) -> _Connection:
        left = max(self._deadline - time.monotonic(), 0.001)
        return _Connection(self._location, min(CONNECT_TIMEOUT_S, left))


def _batches(wanted: Sequence[Wanted]) -> Iterator[Sequence[Wanted]]:
    begin = held = 0
    for at, segment in enumerate(wanted):
        held += segment.nbytes
        if held >= BATCH_BYTES:
            yield wanted[begin : at + 1]
            begin, held = at + 1, 0
    if begin < len(wanted):
        yield wanted[begin:]
