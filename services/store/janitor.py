"""The janitor: brings the books back in line with what Redis really holds.

Manifests expire by themselves; their accounts, index entries and parents' child lists
do not. Servers may die between two steps. All of it is repaired here, in small steps
and idempotently, so any number of servers may run a janitor at once.
"""

from __future__ import annotations

from criticalkv.services.store import keys, scripts
from criticalkv.services.store.books import Books, value_of
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.tasks import repeat

_STEP = 256


class Janitor:
    """Repairs accounts; `run` does so for ever."""

    def __init__(self, redis: RedisData, nodes: Nodes, books: Books, grace_ms: int) -> None:
        """Prepare one.

        Args:
            grace_ms: the longest read; what no manifest names lives this much longer.
        """
        self._redis = redis
        self._nodes = nodes
        self._books = books
        self._grace_ms = grace_ms

    async def run(self, interval_s: float) -> None:
        """Sweep every `interval_s` seconds until cancelled."""
        await repeat(interval_s, self.sweep, "clean-up")

    async def sweep(self) -> None:
        """Do one full round."""
        await self._empty_trash()
        await self._end_dead_puts()
        await self._check_accounts()
        await self._check_index()

    async def _empty_trash(self) -> None:
        # Replaced and expired generations whose longest read is over.
        for member in await self._due(keys.TRASH):
            if await self._named(member):
                await self._redis.command("ZREM", keys.TRASH, member)
            else:
                await self._remove(member)

    async def _end_dead_puts(self) -> None:
        # Puts whose server died: published after all, or their segments have expired.
        for member in await self._due(keys.WRITING):
            await self._settle(member)

    async def _check_accounts(self) -> None:
        cursor = "0"
        while True:
            reply = await self._redis.command("HSCAN", keys.SIZES, cursor, "COUNT", _STEP)
            cursor = str(int(reply[0]))
            found = reply[1]
            names = [_text(name) for name in (found if isinstance(found, dict) else found[::2])]
            for member in await self._orphans(names):
                # Not at once: a put may be between its publication and its books, and
                # a read may still run.
                await self._books.trash(member, self._grace_ms)
            if cursor == "0":
                return

    async def _orphans(self, members: list[str]) -> list[str]:
        # Accounts that no manifest names and that are neither being written nor trash.
        replies = await self._redis.commands(
            [
                command
                for member in members
                for command in (
                    ("HGET", keys.manifest(member.split(":")[0]), "attempt"),
                    ("ZSCORE", keys.WRITING, member),
                    ("ZSCORE", keys.TRASH, member),
                )
            ]
        )
        return [
            member
            for i, member in enumerate(members)
            if _text(replies[3 * i] or b"") != member.split(":")[1]
            and replies[3 * i + 1] is None
            and replies[3 * i + 2] is None
        ]

    async def _check_index(self) -> None:
        offset = 0
        while True:
            found = await self._redis.command("ZRANGE", keys.INDEX, offset, offset + _STEP - 1)
            node_ids = [_text(node_id) for node_id in found]
            alive = await self._nodes.present(node_ids)
            dead = [n for n, lives in zip(node_ids, alive, strict=True) if not lives]
            for node_id in dead:
                await self._books.forget(node_id)
            offset += len(node_ids) - len(dead)
            if len(node_ids) < _STEP:
                return

    async def _settle(self, member: str) -> None:
        node_id, attempt = member.split(":")
        found = await self._redis.command(
            "HMGET", keys.manifest(node_id), "attempt", "bytes", "count", "cost", "hits"
        )
        if _text(found[0] or b"") != attempt:
            await self._books.release(member)
            return
        nbytes, count, cost, hits = int(found[1]), int(found[2]), float(found[3]), int(found[4])
        value = value_of(cost, hits, nbytes)
        await self._books.publish(node_id, attempt, nbytes, count, value)

    async def _named(self, member: str) -> bool:
        node_id, attempt = member.split(":")
        found = await self._redis.command("HGET", keys.manifest(node_id), "attempt")
        return _text(found or b"") == attempt

    async def _remove(self, member: str) -> None:
        node_id, attempt = member.split(":")
        count = int(await self._redis.command("HGET", keys.COUNTS, member) or 0)
        await self._nodes.unlink_segments(node_id, attempt, count)
        await self._books.release(member)

    async def _due(self, name: str) -> list[str]:
        found = await self._redis.run(scripts.DUE, [name], [_STEP])
        return [_text(member) for member in found]


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
