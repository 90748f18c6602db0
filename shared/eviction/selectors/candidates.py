"""What a selector chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from criticalkv.shared.eviction.orders import Ranked


@dataclass(frozen=True)
class Candidates:
    """All evictable layers' entries with every score the policy uses.

    Attributes:
        forced: bool [layers, num_kv_heads, n].
        attention: always there.
        critical: only for selectors that read it.
        relative: only for selectors that read it.
    """

    forced: Tensor
    attention: Ranked
    critical: Ranked | None = None
    relative: Ranked | None = None

    def needed(self, name: str) -> Ranked:
        """Return a score that the selector reads; its absence is a caller's mistake."""
        ranked = getattr(self, name)
        if not isinstance(ranked, Ranked):
            raise ValueError(f"the selector needs {name} scores")
        return ranked
