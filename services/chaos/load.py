"""The load: clients in closed loops, each drawing its conversations from its own seed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from criticalkv.services.chaos.call import Caller
from criticalkv.services.chaos.check import LOST, TEMPORARY
from criticalkv.services.chaos.history import Ask, History, Record, Turn
from criticalkv.services.chaos.world import (
    FOLLOW_UPS,
    QUESTIONS,
    READ_TIERS,
    STORE_TIERS,
    Held,
    World,
    document,
)

CHAT = "/v1/chat/completions"
CONTEXTS = "/v1/contexts"
RESPONSES = "/v1/responses"
MAX_TOKENS = (1, 6, 12)
LONG = 48
BACKOFF_S = 0.3
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}


class Over(Exception):
    """The run has had its requests, or its time."""


@dataclass
class Budget:
    """How many requests are left, and how much time.

    Args:
        requests: in all; None = any number.
        until: on the monotonic clock; None = for ever.
        pace_s: least pause between two requests of all clients.
    """

    requests: int | None
    until: float | None
    pace_s: float = 0.0
    _sent: int = 0
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> None:
        """Take one request, when it is due.

        Raises:
            Over: if there is none.
        """
        with self._lock:
            now = time.monotonic()
            ended = self.until is not None and now >= self.until
            if ended or (self.requests is not None and self._sent >= self.requests):
                raise Over
            self._sent += 1
            due = self._next = max(self._next + self.pace_s, now)
        time.sleep(due - now)

    def stop(self) -> None:
        """Let everybody end after the request that runs."""
        with self._lock:
            self.requests = 0


@dataclass
class Client:
    """One client. `run` returns when the budget is spent.

    Args:
        number: of the client; with the seed it fixes everything that is drawn.
        tenant: whose key it has.
        callers: by tenant.
        wrong: a caller without a valid key.
    """

    number: int
    tenant: str
    callers: dict[str, Caller]
    wrong: Caller
    world: World
    history: History
    budget: Budget
    seed: int
    clock: Callable[[], float]

    def run(self) -> None:
        """Hold conversations until the budget is spent."""
        self._random = random.Random(f"{self.seed}/{self.number}")
        self._serial = 0
        kinds, weights = zip(*SCENES, strict=True)
        try:
            while True:
                self._random.choices(kinds, weights)[0](self)
        except Over:
            return

    # ------------------------------------------------------------ what it does

    def converse(self) -> None:
        """Continue a registered context by handle; sometimes in two branches."""
        number, policy = self._about()
        held = self._context(number, policy)
        if held is None:
            return
        ask = self._ask(number, policy, "handle")
        record = self._chat(ask, held)
        self._note_lost(record, number, policy, held)
        while (said := self._said(record, ask)) and len(said) < 4 and self._random.random() < 0.6:
            before = replace(ask, before=said)
            parent = Held(record.handle, held.born)
            ask = self._next(before)
            record, branch = self._chat(ask, parent), self._next(before)
            if self._random.random() < 0.2:
                self._chat(branch, parent)

    def resend(self) -> None:
        """Send a document with its question, then the whole history again."""
        number, policy = self._about()
        ask = self._ask(number, policy, "resent")
        said = self._said(self._chat(ask), ask)
        if said and self._random.random() < 0.7:
            self._chat(self._next(replace(ask, before=said)))

    def respond(self) -> None:
        """Ask by responses, and go on by previous_response_id, sometimes in two branches."""
        number, policy = self._about()
        ask = replace(self._ask(number, policy, "response"), stop="")
        record = self._respond(ask)
        while (said := self._said(record, ask)) and len(said) < 3 and self._random.random() < 0.7:
            before, parent = replace(ask, before=said), Held(record.handle, record.born)
            ask = replace(self._next(before), stop="")
            record, branch = self._respond(ask, parent), replace(self._next(before), stop="")
            if self._random.random() < 0.2:
                self._respond(branch, parent)

    def retry(self) -> None:
        """Send a request under one idempotency key several times, sometimes at once."""
        number, policy = self._about()
        held = self._context(number, policy)
        if held is None:
            return
        group = f"{self.seed}-{self.number}-{self._next_serial()}"
        ask = self._ask(number, policy, "handle")
        sampled = self._random.random() < 0.3
        ask = replace(ask, sampling="" if not sampled else f"temperature=1.2 key={group}")
        if self._random.random() < 0.3:
            self._chat(ask, held, group=group, cut_after=2)
        if self._random.random() < 0.3:
            self._at_once(ask, held, group)
        for _ in range(2):
            self._chat(ask, held, group=group)

    def sample(self) -> None:
        """Draw with a seed that others draw with, too."""
        number, policy = self._about()
        held = self._context(number, policy)
        if held is not None:
            seed = self._random.randrange(3)
            ask = self._ask(number, policy, "handle")
            self._chat(replace(ask, sampling=f"temperature=1.1 seed={seed}"), held)

    def leave(self) -> None:
        """Hang up in the middle of a stream."""
        number, policy = self._about()
        held = self._context(number, policy)
        if held is not None:
            ask = self._ask(number, policy, "handle")
            ask = replace(ask, turn=replace(ask.turn, max_tokens=LONG), stop="")
            self._chat(ask, held, cut_after=self._random.randrange(1, 12))

    def plain(self) -> None:
        """Ask without any context."""
        turn = Turn(f"Number {self._random.randrange(20)}?", self._random.choice(MAX_TOKENS))
        self._chat(Ask(None, "", "resent", turn))

    def own(self) -> None:
        """Ask about a text that nobody else has; then the other tenant asks the same."""
        text = document(10_000 + self._random.randrange(1 << 40))
        turn = Turn(self._random.choice(QUESTIONS), 6)
        policy = self._random.choice(self.world.policies)
        ask = Ask(None, policy, "resent", turn, own=text, read_tier="1")
        self._chat(ask, most_cached=0)
        (other,) = [name for name in self.callers if name != self.tenant]
        self._chat(ask, most_cached=0, tenant=other)

    def manage(self) -> None:
        """Register, look at, list, pin, unpin and delete a context."""
        number, policy = self._about()
        held = self._register(number, policy, share=False)
        if held is None:
            return
        path = f"{CONTEXTS}/{held.handle}"
        self._send("manage", "ok", "GET", path, held=held)
        for way in (f"{path}/pin", f"{path}/unpin"):
            self._send("manage", "pin", "POST", way, held=held)
        self._send("manage", "ok", "GET", CONTEXTS)
        deleted = self._send("manage", "ok", "DELETE", path, held=held)[0]
        if deleted.status == 200:
            self._send("manage", "gone", "GET", path, held=held)
            self._send("manage", "gone", "DELETE", path, held=held)

    def intrude(self) -> None:
        """Use a handle of another tenant in every way there is."""
        held = self.world.foreign(self.tenant, self._random)
        if held is None:
            return
        path = f"{CONTEXTS}/{held.handle}"
        turn = {"role": "user", "content": "Which one?"}
        body = {**self._common(), "messages": [turn], "criticalkv": {"context_id": held.handle}}
        answer = {"model": self.world.model, "input": "?", "previous_response_id": held.handle}
        for method, way, sent in (
            ("GET", path, None),
            ("DELETE", path, None),
            ("POST", f"{path}/pin", None),
            ("POST", CHAT, body),
            ("POST", RESPONSES, answer),
            ("GET", f"{RESPONSES}/{held.handle}", None),
        ):
            self._send("intrude", "foreign", method, way, sent, held=held)

    def blunder(self) -> None:
        """Send something that no server may accept."""
        good = {**self._common(), "messages": [{"role": "user", "content": "One?"}]}
        body = self._random.choice(BLUNDERS)
        sent = body if isinstance(body, str) else {**good, **body}
        if self._random.random() < 0.2:
            self._send("blunder", "refused", "POST", CHAT, good, caller=self.wrong)
        else:
            self._send("blunder", "refused", "POST", CHAT, sent)

    # ---------------------------------------------------------------- requests

    def _chat(
        self,
        ask: Ask,
        held: Held | None = None,
        *,
        group: str = "",
        cut_after: int | None = None,
        most_cached: int | None = None,
        tenant: str = "",
    ) -> Record:
        stream = cut_after is not None or self._random.random() < 0.5
        body = {**self._common(), **self._said_in(ask, held), "stream": stream}
        if stream and cut_after is None:
            body["stream_options"] = {"include_usage": True}
        return self._send(
            "retry" if group else "chat",
            "answer",
            "POST",
            CHAT,
            body,
            held=held,
            ask=ask,
            group=group,
            cut_after=cut_after,
            most_cached=most_cached,
            tenant=tenant,
        )[0]

    def _respond(self, ask: Ask, held: Held | None = None) -> Record:
        said = self._said_in(ask, None)
        messages = [
            _input(m) for m in (said["messages"] if held is None else said["messages"][-1:])
        ]
        body: dict[str, Any] = {
            "model": self.world.model,
            "input": [_input(message) for message in messages],
            "temperature": 0,
            "max_output_tokens": ask.turn.max_tokens,
            "criticalkv": said["criticalkv"],
            "stream": self._random.random() < 0.5,
        }
        if held is not None:
            body["previous_response_id"] = held.handle
        return self._send("response", "answer", "POST", RESPONSES, body, held=held, ask=ask)[0]

    def _said_in(self, ask: Ask, held: Held | None) -> dict[str, Any]:
        extension: dict[str, Any] = {"read_tier": ask.read_tier, "min_read_tier": ask.min_tier}
        if held is not None:
            extension["context_id"] = held.handle
        elif ask.policy:
            extension |= {"policy": ask.policy, "store_tier": "1" if ask.own else "0.6"}
        body: dict[str, Any] = {
            "max_tokens": ask.turn.max_tokens,
            "messages": self._messages(ask),
            "criticalkv": {name: value for name, value in extension.items() if value is not None},
        }
        for name, _, value in (item.partition("=") for item in ask.sampling.split()):
            if name != "key":
                body[name] = float(value) if name == "temperature" else int(value)
        return body | ({"stop": [ask.stop]} if ask.stop else {})

    def _messages(self, ask: Ask) -> list[dict[str, Any]]:
        if ask.form == "handle":
            return [_user(ask.turn.question)]
        text = ask.own or ("" if ask.document is None else self.world.documents[ask.document])
        turns = [*ask.before, ask.turn]
        marked = [{"type": "text", "text": text, **MARK}] if text else []
        out = [_user([*marked, {"type": "text", "text": turns[0].question}])]
        for earlier, later in pairwise(turns):
            out += [{"role": "assistant", "content": earlier.answer}, _user(later.question)]
        return out

    def _register(self, number: int, policy: str, *, share: bool) -> Held | None:
        body = {
            "text": self.world.documents[number],
            "policy": policy,
            "store_tier": self._random.choice(STORE_TIERS),
        }
        record, data = self._send("register", "ok", "POST", CONTEXTS, body)
        if record.status != 200 or "id" not in data:
            return None
        held = Held(data["id"], record.start)
        if share:
            self.world.hold(self.tenant, number, policy, held)
        return held

    def _send(
        self,
        kind: str,
        expects: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        held: Held | None = None,
        ask: Ask | None = None,
        group: str = "",
        cut_after: int | None = None,
        most_cached: int | None = None,
        tenant: str = "",
        caller: Caller | None = None,
    ) -> tuple[Record, dict[str, Any]]:
        self.budget.take()
        record = Record(
            id=0,
            client=self.number,
            tenant=tenant or self.tenant,
            kind=kind,
            expects=expects,
            start=0.0,
            stream=isinstance(body, dict) and body.get("stream") is True,
            born=held.born if held else self.clock(),
            group=group,
            most_cached=most_cached,
            ask=ask,
        )
        headers = {"idempotency-key": group} if group else {}
        by = caller or self.callers[record.tenant]
        record, data = by.send(record, method, path, body, headers=headers, cut_after=cut_after)
        record = self.history.add(record)
        if record.code in TEMPORARY or record.transport:
            time.sleep(BACKOFF_S)
        return record, data

    def _at_once(self, ask: Ask, held: Held, group: str) -> None:
        """Send the same request from two threads."""

        def send() -> None:
            try:
                self._chat(ask, held, group=group)
            except Over:
                return

        thread = threading.Thread(target=send)
        thread.start()
        send()
        thread.join()

    # ------------------------------------------------------------------ choice

    def _about(self) -> tuple[int, str]:
        number = self._random.randrange(len(self.world.documents))
        return number, self._random.choice(self.world.policies)

    def _ask(self, number: int, policy: str, form: str) -> Ask:
        turn = Turn(self._random.choice(QUESTIONS), self._random.choice(MAX_TOKENS))
        tier = self._random.choice(READ_TIERS)
        return Ask(number, policy, form, turn, read_tier=tier, stop=self._stop())

    def _stop(self) -> str:
        return self._random.choice("aeiou") if self._random.random() < 0.1 else ""

    def _next(self, ask: Ask) -> Ask:
        turn = Turn(self._random.choice(FOLLOW_UPS), self._random.choice(MAX_TOKENS))
        return replace(ask, turn=turn, read_tier=self._random.choice(READ_TIERS), stop=self._stop())

    def _said(self, record: Record, ask: Ask) -> tuple[Turn, ...]:
        """Return the turns so far, if the next one can follow them."""
        if not record.answered or not record.published or ask.stop or ask.sampling:
            return ()
        return (*ask.before, replace(ask.turn, tier=record.tier, answer=record.text))

    def _context(self, number: int, policy: str) -> Held | None:
        held = self.world.held(self.tenant, number, policy)
        return held or self._register(number, policy, share=True)

    def _note_lost(self, record: Record, number: int, policy: str, held: Held) -> None:
        if record.code in LOST:
            self.world.forget(self.tenant, number, policy, held)

    def _common(self) -> dict[str, Any]:
        return {"model": self.world.model, "temperature": 0, "max_tokens": 6}

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


def _input(message: dict[str, Any]) -> dict[str, Any]:
    """Spell a message as an item of a response's input."""
    content = message["content"]
    if isinstance(content, list):
        content = [{**part, "type": "input_text"} for part in content]
    return {**message, "content": content}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


SCENES: tuple[tuple[Callable[[Client], None], int], ...] = (
    (Client.converse, 30),
    (Client.resend, 13),
    (Client.respond, 10),
    (Client.retry, 10),
    (Client.sample, 8),
    (Client.leave, 8),
    (Client.blunder, 7),
    (Client.own, 5),
    (Client.manage, 4),
    (Client.intrude, 3),
    (Client.plain, 2),
)
BLUNDERS: tuple[str | dict[str, Any], ...] = (
    "{",
    "[]",
    '{"model": 1e999}',
    {"messages": []},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"temperature": 9},
    {"n": 0},
    {"n": 1000},
    {"max_tokens": 0},
    {"max_tokens": 1 << 30},
    {"model": "../../etc/passwd"},
    {"tools": [{}]},
    {"stop": ["x"] * 50},
    {"unknown_field": 1},
    {"criticalkv": {"read_tier": 7}},
    {"criticalkv": {"policy": "nonsense"}},
    {"criticalkv": {"read_tier": "0.1", "min_read_tier": "0.4"}},
    {"criticalkv": {"context_id": "resp_" + "0" * 32}},
)
