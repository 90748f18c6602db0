"""The load on the service: traces, texts, times and figures are exactly what they say."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest
from openai import APIConnectionError, APIError
from openai.types.chat import ChatCompletionChunk
from tiny_models import byte_tokenizer, make_model
from typer.testing import CliRunner
from whole_service import Service, of_its_own

from criticalkv.services import cli
from criticalkv.services.bench import serve
from criticalkv.services.bench.load import closed_loop, gate, open_loop
from criticalkv.services.bench.load_client import Ask, Asker, LoadClient, Record
from criticalkv.services.bench.serve import Benchmark, Loop, Options, Replay, Scale
from criticalkv.services.bench.serve_figures import MEANING, figures, goodput_targets, samples
from criticalkv.services.bench.shared_prefixes import PrefixTree
from criticalkv.services.bench.trace import BLOCK_TOKENS, TraceRequest, read_trace
from criticalkv.services.bench.trace_asks import (
    Arrival,
    arrivals,
    known_share,
    poisson,
)
from criticalkv.services.bench.words import Words
from criticalkv.services.evaluation.rows import Rows
from criticalkv.services.store.process import StoreProcess
from criticalkv.shared.config import Config, ModelConfig
from criticalkv.shared.errors import ConfigError, CriticalKVError, PolicyError
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.report import Report

CHAT = ChatTemplate(byte_tokenizer())
WORDS = Words(CHAT.encode_content, seed=0)
ASKER = Asker(WORDS, overhead=7, extension={})
SCALE = Scale(length=1 / 32, time=0.5)  # blocks of 16 tokens


def row(at_ms: float, blocks: list[int], last: int = BLOCK_TOKENS, out: int = 64) -> dict[str, Any]:
    """A line of a Mooncake trace; its last block has `last` tokens."""
    length = BLOCK_TOKENS * (len(blocks) - 1) + last
    return {
        "timestamp": at_ms,
        "input_length": length,
        "output_length": out,
        "hash_ids": blocks,
    }


def mooncake(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def request_of(at_s: float, blocks: list[int], last: int = BLOCK_TOKENS) -> TraceRequest:
    return TraceRequest(at_s, BLOCK_TOKENS * (len(blocks) - 1) + last, 64, tuple(blocks))


def text_of(arrival: Arrival) -> str:
    return "".join(part["text"] for part in parts_of(arrival))


def parts_of(arrival: Arrival) -> list[dict[str, Any]]:
    (message,) = arrival.ask.body["messages"]
    return list(message["content"])


def marked_of(arrival: Arrival) -> list[str]:
    """What each breakpoint of the request closes, from the beginning of the prompt."""
    marked = [part["text"] for part in parts_of(arrival) if "prompt_cache_breakpoint" in part]
    return ["".join(marked[: n + 1]) for n in range(len(marked))]


# ------------------------------------------------------------------------- traces


def test_traces_are_read_in_order_and_from_time_zero(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "t.jsonl", [row(5000, [1, 2], last=7), row(3000, [1]), row(9000, [4])]
    )
    assert read_trace(path, 2) == [
        TraceRequest(0.0, 512, 64, (1,)),
        TraceRequest(2.0, 519, 64, (1, 2)),
    ]
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9305900,396,109\r\n"
    )
    first, second = read_trace(azure, 10)
    assert (first.input_tokens, first.output_tokens, first.hash_ids) == (374, 44, ())
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(4.25))


@pytest.mark.parametrize(
    ("name", "bad", "why"),
    [
        ("t.jsonl", '{"timestamp": 1', "line 2: "),
        ("t.jsonl", '{"timestamp": 1, "output_length": 1, "hash_ids": [1]}', "input_length"),
        ("t.jsonl", json.dumps({**row(1, [1]), "hash_ids": [1, 2]}), "2 hash_ids for 512 tokens"),
        ("t.jsonl", json.dumps({**row(1, [1]), "timestamp": float("nan")}), "timestamp"),
        ("t.jsonl", json.dumps({**row(1, [1]), "output_length": 0}), "output_length"),
        ("t.jsonl", json.dumps({**row(1, [1]), "note": "\ud83d"}), "surrogate"),
        ("t.csv", "2023-11-16 18:15:50,many,109", "many"),
        ("t.csv", "yesterday,3,109", "yesterday"),
        ("t.csv", "2023-11-16 18:15:50,0,109", "at least 1"),
        ("t.csv", "2023-11-16 18:15:50,7", "line 2: "),
    ],
)
def test_a_malformed_line_is_named_and_may_be_skipped(
    tmp_path: Path, name: str, bad: str, why: str
) -> None:
    path = tmp_path / name
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n" if name.endswith("csv") else ""
    good = "2023-11-16 18:15:46.6,374,44\n" if header else json.dumps(row(0, [1])) + "\n"
    path.write_text((header or good) + bad + "\n" + good)
    with pytest.raises(ConfigError, match=rf"{name}, line 2: ") as caught:
        read_trace(path, 10, Rows())
    assert why in caught.value.message
    assert "--skip-bad" in caught.value.message
    told: list[str] = []
    assert len(read_trace(path, 10, Rows(True, told.append))) == (1 if header else 2)
    assert len(told) == 1


def test_what_is_no_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    good = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n"
    path.write_text(good + "x" * 200_000)
    for rows in (Rows(), Rows(skip_bad=True)):
        with pytest.raises(ConfigError, match=r"t\.csv, line 3: field larger"):
            read_trace(path, 10, rows)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl has no requests"):
        read_trace(mooncake(tmp_path / "t.jsonl", []), 1)


# -------------------------------------------------------------------------- texts


def test_requests_are_cut_where_their_ways_part() -> None:
    requests = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 1, 2, 5, 6], [7], [8, 9], [8, 9]]
    tree = PrefixTree(requests)
    cuts = [tree.partings(path, 4) for path in tree.paths]
    assert cuts == [(1, 3), (1,), (1, 3), (1, 3), (), (2,), (2,)]
    assert [tree.partings(path, 1) for path in tree.paths][:3] == [(1,), (1,), (1,)]
    assert tree.known() == [0, 1, 3, 3, 0, 0, 2]


def random_trace(seed: int, count: int = 25) -> list[TraceRequest]:
    """Requests that go on from leading whole blocks of earlier ones, with fresh blocks."""
    draw, fresh, paths = random.Random(seed), iter(range(10_000)), [[0]]
    requests = []
    for number in range(count):
        base = draw.choice(paths)
        shared = base[: draw.randrange(len(base) + 1)]
        own = [*shared, *(next(fresh) for _ in range(draw.randrange(1, 4)))]
        last = draw.choice([BLOCK_TOKENS, draw.randrange(40, BLOCK_TOKENS)])
        paths.append(own if last == BLOCK_TOKENS else own[:-1])
        requests.append(request_of(number * 0.3, own, last))
    return requests


@pytest.mark.parametrize("seed", range(5))
def test_equal_leading_blocks_are_equal_prefixes_and_no_more(seed: int) -> None:
    requests = random_trace(seed)
    plan = arrivals(requests, SCALE, ASKER)
    for one, other in combinations(range(len(requests)), 2):
        a, b = (SCALE.blocks(requests[i]) for i in (one, other))
        shared = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        tokens = sum(size for _, size in a[:shared])
        left, right = (CHAT.encode_content(text_of(plan[i])) for i in (one, other))
        assert left[:tokens] == right[:tokens]
        until = tokens + (a[shared][1] if shared < len(a) else 0)
        assert shared in (len(a), len(b)) or left[tokens:until] != right[tokens:until]


@pytest.mark.parametrize("seed", range(5))
def test_breakpoints_end_where_others_find_them(seed: int) -> None:
    requests = random_trace(seed)
    plan = arrivals(requests, SCALE, ASKER)
    everybody = [set(marked_of(arrival)) for arrival in plan]
    for number, arrival in enumerate(plan):
        own = marked_of(arrival)
        assert len(own) <= 4
        assert arrival.ask.context == (own[-1] if own else None)
        assert arrival.ask.context_tokens == (7 + len(own[-1]) if own else 0)
        for text in own:  # somebody else closes the same prefix, after the same ones
            others = [texts for i, texts in enumerate(everybody) if i != number and text in texts]
            assert others
            before = {shorter for shorter in own if len(shorter) <= len(text)}
            assert all(before <= texts for texts in others)


@pytest.mark.parametrize("length", [1 / 32, 0.02, 0.0371, 1.0])
def test_lengths_are_scaled_exactly(length: float) -> None:
    requests = random_trace(1, count=6)
    plan = arrivals(requests, Scale(length, time=0.1), ASKER)
    for request, arrival in zip(requests, plan, strict=True):
        asked = round(request.input_tokens * length)
        assert len(CHAT.encode_content(text_of(arrival))) == arrival.input_tokens == asked
        assert arrival.ask.body["max_tokens"] == round(64 * length)
        assert arrival.at_s == pytest.approx(request.at_s * 0.1)
    # Ends of blocks are rounded, not their lengths: nothing adds up over a long prompt.
    sizes = [size for _, size in Scale(0.02).blocks(request_of(0, list(range(100))))]
    assert sum(sizes) == 1024
    assert set(sizes) == {10, 11}


def test_without_hash_ids_nothing_is_shared_and_nothing_marked() -> None:
    plan = arrivals([TraceRequest(0.0, 640, 64), TraceRequest(1.0, 640, 64)], SCALE, ASKER)
    assert [len(text_of(arrival)) for arrival in plan] == [20, 20]
    assert text_of(plan[0]) != text_of(plan[1])
    assert not any(map(marked_of, plan))
    assert known_share([TraceRequest(0.0, 640, 64)]) is None


def test_blocks_too_short_to_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match="--length-scale"):
        arrivals([request_of(0, [number]) for number in range(30)], Scale(1 / 512), ASKER)


def test_the_traces_own_hits_are_counted() -> None:
    requests = [request_of(0, [0, 1]), request_of(1, [0, 1, 2]), request_of(2, [1, 0])]
    assert known_share(requests) == 2 / 7  # block 1 is another one without block 0 before it


def test_texts_depend_on_name_and_seed_alone() -> None:
    assert WORDS.text("a", 50).startswith(WORDS.text("a", 20))
    assert WORDS.text("a", 20) == Words(CHAT.encode_content, 0).text("a", 20)
    assert (
        len({WORDS.text("a", 20), WORDS.text("b", 20), Words(CHAT.encode_content, 1).text("a", 20)})
        == 3
    )


def test_conversations_share_documents_and_think_as_long_as_said() -> None:
    loop = Loop(clients=3, turns=3, conversations=40, documents=2, think_time_s=2.0)
    plan = serve.conversations(loop, ASKER, seed=1)
    assert [len(own) for own in plan] == [40] * 3
    assert [own[0].document for own in plan] == [
        WORDS.text(f"document {number}", 1024) for number in (0, 1, 0)
    ]
    every = [conversation for own in plan for conversation in own]
    assert len({question for each in every for question in each.questions}) == loop.requests
    assert {each.pauses_s[0] for each in every} == {0.0}
    pauses = [pause for each in every for pause in each.pauses_s[1:]]
    assert np.mean(pauses) == pytest.approx(2.0, rel=0.25)
    assert plan == serve.conversations(loop, ASKER, seed=1)


def test_words_are_one_token_each_in_whatever_tokenizer() -> None:
    def with_a_beginning(
        text: str,
    ) -> list[str]:  # as SentencePiece's prefix; words of a vocabulary
        return ["_", *(w if len(w) < 5 else w[:5] for w in text.split(" ")[1:])]

    words = Words(with_a_beginning, 0)
    assert words.extra == 1
    assert len(with_a_beginning(words.text("x", 99))) == 100
    requests = [request_of(0, [0, 1, 2]), request_of(1, [0, 1, 3]), request_of(2, [0])]
    first = arrivals(requests, SCALE, Asker(words, 7, {}))[0]
    marked = [part["text"] for part in parts_of(first) if "prompt_cache_breakpoint" in part]
    assert first.ask.context_tokens == 7 + sum(len(with_a_beginning(text)) for text in marked)
    with pytest.raises(ConfigError, match="one token"):
        Words(lambda text: [*text, *text], 0)


def test_random_arrivals_have_the_rate() -> None:
    plan = arrivals([request_of(0, [n]) for n in range(400)], SCALE, ASKER)
    times = [arrival.at_s for arrival in poisson(plan, 5.0, seed=3)]
    assert times == sorted(times)
    assert 400 / times[-1] == pytest.approx(5.0, rel=0.2)
    assert times == [arrival.at_s for arrival in poisson(plan, 5.0, seed=3)]
    assert {arrival.at_s for arrival in poisson(plan, float("inf"), seed=3)} == {0.0}


# --------------------------------------------------------------- times of a stream


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Stream:
    """A scripted answer: each chunk comes at its time, then the script's error."""

    def __init__(self, clock: Clock, script: list[tuple[float, Any]]) -> None:
        self._clock, self._script, self._start = clock, script, clock.at

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        for at, item in self._script:
            self._clock.at = self._start + at
            if isinstance(item, BaseException):
                raise item
            if item == "silence":
                await asyncio.sleep(3600)
            yield item


