"""Prometheus metrics of the gateway. Numbers only, never text of requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from criticalkv.shared.cache.quality import Quality
from criticalkv.shared.requests import DecodeEnd, DecodeStart

_PREFIX = "criticalkv_gateway_"
# Upper bounds of the histograms' buckets.
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PART_SECONDS = (0.001, 0.0025, 0.005, *REQUEST_SECONDS)
TOKEN_SECONDS = (
    *(0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30),
)
SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
MASS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1)
BOUND = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
NATS = (1e-6, 1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """One registry per gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count_requests()
        self._time_requests()
        self._watch_quality()
        self._watch_decode()

    def _count_requests(self) -> None:
        self._requests = self._counter("requests", "Answers by route and status", "route", "status")
        self.running = Gauge(_PREFIX + "running", "Requests in progress", registry=self.registry)
        self._tokens = self._counter(
            "tokens", "Tokens: prompt, cached (of the prompt), prefilled, generated", "kind"
        )
        self._background = self._counter(
            "background",
            "Background work (refine, fold): queued, dropped (no room, replaced, stopped), "
            "retried, done, unused (the context went on or was deleted: no handle was led to "
            "the better node), failed",
            "kind",
            "event",
        )

    def _time_requests(self) -> None:
        self._ttft = self._histogram(
            "ttft_seconds", "Receipt to first token, store pull included", REQUEST_SECONDS
        )
        self._itl = self._histogram(
            "itl_seconds",
            "Gap between two deliveries of new tokens of a choice; every gap of every choice",
            TOKEN_SECONDS,
        )
        self._tpot = self._histogram(
            "tpot_seconds",
            "Per choice: first to last token / (tokens - 1), which is (E2E - TTFT) / (n - 1)",
            TOKEN_SECONDS,
        )
        self._e2e = self._histogram("e2e_seconds", "Receipt to last token", REQUEST_SECONDS)
        self._prefill = self._histogram("prefill_seconds", "Prefill calls", REQUEST_SECONDS)

    def _watch_quality(self) -> None:
        """Of every node that a prefill computed, at its highest tier."""
        self._mass = self._histogram(
            "retained_mass_ratio",
            "Attention of a context's last queries that its node keeps, mean over query heads",
            MASS,
        )
        self._theta = self._histogram(
            "theta_ratio",
            "Bound on what eviction does to an attention output / its largest size, mean",
            BOUND,
        )
        self._low_mass = self._histogram(
            "low_mass_ratio", "Query heads of a node that keep at most half of their mass", RATIO
        )
        self._kl = self._histogram(
            "codec_kl_nats", "KL per token from a node's kept entries to the quantized ones", NATS
        )

    def _watch_decode(self) -> None:
        self._queue = self._histogram(
            "queue_seconds", "Wait for a slot and for room in decode, per choice", PART_SECONDS
        )
        self._pull = self._histogram(
            "pull_seconds",
            "In the store before the first forward, of turns over a stored context",
            PART_SECONDS,
        )
        self._question = self._histogram(
            "question_seconds",
            "Decode's forward over a turn's new prompt tokens, to the first token's logits",
            PART_SECONDS,
        )
        self._batch = self._histogram(
            "batch_sequences",
            "Sequences per decode step, mean over the steps of a choice",
            SEQUENCES,
        )
        self._pool = self._histogram(
            "pool_used_ratio", "Bytes in use / decode's KV pool, at the end of a choice", RATIO
        )
        self._preemptions = self._counter(
            "preemptions", "Times that a choice made room for others in decode's KV pool"
        )
        self._contexts = self._counter(
            "context_reads",
            "Turns over a stored context: held (the replica had all of it), pulled",
            "result",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

    def background(self, kind: str, event: str) -> None:
        """Count an event of background work."""
        self._background.labels(kind, event).inc()

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer."""
        self._requests.labels(route, str(status)).inc()

    def prefilled(self, tokens: int, milliseconds: float) -> None:
        """Count a prefill call."""
        self._prefill.observe(milliseconds / 1000)
        self._tokens.labels("prefilled").inc(tokens)

    def quality(self, quality: Quality) -> None:
        """Record what a prefill measured of its node."""
        if quality.tiers:
            top = quality.tiers[-1]
            self._mass.observe(top.retained_mass)
            self._theta.observe(top.theta)
            self._low_mass.observe(top.low_mass_share)
        if quality.codec and quality.codec.kl is not None:
            self._kl.observe(quality.codec.kl)

    def first_token(self, seconds: float) -> None:
        """Record a time to first token."""
        self._ttft.observe(seconds)

    def gap(self, seconds: float) -> None:
        """Record a gap between two deliveries of a choice's tokens."""
        self._itl.observe(seconds)

    def per_token(self, seconds: float) -> None:
        """Record a finished choice's time per output token."""
        self._tpot.observe(seconds)

    def choice(self, start: DecodeStart, end: DecodeEnd, *, has_parent: bool) -> None:
        """Record what decode says of a finished choice.

        What the choices of a turn share, the pull and the prompt's forward, counts once.
        """
        self._queue.observe(start.queue_ms / 1000)
        self._batch.observe(end.batch_size)
        self._pool.observe(end.pool_used)
        self._preemptions.inc(end.preemptions)
        if end.choice:
            return
        self._question.observe(end.question_ms / 1000)
        if has_parent:
            self._pull.observe(start.store_ms / 1000)
            self._contexts.labels("pulled" if start.bytes_pulled else "held").inc()

    def turn(self, *, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record a finished chat turn."""
        self._e2e.observe(seconds)
        for kind, count in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(count)

    @property
    def in_progress(self) -> bool:
        """Whether requests are in progress."""
        return bool(self.registry.get_sample_value(_PREFIX + "running"))

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
