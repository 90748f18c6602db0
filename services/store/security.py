"""Who may call the store: loopback by default, TLS and a bearer token otherwise."""

from __future__ import annotations

import hmac
from pathlib import Path

import grpc

from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import ConfigError
from criticalkv.shared.loopback import is_local_address
from criticalkv.shared.store_channel import read_token


class Security:
    """The checked settings. Fails closed: nothing is silently left out."""

    def __init__(self, config: StoreConfig) -> None:
        """Read certificates, key and token.

        Raises:
            ConfigError: if the address is not loopback and TLS or the token is missing,
                clients need certificates but the server has none, a file cannot be read,
                or the token is too short.
        """
        complete = bool(config.tls_cert and config.tls_key and config.token_file)
        if not is_local_address(config.address) and not complete:
            raise ConfigError(
                "store.address is not loopback: it needs tls_cert, tls_key and token_file",
                param="store.address",
            )
        if bool(config.tls_cert) != bool(config.tls_key):
            raise ConfigError("store.tls_cert and store.tls_key go together", param="store.tls_key")
        if config.tls_client_ca and not config.tls_cert:
            raise ConfigError(
                "store.tls_client_ca needs store.tls_cert and store.tls_key: without TLS nobody "
                "shows a certificate",
                param="store.tls_client_ca",
            )
        self._token = read_token(config.token_file)
        self.credentials = _credentials(config)

    def admits(self, metadata: grpc.aio.Metadata | None) -> bool:
        """Whether a call's metadata carry the token, if one is set."""
        if not self._token:
            return True
        given = dict(metadata or ()).get("authorization", "")
        given = given.encode() if isinstance(given, str) else given
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())


def _credentials(config: StoreConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    try:
        pair = (Path(config.tls_key).read_bytes(), Path(config.tls_cert).read_bytes())
        clients = Path(config.tls_client_ca).read_bytes() if config.tls_client_ca else None
    except OSError as error:
        raise ConfigError(f"cannot read the store's certificates: {error}") from error
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)
