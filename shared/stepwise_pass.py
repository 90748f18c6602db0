"""Compute a whole node under a stepwise policy: one forward per piece, bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import Chain
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall, forward
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.stepwise_node import StepwiseNode


class StepwisePass:
    """AttentionPlan of one piece after another.

    A layer shrinks as soon as its attention is done: beside what was kept, there is
    never more than one piece of one layer.

    Args:
        model: runs the pieces.
        policy: a stepwise one.
        chain: the node's ancestors.
        check: called before each layer of each piece; may raise to stop.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        chain: Chain,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._interval = policy.interval
        self._first = chain.next_position
        self._check = check
        self._node = StepwiseNode(model, policy, chain)
        self.scoring_s = 0.0

    def run(self, token_ids: Sequence[int]) -> RaggedCache:
        """Compute a node of these tokens.

        Raises:
            NumericsError: if a score holds NaN or infinity.
        """
        device = self._model.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        for begin in range(0, len(token_ids), self._interval):
            piece = torch.tensor(token_ids[begin : begin + self._interval], device=device)
            start = self._first + begin
            positions = torch.arange(start, start + piece.numel(), device=device)
            forward(self._model.model, piece, positions, self, none)
        cache = self._node.cache(len(token_ids))
        assert cache is not None
        return cache

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Raises what `check` raises, between layers."""
        self._check()
        out = self._node.attend(call)
        started = time.perf_counter()
        self._node.evict(call.layer)
        self.scoring_s += time.perf_counter() - started
        return out
