"""Every CUDA kernel once, on ragged shapes, for compute-sanitizer (`make sanitize`).

Nothing is compared here (tests/gpu does that) and few other kernels run, so that a checker which
slows a program down a hundred times ends soon.
"""

from __future__ import annotations

import torch
from fp4compile.kernels import cuda_fourbit as four
from fp4compile.kernels import cuda_fp8
from fp4compile.kernels import cuda_kernels as k
from fp4compile.kernels.formats import TensorFormat

SHAPES = ((1, 16), (37, 48), (129, 272), (70, 4096))
ROWS = (
    ("nvfp4:row", "none"), ("nvfp4:tensor", "bf16"), ("nvfp4:row:four_over_six", "bf16"),
    ("nvfp4:row:fp8_exact", "e4m3"), ("nvfp4:row:fp8_exact:half", "e4m3"),
    ("nvfp4:tensor:tile", "bf16"), ("mxfp8:32", "bf16"), ("mxfp8:row", "e4m3"),
)  # fmt: skip
FOUR_BIT = (
    "nvfp4:tensor", "nvfp4:tensor:had16", "mxfp4", "mxfp4:had32", "nvfp4:tensor:sr", "mxfp4:sr",
    "nvfp4:tensor:sr:had16", "mxfp4:sr:had32",
)  # fmt: skip
GRADIENTS = (
    ("mxfp8:row:sr", "e4m3"), ("mxfp8:32:sr", "bf16"), ("mxfp8:row", "e4m3"), ("mxfp8:32", "bf16"),
)  # fmt: skip


def run(m: int, n: int, dtype: torch.dtype) -> None:
    """All kernels on an [m, n] matrix."""
    x, z, up = (torch.ones(m, n, dtype=dtype, device="cuda") for _ in range(3))
    row, col = torch.ones(m, device="cuda"), torch.ones(1, device="cuda")
    bias, seed = torch.ones(n, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    term, other = (z, row, col, bias), (up, row, col, None)
    for text, form in ROWS:
        fmt = TensorFormat.parse(text)
        codes, scales, factor, _ = k.quantize(x, fmt, form)
        for transpose in (False, True):
            k.decode(codes, scales, fmt, n, "bf16", transpose)
        for target, target_form in GRADIENTS:
            k.requantize(
                codes, scales, factor, fmt, n, TensorFormat.parse(target), target_form, seed, 1
            )
        if "tile" in text:
            four.turned_tiles(codes, scales, n)
        if "row" in text:
            k.act_quantize(term, "gelu", fmt, form)
            k.glu_quantize(term, other, "silu", fmt, form)
    for text in FOUR_BIT:
        fmt = TensorFormat.parse(text)
        for form in ("bf16", *["fp4"] * (fmt.format == "nvfp4")):
            four.column_gradient(x, row, fmt, form, True, seed, 1)
            if not fmt.rotation:
                four.row_gradient(x, fmt, form, seed, 1)
        if fmt.stochastic:
            continue
        four.quantize_transposed(x, fmt, "bf16")
        if fmt.format == "nvfp4":
            four.quantize_transposed(x, fmt, "fp4")
        if not fmt.rotation:
            four.act_quantize(term, "gelu", fmt, "bf16")
            four.glu_quantize(term, other, "silu", fmt, "none")
            codes, scales, _, _ = four.quantize(x, fmt, "bf16")
            k.decode(codes, scales, fmt, n, "bf16", True)
    for text, form in GRADIENTS:
        fmt = TensorFormat.parse(text)
        for fold in (None, row):
            k.quantize_grad(x, fold, fmt, fmt, form, form, True, seed, 0)
        rows, cols = k.act_grad((x, row, col, None), term, None, "gelu", (row,), True, x)
        k.quantize_grad(x, row, fmt, fmt, form, form, False, seed, 0, rows, cols)
        k.act_grad((x, row, col, None), term, other, "silu", (row, row), True, x)


def run_blocks(m: int, n: int, dtype: torch.dtype) -> None:
    """The kernels of format fp8 on an [m, n] matrix."""
    x, seed = (
        torch.ones(*shape, dtype=d, device="cuda")
        for shape, d in (((m, n), dtype), ((1,), torch.int64))
    )
    term = (x, torch.ones(m, device="cuda"), None, torch.ones(n, device="cuda"))
    blocks, tiles = TensorFormat("fp8"), TensorFormat("fp8", block="tile")
    for fmt in (blocks, tiles):
        codes, scales, _, _ = cuda_fp8.quantize((x, None, None, None), None, None, fmt, "e4m3")
        k.decode(codes, scales, fmt, n, "e4m3", True)
    cuda_fp8.quantize(term, None, "gelu", blocks, "e4m3")
    codes, scales, _, _ = cuda_fp8.quantize(term, term, "silu", blocks, "e4m3")
    for rounding in ("nearest", "stochastic"):
        fmt = TensorFormat("fp8", rounding=rounding)
        cuda_fp8.requantize(codes, scales, n, fmt, seed, 1)
        cuda_fp8.quantize_grad(x, fmt, fmt, True, seed, 0)


if __name__ == "__main__":
    for size in SHAPES:
        for kind in (torch.bfloat16, torch.float32):
            run(*size, kind)
            run_blocks(*size, kind)
    torch.cuda.synchronize()
    print("all kernels ran")
