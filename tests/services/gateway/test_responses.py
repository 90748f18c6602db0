"""Responses through the unmodified openai client."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, NotFoundError

from criticalkv.services.gateway import responses as module

DOC = "d" * 150  # long enough for the implicit breakpoint


def create(gateway: Any, said: Any = "why?", **fields: Any) -> Any:
    return gateway.client().responses.create(model="tiny", input=said, **fields)


def prompt(gateway: Any, index: int = -1) -> str:
    """The text that a decode request ran, special tokens included."""
    ids = list(gateway.workers.decodes[index].token_ids)
    return str(gateway.core.template._special.decode(ids, skip_special_tokens=False))


# ------------------------------------------------------------------- shape


def test_a_response_has_openais_shape_and_our_extension(gateway: Any) -> None:
    gateway.workers.say = lambda _: "because"
    answer = create(gateway, metadata={"a": "b"}, user="u", max_output_tokens=50)
    assert (answer.object, answer.status, answer.output_text) == (
        "response",
        "completed",
        "because",
    )
    assert (answer.metadata, answer.max_output_tokens, answer.store) == ({"a": "b"}, 50, True)
    assert (answer.error, answer.incomplete_details, answer.tools) == (None, None, [])
    extension = answer.model_extra["criticalkv"]
    assert (extension["handle"], extension["published"]) == (answer.id, True)
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == len("because")


def test_usage_counts_written_then_cached_tokens(gateway: Any) -> None:
    cold, warm = create(gateway, DOC).usage, create(gateway, DOC).usage
    written = len(gateway.workers.prefills[0].token_ids)
    assert cold.input_tokens_details.cache_write_tokens == written
    assert warm.input_tokens_details.cached_tokens == written
    assert len(gateway.workers.prefills) == 1


def test_sampling_and_tiers_reach_decode(gateway: Any) -> None:
    create(
        gateway, DOC, temperature=0.3, top_p=0.9, max_output_tokens=9,
        extra_body={"criticalkv": {"read_tier": 0.1, "top_k": 4}},
    )  # fmt: skip
    sampling = gateway.workers.decodes[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.9, 9)
    assert sampling.top_k == 4
    assert gateway.workers.decodes[0].view == ("0.1",)


def test_an_answer_that_is_cut_is_incomplete(gateway: Any) -> None:
    gateway.workers.finish = "length"
    answer = create(gateway)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    with gateway.client().responses.stream(model="tiny", input="x") as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.incomplete_details.reason) == (
        "response.incomplete", "max_output_tokens",
    )  # fmt: skip


def test_input_is_a_string_or_messages_with_parts_and_marks(gateway: Any) -> None:
    first = create(gateway, "hi", instructions="be brief")
    assert prompt(gateway) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    marked = {"type": "input_text", "text": DOC, "prompt_cache_breakpoint": {"mode": "explicit"}}
    history = [
        {"role": "user", "content": [marked, {"type": "input_text", "text": "hi"}]},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "developer", "content": "go on", "status": "completed"},
    ]
    create(gateway, history)
    prefilled = gateway.node_ids()
    head = gateway.core.template.decode(gateway.workers.prefills[0].token_ids)
    assert head.endswith(DOC)
    rest = gateway.core.template.decode(gateway.workers.prefills[1].token_ids)
    assert f"assistant\n{first.output_text}" in rest
    assert prompt(gateway).startswith("go on<|im_end|>")
    marked["cache_control"] = {"type": "ephemeral"}
    del marked["prompt_cache_breakpoint"]
    create(gateway, history)
    assert gateway.node_ids() == prefilled


# ------------------------------------------------------------------ stream


ORDER = ["response.created", "response.in_progress", "response.output_item.added",
         "response.content_part.added", "response.output_text.delta",
         "response.output_text.done", "response.content_part.done",
         "response.output_item.done", "response.completed"]  # fmt: skip


def test_the_stream_helper_reads_the_events_in_order(gateway: Any) -> None:
    gateway.workers.say = lambda _: "héllo 🎉 漢字"
    with gateway.client().responses.stream(model="tiny", input=DOC) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert list(dict.fromkeys(e.type for e in events)) == ORDER
    assert [e.sequence_number for e in events] == list(range(len(events)))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert len(deltas) == len("héllo 🎉 漢字")
    assert deltas[-1].snapshot == final.output_text == "héllo 🎉 漢字"
    assert "".join(d.delta for d in deltas) == final.output_text
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {final.output[0].id}
    assert final.usage.input_tokens_details.cache_write_tokens > 0
    assert final.model_extra["criticalkv"]["published"] is True
    again = create(gateway, "go on", previous_response_id=final.id)
    assert gateway.workers.decodes[-1].parent == final.model_extra["criticalkv"]["node_id"]
    assert again.previous_response_id == final.id


def test_every_event_names_itself_and_the_last_is_the_response(gateway: Any) -> None:
    text = gateway.post("/v1/responses", {"model": "tiny", "input": "x", "stream": True}).text
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    data = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [d["type"] for d in data]
    assert data[-1]["type"] == "response.completed"
    assert data[-1]["response"]["output"][0]["content"][0]["text"].startswith("seed")


def test_a_failure_in_the_middle_is_told_and_raised(gateway: Any) -> None:
    gateway.workers.say = lambda _: "abcdef"
    gateway.workers.fail_after = 3
    events: list[Any] = []
    stream = gateway.client().responses.create(model="tiny", input="x", stream=True)
    with pytest.raises(APIError, match="internal error"):
        events.extend(stream)
    assert events[-1].type == "response.failed"
    assert (events[-1].response.status, events[-1].response.error.code) == (
        "failed",
        "server_error",
    )
    assert events[-1].response.output[0].content[0].text == "abc"
    assert "secret" not in str(events)
    with pytest.raises(APIError):
        create(gateway)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_answer_is_never_complete(gateway: Any, stream: bool) -> None:
    gateway.workers.finish = "cancelled"
    body = {"model": "tiny", "input": "x", "stream": stream}
    text = gateway.post("/v1/responses", body).text
    assert '"cancelled"' in text
    assert "completed" not in text


def test_a_refusal_before_the_first_token_has_a_status(gateway: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        gateway.client().responses.create(model="tiny", input="w" * 4096, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(BadRequestError) as caught:
        create(gateway, max_output_tokens=10**6)
    assert caught.value.param == "max_output_tokens"
    assert gateway.workers.decodes == []


# ------------------------------------------------------------ conversations


def test_a_response_continues_from_its_node_and_branches(gateway: Any) -> None:
    first = create(gateway, DOC)
    second = create(gateway, "and?", previous_response_id=first.id)
    branch = create(gateway, "or?", previous_response_id=first.id)
    node = first.model_extra["criticalkv"]["node_id"]
    assert [d.parent for d in gateway.workers.decodes[1:]] == [node, node]
    assert len({first.id, second.id, branch.id}) == 3
    create(gateway, "so?", previous_response_id=second.id)
    assert gateway.workers.decodes[-1].parent == second.model_extra["criticalkv"]["node_id"]
    assert len(gateway.workers.prefills) == 1


def test_turns_on_one_parent_at_once_are_branches_of_their_own(gateway: Any) -> None:
    def echo(request: Any) -> str:
        text = gateway.core.template.decode(request.token_ids)
        return str(text.split("user\n")[-1].split("\n")[0].removesuffix("assistant"))

    gateway.workers.say, gateway.workers.token_delay = echo, 0.01
    first = create(gateway, DOC)
    questions = [f"question {i}" for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda q: create(gateway, q, previous_response_id=first.id), questions)
        )
    assert [answer.output_text for answer in answers] == questions
    nodes = {answer.model_extra["criticalkv"]["node_id"] for answer in answers}
    assert len(nodes) == 6
    create(gateway, "and?", previous_response_id=answers[3].id)
    last = gateway.workers.decodes[-1].parent
    assert last == answers[3].model_extra["criticalkv"]["node_id"]


def test_the_same_instructions_continue_from_the_node(gateway: Any) -> None:
    first = create(gateway, instructions="be brief")
    create(gateway, "and?", instructions="be brief", previous_response_id=first.id)
    assert gateway.workers.decodes[-1].parent == first.model_extra["criticalkv"]["node_id"]
    assert "brief" not in prompt(gateway)


@pytest.mark.parametrize("instructions", ["be verbose", None])
def test_other_instructions_render_the_conversation_anew(
    gateway: Any, instructions: str | None
) -> None:
    gateway.workers.say = lambda _: "because"
    first = create(gateway, "why?", instructions="be brief")
    second = create(gateway, "and?", instructions="be brief", previous_response_id=first.id)
    third = create(gateway, "so?", instructions=instructions, previous_response_id=second.id)
    system = f"<|im_start|>system\n{instructions}<|im_end|>\n" if instructions else ""
    assert gateway.workers.decodes[-1].parent is None
    assert prompt(gateway) == (
        f"{system}<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nbecause<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nbecause<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )
    create(gateway, "x", instructions=instructions, previous_response_id=third.id)
    assert gateway.workers.decodes[-1].parent == third.model_extra["criticalkv"]["node_id"]


def test_a_document_keeps_its_mark_salt_and_policy_under_other_instructions(gateway: Any) -> None:
    mark = {"type": "input_text", "text": DOC, "cache_control": {"type": "ephemeral"}}
    items = [{"role": "user", "content": [mark, {"type": "input_text", "text": "q"}]}]
    extension = {"criticalkv": {"cache_salt": "s", "policy": "snapkv"}}
    first = create(gateway, items, extra_body=extension)
    create(gateway, "and?", instructions="be brief", previous_response_id=first.id)
    one, other = gateway.workers.prefills
    assert (one.salt, one.policy) == (other.salt, other.policy)
    assert one.token_ids != other.token_ids
    assert gateway.core.template.decode(other.token_ids).endswith(DOC)  # and not with "q"


def test_a_conversation_too_long_to_be_kept_is_continued_but_not_rendered_anew(
    make_gateway: Callable[..., Any],
) -> None:
    gateway = make_gateway(max_positions=200_000, decode_max_suffix_tokens=200_000)
    noise = secrets.token_hex(60_000)
    first = create(gateway, noise)
    second = create(gateway, "and?", previous_response_id=first.id)
    assert gateway.workers.decodes[-1].parent == first.model_extra["criticalkv"]["node_id"]
    for previous in (first, second):
        with pytest.raises(BadRequestError, match="send them again") as caught:
            create(gateway, "so?", instructions="new", previous_response_id=previous.id)
        assert caught.value.param == "instructions"
    assert gateway.client().responses.retrieve(first.id).output_text == first.output_text
    long = create(gateway, "x", instructions=noise)
    with pytest.raises(NotFoundError, match="too long"):
        gateway.client().responses.retrieve(long.id)
    create(gateway, "y", instructions=noise, previous_response_id=long.id)
    assert gateway.workers.decodes[-1].parent == long.model_extra["criticalkv"]["node_id"]


def test_contexts_and_chat_turns_are_continued_too(gateway: Any) -> None:
    context = gateway.post("/v1/contexts", {"text": DOC}).json()
    turn = gateway.chat([{"role": "user", "content": "q"}]).json()
    for handle, node in ((context["id"], context["node_id"]),
                         (turn["id"], turn["criticalkv"]["node_id"])):  # fmt: skip
        create(gateway, "why?", previous_response_id=handle)
        assert gateway.workers.decodes[-1].parent == node
        create(gateway, "why?", extra_body={"criticalkv": {"context_id": handle}})
        assert gateway.workers.decodes[-1].parent == node
        with pytest.raises(BadRequestError, match="instructions"):
            create(gateway, "why?", instructions="x", previous_response_id=handle)
    answer = create(gateway, "why?", previous_response_id=context["id"])
    gateway.chat(
        [{"role": "user", "content": "q"}], criticalkv={"context_id": answer.id}
    ).raise_for_status()


def test_without_store_nothing_is_bound(gateway: Any) -> None:
    answer = create(gateway, DOC, store=False)
    assert answer.id.startswith("resp_")
    assert (answer.store, answer.model_extra["criticalkv"]["published"]) == (False, False)
    assert "error" not in answer.model_extra["criticalkv"]
    request = gateway.workers.decodes[-1]
    assert request.publish is False
    assert len(gateway.workers.prefills) == 1  # the document is cached as ever
    for call in (lambda: create(gateway, "x", previous_response_id=answer.id),
                 lambda: gateway.client().responses.retrieve(answer.id)):  # fmt: skip
        with pytest.raises(NotFoundError):
            call()


def test_retrieve_then_delete(gateway: Any) -> None:
    created = create(gateway, "why?", instructions="be brief", metadata={"k": "v"})
    found = gateway.client().responses.retrieve(created.id)
    ours = found.to_dict().pop("criticalkv")
    assert ours["node_id"] == created.model_extra["criticalkv"]["node_id"]
    same = ("id", "status", "output", "usage", "instructions", "metadata", "model", "store")
    assert all(getattr(found, name) == getattr(created, name) for name in same)
    assert abs(found.created_at - time.time()) < 300
    gateway.client().responses.delete(created.id)
    assert not gateway.store.stat([ours["node_id"]])[0].present
    assert gateway.store.token_records([ours["node_id"]]) == [None]
    with pytest.raises(NotFoundError):
        gateway.client().responses.retrieve(created.id)


def test_a_stored_response_is_not_streamed(gateway: Any) -> None:
    created = create(gateway)
    with pytest.raises(BadRequestError) as caught:
        gateway.client().responses.retrieve(created.id, stream=True)
    assert caught.value.param == "stream"
    assert gateway.client().responses.retrieve(created.id, stream=False).id == created.id


def test_deleting_the_first_response_leaves_the_second_to_be_continued(gateway: Any) -> None:
    first = create(gateway, "why?")
    second = create(gateway, "and?", previous_response_id=first.id)
    gateway.client().responses.delete(first.id)
    create(gateway, "so?", previous_response_id=second.id)
    create(gateway, "so?", instructions="new", previous_response_id=second.id)
    assert "why?" in prompt(gateway)


def test_a_turn_that_could_not_be_stored_is_told_and_cannot_be_continued(gateway: Any) -> None:
    gateway.workers.publish_error = "the store is full"
    answer = create(gateway)
    assert answer.model_extra["criticalkv"]["error"] == "the store is full"
    with pytest.raises(NotFoundError):
        create(gateway, previous_response_id=answer.id)


def test_unknown_expired_foreign_and_other_handles_are_the_same_404(
    make_gateway: Callable[..., Any], keys: Any
) -> None:
    gateway = make_gateway(api_keys_file=str(keys))
    mine = gateway.client("key-a").responses.create(model="tiny", input="x")
    deleted = gateway.client("key-b").responses.create(model="tiny", input="x")
    gateway.client("key-b").responses.delete(deleted.id)
    handles = (mine.id, deleted.id, "resp_" + "0" * 32, "../../etc", "ü")
    answers = set()
    for handle in handles:
        body = {"model": "tiny", "input": "x", "previous_response_id": handle}
        answer = gateway.post("/v1/responses", body, Authorization="Bearer key-b")
        answers.add((answer.status_code, answer.text))
    assert len(answers) == 1
    status, text = answers.pop()
    assert (status, json.loads(text)["error"]["param"]) == (404, "previous_response_id")
    chat = gateway.chat([{"role": "user", "content": "x"}], headers=bearer("key-b")).json()
    for method in ("GET", "DELETE"):
        texts = {
            httpx.request(
                method, f"{gateway.url}/v1/responses/{handle}", headers=bearer("key-b")
            ).text
            for handle in (*handles[:3], chat["id"])
        }
        assert len(texts) == 1
    assert gateway.client("key-a").responses.retrieve(mine.id).id == mine.id


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -------------------------------------------------------------- idempotency


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_same_response(gateway: Any, stream: bool) -> None:
    key = {"Idempotency-Key": secrets.token_hex(8)}
    first = create(gateway, extra_headers=key)
    wait_a_second()
    if stream:
        with gateway.client().responses.stream(
            model="tiny", input="why?", extra_headers=key
        ) as events:
            second = events.get_final_response()
    else:
        second = create(gateway, extra_headers=key)
    assert (second.id, second.output_text) == (first.id, first.output_text)
    assert (second.created_at, second.completed_at) == (first.created_at, first.completed_at)
    assert second.usage == first.usage
    assert second.model_extra["criticalkv"] == first.model_extra["criticalkv"]
    assert len(gateway.workers.decodes) == 1
    answer = gateway.post("/v1/responses", {"model": "tiny", "input": "other"}, **key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")


def wait_a_second() -> None:
    """Until times in whole seconds are others."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.02)


