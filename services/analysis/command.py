"""`criticalkv analyze`: look at what a policy kept; JSON, and plots if wanted.

Imports what a command needs only inside it: torch takes seconds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from criticalkv.services.analysis import intervene_command
from criticalkv.shared.options import ConfigFile, Json, Model, Plots, Threads
from criticalkv.shared.output import finish

if TYPE_CHECKING:
    from criticalkv.shared.report import Report

app = typer.Typer(help="What a policy kept, and what that changed.", no_args_is_help=True)

Tiers = Annotated[str, typer.Option(help="Kept fractions, comma-separated, ascending.")]
Rows = Annotated[int, typer.Option(min=1, help="Texts.")]
Tokens = Annotated[int, typer.Option(min=64, help="Longest context.")]
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with multi_news_50.jsonl; else $CRITICALKV_DATA."),
]
BASES = ("snapkv", "adakv", "h2o", "tova")


@app.command()
def perturbation(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Base method, compared with its CriticalKV form; may be repeated."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the CriticalKV forms, such as eps=0."),
    ] = None,
    tiers: Tiers = "0.1,0.2,0.4",
    rows: Rows = 5,
    tokens: Tokens = 1500,
    json: Json = Path("perturbation.json"),
    plots: Plots = None,
    data: Data = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """Output perturbation of every head, its bounds, and what CriticalKV changes."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.analysis import run

    settings = run.settings(config, model, tiers)
    found = run.perturbation(
        settings,
        run.Options(rows, tokens, data, threads),
        policy or BASES,
        option or (),
    )
    _finish(found, json, plots)


@app.command()
def sweep(
    option: Annotated[
        Literal["alpha", "eps", "norm"], typer.Argument(help="Which option of the policy.")
    ],
    values: Annotated[
        str | None, typer.Option(help="Comma-separated; of eps also such as 0.1/n.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Of two stages.")] = "criticalkv",
    tiers: Tiers = "0.1,0.2,0.4",
    rows: Rows = 5,
    tokens: Tokens = 1500,
    json: Json = Path("sweep.json"),
    plots: Plots = None,
    data: Data = None,
    threads: Threads = 2,
    config: ConfigFile = None,
    model: Model = None,
) -> None:
    """The perturbation under one option's values, against the base method."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    from criticalkv.services.analysis import run

    settings = run.settings(config, model, tiers)
    found = run.sweep(
        settings,
        run.Options(rows, tokens, data, threads),
        policy,
        option,
        values.split(",") if values else None,
    )
    _finish(found, json, plots)


intervene_command.register(app)


def _finish(report: Report, json: Path, plots: Path | None) -> None:
    from criticalkv.services.analysis.plots import draw

    finish(report, json, plots, draw)
