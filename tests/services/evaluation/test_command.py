"""`criticalkv eval` from end to end on a tiny model's files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import Result
from scripted_answers import said
from tiny_models import byte_tokenizer, make_model
from typer.testing import CliRunner

from criticalkv.services.evaluation import local_answerer, service_answerer
from criticalkv.services.evaluation.answer import Answers, Cell
from criticalkv.services.evaluation.command import app
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.shared.errors import ConfigError, ContextLengthError, PolicyError
from criticalkv.shared.model.chat import ChatTemplate

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model(num_layers=1)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def evaluate(files: Path, out: Path, *arguments: str, code: int = 0) -> Result:
    """Run a command with its files in a folder."""
    common = [f"--model={files}", "--threads=1", f"--out={out / 'run.jsonl'}"]
    done = CliRunner().invoke(app, [*arguments, *common], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "it.json").read_text())
    assert set(found["headline"]) == set(found["meaning"])
    return found


def drawn(out: Path) -> list[str]:
    paths = sorted((out / "plots").iterdir())
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    return [path.stem for path in paths]


def table_rows(done: Result) -> list[list[str]]:
    """First five columns: task, length, policy, tier, cases."""
    rows = [line.replace("│", "").split() for line in done.stdout.splitlines() if "│" in line]
    return [row[:5] for row in rows]


def test_ruler(files: Path, tmp_path: Path) -> None:
    arguments = (
        *("ruler", "--tasks=niah_single_1", "--lengths=1000", "--num=2", "--tiers=0.2,0.5"),
        *("--policy=snapkv", "--policy=criticaladakv", f"--json={tmp_path / 'it.json'}"),
    )
    first = evaluate(
        files, tmp_path, *arguments, f"--plot={tmp_path / 'plots'}", f"--evidence={tmp_path / 'e'}"
    )
    cells = [
        ("full", "1"),
        *((policy, tier) for policy in ("snapkv", "criticaladakv") for tier in ("0.2", "0.5")),
    ]
    assert table_rows(first) == [["niah_single_1", "1000", *cell, "2"] for cell in cells]
    header, *rest = lines(tmp_path)
    assert header["lengths"] == [1000]
    assert [(line["name"], line["policy"], line["tier"]) for line in rest] == [
        (f"niah_single_1-1000-{number}", *cell) for number in range(2) for cell in cells
    ]
    by_tier = {line["tier"]: line["turns"][0] for line in rest[:3]}
    assert by_tier["1"]["kl"] == 0
    assert by_tier["0.2"]["kl"] > by_tier["0.5"]["kl"] > 0
    assert by_tier["0.2"]["kept"] == pytest.approx(0.2, abs=0.01)
    assert by_tier["0.2"]["kept_bytes"] < by_tier["0.5"]["kept_bytes"] < by_tier["1"]["kept_bytes"]
    found = report(tmp_path)
    assert found["benchmark"] == "ruler"
    of = "niah_single_1 1000 snapkv 0.2"
    kls = [line["turns"][0]["kl"] for line in rest if (line["policy"], line["tier"]) == cells[1]]
    assert found["headline"][f"kl {of}"] == pytest.approx(sum(kls) / 2)
    assert found["headline"][f"score {of}"] == 0
    assert len(found["samples"]["records"]) == 10
    assert drawn(tmp_path) == ["bytes-niah_single_1-1000"]
    spans = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert [span["name"] for span in spans] == [rest[0]["name"], rest[5]["name"]]

    # Nothing is asked again; what was cut off is; the table is the same.
    journal = tmp_path / "run.jsonl"
    whole = journal.read_text()
    again = evaluate(files, tmp_path, *arguments)
    assert again.stdout == first.stdout
    assert journal.read_text() == whole
    journal.write_text("".join(whole.splitlines(keepends=True)[:5]) + '{"name"')
    resumed = evaluate(files, tmp_path, *arguments)
    assert resumed.stdout == first.stdout
    assert journal.read_text().startswith("".join(whole.splitlines(keepends=True)[:5]))

    with pytest.raises(ConfigError, match=r"other settings.*seed 0 there, 1 here"):
        evaluate(files, tmp_path, *arguments, "--seed=1")


def test_two_runs_with_one_seed_are_alike(files: Path, tmp_path: Path) -> None:
    arguments = ("ruler", "--tasks=vt", "--lengths=1500", "--num=2", "--tiers=0.2")
    found = []
    for out in (tmp_path / "a", tmp_path / "b"):
        evaluate(files, out, *arguments, "--policy=criticaladakv")
        found.append([{k: v for k, v in line.items() if k != "seconds"} for line in lines(out)])
    assert found[0] == found[1]


@pytest.mark.parametrize("history", ["model", "gold"])
def test_scbench_is_scored_turn_by_turn(files: Path, tmp_path: Path, history: str) -> None:
    done = evaluate(
        files,
        tmp_path,
        *("scbench", "--tasks=multi_needle", "--lengths=1200", "--num=1", "--turns=2"),
        *("--policy=snapkv", "--tiers=0.3", f"--history={history}", "--no-kl"),
        *(f"--json={tmp_path / 'it.json'}", f"--plot={tmp_path / 'plots'}"),
    )
    assert "turn 2" in done.stdout
    assert "turn 3" not in done.stdout
    assert [len(line["turns"]) for line in lines(tmp_path)[1:]] == [2, 2]
    assert lines(tmp_path)[0]["history"] == history
    table = report(tmp_path)["details"]["table"]
    assert [len(row["turns"]) for row in table] == [2, 2]
    assert [row["kl"] for row in table] == [None, None]
    assert drawn(tmp_path) == ["bytes-multi_needle-1200", "turns-multi_needle-1200"]


def test_niah_is_a_map(files: Path, tmp_path: Path) -> None:
    done = evaluate(
        files,
        tmp_path,
        *("niah", "--lengths=900,1100", "--depths=0,0.5,1", "--policy=snapkv", "--tiers=0.3"),
        *("--no-full", "--no-kl", f"--json={tmp_path / 'it.json'}"),
        f"--plot={tmp_path / 'plots'}",
    )
    assert [row[1] for row in table_rows(done)] == ["900", "1100"]
    places = report(tmp_path)["details"]["places"]
    assert [(place["length"], place["depth"]) for place in places] == [
        (length, depth) for length in (900, 1100) for depth in (0, 0.5, 1)
    ]
    assert drawn(tmp_path) == ["bytes-niah-1100", "bytes-niah-900", "needle-snapkv-0.3"]


def test_perplexity(files: Path, tmp_path: Path) -> None:
    arguments = (
        *("perplexity", "--lengths=600", "--num=2", "--continuation=20", "--policy=snapkv"),
        *("--tiers=0.1,0.5", f"--json={tmp_path / 'it.json'}"),
    )
    done = evaluate(files, tmp_path, *arguments, f"--plot={tmp_path / 'plots'}")
    assert "perplexity" in done.stdout
    assert len(table_rows(done)) == 3
    found = report(tmp_path)
    by_tier = {row["tier"]: row for row in found["details"]["table"]}
    likelihoods = [line["likelihood"] for line in lines(tmp_path)[1:] if line["tier"] == "1"]
    expected = math.exp(sum(of["nll"] for of in likelihoods) / 2)
    assert by_tier["1"]["score"]["mean"] == pytest.approx(expected)
    assert found["headline"]["perplexity perplexity 600 full 1"] == pytest.approx(expected)
    assert by_tier["0.1"]["kl"]["mean"] > by_tier["0.5"]["kl"]["mean"] > 0
    assert evaluate(files, tmp_path, *arguments).stdout == done.stdout
    with pytest.raises(ConfigError, match="--through local"):
        evaluate(files, tmp_path, *arguments, "--through=service")


def write_ruler_rows(folder: Path) -> None:
    """Two rows of RULER's, a bad one between them."""
    rows = [
        {
            "index": index,
            "input": example.context + example.questions[0].text,
            "outputs": list(example.questions[0].references),
            "answer_prefix": example.questions[0].answer_prefix,
        }
        for index, example in enumerate(
            Ruler(ChatTemplate(byte_tokenizer())).examples(["vt"], [1500], 2, 0)
        )
    ]
    lines = [rows[0], {"index": 7}, rows[1]]
    (folder / "vt.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_rows_that_are_bad_are_named_or_skipped(files: Path, tmp_path: Path) -> None:
    write_ruler_rows(tmp_path)
    arguments = ("ruler", f"--rows={tmp_path}", "--policy=snapkv", "--tiers=0.3", "--no-kl")
    with pytest.raises(ConfigError, match=r"vt\.jsonl, line 2: .*--skip-bad"):
        evaluate(files, tmp_path, *arguments)
    assert len(lines(tmp_path)) == 1
    done = evaluate(files, tmp_path, *arguments, "--skip-bad")
    assert "skipped vt.jsonl, line 2" in done.stderr
    assert table_rows(done)[0] == ["vt", "–", "full", "1", "2"]


def test_longbench_reads_files(files: Path, tmp_path: Path) -> None:
    row = {"context": "Words. " * 40, "input": "Why?", "answers": ["Because."], "all_classes": None}
    row |= {"_id": "0", "length": 40, "dataset": "hotpotqa", "language": "en"}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row))
    arguments = ("longbench", "--tasks=hotpotqa", f"--data={tmp_path}", "--policy=snapkv")
    done = evaluate(files, tmp_path, *arguments, "--tiers=0.5", "--no-kl")
    assert table_rows(done) == [["hotpotqa", "–", *cell, "1"] for cell in FULL_AND_SNAPKV]


