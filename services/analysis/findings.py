"""What a study found, as a report: tables, and the maps that plots are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from criticalkv.services.analysis.comparison import compare, lower_share, of_kv_heads, reduction
from criticalkv.services.analysis.query_rows import NORMS
from criticalkv.services.analysis.study import HALF, QUERIES, Cell, Queries, Study
from criticalkv.shared.report import Report

HEADLINE: Queries = "after"
DIGITS = 6
MEANING = {
    "lower_share": "share of query heads whose mean L1 perturbation is lower under {other} than "
    "under {base}, {tier} kept; ratio, higher is better",
    "reduction": "1 − mean over heads of the L1 perturbation under {other} ÷ under {base}, {tier} "
    "kept; ratio, higher is better",
    "first_stage_over_half": "share of query heads whose first stage holds σ > ½ on average, "
    "{other}, {tier} kept; ratio, higher is better",
}
DEFINITIONS = {
    "after": "queries after the context that predict the answer; the context was compressed "
    "without knowing them",
    "window": "the context's last queries, which window scorers look at",
    "actual": "‖o − ô‖ of a query head's output after W_O, survivors renormalised",
    "theta": "C − (2 − 1/σ)·S, Theorem 3.3",
    "attention_only": "C − (2σ − 1)·min‖𝓥‖, or + (1 − 2σ)·max‖𝓥‖ if σ ≤ ½, Theorem C.1",
    "layer": "‖Σ_heads (o − ô)‖",
    "sigma": "kept share of unpooled attention; first_: of the first stage",
}


def report_of(study: Study, name: str, bases: Mapping[str, str], details: dict[str, Any]) -> Report:
    """Sum a study up.

    Args:
        study: with at least one text.
        name: of the report.
        bases: policy → what it is compared with, both by their names in the study.
        details: settings, to be kept with the tables.
    """
    headline, meaning = _headline(study, bases)
    return Report(
        name,
        quick=False,
        headline=headline,
        meaning=meaning,
        details={
            **details,
            "definitions": DEFINITIONS,
            "policies": {name: policy.canonical() for name, policy in study.policies.items()},
            "layers": list(study.layers),
            "queries_checked": study.checked,
            "bounds_violated": study.violations,
            "table": _nested(study, _row),
            "against_base": {other: _against(study, base, other) for other, base in bases.items()},
        },
        samples={name: _maps(study, name) for name in ("actual_l1", "sigma", "first_sigma")},
    )


def listed(values: Tensor) -> Any:
    """Return a tensor as nested lists of rounded numbers."""
    return values.double().mul(10**DIGITS).round().div(10**DIGITS).tolist()


def _headline(
    study: Study, bases: Mapping[str, str]
) -> tuple[dict[str, float | None], dict[str, str]]:
    headline: dict[str, float | None] = {"bounds_violated": float(study.violations)}
    meaning = {"bounds_violated": "queries whose perturbation exceeds its bound; must be 0"}
    for other, base in bases.items():
        for tier in study.tiers:
            found = _pair(study, base, other, tier, HEADLINE)
            found["first_stage_over_half"] = _row(study, Cell(other, tier, HEADLINE)).get(
                "first_over_half"
            )
            for key, text in MEANING.items():
                if found.get(key) is not None:
                    headline[f"{key} {other} {tier}"] = found[key]
                    meaning[f"{key} {other} {tier}"] = text.format(
                        other=other, base=base, tier=tier
                    )
    return headline, meaning


def _maps(study: Study, figure: str) -> dict[str, Any]:
    """The figure of every layer and query head; without policies that have no first stage."""
    found = _nested(
        study,
        lambda of, cell: listed(of.mean(cell, figure)) if figure in of.found[cell][0] else None,
    )
    return {
        name: tiers
        for name, tiers in found.items()
        if all(grid is not None for of in tiers.values() for grid in of.values())
    }


def _nested(study: Study, of: Callable[[Study, Cell], Any]) -> dict[str, Any]:
    """policy → tier → queries → what `of` says of the cell."""
    return {
        name: {
            tier: {queries: of(study, Cell(name, tier, queries)) for queries in QUERIES}
            for tier in study.tiers
        }
        for name in study.policies
    }


def _row(study: Study, cell: Cell) -> dict[str, float]:
    """Means over heads and layers: the columns of the paper's Table 9, and σ."""
    figures = study.found[cell][0]
    row = {name: float(study.mean(cell, name).mean()) for name in figures}
    for prefix in ("", "first_"):
        if f"{prefix}sigma" in figures:
            sigma = study.mean(cell, f"{prefix}sigma")
            row[f"{prefix}over_half"] = float((sigma > HALF).double().mean())
    return row


def _against(study: Study, base: str, other: str) -> dict[str, Any]:
    return {
        tier: {queries: _pair(study, base, other, tier, queries) for queries in QUERIES}
        for tier in study.tiers
    }


def _pair(
    study: Study, base: str, other: str, tier: str, queries: Queries
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for norm in NORMS:
        before, after = compare(study, base, other, tier, queries, norm)
        suffix = "" if norm == "l1" else f"_{norm}"
        shared = [of_kv_heads(x, study.model.spec.group_size) for x in (before, after)]
        whole = [study.mean(Cell(x, tier, queries), f"layer_{norm}") for x in (base, other)]
        found |= {
            f"lower_share{suffix}": lower_share(before, after),
            f"kv_heads_lower_share{suffix}": lower_share(shared[0], shared[1]),
            f"equal_share{suffix}": float((before == after).double().mean()),
            f"reduction{suffix}": float(reduction(before.mean(), after.mean())),
            f"layers_lower_share{suffix}": lower_share(whole[0], whole[1]),
            f"layer_reduction{suffix}": float(reduction(whole[0].mean(), whole[1].mean())),
        }
    return found
