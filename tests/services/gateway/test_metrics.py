"""What `/metrics` says, in exact numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from criticalkv.services.gateway.metrics import Metrics
from criticalkv.services.gateway.pace import Pace
from criticalkv.shared.requests import DecodeEnd, DecodeStart

DOC = [{"role": "user", "content": "d" * 150}]
ASK = [{"role": "user", "content": "why?"}]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"criticalkv_gateway_{name}", labels)


def histogram(metrics: Metrics, name: str) -> tuple[float | None, float | None]:
    """Return count and sum, the sum rounded to a nanosecond."""
    total = value(metrics, f"{name}_sum")
    return value(metrics, f"{name}_count"), None if total is None else round(total, 9)


def at_most(metrics: Metrics, name: str, bound: str) -> float | None:
    return value(metrics, f"{name}_bucket", le=bound)


# -------------------------------------------------------------------- pace


def test_ttft_gaps_tpot_and_e2e_of_one_choice() -> None:
    metrics = Metrics()
    pace = Pace(metrics, received=100.0)
    for at in (101.5, 101.6, 101.9):
        pace.told(0, at)
    pace.ended(0, 5, at=104.0)  # stored by then: no token came so late
    assert pace.ttft == 1.5
    assert pace.e2e == pytest.approx(1.9)
    assert histogram(metrics, "ttft_seconds") == (1.0, 1.5)
    assert histogram(metrics, "itl_seconds") == (2.0, 0.4)
    assert at_most(metrics, "itl_seconds", "0.15") == 1.0
    assert at_most(metrics, "itl_seconds", "0.5") == 2.0
    # (E2E − TTFT) / (n − 1), n = 5 tokens in three pieces.
    assert histogram(metrics, "tpot_seconds") == (1.0, 0.1)


def test_gaps_are_within_a_choice_and_pooled_over_all() -> None:
    metrics = Metrics()
    pace = Pace(metrics, received=0.0)
    for choice, at in ((0, 1.0), (1, 1.25), (0, 2.0), (1, 4.25)):
        pace.told(choice, at)
    pace.ended(0, 2, at=5.0)
    pace.ended(1, 4, at=6.0)
    assert histogram(metrics, "ttft_seconds") == (1.0, 1.0)
    assert histogram(metrics, "itl_seconds") == (2.0, 4.0)
    assert histogram(metrics, "tpot_seconds") == (2.0, 2.0)
    assert pace.e2e == 4.25


@pytest.mark.parametrize(("told", "tokens"), [([], 0), ([], 3), ([1.0], 1), ([1.0], 4)], ids=str)
def test_tokens_that_come_at_once_have_no_pace(told: list[float], tokens: int) -> None:
    metrics = Metrics()
    pace = Pace(metrics, received=0.0)
    for at in told:
        pace.told(0, at)
    pace.ended(0, tokens, at=2.0)
    assert histogram(metrics, "itl_seconds") == histogram(metrics, "tpot_seconds") == (0.0, 0.0)
    expected = (told or [2.0])[0]  # an empty answer is there when it ends
    assert histogram(metrics, "ttft_seconds") == (1.0, expected)
    assert pace.e2e == expected


# ------------------------------------------------------------------ decode


def start(choice: int = 0, **fields: Any) -> DecodeStart:
    data = {
        "choice": choice, "replica": "r", "bytes_pulled": 0, "cached_tokens": 0, "tier": "1",
        "retained_fraction": 1.0, "store_ms": 30.0, "queue_ms": 250.0, **fields,
    }  # fmt: skip
    return DecodeStart.model_validate(data)


def end(choice: int = 0) -> DecodeEnd:
    return DecodeEnd(
        choice=choice, finish_reason="stop", prompt_tokens=1, completion_tokens=1, node_id=None,
        question_ms=400.0, batch_size=3.5, pool_used=0.55, preemptions=2,
    )  # fmt: skip


def test_what_choices_share_counts_once() -> None:
    metrics = Metrics()
    for choice in range(3):
        metrics.choice(start(choice), end(choice), has_parent=True)
    assert histogram(metrics, "queue_seconds") == (3.0, 0.75)
    assert histogram(metrics, "batch_sequences") == (3.0, 10.5)
    assert histogram(metrics, "pool_used_ratio") == (3.0, 1.65)
    assert value(metrics, "preemptions_total") == 6.0
    assert histogram(metrics, "pull_seconds") == (1.0, 0.03)
    assert histogram(metrics, "question_seconds") == (1.0, 0.4)
    assert value(metrics, "context_reads_total", result="held") == 1.0
    assert value(metrics, "context_reads_total", result="pulled") is None
    assert at_most(metrics, "batch_sequences", "2.0") == 0.0
    assert at_most(metrics, "batch_sequences", "4.0") == 3.0
    assert at_most(metrics, "pool_used_ratio", "0.5") == 0.0
    assert at_most(metrics, "pool_used_ratio", "0.6") == 3.0


def test_turns_over_a_context_are_held_or_pulled_and_others_neither() -> None:
    metrics = Metrics()
    metrics.choice(start(), end(), has_parent=True)
    metrics.choice(start(bytes_pulled=1), end(), has_parent=True)
    metrics.choice(start(bytes_pulled=9), end(), has_parent=True)
    metrics.choice(start(), end(), has_parent=False)
    assert value(metrics, "context_reads_total", result="held") == 1.0
    assert value(metrics, "context_reads_total", result="pulled") == 2.0
    assert histogram(metrics, "pull_seconds") == (3.0, 0.09)
    assert histogram(metrics, "question_seconds") == (4.0, 1.6)


def test_every_metric_has_a_help_text_and_times_are_in_seconds() -> None:
    for family in Metrics().registry.collect():
        assert len(family.documentation) > 10, family.name
        if family.type == "histogram":
            assert family.name.rsplit("_", 1)[1] in ("seconds", "sequences", "ratio", "nats")


# ----------------------------------------------------------------- gateway


def test_a_gateway_measures_its_turns(gateway: Any) -> None:
    workers, metrics = gateway.workers, gateway.core.metrics
    workers.start_fields = {"queue_ms": 250.0, "store_ms": 30.0, "bytes_pulled": 0}
    workers.end_fields = {
        "question_ms": 400.0, "batch_size": 3.0, "pool_used": 0.5, "preemptions": 1,
    }  # fmt: skip
    workers.say = lambda request: {5: "abc", 6: "de"}[request.sampling.seed]
    gateway.chat(DOC, n=2, seed=5)
    workers.start_fields = {"bytes_pulled": 7}
    gateway.chat(DOC, seed=5)
    gateway.chat(ASK, seed=5)
    assert value(metrics, "itl_seconds_count") == 2 + 1 + 2 + 2
    assert value(metrics, "tpot_seconds_count") == 4
    assert value(metrics, "ttft_seconds_count") == value(metrics, "e2e_seconds_count") == 3
    assert histogram(metrics, "queue_seconds") == (4.0, 0.5)
    assert histogram(metrics, "pull_seconds") == (2.0, 0.031)
    assert histogram(metrics, "question_seconds") == (3.0, 1.2)
    assert histogram(metrics, "batch_sequences") == (4.0, 12.0)
    assert histogram(metrics, "pool_used_ratio") == (4.0, 2.0)
    assert value(metrics, "preemptions_total") == 4.0
    assert value(metrics, "context_reads_total", result="held") == 1.0
    assert value(metrics, "context_reads_total", result="pulled") == 1.0
    text = gateway.get("/metrics").text
    assert "criticalkv_gateway_itl_seconds_count 7.0" in text
    assert "# HELP criticalkv_gateway_tpot_seconds " in text


def test_e2e_ends_with_the_last_token_and_not_with_the_store(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = gateway.core.store._client
    bind = client.bind_handle
    monkeypatch.setattr(client, "bind_handle", lambda *a: [time.sleep(1.0), bind(*a)][1])
    gateway.chat(ASK)
    total = value(gateway.core.metrics, "e2e_seconds_sum")
    assert total is not None
    assert 0 < total < 1.0
