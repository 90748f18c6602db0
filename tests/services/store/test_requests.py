"""Idempotency keys, aliases, and the limits of every call."""

from __future__ import annotations

import secrets
import time

import grpc
import pytest

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.errors import IdempotencyConflictError, InvalidRequestError

ALICE, BOB = "a1" * 16, "b2" * 16
BODY, OTHER_BODY = "0" * 64, "1" * 64


def begin(store, key, *, tenant=ALICE, body=BODY, handle="resp_1", lease_ms=60_000):
    return store.begin_request(tenant, key, body, handle, lease_ms, 600_000)


@pytest.fixture
def key():
    return secrets.token_hex(32)


def test_run_then_running_then_done(store, key):
    first = begin(store, key)
    assert (first.state, first.handle) == (pb.BeginRequestResponse.RUN, "resp_1")
    second = begin(store, key, handle="resp_2")
    assert (second.state, second.handle) == (pb.BeginRequestResponse.RUNNING, "resp_1")
    assert second.lease_token == ""
    assert not store.finish_request(ALICE, key, "wrong", b"answer")
    assert store.finish_request(ALICE, key, first.lease_token, b"answer")
    third = begin(store, key, handle="resp_3")
    assert (third.state, third.handle) == (pb.BeginRequestResponse.DONE, "resp_1")
    assert third.answer == b"answer"


def test_another_body_conflicts_in_every_state(store, key):
    token = begin(store, key).lease_token
    with pytest.raises(IdempotencyConflictError):
        begin(store, key, body=OTHER_BODY)
    store.finish_request(ALICE, key, token, b"answer")
    with pytest.raises(IdempotencyConflictError):
        begin(store, key, body=OTHER_BODY)
    assert begin(store, key, tenant=BOB, body=OTHER_BODY).state == pb.BeginRequestResponse.RUN


def test_failed_attempt_is_forgotten(store, key):
    token = begin(store, key).lease_token
    assert store.finish_request(ALICE, key, token, b"")
    again = begin(store, key, handle="resp_2")
    assert (again.state, again.handle) == (pb.BeginRequestResponse.RUN, "resp_2")


def test_lapsed_attempt_is_taken_over(store, key):
    dead = begin(store, key, lease_ms=30)
    time.sleep(0.06)
    heir = begin(store, key, handle="resp_2")
    assert (heir.state, heir.handle) == (pb.BeginRequestResponse.RUN, "resp_1")
    assert heir.lease_token != dead.lease_token
    assert not store.finish_request(ALICE, key, dead.lease_token, b"late")
    assert not store.finish_request(ALICE, key, dead.lease_token, b"")
    assert store.finish_request(ALICE, key, heir.lease_token, b"right")
    assert begin(store, key).answer == b"right"


def test_answer_is_bounded(store, key):
    token = begin(store, key).lease_token
    with pytest.raises(InvalidRequestError, match="answer"):
        store.finish_request(ALICE, key, token, bytes((1 << 20) + 1))


def test_alias_leads_to_living_nodes_newest_first(store, make_node):
    alias = secrets.token_hex(32)
    old, new = make_node(), make_node()
    old.put(store)
    new.put(store)
    store.put_alias(alias, old.node_id, [])
    time.sleep(0.005)
    store.put_alias(alias, new.node_id, ["0.4", "1"])
    none, found = store.resolve_aliases(["2" * 64, alias])
    assert none == []
    assert [(t.node_id, list(t.view)) for t in found] == [
        (new.node_id, ["0.4", "1"]),
        (old.node_id, []),
    ]
    store.delete_node(new.node_id)
    assert [t.node_id for t in store.resolve_aliases([alias])[0]] == [old.node_id]


def test_alias_keeps_sixteen_targets(store, make_node):
    alias = secrets.token_hex(32)
    for i in range(20):
        store.put_alias(alias, f"{i:064x}", [])
    node = make_node()
    node.put(store)
    store.put_alias(alias, node.node_id, [])
    assert [t.node_id for t in store.resolve_aliases([alias])[0]] == [node.node_id]


