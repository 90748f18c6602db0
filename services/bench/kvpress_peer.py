"""kvpress' own pipeline in a process of its own, asked one example at a time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from pydantic import TypeAdapter, ValidationError

from criticalkv.services.evaluation.prompt import Prompt
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.model.spec import ModelSpec

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "scripts" / "kvpress_pipeline.py"
START_S = 300.0
ANSWER_S = 600.0
END_S = 30.0
"""Longest wait for a killed process to be gone."""
T = TypeVar("T")


@dataclass(frozen=True)
class Ready:
    """What kvpress' process says once it has loaded the model.

    Attributes:
        presses: that it can be asked for.
        device: of the model: "cpu" or "cuda".
        dtype: of its weights.
        versions: of kvpress, torch and transformers.
    """

    presses: tuple[str, ...]
    device: str
    dtype: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class PeerAnswer:
    """What kvpress said, and how long one run of its pipeline took, in its own process."""

    answer: str
    seconds: float


class KvpressPeer:
    """Speaks with `infra/scripts/kvpress_pipeline.py`; see there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wait until the model is loaded.

        Raises:
            ConfigError: if the process ends, says nothing in time, or something else.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()
        self.ready = self._next(Ready, START_S)

    def answer(self, prompt: Prompt, max_tokens: int, press: str, kept: float) -> PeerAnswer:
        """Run the pipeline once.

        Args:
            prompt: context and question; the same tokens as ours.
            max_tokens: most tokens of the answer.
            press: one of `ready.presses`.
            kept: kept fraction, 1 − kvpress' compression ratio.

        Raises:
            ConfigError: if the process ended, says nothing in time, or something else.
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
        return self._next(PeerAnswer, ANSWER_S)

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, kind: type[T], timeout_s: float) -> T:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise _refused(f"said nothing for {timeout_s:.0f} s") from None
        if line is None:
            raise _refused("ended; its messages are above")
        try:
            return TypeAdapter(kind).validate_json(line)
        except ValidationError:
            # Not quoted: it may be an answer.
            raise _refused(f"said something that is no {kind.__name__}") from None


@contextmanager
def kvpress_peer(python: Path, spec: ModelSpec, threads: int) -> Iterator[KvpressPeer]:
    """Start the pipeline; stop it in the end, with all that it started.

    Args:
        python: of the environment that holds kvpress.
        spec: of the same model: its directory, device and dtype.
        threads: torch threads.

    Raises:
        ConfigError: if it cannot be started.
    """
    command = [str(python), str(SCRIPT), f"--model={spec.path}", f"--threads={threads}"]
    try:
        process = subprocess.Popen(
            [*command, f"--device={spec.device}", f"--dtype={spec.dtype}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{python}: {error.strerror}", param="kvpress-python") from error
    try:
        yield KvpressPeer(process)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    first = sys.exception()  # must not be hidden by what fails here
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        late = _refused(f"is still there {END_S:.0f} s after it was killed")
        if first is None:
            raise late from None
        first.add_note(str(late))


def _refused(why: str) -> ConfigError:
    return ConfigError(f"kvpress {why}", param="kvpress-python")


def _environment() -> dict[str, str]:
    """As ours, but without what puts this project's modules on the path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
