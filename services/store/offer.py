"""Where clients may read segments themselves: the store's Redis, as a user that only reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys
from criticalkv.shared.errors import CriticalKVError, StoreUnavailableError
from criticalkv.shared.loopback import is_local_address, is_loopback
from criticalkv.shared.redis_location import Location

log = logging.getLogger(__name__)

Locate = Callable[[str], Location]
"""Returns the server that has a key. May wait for other servers."""
LOCATE_S = 1.0
"""How long a read waits to learn where its segments are."""
NOWHERE_S = 5.0
"""How long nothing is offered after that was in vain."""


class Offer:
    """Says where a node's segments are, to those who can go there."""

    def __init__(self, reader: Location | None, locate: Locate | None = None) -> None:
        """Prepare.

        Args:
            reader: the user to read as, and its server; None = nothing is offered.
            locate: which server has a key, where that is not always the reader's.
        """
        self._reader = reader
        self._locate = locate
        # Its own: servers that do not answer must hold up nothing else.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-offer")
        self._nowhere_until = 0.0

    def close(self) -> None:
        """Ask nobody any more. Does not wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def location(self, node_id: str, peer: str) -> pb.RedisLocation | None:
        """Return where a node can be read; None if nowhere, for this client.

        Args:
            peer: the client's connection, as gRPC names it.
        """
        if self._reader is None or time.monotonic() < self._nowhere_until:
            return None
        try:
            at = await self._at(self._reader, keys.segment(node_id, "", 0))
        except CriticalKVError as error:
            log.warning("no direct reads while Redis cannot be located: %s", error.message)
            self._nowhere_until = time.monotonic() + NOWHERE_S
            return None
        return _message(at) if _reachable(at, peer) else None

    async def _at(self, reader: Location, key: str) -> Location:
        if self._locate is None:
            return reader
        located = asyncio.get_running_loop().run_in_executor(self._thread, self._locate, key)
        try:
            server = await asyncio.wait_for(located, LOCATE_S)
        except TimeoutError:
            raise StoreUnavailableError("no answer in time") from None
        return replace(server, username=reader.username, password=reader.password)


def _reachable(location: Location, peer: str) -> bool:
    # A unix socket and a loopback address mean something else on another machine.
    local = bool(location.path) or is_loopback(location.host)
    kind, _, rest = peer.partition(":")
    same_machine = kind == "unix" or is_local_address(rest.replace("%5B", "[").replace("%5D", "]"))
    return same_machine or not local


def _message(location: Location) -> pb.RedisLocation:
    return pb.RedisLocation(
        path=location.path,
        host=location.host,
        port=0 if location.path else location.port,
        tls=location.tls,
        username=location.username,
        password=location.password,
        database=location.database,
    )
