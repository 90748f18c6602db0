"""A run's journal: its settings, then a line for every finished cell. A killed run goes on.

JSON lines, only ever appended to. Which policies, tiers and examples a run has is not among
its settings: they may grow. An example is known by its name and the digest of its texts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from criticalkv.services.evaluation.column import Column
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.record import Key, Record, digest
from criticalkv.shared.closing import Closing
from criticalkv.shared.errors import ConfigError

FORMAT = 1


class Journal(Closing):
    """An open journal; nobody else writes to its file. A context manager."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Begin a journal, or go on with one.

        Args:
            path: of the file.
            settings: what every line depends on; values of JSON.

        Raises:
            ConfigError: if the file is no journal, has cells of a run with other settings, is
                damaged before its last line, or is being written to.
        """
        self.path = path
        self._records: dict[Key, Record] = {}
        self._settings = json.loads(json.dumps({"format": FORMAT, **settings}))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def find(self, example: Example, column: Column) -> Record | None:
        """Return the record of a finished cell.

        Raises:
            ConfigError: if it is of an example with this name and other texts.
        """
        key = (example.name, column.canonical, column.cell.tier, column.below)
        found = self._records.get(key)
        if found is not None and found.digest != digest(example):
            raise ConfigError(
                f"{self.path}: {example.name} was another text there: its data, its turns or how "
                "it is made have changed; give another --out",
                param="out",
            )
        return found

    def add(self, record: Record) -> None:
        """Append a line; it is on disk when this returns."""
        self._append(record.model_dump_json())
        self._records[record.key] = record

    def _append(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run is writing to {self.path}; give another --out", param="out"
            ) from error

    def _read(self) -> None:
        header = json.dumps(self._settings)
        lines = _whole_lines(self._file)
        if not lines:
            self._begin(header)
            return
        there = self._header(lines[0])
        if len(lines) == 1 and "command" in there:
            _cut(self._file, 0)  # nothing was finished: nothing can be mixed up
            self._append(header)
            return
        self._compare(there)
        for number, line in enumerate(lines[1:], 2):
            record = self._parsed(number, line)
            self._records[record.key] = record
        _cut(self._file, sum(map(len, lines)))

    def _begin(self, header: str) -> None:
        self._file.seek(0)
        if not header.encode().startswith(self._file.read()):
            raise self._foreign()
        _cut(self._file, 0)
        self._append(header)

    def _header(self, line: bytes) -> dict[str, Any]:
        try:
            there = json.loads(line)
        except ValueError as error:
            raise self._foreign() from error
        if not isinstance(there, dict) or "format" not in there:
            raise self._foreign()
        return there

    def _compare(self, there: Mapping[str, Any]) -> None:
        names = dict.fromkeys([*self._settings, *there])
        other = [name for name in names if there.get(name) != self._settings.get(name)]
        if other:
            differ = "; ".join(
                f"{name} {_short(there.get(name))} there, {_short(self._settings.get(name))} here"
                for name in other
            )
            raise ConfigError(
                f"{self.path} is of a run with other settings ({differ}); give another --out",
                param="out",
            )

    def _parsed(self, number: int, line: bytes) -> Record:
        try:
            return Record.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(f"{self.path}, line {number} is damaged", param="out") from error

    def _foreign(self) -> ConfigError:
        return ConfigError(f"{self.path} is no journal of a run; give another --out", param="out")


def _whole_lines(file: BinaryIO) -> list[bytes]:
    """Read a file's lines without a last one that was torn while it was written."""
    file.seek(0)
    return [line for line in file if line.endswith(b"\n")]


def _cut(file: BinaryIO, size: int) -> None:
    file.truncate(size)
    file.seek(0, os.SEEK_END)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
