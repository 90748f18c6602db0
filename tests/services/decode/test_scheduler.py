"""Who is next, and who makes room."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from criticalkv.services.decode.scheduler import WaitingLine, victim


@dataclass(frozen=True, eq=False)
class Item:
    """A sequence as far as it is scheduled."""

    tenant: str
    arrival: int


def anybody(_: Item) -> bool:
    return True


def admitted(line: WaitingLine[Item], running: list[Item], count: int) -> list[str]:
    """Admit so many; return their names."""
    names = []
    for _ in range(count):
        item = line.next(running)
        assert item is not None
        line.remove(item)
        running.append(item)
        names.append(f"{item.tenant}{item.arrival}")
    return names


def test_the_tenant_with_the_fewest_running_is_next() -> None:
    line: WaitingLine[Item] = WaitingLine()
    for item in (*(Item("a", n) for n in range(4)), Item("b", 4), Item("b", 5), Item("c", 6)):
        line.add(item)
    assert len(line) == len(list(line)) == 7
    assert admitted(line, [Item("b", 99)], 7) == ["a0", "c6", "a1", "b4", "a2", "b5", "a3"]
    assert line.next([]) is None
    assert len(line) == 0


def test_looking_takes_nobody_out_and_a_large_one_is_not_overtaken() -> None:
    line: WaitingLine[Item] = WaitingLine()
    large, small = Item("a", 0), Item("a", 1)
    line.add(large)
    line.add(small)
    assert line.next([]) is line.next([]) is large
    line.remove(small)
    assert line.next([]) is large


def test_a_tenants_own_come_in_the_order_of_their_arrival() -> None:
    """Whoever was measured first, and whoever had to make room meanwhile."""
    line: WaitingLine[Item] = WaitingLine()
    for arrival in (4, 3, 1, 5, 2):
        line.add(Item("a", arrival))
    line.add(Item("b", 0))
    assert admitted(line, [], 6) == ["b0", "a1", "a2", "a3", "a4", "a5"]


def test_only_who_came_later_makes_room() -> None:
    old, mid, new = (Item("a", n) for n in range(3))
    running = [new, old, mid]
    assert victim(old, running, anybody) is new
    assert victim(mid, running, anybody) is new
    assert victim(new, running, anybody) is new, "nobody came later: itself"
    assert victim(old, [old], anybody) is old
    assert victim(mid, [old, mid], anybody) is mid, "never the oldest"


def test_the_tenant_with_the_most_running_gives_its_latest() -> None:
    needy = Item("a", 0)
    running = [needy, Item("b", 1), Item("b", 2), Item("c", 3)]
    assert victim(needy, running, anybody) is running[2]
    # Its own tenant, too; but itself last of all.
    assert victim(needy, [needy, Item("a", 1), Item("b", 2)], anybody) is not needy
    crowd = [Item("a", 0), Item("a", 1), Item("a", 2), Item("b", 3)]
    assert victim(crowd[2], crowd, anybody) is crowd[3]
    late = [Item("a", 5), Item("b", 6)]
    assert victim(needy, [needy, *late], anybody) is late[0]


@pytest.mark.parametrize("stays", [1, 2])
def test_who_may_not_leave_stays(stays: int) -> None:
    running = [Item("a", n) for n in range(3)]
    got = victim(running[0], running, lambda s: s.arrival != stays)
    assert got is running[3 - stays]
    assert victim(running[0], running, lambda _: False) is None
