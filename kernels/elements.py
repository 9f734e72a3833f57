"""Element and scale types: bits to numbers and back, on FP32 tensors of any device.

`E2M1` and `E4M3` are rows of one table, `Grid`; everything is integer arithmetic on the FP32 bits,
so the result depends on no device's float8 cast. Formulas: docs/numerics.md, "Elements".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
NAN_BYTE = 255  # the E8M0 scale of a block that is not finite
S2F6_TOP = 127 / 64


@dataclass(frozen=True)
class Grid:
    """A small float type: sign, exponent with ``bias``, ``mantissa`` bits, largest value ``top``.

    ``sign`` is the position of the sign bit; ``nan`` the magnitude code that means NaN, if any.
    """

    mantissa: int
    bias: int
    top: float
    sign: int
    nan: int | None = None

    @property
    def drop(self) -> int:
        """Mantissa bits of FP32 that the type does not have."""
        return 23 - self.mantissa

    @property
    def normal(self) -> float:
        """The smallest normal value."""
        return 2.0 ** (1 - self.bias)

    @property
    def step(self) -> float:
        """The distance of values below `normal`."""
        return self.normal / 2**self.mantissa

    @property
    def offset(self) -> int:
        """FP32 bits >> `drop` of a normal value, less its code."""
        return (127 - self.bias) << self.mantissa


E2M1 = Grid(mantissa=1, bias=1, top=6.0, sign=3)
E4M3 = Grid(mantissa=3, bias=7, top=448.0, sign=7, nan=0x7F)
GRIDS = {"nvfp4": E2M1, "mxfp4": E2M1, "mxfp8": E4M3, "fp8": E4M3}


def _signed(code: Tensor, y: Tensor, grid: Grid) -> Tensor:
    """Magnitude codes (int32) with the sign of y, as uint8."""
    return code.to(torch.uint8) | (torch.signbit(y).to(torch.uint8) << grid.sign)


def encode(y: Tensor, grid: Grid) -> Tensor:
    """FP32 y -> codes uint8 (unpacked), nearest even, saturating, sign of zero kept; y not NaN."""
    size = y.abs().clamp_(max=grid.top)
    word = size.view(torch.int32)
    odd = (word >> grid.drop).bitwise_and_(1)
    rounded = odd.add_(word).add_((1 << (grid.drop - 1)) - 1)
    normal = (rounded >> grid.drop).sub_(grid.offset)
    tiny = (size * (1 / grid.step)).round_().to(torch.int32)
    return _signed(torch.where(size < grid.normal, tiny, normal), y, grid)


def encode_up(y: Tensor, grid: Grid) -> Tensor:
    """FP32 y >= 0 -> uint8 code of the smallest value >= y, at most the largest; y not NaN."""
    size = y.clamp(max=grid.top)
    normal = ((size.view(torch.int32) + ((1 << grid.drop) - 1)) >> grid.drop) - grid.offset
    tiny = (size * (1 / grid.step)).ceil_().to(torch.int32)
    return torch.where(size < grid.normal, tiny, normal).to(torch.uint8)


def encode_stochastic(y: Tensor, random: Tensor, grid: Grid) -> Tensor:
    """FP32 y, int32 ``random`` (16-bit values, same shape) -> codes uint8; y not NaN.

    The random bits and half a unit of theirs are added below the mantissa and the rest is cut off:
    unbiased up to 2^-16 of a step. Values below `Grid.normal` are lifted into the first binade,
    whose step is theirs.
    """
    size = y.abs().clamp_(max=grid.top)
    low = size < grid.normal
    word = torch.where(low, size + grid.normal, size).view(torch.int32)
    noise = (random << (grid.drop - 16)) + (1 << (grid.drop - 17))
    code = ((word + noise) >> grid.drop).sub_(grid.offset)
    lifted = low.to(torch.int32) << grid.mantissa
    return _signed(code.sub_(lifted).clamp_(max=top_code(grid)), y, grid)


def top_code(grid: Grid) -> int:
    """The magnitude code of `Grid.top`."""
    return (_word(grid.top) >> grid.drop) - grid.offset


def decode(codes: Tensor, grid: Grid) -> Tensor:
    """Codes uint8 (unpacked) -> FP32, exact; -0.0 and NaN included."""
    signed = codes.to(torch.int32)
    size = signed & ((1 << grid.sign) - 1)
    normal = ((size + grid.offset) << grid.drop).view(torch.float32)
    value = torch.where(size < (1 << grid.mantissa), size.to(torch.float32) * grid.step, normal)
    if grid.nan is not None:
        value.masked_fill_(size == grid.nan, float("nan"))
    return torch.where(signed == size, value, -value)


def pack(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [R, C], C even -> [R, C/2]; element 2i in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [R, C/2] -> [R, C]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _word(value: float) -> int:
    """The FP32 bits of a Python number."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def e8m0_encode(amax: Tensor, top: float) -> Tensor:
    """FP32 amax >= 0 -> byte of the smallest power of two >= amax / top, uint8.

    Exact, from exponent and mantissa bits; clamped to [0, 254]; 255 where amax is NaN or Inf.
    ``top`` is the largest element value, in [1, 448].
    """
    word, bound = amax.view(torch.int32), _word(top)
    exponent = (word >> 23) - ((bound >> 23) - 127)
    byte = (exponent + ((word & 0x7FFFFF) > (bound & 0x7FFFFF))).clamp_(max=254)
    byte = torch.where(amax <= top * 2.0**-127, 0, byte)  # covers subnormal amax as well
    return torch.where(amax.isfinite(), byte, NAN_BYTE).to(torch.uint8)


def e8m0_decode(byte: Tensor) -> Tensor:
    """Byte uint8 -> FP32 2^(byte - 127), exact (byte 0 is subnormal); 255 is NaN."""
    word = byte.to(torch.int32) << 23
    word = torch.where(byte == 0, 0x00400000, word)
    return torch.where(byte == NAN_BYTE, 0x7FC00000, word).view(torch.float32)


def s2f6_encode(y: Tensor) -> Tensor:
    """FP32 y -> int8 rint(64 y), ties to even, clamped to +-127; y not NaN."""
    return (y * 64).round_().clamp_(-127, 127).to(torch.int8)


def s2f6_decode(codes: Tensor) -> Tensor:
    """Codes int8 -> FP32 codes / 64, exact."""
    return codes.to(torch.float32) * (1 / 64)
