"""What an intervention's command line names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wanted:
    """A text, and what of the model and the text is of interest.

    Attributes:
        text: a file.
        tokens: most that are read of it.
        queries: last tokens whose attention and predictions are looked at.
        layers: such as "0,3-5"; None: all.
        heads: query heads, likewise.
        kv_heads: likewise.
        threads: of torch.
        config: a file with sections, or None.
        model: goes before the configuration's.
    """

    text: Path
    tokens: int
    queries: int
    layers: str | None
    heads: str | None
    kv_heads: str | None
    threads: int
    config: Path | None
    model: str | None
