"""Where a node's entries lie in its pages, head by head.

A place is what a table names: of a raw node a page, which is one head's alone; of a
quantized one a group. As many groups as fit lie in a page, one after another, whatever
their heads and layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.shared.cache.group_table import GroupTable
from criticalkv.shared.cache.manifest import ITEMSIZE, Manifest
from criticalkv.shared.cache.quantized import QuantizedLayer
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.chain import read_groups, read_layers
from criticalkv.shared.errors import PoolLimitError
from criticalkv.shared.node_store import Reader

Indexes: TypeAlias = NDArray[np.int64]


class Places(Protocol):
    """Places of one node, held at one tier."""

    def counts(self, tier: str) -> Ints:
        """Places of a view per head, int32 [layers, kv_heads]."""
        ...

    def of(self, tier: str, layer: Indexes, head: Indexes, place: Indexes) -> tuple[Ints, Ints]:
        """Return what a table says of a head's places: numbers and fills, int32 [n] each."""
        ...

    def fill(self, pages: Pages, reader: Reader) -> Iterator[int]:
        """Write a read's layers into pages; yield how many are there, after each."""
        ...

    def copied(self, pages: Pages, layer: int) -> RaggedLayer:
        """Return a copy of a layer's entries, on the CPU, in the pool's dtype."""
        ...


class PagePlaces:
    """Pages of a raw node: a head's entries begin a page and fill the next ones.

    Args:
        manifest: of a raw node.
        tier: highest tier held.
        page_size: slots per page.
        pages: int32, as many as `pages_needed` says.
    """

    def __init__(self, manifest: Manifest, tier: str, page_size: int, pages: Ints) -> None:
        self._manifest = manifest
        self._size = page_size
        self._pages = pages
        self._lens = lens_at(manifest, tier)
        self._counts = _pages_of(self._lens, page_size)
        ends = self._counts.ravel().cumsum()
        self._first = (ends - self._counts.ravel()).reshape(self._lens.shape)

    def counts(self, tier: str) -> Ints:
        """See Places."""
        return _pages_of(lens_at(self._manifest, tier), self._size)

    def of(self, tier: str, layer: Indexes, head: Indexes, place: Indexes) -> tuple[Ints, Ints]:
        """See Places."""
        pages: Ints = self._pages[self._first[layer, head] + place]
        lens = lens_at(self._manifest, tier)[layer, head]
        fills: Ints = np.clip(lens - self._size * place, 0, self._size).astype(np.int32)
        return pages, fills

    def fill(self, pages: Pages, reader: Reader) -> Iterator[int]:
        """See Places."""
        for index, layer in enumerate(read_layers(reader)):
            self.write(pages, index, layer)
            yield index + 1

    def write(self, pages: Pages, index: int, layer: RaggedLayer) -> None:
        """Write one layer."""
        device = pages.keys.device
        parts = (layer.keys.to(device), layer.values.to(device), layer.positions.to(device))
        pages.write(self._rows(index).to(device), *parts)

    def copied(self, pages: Pages, layer: int) -> RaggedLayer:
        """See Places."""
        keys, values, positions = pages.read(self._rows(layer).to(pages.keys.device))
        cu_seqlens = cu_seqlens_of(self._lens[layer].tolist())
        return RaggedLayer(keys, values, positions, cu_seqlens).cpu()

    def _rows(self, layer: int) -> Tensor:
        """The slots of a layer's entries, head after head; int64 [Σ len]."""
        rows = [self._head_rows(layer, h) for h in range(self._lens.shape[1])]
        return torch.from_numpy(np.concatenate(rows))

    def _head_rows(self, layer: int, head: int) -> Indexes:
        begin, count = self._first[layer, head], self._counts[layer, head]
        pages = self._pages[begin : begin + count].astype(np.int64) * self._size
        out: Indexes = (pages[:, None] + np.arange(self._size)).ravel()
        return out[: self._lens[layer, head]]


