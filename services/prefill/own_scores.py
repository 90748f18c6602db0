"""Scores of a layer by what the context's own forward computed."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.lookup import scorer_of
from criticalkv.shared.eviction.scores import LayerScores
from criticalkv.shared.model.loader import LoadedModel


class OwnScores(NamedTuple):
    """A layer's scores and the entries that they are about.

    Attributes:
        scores: of n entries.
        keys: [num_kv_heads, n, head_dim].
        values: like keys.
        first: position of the first entry.
    """

    scores: LayerScores
    keys: Tensor
    values: Tensor
    first: int


def own_scores(
    model: LoadedModel, policy: Policy | None, layer: LayerPass, first_position: int
) -> OwnScores:
    """Score a layer by what its own forward computed.

    A sliding-window layer is cut to its last `window` entries and keeps them all.
    """
    call = layer.call
    heads, n, _ = call.key.shape
    if policy is None or call.window is not None:
        begin = cut_start(n, call.window)
        scores = LayerScores.everything(heads, n - begin, call.key.device)
        return OwnScores(scores, call.key[:, begin:], call.value[:, begin:], first_position + begin)
    context = context_layer(model, layer, first_position)
    return OwnScores(scorer_of(policy)(policy, context), call.key, call.value, first_position)


def context_layer(model: LoadedModel, layer: LayerPass, first_position: int) -> ContextLayer:
    """Show a full-attention layer to a scorer."""
    call = layer.call
    has_prefix = layer.prefix.keys.shape[0] > 0
    return ContextLayer(
        queries=call.query,
        out=layer.out,
        keys=call.key,
        values=call.value,
        w_o=model.w_o(call.layer),
        scaling=call.scaling,
        first_position=first_position,
        rotation=partial(model.rotation, call.layer),
        prefix_keys=layer.prefix.keys if has_prefix else None,
        prefix_cu=layer.prefix.cu_seqlens if has_prefix else None,
    )


def evictable_layers(model: LoadedModel) -> tuple[int, ...]:
    """The model's full-attention layers; sliding-window layers keep their window."""
    return tuple(i for i, window in enumerate(model.spec.sliding_windows) if window is None)


def cut_start(n: int, window: int | None) -> int:
    """First of n entries that a layer with this sliding window still sees."""
    return 0 if window is None else max(0, n - window)
