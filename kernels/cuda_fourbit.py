"""CUDA kernels of the 4-bit formats that couple nothing along a row, both directions and roundings.

These are NVFP4 with one outer scale for the tensor (no scale search, no tiles) and MXFP4.

| function | source | what it reads and writes |
|---|---|---|
| `quantize`, `act_quantize`, `glu_quantize` | blocks.cu | rows to codes and operand |
| `quantize_transposed` | columns.cu | the transpose, rotated or not, to codes |
| `row_gradient`, `column_gradient` | both | a gradient to an operand of one orientation |
| `turned_tiles` | turned.cu | saved codes in tiles to the operand of their transpose |

NVFP4 needs the maximum of the tensor that it rounds: a pass before (of the rotated values, of the
activation), so those are computed twice and stored nowhere. Conventions: `cuda_kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import block_scaled
from .cuda_arguments import Blocks, Columns, Term, Turned
from .cuda_kernels import (
    ACTS,
    BIG,
    DTYPES,
    FORMS,
    Affine,
    _ceil,
    _empty,
    _launch,
    _matrix,
    _operand,
    _parts,
    _pointer,
    _resident,
    _seed,
    _tensor_amax,
    _term,
    decode,
)
from .fallback import ROTATED_STREAM
from .formats import BLOCK, TensorFormat

COLUMNS_ACROSS = 2  # warps of a CTA of columns.cu side by side
WAVES = 1024  # CTAs of columns.cu, about; a function of the shape alone


def knows(fmt: TensorFormat) -> bool:
    """Whether this module has the format, whatever its rounding and rotation."""
    if fmt.format == "mxfp4":
        return True
    plain = fmt.block_scales == "e4m3" and fmt.scale_search is None
    return fmt.format == "nvfp4" and plain and fmt.outer == "tensor" and fmt.block != "tile"


def supports(fmt: TensorFormat, form: str, transpose: bool) -> bool:
    """Whether `quantize` can write ``fmt`` in ``form``, or `quantize_transposed` its transpose.

    Only the transpose is rotated. Rows for block-scaled tensor cores are `cuda_kernels`'.
    """
    forms = ("none", "bf16", *["fp4"] * (transpose and fmt.format == "nvfp4"))
    return knows(fmt) and form in forms and (transpose or not fmt.rotation)


def supports_gradient(fmt: TensorFormat, form: str, transpose: bool) -> bool:
    """Whether `row_gradient`, or `column_gradient`, can write ``fmt`` in ``form``."""
    rows = not transpose and form == "fp4" and fmt.format == "nvfp4" and not fmt.rotation
    return supports(fmt, form, transpose) or rows and knows(fmt)


def _made(x: Tensor, rows: int, padded: int, form: str) -> Tensor:
    """Room for an operand of its own."""
    if form != "fp4":
        return _operand(x, rows, padded, form)
    width = padded // 2
    rows += block_scaled.tail(rows, width, form) if width else 0
    return x.new_empty((rows, width), dtype=torch.uint8)


def _form(form: str) -> int:
    return FORMS["scales" if form == "fp4" else form]


def _padded(n: int, fmt: TensorFormat) -> int:
    return _ceil(n, fmt.padding) * fmt.padding


def _factor(x: Tensor, fmt: TensorFormat) -> Tensor:
    """Room for the outer scale; 1 of a tensor without elements."""
    return x.new_ones(1 if fmt.format == "nvfp4" else 0, dtype=torch.float32)


def _numerics(fmt: TensorFormat) -> dict[str, int]:
    return {"MX": int(fmt.format == "mxfp4"), "SR": int(fmt.stochastic)}


# ---- along rows -----------------------------------------------------------------------------


def quantize(
    x: Tensor, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [R, C] along its last axis, nearest -> codes, scales, factor, operand."""
    return _rows((x, None, None, None), None, None, fmt, form)


