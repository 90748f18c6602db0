"""The store: throughput of both read paths, metadata at scale, recovery, hit rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from criticalkv.services.bench import cancelled_calls, store_path, store_recovery, store_replay
from criticalkv.services.bench import store_stat as stat
from criticalkv.services.bench.external_store import ExternalStore
from criticalkv.services.bench.store_path import Case, Measured
from criticalkv.services.bench.trace import MOONCAKE_FILE, read_blocks
from criticalkv.shared.report import Report

HEADLINE_MIB = 64
MEANING = {
    "direct_get_vs_socket_64m": "GET GB/s of a 64 MiB node straight from Valkey, verified ÷ a "
    "plain copy of as many bytes over a unix socket into one buffer; 1 stream; ratio, higher "
    "is better",
    "grpc_get_vs_bare_grpc_64m": "GET GB/s of a 64 MiB node through the store, verified ÷ a "
    "bare gRPC stream of the same frames without Redis and checks; 1 stream; ratio, higher is "
    "better",
    "grpc_put_vs_bare_grpc_64m": "PUT GB/s of a 64 MiB node, published ÷ a bare gRPC stream of "
    "the same frames without Redis and checks; 1 stream; ratio, higher is better",
    "hit_ratio_vs_lru": "share of the blocks wanted that are read at tier 0.2 or above, with "
    "all blocks before them: the store's own order, which shrinks before it evicts ÷ plain "
    "LRU, at equal bytes, both storing up to 0.4; ratio, higher is better",
}


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        cases: of throughput.
        nodes: present, for StatNodes.
        calls: of each kind.
        kills: of each kind.
        cancels: calls begun and cancelled.
        requests: of the trace.
        share: of the trace's distinct blocks that fit in memory.
    """

    cases: tuple[Case, ...]
    nodes: tuple[int, ...]
    calls: int
    kills: int
    cancels: int
    requests: int
    share: float


FULL = Extent(
    cases=(
        Case(1, 1, 61),
        Case(1, 4, 31),
        Case(16, 1, 31),
        Case(16, 4, 15),
        Case(64, 1, 31),
        Case(64, 4, 9),
        Case(512, 1, 7),
        Case(512, 4, 3),
    ),
    nodes=(10_000, 100_000),
    calls=2000,
    kills=5,
    cancels=5000,
    requests=1000,
    share=0.2,
)
QUICK = Extent(
    cases=(Case(1, 4, 3), Case(64, 1, 3)),
    nodes=(500, 1000),
    calls=100,
    kills=1,
    cancels=200,
    requests=4,
    share=0.2,
)


def run(*, quick: bool, data: Path | None) -> Report:
    """Measure everything and return the report.

    Args:
        quick: small and few.
        data: folder with the Mooncake trace; without it the hit rate is not measured.
    """
    extent = QUICK if quick else FULL
    report = Report("store", quick, dict.fromkeys(MEANING), MEANING)
    with Progress(console=Console(stderr=True)) as progress:
        step = progress.add_task("store", total=len(extent.cases) + 4)
        _throughput(report, extent, lambda: progress.advance(step))
        with ExternalStore() as store:
            report.details["stat_nodes"] = stat.measure(store, extent.nodes, extent.calls)
            progress.advance(step)
            report.details["recovery"] = store_recovery.measure(store, extent.kills)
            progress.advance(step)
        report.details["connect_and_cancel"] = cancelled_calls.measure(extent.cancels)
        progress.advance(step)
        report.details["replay"] = _replay(report, extent, data)
        progress.advance(step)
    return report


def _throughput(report: Report, extent: Extent, tick: Any) -> None:
    most = max(case.mib * case.streams for case in extent.cases)
    with store_path.running(most) as paths:
        for case in extent.cases:
            found = paths.measure(case)
            name = f"{case.mib}_mib_{case.streams}_streams"
            report.details[name] = _described(case, found)
            report.samples[name] = found.gb_s
            if (case.mib, case.streams) == (HEADLINE_MIB, 1):
                for key, ratio in found.ratios().items():
                    report.headline[f"{key}_64m"] = ratio
            tick()


def _described(case: Case, found: Measured) -> dict[str, Any]:
    return {
        "rounds": case.rounds,
        "gb_s": found.medians(),
        "ratios": found.ratios(),
        "cpu_s_per_gb": found.cpu_s_per_gb,
        "peak_mib": found.peak_mib,
    }


def _replay(report: Report, extent: Extent, data: Path | None) -> dict[str, Any]:
    trace = read_blocks(data, extent.requests)
    if trace is None:
        return {"reason": f"no {MOONCAKE_FILE} in --data or CRITICALKV_DATA"}
    found = store_replay.measure(trace, extent.share)
    report.headline["hit_ratio_vs_lru"] = found["ratio"]
    return found
