"""How many replicas prefill and decode need: policies for Ray Serve's autoscaler.

Serve applies its own delays and bounds to what a policy wants. Runs in Serve's controller,
pickled by value: imports nothing of ours, and no torch. Knows replicas only by the numbers
that they report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

ROUNDING = 1e-9  # what floats add to a demand starts no replica
Report = dict[str, float]
Demand = Callable[[list[Report], float], float]


class DecodePolicy:
    """Scale on the scarcest of KV room, places in the batch and tokens to run.

    Args:
        target_kv_share: of a replica's pool, for running and waiting sequences.
        target_seq_share: of `max_num_seqs`, running and waiting.
        target_waiting_tokens: prompt tokens not yet run, per replica.
        max_num_seqs: sequences that a replica decodes together.
    """

    NAMES = (
        "pool_bytes",
        "used_bytes",
        "queued_bytes",
        "running",
        "waiting",
        "waiting_tokens",
    )

    def __init__(
        self,
        target_kv_share: float,
        target_seq_share: float,
        target_waiting_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._kv_share = target_kv_share
        self._seqs = target_seq_share * max_num_seqs
        self._tokens = target_waiting_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas; Serve calls it again and again."""
        return wanted(context, self.NAMES, self.demand), {}

    def demand(self, reports: list[Report], queued: float) -> float:
        """Return how many replicas the reported load fills up to the targets.

        Args:
            reports: one for each replica that told its load.
            queued: requests that no replica has accepted yet; of these only the places
                are known.
        """
        pools = [report["pool_bytes"] for report in reports]
        pool = sum(pools) / len(pools) if pools else 0.0
        return max(
            _ratio(_total(reports, "used_bytes", "queued_bytes"), self._kv_share * pool),
            _ratio(_total(reports, "running", "waiting") + queued, self._seqs),
            _ratio(_total(reports, "waiting_tokens"), self._tokens),
        )


class PrefillPolicy:
    """Scale on the prompt tokens that wait.

    Args:
        target_waiting_tokens: prompt tokens accepted or queued, per replica.
    """

    NAMES = ("waiting", "waiting_tokens")

    def __init__(self, target_waiting_tokens: int) -> None:
        self._tokens = target_waiting_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas; Serve calls it again and again."""
        return wanted(context, self.NAMES, self.demand), {}

    def demand(self, reports: list[Report], queued: float) -> float:
        """Return how many replicas the waiting tokens fill up to the target.

        Args:
            reports: one for each replica that told its load.
            queued: requests that no replica has accepted yet. Requests queue only where
                replicas are full, so they count like the mean of what these hold.
        """
        tokens = _total(reports, "waiting_tokens")
        mean = _ratio(tokens, _total(reports, "waiting"))
        return (tokens + queued * mean) / self._tokens


def wanted(context: AutoscalingContext, names: tuple[str, ...], demand: Demand) -> int:
    """Turn a demand into a number of replicas within the bounds.

    While a replica has not told its load the number does not fall: what is not known
    is not idle. Without any replica it stays as it is; Serve itself begins anew from zero
    as soon as a request waits.
    """
    target: int = context.target_num_replicas
    if not context.running_replicas:
        return _bounded(context, target)
    reports = latest(context.raw_metrics or {}, context.running_replicas, names)
    queued = context.total_queued_requests or 0.0
    number = math.ceil(demand(reports, queued if math.isfinite(queued) else 0.0) - ROUNDING)
    if len(reports) < len(context.running_replicas):
        number = max(number, target)
    return _bounded(context, number)


def _bounded(context: AutoscalingContext, number: int) -> int:
    low: int = context.capacity_adjusted_min_replicas
    high: int = context.capacity_adjusted_max_replicas
    return max(low, min(high, number))


def latest(
    metrics: Mapping[str, Mapping[Any, Any]], replicas: Iterable[Any], names: tuple[str, ...]
) -> list[Report]:
    """Return the last numbers of each running replica that told all of them, and finite.

    Args:
        metrics: Serve's time series, by name and replica.
        replicas: those that run now; what others once told is left out.
        names: what a report consists of.
    """
    reports = []
    for replica in replicas:
        series = [metrics.get(name, {}).get(replica) for name in names]
        values = [float(points[-1].value) for points in series if points]
        if len(values) == len(names) and all(map(math.isfinite, values)):
            reports.append(dict(zip(names, values, strict=True)))
    return reports


def _total(reports: list[Report], *names: str) -> float:
    return sum(report[name] for report in reports for name in names)


def _ratio(amount: float, target: float) -> float:
    """Return 0 where there is no target yet."""
    return amount / target if target > 0 else 0.0
