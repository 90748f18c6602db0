"""Keys of the API, as they may stand in a request's header."""

from __future__ import annotations

from criticalkv.shared.errors import ConfigError


def check_api_key(key: str) -> str:
    """Return a key that a header can carry; HTTP libraries print the other ones.

    Raises:
        ConfigError: without the key.
    """
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            "the API key must be printable ASCII, without white space around it", param="api_key"
        )
    return key
