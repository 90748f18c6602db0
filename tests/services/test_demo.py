"""The demo, as a user runs it: it ends by itself or by Ctrl-C, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import psutil
import pytest
from httpx import Request
from openai import APIConnectionError

from criticalkv.services import demo
from criticalkv.shared.config import load_config
from criticalkv.shared.errors import ConfigError, CriticalKVError
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


def cells(out: str) -> dict[str, list[str]]:
    """The table's rows by their turn; cells of rows that wrap are the first line's."""
    rows: dict[str, list[str]] = {}
    for line in out.splitlines():
        parts = [part.strip() for part in re.split("[│┃|]", line)][1:-1]
        if parts and re.fullmatch("[AB][1-3]", parts[0]):
            rows.setdefault(parts[0], parts)
    return rows


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, f"left behind: {alive}"


def test_a_document_that_does_not_fit_is_refused_at_once(demo_model: LoadedModel) -> None:
    config = load_config(overrides={"model": {"path": demo_model.spec.path}})
    demo.check_length(config, topics["with"])
    with pytest.raises(ConfigError, match=rf"{demo_model.spec.max_positions} positions"):
        demo.check_length(config, "a b c d " * demo_model.spec.max_positions)


def test_an_error_of_the_service_is_one_line(
    monkeypatch: pytest.MonkeyPatch, demo_model: LoadedModel
) -> None:
    def fail(*_: object) -> None:
        raise APIConnectionError(request=Request("GET", "http://127.0.0.1/"))

    monkeypatch.setattr(demo, "show", fail)
    config = load_config(overrides={"model": {"path": demo_model.spec.path}})
    with pytest.raises(CriticalKVError, match="Connection error"):
        demo.run(config, None)


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
    rows = cells(out)
    assert sorted(rows) == ["A1", "A2", "A3", "B1", "B2", "B3"]
    assert all(int(row[3]) > 0 for row in rows.values()), "every turn reads the stored context"
    # Only the first read of a node pulls it.
    assert any(float(row[4].removesuffix(" MB")) > 0 for row in rows.values())
    # Which replica answers is the balancer's choice; what is said must be what was shown.
    replicas = {row[1] for row in rows.values()}
    assert f"Decode replicas used: {len(replicas)}." in " ".join(out.split())
    assert 1 <= len(replicas) <= 2
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
    # On a slow machine the command line may still be importing: then CPython itself ends
    # by the signal. A shell says 130 for both.
    assert process.returncode in (130, -signal.SIGINT)
    assert_gone(seen)
