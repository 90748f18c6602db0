"""What processes cost: CPU seconds and peak memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import psutil


class ProcessCost:
    """Adds up the CPU time of named processes over many stretches."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Prepare.

        Args:
            pids: name of each process → its id.
        """
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process since it started, user and system."""
        out = {}
        for name, process in self._processes.items():
            times = process.cpu_times()
            out[name] = times.user + times.system
        return out

    def forget_peaks(self) -> None:
        """Start afresh with peak memory."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):  # a kernel without it: peaks are since the start
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> dict[str, float]:
        """Peak memory of each process, MiB."""
        return {name: _peak(process.pid) for name, process in self._processes.items()}


def _peak(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")
