"""The scalar functions of cuda/numerics.cuh, compiled for the host, exhaustively.

Compiled without optimization and without the flags of the native library, apart from
-ffp-contract=off, so that what is tested is the header and not a build.
"""

from __future__ import annotations

import ctypes
import subprocess
from fractions import Fraction
from pathlib import Path

import fp4compile.kernels
import numpy as np
import pytest
import torch
from fp4compile.kernels.native_library import compiler

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

PROBE = r"""
#include "cuda/numerics.cuh"
using namespace fp4;
float ignored;
#define EACH(name, expression)                                                  \
  extern "C" void name(long n, const u32* x, const u32* r, u32* out) {          \
    for (long i = 0; i < n; ++i) {                                              \
      const u32 b = x[i], e = r[i];                                             \
      const float f = from_bits(b);                                             \
      (void)e; (void)f;                                                         \
      out[i] = expression;                                                      \
    }                                                                           \
  }
EACH(e2m1, encode<E2M1>(f))
EACH(e4m3, encode<E4M3>(f))
EACH(nearest_e2m1, bits(nearest<E2M1>(f)))
EACH(nearest_e4m3, bits(nearest<E4M3>(f)))
EACH(sr_e2m1, encode_stochastic<E2M1>(f, e))
EACH(sr_e4m3, encode_stochastic<E4M3>(f, e))
EACH(decode_e2m1, bits(decode<E2M1>(b)))
EACH(decode_e4m3, bits(fp4::decode_e4m3(b)))
EACH(ceil_e4m3, e4m3_ceil(f))
EACH(mx_e4m3, e8m0<E4M3>(b))
EACH(mx_e2m1, e8m0<E2M1>(b))
EACH(scale_e8m0, bits(e8m0_value(b)))
EACH(inverse_e8m0, bits(e8m0_inverse(b)))
EACH(index_exact, exact_index(b))
EACH(byte_exact, exact_byte(b))
EACH(reciprocal_exact, bits(exact_reciprocal(exact_scale(b))))
EACH(value_sr_e2m1, bits(stochastic<E2M1>(f, e)))
EACH(value_sr_e4m3, bits(stochastic<E4M3>(f, e)))
EACH(half, bits(widen_f16((u16)b)))
EACH(to_half, bits(round_f16(f)))
EACH(sum_half, bits(half_sum(f, from_bits(e))))
EACH(product_half, bits(half_product(f, from_bits(e))))
EACH(inverse_half, bits(half_inverse(f)))
EACH(unit_half, bits(half_unit(f)))
EACH(code_half, half_code(f, half_inverse(from_bits(e)), &ignored))
EACH(square_half, bits(half_square(f, half_inverse(from_bits(e)), from_bits(e))))
EACH(brain, bits(widen_bf16((u16)b)))
"""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
GRIDS = {"e2m1": (E2M1, 3, 1.0), "e4m3": (E4M3, 7, 2.0**-6)}


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    where = tmp_path_factory.mktemp("probe")
    (where / "probe.cpp").write_text(PROBE)
    include = Path(fp4compile.kernels.__file__).parent
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
    ]
    call = [*compiler(), *flags, "-I", str(include), "probe.cpp", "-o", "probe.so"]
    subprocess.run(call, cwd=where, check=True)
    library = ctypes.CDLL(str(where / "probe.so"))

    def run(name: str, x, random16=None) -> np.ndarray:
        x = np.ascontiguousarray(x)
        x = x.view(np.uint32) if x.dtype == np.float32 else x.astype(np.uint32)
        r = np.zeros_like(x) if random16 is None else np.ascontiguousarray(random16)
        r = r.view(np.uint32) if r.dtype == np.float32 else r.astype(np.uint32)
        out = np.empty_like(x)
        pointer = ctypes.c_void_p
        getattr(library, name)(
            ctypes.c_long(x.size), *(pointer(a.ctypes.data) for a in (x, r, out))
        )
        return out

    return run


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def all_bf16() -> np.ndarray:
    x = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    return x[~np.isnan(x)]


def all_midpoints(grid: np.ndarray) -> np.ndarray:
    """Midpoints between neighbours, and the FP32 numbers just beside them, both signs."""
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, 1e9), grid])
    return np.concatenate([x, -x]).astype(np.float32)


