"""How much of the pool a sequence needs, and at which tiers it fits."""

from __future__ import annotations

import math

from criticalkv.services.decode.opening import ChainOpener, MeasuredChain
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.sequence import Sequence
from criticalkv.shared.errors import ContextLengthError, PoolLimitError
from criticalkv.shared.model.spec import ModelSpec


class Room:
    """Sizes of sequences against one pool."""

    def __init__(self, spec: ModelSpec, pages: Pages, opener: ChainOpener) -> None:
        self._spec = spec
        self._pages = pages
        self._opener = opener
        self._heads = spec.num_layers * spec.num_kv_heads

    def check(self, sequence: Sequence) -> None:
        """Refuse a sequence that could never run.

        Raises:
            ContextLengthError: if it needs more positions than the model has.
            PoolLimitError: if it would not fit an empty pool.
        """
        limit, end = self._spec.max_positions, sequence.chain.next_position + _longest(sequence)
        if end > limit:
            raise ContextLengthError(
                f"context, prompt and max_tokens together need {end} positions; the model has "
                f"{limit}",
                param="max_tokens",
            )
        # What fits an empty pool ends some day: all others can make room.
        lowest, chain = sequence.request.min_tier, sequence.chain
        chain = chain if lowest is None else chain.lowered(lowest)
        needed = self._opener.pages_at_least(chain) + self.own_pages(sequence, _longest(sequence))
        if needed > self._pages.total:
            raise PoolLimitError(
                f"context and turn need {self._mib(needed)} MiB of KV; the decode pool has "
                f"{self._mib(self._pages.total)} MiB: read the context at a lower tier, ask for "
                "fewer max_tokens, or raise decode.pool_mb"
            )

    def to_begin(self, sequence: Sequence) -> int:
        """Pages for the tokens that a sequence has, and one more."""
        return self.own_pages(sequence, len(sequence.tokens) + 1)

    def wanted(self, sequence: Sequence) -> int:
        """Pages that a waiting sequence needs and does not have."""
        return self._opener.pages_to_pull(sequence.chain) + self.to_begin(sequence)

    def fitting(self, sequence: Sequence) -> MeasuredChain | None:
        """Return its chain at the highest tiers for which there is room now."""
        lowest, chain = sequence.request.min_tier, sequence.chain
        candidates = [chain]
        # A view never changes once it has been told.
        if lowest is not None and sequence.start is None:
            candidates += [chain.lowered(tier) for tier in chain.lower_tiers(lowest)]
        most = self._pages.total - self.own_pages(sequence, _longest(sequence))
        possible = (c for c in candidates if self._opener.pages_at_least(c) <= most)
        own = self.to_begin(sequence)
        return next((c for c in possible if self._opener.has_room(c, own)), None)

    def own_pages(self, sequence: Sequence, tokens: int) -> int:
        """Pages for a turn's own tokens."""
        size = self._pages.page_size
        if sequence.policy is None:
            return math.ceil(tokens / size) * self._heads
        # A stepwise turn holds a copy of its chain and, at most, all of its tokens.
        copied = math.ceil(sequence.chain.entries_per_head / size)
        return (math.ceil(_longest(sequence) / size) + copied) * self._heads

    def _mib(self, pages: int) -> int:
        return math.ceil(pages * self._pages.page_bytes / 2**20)


def _longest(sequence: Sequence) -> int:
    """Own tokens that a sequence may come to have."""
    return len(sequence.request.token_ids) + sequence.request.sampling.max_tokens
