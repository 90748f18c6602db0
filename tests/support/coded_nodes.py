"""Nodes of random entries in any codec, made without a model. On the tests' path."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.ragged import RaggedLayer, cu_seqlens_of
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.cache.wire import TORCH_DTYPE, pack_layer
from criticalkv.shared.identity import Identity, tokens_digest

DIGEST = hashlib.sha256(b"model").hexdigest()
TIERS = ("0.1", "0.2", "0.4", "0.6", "0.8", "1")


@dataclass(frozen=True)
class CodedNode:
    """A node, the layers that it was made of, and the bytes it is sent as."""

    manifest: Manifest
    record: TokenRecord
    layers: list[RaggedLayer]
    payloads: list[bytes]

    @property
    def node_id(self) -> str:
        return self.manifest.node_id

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.payloads))

    def read(self, tier: str) -> list[tuple[int, bytes]]:
        """What a read at a tier delivers."""
        order = self.manifest.read_order(tier, range(self.manifest.num_layers))
        return [(index, self.payloads[index]) for index in order]


def random_layer(lens: Sequence[int], head_dim: int, dtype: str, seed: int) -> RaggedLayer:
    """Entries at distinct positions from 0, some far from 0."""
    generator, rows = torch.Generator().manual_seed(seed), sum(lens)
    keys, values = (
        torch.randn(rows, head_dim, generator=generator) * 3 + torch.arange(head_dim)
        for _ in range(2)
    )
    order = torch.randperm(max(rows, 1), generator=generator)[:rows].to(torch.int32)
    to = TORCH_DTYPE[dtype]
    return RaggedLayer(keys.to(to), values.to(to), order, cu_seqlens_of(lens))


def coded_node(
    tables: Tensor, head_dim: int = 8, codec: str = "int8", dtype: str = "float32", seed: int = 0
) -> CodedNode:
    """Make a node that nobody else has.

    Args:
        tables: int64 [layers, tiers, heads], ascending along tiers.
    """
    layers = [
        random_layer(table[-1].tolist(), head_dim, dtype, seed + i)
        for i, table in enumerate(tables)
    ]
    packed = [
        piece for i, layer in enumerate(layers) for piece in pack_layer(i, layer, tables[i], codec)
    ]
    tokens = max(1, *(int(table[-1].sum()) for table in tables))
    ids = tuple((seed + i) % 1000 for i in range(tokens))
    identity = Identity(
        model_digest=DIGEST,
        tokenizer_digest=DIGEST,
        dtype=dtype,
        codec=codec,
        policy="dense",
        salt=secrets.token_hex(32),
        tokens=tokens_digest(ids),
    )
    manifest = Manifest(
        identity=identity,
        attempt=secrets.token_hex(8),
        num_tokens=tokens,
        next_position=tokens,
        num_layers=len(layers),
        num_kv_heads=tables.shape[2],
        head_dim=head_dim,
        tiers=TIERS[: tables.shape[1]],
        tier_lens=tables.transpose(0, 1).tolist(),
        segments=tuple(segment for segment, _ in packed),
    )
    record = TokenRecord(identity=identity, token_ids=ids)
    return CodedNode(manifest, record, layers, [bytes(payload) for _, payload in packed])
