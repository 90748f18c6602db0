"""LongBench's 16 English datasets, from local files or from Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any
from zipfile import Path as ZipPath

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.longbench.rows import example
from criticalkv.services.evaluation.longbench.source import Source
from criticalkv.services.evaluation.longbench.templates import TEMPLATES
from criticalkv.services.evaluation.longbench.truncation import fit
from criticalkv.services.evaluation.metrics.registry import METRICS
from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

TASKS = tuple(TEMPLATES)
"""Datasets as LongBench spells them, in its order."""


class LongBench:
    """Yields a benchmark's rows in its prompts; the same files yield the same examples."""

    def __init__(
        self,
        chat: ChatTemplate,
        max_positions: int,
        *,
        data: Path | None,
        rows: Rows,
        online: bool = True,
    ) -> None:
        """Take what every task needs.

        Args:
            chat: of the model; its template is always used, and it counts the tokens.
            max_positions: of the model; longer prompts lose the middle of their context.
            data: folder of data files; None: as the environment says.
            rows: how files are read; is told of each context that was cut.
            online: whether files that the folder lacks may be fetched.
        """
        self._chat, self._max_positions = chat, max_positions
        self._rows, self._source = rows, Source(data, online)

    def examples(self, tasks: Sequence[str], num: int | None) -> Iterator[Example]:
        """Yield examples, task by task, when they are asked for.

        Args:
            tasks: some of `TASKS`.
            num: first rows of each; None: all.

        Raises:
            ConfigError: at once for an unknown task, a file or a package that is missing;
                naming a bad row, later.
        """
        for task in tasks:
            _check(task)
        return self._examples(self._source.files(tasks), num)

    def _examples(self, files: Mapping[str, Path | ZipPath], num: int | None) -> Iterator[Example]:
        for task, path in files.items():
            yield from islice(self._read(task, path), num)

    def _read(self, task: str, path: Path | ZipPath) -> Iterator[Example]:
        numbers = count()

        def parse(row: dict[str, Any]) -> Example:
            whole = example(row, task, f"{task}-{next(numbers)}")
            fitting, lost = fit(self._chat, whole, self._max_positions)
            if lost:
                self._rows.tell(f"{whole.name} lost {lost} tokens from the middle of its context")
            return fitting

        return self._rows.read(path, parse)


def _check(task: str) -> None:
    """Refuse an unknown task, and one whose metric needs a package that is missing."""
    if task not in TEMPLATES:
        raise ConfigError(f"no task {task!r}; there are {', '.join(TASKS)}", param="tasks")
    metric = TEMPLATES[task].metric
    METRICS[metric]("", Question("", ("Paragraph 1",), metric, 1))
