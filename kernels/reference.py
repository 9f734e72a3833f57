"""The numerics in vectorized PyTorch, on any device: the specification in code.

| module | what it defines |
|---|---|
| `elements` | E2M1, E4M3, E8M0, S2F6: encode, decode, stochastic rounding, packing |
| `philox` | counter-based random bits |
| `rotation` | Hadamard rotation |
| `nvfp4`, `mx`, `fp8` | block scales and codes |
| `layout` | block scales as tensor cores read them |
| here | a tensor to codes and back, for every `TensorFormat` |

No function reads a tensor's values on the host. The words of the shapes: R rows, C columns, Cp = C
padded to the block (`padded`). Every other implementation is held to these bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fp8, mx, nvfp4, rotation
from .elements import E4M3, GRIDS, decode, e8m0_decode, pack, s2f6_decode, unpack
from .errors import InputError
from .formats import BITS, BLOCK, TensorFormat
from .philox import random16


def padded(cols: int, fmt: TensorFormat) -> int:
    """``cols`` rounded up to the block and, where the format rotates, to the rotation's group."""
    return (cols + fmt.padding - 1) // fmt.padding * fmt.padding


def random_bits(seed: Tensor, stream: int, rows: int, cols: int, block: int) -> Tensor:
    """The random bits of a gradient [rows, cols]: int32 [rows, cols padded to ``block``].

    They belong to the gradient's elements: its transposed copy takes the transpose.
    ``seed``: int64, one element, on the device of the result.
    """
    width = (cols + block - 1) // block * block
    return random16(seed, stream, rows * width).view(rows, width)


def _bits(
    shape: tuple[int, int], fmt: TensorFormat, seed: Tensor | None, stream: int, bits: Tensor | None
) -> Tensor | None:
    """Random bits int32 of the padded shape, or None where rounding is to nearest."""
    if not fmt.stochastic:
        return None
    if bits is not None:
        return torch.nn.functional.pad(bits, (0, shape[1] - bits.shape[1])).contiguous()
    if seed is None:
        raise InputError(f"{fmt}: stochastic rounding needs a seed (an int64 tensor)")
    return random_bits(seed, stream, *shape, 1)


def quantize(
    x: Tensor,
    fmt: TensorFormat,
    seed: Tensor | None = None,
    stream: int = 0,
    bits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, C], any float dtype and strides -> codes, scales, outer, along the last axis.

    codes: uint8 [R, Cp/2] for 4-bit formats, uint8 [R, Cp] for FP8 and MXFP8, int8 for S2F6.
    scales: uint8 [R, Cp/block], repeated where a coarser block shares one; FP8: FP32 [R, Cp/128],
    or one a tile, [ceil(R/128), Cp/128].
    outer: FP32 [R] ("row"), [] ("tensor"), [0] (formats without).
    Stochastic rounding takes ``bits`` (int32 [R, C] or [R, Cp], 16-bit values) or draws its own
    from ``seed`` (int64, one element) and ``stream``; `InputError` without either.
    """
    x = x.detach().to(torch.float32)
    x = torch.nn.functional.pad(x, (0, padded(x.shape[1], fmt) - x.shape[1]))
    if fmt.rotation:
        x = rotation.rotate(x, fmt.rotation)
    bits = _bits((x.shape[0], x.shape[1]), fmt, seed, stream, bits)
    module = {"nvfp4": nvfp4, "fp8": fp8}.get(fmt.format, mx)
    codes, scales, outer = module.quantize(x.contiguous(), fmt, bits)
    return pack(codes) if BITS[fmt.format] == 4 else codes, scales, outer


def elements(codes: Tensor, fmt: TensorFormat) -> Tensor:
    """Codes -> FP32 element values [R, Cp], without any scale."""
    if fmt.format == "s2f6":
        return s2f6_decode(codes)
    if fmt.format == "fp8":
        return fp8.elements(codes)
    return decode(unpack(codes) if BITS[fmt.format] == 4 else codes, GRIDS[fmt.format])


def values(codes: Tensor, scales: Tensor, fmt: TensorFormat, cols: int | None = None) -> Tensor:
    """Code x block scale, without the outer scale: FP32 [R, Cp], or [R, cols]; rotation kept."""
    blocks = elements(codes, fmt).unflatten(1, (scales.shape[1], BLOCK[fmt.format]))
    if fmt.float_scales:
        scale = fp8.per_row(scales, codes.shape[0], fmt)
    else:
        scale = decode(scales, E4M3) if fmt.format == "nvfp4" else e8m0_decode(scales)
    product = (blocks * scale[..., None]).flatten(1)
    return product if cols is None else product[:, :cols]


def split(codes: Tensor, scales: Tensor, outer: Tensor, fmt: TensorFormat) -> tuple[Tensor, Tensor]:
    """What a GEMM reads and what its result is multiplied with: FP32 values [R, Cp] and a factor.

    NVFP4: code x scale and outer ([R] or [1]). MXFP8 with row scales: the E4M3 values alone and the
    power of two of each row [R], NaN for a row that is not finite. Others: code x scale and [0].
    """
    if fmt.format == "mxfp8" and fmt.block == "row":
        byte = scales.amax(1) if scales.shape[1] else scales.new_zeros(scales.shape[0])
        return elements(codes, fmt), e8m0_decode(byte)
    return values(codes, scales, fmt), outer.reshape(-1)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    outer: Tensor,
    fmt: TensorFormat,
    cols: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(code x block scale) x outer, rotated back: [R, cols]; NaN for groups not finite."""
    x = values(codes, scales, fmt)
    if fmt.format == "nvfp4":
        x = x * (outer[:, None] if fmt.outer == "row" else outer)
    if fmt.rotation:
        x = rotation.unrotate(x, fmt.rotation)
    return x[:, :cols].to(dtype)