def chunk(text: str | None = None, finish: str | None = None, **usage: Any) -> ChatCompletionChunk:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]
    extra = {"criticalkv": {"bytes_pulled": 5000, "tier": "0.4"}} if finish else {}
    return ChatCompletionChunk.model_validate(
        {
            "id": "resp_1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [] if usage else choices,
            "usage": usage or None,
            **extra,
        }
    )


def ended(prompt: int = 50, cached: int = 40, output: int = 4) -> ChatCompletionChunk:
    return chunk(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details={"cached_tokens": cached, "cache_write_tokens": 0},
    )


ANSWER = [
    (0.5, chunk("")),
    (0.75, chunk("a")),
    (1.0, chunk("b")),
    (1.75, chunk("cd")),
    (2.0, chunk(finish="length")),
    (2.25, ended()),
]


def client_of(clock: Clock, *scripts: Any, timeout_s: float = 60.0) -> LoadClient:
    """A client whose requests get these answers, one after the other."""
    waiting = iter(scripts)

    async def create(**_: Any) -> Stream:
        script = next(waiting)
        if isinstance(script, BaseException):
            raise script
        return Stream(clock, script)

    openai: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    return LoadClient(openai, "m", timeout_s, clock)


ASK = Ask({"max_tokens": 4}, context="the text", context_tokens=40)


