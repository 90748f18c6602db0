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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor

from criticalkv.services.bench.prefill_cost import measure as measure_cost
from criticalkv.services.bench.report import Report
from criticalkv.services.evaluation.case import Case
from criticalkv.services.evaluation.needles import Needles
from criticalkv.services.evaluation.news import news
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.services.local.side_by_side import SideBySide, answer_logprobs, greedy
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.config import Config
from criticalkv.shared.eviction.policy import DEFAULT_POLICY, Policy
from criticalkv.shared.model.loader import LoadedModel, load_model

TIERS = ("0.05", "0.1", "0.2", "0.4", "0.6")
CONTEXT_TOKENS = 1500
NEWS_TOKENS = 1000
SUMMARY_TOKENS = 40
FIRST_SEED = 10
"""Seeds below were used to choose settings; reports use others."""
ABLATIONS: dict[str, str] = {"default": DEFAULT_POLICY}
"""Measured on every case."""
OTHERS = {
    "snapkv": "snapkv",
    "criticalkv": "criticalkv",
    "adakv": "adakv",
    "criticaladakv": "criticaladakv",
    "kvzip": "kvzip",
    "expectedattention": "expectedattention",
    "h2o": "h2o",
    "streamingllm": "streamingllm",
}
"""Measured on a quarter of the cases."""
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


@dataclass
class Table:
    """Samples of every policy and tier: KL and agreement, case by case."""

    cells: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    full: list[float] = field(default_factory=list)

    def add(self, policy: str, tier: str, kl: float, agreement: float) -> None:
        """Add one case's sample."""
        self.cells.setdefault(policy, {}).setdefault(tier, []).append((kl, agreement))

    def kl(self, policy: str, tier: str) -> float | None:
        """Mean KL, or None if not measured."""
        return self._mean(policy, tier, 0)

    def over_full(self, policy: str, tier: str) -> float | None:
        """Agreement ÷ the full cache's on the same cases, or None."""
        right, cases = self._mean(policy, tier, 1), self.cells.get(policy, {}).get(tier, [])
        full = sum(self.full[: len(cases)])
        return None if right is None or not full else right * len(cases) / full

    def _mean(self, policy: str, tier: str, which: int) -> float | None:
        samples = [s[which] for s in self.cells.get(policy, {}).get(tier, [])]
        return Estimate.of(samples).mean if samples else None

    def estimates(self) -> dict[str, Any]:
        """Every cell with its confidence intervals."""
        return {
            policy: {
                tier: {
                    "kl": Estimate.of([s[0] for s in samples]).as_json(),
                    "agreement": Estimate.of([s[1] for s in samples]).as_json(),
                }
                for tier, samples in row.items()
            }
            for policy, row in self.cells.items()
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
    """
    report = Report("eviction", quick, dict.fromkeys(MEANING), MEANING)
    model = load_model(config.model, threads)
    always = {text: text for text in policies} or ABLATIONS
    others = {} if policies else OTHERS
    tokens, count = (400, 2) if quick else (CONTEXT_TOKENS, cases)
    needles = Needles(model.chat, data)
    report.details |= {"threads": threads, "haystack": needles.haystack, "tokens": tokens}
    report.details["policies"] = {
        name: Policy.parse(text).canonical() for name, text in {**always, **others}.items()
    }
    with _progress() as progress:
        table = _needles(model, needles, tokens, count, always, others, progress)
        summaries = _summaries(model, data, quick, {**always, **others}, progress)
        costs = measure_cost(model, (512,) if quick else (1024, 2048, 4096), progress)
    if kvpress is not None:
        table.cells |= json.loads(kvpress.read_text())
    report.details["needles"] = table.estimates() | {"full": Estimate.of(table.full).as_json()}
    report.details["summaries"] = summaries.estimates()
    report.details["cost"] = costs
    report.samples |= {"needles": table.cells, "full": table.full, "summaries": summaries.cells}
    report.headline.update(_headline(table, summaries, costs))
    return report


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


def _needles(
    model: LoadedModel,
    needles: Needles,
    tokens: int,
    count: int,
    always: dict[str, str],
    others: dict[str, str],
    progress: Progress,
) -> Table:
    table = Table()
    task = progress.add_task("needles", total=count)
    for i in range(count):
        case = _case(needles, i, tokens)
        # Others see pairs of the first cases, so that both kinds are there.
        named = {**always, **(others if i < max(2, count // 4) else {})}
        _one_needle(model, case, named, table)
        progress.advance(task)
    return table


def _one_needle(model: LoadedModel, case: Case, named: dict[str, str], table: Table) -> None:
    context = SideBySide(model, case.context_ids)
    wanted = torch.tensor(case.answer_ids, device=model.device)
    full = answer_logprobs(model, [context.full()], case.question_ids, case.answer_ids)[0]
    table.full.append(float((full.argmax(-1) == wanted).all()))
    for name, tier, found in _answers(
        model, context, named, lambda caches: _of_case(model, case, caches)
    ):
        right = float((found.argmax(-1) == wanted).all())
        table.add(name, tier, divergence(full, found), right)


def _of_case(model: LoadedModel, case: Case, caches: Sequence[RaggedCache]) -> Tensor:
    return answer_logprobs(model, caches, case.question_ids, case.answer_ids)


def _summaries(
    model: LoadedModel, data: Path | None, quick: bool, named: dict[str, str], progress: Progress
) -> Table:
    table = Table()
    rows = list(news(model.chat, data, NEWS_TOKENS))[: 1 if quick else None]
    for _, ids, question in progress.track(rows, description="summaries"):
        context = SideBySide(model, ids)
        answer = greedy(model, context.full(), question, 4 if quick else SUMMARY_TOKENS)
        full = answer_logprobs(model, [context.full()], question, answer)[0]

        def follow(
            caches: Sequence[RaggedCache],
            question: list[int] = question,
            answer: list[int] = answer,
        ) -> Tensor:
            return answer_logprobs(model, caches, question, answer)

        for name, tier, found in _answers(model, context, named, follow):
            same = float((found.argmax(-1) == full.argmax(-1)).float().mean())
            table.add(name, tier, divergence(full, found), same)
    return table


def _answers(
    model: LoadedModel,
    context: SideBySide,
    named: dict[str, str],
    follow: Callable[[Sequence[RaggedCache]], Tensor],
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (policy, tier, log probabilities [answer, vocab]) of every policy and tier."""
    del model
    for name, text in named.items():
        caches = _every_tier(context, Policy.parse(text))
        for tier, found in zip(TIERS, follow(caches), strict=True):
            yield name, tier, found


def _every_tier(context: SideBySide, policy: Policy) -> list[RaggedCache]:
    cache = context.compress(policy, TIERS).cache
    if cache.tiers == TIERS:
        return [cache.at_tier(tier) for tier in TIERS]
    # Not nested: each tier is a cache of its own.
    return [context.compress(policy, (tier,)).cache for tier in TIERS]


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full ‖ other) of log probabilities [tokens, vocab], mean over tokens, nats."""
    return float((full.exp() * (full - other)).sum(-1).mean())


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        started = time.monotonic()
        yield progress
        progress.console.print(f"measured in {time.monotonic() - started:.0f} s")
