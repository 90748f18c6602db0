"""AdaKV: heads compete within each layer (arXiv 2407.11550)."""

from __future__ import annotations

import torch
from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.allocators.uniform import uniform
from criticalkv.shared.eviction.orders import floors_of, take


def adakv(contest: Contest) -> Tensor:
    """Spread each layer's uniform total over its heads by one top-k.

    Outside the forced entries every head has c = max(⌊n·t⌋ − forced, 0). It keeps its
    own best ⌊safeguard·c⌋; what remains of the layer's Σ c goes to the layer's best
    remaining entries, wherever they are. The total is exact, no head ends empty.
    """
    ranked, forced = contest.ranked, contest.forced
    forced_count = forced.sum(-1)
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
