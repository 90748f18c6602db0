"""The Triton kernel for attention over pages: interpreted on a CPU, and compiled for GPUs."""

from __future__ import annotations

import json
import sys
from typing import Any

import naive_pages
import pytest
import torch
import triton_builds

pytestmark = pytest.mark.timeout(900)  # compiling takes its time

CHAINS = [
    [[3, 2, 70, 1], [1, 64, 1], [5]],  # nodes that end within a page
    [[64, 0, 0, 7, 2], [0, 9], [0, 0, 0, 0, 0, 0, 2]],  # holes in the middle and in front
    [[130, 6], [200, 6], [6]],
]
LONG = [[[1300], [3, 600]], [[40], [1024]]]
EMPTY = [[[0], [7]], [[33, 2], [0, 0]], [[0], [0]]]
MANY = [[[90, 40], [40]], [[3], [7]]]

# No bf16: Triton's interpreter multiplies the bits of bf16 matrices as if they were integers.
# name: rows, queries, group, dim, page size, window, causal, dtype
CASES: dict[str, tuple[Any, ...]] = {
    "chains-page16": (CHAINS, [1, 2, 6], 3, 64, 16, None, True, "float32"),
    "chains-page64": (CHAINS, [1, 2, 6], 2, 64, 64, None, True, "float32"),
    "chains-page256": (CHAINS, [1, 2, 6], 2, 64, 256, None, True, "float32"),
    "chains-window": (CHAINS, [1, 2, 6], 3, 64, 16, 40, True, "float32"),
    "chains-narrow-window": (CHAINS, [1, 2, 6], 3, 64, 64, 5, True, "float32"),
    "decode-window": (CHAINS, [1, 1, 1], 3, 64, 64, 40, True, "float32"),
    "splits-page16": (LONG, [1, 1], 3, 64, 16, None, True, "float32"),
    "splits-page256": (LONG, [1, 5], 3, 64, 256, None, True, "float32"),
    "empty-heads": (EMPTY, [2, 1, 3], 2, 64, 16, None, False, "float32"),
    "many-queries": (MANY, [40, 3], 3, 64, 16, None, True, "float32"),
    "g1-d64": (MANY, [1, 3], 1, 64, 64, None, True, "float32"),
    "g4-d80": (MANY, [1, 3], 4, 80, 64, None, True, "float32"),
    "g5-d96": (MANY, [1, 3], 5, 96, 64, None, True, "float32"),
    "g7-d128": (MANY, [1, 3], 7, 128, 64, None, True, "float32"),
    "g8-d256": (MANY, [1, 3], 8, 256, 64, None, True, "float32"),
    "fp16": (CHAINS, [1, 2, 6], 3, 64, 64, None, True, "float16"),
}
FLOOR = 2e-6
"""Absolute error allowed in fp32, whose products and sums are fp32 too."""
FLOAT16_FLOOR = 2e-3
"""fp16 rounds weights and results to 2^-11; results are of order 1."""
FLOORS = {"float32": FLOOR, "float16": FLOAT16_FLOOR}

# dtype, group, dim, page size, most queries
BUILDS = [
    ("fp16", 3, 64, 64, 1),
    ("bf16", 4, 128, 16, 512),
    ("fp16", 1, 64, 64, 512),
    ("fp32", 3, 64, 64, 1),
    ("fp32", 3, 64, 64, 512),
    ("fp32", 4, 128, 64, 1),
    ("bf16", 8, 96, 64, 512),
    ("bf16", 8, 256, 64, 512),
    ("fp32", 8, 256, 64, 1),
]


def interpret() -> dict[str, Any]:
    """Return each case's greatest errors (out, lse); NaN and infinities must agree."""
    from criticalkv.kernels import paged_attention_gpu

    found = {}
    for name, (rows, queries, group, dim, page, window, causal, dtype) in CASES.items():
        b = naive_pages.batch(
            rows, queries, group=group, dim=dim, page_size=page, dtype=getattr(torch, dtype)
        )
        options = b.options(window, causal)
        out, lse = paged_attention_gpu.paged_attention(*b.arguments(), **options)
        again, _ = paged_attention_gpu.paged_attention(*b.arguments(), **options)
        expected, expected_lse = naive_pages.attention(b, window, causal)
        assert torch.equal(out, again)
        assert out.dtype == b.q.dtype
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        gap = (lse.double() - expected_lse).masked_fill(lse.isinf(), 0)
        found[name] = [(out.double() - expected).abs().max().item(), gap.abs().max().item()]
    return found


def build() -> dict[str, Any]:
    """Compile for sm_80 and sm_90; return (registers, bytes spilled, shared memory) of each."""
    from criticalkv.kernels import paged_attention_gpu as gpu

    found = {}
    for dtype, group, dim, page, queries in BUILDS:
        sizes = gpu.block_sizes(dim, group, queries, 4 if dtype == "fp32" else 2)
        options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
        pointers = dict.fromkeys(("q", "keys", "values"), f"*{dtype}")
        for name in ("tables", "fills", "ends", "query_cu", "blocks", "position_pages"):
            pointers[name] = "*i32"
        pointers |= {"query_positions": "*i64", "part_out": "*fp32", "part_lse": "*fp32"}
        scalars = {"scale": "fp32"} | dict.fromkeys(
            ("window", "places", "split_places", "num_blocks", "num_queries"), "i32"
        )
        constants = {"CAUSAL": queries > 1, "WINDOW": False, "GROUP": group, "PAGE": page}
        for capability in (80, 90):
            name = f"sm{capability}-{dtype}-g{group}-d{dim}-page{page}-q{queries}"
            found[name] = triton_builds.built(
                gpu.split_kernel,
                pointers | scalars,
                constants | {"DIM": dim} | sizes,
                capability=capability,
                aligned=range(len(pointers)),
                **options,
            )
    found["sm80-merge-d128"] = triton_builds.built(
        gpu.merge_kernel,
        {"part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "splits": "i32"},
        {"DIM": 128, "BLOCK_D": 128, "BLOCK_S": 16},
        capability=80,
        num_warps=4,
        num_stages=3,
    )
    return found


@pytest.mark.parametrize("name", CASES)
def test_interpreted_equals_loops_in_fp64(name: str, interpreted: dict[str, list[float]]) -> None:
    out, lse = interpreted[name]
    dtype = CASES[name][-1]
    assert out <= FLOORS[dtype]
    assert lse <= 2 * FLOOR  # logits are fp32 products of what was given


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_it_compiles_without_spills(
    build: tuple[Any, ...], capability: int, built: dict[str, list[int]]
) -> None:
    dtype, group, dim, page, queries = build
    name = f"sm{capability}-{dtype}-g{group}-d{dim}-page{page}-q{queries}"
    registers, spilled, shared = built[name]
    assert registers <= 255
    assert shared <= 99 * 1024  # what every GPU from sm_80 on grants, sm_86 and 89 too
    if dim <= 128:
        assert spilled == 0


def test_merging_compiles(built: dict[str, list[int]]) -> None:
    assert built["sm80-merge-d128"][2] <= 48 * 1024


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "build": build}[sys.argv[1]]()))
