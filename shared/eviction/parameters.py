"""Which parameters each part of a policy uses, with its own defaults; and the aliases.

A value of None means the default of `Policy`'s field.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

Defaults = dict[str, Any]

ECHO: Defaults = {"echo_chunk": None, "echo_reach": None}
SELF: Defaults = {"distance": None, "stride": None}
CRITICAL: Defaults = {"eps": None, "eps_per_token": None, "norm": None}

SCORERS: dict[str, Defaults] = {
    "window": {"window": None, "kernel": None, "pooling": None},
    "h2o": {"window": None, "span": None},
    "tova": {"recent": 1},
    "streaming": {"sinks": None},
    "knorm": {},
    "keydiff": {},
    "expected": {"sinks": None, "future": None, "covariance": None},
    "obcache": {"window": None, "kernel": None, "pooling": None},
    "defensive": {"window": None, "kernel": 5, "pooling": "avg"},
    "replay": {
        **{"sinks": None, "recent": None, "chunk": None, "share": None},
        **{"echo_weight": None, "self_weight": None},
    },
    "echo": {
        **{"sinks": None, "recent": None, "echo_chunk": None, "echo_reach": None},
        "self_weight": None,
    },
    "self": {"sinks": None, "recent": None, "distance": None, "stride": 1},
}
ALLOCATORS: dict[str, Defaults] = {
    "uniform": {},
    "adakv": {"safeguard": None},
    "headkv": {"profile": None, "beta": "1.5"},
    "pyramidkv": {"beta": None},
    "duo": {"profile": None, "sinks": 128, "recent": 256},
    "model": {},
}
SELECTORS: dict[str, Defaults] = {
    "plain": {},
    "twostage": {"alpha": None, "second": None},
    "critical": CRITICAL,
    "relative": {},
}
EVERY: Defaults = dict.fromkeys(("preset", "interval", "keep", "target", "codec"))

PRESETS: dict[str, dict[str, Defaults]] = {
    "kvpress": {
        "window": {"window": 64, "kernel": 5, "pooling": "avg"},
        "expected": {"offset": None},
        "replay": {"recent": 0, "chunk": 2048},
    },
}
"""Defaults of a part where a preset has its own."""

ALIASES = {
    "default": "replay+model+relative:share=0.125,echo_weight=4,echo_reach=512",
    "snapkv": "window+uniform+plain",
    "adakv": "window+adakv+plain",
    "pyramidkv": "window+pyramidkv+plain",
    "criticalkv": "window+uniform+twostage",
    "criticaladakv": "window+adakv+twostage",
    "h2o": "h2o+uniform+plain",
    "tova": "tova+uniform+plain",
    "streamingllm": "streaming+uniform+plain",
    "knorm": "knorm+uniform+plain",
    "keydiff": "keydiff+uniform+plain",
    "expectedattention": "expected+uniform+plain",
    "obcache": "obcache+uniform+plain",
    "defensivekv": "defensive+adakv+plain:safeguard=0",
    "layerdefensivekv": "defensive+model+plain",
    "kvzip": "replay+model+plain",
    # What kvpress 0.5.5 keeps.
    "snapkv-kvpress": "window+uniform+plain:preset=kvpress",
    "adakv-kvpress": "window+adakv+plain:preset=kvpress",
    "pyramidkv-kvpress": "window+pyramidkv+plain:preset=kvpress",
    "criticalkv-kvpress": "window+uniform+twostage:preset=kvpress",
    "criticaladakv-kvpress": "window+adakv+twostage:preset=kvpress",
    "tova-kvpress": "tova+uniform+plain:preset=kvpress",
    "streamingllm-kvpress": "streaming+uniform+plain:preset=kvpress",
    "knorm-kvpress": "knorm+uniform+plain:preset=kvpress",
    "keydiff-kvpress": "keydiff+uniform+plain:preset=kvpress",
    "expectedattention-kvpress": "expected+uniform+plain:preset=kvpress",
    "duo-kvpress": "streaming+duo+plain:preset=kvpress",
    "kvzip-kvpress": "replay+model+plain:preset=kvpress",
    "kvziplayerwise-kvpress": "replay+adakv+plain:preset=kvpress,safeguard=0",
}
"""Short names of policies that are well known."""


def used_parameters(options: Mapping[str, Any]) -> Defaults:
    """Return the parameters that a policy uses, with defaults that differ.

    What another parameter switches off is not among them: a policy has one name.

    Args:
        options: scorer, allocator, selector, and what else is given of a policy; values
            as they are, or as text.
    """
    used = dict(EVERY)
    preset = PRESETS.get(str(options.get("preset", "paper")), {})
    for table, name in (
        (SCORERS, "scorer"),
        (ALLOCATORS, "allocator"),
        (SELECTORS, "selector"),
    ):
        part = str(options.get(name))
        used |= table.get(part, {})
        used |= preset.get(part, {})
    return used | _switched(options)


def _switched(options: Mapping[str, Any]) -> Defaults:
    """Parameters that matter only next to certain values of others."""
    scorer, selector = options.get("scorer"), options.get("selector")
    more: Defaults = {}
    if scorer == "replay" and _is_on(options, "echo_weight"):
        more |= ECHO
    if scorer in ("replay", "echo") and _is_on(options, "self_weight"):
        more |= SELF
    if selector == "twostage" and options.get("second", "critical") != "relative":
        more |= CRITICAL
    # Critical selectors multiply by a value norm themselves; kvpress does it twice.
    multiplied = selector in ("critical", "twostage") and options.get("preset") != "kvpress"
    if scorer == "expected" and not multiplied:
        more["vnorm"] = None
    return more


def _is_on(options: Mapping[str, Any], name: str) -> bool:
    """Whether a weight is given and not 0; what is no number is refused elsewhere."""
    try:
        return Decimal(str(options.get(name, 0))) != 0
    except InvalidOperation:
        return True