async def test_times_of_a_scripted_stream_are_exact() -> None:
    clock = Clock()
    client = client_of(clock, ANSWER, ANSWER)
    clock.at = 110.0
    record = await client.send(ASK, due_s=9.5)
    assert (record.sent_s, record.queue_s) == (10.0, 0.5)
    assert record.error is None
    assert record.ttft_s == 0.75
    assert record.itls_s == [0.25, 0.75]
    assert record.e2e_s == 2.0  # with the last chunk that has choices
    assert record.tpot_s == (2.0 - 0.75) / 3
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (50, 4, 40)
    assert record.handle == "resp_1"
    assert record.extension["bytes_pulled"] == 5000
    assert (record.is_hit, record.is_warm) == (True, False)
    assert (await client.send(ASK)).is_warm


async def test_an_answer_without_text_has_its_end_as_first_token() -> None:
    record = await client_of(
        Clock(), [(0.5, chunk("")), (2.0, chunk(finish="stop")), (2.5, ended(output=1))]
    ).send(ASK)
    assert (record.error, record.ttft_s, record.tpot_s, record.itls_s) == (None, 2.0, None, [])
    assert record.e2e_s == 2.0


def failing(code: str | None) -> APIError:
    return APIError("no", request=None, body={"code": code} if code else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (APIConnectionError(request=None), "connection"),  # type: ignore[arg-type]
        ([(0.5, chunk("a")), (0.6, failing("worker_lost"))], "worker_lost"),
        ([(0.5, chunk("a")), (0.6, failing(None))], "incomplete_stream"),
        ([(0.5, chunk("a")), (0.6, json.JSONDecodeError("no", "", 0))], "incomplete_stream"),
        ([(0.5, chunk("a"))], "incomplete_stream"),
        ([(0.5, chunk("a")), (0.6, "silence")], "timeout"),
    ],
)
async def test_a_failure_is_recorded_by_its_code(script: Any, code: str) -> None:
    clock = Clock()
    client = client_of(clock, script, ANSWER, timeout_s=0.2)
    failed = await client.send(ASK)
    assert failed.error == code
    assert failed.e2e_s == clock.at - 100  # until it failed
    assert client.records == [failed]
    assert not (await client.send(ASK)).is_warm  # nothing was stored for sure


