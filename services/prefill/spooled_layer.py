"""A layer whose full KV waits on the host until every layer has scores."""

from __future__ import annotations

from torch import Tensor

from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.services.prefill.own_scores import context_layer, own_scores
from criticalkv.shared.eviction.canary import Asked
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers.replay import first_pass_sumsq
from criticalkv.shared.eviction.scores import LayerScores
from criticalkv.shared.model.loader import LoadedModel


class SpooledLayer:
    """Full KV of one layer, on the host; and what the context's own queries said of it.

    Attributes:
        scores: of scorers that look at these queries; a replay gives them later.
        first_pass: what a replay adds to its own sums, on the host, or None.
        asked: what a canary keeps of the queries, or None.
    """

    def __init__(
        self, layer: LayerPass, scores: LayerScores | None, first_pass: Tensor | None = None
    ) -> None:
        self.keys = layer.call.key.contiguous().cpu()
        self.values = layer.call.value.contiguous().cpu()
        self.window = layer.call.window
        self.scores = scores
        self.first_pass = None if first_pass is None else first_pass.cpu()
        self.asked: Asked | None = None

    @classmethod
    def of(
        cls, model: LoadedModel, policy: Policy, layer: LayerPass, first_position: int
    ) -> SpooledLayer:
        """Keep a layer; score it now as far as the policy looks at its own queries."""
        if policy.scorer != "replay":
            return cls(layer, own_scores(model, policy, layer, first_position)[0])
        if layer.call.window is not None:
            return cls(layer, None)
        context = context_layer(model, layer, first_position)
        return cls(layer, None, first_pass_sumsq(policy, context))
