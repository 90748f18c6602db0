"""Where two runs may draw different tokens: how far each draw was from being another one.

A batch's logits differ in their last bits with what else is in it. A token that is drawn
just beside another may then become that one, and all after it differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from criticalkv.services.decode import sampling

TOLERANCE = 1e-4
"""Logits this near to one another may change their order."""


@contextmanager
def noting_margins() -> Iterator[list[float]]:
    """Note, for every token that is drawn, how near its logit is to another's in rank."""
    margins: list[float] = []
    pick = sampling.Sampler.pick

    def noting(self: Any, row: sampling.Row) -> int:
        token = pick(self, row)
        gaps = np.abs(row - row[token])
        gaps[token] = np.inf
        margins.append(float(gaps.min()))
        return token

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling.Sampler, "pick", noting)
        yield margins


def first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    """Index of the first token that differs; None if there is none."""
    pairs = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(one), len(other)) if at is None and len(one) != len(other) else at
