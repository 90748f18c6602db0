"""SCBench: made at any length, or read from its own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

from criticalkv.services.evaluation.case import ENVIRONMENT, data_file
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.ruler.fitting import prompt_tokens
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.services.evaluation.scbench import en_qa, kv75, math_find, multi_needle, retr_kv
from criticalkv.services.evaluation.scbench import rows as official
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

MAKERS: dict[str, Callable[[Sources, Order, int], Example]] = {
    retr_kv.TASK: retr_kv.retr_kv,
    math_find.TASK: math_find.math_find,
    multi_needle.TASK: multi_needle.multi_needle,
}
"""What makes a task's examples, of any number of turns."""
FILES = {
    "scbench_kv": ("scbench_kv.jsonl",),
    "scbench_mf": ("scbench_mf.jsonl",),
    en_qa.TASK: ("scbench_qa_eng.jsonl", "en_qa.jsonl"),
    kv75.TASK: ("kv75_60.jsonl",),
}
"""Tasks whose rows come from a file of the data folder; the first that is there."""
ALIASES = {"scbench_qa_eng": en_qa.TASK}
TASKS = (*MAKERS, *FILES)


class SCBench:
    """Yields a benchmark's examples; the same arguments yield the same ones."""

    def __init__(self, chat: ChatTemplate, *, data: Path | None, rows: Rows) -> None:
        """Take what every task needs.

        Args:
            chat: of the model; counts the tokens.
            data: folder of data files, and of essays; None: as the environment says.
            rows: how files are read.
        """
        self._sources, self._rows = Sources(chat, data), rows

    def examples(
        self, tasks: Sequence[str], lengths: Sequence[int], num: int, turns: int, seed: int
    ) -> Iterator[Example]:
        """Yield examples, task by task, when they are asked for.

        Args:
            tasks: some of `TASKS`.
            lengths: in tokens, at least one, of what is made; of a file, rows longer than
                the longest are left out.
            num: examples of each task and length; of a file, at most.
            turns: questions of each example; of a file's rows, the first ones.
            seed: of what is made.

        Raises:
            ConfigError: at once for an unknown task or a missing file; naming a bad row, or
                the least length where one is too small.
        """
        known = [_known(task) for task in tasks]
        for task in FILES.keys() & set(known):
            self._file(task)
        if turns < 1:
            raise ConfigError(f"{turns} turns are too few", param="turns")
        return self._examples(known, lengths, num, turns, seed)

    def _examples(
        self, tasks: Sequence[str], lengths: Sequence[int], num: int, turns: int, seed: int
    ) -> Iterator[Example]:
        for task in tasks:
            if task in FILES:
                yield from self._fitting(task, max(lengths), num, turns)
                continue
            for length, number in product(lengths, range(num)):
                yield MAKERS[task](self._sources, Order(task, length, seed, number), turns)

    def _fitting(self, task: str, longest: int, num: int, turns: int) -> Iterator[Example]:
        """Yield a file's first examples that are no longer than the longest length.

        Raises:
            ConfigError: if none is as short.
        """
        kept, too_long = 0, []
        for example in self._read(task, turns):
            size = prompt_tokens(self._sources.chat, example)
            if size > longest:
                too_long.append(size)
                continue
            yield example
            kept += 1
            if kept == num:
                break
        if too_long:
            why = f"rows of {min(too_long)} tokens or more do not fit into {longest}"
            self._leave_out(f"{task}: {why} ({len(too_long)} of them)", kept)

    def _leave_out(self, why: str, kept: int) -> None:
        if not kept:
            raise ConfigError(why, param="lengths")
        self._rows.tell(f"left out, {why}")

    def _read(self, task: str, turns: int) -> Iterator[Example]:
        numbers = count()

        def parse(row: dict[str, Any]) -> Example:
            if task == kv75.TASK:
                return kv75.kv75(row, f"{task}-{next(numbers)}")
            return official.example(row, task, f"{task}-{next(numbers)}", turns)

        return self._rows.read(self._file(task), parse)

    def _file(self, task: str) -> Path:
        paths = (data_file(name, self._sources.data) for name in FILES[task])
        found = next(filter(None, paths), None)
        if found is None:
            names = " or ".join(FILES[task])
            raise ConfigError(
                f"{task} needs {names} in the data folder (--data, {ENVIRONMENT})", param="data"
            )
        return found


def _known(task: str) -> str:
    task = ALIASES.get(task, task)
    if task not in TASKS:
        raise ConfigError(f"no task {task!r}; there are {', '.join(TASKS)}", param="tasks")
    return task
