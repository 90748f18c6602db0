"""The client's own duties: laziness, deadlines, retries, typed errors, hostile servers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest

from criticalkv.proto import cache_store_pb2 as pb
from criticalkv.services.store import server
from criticalkv.shared import errors, node_writer
from criticalkv.shared.breaker import FAILURES, CircuitOpenError
from criticalkv.shared.store_channel import OPTIONS, SERVICE, typed_error
from criticalkv.shared.store_client import StoreClient


def test_channel_is_made_at_the_first_call(store_process):
    client = StoreClient(store_process.address)
    assert client._channel is None
    assert client.healthy()
    assert client._channel is not None
    client.close()
    client.close()
    with pytest.raises(errors.StoreUnavailableError):
        client.stat(["0" * 64])


def test_client_is_thread_safe(store):
    def work(i: int) -> bool:
        return store.stat([f"{i:064x}"])[0].node_id == f"{i:064x}"

    with futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(200)))


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with StoreClient(address, timeout_s=1.0) as client:
        assert not client.healthy()
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailableError) as caught:
            client.stat(["0" * 64])
        assert caught.value.retry_after_s
        assert time.monotonic() - began < 2


def test_a_retry_that_comes_too_late_says_what_went_wrong_before(monkeypatch):
    failures = [errors.StoreUnavailableError("nobody listens"), errors.DeadlineError("too late")]
    with StoreClient("127.0.0.1:1", timeout_s=5.0) as client:

        def fail(*_):
            raise failures.pop(0)

        monkeypatch.setattr(client, "_once", fail)
        with pytest.raises(errors.StoreUnavailableError, match="nobody listens"):
            client.stat(["0" * 64])


def test_black_hole_ends_at_the_deadline():
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()  # accepts, never answers
        with StoreClient(f"127.0.0.1:{hole.getsockname()[1]}", timeout_s=0.5) as client:
            began = time.monotonic()
            with pytest.raises((errors.DeadlineError, errors.StoreUnavailableError)):
                client.stat(["0" * 64])
            with pytest.raises((errors.DeadlineError, errors.StoreUnavailableError)):
                client.open_get("0" * 64, timeout_s=0.5)
            assert time.monotonic() - began < 3


@pytest.fixture
def hole():
    """A client of a server that accepts connections and never answers."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen()
        with StoreClient(f"127.0.0.1:{hole.getsockname()[1]}", timeout_s=0.3) as client:
            yield client


SILENCE = (errors.DeadlineError, errors.StoreUnavailableError)
CALLS = {
    "unary": lambda client: client.stat(["0" * 64]),
    "once": lambda client: client.acquire_lease("0" * 64, 1),
    "get": lambda client: client.open_get("0" * 64, timeout_s=0.3),
    "put": lambda client: empty_put(client),
}


def empty_put(client):
    with client.open_put("0" * 64, "a" * 16, timeout_s=0.3) as writer:
        send_for_ever(writer)


@pytest.mark.parametrize("kind", CALLS)
def test_second_caller_of_a_black_hole_fails_at_once(hole, kind):
    for _ in range(FAILURES):
        with pytest.raises(SILENCE):
            CALLS[kind](hole)
    for call in CALLS.values():
        began = time.monotonic()
        with pytest.raises(CircuitOpenError) as caught:
            call(hole)
        assert time.monotonic() - began < 0.2
        assert caught.value.retry_after_s > 0


def test_a_store_that_came_back_is_found_by_a_probe(hostile, client):
    hostile.answers["AcquireLease"] = fail(grpc.StatusCode.UNAVAILABLE, times=FAILURES)
    for _ in range(FAILURES):
        with pytest.raises(errors.StoreUnavailableError):
            client.acquire_lease("0" * 64, 1)
    with pytest.raises(CircuitOpenError):
        client.acquire_lease("0" * 64, 1)
    assert len(hostile.calls) == FAILURES
    client._breaker._probe_at = 0.0  # a pause later
    client.acquire_lease("0" * 64, 1)
    client.acquire_lease("0" * 64, 1)


def test_health_is_asked_past_an_open_breaker(store_process):
    with store_process.client() as client:
        for _ in range(FAILURES):
            client._breaker.begin(5.0).failed(errors.StoreUnavailableError("silent"))
        with pytest.raises(CircuitOpenError):
            client.stat(["0" * 64])
        assert client.healthy()
        client.stat(["0" * 64])


@pytest.fixture
def half_open(store_process):
    """A client whose breaker waits for a probe; the store is well."""
    with store_process.client() as client:
        for _ in range(FAILURES):
            client._breaker.begin(5.0).failed(errors.StoreUnavailableError("silent"))
        client._breaker._probe_at = 0.0
        yield client


def test_a_long_put_is_no_probe(half_open):
    with half_open.open_put("0" * 64, "a" * 16):
        assert half_open.stat(["0" * 64])  # did not wait for the put's end


