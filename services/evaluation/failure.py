"""Failures of a request to a service, as the errors that they were there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from openai import APIConnectionError, APIError

from criticalkv.shared.errors import CriticalKVError, DeadlineError


@asynccontextmanager
async def bounded(what: str, seconds: float) -> AsyncIterator[None]:
    """Give a request's failures their types, and end it after so long.

    Args:
        what: names the request, without its text.
        seconds: retries included.

    Raises:
        DeadlineError: if it took longer.
        CriticalKVError: of the type that the service names.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"{what}: no answer within {seconds:g} seconds") from error
    except APIError as error:
        raise _typed(what, error) from error


def _typed(what: str, error: APIError) -> CriticalKVError:
    if isinstance(error, APIConnectionError):
        # Not the cause's message: it may quote a header.
        why = type(error.__cause__ or error).__name__
        return CriticalKVError(f"{what}: cannot reach the service ({why})")
    body = error.body if isinstance(error.body, dict) else {}
    kind = next((k for k in _kinds(CriticalKVError) if k.code == error.code), CriticalKVError)
    return kind(f"{what}: {body.get('message', error.message)}", param=error.param)


def _kinds(kind: type[CriticalKVError]) -> Iterator[type[CriticalKVError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
