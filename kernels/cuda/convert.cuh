// Conversions that some GPUs have instructions for. The software version of each, in numerics.cuh,
// is the specification; an instruction is used where it gives the same bits:
//
//     e2m1_codes8    cvt.rn.satfinite.e2m1x2   sm_100a, 103a, 120a, 121a
//     e4m3_codes4    cvt.rn.satfinite.e4m3x2   sm_89 and later
//     e8m0_byte      cvt.rp.satfinite.ue8m0x2  sm_100a, 103a, 120a, 121a
//
// NaN is where they differ: e2m1x2 makes it +6, e4m3x2 0x7f, the specification the largest code with
// NaN's sign. No caller converts NaN: what is not finite has code 0 before. e8m0_byte takes NaN.
//
// Not used: cvt.rs, stochastic rounding. It takes 32 random bits for four numbers, where 16 for each
// and half a unit below them are specified, so its bits are others; sm_120 and sm_121 lack it.
//
// A test compiles this for the host with a model of the instructions (FP4_PTX_MODEL).
#pragma once
#include "numerics.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP4_CVT_E4M3 1
#else
#define FP4_CVT_E4M3 0
#endif
// Instructions of one architecture, which the names with "a" give.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && defined(__CUDA_ARCH_SPECIFIC__)
#define FP4_CVT_FP4 1
#else
#define FP4_CVT_FP4 0
#endif

#ifdef FP4_PTX_MODEL
#include "ptx_model.h"
#undef FP4_CVT_E4M3
#undef FP4_CVT_FP4
#define FP4_CVT_E4M3 1
#define FP4_CVT_FP4 1
#endif

namespace fp4 {

// ---- the instructions -------------------------------------------------------------------------
// Each converts `high` to the upper and `low` to the lower half of its result.

#ifndef FP4_PTX_MODEL
#if FP4_CVT_E4M3
FP4_HD u16 cvt_e4m3x2(float high, float low) {
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}
#endif
#if FP4_CVT_FP4
// Eight numbers, the first in the lowest nibble.
FP4_HD u32 cvt_e2m1x8(const float* y) {
  u32 out;
  asm("{.reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;"
      " cvt.rn.satfinite.e2m1x2.f32 b, %4, %3; cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;"
      " cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d};}"
      : "=r"(out)
      : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]), "f"(y[4]), "f"(y[5]), "f"(y[6]), "f"(y[7]));
  return out;
}

FP4_HD u16 cvt_ue8m0x2(float high, float low) {
  u16 out;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  return out;
}

FP4_HD float mul_up(float a, float b) { return __fmul_ru(a, b); }
#endif
#endif

// ---- conversions ------------------------------------------------------------------------------

// E2M1 codes of eight numbers, nearest even, saturating; element i in nibble i.
FP4_HD u32 e2m1_codes8(const float* y) {
#if FP4_CVT_FP4
  return cvt_e2m1x8(y);
#else
  u32 codes = 0;
  FP4_UNROLL
  for (int i = 0; i < 8; ++i) codes |= encode<E2M1>(y[i]) << 4 * i;
  return codes;
#endif
}

// E4M3 bytes of four numbers, nearest even, saturating.
FP4_HD u32 e4m3_codes4(const float* y) {
#if FP4_CVT_E4M3
  return (u32)cvt_e4m3x2(y[1], y[0]) | (u32)cvt_e4m3x2(y[3], y[2]) << 16;
#else
  return encode<E4M3>(y[0]) | encode<E4M3>(y[1]) << 8 | encode<E4M3>(y[2]) << 16 |
         encode<E4M3>(y[3]) << 24;
#endif
}

// E8M0 byte of a block of E4M3 elements from its maximum (bits of a magnitude, NaN too): of the
// smallest power of two >= amax / 448.
//
// The instruction rounds up to a power. Its argument is amax times a number 2^-24 of it below 1 / 448,
// rounded up: for amax = 448 * 2^k it stays at most 2^k, for the FP32 number after that amax, which is
// 1.14 * 2^-24 of it more, it is above.
FP4_HD u32 e8m0_byte(u32 amax) {
#if FP4_CVT_FP4
  const u32 byte = cvt_ue8m0x2(0.0f, mul_up(from_bits(amax), from_bits(0x3b124924u)));
  return amax >= INFINITE ? 255u : byte;  // saturated infinity is 254
#else
  return e8m0<E4M3>(amax);
#endif
}

}  // namespace fp4