async def test_whoever_is_interrupted_has_a_record() -> None:
    client = client_of(Clock(), ANSWER, [(0.1, "silence")])
    plan = [Arrival(0.0, ASK, 50), Arrival(0.0, ASK, 50)]
    run = asyncio.create_task(open_loop(client, plan, gate(1), lambda: None))
    while len(client.records) < 2:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [record.error for record in client.records] == [None, "interrupted"]


async def test_a_failed_turn_is_counted_and_the_conversation_goes_on_before_it() -> None:
    asked: list[Ask] = []

    class Noting(LoadClient):
        async def send(self, ask: Ask, due_s: float | None = None) -> Record:
            asked.append(ask)
            return await super().send(ask, due_s)

    scripts = iter([ANSWER, [(0.1, failing("overloaded"))], ANSWER])

    async def create(**_: Any) -> Stream:
        return Stream(Clock(), next(scripts))

    openai: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    client = Noting(openai, "m", 60.0, Clock())
    plan = serve.conversations(Loop(clients=1, turns=3, documents=1, context_tokens=20), ASKER, 0)
    ticks: list[int] = []
    await closed_loop(client, plan, ASKER, gate(None), lambda: ticks.append(1))
    assert len(ticks) == 3
    assert [record.error for record in client.records] == [None, "overloaded", None]
    first, second, third = asked
    assert first.context_tokens == 27
    assert second.context == third.context == "resp_1"
    assert second.context_tokens == 50  # all that came before the first answer