def test_a_put_before_a_store_that_does_not_serve_fails_soon(half_open, monkeypatch):
    monkeypatch.setattr(half_open, "healthy", lambda: False)
    with pytest.raises(errors.StoreUnavailableError, match="does not serve"):
        half_open.open_put("0" * 64, "a" * 16)
    with pytest.raises(CircuitOpenError):
        half_open.open_put("0" * 64, "a" * 16)


class Hostile:
    """A gRPC server whose answers a test scripts."""

    def __init__(self):
        self.calls = []
        self.answers = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers((self,))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def service(self, details):
        name = details.method.rsplit("/", 1)[1]
        self.calls.append(name)
        kind = {
            "PutNode": grpc.stream_unary_rpc_method_handler,
            "GetNode": grpc.unary_stream_rpc_method_handler,
        }.get(name, grpc.unary_unary_rpc_method_handler)
        return kind(self.answers[name], None, None)


@pytest.fixture
def hostile():
    hostile = Hostile()
    yield hostile
    hostile.server.stop(0)


@pytest.fixture
def client(hostile):
    with StoreClient(f"127.0.0.1:{hostile.port}", timeout_s=5.0) as client:
        yield client


def fail(status, times=100, code=None):
    left = [times]

    def answer(_, context):
        if left[0]:
            left[0] -= 1
            if code:
                context.set_trailing_metadata((("ckv-code", code),))
            context.abort(status, "because")
        return b""

    return answer


def test_idempotent_calls_are_retried_on_unavailable(hostile, client):
    hostile.answers["Touch"] = fail(grpc.StatusCode.UNAVAILABLE, times=2)
    assert client.touch("0" * 64, 1) is False
    assert hostile.calls == ["Touch"] * 3


def test_retries_are_bounded(hostile, client):
    hostile.answers["Touch"] = fail(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(errors.StoreUnavailableError):
        client.touch("0" * 64, 1)
    assert len(hostile.calls) == 4


def test_other_calls_and_other_errors_are_not_retried(hostile, client):
    hostile.answers["AcquireLease"] = fail(grpc.StatusCode.UNAVAILABLE)
    hostile.answers["BeginRequest"] = fail(grpc.StatusCode.UNAVAILABLE)
    hostile.answers["Touch"] = fail(grpc.StatusCode.INTERNAL)
    with pytest.raises(errors.StoreUnavailableError):
        client.acquire_lease("0" * 64, 1)
    with pytest.raises(errors.StoreUnavailableError):
        client.begin_request("a", "0" * 64, "0" * 64, "h", 1, 1)
    with pytest.raises(errors.CriticalKVError):
        client.touch("0" * 64, 1)
    assert hostile.calls == ["AcquireLease", "BeginRequest", "Touch"]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("INVALID_ARGUMENT", None, errors.InvalidRequestError),
        ("UNAUTHENTICATED", None, errors.AuthenticationError),
        ("NOT_FOUND", None, errors.NodeMissingError),
        ("NOT_FOUND", "context_not_found", errors.ContextNotFoundError),
        ("ALREADY_EXISTS", None, errors.IdempotencyConflictError),
        ("FAILED_PRECONDITION", None, errors.LeaseLostError),
        ("RESOURCE_EXHAUSTED", None, errors.OverloadedError),
        ("RESOURCE_EXHAUSTED", "store_full", errors.StoreFullError),
        ("DEADLINE_EXCEEDED", None, errors.DeadlineError),
        ("CANCELLED", None, errors.CancelledError),
        ("INTERNAL", None, errors.CriticalKVError),
        ("UNKNOWN", None, errors.CriticalKVError),
    ],
)
def test_status_to_typed_error(hostile, client, status, code, kind):
    hostile.answers["Touch"] = fail(grpc.StatusCode[status], code=code)
    with pytest.raises(kind) as caught:
        client.touch("0" * 64, 1)
    assert type(caught.value) is kind
    assert "because" in caught.value.message


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xff\xff"],
        [pb.GetFrame(segment=pb.GetSegment()).SerializeToString()],
    ],
    ids=["nothing", "empty", "garbage", "no header"],
)
def test_hostile_reads_are_corrupt(hostile, client, frames):
    hostile.answers["GetNode"] = lambda _, __: iter(frames)
    hostile.answers["DeleteNode"] = lambda _, __: b""
    with pytest.raises(errors.CorruptNodeError):
        client.open_get("0" * 64)
    # Nothing says which attempt it is, and a newer version's frame may be what we cannot read.
    assert hostile.calls == ["GetNode"]