def nearest_even(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Codes by distance in float64: exact, since grid and FP32 numbers are."""
    a = np.minimum(np.abs(x).astype(np.float64), grid[-1])
    low = np.searchsorted(grid, a, side="right") - 1
    high = np.minimum(low + 1, len(grid) - 1)
    down, up = a - grid[low], grid[high] - a
    return np.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)


@pytest.mark.parametrize("name", GRIDS)
def test_nearest_even(probe, name: str) -> None:
    grid, sign, _ = GRIDS[name]
    x = np.concatenate([all_bf16(), all_midpoints(grid)])
    want = nearest_even(x, grid)
    got = probe(name, x)
    np.testing.assert_array_equal(got, want | np.signbit(x).astype(np.uint32) << sign)
    value = floats(probe(f"nearest_{name}", x))
    np.testing.assert_array_equal(value, np.copysign(grid[want], x))
    np.testing.assert_array_equal(np.signbit(value), np.signbit(x))


def test_e4m3_agrees_with_torch(probe) -> None:
    x = np.concatenate([all_bf16(), all_midpoints(E4M3)])
    x = x[np.abs(x) <= 448]
    want = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(probe("e4m3", x), want)


def test_decode(probe) -> None:
    byte = np.arange(256, dtype=np.uint32)
    want = byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = floats(probe("decode_e4m3", byte))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[want == 0], np.signbit(want)[want == 0])
    codes = floats(probe("decode_e2m1", byte[:16]))
    np.testing.assert_array_equal(codes, np.concatenate([E2M1, -E2M1]))
    assert np.signbit(codes[8])


def test_block_scale_rounded_up(probe) -> None:
    x = np.concatenate([all_bf16(), all_midpoints(E4M3)])
    x = x[~np.signbit(x)]
    want = np.minimum(np.searchsorted(E4M3, x.astype(np.float64), side="left"), 126)
    np.testing.assert_array_equal(probe("ceil_e4m3", x), want)


@pytest.mark.parametrize(("name", "top"), [("mx_e4m3", 448), ("mx_e2m1", 6)])
def test_power_of_two_scale(probe, name: str, top: int) -> None:
    """Every exponent, mantissas around the step, against exact fractions."""
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    x = np.array([e << 23 | m for e in range(256) for m in mantissas], np.uint32)
    got = probe(name, x)
    for bits, byte in zip(x.tolist(), got.tolist()):
        if bits >= 0x7F800000:
            assert byte == 255
            continue
        amax = Fraction(float(np.uint32(bits).view(np.float32)))
        want = next((b for b in range(255) if Fraction(2) ** (b - 127) * top >= amax), 254)
        assert byte == (0 if amax == 0 else want)


def test_power_of_two_values(probe) -> None:
    byte = np.arange(256, dtype=np.uint32)
    value = floats(probe("scale_e8m0", byte)).astype(np.float64)
    np.testing.assert_array_equal(value[:255], 2.0 ** (byte[:255].astype(float) - 127))
    assert np.isnan(value[255])
    inverse = floats(probe("inverse_e8m0", byte[:255])).astype(np.float64)
    np.testing.assert_array_equal(inverse, 2.0 ** (127 - byte[:255].astype(float)))


@pytest.mark.parametrize("name", GRIDS)
def test_stochastic_rounding_over_all_random_values(probe, name: str) -> None:
    """Between two neighbours the count of ups over the 65,536 random values is the fraction's."""
    grid, sign, smallest = GRIDS[name]
    r = np.arange(65536, dtype=np.uint32)
    generator = np.random.default_rng(1)
    low = generator.integers(0, len(grid) - 1, 40)
    fraction = np.concatenate(
        [generator.random(32), [0, 0.5, 0.25, 2**-16, 2**-17, 2**-18, 2**-12, 0.999]]
    )
    for i, f in zip(low, fraction):
        step = grid[i + 1] - grid[i]
        x = np.float32(grid[i] + f * step)
        f = (float(x) - grid[i]) / step  # what FP32 made of it
        got = probe(f"sr_{name}", np.full(65536, x, np.float32), r)
        value = floats(probe(f"value_sr_{name}", np.full(65536, x, np.float32), r))
        np.testing.assert_array_equal(value, grid[got])
        assert set(got.tolist()) <= {i, i + 1}
        ups = int((got == i + 1).sum())
        assert abs(ups - f * 65536) <= 0.5 + 1e-9 + 65536 * 2**-23 * smallest / step
        if f == 0:
            assert ups == 0
        negative = probe(f"sr_{name}", np.full(65536, -x, np.float32), r)
        np.testing.assert_array_equal(negative, got | 1 << sign)
        value = floats(probe(f"value_sr_{name}", np.full(65536, -x, np.float32), r))
        np.testing.assert_array_equal(value, -grid[got])
        assert np.signbit(value).all()


@pytest.mark.parametrize("name", GRIDS)
def test_stochastic_rounding_keeps_grid_values_and_saturates(probe, name: str) -> None:
    grid, sign, _ = GRIDS[name]
    for r in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        got = probe(f"sr_{name}", grid.astype(np.float32), np.full(len(grid), r))
        np.testing.assert_array_equal(got, np.arange(len(grid)))
        beyond = np.array([grid[-1] * 1.001, grid[-1] * 2, 3e38, np.inf], np.float32)
        assert (probe(f"sr_{name}", beyond, np.full(4, r)) == len(grid) - 1).all()
        assert (floats(probe(f"value_sr_{name}", beyond, np.full(4, r))) == grid[-1]).all()
        assert probe(f"sr_{name}", np.array([-0.0], np.float32), np.array([r])) == 1 << sign


def exact_set() -> list[int]:
    """The bytes of the nonzero E4M3 scales for which every code x scale is an E4M3 number."""
    numbers = set(E4M3.tolist())
    return [b for b in range(1, 127) if all(c * E4M3[b] in numbers for c in E2M1)]


def test_the_exact_set_is_what_the_definition_gives(probe) -> None:
    want = exact_set()
    assert len(want) == 40
    np.testing.assert_array_equal(probe("byte_exact", np.arange(40)), want)
    reciprocal = floats(probe("reciprocal_exact", np.array(want)))
    np.testing.assert_array_equal(reciprocal, np.float32(1) / E4M3[want].astype(np.float32))


def test_exact_index(probe) -> None:
    thresholds = (6 * E4M3[exact_set()]).astype(np.float32)
    around = np.concatenate(
        [thresholds, np.nextafter(thresholds, 0), np.nextafter(thresholds, 1e9)]
    )
    x = all_bf16()
    x = np.concatenate([x[~np.signbit(x) & (x < 1e4)], around, np.float32([1e-45, 1e-38])])
    want = np.minimum(np.searchsorted(thresholds, x, side="left"), 39)
    np.testing.assert_array_equal(probe("index_exact", x), want)


def test_widening(probe) -> None:
    h = np.arange(65536, dtype=np.uint32)
    for name, dtype in (("half", np.float16), ("brain", ml_dtypes.bfloat16)):
        want = h.astype(np.uint16).view(dtype).astype(np.float32)
        got = floats(probe(name, h))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


# ---- FP16 arithmetic in FP32 ------------------------------------------------------------------

HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
# Scales of the half search in units of the first candidate's power of two.
RELATIVE = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)


