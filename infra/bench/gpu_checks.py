"""Is every kernel right? Each against the formula in fp64, and against torch's own error.

The 2× rule: an error of at most twice that of plain torch in the same dtype. What only
moves or orders must be equal. Works on any device; `ops` decides which kernel that means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gpu_pages
import torch
import torch.nn.functional as F
from gpu_pages import Pages
from gpu_shape import Shape
from torch import Tensor

from criticalkv.kernels import ops, pack_reference, quantized_reference
from criticalkv.kernels.group_layout import ROWS, GroupLayout

WIDE = 1e-5
"""Error allowed in fp32 results, as a share of the largest: sums of many terms."""
WINDOW, POOLING = 32, 7
Check = dict[str, Any]


def own_checks(shape: Shape) -> Iterator[Callable[[], Check]]:
    """Yield checks of every kernel on this layer, in bf16."""
    yield from layer_checks(shape, torch.bfloat16)


def other_checks(shape: Shape) -> Iterator[Callable[[], Check]]:
    """Yield checks of every kernel: this layer in other dtypes, layers of other heads in bf16."""
    for dtype in (torch.float16, torch.float32):
        yield from layer_checks(shape, dtype)
    for heads, group, dim in ((3, 3, 64), (2, 1, 80), (2, 8, 96), (2, 2, 256)):
        other = replace(shape, num_q_heads=heads * group, num_kv_heads=heads, head_dim=dim)
        yield from layer_checks(other, torch.bfloat16)


def layer_checks(shape: Shape, dtype: torch.dtype) -> Iterator[Callable[[], Check]]:
    """Yield checks of every kernel on one layer in one dtype."""
    yield partial(value_norm, shape, dtype, "l1")
    yield partial(value_norm, shape, dtype, "l2")
    yield partial(window_scores, shape, dtype)
    yield partial(replay_scores, shape, dtype, "max")
    yield partial(replay_scores, shape, dtype, "sumsq")
    for part in range(3):
        yield partial(scored_attention, shape, dtype, part)
    yield partial(paged_attention, shape, dtype, 1)
    yield partial(paged_attention, shape, dtype, 7)
    for bits in (8, 4):
        yield partial(quantize, shape, dtype, bits)
        yield partial(dequantize, shape, dtype, bits)
        yield partial(quantized_attention, shape, dtype, bits)
    yield partial(tier_ranks, shape)
    yield partial(pack, shape, dtype)


def judge(
    name: str,
    shape: Shape,
    ours: Tensor,
    formula: Callable[..., Tensor],
    given: Sequence[Tensor],
) -> Check:
    """Apply the 2× rule: `formula` of the given tensors in fp64 is the truth.

    Args:
        name: of the check.
        shape: of the layer.
        ours: the kernel's result.
        formula: plain torch, in whatever dtype it is given.
        given: its floating tensors, in the dtype that the kernel was given.
    """
    truth = formula(*(t.double() for t in given))
    error, plain = (float((out.double() - truth).abs().max()) for out in (ours, formula(*given)))
    # Rounding the exact result already costs half a unit in the last place.
    unit = WIDE if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    floor = float(truth.abs().max()) * unit
    right = error <= 2 * max(plain, floor) and bool(ours.isfinite().all())
    return _named(name, shape, given[0].dtype) | {
        "error": error,
        "torch_error": plain,
        "floor": floor,
        "right": right,
    }


def equal(
    name: str, shape: Shape, dtype: torch.dtype, pairs: Sequence[tuple[Tensor, Tensor]]
) -> Check:
    """Demand equality."""
    right = all(torch.equal(ours, truth) for ours, truth in pairs)
    return _named(name, shape, dtype) | {"right": right}


def _named(name: str, shape: Shape, dtype: torch.dtype) -> Check:
    heads = f"{shape.num_kv_heads}x{shape.group_size}x{shape.head_dim}"
    return {"check": name, "heads": heads, "dtype": str(dtype).removeprefix("torch.")}


def value_norm(shape: Shape, dtype: torch.dtype, norm: ops.Norm) -> Check:
    """‖v·W_O‖, the product in full."""
    values, w_o = shape.entries(shape.sample, dtype), shape.w_o(dtype)
    order = 1 if norm == "l1" else 2

    def formula(values: Tensor, w_o: Tensor) -> Tensor:
        split = w_o.view(w_o.shape[0], shape.num_kv_heads, shape.group_size, shape.head_dim)
        return (values[:, None] @ split.permute(1, 2, 3, 0)).norm(order, -1)

    ours = ops.value_norm(values, w_o, shape.group_size, norm)
    return judge(f"value_norm {norm}", shape, ours, formula, (values, w_o))


def window_scores(shape: Shape, dtype: torch.dtype) -> Check:
    """Mean attention of the last queries of a context and of the group, pooled."""
    n = shape.sample
    count = min(WINDOW, n)
    given = shape.queries(count, dtype), shape.entries(n, dtype)

    def formula(queries: Tensor, keys: Tensor) -> Tensor:
        scores = _attention(shape, queries, keys, n - count).mean((1, 2))
        before = F.max_pool1d(scores[:, None, : n - count], POOLING, 1, POOLING // 2)
        return torch.cat([before[:, 0], scores[:, n - count :]], 1)

    ours = ops.window_scores(*given, scaling=shape.scaling, kernel=POOLING, pooling="max")
    return judge("window_scores", shape, ours, formula, given)


def replay_scores(shape: Shape, dtype: torch.dtype, reduction: ops.Reduction) -> Check:
    """Attention of replayed queries, which see the context and their own past."""
    n, m = shape.sample, shape.sample // 3
    given = shape.queries(m, dtype), shape.entries(n, dtype), shape.entries(m, dtype)

    def formula(queries: Tensor, keys: Tensor, tail: Tensor) -> Tensor:
        seen = _attention(shape, queries, torch.cat([keys, tail], 1), n)[..., :n]
        return seen.amax(2) if reduction == "max" else seen.square().sum(2)

    ours = ops.attention_scores(
        *given[:2], scaling=shape.scaling, reductions=(reduction,), tail_keys=given[2]
    )[reduction]
    return judge(f"replay_scores {reduction}", shape, ours, formula, given)


def scored_attention(shape: Shape, dtype: torch.dtype, part: int) -> Check:
    """A replay chunk in one pass: its output, and what it says about the context."""
    n, m = shape.sample, shape.sample // 3
    given = [shape.queries(m, dtype), *(shape.entries(k, dtype) for k in (n, n, m, m))]
    given.append(shape.w_o(dtype))

    def formula(q: Tensor, *rest: Tensor) -> Tensor:
        keys, values, tail_k, tail_v, w_o = rest
        seen = _attention(shape, q, torch.cat([keys, tail_k], 1), n)
        out = (seen @ torch.cat([values, tail_v], 1)[:, None]).view_as(q)
        norms = (out.transpose(0, 1).flatten(1) @ w_o.T).norm(dim=-1)
        weighted = (seen[..., :n] / norms[:, None]).square().sum(2)
        return (out, seen[..., :n].amax(2), weighted)[part]

    ours = ops.scored_attention(*given[:5], scaling=shape.scaling, w_o=given[5])[part]
    assert ours is not None  # it is given W_O
    name = ("out", "peak", "sumsq")[part]
    return judge(f"scored_attention {name}", shape, ours, formula, given)


def _attention(shape: Shape, queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """Softmax over columns ≤ first + i of query i: [num_kv_heads, group_size, m, n]."""
    heads, (m, n) = shape.num_kv_heads, (queries.shape[1], keys.shape[1])
    grouped = queries.view(heads, shape.group_size, m, shape.head_dim)
    logits = grouped @ keys[:, None].transpose(-1, -2) * shape.scaling
    column, row = (torch.arange(k, device=keys.device) for k in (n, m))
    return logits.masked_fill(column > first + row[:, None], -torch.inf).softmax(-1)


def paged_attention(shape: Shape, dtype: torch.dtype, queries: int) -> Check:
    """Attention to ragged heads, the queries' own entries causal."""
    lens = gpu_pages.ragged_lens(shape, 4, shape.sample, 4 * shape.sample)
    pages = gpu_pages.raw(shape, lens, dtype, queries)
    ours, _ = ops.paged_attention(**pages.call)
    given = pages.call["q"], pages.keys, pages.values
    return judge(f"paged_attention q{queries}", shape, ours, _over(shape, pages, queries), given)


