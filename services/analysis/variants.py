"""Policies that differ from another in one part or option."""

from __future__ import annotations

from collections.abc import Mapping

from criticalkv.shared.eviction.parameters import used_parameters
from criticalkv.shared.eviction.policy import PARTS, Policy


def varied(policy: Policy, /, **changes: str) -> Policy:
    """Return a policy with other parts or options; options that no part uses any more go.

    Args:
        policy: to start from.
        changes: by the name of a part (scorer, allocator, selector) or option, as text.

    Raises:
        PolicyError: if there is no such policy.
    """
    head, _, tail = policy.canonical().partition(":")
    named = dict(zip(PARTS, head.split("+"), strict=True))
    given = dict(item.split("=", 1) for item in tail.split(",")) | changes
    parts = named | {part: given.pop(part) for part in PARTS if part in given}
    used = used_parameters(given | parts)
    options = {key: value for key, value in given.items() if key in used or key in changes}
    text = ",".join(f"{key}={value}" for key, value in options.items())
    return Policy.parse("+".join(parts.values()) + ":" + text)


def critical_of(base: Policy, options: Mapping[str, str] | None = None) -> Policy:
    """Return a policy with CriticalKV's two stages instead of its own selector.

    Args:
        base: to start from.
        options: that differ from the defaults.

    Raises:
        PolicyError: if they do not go together.
    """
    return varied(base, **{**(options or {}), "selector": "twostage"})
