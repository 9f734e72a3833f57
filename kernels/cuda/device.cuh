// What the CUDA kernels share: reading, reductions of magnitudes, packed conversions, and a tile
// that turns rows into columns. A test compiles the kernels for the host (FP4_EMULATE).
#pragma once
#include "convert.cuh"
#ifdef FP4_EMULATE
#include "emulate.h"
#endif

namespace fp4 {

enum Dtype { F32, BF16, F16 };
// What a GEMM reads: nothing, bytes, values, or the codes and swizzled block scales.
enum Form { NONE, E4M3_FORM, BF16_FORM, SCALES_FORM };

#define FP4_D __device__ __forceinline__

// a * b + c where a * b is exact, so that contraction changes nothing.
FP4_D float fma_exact(float a, float b, float c) {
#ifdef FP4_EMULATE
  return a * b + c;
#else
  return __fmaf_rn(a, b, c);
#endif
}

// a * b + c rounded once, for activations, whose bits are not specified.
FP4_D float fused(float a, float b, float c) {
#ifdef FP4_EMULATE
  return fmaf(a, b, c);
#else
  return __fmaf_rn(a, b, c);
#endif
}

FP4_D u32 select_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

FP4_D u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }

// The largest v of the CTA; one barrier a call, `memory` is u32[64].
FP4_D u32 cta_max(u32 v, u32* memory, u32& phase) {
  v = warp_max(v);
  const u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return v;
  u32* part = memory + phase * 32;
  if (lane == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  phase ^= 1;
  return warp_max(lane < warps ? part[lane] : 0);
}

// ---- reading: eight adjacent elements ---------------------------------------------------------

template <int D>
struct Raw8 {
  u32 w[D == F32 ? 8 : 4];
};

// Elements at .. at + 8 of x, zero past `valid`; `wide`: they lie on 16-byte boundaries.
template <int D>
FP4_D Raw8<D> load8(const void* x, i64 at, i64 valid, bool wide) {
  constexpr int words = D == F32 ? 8 : 4;
  Raw8<D> raw;
  if (wide && valid >= 8) {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const u8*>(x) +
                                                    at * (D == F32 ? 4 : 2));
FP4_UNROLL
    for (int i = 0; i < words / 4; ++i) {
      const uint4 q = p[i];
      raw.w[4 * i] = q.x, raw.w[4 * i + 1] = q.y, raw.w[4 * i + 2] = q.z, raw.w[4 * i + 3] = q.w;
    }
    return raw;
  }
FP4_UNROLL
  for (int i = 0; i < words; ++i) {
    if (D == F32) {
      raw.w[i] = i < valid ? static_cast<const u32*>(x)[at + i] : 0u;
    } else {
      const u16* p = static_cast<const u16*>(x) + at;
      const u32 low = 2 * i < valid ? p[2 * i] : 0u, high = 2 * i + 1 < valid ? p[2 * i + 1] : 0u;
      raw.w[i] = low | high << 16;
    }
  }
  return raw;
}

template <int D>
FP4_D void widen8(const Raw8<D>& raw, float* out) {
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (D == F32) out[i] = from_bits(raw.w[i]);
    else if (D == BF16) out[i] = from_bits(i & 1 ? raw.w[i / 2] & 0xffff0000u : raw.w[i / 2] << 16);
    else out[i] = widen_f16((u16)(raw.w[i / 2] >> (i & 1) * 16));
  }
}

// ---- block scales as tensor cores read them --------------------------------------------------

