"""A chain of nodes in memory: what a prefill child or a turn attends to.

Pulls nodes from the store at a view and keeps a bounded number of them for reuse. The
cache is an optimisation: every result is the same without it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

import torch

from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import TORCH_DTYPE, LayerAssembler, cache_of
from criticalkv.shared.errors import ContextLengthError, CorruptNodeError, NodeMissingError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore

MAX_CHAIN = 512
"""Longest chain; its ids and view must fit into a manifest's header."""


@dataclass(frozen=True)
class ChainNode:
    """One node of a chain, held at the tier it is read at."""

    manifest: Manifest
    cache: RaggedCache

    @property
    def tier(self) -> str:
        """Tier of this read."""
        return self.cache.tiers[-1]


@dataclass(frozen=True)
class Chain:
    """Nodes from the root to a leaf, and what it cost to get them."""

    nodes: tuple[ChainNode, ...] = ()
    bytes_pulled: int = 0
    store_ms: float = 0.0

    @property
    def ids(self) -> tuple[NodeId, ...]:
        """Node ids, root first."""
        return tuple(node.manifest.node_id for node in self.nodes)

    @property
    def view(self) -> tuple[str, ...]:
        """Tier at which each node is read, root first."""
        return tuple(node.tier for node in self.nodes)

    @property
    def next_position(self) -> int:
        """Original position of the next token."""
        return self.nodes[-1].manifest.next_position if self.nodes else 0

    @property
    def lowest_tier(self) -> str:
        """The lowest tier of the view; "1" without nodes."""
        return min(self.view, key=Decimal, default="1")

    @property
    def retained_fraction(self) -> float:
        """Entries held ÷ entries of the untouched caches of all nodes."""
        full = sum(node.manifest.full_entries for node in self.nodes)
        return sum(node.cache.kept_entries for node in self.nodes) / full if full else 1.0

    def layer(self, index: int, spec: ModelSpec, device: torch.device) -> RaggedLayer:
        """Return one layer of all nodes as one ragged layer on `device`."""
        layers = [node.cache.layers[index] for node in self.nodes]
        merged = merge_layers(layers) if layers else empty_layer(spec)
        # cu_seqlens stay on the CPU: kernels' launch parameters come from them.
        return RaggedLayer(
            merged.keys.to(device),
            merged.values.to(device),
            merged.positions.to(device),
            merged.cu_seqlens,
        )


def empty_layer(spec: ModelSpec) -> RaggedLayer:
    """A layer whose heads are all empty."""
    keys = torch.empty(0, spec.head_dim, dtype=TORCH_DTYPE[spec.dtype])
    positions = torch.empty(0, dtype=torch.int32)
    return RaggedLayer(keys, keys, positions, cu_seqlens_of([0] * spec.num_kv_heads))


def merge_layers(layers: Sequence[RaggedLayer]) -> RaggedLayer:
    """Concatenate the entries of several nodes, head by head, oldest node first."""
    if len(layers) == 1:
        return layers[0]
    heads = layers[0].cu_seqlens.numel() - 1
    parts = [layer.head(h) for h in range(heads) for layer in layers]
    cu = torch.stack([layer.cu_seqlens.to(torch.int64) for layer in layers]).sum(0)
    return RaggedLayer(
        torch.cat([keys for keys, _, _ in parts]),
        torch.cat([values for _, values, _ in parts]),
        torch.cat([positions for _, _, positions in parts]),
        cu.to(torch.int32),
    )


