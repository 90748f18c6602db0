"""What requests have in common: their blocks as a tree, and where its paths part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

Path = tuple[int, ...]
"""Nodes of the tree, from the root down; the root itself is left out."""
_ROOT = 0
_NOWHERE = -1


class PrefixTree:
    """The paths of requests that are known in advance.

    Args:
        requests: the blocks of each, first block first.
    """

    def __init__(self, requests: Iterable[Sequence[Hashable]]) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}
        self.paths = [self._path(blocks) for blocks in requests]
        self._visits = Counter(node for path in self.paths for node in path)

    def partings(self, path: Path, most: int) -> tuple[int, ...]:
        """Return how many leading blocks a request shares with others, in ascending order.

        Up to there it goes with at least one other request, and not with all of them any
        further. A node of the tree is such a place or is not, whoever asks: requests that
        go the same way are cut at the same places.

        Args:
            path: of the request.
            most: of them, counted from the root.
        """
        shared = (
            depth
            for depth, (node, following) in enumerate(pairwise([*path, _NOWHERE]), start=1)
            if 1 < self._visits[node] != self._visits[following]
        )
        return tuple(shared)[:most]

    def known(self) -> list[int]:
        """Return how many leading blocks of each request are those of an earlier one."""
        seen: set[int] = set()
        counts = []
        for path in self.paths:
            counts.append(sum(node in seen for node in path))
            seen.update(path)
        return counts

    def _path(self, blocks: Sequence[Hashable]) -> Path:
        path, node = [], _ROOT
        for block in blocks:
            node = self._nodes.setdefault((node, block), len(self._nodes) + 1)
            path.append(node)
        return tuple(path)
