"""The other library's process, played by a script: it answers, ends, or cannot be started."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tiny_models import make_model

from criticalkv.services.bench import kvpress_peer as peers
from criticalkv.services.evaluation.prompt import Prompt
from criticalkv.shared.errors import ConfigError

READY = """
import json, os, subprocess, sys
given = dict(word.removeprefix("--").split("=") for word in sys.argv[2:])
ready = {"presses": ["snapkv"], "device": given["device"], "dtype": given["dtype"]}
print(json.dumps(ready | {"versions": {"kvpress": given["threads"]}}), flush=True)
"""
ECHO = (
    READY
    + """
for line in sys.stdin:
    asked = json.loads(line)
    text = f"{asked['press']} {asked['kept']} {asked['context_ids']} {asked['question_ids']}"
    print(json.dumps({"answer": text, "seconds": asked["max_tokens"] / 10}), flush=True)
"""
)
FAMILY = (
    READY
    + """
child = subprocess.Popen(["sleep", "600"])  # which holds this one's standard output
sys.stdin.readline()
print(json.dumps({"answer": f"{os.getpid()} {child.pid}", "seconds": 1}), flush=True)
sys.stdin.readline()
"""
)
PROMPT = Prompt((1, 2, 3), (4, 5))
SPEC = replace(make_model(num_layers=1).spec, path="a-model", device="cuda", dtype="bfloat16")


def played(folder: Path, script: str) -> Path:
    """An interpreter that runs `script` whatever it is told to run."""
    (folder / "script.py").write_text(script)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "script.py"} "$@"\n')
    python.chmod(0o755)
    return python


def is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_it_is_told_the_same_tokens_and_the_kept_fraction(tmp_path: Path) -> None:
    with peers.kvpress_peer(played(tmp_path, ECHO), SPEC, 2) as peer:
        first = peer.answer(PROMPT, 7, "adakv", 0.25)
        second = peer.answer(PROMPT, 9, "snapkv", 0.5)
    assert first == peers.PeerAnswer("adakv 0.25 [1, 2, 3] [4, 5]", 0.7)
    assert second == peers.PeerAnswer("snapkv 0.5 [1, 2, 3] [4, 5]", 0.9)


def test_it_runs_where_our_model_runs_and_says_so(tmp_path: Path) -> None:
    with peers.kvpress_peer(played(tmp_path, ECHO), SPEC, 2) as peer:
        assert peer.ready == peers.Ready(("snapkv",), "cuda", "bfloat16", {"kvpress": "2"})


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    with peers.kvpress_peer(played(tmp_path, FAMILY), SPEC, 2) as peer:
        own, child = map(int, peer.answer(PROMPT, 1, "snapkv", 0.5).answer.split())
        assert is_running(own)
        assert is_running(child)
    assert not psutil.pid_exists(own)
    until = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("line", ["Loading weights", '{"answer": 1}', "[]"])
def test_a_line_that_is_no_answer_is_told(tmp_path: Path, line: str) -> None:
    python = played(tmp_path, f"{READY}\nsys.stdin.readline()\nprint({line!r}, flush=True)\n")
    with (
        peers.kvpress_peer(python, SPEC, 2) as peer,
        pytest.raises(ConfigError, match="no PeerAnswer") as caught,
    ):
        peer.answer(PROMPT, 1, "snapkv", 0.5)
    assert line not in caught.value.message  # it may be an answer


def test_one_that_ends_is_told(tmp_path: Path) -> None:
    python = played(tmp_path, READY)
    with peers.kvpress_peer(python, SPEC, 2) as peer, pytest.raises(ConfigError, match="ended"):
        peer.answer(PROMPT, 1, "adakv", 0.5)


def test_one_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "START_S", 0.2)
    python = played(tmp_path, "import time\ntime.sleep(60)\n")
    with (
        pytest.raises(ConfigError, match="said nothing"),
        peers.kvpress_peer(python, SPEC, 2),
    ):
        pass


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no-python"
    with pytest.raises(ConfigError, match="no-python"), peers.kvpress_peer(missing, SPEC, 2):
        pass
