"""The CPU kernels: the same bits as `reference`, for CPU tensors, vectorized and on all threads.

| function | what it does |
|---|---|
| `available` | whether the library is there, and why not |
| `supports` | which formats it knows; others go through `reference` |
| `quantize`, `decode`, `quantize_grad` | one pass each over the tensor |
"""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from .errors import InputError
from .formats import BITS, BLOCK, TensorFormat
from .native_library import Decode, Gradient, Matrix, Quantize, Side, load
from .nvfp4 import bound, factors
from .reference import padded

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KINDS = {"nvfp4": 0, "mxfp8": 1, "mxfp4": 2}


def available() -> tuple[bool, str]:
    """Whether the library is built and loaded (built now if need be); else the reason, one line."""
    library, reason = load()
    return library is not None, reason


def _library() -> ctypes.CDLL:
    library, reason = load()
    if library is None:
        raise RuntimeError(f"fp4compile's CPU kernels: {reason}")
    return library


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None or x.numel() == 0 else x.data_ptr()


def _matrix(x: Tensor) -> tuple[Tensor, Matrix, bool]:
    """x as rows whose elements are adjacent (its transpose where its columns are: True)."""
    if x.device.type != "cpu" or x.ndim != 2:
        raise InputError(f"a matrix on the CPU is needed, not {x.ndim}-d on {x.device}")
    if x.dtype not in DTYPES:
        x = x.to(torch.float32)
    x = x.detach()
    columns = x.stride(1) != 1 and x.stride(0) == 1 and x.stride(1) >= x.shape[0]
    if columns:
        x = x.t()
    elif x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    return x, Matrix(x.data_ptr(), *x.shape, x.stride(0), DTYPES[x.dtype]), columns


def _group(fmt: TensorFormat) -> int:
    """Elements that share an MX scale; 0: the row."""
    return 0 if fmt.block == "row" else int(fmt.block or 32) if fmt.format != "nvfp4" else 16


def _search(fmt: TensorFormat) -> int:
    if fmt.block_scales == "fp8_exact":
        return 3 if fmt.scale_search == "half" else 2
    return 1 if fmt.scale_search is not None else 0


def _check_seed(fmt: TensorFormat, seed: Tensor | None) -> Tensor | None:
    if not fmt.stochastic:
        return None
    if seed is None or seed.dtype != torch.int64 or seed.numel() != 1 or seed.device.type != "cpu":
        raise InputError(f"{fmt}: stochastic rounding needs a seed (an int64 tensor on the CPU)")
    return seed


# ---- kernels --------------------------------------------------------------------------------


def supports(fmt: TensorFormat) -> bool:
    """Whether `quantize` and `decode` know ``fmt``; the others go through `reference`."""
    if fmt.format not in KINDS or fmt.rotation is not None:
        return False
    if isinstance(fmt.scale_search, str) and fmt.scale_search not in ("four_over_six", "half"):
        return False
    tile, exact = fmt.block == "tile", fmt.block_scales == "fp8_exact"
    return not (tile and fmt.outer == "row" or exact and (tile or fmt.stochastic))


