"""Plots of an intervention's report. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from criticalkv.services.analysis.plots import heat_maps
from criticalkv.shared.figures import one_axis, saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what a report holds; return the files.

    Args:
        report: details and samples of a report of `interventions`.
        folder: for the files, PNG.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    return saved(_figures(report), folder)


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    samples = report["samples"]
    for number, (title, grid) in enumerate(samples["maps"].items()):
        most = max(map(max, grid))
        yield f"map-{number}", heat_maps({title: grid}, 0, most or 1, "viridis")
    if samples["curves"]:
        yield "kl", _curves(samples["curves"], report["details"]["first_query"])


def _curves(curves: dict[str, list[float]], first: int) -> Figure:
    axis, figure = one_axis()
    for label, values in curves.items():
        axis.plot(range(first, first + len(values)), values, label=label)
    axis.set(xlabel="token", ylabel="KL from untouched, nats", ylim=(0, None))
    axis.legend()
    return figure
