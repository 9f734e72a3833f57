// The FP8-exact scale search in FP16 arithmetic (scale_search: half), two elements an instruction.
// Values are in units of the first candidate's power of two; a code's FP16 bits, as code x 2^-14,
// are the code << 9, so that rounding to nearest adds half a step (0x100) to the bits.
#pragma once
#include "device.cuh"

namespace fp4 {

#ifdef FP4_EMULATE
FP4_D u32 nearest_f16(float x) {  // FP16 bits of x, nearest even
  const u32 a = magnitude(x), sign = bits(x) >> 16 & 0x8000u;
  if (a > INFINITE) return sign | 0x7fffu;
  if (a < 0x38800000u) {  // below 2^-14: steps of 2^-24
    const float shifted = add(from_bits(a), 0.5f);
    return sign | (bits(shifted) - bits(0.5f));
  }
  const u32 rounded = a + 0xfffu + (a >> 13 & 1u);
  return sign | (rounded >= 0x47800000u ? 0x7c00u : (rounded - 0x38000000u) >> 13);
}
template <class F>
FP4_D u32 both(u32 a, u32 b, u32 c, F f) {
  u32 out = 0;
  for (int i = 0; i < 32; i += 16)
    out |= nearest_f16(f(widen_f16((u16)(a >> i)), widen_f16((u16)(b >> i)),
                         widen_f16((u16)(c >> i)))) << i;
  return out;
}
FP4_D u32 round_f16x2(float low, float high) { return nearest_f16(low) | nearest_f16(high) << 16; }
FP4_D u32 mul_f16x2(u32 a, u32 b) {
  return both(a, b, 0, [](float x, float y, float) { return x * y; });
}
FP4_D u32 add_f16x2(u32 a, u32 b) {
  return both(a, b, 0, [](float x, float y, float) { return x + y; });
}
// a * b - c where a * b is exact.
FP4_D u32 difference_f16x2(u32 a, u32 b, u32 c) {
  return both(a, b, c, [](float x, float y, float z) { return x * y - z; });
}
FP4_D u32 clamp_f16x2(u32 a, u32 most) {  // |a| <= most, sign of a
  return both(a, most, 0, [](float x, float y, float) { return copysignf(fminf(fabsf(x), y), x); });
}
FP4_D bool less_f16(u32 a, u32 b) { return widen_f16((u16)a) < widen_f16((u16)b); }
#else
FP4_D u32 round_f16x2(float low, float high) { return pack_f16(low, high); }
FP4_D u32 mul_f16x2(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
FP4_D u32 add_f16x2(u32 a, u32 b) {
  u32 out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
FP4_D u32 difference_f16x2(u32 a, u32 b, u32 c) {
  u32 out;
  asm("{.reg .b32 n; neg.f16x2 n, %3; fma.rn.f16x2 %0, %1, %2, n;}"
      : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
FP4_D u32 clamp_f16x2(u32 a, u32 most) {
  u32 out;
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(most));
#else
  asm("{.reg .b32 n; min.f16x2 n, %1, %2; max.f16x2 %0, n, %3;}"
      : "=r"(out) : "r"(a), "r"(most), "r"(most | 0x80008000u));
#endif
  return out;
}
FP4_D bool less_f16(u32 a, u32 b) {
  u32 out;
  asm("{.reg .pred p; .reg .b16 x, y, t; mov.b32 {x, t}, %1; mov.b32 {y, t}, %2;"
      " setp.lt.f16 p, x, y; selp.u32 %0, 1, 0, p;}"
      : "=r"(out) : "r"(a), "r"(b));
  return out;
}
#endif

// What the search needs to know of an index of G: 1 / unit, and of the three candidates in order
// their scale and reciprocal in FP16 (both halves) and their byte.
struct alignas(16) HalfEntry {
  float up;
  u32 bytes;
  u32 scale[3], inverse[3];
};

FP4_D u32 twice(u32 half) { return half | half << 16; }

FP4_D void fill_half_table(HalfEntry* table) {
  for (u32 j = threadIdx.x; j < EXACT_COUNT; j += blockDim.x) {
    const u32 index[3] = {j, min_u(j + 1, EXACT_COUNT - 1), j ? j - 1 : 0};
    const float up = from_bits((254u << 23) - (bits(exact_scale(exact_byte(j))) & INFINITE));
    HalfEntry e;
    e.up = up, e.bytes = 0;
    for (int c = 0; c < 3; ++c) {
      const float s = mul(exact_scale(exact_byte(index[c])), up);
      e.bytes |= exact_byte(index[c]) << 8 * c;
      e.scale[c] = twice(round_f16x2(mul(s, 0x1p14f), 0.0f) & 0xffffu);
      // 1 / s rounded to FP16, then an exact power of two.
      const float r = widen_f16((u16)round_f16x2(div(1.0f, s), 0.0f));
      e.inverse[c] = twice(round_f16x2(mul(r, 0x1p-14f), 0.0f) & 0xffffu);
    }
    table[j] = e;
  }
}

struct HalfBlock {
  u32 codes[2], byte;
  u32 signs[4];  // E4M3 sign bits of elements 0..3, 4..7, ...
};

// Eight codes from four words of (even, odd) FP16 steps, and the sign bits as bytes.
FP4_D u32 gather_codes(const u32* q, u32* signs) {
  const u32 a = select_bytes(q[0], q[1], 0x7351), b = select_bytes(q[2], q[3], 0x7351);
  const u32 even = select_bytes(a, b, 0x5410), odd = select_bytes(a, b, 0x7632);
  signs[0] = select_bytes(a, a, 0x3120) & 0x80808080u;
  signs[1] = select_bytes(b, b, 0x3120) & 0x80808080u;
  return (even >> 1 & 0x07070707u) | (even >> 4 & 0x08080808u) | (odd << 3 & 0x70707070u) |
         (odd & 0x80808080u);
}

// x [16], `amax` the bits of max |x|, s the row's S.
FP4_D void half_block(const float* x, u32 amax, float s, const HalfEntry* table, HalfBlock& out) {
  const u32 scaled = bits(mul(from_bits(amax), s));
  const HalfEntry e = table[exact_index(scaled)];
  u32 v[8], best[8], least = 0, byte = e.bytes;
  if (s >= 0x1p119f) {  // s x up could overflow: the same product, scaled on the other side
    const float up = mul(mul(s, 0x1p-24f), e.up);
FP4_UNROLL
    for (int p = 0; p < 8; ++p)
      v[p] = round_f16x2(mul(mul(x[2 * p], 0x1p24f), up), mul(mul(x[2 * p + 1], 0x1p24f), up));
  } else {
    const float up = mul(s, e.up);
FP4_UNROLL
    for (int p = 0; p < 8; ++p) v[p] = round_f16x2(mul(x[2 * p], up), mul(x[2 * p + 1], up));
  }
FP4_UNROLL
  for (int c = 0; c < 3; ++c) {
    u32 q[8], sum = 0;
FP4_UNROLL
    for (int p = 0; p < 8; ++p) {
      u32 t = mul_f16x2(v[p], e.inverse[c]);
      if (c == 2) t = clamp_f16x2(t, 0x0e000e00u);
      q[p] = (t + 0x01000100u) & 0xfe00fe00u;
      const u32 d = difference_f16x2(q[p], e.scale[c], v[p]);
      const u32 square = mul_f16x2(d, d);
      sum = p ? add_f16x2(sum, square) : square;
    }
    const u32 error = add_f16x2(sum, sum >> 16);
    const bool better = c == 0 || less_f16(error, least);
    least = better ? error : least;
    byte = c && better ? e.bytes >> 8 * c : byte;
FP4_UNROLL
    for (int p = 0; p < 8; ++p) best[p] = better ? q[p] : best[p];
  }
  out.byte = byte & 0xffu;
  out.codes[0] = gather_codes(best, out.signs);
  out.codes[1] = gather_codes(best + 4, out.signs + 2);
  if (scaled == 0) {  // the maximum underflows: as a block of zeros
    out.codes[0] = out.codes[1] = out.byte = 0;
    out.signs[0] = out.signs[1] = out.signs[2] = out.signs[3] = 0;
  }
}

}  // namespace fp4
