"""The decode benchmark measures what it says, on a tiny model and a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

from criticalkv.services.bench import decode
from criticalkv.services.bench.decode import _Bench, _headline
from criticalkv.shared.config import Config, DecodeConfig, ModelConfig
from criticalkv.shared.model.loader import load_model


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = make_model()
    model.model.save_pretrained(tmp_path / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "tiny")
    path = ModelConfig(path=str(tmp_path / "tiny"))
    return Config(model=path, decode=DecodeConfig(page_size=16, max_num_batched_tokens=512))


def test_a_quick_run_fills_its_report(config: Config, tmp_path: Path) -> None:
    report = decode.run(config, quick=True, threads=1)
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["quick"] is True
    assert written["headline"]["vs_hf_dynamic_b8_t02"] is None
    details = written["details"]
    for batch in ("b1", "b2"):
        step = details[batch]["step_ms"]
        assert {"0.1", "0.2", "0.4", "1", "dynamic", "static"} <= step.keys()
        assert all(ms > 0 for ms in step.values())
        assert details[batch]["memory"]["accounted_bytes"] > 0
    assert "kept" in details["b1"]["step_ms"]
    turns = details["warm"]["2"]["0.4"]
    assert turns["ttft"] >= turns["question"] > 0
    assert details["prepacked"] > 0
    pool = details["pool"]["tiers"]
    assert pool["0.1"]["conversations"] > pool["1"]["conversations"]


def test_both_sides_decode_over_the_same_entries(config: Config) -> None:
    """Transformers' caches hold the untouched keys by position, once for each sequence."""
    model = load_model(config.model, 1)
    bench = _Bench(config, model)
    cache = bench.context(96)
    made = bench._hf_cache(cache, 2, None)
    with torch.inference_mode():
        tokens = torch.tensor([decode.text_tokens(model, 96)])
        plain = bench._plain(tokens, use_cache=True).cache
    for ours, theirs in zip(made.layers, plain.layers, strict=True):
        for row in (0, 1):
            assert torch.allclose(ours.keys[row], theirs.keys[0], atol=1e-5)
            assert torch.allclose(ours.values[row], theirs.values[0], atol=1e-5)
    bench._theirs(made, 2)
    assert made.get_seq_length() == 96, "a round leaves the cache as it was"


def test_the_headline_divides_what_it_says() -> None:
    step = {"0.2": 10.0, "1": 18.0, "dynamic": 40.0, "static": 25.0}
    details = {
        "b8": {"step_ms": step},
        "growth": {"7680": {"step_ms": 11.0}, "1024": {"step_ms": 10.0}},
        "attention": {"full_over_02": 4.0},
        "pool": {"overhead": 0.04},
        "cold_ms": 5000.0,
        "warm": {"1": {"0.2": {"ttft": 100.0}}},
    }
    assert _headline(details) == {
        "vs_hf_dynamic_b8_t02": 4.0,
        "vs_hf_static_b8_t02": 2.5,
        "vs_own_full_b8": 1.8,
        "attention_vs_own_full_b8": 4.0,
        "cost_7680_over_1k": 1.1,
        "pool_overhead": 0.04,
        "warm_speedup_4k": 50.0,
    }
