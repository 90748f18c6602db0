"""The eviction benchmark measures what it says, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

from criticalkv.services.bench import eviction, prefill_cost
from criticalkv.services.bench.closeness import TIERS, Closeness, Table
from criticalkv.services.evaluation.forced import divergence
from criticalkv.shared.config import Config, EvictionConfig, ModelConfig
from criticalkv.shared.errors import ConfigError, PolicyError


def test_a_quick_run_fills_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.model.save_pretrained(tmp_path / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "tiny")
    row = {"context": "News of the day. " * 25}
    (tmp_path / "multi_news_50.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(prefill_cost, "ROUNDS", 1)
    config = Config(model=ModelConfig(path=str(tmp_path / "tiny")))
    complete: list[bool] = []
    report = eviction.run(
        config,
        quick=True,
        threads=1,
        data=tmp_path,
        so_far=lambda report: complete.append(report.details["complete"]),
    )
    assert complete == [False] * 3 + [True]  # a summary, two needle cases, the end
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["quick"] is True
    assert written["headline"]["window_share_4k"] is None  # only 512 tokens
    assert written["headline"]["replay_kl_10pct"] > 0
    assert written["headline"]["critical_over_base_kl_snapkv"] > 0
    for table, policies in (
        ("needles", {*eviction.ABLATIONS, *eviction.OTHERS}),
        ("summaries", set(eviction.SUMMARIZED)),
    ):
        cells = written["samples"][table]
        assert set(cells) == policies
        assert all(set(row) == set(TIERS) for row in cells.values())
    cost = written["details"]["cost"]["512"]
    assert cost["snapkv"]["scoring_over_prefill"] > 0


def test_cases_go_to_other_libraries_and_results_come_back(tmp_path: Path) -> None:
    model = make_model()
    model.model.save_pretrained(tmp_path / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "tiny")
    config = Config(model=ModelConfig(path=str(tmp_path / "tiny")))
    eviction.export(config, tmp_path / "cases.json", data=None, cases=3)
    cases = json.loads((tmp_path / "cases.json").read_text())
    assert [case["name"] for case in cases] == [
        "niah_single-10",
        "niah_multikey-11",
        "niah_single-12",
    ]
    assert all(case["context_ids"] and case["question_ids"] for case in cases)
    theirs = {"press": {"0.1": [[0.5, 1.0]]}}
    path = tmp_path / "kvpress.json"
    path.write_text(json.dumps({"cases": ["niah_single-10"], "samples": theirs}))
    assert eviction._beside(path, ["niah_single-10", "niah_multikey-11"]) == theirs
    with pytest.raises(ConfigError, match="other cases"):
        eviction._beside(path, ["niah_single-12"])


def test_policies_are_checked_before_anything_is_measured() -> None:
    closeness = Closeness(make_model(), EvictionConfig())
    for bad in ("no+such+policy", "window+headkv+plain:profile=" + "0" * 64):
        with pytest.raises(PolicyError):
            closeness.check([bad])


def test_table_compares_equal_cases_only() -> None:
    table = Table(full=[1.0, 0.0, 1.0, 1.0])
    for right in (1.0, 0.0):
        table.add("some", "0.1", 0.5, right)
    for right in (1.0, 0.0, 0.0, 1.0):
        table.add("all", "0.1", 0.25, right)
    assert table.over_full("some", "0.1") == pytest.approx(1.0)  # 1 of 2, as the full cache
    assert table.over_full("all", "0.1") == pytest.approx(2 / 3)
    assert table.kl("some", "0.1") == 0.5
    assert table.kl("other", "0.1") is None


def test_divergence() -> None:
    full = torch.tensor([[0.5, 0.5], [1.0, 1e-30]]).log()
    other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    expected = (
        0.5 * torch.log(torch.tensor([2.0, 2 / 3])).sum() / 2 + torch.log(torch.tensor(2.0)) / 2
    )
    assert divergence(full, other) == pytest.approx(float(expected), rel=1e-5)
    assert divergence(full, full) == 0
