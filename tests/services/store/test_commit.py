"""A reader sees a whole node or none: commits, aborts, races and leases."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import grpc
import pytest
from valkey_servers import admin_of

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.shared.cache.manifest import encode_manifest
from criticalkv.shared.errors import (
    CancelledError,
    InvalidRequestError,
    LeaseLostError,
    NodeMissingError,
    NodeTooLargeError,
    StoreUnavailableError,
)
from criticalkv.shared.frames import encode_segment
from criticalkv.shared.store_channel import typed_error


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def segment_keys(valkey, node):
    return list(valkey.scan_iter(f"ckv:{{{node.node_id}}}:s:*", count=1000))


def booked(valkey, node):
    return valkey.hget("ckv:{books}:sizes", f"{node.node_id}:{node.manifest.attempt}")


def test_nothing_is_visible_before_the_commit(store, valkey, make_node):
    node = make_node()
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        for payload in node.payloads:
            writer.send(payload)
        wait_until(lambda: segment_keys(valkey, node))
        assert not store.stat([node.node_id])[0].present
        with pytest.raises(NodeMissingError):
            store.open_get(node.node_id)
        writer.commit(node.manifest, node.record)
    assert store.stat([node.node_id])[0].present


def test_unpublished_segments_carry_a_lease(store, valkey, make_node):
    node = make_node()
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        writer.send(node.payloads[0])
        wait_until(lambda: segment_keys(valkey, node))
        assert 0 < valkey.pttl(node.segment_key(0)) <= 2000


def test_leaving_without_commit_frees_everything(store, valkey, make_node):
    node = make_node()
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        for payload in node.payloads:
            writer.send(payload)
        wait_until(lambda: segment_keys(valkey, node))
    wait_until(lambda: not segment_keys(valkey, node) and booked(valkey, node) is None, 1.5)
    assert not store.stat([node.node_id])[0].present


def test_end_of_stream_is_not_a_commit(store, valkey, make_node):
    node = make_node()
    begin = pb.PutBegin(node_id=node.node_id, attempt=node.manifest.attempt)
    frames = [pb.PutFrame(begin=begin).SerializeToString()]
    frames += [encode_segment(i, payload) for i, payload in enumerate(node.payloads)]
    with pytest.raises(CancelledError):
        _put_raw(store, frames)
    assert not store.stat([node.node_id])[0].present
    assert not segment_keys(valkey, node)


def test_slow_put_keeps_its_lease(store, make_node):
    node = make_node()  # the lease is 2 s
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        for payload in node.payloads:
            writer.send(payload)
            time.sleep(0.8)
        assert writer.commit(node.manifest, node.record).published


KILLED_WRITER = """
    import json, os, sys, time
    from criticalkv.shared.store_client import StoreClient
    address, node_id, attempt = json.loads(sys.argv[1])
    writer = StoreClient(address).open_put(node_id, attempt)
    for _ in range(4):
        writer.send(os.urandom(1 << 20))
    time.sleep(0.5)
    print("sent", flush=True)
    time.sleep(60)
