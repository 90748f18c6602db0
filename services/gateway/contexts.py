"""Contexts: register ahead of time, look at, pin, delete."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import codec_named
from criticalkv.services.gateway.prompt import Prompt, check_text_size, flatten
from criticalkv.services.gateway.schemas import ContextRequest, parse_ttl
from criticalkv.services.gateway.swap import Bound
from criticalkv.services.gateway.transcript import Metadata, Transcript
from criticalkv.shared.cache.manifest import raw_entry_bytes
from criticalkv.shared.errors import (
    ContextExpiredError,
    ContextLengthError,
    ContextNotFoundError,
    CriticalKVError,
    InvalidRequestError,
    NodeMissingError,
)
from criticalkv.shared.identity import tenant_salt
from criticalkv.shared.model.chat import Message

PREFIX = "ctx_"
MAX_HANDLES = 1000

log = logging.getLogger(__name__)


class Contexts:
    """What a client can do with contexts. Handles of turns work, too."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def create(
        self, tenant: Tenant, request: ContextRequest, deadline: Deadline
    ) -> dict[str, Any]:
        """Compress and store a context; return it under a new handle."""
        core = self._core
        core.check_model(core.model.name if request.model is None else request.model)
        try:
            return await self._create(tenant, request, deadline)
        except ContextLengthError as error:
            field = "messages" if request.text is None else "text"
            text = error.message.partition(": ")[2]
            raise ContextLengthError(f"{field}: {text}", param=field) from None

    async def _create(
        self, tenant: Tenant, request: ContextRequest, deadline: Deadline
    ) -> dict[str, Any]:
        core = self._core
        policy = request.wanted(core.config.eviction.policy)
        salt = tenant_salt(tenant.name, request.cache_salt)
        messages, ttl_ms = request.plain(), parse_ttl(request.ttl)
        check_text_size(messages, core.template, core.model.max_positions)
        prompt = await asyncio.to_thread(self._render, messages)
        first = request.first(core.config.eviction.first_policy)
        want = core.want(
            policy=policy,
            salt=salt,
            tenant=tenant.digest,
            store_tier=request.store_tier,
            ttl_ms=ttl_ms,
            first_policy=first,
        )
        plan = await core.planner.store_all(prompt, want, deadline)
        if plan.parent is None:
            raise InvalidRequestError("the context is empty", param="text")
        metadata = core.describe(
            "context",
            _open(core.transcript(policy, salt), messages),
            policy,
            salt,
            prefill_ms=plan.spent.prefill_ms,
            scoring_ms=plan.spent.scoring_ms,
            cached=not plan.spent.results,
            store_tier=want.store_tier,
            first_policy=want.first_policy or "",
            node_policy=plan.parent.policy if plan.provisional else "",
        )
        handle = await core.store.bind_handle(
            core.new_handle("ctx"), tenant.digest, plan.parent.id, metadata.encode(), ttl_ms
        )
        if ttl_ms:
            await core.store.touch(plan.parent.id, ttl_ms)
        refined = metadata.model_copy(update={"node_policy": ""})
        core.swapper.refine(
            plan.provisional, [Bound(tenant.digest, handle.handle, refined.encode())]
        )
        return (await self._objects([handle]))[0]

    async def get(self, tenant: Tenant, handle: str) -> dict[str, Any]:
        """Return one context.

        Raises:
            ContextNotFoundError: unknown, expired or another tenant's.
        """
        return (await self._objects([await self._core.resolve(tenant, handle)]))[0]

    async def all(self, tenant: Tenant, limit: int) -> dict[str, Any]:
        """Return the tenant's contexts, newest first."""
        handles = await self._core.store.list_handles(tenant.digest, PREFIX, limit)
        return {"object": "list", "data": await self._objects(handles)}

    async def delete(self, tenant: Tenant, handle: str) -> dict[str, Any]:
        """Remove the handle, and KV that nothing references any more."""
        found = await self._core.resolve(tenant, handle)
        await self._unpin_last(tenant, handle, found.node_id)
        await self._core.store.delete_handle(tenant.digest, handle)
        return {"id": handle, "object": "context.deleted", "deleted": True}

    async def pin(self, tenant: Tenant, handle: str, *, keep: bool) -> dict[str, Any]:
        """Keep a context and its ancestors until unpinned, or stop keeping them."""
        node_id = (await self._core.resolve(tenant, handle)).node_id
        while True:
            await self._pin(tenant, node_id, keep=keep)
            now = (await self._core.resolve(tenant, handle)).node_id
            if now == node_id:
                return {"id": handle, "object": "context", "pinned": keep}
            # The handle was led to a better node meanwhile: the pin may not have gone with it.
            await self._unpin_last(tenant, handle, node_id)
            node_id = now

    async def _pin(self, tenant: Tenant, node_id: str, *, keep: bool) -> None:
        call = self._core.store.pin if keep else self._core.store.unpin
        try:
            await call(tenant.digest, node_id)
        except NodeMissingError as error:
            raise ContextExpiredError("the context is no longer stored; send it again") from error

    async def _unpin_last(self, tenant: Tenant, handle: str, node_id: str) -> None:
        """Unpin a node with the tenant's last handle on it: nobody could do it later."""
        store = self._core.store
        others = await store.list_handles(tenant.digest, PREFIX, MAX_HANDLES)
        if any(h.node_id == node_id and h.handle != handle for h in others):
            return
        try:
            await store.unpin(tenant.digest, node_id)
        except NodeMissingError:
            log.info("the pinned node of %s is gone already", handle)

    def _refinement(self, handle: pb.Handle, meta: Metadata) -> str | None:
        """Whether the context is still to be computed under the policy that is wanted."""
        if not meta.first_policy:
            return None
        if not meta.node_policy:
            return "done"
        pending = self._core.swapper.refines(handle.node_id, meta.policy, meta.store_tier)
        return "pending" if pending else "given_up"

    async def _latest(self, handle: pb.Handle) -> pb.Handle:
        """Read a handle again if its refinement seems to have failed: it may just have ended."""
        meta = _readable(handle)
        if meta is None or self._refinement(handle, meta) != "given_up":
            return handle
        try:
            return await self._core.store.resolve_handle(handle.tenant, handle.handle)
        except ContextNotFoundError:
            return handle

    def _full_bytes(self, meta: Metadata, stat: pb.NodeStat) -> int | None:
        """Bytes of the untouched KV, not quantized; None if it is gone, or of another model."""
        model = self._core.model
        if not stat.full_entries or meta.model_digest != model.model_digest:
            return None
        return stat.full_entries * raw_entry_bytes(model.head_dim, model.dtype)

    def _render(self, messages: list[Message]) -> Prompt:
        template = self._core.template
        return flatten(template.render(messages, add_generation_prompt=False), template)

    async def _objects(self, handles: list[pb.Handle]) -> list[dict[str, Any]]:
        handles = [await self._latest(handle) for handle in handles]
        stats = await self._core.store.stat([h.node_id for h in handles]) if handles else []
        return [
            describe(handle, meta, stat)
            | {"full_bytes": self._full_bytes(meta, stat)}
            | {"refinement": self._refinement(handle, meta)}
            for handle, stat in zip(handles, stats, strict=True)
            if (meta := _readable(handle)) is not None
        ]


