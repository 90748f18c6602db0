"""Refining and folding through the gateway, with scripted workers over a real store."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from criticalkv.services.gateway import background
from criticalkv.services.gateway.leftovers import Leftovers
from criticalkv.services.gateway.lookup import _is_wanted
from criticalkv.services.gateway.metrics import Metrics
from criticalkv.services.gateway.nodes import Want, is_context
from criticalkv.services.gateway.prefill_once import Prefiller
from criticalkv.services.gateway.swap import Bound, Swap
from criticalkv.services.gateway.transcript import Metadata
from criticalkv.shared.cache.records import TokenRecord
from criticalkv.shared.chain import MAX_CHAIN
from criticalkv.shared.config import MAX_FOLD_AFTER
from criticalkv.shared.errors import NumericsError, OverloadedError, StoreUnavailableError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import POLICY_DENSE, Identity, tokens_digest
from criticalkv.shared.requests import PrefillRequest

DOC = "d" * 150
WANTED = Policy.parse("kvzip").canonical()
FIRST = Policy.parse("snapkv").canonical()
Message = dict[str, Any]


def user(*parts: str | Message) -> Message:
    texts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": texts}


def marked(text: str) -> Message:
    return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit"}}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def extension(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["criticalkv"]  # type: ignore[no-any-return]


def create(gateway: Any, text: str = DOC, **fields: Any) -> dict[str, Any]:
    answer = gateway.post("/v1/contexts", {"text": text, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def context(gateway: Any, handle: str) -> dict[str, Any]:
    return gateway.get(f"/v1/contexts/{handle}").json()  # type: ignore[no-any-return]


def until(what: Callable[[], Any], timeout: float = 60.0) -> Any:
    end = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def count(gateway: Any, kind: str, event: str) -> int:
    name = "criticalkv_gateway_background_total"
    labels = {"kind": kind, "event": event}
    return int(gateway.core.metrics.registry.get_sample_value(name, labels) or 0)


def settled(gateway: Any) -> None:
    core = gateway.core.background
    until(lambda: core._worker is None or core._worker.done())


def policies(gateway: Any) -> list[tuple[str, bool]]:
    names = {WANTED: "wanted", FIRST: "first", POLICY_DENSE: "dense"}
    return [(names[p.policy], p.background) for p in gateway.workers.prefills]


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """Background prefills wait for it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def refining(make_gateway: Callable[..., Any], hold: threading.Event) -> Any:
    gateway = make_gateway(eviction={"policy": "kvzip", "first_policy": "snapkv"})
    gateway.workers.hold_background = hold
    return gateway


# ----------------------------------------------------------------- refining


