"""The CUDA kernels of format fp8 (fp8.cu) as functions of tensors, with `reference`'s bits.

All write codes, which are the operand, and FP32 scales as engine fp8_block reads them: [Cp/128, R]
for blocks of 1x128, [ceil(R/128), Cp/128] for tiles. One read of the source serves both
orientations of a gradient. Nothing waits for the device; no size is restricted.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import cuda_kernels as cuda
from .cuda_arguments import Fp8, Term
from .formats import TensorFormat

SIDE = 128
# What fp8.cu is compiled for, unless a launch says otherwise.
KINDS = {
    "XD": 1, "SAVED": 0, "ACT": 0, "GATED": 0, "TERM": 0, "UP": 0, "ALONG": 0, "ACROSS": 0,
    "SUMS": 0, "SR": 0, "FULL": 0,
}  # fmt: skip
FORM = "e4m3"  # the only form of the operand; codes need none ("none")


def knows(fmt: TensorFormat) -> bool:
    """Whether this module has the format, whatever its rounding."""
    return fmt.float_scales and fmt.rotation is None


def supports(fmt: TensorFormat, form: str) -> bool:
    """Whether `quantize` (nearest) knows ``fmt`` and writes the operand ``form``."""
    return knows(fmt) and not fmt.stochastic and form in (FORM, "none")


def supports_gradients(
    dgrad: TensorFormat | None, wgrad: TensorFormat | None, form_d: str, form_w: str
) -> bool:
    """Whether `quantize_grad` can write these formats in these forms; `requantize`, the first."""
    sides = [(f, form) for f, form in ((dgrad, form_d), (wgrad, form_w)) if f is not None]
    known = all(knows(f) and f.block == SIDE and form == FORM for f, form in sides)
    return known and len(sides) > 0


def _padded(n: int) -> int:
    return cuda._ceil(n, SIDE) * SIDE


def _launch(arguments: ctypes.Structure, device: torch.device, whole: bool, **defines: int) -> None:
    """One CTA for each tile; ``whole``: rows lie on 16-byte boundaries."""
    rows, cols = arguments.rows, arguments.cols
    full = {"FULL": int(whole and rows % SIDE == 0 and cols % SIDE == 0)}
    kinds, grid = {**KINDS, **full, **defines}, (cuda._ceil(rows, SIDE) * cuda._ceil(cols, SIDE), 1)
    cuda._launch("fp8.cu", "quantize_fp8", kinds, arguments, grid, 256, device)


def _results(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, Cp] and the scales of their 1x128 blocks [Cp/128, rows]."""
    padded = _padded(cols)
    codes = x.new_empty((rows, padded), dtype=torch.uint8)
    return codes, x.new_empty((padded // SIDE, rows), dtype=torch.float32)


def quantize(
    x: cuda.Affine, up: cuda.Affine | None, act: str | None, fmt: TensorFormat, form: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A term, act(term) or act(term) * up [R, C], nearest -> codes, scales, factor, operand.

    Scales are public ([R, Cp/128], or one a tile), their memory is the engine's.
    """
    keep: list[Tensor] = []
    term, dtype, wide = cuda._term(x, keep)
    rows, cols = x[0].shape
    codes, scales = _results(x[0], rows, cols)
    tile = fmt.block == "tile"
    if tile:
        scales = scales.new_empty((cuda._ceil(rows, SIDE), codes.shape[1] // SIDE))
    other = Term()
    if up is not None:
        other, _, wide_up = cuda._term(up, keep)
        wide = wide and wide_up
    arguments = Fp8(
        x=term, up=other, rows=rows, cols=cols, padded=codes.shape[1], wide=wide,
        along=cuda._pointer(codes), along_scales=cuda._pointer(scales),
    )  # fmt: skip
    _launch(
        arguments, codes.device, wide, XD=dtype, ACT=cuda.ACTS[act], GATED=int(up is not None),
        TERM=cuda._parts(x), UP=0 if up is None else cuda._parts(up), ALONG=2 if tile else 1,
    )  # fmt: skip
    nothing = scales.new_empty(0)
    operand = nothing.clone() if form == "none" else codes  # results must not be one tensor
    return codes, scales if tile else scales.t(), nothing, operand


def quantize_either(
    x: Tensor, fmt: TensorFormat, form: str, transpose: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` of x [R, C] itself, or of its transpose: blocks along its columns."""
    if not transpose or fmt.block == "tile":
        return quantize((x.t() if transpose else x, None, None, None), None, None, fmt, form)
    nothing, _, codes, scales, _ = quantize_grad(x, None, fmt, False, None, 0)
    return codes, scales.t(), nothing, nothing.clone() if form == "none" else codes


def quantize_grad(
    g: Tensor, dgrad: TensorFormat | None, wgrad: TensorFormat | None, sums: bool,
    seed: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """g [M, N] in both orientations from one set of random bits, and its column sums.

    Returns dgrad's codes [M, Np] and scales [Np/128, M], wgrad's codes [N, Mp] of g^T and scales
    [Mp/128, N], FP32 sums [N]; [0] tensors for what is left out.
    """
    (rows, cols), (x, wide) = g.shape, cuda._matrix(g)
    nothing = g.new_empty(0, dtype=torch.float32)
    d = _results(g, rows, cols) if dgrad else (nothing, nothing.clone())
    w = _results(g, cols, rows) if wgrad else (nothing.clone(), nothing.clone())
    total = g.new_zeros(cols if sums else 0, dtype=torch.float32)
    if rows * cols == 0:
        return *d, *w, total
    tiles = cuda._ceil(rows, SIDE)
    part = g.new_empty((tiles, cols), dtype=torch.float32) if sums and tiles > 1 else total[None]
    pointers: dict[str, int] = {}
    if dgrad:
        pointers |= {"along": d[0].data_ptr(), "along_scales": d[1].data_ptr()}
    if wgrad:
        pointers |= {"across": w[0].data_ptr(), "across_scales": w[1].data_ptr()}
    arguments = Fp8(
        x=Term(acc=x.data_ptr(), ld=x.stride(0)), rows=rows, cols=cols, padded=_padded(cols),
        padded_rows=_padded(rows), wide=wide, seed=cuda._pointer(seed), stream=stream,
        sums=cuda._pointer(part), **pointers,
    )  # fmt: skip
    random = sum(bit for bit, fmt in ((1, dgrad), (2, wgrad)) if fmt is not None and fmt.stochastic)
    _launch(
        arguments, g.device, wide, XD=cuda.DTYPES[x.dtype], ALONG=int(dgrad is not None),
        ACROSS=int(wgrad is not None), SUMS=int(sums), SR=random,
    )  # fmt: skip
    if sums and tiles > 1:
        cuda.add_chunks(part, total)
    return *d, *w, total


def requantize(
    codes: Tensor, scales: Tensor, cols: int, fmt: TensorFormat, seed: Tensor | None, stream: int
) -> tuple[Tensor, Tensor]:
    """Saved codes of 1x128 blocks [R, Cp], transposed, in ``fmt`` -> codes [cols, Rp], scales."""
    codes, scales = codes.contiguous(), scales.t().contiguous()
    rows = codes.shape[0]
    out = _results(codes, cols, rows)
    if rows * cols == 0:
        return out
    arguments = Fp8(
        saved=codes.data_ptr(), saved_scales=scales.data_ptr(), rows=rows, cols=cols,
        padded=codes.shape[1], padded_rows=_padded(rows), wide=1, seed=cuda._pointer(seed),
        stream=stream, across=out[0].data_ptr(), across_scales=out[1].data_ptr(),
    )  # fmt: skip
    _launch(arguments, codes.device, True, SAVED=1, ACROSS=1, SR=2 * fmt.stochastic)
    return out
