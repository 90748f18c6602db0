"""Quotas: what a tenant may hold, and that it pays for more with its own nodes only."""

from __future__ import annotations

import asyncio

import pytest
from store_rig import held_bytes, total

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.services.store.process import start_store
from criticalkv.shared.config import StoreConfig, TenantQuota
from criticalkv.shared.errors import NodeMissingError, NodeTooLargeError, QuotaExceededError
from criticalkv.shared.identity import tenant_digest

TIERS = ("0.1", "0.2", "0.4", "0.6")
ALICE, BOB, CAROL = map(tenant_digest, ("alice", "bob", "carol"))
# 4 tiers of nearly 256 KiB: a MiB holds one node.
MIB = {"tiers": TIERS, "layers": 1, "rows": 1024, "head_dim": 31, "tokens": 4096}
QUARTER = 1024 * (8 * 31 + 4)


@pytest.fixture
def valkey(emptied):
    return emptied


@pytest.fixture
def make_rig(rigs):
    def make(limit_bytes=1 << 30, **quota):
        config = StoreConfig(
            read_deadline_s=0.3, lease_ttl_s=2, tenant_quotas={"alice": TenantQuota(**quota)}
        )
        return rigs(config, limit_bytes)

    return make


def owned(valkey, tenant):
    return [int(valkey.hget(name, tenant) or 0) for name in (keys.OWNED_BYTES, keys.OWNED_NODES)]


async def put(rig, make_node, tenant, **how):
    node = make_node(**{**MIB, **how})
    assert (await rig.put(node, tenant=tenant)).published
    return node


async def tiers(rig, *nodes):
    return [tuple((await rig.stat(node)).tiers) for node in nodes]


def test_a_tenants_digest_is_what_the_gateway_says():
    from criticalkv.services.gateway.auth import Tenant

    assert Tenant("alice").digest == ALICE


async def test_a_tenant_beyond_its_bytes_shrinks_its_own_nodes_then_drops_them(
    make_rig, valkey, make_node
):
    rig = make_rig(max_mb=2)
    others = await put(rig, make_node, BOB, prefill_ms=0.001)  # the least valuable of all
    nobodys = await put(rig, make_node, "", prefill_ms=0.001)
    mine = [await put(rig, make_node, ALICE, prefill_ms=10.0 * (i + 1)) for i in range(2)]
    assert owned(valkey, ALICE) == [8 * QUARTER, 2]
    mine.append(await put(rig, make_node, ALICE, prefill_ms=1000.0))
    assert await tiers(rig, *mine) == [TIERS[:2], TIERS[:2], TIERS]
    assert owned(valkey, ALICE) == [8 * QUARTER, 3]
    small = {"tiers": TIERS[:3]}
    mine.append(await put(rig, make_node, ALICE, prefill_ms=2000.0, **small))
    assert await tiers(rig, *mine) == [(), TIERS[:2], TIERS[:2], TIERS[:3]]
    assert owned(valkey, ALICE) == [7 * QUARTER, 3]
    assert await tiers(rig, others, nobodys) == [TIERS, TIERS]
    assert total(valkey) == held_bytes(valkey) == 15 * QUARTER


@pytest.mark.parametrize("quota", [{"max_nodes": 4}, {"max_mb": 1}], ids=str)
async def test_what_its_quota_costs_a_tenant_ages_nobody(make_rig, valkey, make_node, quota):
    rig = make_rig(**quota)
    mine = [await put(rig, make_node, ALICE, tiers=TIERS[:1]) for _ in range(5)]
    assert await tiers(rig, *mine) == [(), *[TIERS[:1]] * 4]
    assert valkey.get(keys.AGE) is None


