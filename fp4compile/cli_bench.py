"""``fp4compile bench kernels|mlp|gpt|compile|decode|monitor|predict``."""

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
    write(result, out)


def write(result: dict, out: Path | None) -> None:
    """Write a result as JSON, if somewhere."""
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
def monitor(
    out: Out = None,
    width: int = 768,
    layers: int = 12,
    tokens: Annotated[int, typer.Option(help="tokens a step")] = 16384,
    turns: Annotated[int, typer.Option(help="runs of 50 steps, each with and without")] = 3,
) -> None:
    """What `fp4.monitor` adds to a GPT's step: between samples, in one, and on average."""
    from .bench.training import run_monitor

    show(run_monitor(width, layers, tokens, turns), out)


@app.command()
@one_line_errors
def decode(out: Out = None, width: int = 2048, layers: int = 12) -> None:
    """A GPT one token at a time: KV cache, CUDA graphs, BF16, weights quantized once."""
    from .bench.decoding import run

    show(run(width, layers), out)


@app.command()
@one_line_errors
def forward(
    out: Out = None,
    widths: Annotated[str, typer.Option(help="widths d, comma separated")] = "2048,4096,8192",
    tokens: Annotated[int, typer.Option(help="tokens a call")] = 128,
) -> None:
    """One MLP's forward pass on few tokens: CUDA graphs, BF16, weights cached or not."""
    from .bench.decoding import run_forward

    show(run_forward(tuple(int(d) for d in widths.split(",")), tokens), out)


@app.command()
@one_line_errors
def predict(
    out: Out = None,
    widths: Annotated[str, typer.Option(help="widths d, comma separated")] = "2048,4096,8192",
    tokens: Annotated[int, typer.Option(help="tokens a step of the MLP")] = 32768,
) -> None:
    """One MLP's step and the article's whole step by the cost model, no GPU needed: ms, x BF16."""
    from rich.console import Console
    from rich.table import Table

    from .bench.predicting import run

    result = run(tuple(int(w) for w in widths.split(",")), tokens)
    table = Table("machine", "rates", "d", "what", "bf16 ms", "fp8-exact", "thinking-machines")
    for row in result["rows"]:
        for key, what in (("mlp_ms", "MLP"), ("step_ms", "step")):
            base, *others = row[key].values()
            cells = [f"{ms:.1f} ({ms / base:.2f} x)" for ms in others]
            if key == "step_ms" and row["article"]:
                cells[-1] += f"; article {1 / row['article']:.2f} x"
            table.add_row(
                row["machine"], row["rates"], str(row["d"]), what, f"{base:.1f}", *cells
            )
    Console(width=110).print(table)
    for row in result["gelu_quantize_ms"]:
        text = f"{row['machine']}: GELU + NVFP4 quantize of 32,768 x 32,768: {row['plain']:.2f} ms"
        text += f", with four over six {row['four over six']:.2f}"
        typer.echo(text + (f"; the article's {row['article']}" if row["article"] else ""))
    write(result, out)
