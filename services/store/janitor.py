"""The janitor: brings the books back in line with what Redis really holds.

Manifests expire by themselves; their accounts, index entries and parents' child lists
do not. Servers may die between two steps. All of it is repaired here, in small steps
and idempotently, so any number of servers may run a janitor at once.
"""

from __future__ import annotations

from criticalkv.services.store import keys, scripts
from criticalkv.services.store.books import Books
from criticalkv.services.store.metrics import METRICS
from criticalkv.services.store.nodes import Nodes
from criticalkv.services.store.redis_data import RedisData
from criticalkv.services.store.shrinking import Shrinker
from criticalkv.services.store.tasks import repeat

_STEP = 256
RECOUNT_MS = 60_000
PIN_MS = 60_000
"""How long a pin may be in the books before its node says so."""


class Janitor:
    """Repairs accounts; `run` does so for ever."""

    def __init__(
        self, redis: RedisData, nodes: Nodes, books: Books, shrinker: Shrinker, grace_ms: int
    ) -> None:
        """Prepare one.

        Args:
            grace_ms: the longest read; what no manifest names lives this much longer.
        """
        self._redis = redis
        self._nodes = nodes
        self._books = books
        self._shrinker = shrinker
        self._grace_ms = grace_ms

    async def run(self, interval_s: float) -> None:
        """Sweep every `interval_s` seconds until cancelled."""
        await repeat(interval_s, self.sweep, "clean-up")

    async def sweep(self) -> None:
        """Do one full round."""
        await self._empty_trash()
        await self._shrinker.unlink_due()
        await self._end_dead_puts()
        await self._check_accounts()
        await self._check_index()
        await self._check_pins()
        await self._books.recount(RECOUNT_MS)

    async def empty_early(self, nbytes: int, tenant: str = "") -> int:
        """Unlink attempts before their longest read is over, until `nbytes` are free.

        Args:
            tenant: only this one's; "" = all.

        Returns:
            The bytes freed.
        """
        freed = 0
        members = [_text(m) for m in await self._redis.command("ZRANGE", keys.TRASH, 0, -1)]
        for begin in range(0, len(members), _STEP):
            step = members[begin : begin + _STEP]
            owners = await self._books.owners(step)
            for member, owner in zip(step, owners, strict=True):
                if freed < nbytes and tenant in ("", owner) and not await self._named(member):
                    freed += await self._remove(member)
                    METRICS.early_unlinks.inc()
        return freed

    async def _empty_trash(self) -> None:
        # Replaced and expired generations whose longest read is over.
        while members := await self._due(keys.TRASH):
            for member in members:
                if await self._named(member):
                    await self._books.keep(member)
                else:
                    await self._remove(member)
            if len(members) < _STEP:
                return

    async def _end_dead_puts(self) -> None:
        # Puts whose server died: published after all, or their segments have expired.
        for member in await self._due(keys.WRITING):
            await self._settle(member)

    async def _check_accounts(self) -> None:
        cursor = "0"
        while True:
            reply = await self._redis.command("HSCAN", keys.SIZES, cursor, "COUNT", _STEP)
            cursor = str(int(reply[0]))
            await self._check_sizes(_sizes(reply[1]))
            if cursor == "0":
                return

    async def _check_sizes(self, sizes: dict[str, int]) -> None:
        # Of attempts that are neither being written nor trash: what no manifest names is an
        # orphan; what holds other bytes than its manifest says has lost a note of its cuts.
        replies = await self._redis.commands(
            [
                command
                for member in sizes
                for command in (
                    ("HMGET", keys.manifest(member.split(":")[0]), "attempt", "bytes"),
                    ("ZSCORE", keys.WRITING, member),
                    ("ZSCORE", keys.TRASH, member),
                    ("HEXISTS", keys.USED, member.split(":")[0]),
                )
            ]
        )
        for i, (member, size) in enumerate(sizes.items()):
            (attempt, nbytes), writing, trash, listed = replies[4 * i : 4 * i + 4]
            if writing is not None or trash is not None:
                continue
            if _text(attempt or b"") != member.split(":")[1]:
                # Not at once: a put may be between its publication and its books, and
                # a read may still run.
                await self._books.trash(member, self._grace_ms)
            elif int(nbytes) != size:
                await self._shrinker.mend(member)
            elif not listed:
                # Published while another server was forgetting what it had dropped of it.
                await self._nodes.settle(*member.split(":"))

    async def _check_index(self) -> None:
        offset = 0
        while True:
            found = await self._redis.command("ZRANGE", keys.INDEX, offset, offset + _STEP - 1)
            places = [_text(place) for place in found]
            node_ids = [place.rpartition(":")[2] for place in places]
            alive = await self._nodes.present(node_ids)
            dead = [p for p, lives in zip(places, alive, strict=True) if not lives]
            for place in dead:
                await self._books.forget(place.rpartition(":")[2])
            if dead:  # with a place that the books do not know, too
                await self._redis.command("ZREM", keys.INDEX, *dead)
            offset += len(node_ids) - len(dead)
            if len(node_ids) < _STEP:
                return

    async def _check_pins(self) -> None:
        # Pins that were counted and never made, or taken back and not struck off.
        offset = 0
        while True:
            found = await self._redis.command("ZRANGE", keys.PINS, offset, offset + _STEP - 1)
            pins = [_text(name).split(":") for name in found]
            commands = [("SISMEMBER", keys.pins(node_id), tenant) for tenant, node_id in pins]
            there = await self._redis.commands(commands)
            for (tenant, node_id), pinned in zip(pins, there, strict=True):
                if not pinned:
                    await self._books.unpin(tenant, node_id, PIN_MS)
            offset += len(pins)
            if len(pins) < _STEP:
                return

    async def _settle(self, member: str) -> None:
        node_id, attempt = member.split(":")
        if await self._nodes.settle(node_id, attempt):
            return
        if count := await self._nodes.replaced(node_id, attempt):
            await self._books.trash(member, self._grace_ms, count)
        else:
            await self._books.release(member)

    async def _named(self, member: str) -> bool:
        node_id, attempt = member.split(":")
        found = await self._redis.command("HGET", keys.manifest(node_id), "attempt")
        return _text(found or b"") == attempt

    async def _remove(self, member: str) -> int:
        node_id, attempt = member.split(":")
        count = int(await self._redis.command("HGET", keys.COUNTS, member) or 0)
        await self._nodes.unlink_segments(node_id, attempt, range(count))
        return await self._books.release(member)

    async def _due(self, name: str) -> list[str]:
        found = await self._redis.run(scripts.DUE, [name], [_STEP])
        return [_text(member) for member in found[::2]]


def _sizes(found: dict[bytes, bytes] | list[bytes]) -> dict[str, int]:
    flat = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
    return {_text(member): int(size) for member, size in flat.items()}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
