"""The CUDA kernels as functions of tensors: the same bits as `reference`, one family a source file.

| function | source | what it reads and writes |
|---|---|---|
| `quantize`, `act_quantize`, `glu_quantize` | rows.cu, tensors.cu | a matrix to codes and operand |
| `decode`, `requantize` | transposes.cu | saved codes to an operand, by rows or transposed |
| `act_grad` | hidden.cu | a chain's hidden gradient, over what it is made of, and its maxima |
| `quantize_grad` | gradient.cu | a gradient (read twice for row scales) in both orientations |
| `cuda_fp8` | fp8.cu | FP8 with FP32 scales: all of it, in tiles of 128 x 128 |

NVFP4 with one outer scale for the tensor, and MXFP4: `cuda_fourbit`.

An operand's form is "none", "e4m3" (uint8), "bf16" or one of block_scaled.py. A factor is FP32 [R],
[1] or [0], as `reference.split`. Nothing waits for the device; M, N and K are not restricted.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from . import block_scaled, cuda_loader
from .cuda_arguments import Amax, Gradient, Hidden, Output, Rows, Saved, Sums, Term, Tiles
from .errors import InputError
from .formats import BITS, BLOCK, TensorFormat

FORMS = {"none": 0, "e4m3": 1, "bf16": 2, "scales": 3}  # "scales": swizzled, beside the codes
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTS: dict[str | None, int] = {
    None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "silu": 5, "quick_gelu": 6,
}  # fmt: skip
MODES: dict = {"None": 0, "four_over_six": 1, "fp8_exact": 2, 32: 3, "row": 4, "half": 5}
# Warps of a CTA side by side over columns; rows of tiles that transposes work on together.
GRADIENT_ACROSS, TRANSPOSE_ACROSS, TRANSPOSE_GROUP = 2, 1, 16
AMAX_ROWS, AMAX_COLS = 256, 256
BIG = 2**35  # elements from which groups of random bits have 64-bit numbers
WAVES = 1024  # column tiles x row chunks of a gradient, about; a function of the shape alone


# Affine terms: accumulator [M, N], row factor [M] or [1], column factor [N] or [1], bias [N].
Affine = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


# ---- helpers --------------------------------------------------------------------------------


def supports(fmt: TensorFormat, form: str = "none") -> bool:
    """Whether `quantize` knows ``fmt`` (nearest) and can write the operand ``form``."""
    form = _kernel_form(fmt, form)
    if form not in FORMS or fmt.rotation is not None or fmt.stochastic:
        return False
    if form == "e4m3" and not fmt.exact_in_fp8:
        return False
    if fmt.format == "mxfp8":
        return fmt.block in (32, "row")
    if fmt.format != "nvfp4" or fmt.scale_search not in (None, "four_over_six", "half"):
        return False
    return fmt.block != "tile" or (fmt.outer == "tensor" and fmt.block_scales == "e4m3")


def supports_gradient(fmt: TensorFormat | None, form: str = "bf16") -> bool:
    """Whether `quantize_grad` and `requantize` can write ``fmt`` in ``form``."""
    if fmt is None:
        return True
    if fmt.format != "mxfp8" or fmt.rotation is not None:
        return False
    codes = "e4m3" if fmt.block == "row" else "scales"
    return fmt.block in (32, "row") and _gradient_form(fmt, form) in ("bf16", codes)


def _gradient_form(fmt: TensorFormat, form: str) -> str:
    """The kernels' word, of `FORMS`, for an operand of its own in ``form``."""
    if form not in block_scaled.FORMS:
        return form
    return "scales" if block_scaled.has_tail(fmt, form) else "e4m3"


def _kernel_form(fmt: TensorFormat, form: str) -> str:
    """The kernels' word, of `FORMS`, for what is beside saved codes."""
    if form not in block_scaled.FORMS:
        return form
    places = {"scales": "scales", "nothing": "none", "values": "e4m3"}
    return places[block_scaled.in_place(fmt, form)]


