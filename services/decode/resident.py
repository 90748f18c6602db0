"""Nodes whose KV is in the pool, shared by all sequences over them.

A node's pages are listed per (layer, KV head), its entries in rank order. A view at a
lower tier is the same pages with shorter lengths. Nodes that nobody uses stay, least
recently used go first, until room is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import cache_of
from criticalkv.shared.chain import Chain, ChainNode
from criticalkv.shared.errors import CriticalKVError
from criticalkv.shared.identity import NodeId

POLL_S = 0.05


class ResidentNode:
    """One node at one tier: where its entries are, and how far they have come.

    Attributes:
        manifest: of the read that fills it.
        tier: highest tier held.
        lens: int32 [layers, kv_heads] at that tier.
        counts: int32 [layers, kv_heads], pages.
        first: int32 [layers, kv_heads], where a head's pages begin in `pages`.
    """

    def __init__(self, manifest: Manifest, tier: str, page_size: int, pages: Ints) -> None:
        self.manifest = manifest
        self.tier = tier
        self.pages = pages
        self.users = 0
        self.lens = lens_at(manifest, tier)
        self.counts = pages_of(self.lens, page_size)
        self.first = (self.counts.ravel().cumsum() - self.counts.ravel()).reshape(self.lens.shape)
        self._page_size = page_size
        self._progress = threading.Condition()
        self._layers = 0
        self._error: CriticalKVError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all layers are there."""
        return self._layers == self.manifest.num_layers

    @property
    def error(self) -> CriticalKVError | None:
        """Why it will never be complete."""
        return self._error

    def rows(self, layer: int) -> Tensor:
        """Return the slots of a layer's entries, head after head; int64 [Σ len]."""
        rows = [self._head_rows(layer, h) for h in range(self.lens.shape[1])]
        return torch.from_numpy(np.concatenate(rows))

    def _head_rows(self, layer: int, head: int) -> NDArray[np.int64]:
        begin, count = self.first[layer, head], self.counts[layer, head]
        pages = self.pages[begin : begin + count].astype(np.int64) * self._page_size
        slots = pages[:, None] + np.arange(self._page_size)
        out: NDArray[np.int64] = slots.ravel()[: self.lens[layer, head]]
        return out

    def arrived(self, layers: int) -> None:
        """Say that the first `layers` layers are there."""
        with self._progress:
            self._layers = layers
            self._progress.notify_all()

    def failed(self, error: CriticalKVError) -> None:
        """Say that no more will come."""
        with self._progress:
            self._error = error
            self._progress.notify_all()

    def wait_for(self, layer: int, check: Callable[[], None]) -> None:
        """Wait until a layer is there.

        Raises:
            CriticalKVError: what ended the pull, or what `check` raises.
        """
        with self._progress:
            while self._layers <= layer:
                if self._error is not None:
                    raise self._error
                check()
                self._progress.wait(POLL_S)


@dataclass(frozen=True)
class NodeView:
    """A resident node read at a tier that it holds."""

    node: ResidentNode
    tier: str

    @property
    def lens(self) -> Ints:
        """Entries per head, int32 [layers, kv_heads]."""
        if self.tier == self.node.tier:
            return self.node.lens
        return lens_at(self.node.manifest, self.tier)


