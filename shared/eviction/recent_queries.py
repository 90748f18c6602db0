"""The last queries of a layer, as its attention got them: after RoPE at their positions."""

from __future__ import annotations

import torch
from torch import Tensor

SLACK = 32
"""Latest tokens that may be taken back, with `limit` queries left before them."""


class RecentQueries:
    """The last `limit` queries, and `SLACK` more.

    Args:
        limit: most queries that are asked for at once.
    """

    def __init__(self, limit: int) -> None:
        self._held = limit + SLACK
        self._rows = torch.empty(0, 0, 0)
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, room for more included."""
        return self._rows.numel() * self._rows.element_size()

    def append(self, query: Tensor) -> None:
        """Add [num_q_heads, T, head_dim]."""
        query = query[:, -self._held :]
        count = query.shape[1]
        if self.length + count > self._rows.shape[1]:
            self._make_room(query)
        self._rows[:, self.length : self.length + count] = query
        self.length += count

    def _make_room(self, query: Tensor) -> None:
        kept = self.last(min(self.length, self._held - query.shape[1]))
        self._rows = query.new_empty(query.shape[0], self._held + SLACK, query.shape[2])
        self.length = kept.shape[1]
        if self.length:
            self._rows[:, : self.length] = kept

    def last(self, count: int, cut: int = 0) -> Tensor:
        """Return the last `count`, or as many as there are, before the last `cut`."""
        end = self.length - cut
        return self._rows[:, max(0, end - count) : end]

    def forget(self, count: int) -> None:
        """Keep the last `count` only."""
        kept = self.last(count).clone()
        self._rows, self.length = kept, kept.shape[1]
