"""The command ``fp4compile``. Every error on purpose is one red line on stderr, exit code 2."""

from __future__ import annotations

import typer

from . import cli_bisect, cli_calibrate, cli_inspect, cli_verify, cli_warmup
from .cli_bench import app as bench_app
from .cli_policy import app as policy_app

app = typer.Typer(
    help='Train linear layers in 4 bits with torch.compile(model, backend="fp4").',
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.add_typer(policy_app, name="policy")
app.add_typer(bench_app, name="bench")
app.command()(cli_inspect.doctor)
app.command()(cli_inspect.explain)
app.command()(cli_bisect.bisect)
app.command()(cli_calibrate.calibrate)
app.command()(cli_warmup.warmup)
app.command()(cli_verify.verify)
