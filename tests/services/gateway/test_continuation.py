"""An answer that cannot be completed ends with an error, never with a finish reason."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from criticalkv.shared.errors import (
    CancelledError,
    CriticalKVError,
    DeadlineError,
    NumericsError,
    OverloadedError,
    PoolLimitError,
    StoreUnavailableError,
    WorkerLostError,
)

ASK = [{"role": "user", "content": "why?"}]
ENDS = [CancelledError, DeadlineError, NumericsError, PoolLimitError, StoreUnavailableError]


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", ENDS)
def test_whatever_ends_decode_in_the_middle_ends_the_stream_with_one_error(
    gateway: Any, kind: type[CriticalKVError]
) -> None:
    gateway.workers.fail_after, gateway.workers.fail_with = 3, kind("it ended")
    *chunks, last = events(gateway.chat(ASK, stream=True).text)
    assert last["error"]["code"] == kind.code
    assert [c for c in chunks if "error" in c] == []
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "see"
    assert len(gateway.workers.decodes) == 1, "it would end there as well"


@pytest.mark.parametrize("kind", ENDS)
def test_without_a_stream_it_is_the_errors_status(
    gateway: Any, kind: type[CriticalKVError]
) -> None:
    gateway.workers.fail_after, gateway.workers.fail_with = 3, kind("it ended")
    answer = gateway.chat(ASK)
    assert answer.status_code == kind.http_status
    assert answer.json()["error"]["code"] == kind.code


def test_a_turn_lost_before_its_end_is_retried_from_its_parent(gateway: Any) -> None:
    """Nothing of the lost turn was bound: the retry has the same parent, and another end."""
    parent = gateway.chat(ASK).json()["id"]
    follow = {"criticalkv": {"context_id": parent}}
    key = {"Idempotency-Key": secrets.token_hex(8)}
    gateway.workers.fail_after, gateway.workers.fail_with = 3, NumericsError("it ended")
    text = gateway.chat(ASK, stream=True, headers=key, **follow).text
    assert events(text)[-1]["error"]["code"] == NumericsError.code
    handle = events(text)[0]["id"]
    assert gateway.get(f"/v1/contexts/{handle}").status_code == 404
    gateway.workers.fail_after = None
    again = gateway.chat(ASK, headers=key, **follow)
    assert again.json()["id"] == handle
    lost, kept = gateway.workers.decodes[-2:]
    assert (kept.parent, kept.token_ids, kept.emitted) == (lost.parent, lost.token_ids, ())
    assert gateway.get(f"/v1/contexts/{handle}").status_code == 200


def test_a_context_that_shrank_meanwhile_is_rebuilt_for_the_rest_of_the_answer(
    gateway: Any,
) -> None:
    context = gateway.post("/v1/contexts", {"text": "d" * 150}).json()
    document, workers = gateway.workers.prefills[0], gateway.workers

    def die() -> None:
        workers.fail_after, workers.fail_with = 3, WorkerLostError("died")

    def shrink() -> None:
        workers.fail_after = None
        gateway.store.delete_node(document.node_id)
        workers._prefill(document.model_copy(update={"store_tier": "0.2", "lease_token": ""}))

    workers.before_decode = [die, shrink]
    workers.say = lambda _: "abcdef"
    text = gateway.chat(ASK, stream=True, criticalkv={"context_id": context["id"]}).text
    assert text.endswith("data: [DONE]\n\n")
    chunks = events(text.removesuffix("data: [DONE]\n\n"))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abcdef"
    assert {request.view for request in workers.decodes} == {("0.4",)}
    assert gateway.store.stat([document.node_id])[0].tiers[-1] == "0.4"


def test_a_full_worker_is_asked_again_for_what_is_left_of_any_choice(gateway: Any) -> None:
    """Also of one that has told nothing yet, and more often than workers may be lost."""
    workers = gateway.workers
    full = OverloadedError("full", retry_after_s=0.01)

    def die() -> None:
        workers.fail_after, workers.fail_with = 0, WorkerLostError("died")

    def revive() -> None:
        workers.fail_after, workers.fail_decode = None, [full] * 10

    workers.before_decode = [die, revive]
    workers.say = lambda request: "" if request.sampling.seed == 5 else "xyz"
    text = gateway.chat(ASK, stream=True, n=2, seed=5).text
    assert text.endswith("data: [DONE]\n\n")
    assert workers.decodes[1].emitted == ()
    assert len(workers.decodes) == 12


def test_a_stream_that_has_begun_waits_for_a_full_worker(gateway: Any) -> None:
    """Its client has read a 200, although no word was said yet."""
    workers = gateway.workers
    full = OverloadedError("full", retry_after_s=0.01)

    def die() -> None:
        workers.fail_after, workers.fail_with = 0, WorkerLostError("died")

    def revive() -> None:
        workers.fail_after, workers.fail_decode = None, [full] * 3

    workers.before_decode = [die, revive]
    workers.say = lambda _: "xyz"
    text = gateway.chat(ASK, stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    assert '"error"' not in text
    assert len(workers.decodes) == 5
