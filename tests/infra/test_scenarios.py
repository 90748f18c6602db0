"""tests/SCENARIOS.md: complete, and of tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "tests" / "SCENARIOS.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if re.match(r"\| S?\d+ \|", line)
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
NAMED = sorted(set(TEST.findall(TEXT)))


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_scenario_and_every_attack_has_one_row() -> None:
    numbers = [row[0] for row in ROWS]
    assert numbers == [*map(str, range(1, 45)), *(f"S{n}" for n in range(1, 17))]


def test_every_row_is_whole() -> None:
    for row in ROWS:
        assert len(row) == 4, row[0]
        assert all(row), row[0]
        tests = row[3] if row[0].startswith("S") else row[2]
        assert TEST.search(tests), f"{row[0]} names no test"


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    assert name in functions(path)


def test_nothing_is_left_open() -> None:
    assert [row[0] for row in ROWS if "TBD" in " ".join(row)] == []