async def test_no_more_requests_at_once_than_allowed() -> None:
    running, most = 0, []

    async def create(**_: Any) -> Stream:
        nonlocal running
        running += 1
        most.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        return Stream(Clock(), ANSWER)

    openai: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    client = LoadClient(openai, "m", 60.0)
    await open_loop(client, [Arrival(0.0, ASK, 50)] * 8, gate(3), lambda: None)
    assert max(most) == 3
    assert len(client.records) == 8


# ------------------------------------------------------------------------ figures


def record(sent: float, ttft: float, e2e: float, output: int, **more: Any) -> Record:
    return Record(
        Ask({}, more.pop("context", None), more.pop("context_tokens", 0)),
        sent_s=sent,
        ttft_s=ttft,
        e2e_s=e2e,
        prompt_tokens=100,
        output_tokens=output,
        **{"error": None, **more},
    )


RECORDS = [
    record(0.0, 0.125, 1.125, 9, itls_s=[0.25, 0.25], context="a", context_tokens=80),
    record(0.5, 0.25, 2.25, 5, context="a", context_tokens=80, cached_tokens=80, is_warm=True),
    record(1.125, 0.5, 0.5, 1, context="b", context_tokens=90, cached_tokens=80, is_warm=True),
    record(1.125, 0.375, 0.875, 3),
    record(2.0, 0.0, 0.5, 0, error="overloaded"),
]
RECORDS[1].extension = {"bytes_pulled": 700, "tier": "0.4"}


