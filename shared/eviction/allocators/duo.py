"""DuoAttention: retrieval heads keep everything, streaming heads a few (arXiv 2410.10819)."""

from __future__ import annotations

from torch import Tensor

from criticalkv.shared.eviction.allocators.contest import Contest
from criticalkv.shared.eviction.orders import floor_of


def duo(contest: Contest) -> Tensor:
    """Let whole heads be full, the most important first, as far as the total goes.

    All heads keep sinks + recent entries, also where that is more than ⌊L·heads·n·t⌋. The
    first head that does not fit whole, and all after it, get no more. Ties in importance
    go to the lower (layer, head).
    """
    n, policy = contest.n, contest.policy
    few = min(n, max(1, policy.sinks + policy.recent))
    budgets = [max(few, forced) for forced in contest.forced_of_all()]
    left = floor_of(contest.tier, len(budgets) * contest.tokens) - sum(budgets)
    importance = contest.importance()
    for head in sorted(range(len(budgets)), key=lambda head: (-importance[head], head)):
        left -= n - budgets[head]
        if left < 0:
            break
        budgets[head] = n
    return contest.rows(budgets)
