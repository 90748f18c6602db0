"""A sweep of policies and tiers over RULER: ours against kvpress' pipeline, case by case.

Both get the same tokens, threads and limits, in turns. kvpress runs its pipeline once per
press and compression ratio, as its own evaluation does. Ours runs a context once, every
policy scores that forward, one node serves all of a policy's tiers, and all answers are
decoded in one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from criticalkv.services.bench.kvpress_peer import KvpressPeer, kvpress_peer
from criticalkv.services.evaluation.answer import Answerer, Answers, Cell
from criticalkv.services.evaluation.column import columns
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.local_answerer import LocalAnswerer, wide
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.prompt import first_prompt
from criticalkv.services.evaluation.ruler.suite import Ruler
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.shared.config import Config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.model.spec import ModelSpec
from criticalkv.shared.progress import counting
from criticalkv.shared.report import Report, median

POLICIES = ("snapkv", "criticalkv", "adakv", "criticaladakv")
LIKE_FOR_LIKE = "-kvpress"
"""Ends our names of policies that keep what kvpress keeps."""
TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "vt")
SEED = 1
MEANING = {
    "speedup": "seconds of kvpress' pipeline ÷ ours for all policies and tiers of a case, median "
    "over cases; ratio, higher is better",
    "cases_per_minute": "cases (one example, one policy, one tier) answered per minute by ours; "
    "1/min, higher is better",
    "kvpress_cases_per_minute": "the same by kvpress' pipeline; 1/min",
    "score_minus_kvpress": "mean score of ours − of kvpress over the same cases, 0 to 100; "
    "points, higher is better; a policy whose name does not end in -kvpress has the paper's "
    "rules here and kvpress' own there",
}


def run(
    config: Config,
    *,
    quick: bool,
    threads: int,
    kvpress_python: Path | None,
    tiers: str,
    examples: int = 8,
    length: int = 1024,
    tasks: Sequence[str] = TASKS,
    policies: Sequence[str] = POLICIES,
    data: Path | None = None,
    so_far: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measure both and return the report.

    Args:
        config: which model.
        quick: two short examples, two policies, two tiers.
        threads: torch threads, for both.
        kvpress_python: interpreter of an environment with kvpress; None measures ours alone.
        tiers: kept fractions, comma-separated.
        examples: how many, spread over the tasks.
        length: tokens of each.
        tasks: of RULER.
        policies: that both have; a name that ends in "-kvpress" is the same press there.
        data: folder with essays, optional.
        so_far: called with the unfinished report after each example.

    Raises:
        ConfigError, PolicyError, InvalidRequestError: before anything is measured.
    """
    report = Report("eval-sweep", quick, dict.fromkeys(MEANING), MEANING)
    if quick:
        examples, length, policies = 2, 512, policies[:2]
        tiers = ",".join(tiers.split(",")[:2])
    cells = [column.cell for column in columns(policies, tiers, full=False)]
    model = load_model(config.model, threads)
    found = _examples(model, examples, length, tasks, data)
    report.details |= {"threads": threads, "length": length, "examples": [x.name for x in found]}
    report.details |= _details(model.spec, cells)
    with closing(_answerer(model, config, cells)) as answerer:
        answerer.check(cells)
        with _peer(kvpress_python, model.spec, threads) as peer, counting() as progress:
            if peer is not None:
                check_presses(cells, peer.ready.presses)
                report.details["kvpress"] = asdict(peer.ready)
            sweep = Sweep(model.chat, answerer, cells, report)
            for example in progress.track(found, description="examples"):
                sweep.take(example, peer)
                so_far(report)
    return report


def press_of(policy: str) -> str:
    """Return what kvpress' script calls a policy."""
    return policy.removesuffix(LIKE_FOR_LIKE)


