"""The memory limit: what goes first, what never goes, and that the books add up."""

from __future__ import annotations

import time

import pytest
from valkey_servers import admin_of

from criticalkv.shared.errors import NodeTooLargeError, StoreFullError

# Five tiers of 1 MiB: three nodes fit into a store of 16 MiB.
BIG = {
    "layers": 1,
    "tiers": ("0.1", "0.2", "0.4", "0.6", "0.8"),
    "rows": 2032,
    "head_dim": 64,
    "tokens": 6000,
}


@pytest.fixture
def books(small_store):
    with admin_of(small_store.config.data_dir) as client:
        yield client


@pytest.fixture
def client(small_store):
    with small_store.client() as client:
        yield client


def present(client, *nodes):
    return [stat.present for stat in client.stat([node.node_id for node in nodes])]


def until(what):
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def total(books):
    return int(books.get("ckv:{books}:total") or 0)


def test_least_valuable_goes_first(client, books, make_node):
    cost = {"a": 30.0, "b": 10.0, "c": 20.0}
    nodes = {name: make_node(**BIG, prefill_ms=ms) for name, ms in cost.items()}
    for node in nodes.values():
        node.put(client)
    make_node(**BIG, prefill_ms=40.0).put(client)
    assert present(client, *nodes.values()) == [True, False, True]
    with client.open_get(nodes["c"].node_id) as reader:  # a hit: worth 40 now, more than a
        list(reader)
    make_node(**BIG, prefill_ms=50.0).put(client)
    assert present(client, *nodes.values()) == [False, False, True]
    assert not books.exists(nodes["a"].segment_key(0))
    assert total(books) == 3 * nodes["a"].nbytes <= 16 << 20


def test_equal_value_longest_unused_goes_first(client, make_node):
    nodes = [make_node(**BIG, prefill_ms=10.0) for _ in range(3)]
    for node in nodes:
        node.put(client)
        time.sleep(0.005)
    make_node(**BIG, prefill_ms=10.0).put(client)
    assert present(client, *nodes) == [False, True, True]


def test_leaves_go_before_their_parents(client, make_node):
    root = make_node(**BIG, prefill_ms=1.0)
    child = make_node(**BIG, parent=root, prefill_ms=100.0)
    leaf = make_node(**BIG, parent=child, prefill_ms=50.0)
    for node in (root, child, leaf):
        node.put(client)
    make_node(**BIG, prefill_ms=1000.0).put(client)
    assert present(client, root, child, leaf) == [True, True, False]
    make_node(**BIG, prefill_ms=1000.0).put(client)
    assert present(client, root, child) == [True, False]
    make_node(**BIG, prefill_ms=1000.0).put(client)
    assert present(client, root) == [False]


def test_pinned_store_is_full(client, books, make_node):
    root = make_node(**BIG)
    child = make_node(**BIG, parent=root)
    other = make_node(**BIG)
    for node in (root, child, other):
        node.put(client)
    assert client.pin("aa", child.node_id) == 1  # keeps root as well
    assert client.pin("aa", other.node_id) == 1
    refused = make_node(**BIG)
    with pytest.raises(StoreFullError):
        refused.put(client)
    assert present(client, root, child, other, refused) == [True, True, True, False]
    until(lambda: total(books) == 3 * root.nbytes)
    assert list(books.scan_iter(f"ckv:{{{refused.node_id}}}:s:*")) == []
    client.unpin("aa", other.node_id)
    assert make_node(**BIG).put(client).published
    assert present(client, root, child, other) == [True, True, False]


def test_node_beyond_the_limit_is_refused(client, make_node):
    kept = make_node(**BIG)
    kept.put(client)
    with pytest.raises(NodeTooLargeError):
        make_node(**{**BIG, "layers": 10}).put(client)
    assert client.healthy()


def test_redis_out_of_memory_is_a_typed_error(client, books, make_node):
    books.config_set("maxmemory", 1 << 20)
    node = make_node(**BIG)
    with pytest.raises(StoreFullError):
        node.put(client)
    assert present(client, node) == [False]
    assert list(books.scan_iter("ckv:*:s:*")) == []
    assert total(books) == 0
    books.config_set("maxmemory", 1 << 30)
    assert make_node(**BIG).put(client).published


def test_books_follow_expiry(client, books, make_node):
    node = make_node()
    node.put(client, ttl_ms=200)
    assert total(books) == node.nbytes
    until(lambda: not total(books))
    assert books.zcard("ckv:{books}:index") == 0
    assert books.hlen("ckv:{books}:counts") == 0
    assert list(books.scan_iter("ckv:*:s:*")) == []


def test_books_are_repaired(client, books, make_node):
    node = make_node()
    node.put(client)
    books.delete(f"ckv:{{{node.node_id}}}:m")  # as a Redis that evicts would
    books.hset("ckv:{books}:sizes", "0" * 64 + ":" + "1" * 16, 5)
    books.incrby("ckv:{books}:total", 5)
    books.zadd("ckv:{books}:index", {"2" * 64: 1.0})
    until(lambda: not total(books) and not books.zcard("ckv:{books}:index"))
    assert list(books.scan_iter("ckv:*:s:*")) == []


def under_way(client, node, parent):
    return client.open_put(
        node.node_id,
        node.manifest.attempt,
        ancestors=[parent.node_id],
        expected_bytes=node.nbytes,  # reserved at once, however its segments are batched
    )


def test_child_being_put_does_not_evict_its_parent(client, make_node):
    root = make_node(**BIG, prefill_ms=1.0)  # the cheapest of three that fill the store
    others = [make_node(**BIG, prefill_ms=ms) for ms in (50.0, 60.0)]
    for node in (root, *others):
        node.put(client)
    child = make_node(**BIG, parent=root, prefill_ms=1.0)
    with under_way(client, child, root) as writer:
        for payload in child.payloads[:-1]:
            writer.send(payload)
        time.sleep(2.5)  # longer than the lease, which is renewed
        make_node(**BIG, prefill_ms=70.0).put(client)  # another's put spares it too
        assert present(client, root, *others) == [True, False, False]
        writer.send(child.payloads[-1])
        assert writer.commit(child.manifest, child.record).published
    assert present(client, root, child) == [True, True]


def test_parent_does_not_expire_while_its_child_is_put(client, make_node):
    root = make_node()
    root.put(client, ttl_ms=1000)
    child = make_node(parent=root)
    with under_way(client, child, root) as writer:
        time.sleep(2.2)
        assert present(client, root) == [True]
        for payload in child.payloads:
            writer.send(payload)
        assert writer.commit(child.manifest, child.record).published


def test_ended_put_lets_go_of_its_parent(client, books, make_node):
    root = make_node()
    root.put(client)
    holds = f"ckv:{{{root.node_id}}}:w"
    for commit in (False, True):
        child = make_node(parent=root)
        with under_way(client, child, root) as writer:
            for payload in child.payloads:
                writer.send(payload)
            until(lambda: books.zcard(holds))
            lease_ms = books.pttl(holds)
            assert lease_ms == -2 or 0 < lease_ms <= 2000  # -2: lapsed while we looked
            if commit:
                writer.commit(child.manifest, child.record)
        until(lambda: not books.zcard(holds))
