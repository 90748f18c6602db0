"""The KV of a running sequence whose turn shrinks while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from criticalkv.services.decode.pages import Ints, Pages
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import Chain
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.stepwise_node import StepwiseNode
from criticalkv.shared.stepwise_pass import StepwisePass


class StepwiseKV:
    """KV under a stepwise policy, beside the pages. No call goes beyond its piece.

    Args:
        model: whose layers it serves.
        policy: a stepwise one.
        chain: a copy of the turn's ancestors.

    Attributes:
        ballast: pages that nobody writes to: the pool lends their bytes for what this holds.
    """

    def __init__(
        self, model: LoadedModel, policy: Policy, chain: Chain, pages: Pages | None = None
    ) -> None:
        self._model = model
        self._policy = policy
        self._chain = chain
        self._node = StepwiseNode(model, policy, chain)
        self._pages = pages
        self.ballast: Ints | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Append the call's tokens and attend to the chain and what is left of the turn."""
        return self._node.attend(call)

    def end_step(self) -> None:
        """Shrink if a piece is complete."""
        if self._node.tokens % self._policy.interval == 0:
            self._node.evict_all()

    def own(self, token_ids: Sequence[int], check: Callable[[], None]) -> RaggedCache:
        """Return the KV, on the CPU, of a turn that consists of exactly these tokens.

        A stop string may cut off tokens that an eviction looked at already. What the
        tokens before it leave is then computed anew; `check` is called between layers,
        and may raise to stop.
        """
        cache = self._node.cache(len(token_ids))
        if cache is not None:
            return cache
        return StepwisePass(self._model, self._policy, self._chain, check).run(token_ids)

    def close(self) -> None:
        """Give the bytes back."""
        if self._pages is not None and self.ballast is not None:
            self._pages.give_back(self.ballast)
            self.ballast = None
