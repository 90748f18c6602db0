"""Packages that only some metrics need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from criticalkv.shared.errors import ConfigError


def package(name: str) -> Any:
    """Import a package of the extra `eval`.

    Raises:
        ConfigError: if it is not installed; says how to.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this metric needs the package {name.partition('.')[0]}: "
            "pip install 'criticalkv[eval]'"
        ) from error
