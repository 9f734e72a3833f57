"""Each primitive at two sizes: milliseconds, GB/s and percent of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..kernels import ops as _ops  # noqa: F401 - defines torch.ops.fp4
from ..kernels.formats import BITS, BLOCK, TensorFormat
from .timing import header, median_ms

fp4 = torch.ops.fp4
EXACT, FP32_SEARCH = "nvfp4:row:fp8_exact:half", "nvfp4:row:fp8_exact"
PLAIN, SEARCH = "nvfp4:row", "nvfp4:row:four_over_six"
ROW, B32 = "mxfp8:row:sr", "mxfp8:32:sr"
FP8, TILE = "fp8:128", "fp8:tile"
NVIDIA, MXFP4 = ("nvfp4:tensor", "had16"), ("mxfp4", "had32")
Case = tuple[str, Callable[[], object], float]


def stored(text: str) -> float:
    """Bytes an element of codes and block scales."""
    fmt = TensorFormat.parse(text)
    return BITS[fmt.format] / 8 + (4 if fmt.float_scales else 1) / BLOCK[fmt.format]


def cases(m: int, k: int) -> Iterator[Case]:
    """(name, call, bytes an element that it must move) at x [m, k]."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor([1], device="cuda")
    row = torch.rand(m, device="cuda") + 0.5
    col = torch.ones(1, device="cuda")
    for name, fmt, form in (
        ("row quantize, fp8-exact, + E4M3", EXACT, "e4m3"),
        ("row quantize, fp8-exact, FP32 search, + E4M3", FP32_SEARCH, "e4m3"),
        ("row quantize, plain", PLAIN, "none"),
        ("row quantize, four over six", SEARCH, "none"),
    ):
        operand = 1 if form == "e4m3" else 0
        yield name, partial(fp4.quantize, x, fmt, form, False), 2 + stored(fmt) + operand
    for act in ("gelu", "gelu_tanh"):
        yield (
            f"{act} + quantize, fp8-exact, + E4M3",
            partial(fp4.act_quantize, x, row, col, None, act, EXACT, "e4m3"),
            3 + stored(EXACT),
        )
    yield (
        "gelu_tanh + quantize, four over six, + BF16",
        lambda: fp4.act_quantize(x, row, col, None, "gelu_tanh", SEARCH, "bf16"),
        4 + stored(SEARCH),
    )
    yield from activations(x, row, col)
    yield (
        "gradient both ways, row scales",
        lambda: fp4.quantize_grad(g, row, ROW, ROW, "e4m3", "e4m3", True, seed, 0),
        6,
    )
    term = (row, col, x, row, col, None, "gelu_tanh", row)
    yield "gelu_tanh derivative, row scales", lambda: fp4.act_grad_(g, *term, True), 6
    yield "gelu_tanh derivative", lambda: fp4.act_grad_(g, *term[:-1], None, False), 6
    yield (
        "gradient both ways, blocks of 32, + BF16",
        lambda: fp4.quantize_grad(g, None, B32, B32, "bf16", "bf16", True, seed, 0),
        6,
    )
    yield from _decodes(x, seed)
    yield from _blocks(x)
    for name, (fmt, rotation) in (("nvidia", NVIDIA), ("mxfp4", MXFP4)):
        yield from _four_bit(name, fmt, rotation, x, seed)


def _four_bit(name: str, fmt: str, rotation: str, x: Tensor, seed: Tensor) -> Iterator[Case]:
    """What the recipes ``name`` run; NVFP4 reads its input a second time for the maximum."""
    rotated, drawn = f"{fmt}:{rotation}", f"{fmt}:sr"
    both = f"{drawn}:{rotation}"
    codes, scales, _, _ = fp4.quantize(x, rotated, "none", True)
    yield (
        f"{name}: rows, + BF16",
        lambda: fp4.quantize(x, fmt, "bf16", False),
        4 + stored(fmt),
    )
    yield (
        f"{name}: rotated columns",
        lambda: fp4.quantize(x, rotated, "none", True),
        2 + stored(fmt),
    )
    yield (
        f"{name}: gradient along rows, + BF16",
        lambda: fp4.quantize_grad(x, None, drawn, "", "bf16", "none", False, seed, 0),
        4,
    )
    yield (
        f"{name}: gradient along rotated columns, + BF16",
        lambda: fp4.quantize_grad(x, None, "", both, "none", "bf16", False, seed, 0),
        4,
    )
    yield (
        f"{name}: decode to BF16",
        lambda: fp4.decode(codes, scales, rotated, x.shape[0], "bf16", False),
        2 + stored(fmt),
    )