FULL_AND_SNAPKV = (("full", "1"), ("snapkv", "0.5"))


class Service:
    """Stands where the answerer of a service does."""

    made: ClassVar[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    def __init__(self, *given: Any, **more: Any) -> None:
        self.made.append((given, more))

    def check(self, cells: Sequence[Cell]) -> None:
        assert [(cell.policy, cell.tier) for cell in cells] == list(FULL_AND_SNAPKV)

    def answer(self, example: Example, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Answers]]:
        for cell in cells:
            read = "0.4" if cell.tier == "0.5" else cell.tier
            yield cell, (dataclasses.replace(said(example, cell, 0), tier=read),)

    def close(self) -> None:
        pass


def test_through_a_service(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_answerer, "ServiceAnswerer", Service)
    monkeypatch.setenv("CRITICALKV_API_KEY", "a secret")
    done = evaluate(
        files,
        tmp_path,
        *("ruler", "--tasks=niah_single_1", "--lengths=900", "--num=1", "--policy=snapkv"),
        *("--tiers=0.5", "--through=service", "--url=http://there/v1", "--concurrency=3"),
    )
    ((given, more),) = Service.made
    assert given == ("http://there/v1", "a secret", files.name)
    assert more["concurrency"] == 3
    assert more["setting"] == "context-only"
    assert len(table_rows(done)) == 2
    assert done.stderr.count(" was asked for, ") == 1
    assert "tier 0.5 was asked for, 0.4 was read" in done.stderr
    header = lines(tmp_path)[0]
    assert (header["through"], header["kl"]) == ("service", False)
    assert "secret" not in (tmp_path / "run.jsonl").read_text() + done.output


