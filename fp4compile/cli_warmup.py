"""``fp4compile warmup``: compile the CUDA kernels ahead of time, for images without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_errors import one_line_errors
from .kernels.errors import EngineError
from .words import unknown


@one_line_errors
def warmup(
    arch: Annotated[
        list[str] | None, typer.Option(help="sm_90a and so on, repeatable; default: this GPU's")
    ] = None,
    widths: Annotated[
        str, typer.Option(help="columns of the tensors to be quantized, comma separated")
    ] = "2048,4096,8192,16384",
) -> None:
    """Compile the recipes' CUDA kernels into the cache. Others still build when first used."""
    import torch
    from rich.progress import track

    from .kernels import cache, cuda_loader, cuda_variants

    found, reason = cuda_loader.compiler_available()
    if not found:
        raise EngineError(f"warmup: {reason}")
    if not arch:
        if not torch.cuda.is_available():
            raise EngineError("warmup: no GPU here, so say --arch, such as --arch sm_90a")
        arch = [cuda_loader.architecture(torch.cuda.get_device_capability())]
    for name in arch:
        if name not in cuda_loader.ARCHITECTURES:
            raise EngineError(f"warmup: {unknown('architecture', name, cuda_loader.ARCHITECTURES)}")
    columns = tuple(int(w) for w in widths.split(","))
    for name in arch:
        left = cuda_variants.warm(name, columns)
        first = next(left)
        for _ in track(left, description=name, total=first):
            pass
        typer.echo(f"{name}: {first + 1} kernels in {cache.directory()}")
