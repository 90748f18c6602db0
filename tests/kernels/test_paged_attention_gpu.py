"""The Triton kernel for attention over pages: interpreted on a CPU, and compiled for GPUs.

Triton decides when it is imported whether it interprets, so either happens in a process
of its own; this module is what they run, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import naive_pages
import pytest
import torch

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
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
        constants |= {"DIM": dim} | sizes
        signature = pointers | scalars | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
        for capability in (80, 90):
            target = GPUTarget("cuda", capability, 32)
            source = ASTSource(gpu.split_kernel, signature, constants, aligned)
            built = triton.compile(source, target=target, options=options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(built.asm["cubin"])
                file.flush()
                usage = _usage(file.name)
            name = f"sm{capability}-{dtype}-g{group}-d{dim}-page{page}-q{queries}"
            found[name] = [*usage, built.metadata.shared]
    merge = {"part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    constants = {"DIM": 128, "BLOCK_D": 128, "BLOCK_S": 16}
    signature = merge | {"splits": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(gpu.merge_kernel, signature, constants, {})
    built = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    found["sm80-merge-d128"] = [0, 0, built.metadata.shared]
    return found


def _usage(cubin: str) -> tuple[int, int]:
    """(registers per thread, bytes of local memory) by the tool that comes with Triton."""
    import re

    from triton.knobs import nvidia

    text = subprocess.run(
        [nvidia.cuobjdump.path, "--dump-resource-usage", cubin],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])


def in_a_process(function: str, **environment: str) -> Any:
    paths = [str(Path(__file__).parent), str(Path(naive_pages.__file__).parent)]
    code = (
        f"import sys, json; sys.path[:0] = {paths!r}; import test_paged_attention_gpu as t;"
        f"print(json.dumps(t.{function}()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    pytest.importorskip("triton")
    return in_a_process("interpret", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def built() -> Any:
    pytest.importorskip("triton")
    return in_a_process("build")


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
