"""Samples: seconds of calls on a GPU, by its own clock; on a CPU by the wall's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 7
RUN_S = 0.02
"""A sample lasts about so long: a call's launch is then in the shade of the one before."""


def alternate(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, list[float]]:
    """Return seconds of each call, several samples, taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    counts = {name: _count(call, device) for name, call in calls.items()}
    for _ in range(REPEATS):
        for name, call in calls.items():
            samples[name].append(_run(call, counts[name], device) / counts[name])
    return samples


def sample(call: Callable[[], Any], device: str) -> list[float]:
    """Return seconds of a call, several samples."""
    return alternate({"call": call}, device)["call"]


def _count(call: Callable[[], Any], device: str) -> int:
    """Calls of one sample; the first compiles."""
    call()
    return max(1, min(50, int(RUN_S / max(1e-6, _run(call, 1, device)))))


def _run(call: Callable[[], Any], count: int, device: str) -> float:
    """Seconds of so many calls."""
    if torch.device(device).type != "cuda":
        begun = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
