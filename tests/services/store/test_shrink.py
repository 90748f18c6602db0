"""Shrinking: what a smaller generation is, who sees it, and that no byte is lost sight of."""

from __future__ import annotations

import asyncio

import pytest
from store_rig import held_bytes, total

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.services.store.order import RecencyOrder
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import InvalidRequestError, NodeMissingError, StoreFullError
from criticalkv.shared.frames import decode_get

TIERS = ("0.1", "0.2", "0.4", "0.6")
ENTRY = 2 * 8 * 4 + 4
TIER = 2 * 6 * ENTRY
"""Bytes that each tier of a node adds: 2 layers of 6 entries."""
assert TIER == 816
GRACE_S = 0.3
CONFIG = StoreConfig(read_deadline_s=GRACE_S, lease_ttl_s=2)


@pytest.fixture
def valkey(emptied):
    return emptied


@pytest.fixture
def make_rig(rigs):
    def make(limit_bytes=1 << 30, order=None, **config):
        rig = rigs(CONFIG.model_copy(update=config), limit_bytes, order)
        rig.evictor.young_s = 0.0
        return rig

    return make


@pytest.fixture
def rig(make_rig):
    return make_rig()


async def put(rig, make_node, tenant="", **how):
    node = make_node(**{"tiers": TIERS, **how})
    assert (await rig.put(node, tenant=tenant)).published
    return node


async def tiers(rig, *nodes):
    return [tuple((await rig.stat(node)).tiers) for node in nodes]


async def state(rig):
    found = await rig.books.state()
    return found.total, found.freeing


def expected(node, tier):
    """Payloads of a read, by index."""
    order = node.manifest.read_order(tier, range(node.manifest.num_layers))
    return {index: node.payloads[index] for index in order}


# ------------------------------------------------------------ one generation


async def test_a_shrunk_node_is_a_smaller_one(rig, valkey, make_node):
    node = await put(rig, make_node)
    assert total(valkey) == held_bytes(valkey) == 4 * TIER
    assert await rig.shrinker.shrink(node.node_id) == ("shrunk", TIER)
    stat = await rig.stat(node)
    assert (tuple(stat.tiers), stat.generation) == (TIERS[:3], 2)
    assert list(stat.tier_bytes) == [TIER, 2 * TIER, 3 * TIER]
    for wanted, given in (("", "0.4"), ("0.6", "0.4"), ("0.4", "0.4"), ("0.1", "0.1")):
        header, payloads = await rig.get(node.node_id, wanted)
        assert (header.tier, header.generation) == (given, 2)
        assert payloads == expected(node, given)


async def test_a_dropped_tier_is_unlinked_after_the_longest_read(rig, valkey, make_node):
    node = await put(rig, make_node)
    await rig.shrinker.shrink(node.node_id)
    await rig.janitor.sweep()
    assert await state(rig) == (4 * TIER, TIER)
    assert held_bytes(valkey) == 4 * TIER
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert await state(rig) == (3 * TIER, 0)
    assert held_bytes(valkey) == 3 * TIER
    assert not valkey.exists(node.segment_key(3), node.segment_key(7))
    assert valkey.hlen(keys.CUT_BYTES) == 0
    assert (await rig.get(node.node_id))[1] == expected(node, "0.4")


async def test_two_shrinks_keep_their_own_times(rig, valkey, make_node):
    node = await put(rig, make_node)
    await rig.shrinker.shrink(node.node_id)
    await asyncio.sleep(GRACE_S)
    await rig.shrinker.shrink(node.node_id)
    await rig.janitor.sweep()
    assert await state(rig) == (3 * TIER, TIER)
    assert held_bytes(valkey) == 3 * TIER
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert await state(rig) == (2 * TIER, 0)
    assert held_bytes(valkey) == 2 * TIER


