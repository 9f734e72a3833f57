// What the PTX ISA says of the conversion instructions that convert.cuh uses, on the host: by tables
// of the formats' numbers in double precision, not by the bit tricks of numerics.cuh.
//
//     cvt.rn     nearest, ties to the even code · .satfinite: the largest number in place of a larger
//                one and of infinity · NaN: e4m3 0x7f, e2m1 the largest number, positive
//     ue8m0 .rp  the smallest power of two not below |x|; .satfinite: 2^127 (254) for infinity;
//                NaN 255; 2^-127 (0) and less are 0
#pragma once
#include <cmath>


namespace fp4 {

static inline double ptx_number(u32 code, int mant, int bias) {
  const u32 e = code >> mant, m = code & ((1u << mant) - 1);
  return e ? std::ldexp((double)((1u << mant) + m), (int)e - bias - mant)
           : std::ldexp((double)m, 1 - bias - mant);
}

static inline u32 ptx_nearest(float x, int mant, int bias, u32 top, u32 nan, u32 sign_at) {
  if (std::isnan(x)) return nan;
  const double a = std::fabs((double)x);
  const u32 sign = std::signbit(x) ? 1u << sign_at : 0u;
  if (a >= ptx_number(top, mant, bias)) return top | sign;
  u32 below = 0, above = top;  // numbers ascend with their codes
  while (above - below > 1) {
    const u32 middle = (below + above) / 2;
    (ptx_number(middle, mant, bias) <= a ? below : above) = middle;
  }
  const double down = a - ptx_number(below, mant, bias), up = ptx_number(above, mant, bias) - a;
  const bool higher = up < down || (up == down && below % 2);
  return (higher ? above : below) | sign;
}

static inline u32 ptx_e2m1(float x) { return ptx_nearest(x, 1, 1, 7, 7, 3); }
static inline u32 ptx_e4m3(float x) { return ptx_nearest(x, 3, 7, 0x7e, 0x7f, 7); }

static inline u32 ptx_ue8m0(float x) {
  if (std::isnan(x)) return 255;
  if (std::isinf(x)) return 254;
  u32 byte = 0;
  while (byte < 254 && std::ldexp(1.0, (int)byte - 127) < std::fabs((double)x)) ++byte;
  return byte;
}

static inline u16 cvt_e4m3x2(float high, float low) {
  return (u16)(ptx_e4m3(high) << 8 | ptx_e4m3(low));
}

static inline u32 cvt_e2m1x8(const float* y) {
  u32 out = 0;
  for (int i = 0; i < 8; ++i) out |= ptx_e2m1(y[i]) << 4 * i;
  return out;
}

static inline u16 cvt_ue8m0x2(float high, float low) {
  return (u16)(ptx_ue8m0(high) << 8 | ptx_ue8m0(low));
}

// The exact product (48 bits) in double precision, to the FP32 number not below it.
static inline float mul_up(float a, float b) {
  const double exact = (double)a * (double)b;
  const float near = (float)exact;
  return (double)near < exact ? std::nextafterf(near, INFINITY) : near;
}

}  // namespace fp4
