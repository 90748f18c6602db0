"""Skipped tests are told with their reason, and fail the run unless they are listed.

tests/allowed_skips.txt has a line for each that may skip:

    pattern of node ids | part of the reason | why it may
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

LIST = Path("tests", "allowed_skips.txt")
SKIPS = pytest.StashKey[list["Skip"]]()


@dataclass(frozen=True)
class Skip:
    """A test, or a module, that did not run."""

    node_id: str
    reason: str

    def allowed(self, lines: list[list[str]]) -> bool:
        return any(fnmatchcase(self.node_id, line[0]) and line[1] in self.reason for line in lines)


def allowed_skips(root: Path) -> list[list[str]]:
    """Read the list; a line that is not of three parts is an error."""
    file = root / LIST
    text = file.read_text() if file.exists() else ""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = [[part.strip() for part in line.split(" | ")] for line in lines]
    if any(len(line) != 3 or "" in line for line in parts):
        raise pytest.UsageError(f"{LIST} has a line that is not: pattern | reason | why")
    return parts


def _reason(report: Any) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


class Collector:
    """Notes what is skipped, at collection or in a run."""

    def __init__(self, config: pytest.Config) -> None:
        self.skips = config.stash[SKIPS] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.skipped:
            self.skips.append(Skip(report.nodeid, _reason(report)))


def unlisted(config: pytest.Config) -> list[Skip]:
    """What was skipped and may not be."""
    lines = allowed_skips(config.rootpath)
    return [skip for skip in config.stash.get(SKIPS, []) if not skip.allowed(lines)]


def pytest_configure(config: pytest.Config) -> None:
    allowed_skips(config.rootpath)  # a bad line is told before hours of tests
    config.pluginmanager.register(Collector(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    fine = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if unlisted(session.config) and session.exitstatus in fine:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if skips := unlisted(config):
        terminalreporter.section(f"skipped, but not listed in {LIST}", red=True)
        for skip in skips:
            terminalreporter.line(f"{skip.node_id}: {skip.reason}")
