"""From a request's chain to views of resident nodes: measure, admit, pull.

Measuring reads manifests only, so that the room a sequence needs is known before any
byte of KV is pulled. Admission takes pages for the nodes that are not in the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.services.decode.places import pages_needed
from criticalkv.services.decode.resident import NodeView, ResidentNode, Residents
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.chain import check_manifest, open_at, walk_chain
from criticalkv.shared.errors import CriticalKVError, NodeMissingError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore

log = logging.getLogger(__name__)

Check = Callable[[], None]


@dataclass(frozen=True)
class MeasuredChain:
    """A chain's manifests and the tier to read each at, root first."""

    manifests: tuple[Manifest, ...] = ()
    view: tuple[str, ...] = ()

    @cached_property  # an id is a digest
    def ids(self) -> tuple[NodeId, ...]:
        """Node ids."""
        return tuple(manifest.node_id for manifest in self.manifests)

    @property
    def next_position(self) -> int:
        """Original position of the next token."""
        return self.manifests[-1].next_position if self.manifests else 0

    @property
    def lowest_tier(self) -> str:
        """The lowest tier of the view; "1" without nodes."""
        return min(self.view, key=Decimal, default="1")

    @property
    def retained_fraction(self) -> float:
        """Entries of the view ÷ entries of the untouched caches of all nodes."""
        full = sum(manifest.full_entries for manifest in self.manifests)
        return sum(self._entries()) / full if full else 1.0

    @property
    def kept_bytes(self) -> int:
        """Stored bytes of the view."""
        pairs = zip(self.manifests, self.view, strict=True)
        return sum(m.tier_bytes()[m.tier_index(tier)] for m, tier in pairs)

    @property
    def entries_per_head(self) -> int:
        """Entries of the view per head, rounded up from the mean."""
        if not self.manifests:
            return 0
        heads = self.manifests[0].num_layers * self.manifests[0].num_kv_heads
        return -(-sum(self._entries()) // heads)

    def lowered(self, limit: str) -> MeasuredChain:
        """Return the chain with no node above `limit`, as far as smaller tiers are stored."""
        view = [_lowered(m, t, limit) for m, t in zip(self.manifests, self.view, strict=True)]
        return MeasuredChain(self.manifests, tuple(view))

    def lower_tiers(self, lowest: str) -> list[str]:
        """Return the tiers, highest first, to which this chain can be lowered."""
        low, high = Decimal(lowest), max(map(Decimal, self.view), default=Decimal(0))
        stored = {tier for manifest in self.manifests for tier in manifest.tiers}
        return sorted((t for t in stored if low <= Decimal(t) < high), key=Decimal, reverse=True)

    def _entries(self) -> list[int]:
        pairs = zip(self.manifests, self.view, strict=True)
        return [m.tier_entries()[m.tier_index(tier)] for m, tier in pairs]


def _lowered(manifest: Manifest, tier: str, limit: str) -> str:
    fitting = [t for t in manifest.tiers if Decimal(t) <= Decimal(limit)]
    return tier if Decimal(tier) <= Decimal(limit) or not fitting else fitting[-1]


@dataclass(frozen=True)
class OpenedChain:
    """What a sequence has taken.

    Attributes:
        views: its chain's nodes, root first.
        to_pull: those of them that it has to bring.
        own: pages for its own tokens.
    """

    views: tuple[NodeView, ...]
    to_pull: tuple[ResidentNode, ...]
    own: Ints

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are there."""
        return all(view.node.is_complete for view in self.views)

    @property
    def bytes_to_pull(self) -> int:
        """Stored bytes of what is pulled."""
        return sum(
            node.manifest.tier_bytes()[node.manifest.tier_index(node.tier)] for node in self.to_pull
        )


class ChainOpener:
    """Opens chains of one model."""

    def __init__(
        self, store: NodeStore, spec: ModelSpec, pages: Pages, residents: Residents
    ) -> None:
        self._store = store
        self._spec = spec
        self._pages = pages
        self._residents = residents

    def measure(
        self, leaf: NodeId | None, salt: str, view: Sequence[str], check: Check
    ) -> MeasuredChain:
        """Return the manifests of the chain that ends in `leaf`.

        Args:
            leaf: last node, or None for an empty chain.
            salt: the requester's salt; a node of another one is a miss.
            view: exact tier to read each node at, root first, leaf last.
            check: called before each node; may raise to stop.

        Raises:
            NodeMissingError: if a node is absent, of another model or tenant, or not
                stored at its tier of the view.
            ContextLengthError: if nothing can be added to the chain.
            PoolLimitError: if a node's quantized groups are larger than a page.
        """
        check()
        if leaf is None:
            return MeasuredChain()

        def read(node_id: NodeId, tier: str) -> Manifest:
            return self._manifest(node_id, tier, salt)

        manifests = walk_chain(leaf, view, read, lambda manifest: manifest, self._spec, check)
        return MeasuredChain(tuple(manifests), tuple(view))

    def pages_to_pull(self, chain: MeasuredChain) -> int:
        """Pages that the chain needs beyond the nodes that are in the pool."""
        nodes = zip(chain.ids, chain.manifests, chain.view, strict=True)
        missing = [(m, t) for i, m, t in nodes if not self._residents.find(i, t)]
        return sum(self._node_pages(manifest, tier) for manifest, tier in missing)

    def pages_at_least(self, chain: MeasuredChain) -> int:
        """Pages that the chain needs if nothing of it is in the pool."""
        pairs = zip(chain.manifests, chain.view, strict=True)
        return sum(self._node_pages(manifest, tier) for manifest, tier in pairs)

    def has_room(self, chain: MeasuredChain, own: int) -> bool:
        """Whether the chain and `own` pages more fit, at the expense of unused nodes only."""
        found = map(self._residents.find, chain.ids, chain.view)
        kept = sum(node.pages.size for node in found if node is not None and not node.users)
        room = self._pages.free + self._residents.unused_pages - kept
        return self.pages_to_pull(chain) + own <= room

    def open(self, chain: MeasuredChain, own: int) -> OpenedChain | None:
        """Take a chain's nodes into use, and `own` pages more; None if there is no room."""
        pairs = list(zip(chain.manifests, chain.view, strict=True))
        # First all that are there: room for the others must not be made of them.
        nodes = list(map(self._residents.acquire, chain.ids, chain.view))
        found = [node for node in nodes if node is not None]
        pages = self._residents.take(own)
        made: list[ResidentNode] = []
        for at, (manifest, tier) in enumerate(pairs):
            if pages is not None and nodes[at] is None:
                nodes[at] = self._new_node(manifest, tier)
                made += [node for node in nodes[at : at + 1] if node is not None]
        if pages is None or None in nodes:
            self._undo(found, made, pages)
            return None
        views = (NodeView(n, t) for n, (_, t) in zip(nodes, pairs, strict=True) if n is not None)
        # The largest last: its first layers can be used while the others come.
        made.sort(key=lambda node: node.pages.size)
        return OpenedChain(tuple(views), tuple(made), pages)

    def pull(self, nodes: Sequence[ResidentNode], check: Check) -> None:
        """Read nodes from the store into their pages, layer by layer.

        Every node ends complete or failed; who waits for one is told.

        Raises:
            CriticalKVError: what ended the first pull that failed.
        """
        error: CriticalKVError | None = None
        for node in nodes:
            try:
                if error is not None:
                    raise error
                self._pull(node, check)
            except CriticalKVError as failure:
                error = failure
                node.failed(failure)
            except Exception as failure:
                log.exception("a node could not be pulled")
                error = CriticalKVError(f"pulling a node failed: {type(failure).__name__}")
                node.failed(error)
        if error is not None:
            raise error

    def _pull(self, node: ResidentNode, check: Check) -> None:
        check()
        node_id = node.manifest.node_id
        with open_at(self._store, node_id, node.tier) as reader:
            if not node.is_laid_out_like(reader.manifest):
                # Another writer's low bits chose other entries since it was measured.
                raise NodeMissingError.of(node_id, "it was replaced while it was opened")
            for layers in node.places.fill(self._pages, reader):
                check()
                node.arrived(layers)

    def _new_node(self, manifest: Manifest, tier: str) -> ResidentNode | None:
        pages = self._residents.take(self._node_pages(manifest, tier))
        if pages is None:
            return None
        node = ResidentNode(manifest, tier, self._pages.page_size, pages)
        self._residents.add(node)
        return node

    def _undo(
        self, found: Sequence[ResidentNode], made: Sequence[ResidentNode], pages: Ints | None
    ) -> None:
        for node in made:
            node.failed(CriticalKVError("the pool is full"))
        for node in (*found, *made):
            self._residents.leave(node)
        if pages is not None:
            self._pages.give_back(pages)

    def _manifest(self, node_id: NodeId, tier: str, salt: str) -> Manifest:
        node = self._residents.find(node_id, tier)
        if node is not None:
            manifest = node.manifest
        else:
            with open_at(self._store, node_id, tier, layers=range(0)) as reader:
                manifest = reader.manifest
        check_manifest(manifest, self._spec, salt)
        self._node_pages(manifest, tier)  # refuses what no page can hold
        return manifest

    def _node_pages(self, manifest: Manifest, tier: str) -> int:
        return pages_needed(manifest, tier, self._pages.page_size)
