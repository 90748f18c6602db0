"""The table of a run's results, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from criticalkv.services.evaluation.results import Measure, Result
from criticalkv.services.evaluation.statistics import Estimate

NOTHING = "–"


def table(results: Sequence[Result], measure: Measure, title: str) -> Table:
    """Return the rows, task after task; columns for turns if there are several."""
    turns = max(len(result.turns) for result in results)
    made = Table(title=title, title_justify="left")
    before, after = ("task", "length", "policy", "tier", "cases"), ("95 %", "KL", "kept", "MB")
    for name in (*before, measure, *after):
        made.add_column(name, no_wrap=True, justify="left" if name in WORDS else "right")
    for turn in range(1, turns + 1) if turns > 1 else ():
        made.add_column(f"turn {turn}", no_wrap=True, justify="right")
    for result, following in zip(results, [*results[1:], None], strict=True):
        last = following is None or _place(following) != _place(result)
        made.add_row(*_row(result, turns), end_section=last)
    return made


WORDS = ("task", "policy")


def show(console: Console, shown: Table) -> None:
    """Print a table as wide as it is, wherever it goes: a file has no width."""
    needed = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    console.width = max(console.width, needed)
    console.print(shown)


def _place(result: Result) -> tuple[str, int | None]:
    return result.task, result.length


def _row(result: Result, turns: int) -> list[str]:
    places = [f"{score:.1f}" for score in result.turns] + [NOTHING] * (turns - len(result.turns))
    return [
        result.task,
        NOTHING if result.length is None else str(result.length),
        result.cell.policy,
        result.cell.tier,
        str(result.score.count),
        f"{result.score.mean:.1f}",
        _interval(result.score),
        NOTHING if result.kl is None else f"{result.kl.mean:.4f}",
        f"{result.kept:.3f}",
        f"{result.kept_bytes / 1e6:.2f}",
        *(places if turns > 1 else ()),
    ]


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.1f}–{estimate.high:.1f}"
