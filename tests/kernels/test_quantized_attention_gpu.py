"""The Triton kernel for quantized groups: interpreted on a CPU, and compiled for GPUs."""

from __future__ import annotations

import json
import sys
from typing import Any

import naive_groups
import pytest
import torch
import triton_builds

from criticalkv.kernels.group_layout import GroupLayout

pytestmark = pytest.mark.timeout(900)  # compiling takes its time

CHAINS = [
    [[3, 2, 70, 1], [1, 64, 1], [5]],  # pieces that end within a group
    [[64, 0, 0, 7, 2], [0, 9], [0, 0, 0, 0, 0, 0, 2]],  # holes in the middle and in front
    [[50, 6], [], [31, 33]],  # an empty head
]
LONG = [[[1100], [3, 600]]]  # three splits
MANY = [[[90, 40], [40]], [[3], [7]]]

# No bf16: Triton's interpreter multiplies the bits of bf16 matrices as if they were integers.
# name: rows, queries, group, dim, bits, groups of a page, window, dtype
CASES: dict[str, tuple[Any, ...]] = {
    "chains-int8": (CHAINS, [1, 2, 6], 3, 64, 8, 7, None, "float32"),
    "chains-int4": (CHAINS, [1, 2, 6], 3, 64, 4, 12, None, "float32"),
    "chains-window": (CHAINS, [1, 2, 6], 3, 64, 8, 1, 300, "float32"),
    "hidden-by-window": (CHAINS, [1, 1, 1], 3, 64, 4, 2, 1, "float32"),
    "splits": (LONG, [1], 3, 64, 8, 5, None, "float32"),
    "many-queries": (MANY, [20, 3], 3, 64, 4, 3, None, "float32"),
    "one-entry": ([[[1]]], [1], 1, 64, 8, 1, None, "float32"),
    "g2-d80-int4": (MANY, [1, 3], 2, 80, 4, 3, None, "float32"),
    "g4-d80-int8": (MANY, [1, 3], 4, 80, 8, 3, None, "float32"),
    "g5-d96-int4": (MANY, [1, 3], 5, 96, 4, 3, None, "float32"),
    "g6-d96-int8": (MANY, [1, 3], 6, 96, 8, 3, None, "float32"),
    "g7-d128-int4": (MANY, [1, 3], 7, 128, 4, 3, None, "float32"),
    "g8-d256-int8": (MANY, [1, 3], 8, 256, 8, 3, None, "float32"),
    "fp16-int8": (CHAINS, [1, 2, 6], 3, 64, 8, 7, None, "float16"),
    "fp16-int4": (CHAINS, [1, 2, 6], 3, 64, 4, 7, None, "float16"),
}
FLOOR = 2e-6
"""Absolute error allowed in fp32, whose products and sums are fp32 too."""

# dtype, bits, group, dim, most queries
BUILDS = [
    ("bf16", 8, 3, 64, 1),
    ("bf16", 4, 3, 64, 1),
    ("fp16", 8, 4, 128, 1),
    ("bf16", 4, 4, 128, 1),
    ("bf16", 8, 4, 128, 512),
    ("bf16", 4, 4, 128, 512),
    ("fp32", 8, 3, 64, 1),
    ("fp32", 4, 4, 128, 1),
    ("bf16", 4, 8, 80, 1),
    ("bf16", 8, 8, 256, 1),
    ("bf16", 8, 8, 256, 512),
]


def _sdpa(b: naive_groups.Batch) -> torch.Tensor:
    """Attention to groups expanded to the dtype of the queries, in that dtype."""
    out = torch.zeros_like(b.q)
    group, cu = b.q.shape[0] // b.tables.shape[1], b.query_cu.tolist()
    for s in range(len(cu) - 1):
        for head in range(b.tables.shape[1]):
            keys, values, _ = naive_groups.entries(b, s, head)
            rows = slice(head * group, (head + 1) * group), slice(cu[s], cu[s + 1])
            if len(keys):
                out[rows] = torch.nn.functional.scaled_dot_product_attention(
                    b.q[rows],
                    keys.to(b.q.dtype).expand(group, -1, -1),
                    values.to(b.q.dtype).expand(group, -1, -1),
                    scale=naive_groups.scaling(b),
                )
    return out


