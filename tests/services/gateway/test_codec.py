"""The request field `codec`, and what replies say of it; scripted workers, real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from criticalkv.shared.eviction.policy import Policy, with_codec
from criticalkv.shared.identity import Identity

DOC = "d" * 150
DEFAULT = Policy.parse("default").canonical()
ASK = [{"role": "user", "content": "why?"}]
MARKED = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": DOC, "prompt_cache_breakpoint": {"mode": "explicit"}},
            {"type": "text", "text": "why?"},
        ],
    }
]


def create(gateway: Any, **fields: Any) -> dict[str, Any]:
    answer = gateway.post("/v1/contexts", {"text": DOC, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def ask(gateway: Any, messages: Any = ASK, **extension: Any) -> dict[str, Any]:
    answer = gateway.chat(messages, criticalkv=extension)
    assert answer.status_code == 200, answer.text
    return answer.json()["criticalkv"]  # type: ignore[no-any-return]


def policies(gateway: Any) -> list[str]:
    return [request.policy for request in gateway.workers.prefills]


def named(policy: str, codec: Any) -> str:
    return with_codec(Policy.parse(policy).canonical(), codec)


def test_a_context_says_its_codec_and_its_untouched_size(gateway: Any) -> None:
    raw, small = create(gateway), create(gateway, codec="int4")
    assert (raw["codec"], small["codec"]) == ("raw", "int4")
    assert small["policy"] == policies(gateway)[1] == named("default", "int4")
    assert raw["node_id"] != small["node_id"]
    assert raw["full_bytes"] == small["full_bytes"] == raw["num_tokens"] * (2 * 4 * 4 + 4)
    assert [t["entries"] for t in raw["tiers"]] == [t["entries"] for t in small["tiers"]]
    manifest = gateway.store.open_get(small["node_id"]).manifest
    assert manifest.identity.codec == "int4"
    assert small["tiers"][-1]["bytes"] == manifest.tier_bytes()[-1]
    assert create(gateway, policy="default:codec=int4")["node_id"] == small["node_id"]
    listed = gateway.get("/v1/contexts").json()["data"]
    assert {c["codec"] for c in listed} == {"raw", "int4"}


def test_a_turn_and_a_child_over_it_go_on_in_its_codec(gateway: Any) -> None:
    context = create(gateway, codec="int8")
    first = ask(gateway, context_id=context["id"])
    assert (first["codec"], first["policy"]) == ("int8", named("default", "int8"))
    assert gateway.workers.decodes[-1].policy == "dense"
    ask(gateway, [{"role": "user", "content": "z" * 300}], context_id=context["id"])
    assert policies(gateway) == 2 * [named("default", "int8")]
    raw = ask(
        gateway, [{"role": "user", "content": "z" * 300}], context_id=context["id"], codec="raw"
    )
    assert raw["codec"] == "raw"  # of the last context in the chain
    assert policies(gateway)[-1] == DEFAULT


def test_resent_history_finds_turns_of_its_own_codec(gateway: Any) -> None:
    gateway.workers.say = lambda _: "so."
    first = ask(gateway, MARKED, codec="int8")
    assert first["codec"] == "int8"
    history = [*MARKED, {"role": "assistant", "content": "so."}, *ASK]
    ask(gateway, history, codec="int8")
    assert gateway.workers.decodes[-1].parent == first["node_id"]
    ask(gateway, history)
    assert gateway.workers.decodes[-1].parent != first["node_id"]
    assert policies(gateway)[:2] == [named("default", "int8"), DEFAULT]


def test_without_a_context_there_is_no_codec_to_tell(gateway: Any) -> None:
    assert ask(gateway, codec="int8")["codec"] is None


def test_responses_take_it_too(gateway: Any) -> None:
    body = {"model": "tiny", "input": MARKED[0]["content"][0]["text"], "criticalkv": {}}
    body["criticalkv"] = {"codec": "int8", "policy": "snapkv"}
    answer = gateway.post("/v1/responses", body).json()
    assert policies(gateway) == [named("snapkv", "int8")]
    assert answer["criticalkv"]["codec"] == "int8"


@pytest.mark.parametrize(
    ("extension", "param"),
    [
        ({"codec": "int2"}, "codec"),
        ({"codec": 8}, "codec"),
        ({"codec": "int8", "policy": "snapkv:codec=int4"}, "policy"),
        ({"codec": "int8", "policy": "snapkv:codec=raw"}, "policy"),
        ({"codec": "raw", "policy": "snapkv:codec=int4"}, "policy"),
        ({"codec": "int8", "first_policy": "snapkv:codec=int4"}, "first_policy"),
        ({"turn_policy": "snapkv:interval=32,keep=0.5,codec=int8"}, "turn_policy"),
    ],
)
def test_contradictions_are_named(shared_gateway: Any, extension: Any, param: str) -> None:
    bodies = [
        ("/v1/chat/completions", {"model": "tiny", "messages": ASK, "criticalkv": extension}),
        ("/v1/responses", {"model": "tiny", "input": "x", "criticalkv": extension}),
    ]
    if param != "turn_policy":
        bodies.append(("/v1/contexts", {"text": DOC, **extension}))
    for path, body in bodies:
        answer = shared_gateway.post(path, body)
        error = answer.json()["error"]
        where = param if path == "/v1/contexts" else f"criticalkv.{param}"
        assert (answer.status_code, error["param"]) == (400, where), path
    assert shared_gateway.workers.prefills == []


@pytest.mark.parametrize(
    "extension",
    [
        {"codec": "int8", "policy": "snapkv:codec=int8"},
        {"codec": "int8", "policy": "snapkv"},
        {"policy": "snapkv:codec=int8"},
        {"codec": None, "policy": "snapkv:codec=int8"},
    ],
)
def test_it_is_the_policys_option(gateway: Any, extension: dict[str, Any]) -> None:
    assert create(gateway, **extension)["policy"] == named("snapkv", "int8")


def test_a_configured_codec_can_be_left(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(eviction={"policy": "snapkv:codec=int8"})
    assert create(gateway)["codec"] == "int8"
    assert create(gateway, codec="raw")["policy"] == named("snapkv", "raw")
    assert create(gateway, policy="snapkv")["codec"] == "raw"


def test_the_first_policy_has_it_too_and_is_refined(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(eviction={"policy": "kvzip", "first_policy": "snapkv"})
    context = create(gateway, codec="int8")
    assert policies(gateway)[0] == named("snapkv", "int8")
    end = 1000
    while gateway.get(f"/v1/contexts/{context['id']}").json()["refinement"] == "pending":
        assert (end := end - 1)
    better = gateway.get(f"/v1/contexts/{context['id']}").json()
    assert (better["refinement"], better["codec"]) == ("done", "int8")
    assert better["policy"] == policies(gateway)[1] == named("kvzip", "int8")


def test_a_record_whose_codec_is_not_its_policys_is_no_record(gateway: Any) -> None:
    context = create(gateway, codec="int8")
    record = gateway.store.token_records([context["node_id"]])[0]
    fields = record.identity.model_dump()
    wrong = Identity(**{**fields, "codec": "int4"})
    restorer = gateway.core.planner._restorer
    assert restorer._is_ours(record, record.identity.node_id)
    changed = record.model_copy(update={"identity": wrong})
    assert not restorer._is_ours(changed, wrong.node_id)
    assert gateway.store.delete_node(context["node_id"])
    assert ask(gateway, context_id=context["id"])["codec"] == "int8"
    assert gateway.node_ids() == 2 * [context["node_id"]]
