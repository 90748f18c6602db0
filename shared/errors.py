"""Typed errors of every component, and their one mapping to gRPC and to HTTP.

Raise these and nothing else across a component's border. The gateway turns them
into OpenAI error JSON, the store's server into a gRPC status; nobody else maps.
"""

from __future__ import annotations

from typing import ClassVar


class CriticalKVError(Exception):
    """Base of all errors with a meaning for a caller.

    Attributes:
        http_status: status of the HTTP answer.
        code: stable machine-readable name, `error.code` in OpenAI's error JSON.
        kind: OpenAI's `error.type`.
        param: the request field at fault, or None.
        retry_after_s: seconds after which a retry makes sense, or None.
    """

    http_status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross Ray's process borders; the default loses keyword arguments.
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(
    cls: type[CriticalKVError], message: str, param: str | None, retry_after_s: float | None
) -> CriticalKVError:
    return cls(message, param=param, retry_after_s=retry_after_s)


class InvalidRequestError(CriticalKVError):
    """A field of the request is wrong; the message names it and the limit."""

    http_status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The conversation does not fit the model's positions."""

    code = "context_length_exceeded"


class PoolLimitError(InvalidRequestError):
    """The KV that a turn needs would not fit an empty decode pool."""

    code = "kv_pool_exceeded"


class NodeTooLargeError(InvalidRequestError):
    """A context's KV has more bytes than the store accepts of one node."""

    code = "node_too_large"


class UnsupportedFieldError(InvalidRequestError):
    """A known OpenAI field that this server does not implement."""

    code = "unsupported_field"


class AuthenticationError(CriticalKVError):
    """The API key is missing or unknown."""

    http_status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class ModelNotFoundError(CriticalKVError):
    """The named model is not the one served."""

    http_status = 404
    code = "model_not_found"
    kind = "invalid_request_error"


class ContextNotFoundError(CriticalKVError):
    """No such handle for this tenant: unknown, expired or somebody else's."""

    http_status = 404
    code = "context_not_found"
    kind = "invalid_request_error"


class ContextExpiredError(CriticalKVError):
    """The node's KV is gone and so is the token record to rebuild it from."""

    http_status = 404
    code = "context_expired"
    kind = "invalid_request_error"


class IdempotencyConflictError(CriticalKVError):
    """One idempotency key was used with two different requests."""

    http_status = 409
    code = "idempotency_key_reused"
    kind = "invalid_request_error"


class BodyTooLargeError(CriticalKVError):
    """The request body exceeds the limit."""

    http_status = 413
    code = "body_too_large"
    kind = "invalid_request_error"


class OverloadedError(CriticalKVError):
    """Too much is running or queued; retry later."""

    http_status = 429
    code = "overloaded"
    kind = "rate_limit_error"


class StoreFullError(OverloadedError):
    """The store's memory limit is reached and everything in it is pinned."""

    http_status = 503
    code = "store_full"
    kind = "server_error"


class QuotaExceededError(OverloadedError):
    """The tenant's share of the store is used up, and nothing of it may go."""

    code = "quota_exceeded"


class StoreUnavailableError(CriticalKVError):
    """The store, or the Redis behind it, does not answer."""

    http_status = 503
    code = "store_unavailable"


class DeadlineError(CriticalKVError):
    """The work did not finish before its deadline."""

    http_status = 504
    code = "deadline_exceeded"


class CancelledError(CriticalKVError):
    """The caller went away or asked to stop; nothing was published."""

    http_status = 499
    code = "cancelled"


class WorkerLostError(CriticalKVError):
    """The worker that ran the request died or is stopping: another one can go on.

    What a gateway knows of it already is true, and nothing else of it is kept.
    """

    http_status = 503
    code = "worker_lost"


class StoppingError(CriticalKVError):
    """The service is being stopped: it begins nothing, and ends what takes too long."""

    http_status = 503
    code = "stopping"


class NodeMissingError(CriticalKVError):
    """A node is absent, or unusable and therefore treated as absent: a miss.

    Never reaches an HTTP client: the gateway recomputes the node instead.
    """

    http_status = 503
    code = "node_missing"

    @classmethod
    def of(cls, node_id: str, reason: str) -> NodeMissingError:
        """Name the node and why it is a miss."""
        return cls(f"node {node_id[:16]} is not usable: {reason}", param=node_id)


class CorruptNodeError(NodeMissingError):
    """Bytes of a node do not match its manifest (checksum, length, identity)."""

    code = "node_corrupt"


class LeaseLostError(CriticalKVError):
    """Another worker took the lease over; this attempt's commit was refused."""

    http_status = 503
    code = "lease_lost"


class PolicyError(InvalidRequestError):
    """An eviction policy that does not parse, or whose parts do not fit."""

    code = "invalid_policy"


class UnsupportedModelError(CriticalKVError):
    """The model's architecture or RoPE variant cannot be served correctly."""

    code = "unsupported_model"


class NumericsError(CriticalKVError):
    """NaN or infinity in scores, KV or logits; nothing was published."""

    code = "non_finite_values"


class ConfigError(CriticalKVError):
    """The configuration is wrong or unsafe; the message says what to change."""

    code = "invalid_config"