// Where byte (r, c) lies: in tiles of 128 rows x 4 columns, `across` tiles side by side.
FP4_D u64 swizzled_at(u32 r, u32 c, u32 across) {
  return ((u64)(r / 128) * across + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

FP4_D u32 tiles_across(u32 cols) { return (cols + 3) / 4; }

// Zeros in what pads [rows, cols] to whole tiles, by all threads: this is number `first` of `count`.
FP4_D void pad_swizzled(u8* out, u32 rows, u32 cols, u32 first, u32 count) {
  const u32 across = tiles_across(cols), down = (rows + 127) / 128 * 128;
  for (u32 r = first; r < down; r += count)
    if (r >= rows)
      for (u32 t = 0; t < across; ++t)
        *reinterpret_cast<u32*>(out + swizzled_at(r, 4 * t, across)) = 0;
    else
      for (u32 c = cols; c < 4 * across; ++c) out[swizzled_at(r, c, across)] = 0;
}

// ---- packed conversions -----------------------------------------------------------------------

FP4_D u32 pack_bf16(float low, float high) {  // exact or nearest even; NaN stays NaN
#ifdef FP4_EMULATE
  const u32 w[2] = {bits(low), bits(high)};
  u32 h[2];
  for (int i = 0; i < 2; ++i)
    h[i] = (w[i] & MAGNITUDE) > INFINITE ? 0x7fffu : (w[i] + 0x7fffu + (w[i] >> 16 & 1)) >> 16;
  return h[0] | h[1] << 16;
#else
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#endif
}

// Halves of two FP32 numbers that FP16 holds exactly.
FP4_D u32 pack_f16(float low, float high) {
#ifdef FP4_EMULATE
  return exact_f16(low) | exact_f16(high) << 16;
#else
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#endif
}

// The top bytes of four words.
FP4_D u32 top_bytes(u32 a, u32 b, u32 c, u32 d) {
  return select_bytes(select_bytes(a, b, 0x0073), select_bytes(c, d, 0x0073), 0x5410);
}

// What stochastic rounding adds to (FP32 bits << 4): a lane's 16 bits at bit 8, half below them.
FP4_D u32 rounding_bits(const Words& words, u32 lane) {
  return select_bytes(words.w[lane >> 1], 0x80u, lane & 1 ? 0x5324u : 0x5104u);
}

// ---- NVFP4: sixteen elements of one thread ----------------------------------------------------

constexpr float UNIT = 0x1p-14f;

// Nearest even E2M1 magnitude of y >= 0 in units of `unit`, as a value in those units.
FP4_D float nearest_magnitude(float y, float unit) {
  const float p = from_bits(bits(fmaxf(y, unit)) & INFINITE);
  return fma_exact(p, -0x1p22f, fma_exact(p, 0x1p22f, y));
}

// Codes of eight elements, a nibble each: q are E2M1 magnitudes; signs from x. In units of 2^-14 the
// half precision bits of an E2M1 value are its code << 9.
FP4_D u32 pack_codes(const float* q, const float* x) {
#if FP4_CVT_FP4
  float y[8];
FP4_UNROLL
  for (int i = 0; i < 8; ++i) y[i] = from_bits(bits(q[i]) | (bits(x[i]) & 0x80000000u));
  return e2m1_codes8(y);
#else
  u32 codes = 0, signs = 0;
FP4_UNROLL
  for (int i = 0; i < 4; ++i) {
    const u32 half = pack_f16(mul(q[i], UNIT), mul(q[i + 4], UNIT));
    codes |= i < 3 ? half >> (9 - 4 * i) : half << 3;
  }
FP4_UNROLL
  for (int i = 0; i < 8; ++i) signs = signs >> 4 | (bits(x[i]) & 0x80000000u);
  return codes | signs;
#endif
}

// E2M1 magnitudes of |x| * factor.
template <bool CLAMP>
FP4_D void magnitudes(const float* x, float factor, float* q) {
FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float y = mul(fabsf(x[i]), factor);
    q[i] = nearest_magnitude(CLAMP ? fminf(y, 6.0f) : y, 1.0f);
  }
}

// Error of a candidate, summed in order, of magnitudes (signs do not matter).
FP4_D float block_error(const float* q, const float* t, float scale) {
  float err = 0.0f;
FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float d = fma_exact(q[i], scale, -fabsf(t[i]));
    err = add(err, mul(d, d));
  }
  return err;
}

// A quantized block: `q` are the magnitudes of its codes (unset in a row that is not finite).
struct Block16 {
  u32 codes[2], byte;
  float scale, q[16];
};

FP4_D u32 block_max(const float* x) {
  float m = 0.0f;
FP4_UNROLL
  for (int i = 0; i < 16; ++i) m = fmaxf(m, fabsf(x[i]));
  return bits(m);
}

// As block_max, but NaN wins.
FP4_D u32 block_max_nan(const float* x) {
#ifdef FP4_EMULATE
  u32 m = 0;
  for (int i = 0; i < 16; ++i) m = max_u(m, magnitude(x[i]));
  return m;
#else
  float m = 0.0f;
FP4_UNROLL
  for (int i = 0; i < 16; ++i) asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(m), "f"(fabsf(x[i])));
  return bits(m);
#endif
}

FP4_D void finish_block(const float* x, Block16& out) {
  const u32 mask = out.byte ? 0xffffffffu : 0u;
  out.codes[0] = pack_codes(out.q, x) & mask;
  out.codes[1] = pack_codes(out.q + 8, x + 8) & mask;
}

