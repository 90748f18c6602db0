"""The coverage-guided harness runs, and finds what is planted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import TARGETS

pytest.importorskip("atheris")
RUN = Path(__file__).resolve().parents[2] / "infra" / "fuzz" / "run.py"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=cwd)


def test_every_target_holds_for_two_seconds() -> None:
    done = run("--seconds", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    runs = dict(re.findall(r"^(\w+): ok, (\d+) runs$", done.stdout, re.M))
    assert set(runs) == set(TARGETS)
    assert min(map(int, runs.values())) > 100


PLANTED = """
import runpy, sys
sys.argv = ["run.py", "--seconds", "20", "--target", "frame"]
run = runpy.run_path({path!r}, run_name="run")
def bad(data):
    if data[:2] == b"\\x7a\\x01":
        raise IndexError("planted")
found = run["targets"]()
sys.exit(int(not run["fuzz"]("frame", type(found["frame"])(bad, (b"\\x7a\\x00",)), 20)))
"""


def test_a_planted_defect_is_found() -> None:
    code = PLANTED.format(path=str(RUN))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    assert "planted" in done.stdout
