"""Writing and reading nodes through the real server and a real Valkey."""

from __future__ import annotations

import pytest

from criticalkv.shared.errors import InvalidRequestError, NodeMissingError


@pytest.fixture
def store(each_path):
    return each_path


def read(store, node, **options):
    with store.open_get(node.node_id, **options) as reader:
        return reader, {index: bytes(payload) for index, payload in reader}


def test_roundtrip(store, make_node):
    node = make_node()
    result = node.put(store)
    assert (result.published, result.generation, result.stored_bytes) == (True, 1, node.nbytes)
    reader, got = read(store, node)
    assert reader.manifest == node.manifest
    assert (reader.tier, reader.generation) == ("0.4", 1)
    assert got == dict(enumerate(node.payloads))


def test_node_larger_than_any_window(store, make_node):
    # 24 segments of 1 MiB: more than the queues, batches and flow-control windows hold.
    node = make_node(layers=12, rows=2032, head_dim=64, tokens=4096)
    node.put(store)
    assert list(read(store, node)[1].values()) == node.payloads


def test_node_without_entries(store, make_node):
    node = make_node(rows=0, layers=1, tiers=("1",))
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        assert writer.commit(node.manifest, node.record).published
    assert read(store, node)[1] == {}


@pytest.mark.parametrize(
    ("wanted", "served", "segments"),
    [
        (None, "0.8", [0, 1, 2, 3, 4, 5]),
        ("0.8", "0.8", [0, 1, 2, 3, 4, 5]),
        ("1", "0.8", [0, 1, 2, 3, 4, 5]),
        ("0.5", "0.4", [0, 1, 3, 4]),
        ("0.1", "0.1", [0, 3]),
        ("0.01", "0.1", [0, 3]),
    ],
)
def test_tier_read_is_a_prefix(store, make_node, wanted, served, segments):
    node = make_node(tiers=("0.1", "0.4", "0.8"))
    node.put(store)
    reader, got = read(store, node, tier=wanted)
    assert (reader.tier, list(got)) == (served, segments)
    assert sum(map(len, got.values())) == node.manifest.tier_bytes()[len(segments) // 2 - 1]


def test_layer_range(store, make_node):
    node = make_node(layers=3)
    node.put(store)
    assert list(read(store, node, layers=range(1, 3))[1]) == [2, 3, 4, 5]
    with pytest.raises(InvalidRequestError, match="layers"):
        store.open_get(node.node_id, layers=range(2, 4))


def test_byte_limit(store, make_node):
    node = make_node()
    node.put(store)
    low, high = node.manifest.tier_bytes()
    assert read(store, node, byte_limit=high)[0].tier == "0.4"
    assert read(store, node, byte_limit=high - 1)[0].tier == "0.1"
    with pytest.raises(InvalidRequestError, match="byte_limit"):
        store.open_get(node.node_id, byte_limit=low - 1)


def test_unknown_is_missing(store):
    with pytest.raises(NodeMissingError):
        store.open_get("0" * 64)


@pytest.mark.parametrize("node_id", ["", "0" * 63, "G" * 64, "../../etc", "0" * 64 + "\n"])
def test_malformed_id_is_refused(store, node_id):
    with pytest.raises(InvalidRequestError, match="node_id"):
        store.open_get(node_id)


def test_stat_in_the_order_asked(store, make_node):
    node, absent = make_node(), make_node()
    node.put(store, ttl_ms=60_000)
    first, second = store.stat([absent.node_id, node.node_id])
    assert (first.node_id, first.present) == (absent.node_id, False)
    assert second.present
    assert list(second.tiers) == ["0.1", "0.4"]
    assert list(second.tier_bytes) == node.manifest.tier_bytes()
    assert list(second.tier_entries) == [12 * 1, 12 * 2]
    assert second.full_entries == 64 * 2 * 2
    assert list(second.pending_ids) == [7]
    assert 0 < second.ttl_ms <= 60_000
    assert not second.pinned


def test_abandoned_read_leaves_the_store_working(store, make_node):
    node = make_node(layers=12, rows=2032, head_dim=64, tokens=4096)
    node.put(store)
    for _ in range(20):
        with store.open_get(node.node_id) as reader:
            next(iter(reader))
    assert list(read(store, node)[1].values()) == node.payloads


def test_token_record_outlives_kv(store, make_node):
    node = make_node()
    node.put(store)
    assert store.delete_node(node.node_id)
    assert not store.stat([node.node_id])[0].present
    assert store.token_records([node.node_id, "1" * 64]) == [node.record, None]


def test_delete_spares_another_attempt(store, make_node):
    node = make_node()
    node.put(store)
    assert not store.delete_node(node.node_id, "f" * 16)
    assert store.delete_node(node.node_id, node.manifest.attempt)
    assert not store.delete_node(node.node_id)
