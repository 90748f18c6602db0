"""The history of a run: one record per request, one JSON line each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Turn:
    """A question, how it was asked, and what came back.

    Attributes:
        question: the user's text.
        max_tokens: limit of the answer.
        tier: at which the document was read, as the service reported it.
        answer: the text that came back.
    """

    question: str
    max_tokens: int
    tier: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Ask:
    """What a request asked, as far as the oracle needs it.

    Attributes:
        document: number of the document; None = none.
        own: text of a document that only this request has; "" = a numbered one.
        policy: how it was compressed.
        form: "handle" (a registered context, then context_id), "resent" (all in the request)
            or "response" (sent at first, then previous_response_id).
        before: earlier turns.
        turn: this one.
        stop: a stop string; "" = none.
        read_tier: highest tier that was asked for; None = the highest stored.
        min_tier: lowest that would do; None = any.
        sampling: of a sampled request, temperature and seed; "" = greedy.
    """

    document: int | None
    policy: str
    form: str
    turn: Turn
    own: str = ""
    before: tuple[Turn, ...] = ()
    stop: str = ""
    read_tier: str | None = None
    min_tier: str | None = None
    sampling: str = ""


@dataclass(frozen=True)
class Record:
    """One request and how it ended.

    Attributes:
        id: number in the run.
        client: number of the client that sent it.
        tenant: whose key it carried.
        kind: what it was for.
        expects: "answer", "ok", "pin" (ok, if the KV is there), "refused" (a 4xx), "foreign"
            or "gone" (a 404).
        start, end: seconds since the run began.
        status: of the HTTP answer; 0 = none came.
        stream: whether a stream was asked for.
        done: whether `[DONE]` was seen, or a response's last event.
        finish: the finish_reason; "" = none.
        complete: whether a body of JSON came whole.
        cut: whether the client hung up itself.
        code: the error's code; "" = none.
        message: the error's, cut.
        event: whether the error came as an event of the stream.
        retry_after: whether a Retry-After came with it.
        transport: what the connection failed with; "" = nothing.
        text: the answer, as far as it came.
        tier: as reported.
        handle: as reported; of a context its id.
        published: whether the answer's turn was stored.
        cached: cached_tokens as reported; None = not reported.
        born: when the oldest handle that it uses was made, in seconds of the run.
        group: requests of one idempotency key share it; "" = none.
        most_cached: cached_tokens may not be more; None = any number.
        ask: for the oracle.
    """

    id: int
    client: int
    tenant: str
    kind: str
    expects: str
    start: float
    end: float = 0.0
    status: int = 0
    stream: bool = False
    done: bool = False
    finish: str = ""
    complete: bool = False
    cut: bool = False
    code: str = ""
    message: str = ""
    event: bool = False
    retry_after: bool = False
    transport: str = ""
    text: str = ""
    tier: str = ""
    handle: str = ""
    published: bool = False
    cached: int | None = None
    born: float = 0.0
    group: str = ""
    most_cached: int | None = None
    ask: Ask | None = None

    @property
    def answered(self) -> bool:
        """Whether a whole answer came, and no error."""
        ended = self.done and bool(self.finish) if self.stream else self.complete
        return self.status == 200 and ended and not self.code and not self.cut

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Event:
    """Something that was done to the system.

    Attributes:
        what: "prefill", "decode", "store", "valkey" (killed), "memory" (Redis was full).
        at: seconds of the run.
        until: when what it stopped answered again; None = it did not.
        by: "kill", or the failpoint.
    """

    what: str
    at: float
    until: float | None = None
    by: str = "kill"

    @property
    def recovery_s(self) -> float | None:
        """Seconds until it answered again."""
        return None if self.until is None else self.until - self.at


@dataclass
class History:
    """What happened, in memory and, line by line, in a file."""

    path: Path
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._file = self.path.open("w", encoding="utf-8")

    def add(self, record: Record) -> Record:
        """Number a finished record, keep it, and return it."""
        with self._lock:
            record = replace(record, id=len(self.records))
            self.records.append(record)
            self._file.write(_line("record", record))
        return record

    def happened(self, event: Event) -> None:
        """Keep an event."""
        with self._lock:
            self.events.append(event)
            self._file.write(_line("event", event))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def read(path: Path) -> tuple[list[Record], list[Event]]:
    """Read a history back."""
    records: list[Record] = []
    events: list[Event] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields: dict[str, Any] = json.loads(line)
        kind = fields.pop("line")
        if kind == "event":
            events.append(Event(**fields))
        else:
            records.append(Record(**{**fields, "ask": _ask(fields["ask"])}))
    return records, events


def counted(values: Iterable[str]) -> dict[str, int]:
    """Count equal values, the most frequent first."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(_by_count(counts))


def _by_count(counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    yield from sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _line(kind: str, value: Record | Event) -> str:
    return json.dumps({"line": kind, **asdict(value)}) + "\n"


def _ask(fields: dict[str, Any] | None) -> Ask | None:
    if fields is None:
        return None
    before = tuple(Turn(**turn) for turn in fields["before"])
    return Ask(**{**fields, "turn": Turn(**fields["turn"]), "before": before})
