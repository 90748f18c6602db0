"""Which server of Redis has a key's payload: the one, the Sentinels' master, a cluster node.

For threads. What the metadata's asyncio client does by itself is done here for `resp`,
with redis-py's blocking client for all that is not payload.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis import exceptions as redis_exceptions
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from criticalkv.shared.redis_location import Deployment, Location
from criticalkv.shared.resp import (
    RETRY_AFTER_S,
    DataClient,
    DataConnection,
    DataPool,
    LengthMismatch,
    Moving,
    NobodyLeads,
    Redirected,
    Unreachable,
)

exceptions: Any = redis_exceptions  # older stubs lack some of its names
log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Item = TypeVar("_Item", tuple[str, bytes], tuple[str, int])
MAX_HOPS = 5
"""Redirections that a call follows."""
_ASK_TIMEOUT_S = 1.0
"""Limit of asking one Sentinel or node where the others are."""
_TURN_S = 2.0
"""Limit of waiting for others who ask the Sentinels."""
_ALL_SLOTS = 16384


def data_client(deployment: Deployment, timeout_s: float) -> DataClient:
    """Return what moves payloads to and from a deployment; nothing connects yet."""
    if deployment.kind == "sentinel":
        return SentinelData(deployment, timeout_s)
    if deployment.kind == "cluster":
        return ClusterData(deployment, timeout_s)
    return DataPool(deployment.server, timeout_s)


def options(location: Location, timeout_s: float) -> dict[str, Any]:
    """Return redis-py's arguments for the user, database, TLS and time limits."""
    out: dict[str, Any] = {
        "username": location.username or None,
        "password": location.password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }
    if location.database:
        out["db"] = location.database
    if location.tls:
        out |= {"ssl": True, "ssl_ca_certs": location.ca or None, "ssl_cert_reqs": "required"}
    return out


class Master:
    """Called, it returns the master that the Sentinels name now.

    Attributes:
        known: what they said last, until it is forgotten; None = unknown.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.known: Location | None = None
        self._deployment = deployment
        sentinel: Any = Sentinel  # untyped
        self._sentinel = sentinel(
            [(seed.host, seed.port) for seed in deployment.seeds],
            sentinel_kwargs={**options(deployment.seeds[0], _ASK_TIMEOUT_S), "retry": once()},
        )
        self._lock = threading.Lock()

    def __call__(self) -> Location:
        """Ask.

        Raises:
            StoreUnavailableError: if no Sentinel answers, or none knows a living master.
            ConfigError: if it is on another machine without TLS and a password.
        """
        with self._turn():
            try:
                host, port = self._sentinel.discover_master(self._deployment.service)
            except MasterNotFoundError as error:
                raise self._nobody(error) from error
            except (exceptions.RedisError, OSError) as error:
                raise Unreachable(f"Sentinel failed: {type(error).__name__}") from error
        self.known = self._deployment.at(str(host), int(port))
        return self.known

    @contextmanager
    def _turn(self) -> Iterator[None]:
        # It sorts its list of Sentinels: one at a time.
        if not self._lock.acquire(timeout=_TURN_S):
            raise Unreachable("the Sentinels do not answer", retry_after_s=RETRY_AFTER_S)
        try:
            yield
        finally:
            self._lock.release()

    def _nobody(self, error: Exception) -> Moving:
        if any_answered(self._sentinel.sentinels, error):
            return Moving("no Sentinel names a master", retry_after_s=RETRY_AFTER_S)
        return NobodyLeads("no Sentinel answers", retry_after_s=RETRY_AFTER_S)


class SentinelData(DataPool):
    """Moves payloads to and from the master that Sentinels name."""

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self._master = Master(deployment)
        super().__init__(self._master, timeout_s)

    def location_of(self, key: str) -> Location:  # noqa: ARG002 (it has all keys)
        """As DataPool.location_of; the Sentinels are asked only if the master is not known."""
        return self._master.known or self._master()

    def forget(self) -> None:
        """As DataPool.forget."""
        self._master.known = None
        super().forget()


class Slots:
    """Which master of a cluster has which slot, as far as is known. For threads."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._owners: dict[int, Location] = {}

    def get(self, slot: int) -> Location | None:
        """Return the slot's master, or None if it is not known."""
        return self._owners.get(slot)

    @property
    def known(self) -> bool:
        """Whether any slot's master is known."""
        return bool(self._owners)

    def masters(self) -> set[Location]:
        """Return all masters that are known."""
        return set(self._owners.values())

    def moved(self, slot: int, owner: Location) -> None:
        """Note a slot's new master."""
        self._owners[slot] = owner

    def forget(self) -> None:
        """Know nothing any more."""
        self._owners = {}

    def refresh(self) -> None:
        """Ask one node after the other, until one knows the masters of all slots.

        If none does, what the best of them says counts: one that has not joined the
        cluster, or was taken out of it, knows less than the others.

        Raises:
            StoreUnavailableError: if none answers, or none knows a master.
            ConfigError: if a master is on another machine without TLS and a password.
        """
        best: dict[int, Location] | None = None
        for node in dict.fromkeys((*self.masters(), *self._deployment.seeds)):
            try:
                found = _slots_by(node)
            except (exceptions.RedisError, OSError) as error:
                log.warning("a node of the cluster does not answer: %s", type(error).__name__)
                continue
            owners = self._owners_in(found, node)
            if best is None or len(owners) > len(best):
                best = owners
            if len(best) == _ALL_SLOTS:
                break
        if best is None:
            raise Unreachable("no node of the cluster answers", retry_after_s=RETRY_AFTER_S)
        if not best:
            raise Moving("no node of the cluster knows a master", retry_after_s=RETRY_AFTER_S)
        self._owners = best

    def _owners_in(
        self, found: list[tuple[int, int, str, int]], node: Location
    ) -> dict[int, Location]:
        return {
            slot: owner
            for first, last, host, port in found
            for owner in [self._deployment.at(host or node.host, port)]
            for slot in range(first, last + 1)
        }


