"""Means with 95 % confidence intervals, by bootstrap over cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over cases and its 95 % percentile interval."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Estimate the mean of samples; the same samples give the same interval."""
        return cls.across([samples])

    @classmethod
    def across(cls, groups: Sequence[Sequence[float]]) -> Estimate:
        """Estimate the mean of the groups' means; each group is resampled by itself."""
        random, values = np.random.default_rng(0), [np.asarray(g, np.float64) for g in groups]
        drawn = np.mean([x[_draws(random, len(x))].mean(1) for x in values], 0)
        return cls._from(float(np.mean([x.mean() for x in values])), drawn, sum(map(len, values)))

    @classmethod
    def ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
        """Estimate a sum over a sum; both are of the same cases."""
        above, below = (np.asarray(x, np.float64) for x in (numerators, denominators))
        draws = _draws(np.random.default_rng(0), len(above))
        drawn = above[draws].sum(1) / below[draws].sum(1)
        return cls._from(float(above.sum() / below.sum()), drawn, len(above))

    @classmethod
    def _from(cls, mean: float, drawn: Values, count: int) -> Estimate:
        low, high = np.percentile(drawn, [2.5, 97.5])
        return cls(mean, float(low), float(high), count)

    def exp(self) -> Estimate:
        """Return e to the mean, and to the interval's ends."""
        ends = math.exp(self.low), math.exp(self.high)
        return Estimate(math.exp(self.mean), *ends, self.count)

    def as_json(self) -> dict[str, float | int]:
        """For reports."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "cases": self.count}


def _draws(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw cases, with repetition, once for each resample."""
    return random.integers(0, count, (RESAMPLES, count))
