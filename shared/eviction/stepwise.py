"""Stepwise eviction: a layer of a node that shrinks while its tokens are still coming.

With a policy of `interval=I` a node's own tokens are pieces that end at I, 2I, 3I, … and
at the node's end. What a token of the third piece sees, I = 4:

    ancestors      survivors of 8 own tokens     its piece
    1 1 1 1 1      1 1 1 1                       1 1 0 0

After a piece's attention the layer's own entries are scored by its last queries and
shrunk to the budget: ⌊keep · own tokens so far⌋ per head, or `target`. So what is left is
a function of the node's tokens and its ancestors alone, however the tokens came: at once
in a prefill, or one by one while they are generated. What is evicted never comes back,
ancestors are seen and never touched, keys keep their positions. A scorer's window may
reach into earlier pieces; such queries, too, are scored over what is left. A
sliding-window layer keeps its last `window` entries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.cache.tail import Tail
from criticalkv.shared.chain import merge_layers
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.orders import floor_of
from criticalkv.shared.eviction.padded import Padded
from criticalkv.shared.eviction.plan import Plan
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.recent_queries import SLACK, RecentQueries
from criticalkv.shared.eviction.scorers import SCORERS
from criticalkv.shared.model.attention import LayerCall, attend_ragged


class StepwiseLayer:
    """One layer: its ancestors' and its own surviving entries, then a growing piece.

    Args:
        policy: a stepwise one.
        ancestors: entries of the node's chain.
        first_position: original position of the node's first token.
        w_o: [D_model, num_q_heads · head_dim].
        window: sliding window, or None.
    """

    def __init__(
        self,
        policy: Policy,
        ancestors: RaggedLayer,
        first_position: int,
        w_o: Tensor,
        window: int | None,
    ) -> None:
        self._policy = policy
        self._visible = ancestors
        self._ancestor_lens: list[int] = ancestors.lens.tolist()
        self._first = first_position
        self._w_o = w_o
        self._window = window
        self._scaling = 1.0
        self._before = 0
        self._tail = Tail(policy.interval)
        self._queries = RecentQueries(queries_read(policy))

    @property
    def tokens(self) -> int:
        """Own tokens so far, evicted ones included."""
        return self._before + self._tail.length

    @property
    def nbytes(self) -> int:
        """Bytes held: ancestors, survivors, the growing piece and the latest queries."""
        tail = (self._tail.keys, self._tail.values)
        held = sum(t.numel() * t.element_size() for t in tail)
        return self._visible.nbytes + held + self._queries.nbytes

    def attend(self, call: LayerCall) -> Tensor:
        """Append the call's tokens, which end no later than their piece; attend to all.

        Returns [num_q_heads, T, head_dim].
        """
        keys, values = self._tail.append(call.key, call.value)
        self._scaling = call.scaling
        if self._window is None:
            self._queries.append(call.query)
        return attend_ragged(call, self._visible, keys, values, self._first + self._before)

    def evict(self) -> None:
        """End the piece: shrink the layer's own entries to the budget.

        Raises:
            NumericsError: if a score holds NaN or infinity.
        """
        ancestors, before = self._visible.split(self._ancestor_lens)
        own = self._shrunk(ancestors, before, 0)
        has_ancestors = ancestors.keys.shape[0] > 0
        self._visible = merge_layers([ancestors, own]) if has_ancestors else own
        self._before = self.tokens
        self._tail = Tail(self._policy.interval)
        # Of older tokens some head may have evicted the entry, and columns must be tokens.
        self._queries.forget(always_kept(self._policy))

    def reaches_back_to(self, tokens: int) -> bool:
        """Whether `survivors` can still tell what the first `tokens` tokens leave."""
        cut = self.tokens - tokens
        return cut <= min(self._tail.length, SLACK)

    def survivors(self, cut: int = 0) -> RaggedLayer:
        """Return the own entries that are left if the node ends here, by position.

        Args:
            cut: latest tokens that do not belong to the node.
        """
        return self._shrunk(*self._visible.split(self._ancestor_lens), cut)

    def _shrunk(self, ancestors: RaggedLayer, own: RaggedLayer, cut: int) -> RaggedLayer:
        """Return what is left of the earlier pieces and of this one."""
        count = self._tail.length - cut
        if not count:
            return own
        entries = Padded.of(
            own,
            self._tail.keys[:, :count],
            self._tail.values[:, :count],
            self._first + self._before,
        )
        return entries.take(self._kept(entries, ancestors, cut))

    def _kept(self, entries: Padded, ancestors: RaggedLayer, cut: int) -> Tensor:
        tokens = self.tokens - cut
        if self._window is not None:
            oldest = max(0, self._first + tokens - self._window)
            return entries.positions >= oldest
        tier = budget(self._policy, tokens)
        if floor_of(tier, tokens) >= entries.n:
            return entries.real
        layer = self._context(entries, ancestors, cut)
        real = entries.real if any(entries.padding) else None
        scores = SCORERS[self._policy.scorer](self._policy, layer)
        return Plan([scores], self._policy, tokens=tokens, real=real).select(tier)[0]

    def _context(self, entries: Padded, ancestors: RaggedLayer, cut: int) -> ContextLayer:
        queries = self._queries.last(queries_read(self._policy), cut)
        layer = ContextLayer(
            queries=queries,
            # Outputs are read for relative scores only, which no stepwise policy uses.
            out=queries[:, :0],
            keys=entries.keys,
            values=entries.values,
            w_o=self._w_o,
            scaling=self._scaling,
            first_position=self._first,
            positions=entries.positions,
            padding=_padding(entries) if any(entries.padding) else None,
        )
        if not ancestors.keys.shape[0]:
            return layer
        return replace(layer, prefix_keys=ancestors.keys, prefix_cu=ancestors.cu_seqlens)


def budget(policy: Policy, tokens: int) -> str:
    """Return the budget after so many own tokens as a fraction of them, exactly."""
    return f"{policy.target}/{tokens}" if policy.target else str(policy.keep)


def queries_read(policy: Policy) -> int:
    """Most queries that the policy's scorer looks at."""
    spans = {"window": policy.window, "h2o": max(policy.window, policy.span)}
    return spans.get(policy.scorer, 1)


def always_kept(policy: Policy) -> int:
    """Latest tokens whose entries the policy's scorer forces, in every head."""
    forced = {"window": policy.window, "h2o": policy.window, "tova": policy.recent}
    return forced.get(policy.scorer, 0)


def _padding(entries: Padded) -> Tensor:
    return torch.tensor(entries.padding, device=entries.keys.device)
