"""How likely texts are to a model in this process; see `party` for questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from criticalkv.services.evaluation.answer import Cell
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.likelihood import Likelihood
from criticalkv.services.evaluation.options import PerplexityOptions
from criticalkv.services.evaluation.party import Party, config_of
from criticalkv.services.evaluation.perplexity import Perplexity, Window, Windows
from criticalkv.shared.errors import ContextLengthError
from criticalkv.shared.model.loader import LoadedModel, load_model


@contextmanager
def measured(
    options: PerplexityOptions, lengths: Sequence[int], cells: Sequence[Cell]
) -> Iterator[Party]:
    """Load a model; give back what it takes at the end.

    Raises:
        As `party` does; ContextLengthError for a length that the model has not.
    """
    config = config_of(options, cells)
    model = load_model(config.model, options.threads)
    windows: dict[str, Window] = {}

    def examples() -> Iterator[Example]:
        for window in _windows(model, options, lengths):
            windows[window.name] = window
            yield window.example(model)

    def ask(example: Example, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Likelihood]]:
        return meter.measure(windows[example.name], cells)

    with closing(Perplexity(model, prefill=config.prefill, eviction=config.eviction)) as meter:
        meter.check(cells)
        yield Party(model.spec, model.chat, examples, ask)


def _windows(
    model: LoadedModel, options: PerplexityOptions, lengths: Sequence[int]
) -> Iterator[Window]:
    text = Windows(model, options.data)
    for length in lengths:
        needed = length + 1 + options.continuation
        if needed > model.spec.max_positions:
            raise ContextLengthError(
                f"a context of {length} tokens and what follows take {needed}; the model has "
                f"{model.spec.max_positions} positions",
                param="lengths",
            )
        yield from text.take(
            options.num, length, continuation=options.continuation, seed=options.seed
        )
