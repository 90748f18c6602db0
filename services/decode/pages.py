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

from criticalkv.kernels.group_layout import GroupLayout
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

    A page may hold quantized groups instead of entries: the key bytes of several, back to
    back, where its keys would be, their value bytes where its values would be.

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

    @property
    def key_bytes(self) -> Tensor:
        """The keys' memory, uint8 [num_pages, bytes]."""
        return self.keys.view(torch.uint8).flatten(1)

    @property
    def value_bytes(self) -> Tensor:
        """The values' memory, uint8 [num_pages, bytes]."""
        return self.values.view(torch.uint8).flatten(1)

    def write_groups(
        self, numbers: Tensor, key_groups: Tensor, value_groups: Tensor, layout: GroupLayout
    ) -> None:
        """Put quantized groups into pages.

        Args:
            numbers: integers [n], page · groups per page + place, on the pages' device.
            key_groups: uint8 [n, layout.key_bytes].
            value_groups: uint8 [n, layout.value_bytes].
            layout: of the groups.
        """
        keys, values, at = self._groups(numbers, layout)
        keys[at], values[at] = key_groups, value_groups

    def read_groups(self, numbers: Tensor, layout: GroupLayout) -> tuple[Tensor, Tensor]:
        """Return copies of groups, as `write_groups` takes them."""
        keys, values, at = self._groups(numbers, layout)
        return keys[at], values[at]

    def _groups(
        self, numbers: Tensor, layout: GroupLayout
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Views [num_pages, groups per page, bytes] of the memory, and where numbers point."""
        memory = ((self.key_bytes, layout.key_bytes), (self.value_bytes, layout.value_bytes))
        count = min(of_page.shape[1] // size for of_page, size in memory)
        keys, values = (
            of_page[:, : count * size].view(-1, count, size) for of_page, size in memory
        )
        at = numbers.long()
        return keys, values, (at // count, at % count)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies (keys [n, head_dim], values, positions [n]) of slots."""
        return (
            self.keys.flatten(0, 1)[rows],
            self.values.flatten(0, 1)[rows],
            self.positions.flatten()[rows],
        )
