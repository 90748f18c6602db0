"""Fuzz what hostile peers reach, guided by coverage: one process per target.

    python infra/fuzz/run.py [--seconds 60] [--target NAME]…

Needs `pip install atheris`. What makes a target fail is kept in the folder that is named
then; exit status 1. The targets are those of the tests (tests/support/fuzz_targets.py).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import atheris

ROOT = Path(__file__).resolve().parents[2]
MEMORY_MB = 2048
LONGEST = 65536  # bytes of one input


def targets() -> dict[str, Any]:
    """Import the targets, and with them what they reach, instrumented."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    # Ours only: torch and the rest would take minutes.
    with atheris.instrument_imports(include=["criticalkv"]):
        import fuzz_targets
    found: dict[str, Any] = fuzz_targets.TARGETS
    return found


def fuzz(name: str, target: Any, seconds: int) -> bool:
    """Fuzz one target in a process of its own; return whether it held."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    pid = os.fork()
    if not pid:
        _child(target, seconds, folder)
    _, status = os.waitpid(pid, 0)
    log = (folder / "log").read_text(errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", log)
    print(f"{name}: {'FAILED' if status else 'ok'}, {runs[1] if runs else 'no'} runs", flush=True)
    if status:
        print(f"{log[-3000:]}\ninputs are kept in {folder}", flush=True)
    return not status


def _child(target: Any, seconds: int, folder: Path) -> NoReturn:
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    options = {
        "max_total_time": seconds,
        "max_len": LONGEST,
        "rss_limit_mb": MEMORY_MB,
        "timeout": 60,
        "print_final_stats": 1,
        "artifact_prefix": f"{folder}/",
    }
    words = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *words, str(corpus)], target.run)
    atheris.Fuzz()  # ends the process
    raise SystemExit


def main() -> int:
    """Fuzz the targets in turn; return the exit status."""
    parser = argparse.ArgumentParser(description="Fuzz what hostile peers reach.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    given = parser.parse_args()
    found = targets()
    failed = 0
    for name in given.target or found:
        failed += not fuzz(name, found[name], given.seconds)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
