"""One chat turn: from a checked request to reply events, the turn bound to its handle."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from typing import Any

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.gateway.answer import Finished, Opened, ReplyEvent, Said, logprob_fields
from criticalkv.services.gateway.auth import Tenant
from criticalkv.services.gateway.choices import Choices
from criticalkv.services.gateway.core import GatewayCore
from criticalkv.services.gateway.deadline import Deadline
from criticalkv.services.gateway.nodes import Want, codec_named, length_of
from criticalkv.services.gateway.pace import Pace
from criticalkv.services.gateway.plan import Plan, check_room
from criticalkv.services.gateway.prompt import Prompt, add_implicit, check_text_size, flatten
from criticalkv.services.gateway.schemas import ChatRequest, Extension, parse_ttl
from criticalkv.services.gateway.swap import Bound
from criticalkv.services.gateway.transcript import Metadata, Transcript
from criticalkv.services.gateway.workers import Event
from criticalkv.shared.errors import (
    CancelledError,
    ContextNotFoundError,
    CriticalKVError,
    IdempotencyConflictError,
    InvalidRequestError,
    NodeMissingError,
)
from criticalkv.shared.identity import NodeId, tenant_salt
from criticalkv.shared.model.chat import Message, Part
from criticalkv.shared.requests import (
    MAX_ANCESTORS_HINT,
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    Sampling,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """Where a conversation stands before the request's messages."""

    transcript: Transcript
    policy: str
    salt: str
    node_id: str | None = None
    first_policy: str | None = None
    handle: str | None = None


def base_after(tenant: Tenant, ext: Extension, meta: Metadata, handle: pb.Handle) -> Base:
    """Return where a stored conversation stands.

    Raises:
        InvalidRequestError: if the request wants another salt than the context's.
    """
    if ext.cache_salt is not None and tenant_salt(tenant.name, ext.cache_salt) != meta.salt:
        raise InvalidRequestError(
            "criticalkv.cache_salt differs from the context's", param="criticalkv.cache_salt"
        )
    first, policy = ext.first(meta.first_policy or None), ext.wanted(meta.policy)
    return Base(meta.transcript, policy, meta.salt, handle.node_id, first, handle.handle)


@dataclass(frozen=True)
class Keeping:
    """What is kept of a turn.

    Attributes:
        stored: whether its node is published and bound to its handle.
        complete: adds to the handle's metadata, given the answer's text, its end and the usage.
    """

    stored: bool = True
    complete: Callable[[Metadata, str, DecodeEnd, dict[str, Any]], Metadata] | None = None


@dataclass(frozen=True)
class Asked:
    """What a turn answers.

    Attributes:
        prompt: to run.
        transcript: of all before the answer.
        prefix: text that the answer goes on after: its first words, told by the client.
    """

    prompt: Prompt
    transcript: Transcript
    prefix: str = ""

    def said(self, text: str) -> Transcript:
        """Return the transcript after an answer that goes on with `text`."""
        answer = Message("assistant", (Part(self.prefix + text),))
        return self.transcript.say(answer).close()


