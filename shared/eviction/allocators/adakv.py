"""AdaKV: heads compete within each layer (arXiv 2407.11550)."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.allocators.uniform import uniform
from criticalkv.shared.eviction.orders import floors_of, take


def adakv(contest: Contest) -> Tensor:
    """Spread each layer's uniform total over its heads by one top-k.

    Outside the forced entries every head has c = max(⌊n·t⌋ − forced, 0). It keeps its
    own best ⌊safeguard·c⌋; what remains of the layer's Σ c goes to the layer's best
    remaining entries, wherever they are. The total is exact, no head ends empty. Under
    preset `official` heads are rounded as the authors' code does, see `_rounded`.
    """
    # DefensiveKV's own code allots as we do.
    if contest.policy.preset == "official" and contest.policy.scorer != "defensive":
        return _rounded(contest)
    ranked, forced = contest.ranked, contest.forced
    forced_count = contest.kept.counts
    spare = uniform(contest) - forced_count
    floors = floors_of(contest.policy.safeguard, spare)
    floors = torch.where(forced_count == 0, floors.clamp_min(1).minimum(spare), floors)
    guarded = take(ranked.by_head, ~forced, floors)
    rest = take(
        ranked.by_layer,
        ~(forced | guarded).flatten(1),
        (spare - floors).sum(-1),
    ).view_as(forced)
    return (forced | guarded | rest).sum(-1)


def _rounded(contest: Contest) -> Tensor:
    """The authors' budgets: c_h·(1 − safeguard) + ⌊safeguard·c⌋, rounded half to even.

    c_h is what a head wins in one top-k of the layer's Σ c. Each head is rounded by
    itself, so a layer's total drifts. A budget of all entries evicts nothing.
    """
    budgets, forced = uniform(contest), contest.kept.counts
    if contest.per_head >= contest.n:
        return budgets
    spare = budgets - forced
    best = take(contest.ranked.by_layer, ~contest.forced.flatten(1), spare.sum(-1))
    won = best.view_as(contest.forced).sum(-1)
    floors = floors_of(contest.policy.safeguard, spare)
    share = 1 - Fraction(contest.policy.safeguard)
    pairs = zip(won.flatten().tolist(), floors.flatten().tolist(), strict=True)
    rounded = torch.tensor([round(share * w + floor) for w, floor in pairs], device=won.device)
    return forced + rounded.view_as(forced)
