"""Which policies differ under preset `official`: the authors' code, where that is not the paper.

No torch: policies are checked where they are read.
"""

from __future__ import annotations

COMBINATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "window": {
        "uniform": ("plain", "twostage", "critical"),
        "adakv": ("plain", "twostage", "critical"),
    },
    "defensive": dict.fromkeys(("uniform", "adakv", "model"), ("plain",)),
}
"""scorer → allocator → selectors. SnapKV sums over its window, AdaKV rounds each head's
budget by itself, DefensiveKV has a first stage."""


def refusal(scorer: str, allocator: str, selector: str, *, reads_relative: bool) -> str | None:
    """Return why there is no official form of a policy, None if there is one."""
    selectors = COMBINATIONS.get(scorer, {}).get(allocator, ())
    if selector in selectors and not reads_relative:
        return None
    known = ", ".join(
        f"{scorer}+{'|'.join(ways)}+{'|'.join(dict.fromkeys(s for w in ways.values() for s in w))}"
        for scorer, ways in COMBINATIONS.items()
    )
    relative = " with relative scores" if reads_relative and selector in selectors else ""
    return (
        f"preset official has no {scorer}+{allocator}+{selector}{relative}; it has {known}, "
        "without relative scores"
    )
