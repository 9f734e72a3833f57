"""The primitives over the CUDA kernels; see `fallback` for the interface."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import cuda_fourbit, cuda_fp8, cuda_kernels, cuda_loader, fallback
from .cuda_kernels import Affine
from .formats import TensorFormat

REFERENCE_FORM = "f32"  # the form of the reference engine: the PyTorch reference makes it


def available(device: torch.device) -> bool:
    """Whether the CUDA kernels can run on ``device``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return cuda_loader.available(index)[0]


def supports(fmt: TensorFormat) -> bool:
    """Whether the kernels know ``fmt``; stochastic ones are gradients'."""
    if cuda_fp8.knows(fmt) or cuda_fourbit.knows(fmt):
        return True
    return cuda_kernels.supports_gradient(fmt) if fmt.stochastic else cuda_kernels.supports(fmt)


def quantize_operand(
    x: Tensor, fmt: TensorFormat, form: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, factor and operand of x [R, C], or of its transpose."""
    if cuda_fp8.supports(fmt, form):
        return cuda_fp8.quantize_either(x, fmt, form, transpose)
    if cuda_fourbit.supports(fmt, form, transpose):
        return (cuda_fourbit.quantize_transposed if transpose else cuda_fourbit.quantize)(
            x, fmt, form
        )
    if not cuda_kernels.supports(fmt, form):
        return fallback.quantize_operand(x, fmt, form, transpose)
    return cuda_kernels.quantize(x.t() if transpose else x, fmt, form)


def act_quantize_operand(
    term: Affine, act: str, fmt: TensorFormat, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`quantize_operand` of act(term), fused; None where the format has no fused kernel."""
    if cuda_fp8.supports(fmt, form):
        return cuda_fp8.quantize(term, None, act, fmt, form)
    if cuda_fourbit.supports(fmt, form, False):
        return cuda_fourbit.act_quantize(term, act, fmt, form)
    if fmt.factor == "tensor" or not cuda_kernels.supports(fmt, form):
        return None
    return cuda_kernels.act_quantize(term, act, fmt, form)


def glu_quantize_operand(
    gate: Affine, up: Affine, act: str, fmt: TensorFormat, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`quantize_operand` of act(gate) * up, fused; None where there is no fused kernel."""
    if gate[0].dtype != up[0].dtype:
        return None
    if cuda_fp8.supports(fmt, form):
        return cuda_fp8.quantize(gate, up, act, fmt, form)
    if cuda_fourbit.supports(fmt, form, False):
        return cuda_fourbit.glu_quantize(gate, up, act, fmt, form)
    if fmt.factor == "tensor" or not cuda_kernels.supports(fmt, form):
        return None
    return cuda_kernels.glu_quantize(gate, up, act, fmt, form)


def decode_operand(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, form: str, transpose: bool
) -> Tensor:
    """The operand of saved codes; transposed: [cols, R padded to the block with zeros]."""
    if form == "fp4":
        assert transpose and fmt.format == "nvfp4" and fmt.block == "tile"
        return cuda_fourbit.turned_tiles(codes, scales, cols)
    if form == REFERENCE_FORM:
        return fallback.decode_operand(codes, scales, fmt, cols, form, transpose)
    return cuda_kernels.decode(codes, scales, fmt, cols, form, transpose)


def requantize_operand(
    codes: Tensor, scales: Tensor, factors: Tensor, source: TensorFormat, cols: int,
    fmt: TensorFormat, form: str, seed: Tensor, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode with the factor, transpose, quantize in ``fmt`` -> operand, factor."""
    if cuda_fp8.supports_gradients(fmt, None, form, "") and str(source) == "fp8:128":
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
    if fold is None and cuda_fp8.supports_gradients(dgrad, wgrad, form_d, form_w):
        return cuda_fp8.quantize_grad(g, dgrad, wgrad, bias_grad, seed, stream)
    side_d, side_w = _side(dgrad, form_d, False), _side(wgrad, form_w, True)
    if fallback in (side_d, side_w):
        return fallback.gradient_operands(
            g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream
        )
    if cuda_fourbit not in (side_d, side_w):
        return cuda_kernels.quantize_grad(
            g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream, row_amax, col_amax
        )
    return _each_side(
        g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream, row_amax, col_amax,
        side_d, side_w,
    )  # fmt: skip


def _side(fmt: TensorFormat | None, form: str, transpose: bool) -> ModuleType | None:
    """The module that writes one orientation of a gradient; None where it is absent."""
    if fmt is None:
        return None
    if cuda_fourbit.supports_gradient(fmt, form, transpose):
        return cuda_fourbit
    return cuda_kernels if cuda_kernels.supports_gradient(fmt, form) else fallback


def _each_side(
    g, fold, dgrad, wgrad, form_d, form_w, bias_grad, seed, stream, row_amax, col_amax,
    side_d, side_w,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`gradient_operands` where one orientation at least is of `cuda_fourbit`: one after another.

    Their random bits are the element's own, so they are the same in one kernel or two.
    """
    d, w = ([g.new_empty(0, dtype=torch.float32) for _ in range(2)] for _ in range(2))
    rest, known = (seed, stream), (row_amax, col_amax)
    sums = g.new_empty(0, dtype=torch.float32)
    if side_w is cuda_fourbit:
        *w, sums = cuda_fourbit.column_gradient(g, fold, wgrad, form_w, bias_grad, *rest)
    elif wgrad is not None:
        _, _, *w, sums = cuda_kernels.quantize_grad(
            g, fold, None, wgrad, "none", form_w, bias_grad, *rest, *known
        )
    if side_d is cuda_fourbit:
        d = list(cuda_fourbit.row_gradient(g, dgrad, form_d, *rest))
    elif dgrad is not None:
        d = list(
            cuda_kernels.quantize_grad(g, None, dgrad, None, form_d, "none", False, *rest, *known)
        )[:2]
    if bias_grad and wgrad is None:
        sums = fallback.column_sums(g.float())
    return *d, *w, sums


def act_grad(
    g: Affine, z: Affine, up: Affine | None, act: str, folds: tuple, amax: bool, out: Tensor
) -> tuple[Tensor, ...]:
    """See `primitives.act_grad_` and `primitives.glu_grad_`; ``out`` may be g's accumulator."""
    return cuda_kernels.act_grad(g, z, up, act, folds, amax, out)
