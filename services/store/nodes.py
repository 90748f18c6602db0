"""Nodes: publishing, finding, extending, pinning and dropping them.

The manifest hash is the node: who removes it has removed the node for every reader.
Payloads are written and read elsewhere.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import keys, scripts
from criticalkv.services.store.books import Books, Worth
from criticalkv.services.store.metadata_room import MetadataRoom
from criticalkv.services.store.quotas import Quotas
from criticalkv.services.store.redis_data import Argument, Call, RedisData
from criticalkv.shared import failpoints
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.config import StoreConfig
from criticalkv.shared.errors import CorruptNodeError, LeaseLostError, NodeMissingError

UNLINK_STEP = 64
"""Segments (≤ 1 MiB each) unlinked at once: freeing more stalls Redis noticeably."""
ADOPTION_MS = 30_000
"""How long a child may be announced to its parent before it is published."""
LOOKED_AT = 2
"""Children of a node that are looked at whenever one is announced, which each is twice: of
those that are listed, no more than about one of four is gone."""
ANCESTOR_MARGIN_MS = 2_000
"""By how much an ancestor outlives the node below it."""


@dataclass(frozen=True)
class Opened:
    """What a read starts from."""

    generation: int
    attempt: str
    parts: bytes


class Nodes:
    """All nodes of the store."""

    def __init__(
        self,
        redis: RedisData,
        books: Books,
        config: StoreConfig,
        room: MetadataRoom | None = None,
    ) -> None:
        self._redis = redis
        self._books = books
        self._room = room or MetadataRoom(config)
        self._node_ttl_ms = config.node_ttl_s * 1000
        self._record_ttl_ms = config.record_ttl_s * 1000
        self._grace_ms = int(config.read_deadline_s * 1000)
        self._floor = config.shrink_floor
        self._quotas = Quotas(config)

    async def publish(
        self,
        manifest: Manifest,
        commit: pb.PutCommit,
        lease_token: str,
        tenant: str = "",
    ) -> pb.PutResult:
        """Make a node visible, unless an equal or better one is.

        Args:
            tenant: whom it counts against; it lives no longer than that one's quota says.

        Raises:
            LeaseLostError: if another holds the node's lease, or segments have expired.
            NodeMissingError: if neither the parent nor its token record is stored.
        """
        node_id = manifest.node_id
        ttl_ms = self._quotas.of(tenant).shortened(commit.ttl_ms or self._node_ttl_ms)
        if not await self._adopt(manifest):
            raise NodeMissingError.of(manifest.ancestors[-1], "the parent has been deleted")
        reply = await self._redis.run(
            scripts.PUBLISH,
            [
                keys.manifest(node_id),
                keys.pins(node_id),
                keys.pinned_below(node_id),
                keys.lease(node_id),
                keys.record(node_id),
                keys.children(node_id),
            ],
            [
                keys.segments(node_id, manifest.attempt),
                len(manifest.segments),
                lease_token,
                ttl_ms,
                self._grace_ms,
                commit.token_record,
                commit.record_ttl_ms or self._record_ttl_ms,
                self._room.longest_ms,
                manifest.tiers[-1],
                *_fields(manifest, commit, tenant),
            ],
        )
        return await self._published(manifest, reply, ttl_ms, tenant)

    async def _published(
        self, manifest: Manifest, reply: list[bytes | int], ttl_ms: int, tenant: str
    ) -> pb.PutResult:
        node_id, outcome = manifest.node_id, reply[0]
        if outcome == b"lease":
            raise LeaseLostError("another worker holds the node's lease")
        if outcome == b"missing":
            raise LeaseLostError(f"segment {reply[1]!r} has expired before the commit")
        if outcome == b"present":
            await self.touch(node_id, ttl_ms)
            return pb.PutResult(published=False, generation=int(reply[1]))
        await failpoints.passed("store.put.published")
        nbytes = manifest.tier_bytes()[-1]
        await self._books.publish(
            keys.member(node_id, manifest.attempt),
            len(manifest.segments),
            Worth(cost_of(manifest), 0, nbytes),
            tall=lower_tier(manifest.tiers, self._floor) is not None,
            tenant=tenant,
        )
        if reply[2]:
            old = keys.member(node_id, _text(reply[2]))
            await self._books.trash(old, self._grace_ms, int(reply[3]))
        if not await self._adopt(manifest):  # deleted between the two steps
            await self.drop(node_id, manifest.attempt, guard="unbind")
            raise NodeMissingError.of(manifest.ancestors[-1], "the parent has been deleted")
        await self._extend(list(manifest.ancestors), ttl_ms + ANCESTOR_MARGIN_MS)
        return pb.PutResult(published=True, generation=int(reply[1]), stored_bytes=nbytes)

    async def open(self, node_id: str) -> Opened:
        """Read the manifest and count the hit.

        Raises:
            NodeMissingError: if there is no such node.
        """
        node = await self._redis.run(scripts.OPEN, [keys.manifest(node_id)], [])
        if node is None:
            raise NodeMissingError.of(node_id, "not stored")
        generation, attempt, parts, cost, nbytes, hits = node
        if not await self._books.use(node_id, Worth(float(cost), int(hits), int(nbytes))):
            await self.settle(node_id, attempt.decode())  # the books were lost, or are behind
        return Opened(int(generation), attempt.decode(), parts)

    async def stat(self, node_ids: Sequence[str]) -> list[pb.NodeStat]:
        """Describe nodes, in the order asked."""
        commands: list[Sequence[Argument]] = []
        for node_id in node_ids:
            commands.append(("HMGET", keys.manifest(node_id), "stat", "generation"))
            commands.append(("PTTL", keys.manifest(node_id)))
            commands.append(("SCARD", keys.pins(node_id)))
        replies = await self._redis.commands(commands)
        return [_stat(node_id, *replies[3 * i : 3 * i + 3]) for i, node_id in enumerate(node_ids)]

    async def present(self, node_ids: Sequence[str]) -> list[bool]:
        """Whether each node is stored."""
        replies = await self._redis.commands(
            [("EXISTS", keys.manifest(node_id)) for node_id in node_ids]
        )
        return [bool(reply) for reply in replies]

    async def settle(self, node_id: str, attempt: str) -> bool:
        """Book an attempt that was published, and that the books do not know as such.

        False if the manifest does not name it.
        """
        found = await self._redis.command(
            "HMGET",
            keys.manifest(node_id),
            *("attempt", "bytes", "count", "cost", "hits", "stat", "tenant"),
        )
        if found[0] is None or _text(found[0]) != attempt:
            return False
        nbytes, count, cost, hits = int(found[1]), int(found[2]), float(found[3]), int(found[4])
        tiers = tuple(pb.NodeStat.FromString(found[5]).tiers)
        await self._books.publish(
            keys.member(node_id, attempt),
            count,
            Worth(cost, hits, nbytes),
            tall=lower_tier(tiers, self._floor) is not None,
            tenant=_text(found[6] or b""),
        )
        return True

    async def replaced(self, node_id: str, attempt: str) -> int:
        """Segments of an attempt that the present one has replaced; 0 = it has not."""
        found = await self._redis.command(
            "HMGET", keys.manifest(node_id), "replaced", "replaced_count"
        )
        return int(found[1]) if found[0] is not None and _text(found[0]) == attempt else 0

    async def names(self, node_id: str, attempt: str) -> bool:
        """Whether the node is stored and its manifest names this attempt."""
        found = await self._redis.command("HGET", keys.manifest(node_id), "attempt")
        return found is not None and bytes(found) == attempt.encode()

    async def known(self, node_id: str) -> bool:
        """Whether the node or at least its token record is stored."""
        found = await self._redis.command("EXISTS", keys.manifest(node_id), keys.record(node_id))
        return bool(found)

    async def records(self, node_ids: Sequence[str]) -> list[bytes]:
        """Token records, empty where there is none."""
        replies = await self._redis.commands(
            [("GET", keys.record(node_id)) for node_id in node_ids]
        )
        return [bytes(reply or b"") for reply in replies]

    async def touch(self, node_id: str, ttl_ms: int) -> bool:
        """Extend a node and its ancestors, as far as its tenant's quota allows.

        False if the node is not stored.
        """
        key = keys.manifest(node_id)
        ancestors, tenant = await self._redis.command("HMGET", key, "ancestors", "tenant")
        if ancestors is None:
            return False
        ttl_ms = self._quotas.of(_text(tenant or b"")).shortened(ttl_ms)
        await self._extend(_text(ancestors).split(), ttl_ms + ANCESTOR_MARGIN_MS)
        return bool(await self._extend([node_id], ttl_ms))

    async def hold(self, member: str, ancestors: Sequence[str], lease_ms: int) -> None:
        """Keep what a running put stands on: no eviction, no expiry before the lease's."""
        calls: list[Call] = [(scripts.HOLD, [keys.holds(a)], [member, lease_ms]) for a in ancestors]
        if calls:
            await self._redis.run_many(calls)
            await self._extend(ancestors, lease_ms)

    async def let_go(self, member: str, ancestors: Sequence[str]) -> None:
        """End `hold`."""
        await self._redis.commands([("ZREM", keys.holds(a), member) for a in ancestors])

    async def pin(self, tenant: str, node_id: str, *, limited: bool = True) -> int:
        """Keep a node and its ancestors; return the node's number of pins.

        Args:
            limited: whether the tenant's quota may refuse the pin.

        Raises:
            NodeMissingError: if the node is not stored.
            QuotaExceededError: if the tenant has as many pins as it may have.
        """
        quota = self._quotas.of(tenant)
        if not await self._books.pin(tenant, node_id, quota.max_pins if limited else 0):
            raise quota.exceeded("max_pins", f"a pin beyond {quota.max_pins}")
        ancestors = await self.ancestors(node_id)
        pins = -1 if ancestors is None else await self._pin_all(tenant, node_id, ancestors)
        if pins < 0:
            if not await self._redis.command("SISMEMBER", keys.pins(node_id), tenant):
                await self._books.unpin(tenant, node_id)
            raise NodeMissingError.of(node_id, "not stored")
        return pins

    async def _pin_all(self, tenant: str, node_id: str, ancestors: Sequence[str]) -> int:
        calls = [self._pin(1, a, keys.pinned_below(a), keys.pins(a), node_id) for a in ancestors]
        await self._redis.run_many(calls)
        own = self._pin(1, node_id, keys.pins(node_id), keys.pinned_below(node_id), tenant)
        pins = int((await self._redis.run_many([own]))[0])
        # It vanished between the steps: no pin of it will ever free its ancestors.
        if pins < 0 and not await self._redis.command("SCARD", keys.pins(node_id)):
            await self._unmark(node_id, ancestors)
        return pins

    async def unpin(self, tenant: str, node_id: str) -> int:
        """Take one tenant's pin back; return how many remain."""
        cap_ms = self._quotas.of(tenant).max_ttl_ms
        own = self._pin(0, node_id, keys.pins(node_id), keys.pinned_below(node_id), tenant, cap_ms)
        pins = int((await self._redis.run_many([own]))[0])
        await self._books.unpin(tenant, node_id)
        if pins == 0:
            await self._unmark(node_id, await self._lineage(node_id), cap_ms)
        return pins

    async def drop(
        self,
        node_id: str,
        attempt: str = "",
        guard: str = "",
        *,
        generation: int = 0,
        later: bool = False,
        ages: bool = False,
    ) -> tuple[str, int]:
        """Remove a node's KV, its manifest first.

        Args:
            attempt: drop only if the manifest names it; empty = any.
            guard: "" nothing protects the node; "evict" pins, living children and running
                puts below it do; "unbind" pins, handles and all children do, and the token
                record goes as well.
            generation: drop only if the manifest has it; 0 = any.
            later: unlink the segments only after the longest read.
            ages: it goes for its low value, so all that was used before is older now.

        Returns:
            ("dropped", bytes) or (why not, 0): absent, other, pinned, parent, held,
            bound.
        """
        reply = await self._redis.run(
            scripts.DROP,
            [
                keys.manifest(node_id),
                keys.pins(node_id),
                keys.pinned_below(node_id),
                keys.children(node_id),
                keys.bindings(node_id),
                keys.record(node_id),
                keys.holds(node_id),
                keys.dropped(node_id),
            ],
            [attempt, guard, generation, secrets.token_hex(8), self._room.longest_ms],
        )
        outcome = _text(reply[0])
        if outcome == "parent" and await self.forget_dead_children(node_id):
            return await self.drop(
                node_id, attempt, guard, generation=generation, later=later, ages=ages
            )
        if outcome == "absent":
            await self._books.forget(node_id)
        if outcome != "dropped":
            return outcome, 0
        _, gone, count, nbytes, parent, needed = reply
        member = keys.member(node_id, _text(gone))
        if later:
            await self._books.trash(member, self._grace_ms, int(count))
        else:
            await self.unlink_segments(node_id, _text(gone), range(int(count)))
            await self._books.release(member)
        await self._books.forget(node_id, sacrificed=ages)
        # The answer has arrived: nobody will ask for it again.
        commands: list[Sequence[Argument]] = [("UNLINK", keys.dropped(node_id))]
        if _text(parent):
            commands.append(_gone_from(_text(parent), node_id, needed=bool(needed)))
        await self._redis.commands(commands)
        return outcome, int(nbytes)

    async def spared(self, node_ids: Sequence[str]) -> list[str]:
        """Why each node will neither shrink nor go now, for what a look can tell.

        "" = nothing is known to speak against it; pinned; held; parent = its children
        keep it from going, not from shrinking.
        """
        commands: list[Sequence[Argument]] = [
            command
            for node_id in node_ids
            for command in (
                ("SCARD", keys.pins(node_id)),
                ("SCARD", keys.pinned_below(node_id)),
                ("ZCARD", keys.holds(node_id)),
                ("ZCOUNT", keys.children(node_id), "(0", "+inf"),
            )
        ]
        found = await self._redis.commands(commands)  # none for no nodes
        return [_spared(*found[4 * i : 4 * i + 4]) for i in range(len(node_ids))]

    async def delete_unreferenced(self, node_id: str) -> list[str]:
        """Remove a node and its record if nothing refers to it, then its ancestors.

        Descendants without handle or pin go first. What has one stays, with all above
        and below it. An ancestor's other descendants are left alone. What was linked to a
        node that went is then removed in the same way.

        Returns:
            The nodes that went, leaves first.
        """
        gone: list[str] = []
        waiting = [node_id]
        while waiting:
            waiting += await self._delete_family(waiting.pop(0), gone)
        return gone

    async def link_better(self, node_id: str, better_id: str) -> bool:
        """Have `delete_unreferenced` go on with another node once this one went.

        False if neither the node nor its record is stored.
        """
        names = [keys.betters(node_id), keys.manifest(node_id), keys.record(node_id)]
        return bool(await self._redis.run(scripts.BETTER, names, [better_id]))

    async def _delete_family(self, node_id: str, gone: list[str]) -> list[str]:
        """Add what went to `gone`; return what was linked to it."""
        ancestors = await self._lineage(node_id)
        parent = ancestors[-1] if ancestors else ""
        betters: list[str] = []
        went = False
        for candidate, above in reversed(await self._loose_family(node_id, parent)):
            went = await self._delete(candidate, above, gone, betters)
        while went and ancestors:
            candidate = ancestors.pop()
            above = ancestors[-1] if ancestors else ""
            went = await self._delete(candidate, above, gone, betters)
        return betters

    async def unlink_segments(self, node_id: str, attempt: str, indexes: Sequence[int]) -> None:
        """Free segments of an attempt, in steps of at most 64 MiB."""
        for begin in range(0, len(indexes), UNLINK_STEP):
            step = indexes[begin : begin + UNLINK_STEP]
            names = [keys.segment(node_id, attempt, i) for i in step]
            await self._redis.command("UNLINK", *names)

    async def ancestors(self, node_id: str) -> list[str] | None:
        """A node's ancestors, root first; None if it is not stored."""
        found = await self._redis.command("HGET", keys.manifest(node_id), "ancestors")
        return None if found is None else found.decode().split()

    async def _loose_family(self, node_id: str, parent: str) -> list[tuple[str, str]]:
        # (node, its parent), parents before children; nothing below a handle or a pin.
        family = [(node_id, parent)]
        for node, _ in family:
            found = await self._redis.run(
                scripts.LOOSE_CHILDREN,
                [keys.pins(node), keys.bindings(node), keys.children(node)],
                [],
            )
            family += [(child.decode(), node) for child in found]
        return family

    async def _delete(self, node_id: str, parent: str, gone: list[str], betters: list[str]) -> bool:
        outcome, _ = await self.drop(node_id, guard="unbind")
        if outcome == "dropped":
            gone.append(node_id)
        elif outcome == "absent" and parent:
            await self._redis.command("ZREM", keys.children(parent), node_id)
        went = outcome in ("dropped", "absent")
        if went:  # nothing is linked to it any more
            found = await self._redis.command("SMEMBERS", keys.betters(node_id))
            await self._redis.command("UNLINK", keys.betters(node_id))
            betters += [better.decode() for better in found]
        return went

    async def _unmark(self, node_id: str, ancestors: Sequence[str], cap_ms: int = 0) -> None:
        calls = [
            self._pin(0, a, keys.pinned_below(a), keys.pins(a), node_id, cap_ms) for a in ancestors
        ]
        await self._redis.run_many(calls)

    async def _lineage(self, node_id: str) -> list[str]:
        # Without the manifest (expired) the ancestors are found through the record.
        found = await self.ancestors(node_id)
        if found is not None:
            return found
        data = await self._redis.command("GET", keys.record(node_id))
        try:
            record = await asyncio.to_thread(TokenRecord.decode, data or b"")
        except CorruptNodeError:
            return []
        return list(record.ancestors)

    async def forget_dead_children(self, node_id: str) -> bool:
        """Strike children off that are gone, or mark those whose records need this one.

        False if that changed nothing.
        """
        found = await self._redis.command("ZRANGE", keys.children(node_id), 0, -1)
        return await self._forget_dead(node_id, [child.decode() for child in found])

    async def _forget_dead(self, node_id: str, children: Sequence[str]) -> bool:
        """Do the same for some of its children."""
        alive = await self.present(children)
        dead = [child for child, lives in zip(children, alive, strict=True) if not lives]
        if not dead:
            return False
        needed = await self._needed(dead)
        loose = [child for child in dead if child not in needed]
        arguments: list[Argument] = [len(loose), *loose, *needed]
        return bool(await self._redis.run(scripts.DISOWN, [keys.children(node_id)], arguments))

    async def _needed(self, node_ids: Sequence[str]) -> set[str]:
        """Those of nodes without manifest that a handle leads to, or to one below them."""
        bound, above = await self._exist(keys.bindings, node_ids), set[str]()
        for node_id in await self._exist(keys.children, node_ids) - bound:
            await self.forget_dead_children(node_id)
            above |= await self._exist(keys.children, [node_id])
        return bound | above

    async def _exist(self, name: Callable[[str], str], node_ids: Sequence[str]) -> set[str]:
        found = await self._redis.commands([("EXISTS", name(node_id)) for node_id in node_ids])
        return {node_id for node_id, there in zip(node_ids, found, strict=True) if there}

    async def _adopt(self, manifest: Manifest) -> bool:
        if not manifest.ancestors:
            return True
        parent = manifest.ancestors[-1]
        names = [keys.children(parent), keys.manifest(parent), keys.record(parent)]
        place = repr(random.random())
        arguments: list[Argument] = [manifest.node_id, ADOPTION_MS, place, LOOKED_AT]
        children = await self._redis.run(scripts.ADOPT, names, arguments)
        if children is None:
            return False
        # A node that is used for ever would list all the children that it ever had.
        await self._forget_dead(parent, [child.decode() for child in children])
        return True

    async def _extend(self, node_ids: Sequence[str], ttl_ms: int) -> int:
        calls: list[Call] = [
            (
                scripts.TOUCH,
                [
                    keys.manifest(node_id),
                    keys.record(node_id),
                    keys.children(node_id),
                    keys.betters(node_id),
                ],
                [
                    keys.segments(node_id, "")[:-1],
                    ttl_ms,
                    self._grace_ms,
                    self._record_ttl_ms,
                    self._room.longest_ms,
                ],
            )
            for node_id in node_ids
        ]
        return sum(await self._redis.run_many(calls)) if calls else 0

    def _pin(
        self, on: int, node_id: str, changed: str, other: str, member: str, cap_ms: int = 0
    ) -> Call:
        return (
            scripts.PIN,
            [
                keys.manifest(node_id),
                changed,
                other,
                keys.record(node_id),
                keys.children(node_id),
                keys.betters(node_id),
            ],
            [
                on,
                keys.segments(node_id, "")[:-1],
                member,
                self._node_ttl_ms,
                self._grace_ms,
                self._record_ttl_ms,
                cap_ms,
                self._room.longest_ms,
            ],
        )


