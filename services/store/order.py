"""The order of sacrifice: what makes one node go before another.

The books sort nodes by `clock + value`, the longest unused first among equals. With the
clock "age", the value of the last node that went, what was once popular grows old: this
is GreedyDual-Size-Frequency. With "time" and no value it is plain LRU.
"""

from __future__ import annotations

from typing import Literal, Protocol


class Order(Protocol):
    """Ranks nodes.

    Attributes:
        clock: what is added to a node's value at each use: "age" or "time", in µs.
        shrinks: whether nodes lose their top tiers before any node goes.
    """

    clock: Literal["age", "time"]
    shrinks: bool

    def value(self, cost: float, hits: int, nbytes: int) -> float:
        """Return what a node is worth.

        Args:
            cost: milliseconds of prefill, or tokens where that is unknown.
            hits: reads so far.
            nbytes: payload bytes.
        """
        ...


class ValueOrder:
    """Cost to recompute × (1 + hits) ÷ bytes, with ageing. Nodes shrink first."""

    clock: Literal["age", "time"] = "age"
    shrinks = True

    def value(self, cost: float, hits: int, nbytes: int) -> float:
        """See Order."""
        return cost * (1 + hits) / max(nbytes, 1)


class RecencyOrder:
    """The longest unused node goes first, whole: what other stores do."""

    clock: Literal["age", "time"] = "time"
    shrinks = False

    def value(self, cost: float, hits: int, nbytes: int) -> float:  # noqa: ARG002
        """See Order."""
        return 0.0
