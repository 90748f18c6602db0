"""Value norms against a loop over heads, rows and columns."""

import naive_value_norm
import pytest
import torch
from torch import Tensor

from criticalkv.kernels import ops, reference

torch.set_num_threads(1)

SHAPES = [
    # num_kv_heads, group_size, n, head_dim, D_model
    (1, 1, 1, 64, 64),
    (2, 3, 13, 64, 384),
    (3, 2, 7, 80, 101),
    (2, 8, 31, 96, 1536),
    (1, 5, 17, 16, 1031),
    (1, 7, 3, 128, 257),
    (1, 2, 5, 256, 67),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_naive(
    shape: tuple[int, int, int, int, int], norm: ops.Norm, dtype: torch.dtype
) -> None:
    heads, group, n, dim, width = shape
    torch.manual_seed(n)
    values = torch.randn(heads, n, dim).to(dtype)
    w_o = torch.randn(width, heads * group * dim).to(dtype)
    got = ops.value_norm(values, w_o, group, norm)
    assert got.dtype == torch.float32
    assert got.shape == (heads, group, n)
    expected = naive_value_norm.value_norm(values, w_o, group, norm)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_blocks_do_not_change_the_result(norm: ops.Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    values, w_o = torch.randn(2, 41, 16), torch.randn(1500, 2 * 2 * 16)
    whole = ops.value_norm(values, w_o, 2, norm)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 5000)
    torch.testing.assert_close(ops.value_norm(values, w_o, 2, norm), whole, rtol=1e-5, atol=1e-5)


def test_zero_values_have_zero_norm() -> None:
    zero = torch.zeros(2, 3, 8)
    assert ops.value_norm(zero, torch.randn(5, 32), 2, "l2").eq(0).all()
    assert ops.value_norm(zero, torch.randn(5, 32), 2, "l1").eq(0).all()


def test_wrong_w_o_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ops.value_norm(torch.zeros(2, 3, 8), torch.zeros(5, 33), 2)


def test_output_norms_equal_the_projected_output() -> None:
    torch.manual_seed(1)
    out, w_o = torch.randn(6, 5, 8), torch.randn(11, 48)
    for i in range(5):
        joined = torch.cat([out[h, i] for h in range(6)]).double()
        expected = (w_o.double() @ joined).norm()
        torch.testing.assert_close(
            ops.output_norms(out, w_o)[i].double(), expected, rtol=1e-5, atol=1e-5
        )


def test_output_norms_never_hold_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    out, w_o = torch.randn(4, 41, 8), torch.randn(30, 32)
    whole = ops.output_norms(out, w_o)
    seen: list[int] = []
    linear = reference.F.linear

    def noting(rows: Tensor, weight: Tensor) -> Tensor:
        seen.append(max(rows.numel(), rows.shape[0] * weight.shape[0]))
        return linear(rows, weight)

    monkeypatch.setattr(reference.F, "linear", noting)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 200)
    torch.testing.assert_close(ops.output_norms(out, w_o), whole)
    assert max(seen) <= 200
