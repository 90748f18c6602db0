"""The perturbation of every head under several policies and tiers, over several texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from criticalkv.services.analysis.kept import Kept, kept_of
from criticalkv.services.analysis.perturbation import kept_share, perturbation
from criticalkv.services.analysis.query_rows import NORMS, QueryRows
from criticalkv.services.analysis.watch import LayerView, watch
from criticalkv.services.evaluation.case import Case
from criticalkv.services.local.side_by_side import SideBySide
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.profile import Profile
from criticalkv.shared.model.loader import LoadedModel

Queries = Literal["after", "window"]
QUERIES: tuple[Queries, ...] = get_args(Queries)
ANSWER_TOKENS = 48
"""Of each answer, as far as they are looked at."""
HALF = 0.5
"""σ that Assumption 3.4 asks of the first stage."""

Figures = dict[str, Tensor]
"""fp64 [num_q_heads], means over queries; those of a whole layer, []:

sigma, low (share of queries with σ ≤ ½), first_sigma and first_low (the same of CriticalKV's
first stage), and per norm actual_, theta_, attention_only_, layer_."""


class Cell(NamedTuple):
    """Whose figures these are."""

    policy: str
    tier: str
    queries: Queries


@dataclass
class Study:
    """Figures of policies, text by text.

    Attributes:
        model: whose attention it is.
        policies: by any names.
        tiers: kept fractions.
        profiles: of policies that need the model's.
        found: per cell, for each text, figures of all evictable layers: [layers, …].
        layers: the model's layers that evict.
        checked: queries whose change was compared with its bounds.
        violations: of those, how many were beyond.
    """

    model: LoadedModel
    policies: Mapping[str, Policy]
    tiers: Sequence[str]
    profiles: Mapping[str, Profile | None] = field(default_factory=dict)
    found: dict[Cell, list[Figures]] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    checked: int = 0
    violations: int = 0

    def add(self, case: Case) -> None:
        """Run one text and measure what every policy would do to it.

        Raises:
            PolicyError: if a policy is stepwise.
        """
        context = SideBySide(self.model, case.context_ids)
        kept = {
            name: kept_of(context, policy, self.tiers, self.profiles.get(name))
            for name, policy in self.policies.items()
        }
        self.layers = next(iter(kept.values())).layers
        seen: dict[Cell, list[Figures]] = {}
        answer = case.answer_ids[:ANSWER_TOKENS]
        watch(
            *(self.model, context, case.question_ids, answer),
            lambda view: self._look(view, kept, seen),
        )
        for cell, layers in seen.items():
            joined = {name: torch.stack([x[name] for x in layers]) for name in layers[0]}
            self.found.setdefault(cell, []).append(joined)

    def mean(self, cell: Cell, figure: str) -> Tensor:
        """Return a figure's mean over the texts, fp64 [layers, num_q_heads] or [layers]."""
        return torch.stack([figures[figure] for figures in self.found[cell]]).mean(0)

    def _look(
        self, view: LayerView, kept: Mapping[str, Kept], seen: dict[Cell, list[Figures]]
    ) -> None:
        at = self.layers.index(view.layer)
        for name, choice in kept.items():
            for tier in self.tiers:
                first = choice.first[tier][at] if choice.first else None
                for queries in QUERIES:
                    figures = self._figures(getattr(view, queries), choice.masks[tier][at], first)
                    seen.setdefault(Cell(name, tier, queries), []).append(figures)

    def _figures(self, rows: QueryRows, kept: Tensor, first: Tensor | None) -> Figures:
        """Measure one layer. What follows the context is kept."""
        more = (0, rows.columns - kept.shape[1])
        found = perturbation(rows, F.pad(kept, more, value=True))
        self.checked += found.sigma.numel()
        self.violations += found.violations()
        figures = _shares(found.sigma, "")
        if first is not None:
            figures |= _shares(kept_share(rows, F.pad(first, more, value=True)), "first_")
        for norm in NORMS:
            figures |= {
                f"actual_{norm}": found.actual[norm].mean(-1),
                f"theta_{norm}": found.bounds[norm].theta.mean(-1),
                f"attention_only_{norm}": found.bounds[norm].attention_only.mean(-1),
                f"layer_{norm}": found.layer[norm].mean(-1),
            }
        return {name: figure.cpu() for name, figure in figures.items()}


def _shares(sigma: Tensor, prefix: str) -> Figures:
    low = (sigma <= HALF).double()
    return {f"{prefix}sigma": sigma.mean(-1), f"{prefix}low": low.mean(-1)}
