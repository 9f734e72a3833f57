"""The swizzled layout in which block-scaled tensor cores read block scales.

Tiles of 128 rows x 4 columns, 512 bytes each, row-major; inside a tile byte (r, c) lies at
(r % 32) * 16 + (r // 32) * 4 + c. Tensors are stored and exported in the plain layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _tiles(size: int, tile: int) -> int:
    return (size + tile - 1) // tile


def swizzle(scales: Tensor) -> Tensor:
    """Scales uint8 [R, C] -> flat uint8; rows padded to 128, columns to 4, with zeros."""
    rows, cols = scales.shape
    across, down = _tiles(cols, 4), _tiles(rows, 128)
    padded = torch.nn.functional.pad(scales, (0, 4 * across - cols, 0, 128 * down - rows))
    tiles = padded.reshape(down, 4, 32, across, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle`: flat uint8 -> [rows, cols] in the plain layout."""
    across, down = _tiles(cols, 4), _tiles(rows, 128)
    tiles = flat.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(128 * down, 4 * across)[:rows, :cols].contiguous()
