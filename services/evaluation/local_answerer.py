"""An answerer in this process: one prefill serves every policy and tier of an example.

All cells' questions are decoded together, in one continuous batch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from decimal import Decimal

from criticalkv.services.evaluation.answer import (
    FULL_CELL,
    KL_TOKENS,
    Answer,
    Answers,
    Cell,
    History,
)
from criticalkv.services.evaluation.asking import Round, Steps, rounds
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.forced import divergence, forced
from criticalkv.services.evaluation.prompt import ROLES, Setting
from criticalkv.services.evaluation.reading import EVICTION, Reading, check_cells, read_each
from criticalkv.services.local import LocalEngine, LocalNode, LocalTurn
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.shared.config import DecodeConfig, EvictionConfig, PrefillConfig
from criticalkv.shared.errors import CancelledError, DeadlineError
from criticalkv.shared.model.loader import LoadedModel

SEQS, STEP_TOKENS, POOL_MB = 64, 2048, 4096
"""Wide: what is decoded together shares each reading of the weights."""
END_S = 600.0
"""Longest wait for answers that were given up to end; they do within one step, a wide one."""
TURN_S = 3600.0
"""Longest time until an answer has come, all that is decoded beside it included."""

Asked = dict["Future[list[LocalTurn]]", tuple[Cell, Steps]]
"""Conversations that were begun."""


def wide(config: DecodeConfig) -> DecodeConfig:
    """Return a configuration that decodes more together; a pool that was given stays."""
    more = {
        "max_num_seqs": max(config.max_num_seqs, SEQS),
        "max_num_batched_tokens": max(config.max_num_batched_tokens, STEP_TOKENS),
    }
    if "pool_mb" not in config.model_fields_set:
        more["pool_mb"] = POOL_MB
    return config.model_copy(update=more)


class LocalAnswerer:
    """See Answerer. One example at a time.

    Args:
        model: that answers.
        setting: whether policies see the first question.
        history: what later questions follow.
        kl: measure KL along the full cache's own answer to the first question, over its
            first KL_TOKENS tokens, the one that ends it included.
        prefill: the memory for what policies look at.
        eviction: the tiers that are stored beside those asked for.
        decode: how much is decoded together, and the pool for it.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        setting: Setting = "context-only",
        history: History = "model",
        kl: bool = True,
        prefill: PrefillConfig | None = None,
        eviction: EvictionConfig | None = None,
        decode: DecodeConfig | None = None,
    ) -> None:
        self._model = model
        self._setting: Setting = setting
        self._history: History = history
        self._kl = kl
        self._store = MemoryStore()
        decode = decode or wide(DecodeConfig())
        self._engine = LocalEngine(
            model, self._store, prefill=prefill, eviction=eviction or EVICTION, decode=decode
        )
        self._threads = ThreadPoolExecutor(decode.max_num_seqs, thread_name_prefix="answer")

    def close(self) -> None:
        """End its threads; one that hangs is waited for only when the process ends."""
        self._engine.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, cells: Sequence[Cell]) -> None:
        """See Answerer."""
        check_cells(self._engine, cells)

    def answer(self, example: Example, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Answers]]:
        """See Answerer."""
        wanted = tuple(dict.fromkeys(cells))
        found: dict[Cell, dict[int, Answer]] = {cell: {} for cell in wanted}
        for part in rounds(self._model.chat, example, self._setting, self._history):
            # Closed at once: what its end raises would be lost in a garbage collection.
            with closing(self._round(part, wanted)) as running:
                for cell, answers in running:
                    found[cell] |= answers
                    if len(found[cell]) == len(example.questions):
                        yield cell, tuple(found[cell][i] for i in range(len(example.questions)))

    def _round(
        self, part: Round, cells: Sequence[Cell]
    ) -> Generator[tuple[Cell, dict[int, Answer]], None, None]:
        """Ask about one context, then forget it."""
        given_up = threading.Event()
        asked: Asked = {}
        try:
            measured = self._kl and any(steps[0].index == 0 for steps in part.conversations)
            every = dict.fromkeys((*cells, FULL_CELL) if measured else cells)
            readings = read_each(self._engine, part.context_ids, every)
            self._ask(part, cells, readings, given_up, asked)
            kls = self._kls(asked, readings) if measured else {}
            for future in tuple(asked) if measured else _ended(asked):
                cell, steps = asked[future]
                if cell in cells:
                    yield cell, _answers(readings[cell], steps, future.result(), kls.get(cell))
        finally:
            given_up.set()
            self._forget(asked)

    def _ask(
        self,
        part: Round,
        cells: Sequence[Cell],
        readings: Mapping[Cell, Reading],
        given_up: threading.Event,
        asked: Asked,
    ) -> None:
        """Begin all conversations; of a full cache nobody asked for, the first answer only."""
        # The highest tier first: the others then read the same pages.
        for cell in sorted(readings, key=lambda cell: Decimal(cell.tier), reverse=True):
            for steps in part.conversations:
                if cell not in cells:
                    if steps[0].index:
                        continue
                    steps = steps[:1]
                future = self._threads.submit(self._converse, readings[cell], steps, given_up)
                asked[future] = cell, steps

    def _converse(
        self, reading: Reading, steps: Steps, given_up: threading.Event
    ) -> list[LocalTurn]:
        """Ask one question after another."""

        def check() -> None:
            if given_up.is_set():
                raise CancelledError("the example was given up")

        leaf: LocalNode = reading.node
        turns = []
        for step in steps:
            check()
            turn = self._engine.generate(
                leaf,
                [*self._engine.manifest(leaf).pending_ids, *step.token_ids],
                tier=reading.tier,
                max_tokens=step.question.max_tokens,
                roles=ROLES,
                begun=step.begun,
                keep=step is not steps[-1],
                deadline_s=TURN_S,
                check=check,
            )
            turns.append(turn)
            leaf = turn
        return turns

    def _forget(self, asked: Asked) -> None:
        """Drop an example's nodes, once what was given up has ended, too.

        Raises:
            DeadlineError: if something still runs after END_S; only a note if another error
                is on its way.
        """
        decode, until = self._engine.decode, time.monotonic() + END_S
        running = wait(asked, END_S).not_done
        # Who has ended may still hold pages for a moment, and a node may still arrive.
        while in_use := decode.in_flight or decode.pages.free < decode.pages.total:
            decode.drop_unused()
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        if running or in_use:
            late = DeadlineError(f"answers that were given up still run after {END_S:g} s")
            first = sys.exception()
            if first is None or isinstance(first, GeneratorExit):
                raise late
            first.add_note(str(late))
            return
        self._store.clear()

    def _kls(self, asked: Asked, readings: Mapping[Cell, Reading]) -> dict[Cell, float]:
        """Follow the full cache's first answer after every cache, once all have answered."""
        for future in _ended(asked):
            future.result()
        turns, steps = next(
            (future.result(), steps)
            for future, (cell, steps) in asked.items()
            if cell == FULL_CELL and steps[0].index == 0
        )
        drawn = [token for delta in turns[0].deltas for token in delta.sampled][:KL_TOKENS]
        others = [cell for cell in readings if cell != FULL_CELL]
        caches = ((cell, readings[cell].cache(self._engine)) for cell in (FULL_CELL, *others))
        rows = forced(self._model, caches, steps[0].token_ids, drawn)
        _, full = next(rows)
        kls = {cell: divergence(full, row) for cell, row in rows}
        return {FULL_CELL: 0.0, **kls}


def _ended(asked: Asked) -> Iterator[Future[list[LocalTurn]]]:
    """Yield conversations as they end.

    Raises:
        DeadlineError: if none ends for longer than the longest may take.
    """
    longest = TURN_S * max((len(steps) for _, steps in asked.values()), default=0) + END_S
    running = set(asked)
    while running:
        ended, running = wait(running, longest, FIRST_COMPLETED)
        if not ended:
            raise DeadlineError(f"no answer within {longest:g} s")
        yield from ended


def _answers(
    reading: Reading, steps: Steps, turns: Sequence[LocalTurn], kl: float | None
) -> dict[int, Answer]:
    """Return a conversation's answers by their questions' indexes."""
    return {
        step.index: Answer(
            text=turn.text,
            finish_reason=turn.finish_reason,
            tier=reading.tier,
            kept=reading.kept,
            kept_bytes=reading.kept_bytes,
            kl=kl if step.index == 0 else None,
            token_ids=turn.token_ids,
        )
        for step, turn in zip(steps, turns, strict=True)
    }
