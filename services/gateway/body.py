"""Reading a request's body: bounded, and parsed off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from criticalkv.shared.errors import BodyTooLargeError, CancelledError, InvalidRequestError

# Read and thrown away beyond the limit, so that a client still sending gets the answer.
DRAIN_BYTES = 64 * 1024 * 1024


async def read_json(request: Request, limit: int) -> Any:
    """Return the body's JSON value.

    Raises:
        BodyTooLargeError: beyond `limit` bytes.
        InvalidRequestError: if it is not JSON, nested too deeply, or not Unicode.
    """
    try:
        body = await _read(request, limit)
    except ClientDisconnect as error:
        raise CancelledError("the client went away") from error
    try:
        return await asyncio.to_thread(from_json, body)
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