"""


def test_killed_writer_leaves_a_miss_and_no_segments(store_process, store, valkey, make_node):
    node = make_node()
    argument = json.dumps([store_process.address, node.node_id, node.manifest.attempt])
    command = [sys.executable, "-c", textwrap.dedent(KILLED_WRITER), argument]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        assert segment_keys(valkey, node)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not segment_keys(valkey, node) and booked(valkey, node) is None, 5.0)
    assert not store.stat([node.node_id])[0].present
    assert node.put(store).published  # the id is not blocked


def test_first_of_two_writers_wins(store, valkey, make_node):
    first, second = make_node(seed=1), make_node(seed=1)
    assert first.node_id == second.node_id
    with (
        store.open_put(first.node_id, first.manifest.attempt) as one,
        store.open_put(second.node_id, second.manifest.attempt) as two,
    ):
        for a, b in zip(first.payloads, second.payloads, strict=True):
            one.send(a)
            two.send(b)
        assert two.commit(second.manifest, second.record).published
        late = one.commit(first.manifest, first.record)
    assert (late.published, late.generation, late.stored_bytes) == (False, 1, 0)
    with store.open_get(first.node_id) as reader:
        assert reader.manifest.attempt == second.manifest.attempt
        assert len(list(reader)) == len(second.payloads)
    assert len(segment_keys(valkey, first)) == len(second.payloads)
    assert booked(valkey, first) is None


def test_higher_tier_replaces_a_lower_one(store, valkey, make_node):
    low, high = make_node(seed=2), make_node(seed=2, tiers=("0.1", "0.4", "0.8"))
    low.put(store)
    with store.open_get(low.node_id) as old:
        segments = iter(old)
        next(segments)
        assert high.put(store).generation == 2
        assert len(list(segments)) == len(low.payloads) - 1  # one generation per read
    with store.open_get(low.node_id) as reader:
        assert (reader.generation, reader.tier) == (2, "0.8")
        assert [bytes(p) for _, p in reader] == high.payloads
    time.sleep(0.7)  # several rounds of the janitor, less than the longest read
    assert valkey.exists(low.segment_key(0))
    assert not make_node(seed=2).put(store).published  # the lower one loses from now on
    wait_until(lambda: not valkey.exists(low.segment_key(0)), 8.0)
    wait_until(lambda: booked(valkey, low) is None)
    assert valkey.exists(high.segment_key(0))


def test_foreign_lease_refuses_the_commit(store, make_node):
    node = make_node()
    sleeper = store.acquire_lease(node.node_id, 100)
    assert sleeper.acquired
    time.sleep(0.15)
    taker = store.acquire_lease(node.node_id, 60_000)
    assert taker.acquired
    with pytest.raises(LeaseLostError):
        node.put(store, lease_token=sleeper.lease_token)
    assert not store.stat([node.node_id])[0].present
    assert make_retry(node).put(store, lease_token=taker.lease_token).published


def make_retry(node):
    return replace(node, manifest=node.manifest.model_copy(update={"attempt": "a" * 16}))


def test_lease_is_exclusive_and_released_by_its_token(store, make_node):
    node_id = make_node().node_id
    mine = store.acquire_lease(node_id, 60_000)
    other = store.acquire_lease(node_id, 60_000)
    assert (other.acquired, other.lease_token) == (False, "")
    assert 0 < other.held_for_ms <= 60_000
    assert not store.release_lease(node_id, "wrong")
    assert store.release_lease(node_id, mine.lease_token)
    assert store.acquire_lease(node_id, 1000).acquired


def test_segments_lost_before_the_commit_refuse_it(store, valkey, make_node):
    node = make_node()
    with store.open_put(node.node_id, node.manifest.attempt) as writer:
        for payload in node.payloads:
            writer.send(payload)
        wait_until(lambda: valkey.delete(node.segment_key(0)))
        with pytest.raises(LeaseLostError, match="segment 0"):
            writer.commit(node.manifest, node.record)
    assert not segment_keys(valkey, node)


def test_attempt_is_used_once(store, make_node):
    node = make_node()
    node.put(store)
    with pytest.raises(InvalidRequestError, match="attempt"):
        node.put(store)


def _put_raw(store, frames):
    try:
        return store._call("PutNode")(iter(frames), timeout=10)
    except grpc.RpcError as error:
        raise typed_error(error) from error


def _frames(node, **changes):
    begin = pb.PutBegin(node_id=node.node_id, attempt=node.manifest.attempt)
    commit = pb.PutCommit(
        segment_count=len(node.payloads),
        manifest_parts=encode_manifest(node.manifest),
        token_record=node.record.encode(),
    )
    payloads = list(node.payloads)
    if "count" in changes:
        commit.segment_count = changes["count"]
    if "manifest" in changes:
        del commit.manifest_parts[:]
        commit.manifest_parts.extend(changes["manifest"])
    if "record" in changes:
        commit.token_record = changes["record"]
    if "payload" in changes:
        payloads[1] = changes["payload"]
    if "begin" in changes:
        begin = changes["begin"]
    return [
        pb.PutFrame(begin=begin).SerializeToString(),
        *(encode_segment(i, payload) for i, payload in enumerate(payloads)),
        pb.PutFrame(commit=commit).SerializeToString(),
    ]


def _flip(data):
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize(
    "change",
    ["count", "truncated", "flipped", "other node", "other attempt", "manifest", "record",
     "foreign record", "too long", "empty", "index", "begin twice", "no begin", "garbage"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(store, valkey, make_node, change):
    node, other = make_node(), make_node()
    frames = {
        "count": lambda: _frames(node, count=3),
        "truncated": lambda: _frames(node, payload=node.payloads[1][:-1]),
        "flipped": lambda: _frames(node, payload=_flip(node.payloads[1])),
        "other node": lambda: _frames(node, manifest=encode_manifest(other.manifest)),
        "other attempt": lambda: _frames(node, manifest=encode_manifest(make_retry(node).manifest)),
        "manifest": lambda: _frames(node, manifest=[b"\xc1"]),
        "record": lambda: _frames(node, record=b""),
        "foreign record": lambda: _frames(node, record=other.record.encode()),
        "too long": lambda: _frames(node, payload=bytes((1 << 20) + 1)),
        "empty": lambda: _frames(node, payload=b""),
        "index": lambda: [_frames(node)[i] for i in (0, 1, 3, 5)],
        "begin twice": lambda: [_frames(node)[i] for i in (0, 0, 1)],
        "no begin": lambda: _frames(node)[1:],
        "garbage": lambda: [b"\xff" * 100],
    }[change]()
    with pytest.raises(InvalidRequestError):
        _put_raw(store, frames)
    assert not store.stat([node.node_id])[0].present
    assert not segment_keys(valkey, node)
    assert booked(valkey, node) is None
    assert store.healthy()


def test_expected_bytes_beyond_the_limit_are_refused_early(store, make_node):
    node = make_node()
    attempt = node.manifest.attempt
    with store.open_put(node.node_id, attempt, expected_bytes=1 << 40) as writer:
        wait_until(writer._future.done)
        with pytest.raises(NodeTooLargeError):
            writer.send(node.payloads[0])


def test_step_failing_after_the_publication_frees_nothing(small_store, make_node):
    node = make_node()
    with admin_of(small_store.config.data_dir) as valkey, small_store.client() as store:
        valkey.set("ckv:{books}:used", "not a sorted set")
        with pytest.raises(StoreUnavailableError):
            node.put(store)
        valkey.delete("ckv:{books}:used")
        assert booked(valkey, node) is not None
        with store.open_get(node.node_id) as reader:
            assert [bytes(payload) for _, payload in reader] == node.payloads


def test_begin_and_manifest_name_the_same_ancestors(store, make_node):
    root, other = make_node(), make_node()
    root.put(store)
    child = make_node(parent=root)
    with store.open_put(child.node_id, child.manifest.attempt, ancestors=[other.node_id]) as writer:
        for payload in child.payloads:
            writer.send(payload)
        with pytest.raises(InvalidRequestError, match="ancestors"):
            writer.commit(child.manifest, child.record)
    node = make_node()
    with (
        store.open_put(node.node_id, node.manifest.attempt, ancestors=["0" * 64] * 1025) as writer,
        pytest.raises(InvalidRequestError, match="at most 1024"),
    ):
        writer.commit(node.manifest, node.record)


def test_lease_is_extended_by_its_holder_only(store, make_node):
    node_id = make_node().node_id
    mine = store.acquire_lease(node_id, 200)
    for _ in range(4):
        again = store.acquire_lease(node_id, 200, mine.lease_token)
        assert (again.acquired, again.lease_token) == (True, mine.lease_token)
        time.sleep(0.1)
    store.acquire_lease(node_id, 60_000, lease_token=mine.lease_token)
    store.acquire_lease(node_id, 1, lease_token=mine.lease_token)  # never shortens
    other = store.acquire_lease(node_id, 60_000, lease_token="b" * 32)
    assert (other.acquired, other.lease_token) == (False, "")
    assert other.held_for_ms > 50_000
    assert store.release_lease(node_id, mine.lease_token)
    lapsed = store.acquire_lease(node_id, 1000, lease_token=mine.lease_token)
    assert (lapsed.acquired, lapsed.held_for_ms) == (False, 0)
    assert store.acquire_lease(node_id, 1000).acquired
