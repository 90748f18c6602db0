"""‖v·W_O‖ on a GPU, the product never in memory: one Triton kernel for both norms.

A program holds a block of one head's values and passes the rows of W_O by, a block at a
time; each product is reduced as soon as it is there:

    values of a KV head      rows of W_O, a query head's D columns       out
    128 rows             ×   block | block | block | …                →  Σ |v·w|, 128 rows

‖·‖₂ goes by the Gram matrix, ‖v W‖₂² = v (W Wᵀ) vᵀ: its D rows pass by instead of D_model,
and each product is multiplied with its own column of v. (Plain torch would write the
products, group_size times the size of V in fp32, and read them again.) In half precision
the Gram matrix is a sum of half-precision terms, whose rows pass by one after another.

Sums run in a fixed order that depends on D and D_model alone: the same bits for a row in
any batch, and no atomics. Knows no caches and no models.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from criticalkv.kernels import reference

SPLIT = 2048
"""Rows of W_O that one program passes by: few contexts fill a GPU with one split only."""

TERMS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Terms that hold an fp32 matrix, by their dtype."""


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    values,  # [num_kv_heads, n, D]
    weights,  # like values, [num_q_heads, width, D]: rows of W_O, or terms of Gram matrices
    out,  # fp32 [splits, num_q_heads, n]
    value_head,  # strides, in elements
    value_row,
    weight_head,
    weight_row,
    n,
    width,
    GRAM: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Reduce one block of values against one split of a query head's weights."""
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    real, in_d = m < n, d < DIM
    rows = values + (head // GROUP).to(tl.int64) * value_head + m.to(tl.int64) * value_row
    rows = rows[:, None]
    v = tl.load(rows + d, mask=real[:, None] & in_d, other=0.0)

    weights += head.to(tl.int64) * weight_head
    total = tl.zeros([BLOCK_M], tl.float32)
    begin = split * SPLIT
    for first in range(begin, tl.minimum(begin + SPLIT, width), BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        inside = column < width
        columns = weights + column.to(tl.int64)[None, :] * weight_row
        if BLOCK_K == BLOCK_D:
            mask = inside[None, :] & in_d[:, None]
            w = tl.load(columns + d[:, None], mask=mask, other=0.0)
            product = tl.dot(v, w, input_precision="tf32x3")
        else:  # fp32, of which a block of all D would not fit
            product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, DIM, BLOCK_K):
                part = k + tl.arange(0, BLOCK_K)
                in_part = part < DIM
                left = tl.load(rows + part, mask=real[:, None] & in_part, other=0.0)
                mask = inside[None, :] & in_part[:, None]
                right = tl.load(columns + part[:, None], mask=mask, other=0.0)
                product = tl.dot(left, right, product, input_precision="tf32x3")
        if GRAM:
            own = tl.load(rows + column % DIM, mask=real[:, None] & inside, other=0.0)
            total += tl.sum(product * own.to(tl.float32), 1)
        else:
            total += tl.sum(tl.abs(product), 1)
    place = (split * tl.num_programs(1) + head).to(tl.int64) * n
    tl.store(out + place + m, total, mask=real)


def block_sizes(head_dim: int, itemsize: int, gram: bool) -> dict[str, int]:
    """Return the kernel's compile-time sizes and warps: two programs fit a multiprocessor.

    Args:
        head_dim: D; the kernel computes with the next power of 2.
        itemsize: of values and weights, in bytes.
        gram: whether the weights are Gram matrices: then columns of V pass by as well.
    """
    block_d, fp32 = max(16, triton.next_power_of_2(head_dim)), itemsize == 4
    wide = block_d > 128
    return {
        "BLOCK_D": block_d,
        "BLOCK_M": 64 if fp32 or wide else 128,
        "BLOCK_N": 64 if fp32 or (gram and not wide) else 32 if wide else 128,
        "BLOCK_K": min(block_d, 32) if fp32 else block_d,
        "num_warps": 4 if fp32 or wide else 8,
        "num_stages": 2,
    }


def value_norm(values: Tensor, w_o: Tensor, group_size: int, norm: str) -> Tensor:
    """Return ‖v·W_O‖ per query head, fp32 [num_kv_heads, group_size, n]; see `ops`."""
    heads, n, dim = values.shape
    dtype = torch.promote_types(values.dtype, w_o.dtype)
    dtype = dtype if dtype in TERMS else torch.float32
    values, weights = values.to(dtype), w_o.to(dtype).view(-1, heads * group_size, dim)
    if norm == "l1":
        sums = _sums(values, weights.transpose(0, 1), group_size, gram=False)
    else:
        terms, scale = gram_terms(weights.transpose(0, 1))
        sums = _sums(values, terms, group_size, gram=True)
        sums = sums.clamp_min_(0).mul_(scale[:, None]).sqrt_()
    return sums.view(heads, group_size, n)


def gram_terms(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return W Wᵀ of each query head as a sum of terms in W's dtype, divided by a scale.

    Args:
        weights: [num_q_heads, D_model, D].

    Returns:
        (terms [num_q_heads, terms · D, D], scale fp32 [num_q_heads]): together exact to
        2^-22, without leaving fp16's range.
    """
    gram = _gram(weights)
    # The largest element of all: no product of two vectors exceeds both their squares.
    scale = gram.diagonal(dim1=1, dim2=2).amax(-1).clamp_min(reference.MIN_NORM)
    rest, terms = gram / scale[:, None, None], []
    for _ in range(TERMS[weights.dtype]):
        terms.append(rest.to(weights.dtype))
        rest = rest - terms[-1].float()
    return torch.cat(terms, 1), scale


def _gram(weights: Tensor) -> Tensor:
    """W Wᵀ, fp32 [num_q_heads, D, D]; products of half-precision numbers are exact in fp32."""
    if weights.is_cuda and weights.dtype != torch.float32:
        return torch.bmm(weights.transpose(1, 2), weights, out_dtype=torch.float32)
    weights = weights.float()
    return weights.transpose(1, 2) @ weights


def _sums(values: Tensor, weights: Tensor, group_size: int, *, gram: bool) -> Tensor:
    """Return the reduced products, fp32 [num_q_heads, n], of weights [num_q_heads, width, D]."""
    (_, n, dim), (heads, width, _) = values.shape, weights.shape
    values, weights = _rows_whole(values), _rows_whole(weights)
    sizes: dict[str, Any] = block_sizes(dim, weights.element_size(), gram)
    splits = triton.cdiv(width, SPLIT)
    out = torch.empty(splits, heads, n, dtype=torch.float32, device=values.device)
    if out.numel():
        norm_kernel[(triton.cdiv(n, sizes["BLOCK_M"]), heads, splits)](
            values,
            weights,
            out,
            values.stride(0),
            values.stride(1),
            weights.stride(0),
            weights.stride(1),
            n,
            width,
            GRAM=gram,
            SPLIT=SPLIT,
            GROUP=group_size,
            DIM=dim,
            **sizes,
        )
    return out[0] if splits == 1 else out.sum(0)


def _rows_whole(x: Tensor) -> Tensor:
    """x, with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
