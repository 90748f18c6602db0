"""Growing KV of one layer: the tokens that came since it was last emptied."""

from __future__ import annotations

import torch
from torch import Tensor


class Tail:
    """Keys and values [num_kv_heads, capacity, head_dim], the first `length` in use.

    Args:
        limit: most tokens that will ever be in it; None = unknown.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.keys = torch.empty(0, 0, 0)
        self.values = torch.empty(0, 0, 0)
        self.length = 0
        self._limit = limit

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens; return views of all keys and values so far."""
        end = self.length + key.shape[1]
        if end > self.keys.shape[1] or self.length == 0:
            self.keys = self._grown(self.keys, key, end)
            self.values = self._grown(self.values, value, end)
        self.keys[:, self.length : end] = key
        self.values[:, self.length : end] = value
        self.length = end
        return self.keys[:, :end], self.values[:, :end]

    def _grown(self, old: Tensor, like: Tensor, needed: int) -> Tensor:
        # Doubling keeps appends amortised O(1).
        capacity = max(64, 2 * needed)
        if self._limit is not None:
            capacity = max(needed, min(capacity, self._limit))
        new = like.new_empty(like.shape[0], capacity, like.shape[2])
        if self.length:
            new[:, : self.length] = old[:, : self.length]
        return new
