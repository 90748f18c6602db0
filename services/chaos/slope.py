"""Does a process grow? A slope with its uncertainty, or why there is none.

Of a database the growth beyond its data: what it is given to keep is no leak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIB = 2**20
HOUR_S = 3600.0
BIN_S = 60.0
MIN_BINS = 10
"""Minutes after warm-up from which on a slope is judged."""
NORMAL_95 = 1.96
RSS_PER_DATA = 1.06
"""Memory that a byte of Valkey's data takes: its allocator's own bytes in each block are not
among the data. Measured with token records, handles, answers and aliases: 1.05 to 1.07."""


@dataclass(frozen=True)
class Slope:
    """Growth of one process.

    Attributes:
        mib_per_hour: least squares over means of a minute; None = not judged.
        low, high: its 95 % interval, with correlated residuals allowed for.
        not_judged: why; "" = judged.
    """

    mib_per_hour: float | None = None
    low: float | None = None
    high: float | None = None
    not_judged: str = ""

    def holds(self, limit: float) -> bool | None:
        """Whether growth stays within a limit; None if that cannot be said."""
        return None if self.mib_per_hour is None else self.mib_per_hour <= limit


def slope(times: Sequence[float], rss: Sequence[float], *, warm_up_s: float, limit: float) -> Slope:
    """Fit a line to a process's memory.

    Args:
        times: seconds, ascending.
        rss: bytes.
        warm_up_s: samples before this are left out.
        limit: MiB per hour; an interval that is wider than this says nothing.
    """
    hours, mib = _minutes(times, rss, warm_up_s)
    if len(hours) < MIN_BINS:
        return Slope(
            not_judged=f"{len(hours)} minutes after warm-up, at least {MIN_BINS} are needed"
        )
    centred = hours - hours.mean()
    value = float(centred @ mib / (centred @ centred))
    error = _error(centred, mib - mib.mean() - value * centred)
    low, high = value - NORMAL_95 * error, value + NORMAL_95 * error
    if low <= limit < high and high - low > limit:
        return Slope(not_judged=f"too noisy: between {low:.1f} and {high:.1f} MiB/h")
    return Slope(value, low, high)


def beyond_data(rss: Sequence[float], data: Sequence[float]) -> list[float]:
    """Return a database's memory without what its data grew by since the first sample.

    Args:
        rss, data: bytes, at the same moments.
    """
    return [size - RSS_PER_DATA * (held - data[0]) for size, held in zip(rss, data, strict=True)]


def per_minute(times: Sequence[float], rss: Sequence[float], begin_s: float) -> list[float | None]:
    """Return means of each minute since `begin_s`, MiB; None = no sample in it."""
    minutes: dict[int, list[float]] = defaultdict(list)
    for at, size in zip(times, rss, strict=True):
        minutes[int((at - begin_s) // BIN_S)].append(size / MIB)
    return [
        round(float(np.mean(minutes[minute])), 1) if minute in minutes else None
        for minute in range(max(minutes, default=-1) + 1)
    ]


def _minutes(
    times: Sequence[float], rss: Sequence[float], warm_up_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return means per minute: hours, MiB."""
    at, size = np.asarray(times, dtype=float), np.asarray(rss, dtype=float)
    kept = at >= warm_up_s
    at, size = at[kept], size[kept]
    if not len(at):
        return at, size
    bins = ((at - at[0]) // BIN_S).astype(int)
    whole = [b for b in range(bins[-1] + 1) if (bins == b).any()]
    return (
        np.array([at[bins == b].mean() / HOUR_S for b in whole]),
        np.array([size[bins == b].mean() / MIB for b in whole]),
    )


def _error(centred: np.ndarray, residuals: np.ndarray) -> float:
    """Standard error of the slope after Newey and West: neighbours are alike."""
    scores = centred * residuals
    n = len(scores)
    lags = int(4 * (n / 100) ** (2 / 9)) + 1
    total = float(scores @ scores)
    for lag in range(1, min(lags, n - 1) + 1):
        total += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    return float(np.sqrt(max(total, 0.0) * n / (n - 2)) / (centred @ centred))
