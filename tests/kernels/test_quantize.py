"""Quantized groups: the bytes of loops over elements, and what an error may be."""

from __future__ import annotations

import naive_quantize
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_quantize import group_bytes, parse, random_entries
from torch import Tensor

from criticalkv.kernels import ops, quantized_reference
from criticalkv.kernels.group_layout import MAX_MAGNITUDE, ROWS, GroupLayout

torch.set_num_threads(1)

BITS = [8, 4]
DIMS = [2, 6, 34, 64, 80, 96, 128]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP32 = 2.0**-24
"""Half a unit in the last place of 1."""

entry_sets = st.builds(
    dict,
    dim=st.sampled_from(DIMS),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    fills=st.lists(st.integers(1, ROWS), min_size=1, max_size=4),
    seed=st.integers(0, 2**30),
    spread=st.sampled_from([0.0, 1e-8, 1e-4, 1.0, 300.0, 60000.0]),
    offset=st.sampled_from([0.0, 1e-6, -3.0, 1000.1, -65504.0]),
)


class Quantized:
    """Groups of random entries, laid one after another."""

    def __init__(
        self,
        *,
        dim: int,
        bits: int,
        fills: list[int],
        seed: int = 0,
        spread: float = 1.0,
        offset: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.bits, self.layout, self.counts = bits, GroupLayout(bits, dim), fills
        entries = random_entries(sum(fills), dim, seed=seed, spread=spread, offset=offset)
        self.keys, self.values = (_in_range(x, dtype) for x in entries[:2])
        self.positions = entries[2]
        self.fills = torch.tensor(fills)
        self.starts = self.fills.cumsum(0) - self.fills
        self.groups = self.quantized(slice(None))

    def quantized(self, which: slice) -> tuple[Tensor, Tensor]:
        """Quantize some of the groups."""
        starts, fills = self.starts[which], self.fills[which]
        return ops.quantize(self.keys, self.values, self.positions, starts, fills, self.bits)

    def rows(self, group: int) -> slice:
        """Entries of one group."""
        return slice(int(self.starts[group]), int(self.starts[group]) + self.counts[group])

    def parsed(self, group: int) -> naive_quantize.Group:
        key, value = (part[group] for part in self.groups)
        return parse(key, value, self.bits, self.layout.head_dim)


def _in_range(x: Tensor, dtype: torch.dtype) -> Tensor:
    # bf16 rounds 65504 up to 65536, which no fp16 holds.
    return x.clamp(-65280, 65280).to(dtype) if dtype == torch.bfloat16 else x.to(dtype)


@settings(max_examples=40, deadline=None)
@given(entry_sets)
def test_bytes_are_those_of_loops(given: dict) -> None:  # type: ignore[type-arg]
    q = Quantized(**given)
    assert q.groups[0].shape == (len(q.counts), q.layout.key_bytes)
    assert q.groups[1].shape == (len(q.counts), q.layout.value_bytes)
    for g in range(len(q.counts)):
        rows = q.rows(g)
        key, value = group_bytes(q.keys[rows], q.values[rows], q.positions[rows].tolist(), q.bits)
        assert q.groups[0][g].numpy().tobytes() == key
        assert q.groups[1][g].numpy().tobytes() == value


@settings(max_examples=100, deadline=None)
@given(entry_sets)
def test_no_error_exceeds_half_a_step(given: dict) -> None:  # type: ignore[type-arg]
    q = Quantized(**given)
    keys, values, _ = ops.dequantize(*q.groups, q.fills, q.layout)
    for g, fill in enumerate(q.counts):
        rows, parsed = q.rows(g), q.parsed(g)
        affine = np.array([parsed.key_scale, parsed.key_zero], float)[:, None]
        _check_errors(keys[rows], q.keys[rows], *affine, q.layout.levels)
        scale, zero = parsed.wide_value_affine
        _check_errors(values[rows], q.values[rows], scale[:fill], zero[:fill], q.layout.levels)


def _check_errors(
    got: Tensor,
    given: Tensor,
    scale: np.ndarray,  # type: ignore[type-arg]
    zero: np.ndarray,  # type: ignore[type-arg]
    levels: int,
) -> None:
    """Errors are at most half a step, and the range covers every element."""
    x = given.double().numpy()
    rounding = 4 * FP32 * (np.abs(x) + np.abs(zero) + levels * scale)
    assert (np.abs(got.double().numpy() - x) <= scale / 2 + rounding).all()
    assert (zero <= x).all()
    assert (x <= zero + levels * scale + rounding).all()


@settings(max_examples=40, deadline=None)
@given(entry_sets)
def test_ranges_are_no_wider_than_fp16_needs(given: dict) -> None:  # type: ignore[type-arg]
    q = Quantized(**given)
    for g in range(len(q.counts)):
        x, parsed = q.keys[q.rows(g)].double().numpy(), q.parsed(g)
        scale, zero = parsed.key_scale, parsed.key_zero
        up, down = np.float16(np.inf), np.float16(-np.inf)
        with np.errstate(over="ignore"):
            assert (np.nextafter(zero, up).astype(float) > x.min(0)).all()
        narrower = np.nextafter(scale, down).astype(float)
        spread = x.max(0) - zero.astype(float)
        tight = q.layout.levels * narrower <= spread * (1 + 4 * FP32)
        assert (tight | (scale == 0)).all()


@settings(max_examples=25, deadline=None)
@given(entry_sets)
def test_groups_do_not_depend_on_one_another(given: dict) -> None:  # type: ignore[type-arg]
    q = Quantized(**given)
    for g in range(len(q.counts)):
        alone = q.quantized(slice(g, g + 1))
        assert torch.equal(alone[0][0], q.groups[0][g])
        assert torch.equal(alone[1][0], q.groups[1][g])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("fills", [[1], [31, 32, 1, 17]], ids=str)
def test_unused_rows_are_zero(fills: list[int], bits: int) -> None:
    q = Quantized(dim=80, bits=bits, fills=fills, offset=5.0)
    for g, fill in enumerate(fills):
        parsed = q.parsed(g)
        for rows in (parsed.key_codes, parsed.value_codes, parsed.value_scale, parsed.value_zero):
            assert not rows[fill:].any()
        assert not parsed.positions[fill:].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5, -65504.0, 65504.0, 6e-8])
