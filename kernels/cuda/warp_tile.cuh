// What gradients and transposes share: a tile that one warp turns without a barrier of the CTA,
// stochastic E4M3 of scaled values, and random bits of several groups at once.
#pragma once
#include "device.cuh"

namespace fp4 {

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- a tile of one warp -----------------------------------------------------------------------
// C columns of 64 bytes (64 rows of bytes, 32 rows of halves), four 16-byte chunks each. Eight
// threads with `C / 8` adjacent columns each write; four threads read a column. `turn` is the
// column's place among the eight writers: neither access has bank conflicts.

FP4_D u32 tile_chunk(u32 column, u32 chunk, u32 turn) { return (column * 4 + chunk) ^ turn; }

// The same for column `j` of a writer whose columns start at `first`, a multiple of 8.
FP4_D u32 tile_chunk(u32 first, u32 j, u32 chunk, u32 turn) {
  return first * 4 + (j / 2) * 8 + ((j % 2 * 4 + chunk) ^ turn);
}

// The largest of `m` >= 0 and |x|; NaN if one is.
FP4_D float max_magnitude(float m, float x) {
#ifdef FP4_EMULATE
  const u32 a = bits(m), b = magnitude(x), c = max_u(a, b);
  return from_bits(c > INFINITE ? MAGNITUDE : c);
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(m), "f"(fabsf(x)));
  return y;
#endif
}

// The same of BF16 pairs.
FP4_D u32 max_magnitudes(u32 m, u32 x) {
  x &= 0x7fff7fffu;
#ifdef FP4_EMULATE
  return max_u(m & 0xffffu, x & 0xffffu) | max_u(m >> 16, x >> 16) << 16;
#else
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(m), "r"(x));
  return y;
#endif
}

// a * b of BF16 pairs, exact.
FP4_D u32 mul_bf16(u32 a, u32 b) {
#ifdef FP4_EMULATE
  return pack_bf16(mul(from_bits(a << 16), from_bits(b << 16)),
                   mul(from_bits(a & 0xffff0000u), from_bits(b & 0xffff0000u)));
#else
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
  return out;
#endif
}

// ---- reading ahead ----------------------------------------------------------------------------

// 16 bytes where `exists`, else what `raw` held before; data that is read once.
FP4_D void load16_if(u32* raw, const u8* p, bool exists) {
#ifdef FP4_EMULATE
  if (exists) __builtin_memcpy(raw, p, 16);
#else
  asm volatile(
      "{ .reg .pred q; setp.ne.u32 q, %5, 0;\n"
      "@q ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(raw[0]), "+r"(raw[1]), "+r"(raw[2]), "+r"(raw[3])
      : "l"(p), "r"((u32)exists));
#endif
}

FP4_D void store_if(void* p, uint2 v, bool wanted) {
#ifdef FP4_EMULATE
  if (wanted) __builtin_memcpy(p, &v, 8);
#else
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %3, 0; @q st.global.v2.u32 [%0], {%1, %2}; }" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"((u32)wanted)
               : "memory");
#endif
}

FP4_D void store_if(void* p, uint4 v, bool wanted) {
#ifdef FP4_EMULATE
  if (wanted) __builtin_memcpy(p, &v, 16);
#else
  asm volatile(
      "{ .reg .pred q; setp.ne.u32 q, %5, 0; @q st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((u32)wanted)
      : "memory");
#endif
}

// Keeps a rare branch a branch.
FP4_D void rarely() {
#ifndef FP4_EMULATE
  asm volatile("");
#endif
}

// ---- stochastic E4M3 --------------------------------------------------------------------------
// Values are scaled by 2^(7 - byte): E4M3's subnormals become FP32's. One factor does it up to
// byte LAST_SINGLE; above (maxima of 2^38 and more, not finite) `shrunk_slowly`.

constexpr u32 LAST_SINGLE = 156;

FP4_D float shrink_factor(u32 byte) { return mul(e8m0_inverse(byte), 0x1p-120f); }

