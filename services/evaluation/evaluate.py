"""What every command of `criticalkv eval` does: check, load, ask, and show the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from criticalkv.services.evaluation.column import Column, columns
from criticalkv.services.evaluation.evidence import write_evidence
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.findings import report_of
from criticalkv.services.evaluation.journal import Journal
from criticalkv.services.evaluation.options import Options
from criticalkv.services.evaluation.party import Open, Party
from criticalkv.services.evaluation.plots import draw
from criticalkv.services.evaluation.record import Record
from criticalkv.services.evaluation.results import Measure, results
from criticalkv.services.evaluation.run import run
from criticalkv.services.evaluation.table import show, table
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.output import draw_plots

STOPPED = 130  # exit code after Ctrl-C


@dataclass(frozen=True)
class Benchmark:
    """What one command asks.

    Attributes:
        name: of the command.
        open: gets the model ready that is asked.
        settings: beside those of every command, what its answers depend on.
        shape: which examples there are, for its report; they may become more.
        measure: what comes of it.
        evidence: file for the needles' spans, or None.
    """

    name: str
    open: Open
    settings: Mapping[str, Any]
    shape: Mapping[str, Any]
    measure: Measure = "score"
    evidence: Path | None = None


def evaluate(options: Options, benchmark: Benchmark) -> None:
    """Run a benchmark, from where its journal ends.

    Raises:
        CriticalKVError: before anything is asked for what cannot be; or of an example.
    """
    wanted = columns(options.policy or ("default",), options.tiers, full=options.full)
    out = options.out or Path(f"criticalkv-eval-{benchmark.name}.jsonl")
    with benchmark.open([column.cell for column in wanted]) as party:
        settings = _settings(options, benchmark, party.spec)
        with Journal(out, settings) as journal:
            examples = _examples(party)
            if benchmark.evidence is not None:
                write_evidence(
                    benchmark.evidence, examples, party.chat, partial(typer.echo, err=True)
                )
            records = _ask_all(examples, wanted, party, journal)
    _tell_other_tiers(records)
    found = results(records, wanted)
    show(Console(), table(found, benchmark.measure, f"{benchmark.name}, {party.spec.name}"))
    told = {**settings, **benchmark.shape}
    report = report_of(benchmark.name, benchmark.measure, found, records, told)
    if options.json is not None:
        report.write(options.json)
    if options.plot is not None:
        draw_plots(report, options.plot, draw)


def _settings(options: Options, benchmark: Benchmark, spec: ModelSpec) -> dict[str, Any]:
    return {
        "command": benchmark.name,
        "model": spec.model_digest,
        "tokenizer": spec.tokenizer_digest,
        "dtype": spec.dtype,
        "seed": options.seed,
        **benchmark.settings,
    }


def _examples(party: Party) -> list[Example]:
    """Make all examples, so that what is wrong with one is said before hours of others."""
    found: dict[str, Example] = {}
    with _progress() as progress:
        for example in progress.track(party.examples(), description="examples"):
            if found.setdefault(example.name, example) is not example:
                raise ConfigError(f"two examples are called {example.name}", param="data")
    if not found:
        raise ConfigError("there is not one example", param="data")
    return list(found.values())


def _ask_all(
    examples: Sequence[Example], wanted: Sequence[Column], party: Party, journal: Journal
) -> list[Record]:
    with _progress() as progress:
        task = progress.add_task("cells", total=len(examples) * len(wanted))
        try:
            return run(examples, wanted, party.ask, journal, lambda n: progress.advance(task, n))
        except KeyboardInterrupt:
            progress.stop()
            done, of = (int(x or 0) for x in (progress.tasks[0].completed, progress.tasks[0].total))
            typer.echo(
                f"stopped: {journal.path} has {done} of {of} cells; the same command goes on "
                "from there",
                err=True,
            )
            raise typer.Exit(STOPPED) from None


def _tell_other_tiers(records: Sequence[Record]) -> None:
    """Say where a service read another tier than it was asked for: it has its own ones."""
    for asked, read in sorted({(r.tier, turn.tier) for r in records for turn in r.turns}):
        if asked != read:
            typer.echo(f"tier {asked} was asked for, {read} was read", err=True)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )
