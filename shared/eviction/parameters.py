"""Which parameters each part of a policy uses, with its own defaults; and the aliases.

A value of None means the default of `Policy`'s field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Defaults = dict[str, Any]

SCORERS: dict[str, Defaults] = {
    "window": {"window": None, "kernel": None, "pooling": None},
    "h2o": {"window": None, "span": None},
    "tova": {"recent": 1},
    "streaming": {"sinks": None},
    "knorm": {},
    "keydiff": {},
    "expected": {"sinks": None, "future": None, "covariance": None, "vnorm": None},
    "obcache": {"window": None, "kernel": None, "pooling": None},
    "defensive": {"window": None, "kernel": 5, "pooling": "avg"},
    "replay": {
        **{"sinks": None, "recent": None, "chunk": None, "share": None},
        **{"echo_weight": None, "echo_chunk": None, "echo_reach": None},
        **{"self_weight": None, "distance": None, "stride": None},
    },
    "echo": {
        **{"sinks": None, "recent": None, "echo_chunk": None, "echo_reach": None},
        **{"self_weight": None, "distance": None, "stride": None},
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
    "twostage": {
        "alpha": None,
        "eps": None,
        "eps_per_token": None,
        "norm": None,
        "second": None,
    },
    "critical": {"eps": None, "eps_per_token": None, "norm": None},
    "relative": {},
}
EVERY: Defaults = {"preset": None, "interval": None, "keep": None, "target": None}

PRESETS: dict[str, dict[str, Defaults]] = {
    "kvpress": {
        "window": {"window": 64, "kernel": 5, "pooling": "avg"},
        "expected": {"offset": None},
        "replay": {"recent": 0, "chunk": 2048},
    },
    "official": {},
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


def used_parameters(parts: Mapping[str, Any]) -> Defaults:
    """Return the parameters that a policy's parts use, with defaults that differ.

    Args:
        parts: scorer, allocator, selector, and preset where it is not `paper`.
    """
    used = dict(EVERY)
    preset = PRESETS.get(str(parts.get("preset", "paper")), {})
    for table, name in (
        (SCORERS, "scorer"),
        (ALLOCATORS, "allocator"),
        (SELECTORS, "selector"),
    ):
        part = str(parts.get(name))
        used |= table.get(part, {})
        used |= preset.get(part, {})
    return used
