"""Nodes in the pool: shared, kept while there is room, and never given back twice."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from small_pool import SmallPool, spec_of

from criticalkv.services.decode.resident import NodeView, ResidentNode, copied_chain
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.errors import CancelledError, CriticalKVError, NodeMissingError

LENS = [[[1, 0, 4], [2, 3, 0]], [[5, 0, 9], [4, 8, 1]]]
TIERS = ("0.5", "1")
PAGES = 2 + 0 + 3 + 1 + 2 + 1
LOW_PAGES = 1 + 0 + 1 + 1 + 1 + 0


def held(pool: SmallPool, seed: int = 0) -> ResidentNode:
    return pool.hold(*pool.publish(LENS, TIERS, seed=seed))


def found(pool: SmallPool, manifest: Manifest, tier: str = "1") -> ResidentNode | None:
    return pool.residents.find(manifest.node_id, tier)


def test_a_node_takes_its_pages_once_for_all_its_users() -> None:
    pool = SmallPool()
    node = held(pool)
    assert pool.used == PAGES
    assert pool.residents.acquire(node.manifest.node_id, "0.5") is node
    assert node.users == 2
    pool.residents.use(node)
    assert (pool.used, pool.residents.unused_pages) == (PAGES, 0)
    for _ in range(3):
        assert pool.residents.unused_pages == 0
        pool.residents.leave(node)
    assert (pool.used, pool.residents.unused_pages) == (PAGES, PAGES)
    assert pool.residents.acquire(node.manifest.node_id, "1") is node
    assert pool.residents.unused_pages == 0
    pool.residents.leave(node)
    pool.assert_empty()


def test_a_view_at_a_lower_tier_is_a_prefix_of_the_same_pages() -> None:
    pool = SmallPool()
    manifest, cache = pool.publish(LENS, TIERS)
    node = pool.hold(manifest, cache)
    assert NodeView(node, "1").lens.tolist() == LENS[1]
    assert NodeView(node, "0.5").lens.tolist() == LENS[0]
    for tier in TIERS:
        (copy,) = copied_chain(pool.pages, [NodeView(node, tier)]).nodes
        assert copy.tier == tier
        for layer, right in zip(copy.cache.layers, cache.at_tier(tier).layers, strict=True):
            assert layer.keys.equal(right.keys)
            assert layer.values.equal(right.values)
            assert layer.positions.equal(right.positions)
            assert layer.cu_seqlens.equal(right.cu_seqlens)


def test_a_smaller_read_is_no_larger_one() -> None:
    pool = SmallPool()
    manifest, cache = pool.publish(LENS, TIERS)
    low = pool.hold(manifest, cache, "0.5")
    assert NodeView(low, "0.5").lens.tolist() == LENS[0]
    assert pool.used == LOW_PAGES
    assert found(pool, manifest, "0.5") is low
    assert found(pool, manifest, "1") is None
    assert found(pool, manifest, "0.3") is None, "not stored"


def test_unused_ones_go_least_recently_used_first() -> None:
    pool = SmallPool(total=3 * PAGES)
    nodes = [held(pool, seed) for seed in range(3)]
    for node in nodes:
        pool.residents.leave(node)
    pool.residents.use(nodes[0])
    pool.residents.leave(nodes[0])
    ids = [node.manifest.node_id for node in nodes]
    assert pool.residents.ids(9) == (ids[0], ids[2], ids[1])
    assert pool.residents.ids(2) == (ids[0], ids[2])
    pages = pool.residents.take(1)
    assert pages is not None
    assert [found(pool, n.manifest) for n in nodes] == [nodes[0], None, nodes[2]]
    assert pool.residents.unused_pages == 2 * PAGES
    assert not pool.residents.make_room(3 * PAGES), "the page taken is somebody's"
    assert pool.residents.ids(9) == ()
    pool.pages.give_back(pages)
    pool.assert_empty()


def test_used_ones_stay_whatever_is_wanted() -> None:
    pool = SmallPool(total=2 * PAGES)
    used, unused = held(pool), held(pool, 1)
    pool.residents.leave(unused)
    assert pool.residents.take(PAGES + 1) is None
    assert found(pool, used.manifest) is used
    assert pool.used == PAGES


def test_no_more_is_kept_than_allowed() -> None:
    pool = SmallPool(keep=2 * PAGES + 1)
    nodes = [held(pool, seed) for seed in range(4)]
    for node in nodes:
        pool.residents.leave(node)
    assert [found(pool, n.manifest) for n in nodes] == [None, None, nodes[2], nodes[3]]
    assert pool.used == pool.residents.unused_pages == 2 * PAGES
    none = SmallPool(keep=0)
    none.residents.leave(held(none))
    assert none.used == 0


@pytest.mark.parametrize("is_used", [False, True])
def test_a_higher_read_replaces_and_the_old_one_goes_with_its_last_user(is_used: bool) -> None:
    pool = SmallPool()
    manifest, cache = pool.publish(LENS, TIERS)
    low = pool.hold(manifest, cache, "0.5")
    if not is_used:
        pool.residents.leave(low)
    high = pool.hold(manifest, cache)
    assert found(pool, manifest, "0.5") is found(pool, manifest) is high
    assert pool.used == PAGES + is_used * low.pages.size
    if is_used:
        pool.residents.use(low)
        pool.residents.leave(low)
        assert pool.used == PAGES + low.pages.size
        pool.residents.leave(low)
    assert (pool.used, pool.residents.unused_pages) == (PAGES, 0)
    pool.residents.leave(high)
    assert found(pool, manifest) is high
    pool.assert_empty()


def test_a_failed_one_is_never_found_and_goes_with_its_last_user() -> None:
    pool = SmallPool()
    manifest, cache = pool.publish(LENS, TIERS)
    broken = pool.begin(manifest)
    assert found(pool, manifest) is broken, "about to come"
    pool.residents.use(broken)
    broken.failed(NodeMissingError.of(manifest.node_id, "planted"))
    assert found(pool, manifest) is None
    assert pool.residents.acquire(manifest.node_id, "1") is None
    node = pool.hold(manifest, cache)
    pool.residents.leave(broken)
    assert pool.used == 2 * PAGES
    pool.residents.leave(broken)
    assert pool.used == PAGES
    assert found(pool, manifest) is node
    half = pool.begin(pool.publish(LENS, TIERS, seed=7)[0])
    half.arrived(1)
    pool.residents.leave(half)
    assert pool.used == PAGES, "a part of a node is not kept"
    pool.residents.leave(node)
    pool.assert_empty()


def test_who_waits_for_a_layer_is_told() -> None:
    pool = SmallPool()
    node = pool.begin(pool.publish(LENS, TIERS)[0])
    node.arrived(1)
    node.wait_for(0, lambda: None)
    thread = threading.Timer(0.02, lambda: node.arrived(2))
    thread.start()
    node.wait_for(1, lambda: None)
    thread.join()
    other = pool.begin(pool.publish(LENS, TIERS, seed=1)[0])
    other.arrived(1)
    threading.Timer(0.02, lambda: other.failed(CriticalKVError("planted"))).start()
    with pytest.raises(CriticalKVError, match="planted"):
        other.wait_for(1, lambda: None)
    other.wait_for(0, lambda: None)  # what has come is good

    def given_up() -> None:
        raise CancelledError("given up")

    third = pool.begin(pool.publish(LENS, TIERS, seed=2)[0])
    with pytest.raises(CancelledError):
        third.wait_for(0, given_up)


def test_users_that_come_and_go_in_many_threads_lose_no_page() -> None:
    pool = SmallPool(total=4 * PAGES, keep=PAGES)
    stored = [pool.publish(LENS, TIERS, seed=seed) for seed in range(4)]
    trouble = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                manifest, _ = stored[rng.integers(4)]
                node = pool.residents.acquire(manifest.node_id, "1")
                if node is None:
                    pages = pool.residents.take(PAGES)
                    if pages is None:
                        continue
                    node = ResidentNode(manifest, "1", 4, pages)
                    node.arrived(2)
                    pool.residents.add(node)
                pool.residents.leave(node)
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not trouble
    assert pool.residents.unused_pages == pool.used <= PAGES
    pool.assert_empty()


@pytest.mark.parametrize("seed", range(3))
def test_pages_cost_at_most_a_twentieth_at_800_entries_per_head(seed: int) -> None:
    """Lengths as an allocator makes them: ragged, a few heads nearly empty, no multiples."""
    layers, heads, tokens = 8, 8, 8000
    rng = np.random.default_rng(seed)
    drawn = rng.gamma(2.0, 400.0, (layers, heads))
    lens = np.minimum(drawn * 801 / drawn.mean(), tokens).astype(int)
    lens += 2
    lens += lens % 64 == 0
    assert 800 <= lens.mean() <= 810
    assert (lens % 64 > 0).all()
    assert lens.std() > 300
    pool = SmallPool(total=layers * heads * 140, page_size=64, spec=spec_of(layers, heads, dim=4))
    node = pool.hold(*pool.publish([lens.tolist()]))
    entries = int(lens.sum()) * node.manifest.entry_bytes
    assert pool.used * pool.pages.page_bytes <= 1.05 * entries
    pool.residents.leave(node)
    pool.assert_empty()
