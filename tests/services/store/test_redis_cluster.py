"""A real cluster: every key of a node in one slot, the rest anywhere."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from redis.crc import key_slot
from store_thread import store_on
from valkey_servers import Server, cluster, move_slot, wait_for

from criticalkv.services.store import keys
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.topology import Slots, data_client
from criticalkv.shared.errors import NodeMissingError, NodeTooLargeError, StoreUnavailableError
from criticalkv.shared.redis_location import Deployment, Location

TENANT = "ab" * 32


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def url(nodes):
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])


@pytest.fixture
def client(url):
    with store_on(url, lease_ttl_s=2, read_deadline_s=1.0, janitor_interval_s=0.2) as client:
        yield client


@pytest.fixture
async def redis(url):
    redis = RedisData(Deployment.parse(url), 5.0)
    yield redis
    await redis.close()


@pytest.fixture
def data(url):
    data = data_client(Deployment.parse(url), 5.0)
    yield data
    data.close()


def payloads(client, node) -> list[bytes]:
    with client.open_get(node.node_id) as reader:
        return [bytes(p) for _, p in reader]


def test_nodes_handles_pins_and_children(client, make_node):
    for _ in range(3):  # in slots of any server
        parent = make_node()
        child = make_node(parent=parent)
        parent.put(client)
        child.put(client)
        assert payloads(client, child) == child.payloads
        client.bind_handle(f"ctx_{child.node_id[:20]}", TENANT, child.node_id, b"")
        assert client.resolve_handle(TENANT, f"ctx_{child.node_id[:20]}").node_id == child.node_id
        assert client.pin(TENANT, child.node_id) == 1
        assert client.unpin(TENANT, child.node_id) == 0
        found = client.stat([parent.node_id, child.node_id, "0" * 64])
        assert [stat.present for stat in found] == [True, True, False]
        assert set(client.delete_handle(TENANT, f"ctx_{child.node_id[:20]}")) == {
            parent.node_id,
            child.node_id,
        }
        assert not client.stat([child.node_id])[0].present


def test_full_store_makes_room(client, make_node):
    big = {"rows": 2000, "tokens": 2000, "head_dim": 60, "layers": 2}
    stored = [make_node(**big) for _ in range(8)]
    for node in stored:
        assert node.put(client).published
    assert payloads(client, stored[-1]) == stored[-1].payloads
    with pytest.raises(NodeTooLargeError):
        make_node(**{**big, "layers": 10}).put(client)


def test_leases_requests_and_aliases(client, make_node):
    node = make_node()
    lease = client.acquire_lease(node.node_id, 10_000)
    assert lease.acquired
    assert not client.acquire_lease(node.node_id, 10_000).acquired
    node.put(client, lease_token=lease.lease_token)
    assert client.release_lease(node.node_id, lease.lease_token)


async def test_scripts_on_every_server(redis, nodes):
    """A script that some servers do not know is loaded everywhere, also after a flush."""
    script = "return {KEYS[1], ARGV[1]}"
    calls = [(script, [f"ckv:{i}"], [i]) for i in range(50)]
    expected = [[f"ckv:{i}".encode(), b"%d" % i] for i in range(50)]
    assert await redis.run_many(calls) == expected
    with nodes[1].client() as one:
        one.script_flush()
    assert await redis.run_many(calls) == expected


async def test_eviction_policy_of_any_server(redis, nodes):
    assert await redis.eviction_policy() == "noeviction"
    for node in nodes:
        with node.client() as one:
            one.config_set("maxmemory-policy", "allkeys-lru")
            assert await redis.eviction_policy() == "allkeys-lru"
            one.config_set("maxmemory-policy", "noeviction")


async def test_slot_that_moves(redis, data, nodes):
    """Reads and writes follow a slot while it is given away, and afterwards."""
    slot = key_slot(b"ckv:{moved}")
    source = next(n for n in nodes if _serves(n, slot))
    target = next(n for n in nodes if n is not source)
    names = [f"ckv:{{moved}}:{i}" for i in range(40)]

    def check(names: list[str]) -> None:
        for at in range(0, len(names), 4):
            batch = [(name, len(name)) for name in names[at : at + 4]]
            assert data.get_many(batch) == [name.encode() for name, _ in batch]
        assert data.get_many([("ckv:{moved}:absent", 5)]) == [None]

    def meanwhile() -> None:
        check(names)
        new = [(f"ckv:{{moved}}:new:{i}", b"12345") for i in range(4)]
        data.set_many(new, 60_000)
        assert data.get_many([(name, 5) for name, _ in new]) == [b"12345"] * 4
        found = asyncio.run_coroutine_threadsafe(metadata(), loop).result(20)
        assert found == [name.encode() for name in names]

    async def metadata() -> list[bytes]:
        return await asyncio.gather(*(redis.command("GET", name) for name in names))

    loop = asyncio.get_running_loop()
    data.set_many([(name, name.encode()) for name in names], 60_000)
    await redis.command("SET", "ckv:{moved}:meta", "m")
    await asyncio.to_thread(move_slot, slot, source, target, meanwhile)
    check(names)
    assert await redis.command("GET", "ckv:{moved}:meta") == b"m"
    assert await redis.run("return redis.call('GET', KEYS[1])", ["ckv:{moved}:meta"], []) == b"m"


@pytest.fixture
def stray(tmp_path):
    """A node of no cluster, without slots."""
    with Server(tmp_path, "--cluster-enabled", "yes") as stray:
        yield stray


async def test_seed_without_slots_is_passed_over(nodes, stray):
    seeds = ",".join(f"127.0.0.1:{server.port}" for server in (stray, nodes[0]))
    deployment = Deployment.parse(f"redis+cluster://{seeds}")
    redis, data = RedisData(deployment, 5.0), data_client(deployment, 5.0)
    try:
        await redis.check(False)
        for i in range(20):  # on any server
            await redis.command("SET", f"ckv:seed:{i}", "1", "PX", 60_000)
            await asyncio.to_thread(data.set_many, [(f"ckv:data:{i}", b"1")], 60_000)
    finally:
        data.close()
        await redis.close()


async def test_answer_that_covers_most_slots_is_kept(nodes, stray):
    with stray.client() as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 9)
    seeds = tuple(Location(host="127.0.0.1", port=s.port) for s in (stray, nodes[0], stray))
    slots = Slots(replace(Deployment.parse("redis+cluster://127.0.0.1"), seeds=seeds))
    slots.refresh()
    assert {owner.port for owner in slots.masters()} == {node.port for node in nodes}


async def test_without_any_master_the_check_fails(stray, monkeypatch):
    monkeypatch.setattr("criticalkv.services.store.redis_data.FAILOVER_S", 0.3)
    redis = RedisData(Deployment.parse(f"redis+cluster://127.0.0.1:{stray.port}"), 5.0)
    try:
        with pytest.raises(StoreUnavailableError):
            await redis.check(False)
    finally:
        await redis.close()


async def test_script_on_a_slot_that_moves_to_a_new_server(tmp_path):
    """The new one is no master yet, and knows no scripts."""
    with (
        cluster(tmp_path, 1) as (old,),
        Server(tmp_path, "--cluster-enabled", "yes") as new,
        old.client() as source,
        new.client() as target,
    ):
        source.execute_command("CLUSTER MEET", "127.0.0.1", new.port)
        for client in (source, target):
            wait_for(
                lambda client=client: (
                    client.execute_command("CLUSTER INFO")["cluster_known_nodes"] == "2"
                )
            )
        wait_for(lambda: target.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        slot = key_slot(b"ckv:{moved}")
        old_id, new_id = (client.execute_command("CLUSTER MYID") for client in (source, target))
        target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
        redis = RedisData(Deployment.parse(f"redis+cluster://127.0.0.1:{old.port}"), 5.0)
        script = "return redis.call('SET', KEYS[1], ARGV[1]) and KEYS[1]"
        calls = [(script, [f"ckv:{{moved}}:{i}"], ["x"]) for i in range(3)]
        try:
            assert await redis.run_many(calls) == [f"ckv:{{moved}}:{i}".encode() for i in range(3)]
            assert target.dbsize() == 3
        finally:
            await redis.close()


def test_slot_moves_under_puts_and_gets(client, nodes, make_node):
    """What is read is right or a miss, and afterwards all works."""
    node = make_node(layers=8)
    slot = key_slot(keys.manifest(node.node_id).encode())
    source = next(n for n in nodes if _serves(n, slot))
    target = next(n for n in nodes if n is not source)
    node.put(client)
    done = threading.Event()
    wrong: list[object] = []

    def use() -> None:
        while not done.is_set():
            try:
                found = payloads(client, node)
                wrong.extend([] if found == node.payloads else [found])
            except (NodeMissingError, StoreUnavailableError):
                pass

    thread = threading.Thread(target=use)
    thread.start()
    try:
        move_slot(slot, source, target, lambda: None)
    finally:
        done.set()
        thread.join()
    assert not wrong
    again = make_node()
    assert again.put(client).published
    wait_for(lambda: _there(client, node))


def _there(client, node) -> bool:
    try:
        return payloads(client, node) == node.payloads
    except (NodeMissingError, StoreUnavailableError):
        return node.put(client).published


def _serves(node, slot: int) -> bool:
    with node.client() as client:
        return any(
            first <= slot <= last and master[1] == node.port
            for first, last, master, *_ in client.execute_command("CLUSTER SLOTS")
        )