@pytest.mark.parametrize(
    ("stored", "floor", "ends"),
    [
        (TIERS, "0.2", ("0.1", "0.2")),
        (TIERS, "0.1", ("0.1",)),
        (TIERS, "0.15", ("0.1", "0.2")),
        (TIERS, "1", TIERS),
        (("0.1", "0.4"), "0.2", ("0.1", "0.4")),  # the next is below
        (("0.4", "0.6"), "0.2", ("0.4",)),
        (("1",), "0.2", ("1",)),  # as a turn is
    ],
)
async def test_nodes_shrink_to_the_floor(make_rig, valkey, make_node, stored, floor, ends):
    rig = make_rig(shrink_floor=floor)
    node = await put(rig, make_node, tiers=stored)
    gained = 0
    while (step := await rig.shrinker.shrink(node.node_id, at_once=True))[0] == "shrunk":
        gained += step[1]
    assert step == ("floor", 0)
    assert await tiers(rig, node) == [ends]
    assert gained == (len(stored) - len(ends)) * TIER
    assert total(valkey) == held_bytes(valkey) == len(ends) * TIER
    assert await rig.books.cheapest(0, 9, tall=True) == []


async def test_pins_and_running_puts_keep_a_node_whole(rig, make_node):
    root = await put(rig, make_node)
    child = await put(rig, make_node, parent=root)
    await rig.nodes.pin("aa", child.node_id)
    for node in (root, child):
        assert await rig.shrinker.shrink(node.node_id) == ("pinned", 0)
    await rig.nodes.unpin("aa", child.node_id)
    await rig.nodes.hold("put", [root.node_id], 10_000)
    assert await rig.shrinker.shrink(root.node_id) == ("held", 0)
    await rig.nodes.let_go("put", [root.node_id])
    assert await state(rig) == (8 * TIER, 0)  # nothing is scheduled
    assert await rig.shrinker.shrink(root.node_id) == ("shrunk", TIER)  # though a parent


async def test_a_shrunk_node_lives_as_long_as_it_is_touched(rig, valkey, make_node):
    node = await put(rig, make_node)
    await rig.shrinker.shrink(node.node_id, at_once=True)
    for index in (0, 4):  # those of the lowest tier stay
        valkey.pexpire(node.segment_key(index), 60_000)
    await rig.nodes.touch(node.node_id, 90_000_000)
    left = [valkey.pttl(node.segment_key(i)) for i in (0, 1, 2, 4, 5, 6)]
    assert min(left) > 89_000_000
    await rig.nodes.pin("aa", node.node_id)
    assert {valkey.pttl(node.segment_key(i)) for i in (0, 1, 2, 4, 5, 6)} == {-1}
    await rig.nodes.unpin("aa", node.node_id)
    assert all(valkey.pttl(node.segment_key(i)) > 0 for i in (0, 1, 2, 4, 5, 6))


async def test_the_probe_is_a_segment_that_stays(rig, valkey, make_node):
    node = make_node(tiers=TIERS)
    order = (3, 2, 1, 0, 7, 6, 5, 4)  # the highest tier first
    segments = tuple(node.manifest.segments[i] for i in order)
    node = type(node)(
        node.manifest.model_copy(update={"segments": segments}),
        node.record,
        [node.payloads[i] for i in order],
    )
    await rig.put(node)
    await rig.shrinker.shrink(node.node_id, at_once=True)
    assert not valkey.exists(node.segment_key(0))
    await rig.nodes.touch(node.node_id, 90_000_000)
    left = [valkey.pttl(node.segment_key(i)) for i in (1, 2, 3)]
    await rig.nodes.touch(node.node_id, 90_000_001)  # all is long enough: nothing to do
    assert all(
        now <= before
        for now, before in zip(
            [valkey.pttl(node.segment_key(i)) for i in (1, 2, 3)], left, strict=True
        )
    )


async def test_a_higher_writer_replaces_a_shrunk_node(rig, valkey, make_node):
    node = await put(rig, make_node, seed=1)
    await rig.shrinker.shrink(node.node_id)
    again = make_node(tiers=TIERS, seed=1)
    result = await rig.put(again)
    assert (result.published, result.generation) == (True, 3)
    assert (await rig.get(node.node_id))[1] == expected(again, "0.6")
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert await state(rig) == (4 * TIER, 0)
    assert held_bytes(valkey) == 4 * TIER