class Residents:
    """All nodes in the pool.

    Args:
        pages: the pool's memory.
        keep_bytes: most bytes of nodes that nobody uses.
    """

    def __init__(self, pages: Pages, keep_bytes: int) -> None:
        self._pages = pages
        self._keep_pages = keep_bytes // pages.page_bytes
        # By node: the newest that was begun; older ones live on while they are used.
        self._nodes: dict[NodeId, ResidentNode] = {}
        self._unused: OrderedDict[NodeId, ResidentNode] = OrderedDict()
        self._unused_pages = 0
        self._lock = threading.RLock()

    @property
    def unused_pages(self) -> int:
        """Pages of nodes that nobody uses now."""
        return self._unused_pages

    def ids(self, limit: int) -> tuple[NodeId, ...]:
        """Return nodes that are held, most recently used first."""
        with self._lock:
            used = [i for i, node in self._nodes.items() if node.users]
            return tuple([*used, *reversed(self._unused)][:limit])

    def find(self, node_id: NodeId, tier: str) -> ResidentNode | None:
        """Return a node that holds `tier`, or is about to."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or node.error is not None:
                return None
            manifest = node.manifest
            if tier not in manifest.tiers or Decimal(tier) > Decimal(node.tier):
                return None
            return node

    def acquire(self, node_id: NodeId, tier: str) -> ResidentNode | None:
        """Return what `find` does, and count a user of it."""
        with self._lock:  # in between, nobody may drop it
            node = self.find(node_id, tier)
            if node is not None:
                self.use(node)
            return node

    def use(self, node: ResidentNode) -> None:
        """Count one more user of a node that has one."""
        with self._lock:
            node.users += 1
            if self._unused.get(node.manifest.node_id) is node:
                del self._unused[node.manifest.node_id]
                self._unused_pages -= node.pages.size

    def leave(self, node: ResidentNode) -> None:
        """Count a user less. An unused node stays if it is whole and wanted."""
        with self._lock:
            node.users -= 1
            if node.users:
                return
            node_id = node.manifest.node_id
            if not node.is_complete or self._nodes.get(node_id) is not node:
                self._drop(node)
                return
            self._unused[node_id] = node
            self._unused_pages += node.pages.size
            while self._unused_pages > self._keep_pages:
                self._drop_oldest()

    def add(self, node: ResidentNode) -> None:
        """Make a node findable; it counts as used once. It replaces an older one."""
        with self._lock:
            old = self._nodes.get(node.manifest.node_id)
            self._nodes[node.manifest.node_id] = node
            node.users = 1
            if old is not None and not old.users:
                self._drop(old)

    def make_room(self, count: int) -> bool:
        """Drop unused nodes until `count` pages are free; return whether they are."""
        with self._lock:
            while self._pages.free < count and self._unused:
                self._drop_oldest()
            return self._pages.free >= count

    def take(self, count: int) -> Ints | None:
        """Take pages, dropping unused nodes if need be; None if there is no room."""
        with self._lock:
            return self._pages.take(count) if self.make_room(count) else None

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._unused.values())))

    def _drop(self, node: ResidentNode) -> None:
        self._forget_unused(node)
        if self._nodes.get(node.manifest.node_id) is node:
            del self._nodes[node.manifest.node_id]
        self._pages.give_back(node.pages)

    def _forget_unused(self, node: ResidentNode) -> None:
        if self._unused.get(node.manifest.node_id) is node:
            del self._unused[node.manifest.node_id]
            self._unused_pages -= node.pages.size


def lens_at(manifest: Manifest, tier: str) -> Ints:
    """Return entries per head at a stored tier, int32 [layers, kv_heads]."""
    out: Ints = manifest.lens[manifest.tier_index(tier)].astype(np.int32)
    return out


def pages_of(lens: Ints, page_size: int) -> Ints:
    """Return the pages that so many entries take."""
    out: Ints = -(-lens // page_size)
    return out


def copied_chain(pages: Pages, views: Sequence[NodeView]) -> Chain:
    """Return a chain of complete nodes with a copy of their entries, on the CPU."""
    nodes = []
    for view in views:
        manifest = view.node.manifest
        layers = [_copied(pages, view.node, layer) for layer in range(manifest.num_layers)]
        cache = cache_of(manifest, view.node.tier, layers)
        nodes.append(ChainNode(manifest, cache.at_tier(view.tier)))
    return Chain(tuple(nodes))


def _copied(pages: Pages, node: ResidentNode, layer: int) -> RaggedLayer:
    keys, values, positions = pages.read(node.rows(layer).to(pages.keys.device))
    return RaggedLayer(keys, values, positions, cu_seqlens_of(node.lens[layer].tolist())).cpu()
