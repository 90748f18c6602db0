"""Commands whose flags are the fields of a dataclass: many commands share most of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")


def add_command(
    app: typer.Typer, name: str, options: type[T], run: Callable[[T], None], epilog: str = ""
) -> None:
    """Add a command to an app.

    Args:
        app: gets it.
        name: of the command.
        options: dataclass; each field has a default, and says in its type what typer needs.
        run: called with what was given; its docstring is the command's help.
        epilog: below the help.
    """
    hints = get_type_hints(options, include_extras=True)

    def command(**given: Any) -> None:
        run(options(**given))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    app.command(name, help=run.__doc__, epilog=epilog or None)(command)
