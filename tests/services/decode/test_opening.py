"""Chains are measured by manifests, admitted by pages, and pulled layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from small_pool import SALT, SmallPool

from criticalkv.services.decode.opening import MeasuredChain, OpenedChain
from criticalkv.services.decode.resident import copied_chain
from criticalkv.services.local.memory_store import MemoryReader, MemoryStore
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.errors import CancelledError, ContextLengthError, NodeMissingError
from criticalkv.shared.identity import tenant_salt

TIERS = ("0.2", "0.5", "1")
ROOT = [[[1, 0, 2], [1, 1, 0]], [[3, 1, 4], [2, 5, 0]], [[5, 2, 9], [4, 8, 1]]]
LEAF = [[[3, 3, 3], [3, 3, 3]]]
ROOT_PAGES, MID_PAGES, LOW_PAGES, LEAF_PAGES = 10, 6, 4, 6  # of 4 slots


class CountingStore(MemoryStore):
    """Notes which payloads are read, and may break off."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.segments: list[tuple[str, int]] = []
        self.breaks_at: int | None = None

    def open_get(self, node_id: str, **options: Any) -> MemoryReader:
        self.opened.append(node_id)
        reader = super().open_get(node_id, **options)
        return CountingReader(self, reader, options.get("layers"))


class CountingReader(MemoryReader):
    """See CountingStore."""

    def __init__(self, store: CountingStore, reader: MemoryReader, layers: range | None) -> None:
        super().__init__(reader.manifest, reader._segments, reader.tier, layers)
        self._store = store

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        for index, payload in super().__iter__():
            if self._store.breaks_at == self.manifest.segments[index].layer:
                raise NodeMissingError.of(self.manifest.node_id, "planted")
            self._store.segments.append((self.manifest.node_id, index))
            yield index, payload


class Chained(SmallPool):
    """A pool, and a stored chain of a ragged root and a dense leaf."""

    def __init__(self, **fields: Any) -> None:
        self.counting = CountingStore()
        super().__init__(store=self.counting, **fields)
        self.root, self.root_cache = self.publish(ROOT, TIERS)
        self.leaf, self.leaf_cache = self.publish(LEAF, parent=self.root, seed=1)

    def measure(self, *view: str, leaf: Manifest | None = None, salt: str = SALT) -> MeasuredChain:
        leaf = leaf or self.leaf
        return self.opener.measure(leaf.node_id, salt, view, lambda: None)

    def open(self, *view: str, own: int = 0) -> OpenedChain | None:
        return self.opener.open(self.measure(*view), own)

    def leave(self, opened: OpenedChain) -> None:
        self.pages.give_back(opened.own)
        for view in opened.views:
            self.residents.leave(view.node)


def assert_same(cache: RaggedCache, right: RaggedCache) -> None:
    for layer, expected in zip(cache.layers, right.layers, strict=True):
        assert layer.keys.equal(expected.keys)
        assert layer.values.equal(expected.values)
        assert layer.positions.equal(expected.positions)


