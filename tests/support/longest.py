"""The longest length at which there is an example."""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.shared.errors import ConfigError


def longest_that_is_made(make: Callable[[int], object], made: int, refused: int) -> int:
    """Return it, between a length that is made and a longer one that is refused."""
    while refused - made > 1:
        length = (made + refused) // 2
        try:
            make(length)
            made = length
        except ConfigError:
            refused = length
    return made
