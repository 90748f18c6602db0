"""A sweep of policies and tiers over RULER: ours against kvpress' pipeline, case by case.

Both get the same tokens, threads and limits, in turns. kvpress runs its pipeline once per
press and compression ratio, as its own evaluation does. Ours runs a context once, every
policy scores that forward, one node serves all of a policy's tiers, and all answers are
decoded in one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from criticalkv.services.bench.kvpress_peer import KvpressPeer, kvpress_peer
from criticalkv.services.evaluation.answer import Answers, Cell
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.local_answerer import LocalAnswerer
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.shared.config import Config
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.report import Report, median

POLICIES = ("snapkv", "criticalkv", "adakv", "criticaladakv")
TIERS = ("0.05", "0.1", "0.2", "0.3", "0.4", "0.6")
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "vt")
SEED = 1
MEANING = {
    "speedup": "seconds of kvpress' pipeline ÷ ours for all policies and tiers of a case, median "
    "over cases; ratio, higher is better",
    "cases_per_minute": "cases (one example, one policy, one tier) answered per minute by ours; "
    "1/min, higher is better",
    "kvpress_cases_per_minute": "the same by kvpress' pipeline; 1/min",
    "score_minus_kvpress": "mean score of ours − of kvpress over the same cases, 0 to 100; "
    "points, higher is better",
}


def run(
    config: Config,
    *,
    quick: bool,
    threads: int,
    kvpress_python: Path | None,
    examples: int = 8,
    length: int = 1024,
    tasks: Sequence[str] = TASKS,
    policies: Sequence[str] = POLICIES,
    tiers: Sequence[str] = TIERS,
    data: Path | None = None,
    so_far: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measure both and return the report.

    Args:
        config: which model.
        quick: two short examples, two policies, two tiers.
        threads: torch threads, for both.
        kvpress_python: interpreter of an environment with kvpress; None measures ours alone.
        examples: how many, spread over the tasks.
        length: tokens of each.
        tasks: of RULER.
        policies: that both have.
        tiers: kept fractions.
        data: folder with essays, optional.
        so_far: called with the unfinished report after each example.
    """
    report = Report("eval-sweep", quick, dict.fromkeys(MEANING), MEANING)
    if quick:
        examples, length, policies, tiers = 2, 512, policies[:2], tiers[:2]
    model = load_model(config.model, threads)
    cells = [Cell(policy, tier) for policy in policies for tier in tiers]
    found = _examples(model, examples, length, tasks, data)
    sweep = _Sweep(model, config, cells, report)
    report.details |= {"threads": threads, "length": length, "examples": [x.name for x in found]}
    report.details |= {"policies": list(policies), "tiers": list(tiers)}
    with _progress() as progress:
        if kvpress_python is None:
            for example in progress.track(found, description="examples"):
                sweep.take(example, None)
                so_far(report)
            return report
        with kvpress_peer(kvpress_python, Path(model.spec.path), threads) as peer:
            for example in progress.track(found, description="examples"):
                sweep.take(example, peer)
                so_far(report)
    return report


class _Sweep:
    """Runs both over an example and keeps the report up to date."""

    def __init__(
        self, model: LoadedModel, config: Config, cells: Sequence[Cell], report: Report
    ) -> None:
        self._model = model
        self._answerer = LocalAnswerer(
            model, setting="context-only", history="model", kl=False, eviction=config.eviction
        )
        self._cells = cells
        self._report = report
        self._seconds: dict[str, list[float]] = {"ours": [], "kvpress": []}
        self._scores: dict[str, dict[str, list[float]]] = {"ours": {}, "kvpress": {}}

    def take(self, example: Example, peer: KvpressPeer | None) -> None:
        """Answer one example in every cell; who begins changes from example to example."""
        first_ours = len(self._seconds["ours"]) % 2 == 0
        if first_ours:
            self._ours(example)
        if peer is not None:
            self._theirs(example, peer)
        if not first_ours:
            self._ours(example)
        self._fill()

    def _ours(self, example: Example) -> None:
        started = time.perf_counter()
        found: list[tuple[Cell, Answers]] = list(self._answerer.answer(example, self._cells))
        self._seconds["ours"].append(time.perf_counter() - started)
        for cell, answers in found:
            self._score("ours", cell, example, answers[0].text)

    def _theirs(self, example: Example, peer: KvpressPeer) -> None:
        question = example.questions[0]
        prompt = first_prompt(self._model.chat, example, question, "context-only")
        spent = 0.0
        for cell in self._cells:
            said = peer.answer(prompt, question.max_tokens, cell.policy, float(cell.tier))
            spent += said.seconds
            self._score("kvpress", cell, example, said.text)
        self._seconds["kvpress"].append(spent)

    def _score(self, who: str, cell: Cell, example: Example, text: str) -> None:
        question = example.questions[0]
        score = 100 * METRICS[question.metric](text, question)
        self._scores[who].setdefault(f"{cell.policy}@{cell.tier}", []).append(score)

    def _fill(self) -> None:
        ours, theirs = self._seconds["ours"], self._seconds["kvpress"]
        report, cells = self._report, len(self._cells)
        report.headline["cases_per_minute"] = 60 * cells * len(ours) / sum(ours)
        if theirs:
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            report.headline["speedup"] = median(ratios)
            report.headline["kvpress_cases_per_minute"] = 60 * cells * len(theirs) / sum(theirs)
            report.headline["score_minus_kvpress"] = self._mean("ours") - self._mean("kvpress")
        report.samples |= {"seconds": self._seconds, "scores": self._scores}
        report.details["scores"] = {
            who: {cell: Estimate.of(scores).as_json() for cell, scores in row.items()}
            for who, row in self._scores.items()
        }

    def _mean(self, who: str) -> float:
        scores = [score for row in self._scores[who].values() for score in row]
        return sum(scores) / len(scores)


def _examples(
    model: LoadedModel, count: int, length: int, tasks: Sequence[str], data: Path | None
) -> list[Example]:
    """Take examples of the tasks in turns, so that a few are of every kind."""
    per_task = -(-count // len(tasks))
    ruler = Ruler(model.chat, data=data, essays=None)
    rows = [list(ruler.examples([task], [length], per_task, SEED)) for task in tasks]
    return [row[i] for i in range(per_task) for row in rows][:count]


def _progress() -> Progress:
    columns: list[Any] = [*Progress.get_default_columns(), MofNCompleteColumn()]
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
