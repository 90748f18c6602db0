"""Means, intervals and rows, against numbers worked out by hand."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from criticalkv.services.evaluation.answer import FULL_CELL, Cell
from criticalkv.services.evaluation.column import columns
from criticalkv.services.evaluation.likelihood import Likelihood
from criticalkv.services.evaluation.record import Record, Turn
from criticalkv.services.evaluation.results import Measure, Result, results
from criticalkv.services.evaluation.statistics import Estimate
from criticalkv.services.evaluation.table import show, table

FULL, SMALL, LARGE = COLUMNS = columns(["snapkv"], "0.1,0.4")


def record(
    number: int,
    scores: Sequence[float],
    kl: float | None = None,
    *,
    task: str = "seek",
    length: int | None = 100,
    column: int = 1,
    kept: float = 0.1,
    kept_bytes: int = 1000,
) -> Record:
    """A record whose first turn has a KL."""
    cell = COLUMNS[column].cell
    return Record(
        name=f"{task}-{length}-{number}",
        task=task,
        length=length,
        depth=None,
        digest="",
        policy=cell.policy,
        canonical=COLUMNS[column].canonical,
        tier=cell.tier,
        turns=tuple(
            Turn(
                text="",
                score=score,
                finish_reason="stop",
                tier=cell.tier,
                kept=kept,
                kept_bytes=kept_bytes,
                kl=None if turn else kl,
            )
            for turn, score in enumerate(scores)
        ),
        seconds=1,
    )


def rows(records: Sequence[Record]) -> dict[tuple[str, int | None, str], Result]:
    found = results(records, COLUMNS)
    by_place = {(result.task, result.length, result.cell.tier): result for result in found}
    assert len(by_place) == len(found)
    return by_place


def test_a_row() -> None:
    found = rows(
        [
            record(0, [1, 0.5, 0], 0.2, kept=0.1, kept_bytes=1000),
            record(1, [0, 1], 0.4, kept=0.2, kept_bytes=4000),
            record(2, [0, 0, 1], None, kept=0.3, kept_bytes=7000),
        ]
    )
    assert list(found) == [("seek", 100, "0.1")]
    row = found["seek", 100, "0.1"]
    assert row.cell == Cell("snapkv", "0.1")
    assert row.score == Estimate.of([100 * mean for mean in (0.5, 0.5, 1 / 3)])
    assert row.score.mean == pytest.approx(400 / 9)
    assert row.score.count == 3
    assert row.kl == Estimate.of([0.2, 0.4])
    assert row.kept == pytest.approx((3 * 0.1 + 2 * 0.2 + 3 * 0.3) / 8)
    assert row.kept_bytes == pytest.approx((3 * 1000 + 2 * 4000 + 3 * 7000) / 8)
    assert row.turns == pytest.approx((100 / 3, 50, 50))


def test_without_kl_there_is_none() -> None:
    assert rows([record(0, [1])])["seek", 100, "0.1"].kl is None


def test_averages_are_means_of_tasks() -> None:
    """However many examples a task has; of each length by itself."""
    found = rows(
        [record(i, [1], 0.3, kept_bytes=100) for i in range(3)]
        + [record(0, [0], 0.1, task="count", kept_bytes=300)]
        + [record(0, [0.25], task="count", length=200), record(0, [0.75], length=200)]
        + [record(0, [1], task="count", column=0), record(0, [1], column=0)]
    )
    average = found["average", 100, "0.1"]
    assert average.score.mean == 50
    assert average.score.count == 4
    assert (average.score.low, average.score.high) == (50, 50)  # no task varies by itself
    assert average.kl is not None
    assert average.kl.mean == pytest.approx(0.2)
    assert average.kept_bytes == 200
    assert average.turns == (50,)
    assert found["average", 200, "0.1"].score.mean == 50
    assert found["average", 100, "1"].score.mean == 100
    assert ("average", 100, "0.4") not in found


def test_rows_stand_in_the_order_of_tasks_lengths_and_columns() -> None:
    records = [
        record(0, [1], task=task, length=length, column=column)
        for task in ("seek", "count")
        for length in (200, 100)
        for column in (0, 1, 2)
    ]
    places = [
        (task, length, column.cell)
        for task in ("seek", "count", "average")
        for length in (200, 100)
        for column in COLUMNS
    ]
    found = results(records, COLUMNS)
    assert [(row.task, row.length, row.cell) for row in found] == places
    assert FULL.cell == FULL_CELL


def test_one_task_has_no_average() -> None:
    found = rows([record(0, [1]), record(0, [1], length=200)])
    assert list(found) == [("seek", 100, "0.1"), ("seek", 200, "0.1")]


def test_what_is_not_asked_for_is_left_out() -> None:
    records = [record(0, [1], column=1), record(0, [0], column=2)]
    (row,) = results(records, (FULL, LARGE))
    assert row.cell == LARGE.cell
    assert row.score.mean == 0


def test_order_within_a_task_does_not_matter() -> None:
    draw = random.Random(0)
    records = [record(i, [draw.random(), draw.random()], draw.random()) for i in range(40)]
    mixed = draw.sample(records, 40)
    assert results(mixed, COLUMNS) == results(records, COLUMNS)


def test_perplexity_is_over_all_tokens() -> None:
    def continued(number: int, nll: float, tokens: int, kl: float) -> Record:
        likelihood = Likelihood(nll=nll, kl=kl, agreement=1, tokens=tokens, kept=0.1, kept_bytes=5)
        return record(number, []).model_copy(update={"likelihood": likelihood})

    row = rows([continued(0, 1.0, 30, 0.5), continued(1, 3.0, 10, 0.1)])["seek", 100, "0.1"]
    assert row.score.mean == pytest.approx(math.exp(1.5))
    assert row.score.low == pytest.approx(math.exp(1))
    assert row.score.high == pytest.approx(math.exp(3))
    assert row.kl is not None
    assert row.kl.mean == pytest.approx(0.3)
    assert row.kept_bytes == 5
    assert row.turns == ()


def test_across_resamples_each_group_by_itself() -> None:
    """Against the normal approximation, of groups whose own spreads differ."""
    draw = np.random.default_rng(1)
    groups = [draw.normal(10, 3, 400).tolist(), draw.normal(50, 1, 100).tolist()]
    estimate = Estimate.across(groups)
    means = [np.mean(group) for group in groups]
    error = math.sqrt(sum(np.var(group) / len(group) for group in groups)) / 2
    assert estimate.mean == pytest.approx(np.mean(means))
    assert estimate.low == pytest.approx(estimate.mean - 1.96 * error, abs=error / 5)
    assert estimate.high == pytest.approx(estimate.mean + 1.96 * error, abs=error / 5)
    assert estimate.count == 500
    assert Estimate.across([groups[0]]) == Estimate.of(groups[0])


def printed(records: Sequence[Record], width: int = 40, measure: Measure = "score") -> list[str]:
    """The lines of a table, from its head on."""
    text = io.StringIO()
    show(Console(file=text, width=width), table(results(records, COLUMNS), measure, "a run"))
    _, *lines = text.getvalue().splitlines()
    return lines


def cells(records: Sequence[Record], measure: Measure = "score") -> list[str]:
    """Its rows, one space between their cells."""
    rows = [" ".join(line.split()) for line in printed(records, measure=measure)[2:]]
    return [row for row in rows if row]


def test_the_table_is_whole_however_narrow_the_terminal() -> None:
    long = "a_task_with_quite_a_long_name"
    records = [
        *(record(i, [i, 0.5], 0.25, task=long, kept_bytes=1_234_567) for i in (0, 1)),
        record(0, [0]),
    ]
    assert cells(records) == [
        f"{long} 100 snapkv 0.1 2 50.0 25.0–75.0 0.2500 0.100 1.23 50.0 50.0",
        "seek 100 snapkv 0.1 1 0.0 – – 0.100 0.00 0.0 –",
        "average 100 snapkv 0.1 3 25.0 12.5–37.5 0.2500 0.100 0.62 25.0 50.0",
    ]
    assert printed(records, 40) == printed(records, 60)


@pytest.mark.parametrize("scores", [[1], [0], [1 / 3] * 7, [0.1, 0.1, 0.1]])
def test_what_does_not_vary_has_no_interval(scores: Sequence[float]) -> None:
    (line,) = cells([record(i, [score], length=None) for i, score in enumerate(scores)])
    mean = f"{100 * scores[0]:.1f}"
    assert line == f"seek – snapkv 0.1 {len(scores)} {mean} – – 0.100 0.00"


def test_task_and_length_stand_in_a_sections_first_row() -> None:
    records = [
        record(0, [1], task=task, length=length, column=column)
        for task in ("seek", "count")
        for length in (100, 200)
        for column in (0, 1, 2)
    ]
    rows = [line[: len("average    100")].split() for line in printed(records)[2:]]
    begins = [[task, str(n)] for task in ("seek", "count", "average") for n in (100, 200)]
    assert rows == [cell for begin in begins for cell in (begin, [], [], [])][:-1]


def test_a_table_of_one_turn_fits_80_columns() -> None:
    draw = random.Random(0)
    wide = columns(["criticaladakv"], "0.05")[1]
    records = [
        record(
            i, [draw.random() > 0.1], draw.random(), task="niah_multikey_1", kept_bytes=94_123_456
        ).model_copy(update={"policy": wide.cell.policy, "length": 131_072})
        for i in range(25)
    ]
    lines = printed(records, 80)
    assert "–100.0 " in lines[2]
    assert {len(line.rstrip()) for line in lines[:3]} <= set(range(81))


def test_perplexities_have_two_decimals() -> None:
    def continued(number: int, nll: float) -> Record:
        likelihood = Likelihood(nll=nll, kl=0.5, agreement=1, tokens=9, kept=0.1, kept_bytes=5)
        return record(number, []).model_copy(update={"likelihood": likelihood})

    records = [continued(0, math.log(7.25)), continued(1, math.log(7.29))]
    assert printed(records, measure="perplexity")[0].split()[5] == "PPL"
    assert cells(records, "perplexity") == [
        "seek 100 snapkv 0.1 2 7.27 7.25–7.29 0.5000 0.100 0.00"
    ]
