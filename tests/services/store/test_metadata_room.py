"""Metadata live shorter the fuller their space is, so that Redis never runs full of them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from store_rig import Rig
from store_thread import store_on
from valkey_servers import Server, admin_of, wait_for

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys, metadata_room
from criticalkv.services.store.aliases import Aliases
from criticalkv.services.store.metadata_room import FLOOR_MS, FULL, HALF, MetadataRoom
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.requests import Requests
from criticalkv.services.store.valkey import Valkey
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ContextNotFoundError

MIB = 1 << 20
WEEK_MS = 7 * 24 * 3600 * 1000
CONFIG = StoreConfig(memory_limit_mb=100)
NODE_MS = CONFIG.node_ttl_s * 1000
SLACK_MS = 60_000  # of a slow machine, between a call and the look at its key


def room_at(share: float, config: StoreConfig = CONFIG) -> MetadataRoom:
    room = MetadataRoom(config)
    room.look([info(used=round(100 * MIB * share))], held=0)
    assert room.share == pytest.approx(share)
    return room


def info(used: int, maxmemory: int = 200 * MIB) -> dict[str, Any]:
    return {"used_memory": used, "maxmemory": maxmemory, "maxmemory_policy": "noeviction"}


# ---------------------------------------------------------------------------- the share


def test_share_is_of_what_payload_leaves():
    room = MetadataRoom(CONFIG)
    room.look([info(used=130 * MIB)], held=60 * MIB)
    assert room.share == 0.7
    assert METRICS.metadata_share._value.get() == 0.7
    room.look([info(used=50 * MIB)], held=60 * MIB)  # reserved, and not yet written
    assert room.share == 0


def test_what_jemalloc_rounds_up_is_payloads():
    room = MetadataRoom(CONFIG)  # of 100 MiB
    rounded = {"mem_allocator": "jemalloc-5.3.0"}
    room.look([info(145 * MIB, 225 * MIB) | rounded], held=100 * MIB)
    assert room.share == 0.2  # 20 of 100, not 45 of 125
    room.look([info(225 * MIB, 225 * MIB) | rounded], held=100 * MIB)
    assert room.share == 1  # full is full
    room.look([info(60 * MIB, 110 * MIB) | rounded], held=56 * MIB)  # no room by that measure
    assert room.share == 0.4


def test_on_a_cluster_the_fullest_counts():
    room = MetadataRoom(CONFIG)
    masters = [info(60 * MIB, 100 * MIB), info(70 * MIB, 100 * MIB), info(90 * MIB, 200 * MIB)]
    room.look(masters, held=60 * MIB)  # 20 each, of a limit of 33.3 each
    assert room.share == pytest.approx(50 / (100 - 100 / 3))


def test_without_limit_there_is_room(caplog):
    room = MetadataRoom(CONFIG)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            room.look([info(10**12, 0), info(10**12, 0)], held=0)
    assert room.share == 0
    assert [(r.levelname, "maxmemory" in r.message) for r in caplog.records] == [("INFO", True)]
    room.look([info(10**12, 0), info(130 * MIB)], held=0)  # one of the cluster's has one
    assert room.share == pytest.approx(130 / 150)


def test_what_redis_may_not_tell_is_no_pressure(caplog):
    room = MetadataRoom(CONFIG)
    room.look([], held=5 * MIB)
    assert (room.share, room.longest_ms > WEEK_MS) == (0, True)
    assert not caplog.records


def test_without_room_beside_the_payload_all_of_it_counts():
    room = MetadataRoom(CONFIG)
    room.look([info(used=60 * MIB, maxmemory=80 * MIB)], held=50 * MIB)
    assert room.share == 0.75


# ----------------------------------------------------------------------------- the life


@pytest.mark.parametrize(
    ("share", "asked_ms", "lives_ms"),
    [
        (0.0, WEEK_MS, WEEK_MS),
        (HALF, 10 * WEEK_MS, 10 * WEEK_MS),  # up to half full: as asked for
        (0.6, WEEK_MS, 107_336_307),  # 600 s · 1,008^(3/4)
        (0.7, WEEK_MS, 19_049_409),  # the geometric mean of a week and 600 s
        (0.7, 10 * WEEK_MS, 19_049_409),
        (0.7, 3_600_000, 3_600_000),  # shorter than that already
        (FULL, WEEK_MS, 600_000),
        (3.0, WEEK_MS, 600_000),
        (3.0, 1_000, 1_000),  # never longer than asked for
    ],
)
def test_life(share, asked_ms, lives_ms):
    assert room_at(share).shortened(asked_ms) == pytest.approx(lives_ms, rel=1e-6)


def test_life_never_rises_with_the_share():
    lives = [room_at(percent / 100).longest_ms for percent in range(120)]
    assert lives == sorted(lives, reverse=True)


def test_what_is_configured_shorter_than_the_floor_stays():
    config = CONFIG.model_copy(update={"record_ttl_s": 60})
    for share in (0.4, 0.7, 1.0):
        assert room_at(share, config).shortened(60_000) == 60_000


def test_each_mark_is_warned_of_once(caplog):
    room = MetadataRoom(CONFIG)

    def said(share: float) -> list[str]:
        caplog.clear()
        room.look([info(used=round(100 * MIB * share))], held=0)
        return [r.message for r in caplog.records if r.levelname == "WARNING"]

    assert said(0.49) == []
    (half,) = said(0.51)
    assert "50 % full" in half
    assert "maxmemory" in half
    assert "store.record_ttl_s" in half
    assert said(0.49) + said(0.52) + said(0.8) == []
    (full,) = said(0.95)
    assert "90 % full" in full
    assert "600 s" in full
    assert said(0.85) + said(0.91) == []
    assert said(0.3) == []
    assert len(said(1.0)) == 1  # and again after it was over


# ------------------------------------------------------------------- what is stored then


class Small:
    """The parts of a store whose metadata share one room."""

    def __init__(self, rig: Rig, config: StoreConfig) -> None:
        self.rig, self.room = rig, rig.room
        self.requests = Requests(rig.redis, config, self.room)
        self.aliases = Aliases(rig.redis, rig.nodes, config, self.room)

    def fill(self, share: float) -> None:
        self.room.share = share

    async def bind(
        self, node_id: str, handle: str = "h", ttl_ms: int = 0, text: bytes = b""
    ) -> Any:
        request = pb.BindHandleRequest(
            handle=handle, tenant="ab", node_id=node_id, metadata=text, ttl_ms=ttl_ms
        )
        return await self.rig.handles.bind(request)

    async def request(self, key: str, answer: bytes = b"answer", ttl_ms: int = 0) -> None:
        begin = pb.BeginRequestRequest(
            tenant="ab", key_digest=key, request_digest=key, handle="h", ttl_ms=ttl_ms
        )
        token = (await self.requests.begin(begin)).lease_token
        finish = pb.FinishRequestRequest(
            tenant="ab", key_digest=key, lease_token=token, answer=answer
        )
        assert await self.requests.finish(finish)

    async def alias(self, alias: str, node_id: str) -> None:
        target = pb.AliasTarget(node_id=node_id, view=["0.4"])
        await self.aliases.put(pb.PutAliasRequest(alias=alias, target=target))


@pytest.fixture
def small(rigs: Callable[..., Rig]) -> Small:
    return Small(rigs(CONFIG), CONFIG)


def left(valkey: redis.Redis, name: str) -> int:
    return int(valkey.pttl(name))


def lives(valkey: redis.Redis, name: str, ms: int) -> bool:
    return ms - SLACK_MS < left(valkey, name) <= ms


async def test_new_metadata_live_as_long_as_there_is_room_for(small, emptied, make_node):
    for share in (0.0, 0.7, 0.95):
        small.fill(share)
        want = small.room.shortened(WEEK_MS)
        node, name = make_node(), secrets.token_hex(8)
        key = keys.digest(name)
        await small.rig.put(node)
        bound = await small.bind(node.node_id, name)
        await small.request(key)
        await small.alias(key, node.node_id)
        assert bound.ttl_ms == want
        for stored in (
            keys.handle(keys.digest("ab", name)),
            keys.bindings(node.node_id),
            keys.request("ab", key),
            keys.alias(key),
        ):
            assert lives(emptied, stored, want), (share, stored)
        # The node itself has its own time, and its record no less, while the node is there.
        assert lives(emptied, keys.manifest(node.node_id), NODE_MS)
        assert lives(emptied, keys.record(node.node_id), max(want, NODE_MS))
        await small.rig.nodes.drop(node.node_id)
        assert lives(emptied, keys.record(node.node_id), want)


async def test_shorter_times_asked_for_stay(small, emptied, make_node):
    node = make_node()
    await small.rig.put(node)
    small.fill(0.95)
    assert (await small.bind(node.node_id, ttl_ms=120_000)).ttl_ms == 120_000
    await small.request(keys.digest("k"), ttl_ms=120_000)
    assert lives(emptied, keys.request("ab", keys.digest("k")), 120_000)


async def test_use_never_takes_life_away(small, emptied, make_node):
    """What was written while there was room keeps its time, however often it is used."""
    node, handle = make_node(seed=1), keys.handle(keys.digest("ab", "h"))
    await small.rig.put(node)
    await small.bind(node.node_id)
    await small.alias(keys.digest("a"), node.node_id)
    small.fill(0.95)
    again = await small.bind(node.node_id)
    found = await small.rig.handles.resolve("ab", "h")
    await small.alias(keys.digest("a"), node.node_id)
    await small.rig.put(make_node(seed=1))
    await small.rig.nodes.touch(node.node_id, 1000)
    for name in (handle, keys.record(node.node_id), keys.alias(keys.digest("a"))):
        assert lives(emptied, name, WEEK_MS), name
    assert WEEK_MS - SLACK_MS < again.ttl_ms <= WEEK_MS
    assert WEEK_MS - SLACK_MS < found.ttl_ms <= WEEK_MS


async def test_use_gives_what_there_is_room_for(small, emptied, make_node):
    """Written under pressure and read later: with room again, they live as asked for."""
    node, handle = make_node(), keys.handle(keys.digest("ab", "h"))
    small.fill(0.95)
    await small.rig.put(node)
    await small.bind(node.node_id)
    small.fill(0.7)
    between = small.room.shortened(WEEK_MS)
    assert (await small.rig.handles.resolve("ab", "h")).ttl_ms == between
    assert lives(emptied, handle, between)
    assert lives(emptied, keys.record(node.node_id), max(between, NODE_MS))
    small.fill(0.2)
    assert (await small.rig.handles.resolve("ab", "h")).ttl_ms == WEEK_MS
    assert lives(emptied, handle, WEEK_MS)
    assert lives(emptied, keys.record(node.node_id), WEEK_MS)


async def test_pins_keep_and_what_is_unpinned_lives_by_the_room(small, emptied, make_node):
    node = make_node(seed=2)
    small.fill(0.95)
    await small.rig.put(node)
    await small.rig.nodes.pin("ab", node.node_id)
    await small.rig.put(make_node(seed=2))
    assert left(emptied, keys.record(node.node_id)) == -1
    assert left(emptied, keys.manifest(node.node_id)) == -1
    await small.rig.nodes.unpin("ab", node.node_id)
    assert lives(emptied, keys.record(node.node_id), NODE_MS)  # as long as the node
    small.fill(0.0)
    await small.rig.nodes.pin("ab", node.node_id)
    await small.rig.nodes.unpin("ab", node.node_id)
    assert lives(emptied, keys.record(node.node_id), WEEK_MS)


async def test_an_answer_lives_by_the_room_at_its_end(small, emptied):
    """It is what takes the space, not the request that was begun before."""
    key = keys.digest("k")
    begin = pb.BeginRequestRequest(tenant="ab", key_digest=key, request_digest=key, handle="h")
    token = (await small.requests.begin(begin)).lease_token
    assert lives(emptied, keys.request("ab", key), WEEK_MS)
    small.fill(1.0)
    finish = pb.FinishRequestRequest(tenant="ab", key_digest=key, lease_token=token, answer=b"a")
    assert await small.requests.finish(finish)
    assert lives(emptied, keys.request("ab", key), FLOOR_MS)
    key = keys.digest("never finished")
    begin = pb.BeginRequestRequest(tenant="ab", key_digest=key, request_digest=key, handle="h")
    await small.requests.begin(begin)
    assert lives(emptied, keys.request("ab", key), FLOOR_MS)


# -------------------------------------------------------------- lists that would only grow


async def test_expired_handles_leave_their_tenants_list(small, emptied, make_node):
    node = make_node()
    await small.rig.put(node)
    for number in range(120):
        await small.bind(node.node_id, f"short-{number}")
        emptied.delete(keys.handle(keys.digest("ab", f"short-{number}")))  # as if by its time
        if not number % 10:
            await small.bind(node.node_id, f"long-{number}")
    listed = {name.decode() for name in emptied.zrange(keys.tenant_handles("ab"), 0, -1)}
    alive = {f"long-{number}" for number in range(0, 120, 10)}
    assert alive <= listed
    assert len(listed - alive) < 60  # of 120; without looking none would have gone
    request = pb.ListHandlesRequest(tenant="ab")
    assert {h.handle for h in await small.rig.handles.list_of(request)} == alive


async def test_expired_children_leave_their_parents_list(small, emptied, make_node):
    """A node that is used for ever does not list whatever was put below it."""
    parent = make_node()
    await small.rig.put(parent)
    bound = make_node(parent=parent)
    await small.rig.put(bound)
    await small.bind(bound.node_id)
    for number in range(60):
        child = make_node(parent=parent)
        await small.rig.put(child)
        # As if by its time, long after it was announced.
        emptied.delete(keys.manifest(child.node_id), keys.record(child.node_id))
        emptied.zadd(keys.children(parent.node_id), {child.node_id: 1})
        if not number:
            emptied.delete(keys.manifest(bound.node_id))
            emptied.zadd(keys.children(parent.node_id), {bound.node_id: 1})
    listed = {child.decode() for child in emptied.zrange(keys.children(parent.node_id), 0, -1)}
    assert bound.node_id in listed  # its handle leads to its record, and that to this one's
    assert len(listed) < 40


# ---------------------------------------------------------------------- all of it together

PAUSE_S = 0.04
"""Between rounds, whatever one takes: a slower machine puts less pressure on, never more."""
ROUNDS = 160
KEPT = 48 << 10
"""Bytes of a handle's metadata, of an answer, and of a token record."""
SPACE = 10 << 20
TEST_FLOOR_MS = 100


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Valkey, redis.Redis]]:
    """A Valkey with SPACE for metadata beside 1 MiB of payload; the floor is much lower."""
    monkeypatch.setattr(metadata_room, "FLOOR_MS", TEST_FLOOR_MS)
    with Valkey("", 1 << 30) as valkey, admin_of(valkey.directory) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + SPACE + MIB)
        yield valkey, client