FP4_D float shrunk_slowly(float x, u32 byte) {
  return byte == 255 ? 0.0f : mul(mul(x, e8m0_inverse(byte)), 0x1p-120f);
}

// The code with its sign is the top byte of the result.
FP4_D u32 code_at_top(float shrunk, u32 rounding) {
  return ((bits(shrunk) << 4) + rounding) | (bits(shrunk) & 0x80000000u);
}

// The rounded value, as small as `shrunk`.
FP4_D float rounded(float shrunk, u32 rounding) {
  return from_bits((bits(shrunk) + (rounding >> 4)) & 0xfff00000u);
}

// 2^(byte - 7), what gives `rounded` its size, up to byte LAST_GROWN; NaN for 255.
constexpr u32 LAST_GROWN = 133;

FP4_D float grow_factor(u32 byte) {
  return byte == 255 ? from_bits(QUIET_NAN) : from_bits((byte + 120) << 23);
}

// ---- order ------------------------------------------------------------------------------------

struct Place {
  u32 row, column;
};

// Number `i` of rows x columns tiles: `group` rows of tiles together, rows fastest, so that what
// runs at one time is a block whose rows and columns are both long.
FP4_D Place place_of(u32 i, u32 rows, u32 columns, u32 group) {
  const u32 base = i / (group * columns) * group, rest = i - base * columns;
  const u32 size = min_u(group, rows - base);
  return {base + rest % size, rest / size};
}

// ---- random bits ------------------------------------------------------------------------------

// Philox of groups below 2^32 with one key and stream: what they have in common, and the rest.
struct Cipher {
  u32 k0, k1;          // the key before round 3
  u32 a, b, c, d, e;   // what earlier rounds exclusive-or, constants of the stream
};

FP4_D Cipher cipher(u64 seed, u32 stream) {
  const u32 k0 = (u32)seed, k1 = (u32)(seed >> 32), W0 = 0x9E3779B9u, W1 = 0xBB67AE85u;
  const u64 p = (u64)0xCD9E8D57u * stream, q = (u64)0xD2511F53u * ((u32)(p >> 32) ^ k0);
  Cipher s;
  s.a = k1;
  s.b = (u32)p ^ (k0 + W0);
  s.c = (u32)(q >> 32) ^ (k1 + W1);
  s.d = k0 + 2 * W0;
  s.e = (u32)q ^ (k1 + 2 * W1);
  s.k0 = k0 + 3 * W0, s.k1 = k1 + 3 * W1;
  return s;
}

template <int N>
FP4_D void philox(const Cipher& s, const u32* group, Words* out) {
  u32 c0[N], c1[N], c2[N], c3[N];
FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    const u64 p = (u64)0xD2511F53u * group[i];
    const u64 q = (u64)0xCD9E8D57u * ((u32)(p >> 32) ^ s.a);
    const u32 x = (u32)(q >> 32) ^ s.b, y = (u32)p ^ s.c;
    const u64 p2 = (u64)0xD2511F53u * x, q2 = (u64)0xCD9E8D57u * y;
    c0[i] = (u32)(q2 >> 32) ^ (u32)q ^ s.d;
    c1[i] = (u32)q2;
    c2[i] = (u32)(p2 >> 32) ^ s.e;
    c3[i] = (u32)p2;
  }
  u32 k0 = s.k0, k1 = s.k1;
FP4_UNROLL
  for (int round = 3; round < 10; ++round) {
FP4_UNROLL
    for (int i = 0; i < N; ++i) {
      const u64 p = (u64)0xD2511F53u * c0[i], q = (u64)0xCD9E8D57u * c2[i];
      c0[i] = (u32)(q >> 32) ^ c1[i] ^ k0;
      c1[i] = (u32)q;
      c2[i] = (u32)(p >> 32) ^ c3[i] ^ k1;
      c3[i] = (u32)p;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
FP4_UNROLL
  for (int i = 0; i < N; ++i) out[i] = {{c0[i], c1[i], c2[i], c3[i]}};
}

}  // namespace fp4
