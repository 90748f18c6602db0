"""What a scorer gets to see: one layer of a context, as its attention saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.eviction.scores import finite

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions int64 [p] → (cos, sin), fp32 [p, rotary_dim] each, as a layer's RoPE has them.

rotary_dim ≤ head_dim: some models turn only the first dimensions of a head."""


@dataclass(frozen=True)
class ContextLayer:
    """One full-attention layer over the node's own n entries.

    Attributes:
        queries: [num_q_heads, m, head_dim], after RoPE: those of the last m ≤ n tokens,
            all of them in a prefill.
        out: [num_q_heads, m, head_dim], their attention output before W_O.
        keys: [num_kv_heads, n, head_dim], after RoPE.
        values: [num_kv_heads, n, head_dim].
        w_o: [D_model, num_q_heads · head_dim].
        scaling: factor of the logits.
        first_position: original position of the node's first token.
        rotation: the layer's RoPE; only scorers that look ahead need it.
        prefix_keys: [Σ len_h, head_dim], the parent chain's kept keys, seen by every
            query, or None.
        prefix_cu: integers [num_kv_heads + 1], or None.
        positions: int64 [num_kv_heads, n], original positions where earlier steps have
            evicted entries; None: `first_position` and what follows.
        padding: int64 [num_kv_heads], leading entries that are none, where earlier steps
            have left heads of different length; None: no padding.
    """

    queries: Tensor
    out: Tensor
    keys: Tensor
    values: Tensor
    w_o: Tensor
    scaling: float
    first_position: int = 0
    rotation: Rotation | None = None
    prefix_keys: Tensor | None = None
    prefix_cu: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    @property
    def n(self) -> int:
        """Entries per head, padding included."""
        return self.keys.shape[1]

    @property
    def real(self) -> Tensor | None:
        """Mask of what is not padding, bool [num_kv_heads, n]; None: everything is real."""
        return None if self.padding is None else self.index >= self.padding[:, None]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def index(self) -> Tensor:
        """0 … n − 1, int64 [n]."""
        return torch.arange(self.n, device=self.keys.device)

    def last(self, count: int) -> Tensor:
        """Mask of the last `count` entries, bool [n]."""
        return self.index >= self.n - count

    def first(self, count: int) -> Tensor:
        """Mask of the entries of the node's first `count` tokens, bool [n] or [heads, n]."""
        if self.positions is None:
            return self.index < count
        return self.positions < self.first_position + count

    def asking(self, count: int) -> Tensor:
        """The last `count` queries, [num_q_heads, count, head_dim].

        Raises:
            ValueError: if there are fewer.
            NumericsError: if a key holds NaN or infinity: its own attention may be an
                innocent 0. A query's shows in every score.
        """
        if self.queries.shape[1] < count:
            raise ValueError(f"{self.queries.shape[1]} queries for a window of {count}")
        finite(self.keys, "keys")
        return self.queries[:, -count:]

    def output_weight(self, count: int, stride: int = 1) -> Tensor:
        """1/‖o_q‖², o_q the output after W_O; silent ones count as tiny.

        Returns:
            fp32 [⌈count / stride⌉], of each `stride`-th of the last `count` queries.
        """
        out = self.out[:, -count:][:, ::stride]
        norms = finite(ops.output_norms(out, self.w_o), "attention outputs")
        return norms.clamp_min(ops.MIN_NORM).square().reciprocal()

    def attention(
        self,
        count: int,
        *reductions: ops.Reduction,
        min_distance: int = 0,
        stride: int = 1,
        weight: Tensor | None = None,
    ) -> dict[ops.Reduction, Tensor]:
        """Return what the last `count` queries attend to, see `ops.attention_scores`.

        Of the queries only each `stride`-th asks. "sumsq" is weighted by `weight`, fp32
        [⌈count / stride⌉]; None: by their `output_weight`.

        Raises:
            ValueError, NumericsError: see `asking`.
        """
        queries = self.asking(count)
        if weight is None and "sumsq" in reductions:
            weight = self.output_weight(count, stride)
        return ops.attention_scores(
            queries[:, ::stride],
            self.keys,
            scaling=self.scaling,
            reductions=reductions,
            first_query=self.n - count,
            prefix_keys=self.prefix_keys,
            prefix_cu=self.prefix_cu,
            query_weight=weight,
            padding=self.padding,
            min_distance=min_distance,
            query_stride=stride,
        )

    def window_scores(
        self, count: int, kernel: int, pooling: ops.Pooling, over: Literal["mean", "sum"]
    ) -> Tensor:
        """Return the pooled attention of the last `count` queries, see `ops.window_scores`.

        Raises:
            ValueError, NumericsError: see `asking`.
        """
        return ops.window_scores(
            self.asking(count),
            self.keys,
            scaling=self.scaling,
            kernel=kernel,
            pooling=pooling,
            reduction=over,
            prefix_keys=self.prefix_keys,
            prefix_cu=self.prefix_cu,
        )

    def attention_rows(self, count: int) -> Iterator[ops.AttentionRows]:
        """Yield what the last `count` queries attend to, see `ops.attention_rows`.

        Raises:
            ValueError, NumericsError: see `asking`.
        """
        return ops.attention_rows(
            self.asking(count),
            self.keys,
            scaling=self.scaling,
            first_query=self.n - count,
            prefix_keys=self.prefix_keys,
            prefix_cu=self.prefix_cu,
            padding=self.padding,
        )