def quantized_attention(shape: Shape, dtype: torch.dtype, bits: int) -> Check:
    """Attention to groups, all visible, against the same entries expanded."""
    lens = gpu_pages.ragged_lens(shape, 4, shape.sample, 4 * shape.sample)
    pages = gpu_pages.quantized(shape, lens, dtype, 3, bits)
    ours, _ = ops.quantized_attention(**pages.call)
    name, given = f"quantized_attention int{bits}", (pages.call["q"], pages.keys, pages.values)
    truth = _over(shape, pages, 0)

    def formula(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # fp32 holds the expanded entries exactly; a half-precision pool would round them.
        return truth(q, keys.to(q.dtype), values.to(q.dtype))

    return judge(name, shape, ours, formula, given)


def _over(shape: Shape, pages: Pages, own: int) -> Callable[..., Tensor]:
    """Attention by torch, one head at a time; each sequence's last `own` entries causal."""
    cu, lens = pages.call["query_cu"].tolist(), pages.lens.flatten().tolist()

    def formula(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out, entries = torch.empty_like(q), zip(keys.split(lens), values.split(lens), strict=True)
        for first, last in itertools.pairwise(cu):
            for h in range(shape.num_kv_heads):
                rows = slice(h * shape.group_size, (h + 1) * shape.group_size)
                part = q[rows, first:last]
                out[rows, first:last] = _attend(part, *next(entries), own, shape.scaling)
        return out

    return formula


def _attend(q: Tensor, keys: Tensor, values: Tensor, own: int, scaling: float) -> Tensor:
    """Torch's own attention of q [G, t, D] to one head's [n, D]."""
    n, (group, count, _) = keys.shape[0], q.shape
    column, row = (torch.arange(k, device=q.device) for k in (n, count))
    seen = column <= n - own + row[:, None]
    wide = (t.expand(1, group, -1, -1) for t in (keys, values))
    return F.scaled_dot_product_attention(q[None], *wide, attn_mask=seen, scale=scaling)[0]


def quantize(shape: Shape, dtype: torch.dtype, bits: int) -> Check:
    """Error of entries quantized and expanded again, against plain torch doing the same."""
    lens = torch.tensor([1, 7, ROWS, ROWS, 19] * 40, device=shape.device)
    starts, total = lens.cumsum(0) - lens, int(lens.sum())
    given = [shape.random(total, shape.head_dim, dtype=dtype) for _ in range(2)]
    rest = torch.arange(total, device=shape.device), starts, lens, bits
    layout = GroupLayout(bits, shape.head_dim)
    groups, plain = ops.quantize(*given, *rest), quantized_reference.quantize(*given, *rest)
    ours = ops.dequantize(*groups, lens, layout)
    torchs = quantized_reference.dequantize(*plain, lens, layout)
    wide = torch.cat(given).double()
    error, torch_error = (
        float((torch.cat(part[:2]).double() - wide).abs().max()) for part in (ours, torchs)
    )
    same_bytes = all(torch.equal(a, b) for a, b in zip(groups, plain, strict=True))
    return _named(f"quantize int{bits}", shape, dtype) | {
        "error": error,
        "torch_error": torch_error,
        "right": error <= 2 * torch_error and torch.equal(ours[2], torchs[2]) and same_bytes,
        "same_bytes": same_bytes,
    }


def dequantize(shape: Shape, dtype: torch.dtype, bits: int) -> Check:
    """Expanded groups: one product, exact in fp32, and one sum leave no choice."""
    fills = torch.tensor([ROWS, 5, 1] * 20, device=shape.device)
    starts, total = fills.cumsum(0) - fills, int(fills.sum())
    given = [shape.random(total, shape.head_dim, dtype=dtype) for _ in range(2)]
    positions = torch.arange(total, device=shape.device)
    groups = quantized_reference.quantize(*given, positions, starts, fills, bits)
    rest = *groups, fills, GroupLayout(bits, shape.head_dim)
    pairs = zip(ops.dequantize(*rest), quantized_reference.dequantize(*rest), strict=True)
    return equal(f"dequantize int{bits}", shape, dtype, list(pairs))


def tier_ranks(shape: Shape) -> Check:
    """The order of entries by tier, with many ties."""
    size = (shape.num_kv_heads, shape.sample)
    order = torch.rand(size, device=shape.device).argsort(-1)
    admitted = torch.randint(0, 6, size, dtype=torch.uint8, device=shape.device)
    truth = pack_reference.tier_ranks(order, admitted, 5)
    return equal("tier_ranks", shape, torch.uint8, [(ops.tier_ranks(order, admitted, 5), truth)])


def pack(shape: Shape, dtype: torch.dtype) -> Check:
    """Kept entries of ragged heads, tier-major."""
    n, heads = shape.sample, shape.num_kv_heads
    top = torch.arange(heads) % n + n // 3
    lens = torch.stack([top // 5, top // 2, top])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), top.cumsum(0)]).to(torch.int32)
    order = torch.rand(heads, n, device=shape.device).argsort(-1)
    indices = torch.cat([row[:k] for row, k in zip(order, top.tolist(), strict=True)])
    given = shape.entries(n, dtype), shape.entries(n, dtype), indices, cu, 11, lens
    return equal(
        "pack", shape, dtype, list(zip(ops.pack(*given), pack_reference.pack(*given), strict=True))
    )
