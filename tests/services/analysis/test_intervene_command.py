"""`criticalkv analyze mask | placebo | sinks | flat` from end to end on a tiny model's files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_model
from typer.testing import CliRunner

from criticalkv.services.analysis.attended import attended
from criticalkv.services.analysis.chosen_heads import chosen_heads
from criticalkv.services.analysis.command import app
from criticalkv.services.analysis.masking import LayerRows, Mask, layer_rows, masked_forward
from criticalkv.services.analysis.placebo import find_placebo
from criticalkv.services.analysis.span import Span
from criticalkv.services.analysis.strength import strength, token_strength
from criticalkv.services.analysis.subject import numbered
from criticalkv.services.evaluation.case import context_ids
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.loader import LoadedModel

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3
PNG = b"\x89PNG\r\n"
SPAN = Span(30, 42)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_model()


@pytest.fixture(scope="module")
def files(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, with a text beside."""
    folder = tmp_path_factory.mktemp("tiny")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def analyze(files: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Run the command; return its report."""
    common = ["--threads=1", f"--json={out / 'it.json'}", f"--plots={out / 'plots'}"]
    given = [*arguments, f"--text={files / 'text.txt'}", f"--model={files}", *common]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads((out / "it.json").read_text())
    assert set(report["headline"]) == set(report["meaning"])
    assert all(path.read_bytes().startswith(PNG) for path in (out / "plots").iterdir())
    return report


def kl(model: LoadedModel, ids: list[int], mask: Mask, first: int) -> torch.Tensor:
    """KL(untouched ‖ masked) by torch's own."""
    logits = [
        masked_forward(model, ids, m, logits_from=first).log_softmax(-1) for m in (None, mask)
    ]
    return torch.nn.functional.kl_div(logits[1], logits[0], reduction="none", log_target=True).sum(
        -1
    )


def inflation(model: LoadedModel, ids: list[int], heads: torch.Tensor, first: int) -> float:
    """Geometric mean of 1 / Σ N A in the masked run."""
    rows: list[LayerRows] = []
    mask = Mask(SPAN, heads)
    masked_forward(model, ids, mask, look=lambda call: rows.append(layer_rows(call, mask, first)))
    logs = [
        math.log(1 - float(row.plain[h, q, 30:42].sum()))
        for row in rows
        for h in range(4)
        for q in range(row.plain.shape[1])
        if heads[row.layer, h]
    ]
    return math.exp(-sum(logs) / len(logs))


def test_mask(files: Path, model: LoadedModel, tmp_path: Path) -> None:
    report = analyze(files, tmp_path, "mask", "--span=30:42", "--layers=1-2", "--heads=0,3")
    ids, found = context_ids(model.chat, TEXT), report["headline"]
    first = len(ids) - 64
    heads = chosen_heads(model.spec, [1, 2], [0, 3])
    expected = kl(model, ids, Mask(SPAN, heads), first)
    assert found["kl_mean"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert found["kl_max"] == pytest.approx(float(expected.max()), rel=1e-3)
    assert report["samples"]["curves"]["KL without 30:42"] == pytest.approx(
        expected.tolist(), rel=1e-3, abs=2e-6
    )
    sums = attended(model, ids, first)
    by_head = strength(sums, SPAN)
    assert found["delta_theta"] == pytest.approx(float(by_head[heads].sum()), rel=1e-5)
    mass = sums.mass[..., 30:42].sum(-1) / 64
    assert found["mass"] == pytest.approx(float(mass[heads].mean()), rel=1e-5)
    assert found["residual"] < 1e-6
    assert found["inflation"] == pytest.approx(inflation(model, ids, heads, first), rel=1e-4)
    assert report["details"]["span"]["text"] == model.chat.decode(ids[30:42])
    assert report["details"]["heads"] == [[], [0, 3], [0, 3]]
    assert len(list((tmp_path / "plots").iterdir())) == 3
    cached = analyze(files, tmp_path, "mask", "--span=30:42", "--cached")["headline"]
    everywhere = Mask(SPAN, chosen_heads(model.spec), first)
    assert cached["kl_mean"] == pytest.approx(
        float(kl(model, ids, everywhere, first).mean()), rel=1e-3
    )
    bare = analyze(files, tmp_path, "mask", "--span=30:42", "--cached", "--no-renormalise")
    assert bare["headline"]["kl_mean"] != pytest.approx(cached["kl_mean"], rel=1e-2)


def test_placebo(files: Path, model: LoadedModel, tmp_path: Path) -> None:
    arguments = ("placebo", "--span=30:42", "--forbid=0:5", "--forbid=60:70", "--kv-heads=1")
    report = analyze(files, tmp_path, *arguments)
    ids, found = context_ids(model.chat, TEXT), report["headline"]
    first, heads = len(ids) - 64, chosen_heads(model.spec, None, None, [1])
    tokens = token_strength(attended(model, ids, first), heads)
    match = find_placebo(tokens, SPAN, forbidden=[Span(0, 5), Span(60, 70)], before=first)
    placebo = report["details"]["placebo"]
    assert match.span == Span(placebo["begin"], placebo["end"])
    assert match.span.end <= first
    assert found["gap"] == pytest.approx(match.gap, rel=1e-3)
    assert found["matched"] == match.matched
    for name, span in (("kl_target", SPAN), ("kl_placebo", match.span)):
        expected = kl(model, ids, Mask(span, heads, first), first)
        assert found[name] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["kl.png"]
    nothing = analyze(files, tmp_path, *arguments, f"--forbid=0:{first}")
    assert nothing["details"]["placebo"] is None
    assert nothing["headline"]["matched"] == 0
    assert nothing["headline"]["gap"] is None
    assert nothing["headline"]["kl_target"] == pytest.approx(found["kl_target"], rel=1e-3)


def test_sinks(files: Path, model: LoadedModel, tmp_path: Path) -> None:
    report = analyze(files, tmp_path, "sinks", "--layers=1")
    ids = context_ids(model.chat, TEXT)
    found = attended(model, ids, len(ids) - 64)
    for key, scores in (("by_mass", found.mass), ("by_value", found.mass * found.norms)):
        scores = scores[1, :, : len(ids) - 64]
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        listed = report["details"][key]
        assert [row["token"] for row in listed] == mean.topk(10).indices.tolist()
        assert listed[0]["mass_share" if key == "by_mass" else "value_share"] == pytest.approx(
            float(mean.max()), rel=1e-4
        )
    assert report["headline"]["sink_mass_share"] == report["details"]["by_mass"][0]["mass_share"]
    assert len(list((tmp_path / "plots").iterdir())) == 2


def test_flat(files: Path, tmp_path: Path) -> None:
    """With a threshold between the fourth and the fifth of eight heads."""
    assert analyze(files, tmp_path, "flat", "--share=1")["details"]["flagged"] == []
    first = analyze(files, tmp_path, "flat", "--share=0")
    assert first["headline"]["flagged"] == 12
    grid = first["samples"]["maps"]["effective share of keys"]
    shares = sorted(grid[0] + grid[2])
    report = analyze(files, tmp_path, "flat", f"--share={sum(shares[3:5]) / 2}", "--layers=0,2")
    flagged = [[i, h] for i in (0, 2) for h in range(4) if grid[i][h] > shares[3]]
    assert report["details"]["flagged"] == flagged
    assert report["headline"]["flagged"] == 4
    assert report["headline"]["flagged_share"] == 0.5
    assert report["headline"]["flagged_layer_0"] == sum(i == 0 for i, _ in flagged)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mask", "--span=5"], "not A:B"),
        (["mask", "--span=100:9999"], "ends after the last"),
        (["placebo", "--span=3:9", "--forbid=9"], "not A:B"),
        (["sinks", "--layers=7"], "not among the model's 3"),
        (["flat", "--heads=a"], "not numbers and ranges"),
        (["flat", "--tokens=5"], "no query sees"),
    ],
)
def test_what_has_no_sense_is_refused(files: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        analyze(files, Path("/nowhere"), *arguments)


def test_ranges_are_read() -> None:
    assert numbered(None) is None
    assert numbered("0,3-5,7") == [0, 3, 4, 5, 7]
    for wrong in ("", "-1", "1-", "1,", "a-3", "1--2"):
        with pytest.raises(ConfigError, match="not numbers and ranges"):
            numbered(wrong)