FP4_D void plain_block(const float* x, u32 amax, float s, float outer, Block16& out) {
  out.byte = encode<E4M3>(block_base(amax, s));
  out.scale = decode<E4M3>(out.byte);
  const float inverse = out.byte ? block_inverse(out.scale, outer) : 0.0f;
  magnitudes<true>(x, inverse, out.q);
#if FP4_CVT_FP4
  float y[16];  // the instruction needs no magnitudes: they are for an operand in BF16
FP4_UNROLL
  for (int i = 0; i < 16; ++i) y[i] = mul(x[i], inverse);
  const u32 mask = out.byte ? 0xffffffffu : 0u;
  out.codes[0] = e2m1_codes8(y) & mask, out.codes[1] = e2m1_codes8(y + 8) & mask;
#else
  finish_block(x, out);
#endif
}

// x is overwritten with x * s.
FP4_D void exact_block(float* x, float s, Block16& out) {
FP4_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = mul(x[i], s);
  const u32 amax = block_max(x), j = exact_index(amax);
  const u32 byte[3] = {exact_byte(j), exact_byte(min_u(j + 1, EXACT_COUNT - 1)),
                       exact_byte(j ? j - 1 : 0)};
  out.byte = byte[0];
  out.scale = exact_scale(byte[0]);
  magnitudes<false>(x, exact_reciprocal(out.scale), out.q);
  float best = block_error(out.q, x, out.scale);
FP4_UNROLL
  for (int c = 1; c < 3; ++c) {
    const float scale = exact_scale(byte[c]), r = exact_reciprocal(scale);
    float q[16];
    if (c == 1) magnitudes<false>(x, r, q);
    else magnitudes<true>(x, r, q);
    const float err = block_error(q, x, scale);
    const bool better = err < best;
    best = better ? err : best;
    out.byte = better ? byte[c] : out.byte;
    out.scale = better ? scale : out.scale;
FP4_UNROLL
    for (int i = 0; i < 16; ++i) out.q[i] = better ? q[i] : out.q[i];
  }
  out.byte = amax ? out.byte : 0;
  finish_block(x, out);
}

// BF16 values of eight magnitudes times their block's scale, with the signs of x.
FP4_D uint4 signed_bf16(const float* q, float scale, const float* x) {
  float v[8];
FP4_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = from_bits(bits(mul(q[i], scale)) | (bits(x[i]) & 0x80000000u));
  uint4 out;
  out.x = pack_bf16(v[0], v[1]), out.y = pack_bf16(v[2], v[3]);
  out.z = pack_bf16(v[4], v[5]), out.w = pack_bf16(v[6], v[7]);
  return out;
}

// ---- operands from codes ----------------------------------------------------------------------

// For each E4M3 scale byte the E4M3 bytes of the eight E2M1 magnitudes times it: u64[128].
FP4_D void fill_operand_table(u64* table) {
  for (u32 i = threadIdx.x; i < 128 * 8; i += blockDim.x)
    reinterpret_cast<u8*>(table)[i] =
        (u8)encode<E4M3>(mul(decode<E2M1>(i & 7), decode<E4M3>(i >> 3)));
}

// Sign bits of four nibbles as the top bits of four bytes.
FP4_D u32 spread_signs(u32 codes) {
  return (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 |
         (codes & 0x8000u) << 16;
}

// Eight codes to eight E4M3 bytes, given their scale's row of the table.
FP4_D uint2 operand_e4m3(u32 codes, u64 row) {
  const u32 low = (u32)row, high = (u32)(row >> 32), c = codes & 0x77777777u;
  uint2 out;
  out.x = select_bytes(low, high, c & 0xffffu) | spread_signs(codes);
  out.y = select_bytes(low, high, c >> 16) | spread_signs(codes >> 16);
  return out;
}

// As `operand_e4m3` where the sign bits of the eight bytes are at hand.
FP4_D uint2 signed_e4m3(u32 codes, u64 row, const u32* signs) {
  const u32 low = (u32)row, high = (u32)(row >> 32), c = codes & 0x77777777u;
  uint2 out;
  out.x = select_bytes(low, high, c) | signs[0];
  out.y = select_bytes(low, high, c >> 16) | signs[1];
  return out;
}

// Values of eight codes: code * scale.
FP4_D void operand_f32(u32 codes, float scale, float* out) {
FP4_UNROLL
  for (int i = 0; i < 8; ++i) out[i] = mul(decode<E2M1>(codes >> 4 * i & 15u), scale);
}

FP4_D uint4 eight_bf16(const float* v) {
  uint4 out;
  out.x = pack_bf16(v[0], v[1]), out.y = pack_bf16(v[2], v[3]);
  out.z = pack_bf16(v[4], v[5]), out.w = pack_bf16(v[6], v[7]);
  return out;
}

// Values of four E4M3 bytes times a scale.
FP4_D void decode4(u32 bytes, float scale, float* out) {
FP4_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = mul(decode<E4M3>(bytes >> 8 * i & 255u), scale);
}

}  // namespace fp4
