"""One process asks another for decode's load, by a signal and a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from criticalkv.services.chaos import decode_load

# Ray's own modules are not needed to see who asks whom.
CHILD = """
import json, pathlib, sys, threading, types
from criticalkv.services.chaos import decode_load

class Answer:
    def __init__(self, running):
        self.running = running
    def result(self, timeout_s):
        if self.running is None:
            raise TimeoutError
        return {"running": self.running, "waiting": 2, "used_bytes": 5}

says = json.loads(sys.argv[2])
calls = iter(says * 9)
method = types.SimpleNamespace(remote=lambda: Answer(next(calls)))
handle = types.SimpleNamespace(record_autoscaling_stats=method)
ray, broken = types.ModuleType("ray"), types.ModuleType("ray.exceptions")
ray.serve = types.SimpleNamespace(get_deployment_handle=lambda *names: handle)
broken.RayError = type("RayError", (Exception,), {})
sys.modules.update({"ray": ray, "ray.exceptions": broken})
decode_load.answer_signals(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("says", "heard"), [("[0, 3]", {"running": 3, "waiting": 2}), ("[null]", None)]
)
def test_the_busiest_replica_is_told(
    tmp_path: Path, says: str, heard: dict[str, float] | None
) -> None:
    path = tmp_path / "load.json"
    path.write_text('"of an earlier time"')
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), says], stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            assert [decode_load.ask(child.pid, path) for _ in range(2)] == [heard, heard]
        finally:
            child.kill()


def test_who_is_not_there_says_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert decode_load.ask(child.pid, tmp_path / "load.json") is None
