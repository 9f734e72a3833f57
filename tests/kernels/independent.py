"""The numerics once more, written to be read next to docs/numerics.md: numpy, ml_dtypes, loops.

Nothing here is shared with the package: elements are cast by ml_dtypes, scales are found by trying
them, random bits use Python integers, stochastic rounding compares fractions. Slow; small shapes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np

F32, F16 = np.float32, np.float16
FLT_MAX = np.finfo(F32).max
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
TOP = {E4M3: 448.0, E2M1: 6.0}
NORMAL = {E4M3: 2.0**-6, E2M1: 1.0}
MANTISSA = {E4M3: 3, E2M1: 1}
ELEMENT = {"nvfp4": E2M1, "mxfp4": E2M1, "mxfp8": E4M3, "s2f6": None, "fp8": E4M3}
ALL_E4M3 = [float(v) for v in np.arange(127, dtype=np.uint8).view(E4M3).astype(F32)]
EXACT = [2.0**-8, 2.0**-7, 1.5 * 2.0**-7]
EXACT += [m * 2.0**e for e in range(-6, 6) for m in (1, 1.25, 1.5)] + [64.0]
SIGNS = {
    16: "+++-+------+-+--",
    32: "+++-+------+-+-----+-++++++-+-++",
}


def philox16(seed: int, stream: int, index: int) -> int:
    """One 16-bit value, with Python integers."""
    low = 0xFFFFFFFF
    group, lane = divmod(index, 8)
    c = [group & low, group >> 32, stream & low, 0]
    k = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return (c[lane // 2] >> (16 * (lane % 2))) & 0xFFFF


def random_bits(seed: int, stream: int, rows: int, width: int) -> np.ndarray:
    """Bits of a tensor [rows, width] whose width is already padded."""
    flat = [philox16(seed, stream, i) for i in range(rows * width)]
    return np.array(flat, dtype=np.int64).reshape(rows, width)


def nearest(y: np.ndarray, kind) -> np.ndarray:
    """Element codes of FP32 y, saturating."""
    return np.clip(y, -TOP[kind], TOP[kind]).astype(kind).view(np.uint8)


def stochastic(y: F32, r16: int, kind) -> int:
    """One code: up where the fraction of a step and the draw's middle add up to 1."""
    size, lift = abs(y), F32(0)
    if size < NORMAL[kind]:
        lift = F32(NORMAL[kind])
    z = float(size + lift)
    step = 2.0 ** (math.frexp(z)[1] - 1 - MANTISSA[kind])
    whole, part = divmod(z / step, 1)
    up = part * 65536 + r16 + 0.5 >= 65536
    value = min((whole + up) * step - float(lift), TOP[kind])
    return int(np.array(math.copysign(value, y), F32).astype(kind).view(np.uint8))


def round_to(y: np.ndarray, kind, bits: np.ndarray | None) -> np.ndarray:
    if bits is None:
        return nearest(y, kind)
    return np.array([stochastic(v, int(r), kind) for v, r in zip(y, bits)], dtype=np.uint8)


def pad(x: np.ndarray, unit: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % unit)))


def hadamard(x: np.ndarray, n: int) -> np.ndarray:
    """Rotated groups of n, one butterfly at a time."""
    y = x.reshape(-1, n).copy()
    y *= np.array([1 if s == "+" else -1 for s in SIGNS[n]], dtype=F32)
    d = 1
    while d < n:
        for i in range(n):
            if i & d == 0:
                a, b = y[:, i].copy(), y[:, i + d].copy()
                y[:, i], y[:, i + d] = a + b, a - b
        d *= 2
    return (y * F32(1 / math.sqrt(n))).reshape(x.shape)


def factors_and_bound(fmt) -> tuple[tuple, float]:
    if fmt.block_scales == "fp8_exact":
        return (1.0,), 384.0
    if fmt.scale_search is None:
        return (1.0,), 2688.0
    factors = (1.0, 1.5) if fmt.scale_search == "four_over_six" else fmt.scale_search
    top = 448.0
    if max(factors) > 1:
        top = max(2.0**e for e in range(-20, 9) if 2.0**e * max(factors) <= 448)
    return factors, 6 * top


def error(code: np.ndarray, s: F32, scaled: np.ndarray) -> F32:
    total = F32(0)
    for c, v in zip(code.view(E2M1).astype(F32), scaled):
        d = c * s - v
        total = total + d * d
    return total


