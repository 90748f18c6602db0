"""The Triton kernel for value norms: interpreted on a CPU, and compiled for GPUs."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import naive_value_norm
import pytest
import torch
import triton_builds

from criticalkv.kernels import ops, reference

pytestmark = pytest.mark.timeout(900)  # compiling takes its time

# No bf16: Triton's interpreter multiplies the bits of bf16 matrices as if they were integers.
# name: num_kv_heads, group_size, n, head_dim, D_model, dtype
CASES: dict[str, tuple[int, int, int, int, int, str]] = {
    "one-token": (1, 1, 1, 64, 64, "float32"),
    "g3-d80-primes": (2, 3, 13, 80, 101, "float32"),
    "g5-d96-two-blocks-of-rows": (1, 5, 131, 96, 257, "float32"),
    "g8-d128": (1, 8, 7, 128, 300, "float32"),
    "g7-d256": (1, 7, 67, 256, 67, "float32"),
    "three-splits": (1, 2, 3, 16, 4099, "float32"),
    "tiny-heads": (3, 2, 5, 8, 48, "float32"),
    "fp16-d128": (2, 2, 17, 128, 300, "float16"),
    "fp16-d256": (1, 1, 67, 256, 67, "float16"),
}
FLOOR = 2e-6
"""Relative error allowed: products and sums are fp32."""

# dtype, head_dim, Gram matrix?
BUILDS = [
    ("fp16", 64, False),
    ("bf16", 80, False),
    ("bf16", 128, False),
    ("bf16", 96, True),
    ("bf16", 128, True),
    ("fp16", 256, False),
    ("fp16", 256, True),
    ("fp32", 16, False),
    ("fp32", 64, False),
    ("fp32", 128, False),
    ("fp32", 128, True),
    ("fp32", 256, False),
]


def sample(heads: int, group: int, n: int, dim: int, width: int, dtype: str) -> tuple[Any, Any]:
    """Values as an attention layer has them, heads within rows, and W_O."""
    generator = torch.Generator().manual_seed(n * dim)
    values = torch.randn(n, heads, dim, generator=generator).to(getattr(torch, dtype))
    w_o = torch.randn(width, heads * group * dim, generator=generator).to(values.dtype)
    return values.transpose(0, 1), w_o


def interpret() -> dict[str, Any]:
    """Return each case's greatest relative errors (l1, l2)."""
    from criticalkv.kernels import value_norm_gpu

    found = {}
    for name, case in CASES.items():
        values, w_o = sample(*case)
        errors = []
        for norm in ("l1", "l2"):
            got = value_norm_gpu.value_norm(values, w_o, case[1], norm)
            few = values[:, :3].contiguous()  # without those that followed, other strides
            again = value_norm_gpu.value_norm(few, w_o, case[1], norm)
            assert torch.equal(got[..., :3], again)
            expected = naive_value_norm.value_norm(values, w_o, case[1], norm)
            assert got.dtype == torch.float32
            assert got.shape == expected.shape
            errors.append(((got.double() - expected).abs() / expected).max().item())
        found[name] = errors
    nothing = torch.zeros(2, 3, 16)
    found["zero"] = [
        value_norm_gpu.value_norm(nothing, torch.randn(5, 64), 2, norm).abs().max().item()
        for norm in ("l1", "l2")
    ]
    found["none"] = list(
        value_norm_gpu.value_norm(nothing[:, :0], torch.ones(5, 64), 2, "l1").shape
    )
    return found


def build() -> dict[str, Any]:
    """Compile for sm_80 and sm_90; return (registers, bytes spilled, shared memory) of each."""
    from criticalkv.kernels import value_norm_gpu as gpu

    found = {}
    for dtype, dim, gram in BUILDS:
        sizes = gpu.block_sizes(dim, 4 if dtype == "fp32" else 2, gram)
        options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
        pointers = {"values": f"*{dtype}", "weights": f"*{dtype}", "out": "*fp32"}
        strides = ("value_head", "value_row", "weight_head", "weight_row")
        scalars = dict.fromkeys((*strides, "n", "width"), "i32")
        constants = {"GRAM": gram, "SPLIT": gpu.SPLIT, "GROUP": 4, "DIM": dim} | sizes
        for capability in (80, 90):
            found[name_of(dtype, dim, gram, capability)] = triton_builds.built(
                gpu.norm_kernel,
                pointers | scalars,
                constants,
                capability=capability,
                aligned=range(7),
                **options,
            )
    return found


def name_of(dtype: str, dim: int, gram: bool, capability: int) -> str:
    return f"sm{capability}-{dtype}-d{dim}-{'gram' if gram else 'l1'}"


@pytest.mark.parametrize("name", CASES)
def test_interpreted_equals_loops_in_fp64(name: str, interpreted: dict[str, list[float]]) -> None:
    l1, l2 = interpreted[name]
    assert l1 <= FLOOR
    assert l2 <= FLOOR


def test_zero_values_have_zero_norm(interpreted: dict[str, list[float]]) -> None:
    assert interpreted["zero"] == [0.0, 0.0]


def test_no_values_have_no_norms(interpreted: dict[str, list[float]]) -> None:
    assert interpreted["none"] == [2, 2, 0]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_it_compiles_without_spills(
    build: tuple[str, int, bool], capability: int, built: dict[str, list[int]]
) -> None:
    registers, spilled, shared = built[name_of(*build, capability)]
    assert registers <= 255
    assert spilled == 0
    assert shared <= 99 * 1024  # what every GPU from sm_80 on grants, sm_86 and 89 too


def test_a_gpu_gets_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from criticalkv.kernels import value_norm_gpu

    monkeypatch.setattr(value_norm_gpu, "value_norm", lambda *given: given)
    values, w_o = SimpleNamespace(shape=(1, 3, 8), is_cuda=True), SimpleNamespace(shape=(5, 16))
    assert ops.value_norm(values, w_o, 2, "l2") == (values, w_o, 2, "l2")


def test_a_gpu_without_triton_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_triton_is_there", lambda: False)
    assert ops._on_gpu("value_norm", reference.value_norm) is reference.value_norm


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "build": build}[sys.argv[1]]()))
