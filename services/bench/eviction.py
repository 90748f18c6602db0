"""Eviction policies: what they cost, and how near they stay to the full cache.

Cost: scoring, ranking and packing as a share of the prefill, in the prefill engine.
Quality: one context is run once and compressed under every policy; the answer is
teacher-forced after each compressed cache. KL is KL(full ‖ compressed), the mean over
answer tokens; a case is right if the answer is the likeliest token by token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from criticalkv.services.bench.closeness import TIERS, Closeness, Table
from criticalkv.services.bench.prefill_cost import measure as measure_cost
from criticalkv.services.evaluation.case import Case
from criticalkv.services.evaluation.needles import Needles
from criticalkv.services.evaluation.news import news
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.shared.config import Config
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.eviction.policy import DEFAULT_POLICY, Policy
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.progress import counting
from criticalkv.shared.report import Report

CONTEXT_TOKENS = 1500
NEWS_TOKENS = 1000
SUMMARY_TOKENS = 40
FIRST_SEED = 10
"""Seeds below were used to choose settings; reports use others."""
ABLATIONS: dict[str, str] = {
    "default": DEFAULT_POLICY,
    "default without echo": "replay+model+relative:share=0.125",
    "echo alone": "echo+model+relative:echo_reach=512",
}
"""Measured on every case."""
OTHERS = {
    "full replay": "replay+model+relative",
    "kvzip": "kvzip",
    "self": "self+model+relative",
    "snapkv": "snapkv",
    "criticalkv": "criticalkv",
    "adakv": "adakv",
    "criticaladakv": "criticaladakv",
    "expectedattention": "expectedattention",
    "h2o": "h2o",
    "obcache": "obcache",
    "keydiff": "keydiff",
    "streamingllm": "streamingllm",
    "snapkv-kvpress": "snapkv-kvpress",
    "criticaladakv-kvpress": "criticaladakv-kvpress",
}
"""Measured on a quarter of the cases."""
SUMMARIZED = (*ABLATIONS, "full replay", "snapkv", "criticaladakv")
"""Measured on summaries too."""
MEANING = {
    "window_share_4k": "scoring, ranking and packing of criticaladakv with the L2 norm ÷ prefill "
    "of 4,096 tokens; ratio, lower is better",
    "replay_over_prefill_4k": "the same of replay+model+relative ÷ prefill of 4,096 tokens; "
    "ratio, lower is better",
    "default_over_prefill_4k": "the same of the default policy ÷ prefill of 4,096 tokens; "
    "ratio, lower is better",
    "replay_kl_10pct": "mean KL of the default policy on needle cases, 10 % kept; nats, lower is "
    "better",
    "replay_accuracy_10pct_over_full": "right answers of the default policy, 10 % kept ÷ of the "
    "full cache; ratio, higher is better",
    "replay_accuracy_5pct_over_full": "right answers of the default policy, 5 % kept ÷ of the "
    "full cache; ratio, higher is better",
    "summary_kl_10pct": "mean KL of the default policy along the full cache's own summaries of "
    "MultiNews rows, 10 % kept; nats, lower is better",
    "critical_over_base_kl_snapkv": "KL of criticalkv ÷ of snapkv, mean over the tiers of needle "
    "cases; ratio, lower is better",
    "critical_over_base_kl_adakv": "KL of criticaladakv ÷ of adakv, mean over the tiers of needle "
    "cases; ratio, lower is better",
}


def run(
    config: Config,
    *,
    quick: bool,
    threads: int,
    data: Path | None = None,
    cases: int = 100,
    policies: Sequence[str] = (),
    kvpress: Path | None = None,
    so_far: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measure everything and return the report.

    Args:
        config: which model.
        quick: short contexts and few cases.
        threads: torch threads.
        data: folder with `inaugural.txt` and `multi_news_50.jsonl`, both optional.
        cases: needle cases of the default policy; others see a quarter of them.
        policies: measure these, on every case, instead of the usual ones.
        kvpress: what `infra/scripts/kvpress_cases.py` wrote, to be shown beside.
        so_far: called with the unfinished report after each case: it takes an hour.
    """
    report = Report("eviction", quick, dict.fromkeys(MEANING), MEANING)
    model = load_model(config.model, threads)
    always = {text: text for text in policies} or ABLATIONS
    others = {} if policies else OTHERS
    every = {**always, **others}
    tokens, count = (400, 2) if quick else (CONTEXT_TOKENS, cases)
    needles = Needles(model.chat, data)
    report.details |= {"threads": threads, "haystack": needles.haystack, "tokens": tokens}
    report.details["policies"] = {k: Policy.parse(v).canonical() for k, v in every.items()}
    closeness = Closeness(model, config.eviction)
    closeness.check(every.values())
    found = [_case(needles, i, tokens) for i in range(count)]
    rows = list(news(model.chat, data, NEWS_TOKENS))[: 1 if quick else None]
    table, summaries = Table(), Table()
    table.cells |= _beside(kvpress, [case.name for case in found]) if kvpress else {}

    def fill(*, complete: bool) -> None:
        _fill(report, table, summaries, complete=complete)
        so_far(report)

    with _progress() as progress:
        report.details["cost"] = measure_cost(
            model, (512,) if quick else (1024, 2048, 4096), progress
        )
        summarized = {k: v for k, v in every.items() if k in (*SUMMARIZED, *policies)}
        for row in progress.track(rows, description="summaries"):
            length = 4 if quick else SUMMARY_TOKENS
            context, question = row.context_ids, row.question_ids
            closeness.of_continuation(context, question, length, summarized, summaries)
            fill(complete=False)
        for i, case in enumerate(progress.track(found, description="needles")):
            # Others see pairs of the first cases, so that both kinds are there.
            closeness.of_case(case, every if i < max(2, count // 4) else always, table)
            fill(complete=False)
    fill(complete=True)
    return report


def _fill(report: Report, table: Table, summaries: Table, *, complete: bool) -> None:
    """Put what has been measured so far into the report."""
    report.details["complete"] = complete
    report.details["needles"] = table.estimates()
    if table.full:
        report.details["full"] = Estimate.of(table.full).as_json()
    report.details["summaries"] = summaries.estimates()
    report.samples |= {"needles": table.cells, "full": table.full, "summaries": summaries.cells}
    report.headline.update(_headline(table, summaries, report.details["cost"]))


def export(config: Config, path: Path, *, data: Path | None, cases: int) -> None:
    """Write the needle cases as JSON, for other libraries."""
    needles = Needles(load_model(config.model).chat, data)
    found = [_case(needles, i, CONTEXT_TOKENS) for i in range(cases)]
    path.write_text(json.dumps([asdict(case) for case in found]))


def _case(needles: Needles, index: int, tokens: int) -> Case:
    """The index-th case: single and multikey in turns."""
    return needles.case(FIRST_SEED + index, needles=1 + 3 * (index % 2), tokens=tokens)


def _headline(table: Table, summaries: Table, costs: dict[str, Any]) -> dict[str, float | None]:
    longest = costs.get("4096", {})
    share = {name: cell["scoring_over_prefill"] for name, cell in longest.items()}
    return {
        "window_share_4k": share.get("criticaladakv:norm=l2"),
        "replay_over_prefill_4k": share.get("replay+model+relative"),
        "default_over_prefill_4k": share.get("default"),
        "replay_kl_10pct": table.kl("default", "0.1"),
        "replay_accuracy_10pct_over_full": table.over_full("default", "0.1"),
        "replay_accuracy_5pct_over_full": table.over_full("default", "0.05"),
        "summary_kl_10pct": summaries.kl("default", "0.1"),
        "critical_over_base_kl_snapkv": _mean_ratio(table, "criticalkv", "snapkv"),
        "critical_over_base_kl_adakv": _mean_ratio(table, "criticaladakv", "adakv"),
    }


def _mean_ratio(table: Table, policy: str, base: str) -> float | None:
    pairs = [(table.kl(policy, tier), table.kl(base, tier)) for tier in TIERS]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return sum(ratios) / len(ratios) if len(ratios) == len(TIERS) else None


def _beside(path: Path, names: Sequence[str]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Read another library's cells.

    Raises:
        ConfigError: if they are not of the first of these cases.
    """
    found = json.loads(path.read_text())
    if found["cases"] != list(names[: len(found["cases"])]):
        raise ConfigError(f"{path} was measured on other cases", param="kvpress")
    cells: dict[str, dict[str, list[tuple[float, float]]]] = found["samples"]
    return cells


@contextmanager
def _progress() -> Iterator[Progress]:
    with counting() as progress:
        started = time.monotonic()
        yield progress
        progress.console.print(f"measured in {time.monotonic() - started:.0f} s")
