"""The circuit breaker: fails fast, probes once, and is not fooled."""

from __future__ import annotations

import time

import pytest

from criticalkv.shared.breaker import Breaker, CircuitOpenError
from criticalkv.shared.errors import (
    DeadlineError,
    NodeMissingError,
    OverloadedError,
    StoreUnavailableError,
)

SILENT = StoreUnavailableError("silent")


def breaker(**options):
    return Breaker("the peer", **{"failures": 3, "pause_s": 60.0, **options})


def fail(breaker, error=SILENT, times=1, timeout_s=5.0):
    for _ in range(times):
        with pytest.raises(type(error)), breaker.begin(timeout_s):
            raise error


def is_open(breaker):
    try:
        breaker.begin(5.0).close()
    except CircuitOpenError:
        return True
    return False


@pytest.mark.parametrize("error", [SILENT, DeadlineError("late")])
def test_opens_after_failures_in_a_row(error):
    it = breaker()
    fail(it, error, 2)
    assert not is_open(it)
    fail(it, error)
    with pytest.raises(CircuitOpenError, match="the peer") as caught:
        it.begin(5.0)
    assert caught.value.retry_after_s > 30


@pytest.mark.parametrize("error", [NodeMissingError("gone"), OverloadedError("busy")])
def test_an_answer_in_between_closes_it_even_if_it_is_an_error(error):
    it = breaker()
    fail(it, times=2)
    fail(it, error)
    fail(it, times=2)
    assert not is_open(it)


def test_a_cancelled_call_says_nothing():
    it = breaker()
    fail(it, times=2)
    it.begin(5.0).close()
    fail(it, KeyboardInterrupt())
    fail(it)
    assert is_open(it)


def test_a_deadline_too_short_for_an_answer_says_nothing():
    it = breaker()
    fail(it, DeadlineError("late"), times=10, timeout_s=0.01)
    assert not is_open(it)


def test_failures_far_apart_do_not_open_it():
    it = breaker(window_s=0.1)
    fail(it, times=2)
    time.sleep(0.15)
    fail(it, times=2)
    assert not is_open(it)


def test_one_probe_decides():
    it = breaker(pause_s=0.05)
    fail(it, times=3)
    time.sleep(0.1)
    probe = it.begin(5.0)
    assert is_open(it)  # only one
    probe.failed(SILENT)
    assert is_open(it)
    time.sleep(0.1)
    it.begin(5.0).answered()
    fail(it, times=2)
    assert not is_open(it)  # counted afresh


def test_a_cancelled_probe_lets_another_through():
    it = breaker(pause_s=0.05)
    fail(it, times=3)
    time.sleep(0.1)
    it.begin(5.0).close()
    assert not is_open(it)


def test_news_of_the_peer_close_it():
    it = breaker()
    fail(it, times=3)
    it.answered()
    assert not is_open(it)
