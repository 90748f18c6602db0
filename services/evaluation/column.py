"""Columns: the cells of a run, with their policies' full names, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from criticalkv.services.evaluation.answer import FULL, FULL_CELL, Cell
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import canonical_tier


@dataclass(frozen=True)
class Column:
    """A cell, and its policy's full textual form: two spellings of one policy are one column."""

    cell: Cell
    canonical: str


def columns(policies: Sequence[str], tiers: str, *, full: bool = True) -> tuple[Column, ...]:
    """Return the columns of a run: the full cache, then policy after policy, tiers ascending.

    Args:
        policies: as their user spelled them; "full" is the full cache.
        tiers: kept fractions, comma-separated. A stepwise policy has none: it is asked once.
        full: whether the full cache is a column even if it is not named.

    Raises:
        ConfigError, PolicyError: naming what does not parse.
    """
    fractions = _fractions(tiers)
    found: dict[tuple[str, str], Column] = {}
    for policy in (FULL,) * full + tuple(policies):
        for column in _columns(policy, fractions):
            found.setdefault((column.canonical, column.cell.tier), column)
    return tuple(found.values())


def _columns(policy: str, tiers: Sequence[str]) -> list[Column]:
    if policy == FULL:
        return [Column(FULL_CELL, FULL)]
    parsed = Policy.parse(policy)
    mine = (FULL_CELL.tier,) if parsed.is_stepwise else tiers
    return [Column(Cell(policy, tier), parsed.canonical()) for tier in mine]


def _fractions(tiers: str) -> list[str]:
    try:
        found = {canonical_tier(tier.strip()) for tier in tiers.split(",")}
    except ValueError as error:
        raise ConfigError(f"--tiers {tiers[:100]!r}: {error}", param="tiers") from error
    return sorted(found, key=float)
