"""``fp4compile bench kernels|mlp|gpt|compile|decode|predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import one_line_errors

app = typer.Typer(
    help="Measure against the copy bandwidth and GEMM rates of the same run.", no_args_is_help=True
)
Out = Annotated[Path | None, typer.Option(help="write the result as JSON")]


def show(result: dict, out: Path | None) -> None:
    """Print a result as a table; write it to ``out``."""
    from rich.console import Console
    from rich.table import Table

    ceilings = result["ceilings"]
    typer.echo(
        f"{result['gpu']}, torch {result['torch']}: copy {ceilings['copy_tbs']:.2f} TB/s,"
        f" BF16 {ceilings['bf16_tflops']:.0f}, FP8 {ceilings['fp8_tflops'] or 0:.0f} TFLOP/s"
    )
    keys = list(dict.fromkeys(k for row in result["rows"] for k in row))
    table = Table(*keys)
    for row in result["rows"]:
        table.add_row(*(str(row.get(k, "")) for k in keys))
    Console(width=160).print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


@app.command()
@one_line_errors
def kernels(out: Out = None) -> None:
    """Each primitive at 32,768 x 4096 and 32,768 x 16384."""
    from .bench.kernels import run

    show(run(), out)


@app.command()
@one_line_errors
def mlp(
    out: Out = None,
    widths: Annotated[str, typer.Option(help="widths d, comma separated")] = "2048,4096,8192",
    tokens: Annotated[int, typer.Option(help="tokens a step")] = 32768,
) -> None:
    """One MLP d -> 4d -> d, forward and backward, BF16 parameters."""
    from .bench.training import run_mlp

    show(run_mlp(tuple(int(d) for d in widths.split(",")), tokens), out)


@app.command()
@one_line_errors
def gpt(
    out: Out = None,
    width: int = 2048,
    layers: int = 12,
    tokens: Annotated[int, typer.Option(help="tokens a step")] = 32768,
    arms: Annotated[str, typer.Option(help="names, comma separated; default: all")] = "",
) -> None:
    """A GPT's whole step: FP32 parameters, BF16 autocast, AdamW, context 1024."""
    from .bench.training import run_gpt

    show(run_gpt(width, layers, tokens=tokens, names=arms.split(",") if arms else None), out)


@app.command(name="compile")
@one_line_errors
def compile_(out: Out = None, width: int = 768, layers: int = 12) -> None:
    """Seconds of a GPT's first step with empty caches; by default of GPT-2 small's size."""
    from .bench.compiling import run

    show(run(width, layers), out)


@app.command()
@one_line_errors
def monitor(out: Out = None) -> None:
    """What `fp4.monitor` adds to a GPT's step: between samples, in one, and on average."""
    from .bench.training import run_monitor

    show(run_monitor(), out)


@app.command()
@one_line_errors
def decode(out: Out = None, width: int = 2048, layers: int = 12) -> None:
    """A GPT one token at a time: KV cache, CUDA graphs, BF16, weights quantized once."""
    from .bench.decoding import run

    show(run(width, layers), out)


@app.command()
@one_line_errors
def predict(
    widths: Annotated[str, typer.Option(help="widths d, comma separated")] = "2048,4096,8192",
    tokens: Annotated[int, typer.Option(help="tokens a step")] = 32768,
) -> None:
    """One MLP's step by the cost model (`passes/cost.py`), no GPU needed: ms and x BF16."""
    from rich.console import Console
    from rich.table import Table

    from .passes import cost

    table = Table("machine", "rates", "d", "bf16 ms", "fp8-exact", "thinking-machines")
    for machine in cost.MACHINES.values():
        forward, backward = ("fp4", "fp8") if "fp4" in machine.rates else ("fp8", "bf16")
        arms = (
            cost.mlp_fp8_exact(forward),
            cost.mlp_thinking_machines(forward if forward == "fp4" else "bf16", backward),
        )
        for d in (int(w) for w in widths.split(",")):
            base = cost.predict(cost.mlp_bf16(), machine, tokens, d, 4 * d)
            each = [cost.predict(arm, machine, tokens, d, 4 * d) for arm in arms]
            cells = (f"{ms:.2f} ({ms / base:.2f} x)" for ms in each)
            table.add_row(machine.name, machine.source, str(d), f"{base:.2f}", *cells)
    Console(width=100).print(table)
