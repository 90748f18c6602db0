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
from criticalkv.shared.eviction.canary import Asked, Canary
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
        canary: Canary | None = None,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._policy = policy
        self._tiers = tiers
        self._first = first_position
        self._profile = profile
        self._canary = canary
        self._rankings: list[Ranking] = []

    def take(self, layer: LayerPass) -> None:
        """Score, rank and send one layer."""
        scores, keys, values, first = own_scores(self._model, self._policy, layer, self._first)
        place = Place((layer.call.layer,), evictable_layers(self._model), self._profile)
        ranking = rank_layers([scores], self._policy, self._tiers, place)
        self._rankings.append(ranking)
        packed = build_layer(ranking, 0, keys, values, first)
        self._publisher.send(packed, ranking.tier_lens[:, 0])
        asked = _asked(self._canary, self._model, layer)
        if self._canary and asked:
            kept, w_o = ranking.order[0].indices, self._model.w_o(layer.call.layer)
            self._canary.add(asked, keys, values, w_o, kept, ranking.tier_lens[:, 0])

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
        canary: Canary | None = None,
    ) -> None:
        self._model = model
        self._publisher = publisher
        self._policy = policy
        self._tiers = tiers
        self._first = first_position
        self._profile = profile
        self._canary = canary
        self.layers: list[SpooledLayer] = []

    def take(self, layer: LayerPass) -> None:
        """Keep a layer."""
        spooled = SpooledLayer.of(self._model, self._policy, layer, self._first)
        spooled.asked = _asked(self._canary, self._model, layer)
        self.layers.append(spooled)

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
            self._look(index, ranking)
            spooled.keys = spooled.values = torch.empty(0)
            self._publisher.send(packed, ranking.tier_lens[:, index])
        return ranking

    def _look(self, index: int, ranking: Ranking) -> None:
        """Let the canary see a ranked layer."""
        spooled, device = self.layers[index], self._model.device
        if self._canary and spooled.asked:
            entries = (spooled.keys.to(device), spooled.values.to(device))
            kept, lens = ranking.order[index].indices, ranking.tier_lens[:, index]
            self._canary.add(spooled.asked, *entries, self._model.w_o(index), kept, lens)

    def _scores_of(self, index: int) -> LayerScores:
        spooled = self.layers[index]
        if spooled.window is not None:
            heads, n, _ = spooled.keys.shape
            return LayerScores.everything(heads, n - cut_start(n, spooled.window))
        assert spooled.scores is not None
        return spooled.scores


def _asked(canary: Canary | None, model: LoadedModel, layer: LayerPass) -> Asked | None:
    """What the canary keeps of a layer; sliding-window layers evict nothing that is seen."""
    call = layer.call
    if canary is None or call.window is not None:
        return None
    return canary.ask(call.query, call.scaling, layer.prefix, model.w_o(call.layer))
