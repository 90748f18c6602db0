"""The groups that a tier table asks for. No torch here: the store checks manifests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from criticalkv.kernels.group_layout import ROWS

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupTable:
    """Groups of one layer, head after head, a head's tiers ascending, in rank order.

    Attributes:
        fills: int64 [N], entries of each group.
        tiers: int64 [N], the tier that adds each group.
        head_cu: int64 [num_kv_heads + 1], cumulative groups per head from 0.
    """

    fills: Ints
    tiers: Ints
    head_cu: Ints

    @classmethod
    def of(cls, lens: Ints) -> GroupTable:
        """Cut what each tier adds to each head into groups.

        Args:
            lens: int64 [tiers, num_kv_heads], entries per head, ascending along tiers.
        """
        added = np.diff(lens, axis=0, prepend=0).T
        counts = -(-added // ROWS)
        cell = np.repeat(np.arange(counts.size), counts.ravel())
        place = np.arange(cell.size) - (counts.cumsum() - counts.ravel())[cell]
        fills = np.minimum(ROWS, added.ravel()[cell] - ROWS * place)
        head_cu = np.concatenate(([0], counts.sum(axis=1).cumsum()))
        return cls(fills, cell % max(1, lens.shape[0]), head_cu)

    @property
    def starts(self) -> Ints:
        """First entry of each group, int64 [N], in the layer's rank order."""
        out: Ints = self.fills.cumsum() - self.fills
        return out

    def of_tier(self, tier: int) -> Ints:
        """Numbers of the groups that a tier adds, ascending: as segments hold them."""
        return np.flatnonzero(self.tiers == tier)
