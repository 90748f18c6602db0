"""The store benchmark measures what it says, and a short run has all parts."""

from __future__ import annotations

import json

import pytest

from criticalkv.services.bench import store, store_replay
from criticalkv.services.bench.store import Extent
from criticalkv.services.bench.store_path import KINDS, Case
from criticalkv.services.bench.trace import BLOCK_TOKENS, MOONCAKE_FILE, read_blocks
from criticalkv.shared.errors import ConfigError


@pytest.fixture
def _tiny(monkeypatch):
    extent = Extent(
        cases=(Case(1, 2, 1), Case(store.HEADLINE_MIB, 1, 1)),
        nodes=(20, 100),
        calls=5,
        kills=1,
        cancels=20,
        requests=2,
        share=0.5,
    )
    monkeypatch.setattr(store, "QUICK", extent)


@pytest.mark.usefixtures("_tiny")
def test_report_without_the_trace(tmp_path, monkeypatch):
    monkeypatch.delenv("CRITICALKV_DATA", raising=False)
    report = store.run(quick=True, data=None)
    report.write(tmp_path / "store.json")
    body = json.loads((tmp_path / "store.json").read_text())
    assert body["headline"].keys() == store.MEANING.keys()
    assert body["headline"].pop("hit_ratio_vs_lru") is None
    assert "CRITICALKV_DATA" in body["details"]["replay"]["reason"]
    assert all(0 < ratio < 5 for ratio in body["headline"].values())
    case = body["details"]["1_mib_2_streams"]
    assert case["gb_s"].keys() == set(KINDS)
    assert case["peak_mib"]["valkey"] > 1
    assert body["samples"]["1_mib_2_streams"]["direct_get"][0] > 0
    assert body["details"]["stat_nodes"].keys() == {"20", "100"}
    assert all(seconds < 60 for seconds in body["details"]["recovery"]["median_s"].values())
    assert body["details"]["connect_and_cancel"]["in_flight_zero_after_s"] is not None


def test_replay_counts_what_is_read_in_a_row_at_a_good_tier(tmp_path):
    # The second request finds the first one's blocks; the fourth one's root is evicted
    # by nobody, so all of it is there.
    lines = [[1, 2, 3], [1, 2, 3, 4], [5], [1, 2, 9]]
    rows = [
        {
            "timestamp": at,
            "input_length": BLOCK_TOKENS * len(blocks),
            "output_length": 1,
            "hash_ids": blocks,
        }
        for at, blocks in enumerate(lines)
    ]
    (tmp_path / MOONCAKE_FILE).write_text("\n".join(map(json.dumps, rows)))
    trace = read_blocks(tmp_path, 10)
    assert trace == list(map(tuple, lines))
    assert read_blocks(tmp_path, 2) == trace[:2]
    found = store_replay.measure(trace, share=50.0)  # far more room than needed
    for order in store_replay.ORDERS:
        assert found[order]["wanted"] == 11
        assert found[order]["hits"] == 5
        assert found[order]["tiers_served"] == {"0.4": 5}
    assert found["ratio"] == 1


def test_replay_under_pressure_shrinks_by_value_and_evicts_by_lru():
    trace = [[block] for block in range(60)] * 2
    found = store_replay.measure(trace, share=0.7)  # 42 of 60 fit at the highest tier
    assert found["lru"]["hits"] == 0  # a cycle longer than the cache: the known worst case
    assert found["value"]["hits"] > 40
    assert found["value"]["tiers_served"].get("0.2", 0) > 0


def test_a_bad_line_is_named_without_an_option_that_there_is_not(tmp_path):
    (tmp_path / MOONCAKE_FILE).write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="line 1: ") as caught:
        read_blocks(tmp_path, 1)
    assert "--skip-bad" not in caught.value.message


def test_missing_folder_is_told(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        read_blocks(tmp_path / "none", 1)
