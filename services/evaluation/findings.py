"""The report of a run: its table as JSON, every example's score, needles by place."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from criticalkv.services.evaluation.answer import KL_TOKENS, Cell
from criticalkv.services.evaluation.niah import TASK as NIAH
from criticalkv.services.evaluation.record import Record
from criticalkv.services.evaluation.results import AVERAGE, Measure, Result
from criticalkv.shared.report import Report

MEANING: Mapping[Measure, str] = {
    "score": "mean score of the benchmark's own metric over examples, 0–100, higher is better",
    "perplexity": "exp of the mean negative log-likelihood, nats per token, lower is better",
}
KL = "mean over examples of KL(full ‖ compressed), nats per token, lower is better, over "
KL_OVER: Mapping[Measure, str] = {
    "score": f"the first {KL_TOKENS} tokens of the full cache's own answer to the first question",
    "perplexity": "the text's own continuation",
}


def report_of(
    name: str,
    measure: Measure,
    results: Sequence[Result],
    records: Sequence[Record],
    settings: Mapping[str, Any],
) -> Report:
    """Return a run's report.

    Args:
        name: of the benchmark.
        measure: what the results' scores are.
        results: of `results.results`.
        records: that they are made from.
        settings: of the run, and which examples it has.
    """
    headline, meaning = _headline(measure, results)
    details = {
        "measure": measure,
        "settings": dict(settings),
        "table": [_as_json(result) for result in results],
        "places": _places(records),
    }
    return Report(name, False, headline, meaning, details, {"records": _samples(records)})


def _headline(
    measure: Measure, results: Sequence[Result]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return averages, or the tasks themselves where there is one; and what they mean."""
    averages = [result for result in results if result.task == AVERAGE] or results
    headline: dict[str, float | None] = {}
    meaning = {}
    for result in averages:
        of = " ".join(filter(None, (_task(result), result.cell.policy, result.cell.tier)))
        headline[f"{measure} {of}"], meaning[f"{measure} {of}"] = (
            result.score.mean,
            MEANING[measure],
        )
        headline[f"kl {of}"] = result.kl.mean if result.kl else None
        meaning[f"kl {of}"] = KL + KL_OVER[measure]
    return headline, meaning


def _task(result: Result) -> str:
    return result.task if result.length is None else f"{result.task} {result.length}"


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "task": result.task,
        "length": result.length,
        **dataclasses.asdict(result.cell),
        "score": result.score.as_json(),
        "kl": result.kl.as_json() if result.kl else None,
        "kept": result.kept,
        "kept_bytes": result.kept_bytes,
        "turns": list(result.turns),
    }


def _places(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Mean score at each place of the grid of `niah`, cell by cell."""
    found: defaultdict[tuple[Cell, int, float], list[float]] = defaultdict(list)
    for record in records:
        if record.task == NIAH and record.length is not None and record.depth is not None:
            cell = Cell(record.policy, record.tier)
            found[cell, record.length, record.depth] += [100 * turn.score for turn in record.turns]
    return [
        {**dataclasses.asdict(cell), "length": length, "depth": depth, "score": fmean(scores)}
        for (cell, length, depth), scores in found.items()
    ]


def _samples(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every record without its texts."""
    left_out: dict[str, Any] = {"digest": True, "canonical": True, "turns": {"__all__": {"text"}}}
    return [record.model_dump(exclude=left_out) for record in records]
