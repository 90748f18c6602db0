"""Prefill and decode engines in one process, without any service."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from criticalkv.services.decode.engine import DecodeEngine
from criticalkv.services.local.memory_store import MemoryStore
from criticalkv.services.prefill.context_pass import ComputedContext
from criticalkv.services.prefill.engine import PrefillEngine
from criticalkv.shared.cache.manifest import Manifest
from criticalkv.shared.closing import Closing
from criticalkv.shared.config import DecodeConfig, EvictionConfig, ModelConfig, PrefillConfig
from criticalkv.shared.errors import DeadlineError, InvalidRequestError
from criticalkv.shared.eviction.policy import Policy, canonical_turn_policy, codec_of
from criticalkv.shared.identity import (
    POLICY_DENSE,
    Identity,
    canonical_tier,
    resolve_tier,
    tenant_salt,
    tokens_digest,
)
from criticalkv.shared.model.chat import JOINER, Message, Part
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    PrefillRequest,
    PrefillResult,
    Sampling,
)

SALT = tenant_salt("local")
DEADLINE_S = 600.0
"""Longest time of a prefill, or of a turn, if the caller says nothing."""


@dataclass(frozen=True)
class LocalNode:
    """A point of a conversation that can be asked from, any number of times.

    Attributes:
        node_id: content address of the node.
        roles: message roles so far.
        is_open: whether the last message can still be added to.
        prefill: what compressing it cost; None for a turn.
        salt: of its identity, and of all that continues from it.
    """

    node_id: str
    roles: tuple[str, ...]
    is_open: bool
    prefill: PrefillResult | None = None
    salt: str = SALT


@dataclass(frozen=True)
class LocalTurn(LocalNode):
    """An answer, and the node that continues from it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    start: DecodeStart | None = None
    end: DecodeEnd | None = None
    deltas: tuple[DecodeDelta, ...] = ()


