"""Which tokens a replay repeats."""

from __future__ import annotations

import itertools

import pytest

from criticalkv.services.prefill.replay_pass import replayed
from criticalkv.shared.eviction.policy import Policy


def passes(n: int, chunk: int, share: str) -> list[list[int]]:
    policy = Policy.parse(f"replay+model+relative:chunk={chunk},share={share}")
    return replayed(list(range(n)), policy)


def test_everything_chunk_by_chunk() -> None:
    assert passes(40, 16, "1") == [[*range(16)], [*range(16, 32)], [*range(32, 40)]]
    assert passes(5, 16, "1") == [[*range(5)]]


def test_the_beginnings_of_chunks_fill_passes() -> None:
    """A quarter of each 16 tokens: four beginnings fit into a pass of 16."""
    begins = [[*range(b, b + 4)] for b in range(0, 80, 16)]
    assert passes(80, 16, "0.25") == [[*itertools.chain(*begins[:4])], begins[4]]


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 33, 100])
@pytest.mark.parametrize("share", ["0.001", "0.125", "0.3", "0.99", "1"])
def test_shares_round_up_and_passes_are_bounded(n: int, share: str) -> None:
    found = passes(n, 16, share)
    assert all(0 < len(part) <= 16 for part in found)
    flat = [*itertools.chain(*found)]
    assert flat == sorted(set(flat))
    for begin in range(0, n, 16):
        count = min(16, n - begin)
        here = [t for t in flat if begin <= t < begin + count]
        assert here == list(range(begin, begin + len(here)))
        assert len(here) - 1 < float(share) * count <= len(here)
