"""The project's tensor operations: contract and dispatch.

Plain tensors in, plain tensors out; nothing here knows policies, caches or models.
Every call goes to `reference` (plain torch, any device) unless a faster kernel for
the tensors' device is registered here.

Names: num_q_heads = num_kv_heads · group_size; query head kv·group_size + g reads KV
head kv and owns the columns [(kv·group_size + g)·D, (kv·group_size + g + 1)·D) of W_O.
D is head_dim, which need not be D_model / num_q_heads.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Literal, TypeVar

import torch
from torch import Tensor

from criticalkv.kernels import flash, pack_reference, quantized_reference, reference
from criticalkv.kernels.group_layout import GroupLayout

Norm = Literal["l1", "l2"]
Reduction = Literal["mean", "sum", "max", "sumsq"]
Pooling = Literal["max", "avg"]
Result = TypeVar("Result")
AttentionRows = reference.AttentionRows
MIN_NORM = reference.MIN_NORM

log = logging.getLogger(__name__)


def value_norm(values: Tensor, w_o: Tensor, group_size: int, norm: Norm = "l1") -> Tensor:
    """Return the norm of each value after the output projection, per query head.

    ‖v_kv · W_O[:, head]ᵀ‖ (CriticalKV, arXiv 2502.03805, Theorem 3.3: 𝓥 = V·W_O).
    The product is never materialised: L1 goes blockwise over rows and columns, L2 by
    the D × D Gram matrix of each head (exact).

    Args:
        values: [num_kv_heads, n, D], any float dtype.
        w_o: [D_model, num_q_heads · D], as in `nn.Linear.weight`.
        group_size: query heads per KV head.
        norm: "l1" or "l2".

    Returns:
        fp32 [num_kv_heads, group_size, n]; the mean over the group is the caller's.
    """
    heads, _, dim = values.shape
    if w_o.shape[1] != heads * group_size * dim:
        raise ValueError(f"w_o {tuple(w_o.shape)} does not fit {heads}x{group_size} heads of {dim}")
    kernel = reference.value_norm
    if values.is_cuda:
        kernel = _on_gpu("value_norm", kernel)
    return kernel(values, w_o, group_size, norm)


def output_norms(attn_out: Tensor, w_o: Tensor) -> Tensor:
    """Return ‖o_q‖₂, o_q being the layer's attention output of a query after W_O.

    Args:
        attn_out: [num_q_heads, m, D], before W_O.
        w_o: [D_model, num_q_heads · D].

    Returns:
        fp32 [m].
    """
    return reference.output_norms(attn_out, w_o)


def attention_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    reductions: Sequence[Reduction] = ("mean",),
    first_query: int | None = None,
    tail_keys: Tensor | None = None,
    prefix_keys: Tensor | None = None,
    prefix_cu: Tensor | None = None,
    query_weight: Tensor | None = None,
    padding: Tensor | None = None,
    min_distance: int = 0,
    query_stride: int = 1,
    block: int | None = None,
) -> dict[Reduction, Tensor]:
    """Return how strongly queries attend to each of `keys`, reduced over the queries.

    A is the softmax over everything a query sees; only the columns of `keys` are
    scored. fp32 throughout, a block of queries at a time. What query i sees:

        prefix_keys (ragged)   keys                     tail_keys
        1 1 1 1 1 1            1 1 1 1 1 1 1 1          1 1 0 0     first_query=None,
        1 1 1 1 1 1            1 1 1 1 1 1 1 1          1 1 1 0     m=3, 4 tail keys
        1 1 1 1 1 1            1 1 1 1 1 1 1 1          1 1 1 1

        1 1 1 1 1 1            1 1 1 1 1 1 0 0                      first_query=5,
        1 1 1 1 1 1            1 1 1 1 1 1 1 0                      m=3, no tail
        1 1 1 1 1 1            1 1 1 1 1 1 1 1

    Args:
        queries: [num_q_heads, m, D], after RoPE.
        keys: [num_kv_heads, n, D], after RoPE; the scored columns.
        scaling: factor of the logits, usually D ** -0.5.
        reductions: any of "mean" (Σ_q A / m), "sum" (Σ_q A), "max" (max_q A) and "sumsq"
            (Σ_q query_weight_q · A²).
        first_query: index among `keys` of query 0's own key, for causal visibility
            (query i sees keys ≤ first_query + i); None: all keys are visible.
        tail_keys: [num_kv_heads, s ≥ m, D] or None: unscored keys after `keys`, causal;
            the queries are the last m of them.
        prefix_keys: [Σ len_h, D] or None: unscored keys before `keys`, all visible,
            head after head; heads may be empty.
        prefix_cu: integers [num_kv_heads + 1], cumulative head lengths of
            `prefix_keys`; on the CPU it costs no synchronisation.
        query_weight: [m], for "sumsq", such as 1/‖o_q‖²; None: 1.
        padding: integers [num_kv_heads] or None: leading columns of `keys` that are none,
            by head; nobody sees them and they score 0. With first_query, queries whose
            own column is one of them are none either: no reduction counts them.
        min_distance: a query only scores keys at least so many columns before its own;
            needs first_query. It still sees the nearer ones.
        query_stride: with first_query, columns from one query's own to the next one's.
        block: queries per block; None: by size. A GPU's kernel has its own.

    Returns:
        for each reduction fp32 [num_kv_heads, group_size, n].
    """
    _check_attention(queries, keys, first_query, tail_keys, prefix_keys, prefix_cu)
    if (min_distance or query_stride != 1) and first_query is None:
        raise ValueError("min_distance and query_stride need first_query")
    if query_stride != 1 and padding is not None:
        raise ValueError("query_stride and padding do not go together")
    kernels = _scores(queries, keys, tail_keys, prefix_keys)
    sums: dict[Reduction, Tensor] = kernels.attention_scores(
        queries,
        keys,
        scaling=scaling,
        reductions=reductions,
        first_query=first_query,
        tail_keys=tail_keys,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        query_weight=query_weight,
        padding=padding,
        min_distance=min_distance,
        query_stride=query_stride,
        block=block,
    )
    return {name: sums[name] for name in reductions}


def attention_rows(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    first_query: int | None = None,
    tail_keys: Tensor | None = None,
    prefix_keys: Tensor | None = None,
    prefix_cu: Tensor | None = None,
    padding: Tensor | None = None,
    block: int | None = None,
) -> Iterator[AttentionRows]:
    """Yield how strongly queries attend to each of `keys`, block by block of queries.

    For reductions that `attention_scores` has not; arguments and visibility are its.

    Yields:
        (head, begin, logits, probs): the KV head, the first query of the block, and fp32
        [group_size, queries of the block, n] logits (−∞ where hidden) and A. Blocks come
        head after head, queries ascending; the caller may overwrite them.
    """
    _check_attention(queries, keys, first_query, tail_keys, prefix_keys, prefix_cu)
    return reference.attention_rows(
        queries,
        keys,
        scaling=scaling,
        first_query=first_query,
        tail_keys=tail_keys,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
        padding=padding,
        block=block,
    )


def _check_attention(
    queries: Tensor,
    keys: Tensor,
    first_query: int | None,
    tail_keys: Tensor | None,
    prefix_keys: Tensor | None,
    prefix_cu: Tensor | None,
) -> None:
    if queries.shape[0] % keys.shape[0]:
        raise ValueError(f"{queries.shape[0]} query heads do not divide by {keys.shape[0]}")
    if queries.shape[1] == 0:
        raise ValueError("no queries")
    if first_query is not None and first_query < 0:
        raise ValueError(f"first_query is {first_query}")
    if tail_keys is not None and tail_keys.shape[1] < queries.shape[1]:
        raise ValueError(f"{tail_keys.shape[1]} tail keys for {queries.shape[1]} queries")
    if (prefix_keys is None) != (prefix_cu is None):
        raise ValueError("prefix_keys and prefix_cu go together")


def scored_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    scaling: float,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    prefix_cu: Tensor | None = None,
    unscored: int = 0,
    w_o: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend, and score `keys` from the same softmax: a replay chunk in one pass.

    What query i of m sees; only the columns of `keys` and the rows from `unscored` on
    are scored:

        prefix (ragged)    keys               tail (the queries' own)
        1 1 1 1            1 1 1 1 1 1        1 0 0
        1 1 1 1            1 1 1 1 1 1        1 1 0
        1 1 1 1            1 1 1 1 1 1        1 1 1

    Args:
        q: [num_q_heads, m, D], after RoPE.
        keys: [num_kv_heads, n, D], after RoPE.
        values: like keys.
        tail_k: [num_kv_heads, m, D].
        tail_v: like tail_k.
        scaling: factor of the logits.
        prefix_k: [Σ len_h, D] or None, head after head.
        prefix_v: like prefix_k.
        prefix_cu: integers [num_kv_heads + 1], cumulative lengths; on the CPU.
        unscored: leading queries that attend without scoring.
        w_o: [D_model, num_q_heads · D] for the sum of squares, or None.

    Returns:
        out [num_q_heads, m, D] in q's dtype; peak fp32 [num_kv_heads, group_size, n],
        max_q A; and, with `w_o`, sumsq of the same shape, Σ_q A² / ‖o_q‖₂², o_q being the
        layer's output of query q after W_O.
    """
    if q.shape[0] % keys.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads do not divide by {keys.shape[0]}")
    if tail_k.shape[1] != q.shape[1]:
        raise ValueError(f"{tail_k.shape[1]} tail keys for {q.shape[1]} queries")
    if not 0 <= unscored < q.shape[1]:
        raise ValueError(f"unscored must leave one of {q.shape[1]} queries, got {unscored}")
    kernels = _scores(q, keys, values, tail_k, tail_v, prefix_k, prefix_v)
    result: tuple[Tensor, Tensor, Tensor | None] = kernels.scored_attention(
        q,
        keys,
        values,
        tail_k,
        tail_v,
        scaling=scaling,
        prefix_k=prefix_k,
        prefix_v=prefix_v,
        prefix_cu=prefix_cu,
        unscored=unscored,
        w_o=w_o,
    )
    return result