async def test_a_tenant_whose_nodes_are_pinned_is_refused(make_rig, valkey, make_node):
    rig = make_rig(max_mb=2)
    others = await put(rig, make_node, BOB)
    for _ in range(2):
        node = await put(rig, make_node, ALICE)
        await rig.nodes.pin(ALICE, node.node_id)
    refused = make_node(**MIB)
    with pytest.raises(QuotaExceededError, match=r"store\.tenant_quotas\.\*\.max_mb"):
        await rig.put(refused, tenant=ALICE)
    assert (await rig.stat(refused)).present is False
    assert owned(valkey, ALICE) == [8 * QUARTER, 2]
    assert await tiers(rig, others) == [TIERS]
    assert total(valkey) == held_bytes(valkey) == 12 * QUARTER
    await put(rig, make_node, BOB)  # the others go on


async def test_a_node_larger_than_the_quota_is_refused_at_once(make_rig, make_node):
    rig = make_rig(max_mb=1)
    kept = await put(rig, make_node, ALICE)
    with pytest.raises(NodeTooLargeError):  # to try again would be in vain
        await rig.put(make_node(**{**MIB, "layers": 2}), tenant=ALICE)
    assert await tiers(rig, kept) == [TIERS]


async def test_a_full_store_is_not_the_quotas_matter(make_rig, make_node):
    rig = make_rig(8 * QUARTER, max_mb=1)
    others = [await put(rig, make_node, BOB, prefill_ms=1.0) for _ in range(2)]
    mine = await put(rig, make_node, ALICE, prefill_ms=1.0)  # within its quota
    assert await tiers(rig, *others, mine) == [TIERS[:2], TIERS[:2], TIERS]


async def test_a_tenant_beyond_its_nodes_drops_its_least_valuable(make_rig, valkey, make_node):
    rig = make_rig(max_nodes=2)
    others = await put(rig, make_node, BOB, prefill_ms=0.001)
    first = await put(rig, make_node, ALICE, prefill_ms=2.0)
    second = await put(rig, make_node, ALICE, prefill_ms=1.0)
    third = await put(rig, make_node, ALICE, prefill_ms=3.0)
    assert await tiers(rig, first, second, third, others) == [TIERS, (), TIERS, TIERS]
    assert owned(valkey, ALICE)[1] == 2
    for node in (first, third):
        await rig.nodes.pin(ALICE, node.node_id)
    with pytest.raises(QuotaExceededError, match="max_nodes"):
        await rig.put(make_node(**MIB), tenant=ALICE)
    assert owned(valkey, ALICE)[1] == 2
    await asyncio.sleep(0.3)
    await rig.janitor.sweep()
    assert owned(valkey, ALICE) == [8 * QUARTER, 2]


async def test_a_replaced_node_is_not_one_more(make_rig, valkey, make_node):
    rig = make_rig(max_nodes=1)
    await put(rig, make_node, ALICE, seed=1, tiers=TIERS[:2])
    better = await put(rig, make_node, ALICE, seed=1)
    assert await tiers(rig, better) == [TIERS]
    assert owned(valkey, ALICE) == [6 * QUARTER, 1]
    same = await rig.put(make_node(**MIB, seed=1), tenant=ALICE)
    assert not same.published
    assert owned(valkey, ALICE) == [6 * QUARTER, 1]
    await asyncio.sleep(0.3)
    await rig.janitor.sweep()
    assert owned(valkey, ALICE) == [4 * QUARTER, 1]


async def test_a_child_does_not_cost_its_parent(make_rig, make_node):
    rig = make_rig(max_nodes=1)
    root = await put(rig, make_node, ALICE)
    with pytest.raises(QuotaExceededError, match="max_nodes"):
        await rig.put(make_node(**MIB, parent=root), tenant=ALICE)
    assert await tiers(rig, root) == [TIERS]


async def test_of_many_puts_at_once_as_many_succeed_as_may(make_rig, valkey, make_node):
    rig = make_rig(max_nodes=3)
    nodes = [make_node(**MIB) for _ in range(8)]
    results = await asyncio.gather(
        *(rig.put(node, tenant=ALICE) for node in nodes), return_exceptions=True
    )
    refused = [r for r in results if not isinstance(r, pb.PutResult)]
    assert all(isinstance(r, QuotaExceededError) for r in refused)
    there = [t for t in await tiers(rig, *nodes) if t]
    assert len(there) == owned(valkey, ALICE)[1] == 3


