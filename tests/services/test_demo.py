"""The demo, as a user runs it: it ends by itself or by Ctrl-C, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import psutil
import pytest

from criticalkv.shared.model.loader import LoadedModel


def start(document: Path, model: LoadedModel) -> subprocess.Popen[str]:
    document.write_text(topics["with"][:1500] + "\n\n")
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "criticalkv.services.cli",
            "demo",
            "--document",
            str(document),
            "--model",
            model.spec.path,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, f"left behind: {alive}"


def test_the_demo_prints_its_table_and_leaves_nothing(
    tmp_path: Path, demo_model: LoadedModel
) -> None:
    process = start(tmp_path / "document.txt", demo_model)
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        seen.update({p.pid: p for p in family(process.pid)})
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            continue
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    for column in ("turn", "replica", "TTFT", "cached", "pulled", "tier", "kept", "tok/s"):
        assert column in out
    for turn in ("A1", "A2", "A3", "B1", "B2", "B3"):
        assert turn in out
    assert "Cold prefill" in out
    assert len(seen) > 5
    assert_gone(list(seen.values()))


@pytest.mark.parametrize("wait_s", [4, 15])
def test_ctrl_c_leaves_nothing(wait_s: float, tmp_path: Path, demo_model: LoadedModel) -> None:
    process = start(tmp_path / "document.txt", demo_model)
    time.sleep(wait_s)
    seen = family(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130
    assert_gone(seen)
