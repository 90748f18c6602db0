"""Model-wide budgets: all heads of all layers compete."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.orders import floor_of, take


def model(contest: Contest) -> Tensor:
    """Spread ⌊layers·heads·n·t⌋ entries by one top-k over the model (as KVzip does).

    Forced entries come first and count. A head may end empty.
    """
    forced = contest.forced
    heads = forced.shape[0] * forced.shape[1]
    spare = (floor_of(contest.tier, heads * contest.tokens) - forced.sum()).clamp_min(0)
    best = take(contest.ranked.by_model, ~forced.flatten(), spare).view_as(forced)
    return (forced | best).sum(-1)
