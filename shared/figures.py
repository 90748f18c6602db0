"""Figures and their files. Needs matplotlib, which is imported only to draw."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def saved(figures: Iterable[tuple[str, Figure]], folder: Path) -> list[Path]:
    """Write figures by their names, PNG; return the files.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures:
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def one_axis() -> tuple[Axes, Figure]:
    """Return an empty plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    return figure.subplots(), figure


def file_name(name: str) -> str:
    """Return a name with the characters that files may have everywhere."""
    return "".join(c if c.isalnum() or c in "-+=." else "_" for c in name)
