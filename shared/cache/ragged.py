"""RaggedCache: the KV of one node, each head with its own length, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedLayer:
    """KV entries of one layer, head after head, best entry of each head first.

    Attributes:
        keys: [sum_h len_h, head_dim], after RoPE at the original positions.
        values: [sum_h len_h, head_dim].
        positions: int32 [sum_h len_h], original positions (absolute in the chain).
        cu_seqlens: int32 [num_kv_heads + 1], cumulative head lengths from 0.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    cu_seqlens: Tensor

    @property
    def lens(self) -> Tensor:
        """Entries per head, int64 [num_kv_heads]."""
        return self.cu_seqlens.to(torch.int64).diff()

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and positions."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values, self.positions))

    def to(self, device: torch.device) -> RaggedLayer:
        """Return it on a device; `cu_seqlens` stay: kernels' launch parameters come from them."""
        keys, values = self.keys.to(device), self.values.to(device)
        return RaggedLayer(keys, values, self.positions.to(device), self.cu_seqlens)

    def head(self, h: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views (keys, values, positions) of KV head `h`."""
        begin, end = int(self.cu_seqlens[h]), int(self.cu_seqlens[h + 1])
        return self.keys[begin:end], self.values[begin:end], self.positions[begin:end]

    def prefix(self, lens: Sequence[int]) -> RaggedLayer:
        """Return a copy with only the first `lens[h]` entries of each head.

        This is how a smaller tier is read from a larger one.
        """
        rows = torch.cat(
            [
                torch.arange(int(self.cu_seqlens[h]), int(self.cu_seqlens[h]) + n)
                for h, n in enumerate(lens)
            ]
        ).to(self.keys.device)
        return RaggedLayer(
            self.keys[rows], self.values[rows], self.positions[rows], cu_seqlens_of(lens)
        )

    def split(self, lens: Sequence[int]) -> tuple[RaggedLayer, RaggedLayer]:
        """Return the first `lens[h]` entries of each head, and the rest."""
        rest = [have - n for have, n in zip(self.lens.tolist(), lens, strict=True)]
        none = self._rows([0] * len(rest), [0] * len(rest))
        if not any(lens):
            return none, self
        if not any(rest):
            return self, none
        return self._rows([0] * len(rest), lens), self._rows(lens, rest)

    def _rows(self, skip: Sequence[int], lens: Sequence[int]) -> RaggedLayer:
        begin = [int(b) + s for b, s in zip(self.cu_seqlens[:-1], skip, strict=True)]
        runs = [slice(b, b + n) for b, n in zip(begin, lens, strict=True)]
        keys, values, positions = (
            torch.cat([t[run] for run in runs]) for t in (self.keys, self.values, self.positions)
        )
        return RaggedLayer(keys, values, positions, cu_seqlens_of(lens))

    def cpu(self) -> RaggedLayer:
        """Return the layer on the CPU."""
        return RaggedLayer(
            self.keys.cpu(), self.values.cpu(), self.positions.cpu(), self.cu_seqlens.cpu()
        )


@dataclass(frozen=True)
class RaggedCache:
    """The KV of one node at the highest tier that is held.

    Attributes:
        layers: one RaggedLayer per decoder layer.
        num_tokens: the node's own tokens, before eviction.
        next_position: original position of the next token of the chain.
        tiers: held tiers, ascending canonical decimals.
        tier_lens: int64 [tiers, layers, kv_heads], entries per head at each tier.
    """

    layers: tuple[RaggedLayer, ...]
    num_tokens: int
    next_position: int
    tiers: tuple[str, ...]
    tier_lens: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def kept_entries(self) -> int:
        """KV entries held, over all layers and heads."""
        return sum(layer.keys.shape[0] for layer in self.layers)

    @property
    def retained_fraction(self) -> float:
        """Entries held ÷ entries of the untouched cache."""
        heads = self.tier_lens.shape[2]
        return self.kept_entries / (self.num_tokens * len(self.layers) * heads)

    def at_tier(self, tier: str) -> RaggedCache:
        """Return the cache as a read at a (held) smaller tier gives it."""
        if tier == self.tiers[-1]:
            return self
        index = self.tiers.index(tier)
        layers = tuple(
            layer.prefix(self.tier_lens[index, i].tolist()) for i, layer in enumerate(self.layers)
        )
        return RaggedCache(
            layers,
            self.num_tokens,
            self.next_position,
            self.tiers[: index + 1],
            self.tier_lens[: index + 1],
        )


def cu_seqlens_of(lens: Sequence[int]) -> Tensor:
    """Return int32 [len(lens) + 1] cumulative lengths from 0, on the CPU."""
    out = torch.zeros(len(lens) + 1, dtype=torch.int32)
    out[1:] = torch.tensor(lens, dtype=torch.int64).cumsum(0).to(torch.int32)
    return out


def dense_layer(keys: Tensor, values: Tensor, first_position: int) -> RaggedLayer:
    """Make a layer that keeps every entry, in position order.

    Args:
        keys: [num_kv_heads, n, head_dim].
        values: [num_kv_heads, n, head_dim].
        first_position: original position of the first token.
    """
    heads, n, dim = keys.shape
    positions = torch.arange(first_position, first_position + n, dtype=torch.int32)
    return RaggedLayer(
        keys.reshape(heads * n, dim),
        values.reshape(heads * n, dim),
        positions.repeat(heads).to(keys.device),
        cu_seqlens_of([n] * heads),
    )