class Chat:
    """Runs chat turns."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    async def start(
        self,
        tenant: Tenant,
        request: ChatRequest,
        handle: str,
        deadline: Deadline,
        *,
        is_retry: bool = False,
        base: Base | None = None,
        keeping: Keeping = Keeping(),
    ) -> Turn:
        """Plan a turn, prefill what is missing, and wait for decode's first event.

        Args:
            is_retry: an earlier attempt may have bound the handle.
            base: what the messages follow; None = what the request says.
            keeping: what is kept of the turn.

        Raises:
            CriticalKVError: everything that can be refused before the first token.
        """
        core, received = self._core, time.perf_counter()
        core.check_model(request.model)
        everything = [message.plain() for message in request.messages]
        check_text_size(everything, core.template, core.model.max_positions)
        base = base or await self._base(tenant, request)
        asked = await asyncio.to_thread(self._render, request, base)
        known = await self._known(tenant, handle) if is_retry else ()
        want = self._want(tenant, request, base, known)
        plan = await self._plan(request, base, asked.prompt, want, deadline)
        turn = Turn(core, tenant, request, handle, base, want, asked, received, keeping)
        await turn.open(plan, deadline)
        core.swapper.refine(plan.provisional)  # not before: it would compete with the turn
        return turn

    async def _known(self, tenant: Tenant, handle: str) -> tuple[NodeId, ...]:
        """Return the chain that an earlier attempt's turn was bound to.

        Going on from better nodes that are there by now, this one would be another turn.
        """
        store = self._core.store
        try:
            bound = await store.resolve_handle(tenant.digest, handle)
        except ContextNotFoundError:
            return ()
        record = (await store.token_records([bound.node_id]))[0]
        return (*record.ancestors, bound.node_id) if record else ()

    async def _same_base(self, node_id: NodeId, known: Collection[NodeId]) -> NodeId:
        """Return the known node that this one was put in the place of, or itself."""
        if not known or node_id in known:
            return node_id
        own, *others = await self._core.store.stat([node_id, *known])
        same = [s for s in others if s.present and length_of(s) == length_of(own)]
        return same[0].node_id if same else node_id

    async def _base(self, tenant: Tenant, request: ChatRequest) -> Base:
        """Return what the messages follow: nothing, or a stored context."""
        core, ext = self._core, request.criticalkv
        if ext.context_id is None:
            salt = tenant_salt(tenant.name, ext.cache_salt)
            policy = ext.wanted(core.config.eviction.policy)
            first = ext.first(core.config.eviction.first_policy)
            return Base(core.transcript(policy, salt), policy, salt, first_policy=first)
        handle = await core.resolve(tenant, ext.context_id)
        return base_after(tenant, ext, core.metadata(handle.metadata), handle)

    def _render(self, request: ChatRequest, base: Base) -> Asked:
        """Tokenize; runs in a thread."""
        messages, prefix = [message.plain() for message in request.asked], request.prefix
        transcripts = base.transcript.say_all(messages)
        if base.node_id is None:
            prompt = self._resent(request, messages, transcripts)
        else:
            prompt = self._continued(base.transcript, messages)
        begun = self._core.template.encode_content(prefix)
        return Asked(prompt.begin(begun), [base.transcript, *transcripts][-1], prefix)

    def _continued(self, before: Transcript, messages: list[Message]) -> Prompt:
        template = self._core.template
        return flatten(template.continue_(before.roles, before.is_open, messages), template)

    def _resent(
        self, request: ChatRequest, messages: list[Message], transcripts: list[Transcript]
    ) -> Prompt:
        template, limits = self._core.template, self._core.config.gateway
        if request.prompt_cache_options.mode == "implicit":
            messages = add_implicit(messages, template, limits.implicit_breakpoint_tokens)
        pieces = template.render(messages, add_generation_prompt=True)
        reusable = transcripts if template.incremental else []
        return flatten(pieces, template, messages, reusable)

    def _want(
        self, tenant: Tenant, request: ChatRequest, base: Base, known: Collection[NodeId]
    ) -> Want:
        return self._core.want(
            policy=base.policy,
            first_policy=base.first_policy,
            salt=base.salt,
            tenant=tenant.digest,
            read_tier=request.criticalkv.read_tier,
            store_tier=request.criticalkv.store_tier,
            ttl_ms=_ttl_ms(request),
            turn_policy=request.criticalkv.turn_policy,
            known=frozenset(known),
        )

    async def _plan(
        self, request: ChatRequest, base: Base, prompt: Prompt, want: Want, deadline: Deadline
    ) -> Plan:
        core, room = self._core, request.token_limit or 1
        check_room(len(prompt.ids), room, core.model.max_positions)
        if base.node_id is None:
            return await core.planner.resent(prompt, want, room, deadline)
        node_id = await self._same_base(base.node_id, want.known)
        return await core.planner.continued(node_id, prompt, want, room, deadline)


class Turn:
    """A turn that is being decoded: a Reply."""

    def __init__(
        self,
        core: GatewayCore,
        tenant: Tenant,
        request: ChatRequest,
        handle: str,
        base: Base,
        want: Want,
        asked: Asked,
        received: float,
        keeping: Keeping,
    ) -> None:
        self.id = handle
        self.created = int(time.time())
        self.model = core.model.name
        self.choices = request.n
        self._core = core
        self._tenant = tenant
        self._request = request
        self._base = base
        self._want = want
        self._asked = asked
        self._keeping = keeping
        self._pace = Pace(core.metrics, received)
        self._handles = [handle, *(core.new_handle("resp") for _ in range(request.n - 1))]
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._starts: dict[int, DecodeStart] = {}
        self._generated = 0

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object so far."""
        plan = self._running.plan
        return {
            "prompt_tokens": plan.prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": plan.prompt_tokens + self._generated,
            "prompt_tokens_details": {
                "cached_tokens": plan.cached_tokens,
                "cache_write_tokens": plan.spent.tokens,
            },
        }

    async def open(self, plan: Plan, deadline: Deadline) -> None:
        """Start decode and wait for its first event, so that early errors have a status."""
        core = self._core
        self._running = Choices(core.workers, core.planner, plan, self._decode_request, deadline)
        try:
            self._first = await self._running.next()
        except BaseException:
            await self._running.aclose()
            raise

    async def aclose(self) -> None:
        """Cancel the turn if it still runs."""
        await self._running.aclose()

    async def events(self) -> AsyncGenerator[ReplyEvent, None]:
        """Yield the turn's events; each choice is bound to its handle before its end."""
        ended = 0
        try:
            for index, handle in enumerate(self._handles):
                yield Opened(index, handle)
            item = self._first
            while True:
                event = await self._take(*item)
                ended += isinstance(event, Finished)
                if ended == self.choices:
                    self._count()
                if event is not None:
                    yield event
                if ended == self.choices:
                    return
                item = await self._running.next()
        finally:
            await self.aclose()

    async def _take(self, event: Event, at: float) -> ReplyEvent | None:
        index = event.choice
        if isinstance(event, DecodeStart):
            self._starts[index] = event
            return None
        if isinstance(event, DecodeDelta):
            return self._say(event, at)
        self._pace.ended(index, event.completion_tokens, at)
        return await self._end(index, event)

    def _say(self, delta: DecodeDelta, at: float) -> Said | None:
        if not delta.text and not delta.token_ids:
            return None
        self._pace.told(delta.choice, at)
        self._texts[delta.choice].append(delta.text)
        logprobs = logprob_fields(delta.logprobs)
        return Said(delta.choice, delta.text, logprobs) if delta.text or logprobs else None

    async def _end(self, index: int, end: DecodeEnd) -> Finished:
        if end.finish_reason == "cancelled":
            raise CancelledError("the answer was cancelled before it was complete")
        self._generated += end.completion_tokens
        has_parent = self._running.plan.parent is not None
        self._core.metrics.choice(self._starts[index], end, has_parent=has_parent)
        error = await self._commit(index, end)
        return Finished(index, end.finish_reason, self._extension(index, end, error))

    async def _commit(self, index: int, end: DecodeEnd) -> str | None:
        """Bind the choice's handle to its node; return what went wrong, or None.

        An earlier attempt under the same idempotency key may have bound the handle and
        failed before its answer was kept. If this one ended in the same node, all is
        well. If not, the handle leads to another answer than the one just given, so
        that the turn ends with an error instead of an id that continues the wrong one:
        one key, one handle, one answer.

        Raises:
            IdempotencyConflictError: if the handle is bound to another node.
            ContextNotFoundError: if what the turn stands on has been deleted.
        """
        if not self._keeping.stored:
            return None
        if end.publish_code == NodeMissingError.code and await self._context_is_gone():
            raise ContextNotFoundError("the context was deleted while the answer was generated")
        if end.node_id is None or end.publish_error is not None:
            return end.publish_error or "the turn was not stored"
        text = "".join(self._texts[index])
        after = self._asked.said(text)
        base = self._base
        metadata = self._core.describe(
            "turn", after, base.policy, base.salt, first_policy=base.first_policy or ""
        )
        if self._keeping.complete is not None:
            # Off the loop: it packs the whole conversation.
            complete = self._keeping.complete
            metadata = await asyncio.to_thread(complete, metadata, text, end, self.usage)
        try:
            await self._core.store.bind_handle(
                self._handles[index],
                self._tenant.digest,
                end.node_id,
                metadata.encode(),
                _ttl_ms(self._request),
            )
        except IdempotencyConflictError as error:
            raise IdempotencyConflictError(
                "an earlier attempt under this Idempotency-Key ended in another answer; "
                "retry with a new key",
                param="Idempotency-Key",
            ) from error
        except CriticalKVError as error:
            log.warning("turn %s is not bound: %s", self._handles[index], error.code)
            return error.message
        await self._alias(after.digest, end.node_id, end.view)
        self._fold(index, end.node_id, end, after)
        return None

    async def _context_is_gone(self) -> bool:
        """Whether the handle that the request went on from has been deleted meanwhile."""
        if self._base.handle is None:
            return False
        try:
            await self._core.resolve(self._tenant, self._base.handle)
        except ContextNotFoundError:
            return True
        except CriticalKVError as error:  # then the answer is whole, and only not published
            log.warning("cannot look whether a context was deleted: %s", error.code)
        return False

    def _fold(self, index: int, leaf: str, end: DecodeEnd, after: Transcript) -> None:
        if index:  # one fold per turn: choices are alternatives, most of them never taken up
            return
        alias = after.digest if self._core.template.incremental else None
        bound = Bound(self._tenant.digest, self._handles[index], alias=alias)
        self._core.swapper.fold(leaf, end.ancestors, self._want, bound)

    async def _alias(self, digest: str, node_id: str, view: tuple[str, ...]) -> None:
        """Let resent history find the turn. Without it the turn is only prefilled again."""
        if not self._core.template.incremental:
            return
        try:
            await self._core.store.put_alias(digest, node_id, view)
        except CriticalKVError as error:
            log.warning("node %s got no alias: %s", node_id[:16], error.code)

    def _extension(self, index: int, end: DecodeEnd, error: str | None) -> dict[str, Any]:
        start, plan = self._starts[index], self._running.plan
        policy = plan.parent.policy if plan.parent else None
        fields = {
            "handle": self._handles[index],
            "node_id": end.node_id,
            "policy": policy,
            "codec": codec_named(policy),
            "tier": start.tier,
            "retained_fraction": start.retained_fraction,
            "kept_bytes": start.kept_bytes,
            "bytes_pulled": start.bytes_pulled,
            "store_ms": start.store_ms,
            "queue_ms": start.queue_ms,
            "prefill_ms": plan.spent.prefill_ms,
            "scoring_ms": plan.spent.scoring_ms,
            "replica": start.replica,
            "published": self._keeping.stored and error is None,
            "ttft_ms": 1000 * (self._pace.ttft or 0.0),
        }
        return fields if error is None else {**fields, "error": error}

    def _decode_request(self, plan: Plan) -> DecodeRequest:
        extension = self._request.criticalkv
        first, *others = self._seeds()
        return DecodeRequest(
            request_id=self.id,
            parent=plan.parent.id if plan.parent else None,
            view=plan.parent.view(extension.read_tier) if plan.parent else (),
            ancestors_hint=_hint(plan.parent.ancestors) if plan.parent else (),
            token_ids=plan.token_ids,
            salt=self._base.salt,
            sampling=self._sampling(plan, first),
            policy=extension.turn_policy or self._core.config.eviction.turn_policy,
            publish=self._keeping.stored,
            ttl_ms=_ttl_ms(self._request),
            tenant=self._tenant.digest,
            min_tier=extension.min_read_tier,
            branch_seeds=tuple(others),
            # Prefill may have run some of the answer's first words.
            begun=min(self._asked.prompt.begun, len(plan.token_ids)),
        )

    def _sampling(self, plan: Plan, seed: int) -> Sampling:
        request = self._request
        room = self._core.model.max_positions - plan.prompt_tokens
        default = min(self._core.config.gateway.default_max_tokens, room)
        return Sampling(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.criticalkv.top_k,
            seed=seed,
            max_tokens=request.token_limit or default,
            stop=tuple(request.stop),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    def _seeds(self) -> list[int]:
        """Return each choice's seed: the wanted one, or one that the handle gives, and up.

        So a retry draws the same.
        """
        seed = self._request.seed
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "little")
        return [(seed + index) % (1 << 63) for index in range(self.choices)]

    def _count(self) -> None:
        plan = self._running.plan
        self._core.metrics.turn(
            seconds=self._pace.e2e,
            prompt=plan.prompt_tokens,
            cached=plan.cached_tokens,
            generated=self._generated,
        )


def _hint(ancestors: tuple[str, ...]) -> tuple[str, ...]:
    """Name the root, usually the large document, and what was added last."""
    limit = MAX_ANCESTORS_HINT
    return ancestors if len(ancestors) <= limit else (ancestors[0], *ancestors[1 - limit :])


def _ttl_ms(request: ChatRequest) -> int:
    """The longest time to live that the request asks for; 0 = the store's default."""
    marks = [part.mark for message in request.messages for part in message.content]
    ttls = [request.prompt_cache_options.ttl, *(mark.ttl for mark in marks if mark)]
    return max(parse_ttl(ttl) for ttl in ttls)
