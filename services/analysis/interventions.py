"""Interventions of the command line: masking, its placebo, sinks and flat heads, as reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from criticalkv.services.analysis.attended import Attended, Watched, attended
from criticalkv.services.analysis.findings import listed
from criticalkv.services.analysis.flat import flatness
from criticalkv.services.analysis.masking import Mask, layer_rows, masked_forward
from criticalkv.services.analysis.placebo import find_placebo
from criticalkv.services.analysis.renormalisation import residual, surviving_mass
from criticalkv.services.analysis.sink_scores import shares, sink_scores
from criticalkv.services.analysis.span import Span
from criticalkv.services.analysis.strength import strength, token_strength
from criticalkv.services.analysis.subject import Subject
from criticalkv.shared.model.attention import LayerCall
from criticalkv.shared.report import Report

TOP = 10
MEANING = {
    "kl_mean": "mean over queries of KL(untouched ‖ masked) of the next token; nats",
    "kl_max": "the greatest of them; nats",
    "top1_changed": "queries whose likeliest next token is another ÷ all",
    "delta_theta": "Σ A_i‖𝓥_i‖₁ of the span over chosen heads and queries; for order only",
    "mass": "attention on the span ÷ all, mean over chosen heads and queries",
    "inflation": "geometric mean of 1 / Σ N A, by which each survivor's attention grows",
    "residual": "max |A'·Σ N A − N ⊙ A| within a layer; rounding",
    "gap": "|Δθ of the placebo − Δθ of the span| ÷ Δθ of the span; lower is better",
    "matched": "1 if the gap is within the tolerance, else 0",
    "delta_theta_target": "Δθ of the span, summed over chosen heads and queries",
    "delta_theta_placebo": "Δθ of the placebo",
    "kl_target": "kl_mean of masking the span",
    "kl_placebo": "kl_mean of masking the placebo",
    "sink_mass_share": "share of the strongest token by mass, mean over chosen heads",
    "sink_value_share": "the same token's share of mass · ‖𝓥‖₁",
    "led_by_mass": "chosen heads in which that token is first by mass ÷ all",
    "led_by_value": "chosen heads in which it is first by mass · ‖𝓥‖₁ ÷ all",
    "flagged": "chosen heads with flat attention",
    "flagged_share": "of all chosen heads",
    "flagged_layer_0": "of them, those in layer 0",
}


class Effect(NamedTuple):
    """What a mask does to predictions: KL in nats, and whether the likeliest changed; [queries]."""

    kl: Tensor
    changed: Tensor


def effect(subject: Subject, plain: Tensor, mask: Mask, first: int, look: Any = None) -> Effect:
    """Run under a mask and compare with the untouched logits from `first` on."""
    logits = masked_forward(subject.model, subject.ids, mask, logits_from=first, look=look)
    before, after = plain.log_softmax(-1), logits.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    return Effect(kl.cpu(), (plain.argmax(-1) != logits.argmax(-1)).cpu())


def mask(
    subject: Subject, span: Span, *, cached: bool = False, renormalised: bool = True
) -> Report:
    """Mask a span and see what becomes of attention and predictions.

    Args:
        subject: what to run.
        span: keys to hide.
        cached: hide them from the queries that count alone: other tokens have seen them.
        renormalised: see `Mask`.

    Raises:
        ConfigError: if no token follows the span.
    """
    first = subject.first_after(span)
    plain, found = _untouched(subject, first)
    hidden = Mask(span, subject.heads, first if cached else None, renormalised)
    undone = _Undone(hidden, first)
    done = effect(subject, plain, hidden, first, undone)
    mass = found.mass[..., span.begin : span.end].sum(-1) / (len(subject.ids) - first)
    headline = {
        "kl_mean": float(done.kl.mean()),
        "kl_max": float(done.kl.max()),
        "top1_changed": float(done.changed.double().mean()),
        "delta_theta": float(strength(found, span)[subject.heads].sum()),
        "mass": float(mass[subject.heads].mean()),
        "inflation": undone.inflation,
        "residual": undone.residual,
    }
    details = {"span": _of_span(subject, span), "cached": cached, "renormalised": renormalised}
    samples = {
        "maps": {
            "attention on the span": listed(mass),
            "Δθ of the span": listed(strength(found, span)),
        },
        "curves": {f"KL without {span}": listed(done.kl)},
    }
    return _report(subject, first, "mask", headline, details, samples)


def placebo(
    subject: Subject,
    span: Span,
    *,
    tolerance: float,
    forbidden: Sequence[Span] = (),
    nearby: bool = False,
) -> Report:
    """Find a placebo for a span, and mask the one and the other.

    Args:
        subject: what to run.
        span: the target.
        tolerance: greatest gap in Δθ.
        forbidden: spans that the placebo must not overlap.
        nearby: take the nearest match in position.

    Raises:
        ConfigError: if no token follows the span.
    """
    first = subject.first_after(span)
    plain, found = _untouched(subject, first)
    match = find_placebo(
        token_strength(found, subject.heads),
        span,
        tolerance=tolerance,
        forbidden=forbidden,
        before=first,
        nearby=nearby,
    )
    # Both from the same token on: where the queries begin.
    spans = [span] if match.span is None else [span, match.span]
    masks = [Mask(x, subject.heads, first) for x in spans]
    kls = [effect(subject, plain, hidden, first).kl for hidden in masks]
    headline = {
        "gap": None if match.span is None else match.gap,
        "matched": float(match.matched),
        "delta_theta_target": match.target,
        "delta_theta_placebo": None if match.span is None else match.strength,
        "kl_target": float(kls[0].mean()),
        "kl_placebo": None if match.span is None else float(kls[1].mean()),
    }
    details = {
        "span": _of_span(subject, span),
        "placebo": None if match.span is None else _of_span(subject, match.span),
        "tolerance": tolerance,
        "forbidden": [str(x) for x in forbidden],
    }
    curves = {f"KL without {x}": listed(kl) for x, kl in zip(spans, kls, strict=True)}
    return _report(subject, first, "placebo", headline, details, {"maps": {}, "curves": curves})


def sinks(subject: Subject) -> Report:
    """Score the tokens before the queries as sinks, by mass and with their values."""
    found = attended(subject.model, subject.ids, subject.first)
    scores = sink_scores(found)
    ranked = [shares(x[..., : subject.first]) for x in (scores.mass, scores.value_aware)]
    mass, value = (x[subject.heads].mean(0) for x in ranked)
    top = int(mass.argmax())
    led = [float((x[subject.heads].argmax(-1) == top).double().mean()) for x in ranked]
    headline = {
        "sink_mass_share": float(mass[top]),
        "sink_value_share": float(value[top]),
        "led_by_mass": led[0],
        "led_by_value": led[1],
    }
    details = {
        "sink": _of_span(subject, Span(top, top + 1)),
        "by_mass": _tokens(subject, mass, value, mass),
        "by_value": _tokens(subject, mass, value, value),
    }
    names = (f"share of token {top}, mass", f"share of token {top}, mass × value norm")
    maps = {name: listed(x[..., top]) for name, x in zip(names, ranked, strict=True)}
    return _report(subject, subject.first, "sinks", headline, details, {"maps": maps, "curves": {}})


def flat(subject: Subject, share: float, entropy: float) -> Report:
    """Flag heads with flat attention.

    Args:
        subject: what to run.
        share: of keys that are effective, at least.
        entropy: relative to the greatest possible, at least.

    Raises:
        ConfigError: if no query sees enough keys.
    """
    found = flatness(subject.model, subject.ids, subject.first)
    flagged = found.flagged(share, entropy) & subject.heads
    headline = {
        "flagged": float(flagged.sum()),
        "flagged_share": float(flagged.sum() / subject.heads.sum()),
        "flagged_layer_0": float(flagged[0].sum()),
    }
    details = {"flagged": flagged.nonzero().tolist(), "share": share, "entropy": entropy}
    maps = {
        "effective share of keys": listed(found.effective_share),
        "relative entropy": listed(found.relative_entropy),
    }
    return _report(subject, subject.first, "flat", headline, details, {"maps": maps, "curves": {}})


class _Undone:
    """Watches a masked forward: growth of the survivors, and whether it can be undone."""

    def __init__(self, hidden: Mask, first: int) -> None:
        self._mask = hidden
        self._first = first
        self._masses: list[Tensor] = []
        self.residual = 0.0

    def __call__(self, call: LayerCall) -> None:
        """Take a layer."""
        heads = self._mask.heads[call.layer]
        if not heads.any():
            return
        rows = layer_rows(call, self._mask, self._first)
        self.residual = max(self.residual, residual(rows.plain, rows.masked, rows.kept))
        self._masses.append(surviving_mass(rows.plain, rows.kept).cpu()[heads].flatten())

    @property
    def inflation(self) -> float:
        """Geometric mean over masked heads and queries."""
        smallest = torch.finfo(torch.float32).tiny
        return float(torch.cat(self._masses).clamp_min(smallest).log().mean().neg().exp())


def _untouched(subject: Subject, first: int) -> tuple[Tensor, Attended]:
    watched = Watched(subject.model, first)
    logits = masked_forward(subject.model, subject.ids, logits_from=first, look=watched)
    return logits, watched.attended()


def _of_span(subject: Subject, span: Span) -> dict[str, Any]:
    return {**asdict(span), "text": subject.words(span)}


def _tokens(subject: Subject, mass: Tensor, value: Tensor, by: Tensor) -> list[dict[str, Any]]:
    """Describe the first tokens in an order."""
    return [
        {
            "token": i,
            "text": subject.words(Span(i, i + 1)),
            "mass_share": float(mass[i]),
            "value_share": float(value[i]),
        }
        for i in by.topk(min(TOP, by.numel())).indices.tolist()
    ]


def _report(
    subject: Subject,
    first: int,
    name: str,
    headline: Mapping[str, float | None],
    details: dict[str, Any],
    samples: dict[str, Any],
) -> Report:
    settings = {
        "model": subject.model.spec.name,
        "tokens": len(subject.ids),
        "first_query": first,
        "heads": [
            [h for h, is_in in enumerate(layer) if is_in] for layer in subject.heads.tolist()
        ],
    }
    meaning = {key: MEANING[key] for key in headline}
    return Report(
        name,
        quick=False,
        headline=dict(headline),
        meaning=meaning,
        details=settings | details,
        samples=samples,
    )