def _scores(queries: Tensor, *others: Tensor | None) -> ModuleType:
    """Return the module with the fastest score functions for tensors of this device and dtype."""
    if not queries.is_cuda or not _triton_is_there():
        return reference
    from criticalkv.kernels import attention_scores_gpu

    return attention_scores_gpu if attention_scores_gpu.applies(queries, *others) else reference


def window_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    kernel: int,
    pooling: Pooling | None,
    reduction: Literal["mean", "sum"] = "mean",
    prefix_keys: Tensor | None = None,
    prefix_cu: Tensor | None = None,
) -> Tensor:
    """Score keys by the attention of the last queries, pooled (SnapKV, arXiv 2404.14469).

    `attention_scores` of the last w queries, whose own keys are the last w, then the mean
    over the group and `pool` of what lies before the window; on a GPU in one kernel.

    Args:
        queries: [num_q_heads, w, D], after RoPE.
        keys: [num_kv_heads, n ≥ w, D], after RoPE.
        scaling: factor of the logits.
        kernel: pooling width, odd.
        pooling: "max" or "avg"; None: no pooling.
        reduction: over the window, "mean" or "sum".
        prefix_keys: [Σ len_h, D] or None: unscored keys before `keys`, head after head.
        prefix_cu: integers [num_kv_heads + 1], cumulative lengths; best on the CPU.

    Returns:
        fp32 [num_kv_heads, n].
    """
    before = keys.shape[1] - queries.shape[1]
    if kernel % 2 == 0:
        raise ValueError(f"a pooling width is odd, got {kernel}")
    _check_attention(queries, keys, before, None, prefix_keys, prefix_cu)
    scores: Tensor = _scores(queries, keys, prefix_keys).window_scores(
        queries,
        keys,
        scaling=scaling,
        kernel=kernel,
        pooling=pooling,
        reduction=reduction,
        prefix_keys=prefix_keys,
        prefix_cu=prefix_cu,
    )
    return scores


