"""A node that is computed under a stepwise policy: its layers, and what is published."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import Chain
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.stepwise import StepwiseLayer
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel

STEPWISE_TIERS = ("1",)
"""A stepwise node has one tier: all that its policy left. Other budgets are other nodes,
because what is kept decides what later tokens compute. It is not the untouched cache."""


class StepwiseNode:
    """All layers of one node over a chain."""

    def __init__(self, model: LoadedModel, policy: Policy, chain: Chain) -> None:
        spec = model.spec
        self._first = chain.next_position
        self._layers = [
            StepwiseLayer(
                policy, chain.layer(i, spec, model.device), self._first, model.w_o(i), window
            )
            for i, window in enumerate(spec.sliding_windows)
        ]

    @property
    def tokens(self) -> int:
        """Own tokens so far, evicted ones included."""
        return self._layers[-1].tokens

    @property
    def nbytes(self) -> int:
        """Bytes that all layers hold, ancestors included."""
        return sum(layer.nbytes for layer in self._layers)

    def attend(self, call: LayerCall) -> Tensor:
        """Append the call's tokens and attend, see StepwiseLayer."""
        return self._layers[call.layer].attend(call)

    def evict(self, layer: int) -> None:
        """End a layer's piece."""
        self._layers[layer].evict()

    def evict_all(self) -> None:
        """End the piece of all layers."""
        for layer in self._layers:
            layer.evict()

    def cache(self, num_tokens: int) -> RaggedCache | None:
        """Return what the node holds if it ends after its first `num_tokens` tokens.

        On the CPU, by position; None if entries that it needs are evicted already.
        """
        if not all(layer.reaches_back_to(num_tokens) for layer in self._layers):
            return None
        cut = self.tokens - num_tokens
        layers = tuple(layer.survivors(cut).cpu() for layer in self._layers)
        lens = torch.stack([layer.lens for layer in layers])[None]
        return RaggedCache(layers, num_tokens, self._first + num_tokens, STEPWISE_TIERS, lens)
