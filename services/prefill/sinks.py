"""What happens to a layer once its attention is done: two ways to compress a node.

`StreamingSink` ranks, sends and frees each layer at once. `SpoolingSink` keeps full KV on
the host until every layer has scores: from the context's own window, or from a replay.
"""

from __future__ import annotations

from typing import Protocol

import torch

from criticalkv.services.prefill.context_pass import LayerPass
from criticalkv.services.prefill.own_scores import cut_start, evictable_layers, own_scores
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.ranking import Ranking, build_layer, join_rankings, rank_layers
from criticalkv.shared.eviction.plan import Place
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
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
        first = [self._first + cut_start(s.keys.shape[1], s.window) for s in self.layers]
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
            return LayerScores.everything(heads, n - cut_start(n, spooled.window))
        assert spooled.scores is not None
        return spooled.scores
