"""kvpress' own pipeline in a process of its own, asked one example at a time."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from criticalkv.services.evaluation.prompt import Prompt
from criticalkv.shared.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "scripts" / "kvpress_pipeline.py"
START_S = 300.0
ANSWER_S = 600.0


@dataclass(frozen=True)
class PeerAnswer:
    """What kvpress said, and how long one run of its pipeline took, in its own process."""

    text: str
    seconds: float


class KvpressPeer:
    """Speaks with `infra/scripts/kvpress_pipeline.py`; see there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: if the process ends or says nothing in time.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        self._next(START_S)

    def answer(self, prompt: Prompt, max_tokens: int, press: str, kept: float) -> PeerAnswer:
        """Run the pipeline once.

        Args:
            prompt: context and question; the same tokens as ours.
            max_tokens: most tokens of the answer.
            press: a key of the script's PRESSES.
            kept: kept fraction, 1 − kvpress' compression ratio.

        Raises:
            ConfigError: if the process ended or says nothing in time.
        """
        asked = {
            "context_ids": prompt.context_ids,
            "question_ids": prompt.question_ids,
            "max_tokens": max_tokens,
            "press": press,
            "kept": kept,
        }
        with suppress(BrokenPipeError):  # it ended: the missing answer says so
            self._stdin.write(json.dumps(asked) + "\n")
            self._stdin.flush()
        said = self._next(ANSWER_S)
        return PeerAnswer(said["answer"], said["seconds"])

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ConfigError(
                f"kvpress said nothing for {timeout_s:.0f} s", param="kvpress-python"
            ) from None
        if line is None:
            raise ConfigError("kvpress ended; its messages are above", param="kvpress-python")
        said: dict[str, Any] = json.loads(line)
        return said


@contextmanager
def kvpress_peer(python: Path, model: Path, threads: int) -> Iterator[KvpressPeer]:
    """Start the pipeline; stop it in the end.

    Args:
        python: of the environment that holds kvpress.
        model: directory of the same model.
        threads: torch threads.

    Raises:
        ConfigError: if it cannot be started.
    """
    command = [str(python), str(SCRIPT), "--model", str(model), "--threads", str(threads)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
    except OSError as error:
        raise ConfigError(f"{python}: {error.strerror}", param="kvpress-python") from error
    try:
        yield KvpressPeer(process)
    finally:
        process.kill()
        process.communicate()


def _environment() -> dict[str, str]:
    """As ours, but without what puts this project's modules on the path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
