"""RULER's own files: rows of `input` and `outputs`, cut into context, question and prefix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, StrictInt, StrictStr

from criticalkv.services.evaluation.example import Example, Question
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.evaluation.ruler import (
    common_words,
    frequent_words,
    needle_text,
    qa,
    variables,
)
from criticalkv.services.evaluation.ruler.suite import known
from criticalkv.shared.errors import ConfigError

LONGEST_TAIL = 10_000
"""Characters of a question and its answer's prefix, at most."""
TEXTS = ("{keys}", "{query}")
"""Fields that are not one word."""
LAYOUTS = ("{task}/validation.jsonl", "{task}.jsonl")


class Row(BaseModel):
    """A line of a file, as RULER writes it.

    Attributes:
        answer_prefix: None if `input` ends with it.
    """

    index: StrictInt
    input: StrictStr
    outputs: list[StrictStr] = Field(min_length=1)
    answer_prefix: StrictStr | None = None


@dataclass(frozen=True)
class Template:
    """How the texts of a task are made; each in one or more forms.

    Attributes:
        start: of the context.
        question: with what separates it from the context.
        prefix: of the answer.
        metric, max_tokens: of a question.
    """

    start: Sequence[str]
    question: Sequence[str]
    prefix: Sequence[str]
    metric: str
    max_tokens: int

    @cached_property
    def begins(self) -> re.Pattern[str]:
        """What an `input` begins with."""
        return re.compile(rf"\s*{_any_of(self.start)}")

    @cached_property
    def asks(self) -> re.Pattern[str]:
        """What a question begins with."""
        return re.compile(_any_of([text.partition("{")[0] for text in self.question]))

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """Groups a question and the answer's prefix; together they end an `input`."""
        prefix = rf"(?:{_any_of(self.prefix)}\s*)?"
        return re.compile(f"({_any_of(self.question)})({prefix})", re.DOTALL)


def ruler_rows(
    folder: Path, tasks: Iterable[str], rows: Rows, num: int | None = None
) -> Iterator[Example]:
    """Yield the examples of RULER's files of some tasks.

    Args:
        folder: has FOLDER/TASK/validation.jsonl or FOLDER/TASK.jsonl.
        tasks: of RULER, in the order asked for.
        rows: what happens to malformed ones.
        num: most examples of each task; all if it is None.

    Raises:
        ConfigError: at once for a task there is not, or a missing file; later naming file
            and line of a row that is not its task's.
    """
    paths = [(task, _path(folder, task)) for task in known(tasks)]
    return (
        example
        for task, path in paths
        for example in islice(rows.read(path, partial(_example, task, set())), num)
    )


def found_tasks(folder: Path, tasks: Iterable[str]) -> list[str]:
    """Return the tasks that a folder has files of.

    Raises:
        ConfigError: if there are none.
    """
    found = [task for task in tasks if _found(folder, task)]
    if not found:
        raise ConfigError(f"{folder.name} has no TASK.jsonl of RULER", param="rows")
    return found


def _found(folder: Path, task: str) -> Path | None:
    paths = (folder / layout.format(task=task) for layout in LAYOUTS)
    return next((path for path in paths if path.is_file()), None)


def _path(folder: Path, task: str) -> Path:
    path = _found(folder, task)
    if path is None:
        names = [layout.format(task=task) for layout in LAYOUTS]
        raise ConfigError(f"{folder.name} has neither {names[0]} nor {names[1]}", param="data")
    return path


def _example(task: str, seen: set[int], fields: dict[str, Any]) -> Example:
    row = Row.model_validate(fields)
    if row.index in seen:
        raise ValueError(f"index {row.index} is there twice")
    seen.add(row.index)
    template = TEMPLATES[task.partition("_")[0]]
    context, question, prefix = _cut(template, row.input)
    if prefix and row.answer_prefix is not None:
        raise ValueError("the answer prefix is in input and in its own field")
    asked = Question(
        text=question,
        references=tuple(row.outputs),
        metric=template.metric,
        max_tokens=template.max_tokens,
        answer_prefix=prefix if row.answer_prefix is None else row.answer_prefix,
    )
    return Example(task, f"{task}-{row.index}", context, (asked,))


def _cut(template: Template, text: str) -> tuple[str, str, str]:
    """Return context, question and answer prefix of an `input`.

    Raises:
        ValueError: if it is not what the template makes: of another task, cut off, or with
            the chat template of some model around it.
    """
    tail = max(0, len(text) - LONGEST_TAIL)
    asked = [match.start() for match in template.asks.finditer(text, tail)]
    end = template.ends.fullmatch(text, asked[-1]) if asked else None
    if end is None or template.begins.match(text) is None:
        raise ValueError(
            "input does not begin and end as this task's does (--model_template_type base?)"
        )
    return text[: asked[-1]], end[1], end[2]


def _both(template: str) -> tuple[str, str]:
    """Return a needle template's plural and singular."""
    return template, needle_text.singular(template)


def _any_of(templates: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(_regex, templates))})"


def _regex(template: str) -> str:
    """Match a template's text.

    One space may stand for any white space: RULER's --remove_newline_tab.
    """
    parts = re.split(r"(\{\w+\}|\s+)", template.rstrip())
    return "".join(map(_part, parts))


def _part(part: str) -> str:
    if part.startswith("{"):
        return ".+?" if part in TEXTS else r"\w+"
    exact = re.escape(part)
    # Two ways to match one space would be 2ⁿ ways to fail at n of them.
    return f"(?:{exact}| )" if part.isspace() and part != " " else exact


TEMPLATES = {
    "niah": Template(
        _both(needle_text.INSTRUCTION),
        _both(needle_text.QUESTION),
        _both(needle_text.PREFIX),
        needle_text.METRIC,
        needle_text.MAX_TOKENS,
    ),
    **{
        name: Template(
            (task.INSTRUCTION,), (task.QUESTION,), (task.PREFIX,), task.METRIC, task.MAX_TOKENS
        )
        for name, task in (
            ("vt", variables),
            ("cwe", common_words),
            ("fwe", frequent_words),
            ("qa", qa),
        )
    },
}
"""By what a task's name begins with."""
