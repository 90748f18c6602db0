"""Uniform budgets: every head keeps the same number of entries."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest


def uniform(contest: Contest) -> Tensor:
    """Give every head ⌊n·t⌋ entries, at least one, and never fewer than are forced."""
    return contest.kept.counts.clamp_min(min(contest.n, contest.per_head))
