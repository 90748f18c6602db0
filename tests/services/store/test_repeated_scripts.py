"""Every script may run twice: its reply was lost, and the call is repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.crc import key_slot
from store_rig import Rig
from valkey_servers import user_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.services.store.leases import Leases
from criticalkv.services.store.requests import Requests
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ContextNotFoundError

CONFIG = StoreConfig()
DIGEST = "a" * 64


@pytest.fixture
async def rig(store_process: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Parts of a server that get only the second reply to every script."""
    rig = Rig(user_of(store_process.config.data_dir, "store"), CONFIG)
    once = rig.redis._scripts

    async def twice(calls: Any) -> Any:
        await once(calls)
        return await once(calls)

    monkeypatch.setattr(rig.redis, "_scripts", twice)
    yield rig
    await rig.close()


async def test_a_put_is_published_and_charged_once(rig: Rig, make_node: Any, store: Any) -> None:
    node = make_node(tiers=("0.1", "0.4"))
    before = await rig.books.total()
    result = await rig.put(node)
    assert (result.published, result.generation) == (True, 1)
    assert await rig.books.total() - before == node.nbytes
    with store.open_get(node.node_id) as reader:
        assert [bytes(payload) for _, payload in reader] == node.payloads


async def test_a_lease_is_taken(rig: Rig, make_node: Any) -> None:
    leases, node_id = Leases(rig.redis, CONFIG), make_node().node_id
    first = await leases.acquire(pb.AcquireLeaseRequest(node_id=node_id, ttl_ms=60_000))
    assert first.acquired
    other = await leases.acquire(pb.AcquireLeaseRequest(node_id=node_id, ttl_ms=60_000))
    assert not other.acquired
    assert 0 < other.held_for_ms <= 60_000


async def test_a_request_begins(rig: Rig, make_node: Any) -> None:
    requests, key = Requests(rig.redis, CONFIG), make_node().node_id
    request = pb.BeginRequestRequest(
        tenant="ab", key_digest=key, request_digest=DIGEST, handle="resp_1", lease_ms=60_000
    )
    first = await requests.begin(request)
    assert (first.state, first.handle) == (pb.BeginRequestResponse.RUN, "resp_1")
    assert (await requests.begin(request)).state == pb.BeginRequestResponse.RUNNING
    assert await requests.finish(finishing(key, first.lease_token, b""))
    second = await requests.begin(request)
    assert second.state == pb.BeginRequestResponse.RUN
    assert not await requests.finish(finishing(key, DIGEST, b""))
    assert await requests.finish(finishing(key, second.lease_token, b"done"))
    assert (await requests.begin(request)).answer == b"done"


def finishing(key: str, token: str, answer: bytes) -> pb.FinishRequestRequest:
    return pb.FinishRequestRequest(tenant="ab", key_digest=key, lease_token=token, answer=answer)


async def test_a_deleted_handle_takes_its_node_along(rig: Rig, make_node: Any) -> None:
    node = make_node()
    await rig.put(node)
    binding = pb.BindHandleRequest(handle="resp_1", tenant="ab", node_id=node.node_id)
    await rig.handles.bind(binding)
    assert await rig.handles.delete("ab", "resp_1") == [node.node_id]
    assert await rig.nodes.records([node.node_id]) == [b""]
    with pytest.raises(ContextNotFoundError):
        await rig.handles.delete("ab", "resp_1")
    await rig.put(make_node(seed=3))
    again = pb.BindHandleRequest(handle="resp_1", tenant="ab", node_id=make_node(seed=3).node_id)
    await rig.handles.bind(again)
    assert await rig.handles.delete("ab", "resp_1") == [again.node_id]


async def test_bytes_are_reserved_once(rig: Rig, make_node: Any) -> None:
    member = keys.member(make_node().node_id, "1" * 16)
    before = await rig.books.total()
    await rig.books.begin(member, 60_000)
    rig.books.limit_bytes = before + 100
    assert await rig.books.reserve(member, 60) == (0, 0)
    assert await rig.books.reserve(member, 90) == (0, 0)
    assert await rig.books.total() - before == 90
    assert await rig.books.reserve(member, 101) == (1, 0)
    assert await rig.books.release(member) == 0  # the first of the two runs had them
    assert await rig.books.total() == before


async def test_a_node_shrinks_once(rig: Rig, make_node: Any) -> None:
    node = make_node(tiers=("0.1", "0.2", "0.4"), prefill_ms=5.0)
    await rig.put(node)
    tier = node.nbytes // 3
    assert await rig.shrinker.shrink(node.node_id) == ("shrunk", tier)
    assert list((await rig.stat(node)).tiers) == ["0.1", "0.2"]
    place = next(p for p in await order(rig) if p[0] == node.node_id)
    other = make_node(tiers=("0.1", "0.2"), prefill_ms=5.0)
    await rig.put(other)
    assert place[1] == pytest.approx(dict(await order(rig))[other.node_id])


async def order(rig: Rig) -> list[tuple[str, float]]:
    found = await rig.redis.command("ZRANGE", keys.INDEX, 0, -1, "WITHSCORES")
    return [(place.decode().rpartition(":")[2], float(score)) for place, score in found]


@pytest.mark.parametrize("later", [False, True])
async def test_a_dropped_node_is_struck_off(rig: Rig, make_node: Any, later: bool) -> None:
    parent = make_node()
    child = make_node(parent=parent)
    for node in (parent, child):
        await rig.put(node)
    before = await rig.books.total()
    dropped = await rig.nodes.drop(child.node_id, guard="evict", later=later)
    assert dropped == ("dropped", child.nbytes)
    assert await rig.nodes.drop(child.node_id, guard="evict") == ("absent", 0)
    assert await rig.redis.command("ZCARD", keys.children(parent.node_id)) == 0
    freed = before - await rig.books.total()
    assert freed == (0 if later else child.nbytes)


async def test_what_a_node_replaces_is_unlinked(rig: Rig, make_node: Any) -> None:
    old = make_node(seed=4, tiers=("0.1",))
    await rig.put(old)
    await rig.put(make_node(seed=4, tiers=("0.1", "0.4")))
    assert await rig.redis.command("ZSCORE", keys.TRASH, keys.member(*attempt_of(old)))


def attempt_of(node: Any) -> tuple[str, str]:
    return node.node_id, node.manifest.attempt


def test_what_is_remembered_lives_in_the_same_slot() -> None:
    for name, remembered in (
        (keys.handle(DIGEST), keys.unbound(DIGEST)),
        (keys.request("ab", DIGEST), keys.forgotten(keys.request("ab", DIGEST))),
        (keys.manifest(DIGEST), keys.dropped(DIGEST)),
        (keys.SIZES, keys.DONE + ":word"),
    ):
        assert key_slot(name.encode()) == key_slot(remembered.encode())
