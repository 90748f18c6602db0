"""How near to the hardware's limit each kernel runs: measured ceilings, then kernels.

A kernel's limit is the time that its bytes take at the speed of a copy, or its products at
the speed of a large matrix product, whichever is longer. Bytes are what must be read and
written once, however often a kernel does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import gpu_pages
import torch
import torch.nn.functional as F
from gpu_clock import alternate, sample
from gpu_shape import Shape
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.kernels.group_layout import ROWS

DTYPE = torch.bfloat16
WINDOW, POOLING, CHUNK = 32, 7, 512
KEPT = (0.05, 0.1, 0.2, 0.3, 0.4)
"""Tiers that a node is stored up to."""
BATCH_KEPT = 0.2
SIZES = ((128, 64, 4), (128, 128, 4), (256, 64, 8), (64, 128, 4), (256, 128, 8))
"""Rows, columns and warps of a program that value_norm is tried with, too."""
SETS = 4
"""Inputs that take turns, or the cache on the chip would serve them."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Ceilings:
    """What the hardware reaches here.

    Attributes:
        copy_gb_s: bytes read and written by a large copy.
        matmul_tflop_s: of a large bf16 product of random matrices.
    """

    copy_gb_s: float
    matmul_tflop_s: float

    @classmethod
    def measured(cls, device: str, copy_bytes: int = 1 << 30, side: int = 8192) -> Ceilings:
        """Measure both."""
        source = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = median(sample(lambda: target.copy_(source), device))
        a, b = (torch.randn(side, side, dtype=DTYPE, device=device) for _ in range(2))
        product = median(sample(lambda: a @ b, device))
        return cls(2 * copy_bytes / copy / 1e9, 2 * side**3 / product / 1e12)

    def row(self, name: str, samples: list[float], moved: int, flops: int = 0) -> Row:
        """Return what a kernel achieved.

        Args:
            name: of the kernel.
            samples: seconds of a call.
            moved: bytes that a call must read and write.
            flops: of its matrix products.
        """
        took = median(samples)
        limit = max(moved / self.copy_gb_s / 1e9, flops / self.matmul_tflop_s / 1e12)
        return {
            "kernel": name,
            "us": 1e6 * took,
            "gb_s": moved / took / 1e9,
            "tflop_s": flops / took / 1e12,
            "of_limit": limit / took,
            "samples_us": [1e6 * each for each in samples],
        }


def value_norm(shape: Shape, ceilings: Ceilings, norm: ops.Norm) -> Row:
    """‖v·W_O‖ of a context."""
    w_o, n = shape.w_o(DTYPE), shape.context
    took = _taking_turns(
        shape,
        lambda: (shape.entries(n, DTYPE),),
        lambda values: ops.value_norm(values, w_o, shape.group_size, norm),
    )
    rows = shape.model_dim if norm == "l1" else shape.head_dim
    flops = 2 * shape.num_q_heads * shape.head_dim * n * rows
    if norm == "l2":
        flops += 2 * shape.num_q_heads * shape.head_dim**2 * shape.model_dim
    moved = _row_bytes(shape) * shape.num_kv_heads * n + 2 * w_o.numel() + 4 * shape.num_q_heads * n
    return ceilings.row(f"value_norm {norm}", took, moved, flops)


