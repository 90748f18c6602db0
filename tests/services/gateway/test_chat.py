"""Chat completions through the unmodified openai client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import APIError, BadRequestError

from criticalkv.services.gateway.auth import LOCAL_TENANT, Tenant
from criticalkv.shared.errors import StoreUnavailableError

DOC = "d" * 150  # long enough for the implicit breakpoint


def question(text: str = "why?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_answer_has_openais_shape_and_our_extension(gateway: Any) -> None:
    gateway.workers.say = lambda _: "because"
    answer = gateway.client().chat.completions.create(
        model="tiny", messages=question(DOC), temperature=0, seed=7
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("resp_")
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "because")
    extension = answer.model_extra["criticalkv"]
    assert extension["handle"] == answer.id
    assert set(extension) == {
        "handle", "node_id", "policy", "codec", "tier", "retained_fraction", "kept_bytes",
        "bytes_pulled", "store_ms", "prefill_ms", "scoring_ms", "replica", "published",
        "ttft_ms", "queue_ms",
    }  # fmt: skip
    assert extension["published"] is True
    assert extension["tier"] == "0.4"


def test_usage_counts_written_then_cached_tokens(gateway: Any) -> None:
    create = gateway.client().chat.completions.create
    cold = create(model="tiny", messages=question(DOC)).usage
    warm = create(model="tiny", messages=question(DOC)).usage
    written = len(gateway.workers.prefills[0].token_ids)
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert cold.prompt_tokens_details.cache_write_tokens == written
    assert warm.prompt_tokens_details.cached_tokens == written
    assert warm.prompt_tokens_details.cache_write_tokens == 0
    assert cold.prompt_tokens == warm.prompt_tokens
    assert cold.total_tokens == cold.prompt_tokens + cold.completion_tokens
    assert len(gateway.workers.prefills) == 1


def test_stream_ends_with_extension_usage_and_done(gateway: Any) -> None:
    gateway.workers.say = lambda _: "héllo 🎉"
    body = {"model": "tiny", "messages": question(), "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    answer = gateway.post("/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all(c["usage"] is None for c in chunks[:-1])
    last = chunks[-2]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["criticalkv"]["handle"] == last["id"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len("héllo 🎉".encode())


def test_openai_client_reads_the_stream(gateway: Any) -> None:
    gateway.workers.say = lambda _: "one two"
    stream = gateway.client().chat.completions.create(
        model="tiny", messages=question(), stream=True, logprobs=True, top_logprobs=2
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == "one two"
    assert [c.choices[0].logprobs.content[0].token for c in chunks if c.choices[0].logprobs] == [
        *"one two"
    ]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_extra["criticalkv"]["published"] is True


def test_every_choice_has_its_own_seed_and_a_handle_that_continues(gateway: Any) -> None:
    client = gateway.client()
    answer = client.chat.completions.create(model="tiny", messages=question(), n=3, seed=5)
    handles = [c.model_extra["criticalkv"]["handle"] for c in answer.choices]
    assert [c.message.content for c in answer.choices] == ["seed 5", "seed 6", "seed 7"]
    assert len(set(handles)) == 3
    assert handles[0] == answer.id
    for handle in handles:
        client.chat.completions.create(
            model="tiny",
            messages=question("go on"),
            extra_body={"criticalkv": {"context_id": handle}},
        )
    parents = [request.parent for request in gateway.workers.decodes[1:]]
    assert parents == [c.model_extra["criticalkv"]["node_id"] for c in answer.choices]


def test_sampling_reaches_decode(gateway: Any) -> None:
    gateway.client().chat.completions.create(
        model="tiny", messages=question(DOC), temperature=0.3, top_p=0.9, seed=11, stop=["x", "y"],
        max_completion_tokens=9, logprobs=True, top_logprobs=4,
        extra_body={"criticalkv": {"top_k": 40, "read_tier": 0.1}},
    )  # fmt: skip
    request = gateway.workers.decodes[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.9, 40)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (11, ("x", "y"), 9)
    assert sampling.logprobs == 4
    assert request.view == ("0.1",)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, None),
        ({"min_read_tier": 0.2}, "0.2"),
        ({"min_read_tier": "0.10", "read_tier": 0.1}, "0.1"),
        ({"min_read_tier": 0.05, "read_tier": 0.2}, "0.05"),
    ],
    ids=str,
)
def test_the_lowest_tier_to_read_at_reaches_decode(
    gateway: Any, asked: dict[str, Any], expected: str | None
) -> None:
    assert gateway.chat(question(DOC), criticalkv=asked).status_code == 200
    request = gateway.workers.decodes[0]
    assert request.min_tier == expected
    # What is wanted stays what it was.
    assert request.view == (str(asked.get("read_tier", "0.4")),)


def test_queue_time_is_told(gateway: Any) -> None:
    gateway.workers.start_fields = {"queue_ms": 7.5}
    assert gateway.chat(question()).json()["criticalkv"]["queue_ms"] == 7.5


def test_temperature_is_one_and_the_seed_is_fresh_by_default(gateway: Any) -> None:
    for _ in range(2):
        gateway.client().chat.completions.create(model="tiny", messages=question())
    first, second = (request.sampling for request in gateway.workers.decodes)
    assert first.temperature == 1.0
    assert first.seed != second.seed
    assert first.logprobs is None


def test_failed_publishing_is_told(gateway: Any) -> None:
    gateway.workers.publish_error = "the store is full"
    answer = gateway.client().chat.completions.create(model="tiny", messages=question())
    extension = answer.model_extra["criticalkv"]
    assert extension["published"] is False
    assert extension["error"] == "the store is full"
    assert gateway.get(f"/v1/contexts/{answer.id}").status_code == 404


def test_a_turn_that_could_not_be_stored_is_told_in_the_last_chunk(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = spy_on_bindings(gateway, monkeypatch)
    gateway.workers.publish_error = "store: the store is full"
    gateway.workers.end_fields = {"publish_code": "store_full"}
    stream = gateway.client().chat.completions.create(
        model="tiny", messages=question(), stream=True
    )
    last = list(stream)[-1]
    assert last.choices[0].finish_reason == "stop"
    extension = last.model_extra["criticalkv"]
    assert (extension["published"], extension["node_id"]) == (False, None)
    assert extension["error"] == gateway.workers.publish_error
    assert bound == []


@pytest.mark.parametrize("deleted", [True, False])
def test_a_turn_whose_context_was_deleted_while_it_streamed_ends_in_an_error(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """Lost without having been deleted, as with a store that came back empty, it is good."""
    context = gateway.post("/v1/contexts", {"text": "A document. " * 30}).json()["id"]
    bound = spy_on_bindings(gateway, monkeypatch)
    gateway.workers.publish_error = "node 0123 is not usable: its parent was deleted"
    gateway.workers.end_fields = {"publish_code": "node_missing"}
    tenant = Tenant(LOCAL_TENANT).digest

    def say(_: Any) -> str:
        if deleted and gateway.store.list_handles(tenant, "ctx_"):
            gateway.store.delete_handle(tenant, context)
        return "abc"

    gateway.workers.say = say
    asked = {"criticalkv": {"context_id": context}, "stream": True}
    lines = [x for x in gateway.chat(question(), **asked).text.split("\n\n") if x]
    last = json.loads(lines[-1 if deleted else -2].removeprefix("data: "))
    if deleted:
        assert last["error"]["code"] == "context_not_found"
        assert all('"finish_reason":"' not in line for line in lines)
    else:
        assert last["criticalkv"]["published"] is False
    assert bound == []


def test_a_missing_alias_is_no_missing_turn(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StoreUnavailableError("no")

    monkeypatch.setattr(gateway.core.store._client, "put_alias", refuse)
    answer = gateway.client().chat.completions.create(model="tiny", messages=question())
    extension = answer.model_extra["criticalkv"]
    assert extension["published"] is True
    assert "error" not in extension
    assert gateway.get(f"/v1/contexts/{answer.id}").status_code == 200


def spy_on_bindings(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every handle and alias that is bound."""
    client, seen = gateway.core.store._client, []
    for name in ("bind_handle", "put_alias"):
        original = getattr(client, name)
        monkeypatch.setattr(
            client, name, lambda *a, name=name, to=original: [seen.append(name), to(*a)][1]
        )
    return seen


