"""The decode engine: continuous batching over ragged nodes in one pool of pages.

Plain Python and threads; knows no Ray and no HTTP. One thread admits, steps the model and
makes room; it never waits for the store while others can run. Measuring and pulling
chains, swapping and publishing turns happen in small pools beside it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from criticalkv.services.decode.batch import BatchPlan, Member, prepare_groups
from criticalkv.services.decode.load import DecodeLoad, Rate
from criticalkv.services.decode.opening import ChainOpener, OpenedChain
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.preparation import Preparation
from criticalkv.services.decode.publication import Publication
from criticalkv.services.decode.resident import Residents
from criticalkv.services.decode.room import Room
from criticalkv.services.decode.sampling import choose, top_logprobs
from criticalkv.services.decode.scheduler import WaitingLine, victim
from criticalkv.services.decode.sequence import Emit, Sequence
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.shared.config import DecodeConfig
from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    DeadlineError,
    OverloadedError,
    WorkerLostError,
)
from criticalkv.shared.eviction.policy import parse_turn_policy
from criticalkv.shared.failpoints import hit
from criticalkv.shared.identity import NodeId
from criticalkv.shared.model.attention import forward
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.node_store import NodeStore
from criticalkv.shared.requests import (
    DecodeDelta,
    DecodeEnd,
    DecodeRequest,
    DecodeStart,
    Sampling,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
IO_THREADS = 4  # for each kind of work with the store
IDLE_WAIT_S = 0.05
STALLED_WAIT_S = 0.005  # between tries when no running sequence has room
PUBLISH_TIMEOUT_S = 30.0
STOPPING = "the decode worker is stopping"
MAX_FAILED_STEPS = 3  # in a row; then the replica asks to be replaced
STEPS_REMEMBERED = 256
LOAD_PERIOD_S = 0.1

Event = DecodeStart | DecodeDelta | DecodeEnd
Message = Callable[[], None]


class DecodeEngine:
    """Decodes turns over stored chains.

    Attributes:
        step_seconds: sequences in the batch and duration of the last steps.
    """

    def __init__(
        self, model: LoadedModel, store: NodeStore, config: DecodeConfig, replica: str = "local"
    ) -> None:
        spec = model.spec
        self._model = model
        self._config = config
        self._replica = replica
        self._heads = (spec.num_layers, spec.num_kv_heads)
        self._pages = Pages(spec, model.device, config.pool_mb << 20, config.page_size)
        self._residents = Residents(self._pages, config.node_cache_mb << 20)
        self._opener = ChainOpener(store, spec, self._pages, self._residents)
        self._publication = Publication(
            store, spec, self._pages, self._residents, PUBLISH_TIMEOUT_S
        )
        self._room = Room(spec, self._pages, self._opener)
        self._preparation = Preparation(
            model, self._pages, self._residents, self._opener, self._publication
        )
        self._lock = threading.Lock()
        self._live: set[Sequence] = set()
        self._arrivals = itertools.count()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Waiting, opening and running sequences belong to the step thread.
        self._waiting: WaitingLine[Sequence] = WaitingLine()
        self._opening: list[Sequence] = []
        self._running: list[Sequence] = []
        self._rate = Rate()
        self.step_seconds: deque[tuple[int, float]] = deque(maxlen=STEPS_REMEMBERED)
        self._load, self._load_due = self._measure_load(), 0.0
        self._failed_steps = 0
        self._closed = threading.Event()
        # Apart, so that what hangs in one kind of work never keeps another waiting.
        self._measuring = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-measure")
        self._pulling = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-pull")
        self._swapping = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-swap")
        self._writing = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="decode-publish")
        self._thread = threading.Thread(target=self._work, name="decode-step", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Choices accepted and not yet ended."""
        return len(self._live)

    @property
    def pages(self) -> Pages:
        """The pool's memory."""
        return self._pages

    def load(self) -> DecodeLoad:
        """Return the load, at most `LOAD_PERIOD_S` and a step old."""
        return self._load

    def resident_ids(self, limit: int) -> tuple[NodeId, ...]:
        """Return at most `limit` nodes that are in the pool, most recently used first."""
        return self._residents.ids(limit)

    def drop_unused(self) -> None:
        """Forget every node that nobody uses now."""
        self._residents.make_room(self._pages.total)

    def submit(self, request: DecodeRequest, emit: Emit) -> Sequence:
        """Start a request; events go to `emit`, from other threads.

        Every choice ends with a DecodeEnd, or the whole request with one error. Set the
        returned sequence's `cancelled` event to stop early: it ends within one step.

        Raises:
            OverloadedError: if too many requests are in flight.
            WorkerLostError: if the engine is stopping, or its step thread has died.
            PolicyError: if the turn's policy is neither dense nor stepwise.
        """
        policy = parse_turn_policy(request.policy)
        limit = self._config.max_num_seqs + self._config.max_queued
        with self._lock:
            self._check_not_closed()
            if len(self._live) >= limit:
                raise OverloadedError(
                    f"decode replica has {limit} requests in flight", retry_after_s=1.0
                )
            deadline = time.monotonic() + request.deadline_s
            arrival = next(self._arrivals)
            sequence = Sequence(request, emit, self._model, deadline, arrival, policy)
            self._live.add(sequence)
            self._measuring.submit(self._guarded, sequence, lambda: self._measure(sequence))
        return sequence

    def generate(self, request: DecodeRequest) -> Generator[Event, None, None]:
        """Run one request; leaving the iterator early cancels it.

        Raises:
            CriticalKVError: whatever ended the request.
        """
        events: queue.SimpleQueue[Event | CriticalKVError] = queue.SimpleQueue()
        sequence = self.submit(request, events.put)
        unfinished = 1 + len(request.branch_seeds)
        try:
            while unfinished:
                event = _next(events, request.deadline_s + PUBLISH_TIMEOUT_S)
                if isinstance(event, CriticalKVError):
                    raise event
                yield event
                unfinished -= isinstance(event, DecodeEnd)
        finally:
            sequence.cancelled.set()

    def check_health(self) -> None:
        """Raise RuntimeError if the step thread is gone or every step fails.

        The store's health is not ours: replacing replicas would not bring it back.
        """
        if self._closed.is_set() or not self._thread.is_alive():
            raise RuntimeError("the decode step thread has died")
        if self._failed_steps >= MAX_FAILED_STEPS:
            # After some device errors nothing works again in this process.
            raise RuntimeError(f"the last {self._failed_steps} decode steps failed")

    def warm_up(self, *, codecs: bool = False) -> None:
        """Run one short turn, so that the first request pays for no first time.

        Args:
            codecs: prepare for quantized contexts, too: compiling for them takes seconds.
        """
        if codecs:
            prepare_groups(self._model.spec, self._pages.keys.device)
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
        """Stop. Turns that have not ended do so with an error that says: go on elsewhere."""
        with self._lock:
            self._closed.set()
        self._inbox.put(lambda: None)
        self._thread.join(timeout=PUBLISH_TIMEOUT_S)
        # Queued jobs run: they find the engine closed and give back what they hold.
        for pool in (self._measuring, self._pulling, self._swapping, self._writing):
            pool.shutdown(wait=True)
        for sequence in list(self._live):
            self._fail(sequence, WorkerLostError(STOPPING))
        self._drain(block_s=0.0)  # what jobs said last gives their pages back

    # -- beside the step thread ------------------------------------------------

    def _measure(self, sequence: Sequence) -> None:
        """Find out what a request reads, and refuse what can never run."""
        started, request = time.perf_counter(), sequence.request
        chain = self._opener.measure(
            request.parent, request.salt, request.view, lambda: self._check_alive(sequence)
        )
        sequence.chain = chain
        self._room.check(sequence)
        sequence.spent.store_s = time.perf_counter() - started
        self._inbox.put(lambda: self._wait(sequence))

    def _prepare(self, sequence: Sequence, opened: OpenedChain, *, fill: bool) -> None:
        """Bring a sequence's nodes, and what its own pages begin with."""
        started = time.perf_counter()
        error: CriticalKVError | None = None
        try:
            # Others may wait for these nodes: they come even if the sequence is given up.
            self._preparation.pull(opened, self._check_not_closed)
            if fill:
                self._preparation.fill(sequence, lambda: self._check_alive(sequence))
        except CriticalKVError as failure:
            error = failure
        except Exception as failure:
            log.exception("a chain could not be opened")
            error = CriticalKVError(f"decode failed: {type(failure).__name__}")
        sequence.spent.store_s += time.perf_counter() - started
        self._inbox.put(lambda: self._prepared(sequence, opened, error))

    def _pull_while_it_runs(self, opened: OpenedChain) -> None:
        with suppress(CriticalKVError):  # who waits for the nodes has it already
            self._preparation.pull(opened, self._check_not_closed)

    def _close(self, sequence: Sequence) -> None:
        """Publish a finished turn and say so."""
        node_id, stored, error, code = None, 0, None, None
        # A turn that was cancelled before its first step has no KV to publish.
        if sequence.request.publish and sequence.published_tokens:
            try:
                hit("decode.publish")
                node_id, stored = self._publication.publish(
                    sequence, lambda: self._check_open(sequence)
                )
            except WorkerLostError as lost:  # another worker can still publish it
                self._fail(sequence, lost)
                return
            except Exception as failure:
                # The answer is good; only its reuse is lost, and the client is told.
                log.warning("turn %s not published", sequence.request.request_id, exc_info=True)
                known = isinstance(failure, CriticalKVError)
                error = str(failure) if known else f"publishing failed: {type(failure).__name__}"
                code = failure.code if isinstance(failure, CriticalKVError) else None
        used = 1.0 - (self._pages.free + self._residents.unused_pages) / self._pages.total
        if not self._end(sequence) or sequence.failed.is_set():
            return
        assert sequence.finish_reason is not None
        spent = sequence.spent
        sequence.emit(
            DecodeEnd(
                choice=sequence.choice,
                finish_reason=sequence.finish_reason,
                prompt_tokens=len(sequence.request.token_ids),
                completion_tokens=len(sequence.generated),
                node_id=node_id,
                ancestors=sequence.chain.ids,
                view=sequence.chain.view,
                stored_bytes=stored,
                publish_error=error,
                publish_code=code,
                decode_ms=1e3 * (time.perf_counter() - sequence.started),
                question_ms=1e3 * spent.question_s,
                batch_size=spent.members / spent.steps if spent.steps else 0.0,
                pool_used=used,
                preemptions=spent.preemptions,
            )
        )

    def _swap_out(self, sequence: Sequence, swap: Callable[[], NodeId | None]) -> None:
        """Store what a preempted sequence has, and put it in line again."""
        sequence.swapped = swap()
        if sequence.swapped is None:
            sequence.forwarded = 0
        self._inbox.put(lambda: self._wait(sequence))

    def _check_alive(self, sequence: Sequence) -> None:
        if sequence.cancelled.is_set():
            raise CancelledError("the request was cancelled")
        self._check_open(sequence)

    def _check_open(self, sequence: Sequence) -> None:
        """Unlike `_check_alive` for what is done with cancelled turns, too."""
        self._check_not_closed()
        if time.monotonic() > sequence.deadline:
            raise DeadlineError("the request's deadline has passed")

    def _check_not_closed(self) -> None:
        if self._closed.is_set():
            raise WorkerLostError(STOPPING)

    def _guarded(self, sequence: Sequence, work: Callable[[], None]) -> None:
        # A request ends with exactly one DecodeEnd or error, whatever goes wrong.
        try:
            work()
        except CriticalKVError as error:
            self._fail(sequence, error)
        except Exception as error:
            log.exception("decode request failed")
            self._fail(sequence, CriticalKVError(f"decode failed: {type(error).__name__}"))

    def _fail(self, sequence: Sequence, error: CriticalKVError) -> None:
        if not self._end(sequence):
            return
        with self._lock:  # one error ends all choices of a request
            first = not sequence.failed.is_set()
            sequence.failed.set()
        sequence.cancelled.set()
        if first:
            sequence.emit(error)

    def _end(self, sequence: Sequence) -> bool:
        """Free what a sequence holds; return whether this call was the one that ended it."""
        with self._lock:
            if sequence not in self._live:
                return False
            self._live.remove(sequence)
        if not sequence.filling:  # else a job still writes to its pages
            self._release(sequence)
        self._inbox.put(lambda: None)  # there may be room for another one
        return True

    def _release(self, sequence: Sequence) -> None:
        if sequence.kv is not None:
            sequence.kv.close()
            sequence.kv = None

    # -- the step thread -------------------------------------------------------

    def _work(self) -> None:
        """Loop until closed. Nobody waits for a thread that has died."""
        try:
            self._loop()
        finally:
            with self._lock:  # who has come by now is told, who comes later is refused
                self._closed.set()
                left = list(self._live)
            for sequence in left:
                # One that has finished is out of _running once its end is being written.
                if sequence.finish_reason is None or sequence in self._running:
                    self._fail(sequence, WorkerLostError(STOPPING))

    def _loop(self) -> None:
        progressed = True
        while not self._closed.is_set():
            idle = STALLED_WAIT_S if self._running else IDLE_WAIT_S
            try:
                self._drain(block_s=0.0 if progressed else idle)
                progressed = self._turn_over()
            except Exception as error:  # the thread goes on, whatever goes wrong
                log.exception("the decode step thread met an error")
                self._step_failed(list(self._running), error)
                progressed = False

    def _turn_over(self) -> bool:
        """End, admit, step; return whether anybody ran."""
        self._sweep()
        self._retire()
        self._poll()
        self._admit()
        if time.monotonic() >= self._load_due:
            self._load, self._load_due = self._measure_load(), time.monotonic() + LOAD_PERIOD_S
        return bool(self._running) and self._step()

    def _drain(self, block_s: float) -> None:
        """Do what jobs have left for this thread."""
        try:
            message = self._inbox.get(block=block_s > 0, timeout=block_s or None)
            while True:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _wait(self, sequence: Sequence) -> None:
        if sequence in self._live:
            sequence.spent.waiting_since = time.perf_counter()
            self._waiting.add(sequence)

    def _prepared(
        self, sequence: Sequence, opened: OpenedChain, error: CriticalKVError | None
    ) -> None:
        """Take over a sequence from the job that prepared it."""
        if sequence.opened is not opened:
            return  # it ran, made room, and has been opened again since
        sequence.filling = False
        if sequence not in self._live:
            self._release(sequence)
        elif error is not None and sequence in self._opening:
            self._opening.remove(sequence)
            self._fail(sequence, error)

    def _poll(self) -> None:
        """Run the sequences whose nodes have come, by whomever."""
        for sequence in list(self._opening):
            opened = sequence.opened
            assert opened is not None
            error = next((v.node.error for v in opened.views if v.node.error), None)
            if error is not None and not sequence.filling:
                self._opening.remove(sequence)
                self._fail(sequence, error)
            elif opened.is_complete and not sequence.filling:
                self._opening.remove(sequence)
                self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self._tell_start(sequence)
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
                if sequence in self._opening:  # its slot is free; its pages may be later
                    self._opening.remove(sequence)
        for sequence in list(self._waiting):
            if sequence not in self._live:
                self._waiting.remove(sequence)

    def _retire(self) -> None:
        for sequence in list(self._running):
            if sequence.cancelled.is_set() and sequence.unborn:
                # Its branches will never be: one error ends all choices.
                self._running.remove(sequence)
                self._fail(sequence, CancelledError("the request was cancelled"))
                continue
            if sequence.cancelled.is_set():
                sequence.finish("cancelled")
            if sequence.finish_reason is not None:
                self._running.remove(sequence)
                self._finish(sequence)
            elif time.monotonic() > sequence.deadline:
                self._running.remove(sequence)
                self._fail(sequence, DeadlineError("the request's deadline has passed"))

    def _finish(self, sequence: Sequence) -> None:
        if sequence.request.publish and sequence.published_tokens:
            self._writing.submit(self._guarded, sequence, lambda: self._close(sequence))
        else:  # nothing that could take long
            self._guarded(sequence, lambda: self._close(sequence))

    # admission

    def _admit(self) -> None:
        while len(self._running) + len(self._opening) < self._config.max_num_seqs:
            sequence = self._waiting.next([*self._running, *self._opening])
            if sequence is None or not self._open(sequence):
                return
            self._waiting.remove(sequence)
            if self._begin(sequence):
                return

    def _open(self, sequence: Sequence) -> bool:
        """Take pages for a sequence; False if there is no room."""
        chain = self._room.fitting(sequence)
        own = self._room.to_begin(sequence)
        opened = None if chain is None else self._opener.open(chain, own)
        if chain is None or opened is None:
            return False
        sequence.chain, sequence.opened = chain, opened
        position = chain.next_position
        kv = TurnKV(self._residents, self._pages, opened.views, position, self._heads)
        kv.grow(opened.own)
        sequence.kv = kv
        sequence.spent.queue_s += time.perf_counter() - sequence.spent.waiting_since
        sequence.start = sequence.start or self._start(sequence, opened.bytes_to_pull)
        return True

    def _begin(self, sequence: Sequence) -> bool:
        """Pull what a sequence lacks; return whether it runs meanwhile, and then alone."""
        opened = sequence.opened
        assert opened is not None
        sequence.filling = sequence.swapped is not None or sequence.policy is not None
        for node in opened.to_pull:
            self._residents.use(node)  # the job is a user, too: it may outlive the sequence
        is_alone = not self._running and not self._opening
        if opened.to_pull and not sequence.filling and is_alone:
            # Nobody else waits: the question's first layers go while the others come.
            self._pulling.submit(self._pull_while_it_runs, opened)
            self._run(sequence)
            return True
        self._opening.append(sequence)
        if opened.to_pull or sequence.filling:
            self._pulling.submit(self._prepare, sequence, opened, fill=sequence.filling)
        else:
            self._poll()
        return False

    def _start(self, sequence: Sequence, bytes_pulled: int) -> DecodeStart:
        chain, spent = sequence.chain, sequence.spent
        return DecodeStart(
            choice=sequence.choice,
            replica=self._replica,
            bytes_pulled=bytes_pulled,
            cached_tokens=chain.next_position,
            tier=chain.lowest_tier,
            view=chain.view,
            retained_fraction=chain.retained_fraction,
            kept_bytes=chain.kept_bytes,
            store_ms=1e3 * spent.store_s,
            queue_ms=1e3 * spent.queue_s,
        )

    def _tell_start(self, sequence: Sequence) -> None:
        if sequence.spent.preemptions or sequence.choice:
            return
        assert sequence.start is not None
        store_ms = 1e3 * sequence.spent.store_s
        sequence.start = sequence.start.model_copy(update={"store_ms": store_ms})
        sequence.emit(sequence.start)

    # stepping

    def _step(self) -> bool:
        """Run one step; False if nobody could be run."""
        planned = self._plan()
        if not planned:
            return False
        now = time.perf_counter()
        for sequence, _ in planned:
            sequence.spent.first_forward = sequence.spent.first_forward or now
        try:
            hit("decode.step")
            logits, asking = self._forward(planned)
        except Exception as error:
            self._step_failed([s for s, _ in planned], error)
            return True
        self._failed_steps = 0
        for sequence, tokens in planned:
            sequence.ran(tokens, len(planned))
            if isinstance(sequence.kv, StepwiseKV):
                self._own_trouble(sequence, sequence.kv.end_step)
        self._sample(asking, logits)
        self.step_seconds.append((len(planned), time.perf_counter() - now))
        return True

    def _plan(self) -> list[tuple[Sequence, int]]:
        """Return who runs how many tokens, oldest first; each has room for them."""
        left = self._config.max_num_batched_tokens - len(self._running)
        planned: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda s: s.arrival):
            if sequence not in self._running:
                continue  # it has just made room
            tokens = min(len(sequence.next_tokens), max(0, left) + 1)
            if self._make_room(sequence, tokens):
                planned.append((sequence, tokens))
                left -= tokens - 1
        return planned

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Take the pages that a sequence's next tokens need, from others if need be."""
        kv = sequence.kv
        if not isinstance(kv, TurnKV):
            return True
        missing = kv.missing_pages(tokens)
        while (pages := self._residents.take(missing)) is None:
            loser = victim(sequence, self._running, lambda s: isinstance(s.kv, TurnKV))
            if loser is None:
                return False
            self._preempt(loser)
            if loser is sequence:
                return False
        kv.grow(pages)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's pages; its KV goes to the store and comes back."""
        assert isinstance(sequence.kv, TurnKV)
        self._running.remove(sequence)
        sequence.opened = None
        sequence.spent.preemptions += 1
        swap = self._publication.swap(sequence)
        self._release(sequence)
        self._swapping.submit(self._guarded, sequence, lambda: self._swap_out(sequence, swap))

    def _forward(self, planned: list[tuple[Sequence, int]]) -> tuple[Tensor, list[Sequence]]:
        """Run a step; return logits [n, vocab] and the sequences that they are of."""
        # Those beside the pages last, as the plan wants them.
        planned = sorted(planned, key=lambda item: isinstance(item[0].kv, StepwiseKV))
        device = self._model.device
        plan = BatchPlan(self._pages, [self._member(*item) for item in planned], device)
        ends = itertools.accumulate(tokens for _, tokens in planned)
        # While a prompt runs in pieces, only the last one's logits choose.
        asking = [(end - 1, s) for end, (s, n) in zip(ends, planned, strict=True) if s.asks(n)]
        last = torch.tensor([end for end, _ in asking], dtype=torch.int64, device=device)
        logits = forward(self._model.model, plan.token_ids, plan.positions, plan, last)
        return logits.float().cpu(), [sequence for _, sequence in asking]

    def _member(self, sequence: Sequence, tokens: int) -> Member:
        assert sequence.kv is not None
        return Member(
            sequence.kv,
            sequence.next_tokens[:tokens],
            sequence.first_position,
            lambda: self._check_alive(sequence),
        )

    def _step_failed(self, sequences: list[Sequence], error: Exception) -> None:
        if isinstance(error, CriticalKVError):
            typed = error  # a chain that did not come, or was given up; it ran alone
        else:
            log.exception("decode step failed")
            self._failed_steps += 1
            typed = CriticalKVError(f"decode failed: {type(error).__name__}")
        for sequence in sequences:
            self._remove_failed(sequence, typed)

    def _sample(self, asking: list[Sequence], logits: Tensor) -> None:
        """Give every sequence whose tokens have all run its next one."""
        pairs = [(s, row) for s, row in zip(asking, logits, strict=True) if s in self._running]
        for sequence, row in list(pairs):
            pairs += [(branch, row) for branch in self._branches(sequence)]
        if not pairs:
            return
        rows = torch.stack([row for _, row in pairs])
        drawn = zip(pairs, rows, choose(rows, [s.sampler for s, _ in pairs]), strict=True)
        good: list[tuple[Sequence, Tensor, int]] = []
        for (sequence, _), row, token in drawn:
            if isinstance(token, CriticalKVError):
                self._remove_failed(sequence, token)
            else:
                good.append((sequence, row, sequence.chosen(token)))
        self._take(good)

    def _take(self, drawn: list[tuple[Sequence, Tensor, int]]) -> None:
        if not drawn:
            return
        sequences, rows, tokens = zip(*drawn, strict=True)
        counts = [sequence.request.sampling.logprobs for sequence in sequences]
        logprobs = top_logprobs(torch.stack(rows), tokens, counts)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            self._own_trouble(sequence, partial(sequence.take, token, logprob))
        self._rate.add(len(drawn))

    def _branches(self, sequence: Sequence) -> list[Sequence]:
        """Begin the other choices of a prompt that has just run."""
        count = sequence.unborn
        if not count:
            return []
        free = self._config.max_num_seqs - len(self._running) - len(self._opening)
        forked = min(count, max(0, free)) if isinstance(sequence.kv, TurnKV) else 0
        kvs = sequence.kv.fork(forked) if isinstance(sequence.kv, TurnKV) and forked else []
        born = [sequence.branch(i + 1, next(self._arrivals)) for i in range(count)]
        with self._lock:
            self._live.update(born)
        for i, branch in enumerate(born):
            assert branch.start is not None
            branch.start = branch.start.model_copy(update={"choice": branch.choice})
            branch.emit(branch.start)
            if i < forked:
                branch.kv = kvs[i]
                self._running.append(branch)
            else:
                branch.forwarded = 0  # no slot: its prompt runs again when there is one
                self._wait(branch)
        return born[:forked]

    def _own_trouble(self, sequence: Sequence, work: Callable[[], None]) -> None:
        # One sequence's trouble is its own: the thread and the others go on.
        try:
            return work()
        except CriticalKVError as failure:
            error = failure
        except Exception as failure:
            log.exception("a token could not be taken")
            error = CriticalKVError(f"decode failed: {type(failure).__name__}")
        return self._remove_failed(sequence, error)

    def _remove_failed(self, sequence: Sequence, error: CriticalKVError) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        self._fail(sequence, error)

    # load

    def _measure_load(self) -> DecodeLoad:
        pages, unused = self._pages, self._residents.unused_pages
        begun = [*self._waiting, *self._opening, *self._running]
        return DecodeLoad(
            pool_bytes=pages.total * pages.page_bytes,
            used_bytes=(pages.total - pages.free - unused) * pages.page_bytes,
            kept_bytes=unused * pages.page_bytes,
            queued_bytes=sum(map(self._room.wanted, self._waiting)) * pages.page_bytes,
            waiting=len(self._waiting),
            waiting_tokens=sum(len(s.next_tokens) for s in begun if not s.spent.question_s),
            running=len(self._running),
            tokens_per_s=self._rate.per_second(),
        )


def _next(events: queue.SimpleQueue[T], timeout_s: float) -> T:
    try:
        return events.get(timeout=timeout_s)
    except queue.Empty:
        raise DeadlineError("the decode engine gave no answer in time") from None
