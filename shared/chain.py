"""A chain of nodes: what a prefill child or a turn attends to, and how it is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

import torch

from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.quantized import QuantizedLayer
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.wire import TORCH_DTYPE, LayerAssembler, cache_of
from criticalkv.shared.errors import ContextLengthError, NodeMissingError
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.node_store import NodeStore, Reader

T = TypeVar("T")
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
        return (merge_layers(layers) if layers else empty_layer(spec)).to(device)


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


class ChainLoader:
    """Pulls chains for one model."""

    def __init__(self, store: NodeStore, spec: ModelSpec) -> None:
        self._store = store
        self._spec = spec

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
        started, pulled = time.perf_counter(), [0]

        def read(node_id: NodeId, tier: str) -> ChainNode:
            return self._node(node_id, tier, salt, pulled)

        nodes = walk_chain(leaf, view, read, lambda node: node.manifest, self._spec, check)
        return Chain(tuple(nodes), pulled[0], 1e3 * (time.perf_counter() - started))

    def _node(self, node_id: NodeId, tier: str, salt: str, pulled: list[int]) -> ChainNode:
        node = self._pull(node_id, tier, pulled)
        check_manifest(node.manifest, self._spec, salt)
        return node

    def _pull(self, node_id: NodeId, tier: str, pulled: list[int]) -> ChainNode:
        with open_at(self._store, node_id, tier) as reader:
            manifest, layers = reader.manifest, list(read_layers(reader))
            pulled[0] += manifest.tier_bytes()[manifest.tier_index(tier)]
            return ChainNode(manifest, cache_of(manifest, tier, layers))


def walk_chain(
    leaf: NodeId,
    view: Sequence[str],
    read: Callable[[NodeId, str], T],
    manifest_of: Callable[[T], Manifest],
    spec: ModelSpec,
    check: Callable[[], None],
) -> list[T]:
    """Read a chain's nodes by its leaf, which names the others; root first.

    Args:
        leaf: last node.
        view: exact tier to read each node at, root first, leaf last.
        read: reads one node at a tier.
        manifest_of: of what `read` returns.
        spec: the model that will go on from there.
        check: called before each ancestor; may raise to stop.

    Raises:
        NodeMissingError: if chain and view differ in length, and what `read` raises.
        ContextLengthError: see `check_chain`.
    """
    if not view:
        raise NodeMissingError.of(leaf, "no view was given to read it at")
    last = read(leaf, view[-1])
    ancestors = manifest_of(last).ancestors
    if len(view) != len(ancestors) + 1:
        raise NodeMissingError.of(leaf, "its chain and the wanted view differ in length")
    nodes = []
    for node_id, tier in zip(ancestors, view, strict=False):
        check()
        nodes.append(read(node_id, tier))
    nodes.append(last)
    check_chain([manifest_of(node) for node in nodes], spec)
    return nodes


def open_at(
    store: NodeStore,
    node_id: NodeId,
    tier: str,
    layers: range | None = None,
    timeout_s: float | None = None,
) -> Reader:
    """Start to read a node at exactly `tier`; an empty range reads the manifest only.

    Raises:
        NodeMissingError: if the node, or this tier of it, is not stored.
    """
    reader = store.open_get(node_id, tier=tier, layers=layers, timeout_s=timeout_s)
    if reader.tier == tier:
        return reader
    with reader:
        stored = ", ".join(reader.manifest.tiers)
        raise NodeMissingError.of(node_id, f"tier {tier} is not stored, only {stored}")


def read_layers(reader: Reader) -> Iterator[RaggedLayer]:
    """Yield a read's layers as they become complete, on the CPU, in the node's dtype.

    Raises:
        CorruptNodeError, NodeMissingError: as the reader and LayerAssembler do.
    """
    return (assembler.finish() for assembler in _assembled(reader))


def read_groups(reader: Reader) -> Iterator[QuantizedLayer]:
    """Yield the layers of a quantized node as they become complete, on the CPU, as stored.

    Raises:
        CorruptNodeError, NodeMissingError: as the reader and LayerAssembler do.
        TypeError: if the node is not quantized.
    """
    return (assembler.finish_groups() for assembler in _assembled(reader))


def _assembled(reader: Reader) -> Iterator[LayerAssembler]:
    """Yield each layer's assembler once its segments have arrived.

    A layer without segments keeps nothing (all heads empty); finishing it verifies that.
    """
    manifest, layer = reader.manifest, 0
    assembler = LayerAssembler(manifest, layer, reader.tier)
    for index, payload in reader:
        while layer < manifest.segments[index].layer:
            yield assembler
            layer += 1
            assembler = LayerAssembler(manifest, layer, reader.tier)
        assembler.add(index, payload)
    yield assembler
    for empty in range(layer + 1, manifest.num_layers):
        yield LayerAssembler(manifest, empty, reader.tier)


def check_manifest(manifest: Manifest, spec: ModelSpec, salt: str) -> None:
    """Refuse a node of another model or tenant.

    Raises:
        NodeMissingError: it is as if it were not there.
    """
    identity = manifest.identity
    ours = (spec.model_digest, spec.tokenizer_digest, spec.dtype, salt)
    theirs = (identity.model_digest, identity.tokenizer_digest, identity.dtype, identity.salt)
    shape = (manifest.num_layers, manifest.num_kv_heads, manifest.head_dim)
    if ours != theirs or shape != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
        raise NodeMissingError.of(manifest.node_id, "it belongs to another model or tenant")


def check_chain(manifests: Sequence[Manifest], spec: ModelSpec) -> None:
    """Refuse a chain to which nothing can be added.

    Raises:
        ContextLengthError: if it has too many nodes, or all of the model's positions.
    """
    if len(manifests) > MAX_CHAIN:
        raise ContextLengthError(
            f"the conversation has {len(manifests)} nodes, the limit is {MAX_CHAIN}; "
            "send its messages as a new context"
        )
    if manifests[-1].next_position >= spec.max_positions:
        raise ContextLengthError(
            f"the context has {manifests[-1].next_position} tokens; the model's limit is "
            f"{spec.max_positions}"
        )
