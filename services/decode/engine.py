"""The decode engine: many turns at once, one flattened forward per step.

Plain Python and threads; knows no Ray and no HTTP. One thread steps the model. Pulling
chains and publishing turns happen in a small pool beside it, so that neither delays the
next token of another sequence.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from criticalkv.services.decode.pool import KVPool, MergedKVPool
from criticalkv.services.decode.sequence import Emit, Sequence
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.chain import Chain, ChainLoader, NodeCache
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import (
    CancelledError,
    ContextLengthError,
    CriticalKVError,
    DeadlineError,
    OverloadedError,
)
from criticalkv.shared.eviction.policy import parse_turn_policy
from criticalkv.shared.identity import POLICY_DENSE, Identity, tokens_digest
from criticalkv.shared.model.attention import LayerCall, forward
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.publish import publish_cache
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    Sampling,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
IO_THREADS = 4  # to pull chains; as many again to publish turns
IDLE_WAIT_S = 0.05
PUBLISH_TIMEOUT_S = 30.0
MAX_FAILED_STEPS = 3  # in a row; then the replica asks to be replaced


class BatchPlan:
    """Attention of one flattened step: each sequence sees its own KV only."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences
        self._counts = [len(s.next_tokens) for s in sequences]

    def attend(self, call: LayerCall) -> Tensor:
        """See AttentionPlan."""
        outs = []
        for sequence, own in zip(self._sequences, call.split(self._counts), strict=True):
            assert sequence.kv is not None
            outs.append(sequence.kv.attend(own))
        return torch.cat(outs, dim=1)


