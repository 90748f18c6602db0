"""Questions whose answers are in documents: files in SQuAD's and HotpotQA's formats."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StrictInt, StrictStr, TypeAdapter

from criticalkv.services.evaluation.case import ENVIRONMENT, data_file
from criticalkv.services.evaluation.rows import reason_of
from criticalkv.shared.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """A question of a file.

    Attributes:
        answers: each of them is right.
        gold: documents that answer it.
        near: documents that go with it and do not answer it.
    """

    query: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """A file's questions and all its documents, each once, sorted."""

    name: str
    asked: tuple[Asked, ...]
    documents: tuple[str, ...]


Answer = Annotated[StrictStr, Field(min_length=1)]
"""An empty one would be part of whatever is said."""


class _SquadAnswer(BaseModel):
    text: Answer


class _SquadQuestion(BaseModel):
    question: StrictStr
    answers: list[_SquadAnswer]
    is_impossible: bool = False


class _SquadParagraph(BaseModel):
    context: StrictStr
    qas: list[_SquadQuestion]


class _SquadArticle(BaseModel):
    paragraphs: list[_SquadParagraph]


class _Squad(BaseModel):
    data: list[_SquadArticle]


class _Hotpot(BaseModel):
    """A question; documents are titles and sentences, facts titles and sentence numbers."""

    question: StrictStr
    answer: Answer
    context: list[tuple[StrictStr, list[StrictStr]]] = Field(min_length=1)
    supporting_facts: list[tuple[StrictStr, StrictInt]] | None = None


_HOTPOT = TypeAdapter(list[_Hotpot])
Parse = Callable[[bytes], list[Asked]]


@dataclass(frozen=True)
class Source:
    """Where a task's questions come from.

    Attributes:
        files: names of which the first that is there is read.
        parse: makes questions of a JSON file's bytes; ValueError if they are of another format.
    """

    files: tuple[str, ...]
    parse: Parse


def squad(content: bytes) -> list[Asked]:
    """Return the questions that have answers of a file in SQuAD's format."""
    return [
        Asked(
            qa.question,
            tuple(dict.fromkeys(answer.text for answer in qa.answers)),
            (paragraph.context,),
            tuple(p.context for p in article.paragraphs if p is not paragraph),
        )
        for article in _Squad.model_validate_json(content).data
        for paragraph in article.paragraphs
        for qa in paragraph.qas
        if qa.answers and not qa.is_impossible
    ]


def hotpot(content: bytes) -> list[Asked]:
    """Return the questions of a file in HotpotQA's format.

    Gold are the documents with supporting facts; where a file does not name them, all of
    a question's documents, as in RULER.
    """
    return [_hotpot(row, number) for number, row in enumerate(_HOTPOT.validate_json(content))]


SOURCES = {
    "qa_1": Source(("squad.json", "xquad_en.json"), squad),
    "qa_2": Source(("hotpotqa.json", "hotpotqa_100.json"), hotpot),
}


def corpus(task: str, data: Path | None) -> Corpus:
    """Return a task's questions; a file is read once.

    Raises:
        ConfigError: saying which file to put where, or what is wrong with it.
    """
    source = SOURCES[task]
    path = _path(source, data)
    if path is None:
        raise ConfigError(_needs(task, source), param="data")
    return _read(path, source)


def lacking(task: str, data: Path | None) -> str | None:
    """Say which file a task needs that is not there; None if there is none such."""
    source = SOURCES.get(task)
    return None if source is None or _path(source, data) else _needs(task, source)


def _needs(task: str, source: Source) -> str:
    names = " or ".join(source.files)
    return f"{task} needs {names} in the folder that --data or {ENVIRONMENT} names"


def _path(source: Source, data: Path | None) -> Path | None:
    return next(filter(None, (data_file(name, data) for name in source.files)), None)


@lru_cache(maxsize=len(SOURCES))
def _read(path: Path, source: Source) -> Corpus:
    try:
        asked = source.parse(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (ValueError, OSError) as error:
        what = f"{path.name} is not in {source.parse.__name__}'s format"
        raise ConfigError(f"{what}: {reason_of(error)}", param="data") from error
    documents = sorted({document for one in asked for document in (*one.gold, *one.near)})
    return Corpus(path.name, tuple(asked), tuple(documents))


def _hotpot(row: _Hotpot, number: int) -> Asked:
    facts = {title for title, _ in row.supporting_facts or row.context}
    documents = {_titled(title, parts): title in facts for title, parts in row.context}
    gold = tuple(text for text, has_fact in documents.items() if has_fact)
    near = tuple(text for text, has_fact in documents.items() if not has_fact)
    if not gold:
        raise ValueError(f"{number}.supporting_facts: none is of the question's documents")
    return Asked(row.question, (row.answer,), gold, near)


def _titled(title: str, sentences: Sequence[str]) -> str:
    return f"{title}\n{''.join(sentences)}"
