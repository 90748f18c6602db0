"""One context under many policies: the forward runs once, every policy scores the same KV.

For comparisons in one process. Nothing is stored: the caches stay in memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from criticalkv.services.prefill.context_pass import ComputedContext, LayerPass
from criticalkv.services.prefill.kvpress_replay import replay_pass_of
from criticalkv.services.prefill.own_scores import OwnScores, evictable_layers, own_scores
from criticalkv.services.prefill.spooled_layer import SpooledLayer
from criticalkv.shared.cache.codec import layout_of
from criticalkv.shared.cache.quantized import quantize_layer
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.ranking import Ranking, build_layer, rank_layers
from criticalkv.shared.chain import Chain
from criticalkv.shared.errors import PolicyError
from criticalkv.shared.eviction.plan import Place
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.model.attention import LayerCall, attend_ragged, forward
from criticalkv.shared.model.loader import LoadedModel


@dataclass(frozen=True)
class Scored:
    """What a policy kept, at every tier, and what choosing cost.

    Attributes:
        cache: at the highest tier; `at_tier` cuts it.
        scoring_s: seconds of scoring, ranking and packing (and replay).
    """

    cache: RaggedCache
    scoring_s: float


class SideBySide:
    """The full KV of one context, to be compressed in several ways."""

    def __init__(self, model: LoadedModel, token_ids: Sequence[int]) -> None:
        """Run the context once and keep what every scorer may need."""
        self._model = model
        self._context = ComputedContext.of(model, token_ids)

    @property
    def layers(self) -> Sequence[LayerPass]:
        """What each layer's forward computed, in order."""
        return self._context.layers

    def compress(
        self, policy: Policy, tiers: Sequence[str], profile: Profile | None = None
    ) -> Scored:
        """Keep what a policy keeps, up to the highest of `tiers`, as its codec leaves it.

        Raises:
            PolicyError: if the policy is stepwise: its KV is not that of the one forward.
        """
        started = time.perf_counter()
        kept = self.score(policy)
        evictable = evictable_layers(self._model)
        place = Place(evictable, evictable, profile)
        ranking = rank_layers([part.scores for part in kept], policy, tiers, place)
        cache = as_read(self._cache(ranking, kept), policy.codec)
        return Scored(cache, time.perf_counter() - started)

    def score(self, policy: Policy) -> list[OwnScores]:
        """Return what a policy's scorer says of every layer, a replay included.

        Raises:
            PolicyError: if the policy is stepwise.
        """
        if policy.is_stepwise:
            raise PolicyError("a stepwise policy needs a forward of its own", param="policy")
        looked = [own_scores(self._model, self._first_look(policy), x, 0) for x in self.layers]
        if policy.scorer != "replay":
            return looked
        spooled = [SpooledLayer.of(self._model, policy, x, 0) for x in self.layers]
        replay = replay_pass_of(policy)
        replay(self._model, policy, Chain(), spooled, lambda: None).run(self._context.token_ids)
        pairs = zip(looked, spooled, strict=True)
        return [part._replace(scores=x.scores or part.scores) for part, x in pairs]

    def full(self) -> RaggedCache:
        """The untouched cache, as tier 1 of anything."""
        kept = [own_scores(self._model, None, layer, 0) for layer in self.layers]
        return self._cache(rank_layers([part[0] for part in kept], None, ("1",)), kept)

    def _cache(self, ranking: Ranking, kept: Sequence[OwnScores]) -> RaggedCache:
        """Pack what a ranking keeps of the layers' own entries."""
        layers = tuple(
            build_layer(ranking, i, keys, values, first)
            for i, (_, keys, values, first) in enumerate(kept)
        )
        n = len(self._context.token_ids)
        return RaggedCache(layers, n, n, ranking.tiers, ranking.tier_lens)

    def _first_look(self, policy: Policy) -> Policy | None:
        return None if policy.scorer == "replay" else policy


def as_read(cache: RaggedCache, codec: str) -> RaggedCache:
    """Return a cache as readers get it from a node of this codec.

    Raises:
        ValueError: if the codec cannot hold the cache's head_dim.
    """
    layout = layout_of(codec, cache.layers[0].keys.shape[1])
    if layout is None:
        return cache
    layers = (
        quantize_layer(layer, cache.tier_lens[:, i], layout).ragged(layer.keys.dtype)
        for i, layer in enumerate(cache.layers)
    )
    return replace(cache, layers=tuple(layers))


class _Answers:
    """AttentionPlan: the same tokens after each of several caches, in one batch."""

    def __init__(self, caches: Sequence[RaggedCache], tokens: int) -> None:
        self._caches = caches
        self._tokens = tokens

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan."""
        parts = call.split([self._tokens] * len(self._caches))
        outs = [_after(cache, part) for cache, part in zip(self._caches, parts, strict=True)]
        return torch.cat(outs, dim=1)


def _after(cache: RaggedCache, call: LayerCall) -> Tensor:
    """Attend to a cache, wherever it lies, and to the tokens after it."""
    layer = cache.layers[call.layer].to(call.query.device)
    return attend_ragged(call, layer, call.key, call.value, cache.next_position)


def answer_logprobs(
    model: LoadedModel,
    caches: Sequence[RaggedCache],
    question: Sequence[int],
    answer: Sequence[int],
) -> Tensor:
    """Teacher-force an answer after each cache.

    Args:
        model: that computed the caches.
        caches: of one context, all ending at one position.
        question: tokens before the answer.
        answer: tokens whose predictions are wanted.

    Returns:
        fp32 log probabilities [caches, len(answer), vocab].
    """
    tokens = [*question, *answer[:-1]]
    begin, count = caches[0].next_position, len(caches)
    positions = torch.arange(begin, begin + len(tokens)).repeat(count)
    wanted = torch.arange(len(question) - 1, len(tokens))
    at = (torch.arange(count)[:, None] * len(tokens) + wanted).flatten()
    logits = forward(
        model.model,
        torch.tensor(tokens).repeat(count).to(model.device),
        positions.to(model.device),
        _Answers(caches, len(tokens)),
        at.to(model.device),
    )
    return logits.float().log_softmax(-1).view(count, len(answer), -1)


def greedy(
    model: LoadedModel, cache: RaggedCache, question: Sequence[int], max_tokens: int
) -> list[int]:
    """Generate an answer after a cache, greedily, up to an end token."""
    answer: list[int] = []
    while len(answer) < max_tokens:
        logprobs = answer_logprobs(model, [cache], question, [*answer, 0])
        answer.append(int(logprobs[0, -1].argmax()))
        if answer[-1] in model.spec.eos_token_ids:
            break
    return answer
