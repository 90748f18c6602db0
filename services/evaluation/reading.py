"""Readings: the node and the tier that each cell reads, all from one forward of a context."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from criticalkv.services.evaluation.answer import FULL, FULL_CELL, Cell
from criticalkv.services.local import LocalEngine, LocalNode
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.errors import InvalidRequestError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import POLICY_DENSE, canonical_tier

EVICTION = EvictionConfig(canary_queries=0)
"""Nobody looks at a canary here."""
PREFILL_S = 3600.0
"""Longest time of a context's forward, and of each policy after it."""


@dataclass(frozen=True)
class Reading:
    """What a cell sees of a context.

    Attributes:
        node: that holds it.
        tier: at which it is read.
        kept: entries read ÷ entries of the full cache.
        kept_bytes: stored bytes up to the tier.
    """

    node: LocalNode
    tier: str
    kept: float
    kept_bytes: int

    @classmethod
    def of(cls, node: LocalNode, tier: str) -> Reading:
        """Read a compressed context at a tier that it stores."""
        result = node.prefill
        assert result is not None
        at = result.tiers.index(tier)
        kept = result.tier_entries[at] / result.full_entries
        return cls(node, tier, kept, result.tier_bytes[at])

    def cache(self, engine: LocalEngine) -> RaggedCache:
        """Return the entries, on the CPU, as decoding sees them."""
        with engine.store.open_get(self.node.node_id, tier=self.tier) as reader:
            return assemble(reader.manifest, reader.tier, reader)


def read_each(
    engine: LocalEngine, context_ids: Sequence[int], cells: Collection[Cell]
) -> dict[Cell, Reading]:
    """Compress a context for every cell; its forward runs once.

    Raises:
        PolicyError, ContextLengthError: before anything is computed.
        DeadlineError: if one of its policies takes longer than PREFILL_S.
    """
    tiers = {canonical_tier(cell.tier) for cell in cells if not has_one_tier(cell.policy)}
    names = [_name(cell.policy) for cell in cells]
    nodes = engine.compress_each(context_ids, names, tiers=tiers, deadline_s=PREFILL_S)
    return {
        cell: Reading.of(nodes[_name(cell.policy)][tier], tier)
        for cell, tier in ((cell, canonical_tier(cell.tier)) for cell in cells)
    }


def check_cells(engine: LocalEngine, cells: Collection[Cell]) -> None:
    """Refuse cells that `read_each` cannot read.

    Raises:
        PolicyError: if a policy does not fit the model.
        InvalidRequestError: if there is no such tier.
    """
    for cell in cells:
        engine.prefill.check(_name(cell.policy))
        checked_tier(cell)


def checked_tier(cell: Cell) -> str:
    """Return a cell's tier as nodes name it.

    Raises:
        PolicyError: if its policy is none.
        InvalidRequestError: if the policy has no such tier.
    """
    try:
        tier = canonical_tier(cell.tier)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="tiers") from error
    if tier != FULL_CELL.tier and has_one_tier(cell.policy):
        raise InvalidRequestError(f"{cell.policy} has one tier, 1, not {tier}", param="tiers")
    return tier


def has_one_tier(policy: str) -> bool:
    """Whether a policy, or "full", stores one tier, called 1, whatever it keeps."""
    return policy == FULL or Policy.parse(policy).is_stepwise


def _name(policy: str) -> str:
    return POLICY_DENSE if policy == FULL else policy
