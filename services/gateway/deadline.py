"""The one deadline of a request, shared by everything that is done for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from criticalkv.shared.errors import DeadlineError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Deadline:
    """A point on the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline so many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left.

        Raises:
            DeadlineError: if there are none.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineError("the request did not finish before its deadline")
        return left

    async def bound(self, work: Awaitable[Value]) -> Value:
        """Await `work` until the deadline.

        Raises:
            DeadlineError: if it takes longer; the work is cancelled.
        """
        try:
            async with asyncio.timeout(max(0.0, self.at - time.monotonic())):
                return await work
        except TimeoutError as error:
            raise DeadlineError("the request did not finish before its deadline") from error
