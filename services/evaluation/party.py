"""Who is asked: a model in this process, or a running service that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from criticalkv.services.evaluation.answer import FULL_CELL, Answerer, Cell, History
from criticalkv.services.evaluation.asking import rounds
from criticalkv.services.evaluation.example import Example
from criticalkv.services.evaluation.local_answerer import LocalAnswerer, wide
from criticalkv.services.evaluation.options import AskingOptions, Options
from criticalkv.services.evaluation.prompt import Setting
from criticalkv.services.evaluation.run import Ask
from criticalkv.shared.config import Config, load_config
from criticalkv.shared.errors import ContextLengthError
from criticalkv.shared.model.chat import ChatTemplate
from criticalkv.shared.model.loader import load_model
from criticalkv.shared.model.spec import ModelSpec, load_spec, load_tokenizer

Suite = Callable[[ChatTemplate, int], Iterable[Example]]
"""(chat template, positions of the model) → examples."""


@dataclass(frozen=True)
class Party:
    """A model that answers.

    Attributes:
        spec: of the model.
        chat: its template and tokenizer.
        examples: makes what it is asked, one after the other.
        ask: asks it one of them.
    """

    spec: ModelSpec
    chat: ChatTemplate
    examples: Callable[[], Iterator[Example]]
    ask: Ask


Open = Callable[[Sequence[Cell]], AbstractContextManager[Party]]
"""Gets ready to be asked under cells, or refuses them before anything runs."""


@contextmanager
def party(
    options: AskingOptions, history: History, suite: Suite, cells: Sequence[Cell]
) -> Iterator[Party]:
    """Load a model, or reach a service; give back what it takes at the end.

    Raises:
        PolicyError, InvalidRequestError: for cells that cannot be asked.
        ConfigError, ModelNotFoundError, UnsupportedModelError: as load_config and load_model.
    """
    config = config_of(options, cells)
    local = options.through == "local"
    spec, chat, answerer = (_local if local else _service)(options, history, config)

    def examples() -> Iterator[Example]:
        for example in suite(chat, spec.max_positions):
            _check_fits(chat, example, spec.max_positions, options.setting, history)
            yield example

    with closing(answerer):
        answerer.check(cells)
        yield Party(spec, chat, examples, answerer.answer)


def _check_fits(
    chat: ChatTemplate, example: Example, max_positions: int, setting: Setting, history: History
) -> None:
    """Refuse an example that may not fit, its longest answers included.

    Raises:
        ContextLengthError: naming it.
    """
    needed = max(
        len(part.context_ids) + sum(len(s.token_ids) + s.question.max_tokens for s in steps)
        for part in rounds(chat, example, setting, history)
        for steps in part.conversations
    )
    if needed > max_positions:
        raise ContextLengthError(
            f"{example.name} may take {needed} tokens, context, questions and answers; the model "
            f"has {max_positions} positions",
            param="lengths",
        )


def _local(
    options: AskingOptions, history: History, config: Config
) -> tuple[ModelSpec, ChatTemplate, Answerer]:
    model = load_model(config.model, options.threads)
    answerer = LocalAnswerer(
        model,
        setting=options.setting,
        history=history,
        kl=options.kl,
        prefill=config.prefill,
        eviction=config.eviction,
        decode=wide(config.decode),
    )
    return model.spec, model.chat, answerer


def _service(
    options: AskingOptions, history: History, config: Config
) -> tuple[ModelSpec, ChatTemplate, Answerer]:
    from criticalkv.services.evaluation.service_answerer import ServiceAnswerer

    spec = load_spec(config.model, check_device=False)
    answerer = ServiceAnswerer(
        options.url,
        options.api_key,
        spec.name,
        setting=options.setting,
        history=history,
        concurrency=options.concurrency,
        timeout_s=options.timeout_s,
    )
    return spec, ChatTemplate(load_tokenizer(spec)), answerer


def config_of(options: Options, cells: Sequence[Cell]) -> Config:
    """Read the configuration; the run's tiers, and a model that is named, go before its own."""
    tiers = sorted({cell.tier for cell in (*cells, FULL_CELL)}, key=float)
    given: dict[str, dict[str, Any]] = {"eviction": {"tiers": tiers, "canary_queries": 0}}
    if options.model is not None:
        given["model"] = {"path": options.model}
    return load_config(str(options.config) if options.config else None, given)