def test_what_fp16_holds_exactly_stays_exact_where_it_is_constant(
    constant: float, bits: int
) -> None:
    kv = torch.full((5, 64), np.float16(constant).item())
    layout, fills = GroupLayout(bits, 64), torch.tensor([5])
    groups = ops.quantize(kv, kv, torch.arange(5), torch.tensor([0]), fills, bits)
    keys, values, _ = ops.dequantize(*groups, fills, layout)
    assert torch.equal(keys, kv)
    assert torch.equal(values, kv)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_numbers_stay_finite(bits: int) -> None:
    kv = torch.tensor([[-MAX_MAGNITUDE, MAX_MAGNITUDE, 1.0, 0.0]] * 2)
    kv[1] = -kv[1]
    layout, fills = GroupLayout(bits, 4), torch.tensor([2])
    groups = ops.quantize(kv, kv, torch.arange(2), torch.tensor([0]), fills, bits)
    for got in ops.dequantize(*groups, fills, layout)[:2]:
        assert got.isfinite().all()
        assert (got - kv).abs().max() <= 2 * MAX_MAGNITUDE / layout.levels * 0.501


def test_halves_of_a_row_share_bytes() -> None:
    kv = torch.tensor([[0.0] * 4, [15.0] * 4, [1.0, 2.0, 3.0, 4.0]])
    groups = ops.quantize(kv, kv, torch.arange(3), torch.tensor([0]), torch.tensor([3]), 4)
    assert groups[0][0, :6].tolist() == [0, 0, 0xFF, 0xFF, 0x31, 0x42]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_entries_come_back_in_order(dim: int, bits: int) -> None:
    q = Quantized(dim=dim, bits=bits, fills=[3, 32, 1])
    keys, values, positions = ops.dequantize(*q.groups, q.fills, q.layout)
    assert torch.equal(positions, q.positions)
    assert [x.dtype for x in (keys, values, positions)] == [torch.float32] * 2 + [torch.int32]
    for g, fill in enumerate(q.counts):
        parsed, rows = q.parsed(g), q.rows(g)
        expected = parsed.key_zero.astype(float) + parsed.key_scale * parsed.key_codes.astype(float)
        np.testing.assert_array_equal(keys[rows].numpy(), expected[:fill].astype(np.float32))
        scale, zero = parsed.wide_value_affine
        expected = zero + scale * parsed.value_codes
        np.testing.assert_array_equal(values[rows].numpy(), expected[:fill].astype(np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_many_groups_are_those_of_few(bits: int) -> None:
    """Work goes a block of groups at a time."""
    groups = 2 * quantized_reference.BLOCK_ELEMENTS // (ROWS * 128) + 2
    q = Quantized(dim=128, bits=bits, fills=[5, 1] * (groups // 2))
    parts = [q.quantized(slice(at, at + 90)) for at in range(0, groups, 90)]
    for whole, pieces in zip(q.groups, zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


def test_no_groups() -> None:
    none = torch.empty(0, dtype=torch.int64)
    layout = GroupLayout(8, 64)
    groups = ops.quantize(torch.empty(0, 64), torch.empty(0, 64), none, none, none, 8)
    assert [part.shape for part in groups] == [(0, layout.key_bytes), (0, layout.value_bytes)]
    assert [x.shape[0] for x in ops.dequantize(*groups, none, layout)] == [0, 0, 0]
