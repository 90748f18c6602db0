"""What the commands of `criticalkv eval` can be told: a field is a flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from criticalkv.shared.options import ConfigFile, Model, Plots, Threads

Through = Literal["local", "service"]
"""Who answers: this process, or a running service."""
Tasks = Annotated[str | None, typer.Option(help="Comma-separated; default all.")]
Lengths = Annotated[str, typer.Option(help="Of contexts, in tokens, comma-separated.")]
Num = Annotated[int, typer.Option(min=1, help="Examples of each task and length.")]
Essays = Annotated[
    Path | None,
    typer.Option(metavar="PATH", exists=True, help="Your own text for the haystack."),
]
Evidence = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, help="Write the needles' token spans here."),
]


@dataclass(frozen=True)
class Options:
    """Of every command."""

    model: Model = None
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy or alias; may be repeated. Default: default."),
    ] = None
    full: Annotated[bool, typer.Option(help="Ask the full cache too.")] = True
    tiers: Annotated[str, typer.Option(help="Kept fractions, comma-separated.")] = "0.1,0.2,0.4"
    seed: Annotated[int, typer.Option(help="Draws the examples.")] = 0
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of data files; else $CRITICALKV_DATA."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Journal: a line per finished cell. The same command goes on from it. "
            "Default: criticalkv-eval-COMMAND.jsonl.",
        ),
    ] = None
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a report here.")
    ] = None
    plot: Plots = None
    threads: Threads = 2
    config: ConfigFile = None


@dataclass(frozen=True)
class AskingOptions(Options):
    """Of commands that ask questions."""

    setting: Annotated[
        Literal["context-only", "context+question"],
        typer.Option(help="What policies see: the context alone, or the first question too."),
    ] = "context-only"
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave malformed rows of data files out.")
    ] = False
    through: Annotated[Through, typer.Option(help="Ask this process or a running service.")] = (
        "local"
    )
    url: Annotated[str, typer.Option(help="Of the service's API.")] = "http://127.0.0.1:8000/v1"
    api_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            envvar="CRITICALKV_API_KEY",
            show_default=False,
            help="Of the service; on the command line others can see it.",
        ),
    ] = "local"
    concurrency: Annotated[
        int, typer.Option(min=1, help="Most requests at once to the service.")
    ] = 4
    timeout_s: Annotated[float, typer.Option(min=1, help="Of a request to the service.")] = 900.0
    kl: Annotated[bool, typer.Option(help="Measure KL to the full cache (local only).")] = True


@dataclass(frozen=True)
class RulerOptions(AskingOptions):
    """Of `ruler`."""

    tasks: Tasks = None
    lengths: Lengths = "4096"
    num: Num = 25
    essays: Essays = None
    rows: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="RULER's own jsonl files."),
    ] = None
    evidence: Evidence = None


@dataclass(frozen=True)
class LongBenchOptions(AskingOptions):
    """Of `longbench`."""

    tasks: Tasks = None
    num: Annotated[int | None, typer.Option(min=1, help="First rows of each; default all.")] = None


@dataclass(frozen=True)
class SCBenchOptions(AskingOptions):
    """Of `scbench`."""

    tasks: Tasks = None
    lengths: Lengths = "4096"
    num: Num = 25
    turns: Annotated[int, typer.Option(min=1, help="Questions of each example.")] = 5
    history: Annotated[
        Literal["model", "gold", "none"],
        typer.Option(help="What later questions follow: answers as given, right ones, nothing."),
    ] = "model"


@dataclass(frozen=True)
class NiahOptions(AskingOptions):
    """Of `niah`."""

    lengths: Lengths = "1024,2048,4096"
    depths: Annotated[
        str, typer.Option(help="Of the needle, 0 = start, 1 = end, comma-separated.")
    ] = "0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1"
    num: Annotated[int, typer.Option(min=1, help="Examples of each length and depth.")] = 1
    essays: Essays = None
    evidence: Evidence = None


@dataclass(frozen=True)
class PerplexityOptions(Options):
    """Of `perplexity`."""

    lengths: Lengths = "1024"
    num: Num = 25
    continuation: Annotated[int, typer.Option(min=1, help="Tokens judged after a context.")] = 128
    through: Annotated[Through, typer.Option(help="Only local: a service tells no logits.")] = (
        "local"
    )