async def test_an_equal_writer_does_not_replace_it(rig, make_node):
    node = await put(rig, make_node, seed=2)
    await rig.shrinker.shrink(node.node_id)
    result = await rig.put(make_node(tiers=TIERS[:3], seed=2))
    assert (result.published, result.generation) == (False, 2)


async def test_nobody_puts_a_shrunk_node(rig, make_node):
    node = make_node(tiers=TIERS)
    shrunk = type(node)(node.manifest.shrunk_to("0.2"), node.record, node.payloads)
    with pytest.raises(InvalidRequestError, match="dropped_tiers"):
        await rig.put(shrunk)


# -------------------------------------------------------------------- readers


async def begin_read(rig, node, tier):
    stream = rig.reader.get(pb.GetNodeRequest(node_id=node.node_id, tier=tier))
    header = decode_get(await anext(stream))[0].header
    return stream, header


async def rest_of(stream):
    return [bytes(decode_get(data)[1]) async for data in stream]


async def test_a_read_that_began_before_finishes(rig, make_node):
    node = await put(rig, make_node, layers=6)
    stream, header = await begin_read(rig, node, "0.6")
    await rig.shrinker.shrink(node.node_id)
    await rig.janitor.sweep()
    assert header.generation == 1
    assert await rest_of(stream) == list(expected(node, "0.6").values())


async def test_a_read_overtaken_by_an_early_unlink_is_a_miss_and_harms_nobody(
    rig, valkey, make_node
):
    node = await put(rig, make_node, layers=6)
    stream, _ = await begin_read(rig, node, "0.6")
    await rig.shrinker.shrink(node.node_id, at_once=True)
    with pytest.raises(NodeMissingError):
        await rest_of(stream)
    assert await tiers(rig, node) == [TIERS[:3]]
    assert (await rig.get(node.node_id))[1] == expected(node, "0.4")
    # A reader that found it itself says which generation it read.
    dropped = await rig.nodes.drop(node.node_id, node.manifest.attempt, generation=1)
    assert dropped == ("other", 0)
    dropped = await rig.nodes.drop(node.node_id, node.manifest.attempt, generation=2)
    assert dropped == ("dropped", 9 * TIER)
    assert total(valkey) == held_bytes(valkey) == 0


async def test_what_is_lost_of_the_new_generation_drops_it(rig, valkey, make_node):
    node = await put(rig, make_node)
    await rig.shrinker.shrink(node.node_id)
    valkey.delete(node.segment_key(0))
    with pytest.raises(NodeMissingError):
        await rig.get(node.node_id)
    assert await tiers(rig, node) == [()]
    assert await state(rig) == (0, 0)


# ------------------------------------------------- several servers, dying ones


async def test_of_two_servers_that_shrink_at_once_one_wins(make_rig, valkey, make_node):
    one, two = make_rig(), make_rig()
    node = await put(one, make_node)
    publish, outcomes = two.shrinker._publish, []

    async def overtaken(now, tier):
        outcomes.append(await one.shrinker.shrink(node.node_id))
        return await publish(now, tier)

    two.shrinker._publish = overtaken
    outcomes.append(await two.shrinker.shrink(node.node_id))
    assert outcomes == [("shrunk", TIER), ("other", 0)]
    assert await tiers(one, node) == [TIERS[:3]]
    assert await state(one) == (4 * TIER, TIER)
    await asyncio.sleep(GRACE_S)
    await asyncio.gather(one.janitor.sweep(), two.janitor.sweep())
    assert await state(one) == (3 * TIER, 0)
    assert held_bytes(valkey) == 3 * TIER


class Killed(BaseException):
    """A server that ends here."""


def dies(*_):
    raise Killed


