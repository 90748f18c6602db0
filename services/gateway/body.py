"""Reading a request's body: bounded, and parsed off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from criticalkv.shared.errors import BodyTooLargeError, CancelledError, InvalidRequestError

# A body that trickles in must not hold a place among the running requests for long.
BODY_TIMEOUT_S = 30.0
# Read and thrown away beyond the limit, so that a client still sending gets the answer.
DRAIN_BYTES = 64 * 1024 * 1024
# Each is checked by itself, and may be an error by itself, on the event loop.
MAX_FIELDS = 256
MAX_VALUES = 100_000


class BodyTimeoutError(InvalidRequestError):
    """The request body did not arrive in time."""

    http_status = 408
    code = "body_timeout"


async def read_json(request: Request, limit: int) -> Any:
    """Return the body's JSON value.

    Raises:
        BodyTooLargeError: beyond `limit` bytes.
        BodyTimeoutError: if it is not complete in time.
        InvalidRequestError: if it is not JSON, nested too deeply, not Unicode, or of too
            many values.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, limit)
    except ClientDisconnect as error:
        raise CancelledError("the client went away") from error
    except TimeoutError as error:
        raise BodyTimeoutError(
            f"the body was not complete within {BODY_TIMEOUT_S:g} seconds, the limit"
        ) from error
    try:
        return await asyncio.to_thread(_parse, body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {str(error)[:100]}") from error


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        elif size > limit + DRAIN_BYTES:
            break
    if size > limit:
        raise BodyTooLargeError(f"the body has more than {limit} bytes, the limit")
    return b"".join(chunks)


def _parse(body: bytes) -> Any:
    data = from_json(body)
    if isinstance(data, dict):
        if len(data) > MAX_FIELDS:
            raise InvalidRequestError(f"the body has more than {MAX_FIELDS} fields, the limit")
        for name, value in data.items():
            if _has_more_values(value, MAX_VALUES):
                field = name[:100]
                raise InvalidRequestError(f"{field}: at most {MAX_VALUES} JSON values", param=field)
    return data


def _has_more_values(value: Any, limit: int) -> bool:
    waiting, count = [value], 0
    while waiting and count <= limit:
        value = waiting.pop()
        children = value.values() if isinstance(value, dict) else value
        if isinstance(value, (dict, list)):
            count += len(value)
            if count <= limit:
                waiting += children
    return count > limit
