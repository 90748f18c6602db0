"""When the tokens of a turn came, and what that makes: TTFT, ITL, TPOT, E2E."""

from __future__ import annotations

from criticalkv.services.gateway.metrics import Metrics


class Pace:
    """Times one turn; all times are perf_counter's.

    Args:
        metrics: told every figure as soon as it is known.
        received: when the request came.
    """

    def __init__(self, metrics: Metrics, received: float) -> None:
        self.ttft: float | None = None
        self._metrics = metrics
        self._received = received
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}

    @property
    def e2e(self) -> float:
        """Seconds from the receipt to the last token of all choices."""
        return max(self._last.values()) - self._received

    def told(self, choice: int, at: float) -> None:
        """Take note of new tokens; those that come together have no gap between them."""
        if choice in self._last:
            self._metrics.gap(at - self._last[choice])
        self._begin(choice, at)
        self._last[choice] = at

    def ended(self, choice: int, tokens: int, at: float) -> None:
        """Take note of a choice's end, which comes after its last token, when all is stored."""
        self._begin(choice, at)
        last, first = self._last.setdefault(choice, at), self._first[choice]
        # Tokens that came in one piece, or not at all, have no pace.
        if tokens > 1 and last > first:
            self._metrics.per_token((last - first) / (tokens - 1))

    def _begin(self, choice: int, at: float) -> None:
        self._first.setdefault(choice, at)
        if self.ttft is None:
            self.ttft = at - self._received
            self._metrics.first_token(self.ttft)
