"""The Triton kernels between scores and bytes: tier ranks, packing, quantizing.

Triton decides when it is imported whether it interprets, so this file also runs as a script,
interpreted or to compile for GPUs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import triton_builds
from naive_quantize import random_entries
from torch import Tensor

from criticalkv.kernels import pack_reference, quantized_reference
from criticalkv.kernels.group_layout import GroupLayout

pytestmark = pytest.mark.timeout(900)  # compiling takes its time

# rows, entries, tiers; a chunk is 1024 entries
RANKS = [(1, 1, 1), (2, 7, 2), (3, 1024, 8), (2, 2503, 8), (1, 3001, 32)]
# heads, entries, head_dim, dtype, tier-major; a block of 64 channels is 64 rows
PACKS = [
    (1, 1, 64, "float32", False),
    (3, 157, 64, "float32", False),
    (3, 157, 64, "float32", True),
    (2, 41, 80, "float16", True),
    (2, 43, 96, "float16", False),
    (2, 67, 128, "float32", True),
    (2, 19, 256, "float16", False),
]
# bits, head_dim, dtype, spread, offset
GROUPS = [
    (8, 2, "float32", 1.0, 0.0),
    (4, 2, "float32", 1.0, 0.0),
    (4, 34, "float32", 1e-4, 0.0),
    (8, 64, "float32", 1.0, 1000.1),
    (4, 64, "float16", 1.0, 0.0),
    (8, 80, "float16", 30000.0, 0.0),
    (4, 80, "float32", 30000.0, -65504.0),
    (8, 96, "float32", 1e-8, 0.0),
    (4, 96, "float32", 1.0, -3.0),
    (8, 128, "float32", 0.0, 1e-6),
    (4, 128, "float32", 1.0, 0.0),
    (8, 256, "float16", 1.0, 0.0),
    (4, 256, "float32", 1.0, 0.0),
]
FILLS = [32, 1, 31, 7]
BUILDS = [(8, 64), (4, 80), (8, 128), (4, 128), (4, 256)]
CAPABILITIES = [80, 90]
NOT_FINITE = [(bad, which) for bad in ("nan", "inf", "-inf") for which in (0, 1)]


def interpret() -> dict[str, bool]:
    """Return whether each case equals the reference bit for bit, twice."""
    found = {f"ranks-{case}": _ranks_agree(*case) for case in RANKS}
    found |= {f"pack-{case}": _packs_agree(*case) for case in PACKS}
    found |= {f"finite-{bad}-{which}": _is_seen(bad, which) for bad, which in NOT_FINITE}
    for case in GROUPS:
        found[f"quantize-{case}"], found[f"dequantize-{case}"] = _groups_agree(*case)
    return found


def _ranks_agree(rows: int, n: int, tiers: int) -> bool:
    from criticalkv.kernels import ranks_gpu

    torch.manual_seed(n)
    by_score = torch.rand(rows, n).argsort(-1)
    admitted = torch.randint(0, tiers + 1, (rows, n), dtype=torch.uint8)
    expected = pack_reference.tier_ranks(by_score, admitted, tiers)
    return all(
        torch.equal(ranks_gpu.tier_ranks(by_score, admitted, tiers), expected) for _ in range(2)
    )


def _kept(heads: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """(indices, cu_seqlens, tier_lens) of random entries; the first head keeps all."""
    lens = torch.randint(0, n + 1, (3, heads)).sort(0).values
    lens[-1, 0] = n
    indices = torch.cat([torch.randperm(n)[:k] for k in lens[-1].tolist()])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lens[-1].cumsum(0)]).to(torch.int32)
    return indices, cu, lens


def _packs_agree(heads: int, n: int, dim: int, dtype: str, tier_major: bool) -> bool:
    from criticalkv.kernels import pack_gpu

    torch.manual_seed(n)
    keys = torch.randn(heads, n, dim).to(getattr(torch, dtype))
    values = torch.randn(n, heads, dim).to(keys.dtype).transpose(0, 1)
    keys[:, :, 0] = torch.finfo(keys.dtype).max
    indices, cu, lens = _kept(heads, n)
    arguments = (keys, values, indices, cu, 1000, lens if tier_major else None)
    expected = pack_reference.pack(*arguments)
    return all(
        torch.equal(a, b) and a.dtype == b.dtype
        for _ in range(2)
        for a, b in zip(pack_gpu.pack(*arguments), expected, strict=True)
    )


def _is_seen(bad: str, which: int) -> bool:
    """Whether what is not finite makes the flag false where it is kept, and only there."""
    from criticalkv.kernels import pack_gpu

    kv, cu = torch.zeros(2, 1, 70, 64), torch.tensor([0, 69], dtype=torch.int32)
    kv[which, 0, 69, 63] = float(bad)
    flags = [pack_gpu.pack(*kv, torch.arange(a, a + 69), cu, 0, None)[3] for a in (0, 1)]
    return [bool(flag) for flag in flags] == [True, False]


def _groups_agree(
    bits: int, dim: int, dtype: str, spread: float, offset: float
) -> tuple[bool, bool]:
    from criticalkv.kernels import quantize_gpu

    entries = random_entries(sum(FILLS), dim, seed=dim, spread=spread, offset=offset)
    keys, values = (x.to(getattr(torch, dtype)) for x in entries[:2])
    fills = torch.tensor(FILLS)
    arguments = (keys, values, entries[2], fills.cumsum(0) - fills, fills, bits)
    expected = quantized_reference.quantize(*arguments)
    layout = GroupLayout(bits, dim)
    expanded = quantized_reference.dequantize(*expected, fills, layout)
    made = [quantize_gpu.quantize(*arguments) for _ in range(2)]
    back = [quantize_gpu.dequantize(*expected, fills, layout) for _ in range(2)]
    return _all_equal(made, expected), _all_equal(back, expanded)


def _all_equal(runs: list[tuple[Tensor, ...]], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for run in runs for a, b in zip(run, expected, strict=True))


def build() -> dict[str, Any]:
    """Compile; return (registers, bytes spilled, shared memory) of each, and PTX facts."""
    from criticalkv.kernels import pack_gpu, quantize_gpu, ranks_gpu

    found: dict[str, Any] = {}
    for capability in CAPABILITIES:
        ranks = {"by_score": "*i64", "admitted": "*u8", "n": "i32", "classes": "i32"}
        options = {"capability": capability, "num_warps": 4, "num_stages": 3}
        for name, own, constants in [
            ("count", {"counts": "*i32"}, {"BINS": 64}),
            ("place", {"ends": "*i32", "out": "*i64"}, {}),
        ]:
            kernel = getattr(ranks_gpu, f"{name}_kernel")
            constants = {"BLOCK": ranks_gpu.CHUNK, **constants}
            built = triton_builds.built(kernel, ranks | own, constants, **options, aligned=(0, 1))
            found[f"sm{capability}-{name}"] = built
        for dtype, dim in [("bf16", 64), ("fp32", 80), ("bf16", 128), ("bf16", 256)]:
            constants = {"DIM": dim, **pack_gpu.block_sizes(dim)}
            found[f"sm{capability}-pack-{dtype}-{dim}"] = triton_builds.built(
                pack_gpu.pack_kernel, _pack_types(dtype), constants, **options, aligned=range(13)
            )
        for bits, dim in BUILDS:
            constants = quantize_gpu.constants(GroupLayout(bits, dim))
            options["num_warps"] = quantize_gpu.num_warps(dim)
            for name, types in _group_types().items():
                kernel = getattr(quantize_gpu, f"{name}_kernel")
                found[f"sm{capability}-{name}-{bits}-{dim}"] = triton_builds.built(
                    kernel, types, constants, **options, aligned=range(len(types))
                )
    found["divisions"] = _divisions()
    return found


def _pack_types(dtype: str) -> dict[str, str]:
    arrays = dict.fromkeys(("keys", "values", "out_keys", "out_values"), f"*{dtype}")
    strides = dict.fromkeys(("key_head", "key_row", "value_head", "value_row"), "i32")
    others = {"indices": "*i64", "runs": "*i64", "positions": "*i32", "finite": "*u8"}
    return arrays | strides | others | {"first_position": "i32"}


def _group_types() -> dict[str, dict[str, str]]:
    entries = {"keys": "*bf16", "values": "*bf16", "positions": "*i32"}
    views = {"key_halves": "*fp16", "value_halves": "*fp16", "value_ints": "*i32"}
    where = {"fills": "*i64"} | views
    out = {"starts": "*i64", "key_out": "*u8", "value_out": "*u8"}
    groups = {"key_groups": "*u8", "value_groups": "*u8", "ends": "*i64"}
    expanded = {"keys": "*fp32", "values": "*fp32", "positions": "*i32"}
    return {"quantize": entries | where | out, "dequantize": expanded | where | groups}


def _divisions() -> list[str]:
    """The kinds of fp32 divisions, and any flushing to zero, in the PTX of quantizing."""
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from criticalkv.kernels import quantize_gpu

    constants = quantize_gpu.constants(GroupLayout(4, 64))
    types = dict.fromkeys(quantize_gpu.quantize_kernel.arg_names, "constexpr")
    source = ASTSource(quantize_gpu.quantize_kernel, types | _group_types()["quantize"], constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
    return sorted(set(re.findall(r"\bdiv\.[\w.]*f32|\.ftz", ptx)))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, bool]:
    pytest.importorskip("triton")
    return triton_builds.in_process(__file__, "interpret", interpret=True)


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    pytest.importorskip("triton")
    return triton_builds.in_process(__file__, "build", interpret=False)


def test_interpreted_equals_the_reference(interpreted: dict[str, bool]) -> None:
    assert len(interpreted) == len(RANKS) + len(PACKS) + len(NOT_FINITE) + 2 * len(GROUPS)
    assert [name for name, agrees in interpreted.items() if not agrees] == []


def test_they_compile_without_spills(built: dict[str, Any]) -> None:
    usage = {name: found for name, found in built.items() if name.startswith("sm")}
    assert len(usage) == 2 * (2 + 4 + 2 * len(BUILDS))
    for name, (registers, spilled, shared) in usage.items():
        assert registers <= 255, name
        assert spilled == 0, name
        assert shared <= 99 * 1024, name  # what every GPU from sm_80 on grants


def test_divisions_are_rounded_as_on_a_cpu(built: dict[str, Any]) -> None:
    assert built["divisions"] == ["div.rn.f32"]


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "build": build}[sys.argv[1]]()))
