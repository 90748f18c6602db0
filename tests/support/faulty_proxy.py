"""A TCP proxy in front of Redis that delays, cuts, damages or swallows what passes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from types import TracebackType


class FaultyProxy:
    """Forwards 127.0.0.1:`port` to a Redis. Faults hold for new data at once.

    Attributes:
        delay_s: pause before each reply is passed on.
        silent: requests are taken, and no reply is ever passed on.
        cut_after: reset the connection after so many bytes of replies; 0 = never.
        target: where new connections lead: host and port, or the path of a unix socket.
        trickle: replies come byte by byte, with `delay_s` between them.
        accepted: connections so far.
    """

    def __init__(
        self, target: tuple[str, int] | str, context: ssl.SSLContext | None = None
    ) -> None:
        """Listen.

        Args:
            target: host and port, or the path of a unix socket.
            context: speak TLS with clients.
        """
        self.delay_s = 0.0
        self.silent = False
        self.cut_after = 0
        self.trickle = False
        self.accepted = 0
        self.target = target
        self._context = context
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def drop_all(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            _close(connection)

    def close(self) -> None:
        _close(self._server)
        self.drop_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        redis = None
        try:
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            redis = _connect(self.target)
            self._open |= {client, redis}
            forward = threading.Thread(target=self._requests, args=(client, redis), daemon=True)
            forward.start()
            self._replies(redis, client)
        except OSError:
            pass
        finally:
            for end in (client, redis):
                if end is not None:
                    self._open.discard(end)
                    _close(end)

    def _requests(self, client: socket.socket, redis: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                redis.sendall(data)
        _close(redis)

    def _replies(self, redis: socket.socket, client: socket.socket) -> None:
        passed = 0
        while data := redis.recv(1 << 16):
            while self.silent:
                time.sleep(0.02)
            if self.cut_after and passed + len(data) > self.cut_after:
                client.sendall(data[: self.cut_after - passed])
                return
            passed += len(data)
            for piece in [data[i : i + 1] for i in range(len(data))] if self.trickle else [data]:
                time.sleep(self.delay_s)
                client.sendall(piece)

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _connect(target: tuple[str, int] | str) -> socket.socket:
    if isinstance(target, tuple):
        return socket.create_connection(target)
    out = socket.socket(socket.AF_UNIX)
    out.connect(target)
    return out


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
