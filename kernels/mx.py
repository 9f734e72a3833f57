"""MXFP8, MXFP4 and S2F6 in vectorized PyTorch: a power-of-two scale for each 32 elements.

Scale bytes are rounded up, so no element saturates. Formulas: docs/numerics.md, "MX formats".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import (
    GRIDS,
    NAN_BYTE,
    S2F6_TOP,
    e8m0_decode,
    e8m0_encode,
    encode,
    encode_stochastic,
    s2f6_encode,
)
from .formats import TensorFormat

BLOCK = 32


def _coarsen(amax: Tensor, block: int | str | None) -> Tensor:
    """Maxima of 32 elements [R, B] -> of the coarser block, repeated: [R, B]."""
    count = amax.shape[1]
    if block == BLOCK or count == 0:
        return amax
    if block == "row":
        return amax.amax(1, keepdim=True).expand_as(amax).contiguous()
    assert isinstance(block, int)
    per = block // BLOCK
    wide = torch.nn.functional.pad(amax, (0, -count % per)).unflatten(1, (-(-count // per), per))
    return wide.amax(-1, keepdim=True).expand_as(wide).flatten(1)[:, :count].contiguous()


def quantize(x: Tensor, fmt: TensorFormat, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 x [R, Cp], Cp a multiple of 32 -> codes [R, Cp], scales uint8 [R, Cp/32], outer [0].

    ``bits``: int32 [R, Cp] for stochastic rounding. Codes are uint8, int8 for S2F6. A block with
    NaN or Inf has scale 255 and codes 0.
    """
    blocks = x.unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    grid = GRIDS.get(fmt.format)
    top = grid.top if grid else S2F6_TOP
    scales = e8m0_encode(_coarsen(blocks.abs().amax(-1), fmt.block), top)
    finite = scales != NAN_BYTE
    y = blocks * e8m0_decode(torch.where(finite, 254 - scales, 0))[..., None]
    y = torch.where(finite[..., None], y, 0.0).flatten(1)
    if grid is None:
        codes = s2f6_encode(y)
    else:
        codes = encode(y, grid) if bits is None else encode_stochastic(y, bits, grid)
    return codes, scales, x.new_empty(0)
