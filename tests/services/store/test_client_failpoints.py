"""The places on the way of a frame: each is passed, on both paths, and damage is noticed."""

from __future__ import annotations

import pytest

from criticalkv.services.store.process import start_store
from criticalkv.shared import failpoints
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    CorruptNodeError,
    InvalidRequestError,
    NodeMissingError,
    StoreUnavailableError,
)
from criticalkv.shared.failpoints import VARIABLE, Failpoints


@pytest.fixture
def switch(monkeypatch):
    """Turn failpoints on in this process."""

    def on(text):
        points = Failpoints.parse(f"{text};seed=7")
        monkeypatch.setattr(failpoints, "_active", points)
        return points

    return on


@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_frames_that_arrive_damaged_are_a_miss(each_path, make_node, switch, kind):
    node = make_node()
    node.put(each_path)
    points = switch(f"client.get.frame={kind}:1")
    with pytest.raises(CorruptNodeError), each_path.open_get(node.node_id) as reader:
        list(reader)
    assert points.counts == {"client.get.frame": 1}
    assert not each_path.stat([node.node_id])[0].present


@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_frames_that_leave_damaged_are_not_published(store, make_node, switch, kind):
    node = make_node()
    points = switch(f"client.put.frame={kind}:1")
    with pytest.raises(InvalidRequestError):
        node.put(store)
    assert points.counts["client.put.frame"] >= 1
    assert not store.stat([node.node_id])[0].present


def test_failing_calls_are_retried_where_that_is_safe(store, switch):
    points = switch("client.call=error:0.25")
    for _ in range(5):
        store.stat(["0" * 64])
    assert points.counts["client.call"] >= 1
    switch("client.call=error:1")
    with pytest.raises(StoreUnavailableError):
        store.acquire_lease("0" * 64, 1000)


@pytest.mark.parametrize("place", ["store.segment.write", "store.segment.read"])
def test_damage_between_store_and_redis_is_a_miss(tmp_path, monkeypatch, make_node, place):
    monkeypatch.setenv(VARIABLE, f"{place}=flip:1;seed=7")
    config = StoreConfig(address="127.0.0.1:0", data_dir=str(tmp_path), memory_limit_mb=16)
    node = make_node()
    with start_store(config) as process, process.client() as client:
        node.put(client)
        with pytest.raises(NodeMissingError), client.open_get(node.node_id) as reader:
            list(reader)
        assert not client.stat([node.node_id])[0].present
