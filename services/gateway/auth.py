"""Who is asking: an API key names the tenant. Knows nothing of requests' content."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from criticalkv.shared.config import GatewayConfig
from criticalkv.shared.errors import AuthenticationError, ConfigError
from criticalkv.shared.identity import HEX64, tenant_digest

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOCAL_TENANT = "local"


@dataclass(frozen=True)
class Tenant:
    """An authenticated caller. `digest` owns handles in the store."""

    name: str

    @property
    def digest(self) -> str:
        """The tenant's name in the store, hex."""
        return tenant_digest(self.name)


class Authenticator:
    """Maps API keys to tenants; without a key file everybody on loopback is `local`.

    Raises:
        ConfigError: for a file that is unreadable, malformed or empty, and for a
            non-loopback address without a file.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._loopback = config.host in LOOPBACK
        self._keys = _read_keys(config.api_keys_file) if config.api_keys_file else None
        if self._keys is None and not self._loopback:
            raise ConfigError(
                f"gateway.host {config.host!r} is not loopback: gateway.api_keys_file is needed",
                param="gateway.api_keys_file",
            )

    def is_open(self, path: str) -> bool:
        """Whether a path needs no key: health always, metrics on loopback."""
        return path == "/health" or (path == "/metrics" and self._loopback)

    def tenant(self, authorization: str) -> Tenant:
        """Return the caller of an `Authorization` header.

        Raises:
            AuthenticationError: if the key is missing or unknown.
        """
        if self._keys is None:
            return Tenant(LOCAL_TENANT)
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for known, name in self._keys.items():  # all of them: time tells nothing
            if hmac.compare_digest(known, digest):
                found = name
        if scheme.lower() != "bearer" or not key or found is None:
            raise AuthenticationError("missing or unknown API key (Authorization: Bearer …)")
        return Tenant(found)


def _read_keys(path: str) -> dict[str, str]:
    try:
        data: Any = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            "gateway.api_keys_file cannot be read", param="gateway.api_keys_file"
        ) from error
    if not isinstance(data, dict) or not data:
        raise ConfigError(
            "gateway.api_keys_file must be a map: sha256 hex of a key → tenant",
            param="gateway.api_keys_file",
        )
    for digest, name in data.items():
        if not (isinstance(digest, str) and re.fullmatch(HEX64, digest)):
            raise ConfigError(
                "gateway.api_keys_file: every key must be a sha256 in lower-case hex",
                param="gateway.api_keys_file",
            )
        if not (isinstance(name, str) and 1 <= len(name) <= 128):
            raise ConfigError(
                "gateway.api_keys_file: every tenant must be a name of 1 to 128 characters",
                param="gateway.api_keys_file",
            )
    return data