async def test_pins_beyond_the_quota_are_refused(make_rig, make_node):
    rig = make_rig(max_pins=2)
    nodes = [await put(rig, make_node, ALICE) for _ in range(3)]
    for node in (*nodes[:2], *nodes[:2]):  # the same again is no more
        assert await rig.nodes.pin(ALICE, node.node_id) == 1
    with pytest.raises(QuotaExceededError, match="max_pins"):
        await rig.nodes.pin(ALICE, nodes[2].node_id)
    assert not (await rig.stat(nodes[2])).pinned
    assert await rig.nodes.pin(BOB, nodes[2].node_id) == 1
    await rig.nodes.unpin(ALICE, nodes[0].node_id)
    await rig.nodes.unpin(ALICE, nodes[0].node_id)
    assert await rig.nodes.pin(ALICE, nodes[2].node_id) == 2


async def test_a_pin_that_failed_does_not_count(make_rig, valkey, make_node):
    rig = make_rig(max_pins=1)
    absent, node = make_node(**MIB), await put(rig, make_node, ALICE)
    with pytest.raises(NodeMissingError):
        await rig.nodes.pin(ALICE, absent.node_id)
    assert await rig.nodes.pin(ALICE, node.node_id) == 1
    # Counted by a server that died before the node knew of it.
    valkey.zadd(keys.PINS, {f"{ALICE}:{absent.node_id}": 1.0})
    valkey.hset(keys.OWNED_PINS, ALICE, 2)
    await rig.janitor.sweep()
    assert int(valkey.hget(keys.OWNED_PINS, ALICE)) == valkey.zcard(keys.PINS) == 1


async def test_a_pin_carried_to_a_better_node_needs_no_second_one(make_rig, make_node):
    rig = make_rig(max_pins=1)
    old, new = [await put(rig, make_node, ALICE) for _ in range(2)]
    bind = pb.BindHandleRequest(handle="ctx", tenant=ALICE, node_id=old.node_id)
    await rig.handles.bind(bind)
    await rig.nodes.pin(ALICE, old.node_id)
    move = pb.MoveHandleRequest(
        tenant=ALICE, handle="ctx", from_node=old.node_id, to_node=new.node_id
    )
    assert (await rig.handles.move(move)).outcome == pb.MoveHandleResponse.MOVED
    assert [(await rig.stat(n)).pinned for n in (old, new)] == [False, True]
    with pytest.raises(QuotaExceededError):
        await rig.nodes.pin(ALICE, old.node_id)


async def test_no_node_lives_longer_than_its_tenant_may(make_rig, make_node):
    rig = make_rig(max_ttl_s=100)
    root, other = await put(rig, make_node, ALICE), await put(rig, make_node, BOB)
    child = make_node(**MIB, parent=root)
    await rig.put(child, tenant=ALICE, ttl_ms=50_000)
    assert 0 < (await rig.stat(root)).ttl_ms <= 100_000
    assert (await rig.stat(other)).ttl_ms > 100_000
    assert 0 < (await rig.stat(child)).ttl_ms <= 50_000
    await rig.nodes.touch(child.node_id, 900_000)
    assert 50_000 < (await rig.stat(child)).ttl_ms <= 100_000
    assert (await rig.stat(root)).ttl_ms <= 102_000  # outlives its child a little
    await rig.nodes.touch(other.node_id, 900_000_000)
    assert (await rig.stat(other)).ttl_ms > 800_000_000
    await rig.nodes.pin(ALICE, child.node_id)
    assert (await rig.stat(child)).ttl_ms == 0  # pinned: for ever
    await rig.nodes.unpin(ALICE, child.node_id)
    for node in (root, child):
        assert 0 < (await rig.stat(node)).ttl_ms <= 102_000
    bind = pb.BindHandleRequest(
        handle="ctx", tenant=ALICE, node_id=child.node_id, ttl_ms=900_000_000
    )
    assert (await rig.handles.bind(bind)).ttl_ms == 100_000
    assert (await rig.stat(child)).ttl_ms <= 100_000


