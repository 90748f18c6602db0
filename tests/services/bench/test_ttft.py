"""The benchmark measures what it says, on a tiny model and a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import make_model

from criticalkv.services.bench import ttft
from criticalkv.shared.config import Config, ModelConfig
from criticalkv.shared.report import Report


def test_a_quick_run_fills_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.model.save_pretrained(tmp_path / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(ttft, "QUICK_LENGTHS", (256, 4096 // 4))
    config = Config(model=ModelConfig(path=str(tmp_path / "tiny")))
    report = ttft.run(config, quick=True, threads=1)
    report.write(tmp_path / "out" / "report.json")
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["quick"] is True
    assert written["headline"].keys() == written["meaning"].keys()
    assert written["headline"]["warm_speedup_4k"] is None
    assert 0 < written["headline"]["store_get_vs_bare_grpc"] < 2
    assert 0 < written["headline"]["store_put_vs_bare_grpc"] < 2
    for n in ("256", "1024"):
        details = written["details"][n]
        for tier, warm in details["warm"].items():
            assert warm["bytes_pulled"] == details["stored_bytes"][tier]
            assert warm["speedup"] == pytest.approx(details["cold_s"] / warm["ttft_s"])
        assert details["stored_bytes"]["0.4"] == pytest.approx(
            0.4 * details["full_kv_bytes"], rel=0.01
        )
    assert written["environment"]["versions"]["torch"]


def test_headline_and_meaning_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other"):
        Report("x", True, {"other": 1.0}, {}).write(tmp_path / "x.json")
