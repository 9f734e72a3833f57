// A block rounded to nearest in few instructions an element: plain, as `plain_block`, and four over
// six. Values keep their signs throughout, so that no instruction has to put them back, and are in
// units of UNIT, 2^-14, where the FP16 bits of an E2M1 number are its sign and its code << 9.
#pragma once
#include "half_search.cuh"

namespace fp4 {

// From this scale byte on |x * inverse| <= 6 * 17 / 16: nothing rounds to 8. Smaller ones are
// subnormal, and may be a third below the number that they stand for, or 0.
constexpr u32 FIRST_NORMAL = 8;

FP4_D float reciprocal(float x) {
#if defined(__CUDA_ARCH__) && !defined(FP4_EMULATE)
  return __frcp_rn(x);
#else
  return div(1.0f, x);
#endif
}

// x / 6: the residual of a product with 1/6 makes it exact where nothing is subnormal.
FP4_D float sixth(float x) {
  if (!(x > 0x1p-100f)) return div(x, 6.0f);
  constexpr float r = 1.0f / 6.0f;
  const float q = mul(x, r);
  return fused(fused(q, -6.0f, x), r, q);
}

// E4M3 of x >= 0, as `encode`.
FP4_D u32 encode_scale(float x) {
#if FP4_CVT_E4M3
  return cvt_e4m3x2(0.0f, x);
#else
  return encode<E4M3>(x);
#endif
}

// Nearest even E2M1 value of y, |y| < 7, negated; +0 for zeros of both signs. With a = 1.5, 3 or 6
// in the binade of |y|, at least 1, a * 2^22 + y has E2M1's steps there: 1/2, 1 or 2.
FP4_D float minus_nearest(float y) {
  u32 a = bits(fmaxf(fabsf(y), UNIT));
#ifdef FP4_EMULATE
  a = (a & INFINITE) | 0x400000u;
#else  // one instruction; the compiler makes two of two constants
  asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(a) : "n"(INFINITE), "r"(0x400000u));
#endif
  return fma_exact(from_bits(a), 0x1p22f, -fma_exact(from_bits(a), 0x1p22f, y));
}

// x * inverse, in [-6, 6] where nothing else keeps it below 7.
FP4_D void scaled(const float* x, float inverse, u32 byte, float* y) {
  if (byte < FIRST_NORMAL || inverse < 0x1p-100f) {
FP4_UNROLL
    for (int i = 0; i < 16; ++i)
      y[i] = mul(fminf(fmaxf(mul(x[i], inverse), -6.0f), 6.0f), UNIT);
    return;
  }
  const float factor = mul(inverse, UNIT);
FP4_UNROLL
  for (int i = 0; i < 16; ++i) y[i] = mul(x[i], factor);
}

// Codes of eight E2M1 values.
FP4_D u32 pack_signed(const float* q) {
#if FP4_CVT_FP4
  float y[8];
FP4_UNROLL
  for (int i = 0; i < 8; ++i) y[i] = mul(q[i], 1 / UNIT);
  return e2m1_codes8(y);
#else
  u32 top[2];  // bytes s000ccc0 of the even elements, and of the odd ones
FP4_UNROLL
  for (int odd = 0; odd < 2; ++odd) {
    const float* v = q + odd;
    top[odd] = select_bytes(round_f16x2(v[0], v[2]), round_f16x2(v[4], v[6]), 0x7531);
  }
  return (top[0] >> 1 & 0x07070707u) | (top[0] >> 4 & 0x08080808u) |
         (top[1] << 3 & 0x70707070u) | (top[1] & 0x80808080u);
#endif
}

// The block of the values whose negatives are given. In codes zeros have the signs of x, by way of
// x * factor, which is below 2^-40 and vanishes in FP16.
FP4_D void store_signed(const float* minus, const float* x, float factor, u32 byte, Block16& out) {
  float q[16];
FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    q[i] = fused(x[i], factor, -minus[i]);
    out.q[i] = sub(0.0f, minus[i]);
  }
  const u32 mask = byte ? 0xffffffffu : 0u;
  out.codes[0] = pack_signed(q) & mask, out.codes[1] = pack_signed(q + 8) & mask;
  out.byte = byte;
}

FP4_D float unit_inverse(float scale, float outer) {
  return min_f(reciprocal(mul(scale, outer)), LARGEST);
}

// `out.scale` is in units of 1 / UNIT, as its magnitudes are in units of UNIT.
FP4_D void nearest_block(const float* x, u32 amax, float s, float outer, Block16& out) {
#if FP4_CVT_FP4  // one instruction rounds
  plain_block(x, amax, s, outer, out);
#else
  const u32 byte = encode_scale(mul(sixth(from_bits(amax)), s));
  const float scale = decode<E4M3>(byte);
  float y[16];
  scaled(x, unit_inverse(scale, outer), byte, y);
FP4_UNROLL
  for (int i = 0; i < 16; ++i) y[i] = minus_nearest(y[i]);
  store_signed(y, x, mul(s, 0x1p-60f), byte, out);
  out.scale = mul(scale, 1 / UNIT);
#endif
}

// x is overwritten with x * s.
FP4_D void nearest_of_two_block(float* x, u32 amax, float s, float outer, Block16& out) {
  const float base = mul(sixth(from_bits(amax)), s);
  const u32 byte[2] = {encode_scale(base), encode_scale(mul(base, 1.5f))};
  float scale[2], err[2], y[2][16];
FP4_UNROLL
  for (int c = 0; c < 2; ++c) {
    scale[c] = decode<E4M3>(byte[c]);
    scaled(x, unit_inverse(scale[c], outer), byte[c], y[c]);
    scale[c] = mul(scale[c], 1 / UNIT);
  }
FP4_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = mul(x[i], s);
FP4_UNROLL
  for (int c = 0; c < 2; ++c) {
    err[c] = 0.0f;
FP4_UNROLL
    for (int i = 0; i < 16; ++i) {
      y[c][i] = minus_nearest(y[c][i]);
      const float d = fma_exact(y[c][i], scale[c], x[i]);
      err[c] = add(err[c], mul(d, d));
    }
  }
  const bool four = err[1] < err[0];
FP4_UNROLL
  for (int i = 0; i < 16; ++i) y[0][i] = four ? y[1][i] : y[0][i];
  store_signed(y[0], x, 0x1p-60f, four ? byte[1] : byte[0], out);
  out.scale = four ? scale[1] : scale[0];
}

}  // namespace fp4
