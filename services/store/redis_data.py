"""Redis as the store's metadata sees it: commands, scripts, and typed errors.

Payloads do not pass here; see `resp`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis.asyncio as redis_asyncio
from redis import exceptions as redis_exceptions

from criticalkv.shared.errors import ConfigError, StoreFullError, StoreUnavailableError
from criticalkv.shared.loopback import is_loopback
from criticalkv.shared.resp import Location

log = logging.getLogger(__name__)

exceptions: Any = redis_exceptions  # older stubs lack some of its names
Argument = str | bytes | int | float
Call = tuple[str, Sequence[str], Sequence[Argument]]
"""A script, its keys and its arguments."""


class RedisData:
    """An asyncio connection pool to Redis that runs commands and scripts."""

    def __init__(self, url: str, timeout_s: float, max_connections: int = 32) -> None:
        """Prepare the pool; nothing connects yet.

        Args:
            url: redis://, rediss:// or unix:// URL.
            timeout_s: limit of each socket operation and of waiting for a connection.
        """
        pool: Any = redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
        self._client: Any = redis_asyncio.Redis(connection_pool=pool)
        self._pool: Any = pool

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._pool.disconnect()

    async def command(self, *words: Argument) -> Any:
        """Run one command.

        Raises:
            StoreUnavailableError: if Redis does not answer.
            StoreFullError: if it is out of memory.
        """
        with _typed_errors():
            return await self._client.execute_command(*words)

    async def commands(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Run commands in one round trip, without a transaction. Raises as `command`."""
        if not commands:
            return []
        with _typed_errors():
            pipe = self._client.pipeline(transaction=False)
            for words in commands:
                pipe.execute_command(*words)
            out: list[Any] = await pipe.execute()
        return out

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run one script. Raises as `command`."""
        words = ("EVALSHA", _sha(script), len(keys), *keys, *args)
        with _typed_errors():
            try:
                return await self._client.execute_command(*words)
            except exceptions.NoScriptError:
                await self._client.execute_command("SCRIPT LOAD", script)
                return await self._client.execute_command(*words)

    async def run_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run several scripts in one round trip. Raises as `command`."""
        with _typed_errors():
            for script in {script for script, _, _ in calls}:
                await self._load(script)
        return await self.commands(
            [("EVALSHA", _sha(script), len(keys), *keys, *args) for script, keys, args in calls]
        )

    async def _load(self, script: str) -> None:
        known = await self._client.execute_command("SCRIPT EXISTS", _sha(script))
        if not known[0]:
            await self._client.execute_command("SCRIPT LOAD", script)

    async def check(self, embedded: bool) -> None:
        """Refuse a Redis that would evict keys by itself.

        Raises:
            ConfigError: if its maxmemory-policy is not `noeviction`.
            StoreUnavailableError: if it does not answer.
        """
        await self.command("PING")
        try:
            info = await self.command("INFO", "memory")
        except StoreUnavailableError as error:
            log.warning("cannot read Redis's maxmemory-policy (%s); it must be noeviction", error)
            return
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction" and not embedded:
            raise ConfigError(
                f"Redis has maxmemory-policy {policy}; set it to noeviction, the store evicts "
                "whole nodes itself",
                param="store.redis_url",
            )


def check_url(url: str) -> Location:
    """Parse a Redis URL and refuse one that would send payloads in the clear.

    Raises:
        ConfigError: if the URL is malformed, or names another machine without both
            TLS (rediss://) and a password.
    """
    location = Location.parse(url)
    if location.path or is_loopback(location.host):
        return location
    if not (location.tls and location.password):
        raise ConfigError(
            "store.redis_url names another machine: it needs rediss:// (TLS) and a password",
            param="store.redis_url",
        )
    return location


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise StoreFullError("Redis is out of memory", retry_after_s=1.0) from error
    except (exceptions.RedisError, OSError) as error:
        # The type only: messages may repeat arguments.
        raise StoreUnavailableError(f"Redis failed: {type(error).__name__}") from error


def _sha(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
