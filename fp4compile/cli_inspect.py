"""``fp4compile doctor`` and ``fp4compile explain``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .cli_errors import one_line_errors
from .kernels.errors import Fp4Error

COLORS = {"ok": "green", "missing": "yellow", "broken": "red"}


@one_line_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what this machine can run, and why not. Exit code 1 if something is broken."""
    from dataclasses import asdict

    from .doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        width = max(len(f.what) for f in findings)
        for f in findings:
            mark = typer.style(f.status.ljust(7), fg=COLORS[f.status])
            typer.echo(f"{f.what.ljust(width)}  {mark}  {f.detail}")
    if any(f.status == "broken" for f in findings):
        raise typer.Exit(1)


@one_line_errors
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="module:factory, a function that returns (model, args): a module and a tuple of"
            " example inputs, or a dict by name"
        ),
    ],
    policy: Annotated[
        str | None, typer.Option(help="a policy file or a recipe's name; default: fp8-exact")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="predict times for it, such as B200; default: this GPU")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what the backend does to each linear of a model, and why not. Nothing is compiled."""
    from torch import nn

    from .cli_policy import call
    from .explaining import explain as run

    made = call(model)
    pair = isinstance(made, tuple) and len(made) == 2
    net, args = made if pair else (made, ())
    if not isinstance(net, nn.Module):
        raise Fp4Error(f"{model}: returned {type(net).__name__}; return (module, args)")
    kwargs = args if isinstance(args, dict) else {}
    args = args if isinstance(args, (tuple, list)) else (() if kwargs else (args,))
    report = run(net, args, kwargs, policy=policy or None, machine=machine)
    typer.echo(json.dumps(report.as_dicts(), indent=1) if as_json else str(report))
