"""`criticalkv eval` from end to end on a tiny model's files."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import pytest
from click.testing import Result
from scripted_answers import said
from tiny_models import byte_tokenizer, make_model
from typer.testing import CliRunner

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.evaluation import forced, local_answerer, service_answerer
from criticalkv.services.evaluation.answer import Answers, Cell
from criticalkv.services.evaluation.command import app
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.longbench import suite as longbench
from criticalkv.services.evaluation.options import (
    LongBenchOptions,
    RulerOptions,
    SCBenchOptions,
)
from criticalkv.services.evaluation.ruler.suite import TASKS, Ruler
from criticalkv.services.evaluation.scbench import suite as scbench
from criticalkv.services.local import engine as local_engine
from criticalkv.services.prefill import engine as prefill_engine
from criticalkv.services.prefill.spool import Spool
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import ConfigError, ContextLengthError, NumericsError, PolicyError
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
    _, body = done.stdout.split("─\n")
    rows: list[list[str]] = []
    for line in filter(str.strip, body.splitlines()):
        place = rows[-1][:2] if line.startswith(" ") else []
        rows.append([*place, *line.split()])
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
    assert header.keys().isdisjoint({"tasks", "lengths"})  # they may grow
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
    assert found["details"]["settings"]["lengths"] == [1000]
    of = "niah_single_1 1000 snapkv 0.2"
    kls = [line["turns"][0]["kl"] for line in rest if (line["policy"], line["tier"]) == cells[1]]
    assert found["headline"][f"kl {of}"] == pytest.approx(sum(kls) / 2)
    assert found["headline"][f"score {of}"] == 0
    assert "over the first 64 tokens of the full cache's" in found["meaning"][f"kl {of}"]
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


@pytest.mark.parametrize("command", ["niah --depths=0.5 --no-full", "perplexity --num=1"])
def test_the_configuration_limits_memory(
    files: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools: list[int] = []
    decodes: list[DecodeConfig] = []

    class NotingSpool(Spool):
        def __init__(self, limit_bytes: int) -> None:
            spools.append(limit_bytes)
            super().__init__(limit_bytes)

    class NotingDecode(DecodeEngine):
        def __init__(self, model: Any, store: Any, config: DecodeConfig) -> None:
            decodes.append(config)
            super().__init__(model, store, config)

    monkeypatch.setattr(prefill_engine, "Spool", NotingSpool)
    monkeypatch.setattr(local_engine, "DecodeEngine", NotingDecode)
    config = tmp_path / "config.yaml"
    config.write_text("{prefill: {spool_limit_mb: 100}, decode: {pool_mb: 64, page_size: 32}}")
    evaluate(files, tmp_path, *command.split(), "--lengths=600", f"--config={config}")
    pool = 1 if command.startswith("perplexity") else 64
    assert spools == [100 << 20]
    assert [(c.pool_mb, c.page_size == 32) for c in decodes] == [(pool, pool == 64)]


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


def test_a_run_grows_by_tasks_and_lengths_but_not_by_turns(files: Path, tmp_path: Path) -> None:
    arguments = ("--num=1", "--turns=2", "--policy=snapkv", "--tiers=0.3", "--no-kl")
    evaluate(files, tmp_path, "scbench", "--tasks=retr_kv", "--lengths=1000", *arguments)
    first = lines(tmp_path)
    grown = ("scbench", "--tasks=retr_kv,math_find", "--lengths=1000,1100", *arguments)
    done = evaluate(files, tmp_path, *grown, f"--evidence={tmp_path / 'e'}")
    assert lines(tmp_path)[: len(first)] == first
    spans = [json.loads(line) for line in (tmp_path / "e").read_text().splitlines()]
    assert [row["name"] for row in spans] == ["retr_kv-1000-0", "retr_kv-1100-0"]
    assert [len(row[name]) for row in spans for name in "ED"] == [2] * 4
    assert "no evidence of math_find: " in done.stderr
    assert [row[:2] for row in table_rows(done)[::2]] == [
        [task, length]
        for task in ("retr_kv", "math_find", "average")
        for length in ("1000", "1100")
    ]
    before = lines(tmp_path)
    assert len(before) == 1 + 2 * 4
    with pytest.raises(ConfigError, match=r"retr_kv-1000-0 was another text there: .*its turns"):
        evaluate(files, tmp_path, *grown, "--turns=3")
    assert lines(tmp_path) == before


def test_all_of_ruler_that_can_be_made(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRITICALKV_DATA", raising=False)
    arguments = ("ruler", "--lengths=1000", "--num=1", "--no-full", "--no-kl", "--tiers=0.3")
    done = evaluate(files, tmp_path, *arguments)
    left_out = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    named = [line.split()[2] for line in left_out]
    assert {"qa_1", "qa_2"} < set(named)
    assert "left out, qa_1 of 1000 tokens: qa_1 needs squad.json or xquad_en.json" in done.stderr
    assert "left out, vt of 1000 tokens: vt takes at least 1" in done.stderr
    made = [row[0] for row in table_rows(done)]
    assert made == [*(task for task in TASKS if task not in named), "average"]
    assert "niah_single_1" in made


def test_a_likelihood_that_is_no_number_is_an_error(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = forced.answer_logprobs
    monkeypatch.setattr(forced, "answer_logprobs", lambda *given: own(*given) * float("nan"))
    cell = r"full at tier 1: log probabilities hold NaN"
    arguments = ("--lengths=600", "--num=1", "--policy=snapkv", "--tiers=0.5")
    with pytest.raises(NumericsError, match=rf"^perplexity-600-0: {cell}"):
        evaluate(files, tmp_path, "perplexity", *arguments)
    assert len(lines(tmp_path)) == 1
    with pytest.raises(NumericsError, match=rf"^niah_single_1-600-0: {cell}"):
        evaluate(files, tmp_path, "ruler", "--tasks=niah_single_1", *arguments)
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (RulerOptions, TASKS),
        (LongBenchOptions, longbench.TASKS),
        (SCBenchOptions, (*scbench.TASKS, *(name for of in scbench.FILES.values() for name in of))),
    ],
)
def test_help_names_every_task(options: type, tasks: Sequence[str]) -> None:
    (option,) = get_type_hints(options, include_extras=True)["tasks"].__metadata__
    assert set(tasks) <= set(re.findall(r"[\w.-]*\w", option.help))
