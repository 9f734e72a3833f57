"""NVFP4 in vectorized PyTorch: E2M1 codes, an E4M3 scale a block of 16, an FP32 outer scale.

All arithmetic is FP32 in the order of docs/numerics.md, one operation a kernel, so nothing is
contracted. Divisions are tensor by tensor: with a Python number PyTorch multiplies by a reciprocal
on some devices, which rounds twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .elements import E2M1, E4M3, FLT_MAX, decode, encode, encode_stochastic, encode_up
from .formats import TensorFormat

BLOCK = 16
FOUR_OVER_SIX = (1.0, 1.5)
EXACT_TOP = 64.0  # largest of the FP8-exact block scales
EXACT_COUNT = 40

Candidate = tuple[Tensor, Tensor]  # block scale bytes and the factor of the elements, both [R, B]


def factors(fmt: TensorFormat) -> tuple[float, ...]:
    """The multiples of the plain block scale that are tried, in order."""
    if fmt.scale_search in (None, "half"):
        return (1.0,)
    return FOUR_OVER_SIX if isinstance(fmt.scale_search, str) else fmt.scale_search


def bound(fmt: TensorFormat) -> float:
    """Magnitude that a group's largest value is scaled to: 6 x the largest plain block scale.

    That scale is 448 (E4M3's largest), 64 for FP8-exact. Where a factor f above 1 is searched it is
    the largest power of two that f does not lift above 448 (256 for four over six).
    """
    if fmt.block_scales == "fp8_exact":
        return 6 * EXACT_TOP
    largest = max(factors(fmt))
    return 6 * (448.0 if largest <= 1 else 2.0 ** math.floor(math.log2(448 / largest)))


def exact_scales(device: torch.device) -> Tensor:
    """The 40 FP8-exact block scales as E4M3 bytes, ascending, uint8.

    2^-8, 2^-7, 1.5 x 2^-7, then 1, 1.25, 1.5 times 2^-6 ... 2^5, then 64: the scales for which
    every code x scale is an E4M3 number.
    """
    j = torch.arange(EXACT_COUNT, device=device)
    return (8 * (j // 3) + 2 * (j % 3) + 2 * (j < 3)).to(torch.uint8)


def _over(numerator: float, x: Tensor) -> Tensor:
    return torch.full_like(x, numerator) / x


def _group_max(x: Tensor, outer: str | None) -> Tensor:
    """Max |x| of every row ([R, 1]) or of the tensor ([1, 1]); 0 where a group is empty."""
    rows = x.shape[0] if outer == "row" else 1
    if x.numel() == 0:
        return x.new_zeros((rows, 1))
    return x.abs().reshape(rows, -1).amax(1, keepdim=True)


def _outer_scales(amax: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """S = min(top / amax, FLT_MAX) and 1 / S; both 1 where amax is 0."""
    up = torch.where(amax > 0, _over(top, amax).clamp_(max=FLT_MAX), 1.0)
    return up, _over(1.0, up)


def _block_max(blocks: Tensor, tile: bool) -> Tensor:
    """Max |x| of blocks [R, B, 16] -> [R, B]; over 16 rows as well for tiles, repeated."""
    b = blocks.abs().amax(-1)
    if not tile:
        return b
    rows = b.shape[0]
    tiles = torch.nn.functional.pad(b, (0, 0, 0, -rows % BLOCK))
    tiles = tiles.unflatten(0, (tiles.shape[0] // BLOCK, BLOCK))
    return tiles.amax(1, keepdim=True).expand_as(tiles).flatten(0, 1)[:rows]


def _inverse(scale: Tensor, outer: Tensor) -> Tensor:
    """What the elements are multiplied with: min(1 / (s * outer), FLT_MAX)."""
    return _over(1.0, decode(scale, E4M3) * outer).clamp_(max=FLT_MAX)


def _error(codes: Tensor, scale: Tensor, scaled: Tensor) -> Tensor:
    """Squared error of code x s against scaled values [R, B, 16] -> [R, B], summed in order."""
    d = decode(codes, E2M1) * decode(scale, E4M3)[..., None] - scaled
    d = d * d
    total = d[..., 0]
    for i in range(1, BLOCK):
        total = total + d[..., i]
    return total


def _codes(blocks: Tensor, candidate: Candidate, bits: Tensor | None = None) -> Tensor:
    """E2M1 codes of blocks [R, B, 16] for one choice of block scales; 0 where the scale is 0."""
    scale, inverse = candidate
    y = blocks * inverse[..., None]
    codes = encode(y, E2M1) if bits is None else encode_stochastic(y, bits, E2M1)
    return torch.where((scale == 0)[..., None], 0, codes)


def _search(
    blocks: Tensor, scaled: Tensor, candidates: Iterable[Candidate]
) -> tuple[Tensor, Tensor]:
    """Codes and scales of the candidate with the smallest error; of equal ones the first."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for candidate in candidates:
        codes, scale = _codes(blocks, candidate), candidate[0]
        error = _error(codes, scale, scaled)
        if best is None:
            best = codes, scale, error
            continue
        better = error < best[2]
        best = (
            torch.where(better[..., None], codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, error, best[2]),
        )
    assert best is not None
    return best[:2]


def _exact_candidates(scaled: Tensor) -> Iterator[Candidate]:
    """The scale whose 6 s first reaches the block's maximum, the next larger, the next smaller."""
    table = exact_scales(scaled.device)
    values = decode(table, E4M3)
    inverses = _over(1.0, values)
    b = scaled.abs().amax(-1)
    first = torch.bucketize(b, 6 * values[:-1])
    for step in (0, 1, -1):
        j = (first + step).clamp_(0, EXACT_COUNT - 1)
        yield torch.where(b == 0, 0, table[j]), inverses[j]


def _half_search(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the FP8-exact search in FP16 arithmetic (docs/numerics.md).

    In units of the power of two of the first candidate: v = |x S| rounded to FP16; a candidate's
    code rounds v x (1/s) to nearest, ties away from zero; its error is the sum of FP16 squares over
    even and over odd elements, each in order, and of the two sums.
    """
    table = exact_scales(scaled.device)
    values = decode(table, E4M3)
    b = scaled.abs().amax(-1)
    first = torch.bucketize(b, 6 * values[:-1])
    unit = (values[first].view(torch.int32) & 0x7F800000).view(torch.float32)
    v = (scaled.abs() * _over(1.0, unit)[..., None]).to(torch.float16)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for step in (0, 1, -1):
        j = (first + step).clamp_(0, EXACT_COUNT - 1)
        steps, error = _half_candidate(v, values[j] / unit)
        if best is None:
            best = steps, j, error
            continue
        better = error < best[2]
        best = (
            torch.where(better[..., None], steps, best[0]),
            torch.where(better, j, best[1]),
            torch.where(better, error, best[2]),
        )
    assert best is not None
    sign = scaled.view(torch.int32) < 0
    codes = best[0].to(torch.uint8) | (sign * 8).to(torch.uint8)
    empty = b == 0
    return torch.where(empty[..., None], 0, codes), torch.where(empty, 0, table[best[1]])


def _half_candidate(v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Code magnitudes int16 [R, B, 16] of FP16 v >= 0 for scales [R, B] in v's units; FP16 errors.

    A code is FP16's bits of code x 2^-14 shifted down by 9, so rounding adds half a step to them.
    """
    half = torch.float16
    inverse = _over(1.0, scale).to(half) * 2.0**-14
    t = (v * inverse[..., None]).clamp_(max=6 * 2.0**-14)
    steps = (t.view(torch.int16) + 0x100) >> 9
    nearest = (steps << 9).view(half)
    d = nearest * (scale * 2.0**14).to(half)[..., None] - v
    squares = (d * d).unflatten(-1, (BLOCK // 2, 2))
    total = squares[..., 0, :]
    for i in range(1, BLOCK // 2):
        total = total + squares[..., i, :]
    return steps, total[..., 0] + total[..., 1]


def quantize(x: Tensor, fmt: TensorFormat, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 x [R, Cp], Cp a multiple of 16 -> codes uint8 [R, Cp], scales uint8 [R, Cp/16], outer.

    ``bits``: int32 [R, Cp] for stochastic rounding. Outer is FP32 [R] or []; NaN where the group's
    maximum is not finite, and then its codes and scales are 0.
    """
    exact = fmt.block_scales == "fp8_exact"
    amax = _group_max(x, fmt.outer)
    finite = amax.isfinite()
    up, down = _outer_scales(torch.where(finite, amax, 0.0), bound(fmt))
    blocks = torch.where(finite, x, 0.0).unflatten(1, (x.shape[1] // BLOCK, BLOCK))
    if exact:
        scaled = blocks * up[..., None]
        if fmt.scale_search == "half":
            codes, scales = _half_search(scaled)
        else:
            codes, scales = _search(scaled, scaled, _exact_candidates(scaled))
    else:
        codes, scales = _scaled_codes(blocks, up, down, fmt, bits)
    outer = torch.where(finite, down, math.nan).reshape(-1 if fmt.outer == "row" else ())
    return codes.flatten(1), scales, outer


def _scaled_codes(
    blocks: Tensor, up: Tensor, down: Tensor, fmt: TensorFormat, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales with E4M3 block scales: one choice, or the best of `factors`."""
    b = _block_max(blocks, fmt.block == "tile")
    base = b / torch.full_like(b, 6.0) * up
    if fmt.scale_search is not None:
        scales = (encode(base * f, E4M3) for f in factors(fmt))
        return _search(blocks, blocks * up[..., None], ((s, _inverse(s, down)) for s in scales))
    if bits is None:
        scale = encode(base, E4M3)
        return _codes(blocks, (scale, _inverse(scale, down))), scale
    scale = encode_up(base, E4M3)
    return _codes(blocks, (scale, _inverse(scale, down)), bits.view_as(blocks)), scale
