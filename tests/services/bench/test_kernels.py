"""The kernel benchmark: both sides of every pair compute the same, and a run fills its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_model

from criticalkv.services.bench import kernels
from criticalkv.services.bench.kernel_ops import Shape, measure
from criticalkv.shared.config import Config, ModelConfig

SHAPE = Shape(tokens=320, heads=2, group=2, dim=64, width=96)
OPERATIONS = {
    "value_norm l1",
    "value_norm l2",
    "window_scores",
    "scored_attention",
    "tier_ranks",
    "pack",
    "quantize and back, int8",
    "quantize and back, int4",
    "paged_attention",
    "quantized_attention int8",
    "quantized_attention int4",
}
# Scales are fp16 here and fp32 there: up to a step of difference, of a range of 2 maxima.
ROUNDING = {"quantize and back, int8": 2 / 255, "quantize and back, int4": 2 / 15}


def test_both_sides_of_a_pair_compute_the_same() -> None:
    ticks: list[int] = []
    found = measure(SHAPE, 1, lambda: ticks.append(1))
    assert {row["op"] for row in found} == OPERATIONS
    assert len(ticks) == len(OPERATIONS)
    for row in found:
        assert row["relative_error"] < ROUNDING.get(row["op"], 1e-5), row["op"]
        assert row["rate"] > 0


def test_a_quick_run_fills_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.model.save_pretrained(tmp_path / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "tiny")
    row = {"context": "News of the day. " * 40, "answers": ["What happened on that day."]}
    (tmp_path / "multi_news_50.jsonl").write_text(json.dumps(row))
    size = kernels._Size(shape=SHAPE, repeats=1, contexts=1, questions=1, tokens=200, rows=1)
    monkeypatch.setattr(kernels._Size, "of", lambda _: size)
    config = Config(model=ModelConfig(path=str(tmp_path / "tiny")))
    report = kernels.run(config, quick=True, threads=1, data=tmp_path)
    report.write(tmp_path / "report.json")
    headline = json.loads((tmp_path / "report.json").read_text())["headline"]
    assert set(headline) == set(kernels.MEANING)
    # D = 16: codes 32 B, value scale 4 B, position 4 B, and 64 B of a group's 32 keys.
    dim = model.spec.head_dim
    assert headline["int8_bytes_ratio"] == (2 * dim + 4 + 4 + 4 * dim / 32) / (4 * dim + 4)
    assert 0 < headline["int8_kl"] < headline["int4_kl"]
    assert 0 <= headline["perturbation_lower_share_snapkv"] <= 1