def lower_tier(tiers: Sequence[str], floor: str) -> str | None:
    """Return the tier that a node shrinks to next; None if that would be below `floor`."""
    if len(tiers) < 2 or Decimal(tiers[-2]) < Decimal(floor):
        return None
    return tiers[-2]


def cost_of(manifest: Manifest) -> float:
    """What recomputing a node costs: milliseconds of prefill, else its tokens."""
    return manifest.prefill_ms or float(manifest.num_tokens)


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Return manifest parts as one value, each preceded by its length."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Undo `join_parts`."""
    parts, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        parts.append(data[at + 4 : end])
        at = end
    return parts


def fields_of(manifest: Manifest, parts: Sequence[bytes]) -> list[Argument]:
    """Return the field-value pairs of a manifest that change when its node shrinks."""
    return [
        "parts",
        join_parts(parts),
        "stat",
        _describe(manifest).SerializeToString(),
        "bytes",
        manifest.tier_bytes()[-1],
    ]


def _fields(manifest: Manifest, commit: pb.PutCommit, tenant: str) -> list[Argument]:
    return [
        *fields_of(manifest, commit.manifest_parts),
        "attempt",
        manifest.attempt,
        "tenant",
        tenant,
        "probe",
        min(range(len(manifest.segments)), key=lambda i: manifest.segments[i].tier, default=0),
        "cost",
        repr(cost_of(manifest)),
        "ancestors",
        " ".join(manifest.ancestors),
        "parent",
        manifest.identity.parent or "",
    ]