def with_scale(block, byte: int, outer: F32, bits) -> np.ndarray:
    """Codes of a block of 16 for the E4M3 scale ``byte``."""
    if byte == 0:
        return np.zeros(16, np.uint8)
    s = np.uint8(byte).view(E4M3).astype(F32)
    return round_to(block * min(F32(1) / (s * outer), FLT_MAX), E2M1, bits)


def e4m3_byte(value) -> int:
    return int(nearest(np.array([value], F32), E4M3)[0])


def plain_block(block, b, up, outer, fmt, bits) -> tuple[np.ndarray, int]:
    base = b / F32(6) * up
    if bits is not None:
        byte = e4m3_byte(next((v for v in ALL_E4M3 if v >= base), 448.0))
        return with_scale(block, byte, outer, bits), byte
    best = None
    for f in factors_and_bound(fmt)[0]:
        byte = e4m3_byte(base * F32(f))
        code = with_scale(block, byte, outer, None)
        err = error(code, np.uint8(byte).view(E4M3).astype(F32), block * up)
        if best is None or err < best[0]:
            best = err, code, byte
    return best[1], best[2]


def exact_block(block, up) -> tuple[np.ndarray, int]:
    scaled = block * up
    b = np.abs(scaled).max()
    if b == 0:
        return np.zeros(16, np.uint8), 0
    j = next((i for i, s in enumerate(EXACT) if 6 * s >= b), len(EXACT) - 1)
    best = None
    for i in (j, j + 1, j - 1):
        s = F32(EXACT[min(max(i, 0), len(EXACT) - 1)])
        code = nearest(scaled * (F32(1) / s), E2M1)
        err = error(code, s, scaled)
        if best is None or err < best[0]:
            best = err, code, e4m3_byte(s)
    return best[1], best[2]


E2M1_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def half_error(v: np.ndarray, code: np.ndarray, s: np.float16) -> np.float16:
    """Sum of FP16 squares over even and over odd elements, each operation rounded to FP16."""
    d = np.array(E2M1_VALUES, F16)[code] * s - v
    squares = d * d
    sums = [squares[0], squares[1]]
    for i in range(2, 16):
        sums[i % 2] = sums[i % 2] + squares[i]
    return sums[0] + sums[1]


def half_block(block, up) -> tuple[np.ndarray, int]:
    """The FP8-exact choice in FP16 arithmetic, which numpy's float16 is, one operation at a time."""
    scaled = block * up
    b = np.abs(scaled).max()
    if b == 0:
        return np.zeros(16, np.uint8), 0
    j = next((i for i, s in enumerate(EXACT) if 6 * s >= b), len(EXACT) - 1)
    unit = 2.0 ** (math.frexp(EXACT[j])[1] - 1)
    v = (np.abs(scaled) / F32(unit)).astype(F16)
    ties = np.array([(low + high) / 2 * 2.0**-14 for low, high in pairwise(E2M1_VALUES)])
    best = None
    for i in (j, j + 1, j - 1):
        s = EXACT[min(max(i, 0), len(EXACT) - 1)]
        inverse = F16(1 / (s / unit)) * F16(2.0**-14)
        t = np.minimum(v * inverse, F16(6 * 2.0**-14))
        code = (t[:, None].astype(np.float64) >= ties).sum(1)
        err = half_error(v, code, F16(s / unit))
        if best is None or err < best[0]:
            best = err, code, e4m3_byte(s)
    return best[1].astype(np.uint8) | np.signbit(scaled).astype(np.uint8) << 3, best[2]


