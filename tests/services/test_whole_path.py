"""The whole path without Ray: real HTTP, real store, real Valkey, real engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import torch
from valkey_servers import admin_of
from whole_service import DOCUMENT, Service, of_its_own, text_of, user

from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.cache.ragged import RaggedCache
from criticalkv.shared.cache.wire import assemble
from criticalkv.shared.config import EvictionConfig
from criticalkv.shared.eviction.parameters import ALIASES
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.store_client import StoreClient

Factory = Callable[..., LoadedModel]


@pytest.fixture
def service(tiny_model: Factory, store_process: StoreProcess) -> Iterator[Service]:
    running = Service(of_its_own(tiny_model()), store_process)
    yield running
    running.close()


@pytest.fixture(scope="session")
def raw_valkey(store_process: StoreProcess) -> Iterator[redis.Redis]:
    with admin_of(store_process.config.data_dir) as client:
        yield client


def segment_keys(valkey: redis.Redis, node_id: str) -> list[bytes]:
    return sorted(valkey.scan_iter(match=f"ckv:{{{node_id}}}:s:*", count=1000))


def test_three_turns_on_three_workers_are_as_on_one(service: Service) -> None:
    context = service.register()
    questions = ("one?", "two?", "three?")

    def talk(*, fresh: bool) -> list[tuple[str, int]]:
        handle, out = context["id"], []
        for question in questions:
            if fresh:
                service.workers.fresh_decoder()
            answer = service.ask(question, handle, read_tier=0.2)
            handle = answer.criticalkv["handle"]
            out.append((text_of(answer), answer.usage.prompt_tokens_details.cached_tokens))
            assert (answer.criticalkv["bytes_pulled"] > 0) == fresh
        return out

    service.workers.fresh_decoder()
    service.ask("warm the cache", context["id"], read_tier=0.2)
    assert talk(fresh=False) == talk(fresh=True)
    assert len(service.workers.prefills) == 1


def damage_flip(valkey: redis.Redis, key: bytes) -> None:
    data = bytearray(valkey.get(key))
    data[len(data) // 2] ^= 1
    valkey.set(key, bytes(data), keepttl=True)


def damage_truncate(valkey: redis.Redis, key: bytes) -> None:
    valkey.set(key, valkey.get(key)[:-4], keepttl=True)


def damage_lose(valkey: redis.Redis, key: bytes) -> None:
    valkey.delete(key)


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_lose])
@pytest.mark.parametrize("where", ["context", "turn"])
def test_damage_is_a_miss_then_recomputed(
    damage: Callable[..., None], where: str, service: Service, raw_valkey: redis.Redis
) -> None:
    context = service.register()
    first = service.ask("one?", context["id"], read_tier=0.4)
    handle = first.criticalkv["handle"]
    expected = service.ask("two?", handle, read_tier=0.4)
    node = context["node_id"] if where == "context" else first.criticalkv["node_id"]
    keys = segment_keys(raw_valkey, node)
    damage(raw_valkey, keys[0])
    service.workers.fresh_decoder()
    before = len(service.workers.prefills)
    again = service.ask("two?", handle, read_tier=0.4)
    assert text_of(again) == text_of(expected)
    assert len(service.workers.prefills) > before
    assert service.workers.prefills[-1].node_id == node
    service.workers.fresh_decoder()
    before = len(service.workers.prefills)
    assert text_of(service.ask("two?", handle, read_tier=0.4)) == text_of(expected)
    assert len(service.workers.prefills) == before, "the repaired node was not found"


STEPWISE = "window+adakv+twostage:window=4,interval=16,target=10"


def test_a_lost_turn_that_shrank_while_it_was_generated_is_prefilled_the_same(
    service: Service, raw_valkey: redis.Redis
) -> None:
    context = service.register()
    first = service.ask("one?", context["id"], read_tier=0.2, turn_policy=STEPWISE, max_tokens=30)
    handle, node_id = first.criticalkv["handle"], first.criticalkv["node_id"]
    store = service.workers._store
    expected = service.ask("two?", handle, read_tier=0.2)
    stored = read_node(store, node_id)
    assert stored.tiers == ("1",)
    assert stored.retained_fraction < 0.5
    for key in segment_keys(raw_valkey, node_id):
        raw_valkey.delete(key)
    service.workers.fresh_decoder()
    again = service.ask("two?", handle, read_tier=0.2)
    lost = service.workers.prefills[-1]
    assert (lost.node_id, lost.view) == (node_id, ("0.2",))
    assert lost.policy == Policy.parse(STEPWISE).canonical()
    assert text_of(again) == text_of(expected)
    for one, two in zip(stored.layers, read_node(store, node_id).layers, strict=True):
        assert torch.equal(one.positions, two.positions)
        assert torch.equal(one.cu_seqlens, two.cu_seqlens)
        torch.testing.assert_close(one.keys, two.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.values, two.values, atol=1e-4, rtol=0)


def read_node(store: StoreClient, node_id: str) -> RaggedCache:
    with store.open_get(node_id) as reader:
        return assemble(reader.manifest, reader.tier, reader)


def test_without_a_record_lost_kv_is_a_404(service: Service, raw_valkey: redis.Redis) -> None:
    from openai import NotFoundError

    context = service.register()
    for key in raw_valkey.scan_iter(match=f"ckv:{{{context['node_id']}}}:*", count=1000):
        raw_valkey.delete(key)
    service.workers.fresh_decoder()
    with pytest.raises(NotFoundError) as error:
        service.ask("one?", context["id"])
    assert error.value.code in ("context_expired", "context_not_found")


def test_two_turns_on_one_parent_are_two_branches(service: Service) -> None:
    context, questions = service.register(), ("left?", "and right?")
    root = service.ask("one?", context["id"], read_tier=0.2).criticalkv["handle"]
    with ThreadPoolExecutor(2) as pool:
        turns = list(pool.map(lambda question: service.ask(question, root), questions))
    service.workers.fresh_decoder()
    cached = []
    for question, turn in zip(questions, turns, strict=True):
        alone = service.ask(question, root)
        assert text_of(alone) == text_of(turn)
        assert alone.criticalkv["node_id"] == turn.criticalkv["node_id"]
        more = [service.ask("and?", t.criticalkv["handle"]) for t in (turn, alone)]
        assert text_of(more[0]) == text_of(more[1])
        cached.append(more[0].usage.prompt_tokens_details.cached_tokens)
    assert cached[1] - cached[0] == len(questions[1]) - len(questions[0])  # a byte is a token


def test_a_retried_sampled_turn_is_the_same_answer_and_handle(service: Service) -> None:
    context = service.register()
    key = {"Idempotency-Key": f"k-{time.time_ns()}"}
    first = service.ask("one?", context["id"], temperature=1.5, max_tokens=30, headers=key)
    again = service.ask("one?", context["id"], temperature=1.5, max_tokens=30, headers=key)
    other = service.ask("one?", context["id"], temperature=1.5, max_tokens=30)
    assert (again.id, text_of(again)) == (first.id, text_of(first))
    assert (other.id, text_of(other)) != (first.id, text_of(first))
    assert len(service.workers.decodes) == 2


def test_an_attachment_goes_through_prefill_as_a_ragged_child(service: Service) -> None:
    context = service.register()
    attachment = "".join(f"Item {i}: {i * 31 % 97}. " for i in range(20))
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    content = [{"type": "text", "text": attachment, **mark}, {"type": "text", "text": "sum?"}]
    answer = service.ask(content, context["id"], read_tier=0.2, store_tier=0.4)  # type: ignore[arg-type]
    child = service.workers.prefills[-1]
    assert child.ancestors == (context["node_id"],)
    assert child.view == ("0.2",)
    assert child.store_tier == "0.4"
    decode = service.workers.decodes[-1]
    assert decode.parent == child.node_id
    assert len(decode.token_ids) < 100
    service.workers.fresh_decoder()
    more = service.ask("more?", answer.criticalkv["handle"], read_tier=0.2)
    assert more.criticalkv["tier"] == "0.2"
    assert len(service.workers.prefills) == 2


def test_a_long_suffix_without_a_mark_goes_through_prefill_too(service: Service) -> None:
    context = service.register()
    service.ask("z" * 300, context["id"], read_tier=0.2)
    assert service.workers.prefills[-1].ancestors == (context["node_id"],)
    assert len(service.workers.decodes[-1].token_ids) <= 100


def test_turns_read_at_different_tiers_are_different_nodes(service: Service) -> None:
    context = service.register()
    low = service.ask("one?", context["id"], read_tier=0.1)
    high = service.ask("one?", context["id"], read_tier=0.6)
    assert low.criticalkv["node_id"] != high.criticalkv["node_id"]
    assert (low.criticalkv["tier"], high.criticalkv["tier"]) == ("0.1", "0.6")
    assert low.criticalkv["retained_fraction"] < high.criticalkv["retained_fraction"]
    # Between stored tiers the next lower one is read.
    assert service.ask("one?", context["id"], read_tier=0.25).criticalkv["tier"] == "0.2"


def test_resent_history_finds_the_turns_own_tokens(service: Service) -> None:
    """Random bytes do not re-tokenize to themselves; the alias finds the node anyway."""
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    first = [user([{"type": "text", "text": DOCUMENT, **mark}, {"type": "text", "text": "one?"}])]
    answer = service.chat(first, read_tier=0.2)
    history = [*first, {"role": "assistant", "content": text_of(answer)}, user("two?")]
    service.workers.fresh_decoder()
    resent = service.chat(history, read_tier=0.2)
    assert service.workers.decodes[-1].parent == answer.criticalkv["node_id"]
    by_handle = service.ask("two?", answer.criticalkv["handle"], read_tier=0.2)
    assert text_of(resent) == text_of(by_handle)
    assert len(service.workers.prefills) == 1
    cold, warm = (a.usage.prompt_tokens_details for a in (answer, resent))
    assert (cold.cached_tokens, warm.cache_write_tokens) == (0, 0)
    assert warm.cached_tokens > cold.cache_write_tokens > 0


def test_a_registered_context_serves_a_plain_chat_with_the_same_text(service: Service) -> None:
    service.register()
    mark = {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": DOCUMENT, **mark}, {"type": "text", "text": "one?"}]
    answer = service.chat([user(content)], read_tier=0.2)
    assert answer.criticalkv["bytes_pulled"] > 0
    assert len(service.workers.prefills) == 1


def test_tier_1_is_the_untouched_model(service: Service) -> None:
    """Through HTTP, gRPC and Valkey: same tokens as one plain forward over everything."""
    context = service.register(store_tier=1.0)
    answer = service.ask("one?", context["id"], read_tier=1.0, max_tokens=12)
    request = service.workers.decodes[-1]
    ids = [*service.workers.prefills[0].token_ids, *request.token_ids]
    model = service.workers._model.model
    model.set_attn_implementation("sdpa")
    try:
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    finally:
        model.set_attn_implementation("criticalkv")
    theirs = service.workers._model.chat.decode(out[0, len(ids) :].tolist())
    # A character that the last tokens leave unfinished is not shown.
    shown = text_of(answer)
    assert shown
    assert theirs.startswith(shown)
    assert set(theirs[len(shown) :]) <= {"\ufffd"}


def test_every_policy_runs_and_weighs_what_its_tiers_say(service: Service) -> None:
    for policy in sorted(set(ALIASES) - {"duo-kvpress"}):  # that one needs a profile
        context = service.register(policy=policy, cache_salt=policy)
        assert context["policy"] == Policy.parse(policy).canonical()
        for tier in context["tiers"]:
            service.workers.fresh_decoder()
            answer = service.ask(
                "why?", context["id"], read_tier=tier["tier"], cache_salt=policy, max_tokens=1
            )
            assert answer.criticalkv["bytes_pulled"] == tier["bytes"], (policy, tier)
            assert answer.criticalkv["tier"] == tier["tier"]


def test_n_choices_have_a_handle_each(service: Service) -> None:
    context = service.register()
    answer = service.ask("one?", context["id"], n=3, temperature=1.2, seed=5)
    handles = [choice.criticalkv["handle"] for choice in answer.choices]
    assert len(set(handles)) == 3
    assert handles[0] == answer.id
    assert len({choice.message.content for choice in answer.choices}) > 1
    for handle in handles:
        assert text_of(service.ask("and?", handle)) is not None


def test_streamed_text_is_the_whole_text(service: Service) -> None:
    context = service.register()
    whole = service.ask("one?", context["id"], temperature=1.0, seed=3, max_tokens=60)
    chunks = list(
        service.ask("one?", context["id"], temperature=1.0, seed=3, max_tokens=60, stream=True)
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == text_of(whole)
    assert chunks[0].id == chunks[-1].id


def test_a_disconnect_frees_the_request(service: Service) -> None:
    context = service.register()
    stream = service.ask("one?", context["id"], max_tokens=900, stream=True)
    next(iter(stream))
    assert service.workers.decoder.in_flight == 1
    stream.close()
    deadline = time.monotonic() + 2
    while service.workers.decoder.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.workers.decoder.in_flight == 0
    assert text_of(service.ask("one?", context["id"])) is not None


# ------------------------------------------------- better nodes in an old one's place


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def swapping(tiny_model: Factory, store_process: StoreProcess) -> Iterator[Service]:
    eviction = EvictionConfig(policy="default", first_policy="snapkv", fold_after=3)
    running = Service(of_its_own(tiny_model()), store_process, eviction)
    yield running
    running.close()


def test_no_answer_fails_or_is_wrong_while_a_context_is_refined(swapping: Service) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    ask = [user([{"type": "text", "text": DOCUMENT, **mark}, {"type": "text", "text": "one?"}])]
    # What each policy says, from nodes that nobody else sees.
    said = {
        Policy.parse(name).canonical(): text_of(
            swapping.chat(ask, policy=name, read_tier=0.05, cache_salt=name)
        )
        for name in ("snapkv", "default")
    }
    seen = []
    while seen[-5:] != [Policy.parse("default").canonical()] * 5:
        assert len(seen) < 500
        answer = swapping.chat(ask, read_tier=0.05)
        policy = answer.criticalkv["policy"]
        assert text_of(answer) == said[policy]
        seen.append(policy)
    assert seen[0] == Policy.parse("snapkv").canonical()
    assert seen == sorted(seen, key=list(said).index)
    cheap, better = swapping.workers.prefills[-2:]
    assert (cheap.background, better.background) == (False, True)


def test_a_refined_context_says_what_its_policy_says(swapping: Service) -> None:
    handle = swapping.register()["id"]
    path = f"/contexts/{handle}"
    wait_for(lambda: swapping.client.get(path, cast_to=dict[str, Any])["refinement"] == "done")
    refined = swapping.ask("one?", handle, read_tier=0.1)
    named = swapping.register(policy="default", cache_salt="named")
    assert text_of(refined) == text_of(swapping.ask("one?", named["id"], read_tier=0.1))
    assert refined.criticalkv["policy"] == named["policy"]


def test_a_folded_conversation_goes_on_as_the_untouched_model_would(swapping: Service) -> None:
    handle = swapping.register(store_tier=1.0, first_policy=None)["id"]
    tier = {"read_tier": 1.0, "store_tier": 1.0}
    for question in ("one?", "two?", "three?"):
        answer = swapping.ask(question, handle, **tier)
        handle = answer.criticalkv["handle"]
    wait_for(lambda: swapping.workers.prefills[-1].background)
    fold = swapping.workers.prefills[-1]
    wait_for(
        lambda: (
            swapping.client.get(f"/contexts/{handle}", cast_to=dict[str, Any])["node_id"]
            == fold.node_id
        )
    )
    swapping.workers.fresh_decoder()
    last = swapping.ask("four?", handle, **tier, max_tokens=12)
    request = swapping.workers.decodes[-1]
    assert (request.parent, request.view, fold.ancestors) == (fold.node_id, ("1",), ())
    assert last.criticalkv["tier"] == "1"
    said = tokens_of(swapping, answer.criticalkv["node_id"])
    assert list(fold.token_ids) == said
    theirs = untouched(swapping, [*said, *request.token_ids])
    shown = text_of(last)
    assert shown
    assert theirs.startswith(shown)
    assert set(theirs[len(shown) :]) <= {"\ufffd"}


def tokens_of(service: Service, leaf: str) -> list[int]:
    """The tokens of a chain, and what its end left pending."""
    store = service.workers._store
    records = store.token_records([*store.stat([leaf])[0].ancestors, leaf])
    assert all(records)
    ids = [token for record in records if record for token in record.token_ids]
    return [*ids, *(records[-1].pending_ids if records[-1] else ())]


def untouched(service: Service, ids: list[int]) -> str:
    """What plain transformers says after these tokens."""
    model = service.workers._model.model
    model.set_attn_implementation("sdpa")
    try:
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    finally:
        model.set_attn_implementation("criticalkv")
    return str(service.workers._model.chat.decode(out[0, len(ids) :].tolist()))
