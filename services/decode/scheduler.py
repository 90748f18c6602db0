"""Who runs next, and who makes room: order among waiting and running sequences.

Fair between tenants: the one with the fewest running sequences is next; within a tenant
first come, first served, also for who had to make room. Nobody is overtaken because he
needs much. Knows no pages and no threads.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar


class Scheduled(Protocol):
    """What is scheduled."""

    @property
    def tenant(self) -> str:
        """Whose share it takes."""
        ...

    @property
    def arrival(self) -> int:
        """Number of the submission, ascending."""
        ...


S = TypeVar("S", bound=Scheduled)


class WaitingLine(Generic[S]):
    """Waiting sequences, one line for each tenant."""

    def __init__(self) -> None:
        self._lines: dict[str, list[S]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[S]:
        return (item for line in self._lines.values() for item in line)

    def add(self, item: S) -> None:
        """Put a sequence into its tenant's line, where its arrival belongs."""
        insort(self._lines.setdefault(item.tenant, []), item, key=lambda other: other.arrival)

    def remove(self, item: S) -> None:
        """Take a sequence out."""
        line = self._lines[item.tenant]
        line.remove(item)
        if not line:
            del self._lines[item.tenant]

    def next(self, running: Iterable[S]) -> S | None:
        """Return who is next, without taking it out."""
        share = Counter(item.tenant for item in running)
        heads = [line[0] for line in self._lines.values()]
        return min(heads, key=lambda item: (share[item.tenant], item.arrival), default=None)


def victim(needy: S, running: Sequence[S], may_leave: Callable[[S], bool]) -> S | None:
    """Return who makes room for `needy`, itself at worst; None if nobody can.

    Only who came later makes room, so the oldest always comes to its end. Among them
    the tenant with the most running sequences gives its latest.
    """
    share = Counter(item.tenant for item in running)
    later = [s for s in running if s.arrival >= needy.arrival and may_leave(s)]
    return max(later, key=lambda s: (s is not needy, share[s.tenant], s.arrival), default=None)