def activations(x: Tensor, row: Tensor, col: Tensor) -> Iterator[Case]:
    """GELU and NVFP4 quantize in one kernel, codes and scales alone, as on FP4 tensor cores.

    Of a GEMM's result with its factors, and of a tensor as it is.
    """
    for words, fmt in (("plain", PLAIN), ("four over six", SEARCH)):
        for of, factors in (("", (row, col)), (", no factors", (None, None))):
            call = partial(fp4.act_quantize, x, *factors, None, "gelu_tanh", fmt, "none")
            yield f"gelu_tanh + quantize, {words}{of}", call, 2 + stored(fmt)


def _decodes(x: Tensor, seed: Tensor) -> Iterator[Case]:
    k = x.shape[1]
    codes, scales, _, _ = fp4.quantize(x, EXACT, "none", False)
    yield (
        "decode-transpose to E4M3",
        lambda: fp4.decode(codes, scales, EXACT, k, "e4m3", True),
        1 + stored(EXACT),
    )
    saved, saved_scales, saved_factor, _ = fp4.quantize(x, SEARCH, "none", False)
    yield (
        "requantize-transpose to MXFP8, + BF16",
        lambda: fp4.requantize(
            saved, saved_scales, saved_factor, SEARCH, k, B32, "bf16", seed, 0
        ),
        2 + stored(SEARCH),
    )


def _blocks(x: Tensor) -> Iterator[Case]:
    """The kernels of `fp8-block`: codes are the operand."""
    k = x.shape[1]
    yield "row quantize, fp8", lambda: fp4.quantize(x, FP8, "e4m3", False), 2 + stored(FP8)
    yield "weight tiles, fp8", lambda: fp4.quantize(x, TILE, "e4m3", False), 3
    yield (
        "gelu_tanh + quantize, fp8",
        lambda: fp4.act_quantize(x, None, None, None, "gelu_tanh", FP8, "e4m3"),
        2 + stored(FP8),
    )
    yield (
        "gradient both ways, fp8",
        lambda: fp4.quantize_grad(x, None, FP8, FP8, "e4m3", "e4m3", True, None, 0),
        2 + 2 * stored(FP8),
    )
    codes, scales, factor, _ = fp4.quantize(x, FP8, "none", False)
    yield (
        "requantize-transpose, fp8",
        lambda: fp4.requantize(codes, scales, factor, FP8, k, FP8, "e4m3", None, 0),
        2 * stored(FP8),
    )


def run(m: int = 32768, widths: tuple[int, ...] = (4096, 16384)) -> dict:
    """The table as a dict: header and one row for each kernel and width."""
    result = {"bench": "kernels", **header(), "rows": []}
    copy = result["ceilings"]["copy_tbs"]
    for k in widths:
        result["rows"] += [measure(case, m, k, copy) for case in cases(m, k)]
        torch.cuda.empty_cache()
    result["rows"] += long_rows(m, copy)
    return result


def measure(case: Case, m: int, k: int, copy: float) -> dict:
    """One row of the table; ``copy``: the machine's bandwidth in TB/s."""
    name, call, per_element = case
    ms = median_ms(call)
    gbs = per_element * m * k / ms / 1e6
    return {
        "kernel": name, "m": m, "k": k, "ms": round(ms, 4), "gb_s": round(gbs),
        "percent_of_copy": round(gbs / copy / 10, 1),
    }  # fmt: skip


def long_rows(m: int, copy: float, k: int = 32768) -> list[dict]:
    """`activations` at the article's size, a hidden tensor of 32,768 x 32,768."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    row, col = torch.rand(m, device="cuda") + 0.5, torch.ones(1, device="cuda")
    return [measure(case, m, k, copy) for case in activations(x, row, col)]
