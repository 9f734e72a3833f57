"""``fp4compile calibrate``: measure a model's layers, write a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import one_line_errors
from .kernels.errors import InputError


@one_line_errors
def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            help="module:factory, a function that returns (model, batches); model(batch): the loss"
        ),
    ],
    out: Annotated[Path, typer.Option(help="the policy file to write")] = Path("policy.yaml"),
    recipe: Annotated[str, typer.Option(help="the recipe to measure")] = "fp8-exact",
    budget: Annotated[str, typer.Option(help="share of parameters in more precision")] = "15%",
    higher: Annotated[str, typer.Option(help="a scheme of the recipe, or original")] = "mxfp8",
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    figure: Annotated[Path | None, typer.Option(help="a heat map as PNG")] = None,
    figures: Annotated[Path | None, typer.Option(help="the figures as JSON")] = None,
) -> None:
    """Measure each layer's errors in a high-precision run; write a policy that keeps the worst."""
    from .calibrating import calibrate as run
    from .cli_policy import call_pair

    if out.exists() and not force:
        raise InputError(f"{out}: exists already (--out FILE, or --force replaces it)")
    pair = call_pair(model, "batches")
    result = run(*pair, recipe=recipe, budget=budget, higher=higher, progress=True)
    typer.echo(str(result))
    result.save(out)
    typer.echo(f"policy: {out}")
    if figure is not None:
        result.plot(figure)
        typer.echo(f"heat map: {figure}")
    if figures is not None:
        figures.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
