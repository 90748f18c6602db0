"""Plots show a report's own numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.evaluation.plots import (
    by_turn,
    draw,
    figures,
    needle_grid,
    needle_map,
    over_bytes,
)

PNG = b"\x89PNG\r\n"


def estimate(mean: float, spread: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - spread, "high": mean + spread, "cases": 9}


def row(policy: str, tier: str, score: float, kl: float | None, **more: Any) -> dict[str, Any]:
    return {
        "task": "seek",
        "length": 100,
        "policy": policy,
        "tier": tier,
        "score": estimate(score, 5),
        "kl": None if kl is None else estimate(kl, 0.01),
        "kept": float(tier),
        "kept_bytes": 1e7 * float(tier),
        "turns": [score],
        **more,
    }


ROWS = [
    row("full", "1", 90, 0),
    row("snapkv", "0.1", 20, 2.0),
    row("snapkv", "0.4", 60, 1.0),
    row("default", "0.1", 70, 0.3),
    row("default", "0.4", 85, 0.02),
]


def place(length: int, depth: float, score: float, policy: str = "snapkv") -> dict[str, Any]:
    return {"policy": policy, "tier": "0.1", "length": length, "depth": depth, "score": score}


PLACES = [place(200, 0.5, 30), place(100, 0.5, 10), place(100, 0, 20), place(200, 1, 40)]


def lines(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines
    }


def test_quality_over_bytes() -> None:
    score, kl = over_bytes(ROWS, "score").axes
    found = lines(score)
    assert list(found) == ["full", "snapkv", "default"]
    assert found["snapkv"] == ([1, 4], [20, 60])
    assert found["default"] == ([1, 4], [70, 85])
    assert found["full"][1] == [90, 90]
    assert score.get_ylabel() == "score"
    assert lines(kl)["snapkv"] == ([1, 4], [2.0, 1.0])
    assert lines(kl)["default"] == ([1, 4], [0.3, 0.02])
    band = score.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(1, 15), (1, 25), (4, 55), (4, 65)}


def test_without_kl_there_is_one_axis() -> None:
    without = [row(of["policy"], of["tier"], 50, None) for of in ROWS]
    assert len(over_bytes(without, "score").axes) == 1
    only_full = [ROWS[0], *without[1:]]
    assert len(over_bytes(only_full, "perplexity").axes) == 1


def test_turn_by_turn() -> None:
    (axis,) = by_turn(
        [row("full", "1", 0, 0, turns=[90, 80, 70]), row("snapkv", "0.1", 0, 1, turns=[50, 10])]
    ).axes
    assert lines(axis) == {
        "full": ([1, 2, 3], [90, 80, 70]),
        "snapkv, 0.1": ([1, 2], [50, 10]),
    }


def test_needles_by_place() -> None:
    lengths, depths, grid = needle_grid(PLACES)
    assert (lengths, depths) == ([100, 200], [0, 0.5, 1])
    assert grid[0][0] == 20
    assert grid[1] == [10, 30]
    assert grid[2][1] == 40
    assert math.isnan(grid[0][1])
    assert math.isnan(grid[2][0])
    axis = needle_map(PLACES).axes[0]
    assert axis.images[0].get_array()[1].tolist() == [10, 30]
    assert axis.images[0].get_clim() == (0, 100)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["100", "200"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["0", "50", "100"]


@pytest.fixture
def report() -> dict[str, Any]:
    other = [of | {"task": "count: it", "turns": [1, 2], "length": None} for of in ROWS]
    places = [*PLACES, place(100, 0, 1, "a+b:c=1")]
    return {"details": {"measure": "score", "table": [*ROWS, *other], "places": places}}


def test_every_figure_has_its_rows(report: dict[str, Any]) -> None:
    found = dict(figures(report))
    assert list(found) == [
        "bytes-seek-100",
        "bytes-count__it",
        "turns-count__it",
        "needle-snapkv-0.1",
        "needle-a+b_c=1-0.1",
    ]
    assert found["bytes-seek-100"].get_suptitle() == "seek, 100 tokens"
    assert len(found["turns-count__it"].axes[0].lines) == 5


def test_files_are_written(report: dict[str, Any], tmp_path: Path) -> None:
    paths = draw(report, tmp_path / "new")
    assert len(paths) == 5
    assert all(path.read_bytes().startswith(PNG) for path in paths)
