"""The prefill engine: context tokens in, a published compressed node out.

Plain Python; knows no Ray and no HTTP.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from decimal import Decimal
from pathlib import Path

from criticalkv.services.prefill.codec_probe import CodecProbe
from criticalkv.services.prefill.context_pass import ComputedContext, ContextPass
from criticalkv.services.prefill.kvpress_replay import replay_pass_of
from criticalkv.services.prefill.priority import Priority
from criticalkv.services.prefill.sinks import Sink, SpoolingSink, StreamingSink
from criticalkv.services.prefill.spool import Spool
from criticalkv.services.prefill.waiting import Waiting
from criticalkv.shared.cache.codec import checked_layout
from criticalkv.shared.cache.manifest import ITEMSIZE
from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.cache.quantized import QuantizedLayer
from criticalkv.shared.cache.ragged import RaggedLayer
from criticalkv.shared.chain import Chain, ChainLoader
from criticalkv.shared.config import EvictionConfig, PrefillConfig
from criticalkv.shared.errors import (
    CancelledError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
)
from criticalkv.shared.eviction.canary import Canary
from criticalkv.shared.eviction.policy import Policy, codec_of
from criticalkv.shared.eviction.profile import Profiles
from criticalkv.shared.eviction.scorers.replay import held_bytes
from criticalkv.shared.identity import CODEC_RAW, POLICY_DENSE, Identity, tokens_digest
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.publish import NodePublisher, Published
from criticalkv.shared.requests import PrefillRequest, PrefillResult
from criticalkv.shared.stepwise_pass import StepwisePass


class PrefillEngine:
    """Computes, compresses and publishes nodes for one model."""

    def __init__(
        self,
        model: LoadedModel,
        store: NodeStore,
        config: PrefillConfig,
        eviction: EvictionConfig,
        replica: str = "local",
    ) -> None:
        self._model = model
        self._store = store
        self._eviction = eviction
        self._replica = replica
        self._loader = ChainLoader(store, model.spec)
        self._spool = Spool(config.spool_limit_mb << 20)
        self._priority = Priority()
        self._waiting = Waiting()
        spec = model.spec
        self._profiles = Profiles(
            Path(eviction.profiles_dir), spec.model_digest, spec.num_layers, spec.num_kv_heads
        )

    def run(
        self,
        request: PrefillRequest,
        cancelled: threading.Event | None = None,
        *,
        context: ComputedContext | None = None,
        tiers: Sequence[str] = (),
    ) -> PrefillResult:
        """Publish the node that a request describes.

        A background request stands back while others run, and gives its spool memory up
        to them.

        Args:
            request: tokens, policy, ancestors and the view to read them at.
            cancelled: set it to stop; the prefill ends before its next layer.
            context: the request's tokens, without ancestors, whose forward has run: it does
                not run again, unless the policy is stepwise and needs its own.
            tiers: ascending, the last is `store_tier`; stored instead of the configured ones.

        Raises:
            NodeMissingError: if an ancestor is gone.
            CancelledError, DeadlineError: nothing is published.
            OverloadedError: if the spool is full, or others need what a background run holds.
            NumericsError: if the KV is not finite.
            InvalidRequestError: if the request does not describe `request.node_id`.
            PolicyError: if the policy names a profile that is missing or of another model.
        """
        prefill = _Prefill(self, request, cancelled or threading.Event(), context, tiers)
        if request.background:
            return prefill.run()
        with self._priority.foreground():
            return prefill.run()

    def accepted(self, request: PrefillRequest) -> AbstractContextManager[None]:
        """Count a request as waiting while the context is open: from its acceptance on.

        A background request is not counted: nobody waits for it.
        """
        if request.background:
            return nullcontext()
        return self._waiting.accepted(len(request.token_ids))

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of accepted prefills that have not ended."""
        return self._waiting.numbers()[1]

    def load(self) -> dict[str, float]:
        """Return what autoscaling reads: accepted prefills that have not ended, their tokens."""
        waiting, tokens = self._waiting.numbers()
        return {"waiting": waiting, "waiting_tokens": tokens}

    def check(self, policy: str, end: int = 0) -> None:
        """Refuse what cannot be compressed here, before anything is computed.

        Args:
            policy: in textual form, or "dense".
            end: position after the context's last token.

        Raises:
            PolicyError: if it does not fit the model, or its profile cannot be read.
            ContextLengthError: if nothing could be added to the context.
        """
        self._check_length(end)
        checked_layout(codec_of(policy), self._model.spec.head_dim)
        self._profiles.of(None if policy == POLICY_DENSE else Policy.parse(policy))

    def _check_length(self, end: int) -> None:
        limit = self._model.spec.max_positions
        if end >= limit:
            raise ContextLengthError(f"the context has {end} tokens; the model's limit is {limit}")

    def tiers_up_to(self, store_tier: str) -> tuple[str, ...]:
        """Return the configured tiers below `store_tier`, then itself."""
        below = [t for t in self._eviction.tiers if Decimal(t) < Decimal(store_tier)]
        return (*below, store_tier)


