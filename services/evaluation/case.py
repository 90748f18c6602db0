"""A case: a context that is compressed before its question is known, and the answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.chat import ChatTemplate, Message, Part
from criticalkv.shared.python_reference import python_reference

ENVIRONMENT = "CRITICALKV_DATA"
ESSAYS = "inaugural.txt"


@dataclass(frozen=True)
class Case:
    """Token ids in the order in which the model runs them.

    Attributes:
        name: kind and seed.
        context_ids: compressed without knowing the rest.
        question_ids: the question, up to where the answer begins.
        answer_ids: the expected answer.
    """

    name: str
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def context_ids(chat: ChatTemplate, text: str) -> list[int]:
    """Return the ids of a user message that is still open, up to its text's end."""
    pieces = chat.render([Message("user", (Part(text),))], add_generation_prompt=False)
    last = max(i for i, piece in enumerate(pieces) if piece.kind == "content")
    return [token for piece in pieces[: last + 1] for token in piece.ids]


def question_ids(chat: ChatTemplate, question: str, answer_prefix: str = "") -> list[int]:
    """Return the ids that end the open message with a question and begin the answer."""
    pieces = chat.continue_(("user",), True, [Message("user", (Part(question),))])
    return [t for piece in pieces for t in piece.ids] + chat.encode_content(answer_prefix)


def data_folder(folder: Path | None) -> Path | None:
    """Return the folder of data files: `folder`, else what $CRITICALKV_DATA names.

    Raises:
        ConfigError: if one is named but is none.
    """
    named = folder or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if named is not None and not named.is_dir():
        raise ConfigError(f"{named} is no folder (--data, {ENVIRONMENT})", param="data")
    return named


def data_file(name: str, folder: Path | None) -> Path | None:
    """Find an optional data file in `folder`, or in $CRITICALKV_DATA.

    Raises:
        ConfigError: if the folder is named but is none.
    """
    named = data_folder(folder)
    path = named / name if named else None
    return path if path and path.is_file() else None


def essays_text(data: Path | None) -> tuple[str, str]:
    """Return the name and the text of the essays in `data`, or of Python's language reference.

    Raises:
        ConfigError: if they cannot be read.
    """
    path = data_file(ESSAYS, data)
    return (path.name, read_text(path)) if path else ("pydoc_data.topics", python_reference())


def read_text(path: Path) -> str:
    """Read the user's text.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is no readable text: {error}", param="essays") from error


def shorten(sentences: Sequence[str], chat: ChatTemplate, tokens: int) -> list[str]:
    """Return the leading sentences that fit into `tokens`, joined by spaces."""
    kept, used = [], 0
    for sentence in sentences:
        used += len(chat.encode_content(" " + sentence))
        if used > tokens:
            break
        kept.append(sentence)
    return kept
