"""Results: scores per task, length, policy and tier, from the records of their examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Literal

from criticalkv.services.evaluation.answer import Cell
from criticalkv.services.evaluation.column import Column
from criticalkv.services.evaluation.record import Record
from criticalkv.services.evaluation.statistics import Estimate

AVERAGE = "average"
"""Instead of a task: the mean of the tasks' means."""


Measure = Literal["score", "perplexity"]
"""What a run measures."""


@dataclass(frozen=True)
class Result:
    """One row of a table.

    Attributes:
        task: name, or AVERAGE over all tasks of that length.
        length: tokens that were asked for; None for rows from files.
        score: 0 to 100, over examples; or the perplexity.
        kl: to the full cache, nats per token, over examples; None if not measured.
        kept: mean kept fraction of the contexts.
        kept_bytes: mean bytes of the contexts.
        turns: mean score of each turn, 0 to 100.
    """

    task: str
    length: int | None
    cell: Cell
    score: Estimate
    kl: Estimate | None
    kept: float
    kept_bytes: float
    turns: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """Records of one task and length under one cell, by the examples' names."""

    records: tuple[Record, ...]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Group:
        """Order records: a mean's interval must not depend on which came first."""
        return cls(tuple(sorted(records, key=lambda record: record.name)))

    @property
    def scores(self) -> list[float]:
        """Score of each example, 0 to 100."""
        return [100 * fmean(turn.score for turn in record.turns) for record in self.records]

    @property
    def kls(self) -> list[float]:
        """KL of each example that has one."""
        known = ([read.kl for read in r.reads if read.kl is not None] for r in self.records)
        return [fmean(values) for values in known if values]

    @property
    def kept(self) -> float:
        """Mean kept fraction."""
        return fmean(read.kept for record in self.records for read in record.reads)

    @property
    def kept_bytes(self) -> float:
        """Mean bytes."""
        return fmean(read.kept_bytes for record in self.records for read in record.reads)

    @property
    def turns(self) -> tuple[float, ...]:
        """Mean score of each turn, over the examples that have it, 0 to 100."""
        return _by_place([100 * turn.score for turn in record.turns] for record in self.records)

    @property
    def perplexity(self) -> Estimate:
        """Of all tokens of all texts."""
        known = [record.likelihood for record in self.records if record.likelihood]
        return Estimate.ratio([x.nll * x.tokens for x in known], [x.tokens for x in known]).exp()


Place = tuple[str, int | None, Cell]
"""(task, length, cell)."""


def results(records: Sequence[Record], columns: Sequence[Column]) -> list[Result]:
    """Aggregate records: a row per task, length and column; of several tasks also averages.

    Args:
        records: of all examples and columns, tasks in the order of the table.
        columns: in the order of the table.
    """
    found = _grouped(records, columns)
    rows = [_result(*key, [group]) for key, group in found.items()]
    return rows + list(_averages(found))


def _grouped(records: Sequence[Record], columns: Sequence[Column]) -> dict[Place, Group]:
    cells = {(column.canonical, column.cell.tier): column.cell for column in columns}
    members: defaultdict[Place, list[Record]] = defaultdict(list)
    for record in records:
        if cell := cells.get((record.canonical, record.tier)):
            members[record.task, record.length, cell].append(record)
    tasks = dict.fromkeys(task for task, _, _ in members)
    lengths = dict.fromkeys(length for _, length, _ in members)
    places = ((task, n, cell) for task in tasks for n in lengths for cell in cells.values())
    return {place: Group.of(members[place]) for place in places if place in members}


def _averages(found: Mapping[Place, Group]) -> Iterator[Result]:
    by_column: defaultdict[tuple[int | None, Cell], list[Group]] = defaultdict(list)
    for (_, length, cell), group in found.items():
        by_column[length, cell].append(group)
    lengths = list(dict.fromkeys(length for length, _ in by_column))
    for key in sorted(by_column, key=lambda key: lengths.index(key[0])):
        if len(by_column[key]) > 1:
            yield _result(AVERAGE, *key, by_column[key])


def _result(task: str, length: int | None, cell: Cell, groups: Sequence[Group]) -> Result:
    kls = [group.kls for group in groups if group.kls]
    return Result(
        task,
        length,
        cell,
        score=_score(groups),
        kl=Estimate.across(kls) if kls else None,
        kept=fmean(group.kept for group in groups),
        kept_bytes=fmean(group.kept_bytes for group in groups),
        turns=_by_place(group.turns for group in groups),
    )


def _score(groups: Sequence[Group]) -> Estimate:
    if groups[0].records[0].likelihood:
        return Group.of(record for group in groups for record in group.records).perplexity
    return Estimate.across([group.scores for group in groups])


def _by_place(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Mean of the first elements, of the second ones, …, of rows of any lengths."""
    return tuple(fmean(x for x in place if x is not None) for place in zip_longest(*rows))
