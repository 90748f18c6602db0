"""The GPU benchmark on a CPU, at tiny sizes: its checks judge, and its report is whole."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from criticalkv.kernels import ops

FOLDER = Path(__file__).resolve().parents[2] / "infra" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with its neighbours, on one thread."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu
    import gpu_clock

    monkeypatch.setattr(gpu_clock, "REPEATS", 1)
    monkeypatch.setattr(gpu_clock, "RUN_S", 0.0)
    return gpu


def tiny(bench: Any) -> Any:
    return bench.Shape(6, 2, 64, 96, 128, context=160, sample=61, device="cpu")


def test_every_kernel_is_checked(bench: Any) -> None:
    shape = tiny(bench)
    torch.manual_seed(0)
    found = [check() for check in bench.gpu_checks.layer_checks(shape, torch.float16)]
    assert all(check["right"] for check in found), found
    assert {check["check"].split()[0] for check in found} == {
        "value_norm",
        "window_scores",
        "replay_scores",
        "scored_attention",
        "paged_attention",
        "quantize",
        "dequantize",
        "quantized_attention",
        "tier_ranks",
        "pack",
    }


def test_other_heads_are_checked_too(bench: Any) -> None:
    one = list(bench.gpu_checks.layer_checks(tiny(bench), torch.float32))
    shape = tiny(bench)
    every = [*bench.gpu_checks.own_checks(shape), *bench.gpu_checks.other_checks(shape)]
    assert len(every) == 7 * len(one)
    assert {check.args[0].head_dim for check in every} == {64, 80, 96, 256}


def wrong(of: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with results that are 5 % too large, or orders that are one off."""

    def off(out: Any) -> Any:
        if isinstance(out, dict):
            return {name: off(value) for name, value in out.items()}
        if isinstance(out, tuple):
            return (off(out[0]), *out[1:])
        return out * 1.05 if out.is_floating_point() else out.roll(1, -1)

    return lambda *args, **kwargs: off(of(*args, **kwargs))


@pytest.mark.parametrize(
    ("operation", "checks"),
    [
        ("value_norm", ["value_norm"]),
        ("window_scores", ["window_scores"]),
        ("attention_scores", ["replay_scores"]),
        ("scored_attention", ["scored_attention"]),
        ("paged_attention", ["paged_attention"]),
        ("quantized_attention", ["quantized_attention"]),
        ("quantize", ["quantize", "quantized_attention"]),
        ("dequantize", ["quantize", "dequantize"]),
        ("pack", ["pack"]),
        ("tier_ranks", ["tier_ranks"]),
    ],
)
def test_a_wrong_kernel_is_found(
    bench: Any, monkeypatch: pytest.MonkeyPatch, operation: str, checks: list[str]
) -> None:
    monkeypatch.setattr(ops, operation, wrong(getattr(ops, operation)))
    torch.manual_seed(0)
    every = bench.gpu_checks.layer_checks(tiny(bench), torch.float16)
    found = [check() for check in every]
    assert {check["check"].split()[0] for check in found if not check["right"]} == set(checks)


def test_a_report_has_every_number(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for checks in ("own_checks", "other_checks"):
        monkeypatch.setattr(bench.gpu_checks, checks, lambda _: iter([]))
    monkeypatch.setattr(bench.gpu_prefill, "LAYERS", 1)
    monkeypatch.setattr(bench.gpu_prefill, "VOCABULARY", 32)
    attempts = bench.Attempts(time.perf_counter() + 600)
    ceilings = bench.Ceilings.measured("cpu", copy_bytes=1 << 12, side=16)
    *earlier, report = bench.measure(tiny(bench), ceilings, attempts, batches=(2,))
    assert len(earlier) == 3
    assert earlier[0]["headline"]["scoring_share_32k"] is not None
    assert attempts.errors == []
    assert report["headline"].keys() == report["meaning"].keys()
    assert all(isinstance(number, int | float) for number in report["headline"].values())
    assert report["details"]["prefill"]["parts_us"].keys() >= {"window", "selection", "pack"}
    assert report["details"]["decode_attention"][0]["batch"] == 2


def test_what_fails_is_null_and_told(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(ops, "value_norm", broken)
    monkeypatch.setattr(ops, "pack", broken)
    attempts = bench.Attempts(time.perf_counter() + 600)
    ceilings = bench.Ceilings(1.0, 1.0)
    calls = bench.kernel_calls(tiny(bench), ceilings)
    headline = bench.headline([None], [attempts.run(call) for call in calls], None)
    assert headline["value_norm_vs_limit"] is None
    assert headline["pack_vs_copy"] is None
    assert headline["scoring_share_32k"] is None
    assert headline["window_scores_vs_limit"] is not None
    assert headline["wrong_checks"] == 1
    assert [line.split(":")[0] for line in attempts.errors] == [
        "value_norm l1",
        "value_norm l2",
        "pack",
    ]


def test_nothing_is_begun_after_the_deadline(bench: Any) -> None:
    attempts = bench.Attempts(time.perf_counter() - 1)
    assert attempts.run(bench.partial(dict, a=1)) is None
    assert "no time left" in attempts.errors[0]


def test_scored_layers_keep_what_the_policy_keeps(bench: Any) -> None:
    """The benchmark's own two-stage selection is the library's, tier by tier."""
    from criticalkv.shared.eviction.plan import Plan
    from criticalkv.shared.eviction.policy import Policy
    from criticalkv.shared.eviction.scores import LayerScores

    torch.manual_seed(0)
    n, heads = 200, 2
    layer = bench.gpu_prefill.Layer(
        torch.randn(6, n, 16),
        torch.randn(heads, n, 16),
        torch.randn(heads, n, 16),
        torch.randn(48, 6 * 16),
        0.25,
    )
    attention = layer.attention()
    lens, _ = bench.gpu_speed.kept_lens(heads, n)
    _, admitted = layer.admit(attention, layer.critical(attention, "l1"), lens)
    policy = Policy.parse("criticalkv")
    window = torch.arange(n) >= n - policy.window
    scores = LayerScores.of(policy, attention, window, values=layer.values, w_o=layer.w_o)
    plan = Plan([scores], policy)
    for index, share in enumerate(bench.gpu_speed.KEPT):
        assert torch.equal(admitted <= index, plan.select(str(share))[0]), share


def test_it_needs_torch_triton_and_transformers_alone() -> None:
    known = {*sys.stdlib_module_names, "torch", "triton", "transformers"}
    known |= {file.stem for file in FOLDER.glob("gpu*.py")}
    for file in FOLDER.glob("gpu*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in known or name.startswith("criticalkv.kernels"), file
