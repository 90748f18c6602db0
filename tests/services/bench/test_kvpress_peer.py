"""The other library's process, played by a script: it answers, ends, or cannot be started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from criticalkv.services.bench import kvpress_peer as peers
from criticalkv.services.evaluation.prompt import Prompt
from criticalkv.shared.errors import ConfigError

ECHO = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    text = f"{asked['press']} {asked['kept']} {asked['context_ids']} {asked['question_ids']}"
    print(json.dumps({"answer": text, "seconds": asked["max_tokens"] / 10}), flush=True)
"""
PROMPT = Prompt((1, 2, 3), (4, 5))


def played(folder: Path, script: str) -> Path:
    """An interpreter that runs `script` whatever it is told to run."""
    (folder / "script.py").write_text(script)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'script.py'}\n")
    python.chmod(0o755)
    return python


def test_it_is_told_the_same_tokens_and_the_kept_fraction(tmp_path: Path) -> None:
    with peers.kvpress_peer(played(tmp_path, ECHO), tmp_path, 2) as peer:
        first = peer.answer(PROMPT, 7, "adakv", 0.25)
        second = peer.answer(PROMPT, 9, "snapkv", 0.5)
    assert first == peers.PeerAnswer("adakv 0.25 [1, 2, 3] [4, 5]", 0.7)
    assert second == peers.PeerAnswer("snapkv 0.5 [1, 2, 3] [4, 5]", 0.9)


def test_one_that_ends_is_told(tmp_path: Path) -> None:
    python = played(tmp_path, 'import json\nprint(json.dumps({"ready": True}), flush=True)\n')
    with peers.kvpress_peer(python, tmp_path, 2) as peer, pytest.raises(ConfigError, match="ended"):
        peer.answer(PROMPT, 1, "adakv", 0.5)


def test_one_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "START_S", 0.2)
    python = played(tmp_path, "import time\ntime.sleep(60)\n")
    with (
        pytest.raises(ConfigError, match="said nothing"),
        peers.kvpress_peer(python, tmp_path, 2),
    ):
        pass


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no-python"
    with pytest.raises(ConfigError, match="no-python"), peers.kvpress_peer(missing, tmp_path, 2):
        pass