class NodeCache:
    """Recently used nodes, at most `limit_bytes` of KV; least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._nodes: OrderedDict[NodeId, ChainNode] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of KV held."""
        return self._bytes

    def get(self, node_id: NodeId, tier: str) -> ChainNode | None:
        """Return the node at exactly `tier`, if what is held includes it."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None or tier not in node.cache.tiers:
                return None
            self._nodes.move_to_end(node_id)
        return ChainNode(node.manifest, node.cache.at_tier(tier))

    def put(self, node: ChainNode) -> None:
        """Keep a node, dropping others until it fits; a larger read replaces a smaller."""
        node_id = node.manifest.node_id
        with self._lock:
            self._drop(node_id)
            if node.cache.nbytes > self._limit:
                return
            self._nodes[node_id] = node
            self._bytes += node.cache.nbytes
            while self._bytes > self._limit:
                self._drop(next(iter(self._nodes)))

    def drop(self, node_id: NodeId) -> None:
        """Forget a node."""
        with self._lock:
            self._drop(node_id)

    def _drop(self, node_id: NodeId) -> None:
        gone = self._nodes.pop(node_id, None)
        self._bytes -= gone.cache.nbytes if gone else 0


class ChainLoader:
    """Pulls chains for one model."""

    def __init__(self, store: NodeStore, spec: ModelSpec, cache: NodeCache) -> None:
        self._store = store
        self._spec = spec
        self._cache = cache

    def load(
        self,
        leaf: NodeId | None,
        salt: str,
        view: Sequence[str],
        check: Callable[[], None] = lambda: None,
    ) -> Chain:
        """Return the chain that ends in `leaf`.

        Args:
            leaf: last node, or None for an empty chain.
            salt: the requester's salt; a node of another one is a miss.
            view: exact tier to read each node at, root first, leaf last.
            check: called before each node; may raise to stop.

        Raises:
            NodeMissingError: if a node is absent, damaged, not of this model, or not
                stored at its tier of the view.
            ContextLengthError: if the chain is longer than the model's positions.
        """
        if leaf is None:
            return Chain()
        if not view:
            raise NodeMissingError.of(leaf, "no view was given to read it at")
        started = time.perf_counter()
        pulled = [0]
        last = self._node(leaf, view[-1], salt, pulled)
        if len(view) != len(last.manifest.ancestors) + 1:
            raise NodeMissingError.of(leaf, "its chain and the wanted view differ in length")
        nodes = []
        for node_id, tier in zip(last.manifest.ancestors, view, strict=False):
            check()
            nodes.append(self._node(node_id, tier, salt, pulled))
        if len(nodes) >= MAX_CHAIN:
            raise ContextLengthError(
                f"the conversation has {len(nodes) + 1} nodes, the limit is {MAX_CHAIN}; "
                "send its messages as a new context"
            )
        chain = Chain((*nodes, last), pulled[0], 1e3 * (time.perf_counter() - started))
        if chain.next_position >= self._spec.max_positions:
            raise ContextLengthError(
                f"the context has {chain.next_position} tokens; the model's limit is "
                f"{self._spec.max_positions}"
            )
        return chain

    def keep(self, manifest: Manifest, cache: RaggedCache) -> None:
        """Remember a node that was just published here."""
        self._cache.put(ChainNode(manifest, cache))

    def forget(self, node_id: NodeId) -> None:
        """Drop a node from the local cache."""
        self._cache.drop(node_id)

    def _node(self, node_id: NodeId, tier: str, salt: str, pulled: list[int]) -> ChainNode:
        node = self._cache.get(node_id, tier)
        if node is None:
            node = self._pull(node_id, tier, pulled)
            self._cache.put(node)
        self._check(node.manifest, salt)
        return node

    def _pull(self, node_id: NodeId, tier: str, pulled: list[int]) -> ChainNode:
        try:
            with self._store.open_get(node_id, tier=tier) as reader:
                manifest = reader.manifest
                if reader.tier != tier:
                    raise NodeMissingError.of(
                        node_id, f"tier {tier} is not stored, only {', '.join(manifest.tiers)}"
                    )
                layers: list[RaggedLayer] = []
                assembler = None
                for index, payload in reader:
                    layer = manifest.segments[index].layer
                    while len(layers) < layer:
                        layers.append(_finish(assembler, manifest, len(layers), tier))
                        assembler = None
                    assembler = assembler or LayerAssembler(manifest, layer, tier)
                    assembler.add(index, payload)
                    pulled[0] += len(payload)
                while len(layers) < manifest.num_layers:
                    layers.append(_finish(assembler, manifest, len(layers), tier))
                    assembler = None
        except CorruptNodeError:
            self._cache.drop(node_id)
            raise
        return ChainNode(manifest, cache_of(manifest, tier, layers))

    def _check(self, manifest: Manifest, salt: str) -> None:
        spec, identity = self._spec, manifest.identity
        ours = (spec.model_digest, spec.tokenizer_digest, spec.dtype, salt)
        theirs = (
            identity.model_digest,
            identity.tokenizer_digest,
            identity.dtype,
            identity.salt,
        )
        shape = (manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
        if ours != theirs or shape != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
            raise NodeMissingError.of(manifest.node_id, "it belongs to another model or tenant")


def _finish(
    assembler: LayerAssembler | None, manifest: Manifest, layer: int, tier: str
) -> RaggedLayer:
    # A layer without segments keeps nothing (all heads empty); finish() verifies that.
    return (assembler or LayerAssembler(manifest, layer, tier)).finish()
