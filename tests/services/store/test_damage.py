"""Damaged, truncated or lost bytes are a miss for everybody, never a wrong answer."""

from __future__ import annotations

import pytest

from criticalkv.shared.errors import CorruptNodeError, NodeMissingError


@pytest.fixture
def store(each_path):
    return each_path


def flip_last(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def flip_first(data):
    return bytes([data[0] ^ 1]) + data[1:]


DAMAGE = {
    "payload bit": (flip_last, CorruptNodeError),
    "head bit": (flip_first, NodeMissingError),
    "truncated": (lambda data: data[:-3], NodeMissingError),
    "longer": (lambda data: data + b"x", NodeMissingError),
    "empty": (lambda _: b"", NodeMissingError),
    "tiny": (lambda _: b"ab", NodeMissingError),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("index", [0, 3])
def test_damaged_segment_is_a_miss(store, valkey, make_node, kind, index):
    damage, error = DAMAGE[kind]
    node = make_node()
    node.put(store)
    key = node.segment_key(index)
    valkey.set(key, damage(valkey.get(key)), keepttl=True)
    with pytest.raises(error), store.open_get(node.node_id) as reader:
        list(reader)
    assert not store.stat([node.node_id])[0].present
    with pytest.raises(NodeMissingError):
        store.open_get(node.node_id)


def test_missing_segment_drops_the_manifest(store, valkey, make_node):
    node = make_node()
    node.put(store)
    valkey.delete(node.segment_key(2))
    with pytest.raises(NodeMissingError), store.open_get(node.node_id) as reader:
        list(reader)
    assert not store.stat([node.node_id])[0].present
    assert not valkey.exists(node.segment_key(0))


def test_wrong_type_of_value_is_a_miss(store, valkey, make_node):
    node = make_node()
    node.put(store)
    valkey.delete(node.segment_key(0))
    valkey.lpush(node.segment_key(0), "x")
    with pytest.raises(NodeMissingError), store.open_get(node.node_id) as reader:
        list(reader)
    assert not store.stat([node.node_id])[0].present


def test_swapped_segments_are_noticed(store, valkey, make_node):
    node = make_node()
    node.put(store)
    valkey.copy(node.segment_key(0), node.segment_key(1), replace=True)
    with pytest.raises(NodeMissingError), store.open_get(node.node_id) as reader:
        list(reader)


@pytest.mark.parametrize("at", [10, 60, -1, -9])
def test_damaged_manifest_is_a_miss(store, valkey, make_node, at):
    node = make_node()
    node.put(store)
    key = f"ckv:{{{node.node_id}}}:m"
    parts = bytearray(valkey.hget(key, "parts"))
    parts[at] ^= 1
    valkey.hset(key, "parts", bytes(parts))
    with pytest.raises(NodeMissingError), store.open_get(node.node_id) as reader:
        list(reader)
    assert not store.stat([node.node_id])[0].present


def test_manifest_of_another_node_is_a_miss(store, valkey, make_node):
    node, other = make_node(), make_node()
    node.put(store)
    other.put(store)
    valkey.copy(f"ckv:{{{other.node_id}}}:m", f"ckv:{{{node.node_id}}}:m", replace=True)
    with pytest.raises(NodeMissingError):
        store.open_get(node.node_id)
    with store.open_get(other.node_id) as reader:
        assert len(list(reader)) == len(other.payloads)


def test_damaged_token_record_counts_as_none(store, valkey, make_node):
    node = make_node()
    node.put(store)
    key = f"ckv:{{{node.node_id}}}:t"
    valkey.set(key, flip_last(valkey.get(key)))
    assert store.token_records([node.node_id]) == [None]