def _readable(handle: pb.Handle) -> Metadata | None:
    """Return a handle's metadata, or None if another version wrote it."""
    try:
        return Metadata.decode(handle.metadata)
    except CriticalKVError:
        log.warning("metadata of %s is unreadable", handle.handle)
        return None


def describe(handle: pb.Handle, meta: Metadata, stat: pb.NodeStat) -> dict[str, Any]:
    """Return a context as the API shows it. Without KV, `tiers` is empty."""
    full, policy = stat.full_entries, meta.node_policy or meta.policy
    tiers = [
        {
            "tier": tier,
            "bytes": size,
            "entries": entries,
            "retained_fraction": entries / full if full else 1.0,
        }
        for tier, size, entries in zip(stat.tiers, stat.tier_bytes, stat.tier_entries, strict=True)
    ]
    return {
        "id": handle.handle,
        "object": "context",
        "node_id": handle.node_id,
        "model": meta.model,
        "policy": policy,
        "codec": codec_named(stat.policy or policy),
        "created": handle.created_at,
        "tiers": tiers,
        "num_tokens": stat.next_position,
        "prefill_ms": meta.prefill_ms,
        "scoring_ms": meta.scoring_ms,
        "quality": _quality(stat),
        "cached": meta.cached,
        "pinned": stat.pinned,
    }


def _quality(stat: pb.NodeStat) -> dict[str, Any] | None:
    """What was measured when the node was made; its tiers are those of `tiers`."""
    codec = stat.codec_quality if stat.HasField("codec_quality") else None
    if not stat.tier_quality and codec is None:
        return None
    return {
        "tiers": [
            {
                "retained_mass": tier.retained_mass,
                "lowest_mass": tier.lowest_mass,
                "low_mass_share": tier.low_mass_share,
                "theta": tier.theta,
            }
            for tier in stat.tier_quality
        ],
        "codec": None
        if codec is None
        else {
            "key_error": codec.key_error,
            "value_error": codec.value_error,
            "kl": codec.kl if codec.HasField("kl") else None,
        },
    }


def _open(start: Transcript, messages: list[Message]) -> Transcript:
    """The conversation with its last message left open: more may join it."""
    *closed, last = messages
    return ([start, *start.say_all(closed)][-1]).say(last)
