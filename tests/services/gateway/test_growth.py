"""What a request leaves behind in the gateway's process: nothing, whatever becomes of it."""

from __future__ import annotations

import gc
import logging
import secrets
import time
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

DOC = "d" * 150  # long enough for the implicit breakpoint
LOOPS = 8
SETTLE_S = 20.0
CHAT, CONTEXTS, RESPONSES = "/v1/chat/completions", "/v1/contexts", "/v1/responses"
BLUNDERS: tuple[Any, ...] = ({"n": 0}, {"stop": ["x"] * 50}, {"unknown_field": 1}, {"model": "?"})


@pytest.fixture
def gateway(make_gateway: Callable[..., Any], keys: Path) -> Any:
    return make_gateway(api_keys_file=str(keys))


class Caller:
    """Makes every kind of request, over one connection where that is kept."""

    def __init__(self, gateway: Any, http: httpx.Client) -> None:
        self._gateway = gateway
        self._http = http

    def loop(self) -> None:
        """Everything once; nothing of it is what an earlier loop sent."""
        self._chat()
        self._leave()
        self._retry()
        self._respond()
        self._manage()
        self._blunder()

    def _send(self, method: str, path: str, status: int, body: Any = None, **headers: str) -> Any:
        headers = {"authorization": "Bearer key-a"} | headers
        answer = self._http.request(method, self._gateway.url + path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer

    def _chat(self) -> None:
        said = [user(DOC + secrets.token_hex(8)), user("why?")]
        handle = self._send("POST", CHAT, 200, body(said)).json()["criticalkv"]["handle"]
        options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
        more = body([user("and?")], criticalkv={"context_id": handle}, **options)
        assert self._send("POST", CHAT, 200, more).text.endswith("data: [DONE]\n\n")

    def _leave(self) -> None:
        self._gateway.workers.token_delay = 0.05
        sent = body([user("a long one")], stream=True)
        headers = {"authorization": "Bearer key-a"}
        with self._http.stream("POST", self._gateway.url + CHAT, json=sent, headers=headers) as got:
            next(got.iter_lines())
        self._gateway.workers.token_delay = 0.0

    def _retry(self) -> None:
        key = {"idempotency-key": secrets.token_hex(8)}
        first, again = (self._send("POST", CHAT, 200, body([user("?")]), **key) for _ in range(2))
        assert first.json()["id"] == again.json()["id"]
        self._send("POST", CHAT, 409, body([user("!")]), **key)

    def _respond(self) -> None:
        asked = {"model": "tiny", "input": "why?"}
        first = self._send("POST", RESPONSES, 200, asked).json()["id"]
        more = asked | {"previous_response_id": first, "stream": True}
        assert "response.completed" in self._send("POST", RESPONSES, 200, more).text
        self._send("GET", f"{RESPONSES}/{first}", 200)
        self._send("DELETE", f"{RESPONSES}/{first}", 200)

    def _manage(self) -> None:
        made = self._send("POST", CONTEXTS, 200, {"text": DOC + secrets.token_hex(8)}).json()
        path = f"{CONTEXTS}/{made['id']}"
        self._send("GET", path, 404, authorization="Bearer key-b")
        for way in ("pin", "unpin"):
            self._send("POST", f"{path}/{way}", 200)
        self._send("GET", CONTEXTS, 200)
        self._send("DELETE", path, 200)
        self._send("GET", path, 404)

    def _blunder(self) -> None:
        for wrong in BLUNDERS:
            answer = 404 if "model" in wrong else 400
            self._send("POST", CHAT, answer, body([user("?")], **wrong))
        self._send("GET", f"/v1/{secrets.token_hex(8)}", 404)
        self._send("GET", CONTEXTS, 401, authorization=f"Bearer {secrets.token_hex(8)}")
        self._gateway.workers.fail_decode.append(ValueError("a worker's failure"))
        self._send("POST", CHAT, 500, body([user("?")]))


def body(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": messages, **fields}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log: pytest would keep its records."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Population:
    """All objects now: how many of a type, and how much each container holds.

    The containers are kept, so that none of another time has the place of one of them.
    """

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        everything = self._everything()
        self._types = Counter(map(type, everything))
        self._containers = [item for item in everything if size(item)]
        self._sizes = list(map(size, self._containers))

    def growth(self) -> dict[str, int]:
        """What there are LOOPS more of."""
        types = Counter(map(type, self._everything()))
        more_of = types - self._types
        grown = {str(kind): more for kind, more in more_of.items() if more >= LOOPS}
        for item, before in zip(self._containers, self._sizes, strict=True):
            if (more := size(item) - before) >= LOOPS:
                grown[f"in a {type(item)} of {before}"] = more
        return grown

    def _everything(self) -> list[Any]:
        self._gateway.workers.prefills.clear()
        self._gateway.workers.decodes.clear()
        urllib.parse.clear_cache()  # of 128 entries, most of them this file's
        gc.collect()
        return gc.get_objects()


def size(item: Any) -> int:
    """Length of a container, 0 of anything else. Text is in containers only."""
    for kind in (dict, list, set, deque):
        if issubclass(type(item), kind):  # `isinstance` asks the item, too
            return int(kind.__len__(item))
    return 0


@pytest.mark.usefixtures("quiet")
def test_no_request_leaves_anything_behind(gateway: Any) -> None:
    """Of no type, and in no container, there is one more per loop."""
    with httpx.Client(timeout=30) as http:
        caller = Caller(gateway, http)
        for _ in range(LOOPS):  # opens connections, threads, caches
            caller.loop()
        Population(gateway).growth()  # leaves something itself, once
        population = Population(gateway)
        for _ in range(LOOPS):
            caller.loop()
        deadline = time.monotonic() + SETTLE_S
        while grown := population.growth():
            assert time.monotonic() < deadline, grown
            time.sleep(0.2)  # what a client left may still be ending
