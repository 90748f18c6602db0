"""Examples and an answerer that needs no model: what it says depends on example and cell."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence

from criticalkv.services.evaluation.answer import Answer, Answers, Cell
from criticalkv.services.evaluation.example import Example, Question


def scripted_examples(count: int = 3, turns: int = 2) -> list[Example]:
    """Examples of two tasks at two lengths, each with so many turns."""
    return [
        Example(
            task=task,
            name=f"{task}-{length}-{number}",
            context=f"Context {number} of {task} at {length}.",
            questions=tuple(
                Question(f"\n\nTurn {turn}?", (f"fact {turn}",), "string_match_all", 8)
                for turn in range(turns)
            ),
            length=length,
            depth=number / count,
        )
        for task in ("seek", "count")
        for length in (100, 200)
        for number in range(count)
    ]


def said(example: Example, cell: Cell, turn: int) -> Answer:
    """What is answered: right or wrong as a hash of all three has it."""
    seed = f"{example.name} {cell.policy} {cell.tier} {turn}".encode()
    number = hashlib.sha256(seed).digest()[0]
    tier = float(cell.tier)
    return Answer(
        text=f"It is fact {turn if number % 2 else 'none'}.",
        finish_reason="stop",
        tier=cell.tier,
        kept=tier,
        kept_bytes=round(1e6 * tier * (example.length or 1)),
        kl=number / 256 * (1 - tier) if turn == 0 else None,
    )


class Scripted:
    """Answers as `said`; notes what it was asked.

    Args:
        reverse: give the last cell's answers first.
        after: cells that are answered before `stop` is called.
        stop: ends it all.
    """

    def __init__(
        self,
        *,
        reverse: bool = False,
        after: int | None = None,
        stop: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self.asked: list[tuple[str, Cell]] = []
        self._order = -1 if reverse else 1
        self._after = after
        self._stop = stop

    def answer(self, example: Example, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Answers]]:
        """See Answerer."""
        for cell in list(cells)[:: self._order]:
            if len(self.asked) == self._after:
                self._stop()
            self.asked.append((example.name, cell))
            turns = range(len(example.questions))
            yield cell, tuple(said(example, cell, turn) for turn in turns)
