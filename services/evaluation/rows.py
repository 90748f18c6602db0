"""Rows of a benchmark's own files, JSON lines or CSV; a bad one is named by its line."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, TypeVar
from zipfile import BadZipFile
from zipfile import Path as ZipPath

from pydantic import ValidationError

from criticalkv.shared.errors import ConfigError

T = TypeVar("T")
BAD = (ValueError, KeyError, TypeError, RecursionError)
"""What is raised for a malformed row; the last of JSON that is nested too deep."""
UNREADABLE = (OSError, EOFError, BadZipFile, zlib.error)
"""What is raised where a file, or a file in an archive, cannot be read on."""


@dataclass(frozen=True)
class Rows:
    """How files are read.

    Attributes:
        skip_bad: leave malformed rows out instead of stopping.
        tell: called with a line about each row that is left out.
        hint: ends the message about a bad row: what its user can do.
    """

    skip_bad: bool = False
    tell: Callable[[str], object] = lambda _: None
    hint: str = " (--skip-bad leaves such rows out)"

    def read(self, path: Path | ZipPath, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield what `parse` makes of each row.

        Args:
            path: of the file, alone or in an archive; empty lines are no rows.
            parse: raises ValueError, KeyError or TypeError for a row that it cannot take.

        Raises:
            ConfigError: naming file and line of the first bad row, unless they are skipped;
                or of what cannot be read.
        """
        for number, line in enumerate(_lines(path.name, lambda: path.open("rb")), 1):
            if not line.strip():
                continue
            try:
                yield parse(_object(line))
            except BAD as error:
                self._refuse(f"{path.name}, line {number}: {reason_of(error)}", error)

    def read_csv(self, path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield what `parse` makes of each row of a CSV file, a map by its first line.

        The same as `read` otherwise; what is no CSV cannot be skipped.
        """
        rows = csv.DictReader(_lines(path.name, lambda: _text(path)))
        for row in _whole(rows, path.name):
            try:
                yield parse(row)
            except BAD as error:
                self._refuse(f"{path.name}, line {rows.line_num}: {reason_of(error)}", error)

    def _refuse(self, what: str, error: Exception) -> None:
        if not self.skip_bad:
            raise ConfigError(what + self.hint, param="data") from error
        self.tell(f"skipped {what}")


def _text(path: Path) -> IO[str]:
    """Open a text as csv wants it; a mark of its byte order is no part of it."""
    return path.open(newline="", encoding="utf-8-sig", errors="replace")


def _lines(name: str, opened: Callable[[], IO[AnyStr]]) -> Iterator[AnyStr]:
    number = 0
    try:
        with opened() as lines:
            for line in lines:
                yield line
                number += 1
    except UNREADABLE as error:
        # What is done with a line happens elsewhere: reading the next one failed.
        why = f"{name}, line {number + 1} cannot be read: {error or type(error).__name__}"
        raise ConfigError(why, param="data") from error


def _object(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"a row is a JSON object, this is {type(row).__name__}")
    _check_text(row)
    return row


def _check_text(row: dict[str, Any]) -> None:
    """Refuse half of a character, which JSON can escape by itself: no tokenizer takes it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no character") from error


def _whole(rows: csv.DictReader[str], name: str) -> Iterator[dict[str, Any]]:
    try:
        yield from rows
    except csv.Error as error:
        # The map's own count is of the row before.
        line = rows.reader.line_num
        raise ConfigError(f"{name}, line {line}: {error}", param="data") from error


def reason_of(error: Exception) -> str:
    """Say what is wrong with a row; pydantic's own text would quote it."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return str(error)