def test_ctrl_c_keeps_what_is_done(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = local_answerer.LocalAnswerer.answer

    def interrupted(
        self: local_answerer.LocalAnswerer, example: Example, cells: Sequence[Cell]
    ) -> Iterator[tuple[Cell, Answers]]:
        if example.name.endswith("-1"):
            raise KeyboardInterrupt
        yield from own(self, example, cells)

    arguments = (
        *("ruler", "--tasks=niah_single_1", "--lengths=900", "--num=2", "--policy=snapkv"),
        *("--tiers=0.5", "--no-kl"),
    )
    with monkeypatch.context() as patched:
        patched.setattr(local_answerer.LocalAnswerer, "answer", interrupted)
        stopped = evaluate(files, tmp_path, *arguments, code=130)
    said = " ".join(stopped.stderr.split())
    assert "run.jsonl has 2 of 4 cells; the same command goes on from there" in said
    assert stopped.stdout == ""
    assert len(lines(tmp_path)) == 3
    evaluate(files, tmp_path, *arguments)
    assert len(lines(tmp_path)) == 5


def test_what_does_not_fit_is_named(files: Path, tmp_path: Path) -> None:
    arguments = ("ruler", "--tasks=niah_single_1", "--lengths=900,2300", "--num=1")
    with pytest.raises(ContextLengthError, match=r"niah_single_1-2300-0 may take .* 2048"):
        evaluate(files, tmp_path, *arguments, "--policy=snapkv")
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["ruler", "--policy=snapvk"], PolicyError, "must be scorer"),
        (["ruler", "--tiers=0"], ConfigError, "--tiers"),
        (["ruler", "--lengths=4k"], ConfigError, "--lengths '4k' must be whole numbers"),
        (["scbench", "--lengths=0"], ConfigError, "--lengths"),
        (["niah", "--depths=50"], ConfigError, "--depths '50' must be numbers from 0 to 1"),
        (["perplexity", "--through=service"], ConfigError, "--through local"),
    ],
)
def test_what_has_no_sense_is_refused_before_a_model_is_loaded(
    tmp_path: Path, arguments: list[str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        evaluate(Path("/nowhere"), tmp_path, *arguments)
    assert not (tmp_path / "run.jsonl").exists()


def test_policies_that_do_not_fit_the_model_are_refused(files: Path, tmp_path: Path) -> None:
    arguments = ("ruler", "--policy=snapkv", f"--policy=window+headkv+plain:profile={'0' * 64}")
    with pytest.raises((PolicyError, ConfigError)):
        evaluate(files, tmp_path, *arguments)
    assert not (tmp_path / "run.jsonl").exists()
