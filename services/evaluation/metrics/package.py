"""Packages that only some metrics need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from criticalkv.shared.errors import ConfigError


@contextmanager
def of_extra(name: str) -> Iterator[None]:
    """Import a package of the extra `eval` inside.

    Raises:
        ConfigError: if it is not installed; says how to.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"this metric needs the package {name}: pip install 'criticalkv[eval]'"
        ) from error
