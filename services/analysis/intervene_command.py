"""`criticalkv analyze mask | placebo | sinks | flat`: interventions on one text.

Imports what a command needs only inside it: torch takes seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from criticalkv.services.analysis.span import Span
from criticalkv.services.analysis.wanted import Wanted
from criticalkv.shared.options import ConfigFile, Json, Model, Plots, Threads
from criticalkv.shared.output import finish

if TYPE_CHECKING:
    from criticalkv.services.analysis.subject import Subject
    from criticalkv.shared.report import Report

Text = Annotated[
    Path, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Text to look at.")
]
SpanText = Annotated[
    str, typer.Option(metavar="A:B", help="Tokens A … B − 1, counted with the chat template's.")
]
Tokens = Annotated[int, typer.Option(min=2, help="Most tokens that are read.")]
Queries = Annotated[int, typer.Option(min=1, help="Last tokens whose queries count.")]
Layers = Annotated[str | None, typer.Option(help="Such as 0,3-5; default all.")]
Heads = Annotated[str | None, typer.Option(help="Query heads, likewise.")]
KVHeads = Annotated[str | None, typer.Option(help="KV heads, likewise.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (mask, placebo, sinks, flat):
        app.command()(command)


def mask(
    text: Text,
    span: SpanText,
    cached: Annotated[
        bool, typer.Option(help="Hide it from the last queries only: from their cache.")
    ] = False,
    renormalise: Annotated[
        bool, typer.Option(help="Let the survivors' attention grow, as a softmax does.")
    ] = True,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    queries: Queries = 64,
    tokens: Tokens = 2048,
    json: Json = Path("mask.json"),
    plots: Plots = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Hide a span of keys from heads: what becomes of attention and predictions."""
    hidden = Span.parse(span)
    wanted = Wanted(text, tokens, queries, layers, heads, kv_heads, threads, config, model)
    subject = _subject(wanted)
    from criticalkv.services.analysis import interventions

    report = interventions.mask(subject, hidden, cached=cached, renormalised=renormalise)
    _finish(report, json, plots)


def placebo(
    text: Text,
    span: SpanText,
    tolerance: Annotated[float, typer.Option(min=0, help="Greatest gap of a match.")] = 0.05,
    forbid: Annotated[
        list[str] | None,
        typer.Option(metavar="A:B", help="The placebo does not overlap it; may be repeated."),
    ] = None,
    nearby: Annotated[bool, typer.Option(help="Take the nearest match in position.")] = False,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    queries: Queries = 64,
    tokens: Tokens = 2048,
    json: Json = Path("placebo.json"),
    plots: Plots = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Find a span as long and as strong as another, and mask both."""
    target, forbidden = Span.parse(span), [Span.parse(x) for x in forbid or ()]
    wanted = Wanted(text, tokens, queries, layers, heads, kv_heads, threads, config, model)
    subject = _subject(wanted)
    from criticalkv.services.analysis import interventions

    report = interventions.placebo(
        subject, target, tolerance=tolerance, forbidden=forbidden, nearby=nearby
    )
    _finish(report, json, plots)


def sinks(
    text: Text,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    queries: Queries = 64,
    tokens: Tokens = 2048,
    json: Json = Path("sinks.json"),
    plots: Plots = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Tokens that draw attention, by mass alone and by mass times value norm."""
    wanted = Wanted(text, tokens, queries, layers, heads, kv_heads, threads, config, model)
    subject = _subject(wanted)
    from criticalkv.services.analysis import interventions

    report = interventions.sinks(subject)
    _finish(report, json, plots)


def flat(
    text: Text,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Least effective share of keys of a flat head.")
    ] = 0.5,
    entropy: Annotated[
        float, typer.Option(min=0, max=1, help="Its least entropy, of the greatest possible.")
    ] = 0.0,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    queries: Queries = 64,
    tokens: Tokens = 2048,
    json: Json = Path("flat.json"),
    plots: Plots = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Flag heads whose attention is flat: they pick nothing."""
    wanted = Wanted(text, tokens, queries, layers, heads, kv_heads, threads, config, model)
    subject = _subject(wanted)
    from criticalkv.services.analysis import interventions

    report = interventions.flat(subject, share, entropy)
    _finish(report, json, plots)


def _subject(wanted: Wanted) -> Subject:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.analysis.subject import subject_of

    return subject_of(wanted)


def _finish(report: Report, json: Path, plots: Path | None) -> None:
    from criticalkv.services.analysis.intervention_plots import draw

    finish(report, json, plots, draw)
