"""What a load run's records add up to; names as in `vllm bench serve`.

TTFT and ITL are of text: a chunk that only names the assistant's role is no first token. A
complete answer ends with its last chunk that has choices, not with the one that has usage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from criticalkv.services.bench.load_client import Record
from criticalkv.shared.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
TARGETS = ("ttft", "tpot", "e2el")
MEANING = {
    "request_throughput": "complete answers ÷ duration of the run; 1/s, higher is better",
    "request_goodput": "complete answers within every target of --goodput ÷ duration; 1/s, "
    "higher is better; null without targets",
    "output_throughput": "tokens of complete answers ÷ duration; 1/s, higher is better",
    "total_token_throughput": "prompt and answer tokens of complete answers ÷ duration; 1/s, "
    "higher is better",
    "p50_ttft_ms": "time from sending a request to the first text of its answer (not to the "
    "chunk with its role), median; ms, lower is better",
    "p99_ttft_ms": "the same, 99th percentile; ms, lower is better",
    "p50_tpot_ms": "(time to the answer's end − time to its first text) ÷ (its tokens − 1), "
    "median over answers; ms, lower is better",
    "p99_tpot_ms": "the same, 99th percentile; ms, lower is better",
    "p50_e2el_ms": "time from sending a request to the last chunk of its answer (not the one "
    "with usage), median; ms, lower is better",
    "p99_e2el_ms": "the same, 99th percentile; ms, lower is better",
    "hit_rate": "complete answers whose whole context was stored before ÷ those with a context; "
    "share, higher is better",
    "cached_token_share": "prompt tokens that were stored before ÷ prompt tokens of complete "
    "answers; share, higher is better",
    "failed_share": "requests without a complete answer ÷ requests sent; share, lower is better",
}


def goodput_targets(pairs: Sequence[str], more: Sequence[str] = ()) -> dict[str, float]:
    """Read targets like "ttft:3000", in ms.

    Args:
        more: what followed the first pair, as vLLM spells several.

    Raises:
        ConfigError: naming the one that is wrong.
    """
    if more and not pairs:
        raise ConfigError(f"unexpected argument {more[0]!r}", param="goodput")
    targets = {}
    for pair in (*pairs, *more):
        name, _, limit = pair.partition(":")
        try:
            targets[name] = float(limit)
        except ValueError:
            targets[name] = -1.0
        if name not in TARGETS or not 0 <= targets[name] < math.inf:
            raise ConfigError(
                f"--goodput {pair!r} is not KEY:MILLISECONDS with one of {', '.join(TARGETS)}",
                param="goodput",
            )
    return targets


def figures(
    records: Sequence[Record], duration_s: float, targets: Mapping[str, float]
) -> dict[str, Any]:
    """Return every figure of a run.

    Args:
        records: of all requests sent.
        duration_s: of the whole run.
        targets: of goodput, ms.
    """
    done = [record for record in records if record.error is None]
    per_s = 1 / duration_s if duration_s else 0.0
    inputs = sum(record.prompt_tokens for record in done)
    outputs = sum(record.output_tokens for record in done)
    good = sum(_meets(record, targets) for record in done)
    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) * per_s,
        "request_goodput": good * per_s if targets else None,
        "output_throughput": outputs * per_s,
        "total_token_throughput": (inputs + outputs) * per_s,
        "max_output_tokens_per_s": _most_in_a_second(done),
        "max_concurrent_requests": _most_at_once(records),
        **_spread("ttft", [record.ttft_s for record in done]),
        **_spread("tpot", [record.tpot_s for record in done]),
        **_spread("itl", [gap for record in done for gap in record.itls_s]),
        **_spread("e2el", [record.e2e_s for record in done]),
        **_spread("client_queue_time", [record.queue_s for record in done]),
        **_of_the_store(done),
        "failed_share": (len(records) - len(done)) / len(records) if records else None,
        "errors": dict(Counter(record.error for record in records if record.error)),
    }


def samples(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the figures of each request, in the order in which they were sent; seconds."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [_rounded(record.ttft_s) for record in records],
        "itls": [[_rounded(gap) for gap in record.itls_s] for record in records],
        "latencies": [_rounded(record.e2e_s) for record in records],
        "start_times": [_rounded(record.sent_s) for record in records],
        "queue_times": [_rounded(record.queue_s) for record in records],
        "errors": [record.error or "" for record in records],
        "context_lens": [record.ask.context_tokens for record in records],
        "cached_lens": [record.cached_tokens for record in records],
        "bytes_pulled": [_pulled(record) for record in records],
        "warm": [record.is_warm for record in records],
    }


def _of_the_store(done: Sequence[Record]) -> dict[str, Any]:
    """What the store had of the answered requests."""
    asked = [record for record in done if record.ask.context is not None]
    warm = [record for record in asked if record.is_warm]
    inputs = sum(record.prompt_tokens for record in done)
    return {
        "requests_with_context": len(asked),
        "hit_rate": _share(record.is_hit for record in asked),
        "requests_with_warm_context": len(warm),
        "warm_hit_rate": _share(record.is_hit for record in warm),
        "cached_token_share": sum(r.cached_tokens for r in done) / inputs if inputs else None,
        "total_cached_tokens": sum(record.cached_tokens for record in done),
        "total_bytes_pulled": sum(map(_pulled, done)),
        "tiers_served": dict(Counter(str(record.extension.get("tier")) for record in asked)),
    }


def _meets(record: Record, targets: Mapping[str, float]) -> bool:
    """Whether an answer meets every target; one of a single token has no TPOT to miss."""
    took = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2e_s}
    return all((took[name] or 0.0) * 1000 <= limit for name, limit in targets.items())


def _spread(name: str, seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles in ms; None of nothing."""
    values = 1000 * np.array([value for value in seconds if value is not None])
    keys = [f"{of}_{name}_ms" for of in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    if not len(values):
        return dict.fromkeys(keys)
    found = (values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES))
    return dict(zip(keys, map(float, found), strict=True))


def _most_at_once(records: Iterable[Record]) -> int:
    """Return how many requests ran at the same time; one that ends makes room at once."""
    changes = [
        change
        for record in records
        for change in ((record.sent_s, 1), (record.sent_s + record.e2e_s, -1))
    ]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _most_in_a_second(done: Sequence[Record]) -> float:
    """Return the pieces of text that came in the run's best second, counted from its first."""
    times = [
        at
        for record in done
        if record.ttft_s is not None
        for at in accumulate([record.sent_s + record.ttft_s, *record.itls_s])
    ]
    first = min((record.sent_s for record in done), default=0.0)
    return float(max(Counter(int(at - first) for at in times).values(), default=0))


def _share(hits: Iterable[bool]) -> float | None:
    found = list(hits)
    return sum(found) / len(found) if found else None


def _pulled(record: Record) -> int:
    return int(record.extension.get("bytes_pulled") or 0)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
