"""Files of rows: whatever is wrong with one is said with its name and line."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.errors import ConfigError

ROW = b'{"a": "' + b"x" * 1000 + b'"}\n'
ROWS = 40


def archived(path: Path, how: int) -> zipfile.Path:
    """Put a file of rows into an archive; its name stands first, and its bytes after it."""
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("a.jsonl", b"".join(ROW[:8] + b"%4d" % i + ROW[12:] for i in range(ROWS)))
    return zipfile.Path(path) / "a.jsonl"


def rows_of(file: Path | zipfile.Path) -> Iterator[dict[str, Any]]:
    return Rows(skip_bad=True).read(file, lambda row: row)


def test_rows_of_an_archive(tmp_path: Path) -> None:
    assert len(list(rows_of(archived(tmp_path / "a.zip", zipfile.ZIP_DEFLATED)))) == ROWS


@pytest.mark.parametrize("how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_a_damaged_archive_is_named(tmp_path: Path, how: int, at: float) -> None:
    path = tmp_path / "a.zip"
    archived(path, how)
    content, start = bytearray(path.read_bytes()), len("a.jsonl") + 30
    with zipfile.ZipFile(path) as archive:
        size = archive.infolist()[0].compress_size
    place = start + int(size * at)
    content[place : place + 3] = b"\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line \d+ cannot be read: "):
        list(rows_of(zipfile.Path(path) / "a.jsonl"))


def test_an_archive_that_ends_too_early_is_named(tmp_path: Path) -> None:
    file = archived(tmp_path / "a.zip", zipfile.ZIP_STORED)
    rows = rows_of(file)
    assert next(rows)["a"].startswith("x   0x")
    with (tmp_path / "a.zip").open("r+b") as content:
        content.truncate(20_000)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line \d+ cannot be read: "):
        list(rows)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for read in (Rows().read, Rows().read_csv):
        with pytest.raises(
            ConfigError, match=rf"{tmp_path.name}, line 1 cannot be read: .*director"
        ):
            list(read(tmp_path, lambda row: row))


def test_what_is_done_with_a_row_is_not_reading_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW)

    def parse(_: dict[str, Any]) -> None:
        raise OSError("of the parser")

    with pytest.raises(OSError, match="of the parser"):
        list(Rows().read(tmp_path / "a.jsonl", parse))


def test_json_that_is_nested_too_deep_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW + b'{"a": ' + b"[" * 100_000 + b"\n" + ROW)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: .*recursion"):
        list(Rows().read(path, lambda row: row))
    assert len(list(rows_of(path))) == 2


def test_csv_with_a_mark_of_its_byte_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("One,Two\r\n1,2\r\n", encoding="utf-8-sig", newline="")
    assert list(Rows().read_csv(tmp_path / "a.csv", dict)) == [{"One": "1", "Two": "2"}]
