"""Questions whose answers are in documents: files in SQuAD's and HotpotQA's formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from criticalkv.services.evaluation.case import data_file
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


Parse = Callable[[Any], list[Asked]]


@dataclass(frozen=True)
class Source:
    """Where a task's questions come from.

    Attributes:
        files: names of which the first that is there is read.
        parse: makes questions of what the JSON file holds.
    """

    files: tuple[str, ...]
    parse: Parse


def squad(content: Any) -> list[Asked]:
    """Return the questions that have answers of a file in SQuAD's format."""
    return [
        Asked(
            qa["question"],
            tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])),
            (paragraph["context"],),
            tuple(p["context"] for p in article["paragraphs"] if p is not paragraph),
        )
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if qa["answers"] and not qa.get("is_impossible")
    ]


def hotpot(content: Any) -> list[Asked]:
    """Return the questions of a file in HotpotQA's format.

    Gold are the documents with supporting facts; where a file does not name them, all of
    a question's documents, as in RULER.
    """
    return [_hotpot(row) for row in content]


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
    path = next(filter(None, (data_file(name, data) for name in source.files)), None)
    if path is None:
        names = " or ".join(source.files)
        raise ConfigError(
            f"{task} needs {names} in the folder that --data or CRITICALKV_DATA names",
            param="data",
        )
    return _read(path, source)


@lru_cache(maxsize=len(SOURCES))
def _read(path: Path, source: Source) -> Corpus:
    try:
        asked = source.parse(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path.name} is not in {source.parse.__name__}'s format"
        raise ConfigError(f"{what}: {type(error).__name__} {error}", param="data") from error
    documents = sorted({document for one in asked for document in (*one.gold, *one.near)})
    return Corpus(path.name, tuple(asked), tuple(documents))


def _hotpot(row: dict[str, Any]) -> Asked:
    facts = {title for title, _ in row.get("supporting_facts") or row["context"]}
    documents = {_titled(title, parts): title in facts for title, parts in row["context"]}
    gold = tuple(text for text, has_fact in documents.items() if has_fact)
    near = tuple(text for text, has_fact in documents.items() if not has_fact)
    return Asked(row["question"], (row["answer"],), gold, near)


def _titled(title: str, sentences: Sequence[str]) -> str:
    return f"{title}\n{''.join(sentences)}"
