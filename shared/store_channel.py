"""The way to the store: credentials, channel options, and typed errors of its statuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import (
    AuthenticationError,
    CancelledError,
    ConfigError,
    ContextNotFoundError,
    CriticalKVError,
    DeadlineError,
    IdempotencyConflictError,
    InvalidRequestError,
    LeaseLostError,
    NodeMissingError,
    NodeTooLargeError,
    OverloadedError,
    QuotaExceededError,
    StoreFullError,
    StoreUnavailableError,
)
from criticalkv.shared.frames import MAX_MESSAGE_BYTES
from criticalkv.shared.loopback import is_local_address

SERVICE = "criticalkv.store.v1.CacheStore"
MIN_TOKEN_CHARS = 16
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # A connection of its own: not one that waits to reconnect for somebody else's sake.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted store is found again within seconds, not minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A store whose machine vanished is noticed in 15 s, also while a call waits for it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]
_TOO_LARGE = "larger than max"
_TOO_MANY = "Concurrent RPC limit exceeded"


@dataclass(frozen=True)
class StoreCredentials:
    """What a client needs for a store on another machine.

    Attributes:
        tls_ca: PEM of the certificate authority to trust, or None for no TLS.
        token: bearer token of every call, or "".
        cert: PEM of the client's own certificate, for a store that wants one.
        key: PEM of its private key.
    """

    tls_ca: bytes | None = None
    token: str = field(default="", repr=False)
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: StoreConfig) -> StoreCredentials | None:
        """Read the files that a configuration names; None if it names none.

        Raises:
            ConfigError: if a file cannot be read, the token would go in the clear, or a
                certificate lacks its key or the store's authority.
        """
        token, ca = read_token(config.token_file), _pem(config.tls_ca, "store.tls_ca")
        cert = _pem(config.tls_client_cert, "store.tls_client_cert")
        key = _pem(config.tls_client_key, "store.tls_client_key")
        if token and not ca and not is_local_address(config.address):
            raise ConfigError(
                "store.tls_ca is needed: the token must not travel in the clear",
                param="store.tls_ca",
            )
        if (cert is None) != (key is None) or (cert and not ca):
            raise ConfigError(
                "store.tls_client_cert, store.tls_client_key and store.tls_ca go together",
                param="store.tls_client_cert",
            )
        return cls(ca, token, cert, key) if ca or token else None

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What goes with every call."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel to `host:port` or `unix:path`; it connects at the first call."""
        if self.tls_ca is None:
            return grpc.insecure_channel(address, OPTIONS)
        tls = grpc.ssl_channel_credentials(self.tls_ca, self.key, self.cert)
        return grpc.secure_channel(address, tls, OPTIONS)


def read_token(path: str) -> str:
    """Return the bearer token in a file; "" without a path.

    Raises:
        ConfigError: if the file cannot be read, or holds less than 16 characters.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read store.token_file", param="store.token_file") from error
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"store.token_file must hold at least {MIN_TOKEN_CHARS} printable ASCII characters",
            param="store.token_file",
        )
    return token


def callables(channel: grpc.Channel) -> dict[str, Callable[..., Any]]:
    """Return the store's methods on a channel, by name. Frames of both streams stay raw."""
    service = pb.DESCRIPTOR.services_by_name["CacheStore"]
    out: dict[str, Callable[..., Any]] = {}
    for method in service.methods:
        reply = getattr(pb, method.output_type.name)
        path = f"/{SERVICE}/{method.name}"
        if method.name == "PutNode":
            out[method.name] = channel.stream_unary(path, None, reply.FromString)
        elif method.name == "GetNode":
            out[method.name] = channel.unary_stream(path, _serialize, None)
        else:
            out[method.name] = channel.unary_unary(path, _serialize, reply.FromString)
    return out


_BY_STATUS: dict[grpc.StatusCode, type[CriticalKVError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NodeMissingError,
    grpc.StatusCode.ALREADY_EXISTS: IdempotencyConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: LeaseLostError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: StoreUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledError,
}
_BY_CODE: dict[str, type[CriticalKVError]] = {
    kind.code: kind
    for kind in (StoreFullError, QuotaExceededError, ContextNotFoundError, NodeTooLargeError)
}


def typed_error(error: grpc.RpcError, subject: str | None = None) -> CriticalKVError:
    """Return the typed error of a failed call.

    Args:
        error: as raised by grpc.
        subject: the node or field that the call was about.
    """
    status, message = error.code(), error.details() or "no details"
    trailing: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
    kind = _BY_CODE.get(str(trailing.get("ckv-code", ""))) or _BY_STATUS.get(
        status, CriticalKVError
    )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        # Trying again would not help, and grpc does not say whose limit it is.
        kind, message = InvalidRequestError, f"a message exceeds {MAX_MESSAGE_BYTES} bytes"
    elif _TOO_MANY in message:
        message = "store.max_concurrent_rpcs calls are running already"
    retry_after_s = 1.0 if issubclass(kind, OverloadedError | StoreUnavailableError) else None
    return kind(f"store: {message}", param=subject, retry_after_s=retry_after_s)


def _pem(path: str, param: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"cannot read {param}: {error}", param=param) from error


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