def value_norm_sizes(shape: Shape, ceilings: Ceilings, rows: int, columns: int, warps: int) -> Row:
    """‖v·W_O‖₁ by another choice of block sizes than the kernel's own."""
    from criticalkv.kernels import value_norm_gpu

    own = value_norm_gpu.block_sizes(shape.head_dim, DTYPE.itemsize, False)
    other = own | {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": warps}
    with mock.patch.object(value_norm_gpu, "block_sizes", return_value=other):
        row = value_norm(shape, ceilings, "l1")
    return row | {"kernel": f"value_norm l1 {rows}x{columns} {warps} warps"}


def window_scores(shape: Shape, ceilings: Ceilings) -> Row:
    """Attention of the last queries to a context, pooled."""
    n, count = shape.context, min(WINDOW, shape.context)
    took = _taking_turns(
        shape,
        lambda: (shape.queries(count, DTYPE), shape.entries(n, DTYPE)),
        lambda q, keys: ops.window_scores(
            q, keys, scaling=shape.scaling, kernel=POOLING, pooling="max"
        ),
    )
    flops = 2 * shape.num_q_heads * count * n * shape.head_dim
    moved = _row_bytes(shape) * shape.num_kv_heads * n + 4 * shape.num_kv_heads * n
    return ceilings.row("window_scores", took, moved, flops)


def replay_scores(shape: Shape, ceilings: Ceilings) -> Row:
    """Highest attention of a replayed chunk to a context."""
    n, count = shape.context, min(CHUNK, shape.context)
    took = _taking_turns(
        shape,
        lambda: (
            shape.queries(count, DTYPE),
            shape.entries(n, DTYPE),
            shape.entries(count, DTYPE),
        ),
        lambda q, keys, tail: ops.attention_scores(
            q, keys, scaling=shape.scaling, reductions=("max",), tail_keys=tail
        ),
    )
    flops = 2 * shape.num_q_heads * count * (n + count // 2) * shape.head_dim
    moved = _row_bytes(shape) * shape.num_kv_heads * n + 4 * shape.num_q_heads * n
    return ceilings.row("replay_scores", took, moved, flops)


def tier_ranks(shape: Shape, ceilings: Ceilings) -> Row:
    """The order of a context's entries by tier."""
    size = (shape.num_kv_heads, shape.context)
    took = _taking_turns(
        shape,
        lambda: (
            torch.rand(size, device=shape.device).argsort(-1),
            torch.randint(0, len(KEPT) + 1, size, dtype=torch.uint8, device=shape.device),
        ),
        lambda order, admitted: ops.tier_ranks(order, admitted, len(KEPT)),
    )
    return ceilings.row("tier_ranks", took, (8 + 1 + 8) * size[0] * size[1])


def pack(shape: Shape, ceilings: Ceilings) -> Row:
    """Gathering what the highest tier keeps, tier-major."""
    lens, cu = kept_lens(shape.num_kv_heads, shape.context)
    top = int(lens[-1, 0])

    def make() -> tuple[Tensor, ...]:
        order = torch.rand(shape.num_kv_heads, shape.context, device=shape.device).argsort(-1)
        entries = [shape.entries(shape.context, DTYPE) for _ in range(2)]
        return *entries, order[:, :top].flatten()

    took = _taking_turns(
        shape, make, lambda keys, values, kept: ops.pack(keys, values, kept, cu, 0, lens)
    )
    rows = top * shape.num_kv_heads
    return ceilings.row("pack", took, rows * (4 * _row_bytes(shape) + 8 + 4))


def kept_lens(heads: int, n: int) -> tuple[Tensor, Tensor]:
    """Return uniform tier_lens int64 [tiers, heads] of n entries, and the last's cu_seqlens."""
    kept = [max(min(n, WINDOW), int(n * share)) for share in KEPT]
    lens = torch.tensor(kept)[:, None].expand(-1, heads)
    return lens, torch.arange(heads + 1, dtype=torch.int32) * int(lens[-1, 0])


def quantize(shape: Shape, ceilings: Ceilings, bits: int) -> Row:
    """Quantizing a context's kept entries."""
    groups = max(1, int(shape.context * KEPT[-1])) * shape.num_kv_heads // ROWS
    total = groups * ROWS
    positions = torch.arange(total, device=shape.device)
    fills = torch.full((groups,), ROWS, device=shape.device)
    rest = positions, positions[::ROWS].contiguous(), fills, bits
    took = _taking_turns(
        shape,
        lambda: tuple(shape.random(total, shape.head_dim, dtype=DTYPE) for _ in range(2)),
        lambda keys, values: ops.quantize(keys, values, *rest),
    )
    some = shape.random(ROWS, shape.head_dim, dtype=DTYPE)
    parts = ops.quantize(some, some, positions[:ROWS], positions[:1], fills[:1], bits)
    size = sum(part.shape[1] for part in parts)
    moved = total * (4 * shape.head_dim + 8) + groups * (size + 16)
    return ceilings.row(f"quantize int{bits}", took, moved)


def decode_attention(shape: Shape, ceilings: Ceilings, batch: int) -> Row:
    """One layer of a decode step over contexts at a tier, raw and quantized, and in full."""
    lens = gpu_pages.ragged_lens(shape, batch, shape.context * BATCH_KEPT, shape.context)
    call = gpu_pages.raw(shape, lens, DTYPE, 1).call
    small = {bits: gpu_pages.quantized(shape, lens, DTYPE, 1, bits).call for bits in (8, 4)}
    size = (batch, shape.num_kv_heads, shape.context, shape.head_dim)
    full = [shape.random(*size, dtype=DTYPE) for _ in range(2)]
    query = shape.random(batch, shape.num_q_heads, 1, shape.head_dim, dtype=DTYPE)
    took = alternate(
        {
            "raw": lambda: ops.paged_attention(**call),
            "int8": lambda: ops.quantized_attention(**small[8]),
            "int4": lambda: ops.quantized_attention(**small[4]),
            "full": lambda: F.scaled_dot_product_attention(query, *full, enable_gqa=True),
        },
        shape.device,
    )
    kept = int(lens.sum())
    row = ceilings.row("paged_attention", took["raw"], 2 * kept * _row_bytes(shape))
    rest = {f"{name}_us": 1e6 * median(took[name]) for name in ("int8", "int4", "full")}
    return row | {"batch": batch, "entries": kept} | rest


def _taking_turns(
    shape: Shape, make: Callable[[], tuple[Tensor, ...]], call: Callable[..., Any]
) -> list[float]:
    """Return seconds of a call whose inputs take turns."""
    inputs = itertools.cycle([make() for _ in range(SETS)])
    return sample(lambda: call(*next(inputs)), shape.device)


def _row_bytes(shape: Shape) -> int:
    """Bytes of one key or value."""
    return shape.head_dim * DTYPE.itemsize
