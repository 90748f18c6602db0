"""`criticalkv eval`: benchmarks under several policies and tiers, in one table.

Imports what a command needs only inside it: torch takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from criticalkv.services.evaluation.answer import History
from criticalkv.services.evaluation.flags import add_command
from criticalkv.services.evaluation.options import (
    AskingOptions,
    LongBenchOptions,
    NiahOptions,
    PerplexityOptions,
    RulerOptions,
    SCBenchOptions,
)
from criticalkv.services.evaluation.rows import Rows
from criticalkv.shared.errors import ConfigError

if TYPE_CHECKING:
    from criticalkv.services.evaluation.example import Example
    from criticalkv.services.evaluation.party import Suite
    from criticalkv.shared.model.chat import ChatTemplate

T = TypeVar("T")
app = typer.Typer(
    help="Benchmarks under several policies and tiers; a run that was stopped goes on.",
    no_args_is_help=True,
)


def ruler(options: RulerOptions) -> None:
    """RULER: 13 tasks at any length, made here or read from its own files."""
    lengths = _numbers(options.lengths, "lengths")

    def suite(chat: ChatTemplate, _: int) -> Iterator[Example]:
        from criticalkv.services.evaluation.ruler.rows import found_tasks, ruler_rows
        from criticalkv.services.evaluation.ruler.suite import TASKS, Ruler

        if options.rows is not None:
            tasks = _names(options.tasks, found_tasks(options.rows, TASKS))
            return ruler_rows(options.rows, tasks, _rows(options), options.num)
        made = Ruler(chat, data=options.data, essays=options.essays)
        if options.tasks is None:
            return made.possible(lengths, options.num, options.seed, _tell)
        tasks = _names(options.tasks, TASKS)
        return made.examples(tasks, lengths, options.num, options.seed)

    _ask("ruler", options, suite, {"tasks": options.tasks, "lengths": lengths}, options.evidence)


def longbench(options: LongBenchOptions) -> None:
    """LongBench: 16 English data sets, from files or Hugging Face."""

    def suite(chat: ChatTemplate, max_positions: int) -> Iterator[Example]:
        from criticalkv.services.evaluation.longbench.suite import TASKS, LongBench

        read = LongBench(chat, max_positions, data=options.data, rows=_rows(options))
        return read.examples(_names(options.tasks, TASKS), options.num)

    _ask("longbench", options, suite, {"tasks": options.tasks})


def scbench(options: SCBenchOptions) -> None:
    """SCBench: several questions about one context, scored turn by turn."""
    lengths = _numbers(options.lengths, "lengths")

    def suite(chat: ChatTemplate, _: int) -> Iterator[Example]:
        from criticalkv.services.evaluation.scbench.suite import MAKERS, SCBench

        made = SCBench(chat, data=options.data, rows=_rows(options))
        tasks = _names(options.tasks, MAKERS)
        return made.examples(tasks, lengths, options.num, options.turns, options.seed)

    shape = {"tasks": options.tasks, "lengths": lengths, "turns": options.turns}
    _ask("scbench", options, suite, shape, options.evidence, options.history)


def niah(options: NiahOptions) -> None:
    """Needle in a haystack: one fact at every depth of every length, as a map."""
    lengths, depths = _numbers(options.lengths, "lengths"), _shares(options.depths, "depths")

    def suite(chat: ChatTemplate, _: int) -> Iterator[Example]:
        from criticalkv.services.evaluation.niah import Niah

        made = Niah(chat, data=options.data, essays=options.essays)
        return made.examples(lengths, options.num, options.seed, depths)

    _ask("niah", options, suite, {"lengths": lengths, "depths": depths}, options.evidence)


def perplexity(options: PerplexityOptions) -> None:
    """How likely a text's own continuation stays after its compressed beginning."""
    lengths = _numbers(options.lengths, "lengths")
    if options.through != "local":
        raise ConfigError(
            "perplexity needs the model's logits, which a service does not tell: --through local",
            param="through",
        )
    _be_passive()
    from criticalkv.services.evaluation.evaluate import Benchmark, evaluate
    from criticalkv.services.evaluation.measured import measured

    shape = {"lengths": lengths, "continuation": options.continuation}
    open_ = partial(measured, options, lengths)
    evaluate(options, Benchmark("perplexity", open_, {}, shape, measure="perplexity"))


def _ask(
    name: str,
    options: AskingOptions,
    suite: Suite,
    shape: dict[str, Any],
    evidence: Path | None = None,
    history: History = "model",
) -> None:
    _be_passive()
    from criticalkv.services.evaluation.evaluate import Benchmark, evaluate
    from criticalkv.services.evaluation.party import party

    settings = {
        "through": options.through,
        "setting": options.setting,
        "history": history,
        "kl": options.kl and options.through == "local",
    }
    open_ = partial(party, options, history, suite)
    evaluate(options, Benchmark(name, open_, settings, shape, evidence=evidence))


def _be_passive() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported


def _rows(options: AskingOptions) -> Rows:
    return Rows(options.skip_bad, _tell)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _numbers(text: str, name: str) -> list[int]:
    """Read whole numbers above 0, comma-separated."""
    return _each(text, name, int, lambda number: number > 0, "whole numbers above 0")


def _shares(text: str, name: str) -> list[float]:
    """Read numbers from 0 to 1, comma-separated."""
    return _each(text, name, float, lambda share: 0 <= share <= 1, "numbers from 0 to 1")


def _each(
    text: str, name: str, read: Callable[[str], T], is_right: Callable[[T], bool], what: str
) -> list[T]:
    """Read what is between commas, without doubles.

    Raises:
        ConfigError: naming the flag.
    """
    wrong = ConfigError(f"--{name} {text[:100]!r} must be {what}, with commas", param=name)
    try:
        found = list(dict.fromkeys(read(item) for item in text.split(",")))
    except ValueError:
        raise wrong from None
    if not all(map(is_right, found)):
        raise wrong
    return found


def _names(text: str | None, every: Iterable[str]) -> list[str]:
    """Read names, comma-separated; None is every one there is."""
    named = every if text is None else (item.strip() for item in text.split(","))
    return list(dict.fromkeys(named))


add_command(app, "ruler", RulerOptions, ruler)
add_command(app, "longbench", LongBenchOptions, longbench)
add_command(app, "scbench", SCBenchOptions, scbench)
add_command(app, "niah", NiahOptions, niah)
add_command(app, "perplexity", PerplexityOptions, perplexity)
