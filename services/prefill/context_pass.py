"""The forward pass over a context: attend, then hand each layer to a sink."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.chain import Chain
from criticalkv.shared.model.loader import LoadedModel


@dataclass(frozen=True)
class LayerPass:
    """What one layer of the context pass computed.

    Attributes:
        index: decoder layer.
        query: [num_q_heads, n, head_dim], after RoPE.
        key: [num_kv_heads, n, head_dim], after RoPE.
        value: [num_kv_heads, n, head_dim].
        out: [num_q_heads, n, head_dim], before W_O.
        prefix: the ancestors' entries that every query saw.
        scaling: factor of the logits.
        window: sliding window of this layer in tokens, or None.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    prefix: RaggedLayer
    scaling: float
    window: int | None


class LayerSink(Protocol):
    """Takes layers as they are done; may block to send."""

    def take(self, layer: LayerPass) -> None:
        """Use a layer. What the sink does not keep is freed."""
        ...


class ContextPass:
    """AttentionPlan of a context over its ancestors' chain."""

    def __init__(
        self, model: LoadedModel, chain: Chain, sink: LayerSink, check: Callable[[], None]
    ) -> None:
        self._model = model
        self._chain = chain
        self._sink = sink
        self._check = check
        self.sink_s = 0.0

    @property
    def first_position(self) -> int:
        """Original position of the context's first token."""
        return self._chain.next_position

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """See AttentionPlan. Raises what `check` raises, between layers."""
        self._check()
        prefix = self._chain.layer(layer, self._model.spec, self._model.device)
        begin = self._chain.next_position
        positions = torch.arange(begin, begin + key.shape[1], device=key.device) if window else None
        out, _ = ops.ragged_attention(
            query,
            prefix.keys,
            prefix.values,
            prefix.cu_seqlens,
            key,
            value,
            scaling=scaling,
            window=window,
            prefix_positions=prefix.positions,
            query_positions=positions,
            tail_positions=positions,
        )
        started = time.perf_counter()
        self._sink.take(LayerPass(layer, query, key, value, out, prefix, scaling, window))
        self.sink_s += time.perf_counter() - started
        return out
