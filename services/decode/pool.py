"""Where running sequences keep their KV, and how they attend to it.

`KVPool` and `SequenceKV` are the interface the engine knows. `MergedKVPool` gives every
sequence its own copy of its chain; it knows no pages and shares nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, dense_layer
from criticalkv.shared.chain import Chain
from criticalkv.shared.model.attention import LayerCall, attend_ragged
from criticalkv.shared.model.loader import LoadedModel


class SequenceKV(Protocol):
    """The KV of one running sequence: a fixed view of its chain, then its own turn."""

    def attend(self, call: LayerCall) -> Tensor:
        """Append the call's keys and values to the turn's own; attend to all of it.

        Returns [num_q_heads, T, head_dim].
        """
        ...

    def own(self, num_tokens: int) -> RaggedCache:
        """Return the turn's own KV of its first `num_tokens` tokens, dense, on the CPU."""
        ...


class KVPool(Protocol):
    """Opens and closes the KV of sequences."""

    def open(self, chain: Chain) -> SequenceKV:
        """Start a sequence over a chain."""
        ...

    def close(self, kv: SequenceKV) -> None:
        """Give a sequence's memory back."""
        ...


class MergedKVPool:
    """Every sequence owns a merged copy of its chain."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def open(self, chain: Chain) -> MergedKV:
        """Merge the chain's nodes layer by layer."""
        layers = range(self._model.spec.num_layers)
        prefix = [chain.layer(i, self._model.spec, self._model.device) for i in layers]
        return MergedKV(prefix, chain.next_position)

    def close(self, kv: SequenceKV) -> None:
        """Nothing to do: memory goes with the object."""


class MergedKV:
    """SequenceKV over flat tensors."""

    def __init__(self, prefix: list[RaggedLayer], first_position: int) -> None:
        self._prefix = prefix
        self._first = first_position
        self._tails = [_Tail() for _ in prefix]

    def attend(self, call: LayerCall) -> Tensor:
        """See SequenceKV."""
        keys, values = self._tails[call.layer].append(call.key, call.value)
        return attend_ragged(call, self._prefix[call.layer], keys, values, self._first)

    def own(self, num_tokens: int) -> RaggedCache:
        """See SequenceKV."""
        layers = tuple(
            dense_layer(
                tail.keys[:, :num_tokens].cpu(), tail.values[:, :num_tokens].cpu(), self._first
            )
            for tail in self._tails
        )
        heads = layers[0].cu_seqlens.numel() - 1
        lens = torch.full((1, len(layers), heads), num_tokens, dtype=torch.int64)
        return RaggedCache(layers, num_tokens, self._first + num_tokens, ("1",), lens)


class _Tail:
    """Growing KV of one layer of a turn, [num_kv_heads, capacity, head_dim]."""

    def __init__(self) -> None:
        self.keys = torch.empty(0, 0, 0)
        self.values = torch.empty(0, 0, 0)
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens; return views of all keys and values so far."""
        end = self.length + key.shape[1]
        if end > self.keys.shape[1] or self.length == 0:
            self.keys = _grown(self.keys, key, self.length, end)
            self.values = _grown(self.values, value, self.length, end)
        self.keys[:, self.length : end] = key
        self.values[:, self.length : end] = value
        self.length = end
        return self.keys[:, :end], self.values[:, :end]


def _grown(old: Tensor, like: Tensor, used: int, needed: int) -> Tensor:
    # Doubling keeps appends amortised O(1).
    new = like.new_empty(like.shape[0], max(64, 2 * needed), like.shape[2])
    if used:
        new[:, :used] = old[:, :used]
    return new