class _Prefill:
    """One request on its way through the engine."""

    def __init__(
        self,
        engine: PrefillEngine,
        request: PrefillRequest,
        cancelled: threading.Event,
        context: ComputedContext | None,
        tiers: Sequence[str],
    ) -> None:
        self._engine = engine
        self._model = engine._model
        self._request = request
        self._cancelled = cancelled
        self._deadline = time.monotonic() + request.deadline_s
        dense = request.policy == POLICY_DENSE
        self._policy = None if dense else Policy.parse(request.policy)
        self._tiers = ("1",) if dense else tuple(tiers) or engine.tiers_up_to(request.store_tier)
        self._context = context
        self._identity = self._make_identity()
        checked_layout(self._identity.codec, self._model.spec.head_dim)
        self._profile = engine._profiles.of(self._policy)
        self._canary = self._make_canary()
        self._probe: CodecProbe | None = None

    def run(self) -> PrefillResult:
        started = self._begin()
        request = self._request
        chain = self._engine._loader.load(
            request.ancestors[-1] if request.ancestors else None,
            request.salt,
            view=request.view,
            check=self._check,
        )
        self._engine._check_length(chain.next_position + len(request.token_ids))
        with ExitStack() as stack:
            publisher = NodePublisher(
                self._engine._store,
                self._identity,
                secrets.token_hex(16),
                lease_token=request.lease_token,
                ancestors=request.ancestors,
                tenant=request.tenant,
                check=self._check,
                timeout_s=request.deadline_s,
                watch=self._watch(stack, chain),
            )
            return self._computed(stack.enter_context(publisher), chain, started)

    def _begin(self) -> float:
        """Return when the work began: a forward that has run before is part of it."""
        now = time.perf_counter()
        if self._context is None or (self._policy is not None and self._policy.is_stepwise):
            return now
        return now - self._context.forward_s

    def _computed(self, publisher: NodePublisher, chain: Chain, started: float) -> PrefillResult:
        if self._policy is not None and self._policy.is_stepwise:
            return self._stepwise(publisher, chain, self._policy, started)
        if self._policy is None or self._policy.streams_layers:
            return self._stream(publisher, chain, started)
        with self._engine._spool.reserve(
            self._full_bytes(), self._check_alive, background=self._request.background
        ):
            return self._spooled(publisher, chain, self._policy, started)

    def _watch(
        self, stack: ExitStack, chain: Chain
    ) -> Callable[[RaggedLayer, QuantizedLayer], None] | None:
        """Start to measure what quantizing changes, if the node is quantized."""
        if self._identity.codec == CODEC_RAW:
            return None
        request = self._request
        probe = CodecProbe(self._model, chain, request.token_ids, request.deadline_s)
        self._probe = stack.enter_context(probe)
        return self._probe.see

    def _stream(self, publisher: NodePublisher, chain: Chain, started: float) -> PrefillResult:
        sink = StreamingSink(
            self._model,
            publisher,
            self._policy,
            self._tiers,
            chain.next_position,
            self._profile,
            self._canary,
        )
        forward_s, scoring_s = self._forward(ContextPass(self._model, chain, sink, self._check))
        return self._commit(publisher, chain, sink, forward_s, scoring_s, started)

    def _stepwise(
        self, publisher: NodePublisher, chain: Chain, policy: Policy, started: float
    ) -> PrefillResult:
        plan = StepwisePass(self._model, policy, chain, self._check)
        begin = time.perf_counter()
        cache = plan.run(self._request.token_ids)
        forward_s = time.perf_counter() - begin - plan.scoring_s
        for index, layer in enumerate(cache.layers):
            publisher.send(layer, cache.tier_lens[:, index])
        spent = (forward_s, plan.scoring_s, started)
        return self._publish(publisher, chain, *spent, tiers=cache.tiers, nested=False)

    def _spooled(
        self, publisher: NodePublisher, chain: Chain, policy: Policy, started: float
    ) -> PrefillResult:
        sink = SpoolingSink(
            self._model,
            publisher,
            policy,
            self._tiers,
            chain.next_position,
            self._profile,
            self._canary,
        )
        forward_s, scoring_s = self._forward(ContextPass(self._model, chain, sink, self._check))
        if policy.scorer == "replay":
            replay_started = time.perf_counter()
            replay = replay_pass_of(policy)
            replay(self._model, policy, chain, sink.layers, self._check).run(
                self._request.token_ids
            )
            scoring_s += time.perf_counter() - replay_started
        return self._commit(publisher, chain, sink, forward_s, scoring_s, started)

    def _forward(self, plan: ContextPass) -> tuple[float, float]:
        """Run the context, unless it has run; return seconds of forward and of scoring."""
        if self._context is not None:
            plan.repeat(self._context)
            return self._context.forward_s, plan.sink_s
        return plan.run(self._request.token_ids), plan.sink_s

    def _commit(
        self,
        publisher: NodePublisher,
        chain: Chain,
        sink: Sink,
        forward_s: float,
        scoring_s: float,
        started: float,
    ) -> PrefillResult:
        packing = time.perf_counter()
        self._check()
        ranking = sink.finish()
        scoring_s += time.perf_counter() - packing
        spent = (forward_s, scoring_s, started)
        return self._publish(publisher, chain, *spent, tiers=ranking.tiers, nested=ranking.nested)

    def _publish(
        self,
        publisher: NodePublisher,
        chain: Chain,
        forward_s: float,
        scoring_s: float,
        started: float,
        *,
        tiers: Sequence[str],
        nested: bool,
    ) -> PrefillResult:
        request = self._request
        published = publisher.commit(
            token_ids=request.token_ids,
            next_position=chain.next_position + len(request.token_ids),
            head_dim=self._model.spec.head_dim,
            tiers=tiers,
            nested=nested,
            pending_ids=request.pending_ids,
            prefill_ms=1e3 * (time.perf_counter() - started),
            ttl_ms=request.ttl_ms,
            quality=self._quality(),
        )
        return self._result(published, forward_s, scoring_s, started)

    def _result(
        self, published: Published, forward_s: float, scoring_s: float, started: float
    ) -> PrefillResult:
        manifest = published.manifest
        return PrefillResult(
            node_id=manifest.node_id,
            tiers=manifest.tiers,
            tier_bytes=tuple(manifest.tier_bytes()),
            tier_entries=tuple(manifest.tier_entries()),
            full_entries=manifest.full_entries,
            num_tokens=manifest.num_tokens,
            next_position=manifest.next_position,
            prefill_ms=1e3 * forward_s,
            scoring_ms=1e3 * scoring_s,
            total_ms=1e3 * (time.perf_counter() - started),
            stored_bytes=published.stored_bytes,
            published=published.published,
            replica=self._engine._replica,
            quality=manifest.quality,
        )

    def _quality(self) -> Quality | None:
        """What was measured: nothing of dense nodes, which keep all as it is."""
        tiers = self._canary.tiers() if self._canary else ()
        codec = self._probe.quality() if self._probe else None
        return Quality(tiers=tiers, codec=codec) if tiers or codec else None

    def _make_canary(self) -> Canary | None:
        """Of stepwise nodes there is none: their queries never saw the whole context."""
        count, policy = self._engine._eviction.canary_queries, self._policy
        if policy is None or policy.is_stepwise or not count:
            return None
        return Canary(count, policy.window)

    def _make_identity(self) -> Identity:
        spec, request = self._model.spec, self._request
        identity = Identity(
            model_digest=spec.model_digest,
            tokenizer_digest=spec.tokenizer_digest,
            dtype=spec.dtype,
            codec=CODEC_RAW if self._policy is None else self._policy.codec,
            policy=POLICY_DENSE if self._policy is None else self._policy.canonical(),
            salt=request.salt,
            parent=request.ancestors[-1] if request.ancestors else None,
            view=request.view,
            tokens=tokens_digest(request.token_ids, request.pending_ids),
        )
        if identity.node_id != request.node_id:
            raise InvalidRequestError(
                "the request does not describe the node it names: caller and worker differ in "
                "model, tokenizer, dtype or policy",
                param="node_id",
            )
        context = self._context
        if context and (request.ancestors or context.token_ids != request.token_ids):
            raise InvalidRequestError("the request is not about the context that has run")
        return identity

    def _full_bytes(self) -> int:
        """What waits on the host for every layer's scores: full KV, and a replay's sums."""
        spec = self._model.spec
        entry = 2 * spec.head_dim * ITEMSIZE[spec.dtype]
        layer = spec.num_kv_heads * entry
        if self._policy is not None:
            layer += held_bytes(self._policy, spec.num_q_heads, spec.num_kv_heads)
        return len(self._request.token_ids) * spec.num_layers * layer

    def _check(self) -> None:
        """Called between layers: stop, or stand back for others."""
        if self._request.background:
            self._engine._priority.stand_back(self._check_background)
        else:
            self._check_alive()

    def _check_background(self) -> None:
        self._check_alive()
        # Also while it stands back: the run it stands back for may wait for its memory.
        if self._policy is not None and not self._policy.streams_layers:
            self._engine._spool.check_loan()

    def _check_alive(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError("the prefill was cancelled")
        if time.monotonic() > self._deadline:
            raise DeadlineError("the prefill's deadline has passed")
