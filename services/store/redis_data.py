"""Redis as the store's metadata sees it: commands, scripts, and typed errors.

Payloads do not pass here; see `shared.resp` and `topology`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from redis import exceptions as redis_exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from criticalkv.services.store.guarded import guarded
from criticalkv.services.store.redis_clients import Argument as Argument
from criticalkv.services.store.redis_clients import Command, NoSentinelError, client_of
from criticalkv.shared import failpoints
from criticalkv.shared.breaker import Breaker
from criticalkv.shared.errors import ConfigError, StoreFullError, StoreUnavailableError
from criticalkv.shared.redis_location import PARAM, Deployment
from criticalkv.shared.resp import (
    FAILOVER_S,
    RETRY_AFTER_S,
    Moving,
    NobodyLeads,
    TimedOut,
    Unreachable,
    backoff,
    busy,
    tls_context,
)

log = logging.getLogger(__name__)

exceptions: Any = redis_exceptions  # older stubs lack some of its names
Call = tuple[str, Sequence[str], Sequence[Argument]]
"""A script, its keys and its arguments."""
_T = TypeVar("_T")
_LOADS = 3
"""Times that scripts are loaded for one call: a slot may move to yet another server."""
_MOVING = (
    exceptions.ReadOnlyError,
    exceptions.BusyLoadingError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    MasterNotFoundError,
)


class RedisData:
    """An asyncio client of one Redis, of any kind, that runs commands and scripts."""

    def __init__(
        self,
        deployment: Deployment,
        timeout_s: float,
        max_connections: int = 32,
        breaker: Breaker | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare it; nothing connects yet.

        Args:
            timeout_s: limit of one try of a command, and of waiting for a connection.
            max_connections: commands that run at once; more wait.
            breaker: shared by all who use this Redis.
            on_lost: called when the server turns out to be none, or out of reach, just now.
        """
        self._client = client_of(deployment, timeout_s)
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(max_connections)
        self._breaker = breaker or Breaker("Redis")
        self._on_lost = on_lost
        self._warned = False

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def command(self, *words: Argument) -> Any:
        """Run one command.

        Raises:
            StoreUnavailableError: if Redis does not answer, or refuses.
            StoreFullError: if it is out of memory.
        """
        return (await self.commands([words]))[0]

    async def commands(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip, without a transaction. Raises as `command`."""
        if not commands:
            return []
        return _results(await self._try(lambda: self._pipeline(commands)))

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run one script. Raises as `command`."""
        return (await self.run_many([(script, keys, args)]))[0]

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run several scripts in one round trip. Raises as `command`."""
        if not calls:
            return []
        return _results(await self._try(lambda: self._scripts(calls)))

    async def check(self, embedded: bool) -> None:
        """Refuse a Redis that would evict keys by itself.

        Raises:
            ConfigError: if its maxmemory-policy is not `noeviction`.
            StoreUnavailableError: if it does not answer.
        """
        await self._try(lambda: self._client.everywhere("PING"))
        policy = await self.eviction_policy()
        if policy != "noeviction" and not embedded:
            raise ConfigError(
                f"Redis has maxmemory-policy {policy}; set it to noeviction, the store evicts "
                "whole nodes itself",
                param=PARAM,
            )

    async def eviction_policy(self) -> str:
        """Return Redis's maxmemory-policy; of a cluster, one that is not noeviction.

        Raises:
            StoreUnavailableError: if it does not answer.
        """
        return policy_of(await self.memory_infos())

    async def memory_infos(self) -> list[dict[str, Any]]:
        """Return every master's INFO memory; none if Redis refuses to tell.

        Raises:
            StoreUnavailableError: if it does not answer.
        """
        try:
            return await self._try(lambda: self._client.everywhere("INFO", "memory"))
        except StoreUnavailableError as error:
            if not isinstance(error.__cause__, exceptions.ResponseError):
                raise  # no answer; a refusal is one
            if not self._warned:
                log.warning("cannot read Redis's INFO memory (%s): noeviction? room?", error)
            self._warned = True
            return []

    async def _scripts(self, calls: Sequence[Call]) -> list[Any]:
        words = [("EVALSHA", _sha(s), len(keys), *keys, *args) for s, keys, args in calls]
        out = await self._pipeline(words)
        # Known scripts vanish when a Redis restarts or another one takes over.
        for _ in range(_LOADS):
            unknown = [i for i, got in enumerate(out) if isinstance(got, exceptions.NoScriptError)]
            if not unknown:
                break
            await self._load((calls[i][0], out[i]) for i in unknown)
            again = await self._pipeline([words[i] for i in unknown])
            for i, got in zip(unknown, again, strict=True):
                out[i] = got
        return out

    async def _load(self, refused: Iterable[tuple[str, Any]]) -> None:
        """Load scripts where they are not known, each once."""
        wanted = {(script, getattr(error, "server", None)): error for script, error in refused}
        for (script, _), error in wanted.items():
            await self._client.load(script, error)

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies, errors among them; raise one after which all is to be retried."""
        out = await self._client.pipeline(commands)
        for got in out:
            if isinstance(got, _MOVING):
                raise got
        return out

    async def _try(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Run a call that may be repeated, in its turn and within its time."""
        await failpoints.passed("store.redis")
        self._breaker.begin(self._timeout_s).close()  # no queueing while it is open
        async with self._turn():
            with guarded(self._breaker, self._timeout_s):
                return await self._repeat(call)

    async def _repeat(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Run a call; once more if an old connection turns out to have died.

        And for FAILOVER_S while the server is being replaced.
        """
        pauses, again = backoff(FAILOVER_S), False
        while True:
            try:
                return await self._once(call)
            except Moving:
                if (pause := next(pauses, None)) is None:
                    raise
                await asyncio.sleep(pause)
            except Unreachable as error:
                if again or isinstance(error, TimedOut):
                    raise
                again = True

    async def _once(self, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            with _typed_errors():
                async with asyncio.timeout(self._timeout_s):
                    return await call()
        except (Moving, Unreachable):
            await self._client.forget()  # idle connections lead to the same server
            self._on_lost()
            raise

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            raise busy() from None
        try:
            yield
        finally:
            self._turns.release()


def policy_of(infos: Iterable[Mapping[str, Any]]) -> str:
    """Return the maxmemory-policy that INFO memory tells; one that is not noeviction if any."""
    policies = {str(info.get("maxmemory_policy", "noeviction")) for info in infos}
    return min(policies - {"noeviction"}, default="noeviction")


def check_url(url: str, ca: str = "") -> Deployment:
    """Parse a Redis URL and refuse one that would send payloads in the clear.

    Args:
        ca: certificate authority of rediss://, PEM file.

    Raises:
        ConfigError: if the URL is malformed, or names another machine without both
            TLS (rediss://) and a password; or if `ca` is no certificate.
    """
    deployment = Deployment.parse(url, ca).check()
    if deployment.server.tls:
        try:
            tls_context(ca)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ConfigError(f"store.redis_ca: {why}", param="store.redis_ca") from error
    return deployment


def _results(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            with _typed_errors():
                raise reply
    return replies


@contextmanager
def _typed_errors() -> Iterator[None]:
    # The type only: messages may repeat arguments.
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise StoreFullError("Redis is out of memory", retry_after_s=RETRY_AFTER_S) from error
    except (exceptions.TimeoutError, TimeoutError) as error:
        raise TimedOut("Redis does not answer in time", retry_after_s=RETRY_AFTER_S) from error
    except (exceptions.RedisError, OSError) as error:
        raise _kind(error)(
            f"Redis failed: {type(error).__name__}", retry_after_s=RETRY_AFTER_S
        ) from error


def _kind(error: Exception) -> type[StoreUnavailableError]:
    if isinstance(error, NoSentinelError):
        return NobodyLeads
    # redis-py's Sentinel client turns a demotion into a lost connection.
    if isinstance(error.__context__, exceptions.ReadOnlyError) or isinstance(error, _MOVING):
        return Moving
    if isinstance(error, exceptions.AuthenticationError | exceptions.ResponseError):
        return StoreUnavailableError
    return Unreachable


def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