class DecodeEngine:
    """Decodes turns over stored chains."""

    def __init__(
        self, model: LoadedModel, store: NodeStore, config: DecodeConfig, replica: str = "local"
    ) -> None:
        self._model = model
        self._store = store
        self._config = config
        self._replica = replica
        self._loader = ChainLoader(store, model.spec, NodeCache(config.node_cache_mb << 20))
        self._pool: KVPool = MergedKVPool(model)
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._running: list[Sequence] = []
        self._live: set[Sequence] = set()
        # Only sequences with a slot hold KV of their own.
        self._slots = threading.Semaphore(config.max_num_seqs)
        self._failed_steps = 0
        self._closed = threading.Event()
        # Apart, so that hanging publications never keep a new request waiting.
        self._opening = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-open")
        self._closing = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-publish")
        self._thread = threading.Thread(target=self._loop, name="decode-step", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._live)

    @property
    def running(self) -> int:
        """Sequences in the present batch."""
        return len(self._running)

    def submit(self, request: DecodeRequest, emit: Emit) -> Sequence:
        """Start a request; events go to `emit`, from other threads.

        The last event is a DecodeEnd or an error. Set the returned sequence's
        `cancelled` event to stop early: it ends within one step.

        Raises:
            OverloadedError: if too many requests are in flight.
            PolicyError: if the turn's policy is neither dense nor stepwise.
        """
        policy = parse_turn_policy(request.policy)
        limit = self._config.max_num_seqs + self._config.max_queued
        with self._lock:
            if self._closed.is_set() or len(self._live) >= limit:
                raise OverloadedError(
                    f"decode replica has {limit} requests in flight", retry_after_s=1.0
                )
            deadline = time.monotonic() + request.deadline_s
            sequence = Sequence(request, emit, self._model, deadline, policy)
            self._live.add(sequence)
        self._opening.submit(self._guarded, sequence, self._open)
        return sequence

    def generate(self, request: DecodeRequest) -> Iterator[DecodeStart | DecodeDelta | DecodeEnd]:
        """Run one request; leaving the iterator early cancels it.

        Raises:
            CriticalKVError: whatever ended the request.
        """
        events: queue.SimpleQueue[DecodeStart | DecodeDelta | DecodeEnd | CriticalKVError] = (
            queue.SimpleQueue()
        )
        sequence = self.submit(request, events.put)
        try:
            while True:
                event = _next(events, request.deadline_s + PUBLISH_TIMEOUT_S)
                if isinstance(event, CriticalKVError):
                    raise event
                yield event
                if isinstance(event, DecodeEnd):
                    return
        finally:
            sequence.cancelled.set()

    def check_health(self) -> None:
        """Raise RuntimeError if the step thread is gone or every step fails.

        The store's health is not ours: replacing replicas would not bring it back.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the decode step thread has died")
        if self._failed_steps >= MAX_FAILED_STEPS:
            # After some device errors nothing works again in this process.
            raise RuntimeError(f"the last {self._failed_steps} decode steps failed")

    def warm_up(self) -> None:
        """Run one short turn, so that the first request pays for no first time."""
        request = DecodeRequest(
            request_id="warm-up",
            token_ids=tuple(self._model.chat.closing_ids) or (0,),
            salt="0" * 64,
            sampling=Sampling(max_tokens=2, ignore_eos=True),
            publish=False,
        )
        for _ in self.generate(request):
            pass

    def close(self) -> None:
        """Stop. Running turns end as cancelled, waiting ones with an error."""
        self._closed.set()
        self._ready.put(None)
        self._thread.join(timeout=PUBLISH_TIMEOUT_S)
        self._opening.shutdown(wait=True, cancel_futures=True)
        self._closing.shutdown(wait=True)
        for sequence in list(self._live):
            self._fail(sequence, CancelledError("the decode worker is stopping"))

    # -- beside the step thread ------------------------------------------------

    def _open(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.chain = self._loader.load(
            request.parent,
            request.salt,
            view=request.view,
            check=lambda: self._check_alive(sequence),
        )
        self._check_length(sequence)
        self._take_slot(sequence)
        kv = self._pool.open(sequence.chain, sequence.policy)
        with self._lock:
            sequence.kv = kv if sequence in self._live else None
        if sequence.kv is None:
            self._pool.close(kv)
            return
        chain = sequence.chain
        sequence.emit(
            DecodeStart(
                replica=self._replica,
                bytes_pulled=chain.bytes_pulled,
                cached_tokens=chain.next_position,
                tier=chain.lowest_tier,
                retained_fraction=chain.retained_fraction,
                store_ms=chain.store_ms,
            )
        )
        self._ready.put(sequence)

    def _take_slot(self, sequence: Sequence) -> None:
        while not self._slots.acquire(timeout=IDLE_WAIT_S):
            self._check_alive(sequence)
        with self._lock:
            sequence.has_slot = sequence in self._live
        if not sequence.has_slot:  # it was given up meanwhile
            self._slots.release()
            raise CancelledError("the request was cancelled")
        self._check_alive(sequence)

    def _check_alive(self, sequence: Sequence) -> None:
        if sequence.cancelled.is_set():
            raise CancelledError("the request was cancelled")
        self._check_open(sequence)

    def _check_open(self, sequence: Sequence) -> None:
        """Unlike `_check_alive` for what is done with cancelled turns, too."""
        if self._closed.is_set():
            raise CancelledError("the decode worker is stopping")
        if time.monotonic() > sequence.deadline:
            raise DeadlineError("the request's deadline has passed")

    def _check_length(self, sequence: Sequence) -> None:
        request, limit = sequence.request, self._model.spec.max_positions
        end = sequence.chain.next_position + len(request.token_ids) + request.sampling.max_tokens
        if end > limit:
            raise ContextLengthError(
                f"context, prompt and max_tokens together need {end} positions; the model has "
                f"{limit}",
                param="max_tokens",
            )

    def _close(self, sequence: Sequence) -> None:
        node_id, stored, error = None, 0, None
        identity = self._identity(sequence)
        ancestors, view = sequence.chain.ids, sequence.chain.view
        # A turn that was cancelled before its first step has no KV to publish.
        if sequence.request.publish and sequence.published_tokens:
            try:
                stored = self._publish(sequence, identity)
                node_id = identity.node_id
            except Exception as failure:
                # The answer is good; only its reuse is lost, and the client is told.
                log.warning("turn %s not published", identity.node_id[:16], exc_info=True)
                known = isinstance(failure, CriticalKVError)
                error = str(failure) if known else f"publishing failed: {type(failure).__name__}"
        if not self._end(sequence):
            return
        assert sequence.finish_reason is not None
        sequence.emit(
            DecodeEnd(
                finish_reason=sequence.finish_reason,
                prompt_tokens=len(sequence.request.token_ids),
                completion_tokens=len(sequence.generated),
                node_id=node_id,
                ancestors=ancestors,
                view=view,
                stored_bytes=stored,
                publish_error=error,
                decode_ms=1e3 * (time.perf_counter() - sequence.started),
            )
        )

    def _publish(self, sequence: Sequence, identity: Identity) -> int:
        assert sequence.kv is not None
        tokens = sequence.published_tokens
        cache: RaggedCache = sequence.kv.own(tokens, lambda: self._check_open(sequence))
        published = publish_cache(
            self._store,
            identity,
            cache,
            token_ids=tokens,
            ancestors=sequence.chain.ids,
            nested=sequence.policy is None,
            pending_ids=sequence.pending_ids,
            attempt=secrets.token_hex(16),
            prefill_ms=1e3 * (time.perf_counter() - sequence.started),
            ttl_ms=sequence.request.ttl_ms,
            timeout_s=PUBLISH_TIMEOUT_S,
        )
        self._loader.keep(published.manifest, cache)
        return published.stored_bytes

    def _identity(self, sequence: Sequence) -> Identity:
        spec, chain = self._model.spec, sequence.chain
        return Identity(
            model_digest=spec.model_digest,
            tokenizer_digest=spec.tokenizer_digest,
            dtype=spec.dtype,
            policy=POLICY_DENSE if sequence.policy is None else sequence.policy.canonical(),
            salt=sequence.request.salt,
            parent=chain.ids[-1] if chain.ids else None,
            view=chain.view,
            tokens=tokens_digest(sequence.published_tokens),
        )

    def _guarded(self, sequence: Sequence, step: object) -> None:
        # A request ends with exactly one DecodeEnd or error, whatever goes wrong.
        try:
            step(sequence)  # type: ignore[operator]
        except CriticalKVError as error:
            self._fail(sequence, error)
        except Exception as error:
            log.exception("decode request failed")
            self._fail(sequence, CriticalKVError(f"decode failed: {type(error).__name__}"))

    def _fail(self, sequence: Sequence, error: CriticalKVError) -> None:
        if self._end(sequence):
            sequence.emit(error)

    def _end(self, sequence: Sequence) -> bool:
        """Free what a sequence holds; return whether this call was the one that ended it."""
        with self._lock:
            if sequence not in self._live:
                return False
            self._live.remove(sequence)
        if sequence.kv is not None:
            self._pool.close(sequence.kv)
            sequence.kv = None
        sequence.chain = Chain()
        if sequence.has_slot:
            self._slots.release()
        return True

    # -- the step thread -------------------------------------------------------

    def _loop(self) -> None:
        while not self._closed.is_set():
            self._admit()
            self._sweep()
            self._retire()
            if self._running:
                self._step()
        for sequence in self._running:
            sequence.finish("cancelled")
        self._retire()

    def _admit(self) -> None:
        while True:
            try:
                timeout = None if self._running else IDLE_WAIT_S
                sequence = self._ready.get(block=not self._running, timeout=timeout)
            except queue.Empty:
                return
            if sequence is None:
                return
            if sequence in self._live:
                self._running.append(sequence)

    def _sweep(self) -> None:
        """End requests that wait for their turn and have been given up."""
        with self._lock:
            waiting = [s for s in self._live if s.finish_reason is None]
        for sequence in set(waiting) - set(self._running):
            try:
                self._check_alive(sequence)
            except CriticalKVError as error:
                self._fail(sequence, error)

    def _retire(self) -> None:
        for sequence in list(self._running):
            if sequence.cancelled.is_set():
                sequence.finish("cancelled")
            if sequence.finish_reason is not None:
                self._running.remove(sequence)
                self._closing.submit(self._guarded, sequence, self._close)
            elif time.monotonic() > sequence.deadline:
                self._running.remove(sequence)
                self._fail(sequence, DeadlineError("the request's deadline has passed"))

    def _step(self) -> None:
        batch = list(self._running)
        try:
            logits = self._forward(batch)
        except Exception as error:
            log.exception("decode step failed")
            self._failed_steps += 1
            for sequence in batch:
                self._running.remove(sequence)
                self._fail(sequence, CriticalKVError(f"decode failed: {type(error).__name__}"))
            return
        self._failed_steps = 0
        for sequence, row in zip(batch, logits, strict=True):
            self._accept(sequence, row)

    def _accept(self, sequence: Sequence, logits: Tensor) -> None:
        # One sequence's trouble is its own: the thread and the others go on.
        try:
            if sequence.kv is not None:
                sequence.kv.end_step()
            return sequence.accept(logits)
        except CriticalKVError as failure:
            error = failure
        except Exception as failure:
            log.exception("a token could not be taken")
            error = CriticalKVError(f"decode failed: {type(failure).__name__}")
        self._running.remove(sequence)
        return self._fail(sequence, error)

    def _forward(self, batch: list[Sequence]) -> Tensor:
        device = self._model.device
        tokens = [s.next_tokens for s in batch]
        positions = [
            torch.arange(s.first_position, s.first_position + len(t))
            for s, t in zip(batch, tokens, strict=True)
        ]
        last = torch.tensor([len(t) for t in tokens]).cumsum(0) - 1
        flat = torch.tensor([token for part in tokens for token in part])
        logits = forward(
            self._model.model,
            flat.to(device),
            torch.cat(positions).to(device),
            BatchPlan(batch),
            last.to(device),
        )
        return logits.float().cpu()


def _next(events: queue.SimpleQueue[T], timeout_s: float) -> T:
    try:
        return events.get(timeout=timeout_s)
    except queue.Empty:
        raise DeadlineError("the decode engine gave no answer in time") from None
