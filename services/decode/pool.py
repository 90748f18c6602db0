"""Where running sequences keep their KV, and how they attend to it.

`KVPool` and `SequenceKV` are the interface the engine knows. `MergedKVPool` gives every
sequence its own copy of its chain; it knows no pages and shares nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.shared.cache.ragged import RaggedCache, RaggedLayer, dense_layer
from criticalkv.shared.cache.tail import Tail
from criticalkv.shared.chain import Chain
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall, attend_ragged
from criticalkv.shared.model.loader import LoadedModel


class SequenceKV(Protocol):
    """The KV of one running sequence: a fixed view of its chain, then its own turn."""

    def attend(self, call: LayerCall) -> Tensor:
        """Append the call's keys and values to the turn's own; attend to all of it.

        Returns [num_q_heads, T, head_dim].
        """
        ...

    def end_step(self) -> None:
        """Do what is due once all layers have the tokens of a step."""
        ...

    def own(self, token_ids: Sequence[int], check: Callable[[], None]) -> RaggedCache:
        """Return the KV, on the CPU, of a turn that consists of exactly these tokens.

        They are the first of those that ran. If that takes forwards, `check` is called
        between layers, and may raise to stop.
        """
        ...


class KVPool(Protocol):
    """Opens and closes the KV of sequences."""

    def open(self, chain: Chain, policy: Policy | None) -> SequenceKV:
        """Start a sequence over a chain; None: its turn keeps every entry."""
        ...

    def close(self, kv: SequenceKV) -> None:
        """Give a sequence's memory back."""
        ...


class MergedKVPool:
    """Every sequence owns a merged copy of its chain."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def open(self, chain: Chain, policy: Policy | None) -> SequenceKV:
        """Merge the chain's nodes layer by layer."""
        if policy is not None:
            return StepwiseKV(self._model, policy, chain)
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
        self._tails = [Tail() for _ in prefix]

    def attend(self, call: LayerCall) -> Tensor:
        """See SequenceKV."""
        keys, values = self._tails[call.layer].append(call.key, call.value)
        return attend_ragged(call, self._prefix[call.layer], keys, values, self._first)

    def end_step(self) -> None:
        """Nothing is due: everything is kept."""

    def own(self, token_ids: Sequence[int], check: Callable[[], None]) -> RaggedCache:  # noqa: ARG002
        """See SequenceKV."""
        num_tokens = len(token_ids)
        layers = tuple(
            dense_layer(
                tail.keys[:, :num_tokens].cpu(), tail.values[:, :num_tokens].cpu(), self._first
            )
            for tail in self._tails
        )
        heads = layers[0].cu_seqlens.numel() - 1
        lens = torch.full((1, len(layers), heads), num_tokens, dtype=torch.int64)
        return RaggedCache(layers, num_tokens, self._first + num_tokens, ("1",), lens)
