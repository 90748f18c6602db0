"""Another Redis takes over: by READONLY, and by Sentinels after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from faulty_proxy import FaultyProxy
from store_thread import store_on
from valkey_servers import Server, sentinels, wait_for

from criticalkv.services.store.guarded import GuardedData
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.topology import data_client
from criticalkv.shared.breaker import Breaker, CircuitOpenError
from criticalkv.shared.errors import ConfigError, NodeMissingError, StoreUnavailableError
from criticalkv.shared.redis_location import Deployment
from criticalkv.shared.resp import Moving, NobodyLeads, Unreachable

RECOVERY_S = 10.0


class Idle(Server):
    """A Sentinel that watches nothing."""

    def _words(self):
        conf = self.directory / "sentinel.conf"
        conf.write_text(f"port {self.port}\nbind 127.0.0.1\n")
        return [str(conf), "--sentinel"]


@pytest.fixture
def impatient(monkeypatch):
    """Stores of this process give Redis a second."""
    monkeypatch.setattr("criticalkv.services.store.server.REDIS_TIMEOUT_S", 1.0)


@pytest.fixture
def soon(monkeypatch):
    """A takeover is waited for only briefly."""
    monkeypatch.setattr("criticalkv.services.store.redis_data.FAILOVER_S", 0.3)
    monkeypatch.setattr("criticalkv.shared.resp.FAILOVER_S", 0.3)


def read(client, node) -> bool:
    """Whether the node is there; whatever is read is what was put."""
    try:
        with client.open_get(node.node_id) as reader:
            assert [bytes(p) for _, p in reader] == node.payloads
        return True
    except (NodeMissingError, StoreUnavailableError):
        return False


def put(client, node) -> bool:
    try:
        node.put(client)
        return True
    except StoreUnavailableError:
        return False


@contextlib.contextmanager
def pair(directory):
    """A master, its replica, and an address that leads to the master."""
    with (
        Server(directory) as master,
        Server(directory, "--replicaof", f"127.0.0.1 {master.port}") as replica,
        FaultyProxy(("127.0.0.1", master.port)) as address,
        replica.client() as client,
    ):
        wait_for(lambda: client.info("replication")["master_link_status"] == "up")
        yield master, replica, address


def swap(master, replica, address) -> None:
    """Demote the master under its open connections; new ones lead to the other server."""
    with master.client() as old, replica.client() as new:
        new.execute_command("REPLICAOF", "NO", "ONE")
        address.target = ("127.0.0.1", replica.port)
        old.execute_command("REPLICAOF", "127.0.0.1", replica.port)
        wait_for(lambda: old.info("replication")["master_link_status"] == "up")


def test_demoted_master_during_puts(tmp_path, make_node):
    """All pooled connections, of metadata and data, are dropped; nothing fails for long."""
    nodes = [make_node() for _ in range(20)]
    with pair(tmp_path) as (master, replica, address), store_on(address.url) as client:
        for node in nodes[:10]:
            node.put(client)
        swap(master, replica, address)
        began = time.monotonic()
        with master.client() as old:
            assert connections(old)
            # One call of the metadata that is refused is enough, also for idle data ones.
            assert client.acquire_lease(nodes[0].node_id, 1000).acquired
            wait_for(lambda: not connections(old))
        for node in nodes[10:]:
            assert put(client, node)
        assert time.monotonic() - began < RECOVERY_S
        assert all(read(client, node) for node in nodes)


def connections(client) -> list[str]:
    """What clients other than this one and the replica did last."""
    found = client.client_list(_type="normal")
    return [one["cmd"] for one in found if one["id"] != str(client.client_id())]


@pytest.mark.usefixtures("soon")
async def test_readonly_for_ever_is_a_typed_error(tmp_path):
    with pair(tmp_path) as (_, replica, _address):
        deployment = Deployment.parse(replica.url)
        redis, data = RedisData(deployment, 5.0), data_client(deployment, 5.0)
        try:
            for call in (
                redis.command("SET", "k", "v"),
                redis.commands([("SET", "k", "v")] * 2),
                redis.run("return redis.call('SET', KEYS[1], '1')", ["k"], []),
                asyncio.to_thread(data.set_many, [("k", b"v")], 1000),
            ):
                with pytest.raises(Moving, match=r"ReadOnly|READONLY"):
                    await call
        finally:
            data.close()
            await redis.close()


@pytest.mark.usefixtures("impatient")
def test_sentinel_failover(tmp_path, make_node):
    """kill -9 of the master during puts and gets: they work again, and no read is wrong."""
    with sentinels(tmp_path) as (master, replica, watchers):
        hosts = ",".join(f"127.0.0.1:{watcher.port}" for watcher in watchers)
        with store_on(f"redis+sentinel://{hosts}/main", 3.0) as client:
            stored = [make_node() for _ in range(10)]
            for node in stored:
                node.put(client)
            with replica.client() as copy, master.client() as old:
                wait_for(lambda: copy.dbsize() == old.dbsize())
            master.kill()
            began = time.monotonic()
            while not put(client, node := make_node()):
                [read(client, old_node) for old_node in stored[:2]]
                assert time.monotonic() - began < 20
            assert read(client, node)
            # Asynchronous replication may lose what was acknowledged: then it is a miss.
            found = [read(client, node) for node in stored]
            assert any(found)
            for node in [make_node() for _ in range(5)]:
                assert put(client, node)
                assert read(client, node)
            wait_for(client.healthy)


@pytest.mark.usefixtures("soon")
async def test_no_sentinel_answers():
    deployment = Deployment.parse("redis+sentinel://127.0.0.1:1/main")
    redis, data = RedisData(deployment, 0.5), data_client(deployment, 0.5)
    try:
        with pytest.raises(StoreUnavailableError):
            await redis.command("PING")
        with pytest.raises(StoreUnavailableError):
            await asyncio.to_thread(data.get_many, [("k", 1)])
    finally:
        data.close()
        await redis.close()


@pytest.mark.usefixtures("soon")
async def test_total_outage_opens_the_breaker():
    deployment = Deployment.parse("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main")
    for of_metadata in (True, False):
        breaker = Breaker("Redis", failures=3, pause_s=60)
        redis = RedisData(deployment, 5.0, breaker=breaker)
        data = GuardedData(data_client(deployment, 5.0), breaker, 5.0)
        try:
            for kind in (NobodyLeads, NobodyLeads, NobodyLeads, CircuitOpenError):
                call = (
                    redis.command("PING")
                    if of_metadata
                    else asyncio.to_thread(data.get_many, [("k", 1)])
                )
                with pytest.raises(kind):
                    await call
        finally:
            data.close()
            await redis.close()


@pytest.mark.usefixtures("soon")
async def test_sentinels_that_know_no_master_do_not_open_it(tmp_path):
    with Idle(tmp_path) as sentinel:
        deployment = Deployment.parse(
            f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main"
        )
        breaker = Breaker("Redis", failures=1, pause_s=60)
        redis = RedisData(deployment, 5.0, breaker=breaker)
        data = GuardedData(data_client(deployment, 5.0), breaker, 5.0)
        try:
            for _ in range(2):
                with pytest.raises(Moving) as caught:
                    await redis.command("PING")
                assert caught.type is Moving
                with pytest.raises(Moving) as caught:
                    await asyncio.to_thread(data.get_many, [("k", 1)])
                assert caught.type is Moving
        finally:
            data.close()
            await redis.close()


def test_a_known_master_is_not_asked_for_again(tmp_path):
    """Until it is forgotten: after a lost connection, or a call that was refused."""
    with sentinels(tmp_path, 1) as (master, _, (watcher,)):
        data = data_client(Deployment.parse(f"redis+sentinel://127.0.0.1:{watcher.port}/main"), 5.0)
        assert data.location_of("k").port == master.port
        watcher.kill()
        assert data.location_of("k").port == master.port
        data.forget()
        with pytest.raises(Unreachable):
            data.location_of("k")
        data.close()


@pytest.mark.usefixtures("soon")
async def test_metadata_that_lose_redis_tell_of_it(tmp_path):
    lost = []
    with Server(tmp_path) as server:
        redis = RedisData(Deployment.parse(server.url), 5.0, on_lost=lambda: lost.append(1))
        await redis.command("PING")
        assert not lost
    with pytest.raises(Unreachable):
        await redis.command("PING")
    assert lost
    await redis.close()


async def test_sentinels_that_lead_to_another_machine_are_not_believed(monkeypatch):
    async def elsewhere(*_: object) -> tuple[str, int]:
        return "10.0.0.1", 6379

    monkeypatch.setattr("redis.asyncio.sentinel.Sentinel.discover_master", elsewhere)
    monkeypatch.setattr("redis.sentinel.Sentinel.discover_master", lambda *_: ("10.0.0.1", 1))
    deployment = Deployment.parse("redis+sentinel://127.0.0.1:1/main")
    redis, data = RedisData(deployment, 0.5), data_client(deployment, 0.5)
    try:
        with pytest.raises(ConfigError, match="another machine"):
            await redis.command("PING")
        with pytest.raises(ConfigError, match="another machine"):
            await asyncio.to_thread(data.get_many, [("k", 1)])
    finally:
        data.close()
        await redis.close()
