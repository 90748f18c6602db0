"""How near compressed caches stay to the full one: KL and agreement, case by case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from criticalkv.services.evaluation.case import Case
from criticalkv.services.evaluation.forced import divergence
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.services.local.side_by_side import SideBySide, answer_logprobs, greedy
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profiles
from criticalkv.shared.model.loader import LoadedModel

TIERS = ("0.05", "0.1", "0.2", "0.4", "0.6")


@dataclass
class Table:
    """Samples of every policy and tier: KL and agreement, case by case."""

    cells: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    full: list[float] = field(default_factory=list)

    def add(self, policy: str, tier: str, kl: float, agreement: float) -> None:
        """Add one case's sample."""
        self.cells.setdefault(policy, {}).setdefault(tier, []).append((kl, agreement))

    def kl(self, policy: str, tier: str) -> float | None:
        """Mean KL, or None if not measured."""
        return self._mean(policy, tier, 0)

    def over_full(self, policy: str, tier: str) -> float | None:
        """Agreement ÷ the full cache's on the same cases, or None."""
        right, cases = self._mean(policy, tier, 1), self.cells.get(policy, {}).get(tier, [])
        full = sum(self.full[: len(cases)])
        return None if right is None or not full else right * len(cases) / full

    def _mean(self, policy: str, tier: str, which: int) -> float | None:
        samples = [s[which] for s in self.cells.get(policy, {}).get(tier, [])]
        return Estimate.of(samples).mean if samples else None

    def estimates(self) -> dict[str, Any]:
        """Every cell with its confidence intervals."""
        return {
            policy: {
                tier: {
                    "kl": Estimate.of([s[0] for s in samples]).as_json(),
                    "agreement": Estimate.of([s[1] for s in samples]).as_json(),
                }
                for tier, samples in row.items()
            }
            for policy, row in self.cells.items()
        }


class Closeness:
    """Compares every policy and tier with the full cache of one model."""

    def __init__(self, model: LoadedModel, eviction: EvictionConfig) -> None:
        self._model = model
        spec = model.spec
        self._profiles = Profiles(
            Path(eviction.profiles_dir), spec.model_digest, spec.num_layers, spec.num_kv_heads
        )

    def check(self, policies: Iterable[str]) -> None:
        """Refuse policies that cannot be measured, before anything is.

        Raises:
            PolicyError: if one cannot be parsed, or its profile not be read.
        """
        for text in policies:
            self._profiles.of(Policy.parse(text))

    def of_case(self, case: Case, named: dict[str, str], table: Table) -> None:
        """Add a case with a known answer; agreement = every token of it is the likeliest."""
        context, answer = SideBySide(self._model, case.context_ids), case.answer_ids
        wanted = torch.tensor(answer, device=self._model.device)
        full = self._follow([context.full()], case.question_ids, answer)[0]
        table.full.append(float((full.argmax(-1) == wanted).all()))
        for name, tier, found in self._answers(context, named, case.question_ids, answer):
            right = float((found.argmax(-1) == wanted).all())
            table.add(name, tier, divergence(full, found), right)

    def of_continuation(
        self,
        context_ids: Sequence[int],
        question: Sequence[int],
        tokens: int,
        named: dict[str, str],
        table: Table,
    ) -> None:
        """Add a case whose answer is what the full cache says; agreement = top-1, per token."""
        context = SideBySide(self._model, context_ids)
        answer = greedy(self._model, context.full(), question, tokens)
        full = self._follow([context.full()], question, answer)[0]
        for name, tier, found in self._answers(context, named, question, answer):
            same = float((found.argmax(-1) == full.argmax(-1)).float().mean())
            table.add(name, tier, divergence(full, found), same)

    def _answers(
        self,
        context: SideBySide,
        named: dict[str, str],
        question: Sequence[int],
        answer: Sequence[int],
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name, tier, log probabilities [answer, vocab]) of every policy and tier."""
        for name, text in named.items():
            caches = self._every_tier(context, Policy.parse(text))
            found = self._follow(caches, question, answer)
            for tier, logprobs in zip(TIERS, found, strict=True):
                yield name, tier, logprobs

    def _every_tier(self, context: SideBySide, policy: Policy) -> list[RaggedCache]:
        profile = self._profiles.of(policy)
        cache = context.compress(policy, TIERS, profile).cache
        if cache.tiers == TIERS:
            return [cache.at_tier(tier) for tier in TIERS]
        # Not nested: each tier is a cache of its own.
        return [context.compress(policy, (tier,), profile).cache for tier in TIERS]

    def _follow(
        self, caches: Sequence[RaggedCache], question: Sequence[int], answer: Sequence[int]
    ) -> Tensor:
        return answer_logprobs(self._model, caches, question, answer)