class ClusterData:
    """Moves payloads to and from a cluster. All keys of one call must share a slot."""

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._slots = Slots(deployment)
        self._lock = threading.Lock()
        self._pools: dict[Location, DataPool] = {}

    def set_many(self, items: Sequence[tuple[str, bytes]], ttl_ms: int) -> None:
        """As DataPool.set_many."""

        def store(
            at: DataConnection, part: Sequence[tuple[str, bytes]], asking: bool
        ) -> list[None]:
            at.set_many(part, ttl_ms, asking)
            return []

        self._follow(items, store)

    def get_many(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """As DataPool.get_many."""
        try:
            return self._follow(wanted, DataConnection.get_many)
        except LengthMismatch:
            return [None] * len(wanted)

    def location_of(self, key: str) -> Location:
        """Return the master that has a key's slot, as far as is known.

        Raises:
            StoreUnavailableError: if no node knows it.
        """
        return self._owner(key_slot(key.encode()))

    def forget(self) -> None:
        """As DataPool.forget."""
        self._slots.forget()
        for pool in list(self._pools.values()):
            pool.forget()

    def close(self) -> None:
        """As DataPool.close."""
        self._close_all_but(set())

    def _follow(
        self,
        items: Sequence[_Item],
        operation: Callable[[DataConnection, Sequence[_Item], bool], list[_T]],
    ) -> list[_T]:
        """Run an operation where the items' slot is, or is being moved to."""
        slot = key_slot(items[0][0].encode())
        owner, asking = self._owner(slot), False
        for _ in range(MAX_HOPS):
            try:
                return self._pool(owner).use(_on(operation, items, asking))
            except Redirected as error:
                if error.asking and len(items) > 1:  # some keys may have moved already
                    return [out for item in items for out in self._follow([item], operation)]
                owner = self._deployment.at(error.host or owner.host, error.port)
                asking = error.asking
                if not asking:
                    self._slots.moved(slot, owner)
            except Unreachable:
                self._refresh()
                if self._owner(slot) == owner:
                    raise
                owner, asking = self._owner(slot), False
        raise Moving("the cluster redirects in circles", retry_after_s=RETRY_AFTER_S)

    def _owner(self, slot: int) -> Location:
        if self._slots.get(slot) is None:
            self._refresh()
        owner = self._slots.get(slot)
        if owner is None:
            raise Moving("no node of the cluster has the slot", retry_after_s=RETRY_AFTER_S)
        return owner

    def _pool(self, owner: Location) -> DataPool:
        with self._lock:
            if owner not in self._pools:
                self._pools[owner] = DataPool(owner, self._timeout_s)
            return self._pools[owner]

    def _refresh(self) -> None:
        self._slots.refresh()
        self._close_all_but(self._slots.masters())

    def _close_all_but(self, owners: set[Location]) -> None:
        with self._lock:
            gone = [self._pools.pop(owner) for owner in self._pools.keys() - owners]
        for pool in gone:
            pool.close()


def _on(
    operation: Callable[[DataConnection, Sequence[_Item], bool], list[_T]],
    items: Sequence[_Item],
    asking: bool,
) -> Callable[[DataConnection], list[_T]]:
    return lambda connection: operation(connection, items, asking)


def _slots_by(node: Location) -> list[tuple[int, int, str, int]]:
    """Return what a node says: first slot, last slot, and the master's host and port, each."""
    with redis.Redis(
        host=node.host, port=node.port, retry=once(), **options(node, _ASK_TIMEOUT_S)
    ) as client:
        found: list[Any] = client.execute_command("CLUSTER SLOTS")
    return [
        (int(first), int(last), (master[0] or b"").decode(), int(master[1]))
        for first, last, master, *_ in found
    ]


def any_answered(sentinels: Sequence[Any], error: Exception) -> bool:
    """Return whether any Sentinel answered; `error` (MasterNotFoundError) lists the silent."""
    return not all(str(sentinel) in str(error) for sentinel in sentinels)


def once() -> Retry:
    """Return redis-py's way not to try again: what is retried is decided here."""
    return Retry(NoBackoff(), 0)