def test_figures_are_those_of_vllm() -> None:
    found = figures(RECORDS, duration_s=4.0, targets={})
    assert (found["completed"], found["failed"]) == (4, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (400, 18)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 4.5
    assert found["total_token_throughput"] == 104.5
    assert found["request_goodput"] is None
    ttfts = [125, 250, 500, 375]
    assert found["mean_ttft_ms"] == pytest.approx(312.5)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(312.5)
    assert found["std_ttft_ms"] == pytest.approx(np.std(ttfts))
    for p in (50, 90, 95, 99):
        assert found[f"p{p}_ttft_ms"] == pytest.approx(np.percentile(ttfts, p))
    assert found["mean_tpot_ms"] == pytest.approx((125 + 500 + 250) / 3)  # one token has none
    assert found["mean_itl_ms"] == pytest.approx(250)
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([1125, 2250, 500, 875], 99))
    assert found["max_concurrent_requests"] == 3  # the first one ends as two others begin
    assert found["max_output_tokens_per_s"] == 4
    assert found["errors"] == {"overloaded": 1}
    assert found["failed_share"] == 0.2


def test_hits_are_whole_contexts() -> None:
    found = figures(RECORDS, duration_s=4.0, targets={})
    assert found["requests_with_context"] == 3
    assert found["hit_rate"] == 1 / 3
    assert found["requests_with_warm_context"] == 2
    assert found["warm_hit_rate"] == 1 / 2
    assert found["cached_token_share"] == 160 / 400
    assert found["total_bytes_pulled"] == 700
    assert found["tiers_served"] == {"None": 2, "0.4": 1}


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        ({"ttft": 375.0}, 3),
        ({"ttft": 374.0}, 2),
        ({"tpot": 250.0}, 3),  # one token: nothing to miss
        ({"ttft": 500.0, "tpot": 125.0}, 2),
        ({"e2el": 1000.0, "tpot": 250.0}, 2),
        ({"ttft": 1.0}, 0),
    ],
)
def test_goodput_counts_answers_that_meet_every_target(
    targets: dict[str, float], good: int
) -> None:
    assert figures(RECORDS, 4.0, targets)["request_goodput"] == good / 4


def test_a_run_without_answers_has_no_times() -> None:
    found = figures([record(0.0, 0.0, 0.5, 0, error="timeout")], 0.5, {"ttft": 1})
    assert found["p99_ttft_ms"] is found["mean_itl_ms"] is found["hit_rate"] is None
    assert (found["failed"], found["request_goodput"], found["max_output_tokens_per_s"]) == (
        1,
        0,
        0,
    )
    assert figures([], 0.0, {})["request_throughput"] == 0


def test_targets_are_spelled_as_vllm_does() -> None:
    assert goodput_targets(["ttft:3000"], ["tpot:10.5"]) == {"ttft": 3000.0, "tpot": 10.5}
    for wrong in (["ttft"], ["itl:5"], ["ttft:soon"], ["ttft:-1"], ["ttft:nan"], ["ttft:inf"]):
        with pytest.raises(ConfigError, match="--goodput"):
            goodput_targets(wrong)
    with pytest.raises(ConfigError, match="unexpected argument 'x'"):
        goodput_targets((), ["x"])


# -------------------------------------------------------------- the whole service


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, path = make_model(), tmp_path_factory.mktemp("model") / "tiny"
    model.model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def service(tiny_model: Callable[..., Any], store_process: StoreProcess) -> Iterator[Service]:
    running = Service(of_its_own(tiny_model()), store_process)
    yield running
    running.close()


def measure(path: str, service: Service, load: Loop | Replay, **more: Any) -> Report:
    model = ModelConfig(path=path, name=more.pop("name", service.model))
    benchmark = Benchmark(model, Options(load, timeout_s=60.0, **more))
    return benchmark.run(str(service.client.base_url).removesuffix("/v1/"))


def test_a_key_that_no_header_can_carry_is_refused_unsaid(tiny_path: str) -> None:
    with pytest.raises(ConfigError, match="API key") as refused:
        Benchmark(ModelConfig(path=tiny_path), Options(Loop(), api_key="a-secret\n"))
    assert "a-secret" not in str(refused.value)


