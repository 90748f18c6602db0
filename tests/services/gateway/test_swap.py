"""Refining and folding through the gateway, with scripted workers over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from criticalkv.services.gateway import background
from criticalkv.shared.errors import NumericsError, OverloadedError
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.identity import POLICY_DENSE

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


def until(what: Callable[[], Any], timeout: float = 10.0) -> Any:
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
    until(lambda: core._running is None and not core._waiting)


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
    refining.workers.hold_background = None
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
    made = create(refining)
    until(lambda: len(refining.workers.prefills) == 2)
    delete(refining, made["id"])
    hold.set()
    settled(refining)
    better = refining.workers.prefills[1].node_id
    assert refining.store.token_records([made["node_id"], better]) == [None, None]
    assert not refining.store.stat([better])[0].present
    assert count(refining, "refine", "unused") == 1


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
        while not stop.is_set():
            seen.append(extension(refining.chat([user(marked("abcdef"[i] * 150), "q")]))["policy"])
        return seen

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, i) for i in range(6)]
        hold.set()
        until(lambda: count(refining, "refine", "queued") and not refining.core.background._running)
        settled(refining)
        time.sleep(0.3)
        stop.set()
        for future in asked:
            seen = future.result()
            assert seen == sorted(seen, key=[FIRST, WANTED].index)
            assert seen[-1] == WANTED
    assert len(made) == 6


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
    until(lambda: len(folding.workers.prefills) == 2)
    folding.core.swapper._fold_after = 99  # the next turn asks for no other fold
    later = talk(folding, 1, turns[-1]["handle"])[0]
    hold.set()
    settled(folding)
    assert count(folding, "fold", "unused") == 1
    for handle, parent in ((turns[-1], turns[-1]["node_id"]), (later, later["node_id"])):
        talk(folding, 1, handle["handle"])
        assert folding.workers.decodes[-1].parent == parent


def test_a_later_turns_fold_replaces_an_earlier_one(folding: Any, hold: threading.Event) -> None:
    turns = talk(folding, 5, create(folding)["id"])
    until(lambda: count(folding, "fold", "dropped") == 2)
    assert count(folding, "fold", "queued") == 3
    hold.set()
    settled(folding)
    assert count(folding, "fold", "done") == 1
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
    turns = talk(folding, 3, create(folding)["id"])
    until(lambda: len(folding.workers.prefills) == 2)
    delete(folding, turns[-1]["handle"])
    hold.set()
    settled(folding)
    folded = folding.workers.prefills[-1].node_id
    assert folding.store.token_records([folded]) == [None]
    assert count(folding, "fold", "unused") == 1
