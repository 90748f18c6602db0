"""`criticalkv analyze` from end to end on a tiny model's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny_models import make_model
from typer.testing import CliRunner

from criticalkv.services.analysis import run
from criticalkv.services.analysis.command import app
from criticalkv.shared.config import Config, ModelConfig
from criticalkv.shared.errors import ConfigError, PolicyError
from criticalkv.shared.model.loader import LoadedModel

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_model()


@pytest.fixture(scope="module")
def files(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, with two rows of news beside."""
    folder = tmp_path_factory.mktemp("tiny")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    rows = [{"context": f"News of the {day}. " * 20, "answers": ["In short."]} for day in "ab"]
    (folder / "multi_news_50.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def analyze(files: Path, out: Path, *arguments: str) -> str:
    """Run the command; return what it says."""
    common = ["--rows=2", "--tokens=700", "--tiers=0.2,0.5", "--threads=1", f"--json={out}"]
    done = CliRunner().invoke(
        app, [*arguments, *common, f"--data={files}", f"--model={files}"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_perturbation(files: Path, tmp_path: Path) -> None:
    out, plots = tmp_path / "it.json", tmp_path / "plots"
    said = analyze(
        files,
        out,
        "perturbation",
        "--policy=h2o",
        "--option=eps=0",
        f"--plots={plots}",
    )
    report = json.loads(out.read_text())
    assert "eps=0," in report["details"]["policies"]["h2o+critical"]
    assert list(report["details"]["texts"]) == ["multi_news-0", "multi_news-1"]
    assert report["headline"]["bounds_violated"] == 0
    assert 0 <= report["headline"]["lower_share h2o+critical 0.2"] <= 1
    assert "lower_share h2o+critical 0.5" in said
    assert report["environment"]["versions"]["torch"]
    layers, heads = 3, 4
    for name in ("h2o", "h2o+critical"):
        for tier in ("0.2", "0.5"):
            row = report["details"]["table"][name][tier]["after"]
            assert row["actual_l1"] <= row["theta_l1"] <= row["attention_only_l1"]
            assert ("first_sigma" in row) == name.endswith("critical")
            grid = report["samples"]["actual_l1"][name][tier]["window"]
            assert [len(line) for line in grid] == [heads] * layers
    drawn = sorted(plots.iterdir())
    # A reduction of the pair; bounds and mass of each policy; mass of the one first stage.
    assert len(drawn) == 1 + 2 + 2 + 1
    assert list(report["samples"]["first_sigma"]) == ["h2o+critical"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


@pytest.mark.parametrize(
    ("option", "values", "names"),
    [
        ("alpha", "0,1", ["alpha=0", "alpha=1"]),
        ("eps", "0.001,0.1/n", ["eps=0.001", "eps=0.1/n"]),
        ("norm", None, ["norm=l1", "norm=l2"]),
    ],
)
def test_sweep(
    files: Path, tmp_path: Path, option: str, values: str | None, names: list[str]
) -> None:
    out, plots = tmp_path / "it.json", tmp_path / "plots"
    given = [f"--values={values}"] if values else []
    drawing = [f"--plots={plots}"] if option == "alpha" else []
    analyze(files, out, "sweep", option, *given, "--policy=criticaladakv", *drawing)
    report = json.loads(out.read_text())
    assert list(report["details"]["against_base"]) == names
    assert report["details"]["policies"]["base"].startswith("window+adakv+plain")
    table = report["details"]["table"]
    if option == "alpha":  # all by attention: nothing changes against the base
        assert report["details"]["against_base"]["alpha=1"]["0.2"]["after"]["equal_share"] == 1
        assert table["alpha=0"]["0.2"]["after"] != table["alpha=1"]["0.2"]["after"]
    if option == "eps":
        assert "eps_per_token=true" in report["details"]["policies"]["eps=0.1/n"]
    if drawing:
        assert (plots / "sweep-alpha.png").read_bytes().startswith(PNG)


def test_without_matplotlib_there_is_json(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "it.json"
    said = analyze(files, out, "perturbation", "--policy=tova", f"--plots={tmp_path / 'plots'}")
    assert "pip install 'criticalkv[analyze]'" in said
    assert json.loads(out.read_text())["headline"]["bounds_violated"] == 0


def test_without_news_there_is_the_reference(model: LoadedModel, tmp_path: Path) -> None:
    from criticalkv.services.analysis.texts import texts

    cases = texts(model.chat, tmp_path, 3, 500)
    assert [case.name for case in cases] == ["python-0", "python-1", "python-2"]
    assert all(100 < len(case.context_ids) <= 500 for case in cases)
    assert len({case.context_ids for case in cases}) == 3


@pytest.mark.parametrize("tiers", ["", "0.5,0.2", "0", "0.2,1.5", "x", "0.2,0.2", "nan"])
def test_tiers_without_sense_are_refused(tiers: str) -> None:
    with pytest.raises(ConfigError, match=r"eviction\.tiers"):
        run.settings(None, None, tiers)


def test_policies_are_refused_before_a_model_is_loaded() -> None:
    config = Config(model=ModelConfig(path="/nowhere"))
    options = run.Options(1, 100, None, 1)
    with pytest.raises(PolicyError):
        run.perturbation(config, options, ["streamingllm"])
    with pytest.raises(PolicyError, match="known key"):
        run.perturbation(config, options, ["snapkv"], ["policy=1"])
    with pytest.raises(ConfigError, match="'eps' is not key=value"):
        run.perturbation(config, options, ["snapkv"], ["eps"])
    with pytest.raises(PolicyError):
        run.sweep(config, options, "criticalkv", "alpha", ["2"])
