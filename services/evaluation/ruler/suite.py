"""RULER's tasks, and their examples at any length (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.common_words import common_words
from criticalkv.services.evaluation.ruler.corpus import lacking
from criticalkv.services.evaluation.ruler.frequent_words import frequent_words
from criticalkv.services.evaluation.ruler.niah import SETTINGS, niah
from criticalkv.services.evaluation.ruler.order import Order
from criticalkv.services.evaluation.ruler.qa import qa
from criticalkv.services.evaluation.ruler.sources import Sources
from criticalkv.services.evaluation.ruler.variables import variables
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate

Maker = Callable[[Sources, Order], Example]
TASKS: dict[str, Maker] = {
    **dict.fromkeys(SETTINGS, niah),
    "vt": variables,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": qa,
    "qa_2": qa,
}
"""What makes each task's examples, from nothing but an order and the user's texts."""


class Ruler:
    """Makes examples: each depends on its task, length, seed and number alone."""

    def __init__(
        self, chat: ChatTemplate, *, data: Path | None = None, essays: Path | None = None
    ) -> None:
        """Take what lengths are counted with, and where texts are.

        Args:
            chat: the model's template and tokenizer.
            data: folder of data files.
            essays: the user's text for haystacks, or a folder of `*.txt`.
        """
        self._sources = Sources(chat, data, essays)

    def examples(
        self, tasks: Iterable[str], lengths: Iterable[int], num: int, seed: int
    ) -> Iterator[Example]:
        """Yield `num` examples of each task at each length, when they are asked for.

        Args:
            lengths: in tokens, prompt and answer together.

        Raises:
            ConfigError: at once for a task there is not, or a missing file of data; and for
                a length that is too short for the last example, naming the least, or a file
                without so many questions. Later for what is a little longer than the last.
        """
        wanted = known(tasks)
        for task in wanted:
            if why := lacking(task, self._sources.data):
                raise ConfigError(why, param="data")
        pairs = list(product(wanted, lengths))
        last = {pair: self._example(*pair, seed, num - 1) for pair in pairs}
        return (
            last[pair] if number == num - 1 else self._example(*pair, seed, number)
            for pair in pairs
            for number in range(num)
        )

    def possible(
        self, lengths: Iterable[int], num: int, seed: int, tell: Callable[[str], object]
    ) -> Iterator[Example]:
        """Yield `num` examples of each task there is, at each length at which it can be made.

        Args:
            lengths: as in `examples`.
            tell: called with a line about each task and length that is left out: its file is
                missing, or it does not fit.

        Raises:
            ConfigError: for all else that is wrong, such as a malformed file.
        """
        for task, length in product(TASKS, lengths):
            made = self._every(task, length, num, seed)
            if isinstance(made, str):
                tell(f"left out, {task} of {length} tokens: {made}")
            else:
                yield from made

    def _every(self, task: str, length: int, num: int, seed: int) -> list[Example] | str:
        """Make a task's examples of a length, or say why there are none."""
        if why := lacking(task, self._sources.data):
            return why
        try:
            return [self._example(task, length, seed, number) for number in range(num)]
        except ConfigError as error:
            if error.param != "lengths":
                raise
            return error.message

    def _example(self, task: str, length: int, seed: int, number: int) -> Example:
        return TASKS[task](self._sources, Order(task, length, seed, number))


def known(tasks: Iterable[str]) -> list[str]:
    """Return the tasks.

    Raises:
        ConfigError: for one that RULER does not have.
    """
    wanted = list(tasks)
    unknown = [task for task in wanted if task not in TASKS]
    if unknown:
        names = ", ".join(TASKS)
        raise ConfigError(f"RULER has no task {unknown[0]}; it has {names}", param="tasks")
    return wanted
