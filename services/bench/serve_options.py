"""Options of `criticalkv bench serve`; names as in `vllm bench serve` where it has them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer


def finite(value: float) -> float:
    """Refuse what is endless, or no number.

    Raises:
        BadParameter: for infinity and nan.
    """
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Of the service; default gateway.host and gateway.port."),
]
Start = Annotated[bool, typer.Option("--start", help="Start a service, measure it, stop it.")]
ApiKey = Annotated[
    str, typer.Option(envvar="CRITICALKV_API_KEY", show_default=False, help="Better not a flag.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Replay this: Mooncake (JSON lines) or Azure (.csv)."
    ),
]
Num = Annotated[int, typer.Option(min=1, help="Requests of the trace.")]
LengthScale = Annotated[
    float,
    typer.Option(
        min=1e-6,
        callback=finite,
        help="Factor of the trace's lengths: prompts, answers, blocks.",
    ),
]
TimeScale = Annotated[
    float,
    typer.Option(min=0, callback=finite, help="Factor of the time between its requests."),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        min=1e-9,
        help="Per second, at random times instead of the trace's; inf = now.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines out.")]
Clients = Annotated[
    int, typer.Option(min=1, help="Without a trace: clients, each in its own conversation.")
]
Turns = Annotated[int, typer.Option(min=1, help="Of each conversation.")]
Conversations = Annotated[int, typer.Option(min=1, help="Of each client, one after the other.")]
Documents = Annotated[int, typer.Option(min=1, help="That the conversations are about, in all.")]
ContextTokens = Annotated[int, typer.Option(min=1, help="Of each document.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Of each question.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Of each answer, at most.")]
ThinkTime = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", callback=finite, help="Mean pause before a further turn."
    ),
]
Tier = Annotated[str | None, typer.Option(help="Read contexts at this tier.")]
MaxConcurrency = Annotated[int | None, typer.Option(min=1, help="Requests at once, at most.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY:MS", help="Targets: ttft, tpot, e2el; all must be met."),
]
MoreGoodput = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY:MS]...", help="More targets of --goodput.", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Of texts, pauses and random times.")]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, metavar="SECONDS", callback=finite, help="Of each request."),
]
