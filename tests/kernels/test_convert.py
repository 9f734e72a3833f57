"""cuda/convert.cuh with a model of the conversion instructions gives the bits of numerics.cuh.

The model (ptx_model.h) is written from the PTX ISA; the host code of NVIDIA's headers, where Triton is
installed, is a second one. All these functions ascend with |x|, so both sides of every step and the
numbers between prove them for every input.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path

import fp4compile.kernels
import numpy as np
import pytest
from fp4compile.kernels.native_library import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
HERE = Path(__file__).parent
EACH = r"""
#define EACH(name, expression)                                        \
  extern "C" void name(long n, const unsigned* x, unsigned* out) {    \
    for (long i = 0; i < n; ++i) {                                    \
      const unsigned b = x[i];                                        \
      const float f = from_bits(b), eight[8] = {1, f, f, 1, f, 1, 1, f}; \
      (void)f; (void)eight;                                           \
      out[i] = expression;                                            \
    }                                                                 \
  }
"""
PROBE = f"""
#define FP4_PTX_MODEL
#include "cuda/convert.cuh"
using namespace fp4;
{EACH}
EACH(e2m1, e2m1_codes8(eight))
EACH(e4m3, e4m3_codes4(eight))
EACH(e4m3_last, e4m3_codes4(eight + 4))
EACH(e8m0_of, e8m0_byte(b))
EACH(soft_e2m1, encode<E2M1>(f))
EACH(soft_e4m3, encode<E4M3>(f))
EACH(soft_e8m0, e8m0<E4M3>(b))
EACH(model_e2m1, ptx_e2m1(f))
EACH(model_e4m3, ptx_e4m3(f))
EACH(model_e8m0, ptx_ue8m0(f))
"""
VENDOR = f"""
#include <cstring>
#include "cuda_fp4.h"
#include "cuda_fp8.h"
static float from_bits(unsigned b) {{ float f; memcpy(&f, &b, 4); return f; }}
{EACH}
EACH(model_e2m1, __nv_cvt_float_to_fp4(f, __NV_E2M1, cudaRoundNearest))
EACH(model_e4m3, __nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3))
EACH(model_e8m0, __nv_cvt_float_to_e8m0(f, __NV_SATFINITE, cudaRoundPosInf))
"""


class Functions:
    """The functions of a source, over arrays of FP32 bits."""

    def __init__(self, where: Path, text: str, include: list[Path]) -> None:
        (where / "probe.cpp").write_text(text)
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off"]
        flags += [f"-I{path}" for path in include]
        call = [*compiler(), *flags, "probe.cpp", "-o", "probe.so"]
        subprocess.run(call, cwd=where, check=True)
        self.library = ctypes.CDLL(str(where / "probe.so"))

    def __call__(self, name: str, bits: np.ndarray) -> np.ndarray:
        out = np.empty_like(bits)
        pointers = (ctypes.c_void_p(a.ctypes.data) for a in (bits, out))
        getattr(self.library, name)(ctypes.c_long(bits.size), *pointers)
        return out


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> Functions:
    include = [Path(fp4compile.kernels.__file__).parent, HERE]
    return Functions(tmp_path_factory.mktemp("convert"), PROBE, include)


def with_neighbours(bits: np.ndarray) -> np.ndarray:
    """Magnitudes with the FP32 numbers beside them, finite ones, both signs."""
    b = bits.astype(np.int64)
    b = np.concatenate([b - 1, b, b + 1])
    b = np.unique(b[(b >= 0) & (b < 0x7F800000)]).astype(np.uint32)
    return np.concatenate([b, b | 0x80000000]).astype(np.uint32)


def inputs() -> np.ndarray:
    """All BF16 numbers, both sides of all steps of E2M1 and E4M3, FP32 numbers of every size."""
    brain = np.arange(65536, dtype=np.uint32) << 16
    brain = brain[(brain & 0x7FFFFFFF) <= 0x7F800000]
    codes = np.arange(0x7F)
    mantissa, exponent = codes & 7, codes >> 3
    e4m3 = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    grids = (np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), e4m3)
    steps = np.concatenate([np.concatenate([g, (g[1:] + g[:-1]) / 2]) for g in grids])
    steps = steps.astype(np.float32).view(np.uint32)
    anything = np.random.default_rng(1).integers(0, 0x7F800000, 20000, dtype=np.uint32)
    rest = np.concatenate([steps, anything, [0, 1, 0x7F7FFFFF]])
    return np.concatenate([brain, with_neighbours(rest)]).astype(np.uint32)


def maxima() -> np.ndarray:
    """Both sides of every power of two times 448, subnormal ones too, infinity and NaN."""
    powers = 448 * np.exp2(np.arange(-150, 120).astype(np.float64))
    bits = with_neighbours(powers.astype(np.float32).view(np.uint32))
    small = np.arange(4096, dtype=np.uint32)
    special = np.array([0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    return np.concatenate([bits[bits < 0x80000000], small, inputs() & 0x7FFFFFFF, special])


def test_elements(header: Functions) -> None:
    x = inputs()
    for name, bits in (("e2m1", 4), ("e4m3", 8)):
        want = header(f"soft_{name}", x)
        one = 2 if name == "e2m1" else 0x38
        places = (1, 2, 4, 7) if name == "e2m1" else (1, 2)
        every = 8 if name == "e2m1" else 4
        packed = sum((want if i in places else one) << np.uint32(bits * i) for i in range(every))
        np.testing.assert_array_equal(header(name, x), packed.astype(np.uint32), err_msg=name)
    last = header("e4m3_last", x)
    np.testing.assert_array_equal(last & 0xFF, header("soft_e4m3", x))
    np.testing.assert_array_equal(last >> 24, header("soft_e4m3", x))


def test_scale_bytes(header: Functions) -> None:
    amax = maxima()
    want = header("soft_e8m0", amax)
    assert {0, 1, 2, 127, 246, 255} <= set(want.tolist())
    np.testing.assert_array_equal(header("e8m0_of", amax), want)


def test_the_model_saturates_as_the_ptx_isa_says(header: Functions) -> None:
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000], np.uint32)
    assert header("model_e2m1", special).tolist() == [7, 15, 7, 7]
    assert header("model_e4m3", special).tolist() == [0x7E, 0xFE, 0x7F, 0x7F]
    assert header("model_e8m0", special).tolist() == [254, 254, 255, 255]


def vendor_headers() -> Path | None:
    """NVIDIA's headers as Triton ships them, if it is installed."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    include = Path(found.origin).parent / "backends/nvidia/include"
    return include if (include / "cuda_fp4.h").exists() else None


def test_the_model_is_what_nvidias_host_code_computes(header: Functions, tmp_path: Path) -> None:
    include = vendor_headers()
    if include is None:
        pytest.skip("Triton's copy of NVIDIA's headers is not installed")
    (tmp_path / "nv").mkdir()
    # What the headers choose code by target with; here the target is the host.
    (tmp_path / "nv/target").write_text(
        "#define NV_IF_ELSE_TARGET(target, then, otherwise) otherwise\n"
        "#define NV_IF_TARGET(target, then, ...) __VA_ARGS__\n"
    )
    vendor = Functions(tmp_path, VENDOR, [include, tmp_path])
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000], np.uint32)
    x = np.concatenate([inputs(), special])
    np.testing.assert_array_equal(header("model_e2m1", x), vendor("model_e2m1", x))
    np.testing.assert_array_equal(header("model_e8m0", x), vendor("model_e8m0", x))
    x = x[(x & 0x7FFFFFFF) <= 0x7F800000]  # NaN of E4M3 has a sign there, which PTX does not keep
    np.testing.assert_array_equal(header("model_e4m3", x), vendor("model_e4m3", x))
