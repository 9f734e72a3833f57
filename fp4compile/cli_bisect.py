"""``fp4compile bisect``: which layer moves the loss."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .cli_errors import one_line_errors
from .kernels.errors import InputError


@one_line_errors
def bisect(
    model: Annotated[
        str,
        typer.Argument(
            help="module:factory, a function that returns (model, loss); loss(model) is a scalar"
        ),
    ],
    policy: Annotated[
        str | None, typer.Option(help="a policy file or a recipe; default: fp8-exact")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Quantize one layer and one GEMM at a time; say what each does to the loss and gradients."""
    from .bisecting import bisect as run
    from .cli_policy import call_pair

    net, loss = call_pair(model, "loss")
    if not callable(loss):
        kind = type(loss).__name__
        raise InputError(f"{model}: the loss is a {kind}; return (module, a function of it)")
    result = run(net, loss, policy=policy)
    typer.echo(json.dumps(result.as_dict(), indent=1) if as_json else str(result))
