"""The id that a request has in answers and logs: the client's own, or a fresh one."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = b"x-request-id"
_FORM = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

current: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that this task works for; "-" outside of any."""

Headers = list[tuple[bytes, bytes]]


def accept(headers: Headers) -> bytes:
    """Return a request's id: what it brings, if that is well-formed and there is only one.

    Whatever else a client puts there gets into no log and into no answer.
    """
    given = [value for name, value in headers if name.lower() == HEADER]
    if len(given) == 1 and _FORM.fullmatch(given[0]):
        return given[0]
    return f"req_{secrets.token_hex(12)}".encode()


def put(headers: Headers, value: bytes) -> Headers:
    """Return the headers with this id and no other."""
    return [*((name, old) for name, old in headers if name.lower() != HEADER), (HEADER, value)]
