"""How a conversation continues: breakpoints, aliases, handles, views, lost KV."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import CHATML, byte_tokenizer
from tokenizers import decoders

from criticalkv.services.gateway import prefill_once
from criticalkv.services.gateway.choices import MAX_LOST_WORKERS
from criticalkv.services.gateway.lookup import answers_with
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.errors import (
    LeaseLostError,
    NodeMissingError,
    StoreFullError,
    WorkerLostError,
)
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import POLICY_DENSE
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.requests import PrefillRequest, PrefillResult

DOC = "d" * 150
Message = dict[str, Any]


def user(*parts: str | Message) -> Message:
    texts = [part(p) if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": texts}


def part(text: str) -> Message:
    return {"type": "text", "text": text}


def marked(text: str) -> Message:
    return {**part(text), "prompt_cache_breakpoint": {"mode": "explicit"}}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def extension(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["criticalkv"]  # type: ignore[no-any-return]


def text_of(gateway: Any, ids: tuple[int, ...]) -> str:
    return str(gateway.core.template._special.decode(list(ids), skip_special_tokens=False))


# ------------------------------------------------------------- breakpoints


def test_a_breakpoint_cuts_the_tokens_at_the_parts_end(gateway: Any) -> None:
    gateway.chat([user(marked("doc"), "ument?")])
    assert text_of(gateway, gateway.workers.prefills[0].token_ids) == "<|im_start|>user\ndoc"
    decode = gateway.workers.decodes[0]
    assert text_of(gateway, decode.token_ids) == "ument?<|im_end|>\n<|im_start|>assistant\n"
    assert decode.parent == gateway.workers.prefills[0].node_id


def test_the_same_prefix_is_prefilled_once_whatever_follows(gateway: Any) -> None:
    for tail in ("a?", "b?", "c?"):
        gateway.chat([user(marked("doc"), tail)])
    assert len(gateway.workers.prefills) == 1
    assert len({d.parent for d in gateway.workers.decodes}) == 1


def test_up_to_four_breakpoints_are_a_chain(gateway: Any) -> None:
    gateway.chat([user(*(marked(c) for c in "abcd"), "?")])
    chain = gateway.workers.prefills
    assert [len(p.ancestors) for p in chain] == [0, 1, 2, 3]
    assert [p.view for p in chain] == [(), ("0.4",), ("0.4",) * 2, ("0.4",) * 3]
    assert chain[3].ancestors == tuple(p.node_id for p in chain[:3])
    gateway.chat([user(marked("a"), marked("b"), "other")])
    assert len(gateway.workers.prefills) == 4


def test_anthropics_mark_means_the_same(gateway: Any) -> None:
    gateway.chat([user(marked("doc"), "?")])
    gateway.chat([user({**part("doc"), "cache_control": {"type": "ephemeral"}}, "!")])
    assert len(gateway.workers.prefills) == 1


@pytest.mark.parametrize(("mode", "prefills"), [("implicit", 1), ("explicit", 0)])
def test_a_long_first_message_gets_a_breakpoint_by_itself(
    gateway: Any, mode: str, prefills: int
) -> None:
    gateway.chat([user("d" * 110)], prompt_cache_options={"mode": mode})
    assert len(gateway.workers.prefills) == prefills


def test_an_own_mark_and_short_messages_get_none(gateway: Any) -> None:
    gateway.chat([user("short")])
    gateway.chat([user(marked("m" * 120), "n" * 20)])
    assert [text_of(gateway, p.token_ids)[-3:] for p in gateway.workers.prefills] == ["mmm"]


def test_a_fifth_breakpoint_is_not_added_by_itself(gateway: Any) -> None:
    messages = [user(DOC), user(*(marked(c) for c in "abcd"))]
    gateway.chat(messages)
    assert len(gateway.workers.prefills) == 4


def test_a_mark_with_a_ttl_reaches_prefill(gateway: Any) -> None:
    gateway.chat([user(marked("doc"), "?")], prompt_cache_options={"ttl": "30m"})
    assert gateway.workers.prefills[0].ttl_ms == 30 * 60 * 1000


# ------------------------------------------------------------ long suffixes


def test_an_attachment_becomes_a_ragged_child_and_decode_gets_the_question(gateway: Any) -> None:
    context = gateway.post("/v1/contexts", {"text": DOC}).json()
    gateway.chat([user("a" * 300, "why?")], criticalkv={"context_id": context["id"]})
    document, attachment = gateway.workers.prefills
    assert attachment.ancestors == (document.node_id,)
    assert text_of(gateway, attachment.token_ids) == "\n\n" + "a" * 300
    assert gateway.workers.decodes[0].parent == attachment.node_id
    assert text_of(gateway, gateway.workers.decodes[0].token_ids).startswith("why?")


def test_one_long_part_leaves_decode_the_last_tokens(gateway: Any) -> None:
    gateway.chat([user(marked("doc"), "a" * 300)])
    assert len(gateway.workers.prefills) == 2
    assert len(gateway.workers.decodes[0].token_ids) == 64


def test_without_breakpoints_more_goes_to_decode(gateway: Any) -> None:
    options = {"mode": "explicit"}
    gateway.chat([user("a" * 120)], prompt_cache_options=options)
    assert gateway.workers.prefills == []
    gateway.chat([user("a" * 200)], prompt_cache_options=options)
    assert len(gateway.workers.prefills) == 1


# ------------------------------------------------------------------ aliases


def history(gateway: Any, turns: int, **fields: Any) -> list[Message]:
    """Hold a conversation by resending it; return its messages."""
    messages: list[Message] = []
    for i in range(turns):
        messages.append(user(marked(DOC), f"q{i}") if i == 0 else user(f"q{i}"))
        answer = gateway.chat(messages, **fields).json()
        messages.append(assistant(answer["choices"][0]["message"]["content"]))
    return messages


def test_resent_history_continues_its_turns(gateway: Any) -> None:
    history(gateway, 3)
    decodes = gateway.workers.decodes
    assert len(gateway.workers.prefills) == 1
    nodes = [gateway.store.stat([d.parent])[0] for d in decodes]
    assert [len(n.ancestors) for n in nodes] == [0, 1, 2]
    expected = "<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(gateway, decodes[1].token_ids) == expected


def test_a_mark_that_moves_on_still_finds_the_turn(gateway: Any) -> None:
    messages = history(gateway, 1)
    messages[0] = user(DOC, "q0")
    gateway.chat([*messages, user(marked("next"), "?")])
    child = gateway.workers.prefills[1]
    assert len(child.ancestors) == 2
    assert text_of(gateway, child.token_ids) == "<|im_end|>\n<|im_start|>user\nnext"


@pytest.mark.parametrize("change", ["answer", "question", "role", "policy", "salt"])
def test_any_difference_is_no_alias(gateway: Any, change: str) -> None:
    messages, fields = history(gateway, 1, criticalkv={"cache_salt": "s"}), {"cache_salt": "s"}
    if change == "answer":
        messages[1] = assistant(messages[1]["content"] + ".")
    elif change == "question":
        messages[0] = user(marked(DOC), "q0 ")
    elif change == "role":
        messages[0]["role"] = "system"
    elif change == "policy":
        fields["policy"] = "snapkv"
    else:
        fields["cache_salt"] = "t"
    extension(gateway.chat([*messages, user("next")], criticalkv=fields))
    turn = gateway.workers.decodes[-1]
    assert POLICY_DENSE not in {s.policy for s in gateway.store.stat([turn.parent])}


def test_an_alias_whose_tokens_say_something_else_is_not_believed(gateway: Any) -> None:
    messages = history(gateway, 1)
    lie = [messages[0], assistant("something else"), user("next")]
    core = gateway.core
    from criticalkv.services.gateway.schemas import ChatMessage
    from criticalkv.shared.identity import tenant_salt

    plain = [ChatMessage.model_validate(m).plain() for m in lie[:2]]
    start = core.transcript(core.config.eviction.policy, tenant_salt("local"))
    good = core.transcript(core.config.eviction.policy, tenant_salt("local")).say_all(
        [ChatMessage.model_validate(m).plain() for m in messages]
    )[-1]
    target = gateway.store.resolve_aliases([good.digest])[0][0]
    gateway.store.put_alias(start.say_all(plain)[-1].digest, target.node_id, target.view)
    extension(gateway.chat(lie))
    assert gateway.workers.decodes[-1].parent != target.node_id


def test_a_lost_turn_falls_back_to_the_document(gateway: Any) -> None:
    messages = history(gateway, 2)
    document, turn = (decode.parent for decode in gateway.workers.decodes)
    gateway.store.delete_node(turn)
    extension(gateway.chat([*messages[:2], user("again")]))
    parent = gateway.store.stat([gateway.workers.decodes[-1].parent])[0]
    assert [*parent.ancestors, parent.node_id][0] == document
    assert turn not in parent.ancestors


def test_a_template_that_rewrites_history_reuses_documents_only(
    make_gateway: Callable[..., Any],
) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}{% if loop.last %} last{% endif %}]{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    gateway = make_gateway(template)
    assert not gateway.core.template.incremental
    messages = [user(marked(DOC), "q"), assistant("seed 1"), user("next")]
    gateway.chat(messages[:1], seed=1)
    gateway.chat(messages)
    documents = {d.parent for d in gateway.workers.decodes}
    assert documents <= set(gateway.node_ids())


# -------------------------------------------------------------------- views


def test_turns_read_at_different_tiers_are_different_nodes(gateway: Any) -> None:
    low = extension(gateway.chat([user(marked(DOC), "q")], seed=1, criticalkv={"read_tier": 0.1}))
    high = extension(gateway.chat([user(marked(DOC), "q")], seed=1))
    assert (low["tier"], high["tier"]) == ("0.1", "0.4")
    assert low["node_id"] != high["node_id"]


@pytest.mark.parametrize(
    ("stored", "wanted", "found"),
    [(["0.1"], "0.1", "0.1"), (["0.2", "0.1"], "0.1", "0.1"), (["0.3", "0.2"], "0.1", "0.2"),
     (["0.1"], "0.2", None), ([None], "0.1", "0.4"), (["0.2"], None, None)],
)  # fmt: skip
def test_an_alias_is_taken_at_an_equal_view_then_the_next_higher(
    gateway: Any, stored: list[str | None], wanted: str | None, found: str | None
) -> None:
    gateway.workers.say = lambda _: "same"
    first = [user(marked(DOC), "q")]
    for tier in stored:
        gateway.chat(first, criticalkv={"read_tier": tier})
    gateway.chat([*first, assistant("same"), user("next")], criticalkv={"read_tier": wanted})
    parent = gateway.store.stat([gateway.workers.decodes[-1].parent])[0]
    assert list(parent.view) == ([found] if found else [])


def test_a_child_at_a_higher_view_serves_a_lower_wish(gateway: Any) -> None:
    chain = [user(marked(DOC), marked("more"), "q")]
    gateway.chat(chain)
    gateway.chat(chain, criticalkv={"read_tier": "0.1"})
    assert len(gateway.workers.prefills) == 2
    gateway.chat([user(marked(DOC), marked("else"), "q")], criticalkv={"read_tier": "0.1"})
    assert gateway.workers.prefills[-1].view == ("0.1",)
    gateway.chat([user(marked(DOC), marked("else"), "q")])
    assert gateway.workers.prefills[-1].view == ("0.4",)


def test_wanting_more_than_is_stored_is_a_new_prefill(gateway: Any) -> None:
    gateway.chat([user(marked(DOC), "q")])
    answer = extension(gateway.chat([user(marked(DOC), "q")], criticalkv={"read_tier": "0.7"}))
    first, second = gateway.workers.prefills
    assert first.node_id == second.node_id
    assert (first.store_tier, second.store_tier) == ("0.4", "0.6")
    assert answer["tier"] == "0.6"
    gateway.chat([user(marked(DOC), "q")], criticalkv={"store_tier": "0.6"})
    assert len(gateway.workers.prefills) == 2


@pytest.mark.parametrize("field", ["read_tier", "store_tier"])
def test_resent_history_with_a_higher_explicit_tier_is_a_new_prefill(
    gateway: Any, field: str
) -> None:
    messages = history(gateway, 1)
    answer = extension(gateway.chat([*messages, user("next")], criticalkv={field: "0.6"}))
    assert [p.store_tier for p in gateway.workers.prefills[:2]] == ["0.4", "0.6"]
    assert answer["tier"] == "0.6"


# ------------------------------------------------------------------ handles


def test_a_handle_continues_without_resending(gateway: Any) -> None:
    first = extension(gateway.chat([user(marked(DOC), "q0")]))
    gateway.chat([user("q1")], criticalkv={"context_id": first["handle"]})
    decode = gateway.workers.decodes[1]
    assert decode.parent == first["node_id"]
    expected = "<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(gateway, decode.token_ids) == expected


def test_a_handle_and_resent_history_meet_in_one_alias(gateway: Any) -> None:
    gateway.workers.say = lambda _: "ok"
    first = extension(gateway.chat([user(marked(DOC), "q0")]))
    second = extension(gateway.chat([user("q1")], criticalkv={"context_id": first["handle"]}))
    resent = [user(marked(DOC), "q0"), assistant("ok"), user("q1"), assistant("ok"), user("q2")]
    gateway.chat(resent)
    assert gateway.workers.decodes[-1].parent == second["node_id"]


def test_text_joined_to_a_context_has_the_alias_of_its_parts(gateway: Any) -> None:
    gateway.workers.say = lambda _: "ok"
    context = gateway.post("/v1/contexts", {"text": DOC}).json()
    turn = extension(gateway.chat([user("q")], criticalkv={"context_id": context["id"]}))
    gateway.chat([user(DOC, "\n\n", "q"), assistant("ok"), user("next")])
    assert gateway.workers.decodes[-1].parent == turn["node_id"]


def test_two_turns_on_one_parent_are_two_branches(gateway: Any) -> None:
    root = extension(gateway.chat([user(marked(DOC), "q0")]))
    left = extension(gateway.chat([user("l")], criticalkv={"context_id": root["handle"]}))
    right = extension(gateway.chat([user("r")], criticalkv={"context_id": root["handle"]}))
    assert left["node_id"] != right["node_id"]
    for branch in (left, right):
        gateway.chat([user("go on")], criticalkv={"context_id": branch["handle"]})
    parents = [d.parent for d in gateway.workers.decodes[-2:]]
    assert parents == [left["node_id"], right["node_id"]]


def test_another_salt_than_the_contexts_is_refused(gateway: Any) -> None:
    first = extension(gateway.chat([user(marked(DOC), "q")], criticalkv={"cache_salt": "a"}))
    for salt, status in (("a", 200), ("b", 400)):
        fields = {"context_id": first["handle"], "cache_salt": salt}
        answer = gateway.chat([user("next")], criticalkv=fields)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "criticalkv.cache_salt"
    gateway.chat([user("next")], criticalkv={"context_id": first["handle"]})
    assert len({d.salt for d in gateway.workers.decodes}) == 1


def test_a_context_over_the_limit_is_refused_before_prefill(gateway: Any) -> None:
    context = gateway.post("/v1/contexts", {"text": "d" * 3900}).json()
    lose(gateway, context["node_id"])
    answer = gateway.chat([user("q" * 300)], criticalkv={"context_id": context["id"]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(gateway.workers.prefills) == 1


# ------------------------------------------------------------------ lost KV


def lose(gateway: Any, *node_ids: str) -> None:
    for node_id in node_ids:
        gateway.store.delete_node(node_id)


def test_lost_kv_is_rebuilt_down_the_chain_at_the_recorded_view(gateway: Any) -> None:
    gateway.workers.say = lambda _: "ok"
    fields = {"read_tier": "0.2"}
    first = extension(gateway.chat([user(marked(DOC), "q0")], criticalkv=fields))
    second = extension(
        gateway.chat([user("q1")], criticalkv={**fields, "context_id": first["handle"]})
    )
    chain = [gateway.workers.prefills[0].node_id, first["node_id"], second["node_id"]]
    before = gateway.store.stat(chain)
    lose(gateway, *reversed(chain))
    answer = extension(gateway.chat([user("q2")], criticalkv={"context_id": second["handle"]}))
    assert gateway.node_ids()[1:] == chain
    assert [p.view for p in gateway.workers.prefills[1:]] == [(), ("0.2",), ("0.2", "1")]
    assert [p.policy for p in gateway.workers.prefills[2:]] == [POLICY_DENSE] * 2
    after = gateway.store.stat(chain)
    assert [list(s.pending_ids) for s in after] == [list(s.pending_ids) for s in before]
    assert [s.next_position for s in after] == [s.next_position for s in before]
    assert answer["published"] is True


def test_kv_lost_between_look_up_and_decode_is_rebuilt_once(gateway: Any) -> None:
    gateway.chat([user(marked(DOC), "q")])
    node_id = gateway.node_ids()[0]
    gateway.workers.before_decode = [lambda: lose(gateway, node_id)]
    assert extension(gateway.chat([user(marked(DOC), "q")], n=3))["published"] is True
    assert gateway.node_ids() == [node_id] * 2
    gateway.workers.fail_decode = [NodeMissingError.of(node_id, "gone")] * 2
    again = gateway.chat([user(marked(DOC), "q")])
    assert (again.status_code, again.json()["error"]["code"]) == (503, "store_unavailable")
    assert "retry-after" in again.headers


def test_a_second_attempt_reads_the_tiers_that_are_stored_by_then(gateway: Any) -> None:
    gateway.chat([user(marked(DOC), "q")])
    document = gateway.workers.prefills[0]

    def shrink() -> None:
        lose(gateway, document.node_id)
        lower = {"store_tier": "0.2", "lease_token": ""}
        gateway.workers._prefill(document.model_copy(update=lower))

    gateway.workers.before_decode = [shrink]
    assert extension(gateway.chat([user(marked(DOC), "q")]))["tier"] == "0.2"
    assert [d.view for d in gateway.workers.decodes[1:]] == [("0.4",), ("0.2",)]


def off_grid(gateway: Any) -> tuple[str, dict[str, Any]]:
    """Store a turn read at a tier of its own, then its document without that tier."""
    turn = extension(gateway.chat([user(marked(DOC), "q")], criticalkv={"store_tier": "0.15"}))
    document = gateway.workers.prefills[0]
    assert gateway.workers.decodes[0].view == ("0.15",)
    lose(gateway, turn["node_id"], document.node_id)
    gateway.chat([user(marked(DOC), "q")])
    assert "0.15" not in gateway.store.stat([document.node_id])[0].tiers
    return document.node_id, turn


def test_a_present_node_without_the_tier_that_a_lost_turn_read_is_expired(gateway: Any) -> None:
    _, turn = off_grid(gateway)
    answer = gateway.chat([user("next")], criticalkv={"context_id": turn["handle"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "context_expired")


def test_a_lost_node_is_rebuilt_with_the_tier_that_a_lost_turn_read(gateway: Any) -> None:
    document, turn = off_grid(gateway)
    lose(gateway, document)
    extension(gateway.chat([user("next")], criticalkv={"context_id": turn["handle"]}))
    assert "0.15" in gateway.store.stat([document])[0].tiers
    assert gateway.workers.decodes[-1].parent == turn["node_id"]


def test_a_shrunk_node_is_replaced_by_one_with_the_tier_that_a_lost_turn_read(
    gateway: Any,
) -> None:
    turn = extension(gateway.chat([user(marked(DOC), "q")]))
    document = gateway.workers.prefills[0]
    lose(gateway, turn["node_id"], document.node_id)
    lower = {"store_tier": "0.15", "lease_token": ""}
    gateway.workers._prefill(document.model_copy(update=lower))
    extension(gateway.chat([user("next")], criticalkv={"context_id": turn["handle"]}))
    assert gateway.store.stat([document.node_id])[0].tiers[-1] == "0.4"


def test_without_kv_and_record_a_context_is_expired(gateway: Any, monkeypatch: Any) -> None:
    context = gateway.post("/v1/contexts", {"text": DOC}).json()
    lose(gateway, context["node_id"])
    client = gateway.core.store._client
    monkeypatch.setattr(client, "token_records", lambda ids: [None] * len(ids))
    answer = gateway.chat([user("q")], criticalkv={"context_id": context["id"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "context_expired")


def test_a_dead_decode_worker_is_replaced_a_few_times(gateway: Any) -> None:
    gateway.workers.fail_decode = [WorkerLostError("died")] * MAX_LOST_WORKERS
    assert gateway.chat([user("q")]).status_code == 200
    gateway.workers.fail_decode = [WorkerLostError("died")] * (MAX_LOST_WORKERS + 1)
    answer = gateway.chat([user("q")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")


# ------------------------------------------------------------- prefill once


def test_identical_misses_at_once_prefill_once(gateway: Any) -> None:
    gateway.workers.prefill_delay = 0.5
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: gateway.chat([user(marked(DOC), f"q{i}")]), range(6)))
    assert [a.status_code for a in answers] == [200] * 6
    assert len(gateway.workers.prefills) == 1
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert sorted(c > 0 for c in cached) == [False] + [True] * 5


def test_a_lease_is_kept_while_its_prefill_runs(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it is renewed, it is there, for as long as the prefill runs."""
    monkeypatch.setattr(prefill_once, "RENEW_S", 0.05)
    renewed: list[bool] = []
    renew, run = gateway.core.store.renew_lease, gateway.workers.prefill

    async def noting(node_id: str, ttl_ms: int, token: str) -> bool:
        renewed.append(await renew(node_id, ttl_ms, token))
        return renewed[-1]

    async def until_renewed(request: PrefillRequest) -> PrefillResult:
        async with asyncio.timeout(60):
            while len(renewed) < 5:
                await asyncio.sleep(0.01)
        result: PrefillResult = await run(request)
        return result

    monkeypatch.setattr(gateway.core.store, "renew_lease", noting)
    monkeypatch.setattr(gateway.workers, "prefill", until_renewed)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: gateway.chat([user(marked(DOC), f"q{i}")]), range(2)))
    assert [a.status_code for a in answers] == [200] * 2
    assert len(gateway.workers.prefills) == 1
    assert all(renewed)


