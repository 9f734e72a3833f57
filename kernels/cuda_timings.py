"""What a benchmark of the CUDA kernels runs: a name, a function, and the bytes that it must move.

Bytes are the tensors read and written once each, so bytes / time against the rate of a device copy
says how close a kernel is to the memory's limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import cuda_kernels as kernels
from .formats import TensorFormat


@dataclass(frozen=True)
class Timing:
    """One benchmark: ``run`` does it once, moving ``bytes`` bytes at least."""

    name: str
    run: Callable[[], object]
    bytes: int


# Name, format, operand, bytes written for an element (codes, scales, operand).
_ROWS = (
    ("rows nvfp4 plain", "nvfp4:row", "none", 0.5625),
    ("rows nvfp4 four over six", "nvfp4:row:four_over_six", "none", 0.5625),
    ("rows nvfp4 fp8-exact + e4m3", "nvfp4:row:fp8_exact", "e4m3", 1.5625),
    ("rows mxfp8 row", "mxfp8:row", "e4m3", 1.03125),
)


def timings(rows: int, cols: int, device: str = "cuda") -> list[Timing]:
    """The benchmarks for BF16 matrices [rows, cols]."""
    size, tokens = rows * cols, 4 * rows
    x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    found = [Timing("copy bf16", lambda: y.copy_(x), 4 * size)]
    for name, text, form, written in _ROWS:
        run = _bind(kernels.quantize, x, TensorFormat.parse(text), form)
        found.append(Timing(name, run, int((2 + written) * size) + tokens))
    exact = TensorFormat.parse("nvfp4:row:fp8_exact")
    term = (x, torch.rand(rows, device=device), torch.rand(1, device=device), None)
    for act in ("gelu_tanh", "gelu"):
        run = _bind(kernels.act_quantize, term, act, exact, "e4m3")
        found.append(Timing(f"rows {act} + fp8-exact", run, int(3.5625 * size) + 2 * tokens))
    weight = TensorFormat.parse("nvfp4:tensor:tile")
    found.append(Timing("tiles", _bind(kernels.quantize, x, weight, "none"), int(4.5625 * size)))
    return found + _backward(x, term)


def _backward(x: torch.Tensor, term: tuple) -> list[Timing]:
    """Gradients and saved codes; a gradient with row scales is read twice."""
    rows, cols = x.shape
    size, seed = x.numel(), torch.zeros((), dtype=torch.int64, device=x.device)
    by_row, by_block = TensorFormat.parse("mxfp8:row:sr"), TensorFormat.parse("mxfp8:32:sr")
    fold = torch.rand(rows, device=x.device)
    both = (by_row, by_row, "e4m3", "e4m3", True, seed, 0)
    wide = (by_block, by_block, "bf16", "bf16", True, seed, 0)
    plain = (x, None, None, None)
    found = [
        Timing("gradient row both ways", _bind(kernels.quantize_grad, x, fold, *both), 6 * size),
        Timing(
            "gradient 32 both ways bf16", _bind(kernels.quantize_grad, x, fold, *wide), 6 * size
        ),
        Timing(
            "gradient gelu_tanh row both ways",
            _bind(kernels.quantize_grad, plain, fold, *both, "gelu_tanh", term),
            10 * size,
        ),
    ]
    exact = TensorFormat.parse("nvfp4:row:fp8_exact")
    codes, scales, factor, _ = kernels.quantize(x, exact)
    for form, written in (("e4m3", 1), ("bf16", 2)):
        moved = int((0.5625 + written) * size)
        for way, transpose in (("rows", False), ("transpose", True)):
            run = _bind(kernels.decode, codes, scales, exact, cols, form, transpose)
            found.append(Timing(f"decode {way} {form}", run, moved))
    again = (codes, scales, factor, exact, cols)
    run = _bind(kernels.requantize, *again, by_block, "bf16", seed, 0)
    found.append(Timing("requantize 32 bf16", run, int(2.5625 * size)))
    run = _bind(kernels.requantize, *again, by_row, "e4m3", seed, 0)
    found.append(Timing("requantize row e4m3", run, int(2.125 * size)))
    return found


def _bind(function: Callable, *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)