def nvfp4_group(x: np.ndarray, fmt, bits) -> tuple[np.ndarray, np.ndarray, F32]:
    """Rows that share one outer scale."""
    rows, cols = x.shape
    codes = np.zeros((rows, cols), np.uint8)
    scales = np.zeros((rows, cols // 16), np.uint8)
    amax = np.abs(x).max() if x.size else F32(0)
    if not np.isfinite(amax):
        return codes, scales, F32(np.nan)
    up = F32(1) if amax == 0 else min(F32(factors_and_bound(fmt)[1]) / amax, FLT_MAX)
    outer = F32(1) / up
    for r in range(rows):
        for c in range(0, cols, 16):
            block, cut = x[r, c : c + 16], slice(c, c + 16)
            part = None if bits is None else bits[r, cut]
            if fmt.block_scales == "fp8_exact":
                choose = half_block if fmt.scale_search == "half" else exact_block
                codes[r, cut], scales[r, c // 16] = choose(block, up)
                continue
            top = r - r % 16
            b = np.abs(x[top : top + 16, cut] if fmt.block == "tile" else block).max()
            codes[r, cut], scales[r, c // 16] = plain_block(block, b, up, outer, fmt, part)
    return codes, scales, outer


def nvfp4(x: np.ndarray, fmt, bits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if fmt.outer == "tensor":
        codes, scales, outer = nvfp4_group(x, fmt, bits)
        return codes, scales, np.array(outer)
    parts = [
        nvfp4_group(x[r : r + 1], fmt, None if bits is None else bits[r : r + 1])
        for r in range(x.shape[0])
    ]
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    for r, part in enumerate(parts):
        codes[r], scales[r] = part[0][0], part[1][0]
    return codes, scales, np.array([part[2] for part in parts], F32)


def power_of_two_byte(amax: F32, top: float) -> int:
    """The smallest byte whose power of two times ``top`` reaches amax, by trying them."""
    if not np.isfinite(amax):
        return 255
    return next((b for b in range(254) if top * 2.0 ** (b - 127) >= float(amax)), 254)


def mx(x: np.ndarray, fmt, bits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, cols = x.shape
    kind = ELEMENT[fmt.format]
    width = max(cols, 32) if fmt.block == "row" else fmt.block
    codes = np.zeros((rows, cols), np.int8 if kind is None else np.uint8)
    scales = np.zeros((rows, cols // 32), np.uint8)
    for r in range(rows):
        for c in range(0, cols, width):
            part = x[r, c : c + width]
            byte = power_of_two_byte(np.abs(part).max(), TOP.get(kind, 127 / 64))
            scales[r, c // 32 : (c + width) // 32] = byte
            if byte == 255:
                continue
            y = part * F32(2.0 ** (127 - byte))
            if kind is None:
                codes[r, c : c + width] = np.clip(np.rint(y * F32(64)), -127, 127)
            else:
                part_bits = None if bits is None else bits[r, c : c + width]
                codes[r, c : c + width] = round_to(y, kind, part_bits)
    return codes, scales, np.zeros(0, F32)


def fp8(x: np.ndarray, fmt, bits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles of 128 columns and one row, or 128 rows: the largest magnitude lands on 448."""
    (rows, cols), high = x.shape, 128 if fmt.block == "tile" else 1
    codes = np.zeros((rows, cols), np.uint8)
    scales = np.zeros((-(-rows // high), cols // 128), F32)
    for i, j in np.ndindex(scales.shape):
        cut = slice(high * i, high * (i + 1)), slice(128 * j, 128 * (j + 1))
        part, largest = x[cut], np.abs(x[cut]).max()
        if not np.isfinite(largest):
            scales[i, j] = np.nan
            continue
        scales[i, j] = largest / F32(448)
        y = (part * min(F32(1) / scales[i, j], FLT_MAX)).reshape(-1)
        random = None if bits is None else bits[cut].reshape(-1)
        codes[cut] = round_to(y, E4M3, random).reshape(part.shape)
    return codes, scales, np.zeros(0, F32)


def quantize(x: np.ndarray, fmt, seed: int = 0, stream: int = 0, bits=None):
    """FP32 x [R, C] -> codes (packed for 4 bits), scales, outer, as the package returns them."""
    with np.errstate(all="ignore"):
        x = pad(x, max({"nvfp4": 16, "fp8": 128}.get(fmt.format, 32), fmt.rotation or 1))
        if fmt.rotation:
            x = hadamard(x, fmt.rotation)
        if fmt.rounding == "stochastic" and bits is None:
            bits = random_bits(seed, stream, *x.shape)
        codes, scales, outer = {"nvfp4": nvfp4, "fp8": fp8}.get(fmt.format, mx)(x, fmt, bits)
    if ELEMENT[fmt.format] is E2M1:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes, scales, outer


def swizzle(scales: np.ndarray) -> np.ndarray:
    """The tensor cores' layout, byte by byte from the offset formula."""
    rows, cols = scales.shape
    width = -(-cols // 4) * 4
    flat = np.zeros(-(-rows // 128) * 128 * width, np.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = ((r // 128) * (width // 4) + c // 4) * 512
            flat[tile + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales[r, c]
    return flat
