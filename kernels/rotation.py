"""Random Hadamard rotation of groups of 16 or 32 along the last axis, with fixed signs.

y = (x * signs) H / sqrt(n), H in Sylvester order. Both operands of a GEMM are rotated along the
axis it reduces, so the rotation cancels in the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bit i set: element i of a group is negated.
_NEGATED = {16: 0b1101011111101000, 32: 0b00101000000101111101011111101000}


def signs(n: int, device: torch.device) -> Tensor:
    """The signs of a group, FP32 [n] of +-1; made on the device, without a copy from the host."""
    bit = (_NEGATED[n] >> torch.arange(n, device=device)) & 1
    return (1 - 2 * bit).to(torch.float32)


def _hadamard(x: Tensor) -> Tensor:
    """Butterflies (a + b, a - b) at distance 1, 2, 4, ... over the last axis, then 1/sqrt(n)."""
    n, distance = x.shape[-1], 1
    while distance < n:
        pairs = x.unflatten(-1, (n // (2 * distance), 2, distance))
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        distance *= 2
    return x * n**-0.5


def rotate(x: Tensor, n: int) -> Tensor:
    """FP32 x [R, C], C a multiple of n (16 or 32) -> rotated FP32 [R, C]; x * signs, then H."""
    groups = x.reshape(x.shape[0], x.shape[1] // n, n)
    return _hadamard(groups * signs(n, x.device)).flatten(1)


def unrotate(y: Tensor, n: int) -> Tensor:
    """The inverse of `rotate`: H, then the signs."""
    groups = y.reshape(y.shape[0], y.shape[1] // n, n)
    return (_hadamard(groups) * signs(n, y.device)).flatten(1)
