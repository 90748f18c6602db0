"""The books: what each attempt holds, whose it is, and which node is worth how much.

They live in Redis, so any number of store servers agree. Knows no manifests.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from criticalkv.services.store import keys, scripts
from criticalkv.services.store.order import Order, ValueOrder
from criticalkv.services.store.redis_data import Argument, RedisData


@dataclass(frozen=True)
class Worth:
    """What the order of sacrifice asks of a node: cost to recompute, reads, bytes."""

    cost: float
    hits: int
    nbytes: int


@dataclass(frozen=True)
class Cut:
    """A dropped tier that is to be unlinked.

    Attributes:
        tier: its index in the manifest as it was put.
        at: when, as the books write it; "" = not known.
    """

    node_id: str
    attempt: str
    tier: int
    at: str = ""

    @property
    def member(self) -> str:
        """The attempt's name in the books."""
        return keys.member(self.node_id, self.attempt)

    @property
    def name(self) -> str:
        """The tier's own name in the books."""
        return keys.cut(self.node_id, self.attempt, self.tier)

    @classmethod
    def parse(cls, name: str, at: str) -> Cut:
        """Undo `name`."""
        node_id, attempt, tier = name.split(":")
        return cls(node_id, attempt, int(tier), at)


@dataclass(frozen=True)
class State:
    """How full the store is.

    Attributes:
        total: bytes held and reserved.
        freeing: those of them that will be unlinked.
        now_us: Redis's time.
    """

    total: int
    freeing: int
    now_us: int