def _ceil(n: int, unit: int) -> int:
    return (n + unit - 1) // unit


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.numel() == 0 else x.data_ptr()


def _matrix(x: Tensor) -> tuple[Tensor, bool]:
    """x with adjacent elements in a row, and whether rows lie on 16-byte boundaries."""
    if x.ndim != 2:
        raise InputError(f"a matrix is needed, not {x.ndim} dimensions")
    if x.dtype not in DTYPES:
        x = x.to(torch.float32)
    x = x.detach()
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    bytes_apart = x.stride(0) * x.element_size()
    return x, x.data_ptr() % 16 == 0 and bytes_apart % 16 == 0


def _term(term: Affine, keep: list[Tensor]) -> tuple[ctypes.Structure, int, bool]:
    """The kernel's `Term`, the accumulator's dtype and width; ``keep`` holds what it points to."""
    acc, wide = _matrix(term[0])
    row, col, bias = (None if t is None else t.detach().float().contiguous() for t in term[1:])
    keep += [t for t in (acc, row, col, bias) if t is not None]
    strides = [int(t is not None and t.numel() > 1) for t in (row, col)]
    pointers = (_pointer(t) for t in (acc, row, col, bias))
    return Term(*pointers, acc.stride(0), *strides), DTYPES[acc.dtype], wide


def _operand(x: Tensor, rows: int, cols: int, form: str) -> Tensor:
    if form == "none":
        return x.new_empty(0, dtype=torch.float32)
    if form == "scales":  # behind the codes
        rows += block_scaled.tail(rows, cols, "mx") if cols else 0
        return x.new_empty((rows, cols), dtype=torch.uint8)
    return x.new_empty((rows, cols), dtype=torch.uint8 if form == "e4m3" else torch.bfloat16)


def _in_place(codes: Tensor, scales: Tensor, form: str) -> Tensor:
    """What `quantize` writes in the place of an operand whose rows are the codes."""
    if form == "none":
        return codes.new_empty(0)
    return codes.new_empty(block_scaled.scale_bytes(*scales.shape))


def _launch(file, kernel, defines, arguments, grid, threads, device, shared=0) -> None:
    if grid[0] > 0 and grid[1] > 0:
        names = tuple(defines.items())
        cuda_loader.launch(file, kernel, names, arguments, grid, threads, device, shared)


def _resident(file, kernel, defines, threads, device, shared=0) -> int:
    index = device.index or 0
    return cuda_loader.resident(file, kernel, tuple(defines.items()), threads, index, shared)


def _tensor_amax(x: Tensor) -> Tensor:
    """Bits of max |x| as int32 [1]."""
    amax = x.new_zeros(1, dtype=torch.int32)
    x, wide = _matrix(x)
    rows, cols, ld = *x.shape, x.stride(0)
    if ld == cols and x.numel() % 8192 == 0:
        rows, cols, ld = x.numel() // 8192, 8192, 8192
    arguments = Amax(_pointer(x), rows, cols, ld, wide, amax.data_ptr())
    defines = {"XD": DTYPES[x.dtype], "OPERAND": 0}
    grid = (min(rows, _resident("tensors.cu", "tensor_amax", defines, 256, x.device)), 1)
    _launch("tensors.cu", "tensor_amax", defines, arguments, grid, 256, x.device)
    return amax


class Team(NamedTuple):
    """How a row is shared: threads of a CTA, 16-element blocks of each (0: the row is read twice),
    CTAs of 512 threads a multiprocessor's registers are divided for, rows in shared memory."""

    threads: int
    held: int
    ctas: int
    stages: int