def test_many_ids_are_asked_in_groups(store, make_node):
    node = make_node()
    node.put(store)
    ids = [f"{i:064x}" for i in range(600)] + [node.node_id]
    assert [s.present for s in store.stat(ids)] == [False] * 600 + [True]
    assert store.token_records(ids)[-1] == node.record
    with pytest.raises(InvalidRequestError, match="at most 256"):
        store._once("StatNodes", pb.StatNodesRequest(node_ids=ids))


CALLS = {
    "StatNodes": pb.StatNodesRequest(node_ids=["0" * 64]),
    "GetNode": pb.GetNodeRequest(node_id="0" * 64),
    "PutNode": iter([pb.PutFrame(begin=pb.PutBegin(node_id="0" * 64)).SerializeToString()]),
    "Pin": pb.PinRequest(node_id="0" * 64),
    "AcquireLease": pb.AcquireLeaseRequest(node_id="0" * 64),
}


@pytest.mark.parametrize("method", CALLS)
def test_call_without_deadline_is_refused(store, method):
    call = store._call(method)
    run = (
        (lambda: list(call(CALLS[method])))
        if method == "GetNode"
        else (lambda: call(CALLS[method]))
    )
    with pytest.raises(grpc.RpcError) as caught:
        run()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in caught.value.details()


def test_message_over_the_limit_is_refused(store):
    with pytest.raises(Exception, match="a message exceeds"):
        store.bind_handle("resp_big", ALICE, "0" * 64, bytes(32 << 20))
    assert store.healthy()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("tenant", lambda s: s.pin("not hex!", "0" * 64)),
        ("tenant", lambda s: s.resolve_handle("", "resp_1")),
        ("ttl_ms", lambda s: s.touch("0" * 64, 1 << 60)),
        ("ttl_ms", lambda s: s.acquire_lease("0" * 64, 1 << 40)),
        ("metadata", lambda s: s.bind_handle("resp_1", ALICE, "0" * 64, bytes(65537))),
        ("handle", lambda s: s.bind_handle("a b", ALICE, "0" * 64, b"")),
        ("key_digest", lambda s: s.begin_request(ALICE, "x", BODY, "resp_1", 1, 1)),
        ("tier", lambda s: s.put_alias("0" * 64, "0" * 64, ["2"])),
        ("tier", lambda s: s.open_get("0" * 64, tier="NaN")),
        ("attempt", lambda s: s.delete_node("0" * 64, "XYZ")),
    ],
)
def test_malformed_request_names_its_field(store, field, call):
    with pytest.raises(InvalidRequestError, match=field):
        call(store)


def test_running_attempt_is_extended_by_its_token(store, key):
    states = pb.BeginRequestResponse
    mine = begin(store, key, lease_ms=150)

    def extend(token, lease_ms=150):
        return store.begin_request(ALICE, key, BODY, "resp_2", lease_ms, 600_000, lease_token=token)

    for _ in range(4):
        again = extend(mine.lease_token)
        assert (again.state, again.handle) == (states.RUN, "resp_1")
        assert again.lease_token == mine.lease_token
        time.sleep(0.08)
    assert extend(mine.lease_token, 60_000).state == states.RUN
    assert begin(store, key).state == states.RUNNING
    assert extend("b" * 32).state == states.RUNNING
    assert store.finish_request(ALICE, key, mine.lease_token, b"answer")
    assert extend(mine.lease_token).answer == b"answer"


def test_lost_attempt_is_not_started_anew(store, key):
    dead = begin(store, key, lease_ms=30)
    time.sleep(0.06)
    heir = begin(store, key)
    lost = store.begin_request(ALICE, key, BODY, "h", 1000, 1000, dead.lease_token)
    assert (lost.state, lost.lease_token) == (pb.BeginRequestResponse.RUNNING, "")
    assert store.finish_request(ALICE, key, heir.lease_token, b"")
    lost = store.begin_request(ALICE, key, BODY, "h", 1000, 1000, dead.lease_token)
    assert lost.state == pb.BeginRequestResponse.RUNNING
    assert begin(store, key).state == pb.BeginRequestResponse.RUN
