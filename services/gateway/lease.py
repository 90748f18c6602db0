"""Keeping a short lease alive while the work under it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from criticalkv.services.gateway.deadline import Deadline
from criticalkv.shared.errors import CriticalKVError

log = logging.getLogger(__name__)


def keep(
    renew: Callable[[], Awaitable[bool]], every_s: float, deadline: Deadline
) -> asyncio.Task[None]:
    """Renew a lease again and again; cancel the returned task when the work is over.

    Args:
        renew: extends the lease; False if it is lost.
        every_s: pause; several fit into one lease, so that one failure does no harm.
        deadline: of the work; nothing is renewed after it.
    """
    return asyncio.create_task(_keep(renew, every_s, deadline))


async def _keep(renew: Callable[[], Awaitable[bool]], every_s: float, deadline: Deadline) -> None:
    while time.monotonic() + every_s < deadline.at:
        await asyncio.sleep(every_s)
        try:
            if not await renew():
                log.info("a lease was lost before its work was done")
                return
        except CriticalKVError as error:
            log.warning("a lease was not renewed: %s", error.code)