@pytest.mark.parametrize("when", ["before the change", "after it", "while unlinking"])
async def test_a_server_that_dies_while_it_shrinks_loses_no_byte(
    make_rig, valkey, make_node, when, monkeypatch
):
    one, two = make_rig(), make_rig()
    node = await put(one, make_node)
    name = {
        "before the change": "_publish",
        "after it": "_note",
        "while unlinking": "_unlink",
    }[when]
    with monkeypatch.context() as patch:
        patch.setattr(one.shrinker, name, dies)
        with pytest.raises(Killed):
            await one.shrinker.shrink(node.node_id, at_once=True)
    changed = when != "before the change"
    assert await tiers(two, node) == [TIERS[:3] if changed else TIERS]
    await asyncio.sleep(GRACE_S)
    await two.janitor.sweep()
    left = (3 if changed else 4) * TIER
    assert await state(two) == (left, 0)
    assert held_bytes(valkey) == left
    assert (await two.shrinker.shrink(node.node_id))[0] == "shrunk"  # it is still in the order


async def test_a_lost_note_of_a_dropped_tier_is_found_again(rig, valkey, make_node):
    node = await put(rig, make_node)
    await rig.shrinker.shrink(node.node_id)
    await rig.shrinker.shrink(node.node_id)
    valkey.delete(keys.CUTS, keys.CUT_BYTES)
    await rig.janitor.sweep()
    assert await state(rig) == (4 * TIER, 2 * TIER)
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert await state(rig) == (2 * TIER, 0)
    assert held_bytes(valkey) == 2 * TIER


async def test_a_node_put_while_it_is_forgotten_comes_back_into_the_order(rig, make_node):
    node = await put(rig, make_node, seed=4)
    forget = rig.books.forget

    async def late(node_id, **how):
        assert (await rig.put(make_node(tiers=TIERS, seed=4))).published
        await forget(node_id, **how)

    rig.books.forget = late
    await rig.nodes.drop(node.node_id)
    rig.books.forget = forget
    assert await rig.books.cheapest(0, 9) == []
    await rig.janitor.sweep()
    assert [found for found, _ in await rig.books.cheapest(0, 9, tall=True)] == [node.node_id]
    assert await state(rig) == (4 * TIER, 0)


async def test_sums_that_drifted_are_counted_anew(rig, valkey, make_node):
    await put(rig, make_node, tenant="aa")
    await put(rig, make_node, tenant="bb")
    valkey.set(keys.TOTAL, 5)
    valkey.hset(keys.OWNED_BYTES, "aa", 1)
    valkey.hset(keys.OWNED_NODES, "cc", 7)
    valkey.delete(keys.COUNTED)
    await rig.janitor.sweep()
    assert total(valkey) == 8 * TIER
    owned = {name: int(n) for name, n in valkey.hgetall(keys.OWNED_BYTES).items()}
    assert owned == {b"aa": 4 * TIER, b"bb": 4 * TIER}
    nodes = {name: int(n) for name, n in valkey.hgetall(keys.OWNED_NODES).items()}
    assert nodes == {b"aa": 1, b"bb": 1}


# ----------------------------------------------------------- order of sacrifice


async def test_all_shrink_to_the_floor_before_one_goes(make_rig, valkey, make_node):
    rig = make_rig(12 * TIER)  # three whole nodes, or six at the floor
    nodes = [await put(rig, make_node, prefill_ms=100.0 * (i + 1)) for i in range(3)]
    fourth = await put(rig, make_node, prefill_ms=1000.0)
    # The least valuable lost two tiers, the next two as well: what was needed, no more.
    assert await tiers(rig, *nodes, fourth) == [TIERS[:2], TIERS[:2], TIERS, TIERS]
    assert total(valkey) == held_bytes(valkey) == 12 * TIER
    more = [await put(rig, make_node, prefill_ms=2000.0, tiers=TIERS[:2]) for _ in range(2)]
    assert await tiers(rig, *nodes, fourth) == [TIERS[:2]] * 4
    assert total(valkey) == held_bytes(valkey) == 12 * TIER
    last = await put(rig, make_node, prefill_ms=3000.0, tiers=TIERS[:2])
    assert await tiers(rig, *nodes, fourth, *more, last) == [(), *[TIERS[:2]] * 6]


async def test_the_coldest_shrinks_first_and_equals_by_last_use(make_rig, make_node):
    rig = make_rig(8 * TIER)
    nodes = [await put(rig, make_node, prefill_ms=10.0) for _ in range(2)]
    await rig.get(nodes[0].node_id)
    await put(rig, make_node, tiers=TIERS[:1], prefill_ms=10.0)
    assert await tiers(rig, *nodes) == [TIERS, TIERS[:3]]