def act_quantize(
    term: Affine, act: str, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` of act((acc * row) * col + bias), as `cuda_kernels.act_quantize`."""
    return _rows(term, None, act, fmt, form)


def glu_quantize(
    gate: Affine, up: Affine, act: str, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` of act(gate) * up, as `cuda_kernels.glu_quantize`."""
    return _rows(gate, up, act, fmt, form)


def _rows(
    x: Affine, up: Affine | None, act: str | None, fmt: TensorFormat, form: str,
    seed: Tensor | None = None, stream: int = 0, with_codes: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    keep: list[Tensor] = []
    term, dtype, wide = _term(x, keep)
    rows, cols = x[0].shape
    codes, scales, padded = _empty(x[0], rows * with_codes, cols, fmt)
    operand, factor = _made(x[0], rows, padded, form), _factor(x[0], fmt)
    if rows * cols == 0:
        return codes, scales, factor, operand
    other = Term()
    if up is not None:
        other, _, wide_up = _term(up, keep)
        wide = wide and wide_up
    same = act is None and up is None and not _parts(x)
    mx = fmt.format == "mxfp4"
    amax = None if mx else _tensor_amax(x[0]) if same else x[0].new_zeros(1, dtype=torch.int32)
    shift = min(8, (padded // 8 - 1).bit_length())  # 2^shift threads of a CTA side by side
    arguments = Blocks(
        term, other, rows, cols, padded, wide, shift, _pointer(amax), _pointer(codes),
        _pointer(scales), _pointer(factor), _pointer(operand), _seed(seed, fmt), stream,
    )  # fmt: skip
    defines = {
        "XD": dtype, **_numerics(fmt), "CODES": int(with_codes), "OPERAND": _form(form),
        "ACT": ACTS[act], "GATED": int(up is not None), "TERM": _parts(x),
        "UP": 0 if up is None else _parts(up), "WIDE": int(wide and cols == padded),
        "BIG": int(rows * padded >= BIG),
    }  # fmt: skip
    device = x[0].device
    for kernel in ("quantize_blocks",) if mx or same else ("term_amax", "quantize_blocks"):
        resident = _resident("blocks.cu", kernel, defines, 256, device)
        across = _ceil(padded, 8 << shift)
        grid = (across, min(_ceil(rows, 256 >> shift), max(1, resident // across)))
        _launch("blocks.cu", kernel, defines, arguments, grid, 256, device)
    return codes, scales, factor, operand


# ---- along columns --------------------------------------------------------------------------


def quantize_transposed(x: Tensor, fmt: TensorFormat, form: str = "none"):
    """`quantize` of x's transpose [C, R], rotated where the format says so."""
    rows, cols = x.shape
    padded = _padded(rows, fmt)
    codes = x.new_empty((cols, padded // 2), dtype=torch.uint8)
    scales = x.new_empty((cols, padded // BLOCK[fmt.format]), dtype=torch.uint8)
    factor = _factor(x, fmt)
    beside = codes.new_empty(block_scaled.scale_bytes(*scales.shape) if form == "fp4" else 0)
    if rows * cols:
        out = {"codes": codes, "scales": scales, "outer": factor, "operand": beside}
        _columns(x, None, fmt, out, "none")
    if form == "fp4":
        return codes, scales, factor, beside
    if form == "none":
        return codes, scales, factor, _operand(x, 0, 0, form)
    return codes, scales, factor, decode(codes, scales, fmt, padded, form)


def turned_tiles(codes: Tensor, scales: Tensor, cols: int) -> Tensor:
    """The operand of the transpose [cols, R padded to 16] of saved NVFP4 codes in tiles."""
    codes, scales = codes.contiguous(), scales.contiguous()
    rows, padded_rows = codes.shape[0], _ceil(codes.shape[0], 16) * 16
    out = _made(codes, cols, padded_rows, "fp4")
    arguments = Turned(
        _pointer(codes), _pointer(scales), rows, cols, 2 * codes.shape[1], padded_rows,
        _pointer(out),
    )  # fmt: skip
    if out.numel():
        grid = (_ceil(cols, 64), _ceil(padded_rows, 128))
        _launch("turned.cu", "turn_tiles", {}, arguments, grid, 256, codes.device)
    return out


def _columns(
    x: Tensor, fold: Tensor | None, fmt: TensorFormat, out: dict[str, Tensor], form: str,
    sums: bool = False, seed: Tensor | None = None, stream: int = 0,
) -> Tensor | None:  # fmt: skip
    """Launch columns.cu on x [R, C], not empty; with ``sums`` returns FP32 column sums [C]."""
    source = x
    x, _ = _matrix(x)
    rows, cols = x.shape
    size = x.element_size()
    pairs = x.data_ptr() % (2 * size) == 0 and x.stride(0) % 2 == 0 and cols % 2 == 0
    fold = None if fold is None else fold.float().contiguous()
    tile = 8 // COLUMNS_ACROSS * (32 if form == "bf16" else 128)
    beside = form == "none" and "operand" in out and out["operand"].numel() > 0
    across = _ceil(cols, 64 * COLUMNS_ACROSS)
    chunk = min(1024, max(1, _ceil(rows * across // WAVES, tile)) * tile)
    grid = (across, _ceil(rows, chunk))
    part = source.new_empty((grid[1], cols) if sums else 0, dtype=torch.float32)
    known = not fmt.rotation and fold is None  # the maximum is that of x
    amax = None
    if fmt.format == "nvfp4":
        amax = _tensor_amax(x) if known else source.new_zeros(1, dtype=torch.int32)
    padded, padded_rows = _ceil(cols, BLOCK[fmt.format]) * BLOCK[fmt.format], _padded(rows, fmt)
    arguments = Columns(
        _pointer(x), _pointer(fold), x.stride(0), rows, cols, padded, padded_rows, chunk,
        _pointer(amax), _seed(seed, fmt), stream, *(_pointer(out.get(k)) for k in OUTPUTS),
        _pointer(part),
    )  # fmt: skip
    defines = {
        "XD": DTYPES[x.dtype], **_numerics(fmt), "ROT": fmt.rotation or 0, "FORM": _form(form),
        "SWIZZLE": int(beside),
        "FOLD": int(fold is not None), "SUMS": int(sums), "ALIGNED": int(pairs),
        "BIG": int(max(rows * padded, cols * padded_rows) >= BIG), "ACROSS": COLUMNS_ACROSS,
    }  # fmt: skip
    if amax is not None and not known:
        _launch("columns.cu", "columns_amax", defines, arguments, grid, 256, x.device)
    _launch("columns.cu", "quantize_columns", defines, arguments, grid, 256, x.device)
    return part.sum(0) if sums else None


OUTPUTS = ("codes", "scales", "outer", "operand")


# ---- gradients ------------------------------------------------------------------------------


def row_gradient(
    g: Tensor, fmt: TensorFormat, form: str, seed: Tensor, stream: int
) -> tuple[Tensor, Tensor]:
    """DGRAD's operand [M, Np] of g [M, N] and its factor."""
    _, _, factor, operand = _rows((g, None, None, None), None, None, fmt, form, seed, stream, False)
    return operand, factor


def column_gradient(
    g: Tensor, fold: Tensor | None, fmt: TensorFormat, form: str, sums: bool, seed: Tensor,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """WGRAD's operand [N, Mp] of (g * fold[:, None])^T, its factor, and FP32 sums [N] or [0].

    A rotated gradient has a stream of its own.
    """
    rows, cols = g.shape
    factor = _factor(g, fmt)
    operand = _made(g, cols, _padded(rows, fmt), form)
    total = g.new_zeros(cols if sums else 0, dtype=torch.float32)
    if rows * cols == 0:
        return operand, factor, total
    stream += ROTATED_STREAM if fmt.rotation else 0
    out = {"outer": factor, "operand": operand}
    found = _columns(g, fold, fmt, out, form, sums, seed, stream)
    return operand, factor, total if found is None else found
