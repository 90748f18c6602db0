"""Means with 95 % confidence intervals, by bootstrap over cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


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
        values = np.asarray(samples, dtype=np.float64)
        draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
        low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
        return cls(float(values.mean()), float(low), float(high), len(values))

    def as_json(self) -> dict[str, float | int]:
        """For reports."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "cases": self.count}
