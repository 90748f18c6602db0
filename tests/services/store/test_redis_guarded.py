"""The circuit breaker in front of Redis: what counts, and who shares it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from criticalkv.services.store.guarded import GuardedData, guarded
from criticalkv.shared.breaker import Breaker, CircuitOpenError
from criticalkv.shared.errors import StoreFullError, StoreUnavailableError
from criticalkv.shared.resp import Moving, NobodyLeads, TimedOut, Unreachable, busy

FAILURES = 3


@pytest.fixture
def breaker():
    return Breaker("Redis", FAILURES, pause_s=60)


def fail(breaker: Breaker, error: BaseException) -> None:
    with pytest.raises(type(error)), guarded(breaker, 5.0):
        raise error


def is_open(breaker: Breaker) -> bool:
    try:
        breaker.begin(5.0).close()
        return False
    except CircuitOpenError:
        return True


@pytest.mark.parametrize("error", [Unreachable("x"), TimedOut("x")])
def test_calls_without_an_answer_open_it(breaker, error):
    for _ in range(FAILURES):
        assert not is_open(breaker)
        fail(breaker, error)
    assert is_open(breaker)
    with pytest.raises(CircuitOpenError) as caught, guarded(breaker, 5.0):
        pytest.fail("let through")
    assert caught.value.retry_after_s
    assert not isinstance(caught.value, Unreachable)  # or it would count itself


@pytest.mark.parametrize(
    "error",
    [
        StoreFullError("x"),
        StoreUnavailableError("NOPERM"),
        Moving("x"),
        busy(),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refusals_neither_open_nor_close_it(breaker, error):
    for _ in range(2 * FAILURES):
        fail(breaker, error)
    assert not is_open(breaker)
    for _ in range(FAILURES):
        fail(breaker, Unreachable("x"))
        if not is_open(breaker):
            fail(breaker, error)
    assert is_open(breaker)


def test_where_a_key_is_says_nothing_of_redis(breaker):
    """It may be known without asking, or be asked of others."""

    class Known:
        def location_of(self, key):
            if key == "lost":
                raise Unreachable("no Sentinel answers")
            return key

    client = GuardedData(Known(), breaker, 5.0)
    for _ in range(2 * FAILURES):
        with pytest.raises(Unreachable):
            client.location_of("lost")
    assert not is_open(breaker)
    for _ in range(FAILURES):
        assert client.location_of("here") == "here"
        fail(breaker, Unreachable("x"))
    with pytest.raises(CircuitOpenError):
        client.location_of("here")


def test_no_sentinel_counts_once_the_time_for_a_takeover_is_over(breaker):
    for _ in range(FAILURES):
        fail(breaker, NobodyLeads("x"))
    assert is_open(breaker)


def test_threads_share_it(breaker):
    calls = []

    class Dead:
        def get_many(self, wanted):
            calls.append(wanted)
            raise Unreachable("x")

    client = GuardedData(Dead(), breaker, 5.0)

    def work() -> None:
        for _ in range(50):
            with pytest.raises(StoreUnavailableError):
                client.get_many([("k", 1)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FAILURES <= len(calls) <= FAILURES + len(threads)