async def test_what_goes_is_not_counted_any_more(make_rig, valkey, make_node):
    rig = make_rig(max_nodes=9)
    nodes = [await put(rig, make_node, ALICE) for _ in range(4)]
    await rig.nodes.drop(nodes[0].node_id)
    assert owned(valkey, ALICE) == [12 * QUARTER, 3]
    valkey.delete(keys.manifest(nodes[1].node_id))  # expired
    await rig.janitor.sweep()
    assert owned(valkey, ALICE) == [12 * QUARTER, 2]
    await rig.shrinker.shrink(nodes[2].node_id)
    await asyncio.sleep(0.3)
    await rig.janitor.sweep()
    assert owned(valkey, ALICE) == [7 * QUARTER, 2]
    await rig.nodes.delete_unreferenced(nodes[3].node_id)
    assert owned(valkey, ALICE) == [3 * QUARTER, 1]


async def test_a_refused_put_delays_no_other_tenants(make_rig, make_node, monkeypatch):
    rig = make_rig(8 * QUARTER, max_mb=1)
    await rig.nodes.pin(ALICE, (await put(rig, make_node, ALICE)).node_id)
    await put(rig, make_node, "", prefill_ms=1.0)
    inside, leave, make_room = asyncio.Event(), asyncio.Event(), rig.evictor.make_room

    async def slow(nbytes, tenant=""):
        if tenant == ALICE:
            inside.set()
            await leave.wait()
        return await make_room(nbytes, tenant)

    monkeypatch.setattr(rig.evictor, "make_room", slow)
    refused = asyncio.create_task(rig.put(make_node(**MIB), tenant=ALICE))
    await asyncio.wait_for(inside.wait(), 30)
    await asyncio.wait_for(put(rig, make_node, BOB), 30)  # which needs room, too
    assert not refused.done()
    leave.set()
    with pytest.raises(QuotaExceededError):
        await refused


async def test_where_nothing_of_a_tenants_goes_its_put_is_refused_at_once(
    make_rig, make_node, monkeypatch
):
    rig = make_rig(max_mb=1)
    await rig.nodes.pin(ALICE, (await put(rig, make_node, ALICE)).node_id)
    sweeps, sweep = [], rig.janitor.sweep

    async def counted():
        sweeps.append(1)
        await sweep()

    monkeypatch.setattr(rig.janitor, "sweep", counted)
    for _ in range(2):
        tries = [rig.put(make_node(**MIB), tenant=ALICE) for _ in range(3)]
        found = await asyncio.gather(*tries, return_exceptions=True)
        assert [type(error) for error in found] == [QuotaExceededError] * 3
    assert not sweeps


async def test_a_put_awaits_what_of_its_tenants_is_on_its_way_out(make_rig, valkey, make_node):
    rig = make_rig(max_mb=1)
    node = await put(rig, make_node, ALICE)
    await rig.books.forget(node.node_id)  # as a server that is dropping it does
    valkey.delete(keys.manifest(node.node_id))
    await put(rig, make_node, ALICE)


def test_a_client_gets_a_typed_error(tmp_path, make_node):
    config = StoreConfig(
        address="127.0.0.1:0",
        data_dir=str(tmp_path),
        memory_limit_mb=16,
        tenant_quota=TenantQuota(max_mb=1, max_pins=1),
    )
    with start_store(config) as process, process.client() as client:
        with pytest.raises(NodeTooLargeError, match=r"store\.tenant_quota\.max_mb"):
            make_node(**{**MIB, "layers": 2}).put(client, tenant=CAROL)
        nodes = [make_node(**{**MIB, "tiers": TIERS[:2]}) for _ in range(2)]
        for node in nodes:
            assert node.put(client, tenant=CAROL).published
        client.pin(CAROL, nodes[0].node_id)
        with pytest.raises(QuotaExceededError, match=r"store\.tenant_quota\.max_pins"):
            client.pin(CAROL, nodes[1].node_id)
        assert make_node(**MIB).put(client).published  # nobody's
