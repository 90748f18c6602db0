"""The memory slope: a leak is seen, noise is not taken for one, and too little is said."""

from __future__ import annotations

import random

import pytest

from criticalkv.services.chaos.slope import MIB, RSS_PER_DATA, beyond_data, per_minute, slope


def series(
    minutes: int, mib_per_hour: float, noise: float = 0.0
) -> tuple[list[float], list[float]]:
    drawn = random.Random(1)
    times = [2.0 * i for i in range(30 * minutes)]
    rss = [MIB * (500 + mib_per_hour * t / 3600 + drawn.gauss(0, noise)) for t in times]
    return times, rss


@pytest.mark.parametrize("leak", [0.0, 3.0, 12.0, 200.0])
def test_a_leak_is_measured(leak: float) -> None:
    found = slope(*series(20, leak, noise=0.5), warm_up_s=120, limit=8)
    assert found.mib_per_hour == pytest.approx(leak, abs=1.5)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= leak + 0.5
    assert found.high >= leak - 0.5
    assert found.holds(8) is (leak <= 8)


def test_growth_while_warming_up_does_not_count() -> None:
    times, rss = series(20, 0.0)
    rss = [size + (MIB * t if t < 300 else 300 * MIB) for t, size in zip(times, rss, strict=True)]
    assert slope(times, rss, warm_up_s=300, limit=8).mib_per_hour == pytest.approx(0, abs=0.1)
    assert slope(times, rss, warm_up_s=0, limit=8).holds(8) is False


@pytest.mark.parametrize("minutes", [0, 1, 11])
def test_a_short_run_is_not_judged(minutes: int) -> None:
    found = slope(*series(minutes, 0.0), warm_up_s=120, limit=8)
    assert found.mib_per_hour is None
    assert found.holds(8) is None
    assert "at least 10 are needed" in found.not_judged


def test_a_noisy_run_is_not_judged() -> None:
    found = slope(*series(15, 5.0, noise=80.0), warm_up_s=120, limit=8)
    assert found.mib_per_hour is None
    assert "too noisy" in found.not_judged


def test_noise_does_not_hide_a_large_leak() -> None:
    assert slope(*series(20, 500.0, noise=20.0), warm_up_s=120, limit=8).holds(8) is False


def test_data_are_no_leak_and_a_leak_beyond_them_is_seen() -> None:
    times, leaking = series(20, 20.0, noise=0.5)
    data = [MIB * (40 + 180 * t / 3600) for t in times]
    grown = [RSS_PER_DATA * (held - data[0]) for held in data]
    kept = [500 * MIB + more for more in grown]
    assert slope(times, kept, warm_up_s=120, limit=8).holds(8) is False
    own = slope(times, beyond_data(kept, data), warm_up_s=120, limit=8)
    assert own.mib_per_hour == pytest.approx(0, abs=0.01)
    both = [size + more for size, more in zip(leaking, grown, strict=True)]
    found = slope(times, beyond_data(both, data), warm_up_s=120, limit=8)
    assert found.mib_per_hour == pytest.approx(20, abs=1.5)
    assert found.holds(8) is False


def test_what_goes_away_is_added_back() -> None:
    assert beyond_data([100.0, 100.0], [50.0, 0.0]) == [100.0, 100.0 + RSS_PER_DATA * 50]
    assert beyond_data([], []) == []


def test_means_per_minute() -> None:
    times = [100.0, 130.0, 159.0, 160.0, 290.0]
    sizes = [MIB * size for size in (1.0, 2.0, 3.0, 8.0, 5.0)]
    assert per_minute(times, sizes, 100.0) == [2.0, 8.0, None, 5.0]
    assert per_minute([], [], 0.0) == []