def test_conversations_find_their_contexts(
    tiny_path: str, service: Service, tmp_path: Path
) -> None:
    loop = Loop(
        clients=2, turns=2, documents=2, context_tokens=150, question_tokens=8, output_tokens=6
    )
    report = measure(
        tiny_path, service, loop, api_key="a-secret", tier="0.2", targets={"ttft": 60_000.0}
    )
    report.write(tmp_path / "serve.json")
    written = (tmp_path / "serve.json").read_text()
    assert "a-secret" not in written
    assert WORDS.text("document 0", 20) not in written
    details = report.details
    assert (details["completed"], details["failed"], details["not_sent"]) == (4, 0, 0)
    assert details["mode"] == "closed_loop"
    assert (details["hit_rate"], details["warm_hit_rate"]) == (0.5, 1.0)
    assert (details["requests_with_context"], details["requests_with_warm_context"]) == (4, 2)
    assert details["tiers_served"] == {"0.2": 4}
    assert details["request_goodput"] == details["request_throughput"] > 0
    assert len(service.workers.prefills) == 2
    assert report.headline.keys() == MEANING.keys()
    sent = report.samples
    assert set(sent) == set(samples([]))
    assert sent["cached_lens"][:2] == [0, 0]
    # The next turn finds the last one, its answer but for the last token included.
    prompts, outputs = sent["input_lens"], sent["output_lens"]
    assert min(sent["cached_lens"][2:]) >= min(prompts[:2])
    assert max(outputs) <= 6
    assert all(ttft <= e2e for ttft, e2e in zip(sent["ttfts"], sent["latencies"], strict=True))
    again = measure(tiny_path, service, loop, tier="0.2")  # the same texts: now all are there
    assert again.details["hit_rate"] == 1.0
    assert len(service.workers.prefills) == 2


def test_a_trace_hits_the_cache_as_it_says(
    tiny_path: str, service: Service, tmp_path: Path
) -> None:
    blocks = [
        [0, 1, 2],
        [0, 3],
        [0, 1, 2, 4],
        [0, 5, 6],
        [0, 1, 2, 4, 7],
        [8],
        [0, 1, 2],
        [0, 5, 9],
    ]
    rows = [row(100 * at, own, last=300, out=128) for at, own in enumerate(blocks)]
    for whole in (0, 2, 6):  # their last block goes on in others, so that it is whole
        rows[whole] = row(100 * whole, blocks[whole], out=128)
    rows.append(row(900, [90, *range(100, 200)]))  # too long for the model
    replay = Replay(mooncake(tmp_path / "t.jsonl", rows), scale=Scale(1 / 16, time=0.01))
    report = measure(tiny_path, service, replay, max_concurrency=1)
    details, sent = report.details, report.samples
    assert details["errors"] == {"context_length_exceeded": 1}
    assert (details["completed"], details["failed"]) == (8, 1)
    assert details["asked_input_tokens"] == sum(round(r["input_length"] / 16) for r in rows)
    # One after the other: each finds the prefixes that the ones before it were cut at.
    base = sent["context_lens"][1] - 32  # of the chat template
    assert sent["context_lens"] == [
        base + n if n else 0 for n in (96, 32, 128, 64, 128, 0, 96, 64, 0)
    ]
    assert sent["cached_lens"] == [base + n if n else 0 for n in (0, 32, 96, 32, 128, 0, 96, 64, 0)]
    assert details["hit_rate"] == 4 / 7
    assert details["warm_hit_rate"] == 1.0
    assert sent["input_lens"][5] - round(300 / 16) == sent["input_lens"][1] - round(812 / 16)
    assert details["trace_known_block_share"] == known_share(read_trace(tmp_path / "t.jsonl", 99))