def test_measuring_reads_manifests_only() -> None:
    pool = Chained()
    chain = pool.measure("0.5", "1")
    assert chain.ids == (pool.root.node_id, pool.leaf.node_id)
    assert (chain.view, chain.next_position) == (("0.5", "1"), pool.leaf.next_position)
    assert (chain.lowest_tier, chain.entries_per_head) == ("0.5", -(-(15 + 18) // 6))
    assert chain.retained_fraction == (15 + 18) / (6 * (9 + 3))
    entry = pool.leaf.tier_bytes()[0] // 18
    assert chain.kept_bytes == (15 + 18) * entry
    assert pool.opener.pages_at_least(chain) == MID_PAGES + LEAF_PAGES
    assert len(pool.counting.opened) == 2
    assert (pool.counting.segments, pool.used) == ([], 0)
    empty = pool.opener.measure(None, SALT, (), lambda: None)
    assert (empty.ids, empty.next_position, empty.lowest_tier) == ((), 0, "1")
    assert empty.kept_bytes == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_what_does_not_fit_is_a_miss(is_held: bool) -> None:
    """Another tenant's node, too, whether the store or the pool has it."""
    pool = Chained()
    if is_held:
        pool.hold(pool.root, pool.root_cache)
        pool.hold(pool.leaf, pool.leaf_cache)
    for view in ((), ("1",), ("1", "1", "1")):
        with pytest.raises(NodeMissingError, match="view"):
            pool.measure(*view)
    with pytest.raises(NodeMissingError, match="tenant"):
        pool.measure("1", "1", salt=tenant_salt("somebody else"))
    with pytest.raises(NodeMissingError, match="not stored"):
        pool.measure("0.3", "1")
    foreign, _ = pool.publish(LEAF, parent=pool.root, salt=tenant_salt("else"))
    with pytest.raises(NodeMissingError, match="tenant"):
        pool.measure("1", "1", leaf=foreign)


def test_a_foreign_ancestor_is_a_miss() -> None:
    pool = Chained()
    foreign, _ = pool.publish(ROOT, TIERS, salt=tenant_salt("else"))
    child, _ = pool.publish(LEAF, parent=foreign)
    with pytest.raises(NodeMissingError, match="tenant"):
        pool.measure("1", "1", leaf=child)


def test_a_full_chain_and_a_stop_end_the_measuring() -> None:
    pool = Chained()
    full, _ = pool.publish([[[4096] * 3] * 2])
    with pytest.raises(ContextLengthError, match="4096"):
        pool.measure("1", leaf=full)

    def stop() -> None:
        raise CancelledError("given up")

    with pytest.raises(CancelledError):
        pool.opener.measure(pool.leaf.node_id, SALT, ("1", "1"), stop)


def test_lower_tiers_are_those_stored_between_the_wish_and_the_least() -> None:
    chain = Chained().measure("1", "1")
    assert chain.lower_tiers("0.05") == ["0.5", "0.2"]
    assert chain.lower_tiers("0.5") == ["0.5"]
    assert chain.lower_tiers("1") == []
    assert chain.lowered("0.5").view == ("0.5", "1"), "a turn has one tier"
    assert chain.lowered("0.3").view == ("0.2", "1")
    assert chain.lowered("0.1").view == ("1", "1"), "nothing so small is stored"
    assert Chained().measure("0.2", "1").lowered("0.5").view == ("0.2", "1"), "never higher"


def test_opening_takes_the_pages_and_pulling_fills_them() -> None:
    pool = Chained()
    opened = pool.open("0.5", "1", own=3)
    assert opened is not None
    assert opened.own.size == 3
    assert pool.used == MID_PAGES + LEAF_PAGES + 3
    assert {n.manifest.node_id for n in opened.to_pull} == {pool.root.node_id, pool.leaf.node_id}
    entry = pool.root.entry_bytes
    assert opened.bytes_to_pull == (15 + 18) * entry
    assert [node.is_complete for node in opened.to_pull] == [False, False]
    pool.opener.pull(opened.to_pull, lambda: None)
    assert opened.is_complete
    root, leaf = copied_chain(pool.pages, opened.views).nodes
    assert_same(root.cache, pool.root_cache.at_tier("0.5"))
    assert_same(leaf.cache, pool.leaf_cache)
    top = [i for i, segment in enumerate(pool.root.segments) if segment.tier == 2]
    assert not {(pool.root.node_id, i) for i in top} & set(pool.counting.segments)
    pool.leave(opened)
    pool.assert_empty()


def test_what_is_held_is_not_pulled_again() -> None:
    pool = Chained()
    first = pool.open("1", "1")
    assert first is not None
    pool.opener.pull(first.to_pull, lambda: None)
    used, reads = pool.used, len(pool.counting.opened)
    second = pool.open("0.2", "1")
    assert second is not None
    assert (second.to_pull, pool.used) == ((), used)
    assert len(pool.counting.opened) == reads, "no manifest is read either"
    root, _ = copied_chain(pool.pages, second.views).nodes
    assert_same(root.cache, pool.root_cache.at_tier("0.2"))
    for opened in (first, second):
        pool.leave(opened)
    pool.assert_empty()


def test_who_opens_what_is_on_its_way_waits_for_it() -> None:
    pool = Chained()
    first, second = pool.open("1", "1"), pool.open("1", "1")
    assert first is not None
    assert second is not None
    assert second.to_pull == ()
    assert [v.node for v in second.views] == [v.node for v in first.views]
    pool.opener.pull(first.to_pull, lambda: None)
    assert second.is_complete
    for opened in (first, second):
        pool.leave(opened)
    pool.assert_empty()


def test_room_is_not_made_of_the_chains_own_nodes() -> None:
    pool = Chained(total=ROOT_PAGES + LEAF_PAGES + 5)
    chain = pool.measure("1", "1")
    pool.residents.leave(pool.hold(pool.root, pool.root_cache))
    other = pool.hold(*pool.publish([[[1, 1, 1], [1, 1, 0]]], seed=9))
    pool.residents.leave(other)  # 5 pages, later used than the root
    assert pool.opener.pages_to_pull(chain) == LEAF_PAGES
    assert pool.opener.has_room(chain, 5)
    assert not pool.opener.has_room(chain, 6), "the root's pages are no room"
    opened = pool.opener.open(chain, 5)
    assert opened is not None
    assert [n.manifest for n in opened.to_pull] == [pool.leaf]
    assert pool.residents.find(other.manifest.node_id, "1") is None
    assert pool.pages.free == 0
    pool.opener.pull(opened.to_pull, lambda: None)
    pool.leave(opened)
    pool.assert_empty()


@pytest.mark.parametrize("short", [1, LEAF_PAGES + 1, ROOT_PAGES + LEAF_PAGES + 1])
def test_without_room_nothing_is_taken(short: int) -> None:
    pool = Chained(total=ROOT_PAGES + LEAF_PAGES + 4)
    chain = pool.measure("1", "1")
    pool.residents.leave(pool.hold(pool.root, pool.root_cache))
    taken = pool.pages.take(4)
    blocked = pool.pages.take(short - 1) if short <= LEAF_PAGES + 1 else None
    assert pool.opener.open(chain, short) is None
    for pages in (taken, blocked):
        if pages is not None:
            pool.pages.give_back(pages)
    assert pool.residents.find(pool.leaf.node_id, "1") is None
    pool.assert_empty()


def test_the_largest_is_pulled_last() -> None:
    pool = Chained()
    opened = pool.open("1", "1")
    assert opened is not None
    sizes = [node.pages.size for node in opened.to_pull]
    assert sizes == [LEAF_PAGES, ROOT_PAGES]
    pool.opener.pull(opened.to_pull, lambda: None)
    order = [node_id for node_id, _ in pool.counting.segments]
    assert order == sorted(order, key=lambda node_id: node_id == pool.root.node_id)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_pull_that_breaks_off_tells_everybody_and_leaves_nothing(layer: int) -> None:
    pool = Chained()
    first, second = pool.open("1", "1"), pool.open("0.5", "1")
    assert first is not None
    assert second is not None
    met: list[Exception] = []

    def wait() -> None:
        try:
            second.views[1].node.wait_for(1, lambda: None)
        except NodeMissingError as error:
            met.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    pool.counting.breaks_at = layer
    with pytest.raises(NodeMissingError, match="planted"):
        pool.opener.pull(first.to_pull, lambda: None)
    waiter.join(5)
    assert len(met) == 1
    pool.counting.breaks_at = None
    third = pool.open("1", "1")
    assert third is not None
    assert len(third.to_pull) == 2, "those after the one that failed are given up with it"
    for opened in (first, second):
        pool.leave(opened)
    pool.opener.pull(third.to_pull, lambda: None)
    root, _ = copied_chain(pool.pages, third.views).nodes
    assert_same(root.cache, pool.root_cache)
    pool.leave(third)
    pool.assert_empty()


def test_a_pull_can_be_stopped_between_layers() -> None:
    pool = Chained()
    opened = pool.open("1", "1")
    assert opened is not None
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise CancelledError("closing")

    with pytest.raises(CancelledError):
        pool.opener.pull(opened.to_pull, stop)
    assert {node_id for node_id, _ in pool.counting.segments} == {pool.leaf.node_id}
    pool.leave(opened)
    pool.assert_empty()


def test_a_node_replaced_by_other_choices_since_it_was_measured_is_a_miss() -> None:
    pool = Chained()
    opened = pool.open("1", "1")
    assert opened is not None
    pool.store.delete(pool.root.node_id)  # type: ignore[attr-defined]
    changed = [*ROOT[:-1], [[6, 2, 9], [4, 8, 1]]]
    again, _ = pool.publish(changed, TIERS)
    assert again.node_id == pool.root.node_id
    with pytest.raises(NodeMissingError, match="replaced"):
        pool.opener.pull(opened.to_pull, lambda: None)
    pool.leave(opened)
    pool.assert_empty()
