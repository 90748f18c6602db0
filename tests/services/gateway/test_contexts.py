"""Contexts over HTTP: create, read, list, pin, delete, continue."""

from __future__ import annotations

from typing import Any

import httpx

from criticalkv.shared.cache.quality import CodecQuality, Quality, TierQuality

DOC = "d" * 150


def create(gateway: Any, **fields: Any) -> dict[str, Any]:
    answer = gateway.post("/v1/contexts", {"text": DOC, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_a_context_shows_its_tiers(gateway: Any) -> None:
    context = create(gateway)
    assert context["object"] == "context"
    assert context["id"].startswith("ctx_")
    assert [t["tier"] for t in context["tiers"]] == ["0.05", "0.1", "0.2", "0.3", "0.4"]
    assert context["num_tokens"] == len(gateway.workers.prefills[0].token_ids)
    top = context["tiers"][-1]
    assert abs(top["retained_fraction"] - 0.4) < 0.01
    assert abs(context["full_bytes"] * top["retained_fraction"] - top["bytes"]) < 1
    assert (context["cached"], context["prefill_ms"], context["scoring_ms"]) == (False, 1.0, 1.0)


def test_the_same_text_again_is_another_handle_on_one_node(gateway: Any) -> None:
    first, second = create(gateway), create(gateway)
    assert first["node_id"] == second["node_id"]
    assert first["id"] != second["id"]
    assert (second["cached"], second["prefill_ms"]) == (True, 0.0)
    assert len(gateway.workers.prefills) == 1


def test_a_chat_that_resends_the_text_with_a_mark_hits_the_context(gateway: Any) -> None:
    context = create(gateway)
    mark = {"type": "text", "text": DOC, "prompt_cache_breakpoint": {"mode": "explicit"}}
    gateway.chat([{"role": "user", "content": [mark, {"type": "text", "text": "why?"}]}])
    assert gateway.workers.decodes[0].parent == context["node_id"]
    assert len(gateway.workers.prefills) == 1


def test_a_user_message_joins_an_open_context(gateway: Any) -> None:
    context = create(gateway)
    answer = gateway.chat(
        [{"role": "user", "content": "why?"}], criticalkv={"context_id": context["id"]}
    ).json()
    decode = gateway.workers.decodes[0]
    text = gateway.core.template._special.decode(list(decode.token_ids), skip_special_tokens=False)
    assert decode.parent == context["node_id"]
    assert text == "\n\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == context["num_tokens"]


def test_messages_and_settings_make_a_context(gateway: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": DOC}]
    body = {"messages": messages, "policy": "snapkv", "store_tier": 0.2, "ttl": "2h",
            "cache_salt": "x", "model": "tiny"}  # fmt: skip
    context = gateway.post("/v1/contexts", body).json()
    request = gateway.workers.prefills[0]
    assert request.policy.startswith("window+uniform+plain:")
    assert (request.store_tier, request.ttl_ms) == ("0.2", 7_200_000)
    assert context["tiers"][-1]["tier"] == "0.2"
    gateway.chat([{"role": "user", "content": "q"}], criticalkv={"context_id": context["id"]})
    assert gateway.workers.decodes[0].salt == request.salt


def test_get_list_pin_delete(gateway: Any) -> None:
    first, second = create(gateway), create(gateway, text="e" * 150)
    assert gateway.get(f"/v1/contexts/{first['id']}").json()["node_id"] == first["node_id"]
    listed = [c["id"] for c in gateway.get("/v1/contexts").json()["data"]]
    assert {first["id"], second["id"]} <= set(listed)
    assert gateway.post(f"/v1/contexts/{first['id']}/pin", None).json()["pinned"] is True
    assert gateway.get(f"/v1/contexts/{first['id']}").json()["pinned"] is True
    assert gateway.post(f"/v1/contexts/{first['id']}/unpin", None).json()["pinned"] is False
    gone = gateway.client().delete(f"/contexts/{first['id']}", cast_to=object)
    assert gone == {"id": first["id"], "object": "context.deleted", "deleted": True}
    assert gateway.get(f"/v1/contexts/{first['id']}").status_code == 404
    assert not gateway.store.stat([first["node_id"]])[0].present


def test_a_context_without_kv_is_shown_and_rebuilt_on_use(gateway: Any) -> None:
    context = create(gateway)
    gateway.store.delete_node(context["node_id"])
    assert gateway.get(f"/v1/contexts/{context['id']}").json()["tiers"] == []
    answer = gateway.chat(
        [{"role": "user", "content": "q"}], criticalkv={"context_id": context["id"]}
    )
    assert answer.status_code == 200
    assert len(gateway.workers.prefills) == 2


def test_deleting_the_last_handle_unpins(gateway: Any) -> None:
    first, second = (gateway.post("/v1/contexts", {"text": DOC}).json() for _ in range(2))
    assert first["node_id"] == second["node_id"]
    gateway.post(f"/v1/contexts/{first['id']}/pin", {})
    delete = httpx.delete(f"{gateway.url}/v1/contexts/{first['id']}")
    assert delete.json()["deleted"] is True
    assert gateway.get(f"/v1/contexts/{second['id']}").json()["pinned"] is True
    httpx.delete(f"{gateway.url}/v1/contexts/{second['id']}")
    assert not gateway.store.stat([first["node_id"]])[0].present


def test_a_handle_of_another_version_is_left_out_of_the_list(gateway: Any) -> None:
    good = gateway.post("/v1/contexts", {"text": DOC}).json()
    tenant = gateway.core.auth.tenant(None).digest
    gateway.store.bind_handle("ctx_other", tenant, good["node_id"], b"\x81\xa1x\x01")
    listed = [c["id"] for c in gateway.get("/v1/contexts").json()["data"]]
    assert good["id"] in listed
    assert "ctx_other" not in listed


def test_too_long_a_text_is_named(gateway: Any) -> None:
    error = gateway.post("/v1/contexts", {"text": "x" * 10_000}).json()["error"]
    assert (error["param"], error["code"]) == ("text", "context_length_exceeded")
    assert error["message"].startswith("text: ")


def test_a_context_shows_what_was_measured_of_it(gateway: Any) -> None:
    figures = [
        {
            "retained_mass": 0.5 + t / 10,
            "lowest_mass": 0.1,
            "low_mass_share": 0.25,
            "theta": 1 - t / 10,
        }
        for t in range(5)
    ]
    gateway.workers.quality = Quality(
        tiers=tuple(TierQuality(**row) for row in figures),
        codec=CodecQuality(key_error=(0.01, 0.03), value_error=(0.02, 0.005), kl=0.125),
    )
    context = create(gateway)
    codec = {"key_error": 0.03, "value_error": 0.02, "kl": 0.125}
    assert context["quality"] == {"tiers": figures, "codec": codec}
    assert gateway.get(f"/v1/contexts/{context['id']}").json()["quality"] == context["quality"]
    metrics = gateway.core.metrics.registry
    sums = {
        name: metrics.get_sample_value(f"criticalkv_gateway_{name}_sum")
        for name in ("retained_mass_ratio", "theta_ratio", "low_mass_ratio", "codec_kl_nats")
    }
    assert sums == {
        "retained_mass_ratio": 0.9,
        "theta_ratio": 0.6,
        "low_mass_ratio": 0.25,
        "codec_kl_nats": 0.125,
    }


def test_a_context_without_figures_shows_none(gateway: Any) -> None:
    context = create(gateway)
    assert context["quality"] is None
    count = "criticalkv_gateway_retained_mass_ratio_count"
    assert gateway.core.metrics.registry.get_sample_value(count) == 0


def test_figures_of_a_codec_without_kl(gateway: Any) -> None:
    gateway.workers.quality = Quality(codec=CodecQuality(key_error=(0.5,), value_error=(0.25,)))
    codec = {"key_error": 0.5, "value_error": 0.25, "kl": None}
    assert create(gateway)["quality"] == {"tiers": [], "codec": codec}
