"""What the commands of `criticalkv eval` can be told: a field is a flag."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from criticalkv.shared.options import ConfigFile, Model, Plots, Threads

Through = Literal["local", "service"]
"""Who answers: this process, or a running service."""
Lengths = Annotated[
    str,
    typer.Option(
        help="Tokens, comma-separated: all of the prompt (context, first question, template) "
        "and the most tokens of its answer."
    ),
]
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

    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: niah_single_1, niah_single_2, niah_single_3, "
            "niah_multikey_1, niah_multikey_2, niah_multikey_3, niah_multivalue, "
            "niah_multiquery, vt, cwe, fwe; from --data: qa_1 (squad.json or xquad_en.json), "
            "qa_2 (hotpotqa.json or hotpotqa_100.json). Default: all that can be made, or of "
            "which --rows has a file."
        ),
    ] = None
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

    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; default all: narrativeqa, qasper, multifieldqa_en, hotpotqa, "
            "2wikimqa, musique, gov_report, qmsum, multi_news, trec, triviaqa, samsum, "
            "passage_count, passage_retrieval_en, lcc, repobench-p."
        ),
    ] = None
    num: Annotated[int | None, typer.Option(min=1, help="First rows of each; default all.")] = None


@dataclass(frozen=True)
class SCBenchOptions(AskingOptions):
    """Of `scbench`."""

    tasks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. Made here, and the default: retr_kv, math_find, "
            "multi_needle. From --data: scbench_kv (scbench_kv.jsonl), scbench_mf "
            "(scbench_mf.jsonl), en_qa (scbench_qa_eng.jsonl or en_qa.jsonl), kv75 "
            "(kv75_60.jsonl)."
        ),
    ] = None
    lengths: Lengths = "4096"
    num: Num = 25
    turns: Annotated[int, typer.Option(min=1, help="Questions of each example.")] = 5
    history: Annotated[
        Literal["model", "gold", "none"],
        typer.Option(help="What later questions follow: answers as given, right ones, nothing."),
    ] = "model"
    evidence: Evidence = None


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

    lengths: Annotated[
        str,
        typer.Option(help="Tokens of contexts, comma-separated; --continuation follows them."),
    ] = "1024"
    num: Num = 25
    continuation: Annotated[int, typer.Option(min=1, help="Tokens judged after a context.")] = 128
    through: Annotated[Through, typer.Option(help="Only local: a service tells no logits.")] = (
        "local"
    )
