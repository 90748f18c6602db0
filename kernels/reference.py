"""The operations of `ops` in plain torch: the truth that every fast kernel is tested against.

Shapes and meanings are documented in `ops`; this module only computes. It knows no
policies, no caches and no models. Work goes one KV head and one block at a time, so that
no intermediate exceeds about `BLOCK_ELEMENTS` fp32 elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_NORM = 1e-12
"""Norm of a layer's output below which it counts as this."""

BLOCK_ELEMENTS = 1 << 20
"""Elements of an intermediate on a CPU, 4 MiB in fp32: measured best of 2^16 … 2^23."""


def value_norm(values: Tensor, w_o: Tensor, group_size: int, norm: str) -> Tensor:
    """Return ‖v·W_O‖ per query head, fp32 [num_kv_heads, group_size, n]."""
    heads, _, dim = values.shape
    weights = w_o.float().view(w_o.shape[0], heads, group_size, dim).permute(1, 2, 0, 3)
    if norm == "l2":
        return _value_norm_l2(values.float(), weights)
    return _value_norm_l1(values.float(), weights)


def _value_norm_l1(values: Tensor, weights: Tensor) -> Tensor:
    """values [H, n, D], weights [H, G, D_model, D] -> [H, G, n], a block of rows and columns
    of the product at a time."""
    heads, group, width, _ = weights.shape
    n = values.shape[1]
    out = values.new_zeros(heads, group, n)
    columns = min(width, 1024)
    rows = max(1, _block_elements(values.device) // (group * columns))
    for h in range(heads):
        for first in range(0, width, columns):
            block = weights[h, :, first : first + columns].transpose(1, 2)
            for begin in range(0, n, rows):
                product = values[h, begin : begin + rows] @ block
                out[h, :, begin : begin + rows] += torch.linalg.vector_norm(product, ord=1, dim=-1)
    return out


def _value_norm_l2(values: Tensor, weights: Tensor) -> Tensor:
    """‖v W‖₂² = v (W Wᵀ) vᵀ with the exact D × D Gram matrix of each query head."""
    heads, group, _, dim = weights.shape
    gram = weights.transpose(-1, -2) @ weights
    out = values.new_empty(heads, group, values.shape[1])
    # A block of rows of one head at a time: measured 5 times as fast on a CPU as all heads'.
    rows = max(1, _block_elements(values.device) // (16 * dim))
    for h, g in itertools.product(range(heads), range(group)):
        for begin in range(0, values.shape[1], rows):
            block = values[h, begin : begin + rows]
            out[h, g, begin : begin + rows] = torch.linalg.vecdot(block @ gram[h, g], block)
    return out.clamp_min(0).sqrt()


def output_norms(attn_out: Tensor, w_o: Tensor) -> Tensor:
    """Return ‖W_O · concat_h(attn_out)‖₂ per query, fp32 [m]."""
    heads, m, dim = attn_out.shape
    weights = w_o.float()
    out = torch.empty(m, dtype=torch.float32, device=attn_out.device)
    row = max(heads * dim, w_o.shape[0])
    for begin, end in _query_blocks(m, row, _block_elements(attn_out.device)):
        joined = attn_out[:, begin:end].float().transpose(0, 1).flatten(1)
        out[begin:end] = torch.linalg.vector_norm(F.linear(joined, weights), dim=-1)
    return out


class AttentionRows(NamedTuple):
    """A block of queries of one KV head's group, see `ops.attention_rows`."""

    head: int
    begin: int
    logits: Tensor
    probs: Tensor


def attention_rows(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    first_query: int | None,
    tail_keys: Tensor | None,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
    padding: Tensor | None,
    block: int | None,
) -> Iterator[AttentionRows]:
    """Yield the softmaxed scores of `keys`, a block of queries of one KV head at a time."""
    n = keys.shape[1]
    for rows in _every_column(
        queries,
        keys,
        scaling=scaling,
        first_query=first_query,
        tail_keys=tail_keys,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        padding=padding,
        query_stride=1,
        block=block,
    ):
        yield rows._replace(logits=rows.logits[..., :n], probs=rows.probs[..., :n])


def _every_column(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    first_query: int | None,
    tail_keys: Tensor | None,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
    padding: Tensor | None,
    query_stride: int,
    block: int | None,
) -> Iterator[AttentionRows]:
    """`attention_rows` with the tail's and the prefix' columns after those of `keys`."""
    heads, n, dim = keys.shape
    group, m = queries.shape[0] // heads, queries.shape[1]
    grouped = queries.view(heads, group, m, dim)
    bounds = [0] * (heads + 1) if prefix_cu is None else prefix_cu.tolist()
    hidden = [0] * heads if padding is None else padding.tolist()
    silent = _silent(hidden, m, first_query)
    for h, (a, b) in enumerate(itertools.pairwise(bounds)):
        tail = keys[h, :0] if tail_keys is None else tail_keys[h]
        prefix = keys[h, :0] if prefix_keys is None else prefix_keys[a:b]
        columns = torch.cat([keys[h], tail, prefix]).float()
        step = block or max(1, _block_elements(keys.device) // (group * columns.shape[0]))
        for begin in range(silent[h], m, step):
            rows = grouped[h, :, begin : begin + step].float() * scaling
            # Plain matrices: a batched product over the group is slower on a CPU.
            logits = (rows.flatten(0, 1) @ columns.T).view(*rows.shape[:2], -1)
            if first_query is not None:
                _hide_future(logits[..., :n], first_query + begin * query_stride, query_stride)
            _hide_future(logits[..., n : n + tail.shape[0]], tail.shape[0] - m + begin)
            logits[..., : hidden[h]] = -torch.inf
            yield AttentionRows(h, begin, logits, logits.softmax(-1))


def _silent(hidden: list[int], m: int, first_query: int | None) -> list[int]:
    """Per head the leading queries whose own column is padding: they are none either."""
    if first_query is None:
        return [0] * len(hidden)
    return [min(m, max(0, count - first_query)) for count in hidden]


def attention_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    reductions: Sequence[str],
    first_query: int | None,
    tail_keys: Tensor | None,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
    query_weight: Tensor | None,
    padding: Tensor | None,
    min_distance: int,
    query_stride: int,
    block: int | None,
) -> dict[str, Tensor]:
    """Return the reductions over queries of the softmaxed scores of `keys`."""
    heads, n, _ = keys.shape
    group = queries.shape[0] // heads
    sums = {
        name: torch.zeros(heads, group, n, dtype=torch.float32, device=keys.device)
        for name in reductions
    }
    asked = torch.zeros(heads, 1, 1, dtype=torch.float32)
    for h, begin, logits, probs in _every_column(
        queries,
        keys,
        scaling=scaling,
        first_query=first_query,
        tail_keys=tail_keys,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        padding=padding,
        query_stride=query_stride,
        block=block,
    ):
        count = probs.shape[1]
        weight = None if query_weight is None else query_weight[begin : begin + count].float()
        if first_query is not None and min_distance:
            own = first_query + begin * query_stride
            _drop_near(probs[..., :n], own - min_distance, query_stride)
        _reduce({name: total[h] for name, total in sums.items()}, probs, weight)
        asked[h] += count
        # Or this block would live on while the next one is made.
        del logits, probs
    if "mean" in sums:
        sums["mean"] /= asked.clamp_min(1).to(keys.device)
    return sums


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    kernel: int,
    pooling: str | None,
    reduction: str,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
) -> Tensor:
    """Return the pooled scores of the last queries' window, fp32 [num_kv_heads, n]."""
    before = keys.shape[1] - queries.shape[1]
    reduced = attention_scores(
        queries,
        keys,
        scaling=scaling,
        reductions=(reduction,),
        first_query=before,
        tail_keys=None,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        query_weight=None,
        padding=None,
        min_distance=0,
        query_stride=1,
        block=None,
    )
    return pool(reduced[reduction].mean(1), before, kernel, pooling)


def pool(scores: Tensor, before: int, kernel: int, pooling: str | None) -> Tensor:
    """Pool the first `before` columns of [num_kv_heads, n]; the rest is untouched."""
    if before == 0 or pooling is None:
        return scores
    pooled = pool_rows(scores[:, None, :before], kernel, pooling)
    return torch.cat([pooled[:, 0], scores[:, before:]], dim=1)


def pool_rows(rows: Tensor, kernel: int, pooling: str) -> Tensor:
    """Pool each row of [a, b, n ≥ 1] over its neighbours, stride 1, same length."""
    pooled = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return pooled(rows, kernel, stride=1, padding=kernel // 2)


def _block_elements(device: torch.device) -> int:
    """A GPU has no cache to stay in, but launches to save."""
    return BLOCK_ELEMENTS * (1 if device.type == "cpu" else 256)


def _hide_future(logits: Tensor, first: int, stride: int = 1) -> None:
    """Mask in place what row i may not see: columns > first + i · stride. Rows are dim -2."""
    count, n = logits.shape[-2:]
    begin = max(0, first + 1)
    if begin >= n:
        return
    row = torch.arange(first, first + count * stride, stride, device=logits.device)
    column = torch.arange(begin, n, device=logits.device)
    logits[..., begin:].masked_fill_(column > row[:, None], -torch.inf)


def _drop_near(probs: Tensor, last: int, stride: int) -> None:
    """Zero in place what row i is too near to score: columns > last + i · stride."""
    count, n = probs.shape[-2:]
    row = torch.arange(last, last + count * stride, stride, device=probs.device)
    probs.masked_fill_(torch.arange(n, device=probs.device) > row[:, None], 0)


def _reduce(sums: dict[str, Tensor], probs: Tensor, weight: Tensor | None) -> None:
    """Fold a block of probabilities [G, queries, ≥ n] into the sums [G, n]; overwrites it.

    Columns after the n-th are reduced with the others and left out then: cutting them
    first would copy the block.
    """
    for name, total in sums.items():
        n = total.shape[-1]
        if name == "max":
            torch.maximum(total, probs.amax(1)[..., :n], out=total)
        elif name in ("mean", "sum"):
            total += probs.sum(1)[..., :n]
    if "sumsq" in sums:  # last: it overwrites
        weights = probs.new_ones(probs.shape[1]) if weight is None else weight
        sums["sumsq"] += (weights @ probs.square_())[..., : sums["sumsq"].shape[-1]]


def scored_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    scaling: float,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    prefix_cu: Tensor | None,
    unscored: int,
    w_o: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (out [Hq, m, D], peak [H, G, n], sumsq [H, G, n] or None)."""
    heads, n, _ = keys.shape
    m, group = q.shape[1], q.shape[0] // heads
    grouped = q.view(heads, group, m, q.shape[2])
    out = torch.empty_like(grouped)
    peak = torch.zeros(heads, group, n, dtype=torch.float32, device=q.device)
    sumsq = torch.zeros_like(peak) if w_o is not None else None
    key_columns = _columns(keys, tail_k, prefix_k, prefix_cu)
    value_columns = _columns(values, tail_v, prefix_v, prefix_cu)
    # All heads of a block stay in memory: ‖o_q‖ needs every head's output.
    row = group * sum(columns.shape[0] for columns in key_columns)
    for begin, end in _query_blocks(m, row, 2 * _block_elements(q.device)):
        probs = []
        for h in range(heads):
            # Plain matrices: a batched product over the group is half as fast on a CPU.
            rows = (grouped[h, :, begin:end].float() * scaling).flatten(0, 1)
            logits = (rows @ key_columns[h].T).view(group, end - begin, -1)
            _hide_future(logits[..., n : n + m], begin)
            probs.append(logits.softmax(-1))
            attended = probs[h].flatten(0, 1) @ value_columns[h]
            out[h, :, begin:end] = attended.view(group, end - begin, -1)
        skip = max(0, unscored - begin)
        if skip >= end - begin:
            continue
        weight = _inverse_square_norm(out[:, :, begin + skip : end], w_o)
        for h in range(heads):
            sums = {"max": peak[h]} if sumsq is None else {"max": peak[h], "sumsq": sumsq[h]}
            _reduce(sums, probs[h][:, skip:], weight)
    return out.view_as(q), peak, sumsq


def _columns(keys: Tensor, tail: Tensor, prefix: Tensor | None, cu: Tensor | None) -> list[Tensor]:
    """Per head fp32 [n + m + len_h, D]: the scored columns, the tail, the ragged prefix."""
    bounds = [0] * (keys.shape[0] + 1) if prefix is None or cu is None else cu.tolist()
    past = keys[0, :0] if prefix is None else prefix
    return [
        torch.cat([keys[h], tail[h], past[a:b]]).float()
        for h, (a, b) in enumerate(itertools.pairwise(bounds))
    ]


def _inverse_square_norm(out: Tensor, w_o: Tensor | None) -> Tensor | None:
    """1 / ‖o_q‖₂² of out [H, G, t, D], fp32 [t]."""
    if w_o is None:
        return None
    norms = output_norms(out.flatten(0, 1), w_o)
    return norms.clamp_min(MIN_NORM).square().reciprocal()


def ragged_attention(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    cu_seqlens: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    scaling: float,
    window: int | None,
    prefix_positions: Tensor | None,
    query_positions: Tensor | None,
    tail_positions: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Hq, T, D], lse fp32 [Hq, T] or None)."""
    heads, tail_len, _ = tail_k.shape
    t = q.shape[1]
    if prefix_k.shape[0] == 0 and t == tail_len and window is None and not return_lse:
        return _causal(q, tail_k, tail_v, scaling), None
    grouped = q.view(heads, q.shape[0] // heads, t, q.shape[2])
    out = torch.empty_like(grouped)
    lse = torch.empty(grouped.shape[:3], dtype=torch.float32, device=q.device)
    bounds, elements = cu_seqlens.tolist(), _block_elements(q.device)
    for h, (a, b) in enumerate(itertools.pairwise(bounds)):
        past_k, past_v = prefix_k[a:b].float(), prefix_v[a:b].float()
        head_k, head_v = tail_k[h].float(), tail_v[h].float()
        for begin, end in _query_blocks(t, grouped.shape[1] * (b - a + tail_len), elements):
            lo, hi = 0, max(0, tail_len - t + end)
            hidden = None
            if window is not None:
                past, queried, tail = _need(prefix_positions, query_positions, tail_positions)
                oldest = queried[begin:end] - window
                lo = min(hi, int((tail[:hi] <= oldest[0]).sum()))
                hidden = torch.cat([past[a:b], tail[lo:hi]]) <= oldest[:, None]
            result = _attend(
                grouped[h, :, begin:end].float() * scaling,
                (past_k, head_k[lo:hi]),
                (past_v, head_v[lo:hi]),
                first=tail_len - t + begin - lo,
                hidden=hidden,
                return_lse=return_lse,
            )
            out[h, :, begin:end] = result[0]
            if result[1] is not None:
                lse[h, :, begin:end] = result[1]
    return out.view_as(q), lse.flatten(0, 1) if return_lse else None


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    fills: Tensor,
    query_cu: Tensor,
    *,
    scaling: float,
    causal: bool,
    window: int | None,
    position_pages: Tensor | None,
    query_positions: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (out [Hq, T, D], lse fp32 [Hq, T] or None), gathering one head's pages at a time."""
    heads, elements = tables.shape[1], _block_elements(q.device)
    grouped = q.view(heads, q.shape[0] // heads, *q.shape[1:])
    out = torch.empty(grouped.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(grouped.shape[:3], dtype=torch.float32, device=q.device)
    for s, (first, last) in enumerate(itertools.pairwise(query_cu.tolist())):
        own = last - first if causal else 0
        for h in range(heads):
            slots = _used_slots(tables[s, h], fills[s, h], key_pages.shape[1])
            shared = slots.numel() - own
            if shared < 0:
                raise ValueError(f"a head has fewer entries than the {own} queries own")
            keys = key_pages.flatten(0, 1).index_select(0, slots).float()
            values = value_pages.flatten(0, 1).index_select(0, slots).float()
            hidden = None
            for a, b in _query_blocks(last - first, grouped.shape[1] * slots.numel(), elements):
                begin, end = first + a, first + b
                if window is not None:
                    positions, queried = _need(position_pages, query_positions)
                    seen = positions.flatten().index_select(0, slots)
                    hidden = seen[: shared + b] <= (queried[begin:end] - window)[:, None]
                result = _attend(
                    grouped[h, :, begin:end].float() * scaling,
                    (keys[:shared], keys[shared : shared + b]),
                    (values[:shared], values[shared : shared + b]),
                    first=a,
                    hidden=hidden,
                    return_lse=return_lse,
                )
                out[h, :, begin:end] = result[0]
                if result[1] is not None:
                    lse[h, :, begin:end] = result[1]
    return out.view(q.shape), lse.flatten(0, 1) if return_lse else None


def _used_slots(tables: Tensor, fills: Tensor, page_size: int) -> Tensor:
    """Return the slots of one head's entries in order, page · page_size + slot, int64 [n]."""
    slots = torch.arange(page_size, device=tables.device)
    return (tables[:, None].long() * page_size + slots)[slots < fills[:, None]]


def _need(*positions: Tensor | None) -> list[Tensor]:
    """Return the positions that a sliding window compares, none missing."""
    given = [p for p in positions if p is not None]
    if len(given) < len(positions):
        raise ValueError("a window needs the positions of entries and queries")
    return given


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Plain causal attention of a prefill without a parent."""
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=q.shape[1] > 1, scale=scaling, enable_gqa=True
    )
    return out[0]


def _query_blocks(t: int, row: int, elements: int) -> Iterator[tuple[int, int]]:
    """Cut t queries, each with `row` logits, into blocks."""
    step = max(1, elements // max(1, row))
    for begin in range(0, t, step):
        yield begin, min(t, begin + step)


def _attend(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    *,
    first: int,
    hidden: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """One KV head, one block of queries, prefix and tail without joining them.

    Args:
        q: fp32 [G, t, D], scaled.
        keys: (prefix [L, D], tail [S, D]).
        values: like keys.
        first: query i sees the tail's columns ≤ first + i.
        hidden: bool [t, L + S], True where a sliding window has passed, or None.
        return_lse: whether to return the log-sum-exp [G, t] too.
    """
    group, t, dim = q.shape
    past, tail = keys[0].shape[0], keys[1].shape[0]
    flat = q.reshape(group * t, dim)
    logits = q.new_empty(group * t, past + tail)
    torch.mm(flat, keys[0].T, out=logits[:, :past])
    torch.mm(flat, keys[1].T, out=logits[:, past:])
    shaped = logits.view(group, t, past + tail)
    if t > 1:
        _hide_future(shaped[..., past:], first)
    if hidden is not None:
        shaped.masked_fill_(hidden, -torch.inf)
    lse = shaped.logsumexp(-1) if return_lse else None
    probs = logits.softmax(-1)
    if hidden is not None:
        probs = probs.masked_fill(hidden.all(-1).repeat(group)[:, None], 0)
    out = probs[:, :past] @ values[0]
    out.addmm_(probs[:, past:], values[1])
    return out.view(group, t, dim), lse
