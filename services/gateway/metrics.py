"""Prometheus metrics of the gateway. Numbers only, never text of requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One registry per gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "criticalkv_gateway_"
        self._requests = Counter(
            name + "requests",
            "Answers by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self.running = Gauge(name + "running", "Requests in progress", registry=self.registry)
        self._ttft = Histogram(
            name + "ttft_seconds",
            "Receipt to first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._e2e = Histogram(
            name + "e2e_seconds",
            "Receipt to last token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prefill = Histogram(
            name + "prefill_seconds", "Prefill calls", buckets=_SECONDS, registry=self.registry
        )
        self._tokens = Counter(
            name + "tokens",
            "Tokens: prompt, cached (of the prompt), prefilled, generated",
            ["kind"],
            registry=self.registry,
        )
        self._background = Counter(
            name + "background",
            "Background work (refine, fold): queued, dropped (no room, replaced, stopped), "
            "retried, done, unused (the context went on or was deleted: no handle was led to "
            "the better node), failed",
            ["kind", "event"],
            registry=self.registry,
        )

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

    def first_token(self, seconds: float) -> None:
        """Record a time to first token."""
        self._ttft.observe(seconds)

    def turn(self, *, seconds: float, prompt: int, cached: int, generated: int) -> None:
        """Record a finished chat turn."""
        self._e2e.observe(seconds)
        for kind, count in (("prompt", prompt), ("cached", cached), ("generated", generated)):
            self._tokens.labels(kind).inc(count)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