def _describe(manifest: Manifest) -> pb.NodeStat:
    tiers = manifest.quality.tiers if manifest.quality else ()
    return pb.NodeStat(
        node_id=manifest.node_id,
        present=True,
        tiers=manifest.tiers,
        tier_bytes=manifest.tier_bytes(),
        tier_entries=manifest.tier_entries(),
        full_entries=manifest.full_entries,
        num_tokens=manifest.num_tokens,
        next_position=manifest.next_position,
        pending_ids=manifest.pending_ids,
        ancestors=manifest.ancestors,
        view=manifest.identity.view,
        policy=manifest.identity.policy,
        tier_quality=[pb.TierQuality(**dict(tier)) for tier in tiers],
        codec_quality=_codec_quality(manifest),
    )


def _codec_quality(manifest: Manifest) -> pb.CodecQuality | None:
    if manifest.quality is None or manifest.quality.codec is None:
        return None
    codec = manifest.quality.codec
    errors = (max(codec.key_error, default=0.0), max(codec.value_error, default=0.0))
    return pb.CodecQuality(key_error=errors[0], value_error=errors[1], kl=codec.kl)


def _gone_from(parent: str, node_id: str, *, needed: bool) -> Sequence[Argument]:
    """Return the command that tells a parent of a child without manifest."""
    # The record of a node with a handle, or above one, leads to its parent's.
    name = keys.children(parent)
    return ("ZADD", name, "XX", 0, node_id) if needed else ("ZREM", name, node_id)


def _spared(pins: int, pinned_below: int, holds: int, children: int) -> str:
    if pins + pinned_below:
        return "pinned"
    if holds:  # perhaps of a put that has ended; then the step itself finds out
        return "held"
    return "parent" if children else ""


def _stat(node_id: str, fields: list[bytes | None], ttl_ms: int, pins: int) -> pb.NodeStat:
    described, generation = fields
    if described is None or generation is None:
        return pb.NodeStat(node_id=node_id)
    stat = pb.NodeStat.FromString(described)
    stat.generation = int(generation)
    stat.ttl_ms = max(ttl_ms, 0)
    stat.pinned = pins > 0
    return stat


def _text(value: bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
