"""The progress bar of a long measurement: how many of how many, and for how long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn


def counting() -> Progress:
    """Return a bar on stderr, so that stdout has results only."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
