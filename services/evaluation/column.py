"""Columns: the cells of a run, with their policies' full names, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from criticalkv.services.evaluation.answer import FULL, FULL_CELL, Cell
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import CODEC_RAW, canonical_tier


@dataclass(frozen=True)
class Column:
    """One column of a run.

    Attributes:
        cell: what is asked.
        canonical: its policy's full textual form: two spellings are one column.
        below: the run's lower tiers, where the policy's codec quantizes: its groups never
            cross a tier, so that the values at one depend on those below. Else empty.
    """

    cell: Cell
    canonical: str
    below: tuple[str, ...] = ()


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
    is_raw = parsed.codec == CODEC_RAW
    return [
        Column(Cell(policy, tier), parsed.canonical(), () if is_raw else tuple(mine[:i]))
        for i, tier in enumerate(mine)
    ]


def _fractions(tiers: str) -> list[str]:
    try:
        found = {canonical_tier(tier.strip()) for tier in tiers.split(",")}
    except ValueError as error:
        raise ConfigError(f"--tiers {tiers[:100]!r}: {error}", param="tiers") from error
    return sorted(found, key=float)