def pool(scores: Tensor, before: int, kernel: int, pooling: Pooling) -> Tensor:
    """Pool a window's scores over their neighbours; the window's own stay what they are.

    Average pooling pads with zeros, as the method's code does, so that the first
    entries lose weight.

    Args:
        scores: [num_kv_heads, n].
        before: columns before the window, which are pooled.
        kernel: pooling width, odd; stride 1, same length.
        pooling: "max" or "avg".

    Returns:
        [num_kv_heads, n].
    """
    return reference.pool(scores, before, kernel, pooling)


def pool_rows(rows: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """Pool every column of [a, b, n ≥ 1], see `pool`."""
    return reference.pool_rows(rows, kernel, pooling)


def ragged_attention(
    q: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    cu_seqlens: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    prefix_positions: Tensor | None = None,
    query_positions: Tensor | None = None,
    tail_positions: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend to a ragged prefix, all of it visible, and causally to a dense tail.

    The T queries are the last T of the S tail tokens. T=2, S=3, a head with 4 entries:

        prefix     tail
        1 1 1 1    1 1 0
        1 1 1 1    1 1 1

    S = 0 is allowed too (queries outside the tail that see only the prefix): then a
    query of an empty head sees nothing, its output is 0 and its lse −inf.

    Args:
        q: [num_q_heads, T, D], after RoPE.
        prefix_k: [Σ len_h, D], head after head, any order within a head.
        prefix_v: like prefix_k.
        cu_seqlens: integers [num_kv_heads + 1], cumulative lengths; best on the CPU.
        tail_k: [num_kv_heads, S, D], S ≥ T or S = 0.
        tail_v: like tail_k.
        scaling: factor of the logits.
        window: sliding window: a query at position p also sees only positions > p − window.
        prefix_positions: [Σ len_h], original positions; needed with a window.
        query_positions: [T], ascending; needed with a window.
        tail_positions: [S], ascending; needed with a window.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        (out [num_q_heads, T, D] in q's dtype, lse fp32 [num_q_heads, T] or None); lse is
        the natural log of Σ exp(scaling · q·k). Softmax and sums are fp32.
    """
    if q.shape[0] % tail_k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads do not divide by {tail_k.shape[0]}")
    if 0 < tail_k.shape[1] < q.shape[1]:
        raise ValueError(f"{tail_k.shape[1]} tail tokens for {q.shape[1]} queries")
    plain = tail_k.shape[1] == q.shape[1] and not prefix_k.shape[0] and window is None
    if plain and not return_lse and flash.applies(q):
        return flash.causal_attention(q, tail_k, tail_v, scaling), None
    return reference.ragged_attention(
        q,
        prefix_k,
        prefix_v,
        cu_seqlens,
        tail_k,
        tail_v,
        scaling=scaling,
        window=window,
        prefix_positions=prefix_positions,
        query_positions=query_positions,
        tail_positions=tail_positions,
        return_lse=return_lse,
    )


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    fills: Tensor,
    query_cu: Tensor,
    *,
    scaling: float,
    causal: bool = True,
    window: int | None = None,
    position_pages: Tensor | None = None,
    query_positions: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend to ragged heads in pages, several sequences at once.

    Row (s, h) lists the pages of sequence s and KV head h; its entries are the first
    `fills` slots of each page, in order. The T_s queries of a sequence own its last T_s
    entries. T_s=2, a head with 6 entries in 3 pages of 3 slots, fills 3, 1, 2:

        page 7    page 2    page 9
        1 1 1     1 - -     1 0 -
        1 1 1     1 - -     1 1 -

    Args:
        q: [num_q_heads, T, D], after RoPE; the sequences' queries one after another.
        key_pages: [P, page_size, D], shared by all sequences, heads and layers.
        value_pages: like key_pages.
        tables: int32 [S, num_kv_heads, C], page of each place.
        fills: int32 [S, num_kv_heads, C], slots in use; 0 = nothing there, the table's
            entry is then not read.
        query_cu: int32 [S + 1], cumulative queries from 0, on the CPU; none may be empty.
        scaling: factor of the logits.
        causal: False: the queries own no entry and see all of them, as after the last
            token; a query of an empty head sees nothing, its output is 0, its lse −inf.
        window: sliding window: a query at position p only sees positions > p − window.
        position_pages: int32 [P, page_size], original positions; needed with a window.
        query_positions: integers [T]; needed with a window.
        return_lse: whether to return the log-sum-exp too.

    Returns:
        (out [num_q_heads, T, D] in q's dtype, lse fp32 [num_q_heads, T] or None); lse is
        the natural log of Σ exp(scaling · q·k). Softmax and sums are fp32.
    """
    if q.shape[0] % tables.shape[1]:
        raise ValueError(f"{q.shape[0]} query heads do not divide by {tables.shape[1]}")
    if tables.shape != fills.shape or query_cu.numel() != tables.shape[0] + 1:
        raise ValueError("tables, fills and query_cu are of different batches")
    if window is not None and (position_pages is None or query_positions is None):
        raise ValueError("a window needs position_pages and query_positions")
    kernel = _paged_attention(q, key_pages, value_pages, tables)
    return kernel(
        q,
        key_pages,
        value_pages,
        tables,
        fills,
        query_cu,
        scaling=scaling,
        causal=causal,
        window=window,
        position_pages=position_pages,
        query_positions=query_positions,
        return_lse=return_lse,
    )


def _paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, tables: Tensor
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the fastest implementation for tensors of this device, dtype and layout."""
    if q.is_cuda:
        return _on_gpu("paged_attention", reference.paged_attention)
    if q.dtype != torch.float32 or not q.is_cpu:
        return reference.paged_attention
    module = _on_cpu("paged_attention", q.shape[2], q.shape[0] // tables.shape[1])
    if module is None or not module.applies(q, key_pages, value_pages):
        return reference.paged_attention
    kernel: Callable[..., tuple[Tensor, Tensor | None]] = module.paged_attention
    return kernel


def _on_gpu(name: str, otherwise: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function of the module `name`_gpu called like `otherwise`, or that one
    without Triton."""
    if not _triton_is_there():
        return otherwise
    kernel: Callable[..., Result] = getattr(_gpu_modules()[name], otherwise.__name__)
    return kernel


@functools.cache
def _gpu_modules() -> dict[str, ModuleType]:
    """The Triton modules by the names that `_on_gpu` knows; they import triton."""
    from criticalkv.kernels import (
        pack_gpu,
        paged_attention_gpu,
        quantize_gpu,
        quantized_attention_gpu,
        ranks_gpu,
        value_norm_gpu,
    )

    return {
        "pack": pack_gpu,
        "paged_attention": paged_attention_gpu,
        "quantize": quantize_gpu,
        "quantized_attention": quantized_attention_gpu,
        "ranks": ranks_gpu,
        "value_norm": value_norm_gpu,
    }


@functools.cache
def _triton_is_there() -> bool:
    there = importlib.util.find_spec("triton") is not None
    if not there:
        log.warning("no triton: kernels run in plain torch on the GPU, much slower")
    return there


@functools.cache
def _on_cpu(name: str, head_dim: int, *sizes: int) -> ModuleType | None:
    """The numba kernels of module `name`_cpu, compiled for such heads, or None where that fails.

    Args:
        name: of the operation.
        head_dim: D.
        sizes: what else its `warm_up` wants.
    """
    try:
        from criticalkv.kernels import (
            paged_attention_cpu,
            quantized_attention_cpu,
            vectors_cpu,
        )

        if head_dim % vectors_cpu.LANES:
            return None
        modules: dict[str, ModuleType] = {
            "paged_attention": paged_attention_cpu,
            "quantized_attention": quantized_attention_cpu,
        }
        module = modules[name]
        module.warm_up(head_dim, *sizes)
    except Exception:  # of many kinds: no numba, no LLVM for this CPU, a broken cache
        log.warning("%s runs in plain torch, much slower", name, exc_info=True)
        return None
    return module


def tier_ranks(by_score: Tensor, admitted: Tensor, tiers: int) -> Tensor:
    """Order entries by (admitting tier, place in `by_score`): a stable partition.

    Args:
        by_score: int64 [..., n], each row an order of its n entries, best first.
        admitted: uint8 [..., n], the tier that admits each entry, `tiers` for none.
        tiers: how many there are, 1…255.

    Returns:
        int64, like by_score.
    """
    if by_score.shape != admitted.shape:
        raise ValueError("by_score and admitted have different shapes")
    if not 1 <= tiers <= 255:
        raise ValueError(f"there must be 1…255 tiers, not {tiers}")
    kernel = pack_reference.tier_ranks
    if by_score.is_cuda:
        kernel = _on_gpu("ranks", kernel)
    return kernel(by_score, admitted, tiers)


def pack(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
    first_position: int,
    tier_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather kept entries, head after head, or tier after tier and head after head in each.

    Args:
        keys: [num_kv_heads, n, D]; any strides, rows best in one piece.
        values: like keys.
        indices: int64 [Σ len_h], entries of each head in rank order, head after head.
        cu_seqlens: int32 [num_kv_heads + 1], cumulative lengths; on the CPU.
        first_position: position of entry 0.
        tier_lens: int64 [tiers, num_kv_heads], entries of each head up to each tier,
            ascending; the output is then tier-major, as segments hold it, and ends with
            the last tier. None: head-major.

    Returns:
        (keys [Σ, D], values [Σ, D], positions int32 [Σ], finite bool []): `finite` says
        whether all that was gathered is; reading it waits for a GPU.
    """
    if keys.shape != values.shape or cu_seqlens.numel() != keys.shape[0] + 1:
        raise ValueError("keys, values and cu_seqlens are of different heads")
    kernel = pack_reference.pack
    if keys.is_cuda:
        kernel = _on_gpu("pack", kernel)
    return kernel(keys, values, indices, cu_seqlens, first_position, tier_lens)


def quantize(
    keys: Tensor, values: Tensor, positions: Tensor, starts: Tensor, fills: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Quantize runs of KV entries into groups (layout: `group_layout`).

    Args:
        keys: [n, D], any float dtype, finite, |x| ≤ 65504; D even.
        values: like keys.
        positions: integers [n].
        starts: int64 [N], first row of each group.
        fills: integers [N], its rows, 1…32.
        bits: 8 or 4.

    Returns:
        (key bytes uint8 [N, key_bytes], value bytes uint8 [N, value_bytes]).
    """
    kernel = quantized_reference.quantize
    if keys.is_cuda:
        kernel = _on_gpu("quantize", kernel)
    return kernel(keys, values, positions, starts, fills, bits)


def dequantize(
    key_groups: Tensor, value_groups: Tensor, fills: Tensor, layout: GroupLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the entries of groups, group after group: zero + scale · code.

    Args:
        key_groups: uint8 [N, key_bytes].
        value_groups: uint8 [N, value_bytes].
        fills: integers [N].
        layout: of the groups.

    Returns:
        (keys fp32 [Σ fills, D], values like keys, positions int32 [Σ fills]).
    """
    kernel = quantized_reference.dequantize
    if key_groups.is_cuda:
        kernel = _on_gpu("quantize", kernel)
    return kernel(key_groups, value_groups, fills, layout)


def quantized_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    fills: Tensor,
    query_cu: Tensor,
    *,
    layout: GroupLayout,
    scaling: float,
    window: int | None = None,
    query_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to quantized groups in pages, several sequences at once, without expanding them.

    Row (s, h) lists the groups of sequence s and KV head h. The queries own none of the
    entries and see all of them, but for a sliding window; what they own is attended to by
    `paged_attention`, and `merge` joins the two.

    Args:
        q: [num_q_heads, T, D], after RoPE; the sequences' queries one after another.
        key_pages: uint8 [P, bytes of a page]: as many groups as fit, back to back.
        value_pages: like key_pages; both hold `groups_per_page` groups.
        tables: int32 [S, num_kv_heads, C], page · groups_per_page + place in the page.
        fills: int32 [S, num_kv_heads, C], entries in use; 0 = nothing there.
        query_cu: int32 [S + 1], cumulative queries from 0, on the CPU; none may be empty.
        layout: of the groups.
        scaling: factor of the logits.
        window: sliding window: a query at position p only sees positions > p − window.
        query_positions: integers [T]; needed with a window.

    Returns:
        (out fp32 [num_q_heads, T, D], lse fp32 [num_q_heads, T]); a query that sees
        nothing has output 0 and lse −inf.
    """
    if q.shape[0] % tables.shape[1]:
        raise ValueError(f"{q.shape[0]} query heads do not divide by {tables.shape[1]}")
    if tables.shape != fills.shape or query_cu.numel() != tables.shape[0] + 1:
        raise ValueError("tables, fills and query_cu are of different batches")
    if window is not None and query_positions is None:
        raise ValueError("a window needs query_positions")
    kernel = _quantized_attention(q, key_pages, value_pages, tables, layout)
    return kernel(
        q,
        key_pages,
        value_pages,
        tables,
        fills,
        query_cu,
        layout=layout,
        scaling=scaling,
        window=window,
        query_positions=query_positions,
    )


def _quantized_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, tables: Tensor, layout: GroupLayout
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the fastest implementation for tensors of this device, dtype and layout."""
    slow = quantized_reference.quantized_attention
    if q.is_cuda:
        return _on_gpu("quantized_attention", slow)
    if q.dtype != torch.float32 or not q.is_cpu:
        return slow
    module = _on_cpu("quantized_attention", q.shape[2], q.shape[0] // tables.shape[1], layout.bits)
    if module is None or not module.applies(q, key_pages, value_pages):
        return slow
    kernel: Callable[..., tuple[Tensor, Tensor]] = module.quantized_attention
    return kernel


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention over disjoint sets of entries by their log-sum-exp.

    A query that sees only one part gets that part's output, bit for bit.

    Args:
        parts: (out [num_q_heads, T, D], lse fp32 [num_q_heads, T]) each.

    Returns:
        fp32 [num_q_heads, T, D].
    """
    return quantized_reference.merge(list(parts))