def interpret() -> dict[str, Any]:
    """Return each case's greatest errors: of out, of lse, and of SDPA in the queries' dtype."""
    from criticalkv.kernels import quantized_attention_gpu

    found = {}
    for name, (rows, queries, group, dim, bits, per_page, window, dtype) in CASES.items():
        b = naive_groups.batch(
            rows, queries, group=group, dim=dim, bits=bits, per_page=per_page,
            dtype=getattr(torch, dtype),
        )  # fmt: skip
        out, lse = quantized_attention_gpu.quantized_attention(*b.arguments(), **b.options(window))
        again, _ = quantized_attention_gpu.quantized_attention(*b.arguments(), **b.options(window))
        expected, expected_lse = naive_groups.attention(b, window)
        assert torch.equal(out, again)
        assert out.dtype == lse.dtype == torch.float32
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        assert not out[lse.isinf()].any()
        gap = (lse.double() - expected_lse).masked_fill(lse.isinf(), 0)
        usual = (_sdpa(b).double() - expected).abs().max().item() if dtype == "float16" else 0.0
        found[name] = [(out.double() - expected).abs().max().item(), gap.abs().max().item(), usual]
    found["nan"] = _nan()
    return found


def _nan() -> list[bool]:
    """Whether NaN in a scale shows: in the head's output, in its lse, in no other head's."""
    from criticalkv.kernels import quantized_attention_gpu

    b = naive_groups.batch([[[30], [700]]], [1], group=1, dim=64, bits=8, per_page=1)
    at = b.layout.affine_at
    b.key_pages[b.tables[0, 1, 20], at : at + 2] = naive_groups.GARBAGE
    out, lse = quantized_attention_gpu.quantized_attention(*b.arguments(), **b.options())
    return [bool(out[1].isnan().all()), bool(lse[1].isnan().all()), bool(out[0].isnan().any())]


def build() -> dict[str, Any]:
    """Compile for sm_80 and sm_90; return (registers, bytes spilled, shared memory) of each."""
    from criticalkv.kernels import quantized_attention_gpu as gpu

    found = {}
    for dtype, bits, group, dim, queries in BUILDS:
        sizes = gpu.sizes(GroupLayout(bits, dim), group, queries, 4 if dtype == "fp32" else 2)
        options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
        pointers = {"q": f"*{dtype}", "keys": "*u8", "key_halves": "*fp16", "values": "*u8"}
        pointers |= {"value_halves": "*fp16", "value_words": "*i32"}
        for name in ("tables", "fills", "query_cu", "blocks"):
            pointers[name] = "*i32"
        pointers |= {"query_positions": "*i64", "part_out": "*fp32", "part_lse": "*fp32"}
        scalars = dict.fromkeys(
            ("window", "places", "split_places", "num_blocks", "num_queries", "key_page"), "i32"
        )
        scalars |= {"scale": "fp32", "value_page": "i32", "per_page": "i32"}
        names = gpu.split_kernel.arg_names
        divisible = [*range(len(pointers)), names.index("key_page"), names.index("value_page")]
        for capability in (80, 90):
            found[_name(capability, dtype, bits, group, dim, queries)] = triton_builds.built(
                gpu.split_kernel,
                pointers | scalars,
                {"WINDOW": False} | sizes,
                capability=capability,
                aligned=divisible,
                **options,
            )
    return found


def _name(capability: int, *build: Any) -> str:
    return "-".join(map(str, (capability, *build)))


@pytest.mark.parametrize("name", CASES)
def test_interpreted_equals_fp64(name: str, interpreted: dict[str, list[float]]) -> None:
    out, lse, usual = interpreted[name]
    assert out <= FLOOR + 2 * usual
    assert lse <= 2 * FLOOR + (2e-3 if usual else 0)  # fp16 keys are rounded to 2^-11


def test_nan_is_not_hidden(interpreted: dict[str, list[bool]]) -> None:
    assert interpreted["nan"] == [True, True, False]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_it_compiles_within_a_gpus_registers(
    build: tuple[Any, ...], capability: int, built: dict[str, list[int]]
) -> None:
    registers, spilled, shared = built[_name(capability, *build)]
    assert registers <= 255
    assert shared <= 99 * 1024  # what every GPU from sm_80 on grants, sm_86 and 89 too
    # fp32 products live in plain registers, which 4-bit scales, one per 32 channels, overfill.
    assert spilled <= (256 if build[:2] == ("fp32", 4) else 0)


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "build": build}[sys.argv[1]]()))
