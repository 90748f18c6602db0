"""The memory of the KV pool: pages of fixed slots, one space for all layers and heads.

Knows no nodes and no sequences. One space, not one per layer: model-wide budgets give
layers very different numbers of entries.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from criticalkv.shared.cache.wire import TORCH_DTYPE
from criticalkv.shared.model.spec import ModelSpec

Ints: TypeAlias = NDArray[np.int32]


class Pages:
    """Pages that are handed out and taken back by number.

    Attributes:
        keys: [num_pages, page_size, head_dim].
        values: like keys.
        positions: int32 [num_pages, page_size].
        page_bytes: of one page: keys, values, positions.

    The memory is reserved at once, and on a CPU only occupied once it is written to.
    Pages that were given back last go out first: they are in memory already.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, limit_bytes: int, page_size: int
    ) -> None:
        dtype = TORCH_DTYPE[spec.dtype]
        self.page_size = page_size
        self.page_bytes = page_size * (2 * spec.head_dim * dtype.itemsize + 4)
        self.total = max(1, limit_bytes // self.page_bytes)
        shape = (self.total, page_size, spec.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.positions = torch.empty(shape[:2], dtype=torch.int32, device=device)
        self._stack: Ints = np.arange(self.total - 1, -1, -1, dtype=np.int32)
        self._top = self.total
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Pages nobody has."""
        return self._top

    def take(self, count: int) -> Ints | None:
        """Return int32 [count] page numbers, or None if there are not so many."""
        with self._lock:
            if count > self._top:
                return None
            self._top -= count
            return self._stack[self._top : self._top + count].copy()

    def give_back(self, pages: Ints) -> None:
        """Take pages back."""
        with self._lock:
            end = self._top + pages.size
            assert end <= self.total, "pages were given back twice"
            self._stack[self._top : end] = pages.ravel()
            self._top = end

    def write(self, rows: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Put entries into slots.

        Args:
            rows: int64 [n], page · page_size + slot, on the pages' device.
            keys: [n, head_dim].
            values: like keys.
            positions: integers [n].
        """
        self.keys.flatten(0, 1).index_copy_(0, rows, keys)
        self.values.flatten(0, 1).index_copy_(0, rows, values)
        self.positions.flatten().index_copy_(0, rows, positions.to(torch.int32))

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies (keys [n, head_dim], values, positions [n]) of slots."""
        return (
            self.keys.flatten(0, 1)[rows],
            self.values.flatten(0, 1)[rows],
            self.positions.flatten()[rows],
        )
