// Blocks of E2M1 elements that share nothing with their row: NVFP4 with one outer scale for the tensor
// (MX 0, blocks of 16) and MXFP4 (MX 1, blocks of 32), to nearest (SR 0) or stochastically (SR 1).
#pragma once
#include "warp_tile.cuh"

namespace fp4 {

constexpr u32 LENGTH = MX ? 32 : 16;

// What a tensor's maximum (FP32 bits) fixes: S and what is stored of it.
struct Whole {
  float up, outer;
  bool finite;
};

// For each scale byte what elements are multiplied with, and the scale as a BF16 pair.
constexpr u32 SCALES = MX ? 1 : 128;

FP4_D Whole whole_of(u32 amax, uint2* table) {
  Whole t = {1.0f, 1.0f, true};
  if (MX) return t;
  t.up = outer_inverse(amax, BOUND_PLAIN), t.outer = outer_scale(amax, t.up);
  t.finite = amax < INFINITE;
  for (u32 i = threadIdx.x; i < SCALES; i += blockDim.x) {
    const float scale = decode<E4M3>(i);
    table[i] = make_uint2(i ? bits(block_inverse(scale, t.outer)) : 0u, pack_bf16(scale, scale));
  }
  __syncthreads();
  return t;
}

// b / 6, rounded once: the remainder of the quotient is exact where it is no subnormal number.
FP4_D float sixth(u32 b) {
  const float x = from_bits(b);
  if (b < 0x0d800000u) {  // 2^-100
    rarely();
    return div(x, 6.0f);
  }
  constexpr float r = 1.0f / 6.0f;
  const float q = mul(x, r);
  return fused(fused(q, -6.0f, x), r, q);
}

FP4_D u32 e4m3_byte(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(0.0f), "f"(x));
  return out;
#else
  return encode<E4M3>(x);
#endif
}

// A block's scale: its byte, what elements are multiplied with, the scale as a BF16 pair; `mask` is 0
// where all codes are 0.
struct Block {
  u32 byte, mask, pair;
  float inverse;
};

FP4_D Block block_of(const Whole& t, const uint2* table, u32 amax) {
  Block b;
  if (MX) {
    b.byte = e8m0<E2M1>(amax);
    const float scale = e8m0_value(b.byte);
    b.inverse = e8m0_inverse(b.byte), b.pair = pack_bf16(scale, scale);
    b.mask = b.byte == 255 ? 0u : ~0u;
    return b;
  }
  const float base = mul(sixth(amax), t.up);
  u32 byte = e4m3_byte(base);
  if (SR) byte = min_u(byte + (from_bits(table[byte].y << 16) < base ? 1u : 0u), E4M3::top);
  b.byte = t.finite ? byte : 0u;
  const uint2 entry = table[b.byte];
  b.inverse = from_bits(entry.x), b.pair = entry.y, b.mask = b.byte ? ~0u : 0u;
  return b;
}

// E2M1 magnitudes of eight elements, nearest even.
FP4_D void nearest8(const float* x, const Block& b, float* q) {
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float y = mul(fabsf(x[i]), b.inverse);
    q[i] = nearest_magnitude(MX ? y : fminf(y, 6.0f), 1.0f);
  }
}

FP4_D u32 codes8(const float* q, const float* x, const Block& b) { return pack_codes(q, x) & b.mask; }

// The eight BF16 values of magnitudes with the signs of x.
FP4_D uint4 nearest_values(const float* q, const float* x, const Block& b) {
  u32 out[4];
FP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    const u32 size = select_bytes(bits(q[2 * i]), bits(q[2 * i + 1]), 0x7632);
    const u32 sign = select_bytes(bits(x[2 * i]), bits(x[2 * i + 1]), 0x7632) & 0x80008000u;
    out[i] = mul_bf16((size | sign) & b.mask, b.pair);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Stochastic: times 2^-126, E2M1's subnormal is FP32's, and a code with its sign is what FP32 has
// above 22 bits of mantissa. `rounding(i)`: a lane's 16 bits at bit 8, half below them. No clamp: scales
// are rounded up, and what S, outer and inverse are off by lifts an element over 6 by less than the 32
// units in the last place that the largest draw lacks to carry into the next code.
template <class Rounding>
FP4_D u32 stochastic_codes(const float* x, const Block& b, const Rounding& rounding) {
  u32 codes = 0;
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    const u32 up = bits(mul(mul(x[i], b.inverse), 0x1p-126f)) + (rounding(i) >> 2);
    codes |= (up >> 22 & 7u | up >> 28 & 8u) << 4 * i;
  }
  return codes & b.mask;
}

// The values of these codes.
template <class Rounding>
FP4_D uint4 stochastic_values(const float* x, const Block& b, const Rounding& rounding) {
  const u32 mask = b.mask & 0xffc0ffc0u;
  u32 up[8], out[4];
FP4_UNROLL
  for (int i = 0; i < 8; ++i)
    up[i] = bits(mul(mul(x[i], b.inverse), 0x1p-126f)) + (rounding(i) >> 2);
FP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    const u32 small = select_bytes(up[2 * i], up[2 * i + 1], 0x7632) & mask;
    out[i] = mul_bf16(mul_bf16(small, 0x7e807e80u), b.pair);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace fp4
