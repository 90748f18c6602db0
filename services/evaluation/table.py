"""The table of a run's results, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from criticalkv.services.evaluation.results import Measure, Result
from criticalkv.services.evaluation.statistics import Estimate

NOTHING = "–"


def table(results: Sequence[Result], measure: Measure, title: str) -> Table:
    """Return the rows, task after task; columns for turns if there are several."""
    turns = max(len(result.turns) for result in results)
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name in _columns(measure, turns):
        made.add_column(name, no_wrap=True, justify="left" if name in WORDS else "right")
    for _, rows in groupby(results, _place):
        for number, result in enumerate(section := list(rows), 1):
            place = _place(result) if number == 1 else ("", "")
            made.add_row(*place, *_row(result, measure, turns), end_section=number == len(section))
    return made


WORDS = ("task", "policy")
SHORT: Mapping[Measure, str] = {"score": "score", "perplexity": "PPL"}
DIGITS: Mapping[Measure, int] = {"score": 1, "perplexity": 2}


def _columns(measure: Measure, turns: int) -> Iterator[str]:
    yield from ("task", "length", "policy", "tier", "n", SHORT[measure], "95 %", "KL", "kept", "MB")
    if turns > 1:
        yield from (f"turn {turn}" for turn in range(1, turns + 1))


def show(console: Console, shown: Table) -> None:
    """Print a table as wide as it is, wherever it goes: a file has no width."""
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    console.width = max(console.width, needed)
    console.print(shown)


def _place(result: Result) -> tuple[str, str]:
    return result.task, NOTHING if result.length is None else str(result.length)


def _row(result: Result, measure: Measure, turns: int) -> list[str]:
    digits = DIGITS[measure]
    places = [f"{score:.1f}" for score in result.turns] + [NOTHING] * (turns - len(result.turns))
    return [
        result.cell.policy,
        result.cell.tier,
        str(result.score.count),
        f"{result.score.mean:.{digits}f}",
        _interval(result.score, digits),
        NOTHING if result.kl is None else f"{result.kl.mean:.4f}",
        f"{result.kept:.3f}",
        f"{result.kept_bytes / 1e6:.2f}",
        *(places if turns > 1 else ()),
    ]


def _interval(estimate: Estimate, digits: int) -> str:
    """Show an interval; of one case, or of equal ones, a bootstrap has none."""
    if math.isclose(estimate.low, estimate.high):
        return NOTHING
    return f"{estimate.low:.{digits}f}–{estimate.high:.{digits}f}"