class Books:
    """Accounts of bytes, nodes and pins, in steps that are atomic each."""

    def __init__(self, redis: RedisData, limit_bytes: int, order: Order | None = None) -> None:
        self._redis = redis
        self.limit_bytes = limit_bytes
        self.order: Order = order or ValueOrder()

    # ------------------------------------------------------------ attempts

    async def begin(self, member: str, lease_ms: int) -> bool:
        """Open an account for an attempt; False if there is one already."""
        return bool(await self._run(scripts.BOOK_BEGIN, member, lease_ms, secrets.token_hex(8)))

    async def admit(self, member: str, tenant: str, max_nodes: int) -> int:
        """Count an attempt against its tenant.

        Returns:
            How many nodes are too many; 0 = counted, -1 = no account.
        """
        node_id = member.split(":")[0]
        return int(await self._run(scripts.BOOK_ADMIT, member, node_id, tenant, max_nodes))

    async def reserve(self, member: str, nbytes: int, own_limit: int = 0) -> tuple[int, int]:
        """Have an attempt hold `nbytes` altogether, unless they are too many.

        Args:
            own_limit: bytes that all attempts of the same tenant may hold; 0 = any.

        Returns:
            Bytes too many for the store and for the tenant; (0, 0) = reserved,
            (-1, 0) = no account.
        """
        limits = (self.limit_bytes, own_limit)
        missing, own = await self._run(scripts.BOOK_RESERVE, member, nbytes, *limits)
        return int(missing), int(own)

    async def renew(self, member: str, lease_ms: int) -> None:
        """Extend the lease of an unpublished attempt."""
        await self._run(scripts.BOOK_RENEW, member, lease_ms)

    async def publish(
        self, member: str, count: int, worth: Worth, *, tall: bool, tenant: str = ""
    ) -> None:
        """Book a published node of exactly `worth.nbytes` in `count` segments.

        Args:
            tall: whether it can lose a tier.
            tenant: whom it counts against, if that is not known yet.
        """
        node_id = member.split(":")[0]
        value = (repr(self._value(worth)), self.order.clock)
        await self._run(
            scripts.BOOK_PUBLISH, member, worth.nbytes, count, node_id, *value, int(tall), tenant
        )

    async def release(self, member: str) -> int:
        """Strike an attempt off; return the bytes that it held."""
        return int(await self._run(scripts.BOOK_RELEASE, member))

    async def trash(self, member: str, delay_ms: int, count: int = 0) -> None:
        """Have the janitor unlink an attempt that no manifest names after `delay_ms`.

        Args:
            count: its segments, in case it was never booked; 0 = not known.
        """
        await self._run(scripts.BOOK_TRASH, member, delay_ms, count)

    async def keep(self, member: str) -> None:
        """Undo `trash`."""
        await self._run(scripts.BOOK_KEEP, member)

    async def total(self) -> int:
        """Bytes held and reserved."""
        return int(await self._redis.command("GET", keys.TOTAL) or 0)

    async def state(self) -> State:
        """How full the store is."""
        total, freeing, now_us = await self._run(scripts.BOOK_STATE)
        return State(int(total), int(freeing), int(now_us))

    async def goes(self, tenant: str) -> bool:
        """Whether anything of a tenant's is on its way out."""
        return bool(await self._run(scripts.BOOK_GOES, tenant))

    async def recount(self, interval_ms: int) -> None:
        """Correct all sums, unless some server did so within the interval."""
        await self._run(scripts.RECOUNT, interval_ms)

    # -------------------------------------------------------- dropped tiers

    async def cut(self, sizes: dict[Cut, int], delay_ms: int) -> list[Cut]:
        """Have dropped tiers, with their bytes, unlinked after `delay_ms`."""
        pairs = [word for cut, nbytes in sizes.items() for word in (cut.name, nbytes)]
        at = _text(await self._run(scripts.BOOK_CUT, delay_ms, *pairs))
        return [Cut(cut.node_id, cut.attempt, cut.tier, at) for cut in sizes]

    async def uncut(self, cut: Cut) -> None:
        """Undo `cut`, unless somebody scheduled the tier again."""
        await self._run(scripts.BOOK_UNCUT, cut.name, cut.at)

    async def cut_done(self, cut: Cut) -> int:
        """Note that a dropped tier has been unlinked; return the bytes freed by that."""
        return int(await self._run(scripts.BOOK_CUT_DONE, cut.name, cut.member))

    async def cuts(self, *, due: bool, count: int, offset: int = 0) -> list[Cut]:
        """Dropped tiers to be unlinked, the earliest first; only those that are due."""
        if due:
            found = await self._redis.run(scripts.DUE, [keys.CUTS], [count])
        else:
            last = offset + count - 1
            found = await self._redis.command("ZRANGE", keys.CUTS, offset, last, "WITHSCORES")
        return [Cut.parse(name, repr(at)) for name, at in _pairs(found)]

    async def mend(self, member: str, kept: int, dropped: dict[Cut, int], delay_ms: int) -> bool:
        """Make an account hold what its manifest says.

        Args:
            kept: bytes of the tiers that are in use.
            dropped: bytes of those that are not, each for as long as it is in `cuts`.
            delay_ms: when to unlink those that are in neither.
        """
        pairs = [word for cut, nbytes in dropped.items() for word in (cut.name, nbytes)]
        return bool(await self._run(scripts.BOOK_MEND, member, kept, delay_ms, *pairs))

    # --------------------------------------------------- order of sacrifice

    async def use(self, node_id: str, worth: Worth) -> bool:
        """Note a read of a node and its new worth; False if the books do not list it."""
        value = (repr(self._value(worth)), self.order.clock)
        return bool(await self._run(scripts.BOOK_USE, node_id, *value))

    async def shrunk(self, node_id: str, old: Worth, new: Worth, *, tall: bool) -> None:
        """Note a node's new size; `tall` as in `publish`."""
        difference = self._value(new) - self._value(old)
        word = secrets.token_hex(8)
        await self._run(scripts.BOOK_REVALUE, node_id, repr(difference), int(tall), word)

    async def forget(self, node_id: str, *, sacrificed: bool = False) -> None:
        """Take a node out of the order of sacrifice.

        Args:
            sacrificed: it went for its low value: what was last used before is old now.
        """
        await self._run(scripts.BOOK_FORGET, node_id, int(sacrificed))

    async def cheapest(
        self, offset: int, count: int, *, tenant: str = "", tall: bool = False
    ) -> list[tuple[str, int]]:
        """Nodes in the order of sacrifice, and when each was last used, µs.

        Args:
            tenant: only this one's; "" = all.
            tall: only those that can lose a tier.
        """
        name = keys.of_tenant(keys.TALL if tall else keys.INDEX, tenant)
        found = await self._redis.command("ZRANGE", name, offset, offset + count - 1)
        places = [_text(place).rpartition(":") for place in found]
        return [(node_id, int(used or 0)) for used, _, node_id in places]

    async def owners(self, members: Sequence[str]) -> list[str]:
        """Tenants that attempts count against, "" where that is nobody."""
        if not members:
            return []
        found = await self._redis.command("HMGET", keys.OWNERS, *members)
        return [_text(tenant or b"") for tenant in found]

    # ---------------------------------------------------------------- pins

    async def pin(self, tenant: str, node_id: str, max_pins: int) -> bool:
        """Count a pin against its tenant; False if that has `max_pins` (0 = no limit)."""
        return bool(await self._run(scripts.BOOK_PIN, tenant, node_id, max_pins))

    async def unpin(self, tenant: str, node_id: str, age_ms: int = 0) -> None:
        """Strike a pin off, if it is at least that old."""
        await self._run(scripts.BOOK_UNPIN, tenant, node_id, age_ms)

    def _value(self, worth: Worth) -> float:
        return self.order.value(worth.cost, worth.hits, worth.nbytes)

    async def _run(self, script: str, *arguments: Argument) -> Any:
        return await self._redis.run(script, keys.BOOKS, arguments)


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