def test_manifest_of_a_newer_version_is_a_miss_and_stays(hostile, client):
    header = pb.GetHeader(manifest_parts=[b"\x80"], tier="1", generation=3)
    frame = pb.GetFrame(header=header).SerializeToString()
    hostile.answers["GetNode"] = lambda _, __: iter([frame])
    with pytest.raises(errors.NodeMissingError):
        client.open_get("0" * 64)
    assert hostile.calls == ["GetNode"]


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("Received message larger than max (9 vs. 8)", errors.InvalidRequestError, "bytes"),
        ("Concurrent RPC limit exceeded!", errors.OverloadedError, "store.max_concurrent_rpcs"),
    ],
)
def test_limits_of_the_transport_are_named(hostile, client, text, kind, names):
    hostile.answers["Touch"] = lambda _, context: context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED, text
    )
    with pytest.raises(kind, match=names):
        client.touch("0" * 64, 1)


def test_writer_blocks_when_the_server_does_not_read(hostile, client):
    release = threading.Event()

    def answer(_, __):
        release.wait(10)
        return b""

    hostile.answers["PutNode"] = answer
    sent = []

    def send():
        with (
            contextlib.suppress(errors.StoreUnavailableError),
            client.open_put("0" * 64, "a" * 16) as writer,
        ):
            for i in range(200):
                writer.send(bytes(1 << 20))
                sent.append(i)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    time.sleep(1.0)
    assert len(sent) < 20  # bounded by queue and flow control, not 200 MiB
    release.set()
    thread.join(10)


def test_writer_learns_of_a_failed_stream(hostile, client):
    def answer(frames, context):
        next(frames)
        context.set_trailing_metadata((("ckv-code", "store_full"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    hostile.answers["PutNode"] = answer
    began = time.monotonic()
    with client.open_put("0" * 64, "a" * 16) as writer, pytest.raises(errors.StoreFullError):
        send_for_ever(writer)
    assert time.monotonic() - began < 5


def send_for_ever(writer):
    while True:
        writer.send(bytes(1 << 16))


def test_buffer_may_be_reused_after_send(hostile, client):
    got = []

    def answer(frames, _):
        got.extend(bytes(frame) for frame in frames)
        return b""

    hostile.answers["PutNode"] = answer
    buffer = bytearray(1000)
    with client.open_put("0" * 64, "a" * 16) as writer:
        for i in range(10):
            buffer[:] = bytes([i]) * 1000
            writer.send(buffer)
        time.sleep(0.3)
    assert [frame[-1] for frame in got[1:]] == list(range(10))[: len(got) - 1]


def test_leaving_a_read_cancels_it(hostile, client):
    ended = threading.Event()

    def answer(_, context):
        context.add_callback(ended.set)
        yield b"\xff"
        time.sleep(10)

    hostile.answers["GetNode"] = answer
    hostile.answers["DeleteNode"] = lambda _, __: b""
    with pytest.raises(errors.CorruptNodeError):
        client.open_get("0" * 64)
    assert ended.wait(2)


def test_service_name_is_the_contract():
    assert pb.DESCRIPTOR.services_by_name["CacheStore"].full_name == SERVICE


def test_error_without_details():
    class Bare(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

        def details(self):
            return None

        def trailing_metadata(self):
            return None

    assert isinstance(typed_error(Bare()), errors.StoreUnavailableError)


class Stop(Exception):
    """What a check raises."""


def stop_after(seconds):
    calls = []

    def check():
        calls.append(time.monotonic())
        if calls[-1] - calls[0] > seconds:
            raise Stop

    return calls, check


@pytest.mark.parametrize("reads", [False, True], ids=["queue full", "result pending"])
def test_waiting_writer_is_stopped_by_its_check(hostile, client, monkeypatch, reads):
    monkeypatch.setattr(node_writer, "encode_manifest", lambda _: [b"manifest"])
    record = SimpleNamespace(encode=lambda: b"record")
    ended = threading.Event()

    def answer(frames, context):
        context.add_callback(ended.set)
        if reads:
            list(frames)
        ended.wait(10)
        return b""

    hostile.answers["PutNode"] = answer
    calls, check = stop_after(0.6)
    with client.open_put("0" * 64, "a" * 16, check=check) as writer:
        act = (lambda: writer.commit(None, record)) if reads else (lambda: send_for_ever(writer))
        with pytest.raises(Stop):
            act()
        assert ended.wait(2)  # the stream was cancelled
    assert max(b - a for a, b in itertools.pairwise(calls)) < 0.3


def test_server_allows_the_pings_of_the_client():
    mine, theirs = dict(OPTIONS), dict(server.OPTIONS)
    assert mine["grpc.keepalive_time_ms"] == 10_000
    assert mine["grpc.keepalive_timeout_ms"] == 5000
    assert theirs["grpc.http2.min_ping_interval_without_data_ms"] < mine["grpc.keepalive_time_ms"]
    assert theirs["grpc.keepalive_permit_without_calls"] == 1
