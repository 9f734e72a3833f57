"""`fp4compile.quantize`: one tensor to codes and scales, and back, for users and exporters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .errors import InputError
from .formats import Search, TensorFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor of ``shape`` [..., C] quantized along its last axis; Cp = C padded to the block.

    ``codes``: uint8 [..., Cp/2] for 4-bit formats (element 2i in the low nibble), uint8 [..., Cp]
    for FP8 and MXFP8, int8 [..., Cp] for S2F6. ``scales``: uint8 [..., Cp/block]: E4M3 bytes for
    NVFP4 (block 16), E8M0 bytes for MX formats and S2F6 (block 32), repeated where a coarser block
    shares one; FP8: FP32 [..., Cp/128], or one for each tile of the R rows, [ceil(R/128), Cp/128].
    ``outer``: FP32 [...] or [] for NVFP4, [0] otherwise. Layout and formulas: docs/numerics.md.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor
    format: TensorFormat
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and outer scales together."""
        return self.codes.nbytes + self.scales.nbytes + self.outer.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded tensor [..., C] in ``dtype``, computed in FP32, rotation undone.

        A row, tensor or block that held NaN or Inf decodes to NaN as a whole.
        """
        rows, cols = _rows(self.shape), self.shape[-1]
        codes = self.codes.reshape(rows, self.codes.shape[-1])
        scales = self.scales
        if not _one_a_tile(self.format):
            scales = scales.reshape(rows, scales.shape[-1])
        outer = self.outer.reshape(rows) if self.format.outer == "row" else self.outer
        x = reference.dequantize(codes, scales, outer, self.format, cols, dtype)
        return x.reshape(self.shape)


def quantize(
    x: Tensor,
    format: str,
    *,
    outer: str | None = None,
    block: str | int | None = None,
    block_scales: str | None = None,
    scale_search: Search = None,
    rounding: str = "nearest",
    rotation: int | None = None,
    seed: Tensor | int | None = None,
    stream: int = 0,
) -> QuantizedTensor:
    """Quantize x [..., C] (FP32, BF16 or FP16, any strides, at least 1-D) along its last axis.

    ``format``: a name of `formats.FORMATS`; the keywords are those of `TensorFormat`.
    ``rounding="stochastic"`` needs ``seed``: an int64 tensor with one element on x's device, or an
    int; the same seed and ``stream`` give the same bits. Not differentiable.

    Raises `FormatError` for a combination that does not exist, `InputError` for a tensor or seed
    that cannot be used.
    """
    fmt = TensorFormat(format, outer, block, block_scales, scale_search, rounding, rotation)
    _check(x)
    key = _seed(seed, x.device) if fmt.stochastic else None
    matrix = x.detach().reshape(_rows(x.shape), x.shape[-1])
    codes, scales, outers = reference.quantize(matrix, fmt, key, stream)
    lead = x.shape[:-1]
    return QuantizedTensor(
        codes=codes.reshape(*lead, codes.shape[1]),
        scales=scales if _one_a_tile(fmt) else scales.reshape(*lead, scales.shape[1]),
        outer=outers.reshape(lead) if fmt.outer == "row" else outers,
        format=fmt,
        shape=x.shape,
    )


def _rows(shape: torch.Size) -> int:
    return math.prod(shape[:-1])


def _one_a_tile(fmt: TensorFormat) -> bool:
    """True where scales are stored once a tile, not for each row."""
    return fmt.float_scales and fmt.block == "tile"


def _check(x: Tensor) -> None:
    """Raise `InputError` unless x is a dense float tensor with at least one axis."""
    if not isinstance(x, Tensor):
        raise InputError(f"quantize needs a torch.Tensor, got {type(x).__name__}; use torch.tensor")
    if x.dtype not in DTYPES:
        raise InputError(
            f"quantize does not take {x.dtype}; convert to float32, bfloat16 or float16 first"
        )
    if x.ndim == 0:
        raise InputError("quantize needs at least one axis, got a scalar; use x.reshape(1)")
    if x.layout != torch.strided:
        raise InputError(f"quantize does not take {x.layout} tensors; use x.to_dense() first")


def _seed(seed: Tensor | int | None, device: torch.device) -> Tensor:
    """The seed as an int64 tensor on ``device``; `InputError` where that is not possible."""
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            raise InputError(f"quantize: seed {seed} does not fit into 64 bits; use a smaller one")
        return torch.tensor(seed, dtype=torch.int64, device=device)
    if seed is None:
        raise InputError("quantize: rounding='stochastic' needs a seed; pass seed=1, for example")
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.numel() != 1:
        got = f"{seed.dtype} {list(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise InputError(f"quantize: the seed must be an int64 tensor of one element, got {got}")
    if seed.device != device:
        raise InputError(
            f"quantize: the seed is on {seed.device}, x on {device}; use seed.to(x.device)"
        )
    return seed
