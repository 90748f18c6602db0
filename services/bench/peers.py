"""What the store's data path is compared with, each in a process of its own.

bare    a grpc.aio server that only counts frames (PUT) or sends them from memory (GET):
        the store's own options and malloc settings, no Redis, no checks;
socket  a thread per connection that sends bytes from memory over a socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store.process import child_environment
from criticalkv.services.store.server import OPTIONS as SERVER_OPTIONS
from criticalkv.shared.frames import encode_segment
from criticalkv.shared.malloc import tune_malloc
from criticalkv.shared.store_channel import OPTIONS as CLIENT_OPTIONS

SERVICE = "bare"
TIMEOUT_S = 120.0
DISTINCT = 64
"""Frames that differ; longer streams repeat them."""


@dataclass(frozen=True)
class Peer:
    """One running peer.

    Attributes:
        address: where it listens.
        pid: its process.
    """

    address: str
    pid: int


@contextmanager
def running(kind: str, nbytes: int) -> Iterator[Peer]:
    """Run a peer.

    Args:
        kind: bare, unix or tcp.
        nbytes: payload bytes of a frame.
    """
    command = [sys.executable, "-m", __name__, kind, str(nbytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
    ) as process:
        assert process.stdout is not None
        try:
            yield Peer(process.stdout.readline().decode().strip(), process.pid)
        finally:
            process.kill()


class BareClient:
    """Streams to and from the bare server."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, CLIENT_OPTIONS)

    def put(self, frames: list[bytes], count: int) -> None:
        """Send `count` frames and wait for the answer."""
        call: Any = self._channel.stream_unary(f"/{SERVICE}/Put", None, None)
        call(islice(cycle(frames), count), timeout=TIMEOUT_S)

    def get(self, count: int) -> None:
        """Receive `count` frames."""
        call: Any = self._channel.unary_stream(f"/{SERVICE}/Get", None, None)
        for _ in call(str(count).encode(), timeout=TIMEOUT_S):
            pass

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def copy_from_socket(address: str, nbytes: int, count: int) -> None:
    """Receive `count` pieces of `nbytes` from a socket peer into one buffer."""
    buffer = bytearray(nbytes)
    with _connected(address) as connection:
        connection.sendall(count.to_bytes(8, "little"))
        for _ in range(count):
            if connection.recv_into(buffer, nbytes, socket.MSG_WAITALL) != nbytes:
                raise RuntimeError("the socket peer hung up")


def _connected(address: str) -> socket.socket:
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


async def _serve_bare(nbytes: int) -> None:
    frames = [encode_segment(i, os.urandom(nbytes)) for i in range(DISTINCT)]

    async def put(requests: AsyncIterator[bytes], _: object) -> bytes:
        total = 0
        async for frame in requests:
            total += len(frame)
        return pb.PutResult(stored_bytes=total).SerializeToString()

    async def get(request: bytes, _: object) -> AsyncIterator[bytes]:
        for frame in islice(cycle(frames), int(request)):
            yield frame

    server = grpc.aio.server(options=SERVER_OPTIONS, compression=grpc.Compression.NoCompression)
    handlers: dict[str, Any] = {
        "Put": grpc.stream_unary_rpc_method_handler(put, None, None),
        "Get": grpc.unary_stream_rpc_method_handler(get, None, None),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent ends
    await server.stop(0)


def _serve_socket(kind: str, nbytes: int) -> None:
    pieces = [os.urandom(nbytes) for _ in range(DISTINCT)]
    with tempfile.TemporaryDirectory(prefix="criticalkv-bench-") as folder:
        server = _listening(kind, Path(folder))
        threading.Thread(target=_accept, args=(server, pieces), daemon=True).start()
        sys.stdin.read()


def _listening(kind: str, folder: Path) -> socket.socket:
    if kind == "unix":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(folder / "s"))
        address = str(folder / "s")
    else:
        server = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    server.listen()
    print(address, flush=True)
    return server


def _accept(server: socket.socket, pieces: list[bytes]) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_send, args=(connection, pieces), daemon=True).start()


def _send(connection: socket.socket, pieces: list[bytes]) -> None:
    with connection:
        count = int.from_bytes(connection.recv(8), "little")
        for piece in islice(cycle(pieces), count):
            connection.sendall(piece)


if __name__ == "__main__":
    tune_malloc()
    if sys.argv[1] == "bare":
        asyncio.run(_serve_bare(int(sys.argv[2])))
    else:
        _serve_socket(sys.argv[1], int(sys.argv[2]))