def quantize(
    x: Tensor,
    fmt: TensorFormat,
    seed: Tensor | None = None,
    stream: int = 0,
    bits: Tensor | None = None,
    values: bool = False,
    transpose: bool = False,
    shared_bits: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x [R, C] (``transpose``: its transpose is [R, C]) -> codes, scales, outer, values.

    Layouts as `reference.quantize`; x FP32, BF16 or FP16 with any strides. ``values``: FP32
    [R, Cp], code x block scale, or the code alone for MXFP8 row scales; None unless asked for.
    Stochastic rounding takes ``bits`` (integers [R, C] or [R, Cp]) or draws from ``seed`` (int64)
    and ``stream``; ``shared_bits`` with ``transpose``: the bits of the untransposed element.
    """
    base, matrix, columns = _matrix(x)
    rows, cols = (x.shape[1], x.shape[0]) if transpose else x.shape
    width, block = padded(cols, fmt), BLOCK[fmt.format]
    codes = torch.empty((rows, width * BITS[fmt.format] // 8), dtype=torch.uint8, device="cpu")
    scales = torch.empty((rows, width // block), dtype=torch.uint8, device="cpu")
    shape = (0,) if fmt.format != "nvfp4" else (rows,) if fmt.outer == "row" else ()
    outer = torch.empty(shape, dtype=torch.float32, device="cpu")
    out = torch.empty((rows, width), dtype=torch.float32, device="cpu") if values else None
    if fmt.stochastic and bits is not None:
        bits = torch.nn.functional.pad(bits, (0, width - bits.shape[1]))
        bits = bits.to(torch.int16).contiguous()
    else:
        bits, seed = None, _check_seed(fmt, seed)
    steps = None
    if fmt.format == "nvfp4":
        steps = torch.tensor(factors(fmt), dtype=torch.float32, device="cpu")
    _library().fp4_quantize(
        byref(
            Quantize(
                x=matrix,
                transpose=transpose != columns,
                kind=KINDS[fmt.format],
                search=_search(fmt),
                tile=fmt.block == "tile",
                outer_row=fmt.outer == "row",
                stochastic=fmt.stochastic,
                group=_group(fmt),
                threads=torch.get_num_threads(),
                random_rows=transpose and shared_bits,
                random_ld=padded(rows, fmt),
                stream=stream,
                n_factors=0 if steps is None else len(steps),
                factors=_pointer(steps),
                seed=_pointer(seed),
                random16=_pointer(bits),
                codes=_pointer(codes),
                scales=_pointer(scales),
                outer=_pointer(outer),
                values=_pointer(out),
                bound=bound(fmt) if fmt.format == "nvfp4" else 0.0,
            )
        )
    )
    del base
    return codes, scales, outer, out


def decode(
    codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int, transpose: bool = False
) -> Tensor:
    """`quantize`'s values of saved codes: FP32 [R, Cp], or [cols, R padded to the block]."""
    codes, scales = codes.contiguous(), scales.contiguous()
    rows, width = codes.shape[0], padded(cols, fmt)
    shape = (cols, padded(rows, fmt)) if transpose else (rows, width)
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    _library().fp4_decode(
        byref(
            Decode(
                codes=_pointer(codes),
                scales=_pointer(scales),
                rows=rows,
                padded=width,
                cols=cols,
                kind=KINDS[fmt.format],
                unit=fmt.block == "row",
                transpose=transpose,
                threads=torch.get_num_threads(),
                values=_pointer(values),
            )
        )
    )
    return values


def factor(scales: Tensor, outer: Tensor, fmt: TensorFormat) -> Tensor:
    """What a GEMM's result is multiplied with: FP32 [R], [1] or [0] (see `reference.split`)."""
    if fmt.block != "row":
        return outer.reshape(-1)
    byte = scales[:, 0] if scales.shape[1] else scales.new_zeros(scales.shape[0])
    power = torch.where(byte == 0, 0x00400000, byte.to(torch.int32) << 23)
    return torch.where(byte == 255, 0x7FC00000, power).view(torch.float32)


def _side(
    fmt: TensorFormat | None, rows: int, cols: int
) -> tuple[Side, tuple[Tensor, Tensor] | None]:
    """One orientation's arguments and its results, values [rows, cols padded] and factor."""
    if fmt is None or fmt.format == "nvfp4":
        return Side(kind=-1), None
    values = torch.empty((rows, padded(cols, fmt)), dtype=torch.float32, device="cpu")
    factor = torch.empty((rows if fmt.block == "row" else 0,), dtype=torch.float32, device="cpu")
    side = Side(KINDS[fmt.format], _group(fmt), fmt.stochastic, _pointer(values), _pointer(factor))
    return side, (values, factor)


def quantize_grad(
    g: Tensor,
    fold: Tensor | None,
    dgrad: TensorFormat | None,
    wgrad: TensorFormat | None,
    seed: Tensor | None,
    stream: int,
    sums: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g [M, N] in both orientations from one set of random bits, and its column sums.

    Returns dgrad's values FP32 [M, Np] and factor, those of (g * fold[:, None])^T, [N, Mp], in
    wgrad's format, and the column sums FP32 [N], added in an order that no thread count changes.
    Factors as `reference.split`; [0] tensors for what is left out. ``fold``: FP32 [M].
    """
    rows, cols = g.shape
    if g.stride(1) != 1:
        g = g.contiguous()
    base, matrix, _ = _matrix(g)
    fold = None if fold is None else fold.to(torch.float32).contiguous()
    total = torch.zeros((cols if sums else 0,), dtype=torch.float32, device="cpu")
    d_side, d = _side(dgrad, rows, cols)
    w_side, w = _side(wgrad, cols, rows)
    for fmt in (dgrad, wgrad):
        if fmt is not None and fmt.stochastic:
            seed = _check_seed(fmt, seed)
    argument = Gradient(
        g=matrix,
        threads=torch.get_num_threads(),
        stream=stream,
        seed=_pointer(seed),
        fold=_pointer(fold),
        d=d_side,
        w=w_side,
        sums=_pointer(total),
    )
    if d is not None or w is not None or sums:
        _library().fp4_gradient(byref(argument))
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    if d is None:
        d = _general(base, dgrad, seed, stream, False) if dgrad else (nothing, nothing)
    if w is None:
        folded = base if fold is None else base.to(torch.float32) * fold[:, None]
        w = _general(folded, wgrad, seed, stream, True) if wgrad else (nothing, nothing)
    return *d, *w, total


def _general(
    g: Tensor, fmt: TensorFormat, seed: Tensor | None, stream: int, transpose: bool
) -> tuple[Tensor, Tensor]:
    """One orientation through `quantize` (NVFP4): values and factor."""
    _, scales, outer, values = quantize(g, fmt, seed, stream, None, True, transpose, True)
    assert values is not None
    return values, factor(scales, outer, fmt)