async def test_equals_go_by_last_use_however_many_they_are(make_rig, make_node):
    rig = make_rig(150 * TIER)
    nodes = [await put(rig, make_node, tiers=TIERS[:1], prefill_ms=10.0) for _ in range(150)]
    for node in nodes[:40]:
        await rig.get(node.node_id)
    for node in nodes[40:100]:  # the same again, so that values are equal
        await rig.get(node.node_id)
    await put(rig, make_node, tiers=TIERS[:1], prefill_ms=10.0)
    gone = [i for i, t in enumerate(await tiers(rig, *nodes)) if not t]
    assert gone == [100]


async def test_what_was_popular_once_goes_in_the_end(make_rig, make_node):
    rig = make_rig(2 * TIER)
    star = await put(rig, make_node, tiers=TIERS[:1], prefill_ms=10.0)
    for _ in range(3):
        await rig.get(star.node_id)  # worth four others
    survived = 0
    while await tiers(rig, star) == [TIERS[:1]]:
        await put(rig, make_node, tiers=TIERS[:1], prefill_ms=10.0)
        survived += 1
        assert survived < 20
    # The first put goes beside it; each later one drops the one before and ages all by one.
    assert survived == 5


async def test_plain_lru_drops_whole_nodes(make_rig, make_node):
    rig = make_rig(8 * TIER, RecencyOrder())
    cheap = await put(rig, make_node, prefill_ms=1.0)
    dear = await put(rig, make_node, prefill_ms=1000.0)
    await rig.get(cheap.node_id)
    new = await put(rig, make_node, tiers=TIERS[:1], prefill_ms=1.0)
    assert await tiers(rig, cheap, dear, new) == [TIERS, (), TIERS[:1]]


async def test_pinned_nodes_stay_whole_and_the_put_fails_in_the_end(make_rig, make_node):
    rig = make_rig(8 * TIER)
    kept = await put(rig, make_node)
    parent = await put(rig, make_node, tiers=TIERS[:2], prefill_ms=1.0)
    child = await put(rig, make_node, tiers=TIERS[:2], parent=parent, prefill_ms=1000.0)
    await rig.nodes.pin("aa", kept.node_id)
    new = await put(rig, make_node, tiers=TIERS[:2], prefill_ms=1.0)
    assert await tiers(rig, kept, parent, child, new) == [TIERS, TIERS[:2], (), TIERS[:2]]
    await rig.nodes.pin("aa", parent.node_id)
    await rig.nodes.pin("aa", new.node_id)
    with pytest.raises(StoreFullError):
        await rig.put(make_node(tiers=TIERS[:1]))
    assert await tiers(rig, kept, parent, new) == [TIERS, TIERS[:2], TIERS[:2]]


# ------------------------------------------------------------------- watermarks


async def test_the_background_goes_from_high_to_low_and_lets_readers_finish(
    make_rig, valkey, make_node
):
    # 16 tiers fit; above 14.4 it makes room down to 12.8.
    rig = make_rig(16 * TIER, high_watermark=0.9, low_watermark=0.8)
    nodes = [await put(rig, make_node, prefill_ms=10.0 * (i + 1)) for i in range(3)]
    nodes.append(await put(rig, make_node, tiers=TIERS[:2], prefill_ms=100.0))
    await rig.evictor.keep_watermark()  # 14 ≤ 14.4
    assert await state(rig) == (14 * TIER, 0)
    nodes.append(await put(rig, make_node, tiers=TIERS[:1], prefill_ms=100.0))
    stream, _ = await begin_read(rig, nodes[0], "0.6")
    await rig.evictor.keep_watermark()
    assert await state(rig) == (15 * TIER, 3 * TIER)
    assert held_bytes(valkey) == 15 * TIER
    assert await rest_of(stream) == list(expected(nodes[0], "0.6").values())
    await rig.evictor.keep_watermark()  # what is scheduled counts as free
    assert await state(rig) == (15 * TIER, 3 * TIER)
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert await state(rig) == (12 * TIER, 0)
    assert held_bytes(valkey) == 12 * TIER