def test_a_failed_attempt_may_be_retried_at_once(gateway: Any) -> None:
    key = {"Idempotency-Key": secrets.token_hex(8)}
    gateway.workers.fail_after = 0
    with pytest.raises(APIError):
        create(gateway, extra_headers=key)
    gateway.workers.fail_after = None
    create(gateway, extra_headers=key)
    first, second = gateway.workers.decodes
    assert (first.request_id, first.sampling.seed) == (second.request_id, second.sampling.seed)


# ------------------------------------------------------------------- fields


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "invalid_request"),
    ({"input": ""}, "input", "invalid_request"),
    ({"input": []}, "input", "invalid_request"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_request"),
    ({"input": [{"role": "user", "content": ""}]}, "input[0]", "invalid_request"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_request"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0]",
     "unsupported_field"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0]", "unsupported_field"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "odd": 1}]}]},
     "input[0].content[0].odd", "invalid_request"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input", "invalid_request"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 8193}]},
     "input", "invalid_request"),
    ({"instructions": ["x"]}, "instructions", "invalid_request"),
    ({"previous_response_id": "x", "criticalkv": {"context_id": "y"}}, "previous_response_id",
     "invalid_request"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
    ({"temperature": 2.1}, "temperature", "invalid_request"),
    ({"top_p": 0}, "top_p", "invalid_request"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "invalid_request"),
    ({"metadata": {"k": "x" * 513}}, "metadata", "invalid_request"),
    ({"metadata": {"k": 1}}, "metadata.k", "invalid_request"),
    ({"user": "x" * 513}, "user", "invalid_request"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
     "invalid_request"),
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_field"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_field"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_field"),
    ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_field"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text",
     "unsupported_field"),
    ({"text": {"verbosity": "low"}}, "text", "unsupported_field"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_field"),
    ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_field"),
    ({"top_logprobs": 2}, "top_logprobs", "unsupported_field"),
    ({"background": True}, "background", "unsupported_field"),
    ({"truncation": "auto"}, "truncation", "unsupported_field"),
    ({"conversation": "c"}, "conversation", "unsupported_field"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_field"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_field"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm",
     "invalid_request"),
    ({"messages": []}, "messages", "invalid_request"),
    ({"n": 2}, "n", "invalid_request"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "code"), REFUSED, ids=[json.dumps(c[0])[:60] for c in REFUSED]
)
def test_a_bad_field_is_named(
    shared_gateway: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = shared_gateway.post("/v1/responses", {"model": "tiny", "input": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert param in error["message"]
    assert shared_gateway.workers.decodes == []


def test_every_field_that_the_client_knows_is_decided() -> None:
    """None is an unknown field: it is accepted, or refused by name as not supported."""
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    from criticalkv.services.gateway.response_schemas import NEUTRAL, ResponseRequest

    known = {*NEUTRAL, *ResponseRequest.model_fields}
    assert set(ResponseCreateParamsBase.__annotations__) <= known


def test_fields_that_ask_for_nothing_are_accepted(gateway: Any) -> None:
    create(
        gateway, tools=[], tool_choice="auto", parallel_tool_calls=True, include=[],
        text={"format": {"type": "text"}}, reasoning={"effort": None, "summary": None},
        background=False, truncation="disabled", service_tier="auto", user="u",
        safety_identifier="s", prompt_cache_key="k", instructions=None, top_logprobs=0,
        previous_response_id=None, metadata=None, temperature=None, max_output_tokens=None,
    )  # fmt: skip
    assert len(gateway.workers.decodes) == 1


def test_what_is_kept_survives_a_round_trip() -> None:
    kept = module.Kept({"a": [1, None]}, [module.Message("user", (module.Part("é", True),))])
    assert module.Kept.decode(kept.encode()) == kept
    assert module.Kept.decode(b"") == module.Kept(None, None)