def test_ctrl_c_keeps_what_there_is(
    tiny_path: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting:
        entered = 0

        async def __aenter__(self) -> None:
            self.entered += 1
            if self.entered == 2:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(serve, "gate", lambda _: Interrupting())
    loop = Loop(clients=1, turns=3, documents=1, context_tokens=100, output_tokens=2)
    report = measure(tiny_path, service, loop)
    assert report.details["interrupted"]
    assert (report.details["completed"], report.details["not_sent"]) == (1, 2)
    assert report.headline["hit_rate"] == 0.0


def test_tokens_are_those_of_the_model_that_is_served(tiny_path: str, service: Service) -> None:
    loop = Loop(clients=1, turns=1, documents=1, context_tokens=50, output_tokens=1)
    with pytest.raises(
        ConfigError, match=r"has 'tiny-llama', .* tokens of 'another': give --model"
    ):
        measure(tiny_path, service, loop, name="another")
    assert not service.workers.prefills
    report = measure(tiny_path, service, loop, name="another", any_model=True)
    assert (report.details["model_id"], report.details["tokenizer_id"]) == ("tiny-llama", "another")
    assert report.details["completed"] == 1


def test_no_service_is_one_line(tiny_path: str) -> None:
    benchmark = Benchmark(ModelConfig(path=tiny_path), Options(Loop(), timeout_s=5.0))
    with pytest.raises(CriticalKVError, match="no service to measure at http://127"):
        benchmark.run("http://127.0.0.1:9")


def test_policy_and_tier_are_checked_before_anything_runs(tiny_path: str) -> None:
    with pytest.raises(PolicyError):
        Benchmark(ModelConfig(path=tiny_path), Options(Loop(), policy="nonsense"))
    with pytest.raises(ConfigError, match="--tier"):
        Benchmark(ModelConfig(path=tiny_path), Options(Loop(), tier="2"))


# --------------------------------------------------------------- the command line


class Fake:
    """Takes the place of the benchmark."""

    options: Options
    url: str
    details: dict[str, Any] = {"errors": {}, "interrupted": False}  # noqa: RUF012

    def __init__(self, _: ModelConfig, options: Options) -> None:
        Fake.options = options

    def run(self, url: str) -> Report:
        Fake.url = url
        return Report("serve", False, {}, {}, dict(Fake.details))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(serve, "Benchmark", Fake)

    def run(*arguments: str) -> Any:
        out = str(tmp_path / "serve.json")
        return CliRunner().invoke(cli.app, ["bench", "serve", *arguments, "--json", out])

    return run


def test_the_command_takes_vllms_spelling(command: Callable[..., Any], tmp_path: Path) -> None:
    path = str(mooncake(tmp_path / "t.jsonl", [row(0, [1])]))
    done = command(
        "--goodput", "ttft:200", "tpot:50", "--trace", path, "--num", "5", "--request-rate", "inf"
    )
    assert done.exit_code == 0, done.output
    assert Fake.options.targets == {"ttft": 200.0, "tpot": 50.0}
    assert isinstance(Fake.options.load, Replay)
    assert (Fake.options.load.num, Fake.options.load.request_rate) == (5, float("inf"))
    assert Fake.url == f"http://127.0.0.1:{Config().gateway.port}"
    assert "200" not in repr(Options(Loop(), api_key="200")), "a key is in no message"


@pytest.mark.parametrize("option", ["length-scale", "time-scale", "think-time", "timeout"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(command: Callable[..., Any], option: str, value: str) -> None:
    done = command(f"--{option}", value)
    assert done.exit_code == 2
    assert f"Invalid value for '--{option}'" in done.output
    assert command("--request-rate", "nan").exit_code == 2


def test_a_model_that_is_named_may_be_called_otherwise(command: Callable[..., Any]) -> None:
    assert command().exit_code == 0
    assert not Fake.options.any_model
    assert command("--model", "demo").exit_code == 0
    assert Fake.options.any_model


def test_a_service_is_started_on_demand(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Config] = []

    @contextmanager
    def running(config: Config) -> Iterator[Config]:
        started.append(config)
        yield config

    monkeypatch.setattr(cli, "running", running)
    assert command("--start", "--clients", "3").exit_code == 0
    assert Fake.url == f"http://127.0.0.1:{started[0].gateway.port}"
    assert started[0].gateway.port != Config().gateway.port
    assert isinstance(Fake.options.load, Loop)
    assert Fake.options.load.clients == 3
    assert isinstance(command("--start", "--url", "http://x").exception, ConfigError)
    assert isinstance(command("--request-rate", "1").exception, ConfigError)
    assert len(started) == 1


def test_an_interrupted_run_ends_like_one(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "details", {"errors": {"timeout": 2}, "interrupted": True})
    done = command()
    assert done.exit_code == 130
    assert "failed with timeout: 2" in done.output
