"""Nodes whose KV is in the pool, shared by all sequences over them.

A node's places are listed per (layer, KV head), its entries in rank order. A view at a
lower tier is the first of the same places. Nodes that nobody uses stay, least recently
used go first, until room is needed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from criticalkv.kernels.group_layout import GroupLayout
from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.services.decode.places import Indexes, lens_at, places_of
from criticalkv.shared.cache.manifest import Manifest
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
        pages: all that it takes.
        places: of its heads in them.
    """

    def __init__(self, manifest: Manifest, tier: str, page_size: int, pages: Ints) -> None:
        self.manifest = manifest
        self.tier = tier
        self.pages = pages
        self.users = 0
        self.places = places_of(manifest, tier, page_size, pages)
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

    def is_laid_out_like(self, manifest: Manifest) -> bool:
        """Whether another manifest of this node puts as many entries into each place."""
        mine, other = (m.lens[: m.tier_index(self.tier) + 1] for m in (self.manifest, manifest))
        return np.array_equal(mine, other)

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
        return lens_at(self.node.manifest, self.tier)

    @property
    def layout(self) -> GroupLayout | None:
        """Of a quantized node's groups; its places are groups, a raw one's are pages."""
        return self.node.manifest.layout

    @property
    def counts(self) -> Ints:
        """Places per head, int32 [layers, kv_heads]."""
        return self.node.places.counts(self.tier)

    def places(self, layer: Indexes, head: Indexes, place: Indexes) -> tuple[Ints, Ints]:
        """Return numbers and fills of places, int32 [n] each; see Places."""
        return self.node.places.of(self.tier, layer, head, place)


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


def copied_chain(pages: Pages, views: Sequence[NodeView]) -> Chain:
    """Return a chain of complete nodes with a copy of their entries, on the CPU.

    Quantized entries become those of the model's own dtype.
    """
    nodes = []
    for view in views:
        manifest = view.node.manifest
        layers = [view.node.places.copied(pages, i) for i in range(manifest.num_layers)]
        cache = cache_of(manifest, view.node.tier, layers)
        nodes.append(ChainNode(manifest, cache.at_tier(view.tier)))
    return Chain(tuple(nodes))
