"""The blocking Redis client, against a real Valkey and against a hostile peer."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from valkey_servers import user_of

from criticalkv.shared.errors import StoreUnavailableError
from criticalkv.shared.resp import DataConnection, DataPool, Location


@pytest.fixture
def location(store_process):
    return user_of(store_process.config.data_dir)


@pytest.fixture
def pool(location):
    pool = DataPool(location, 5.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("size", [1, 4, 9, 10, 99, 100, 1000, 100_000, (1 << 20) + 7])
def test_roundtrip_of_every_head_length(pool, size):
    items = [(f"ckv:test:{size}:{i}", bytes([i]) * size) for i in range(5)]
    pool.set_many(items, 10_000)
    wanted = [(key, size) for key, _ in items]
    wanted.insert(2, ("ckv:test:absent", size))
    values = [value for _, value in items]
    assert pool.get_many(wanted) == [*values[:2], None, *values[2:]]


@pytest.mark.parametrize(("stored", "asked"), [(5, 6), (6, 5), (9, 10), (10, 9), (1000, 99)])
def test_wrong_length_is_gone_and_desynchronizes_nobody(pool, stored, asked):
    pool.set_many([("ckv:test:a", b"a" * stored), ("ckv:test:b", b"bbbb")], 10_000)
    assert pool.get_many([("ckv:test:a", asked), ("ckv:test:b", 4)]) == [None, None]
    assert pool.get_many([("ckv:test:b", 4)]) == [b"bbbb"]


def test_values_expire(pool):
    pool.set_many([("ckv:test:short", b"xxxxx")], 30)
    time.sleep(0.05)
    assert pool.get_many([("ckv:test:short", 5)]) == [None]


@pytest.fixture
def peer(tmp_path):
    """A socket that answers every request with `reply`."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def start(reply: bytes, close: bool = False) -> Location:
            def serve() -> None:
                kept = []
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    connection.recv(1 << 16)
                    connection.sendall(reply)
                    connection.close() if close else kept.append(connection)

            threading.Thread(target=serve, daemon=True).start()
            return Location(path=path)

        yield start


@pytest.mark.parametrize(
    ("reply", "close"),
    [(b"", False), (b"", True), (b"$10\r\nabc", False), (b"$10\r\nabc", True), (b"$1", True)],
)
def test_silent_or_dying_redis_is_a_timely_error(peer, reply, close):
    pool = DataPool(peer(reply, close), 0.2)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        pool.get_many([("k", 10)])
    assert time.monotonic() - began < 2


def test_malformed_reply_drops_the_connection(peer):
    pool = DataPool(peer(b"$3\r\nabcXX"), 0.2)
    with pytest.raises(StoreUnavailableError):
        pool.get_many([("k", 3)])
    assert pool._idle == []


def test_nobody_listens(tmp_path):
    with pytest.raises(StoreUnavailableError):
        DataConnection(Location(path=str(tmp_path / "none")), 1.0)
