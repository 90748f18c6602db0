"""The English words that RULER draws from: the lists of the package `wonderwords`."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Literal

from criticalkv.shared.errors import ConfigError

List = Literal["adjectivelist", "nounlist", "verblist"]


@cache
def word_list(name: List) -> tuple[str, ...]:
    """Return the words of a list, each once, sorted.

    Raises:
        ConfigError: if the package is not installed.
    """
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or spec.origin is None:
        raise ConfigError("RULER's words need: pip install 'criticalkv[eval]'")
    path = Path(spec.origin).parent / "assets" / f"{name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(sorted({line.strip() for line in lines} - {""}))
