"""The books: what they know after a server died between two steps, or after they were lost."""

from __future__ import annotations

import asyncio

import pytest
from store_rig import held_bytes, total

from criticalkv.services.store import keys
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import StoreUnavailableError

GRACE_S = 0.2
TENANT = "ab" * 32
CONFIG = StoreConfig(read_deadline_s=GRACE_S, lease_ttl_s=2)


@pytest.fixture
def valkey(emptied):
    return emptied


@pytest.fixture
def make_rig(rigs):
    return lambda **config: rigs(CONFIG.model_copy(update=config))


@pytest.fixture
def rig(make_rig):
    return make_rig()


async def dies(*_words, **_named):
    raise StoreUnavailableError("the server dies here")


async def sweep(rig, rounds=2):
    for _ in range(rounds):
        await asyncio.sleep(1.5 * GRACE_S)
        await rig.janitor.sweep()


@pytest.mark.parametrize("step", ["publish", "trash"])
async def test_a_replaced_attempt_that_was_never_booked_is_unlinked(
    rig, valkey, make_node, monkeypatch, step
):
    first = make_node(seed=1, tiers=("0.1", "0.4"))
    better = make_node(seed=1, tiers=("0.1", "0.4", "0.8"))
    with monkeypatch.context() as patch:
        patch.setattr(rig.books, "publish", dies)
        with pytest.raises(StoreUnavailableError):
            await rig.put(first)
    if step == "trash":  # the second server dies, too, after its own books
        with monkeypatch.context() as patch:
            patch.setattr(rig.books, "trash", dies)
            with pytest.raises(StoreUnavailableError):
                await rig.put(better)
        await asyncio.sleep(CONFIG.lease_ttl_s)
    else:
        assert (await rig.put(better)).published
    await sweep(rig)
    assert total(valkey) == held_bytes(valkey) == better.nbytes


async def test_what_is_freed_is_counted_as_it_changes(make_rig, valkey, make_node):
    rig = make_rig(read_deadline_s=600.0)
    nodes = [make_node(tiers=("0.2", "0.4", "0.6")) for _ in range(3)]
    for node in nodes:
        await rig.put(node, tenant=TENANT)
    tier = nodes[0].nbytes // 3
    assert valkey.hget(keys.FREEING, TENANT) is None
    await rig.shrinker.shrink(nodes[0].node_id)
    await rig.nodes.drop(nodes[1].node_id, later=True)
    await check_freeing(rig, valkey, 4 * tier)
    await rig.books.trash(keys.member(nodes[2].node_id, nodes[2].manifest.attempt), 0)
    await check_freeing(rig, valkey, 7 * tier)
    await rig.janitor.sweep()  # the third is named
    await check_freeing(rig, valkey, 4 * tier)
    await rig.shrinker.unlink_early(1)
    await check_freeing(rig, valkey, 3 * tier)
    await rig.shrinker.shrink(nodes[0].node_id)
    await check_freeing(rig, valkey, 4 * tier)
    # A node that goes takes its dropped tiers along: they are freed once.
    await rig.nodes.drop(nodes[0].node_id, later=True)
    await check_freeing(rig, valkey, 5 * tier)
    await rig.shrinker.unlink_early(1 << 30)
    await rig.janitor.empty_early(1 << 30)
    await check_freeing(rig, valkey, 0)


async def check_freeing(rig, valkey, expected):
    assert (await rig.books.state()).freeing == expected
    assert int(valkey.hget(keys.FREEING, TENANT)) == expected
    valkey.delete(keys.COUNTED)
    valkey.hset(keys.FREEING, mapping={"": 12345, TENANT: 777})
    await rig.books.recount(1)
    assert (await rig.books.state()).freeing == expected
    if expected:
        assert int(valkey.hget(keys.FREEING, TENANT)) == expected
    else:
        assert not valkey.hexists(keys.FREEING, TENANT)


async def test_how_full_the_store_is_takes_no_longer_the_more_is_going(rig, valkey):
    async def commands():
        valkey.config_resetstat()
        await rig.books.state()
        found = valkey.info("commandstats")
        return {name: what["calls"] for name, what in found.items() if "hget" in name}

    idle = await commands()
    for i in range(100):
        member = keys.member(f"{i:064x}", f"{i:016x}")
        valkey.hset(keys.SIZES, member, 10)
        await rig.books.trash(member, 60_000)
    assert (await rig.books.state()).freeing == 1000
    assert await commands() == idle


async def test_one_sweep_empties_the_trash(rig, valkey):
    for i in range(600):
        valkey.zadd(keys.TRASH, {keys.member(f"{i:064x}", f"{i:016x}"): i})
    await rig.janitor.sweep()
    assert valkey.zcard(keys.TRASH) == 0


async def test_lost_books_are_written_anew_as_nodes_are_read(rig, valkey, make_node):
    node = make_node()
    await rig.put(node, tenant=TENANT)
    valkey.delete(*keys.BOOKS, keys.of_tenant(keys.INDEX, TENANT))
    await rig.get(node.node_id)
    assert total(valkey) == node.nbytes
    assert int(valkey.hget(keys.OWNED_BYTES, TENANT)) == node.nbytes
    assert [found for found, _ in await rig.books.cheapest(0, 9, tenant=TENANT)] == [node.node_id]
    await rig.janitor.sweep()
    assert total(valkey) == held_bytes(valkey) == node.nbytes
