"""Watch a model go on after a context: what its queries see, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from criticalkv.services.analysis.query_rows import QueryRows, query_rows, value_norms
from criticalkv.services.local.side_by_side import SideBySide
from criticalkv.shared.cache.ragged import dense_layer
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel

WINDOW = 32
"""Last queries of the context: those that window policies score by."""


@dataclass(frozen=True)
class LayerView:
    """One full-attention layer with its untouched cache.

    Attributes:
        layer: of the model.
        n: entries per head of the context; what follows them is never evicted.
        after: queries after the context that predict the answer, over context and
            continuation.
        window: the context's last queries, over the context.
    """

    layer: int
    n: int
    after: QueryRows
    window: QueryRows


class _Watch:
    """AttentionPlan of a continuation over the full cache of its context."""

    def __init__(
        self,
        model: LoadedModel,
        context: SideBySide,
        answer: int,
        look: Callable[[LayerView], None],
    ) -> None:
        self._model = model
        self._context = context
        self._answer = answer
        self._look = look

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan. Shows full-attention layers on the way."""
        past = self._context.layers[call.layer].call
        if call.window is None:
            self._look(self._view(past, call))
        n = past.key.shape[1]
        before = dense_layer(past.key, past.value, 0)
        return attend_ragged(call, before, call.key, call.value, n)

    def _view(self, past: LayerCall, call: LayerCall) -> LayerView:
        n, scaling, w_o = past.key.shape[1], call.scaling, self._model.w_o(call.layer)
        keys = torch.cat([past.key, call.key], 1)
        values = torch.cat([past.value, call.value], 1)
        norms = value_norms(values, w_o)
        own = {kind: norm[..., :n] for kind, norm in norms.items()}
        asked, window = call.query[:, -self._answer :], past.query[:, -WINDOW:]
        return LayerView(
            call.layer,
            n,
            query_rows(asked, keys, values, w_o, norms, scaling=scaling),
            query_rows(window, past.key, past.value, w_o, own, scaling=scaling),
        )


def watch(
    model: LoadedModel,
    context: SideBySide,
    question: Sequence[int],
    answer: Sequence[int],
    look: Callable[[LayerView], None],
) -> None:
    """Teacher-force an answer after the full cache and show each layer.

    Only one layer's rows are in memory at a time.

    Args:
        model: that computed the context.
        context: the full KV.
        question: tokens before the answer, at least one.
        answer: at least one; the queries of interest are those that predict its tokens.
        look: called with each full-attention layer.
    """
    tokens = torch.tensor([*question, *answer[:-1]], device=model.device)
    n = context.layers[0].call.key.shape[1]
    positions = torch.arange(n, n + tokens.numel(), device=model.device)
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    forward(model.model, tokens, positions, _Watch(model, context, len(answer), look), none)