def check_presses(cells: Collection[Cell], presses: Collection[str]) -> None:
    """Refuse what kvpress' script does not have, or would run twice.

    Raises:
        ConfigError: naming the policies.
    """
    found: dict[str, str] = {}
    for policy in dict.fromkeys(cell.policy for cell in cells):
        press = press_of(policy)
        if press not in presses:
            raise ConfigError(
                f"kvpress has no {policy} here, only {', '.join(presses)}, each with or without "
                f"{LIKE_FOR_LIKE}",
                param="policy",
            )
        if found.setdefault(press, policy) != policy:
            raise ConfigError(
                f"{found[press]} and {policy} are one press of kvpress: give one of them",
                param="policy",
            )


class Sweep:
    """Runs both over an example and keeps the report up to date.

    Args:
        chat: the model's template and tokenizer.
        answerer: ours.
        cells: asked of both.
        report: is filled.
        clock: seconds, of ours; kvpress tells its own.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        answerer: Answerer,
        cells: Sequence[Cell],
        report: Report,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chat = chat
        self._answerer = answerer
        self._cells = cells
        self._report = report
        self._clock = clock
        self._seconds: dict[str, list[float]] = {"ours": [], "kvpress": []}
        self._scores: dict[str, dict[str, list[float]]] = {"ours": {}, "kvpress": {}}

    def take(self, example: Example, peer: KvpressPeer | None) -> None:
        """Answer one example in every cell; who begins changes from example to example."""
        sides: list[Callable[[Example], None]] = [self._ours]
        if peer is not None:
            sides.append(partial(self._theirs, peer))
        if len(self._seconds["ours"]) % 2:
            sides.reverse()
        for side in sides:
            side(example)
        self._fill()

    def _ours(self, example: Example) -> None:
        started = self._clock()
        found: list[tuple[Cell, Answers]] = list(self._answerer.answer(example, self._cells))
        self._seconds["ours"].append(self._clock() - started)
        for cell, answers in found:
            self._score("ours", cell, example, answers[0].text)

    def _theirs(self, peer: KvpressPeer, example: Example) -> None:
        question = example.questions[0]
        prompt = first_prompt(self._chat, example, question, "context-only")
        spent = 0.0
        for cell in self._cells:
            press = press_of(cell.policy)
            said = peer.answer(prompt, question.max_tokens, press, float(cell.tier))
            spent += said.seconds
            self._score("kvpress", cell, example, said.answer)
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


def _details(spec: ModelSpec, cells: Collection[Cell]) -> dict[str, Any]:
    return {
        "model": spec.name,
        "device": spec.device,
        "dtype": spec.dtype,
        "policies": list(dict.fromkeys(cell.policy for cell in cells)),
        "tiers": list(dict.fromkeys(cell.tier for cell in cells)),
    }


def _answerer(model: LoadedModel, config: Config, cells: Sequence[Cell]) -> LocalAnswerer:
    """As `criticalkv eval` has it: no tiers but the sweep's, no canary."""
    tiers = tuple(sorted({cell.tier for cell in cells}, key=float))
    eviction = config.eviction.model_copy(update={"tiers": tiers, "canary_queries": 0})
    return LocalAnswerer(
        model,
        setting="context-only",
        history="model",
        kl=False,
        eviction=eviction,
        prefill=config.prefill,
        decode=wide(config.decode),
    )


def _peer(
    python: Path | None, spec: ModelSpec, threads: int
) -> AbstractContextManager[KvpressPeer | None]:
    return nullcontext() if python is None else kvpress_peer(python, spec, threads)


def _examples(
    model: LoadedModel, count: int, length: int, tasks: Sequence[str], data: Path | None
) -> list[Example]:
    """Take examples of the tasks in turns, so that a few are of every kind."""
    wanted = tuple(dict.fromkeys(tasks))
    per_task = -(-count // len(wanted))
    ruler = Ruler(model.chat, data=data, essays=None)
    rows = [list(ruler.examples([task], [length], per_task, SEED)) for task in wanted]
    return [row[i] for i in range(per_task) for row in rows][:count]