def test_failure_in_the_middle_is_an_error_event_without_done(gateway: Any) -> None:
    gateway.workers.say = lambda _: "abcdef"
    gateway.workers.fail_after = 3
    text = gateway.chat(question(), stream=True).text
    lines = [line for line in text.split("\n\n") if line]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["code"] == "internal_error"
    assert "[DONE]" not in text
    assert "secret" not in text
    with pytest.raises(APIError):
        list(gateway.client().chat.completions.create(
            model="tiny", messages=question(), stream=True))  # fmt: skip


def test_cancelled_is_never_stop(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = spy_on_bindings(gateway, monkeypatch)
    gateway.workers.finish = "cancelled"
    text = gateway.chat(question(), stream=True).text
    assert '"cancelled"' in text
    assert "stop" not in text
    assert "[DONE]" not in text
    assert bound == []


def test_prompt_over_the_limit_is_refused_before_any_prefill(gateway: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        gateway.client().chat.completions.create(model="tiny", messages=question("w" * 4096))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as caught:
        gateway.client().chat.completions.create(
            model="tiny", messages=question(DOC), max_tokens=4096
        )
    assert caught.value.code == "context_length_exceeded"
    assert gateway.workers.prefills == gateway.workers.decodes == []


def test_absent_max_tokens_fits_the_room_that_is_left(gateway: Any) -> None:
    gateway.chat(question("w" * 4000))
    gateway.chat(question())
    first, second = (request.sampling.max_tokens for request in gateway.workers.decodes)
    assert 0 < first < 96
    assert second == 256
