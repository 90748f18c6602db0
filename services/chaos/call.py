"""One HTTP request of a client, and everything that it saw of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx

from criticalkv.services.chaos.history import Record

DATA = "data: "
MESSAGE_CHARS = 200
ENDS = ("response.completed", "response.incomplete")


class Caller:
    """A client with one key and one connection pool.

    Args:
        base: `http://host:port`.
        key: API key.
        timeout_s: longest silence before it gives up.
        clock: seconds since the run began.
    """

    def __init__(self, base: str, key: str, timeout_s: float, clock: Callable[[], float]) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout_s)
        self._clock = clock

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def send(
        self,
        record: Record,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        cut_after: int | None = None,
    ) -> tuple[Record, dict[str, Any]]:
        """Send a request; return the record of how it ended, and the body if it was JSON.

        Args:
            record: what is asked; its end is filled in.
            body: JSON, or text that is sent as it is.
            cut_after: hang up after so many events of the stream.
        """
        content = body if isinstance(body, str | None) else json.dumps(body)
        sent = {"content-type": "application/json", **(headers or {})}
        record = replace(record, start=self._clock())
        data: dict[str, Any] = {}
        try:
            with self._http.stream(method, path, content=content, headers=sent) as response:
                record = _head(record, response)
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    record = _events(replace(record, stream=True), response, cut_after)
                else:
                    record, data = _body(replace(record, stream=False), response)
        except (httpx.HTTPError, ValueError) as error:  # what is no JSON is no event
            record = replace(record, transport=type(error).__name__)
        return replace(record, end=self._clock()), data


def _head(record: Record, response: httpx.Response) -> Record:
    return replace(
        record, status=response.status_code, retry_after="retry-after" in response.headers
    )


def _body(record: Record, response: httpx.Response) -> tuple[Record, dict[str, Any]]:
    response.read()
    try:
        data = response.json()
    except ValueError:
        return record, {}
    if not isinstance(data, dict):
        return record, {}
    record = replace(record, complete=True)
    if data.get("error") is not None:
        return _failed(record, data["error"]), data
    if data.get("object") == "response":
        return _responded(record, data), data
    return (_answered(record, data) if "choices" in data else record), data


def _answered(record: Record, data: dict[str, Any]) -> Record:
    choice = data["choices"][0]
    record = replace(record, text=choice["message"]["content"], finish=choice["finish_reason"])
    return _extended(_usage(record, data), data)


def _responded(record: Record, data: dict[str, Any]) -> Record:
    """Read an ended response, of a body or of a stream's last event."""
    text = data["output"][0]["content"][0]["text"]
    finish = {"completed": "stop", "incomplete": "length"}.get(data["status"], "")
    details = data["usage"]["input_tokens_details"]
    record = replace(record, text=text, finish=finish, cached=details["cached_tokens"])
    return _extended(record, data)


def _events(record: Record, response: httpx.Response, cut_after: int | None) -> Record:
    for number, data in enumerate(_data(response), start=1):
        if data == "[DONE]":
            record = replace(record, done=True)
            continue
        record = _event(record, json.loads(data))
        if number == cut_after:
            return replace(record, cut=True)
    return record


def _data(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith(DATA):
            yield line.removeprefix(DATA)


def _event(record: Record, data: dict[str, Any]) -> Record:
    if "error" in data:
        return replace(_failed(record, data["error"]), event=True)
    if "type" in data:
        return _response_event(record, data)
    for choice in data["choices"]:
        text = record.text + (choice["delta"].get("content") or "")
        finish = choice["finish_reason"] or record.finish
        record = replace(record, text=text, finish=finish, handle=data["id"])
    return _extended(_usage(record, data), data)


def _response_event(record: Record, data: dict[str, Any]) -> Record:
    if data["type"] == "response.output_text.delta":
        return replace(record, text=record.text + data["delta"])
    if data["type"] in ENDS:  # the last event: such a stream has no [DONE]
        whole = _responded(record, data["response"])
        # Deltas and end must say the same.
        return replace(whole, done=whole.text == record.text)
    return record


def _failed(record: Record, error: Any) -> Record:
    fields = error if isinstance(error, dict) else {}
    message = str(fields.get("message", ""))[:MESSAGE_CHARS]
    return replace(record, code=str(fields.get("code") or "none"), message=message)


def _usage(record: Record, data: dict[str, Any]) -> Record:
    details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
    return replace(record, cached=details.get("cached_tokens", record.cached))


def _extended(record: Record, data: dict[str, Any]) -> Record:
    extension = data.get("criticalkv") or {}
    return replace(
        record,
        tier=extension.get("tier", record.tier),
        handle=extension.get("handle", record.handle),
        published=extension.get("published", record.published),
    )
