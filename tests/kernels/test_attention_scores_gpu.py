"""The Triton kernels for attention scores: interpreted on a CPU, and compiled for GPUs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import triton_builds
from torch import Tensor

from criticalkv.kernels import reference

pytestmark = pytest.mark.timeout(900)  # compiling takes its time

EVERY = ("mean", "sum", "max", "sumsq")

# No bf16: Triton's interpreter multiplies the bits of bf16 matrices as if they were integers.
# heads, group, n, m, dim, and what differs from the defaults of `scores`
SCORES: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "one-token": (1, 1, 1, 1, 64, {"first": 0}),
    "window": (2, 3, 131, 7, 64, {"first": 124, "alone": EVERY}),
    "splits": (2, 3, 613, 5, 64, {"first": 608, "lens": (130, 0)}),
    "splits-of-tail-and-prefix": (1, 2, 5, 3, 64, {"tail": 331, "lens": (271,)}),
    "tail-and-prefix": (2, 2, 67, 5, 80, {"tail": 9, "lens": (0, 37)}),
    "tail-of-the-queries": (2, 1, 33, 11, 64, {"tail": 11}),
    "all-visible": (1, 4, 131, 3, 96, {}),
    "whole-prefill": (1, 2, 71, 71, 64, {"first": 0}),
    "lengths-on-the-gpu": (3, 2, 31, 3, 64, {"first": 28, "lens": (3, 0, 300), "bound": True}),
    "strided-and-far": (2, 1, 151, 37, 64, {"first": 2, "distance": 7, "stride": 4}),
    "farther-than-all": (1, 2, 31, 5, 64, {"first": 26, "distance": 40}),
    "padded": (
        3, 2, 71, 11, 64, {"first": 60, "lens": (3, 0, 2), "padding": (0, 65, 33)}),
    "nothing-but-padding": (2, 2, 17, 3, 64, {"first": 14, "padding": (17, 0)}),
    "padded-and-far": (2, 1, 41, 41, 64, {"first": 0, "padding": (35, 3), "distance": 5}),
    "padded-and-all-visible": (2, 2, 19, 3, 64, {"padding": (7, 0)}),
    "g5-d128": (1, 5, 37, 3, 128, {"first": 34}),
    "g7-d80": (1, 7, 37, 3, 80, {"first": 34}),
    "g8-d256": (1, 8, 37, 3, 256, {"first": 34}),
    "fp16": (2, 3, 150, 70, 64, {"first": 80, "dtype": torch.float16}),
    "fp16-d256": (1, 2, 131, 33, 256, {"first": 98, "dtype": torch.float16}),
}  # fmt: skip

# heads, group, n, m, dim, unscored, prefix lengths, with W_O, dtype
REPLAYS: dict[str, tuple[Any, ...]] = {
    "one-token": (1, 1, 1, 1, 64, 0, None, True, torch.float32),
    "root": (2, 3, 43, 7, 64, 2, None, True, torch.float32),
    "child": (3, 2, 31, 5, 80, 4, (4, 0, 9), True, torch.float32),
    "splits": (1, 4, 613, 11, 64, 3, (71,), True, torch.float32),
    "attention-only": (2, 8, 17, 11, 96, 0, (0, 0), False, torch.float32),
    "g2-d256": (1, 2, 19, 5, 256, 1, None, True, torch.float32),
    "fp16": (2, 3, 150, 70, 64, 9, (3, 60), True, torch.float16),
}

# heads, group, n, window, dim, kernel, pooling, reduction, prefix lengths, dtype
WINDOWS: dict[str, tuple[Any, ...]] = {
    "one-token": (1, 1, 1, 1, 64, 7, "max", "mean", None, torch.float32),
    "one-before": (2, 2, 4, 3, 64, 7, "max", "mean", None, torch.float32),
    "only-the-window": (2, 2, 37, 37, 64, 7, "max", "mean", None, torch.float32),
    "max": (2, 3, 131, 5, 64, 7, "max", "mean", (0, 37), torch.float32),
    "sum": (2, 3, 131, 5, 64, 7, "max", "sum", (13, 0), torch.float32),
    "avg": (2, 3, 131, 5, 64, 5, "avg", "mean", None, torch.float32),
    "not-pooled": (1, 4, 97, 19, 80, 5, None, "mean", None, torch.float32),
    "width-1": (1, 4, 97, 19, 96, 1, "avg", "mean", None, torch.float32),
    "width-63": (1, 1, 211, 3, 64, 63, "max", "mean", None, torch.float32),
    "splits": (1, 2, 613, 3, 128, 7, "avg", "sum", (11,), torch.float32),
    "g8-d256": (1, 8, 43, 3, 256, 3, "max", "mean", None, torch.float32),
    "fp16": (2, 3, 301, 32, 64, 7, "max", "mean", (3, 60), torch.float16),
    "fp16-width-63": (1, 2, 301, 5, 64, 63, "avg", "mean", None, torch.float16),
}

PROBABILITY = 1e-5
"""Relative error allowed: both sides round fp32 logits of order 10 and their exponentials."""
OUTPUT = {torch.float32: PROBABILITY, torch.float16: 2e-3}
"""Absolute; outputs are of order 1, and fp16 rounds weights and results to 2^-11."""
SQUARES = {torch.float32: 1e-4, torch.float16: 4e-3}
"""Relative: weighted by what fp16 outputs, rounded differently, weigh."""


def tensors(count: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Random rows as a model makes them: the heads of a token side by side."""
    return [
        torch.randn(shape[1], shape[0], shape[2]).to(dtype).transpose(0, 1) for _ in range(count)
    ]


