"""The KV of a running sequence whose turn shrinks while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import Chain
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.stepwise_node import StepwiseNode
from criticalkv.shared.stepwise_pass import StepwisePass


class StepwiseKV:
    """SequenceKV under a stepwise policy. No call goes beyond its piece."""

    def __init__(self, model: LoadedModel, policy: Policy, chain: Chain) -> None:
        self._model = model
        self._policy = policy
        self._chain = chain
        self._node = StepwiseNode(model, policy, chain)

    def attend(self, call: LayerCall) -> Tensor:
        """See SequenceKV."""
        return self._node.attend(call)

    def end_step(self) -> None:
        """See SequenceKV: shrink if a piece is complete."""
        if self._node.tokens % self._policy.interval == 0:
            self._node.evict_all()

    def own(self, token_ids: Sequence[int], check: Callable[[], None]) -> RaggedCache:
        """See SequenceKV.

        A stop string may cut off tokens that an eviction looked at already. What the
        tokens before it leave is then computed anew.
        """
        cache = self._node.cache(len(token_ids))
        if cache is not None:
            return cache
        return StepwisePass(self._model, self._policy, self._chain, check).run(token_ids)
