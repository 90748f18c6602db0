"""redis-py's asyncio clients of one server, a Sentinel service, or a cluster, made alike.

A cluster is one ordinary client per server here: redis-py's own cluster client loses its
way when calls run at once while a slot moves or a server goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, NoScriptError

from criticalkv.services.store.topology import MAX_HOPS, Slots, any_answered, options
from criticalkv.shared.redis_location import Deployment, Location
from criticalkv.shared.resp import RETRY_AFTER_S, Moving

Argument = str | bytes | int | float
Command = Sequence[Argument]


class NoSentinelError(MasterNotFoundError):
    """No Sentinel answers."""


class UnknownScriptError(NoScriptError):
    """One server of a cluster does not know a script."""

    def __init__(self, server: Location) -> None:
        super().__init__()
        self.server = server


class Client(Protocol):
    """What runs commands. No call is repeated here."""

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip; return the replies, errors of Redis among them."""

    async def everywhere(self, *words: Argument) -> list[Any]:
        """Run a command without keys on every master; return the replies."""

    async def load(self, script: str, refused: NoScriptError) -> None:
        """Load a script where a reply of `pipeline` says that it is not known."""

    async def forget(self) -> None:
        """Close what is idle, and forget who was where."""

    async def close(self) -> None:
        """Close all connections."""


def client_of(deployment: Deployment, timeout_s: float) -> Client:
    """Return the client of a deployment; nothing connects yet."""
    if deployment.kind == "cluster":
        return ClusterClient(deployment, timeout_s)
    if deployment.kind == "sentinel":
        return SentinelClient(deployment, timeout_s)
    return ServerClient(_redis(deployment.server, timeout_s))


class ServerClient:
    """One server."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for words in commands:
            pipe.execute_command(*words)
        out: list[Any] = await pipe.execute(raise_on_error=False)
        return out

    async def everywhere(self, *words: Argument) -> list[Any]:
        return [await self._redis.execute_command(*words)]

    async def load(self, script: str, refused: NoScriptError) -> None:  # noqa: ARG002
        await self.everywhere("SCRIPT LOAD", script)

    async def forget(self) -> None:
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await self._redis.aclose()


class SentinelClient(ServerClient):
    """The master that Sentinels name."""

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        # A Sentinel that does not answer is passed over soon.
        self._sentinel: Any = _PrivateSentinel(deployment, timeout_s / 5)
        arguments = {**options(deployment.server, timeout_s), "retry": _once()}
        super().__init__(self._sentinel.master_for(deployment.service, **arguments))

    async def close(self) -> None:
        await super().close()
        await self._sentinel.aclose()


class ClusterClient:
    """A cluster. All keys of one command must share a slot."""

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._slots = Slots(deployment)
        self._refreshing = asyncio.Lock()
        self._clients: dict[Location, ServerClient] = {}

    async def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        await self._know()
        parts: dict[Location, list[int]] = {}
        for i, words in enumerate(commands):
            parts.setdefault(self._owner(words), []).append(i)
        out: list[Any] = [None] * len(commands)
        # All of them end before an error of one is raised: none is left behind.
        runs = (self._part(owner, commands, part, out) for owner, part in parts.items())
        for error in await asyncio.gather(*runs, return_exceptions=True):
            if error is not None:
                raise error
        for i, reply in enumerate(out):
            if isinstance(reply, AskError):
                out[i] = await self._follow(commands[i], reply)
        return out

    async def everywhere(self, *words: Argument) -> list[Any]:
        await self._know()
        runs = (self._client(master).everywhere(*words) for master in self._slots.masters())
        return [reply for replies in await asyncio.gather(*runs) for reply in replies]

    async def load(self, script: str, refused: NoScriptError) -> None:
        # Also on one that is only being given its first slot, and is no master yet.
        assert isinstance(refused, UnknownScriptError)
        await self._client(refused.server).everywhere("SCRIPT LOAD", script)

    async def forget(self) -> None:
        self._slots.forget()
        await asyncio.gather(*(client.forget() for client in self._clients.values()))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def _know(self) -> None:
        if not self._slots.known:
            async with self._refreshing:
                if not self._slots.known:
                    await asyncio.to_thread(self._slots.refresh)

    def _owner(self, words: Command) -> Location:
        owner = self._slots.get(_slot(words))
        if owner is None:
            raise Moving("no node of the cluster has the slot", retry_after_s=RETRY_AFTER_S)
        return owner

    def _client(self, server: Location) -> ServerClient:
        if server not in self._clients:
            self._clients[server] = ServerClient(_redis(server, self._timeout_s))
        return self._clients[server]

    async def _part(
        self, owner: Location, commands: Sequence[Command], part: list[int], out: list[Any]
    ) -> None:
        replies = await self._replies(owner, [commands[i] for i in part])
        for i, reply in zip(part, replies, strict=True):
            out[i] = reply

    async def _replies(self, server: Location, commands: Sequence[Command]) -> list[Any]:
        replies = await self._client(server).pipeline(commands)
        return [
            UnknownScriptError(server) if isinstance(reply, NoScriptError) else reply
            for reply in replies
        ]

    async def _follow(self, words: Command, redirected: AskError) -> Any:
        """Run a command where its slot has moved, or is being moved, to."""
        reply: Any = redirected
        for _ in range(MAX_HOPS):
            server = self._deployment.at(reply.host or self._owner(words).host, reply.port)
            moved = isinstance(reply, MovedError)
            if moved:
                self._slots.moved(_slot(words), server)
            commands: list[Command] = [words] if moved else [("ASKING",), words]
            reply = (await self._replies(server, commands))[-1]
            if not isinstance(reply, AskError):
                return reply
        raise Moving("the cluster redirects in circles", retry_after_s=RETRY_AFTER_S)


class _PrivateSentinel(Sentinel):
    """Sentinels that are not believed if they lead to another machine in the clear."""

    def __init__(self, deployment: Deployment, timeout_s: float) -> None:
        self._deployment = deployment
        super().__init__(  # type: ignore[no-untyped-call]
            [(seed.host, seed.port) for seed in deployment.seeds],
            sentinel_kwargs={**options(deployment.seeds[0], timeout_s), "retry": _once()},
        )

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            host, port = await super().discover_master(service_name)
        except MasterNotFoundError as error:
            if any_answered(self.sentinels, error):
                raise
            raise NoSentinelError("no Sentinel answers") from error
        self._deployment.at(host, port)
        return host, port


def _redis(server: Location, timeout_s: float) -> Any:
    arguments = {**options(server, timeout_s), "retry": _once()}
    if server.path:
        return redis_asyncio.Redis(unix_socket_path=server.path, **arguments)
    return redis_asyncio.Redis(host=server.host, port=server.port, **arguments)


def _slot(words: Command) -> int:
    key = words[3] if words[0] == "EVALSHA" else words[1]
    return int(key_slot(key if isinstance(key, bytes) else str(key).encode()))


def _once() -> Retry:
    # What is retried, and for how long, is decided by the caller.
    return Retry(NoBackoff(), 0)
