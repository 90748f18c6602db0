"""Policies and profiles for tests that cover every allocator with every selector."""

from __future__ import annotations

import random
from itertools import product
from typing import get_args

from criticalkv.shared.eviction.parameters import used_parameters
from criticalkv.shared.eviction.plan import Place
from criticalkv.shared.eviction.policy import Allocator, Policy, Selector
from criticalkv.shared.eviction.profile import Profile

ANY_DIGEST = "0" * 64
STATIC = ("headkv", "pyramidkv", "duo")
"""Allocators that decide on the whole model without its scores."""
# duo goes with the streaming scorer, which has no attention to multiply.
MATRIX = [
    (allocator, selector)
    for allocator, selector in product(get_args(Allocator), get_args(Selector))
    if allocator != "duo" or selector == "plain"
]
IDS = ["+".join(parts) for parts in MATRIX]


def make_policy(scorer: str, allocator: str, selector: str, **options: object) -> Policy:
    """Parse a policy with those of the options that its parts use.

    Where the allocator asks for one, it names a profile; duo gets its own scorer and
    few streaming entries, unless told.
    """
    if allocator == "duo":
        scorer, options = "streaming", {"sinks": 2, "recent": 3} | options
    options = {"profile": ANY_DIGEST} | options
    parts = {"scorer": scorer, "allocator": allocator, "selector": selector}
    used = used_parameters(options | parts)
    given = {key: value for key, value in options.items() if key in used and value != ""}
    text = ",".join(f"{key}={value}" for key, value in given.items())
    return Policy.parse(f"{scorer}+{allocator}+{selector}:{text}")


def make_profile(layers: int, heads: int, seed: int = 0) -> Profile:
    """A profile with ties and zeros."""
    draw = random.Random(seed)
    levels = (0.0, 0.001, 0.1, 0.1, 0.35, 2.0)
    rows = tuple(tuple(draw.choice(levels) for _ in range(heads)) for _ in range(layers))
    return Profile(model_digest="a" * 64, method="test", importance=rows)


def whole_model(layers: int, heads: int, seed: int = 0) -> Place:
    """All layers of a model, with a profile."""
    return Place.whole(layers, make_profile(layers, heads, seed))
