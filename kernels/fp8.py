"""FP8 with FP32 block scales in vectorized PyTorch: E4M3 codes, one scale for 128 elements of a row
or for a tile of 128 x 128.

A scale puts its block's largest magnitude on 448, the largest code. Formulas: docs/numerics.md,
"FP8 blocks".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import E4M3, FLT_MAX, decode, encode, encode_stochastic
from .formats import TensorFormat

BLOCK = 128


def nearest(y: Tensor) -> Tensor:
    """`elements.encode` in E4M3; on the CPU PyTorch's cast, the same bits ten times as fast."""
    if y.device.type != "cpu":
        return encode(y, E4M3)
    return y.clamp(-E4M3.top, E4M3.top).to(torch.float8_e4m3fn).view(torch.uint8)


def elements(codes: Tensor) -> Tensor:
    """`elements.decode` of E4M3; on the CPU PyTorch's cast."""
    if codes.device.type != "cpu":
        return decode(codes, E4M3)
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def per_row(scales: Tensor, rows: int, fmt: TensorFormat) -> Tensor:
    """Scales as stored -> [rows, Cp/128], those of tiles repeated for each of their rows."""
    if fmt.block != "tile":
        return scales
    return scales.repeat_interleave(BLOCK, 0)[:rows]


def quantize(x: Tensor, fmt: TensorFormat, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 x [R, Cp], Cp a multiple of 128 -> codes uint8 [R, Cp], scales FP32, outer [0].

    scales: [R, Cp/128], or [ceil(R/128), Cp/128] for tiles. ``bits``: int32 [R, Cp] for stochastic
    rounding. A block with NaN or Inf has scale NaN and codes 0.
    """
    rows = x.shape[0]
    blocks = x.unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    amax = blocks.abs().amax(-1)
    if fmt.block == "tile":
        tiles = torch.nn.functional.pad(amax, (0, 0, 0, -rows % BLOCK))
        amax = tiles.unflatten(0, (tiles.shape[0] // BLOCK, BLOCK)).amax(1)
    finite = amax.isfinite()
    # Tensors on both sides: PyTorch multiplies by the reciprocal of a number on GPUs.
    scales = torch.where(finite, amax / torch.full_like(amax, E4M3.top), float("nan"))
    inverse = torch.where(finite, (torch.ones_like(scales) / scales).clamp(max=FLT_MAX), 0.0)
    y = blocks * per_row(inverse, rows, fmt)[..., None]
    y = torch.where(per_row(finite, rows, fmt)[..., None], y, 0.0).flatten(1)
    codes = nearest(y) if bits is None else encode_stochastic(y, bits, E4M3)
    return codes, scales, x.new_empty(0)
