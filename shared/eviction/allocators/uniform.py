"""Uniform budgets: every head keeps the same number of entries."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest


def uniform(contest: Contest) -> Tensor:
    """Give every head ⌊n·t⌋ entries, at least one, and never fewer than are forced."""
    forced = contest.forced
    return forced.sum(-1).clamp_min(min(forced.shape[-1], contest.per_head))
