"""``fp4compile verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_errors import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from .verify import Verification

SHOWN = 20  # failed checks on the screen; the report has all


@one_line_errors
def verify(
    out: Annotated[Path, typer.Option(help="the JSON report")] = Path("fp4compile-verify.json"),
    quick: Annotated[bool, typer.Option("--quick", help="checks alone, no timings")] = False,
    only: Annotated[
        str, typer.Option(help="checks with this text in their group or name alone")
    ] = "",
    timings: Annotated[
        str, typer.Option(help="gemms, quantize, mlp, steps, comma separated; default: all")
    ] = "",
) -> None:
    """Check this machine's kernels and engines against the reference; time the article's table.

    Exit code 1 if a check fails. The report is written as it grows.
    """
    from rich.console import Console

    from .kernels.errors import InputError
    from .verify import verify as run
    from .verify_timings import TABLES
    from .words import unknown

    tables = tuple(word.strip() for word in timings.split(",") if word.strip())
    for name in tables:
        if name not in TABLES:
            raise InputError(f"--timings: {unknown('table', name, TABLES)}")
    console = Console()
    with console.status("starting") as status:
        result = run(quick, out, only, tables, lambda text: status.update(text[:70]))
    show(result, console)
    console.print(f"report: {out}", soft_wrap=True)
    if result.failed:
        raise typer.Exit(1)


def show(result: Verification, console) -> None:
    """Print a verification: checks by group, what failed, timings, what was not run."""
    machine = result.data["machine"]
    gpu = f"{machine['gpu']}, driver {machine['driver']}" if "gpu" in machine else "no GPU"
    console.print(f"{gpu}; torch {machine['torch']}", highlight=False, soft_wrap=True)
    console.print(_checks(result))
    for check in result.failed[:SHOWN]:
        line = f"{check['status']}: {check['device']} {check['group']} {check['name']}"
        console.print(f"[red]{line}[/red]: {check['detail']}", highlight=False, soft_wrap=True)
    if len(result.failed) > SHOWN:
        console.print(f"and {len(result.failed) - SHOWN} more in the report")
    if result.data["timings"]:
        console.print(_timings(result))
    for each in result.data["not_run"]:
        console.print(f"not run: {each['what']}: {each['why']}", highlight=False, soft_wrap=True)


def _checks(result: Verification) -> Table:
    from rich.table import Table

    statuses = ("pass", "fail", "error", "not run")
    table = Table("device", "checks", *statuses)
    for (device, group), counts in result.counts().items():
        cells = (str(counts[status] or "") for status in statuses)
        style = "red" if counts["fail"] or counts["error"] else ""
        table.add_row(device, group, *cells, style=style)
    return table


def _timings(result: Verification) -> Table:
    from rich.table import Table

    table = Table("what", "ms", "article's B200", "predicted", "more")
    known = ("table", "what", "ms", "article_ms", "predicted_ms")
    for each in result.data["timings"]:
        cells = (str(each.get(key, "")) for key in known[1:])
        more = ", ".join(f"{k} {v}" for k, v in each.items() if k not in known)
        table.add_row(*cells, more)
    return table
