"""The primitives over the CUDA kernels; see `fallback` for the interface."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cuda_fp8, cuda_kernels, cuda_loader, fallback
from .cuda_kernels import Affine
from .formats import TensorFormat

REFERENCE_FORM = "f32"  # the form of the reference engine: the PyTorch reference makes it


def available(device: torch.device) -> bool:
    """Whether the CUDA kernels can run on ``device``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return cuda_loader.available(index)[0]


def supports(fmt: TensorFormat) -> bool:
    """Whether the kernels know ``fmt``: nearest in forward, stochastic MXFP8 for gradients, FP8."""
    if fmt.float_scales:
        return cuda_fp8.supports(fmt)
    return cuda_kernels.supports_gradient(fmt) if fmt.stochastic else cuda_kernels.supports(fmt)


def quantize_operand(
    x: Tensor, fmt: TensorFormat, form: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, factor and operand of x [R, C], or of its transpose."""
    if form == REFERENCE_FORM or (fmt.float_scales and fmt.stochastic):
        return fallback.quantize_operand(x, fmt, form, transpose)
    if fmt.float_scales:
        if transpose and fmt.block == cuda_fp8.SIDE:
            return cuda_fp8.quantize_transposed(x, fmt, form)
        plain = (x.t() if transpose else x, None, None, None)
        return cuda_fp8.quantize(plain, None, None, fmt, form)
    return cuda_kernels.quantize(x.t() if transpose else x, fmt, form)


def act_quantize_operand(
    term: Affine, act: str, fmt: TensorFormat, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`quantize_operand` of act(term), fused; None where the format has no fused kernel."""
    if fmt.factor == "tensor" or form == REFERENCE_FORM:
        return None
    if fmt.float_scales:
        return cuda_fp8.quantize(term, None, act, fmt, form)
    return cuda_kernels.act_quantize(term, act, fmt, form)


def glu_quantize_operand(
    gate: Affine, up: Affine, act: str, fmt: TensorFormat, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`quantize_operand` of act(gate) * up, fused; None where there is no fused kernel."""
    if fmt.factor == "tensor" or form == REFERENCE_FORM or gate[0].dtype != up[0].dtype:
        return None
    if fmt.float_scales:
        return cuda_fp8.quantize(gate, up, act, fmt, form)
    return cuda_kernels.glu_quantize(gate, up, act, fmt, form)


def decode_operand(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, form: str, transpose: bool
) -> Tensor:
    """The operand of saved codes; transposed: [cols, R padded to the block with zeros]."""
    if form == REFERENCE_FORM:
        return fallback.decode_operand(codes, scales, fmt, cols, form, transpose)
    return cuda_kernels.decode(codes, scales, fmt, cols, form, transpose)


def requantize_operand(
    codes: Tensor, scales: Tensor, factors: Tensor, source: TensorFormat, cols: int,
    fmt: TensorFormat, form: str, seed: Tensor, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode with the factor, transpose, quantize in ``fmt`` -> operand, factor."""
    if cuda_fp8.supports_gradient(fmt, form) and str(source) == "fp8:128":
        return cuda_fp8.requantize(codes, scales, cols, fmt, seed, stream)
    if source.float_scales or not cuda_kernels.supports_gradient(fmt, form):
        return fallback.requantize_operand(
            codes, scales, factors, source, cols, fmt, form, seed, stream
        )
    return cuda_kernels.requantize(codes, scales, factors, source, cols, fmt, form, seed, stream)


def gradient_operands(
    g: Tensor, fold: Tensor | None, dgrad: TensorFormat | None, wgrad: TensorFormat | None,
    form_d: str, form_w: str, bias_grad: bool, seed: Tensor, stream: int,
    row_amax: Tensor | None = None, col_amax: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See `primitives.quantize_grad`."""
    some = dgrad is not None or wgrad is not None
    if some and fold is None and _in_blocks(dgrad, form_d) and _in_blocks(wgrad, form_w):
        return cuda_fp8.quantize_grad(g, dgrad, wgrad, bias_grad, seed, stream)
    if not _gradient(dgrad, form_d) or not _gradient(wgrad, form_w):
        return fallback.gradient_operands(
            g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream
        )
    return cuda_kernels.quantize_grad(
        g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream, row_amax, col_amax
    )


def act_grad(
    g: Affine, z: Affine, up: Affine | None, act: str, folds: tuple, amax: bool, out: Tensor
) -> tuple[Tensor, ...]:
    """See `primitives.act_grad_` and `primitives.glu_grad_`; ``out`` may be g's accumulator."""
    return cuda_kernels.act_grad(g, z, up, act, folds, amax, out)


def _in_blocks(fmt: TensorFormat | None, form: str) -> bool:
    return fmt is None or cuda_fp8.supports_gradient(fmt, form)


def _gradient(fmt: TensorFormat | None, form: str) -> bool:
    return cuda_kernels.supports_gradient(fmt, form)
