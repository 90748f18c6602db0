"""Pages: handed out once, taken back, and their bytes are what is said."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_pool import spec_of

from criticalkv.services.decode.pages import Pages


def pages_of(total: int, page_size: int = 4, dtype: str = "float32", slack: int = 0) -> Pages:
    spec = replace(spec_of(dim=8), dtype=dtype)
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    page_bytes = page_size * (2 * 8 * itemsize + 4)
    return Pages(spec, torch.device("cpu"), total * page_bytes + slack, page_size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_limit_is_kept_to_the_byte(dtype: str) -> None:
    pages = pages_of(7, dtype=dtype)
    arrays = (pages.keys, pages.values, pages.positions)
    assert sum(a.numel() * a.element_size() for a in arrays) == 7 * pages.page_bytes
    assert (pages.total, pages.free) == (7, 7)
    assert pages_of(7, dtype=dtype, slack=-1).total == 6
    assert pages_of(7, dtype=dtype, slack=pages.page_bytes - 1).total == 7


def test_all_are_handed_out_once_and_no_more() -> None:
    pages = pages_of(5)
    first, second = pages.take(2), pages.take(3)
    assert first is not None
    assert second is not None
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert pages.take(1) is None
    none = pages.take(0)
    assert none is not None
    assert none.size == 0
    pages.give_back(first)
    assert pages.take(3) is None, "a part of what is wanted is nothing"
    assert pages.free == 2
    again = pages.take(2)
    assert again is not None
    assert sorted(again) == sorted(first), "those in memory already go out first"


def test_what_was_handed_out_is_the_callers() -> None:
    pages = pages_of(4)
    mine, others = pages.take(2), pages.take(2)
    assert mine is not None
    assert others is not None
    before = others.copy()
    pages.give_back(mine)
    assert (others == before).all()
    pages.give_back(np.empty((2, 0, 3), np.int32))
    assert pages.free == 2


def test_too_many_back_are_noticed() -> None:
    pages = pages_of(3)
    mine = pages.take(2)
    assert mine is not None
    pages.give_back(mine.reshape(1, 2))
    with pytest.raises(AssertionError, match="twice"):
        pages.give_back(mine)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that are switched all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_no_page_has_two_owners_under_threads() -> None:
    pages = pages_of(64)
    owners = np.zeros(64, np.int32)
    trouble = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            mine = pages.take(int(rng.integers(1, 20)))
            if mine is None:
                continue
            owners[mine] += 1
            if (owners[mine] != 1).any():
                trouble.append(mine)
            owners[mine] -= 1
            pages.give_back(mine)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not trouble
    everything = pages.take(64)
    assert everything is not None
    assert sorted(everything) == list(range(64))


def test_entries_come_back_bit_for_bit() -> None:
    pages = pages_of(3)
    rows = torch.tensor([11, 0, 5])
    keys, values = torch.randn(3, 8), torch.randn(3, 8)
    for array in (pages.keys, pages.values):
        array.zero_()
    pages.positions.zero_()
    pages.write(rows, keys, values, torch.tensor([70, 80, 90]))
    assert [t.tolist() for t in pages.read(rows)] == [keys.tolist(), values.tolist(), [70, 80, 90]]
    assert pages.positions.tolist() == [[80, 0, 0, 0], [0, 90, 0, 0], [0, 0, 0, 70]]
    assert int((pages.keys != 0).any(-1).sum()) == 3, "nothing else is touched"
    read = pages.read(rows)[0]
    pages.keys.zero_()
    assert (read == keys).all(), "a read is a copy"
