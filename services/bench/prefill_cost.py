"""What eviction adds to a prefill: seconds of scoring, ranking, packing; memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import Progress

from criticalkv.services.local import LocalEngine
from criticalkv.shared.malloc import trim_malloc
from criticalkv.shared.model.loader import LoadedModel
from criticalkv.shared.python_reference import python_reference
from criticalkv.shared.report import median
from criticalkv.shared.requests import PrefillResult

POLICIES = (
    "snapkv",
    "criticaladakv",
    "criticaladakv:norm=l2",
    "replay+model+relative",
    "default",
)
ROUNDS = 3
STORE_TIER = "0.4"


def measure(model: LoadedModel, lengths: tuple[int, ...], progress: Progress) -> dict[str, Any]:
    """Prefill under each policy, in turns; medians over rounds.

    Returns:
        per length and policy: prefill_s, scoring_s, scoring_over_prefill, peak_mb (the
        process's largest resident set minus what it held before, where Linux says).
    """
    task = progress.add_task("cost", total=len(lengths) * len(POLICIES) * ROUNDS)
    found: dict[str, Any] = {}
    for n in lengths:
        runs: dict[str, list[tuple[PrefillResult, float | None]]] = {p: [] for p in POLICIES}
        for _ in range(ROUNDS):
            for policy in POLICIES:
                runs[policy].append(_once(model, _tokens(model, n), policy))
                progress.advance(task)
        found[str(n)] = {policy: _summary(results) for policy, results in runs.items()}
    return found


def _summary(results: list[tuple[PrefillResult, float | None]]) -> dict[str, float | None]:
    forward = median(r.prefill_ms for r, _ in results) / 1e3
    scoring = median(r.scoring_ms for r, _ in results) / 1e3
    peaks = [peak for _, peak in results if peak is not None]
    return {
        "prefill_s": forward,
        "scoring_s": scoring,
        "scoring_over_prefill": median(r.scoring_ms / r.prefill_ms for r, _ in results),
        "peak_mb": median(peaks) if peaks else None,
    }


def _once(
    model: LoadedModel, ids: tuple[int, ...], policy: str
) -> tuple[PrefillResult, float | None]:
    with LocalEngine(model) as engine:
        before = _reset_peak()
        result = engine.compress_tokens(ids, policy=policy, store_tier=STORE_TIER).prefill
        after = _resident("VmHWM")
    assert result is not None
    return result, None if before is None or after is None else (after - before) / 1024


def _tokens(model: LoadedModel, n: int) -> tuple[int, ...]:
    text = python_reference()
    return tuple(model.chat.encode_content(text[: 8 * n])[:n])


def _reset_peak() -> float | None:
    """Forget the largest resident set so far; return the present one, KiB."""
    trim_malloc()  # or what an earlier run has freed hides what this one needs
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(name: str) -> float | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1])
    return None