def test_the_first_answer_does_not_wait_and_the_next_reads_the_better_node(
    refining: Any, hold: threading.Event
) -> None:
    first = extension(refining.chat([user(marked(DOC), "q")]))
    assert first["policy"] == FIRST
    hold.set()
    settled(refining)
    assert policies(refining) == [("first", False), ("wanted", True)]
    cheap, better = refining.workers.prefills
    assert (cheap.token_ids, cheap.ancestors) == (better.token_ids, better.ancestors)
    again = refining.chat([user(marked(DOC), "other")])
    assert extension(again)["policy"] == WANTED
    assert again.json()["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0
    assert refining.workers.decodes[-1].parent == better.node_id
    assert count(refining, "refine", "done") == 1


def test_a_context_moves_to_its_better_node(refining: Any, hold: threading.Event) -> None:
    made = create(refining)
    assert (made["policy"], made["refinement"]) == (FIRST, "pending")
    hold.set()
    now = until(lambda: (c := context(refining, made["id"]))["refinement"] == "done" and c)
    assert (now["policy"], now["created"]) == (WANTED, made["created"])
    assert now["node_id"] == refining.workers.prefills[1].node_id
    turn = extension(refining.chat([user("q")], criticalkv={"context_id": made["id"]}))
    assert turn["policy"] == WANTED
    again = create(refining)
    assert (again["node_id"], again["refinement"]) == (now["node_id"], "done")
    assert len(refining.workers.prefills) == 2


def test_all_handles_on_the_first_node_move(refining: Any, hold: threading.Event) -> None:
    made = [create(refining) for _ in range(3)]
    assert count(refining, "refine", "queued") == 1
    hold.set()
    settled(refining)
    assert {context(refining, c["id"])["policy"] for c in made} == {WANTED}


def test_a_context_with_later_turns_keeps_its_node(refining: Any, hold: threading.Event) -> None:
    made = create(refining)
    turn = extension(refining.chat([user("q0")], criticalkv={"context_id": made["id"]}))
    hold.set()
    settled(refining)
    now = context(refining, made["id"])
    assert (now["node_id"], now["refinement"]) == (made["node_id"], "given_up")
    assert count(refining, "refine", "unused") == 1
    later = extension(refining.chat([user("q1")], criticalkv={"context_id": turn["handle"]}))
    assert later["policy"] == FIRST
    chain = refining.store.stat([later["node_id"]])[0].ancestors
    assert list(chain) == [made["node_id"], turn["node_id"]]
    # New conversations get the better one.
    assert extension(refining.chat([user(marked(DOC), "q")]))["policy"] == WANTED


def test_resent_history_stays_on_its_own_chain(refining: Any, hold: threading.Event) -> None:
    refining.workers.say = lambda _: "ok"
    turn = extension(refining.chat([user(marked(DOC), "q")]))
    hold.set()
    settled(refining)
    extension(refining.chat([user(marked(DOC), "q"), assistant("ok"), user("next")]))
    assert refining.workers.decodes[-1].parent == turn["node_id"]


def test_a_chain_is_refined_as_a_chain(refining: Any, hold: threading.Event) -> None:
    chain = [user(marked(DOC), marked("more"), "q")]
    extension(refining.chat(chain))
    assert policies(refining)[:2] == [("first", False)] * 2
    hold.set()
    settled(refining)
    root, leaf = refining.workers.prefills[2:]
    assert (leaf.ancestors, leaf.policy) == ((root.node_id,), WANTED)
    extension(refining.chat(chain))
    assert refining.workers.decodes[-1].parent == leaf.node_id
    assert len(refining.workers.prefills) == 4


def test_while_a_chain_is_refined_its_longer_version_is_read(refining: Any) -> None:
    refining.workers.hold_background = None
    short = [user(marked(DOC), "q")]
    extension(refining.chat(short))
    settled(refining)  # the root exists under both policies
    hold = refining.workers.hold_background = threading.Event()
    extension(refining.chat([user(marked(DOC), marked("more"), "q")]))
    cheap = refining.workers.prefills[2]
    assert (cheap.policy, cheap.ancestors) == (FIRST, (refining.workers.prefills[1].node_id,))
    # The better root is lost and comes back: its child is not there under that policy.
    extension(refining.chat([user(marked(DOC), marked("more"), "r")]))
    assert refining.workers.decodes[-1].parent == cheap.node_id
    assert [p for p in policies(refining) if p == ("first", False)] == [("first", False)] * 2
    hold.set()


def test_a_longer_chain_of_the_first_policy_beats_a_shorter_better_one(
    refining: Any, hold: threading.Event
) -> None:
    extension(refining.chat([user(marked(DOC), marked("more"), "q")]))
    until(lambda: len(refining.workers.prefills) == 3)
    extension(refining.chat([user(marked(DOC), "q")], criticalkv={"policy": "kvzip"}))
    extension(refining.chat([user(marked(DOC), marked("more"), "r")]))
    assert refining.workers.decodes[-1].parent == refining.workers.prefills[1].node_id
    hold.set()


def test_a_long_suffix_is_refined_after_its_turn(refining: Any, hold: threading.Event) -> None:
    hold.set()
    made = create(refining)
    settled(refining)
    turn = extension(refining.chat([user("q")], criticalkv={"context_id": made["id"]}))
    extension(refining.chat([user("z" * 300)], criticalkv={"context_id": turn["handle"]}))
    settled(refining)
    cheap, better = refining.workers.prefills[-2:]
    assert (cheap.policy, better.policy) == (FIRST, WANTED)
    assert cheap.ancestors == better.ancestors
    assert cheap.ancestors[-1] == turn["node_id"]
    assert cheap.token_ids == better.token_ids


@pytest.mark.parametrize("value", [None, "none", "kvzip"])
def test_a_request_can_switch_it_off(refining: Any, value: str | None) -> None:
    assert extension(refining.chat([user(marked(DOC), "q")], criticalkv={"first_policy": value}))[
        "policy"
    ] == (WANTED)
    made = create(refining, "e" * 150, first_policy=value)
    assert (made["policy"], made["refinement"]) == (WANTED, None)
    assert policies(refining) == [("wanted", False)] * 2


def test_who_names_a_policy_alone_gets_that_one(refining: Any, hold: threading.Event) -> None:
    extension(refining.chat([user(marked(DOC), "q")]))
    until(lambda: len(refining.workers.prefills) == 2)
    named = {"policy": "kvzip"}
    # The better node is being computed behind others: it is computed at once instead.
    assert extension(refining.chat([user(marked(DOC), "q")], criticalkv=named))["policy"] == WANTED
    assert refining.workers.cancelled_prefills == 1
    assert create(refining, "e" * 150, **named)["policy"] == WANTED
    hold.set()
    settled(refining)
    assert policies(refining).count(("wanted", False)) == 2


def test_a_request_can_ask_for_it(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(eviction={"policy": "kvzip"})
    asked = {"first_policy": "snapkv"}
    assert extension(gateway.chat([user(marked(DOC), "q")], criticalkv=asked))["policy"] == FIRST
    settled(gateway)
    assert extension(gateway.chat([user(marked(DOC), "q")]))["policy"] == WANTED
    bad = gateway.chat([user("q")], criticalkv={"first_policy": "nonsense"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "criticalkv.first_policy")


# --------------------------------------------------------- giving up cleanly


def test_a_context_deleted_before_its_refinement_costs_no_prefill(
    refining: Any, hold: threading.Event
) -> None:
    create(refining, "e" * 150)  # keeps the worker busy
    made = create(refining)
    assert refining.get(f"/v1/contexts/{made['id']}").status_code == 200
    delete(refining, made["id"])
    hold.set()
    settled(refining)
    assert len(refining.workers.prefills) == 3
    assert count(refining, "refine", "unused") == 1


def test_a_context_deleted_during_its_refinement_leaves_nothing(
    refining: Any, hold: threading.Event
) -> None:
    refining.core.store.leftovers._longest_s = 0.0
    made = create(refining)
    until(lambda: len(refining.workers.prefills) == 2)
    delete(refining, made["id"])
    hold.set()
    settled(refining)
    better = refining.workers.prefills[1].node_id
    until(lambda: refining.store.token_records([made["node_id"], better]) == [None, None])
    assert not refining.store.stat([better])[0].present
    assert count(refining, "refine", "unused") == 1


def test_what_a_request_may_be_reading_is_not_removed(refining: Any, hold: threading.Event) -> None:
    """The context is deleted while its better node is read: that one stays a while."""
    made = create(refining)
    until(lambda: len(refining.workers.prefills) == 2)
    delete(refining, made["id"])
    hold.set()
    settled(refining)
    better = refining.workers.prefills[1].node_id
    assert set(refining.core.store.leftovers._due) == {better}
    turn = extension(refining.chat([user(marked(DOC), "q")]))
    assert refining.workers.decodes[-1].parent == better
    assert turn["published"]


def test_a_better_node_without_a_handle_goes_with_the_first_one(
    refining: Any, hold: threading.Event
) -> None:
    turn = extension(refining.chat([user(marked(DOC), marked("more"), "q")]))
    hold.set()
    settled(refining)
    nodes = refining.node_ids()
    assert (len(nodes), count(refining, "refine", "done")) == (4, 1)
    assert all(stat.present for stat in refining.store.stat(nodes))
    delete(refining, turn["handle"])
    assert refining.store.token_records([*nodes, turn["node_id"]]) == [None] * 5


def test_a_better_node_of_a_context_that_went_on_goes_with_it(
    refining: Any, hold: threading.Event
) -> None:
    made = create(refining)
    turn = extension(refining.chat([user("q0")], criticalkv={"context_id": made["id"]}))
    hold.set()
    settled(refining)
    cheap, better = refining.node_ids()
    delete(refining, made["id"])
    assert refining.store.stat([better])[0].present  # the turn still holds its chain
    delete(refining, turn["handle"])
    assert refining.store.token_records([cheap, better]) == [None, None]


def test_what_a_failed_refinement_had_computed_goes_with_the_first_one(
    refining: Any, hold: threading.Event
) -> None:
    turn = extension(refining.chat([user(marked(DOC), marked("more"), "q")]))
    until(lambda: len(refining.workers.prefills) == 3)
    prefill = refining.workers.prefill

    async def failing(_: Any) -> Any:
        raise NumericsError("nan")

    refining.workers.prefill = failing  # the second step of the chain
    hold.set()
    settled(refining)
    refining.workers.prefill = prefill
    assert count(refining, "refine", "failed") == 1
    root = refining.node_ids()[2]
    assert refining.store.stat([root])[0].present
    delete(refining, turn["handle"])
    assert refining.store.token_records([root]) == [None]


async def test_the_end_of_the_gateway_removes_what_nobody_needs() -> None:
    gone: list[str] = []

    async def remove(node_id: str) -> bool:
        gone.append(node_id)
        return True

    leftovers = Leftovers(remove, 600.0)
    leftovers.add(["a", "b"])
    await leftovers.aclose()
    assert gone == ["a", "b"]


async def test_leftovers_wait_for_the_last_look_up_and_for_the_store() -> None:
    tried: list[str] = []

    async def remove(node_id: str) -> bool:
        tried.append(node_id)
        if len(tried) == 1:
            raise StoreUnavailableError("down")
        return True

    leftovers = Leftovers(remove, 600.0)
    leftovers.add(["a"])
    leftovers._due["a"] = 0.0
    await leftovers.met(["a", "b"])
    assert leftovers._due["a"] > time.monotonic() + 500
    leftovers._longest_s = 0.0
    leftovers.add(["a"])
    leftovers._worker.cancel()
    leftovers._worker = asyncio.create_task(leftovers._work())
    await asyncio.wait_for(leftovers._worker, 60)
    assert tried == ["a", "a"]


def delete(gateway: Any, handle: str) -> None:
    import httpx

    assert httpx.delete(f"{gateway.url}/v1/contexts/{handle}").status_code == 200


def test_a_failed_refinement_harms_nobody_and_is_not_repeated(
    refining: Any, hold: threading.Event
) -> None:
    hold.set()
    refining.workers.fail_background = [NumericsError("nan")] * 9
    made = create(refining)
    settled(refining)
    assert context(refining, made["id"])["refinement"] == "given_up"
    for _ in range(3):
        assert extension(refining.chat([user(marked(DOC), "q")]))["policy"] == FIRST
    settled(refining)
    assert (count(refining, "refine", "failed"), count(refining, "refine", "dropped")) == (1, 3)


def test_a_refinement_that_made_room_is_run_again(
    refining: Any, hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_S", (0.01, 0.01))
    hold.set()
    refining.workers.fail_background = [OverloadedError("made room")] * 2
    made = create(refining)
    until(lambda: context(refining, made["id"])["refinement"] == "done")
    assert count(refining, "refine", "retried") == 2


def test_a_full_queue_is_no_error(make_gateway: Callable[..., Any], hold: threading.Event) -> None:
    gateway = make_gateway(
        eviction={"policy": "kvzip", "first_policy": "snapkv"}, background_queue=1
    )
    gateway.workers.hold_background = hold
    made = []
    for letter in "abcd":
        made.append(create(gateway, letter * 150))
        until(lambda: gateway.core.background._running)
    assert [context(gateway, c["id"])["refinement"] for c in made] == [
        "pending", "pending", "given_up", "given_up",
    ]  # fmt: skip
    assert count(gateway, "refine", "dropped") == 2


def test_answers_stay_right_while_nodes_are_swapped(refining: Any, hold: threading.Event) -> None:
    made = [create(refining, letter * 150) for letter in "abcdef"]
    stop = threading.Event()

    def ask(i: int) -> list[str]:
        seen = []
        last = False
        while not last:
            last = stop.is_set()  # begun after all swaps
            seen.append(extension(refining.chat([user(marked("abcdef"[i] * 150), "q")]))["policy"])
        return seen

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, i) for i in range(6)]
        try:
            hold.set()
            settled(refining)
        finally:
            stop.set()
        for future in asked:
            seen = future.result()
            assert seen == sorted(seen, key=[FIRST, WANTED].index)
            assert seen[-1] == WANTED
    assert len(made) == 6


def test_a_pin_that_meets_a_move_goes_with_it(
    refining: Any, hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(refining)
    client = refining.core.store._client
    pin, pinned = client.pin, []

    def late(tenant: str, node_id: str) -> int:
        pinned.append(node_id)
        if len(pinned) == 1:  # between the look-up and the pin the handle is led on
            hold.set()
            settled(refining)
        return int(pin(tenant, node_id))

    monkeypatch.setattr(client, "pin", late)
    assert refining.post(f"/v1/contexts/{made['id']}/pin", {}).json()["pinned"] is True
    cheap, better = refining.node_ids()
    assert pinned == [cheap, better]
    assert [s.pinned for s in refining.store.stat([cheap, better])] == [False, True]


def test_a_refinement_that_ends_while_it_is_looked_at_has_not_failed(
    refining: Any, hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(refining)
    client = refining.core.store._client
    resolve, calls = client.resolve_handle, []

    def early(tenant: str, handle: str) -> Any:
        found = resolve(tenant, handle)
        calls.append(handle)
        if len(calls) == 1:  # read, and then the handle is led on
            hold.set()
            settled(refining)
        return found

    monkeypatch.setattr(client, "resolve_handle", early)
    now = context(refining, made["id"])
    assert (now["refinement"], now["policy"]) == ("done", WANTED)


def test_contexts_that_ask_for_other_tiers_are_refined_to_these(
    refining: Any, hold: threading.Event
) -> None:
    create(refining, "e" * 150)  # keeps the worker busy
    low = create(refining, store_tier=0.2)
    high = create(refining, store_tier=0.6, ttl="48h")
    assert low["node_id"] == high["node_id"]
    hold.set()
    settled(refining)
    found = [context(refining, made["id"]) for made in (low, high)]
    assert [c["refinement"] for c in found] == ["done", "done"]
    assert found[1]["tiers"][-1]["tier"] == "0.6"
    assert refining.store.stat([found[1]["node_id"]])[0].ttl_ms > 47 * 3600 * 1000


async def test_joined_work_keeps_its_aliases_and_its_longer_life() -> None:
    one, two = (
        Swap(
            kind="fold",
            old="a",
            policy="p",
            store_tier="1",
            store=None,  # type: ignore[arg-type]
            compute=None,  # type: ignore[arg-type]
            handles=[Bound("t", f"h{ttl}", alias=f"alias{ttl}")],
            ttl_ms=ttl,
        )
        for ttl in (1, 2)
    )
    one.join(two)
    assert ([bound.alias for bound in one.handles], one.ttl_ms) == (["alias1", "alias2"], 2)


def test_a_refinement_begins_after_its_turn(refining: Any) -> None:
    before: list[int] = []
    refining.workers.before_decode.append(
        lambda: before.append(count(refining, "refine", "queued"))
    )
    extension(refining.chat([user(marked(DOC), "q")]))
    assert (before, count(refining, "refine", "queued")) == ([0], 1)


def test_a_fold_begins_well_before_a_chain_is_full() -> None:
    assert MAX_FOLD_AFTER < MAX_CHAIN


# ---------------------------------------------- what another version has stored


def test_a_handle_under_a_policy_of_another_version_has_expired(gateway: Any) -> None:
    made = create(gateway)
    tenant = gateway.core.auth.tenant(None).digest
    stored = gateway.store.resolve_handle(tenant, made["id"])
    for i, policy in enumerate(("gone+uniform+plain:depth=3", "window+uniform+plain")):
        meta = Metadata.decode(stored.metadata).model_copy(update={"policy": policy})
        gateway.store.bind_handle(f"ctx_old{i}", tenant, made["node_id"], meta.encode())
        answer = gateway.chat([user("q")], criticalkv={"context_id": f"ctx_old{i}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "context_expired")
    assert gateway.workers.decodes == []


def test_a_stored_policy_of_another_version_is_a_miss() -> None:
    strange = "gone+uniform+plain:depth=3"
    assert is_context(strange)
    assert not _is_wanted(strange, Want(policy=WANTED, store_tier="1", salt=""))
    assert _is_wanted(WANTED, Want(policy=FIRST, store_tier="1", salt=""))


@pytest.mark.parametrize("change", [{"format_version": 1}, {"policy": "gone+uniform+plain:x=1"}])
def test_a_record_of_another_version_is_no_record(gateway: Any, change: dict[str, Any]) -> None:
    model = gateway.core.model
    identity = Identity(
        **{
            "model_digest": model.model_digest,
            "tokenizer_digest": model.tokenizer_digest,
            "dtype": model.dtype,
            "policy": WANTED,
            "salt": "0" * 64,
            "tokens": tokens_digest([1]),
        }
    )
    ours = gateway.core.planner._restorer._is_ours
    record = TokenRecord.model_construct(identity=identity, token_ids=(1,), pending_ids=())
    assert ours(record, identity.node_id)
    other = identity.model_copy(update=change)
    record = TokenRecord.model_construct(identity=other, token_ids=(1,), pending_ids=())
    assert not ours(record, other.node_id)


async def test_an_abandoned_background_prefill_says_nothing(caplog: Any) -> None:
    begun = asyncio.Event()

    class Failing:
        async def prefill(self, _: Any) -> Any:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                raise ValueError("the secret")

    prefiller = Prefiller(None, Failing(), Metrics())  # type: ignore[arg-type]
    request = PrefillRequest(
        node_id="1" * 64,
        token_ids=(1,),
        policy="dense",
        store_tier="1",
        salt="2" * 64,
        background=True,
    )
    call = asyncio.create_task(prefiller._call(request))
    await begun.wait()
    call.cancel()
    await asyncio.wait({call})
    del call
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


# ------------------------------------------------------------------ folding


@pytest.fixture
def folding(make_gateway: Callable[..., Any], hold: threading.Event) -> Any:
    gateway = make_gateway(eviction={"policy": "kvzip", "fold_after": 3})
    gateway.workers.say = lambda request: f"a{len(request.token_ids) % 7}"
    gateway.workers.hold_background = hold
    return gateway


def talk(gateway: Any, turns: int, handle: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for i in range(turns):
        answer = gateway.chat([user(f"q{i}")], criticalkv={"context_id": handle})
        out.append({**extension(answer), "text": answer.json()["choices"][0]["message"]["content"]})
        handle = out[-1]["handle"]
    return out


def tokens_of(gateway: Any, node_id: str) -> tuple[int, ...]:
    stat = gateway.store.stat([node_id])[0]
    records = gateway.store.token_records([*stat.ancestors, node_id])
    ids = [t for record in records for t in record.token_ids]
    return (*ids, *records[-1].pending_ids)


def test_a_long_chain_becomes_one_node_that_the_next_turn_reads(
    folding: Any, hold: threading.Event
) -> None:
    made = create(folding)
    turns = talk(folding, 3, made["id"])  # four nodes
    hold.set()
    settled(folding)
    assert count(folding, "fold", "done") == 1
    fold = folding.workers.prefills[-1]
    assert (fold.ancestors, fold.policy, fold.background) == ((), WANTED, True)
    assert fold.token_ids == tokens_of(folding, turns[-1]["node_id"])
    ids_before = tokens_of(folding, turns[-1]["node_id"])
    next_turn = talk(folding, 1, turns[-1]["handle"])[0]
    decode = folding.workers.decodes[-1]
    assert decode.parent == fold.node_id
    assert list(folding.store.stat([next_turn["node_id"]])[0].ancestors) == [fold.node_id]
    said = folding.core.template._special.decode(list(decode.token_ids), skip_special_tokens=False)
    assert said == "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
    assert tokens_of(folding, next_turn["node_id"])[: len(ids_before)] == ids_before


def test_a_short_chain_is_not_folded(folding: Any, hold: threading.Event) -> None:
    hold.set()
    talk(folding, 2, create(folding)["id"])
    settled(folding)
    assert count(folding, "fold", "queued") == 0


def test_folding_can_be_off(make_gateway: Callable[..., Any]) -> None:
    gateway = make_gateway(eviction={"fold_after": 0})
    talk(gateway, 5, create(gateway)["id"])
    assert count(gateway, "fold", "queued") == 0


def test_resent_history_finds_the_folded_root(folding: Any, hold: threading.Event) -> None:
    made = create(folding)
    turns = talk(folding, 3, made["id"])
    hold.set()
    settled(folding)
    history = [user(DOC, "\n\n", "q0"), assistant(turns[0]["text"])]
    for i in (1, 2):
        history += [user(f"q{i}"), assistant(turns[i]["text"])]
    extension(folding.chat([*history, user("next")]))
    decode = folding.workers.decodes[-1]
    assert decode.parent == folding.workers.prefills[-1].node_id
    said = folding.core.template._special.decode(list(decode.token_ids), skip_special_tokens=False)
    assert said == "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


def test_a_folded_root_below_the_wanted_tier_is_not_taken(
    folding: Any, hold: threading.Event
) -> None:
    folding.workers.hold_background = None
    first = [user("q0")]
    text = extension_text(folding, first)
    history = [*first, assistant(text)]
    for i in range(1, 4):
        history.append(user(f"q{i}"))
        history.append(assistant(extension_text(folding, history)))
    settled(folding)
    folded = [p.node_id for p in folding.workers.prefills]
    assert folded  # a conversation without a context: its turns are dense
    extension(folding.chat([*history, user("n")], criticalkv={"read_tier": 1}))
    assert folding.workers.decodes[-1].parent not in folded
    hold.set()


def extension_text(gateway: Any, messages: list[Message]) -> str:
    return str(gateway.chat(messages).json()["choices"][0]["message"]["content"])


def test_a_conversation_that_went_on_keeps_its_chain(folding: Any, hold: threading.Event) -> None:
    made = create(folding)
    turns = talk(folding, 3, made["id"])
    folding.core.store.leftovers._longest_s = 0.0
    until(lambda: len(folding.workers.prefills) == 2)
    folding.core.swapper._fold_after = 99  # the next turn asks for no other fold
    later = talk(folding, 1, turns[-1]["handle"])[0]
    hold.set()
    settled(folding)
    assert count(folding, "fold", "unused") == 1
    folded = folding.workers.prefills[-1].node_id
    until(lambda: folding.store.token_records([folded]) == [None])
    # Nothing leads to it.
    for handle, parent in ((turns[-1], turns[-1]["node_id"]), (later, later["node_id"])):
        talk(folding, 1, handle["handle"])
        assert folding.workers.decodes[-1].parent == parent


def test_a_later_turns_fold_replaces_one_that_waits(folding: Any, hold: threading.Event) -> None:
    """One that runs goes on: a conversation may always be faster than its folds."""
    made = create(folding)
    turns = talk(folding, 3, made["id"])
    until(lambda: len(folding.workers.prefills) == 2)
    turns += talk(folding, 2, turns[-1]["handle"])
    assert count(folding, "fold", "queued") == 3
    assert (count(folding, "fold", "dropped"), folding.workers.cancelled_prefills) == (1, 0)
    hold.set()
    settled(folding)
    assert (count(folding, "fold", "unused"), count(folding, "fold", "done")) == (1, 1)
    talk(folding, 1, turns[-1]["handle"])
    assert folding.workers.decodes[-1].parent == folding.workers.prefills[-1].node_id


def test_a_fold_without_records_gives_up(
    folding: Any, hold: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(folding)
    records = folding.core.store._client.token_records
    monkeypatch.setattr(
        folding.core.store._client,
        "token_records",
        lambda ids: [
            None if i == made["node_id"] else r for i, r in zip(ids, records(ids), strict=True)
        ],
    )
    turns = talk(folding, 3, made["id"])
    hold.set()
    settled(folding)
    assert count(folding, "fold", "unused") == 1
    assert len(folding.workers.prefills) == 1
    talk(folding, 1, turns[-1]["handle"])
    assert folding.workers.decodes[-1].parent == turns[-1]["node_id"]


def test_a_turn_deleted_during_its_fold_leaves_no_folded_root(
    folding: Any, hold: threading.Event
) -> None:
    folding.core.store.leftovers._longest_s = 0.0
    turns = talk(folding, 3, create(folding)["id"])
    until(lambda: len(folding.workers.prefills) == 2)
    delete(folding, turns[-1]["handle"])
    hold.set()
    settled(folding)
    folded = folding.workers.prefills[-1].node_id
    until(lambda: folding.store.token_records([folded]) == [None])
    assert count(folding, "fold", "unused") == 1


def test_only_the_first_choice_is_folded(folding: Any, hold: threading.Event) -> None:
    hold.set()
    turns = talk(folding, 2, create(folding)["id"])
    folding.workers.say = lambda request: f"s{request.sampling.seed}"
    asked = {"criticalkv": {"context_id": turns[-1]["handle"]}}
    choices = folding.chat([user("q")], n=3, temperature=1.0, **asked).json()["choices"]
    assert len({choice["criticalkv"]["node_id"] for choice in choices}) == 3
    assert count(folding, "fold", "queued") == 1
