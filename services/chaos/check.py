"""The judgement: a history in, findings out. Pure; knows no process and no clock.

Every rule is about what a client saw. What the right answer is, a judge says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from criticalkv.services.chaos.history import Event, Record
from criticalkv.shared import errors
from criticalkv.shared.errors import CriticalKVError, WorkerLostError

RETRY_STATUS = (429, 503)
TEMPORARY = frozenset(
    kind.code
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, CriticalKVError)
    and kind.http_status in (*RETRY_STATUS, 504)
)
"""Codes of errors after which the same request may succeed."""
LOST = ("context_not_found", "context_expired")
CONFLICT = "idempotency_key_reused"
CUT = "cancelled"
ENDED = (CUT, WorkerLostError.code)
"""What a kill may do to a request, and nothing else."""
NEAR_S = 10.0
"""So long after the service is back it may still tell of what was killed."""


@dataclass(frozen=True)
class Verdict:
    """What a judge says of an answer: right, wrong, or not to be judged, and why."""

    wrong: str = ""
    exempt: str = ""


@dataclass(frozen=True)
class Finding:
    """A rule that a request broke.

    Attributes:
        rule: "wrong", "late" or "silent".
        why: in words.
        record: the request's number.
    """

    rule: str
    why: str
    record: int


@dataclass
class Findings:
    """All of them, and what could not be judged.

    Attributes:
        judged: answers that were compared with the oracle.
        exempt: reason → answers that were not.
    """

    broken: list[Finding] = field(default_factory=list)
    judged: int = 0
    exempt: dict[str, int] = field(default_factory=dict)

    def count(self, rule: str) -> int:
        """Requests that broke a rule."""
        return len({finding.record for finding in self.broken if finding.rule == rule})


def check(
    records: Sequence[Record],
    events: Sequence[Event],
    judge: Callable[[Record], Verdict],
    *,
    deadline_s: float,
    margin_s: float,
) -> Findings:
    """Check a whole history.

    Args:
        records: all requests.
        events: when what was killed; a Valkey that comes back is empty, and only near a
            kill may a request be cancelled or lose its worker.
        judge: says whether an answer, whole or cut, is the right one.
        deadline_s: of every request.
        margin_s: that the answer's way may take beyond it.
    """
    out = Findings()
    emptied = [event.at for event in events if event.what == "valkey"]
    for record in records:
        out.broken += _silent(record)
        out.broken += _late(record, deadline_s + margin_s)
        out.broken += _ended(record, events)
        out.broken += _refusals(record, emptied)
        out.broken += _bounds(record)
        _judged(out, record, judge)
    out.broken += _retries(records, emptied)
    out.broken += _replays(records)
    return out


def _silent(record: Record) -> Iterator[Finding]:
    """A stream ends with finish_reason and [DONE] or an error event; a body is whole."""
    if record.cut:
        return
    if record.transport:
        yield Finding("silent", f"the connection ended: {record.transport}", record.id)
    elif record.status == 200 and record.stream:
        if record.code:
            if record.done:
                yield Finding("silent", "[DONE] after an error event", record.id)
        elif not record.done:
            yield Finding("silent", "the stream ended without [DONE] or an error", record.id)
        elif not record.finish:
            yield Finding("silent", "[DONE] without finish_reason", record.id)
    elif not record.complete:
        yield Finding("silent", "the body is no JSON", record.id)


def _late(record: Record, limit_s: float) -> Iterator[Finding]:
    if record.seconds > limit_s:
        yield Finding("late", f"took {record.seconds:.1f} s of {limit_s:.1f}", record.id)


def _ended(record: Record, events: Sequence[Event]) -> Iterator[Finding]:
    """A request is cancelled, or loses its worker, only if something was killed near it."""
    if record.code in ENDED and not any(_near(record, event) for event in events):
        yield Finding("wrong", f"{record.code}, though nothing was killed near it", record.id)


def _near(record: Record, event: Event) -> bool:
    if event.what == "memory":
        return False
    until = event.until if event.until is not None else record.start
    return event.at <= record.end and record.start <= until + NEAR_S


def _refusals(record: Record, emptied: Sequence[float]) -> Iterator[Finding]:
    """Whether the status is one that this request may get."""
    if record.transport or not (record.complete or record.stream):
        return  # a silent end
    if record.code in TEMPORARY:
        at_the_head = record.status in RETRY_STATUS and not record.event
        if at_the_head and not record.retry_after:
            yield Finding("wrong", f"{record.status} without Retry-After", record.id)
        return
    why = _unexpected(record, emptied)
    if why:
        yield Finding("wrong", why, record.id)


def _unexpected(record: Record, emptied: Sequence[float]) -> str:
    said = f"{record.status} {record.code}".strip()
    if record.expects in ("foreign", "gone"):
        right = record.status == 404 and record.code in LOST
        return "" if right else f"{record.expects} handle: {said}"
    if record.expects == "refused":
        right = 400 <= record.status < 500 and bool(record.code)
        return "" if right else f"invalid request: {said}"
    if record.expects == "pin" and record.code == "context_expired":
        return ""
    if record.code in LOST:
        lost = any(record.born <= at <= record.end for at in emptied)
        return "" if lost else f"a live handle is lost: {said}"
    if (record.code == CONFLICT and record.group) or (record.code == CUT and record.event):
        return ""
    return "" if record.status == 200 and not record.code else f"unexpected: {said}"


def _bounds(record: Record) -> Iterator[Finding]:
    """Tiers and cached tokens within what was asked, and what may be known."""
    if not record.answered:
        return
    if record.most_cached is not None and (record.cached or 0) > record.most_cached:
        yield Finding("wrong", f"{record.cached} foreign tokens are cached", record.id)
    ask = record.ask
    if ask is None or not record.tier:
        return
    if ask.read_tier is not None and Decimal(record.tier) > Decimal(ask.read_tier):
        yield Finding("wrong", f"tier {record.tier} above {ask.read_tier}", record.id)
    if ask.min_tier is not None and Decimal(record.tier) < Decimal(ask.min_tier):
        yield Finding("wrong", f"tier {record.tier} below {ask.min_tier}", record.id)


def _judged(out: Findings, record: Record, judge: Callable[[Record], Verdict]) -> None:
    ask = record.ask
    if (
        ask is None
        or ask.sampling
        or not (record.answered or (record.text and record.status == 200))
    ):
        return
    verdict = judge(record)
    if verdict.wrong:
        out.broken.append(Finding("wrong", verdict.wrong, record.id))
    if verdict.exempt:
        out.exempt[verdict.exempt] = out.exempt.get(verdict.exempt, 0) + 1
    else:
        out.judged += 1


def _retries(records: Iterable[Record], emptied: Sequence[float]) -> Iterator[Finding]:
    """One idempotency key, one answer, one handle, unless the memory of it was lost."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.group and record.answered:
            groups[record.group].append(record)
    for first, *others in groups.values():
        for other in others:
            forgotten = any(first.start <= at <= other.end for at in emptied)
            if not forgotten and (other.text, other.handle) != (first.text, first.handle):
                yield Finding("wrong", f"a retry of {first.id} got another answer", other.id)


def _replays(records: Iterable[Record]) -> Iterator[Finding]:
    """The same seed over the same tokens draws the same."""
    said: dict[tuple[object, ...], Record] = {}
    for record in records:
        ask = record.ask
        if ask is None or not ask.sampling or not record.answered:
            continue
        question = (
            repr(ask.before),
            ask.turn.question,
            ask.turn.max_tokens,
            ask.stop,
            ask.sampling,
        )
        name = (ask.document, ask.own, ask.policy, ask.form, record.tier, *question)
        first = said.setdefault(name, record)
        if first.text != record.text:
            yield Finding("wrong", f"the seed of {first.id} drew another answer", record.id)