class GroupPlaces:
    """Groups of a quantized node, in the order of layers and heads.

    A head's groups are those of its tiers, ascending, so that a smaller tier's are the
    first of them. Arguments as of PagePlaces.
    """

    def __init__(self, manifest: Manifest, tier: str, page_size: int, pages: Ints) -> None:
        lens = manifest.lens[: manifest.tier_index(tier) + 1]
        table = GroupTable.of(lens.reshape(lens.shape[0], -1))
        per_page = groups_per_page(manifest, page_size)
        group = np.arange(table.fills.size)
        self._manifest = manifest
        self._layout = _layout_of(manifest)
        self._numbers: Ints = pages[group // per_page] * per_page + group % per_page
        self._numbers = self._numbers.astype(np.int32)
        self._fills: Ints = table.fills.astype(np.int32)
        self._head_cu = table.head_cu

    def counts(self, tier: str) -> Ints:
        """See Places."""
        return _groups_at(self._manifest, tier)

    def of(self, tier: str, layer: Indexes, head: Indexes, place: Indexes) -> tuple[Ints, Ints]:
        """See Places."""
        del tier  # a smaller view has fewer groups, and no other ones
        group = self._head_cu[layer * self._manifest.num_kv_heads + head] + place
        return self._numbers[group], self._fills[group]

    def fill(self, pages: Pages, reader: Reader) -> Iterator[int]:
        """See Places."""
        for index, layer in enumerate(read_groups(reader)):
            self.write(pages, index, layer)
            yield index + 1

    def write(self, pages: Pages, index: int, layer: QuantizedLayer) -> None:
        """Write one layer."""
        layer = layer.to(pages.keys.device)
        numbers = torch.from_numpy(self._numbers[self._groups(index)]).to(pages.keys.device)
        pages.write_groups(numbers, layer.key_groups, layer.value_groups, self._layout)

    def copied(self, pages: Pages, layer: int) -> RaggedLayer:
        """See Places."""
        groups, device = self._groups(layer), pages.keys.device
        numbers, fills = (
            torch.from_numpy(x[groups]).to(device) for x in (self._numbers, self._fills)
        )
        keys, values = pages.read_groups(numbers, self._layout)
        heads = self._manifest.num_kv_heads
        cu = self._head_cu[layer * heads : (layer + 1) * heads + 1] - groups.start
        held = QuantizedLayer(
            keys, values, fills, torch.from_numpy(cu.astype(np.int32)), self._layout
        )
        return held.ragged(pages.keys.dtype).cpu()

    def _groups(self, layer: int) -> slice:
        heads = self._manifest.num_kv_heads
        return slice(*self._head_cu[[layer * heads, (layer + 1) * heads]].tolist())


def places_of(manifest: Manifest, tier: str, page_size: int, pages: Ints) -> Places:
    """Spread a node over its pages; arguments as of PagePlaces."""
    kind = GroupPlaces if manifest.layout else PagePlaces
    return kind(manifest, tier, page_size, pages)


def pages_needed(manifest: Manifest, tier: str, page_size: int) -> int:
    """Return the pages that a node at a stored tier takes.

    Raises:
        PoolLimitError: see `groups_per_page`.
    """
    if not manifest.layout:
        return int(_pages_of(lens_at(manifest, tier), page_size).sum())
    return -(-int(_groups_at(manifest, tier).sum()) // groups_per_page(manifest, page_size))


def groups_per_page(manifest: Manifest, page_size: int) -> int:
    """Return how many groups of a quantized node a page holds.

    Raises:
        PoolLimitError: if not even one fits.
    """
    layout = _layout_of(manifest)
    row = manifest.head_dim * ITEMSIZE[manifest.identity.dtype]
    largest = max(layout.key_bytes, layout.value_bytes)
    if page_size * row < largest:
        raise PoolLimitError(
            f"a page of {page_size} entries is too small for KV stored as "
            f"{manifest.identity.codec}: set decode.page_size to {-(-largest // row)} or more"
        )
    return page_size * row // largest


def lens_at(manifest: Manifest, tier: str) -> Ints:
    """Return entries per head at a stored tier, int32 [layers, kv_heads]."""
    out: Ints = manifest.lens[manifest.tier_index(tier)].astype(np.int32)
    return out


def _layout_of(manifest: Manifest) -> GroupLayout:
    """Return the layout of a quantized node's groups."""
    assert manifest.layout is not None, "a raw node has no groups"
    return manifest.layout


def _groups_at(manifest: Manifest, tier: str) -> Ints:
    counts = manifest.group_counts[: manifest.tier_index(tier) + 1].sum(axis=0)
    out: Ints = counts.astype(np.int32)
    return out


def _pages_of(lens: Ints, page_size: int) -> Ints:
    out: Ints = -(-lens // page_size)
    return out
