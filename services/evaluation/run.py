"""A run: examples × cells that are not in the journal yet → answers → scores → the journal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from criticalkv.services.evaluation.answer import Cell
from criticalkv.services.evaluation.column import Column
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.journal import Journal
from criticalkv.services.evaluation.record import Outcome, Record
from criticalkv.shared.errors import CriticalKVError

Ask = Callable[[Example, Sequence[Cell]], Iterator[tuple[Cell, Outcome]]]


def run(
    examples: Sequence[Example],
    columns: Sequence[Column],
    ask: Ask,
    journal: Journal,
    advance: Callable[[int], object] = lambda _: None,
) -> list[Record]:
    """Finish what the journal lacks; return the records of all examples and columns.

    Args:
        examples: in order.
        columns: what each is asked under.
        ask: asks an example under cells, as `Answerer.answer` does.
        journal: gets a line as soon as a cell is.
        advance: called with the number of cells that are done more than before.

    Raises:
        ConfigError: before anything is asked, if the journal has another example of a name.
        CriticalKVError: naming the example that failed; what is in the journal stands.
    """
    records = []
    # All of them first: an example that is another one there is said before hours of others.
    known = [{column: journal.find(example, column) for column in columns} for example in examples]
    for example, found in zip(examples, known, strict=True):
        missing = [column for column, record in found.items() if record is None]
        advance(len(columns) - len(missing))
        found |= _ask(example, missing, ask, journal, advance)
        records += [_as_spelled(record, column) for column, record in found.items() if record]
    return records


def _as_spelled(record: Record, column: Column) -> Record:
    """Call a record's policy what it is called now: it may be from a run with another name."""
    return record.model_copy(update={"policy": column.cell.policy})


def _ask(
    example: Example,
    columns: Sequence[Column],
    ask: Ask,
    journal: Journal,
    advance: Callable[[int], object],
) -> dict[Column, Record]:
    by_cell = {column.cell: column for column in columns}
    ready: dict[Cell, Record] = {}
    waiting = deque(by_cell)
    started = time.perf_counter()

    def write(cell: Cell) -> None:
        journal.add(ready[cell])
        advance(1)

    try:
        for cell, outcome in ask(example, tuple(by_cell)) if by_cell else ():
            seconds = time.perf_counter() - started
            ready[cell] = Record.of(example, by_cell[cell], outcome, seconds)
            # Answers come in any order; lines are in the columns' order in every run.
            while waiting and waiting[0] in ready:
                write(waiting.popleft())
    except CriticalKVError as error:
        raise type(error)(f"{example.name}: {error.message}", param=error.param) from error
    finally:
        for cell in waiting:
            if cell in ready:
                write(cell)
    if len(ready) < len(by_cell):
        raise CriticalKVError(f"{example.name}: {len(by_cell) - len(ready)} cells have no answer")
    return {by_cell[cell]: record for cell, record in ready.items()}