def test_rounding_to_half(probe) -> None:
    """Every FP16 number, the midpoints between neighbours and the FP32 numbers beside them."""
    x = HALVES.astype(np.float32)
    middle = (x[1:] + x[:-1]) / 2
    x = np.concatenate([x, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(9e9))])
    x = np.concatenate([x, np.float32([1e-9, 1e-45, 0]), -x])
    np.testing.assert_array_equal(floats(probe("to_half", x)), x.astype(np.float16))


def test_half_sums_and_products(probe) -> None:
    """FP32 arithmetic rounded to FP16 is FP16's own, over random pairs of all sizes."""
    rng = np.random.default_rng(4)
    a, b = (rng.choice(HALVES, 400_000) * rng.choice([-1, 1], 400_000) for _ in range(2))
    a, b = a.astype(np.float16), b.astype(np.float16)
    with np.errstate(over="ignore"):
        cases = {"sum": a + b, "product": a * b}
    for name, want in cases.items():
        fits = np.isfinite(want)
        got = floats(probe(f"{name}_half", a.astype(np.float32), b.astype(np.float32)))
        np.testing.assert_array_equal(got[fits], want[fits])


def test_half_search_of_every_value_and_scale(probe) -> None:
    """Codes by distance from numpy's FP16 t, ties away; squares by numpy's FP16 arithmetic."""
    v = HALVES[HALVES <= 12]
    ties = (E2M1[1:] + E2M1[:-1]) / 2
    for s in RELATIVE:
        inverse = (np.float16(1 / s) * np.float16(2.0**-14)).astype(np.float16)
        scale = np.full(v.size, s, np.float32)
        assert floats(probe("inverse_half", scale[:1])) == np.float32(inverse) * 2.0**14
        t = (v * inverse).astype(np.float64) * 2.0**14
        code = (t[:, None] >= ties).sum(1)
        np.testing.assert_array_equal(probe("code_half", v.astype(np.float32), scale), code)
        d = E2M1[code].astype(np.float16) * np.float16(s) - v
        got = floats(probe("square_half", v.astype(np.float32), scale))
        np.testing.assert_array_equal(got, d * d)


def test_half_units(probe) -> None:
    """Every FP8-exact scale and its neighbours, in units of its power of two, are in RELATIVE."""
    scales = E4M3[exact_set()]
    inverse = floats(probe("unit_half", scales.astype(np.float32)))
    np.testing.assert_array_equal(inverse, 2.0 ** -np.floor(np.log2(scales)))
    for step in (-1, 0, 1):
        near = scales[np.clip(np.arange(40) + step, 0, 39)]
        assert set(near * inverse) <= set(RELATIVE)
