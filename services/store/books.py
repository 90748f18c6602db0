"""The books: how many bytes each attempt holds, and which node is worth how much.

They live in Redis, so any number of store servers agree. Knows no manifests.
"""

from __future__ import annotations

from criticalkv.services.store import keys, scripts
from criticalkv.services.store.redis_data import RedisData


def value_of(cost: float, hits: int, nbytes: int) -> float:
    """Return what a node is worth per byte: cost to recompute × (1 + hits) ÷ bytes.

    Args:
        cost: milliseconds of prefill, or tokens where that is unknown.
        hits: reads so far.
        nbytes: payload bytes.
    """
    return cost * (1 + hits) / max(nbytes, 1)


class Books:
    """Accounts of bytes, in steps that are atomic each."""

    def __init__(self, redis: RedisData, limit_bytes: int) -> None:
        self._redis = redis
        self.limit_bytes = limit_bytes

    async def begin(self, member: str, lease_ms: int) -> bool:
        """Open an account for an attempt; False if there is one already."""
        opened = await self._redis.run(
            scripts.BOOK_BEGIN, [keys.SIZES, keys.WRITING], [member, lease_ms]
        )
        return bool(opened)

    async def reserve(self, member: str, nbytes: int) -> int:
        """Reserve bytes; return how many are too many (0 = reserved, -1 = no account)."""
        return int(
            await self._redis.run(
                scripts.BOOK_RESERVE, [keys.SIZES, keys.TOTAL], [member, nbytes, self.limit_bytes]
            )
        )

    async def renew(self, member: str, lease_ms: int) -> None:
        """Extend the lease of an unpublished attempt."""
        await self._redis.run(scripts.BOOK_RENEW, [keys.WRITING], [member, lease_ms])

    async def publish(
        self, node_id: str, attempt: str, nbytes: int, count: int, value: float
    ) -> None:
        """Book a published node of exactly `nbytes` in `count` segments."""
        await self._redis.run(
            scripts.BOOK_PUBLISH,
            [keys.SIZES, keys.TOTAL, keys.WRITING, keys.COUNTS, keys.INDEX, keys.USED],
            [keys.member(node_id, attempt), nbytes, count, node_id, repr(value)],
        )

    async def release(self, member: str) -> int:
        """Strike an attempt off; return the bytes that it held."""
        return int(
            await self._redis.run(
                scripts.BOOK_RELEASE,
                [keys.SIZES, keys.TOTAL, keys.WRITING, keys.COUNTS, keys.TRASH],
                [member],
            )
        )

    async def trash(self, member: str, delay_ms: int) -> None:
        """Have the janitor unlink a replaced generation after `delay_ms`."""
        await self._redis.run(scripts.BOOK_TRASH, [keys.TRASH], [member, delay_ms])

    async def use(self, node_id: str, value: float) -> None:
        """Note a read of a node and its new value."""
        await self._redis.run(scripts.BOOK_USE, [keys.INDEX, keys.USED], [node_id, repr(value)])

    async def forget(self, node_id: str) -> None:
        """Take a node out of the order of sacrifice."""
        await self._redis.commands([("ZREM", keys.INDEX, node_id), ("ZREM", keys.USED, node_id)])

    async def total(self) -> int:
        """Bytes held and reserved."""
        return int(await self._redis.command("GET", keys.TOTAL) or 0)

    async def cheapest(self, offset: int, count: int) -> list[str]:
        """Nodes by rising value, the longest unused first among equals."""
        found = await self._redis.command(
            "ZRANGE", keys.INDEX, offset, offset + count - 1, "WITHSCORES"
        )
        pairs = _pairs(found)
        if not pairs:
            return []
        used = await self._redis.command("ZMSCORE", keys.USED, *(node for node, _ in pairs))
        order = sorted(
            (value, float(at or 0), node) for (node, value), at in zip(pairs, used, strict=True)
        )
        return [node for _, _, node in order]


def _pairs(found: list[object]) -> list[tuple[str, float]]:
    # RESP3 gives pairs, RESP2 a flat list, redis-py sometimes tuples.
    flat: list[object] = []
    for item in found:
        flat.extend(item) if isinstance(item, list | tuple) else flat.append(item)
    return [
        (_text(name), float(_text(score)))
        for name, score in zip(flat[::2], flat[1::2], strict=True)
    ]


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