async def test_memory_settles_at_constant_inflow(tight, make_node):
    """Far more than the space holds comes in; Redis is never full, and the newest can be read."""
    valkey, client = tight
    # Records live as long as their nodes, whose number payload's limit bounds: not here.
    config = StoreConfig(memory_limit_mb=16, record_ttl_s=600, node_ttl_s=1)
    rig = Rig(valkey.store, config, MIB)
    small, shares, nodes = Small(rig, config), [], []
    try:
        for number in range(ROUNDS):
            await asyncio.sleep(PAUSE_S)
            rig.room.look(await rig.redis.memory_infos(), await rig.books.total())
            shares.append(rig.room.share)
            node, name = make_node(tokens=KEPT // 4), f"h-{number}"
            nodes.append(node)
            await rig.put(node)  # refused with store_full if Redis is out of memory
            await small.request(keys.digest(name), answer=bytes(KEPT))
            late = time.monotonic() + TEST_FLOOR_MS / 1000
            await small.bind(node.node_id, name, text=bytes(KEPT))
            await read(rig, node, name, late)
        assert max(shares) > FULL - 0.15  # or nothing was shown
        assert max(shares) < 1.0
        # What was written while there was room is kept; what came when it was full goes.
        await rig.handles.resolve("ab", "h-0")
        old = ROUNDS - 20
        for name in (
            keys.record(nodes[old].node_id),
            keys.handle(keys.digest("ab", f"h-{old}")),
            keys.request("ab", keys.digest(f"h-{old}")),
        ):
            wait_for(lambda name=name: not client.exists(name))
    finally:
        await rig.close()


async def read(rig: Rig, node: Any, name: str, late: float) -> None:
    """Read what was just bound, unless this machine is too slow for the test's floor."""
    try:
        found = await rig.handles.resolve("ab", name)
    except ContextNotFoundError:
        assert time.monotonic() > late
        return
    assert (found.node_id, len(found.metadata)) == (node.node_id, KEPT)


def test_the_server_looks(tmp_path, make_node):
    """A whole store: what it stores lives by what its own watch sees."""
    with Server(tmp_path) as server, server.client() as client, store_on(server.url) as store:
        node = make_node()
        node.put(store)
        assert lives(client, keys.record(node.node_id), WEEK_MS)
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", (16 << 20) + used)  # full, and not out of memory
        wait_for(lambda: METRICS.metadata_share._value.get() > FULL)
        node, name = make_node(), secrets.token_hex(32)
        node.put(store)
        store.bind_handle("h", "ab", node.node_id, b"")
        token = store.begin_request("ab", name, name, "h", 1000, 0).lease_token
        assert store.finish_request("ab", name, token, b"answer")
        store.put_alias(name, node.node_id, ("0.4",))
        assert lives(client, keys.record(node.node_id), NODE_MS)
        for what in (
            keys.handle(keys.digest("ab", "h")),
            keys.request("ab", name),
            keys.alias(name),
        ):
            assert lives(client, what, FLOOR_MS), what
