"""A skip that is not listed fails the run; any skip is told with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skips

ROOT = Path(__file__).resolve().parents[2]
SKIPPING = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("there is no moon")
"""
ALLOWED = "tests/test_it.py::test_skips | no moon | it is not always night\n"


def run(folder: Path, tests: str, allowed: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(tests)
    (folder / skips.LIST).write_text(allowed)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "tests",
    [
        SKIPPING,
        "import pytest\npytest.importorskip('no_such_module')",
        "import pytest\n@pytest.mark.xfail(reason='not yet')\ndef test_it():\n    assert 0",
        "import pytest\n@pytest.mark.skipif(True, reason='never')\ndef test_it():\n    pass",
    ],
    ids=["call", "module", "xfail", "mark"],
)
def test_an_unlisted_skip_fails_the_run(tmp_path: Path, tests: str) -> None:
    done = run(tmp_path, tests, "# nothing\n")
    assert done.returncode == 1, done.stdout
    assert "skipped, but not listed in tests/allowed_skips.txt" in done.stdout


def test_a_listed_skip_is_told_and_passes(tmp_path: Path) -> None:
    done = run(tmp_path, SKIPPING, ALLOWED)
    assert done.returncode == 0, done.stdout
    assert "there is no moon" in done.stdout
    assert "not listed" not in done.stdout


@pytest.mark.parametrize(
    "allowed", [ALLOWED.replace("test_skips", "test_other"), ALLOWED.replace("moon", "sun")]
)
def test_another_test_or_reason_is_not_listed(tmp_path: Path, allowed: str) -> None:
    assert run(tmp_path, SKIPPING, allowed).returncode == 1


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, SKIPPING, "tests/test_it.py::test_skips | no moon\n").returncode != 0


def test_the_list_speaks_of_tests_that_exist() -> None:
    for pattern, _, _ in skips.allowed_skips(ROOT):
        assert (ROOT / pattern.split("::")[0].rstrip("*")).exists()


def test_the_whole_suite_uses_it() -> None:
    text = (ROOT / "tests" / "conftest.py").read_text()
    for name in ("pytest_configure", "pytest_sessionfinish", "pytest_terminal_summary"):
        assert f"{name} = skips.{name}" in text