def ragged(lens: tuple[int, ...] | None, dim: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """(keys, values, cumulative lengths) of a prefix, or three times None."""
    if lens is None:
        return None, None, None
    keys, values = (torch.randn(sum(lens), dim).to(dtype) for _ in range(2))
    return keys, values, torch.tensor([0, *lens]).cumsum(0)


def gap(got: Tensor, expected: Tensor) -> float:
    """Greatest relative error; what is not seen must be 0 and finite numbers finite."""
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert torch.equal(got == 0, expected == 0)
    assert torch.equal(got.isfinite(), expected.isfinite())
    if not expected.isfinite().any():
        return 0.0
    error = (got.double() - expected.double()).abs() / expected.double().abs().clamp_min(1e-30)
    return float(error[expected.isfinite()].max())


def scores(gpu: Any, case: tuple[int, int, int, int, int, dict[str, Any]]) -> dict[str, float]:
    """Errors of each reduction."""
    heads, group, n, m, dim, options = case
    first, tail, lens = (options.get(name) for name in ("first", "tail", "lens"))
    stride, dtype = options.get("stride", 1), options.get("dtype", torch.float32)
    queries = tensors(1, heads * group, m * stride, dim, dtype=dtype)[0][:, ::stride]
    keys = torch.randn(heads, n + 3, dim).to(dtype)[:, :n]
    prefix, _, cu = ragged(lens, dim, dtype)
    padding = options.get("padding")
    arguments: dict[str, Any] = {
        "scaling": 0.2,
        "first_query": first,
        "tail_keys": None if tail is None else torch.randn(heads, tail, dim).to(dtype),
        "prefix_keys": prefix,
        "prefix_cu": cu,
        "query_weight": torch.rand(m) + 0.5,
        "padding": None if padding is None else torch.tensor(padding),
        "min_distance": options.get("distance", 0),
        "query_stride": stride,
        "block": None,
    }
    expected = reference.attention_scores(queries, keys, reductions=EVERY, **arguments)
    got = gpu.attention_scores(queries, keys, reductions=EVERY, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        if options.get("bound"):  # as where only the GPU knows the lengths
            patch.setattr(gpu._Seen, "columns", lambda _: n + prefix.shape[0])
        again = gpu.attention_scores(queries, keys, reductions=EVERY, **arguments)
    for name in EVERY:
        assert torch.equal(got[name], again[name])
    for name in options.get("alone", ()):
        alone = gpu.attention_scores(queries, keys, reductions=(name,), **arguments)
        assert torch.equal(alone[name], got[name])
    return {name: gap(got[name], expected[name]) for name in EVERY}


def replay(gpu: Any, case: tuple[Any, ...]) -> dict[str, float]:
    """Errors of out (absolute), peak and sumsq (relative)."""
    heads, group, n, m, dim, unscored, lens, with_w_o, dtype = case
    q = tensors(1, heads * group, m, dim, dtype=dtype)[0]
    keys, values = tensors(2, heads, n, dim, dtype=dtype)
    tail_k, tail_v = tensors(2, heads, m, dim, dtype=dtype)
    prefix_k, prefix_v, cu = ragged(lens, dim, dtype)
    arguments = {
        "scaling": 0.2,
        "prefix_k": prefix_k,
        "prefix_v": prefix_v,
        "prefix_cu": cu,
        "unscored": unscored,
        "w_o": torch.randn(23, heads * group * dim).to(dtype) if with_w_o else None,
    }
    given = (q, keys, values, tail_k, tail_v)
    out, peak, sumsq = gpu.scored_attention(*given, **arguments)
    again = gpu.scored_attention(*given, **arguments)
    assert torch.equal(out, again[0])
    assert torch.equal(peak, again[1])
    assert out.dtype == dtype
    expected = reference.scored_attention(*given, **arguments)
    error = (out.double() - expected[0].double()).abs().max().item()
    found = {"out": error, "peak": gap(peak, expected[1])}
    if expected[2] is None:
        assert sumsq is None
        return found
    assert torch.equal(sumsq, again[2])
    return found | {"sumsq": gap(sumsq, expected[2])}


def window(gpu: Any, case: tuple[Any, ...]) -> float:
    """Relative error."""
    heads, group, n, width, dim, kernel, pooling, reduction, lens, dtype = case
    queries = tensors(1, heads * group, n, dim, dtype=dtype)[0][:, -width:]
    keys = torch.randn(heads, n + 3, dim).to(dtype)[:, :n]
    prefix, _, cu = ragged(lens, dim, dtype)
    arguments = {
        "scaling": 0.2,
        "kernel": kernel,
        "pooling": pooling,
        "reduction": reduction,
        "prefix_keys": prefix,
        "prefix_cu": cu,
    }
    got = gpu.window_scores(queries, keys, **arguments)
    assert torch.equal(got, gpu.window_scores(queries, keys, **arguments))
    return gap(got, reference.window_scores(queries, keys, **arguments))


def spoiled(gpu: Any) -> dict[str, list[bool]]:
    """Which scores are finite after one element of a query, then of a key, is NaN."""
    found = {}
    options: dict[str, Any] = {"scaling": 0.2, "prefix_keys": None, "prefix_cu": None}
    rest = {"tail_keys": None, "query_weight": None, "padding": None, "min_distance": 0}
    rest |= {"query_stride": 1, "block": None, "first_query": 7}
    for name in ("query", "key"):
        queries, keys = torch.randn(2, 3, 64), torch.randn(1, 10, 64)
        {"query": queries[0], "key": keys[0]}[name][1, 5] = torch.nan
        every = gpu.attention_scores(queries, keys, reductions=EVERY, **options, **rest)
        pooled = {"kernel": 3, "pooling": "max", "reduction": "mean"}
        every["window"] = gpu.window_scores(queries, keys, **options, **pooled)
        found[name] = [bool(scores.flatten()[0].isfinite()) for scores in every.values()]
    return found


def large_logits(gpu: Any) -> list[float]:
    """Shares of three equal keys among four, at logits of 360000."""
    query, keys = torch.full((1, 1, 64), 75.0), torch.full((1, 4, 64), 75.0)
    keys[0, 1] = -75
    got = gpu.window_scores(
        query, keys, scaling=1.0, kernel=1, pooling=None, reduction="mean",
        prefix_keys=None, prefix_cu=None,
    )  # fmt: skip
    shares: list[float] = got[0].tolist()
    return shares


def applicable(gpu: Any) -> list[bool]:
    """Whether the kernels take tensors of one dtype, of two, of fp64, and too wide ones."""
    half, wide = torch.zeros(1, 1, 64).half(), torch.zeros(1, 1, 320)
    given = [(half, None, half), (half, half.float()), (half.double(),), (wide,)]
    return [gpu.applies(*some) for some in given]


def interpret() -> dict[str, Any]:
    """Return the errors of every case."""
    from criticalkv.kernels import attention_scores_gpu as gpu

    torch.manual_seed(0)
    return {
        "scores": {name: scores(gpu, case) for name, case in SCORES.items()},
        "replays": {name: replay(gpu, case) for name, case in REPLAYS.items()},
        "windows": {name: window(gpu, case) for name, case in WINDOWS.items()},
        "spoiled": spoiled(gpu),
        "large": large_logits(gpu),
        "applicable": applicable(gpu),
    }


# kernel, dtype, group, dim, and for softmax: rows, with values; for window: pooling width
BUILDS = [
    ("softmax", "bf16", 4, 128, 128, False),
    ("softmax", "bf16", 4, 128, 2048, True),
    ("softmax", "fp16", 3, 80, 2048, True),
    ("softmax", "bf16", 8, 256, 2048, True),
    ("softmax", "fp16", 8, 64, 8, False),
    ("softmax", "fp32", 4, 128, 2048, True),
    ("reduce", "bf16", 4, 128, 0, False),
    ("reduce", "fp16", 8, 256, 0, False),
    ("reduce", "fp32", 3, 64, 0, False),
    ("window", "bf16", 4, 128, 7, False),
    ("window", "fp16", 3, 64, 63, False),
    ("window", "fp16", 8, 256, 31, False),
    ("window", "fp32", 3, 96, 15, False),
    ("merge", "fp32", 8, 256, 0, True),
]
OPTIONS = ("num_warps", "num_stages")


def plan(gpu: Any, build: tuple[Any, ...]) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(kernel, types of pointers, constants and options)."""
    kernel, dtype, group, dim, size, values = build  # of integers, Triton compiles a 1 in
    itemsize = 4 if dtype == "fp32" else 2
    shape = {"GROUP": group, "DIM": dim}
    rows = ("q", "keys", "values", "tail_keys", "tail_values", "prefix_keys", "prefix_values")
    pointers = dict.fromkeys(rows, f"*{dtype}") | {"prefix_cu": "*i32", "padding": "*i64"}
    if kernel == "softmax":
        flags = dict.fromkeys(("CAUSAL", "TAIL", "PREFIX"), True) | {"PADDED": False}
        flags |= {"VALUES": values, "stride": 1} | shape
        return (
            gpu.softmax_kernel,
            pointers,
            flags | gpu.softmax_sizes(dim, size, itemsize, values=values),
        )
    if kernel == "reduce":
        flags = dict.fromkeys(("CAUSAL", "WEIGHTED", "SUM", "PEAK", "SQUARES"), True)
        flags |= {"PADDED": False, "stride": 1} | shape
        return gpu.reduce_kernel, pointers, flags | gpu.reduce_sizes(dim, 2048, itemsize)
    if kernel == "window":
        flags = {"KERNEL": size, "MAX": True} | shape
        return gpu.window_kernel, pointers, flags | gpu.reduce_sizes(dim, 32 * group, itemsize)
    sizes = {
        "splits": 1,
        "BLOCK_D": dim,
        "BLOCK_R": 16,
        "BLOCK_S": 32,
        "num_warps": 4,
        "num_stages": 3,
    }
    return gpu.merge_kernel, {"out": f"*{dtype}"}, {"VALUES": values, "DIM": dim} | sizes


def build() -> dict[str, list[int]]:
    """Compile for sm_80 and sm_90; return (registers, bytes spilled, shared memory) of each."""
    from criticalkv.kernels import attention_scores_gpu as gpu

    found = {}
    for case in BUILDS:
        kernel, pointers, constants = plan(gpu, case)
        options = {name: constants.pop(name) for name in OPTIONS}
        signature = {
            name: pointers.get(name, "fp32" if name in ("scale", "factor") else "*fp32")
            for name in kernel.arg_names
            if name not in constants
        }
        for name in SCALARS & signature.keys():
            signature[name] = "i32"
        aligned = [
            i
            for i, name in enumerate(kernel.arg_names)
            if signature.get(name, "").startswith("*") or name in STRIDES
        ]
        for capability in (80, 90):
            found[f"sm{capability}-{case}"] = triton_builds.built(
                kernel, signature, constants, capability=capability, aligned=aligned, **options
            )
    return found


STRIDES = {"q_head", "q_row", "key_head", "key_row"}
SCALARS = STRIDES | {"split_columns", "n", "m", "w", "tail", "first", "stride", "splits", "rows"}
SCALARS |= {"begin", "distance"}


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_the_reference(name: str, interpreted: Any) -> None:
    for reduction in EVERY:
        assert interpreted["scores"][name][reduction] <= 2 * PROBABILITY, reduction


@pytest.mark.parametrize("name", REPLAYS)
def test_replays_equal_the_reference(name: str, interpreted: Any) -> None:
    found, dtype = interpreted["replays"][name], REPLAYS[name][-1]
    assert found["out"] <= OUTPUT[dtype]
    assert found["peak"] <= PROBABILITY
    assert found.get("sumsq", 0) <= SQUARES[dtype]


@pytest.mark.parametrize("name", WINDOWS)
def test_window_scores_equal_the_reference(name: str, interpreted: Any) -> None:
    assert interpreted["windows"][name] <= PROBABILITY


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_shows_in_every_score(where: str, interpreted: Any) -> None:
    assert interpreted["spoiled"][where] == [False] * 5


def test_large_logits_keep_their_precision(interpreted: Any) -> None:
    third = pytest.approx(1 / 3, rel=PROBABILITY)
    assert interpreted["large"] == [third, 0.0, third, third]


def test_what_the_kernels_do_not_know_is_left_to_the_reference(interpreted: Any) -> None:
    assert interpreted["applicable"] == [True, False, False, False]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_it_compiles_without_spills(
    build: tuple[Any, ...], capability: int, built: dict[str, list[int]]
) -> None:
    registers, spilled, shared = built[f"sm{capability}-{build}"]
    assert registers <= 255
    assert spilled == 0
    assert shared <= 99 * 1024  # what every GPU from sm_80 on grants, sm_86 and 89 too


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "build": build}[sys.argv[1]]()))
