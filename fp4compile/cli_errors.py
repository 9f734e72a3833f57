"""Errors of the command line: one red line, no traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from .kernels.errors import Fp4Error

Command = TypeVar("Command", bound=Callable[..., Any])


def one_line_errors(command: Command) -> Command:
    """Wraps a command so that an `Fp4Error` ends it with its message in red and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Fp4Error as exc:
            typer.secho(f"error: {exc}", fg="red", err=True)
            raise typer.Exit(2) from None

    return wrapped  # type: ignore[return-value]
