"""A policy against its base: in how many heads is the perturbation lower, and by how much?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from criticalkv.kernels import ops
from criticalkv.services.analysis.study import Cell, Queries, Study
from criticalkv.services.analysis.variants import critical_of
from criticalkv.services.evaluation.case import Case
from criticalkv.shared.eviction.policy import Policy
from criticalkv.shared.model.loader import LoadedModel


def lower_share(base: Tensor, other: Tensor) -> float:
    """Return the share of heads in which `other` perturbs less; equal ones do not count."""
    return float((other < base).double().mean())


def reduction(base: Tensor, other: Tensor) -> Tensor:
    """Return 1 − other ÷ base, head by head; 0 where the base perturbs nothing."""
    return torch.where(base > 0, 1 - other / base.where(base > 0, 1), 0.0)


def of_kv_heads(figure: Tensor, group_size: int) -> Tensor:
    """Return means over query heads that share a KV head: [layers, num_kv_heads]."""
    means: Tensor = figure.unflatten(-1, (-1, group_size)).mean(-1)
    return means


def compare(
    study: Study, base: str, other: str, tier: str, queries: Queries, norm: ops.Norm = "l1"
) -> tuple[Tensor, Tensor]:
    """Return both policies' mean actual perturbation, fp64 [layers, num_q_heads] each."""
    figure = f"actual_{norm}"
    return (
        study.mean(Cell(base, tier, queries), figure),
        study.mean(Cell(other, tier, queries), figure),
    )


def perturbation_lower_share(
    model: LoadedModel,
    base: str,
    tiers: Sequence[str],
    cases: Sequence[Case],
    queries: Queries = "after",
    options: Mapping[str, str] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Measure in how many heads CriticalKV perturbs less than its base method does.

    Args:
        model: whose heads.
        base: a policy with one stage, such as "snapkv".
        tiers: kept fractions.
        cases: texts; a head's perturbation is the mean over them, L1.
        queries: whose outputs: those after the context, or the context's last.
        options: of the CriticalKV form, such as {"eps": "0"}; None: its defaults.
        tick: called after each text.

    Returns:
        tier → share of query heads, over all layers that evict.

    Raises:
        PolicyError: if the base does not go with two stages.
    """
    policy = Policy.parse(base)
    study = Study(model, {"base": policy, "critical": critical_of(policy, options)}, tiers)
    for case in cases:
        study.add(case)
        tick()
    return {t: lower_share(*compare(study, "base", "critical", t, queries)) for t in tiers}
