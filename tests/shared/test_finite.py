"""One pass over a tensor finds NaN and infinity, and nothing else."""

import pytest
import torch

from criticalkv.shared.finite import is_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_element_is_found(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.ones(3, 50, dtype=dtype)
    tensor[1, 7] = bad
    assert not is_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opposite_infinities_do_not_cancel(dtype: torch.dtype) -> None:
    assert not is_finite(torch.tensor([torch.inf, -torch.inf, 1.0], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0, 4))
