"""Which function scores for a policy."""

from __future__ import annotations

from criticalkv.shared.eviction.kvpress.scorers import KVPRESS_SCORERS
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.eviction.scorers import SCORERS, ScorerFn


def scorer_of(policy: Policy) -> ScorerFn:
    """Return the scorer that a policy names, as its preset has it.

    Raises:
        KeyError: for `replay`, whose scores come from a second pass.
    """
    table = KVPRESS_SCORERS if policy.preset == "kvpress" else SCORERS
    return table[policy.scorer]
