"""A Redis that is slow, silent, cut off, full, restarted or not what it was."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import threading
import time
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy
from store_thread import store_on
from valkey_servers import Server, wait_for

from criticalkv.services.store import server as module
from criticalkv.services.store.redis_data import RedisData
from criticalkv.shared.breaker import FAILURES, Breaker
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    CriticalKVError,
    NodeMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from criticalkv.shared.redis_location import Deployment
from criticalkv.shared.resp import DataPool, Location, TimedOut, Unreachable


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path) as server:
        yield server


@pytest.fixture
def proxy(server):
    with FaultyProxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


def data_of(port: int, timeout_s: float = 5.0, **options: object) -> RedisData:
    return RedisData(Deployment.of(Location(host="127.0.0.1", port=port)), timeout_s, **options)


@contextlib.asynccontextmanager
async def redis_data(port: int, timeout_s: float = 5.0, **options: object):
    redis = data_of(port, timeout_s, **options)
    try:
        yield redis
    finally:
        await redis.close()


@contextlib.contextmanager
def pool_of(port: int, timeout_s: float = 5.0, **options: object):
    pool = DataPool(Location(host="127.0.0.1", port=port), timeout_s, **options)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def impatient(monkeypatch):
    """Stores of this process give Redis half a second."""
    monkeypatch.setattr("criticalkv.services.store.server.REDIS_TIMEOUT_S", 0.5)


SCRIPT = "return redis.call('GET', KEYS[1])"


@pytest.mark.parametrize("kind", ["command", "commands", "script"])
async def test_no_reply_ever_goes_to_the_wrong_caller(proxy, kind):
    """200 calls are cancelled in flight; of 100 others each gets its own value."""

    async def read(redis: RedisData, i: int) -> object:
        if kind == "command":
            return await redis.command("GET", f"k{i}")
        if kind == "commands":
            return (await redis.commands([("GET", f"k{i}"), ("GET", f"k{i}")]))[1]
        return await redis.run(SCRIPT, [f"k{i}"], [])

    async with redis_data(proxy.port, max_connections=16) as redis:
        await redis.commands([("SET", f"k{i}", f"v{i}") for i in range(300)])
        assert await read(redis, 0) == b"v0"
        proxy.delay_s = 0.1
        for _ in range(0, 200, 16):
            calls = [asyncio.create_task(read(redis, i)) for i in range(200, 216)]
            await asyncio.sleep(0.03)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        found = await asyncio.gather(*(read(redis, i) for i in range(100)))
    assert found == [f"v{i}".encode() for i in range(100)]


def test_no_late_payload_ever_goes_to_the_wrong_caller(proxy):
    """Reads run out of time again and again; each of the others gets its own value."""
    with pool_of(proxy.port, 0.2) as pool, pool_of(proxy.port) as patient:
        patient.set_many([(f"k{i}", b"%5d" % i) for i in range(100)], 60_000)
        for i in range(20):
            proxy.delay_s = 0.4 if i % 2 else 0.0
            with contextlib.suppress(Unreachable):
                pool.get_many([(f"k{i}", 5)])
        proxy.delay_s = 0.0
        for i in range(100):
            with contextlib.suppress(TimedOut):  # on a busy machine
                assert pool.get_many([(f"k{i}", 5)]) == [b"%5d" % i]


@pytest.mark.parametrize("cut", [1, 7, 40, 4000])
async def test_connection_reset_within_a_reply(proxy, cut):
    """Half a reply is an error or is read again, and never a value."""
    value = bytes(range(256)) * 12
    with pool_of(proxy.port) as pool:
        async with redis_data(proxy.port) as redis:
            await redis.command("SET", "k", value)
            proxy.cut_after = cut
            proxy.drop_all()
            if cut < len(value):
                with pytest.raises(Unreachable):
                    await redis.command("GET", "k")
                with pytest.raises(Unreachable):
                    pool.get_many([("k", len(value))] * 2)
            proxy.cut_after = 0
            assert await redis.command("GET", "k") == value
            assert pool.get_many([("k", len(value))] * 2) == [value, value]


async def test_replies_byte_by_byte_do_not_outlast_the_deadline(proxy):
    with pool_of(proxy.port, 0.5) as pool:
        async with redis_data(proxy.port, 0.5) as redis:
            await redis.command("SET", "k", b"x" * 1000)
            pool.get_many([("k", 1000)])
            proxy.trickle, proxy.delay_s = True, 0.05
            began = time.monotonic()
            with pytest.raises(TimedOut):
                await asyncio.to_thread(pool.get_many, [("k", 1000)])
            with pytest.raises(TimedOut):  # many short replies, each in time
                await redis.commands([("STRLEN", "none")] * 100)
            with pytest.raises(TimedOut):
                await redis.command("GET", "k")
            assert time.monotonic() - began < 10  # byte by byte they take 15 to 100 s


async def test_all_connections_are_made_anew_after_a_restart(server, proxy):
    async with redis_data(proxy.port) as redis:
        with pool_of(proxy.port) as pool:
            pool.set_many([("a", b"12345")], 60_000)
            await asyncio.gather(*(redis.command("PING") for _ in range(20)))
            server.kill()
            with pytest.raises(Unreachable):
                await redis.command("PING")
            with pytest.raises(Unreachable):
                await asyncio.to_thread(pool.get_many, [("a", 5)])
            server.start()
            await asyncio.gather(*(redis.run("return 7", ["k"], []) for _ in range(20)))
            assert pool.get_many([("a", 5)]) == [None]
            server.kill()  # and once more, with nobody having noticed
            server.start()
            await asyncio.gather(*(redis.run("return 7", ["k"], []) for _ in range(20)))
            assert pool.get_many([("a", 5)]) == [None]


async def test_pool_of_two_queues_then_refuses(proxy):
    """50 calls on 2 connections: all in turn, or a typed error for those that wait too long."""
    async with redis_data(proxy.port, max_connections=2) as redis:
        await redis.commands([("SET", f"k{i}", f"v{i}") for i in range(50)])
        proxy.delay_s = 0.02
        found = await asyncio.gather(*(redis.command("GET", f"k{i}") for i in range(50)))
        assert found == [f"v{i}".encode() for i in range(50)]
        assert proxy.accepted <= 2
    proxy.delay_s = 0.0
    async with redis_data(proxy.port, 0.5, max_connections=2) as redis:
        await asyncio.gather(redis.command("PING"), redis.command("PING"))
        proxy.delay_s = 0.3
        calls = (redis.command("GET", f"k{i}") for i in range(50))
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(
        got == f"v{i}".encode() or isinstance(got, StoreUnavailableError)
        for i, got in enumerate(found)
    )
    refused = [got for got in found if isinstance(got, StoreUnavailableError)]
    assert 0 < len(refused) < 50
    assert all(error.retry_after_s for error in refused)


def test_data_pool_of_two_queues_then_refuses(proxy):
    outcomes: list[object] = []

    def read() -> None:
        try:
            outcomes.append(pool.get_many([("k", 5)]))
        except StoreUnavailableError as error:
            outcomes.append(error)

    def race() -> list[object]:
        outcomes.clear()
        threads = [threading.Thread(target=read) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(outcomes)

    with pool_of(proxy.port, max_connections=2) as pool:
        pool.set_many([("k", b"value")], 60_000)
        proxy.delay_s = 0.02
        assert race() == [[b"value"]] * 50
        assert proxy.accepted <= 2
        pool._timeout_s, proxy.delay_s = 0.5, 0.3
        found = race()
        refused = [got for got in found if isinstance(got, StoreUnavailableError)]
        assert 0 < len(refused) < 50
        assert all(got in refused or got == [b"value"] for got in found)


async def test_black_hole_opens_the_breaker_and_a_probe_closes_it(proxy):
    """Redis accepts and never answers: after a few timeouts calls fail at once."""
    breaker = Breaker("Redis", pause_s=0.3)
    async with redis_data(proxy.port, 0.2, breaker=breaker) as redis:
        await redis.command("PING")
        proxy.silent = True
        for _ in range(FAILURES):
            with pytest.raises(TimedOut):
                await redis.command("PING")
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(StoreUnavailableError) as caught:
                await redis.command("PING")
            assert caught.value.retry_after_s
        assert time.monotonic() - began < 5  # without a breaker 20 s
        proxy.silent = False
        await asyncio.sleep(0.5)
        assert await redis.command("PING")


@pytest.mark.usefixtures("impatient")
def test_black_hole_harms_nobody_else(proxy, make_node, store):
    """A store whose Redis is silent refuses in time and says so; others go on."""
    node = make_node()
    with store_on(proxy.url) as client:
        node.put(client)
        proxy.silent = True
        began = time.monotonic()
        with pytest.raises(CriticalKVError):
            client.stat([node.node_id])
        with pytest.raises(CriticalKVError), client.open_get(node.node_id) as reader:
            list(reader)
        wait_for(lambda: not client.healthy())
        assert time.monotonic() - began < 30
        node.put(store)
        with store.open_get(node.node_id) as reader:
            assert [bytes(p) for _, p in reader] == node.payloads
        proxy.silent = False
        wait_for(client.healthy)
        with client.open_get(node.node_id) as reader:
            assert [bytes(p) for _, p in reader] == node.payloads


def test_redis_restarted_within_a_read(server, proxy, make_node):
    """What was read is whole or an error; the empty Redis is a miss, and serves again."""
    node = make_node(layers=16, rows=2000, tokens=2000)
    with store_on(proxy.url, janitor_interval_s=0.2) as client:
        node.put(client)
        proxy.delay_s = 0.05

        def read() -> None:
            with client.open_get(node.node_id) as reader:
                for _ in reader:
                    server.kill()

        with pytest.raises((StoreUnavailableError, NodeMissingError)):
            read()
        proxy.delay_s = 0.0
        server.start()
        wait_for(client.healthy)
        with pytest.raises(NodeMissingError), client.open_get(node.node_id) as reader:
            list(reader)
        assert not client.stat([node.node_id])[0].present


def test_books_of_an_empty_redis_are_right(server, make_node):
    """With the nodes their accounts are gone: nothing is negative, and the limit holds."""
    old, new = make_node(rows=2000, tokens=2000), make_node(rows=2000, tokens=2000)
    with store_on(server.url, janitor_interval_s=0.2) as client, server.client() as redis:
        old.put(client)
        put = client.open_put(new.node_id, new.manifest.attempt)
        with put as writer:
            for payload in new.payloads:
                writer.send(payload)
            server.kill()
            server.start()
            with pytest.raises(CriticalKVError):
                writer.commit(new.manifest, new.record)
        wait_for(client.healthy)
        assert not client.stat([old.node_id])[0].present
        again = make_node(rows=2000, tokens=2000)
        assert again.put(client).published

        def settled() -> bool:
            sizes = [int(size) for size in redis.hvals("ckv:{books}:sizes")]
            return int(redis.get("ckv:{books}:total") or 0) == sum(sizes) == again.nbytes

        wait_for(settled)
        with client.open_get(again.node_id) as reader:
            assert [bytes(p) for _, p in reader] == again.payloads


def test_full_redis_is_a_typed_error(tmp_path, make_node):
    with Server(tmp_path, "--maxmemory", "6mb") as server, store_on(server.url) as client:
        with pytest.raises(StoreFullError):
            make_node(rows=2000, tokens=2000, layers=4, head_dim=64).put(client)
        with server.client() as redis:
            assert not redis.keys("ckv:{*}:s:*")
        assert make_node().put(client).published


def test_redis_that_begins_to_evict_is_noticed(server, monkeypatch, caplog):
    from criticalkv.services.store.metrics import METRICS

    monkeypatch.setattr(module, "WATCH_S", 0.02)
    url = f"redis://127.0.0.1:{server.port}"

    async def run() -> None:
        async with module.running(StoreConfig(address="127.0.0.1:0", redis_url=url)):
            with server.client() as redis:
                redis.config_set("maxmemory-policy", "allkeys-lru")
            async with asyncio.timeout(20):
                while not METRICS.redis_evicts._value.get():
                    await asyncio.sleep(0.02)

    try:
        asyncio.run(run())
    finally:
        METRICS.redis_evicts.set(0)
    assert "allkeys-lru" in caplog.text


async def test_failpoint_before_every_command(server, monkeypatch):
    from criticalkv.shared import failpoints

    async with redis_data(server.port) as redis:
        monkeypatch.setattr(
            failpoints, "_active", failpoints.Failpoints.parse("store.redis=error:1")
        )
        for call in (
            redis.command("PING"),
            redis.commands([("PING",)]),
            redis.run("return 1", ["k"], []),
        ):
            with pytest.raises(StoreUnavailableError, match="failpoint"):
                await call
        monkeypatch.setattr(failpoints, "_active", None)
        assert await redis.command("ECHO", "hello") == b"hello"


def test_store_asks_no_clock_but_redis():
    """A wall clock of a server would decide about what all servers share."""
    used = []
    for path in Path(module.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in ("datetime", "time_ns", "gmtime", "localtime", "utcnow"):
                used.append((path.name, name))
            if name == "time" and isinstance(node, ast.Attribute):
                used.append((path.name, "time.time"))
    assert not used
