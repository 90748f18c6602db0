"""What decode says of its load, on request: a signal in, a file out.

Only the process that runs the cluster can ask a replica; the file tells the others.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

APP, DEPLOYMENT = "criticalkv", "decode"
ASKED = 4  # each time a replica of the router's choice answers
ANSWER_S = 5.0
POLL_S = 0.05


def answer_signals(path: Path) -> None:
    """From now on write decode's load to `path` at each SIGUSR1. Call in the main thread."""

    def begin(*_: object) -> None:
        threading.Thread(target=_write, args=(path,), name="decode-load", daemon=True).start()

    signal.signal(signal.SIGUSR1, begin)


def ask(pid: int, path: Path) -> dict[str, float] | None:
    """Return running and waiting sequences of the busiest replica; None if it does not say.

    Args:
        pid: of the process that called `answer_signals(path)`.
    """
    path.unlink(missing_ok=True)
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        return None
    deadline = time.monotonic() + ANSWER_S * (ASKED + 1)
    while not path.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    said: dict[str, float] | None = json.loads(path.read_text())
    return said


def _write(path: Path) -> None:
    from ray import serve
    from ray.exceptions import RayError

    said: dict[str, float] | None
    try:
        call = serve.get_deployment_handle(DEPLOYMENT, APP).record_autoscaling_stats
        loads: list[dict[str, Any]] = [
            call.remote().result(timeout_s=ANSWER_S) for _ in range(ASKED)
        ]
        said = {name: max(one[name] for one in loads) for name in ("running", "waiting")}
    except (RayError, TimeoutError):
        said = None  # it does not answer, and that is what the file says
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(said))
    whole.replace(path)
