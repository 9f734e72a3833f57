"""The primitives over the PyTorch reference: any device, any format, and the CPU's native kernels.

An implementation is a module with `supports`, `quantize_operand`, `decode_operand`,
`requantize_operand` and `gradient_operands`; this one supports every format.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import block_scaled, reference
from .formats import BLOCK, TensorFormat

STRIP = 32  # rows whose sum is taken first
ROTATED_STREAM = 8  # a rotated gradient draws its own random bits: its stream is this much higher


def native_for(device: torch.device) -> ModuleType | None:
    """The fast implementation for ``device`` where there is one, else None."""
    if device.type == "cpu":
        from . import native_operands

        return native_operands if native_operands.available() else None
    if device.type == "cuda":
        from . import cuda_operands

        return cuda_operands if cuda_operands.available(device) else None
    return None


def quantize_operand(
    x: Tensor, fmt: TensorFormat, form: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, factor and operand of x [R, C], or of its transpose."""
    from .primitives import as_operand, stored_scales

    codes, scales, outer = reference.quantize(x.t() if transpose else x, fmt)
    if fmt.float_scales:  # in memory as an engine reads them
        scales = stored_scales(stored_scales(scales, fmt).contiguous(), fmt)
        if form == "e4m3":
            return codes, scales, outer, codes.clone()
    values, factors = reference.split(codes, scales, outer, fmt)
    if form in block_scaled.FORMS and block_scaled.in_place(fmt, form) != "values":
        return codes, scales, factors, block_scaled.place_of(fmt, form, scales)
    return codes, scales, factors, as_operand(values, form)


def decode_operand(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, form: str, transpose: bool
) -> Tensor:
    """The operand of saved codes; transposed: [cols, R padded to the block with zeros]."""
    from .primitives import as_operand

    if form == "fp4":  # tiles, transposed
        return block_scaled.with_tail(*block_scaled.turned_tiles(codes, scales, cols), form)
    if fmt.float_scales and form == "e4m3":
        return _pad(codes[:, :cols].t(), fmt).contiguous() if transpose else codes.clone()
    values = reference.split(codes, scales, codes.new_empty(0), fmt)[0]
    if transpose:
        values = _pad(values[:, :cols].t(), fmt).contiguous()
    return as_operand(values, form)


def _pad(values: Tensor, fmt: TensorFormat) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % fmt.padding))


def requantize_operand(
    codes: Tensor, scales: Tensor, factors: Tensor, source: TensorFormat, cols: int,
    fmt: TensorFormat, form: str, seed: Tensor, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode with the factor, transpose, quantize in ``fmt`` -> operand, factor."""
    values = decode_operand(codes, scales, source, cols, "f32", False)[:, :cols]
    if factors.numel():
        values = values * factors[:, None]
    return _operand(values.t(), fmt, form, seed, stream, None)


def _operand(
    x: Tensor, fmt: TensorFormat, form: str, seed: Tensor, stream: int, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    from .primitives import as_operand, stored_scales

    codes, scales, outer = reference.quantize(x, fmt, seed, stream, bits)
    if fmt.float_scales and form == "e4m3":
        return codes, stored_scales(scales, fmt).contiguous()
    values, factors = reference.split(codes, scales, outer, fmt)
    if block_scaled.has_tail(fmt, form):
        return block_scaled.with_tail(codes, scales, form), factors
    return as_operand(values, form), factors


def gradient_operands(
    g: Tensor, fold: Tensor | None, dgrad: TensorFormat | None, wgrad: TensorFormat | None,
    form_d: str, form_w: str, bias_grad: bool, seed: Tensor, stream: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `primitives.quantize_grad`."""
    g = g.float()
    m, n = g.shape
    d, w = ((g.new_empty(0), g.new_empty(0)) for _ in range(2))  # results must not be one tensor
    if dgrad is not None:
        d = _operand(g, dgrad, form_d, seed, stream, None)
    if wgrad is not None:
        folded = g if fold is None else g * fold[:, None]
        bits = None
        if wgrad.rotation:
            stream += ROTATED_STREAM
        elif wgrad.stochastic:
            bits = reference.random_bits(seed, stream, m, n, BLOCK[wgrad.format])[:, :n].t()
            bits = _pad(bits, wgrad)
        w = _operand(folded.t(), wgrad, form_w, seed, stream, bits)
    return *d, *w, column_sums(g) if bias_grad else g.new_empty(0)


def column_sums(g: Tensor) -> Tensor:
    """FP32 sums over the rows of g [M, N]; on the CPU in the native kernels' order.

    That is: 32 rows one after the other, then these sums one after the other.
    """
    if g.device.type != "cpu":
        return g.sum(0)
    strips = torch.nn.functional.pad(g, (0, 0, 0, -g.shape[0] % STRIP))
    strips = strips.view(strips.shape[0] // STRIP, STRIP, g.shape[1])
    return _in_order(_in_order(strips.transpose(0, 1)))


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the first axis, from the first to the last."""
    total = parts.new_zeros(parts.shape[1:])
    for part in parts:
        total = total + part
    return total