class LocalEngine(Closing):
    """Compress contexts and ask questions in-process.

    A context manager; `close` ends its threads.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: NodeStore | None = None,
        *,
        prefill: PrefillConfig | None = None,
        eviction: EvictionConfig | None = None,
        decode: DecodeConfig | None = None,
    ) -> None:
        self.model = model
        self.store: NodeStore = MemoryStore() if store is None else store
        self.prefill = PrefillEngine(
            model, self.store, prefill or PrefillConfig(), eviction or EvictionConfig()
        )
        self.decode = DecodeEngine(model, self.store, decode or DecodeConfig())

    @classmethod
    def load(cls, model: str = "demo", *, threads: int | None = None) -> LocalEngine:
        """Load a model by path or name ("demo": the small model, fetched once)."""
        return cls(load_model(ModelConfig(path=model), threads))

    def close(self) -> None:
        """End the decode threads."""
        self.decode.close()

    def compress(
        self,
        context: str | Sequence[Message],
        *,
        policy: str = "default",
        store_tier: float | str = "1",
        deadline_s: float = DEADLINE_S,
    ) -> LocalNode:
        """Compute, compress and keep a context.

        Args:
            context: text (the start of a user message), or messages.
            policy: scorer+allocator+selector[:k=v,…], a preset's name, or "dense"; with
                codec=int8 or int4 among the options, entries are kept in so many bits.
            store_tier: highest kept fraction that can be asked for later.
            deadline_s: longest time until it is kept.

        Raises:
            DeadlineError: nothing is kept.
        """
        messages = [Message("user", (Part(context),))] if isinstance(context, str) else context
        pieces = self.model.chat.render(messages, add_generation_prompt=False)
        last = max(i for i, piece in enumerate(pieces) if piece.kind == "content")
        ids = [token for piece in pieces[: last + 1] for token in piece.ids]
        roles = tuple(m.role for m in messages)
        return self.compress_tokens(
            ids, policy=policy, store_tier=store_tier, roles=roles, deadline_s=deadline_s
        )

    def compress_tokens(
        self,
        token_ids: Sequence[int],
        *,
        policy: str = "default",
        store_tier: float | str = "1",
        parent: LocalNode | None = None,
        tier: float | str | None = None,
        roles: tuple[str, ...] = (),
        deadline_s: float = DEADLINE_S,
    ) -> LocalNode:
        """Compress raw tokens, alone or after `parent` read at `tier`; see `compress`."""
        request = self._request(
            token_ids,
            policy,
            canonical_tier(store_tier),
            parent.salt if parent else SALT,
            tuple(manifest.node_id for manifest in self._chain(parent)),
            self._view(parent, tier),
            deadline_s=deadline_s,
        )
        result = self.prefill.run(request)
        roles = (parent.roles if parent else ()) + roles
        return LocalNode(request.node_id, roles, True, result, request.salt)

    def compress_each(
        self,
        token_ids: Sequence[int],
        policies: Iterable[str],
        *,
        store_tier: float | str = "1",
        tiers: Iterable[float | str] = (),
        roles: tuple[str, ...] = (),
        deadline_s: float = DEADLINE_S,
    ) -> dict[str, dict[str, LocalNode]]:
        """Compress raw tokens under several policies; their forward runs once.

        Until all of them are compressed, every layer's keys and values live, and its queries
        and outputs, from which policies score: 1 + query heads ÷ KV heads times the full KV,
        so 4 times with 9 query heads on 3. A stepwise policy's KV is not that of this
        forward: it runs one of its own.

        Args:
            token_ids: a context without ancestors.
            policies: as in `compress`.
            store_tier: highest kept fraction that can be asked for later.
            tiers: kept fractions that will be asked for, up to any; instead of the configured
                ones up to `store_tier`.
            roles: of the messages so far.
            deadline_s: longest time of the forward, and of each node after it.

        Returns:
            By policy, as it was given, and by tier: the node to read at that tier. It is one
            node for all tiers, the one that `compress_tokens` makes, unless the policy's tiers
            are not nested: then each tier is a node of its own. Dense and stepwise nodes have
            one tier, "1".

        Raises:
            PolicyError, ContextLengthError: before anything is computed.
            DeadlineError: nodes that were made before it stay.
        """
        wanted = _ascending(tiers) or self.prefill.tiers_up_to(canonical_tier(store_tier))
        each = dict.fromkeys(policies)
        for policy in each:
            self.prefill.check(policy, len(token_ids))
        context = ComputedContext.of(self.model, token_ids, _deadline(deadline_s))
        return {
            policy: self._every_tier(context, policy, wanted, roles, deadline_s) for policy in each
        }

    def _every_tier(
        self,
        context: ComputedContext,
        policy: str,
        tiers: tuple[str, ...],
        roles: tuple[str, ...],
        deadline_s: float,
    ) -> dict[str, LocalNode]:
        """Publish one policy's node, or nodes, of a context that has run."""

        def node(tiers: tuple[str, ...], salt: str) -> LocalNode:
            request = self._request(
                context.token_ids, policy, tiers[-1], salt, deadline_s=deadline_s
            )
            result = self.prefill.run(request, context=context, tiers=tiers)
            return LocalNode(request.node_id, roles, True, result, salt)

        # With the configured ones, whichever are asked for: the same bytes every time.
        top = node(_ascending({*tiers, *self.prefill.tiers_up_to(tiers[-1])}), SALT)
        assert top.prefill is not None
        stored = top.prefill.tiers
        if policy == POLICY_DENSE or Policy.parse(policy).is_stepwise:
            return dict.fromkeys(stored, top)
        # What is stored up to is not identity: two of them under one salt would be one node.
        return {
            tier: top if tier in stored else node((tier,), tenant_salt("local", tier))
            for tier in tiers
        }

    def _request(
        self,
        token_ids: Sequence[int],
        policy: str,
        store_tier: str,
        salt: str,
        ancestors: tuple[str, ...] = (),
        view: tuple[str, ...] = (),
        *,
        deadline_s: float = DEADLINE_S,
    ) -> PrefillRequest:
        """Describe a node."""
        spec = self.model.spec
        name = policy if policy == POLICY_DENSE else Policy.parse(policy).canonical()
        identity = Identity(
            model_digest=spec.model_digest,
            tokenizer_digest=spec.tokenizer_digest,
            dtype=spec.dtype,
            codec=codec_of(name),
            policy=name,
            salt=salt,
            parent=ancestors[-1] if ancestors else None,
            view=view,
            tokens=tokens_digest(token_ids),
        )
        return PrefillRequest(
            node_id=identity.node_id,
            token_ids=tuple(token_ids),
            policy=name,
            store_tier=store_tier,
            salt=salt,
            ancestors=ancestors,
            view=view,
            deadline_s=deadline_s,
        )

    def ask(
        self,
        parent: LocalNode | None,
        question: str,
        *,
        tier: float | str | None = None,
        max_tokens: int = 256,
        policy: str = POLICY_DENSE,
        **sampling: Any,
    ) -> LocalTurn:
        """Ask a question about a context, or continue a conversation.

        Args:
            parent: a context or an earlier turn; None starts afresh.
            question: the user's text.
            tier: kept fraction to read at; None = the highest stored.
            max_tokens: most tokens to generate.
            policy: of the turn's own entries: "dense" keeps all, a stepwise policy
                shrinks them while the turn runs.
            **sampling: further fields of Sampling; greedy by default.
        """
        message = Message("user", (Part(question),))
        chat = self.model.chat
        if parent is None:
            pieces = chat.render([message], add_generation_prompt=True)
            roles: tuple[str, ...] = ("user", "assistant")
        else:
            pieces = chat.continue_(parent.roles, parent.is_open, [message])
            merged = parent.is_open and parent.roles[-1:] == ("user",)
            roles = (*parent.roles, *(() if merged else ("user",)), "assistant")
        pending = self.manifest(parent).pending_ids if parent else ()
        ids = [*pending, *(token for piece in pieces for token in piece.ids)]
        return self.generate(
            parent,
            ids,
            tier=tier,
            max_tokens=max_tokens,
            policy=policy,
            roles=roles,
            **sampling,
        )

    def ask_at_once(
        self,
        context: str,
        question: str,
        *,
        policy: str = "default",
        tier: float | str = "0.2",
        max_tokens: int = 256,
        **sampling: Any,
    ) -> LocalTurn:
        """Compress context and question together, then answer: the context+question setting.

        The policy sees the question (a window scorer looks from it), so the cache serves
        this question only. `compress` and `ask` are the context-only setting.

        Args:
            context: text before the question.
            question: text after it, in the same user message.
            policy: as in `compress`.
            tier: kept fraction of context and question.
            max_tokens: most tokens to generate.
            **sampling: further fields of Sampling; greedy by default.
        """
        message = Message("user", (Part(context), Part(JOINER + question)))
        pieces = self.model.chat.render([message], add_generation_prompt=True)
        ids = [token for piece in pieces for token in piece.ids]
        # The last token runs on the compressed cache: its logits begin the answer.
        node = self.compress_tokens(ids[:-1], policy=policy, store_tier=tier)
        roles = ("user", "assistant")
        return self.generate(node, ids[-1:], max_tokens=max_tokens, roles=roles, **sampling)

    def generate(
        self,
        parent: LocalNode | None,
        token_ids: Sequence[int],
        *,
        tier: float | str | None = None,
        max_tokens: int = 256,
        policy: str = POLICY_DENSE,
        roles: tuple[str, ...] = (),
        keep: bool = True,
        deadline_s: float = DEADLINE_S,
        check: Callable[[], None] = lambda: None,
        begun: int = 0,
        **sampling: Any,
    ) -> LocalTurn:
        """Run raw tokens after `parent` (its pending ids included by the caller).

        Args:
            parent: a context or an earlier turn; None starts afresh.
            token_ids: new ones.
            tier: kept fraction to read at; None = the highest stored.
            max_tokens: most tokens to generate.
            policy: of the turn's own entries, as in `ask`.
            roles: of the conversation's messages after this turn.
            keep: whether to store the turn; if not, its `node_id` is "" and nothing
                continues from it.
            deadline_s: longest time until it has ended.
            check: called for each token; may raise to stop.
            begun: how many of the last ids begin the answer: its text goes on after theirs.
            **sampling: further fields of Sampling; greedy by default.
        """
        salt = parent.salt if parent else SALT
        request = DecodeRequest(
            request_id=secrets.token_hex(8),
            parent=parent.node_id if parent else None,
            view=self._view(parent, tier),
            token_ids=tuple(token_ids),
            salt=salt,
            sampling=Sampling(max_tokens=max_tokens, **sampling),
            policy=canonical_turn_policy(policy),
            publish=keep,
            deadline_s=deadline_s,
            begun=begun,
        )
        events = self._events(request, check)
        start, end = events[0], events[-1]
        assert isinstance(start, DecodeStart)
        assert isinstance(end, DecodeEnd)
        if keep and end.node_id is None:
            raise InvalidRequestError(f"the turn was not kept: {end.publish_error}")
        deltas = tuple(e for e in events if isinstance(e, DecodeDelta))
        return LocalTurn(
            end.node_id or "",
            roles,
            False,
            salt=salt,
            text="".join(d.text for d in deltas),
            token_ids=tuple(t for d in deltas for t in d.token_ids),
            finish_reason=end.finish_reason,
            start=start,
            end=end,
            deltas=deltas,
        )

    def _events(
        self, request: DecodeRequest, check: Callable[[], None]
    ) -> list[DecodeStart | DecodeDelta | DecodeEnd]:
        events = []
        # Closed at once, also while an error's traceback still refers to it.
        with closing(self.decode.generate(request)) as running:
            for event in running:
                check()
                events.append(event)
        return events

    def manifest(self, node: LocalNode) -> Manifest:
        """Return a node's manifest: tiers, bytes, lengths per head."""
        with self.store.open_get(node.node_id) as reader:
            return reader.manifest

    def _view(self, leaf: LocalNode | None, tier: float | str | None) -> tuple[str, ...]:
        wanted = None if tier is None else canonical_tier(tier)
        return tuple(resolve_tier(m.tiers, wanted) for m in self._chain(leaf))

    def _chain(self, leaf: LocalNode | None) -> list[Manifest]:
        if leaf is None:
            return []
        last = self.manifest(leaf)
        above = [LocalNode(node_id, (), False) for node_id in last.ancestors]
        return [*(self.manifest(node) for node in above), last]


def _deadline(seconds: float) -> Callable[[], None]:
    """Return a check that raises DeadlineError once so many seconds have passed."""
    until = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until:
            raise DeadlineError("the prefill's deadline has passed")

    return check


def _ascending(tiers: Iterable[float | str]) -> tuple[str, ...]:
    return tuple(sorted(set(map(canonical_tier, tiers)), key=Decimal))