def test_a_long_context_gets_its_lease(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(max_positions=100_000)
    answer = gateway.post("/v1/contexts", {"text": "d" * 71_000})
    assert answer.status_code == 200, answer.text


def test_a_failed_prefill_frees_the_lease_at_once(gateway: Any) -> None:
    gateway.workers.fail_prefill = [StoreFullError("full")]
    first = gateway.chat([user(marked(DOC), "q")])
    assert (first.status_code, first.json()["error"]["code"]) == (503, "store_full")
    assert first.headers["retry-after"]
    assert gateway.chat([user(marked(DOC), "q")]).status_code == 200


@pytest.mark.parametrize("error", [WorkerLostError("died"), LeaseLostError("slept")])
def test_a_prefill_that_was_lost_is_tried_again(gateway: Any, error: Exception) -> None:
    gateway.workers.fail_prefill = [error]
    assert gateway.chat([user(marked(DOC), "q")]).status_code == 200
    assert len(gateway.workers.prefills) == 2


def test_a_waiter_gives_up_at_its_deadline(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(request_timeout_s=1.0)
    gateway.workers.prefill_delay = 30
    answer = gateway.chat([user(marked(DOC), "q")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.workers.cancelled_prefills == 1
    gateway.workers.prefill_delay = 0
    assert gateway.chat([user(marked(DOC), "q")]).status_code == 200


# ---------------------------------------------------------- alias on read


def test_a_turns_record_is_compared_after_its_generation_prompt(gateway: Any) -> None:
    template = gateway.core.template
    said = itertools.chain(
        template.encode_content("yes"), template.generation_ids, template.encode_content("no")
    )
    identity = gateway.core.transcript  # only the tokens matter below
    record = TokenRecord.model_construct(identity=identity, token_ids=tuple(said), pending_ids=())
    assert answers_with(record, "no", template)
    assert answers_with(record, "n", template)  # a stop string may have cut the rest
    assert not answers_with(record, "yes", template)


@pytest.mark.parametrize("strips", [True, False])
def test_the_space_that_a_decoder_takes_away_is_compared(gateway: Any, strips: bool) -> None:
    """SentencePiece's decoders say a text without its first space: an answer's first words had it.

    Others say it, and what is stored without one is another answer.
    """
    tokenizer = byte_tokenizer(CHATML)
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *strip])
    template = ChatTemplate(tokenizer)
    said = (*template.generation_ids, *template.encode_content(" It is 5"))
    identity = gateway.core.transcript  # only the tokens matter below
    record = TokenRecord.model_construct(identity=identity, token_ids=said, pending_ids=())
    assert answers_with(record, " It is 5", template)
    assert answers_with(record, "It is 5", template) == strips
    assert not answers_with(record, "  It is 5", template)


# ------------------------------------------------- turns that shrink while they run

STEPWISE = "window+adakv+plain:interval=64,target=48"


def test_a_turn_policy_reaches_decode_and_its_handle_is_rebuilt_under_it(gateway: Any) -> None:
    canonical = Policy.parse(STEPWISE).canonical()
    answer = gateway.chat([user(marked(DOC), "one?")], criticalkv={"turn_policy": STEPWISE})
    ours = extension(answer)
    assert [d.policy for d in gateway.workers.decodes] == [canonical]
    gateway.chat([user("two?")], criticalkv={"context_id": ours["handle"]})
    assert gateway.workers.decodes[-1].policy == POLICY_DENSE
    assert gateway.workers.decodes[-1].view == ("0.4", "1")
    # A tier is none of its budgets: it has one, whatever is asked for.
    low = {"context_id": ours["handle"], "read_tier": 0.1}
    gateway.chat([user("two?")], criticalkv=low)
    assert gateway.workers.decodes[-1].view == ("0.1", "1")
    lose(gateway, ours["node_id"])
    before = len(gateway.workers.prefills)
    extension(gateway.chat([user("three?")], criticalkv={"context_id": ours["handle"]}))
    rebuilt = gateway.workers.prefills[before:]
    assert [(p.node_id, p.policy) for p in rebuilt] == [(ours["node_id"], canonical)]


def test_the_servers_turn_policy_is_the_default(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(eviction={"turn_policy": STEPWISE})
    canonical = Policy.parse(STEPWISE).canonical()
    gateway.chat([user("one?")])
    gateway.chat([user("one?")], criticalkv={"turn_policy": None})
    gateway.chat([user("one?")], criticalkv={"turn_policy": "dense"})
    assert [d.policy for d in gateway.workers.decodes] == [canonical, canonical, POLICY_DENSE]


def test_resent_history_never_finds_a_turn_that_evicted_unasked(gateway: Any) -> None:
    stepwise = {"criticalkv": {"turn_policy": STEPWISE}}
    messages = [user(marked(DOC), "one?")]
    answer = gateway.chat(messages, **stepwise)
    node_id = extension(answer)["node_id"]
    said = answer.json()["choices"][0]["message"]["content"]
    resent = [*messages, assistant(said), user("two?")]
    gateway.chat(resent)
    assert node_id not in (gateway.workers.decodes[-1].parent, gateway.workers.prefills[-1].node_id)
    gateway.chat(resent, **stepwise)
    assert gateway.workers.decodes[-1].parent == node_id