def _team(blocks: int, mode: int, same: bool, block_bytes: int, most_bytes: int) -> Team:
    """The team for rows of ``blocks`` blocks; ``same``: the tensor itself is quantized.

    Its rows in flight, of ``block_bytes`` a block, fit into ``most_bytes`` of shared memory.
    """
    for held, most in TEAMS[same]:
        threads = max(32, _ceil(_ceil(blocks, held), 32) * 32)
        stages = min(2, most_bytes // (threads * held * block_bytes))
        if threads <= most and stages:
            # Searches in FP32 and four blocks need more than 64 registers.
            return Team(threads, held, 1 if mode in (1, 2) or held > 2 else 2, stages)
    return Team(512, 0, 1, 1)


def row_team(
    padded: int, mode: int, same: bool, block_bytes: int = 32, most_bytes: int = 192 << 10
) -> tuple[Team, dict[str, int]]:
    """The team for rows of ``padded`` columns, and its defines for rows on 16-byte boundaries."""
    team = _team(padded // 16, mode, same, block_bytes, most_bytes)
    return team, {
        "BLOCKS": team.held, "WIDE": 1, "STAGES": team.stages, "CTAS": team.ctas,
        "THREADS": team.threads if team.held else 0,
        "FULL": int(padded == 16 * team.threads * team.held),
    }  # fmt: skip


# Blocks of a thread and the most threads, in order of preference.
TEAMS = {True: ((1, 64), (2, 512), (4, 512)), False: ((1, 64), (2, 512), (4, 512))}


# ---- quantize -------------------------------------------------------------------------------


def quantize(
    x: Tensor, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [R, C] along its last axis, nearest -> codes, scales, factor, operand (see `supports`)."""
    amax = _tensor_amax(x) if fmt.outer == "tensor" else None
    if fmt.block == "tile":
        return _quantize_tiles(x, amax, form)
    return _quantize_rows((x, None, None, None), None, None, fmt, form, amax)


def act_quantize(
    term: Affine, act: str, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = act((acc * row) * col + bias) [M, N] in FP32, never stored, then as `quantize`.

    Formats with row scales only. Values of the activation may differ from PyTorch's in the last
    places.
    """
    return _quantize_rows(term, None, act, fmt, form, None)


def glu_quantize(
    gate: Affine, up: Affine, act: str, fmt: TensorFormat, form: str = "none"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h = act(gate) * up of two affine terms with accumulators of one dtype, as `act_quantize`."""
    return _quantize_rows(gate, up, act, fmt, form, None)


def _empty(x: Tensor, rows: int, cols: int, fmt: TensorFormat) -> tuple[Tensor, Tensor, int]:
    """Codes, scales and the padded number of columns."""
    block = BLOCK[fmt.format]
    padded = _ceil(cols, block) * block
    codes = x.new_empty((rows, padded * BITS[fmt.format] // 8), dtype=torch.uint8)
    return codes, x.new_empty((rows, padded // block), dtype=torch.uint8), padded


def _quantize_rows(
    x: Affine, up: Affine | None, act: str | None, fmt: TensorFormat, form: str, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keep: list[Tensor] = []
    term, dtype, wide = _term(x, keep)
    rows, cols = x[0].shape
    codes, scales, padded = _empty(x[0], rows, cols, fmt)
    same = fmt.format == "mxfp8" and form == "e4m3"  # the codes are the operand
    beside = form in block_scaled.FORMS
    form = _kernel_form(fmt, form)
    if beside and form != "e4m3":
        operand = _in_place(codes, scales, form)
    else:
        operand = codes if same else _operand(x[0], rows, padded, form)
    size = 0 if fmt.block == 32 else rows if amax is None else 1
    factor = x[0].new_ones(size, dtype=torch.float32) if rows * cols == 0 else (
        x[0].new_empty(size, dtype=torch.float32)
    )  # fmt: skip
    if rows * cols == 0:
        return codes, scales, _empty_factor(factor, fmt), operand
    other = Term()
    if up is not None:
        other, _, wide_up = _term(up, keep)
        wide = wide and wide_up
    mode = _row_mode(fmt)
    device, shared = x[0].device, 0
    block_bytes = 16 * x[0].element_size() * (1 + (up is not None))
    same_tensor = act is None and up is None and not _parts(x)
    most = cuda_loader.shared_memory(device)
    team, shape = row_team(padded, mode, same_tensor, block_bytes, most)
    arguments = Rows(
        term, other, rows, cols, padded, _pointer(amax), codes.data_ptr(),
        scales.data_ptr(), _pointer(factor), None if same else _pointer(operand),
    )  # fmt: skip
    defines = {
        "XD": dtype, "MODE": mode, "OPERAND": 0 if same else FORMS[form], "ACT": ACTS[act],
        "GATED": int(up is not None), "TERM": _parts(x), "UP": 0 if up is None else _parts(up),
        **shape, "WIDE": int(wide and cols == padded),
    }  # fmt: skip
    if defines["WIDE"] and team.held:
        shared = team.stages * team.held * team.threads * block_bytes
    resident = _resident("rows.cu", "quantize_rows", defines, team.threads, device, shared)
    grid = (min(rows, resident), 1)
    _launch("rows.cu", "quantize_rows", defines, arguments, grid, team.threads, device, shared)
    return codes, scales, factor, operand


def _parts(term: Affine) -> int:
    """Which parts a term has, as the kernel's TermParts."""
    _, row, col, bias = term
    columns = 0 if col is None else 2 if col.numel() == 1 else 4
    return int(row is not None) + columns + 8 * (bias is not None)


def _row_mode(fmt: TensorFormat) -> int:
    if fmt.format == "mxfp8":
        return MODES[fmt.block]
    if fmt.block_scales == "fp8_exact" and fmt.scale_search is None:
        return MODES["fp8_exact"]
    return MODES[str(fmt.scale_search)]


def _empty_factor(factor: Tensor, fmt: TensorFormat) -> Tensor:
    """Of a tensor without elements: outer scales are 1, MXFP8's row scales 2^-127."""
    return factor.fill_(2.0**-127) if fmt.format == "mxfp8" else factor


def _quantize_tiles(x: Tensor, amax: Tensor | None, form: str):
    fmt = TensorFormat("nvfp4", block="tile")
    rows, cols = x.shape
    codes, scales, padded = _empty(x, rows, cols, fmt)
    beside, form = form in block_scaled.FORMS, _kernel_form(fmt, form)
    operand = _in_place(codes, scales, form) if beside else _operand(x, rows, padded, form)
    outer = x.new_ones(1, dtype=torch.float32)
    x, wide = _matrix(x)
    arguments = Tiles(
        _pointer(x), rows, cols, padded, x.stride(0), wide, _pointer(amax), _pointer(codes),
        _pointer(scales), outer.data_ptr(), _pointer(operand),
    )  # fmt: skip
    grid = (_ceil(padded // 16, 16), _ceil(rows, 16))
    defines = {"XD": DTYPES[x.dtype], "OPERAND": FORMS[form]}
    _launch("tensors.cu", "quantize_tiles", defines, arguments, grid, 256, x.device)
    return codes, scales, outer, operand


# ---- saved codes ----------------------------------------------------------------------------


def _source(fmt: TensorFormat) -> int:
    if fmt.float_scales:
        return 2  # the codes alone
    return {"nvfp4": 0, "mxfp4": 3}.get(fmt.format, 2 if fmt.block == "row" else 1)


def _saved(codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int) -> dict:
    rows = codes.shape[0]
    return {
        "codes": _pointer(codes), "scales": _pointer(scales), "rows": rows, "cols": cols,
        "padded": scales.shape[1] * BLOCK[fmt.format],
        "padded_rows": _ceil(rows, fmt.padding) * fmt.padding,
    }  # fmt: skip


def _transpose(kernel: str, defines: dict, arguments, form: str, cols: int, device) -> None:
    """Launch a kernel whose CTAs of four warps share tiles of 64 bytes of rows and 64 columns."""
    rows, arguments.group = arguments.padded_rows, TRANSPOSE_GROUP
    tiles = _ceil(rows, 32 if form == "bf16" else 64) * _ceil(cols, 64)
    resident = _resident("transposes.cu", kernel, defines, 128, device)
    grid = (min(_ceil(tiles, 4), resident), 1)
    _launch("transposes.cu", kernel, defines, arguments, grid, 128, device)


def decode(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, form: str, transpose: bool = False
) -> Tensor:
    """The operand of saved codes, exactly: [R, Cp], or [cols, R padded to the block with zeros].

    ``form`` "e4m3" needs a format that is exact in it, and so does "mx". NVFP4, MXFP4, MXFP8; FP8's
    codes alone.
    """
    form = "e4m3" if form == "mx" else form
    codes, scales = codes.contiguous(), scales.contiguous()
    fields = _saved(codes, scales, fmt, cols)
    shape = (cols, fields["padded_rows"]) if transpose else (fields["rows"], fields["padded"])
    if not transpose and fmt.format in ("mxfp8", "fp8") and form == "e4m3":
        return codes.clone()
    out = _operand(codes, shape[0], shape[1], form)
    defines = {
        "SOURCE": _source(fmt), "FORM": FORMS[form], "MODE": 1, "SR": 0, "FACTOR": 0, "BIG": 0,
        "ACROSS": TRANSPOSE_ACROSS,
    }  # fmt: skip
    arguments = Saved(**fields, out=_pointer(out))
    if out.numel() == 0:
        return out
    if transpose:
        _transpose("decode_transpose", defines, arguments, form, cols, codes.device)
        return out
    grid = (min(_ceil(out.numel() // 8, 256), 1 << 20), 1)
    _launch("transposes.cu", "decode_rows", defines, arguments, grid, 256, codes.device)
    return out


def requantize(
    codes: Tensor, scales: Tensor, factor: Tensor, source: TensorFormat, cols: int,
    fmt: TensorFormat, form: str, seed: Tensor | None, stream: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Saved codes with their factor, transposed, in MXFP8 -> operand [cols, Rp] and factor."""
    codes, scales, factor = (t.contiguous() for t in (codes, scales, factor))
    fields = _saved(codes, scales, source, cols)
    fields["padded_rows"] = _ceil(fields["rows"], 32) * 32
    form = _gradient_form(fmt, form)
    out = _operand(codes, cols, fields["padded_rows"], form)
    by_row = fmt.block == "row"
    out_factor = codes.new_empty(cols if by_row else 0, dtype=torch.float32)
    if out.numel() == 0:
        return out, out_factor.fill_(2.0**-127)
    amax = codes.new_zeros(cols if by_row else 0, dtype=torch.int32)
    defines = {
        "SOURCE": _source(source), "FORM": FORMS[form], "MODE": 1 if by_row else 2,
        "SR": int(fmt.stochastic), "FACTOR": int(factor.numel() > 0),
        "BIG": int(cols * fields["padded_rows"] >= BIG), "ACROSS": TRANSPOSE_ACROSS,
    }  # fmt: skip
    arguments = Saved(
        **fields, factor=_pointer(factor), factor_stride=int(factor.numel() > 1),
        amax=_pointer(amax), seed=_seed(seed, fmt), stream=stream, out=out.data_ptr(),
        out_factor=_pointer(out_factor),
    )  # fmt: skip
    if by_row:
        over = (_ceil(fields["rows"], AMAX_ROWS), _ceil(cols, AMAX_COLS))
        _launch("transposes.cu", "requantize_amax", defines, arguments, over, 256, codes.device)
    _transpose("requantize_transpose", defines, arguments, form, cols, codes.device)
    return out, out_factor


# ---- gradients ------------------------------------------------------------------------------


def _chunk(rows: int, cols: int) -> int:
    """Rows that one CTA walks: about `WAVES` CTAs, a multiple of a CTA's tiles, at most 1024."""
    tile = 8 // GRADIENT_ACROSS * 64
    wanted = rows * _ceil(cols, 64 * GRADIENT_ACROSS) // WAVES
    return min(1024, max(1, _ceil(wanted, tile)) * tile)


def _mode(fmt: TensorFormat | None) -> int:
    return 0 if fmt is None else 1 if fmt.block == "row" else 2


def _side(g: Tensor, fmt: TensorFormat | None, form: str, rows: int, cols: int):
    if fmt is None:
        return _operand(g, 0, 0, "none"), g.new_empty(0, dtype=torch.float32)
    operand = _operand(g, rows, _ceil(cols, 32) * 32, _gradient_form(fmt, form))
    factor = g.new_empty(rows if fmt.block == "row" else 0, dtype=torch.float32)
    return operand, factor.fill_(2.0**-127) if cols == 0 else factor


def quantize_grad(
    g: Tensor,
    fold: Tensor | None,
    dgrad: TensorFormat | None,
    wgrad: TensorFormat | None,
    form_d: str,
    form_w: str,
    sums: bool,
    seed: Tensor | None,
    stream: int,
    row_amax: Tensor | None = None,
    col_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g [M, N] in both orientations from one set of random bits, and its column sums.

    Returns dgrad's operand [M, Np] and factor, wgrad's operand [N, Mp] of (g * fold[:, None])^T
    and factor, FP32 sums [N]; [0] tensors for what is left out. ``row_amax`` and ``col_amax``:
    what `act_grad` found, to be given together.
    """
    rows, cols = g.shape
    x, wide = _matrix(g)
    fold = None if fold is None else fold.float().contiguous()
    d, d_factor = _side(g, dgrad, form_d, rows, cols)
    w, w_factor = _side(g, wgrad, form_w, cols, rows)
    total = g.new_zeros(cols if sums else 0, dtype=torch.float32)
    if rows * cols == 0:
        return d, d_factor, w, w_factor, total
    chunk = _chunk(rows, cols)
    grid = (_ceil(cols, 64 * GRADIENT_ACROSS), _ceil(rows, chunk))
    part = g.new_empty((grid[1], cols) if sums and grid[1] > 1 else 0, dtype=torch.float32)
    known = row_amax is not None and row_amax.numel() > 0
    if not known:
        row_amax, col_amax = _maxima(g, rows * (_mode(dgrad) == 1), cols * (_mode(wgrad) == 1))
    padded = _ceil(cols, 32) * 32
    arguments = Gradient(
        _pointer(x), _pointer(fold), x.stride(0), rows, cols, padded, _ceil(rows, 32) * 32,
        AMAX_ROWS, wide, _pointer(row_amax), _pointer(col_amax), _seed(seed, dgrad, wgrad), stream,
        _pointer(d), _pointer(w), _pointer(d_factor), _pointer(w_factor),
        _pointer(part if grid[1] > 1 else total),
    )  # fmt: skip
    defines = {
        "XD": DTYPES[x.dtype], "SUMS": int(sums), "DMODE": _mode(dgrad), "WMODE": _mode(wgrad),
        "DFORM": FORMS[_gradient_form(dgrad, form_d)] if dgrad else 0,
        "WFORM": FORMS[_gradient_form(wgrad, form_w)] if wgrad else 0,
        "DSR": _stochastic(dgrad), "WSR": _stochastic(wgrad),
        "FOLD": int(fold is not None), "ALIGNED": int(wide and cols % 8 == 0),
        "BIG": int(rows * padded >= BIG), "ACROSS": GRADIENT_ACROSS,
    }  # fmt: skip
    if not known and 1 in (_mode(dgrad), _mode(wgrad)):
        over = (_ceil(cols, AMAX_COLS), _ceil(rows, AMAX_ROWS))
        _launch("gradient.cu", "gradient_amax", defines, arguments, over, 256, g.device)
    arguments.chunk = chunk
    _launch("gradient.cu", "quantize_gradient", defines, arguments, grid, 256, g.device)
    if part.numel():
        add_chunks(part, total)
    return d, d_factor, w, w_factor, total


def _seed(seed: Tensor | None, *formats: TensorFormat | None) -> int | None:
    """Where the seed lies; a kernel that rounds stochastically reads it."""
    if seed is None and any(map(_stochastic, formats)):
        raise InputError("stochastic rounding needs a seed (an int64 tensor on the device)")
    return _pointer(seed)


def _stochastic(fmt: TensorFormat | None) -> int:
    return int(fmt is not None and fmt.stochastic)


def add_chunks(part: Tensor, out: Tensor) -> None:
    """The sum over the first axis of ``part`` [chunks, N], in one order, to ``out`` [N]; FP32."""
    chunks, cols = part.shape
    arguments = Sums(part.data_ptr(), chunks, cols, out.data_ptr())
    defines = {"XD": 1, "OPERAND": 0}
    _launch("tensors.cu", "add_chunks", defines, arguments, (_ceil(cols, 32), 1), 128, out.device)


def _maxima(x: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Zeros for the bits of maxima: int32 [rows] and [cols] of one allocation."""
    both = x.new_zeros(rows + cols, dtype=torch.int32)
    return both[:rows], both[rows:]


def act_grad(
    g: Affine, z: Affine, up: Affine | None, act: str, folds: tuple, amax: bool, out: Tensor
) -> tuple[Tensor, ...]:
    """The gradient dz [M, N] of act(z), or those of both terms of act(z) * up; ``out`` holds dz.

    g = (acc * row) * col, z and ``up`` affine terms with accumulators of one dtype; FP32, written
    in g's dtype. ``out`` [M, N] is contiguous and may be g's accumulator. Returns, with ``amax``,
    the bits of the maxima of dz's rows [M] and of the columns [N] of dz * fold[:, None], int32
    (else [0]); with ``up`` also du [M, N] and its maxima.
    """
    keep: list[Tensor] = []
    terms = [_term(t, keep) for t in (g, z) + ((up,) if up is not None else ())]
    rows, cols = g[0].shape
    results: list[Tensor] = []
    outputs = []
    for i, fold in enumerate(folds):
        row_max, col_max = (out.new_zeros(n * amax, dtype=torch.int32) for n in (rows, cols))
        values = torch.empty_like(out) if i else out
        results += ([values] if i else []) + [row_max, col_max]
        keep += [values] + ([] if fold is None else [fold.float().contiguous()])
        outputs.append(
            Output(
                _pointer(values), _pointer(row_max), _pointer(col_max),
                None if fold is None else _pointer(keep[-1]),
            )
        )  # fmt: skip
    wide = all(w for *_, w in terms) and out.data_ptr() % 16 == 0
    arguments = Hidden(
        terms[0][0], terms[1][0], terms[2][0] if up is not None else Term(), rows, cols, wide,
        outputs[0], outputs[1] if up is not None else Output(),
    )  # fmt: skip
    defines = {
        "XD": terms[0][1], "ZD": terms[1][1], "ACT": ACTS[act], "GATED": int(up is not None),
        "GT": _parts(g), "ZT": _parts(z), "UT": 0 if up is None else _parts(up),
        "AMAX": int(amax), "FOLD": sum((f is not None) << i for i, f in enumerate(folds)),
        "ALIGNED": int(wide and cols % 8 == 0),
    }  # fmt: skip
    grid = (_ceil(cols, AMAX_COLS), _ceil(rows, AMAX_ROWS))
    _launch("hidden.cu", "hidden_gradient", defines, arguments, grid, 256, out.device)
    return tuple(results)
