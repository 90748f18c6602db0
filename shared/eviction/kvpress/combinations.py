"""Which policies kvpress 0.5.5 has. No torch: policies are checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCORERS = ("window", "tova", "streaming", "knorm", "keydiff", "expected")
PLAIN = ("plain",)
ALLOCATORS: dict[str, dict[str, tuple[str, ...]]] = {
    "uniform": dict.fromkeys(SCORERS, ("plain", "twostage")),
    "adakv": dict.fromkeys(SCORERS, ("plain", "twostage")) | {"replay": PLAIN},
    "pyramidkv": {"window": PLAIN},
    "duo": {"streaming": PLAIN},
    "model": {"replay": PLAIN},
}
"""allocator → scorer → selectors."""
FIXED: dict[str, dict[str, object]] = {
    "window": {"pooling": "avg"},
    "tova": {"recent": 1},
    "replay": {"recent": 0, "share": 1, "echo_weight": 0, "self_weight": 0},
    "twostage": {"eps_per_token": False, "norm": "l1", "second": "critical"},
}
"""Parameters of a part that kvpress does not have, and what it does instead."""


def refusal(policy: Mapping[str, Any]) -> str | None:
    """Return why kvpress has no such policy, None if it has.

    Args:
        policy: all fields of a Policy.
    """
    scorer, allocator, selector = (policy[x] for x in ("scorer", "allocator", "selector"))
    if selector not in ALLOCATORS.get(allocator, {}).get(scorer, ()):
        return (
            f"preset kvpress has no {scorer}+{allocator}+{selector}; with {allocator} it has "
            f"{_names(allocator)}"
        )
    for part in (scorer, selector):
        for name, value in FIXED.get(part, {}).items():
            if policy[name] != value:
                return f"preset kvpress has no {name} with {part}; it does {name}={_plain(value)}"
    if scorer == "replay" and allocator == "adakv" and policy["safeguard"]:
        return "preset kvpress has no safeguard with replay; give safeguard=0"
    return None


def _names(allocator: str) -> str:
    """The combinations of one allocator, in words."""
    pairs = ALLOCATORS.get(allocator, {}).items()
    return ", ".join(f"{scorer}+…+{'|'.join(ways)}" for scorer, ways in pairs) or "nothing"


def _plain(value: object) -> str:
    return str(value).lower()
