"""What a command leaves: a report as JSON, its headline on the terminal, and plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from criticalkv.shared.report import Report

Draw = Callable[[dict[str, Any], Path], list[Path]]
"""Draws a report's details and samples into a folder."""


def finish(report: Report, json: Path, plots: Path | None = None, draw: Draw | None = None) -> None:
    """Write a report; draw it if there is a folder for plots, and matplotlib."""
    report.write(json)
    for key, value in report.headline.items():
        typer.echo(f"{key}: {'not measured' if value is None else f'{value:.3g}'}")
    if plots is not None and draw is not None:
        draw_plots(report, plots, draw)


def draw_plots(report: Report, folder: Path, draw: Draw) -> None:
    """Draw a report, or say what is missing for it."""
    try:
        count = len(draw({"details": report.details, "samples": report.samples}, folder))
    except ImportError:
        typer.echo("no plots: they need matplotlib, pip install 'criticalkv[analyze]'", err=True)
    else:
        typer.echo(f"{count} plots in {folder}", err=True)
