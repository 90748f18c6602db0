"""Failures of a request to a service, as the errors that they were there."""

from __future__ import annotations

from collections.abc import Iterator

from openai import APIConnectionError, APIError, APITimeoutError

from criticalkv.shared.errors import CriticalKVError, DeadlineError


def failure(what: str, error: APIError) -> CriticalKVError:
    """Return a typed error that says what failed.

    Args:
        what: names the request, without its text.
        error: of the client.
    """
    if isinstance(error, APITimeoutError):
        return DeadlineError(f"{what}: the service did not answer in time")
    if isinstance(error, APIConnectionError):
        return CriticalKVError(f"{what}: cannot reach the service ({error.__cause__ or error})")
    body = error.body if isinstance(error.body, dict) else {}
    kind = next((k for k in _kinds(CriticalKVError) if k.code == error.code), CriticalKVError)
    return kind(f"{what}: {body.get('message', error.message)}", param=error.param)


def _kinds(kind: type[CriticalKVError]) -> Iterator[type[CriticalKVError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
