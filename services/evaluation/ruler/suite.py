"""RULER's tasks, and their examples at any length (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.ruler.common_words import common_words
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
            ConfigError: at once for a task there is not; for a length that is too short,
                naming the least; for a missing file of data.
        """
        wanted, sizes = known(tasks), list(lengths)
        return (
            TASKS[task](self._sources, Order(task, length, seed, number))
            for task in wanted
            for length in sizes
            for number in range(num)
        )


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
