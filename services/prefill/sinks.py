"""What happens to a layer once its attention is done: three ways to compress a node.

`StreamingSink` ranks, sends and frees each layer at once. `SpoolingSink` keeps full KV on
the host until every layer has scores: from the context's own window, or from a replay.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.shared.cache.ranking import Ranking, build_layer, join_rankings, rank_layers
from criticalkv.shared.eviction.context_layer import ContextLayer
from criticalkv.shared.eviction.plan import Place
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.eviction.scorers.lookup import scorer_of
from criticalkv.shared.eviction.scorers.replay import first_pass_sumsq
from criticalkv.shared.eviction.scores import LayerScores
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.publish import NodePublisher


class Sink(Protocol):
    """A LayerSink that ends with a ranking."""

    def take(self, layer: LayerPass) -> None:
        """See LayerSink."""
        ...

    def finish(self) -> Ranking:
        """Send what is left and return the node's ranking."""
        ...


class StreamingSink:
    """Ranks, sends and frees each layer by itself. Also dense nodes (policy None)."""

    def __init__(
        self,
        model: LoadedModel,
        publisher: NodePublisher,
        policy: Policy | None,
        tiers: tuple[str, ...],
        first_position: int,
        profile: Profile | None = None,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._policy = policy
        self._tiers = tiers
        self._first = first_position
        self._profile = profile
        self._rankings: list[Ranking] = []

    def take(self, layer: LayerPass) -> None:
        """Score, rank and send one layer."""
        scores, keys, values, first = own_scores(self._model, self._policy, layer, self._first)
        place = Place((layer.call.layer,), evictable_layers(self._model), self._profile)
        ranking = rank_layers([scores], self._policy, self._tiers, place)
        self._rankings.append(ranking)
        packed = build_layer(ranking, 0, keys, values, first)
        self._publisher.send(packed, ranking.tier_lens[:, 0])

    def finish(self) -> Ranking:
        """Join the layers' rankings."""
        return join_rankings(self._rankings)


class SpooledLayer:
    """Full KV of one layer, on the host; and what the context's own queries said of it.

    Attributes:
        scores: of scorers that look at these queries; a replay gives them later.
        first_pass: what a replay adds to its own sums, on the host, or None.
    """

    def __init__(
        self, layer: LayerPass, scores: LayerScores | None, first_pass: Tensor | None = None
    ) -> None:
        self.keys = layer.call.key.contiguous().cpu()
        self.values = layer.call.value.contiguous().cpu()
        self.window = layer.call.window
        self.scores = scores
        self.first_pass = None if first_pass is None else first_pass.cpu()

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


class SpoolingSink:
    """Keeps every layer until all have scores, then ranks and sends the whole node."""

    def __init__(
        self,
        model: LoadedModel,
        publisher: NodePublisher,
        policy: Policy,
        tiers: tuple[str, ...],
        first_position: int,
        profile: Profile | None = None,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._policy = policy
        self._tiers = tiers
        self._first = first_position
        self._profile = profile
        self.layers: list[SpooledLayer] = []

    def take(self, layer: LayerPass) -> None:
        """Keep a layer."""
        self.layers.append(SpooledLayer.of(self._model, self._policy, layer, self._first))

    def finish(self) -> Ranking:
        """Rank over all layers and send them, freeing each as it goes."""
        first = [self._first + _cut_start(s.keys.shape[1], s.window) for s in self.layers]
        evictable = evictable_layers(self._model)
        ranking = rank_layers(
            [self._scores_of(i) for i in range(len(self.layers))],
            self._policy,
            self._tiers,
            Place(evictable, evictable, self._profile),
        )
        for index in range(len(self.layers)):
            spooled = self.layers[index]
            begin = first[index] - self._first
            packed = build_layer(
                ranking, index, spooled.keys[:, begin:], spooled.values[:, begin:], first[index]
            )
            spooled.keys = spooled.values = torch.empty(0)
            self._publisher.send(packed, ranking.tier_lens[:, index])
        return ranking

    def _scores_of(self, index: int) -> LayerScores:
        spooled = self.layers[index]
        if spooled.window is not None:
            heads, n, _ = spooled.keys.shape
            return LayerScores.everything(heads, n - _cut_start(n, spooled.window))
        assert spooled.scores is not None
        return spooled.scores


def own_scores(
    model: LoadedModel, policy: Policy | None, layer: LayerPass, first_position: int
) -> tuple[LayerScores, Tensor, Tensor, int]:
    """Score a layer by what its own forward computed.

    Returns:
        scores, then the keys and values they are about and the position of the first: a
        sliding-window layer is cut to its last `window` entries and keeps them all.
    """
    call = layer.call
    heads, n, _ = call.key.shape
    if policy is None or call.window is not None:
        begin = _cut_start(n, call.window)
        scores = LayerScores.everything(heads, n - begin, call.key.device)
        return scores, call.key[:, begin:], call.value[:, begin:], first_position + begin
    context = context_layer(model, layer, first_position)
    return scorer_of(policy)(policy, context), call.key, call.value, first_position


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
        rotation=model.rotation,
        prefix_keys=layer.prefix.keys if has_prefix else None,
        prefix_cu=layer.prefix.cu_seqlens if has_prefix else None,
    )


def evictable_layers(model: LoadedModel) -> tuple[int, ...]:
    """The model's full-attention layers; sliding-window layers keep their window."""
    return tuple(i for i, window in enumerate(model.spec.sliding_windows) if window is None)


def _cut_start(n: int, window: int | None) -> int:
    return 0 if window is None else max(0, n - window)
