"""Clocks of store servers an hour apart: times are the one Redis's, or count from now."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey_servers import Server

from criticalkv.services.store.process import StoreProcess, start_store
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.store_client import StoreClient

HOUR_S = 3600
SHIFTED = """
import time
wall, wall_ns = time.time, time.time_ns
time.time = lambda: wall() + {shift}
time.time_ns = lambda: wall_ns() + {shift} * 10**9
"""


@pytest.fixture
def ahead_and_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[StoreClient, StoreClient]]:
    """Clients of two servers on one Redis, whose clocks are an hour wrong either way."""
    with Server(tmp_path) as redis:
        config = StoreConfig(
            address="127.0.0.1:0",
            redis_url=redis.url,
            memory_limit_mb=16,
            lease_ttl_s=2,
            read_deadline_s=2.0,
            janitor_interval_s=0.1,
        )
        with (
            _store(config, HOUR_S, tmp_path, monkeypatch) as ahead,
            _store(config, -HOUR_S, tmp_path, monkeypatch) as behind,
            ahead.client() as one,
            behind.client() as other,
        ):
            yield one, other


def _store(
    config: StoreConfig, shift: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreProcess:
    # Python runs a module of this name before anything else.
    place = folder / str(shift)
    place.mkdir()
    (place / "sitecustomize.py").write_text(SHIFTED.format(shift=shift))
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=":")
    clock = [sys.executable, "-c", "import time; print(time.time())"]
    shown = float(subprocess.run(clock, capture_output=True, check=True).stdout)
    assert abs(shown - time.time() - shift) < 60
    return start_store(config)


def test_a_lease_is_one_for_all_and_ends_in_time(ahead_and_behind) -> None:
    for holder, other in (ahead_and_behind, ahead_and_behind[::-1]):
        node_id = f"{id(holder):064x}"
        assert holder.acquire_lease(node_id, ttl_ms=1500).acquired
        assert not other.acquire_lease(node_id, ttl_ms=1500).acquired
        deadline = time.monotonic() + 10
        while not other.acquire_lease(node_id, ttl_ms=1500).acquired:
            assert time.monotonic() < deadline, "the lease never ended"
            time.sleep(0.05)


def test_nodes_live_as_long_as_they_should(ahead_and_behind, make_node) -> None:
    """No janitor takes another server's node or put for an old one, or keeps a dead one."""
    ahead, behind = ahead_and_behind
    for writer, reader in ((ahead, behind), (behind, ahead)):
        node, short = make_node(), make_node()
        with writer.open_put(node.node_id, node.manifest.attempt) as put:
            for payload in node.payloads:
                put.send(payload)
            time.sleep(0.5)  # several rounds of both janitors
            put.commit(node.manifest, node.record, ttl_ms=HOUR_S * 1000 // 2)
        short.put(writer, ttl_ms=1000)
        time.sleep(0.5)
        with reader.open_get(node.node_id) as read:
            assert [bytes(payload) for _, payload in read] == node.payloads
        left = reader.stat([node.node_id])[0].ttl_ms
        assert 0.9 < left / (HOUR_S * 1000 / 2) <= 1
        deadline = time.monotonic() + 10
        while reader.stat([short.node_id])[0].present:
            assert time.monotonic() < deadline, "the node never expired"
            time.sleep(0.05)
