"""Rows of a benchmark's own files, JSON lines or CSV; a bad one is named by its line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zipfile import Path as ZipPath

from pydantic import ValidationError

from criticalkv.shared.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """How files are read.

    Attributes:
        skip_bad: leave malformed rows out instead of stopping.
        tell: called with a line about each row that is left out.
    """

    skip_bad: bool = False
    tell: Callable[[str], object] = lambda _: None

    def read(self, path: Path | ZipPath, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield what `parse` makes of each row.

        Args:
            path: of the file, alone or in an archive; empty lines are no rows.
            parse: raises ValueError, KeyError or TypeError for a row that it cannot take.

        Raises:
            ConfigError: naming file and line of the first bad row, unless they are skipped.
        """
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield parse(_object(line))
                except (ValueError, KeyError, TypeError) as error:
                    self._refuse(f"{path.name}, line {number}: {_reason(error)}", error)

    def read_csv(self, path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield what `parse` makes of each row of a CSV file, a map by its first line.

        The same as `read` otherwise.
        """
        with path.open(newline="", encoding="utf-8", errors="replace") as lines:
            rows = csv.DictReader(lines)
            for row in rows:
                try:
                    yield parse(row)
                except (ValueError, KeyError, TypeError) as error:
                    self._refuse(f"{path.name}, line {rows.line_num}: {_reason(error)}", error)

    def _refuse(self, what: str, error: Exception) -> None:
        if not self.skip_bad:
            raise ConfigError(f"{what} (--skip-bad leaves such rows out)", param="data") from error
        self.tell(f"skipped {what}")


def _object(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"a row is a JSON object, this is {type(row).__name__}")
    return row


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