async def test_the_background_drops_nodes_when_nothing_shrinks(make_rig, valkey, make_node):
    rig = make_rig(4 * TIER, high_watermark=0.9, low_watermark=0.5)
    nodes = [await put(rig, make_node, tiers=("1",), prefill_ms=i + 1.0) for i in range(4)]
    stream, _ = await begin_read(rig, nodes[0], "")
    await rig.evictor.keep_watermark()
    assert await tiers(rig, *nodes) == [(), (), ("1",), ("1",)]
    assert await state(rig) == (4 * TIER, 2 * TIER)
    assert await rest_of(stream) == list(expected(nodes[0], "1").values())
    await asyncio.sleep(GRACE_S)
    await rig.janitor.sweep()
    assert total(valkey) == held_bytes(valkey) == 2 * TIER


async def test_the_background_spares_what_was_just_used(make_rig, make_node):
    rig = make_rig(8 * TIER, high_watermark=0.5, low_watermark=0.5)
    rig.evictor.young_s = 60.0
    nodes = [await put(rig, make_node) for _ in range(2)]
    await rig.evictor.keep_watermark()
    assert await tiers(rig, *nodes) == [TIERS, TIERS]
    await put(rig, make_node, tiers=TIERS[:2])  # a put does not
    assert await tiers(rig, *nodes) == [TIERS[:3], TIERS[:3]]


async def test_three_servers_that_make_room_at_once_do_not_overdo_it(make_rig, valkey, make_node):
    rigs = [make_rig(100 * TIER, high_watermark=0.9, low_watermark=0.8) for _ in range(3)]
    for _ in range(25):
        await put(rigs[0], make_node, prefill_ms=10.0)
    await asyncio.gather(*(rig.evictor.keep_watermark() for rig in rigs))
    held, freeing = await state(rigs[0])
    assert held == 100 * TIER
    assert 78 * TIER <= held - freeing <= 80 * TIER
    await asyncio.sleep(GRACE_S)
    await asyncio.gather(*(rig.janitor.sweep() for rig in rigs))
    assert await state(rigs[0]) == (held - freeing, 0)
    assert held_bytes(valkey) == held - freeing


async def test_under_hard_pressure_waiting_tiers_go_first(make_rig, valkey, make_node):
    rig = make_rig(8 * TIER)
    nodes = [await put(rig, make_node, prefill_ms=10.0) for _ in range(2)]
    for _ in range(2):
        await rig.shrinker.shrink(nodes[1].node_id)
    stream, _ = await begin_read(rig, nodes[0], "0.6")
    new = await put(rig, make_node, tiers=TIERS[:2])
    assert await tiers(rig, *nodes, new) == [TIERS, TIERS[:2], TIERS[:2]]
    assert total(valkey) == held_bytes(valkey) == 8 * TIER
    assert await rest_of(stream) == list(expected(nodes[0], "0.6").values())


async def test_replaced_nodes_that_wait_go_early_too(make_rig, valkey, make_node):
    rig = make_rig(8 * TIER)
    await put(rig, make_node, tiers=TIERS[:3], seed=3)
    better = await put(rig, make_node, tiers=TIERS, seed=3)
    assert await state(rig) == (7 * TIER, 3 * TIER)
    new = await put(rig, make_node)
    assert await tiers(rig, better, new) == [TIERS, TIERS]
    assert total(valkey) == held_bytes(valkey) == 8 * TIER


@pytest.mark.parametrize("tall", [True, False], ids=["shrinking", "going"])
async def test_places_that_the_books_do_not_know_are_passed_over(rig, valkey, make_node, tall):
    """Such as a Redis leaves that evicts by itself: they would be read for ever."""
    lost = [keys.INDEX, keys.TALL][: 2 if tall else 1]
    for name in lost:
        valkey.zadd(name, {f"{i:017d}:{i:064x}": -1.0 - i for i in range(200)})
    node = await put(rig, make_node)
    async with asyncio.timeout(60):
        freed = await rig.evictor.make_room(node.nbytes)
    assert freed == node.nbytes
    assert (await rig.stat(node)).tiers == []
