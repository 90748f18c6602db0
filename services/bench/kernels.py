"""Kernels and codecs: what an entry costs in bytes and in error, and each operation's speed.

The GPU's part is infra/bench/gpu.sh, which needs no more than torch, triton and transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from criticalkv.kernels.group_layout import ROWS
from criticalkv.services.analysis.comparison import perturbation_lower_share
from criticalkv.services.bench.codec import closeness
from criticalkv.services.bench.kernel_ops import Shape, measure
from criticalkv.services.evaluation.news import news
from criticalkv.shared.cache.codec import BITS, layout_of
from criticalkv.shared.cache.manifest import ITEMSIZE
from criticalkv.shared.config import Config
from criticalkv.shared.model.loader import LoadedModel, load_model
from criticalkv.shared.progress import counting
from criticalkv.shared.report import Report

MEANING = {
    "int8_bytes_ratio": "stored bytes of an int8 entry in whole groups, scales and positions "
    "included ÷ of a bf16 entry, of this model; ratio, lower is better",
    "int4_bytes_ratio": "the same of int4",
    "int8_same_answers": "share of prompts whose greedy answer of 32 tokens at tier 1 is, token by "
    "token, the unquantized cache's; higher is better, goal 0.95",
    "int8_same_or_tied": "the same where a first other token counts as equal if the unquantized "
    "cache preferred its own by less than 0.02 nats; higher is better",
    "int4_same_answers": "as int8_same_answers, of int4; no goal",
    "int4_same_or_tied": "as int8_same_or_tied, of int4; no goal",
    "int8_kl": "KL from the unquantized cache to int8, nats per answer token, mean over prompts at "
    "tier 1; lower is better",
    "int4_kl": "the same of int4",
    "perturbation_lower_share_snapkv": "share of query heads in which CriticalKV changes the "
    "attention output less (mean L1 over MultiNews rows, queries after the context) than SnapKV, "
    "tier 0.2; higher is better",
}
BASES = ("snapkv", "adakv", "h2o", "tova")
TIERS = ("0.1", "0.2", "0.4")
HEADLINE_TIER = "0.2"
MAX_NEWS_TOKENS = 1500


def run(config: Config, *, quick: bool, threads: int, data: Path | None) -> Report:
    """Measure everything that needs no GPU.

    Args:
        config: model.
        quick: few and small; not to be compared.
        threads: of torch.
        data: folder with news and essays.
    """
    torch.set_num_threads(threads)
    model = load_model(config.model)
    size = _Size.of(quick)
    report = Report("kernels", quick, dict.fromkeys(MEANING), MEANING)
    with counting() as progress:
        task = progress.add_task("Operations", total=None)
        operations = measure(size.shape, size.repeats, lambda: progress.advance(task))
        progress.update(task, description="Codecs")
        found = closeness(
            model,
            data=data,
            contexts=size.contexts,
            questions=size.questions,
            tokens=size.tokens,
        )
        progress.advance(task)
        progress.update(task, description="Perturbation")
        shares = _shares(model, data, size.rows, lambda: progress.advance(task))
    report.headline |= _bytes(model) | _codecs(found)
    report.headline["perturbation_lower_share_snapkv"] = shares.get("snapkv", {}).get(HEADLINE_TIER)
    report.details = {"threads": threads, "size": asdict(size)}
    report.details |= {"operations": operations, "codecs": found, "perturbation_lower": shares}
    return report


@dataclass(frozen=True)
class _Size:
    """How much is measured: operations, prompts over contexts, and rows of news."""

    shape: Shape
    repeats: int
    contexts: int
    questions: int
    tokens: int
    rows: int

    @classmethod
    def of(cls, quick: bool) -> _Size:
        """Return the full size, or a quick one."""
        if quick:
            shape = Shape(tokens=512, width=512)
            return cls(shape=shape, repeats=3, contexts=2, questions=2, tokens=512, rows=1)
        return cls(shape=Shape(), repeats=7, contexts=10, questions=10, tokens=1024, rows=5)


def _bytes(model: LoadedModel) -> dict[str, float]:
    spec, out = model.spec, {}
    raw = 2 * spec.head_dim * ITEMSIZE["bfloat16"] + 4
    for codec in BITS:
        layout = layout_of(codec, spec.head_dim)
        assert layout is not None
        out[f"{codec}_bytes_ratio"] = (
            (ROWS * layout.wire_row_bytes + layout.wire_group_bytes) / ROWS / raw
        )
    return out


def _codecs(found: dict[str, Any]) -> dict[str, float]:
    out = {}
    for codec, samples in found["codecs"].items():
        out[f"{codec}_kl"] = samples["kl"]["mean"]
        out[f"{codec}_same_answers"] = samples["same"]["mean"]
        out[f"{codec}_same_or_tied"] = samples["same_or_tied"]["mean"]
    return out


def _shares(model: LoadedModel, data: Path | None, rows: int, tick: Any) -> dict[str, Any]:
    """Share of heads that CriticalKV perturbs less, by base policy and tier."""
    cases = list(islice(news(model.chat, data, MAX_NEWS_TOKENS), rows))
    if not cases:
        return {}
    return {base: perturbation_lower_share(model, base, TIERS, cases, tick=tick) for base in BASES}
