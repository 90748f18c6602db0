"""Prefill and decode as the gateway sees them, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    PrefillRequest,
    PrefillResult,
)

Event = DecodeStart | DecodeDelta | DecodeEnd


class Workers(Protocol):
    """The two engines, wherever they run."""

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute and publish one node."""
        ...

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Event, None]:
        """Generate a turn. Closing the generator cancels it."""
        ...
