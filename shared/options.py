"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[Path, typer.Option(metavar="FILE", help="Write the report here.")]
Plots = Annotated[
    Path | None, typer.Option(metavar="DIR", file_okay=False, help="Draw plots here (PNG).")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML map of sections.")
]
Model = Annotated[
    str | None, typer.Option(help="'demo', a directory with safetensors, or a cached Hub name.")
]
Threads = Annotated[int, typer.Option(min=1, help="Torch threads.")]
