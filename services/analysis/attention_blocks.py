"""A layer's attention over its own sequence, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.shared.model.attention import LayerCall


class AttentionBlock(NamedTuple):
    """Queries of one KV head's group.

    Attributes:
        kv_head: whose keys they see.
        heads: their query heads.
        queries: their tokens.
        logits: fp32 [group_size, queries, n], −∞ where a query does not see; may be changed.
        probs: A, like logits.
    """

    kv_head: int
    heads: slice
    queries: slice
    logits: Tensor
    probs: Tensor

    @property
    def visible(self) -> Tensor:
        """Keys that each query sees, int64 [queries]."""
        return (self.logits[0] > -torch.inf).sum(-1)


def attention_blocks(call: LayerCall, first: int = 0) -> Iterator[AttentionBlock]:
    """Yield A of the tokens from `first` on, causal and within the layer's sliding window.

    Args:
        call: a layer over a whole sequence that starts at position 0.
        first: below the number of tokens.
    """
    group = call.query.shape[0] // call.key.shape[0]
    for head, begin, logits, probs in ops.attention_rows(
        call.query[:, first:], call.key, scaling=call.scaling, first_query=first
    ):
        start = first + begin
        queries = slice(start, start + logits.shape[1])
        if call.window is not None:
            passed = _passed(queries, call.key, call.window)
            probs = logits.masked_fill_(passed, -torch.inf).softmax(-1)
        yield AttentionBlock(head, slice(head * group, (head + 1) * group), queries, logits, probs)


def _passed(queries: slice, keys: Tensor, window: int) -> Tensor:
    """Say which keys a sliding window has passed, bool [queries, n]."""
    columns = torch.arange(keys.shape[1], device=keys.device)
    return columns <= columns[queries, None] - window
