"""The primitives over the native C++ kernels, for CPU tensors; see `fallback` for the interface."""

from __future__ import annotations

from torch import Tensor

from . import block_scaled, fallback, native
from .formats import TensorFormat
from .primitives import as_operand


def available() -> bool:
    """Whether the machine's C++ compiler built the kernels."""
    return native.available()[0]


def supports(fmt: TensorFormat) -> bool:
    """Whether the native kernels know ``fmt``."""
    return native.supports(fmt)


def quantize_operand(
    x: Tensor, fmt: TensorFormat, form: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, factor and operand of x [R, C], or of its transpose."""
    if form in block_scaled.FORMS:
        return fallback.quantize_operand(x, fmt, form, transpose)
    codes, scales, outer, values = native.quantize(
        x, fmt, values=form != "none", transpose=transpose
    )
    factor = native.factor(scales, outer, fmt)
    return codes, scales, factor, as_operand(factor if values is None else values, form)


def decode_operand(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, form: str, transpose: bool
) -> Tensor:
    """The operand of saved codes; transposed: [cols, R padded to the block with zeros]."""
    if form == "fp4":
        return fallback.decode_operand(codes, scales, fmt, cols, form, transpose)
    return as_operand(native.decode(codes, scales, fmt, cols, transpose), form)


def requantize_operand(
    codes: Tensor, scales: Tensor, factors: Tensor, source: TensorFormat, cols: int,
    fmt: TensorFormat, form: str, seed: Tensor, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode with the factor, transpose, quantize in ``fmt`` -> operand, factor."""
    if block_scaled.has_tail(fmt, form):
        rest = (codes, scales, factors, source, cols, fmt, form, seed, stream)
        return fallback.requantize_operand(*rest)
    values = native.decode(codes, scales, source, cols)[:, :cols]
    if factors.numel():
        values = values * factors[:, None]
    _, scales, outer, out = native.quantize(values, fmt, seed, stream, values=True, transpose=True)
    assert out is not None
    return as_operand(out, form), native.factor(scales, outer, fmt)


def gradient_operands(
    g: Tensor, fold: Tensor | None, dgrad: TensorFormat | None, wgrad: TensorFormat | None,
    form_d: str, form_w: str, bias_grad: bool, seed: Tensor | None, stream: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `primitives.quantize_grad`."""
    formats = ((dgrad, form_d), (wgrad, form_w))
    if any(fmt is not None and block_scaled.has_tail(fmt, form) for fmt, form in formats):
        assert seed is not None
        rest = (g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream)
        return fallback.gradient_operands(*rest)
    d, d_factor, w, w_factor, sums = native.quantize_grad(
        g, fold, dgrad, wgrad, seed, stream, bias_grad
    )
    if d_factor is w_factor:  # both left out: the results of an operator must not be one tensor
        w_factor = w_factor.clone()
    return as_operand(d, form_d), d_factor, as_operand(w, form_w), w_factor, sums
