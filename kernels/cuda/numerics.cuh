// The numerics of docs/numerics.md as scalar functions, for the device (NVRTC, nvcc) and the host
// (C++17). Same bits everywhere: FP32, round to nearest, the written order, nothing contracted.
//
//     element types   e2m1, e4m3: encode and nearest (even), encode_stochastic and stochastic, decode
//     scales          e4m3_ceil, e8m0, outer scale, block scale, the FP8-exact set
//     half search     round_f16, codes and errors of the FP8-exact search in FP16
//     random bits     philox
//
// The host build needs -ffp-contract=off and a processor state that keeps denormals.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FP4_DEVICE 1
#define FP4_HD __host__ __device__ __forceinline__
#define FP4_UNROLL _Pragma("unroll")
#else
#define FP4_DEVICE 0
#define FP4_HD static inline __attribute__((always_inline))
#define FP4_UNROLL _Pragma("GCC unroll 16")
#endif

namespace fp4 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(float) == 4, "integer widths");

constexpr u32 MAGNITUDE = 0x7fffffffu;
constexpr u32 INFINITE = 0x7f800000u;  // the bits of a magnitude are finite below this
constexpr u32 QUIET_NAN = 0x7fc00000u;
constexpr float LARGEST = 3.402823466385288598e38f;

// ---- FP32 -------------------------------------------------------------------------------------

FP4_HD u32 bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  u32 b;
  __builtin_memcpy(&b, &x, 4);
  return b;
#endif
}

FP4_HD float from_bits(u32 b) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(b);
#else
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
#endif
}

#ifdef __CUDA_ARCH__
FP4_HD float mul(float a, float b) { return __fmul_rn(a, b); }
FP4_HD float add(float a, float b) { return __fadd_rn(a, b); }
FP4_HD float sub(float a, float b) { return __fsub_rn(a, b); }
FP4_HD float div(float a, float b) { return __fdiv_rn(a, b); }
#else
FP4_HD float mul(float a, float b) { return a * b; }
FP4_HD float add(float a, float b) { return a + b; }
FP4_HD float sub(float a, float b) { return a - b; }
FP4_HD float div(float a, float b) { return a / b; }
#endif

FP4_HD u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
FP4_HD u32 max_u(u32 a, u32 b) { return a > b ? a : b; }
FP4_HD float min_f(float a, float b) { return a < b ? a : b; }
FP4_HD u32 magnitude(float x) { return bits(x) & MAGNITUDE; }

FP4_HD float widen_bf16(u16 h) { return from_bits((u32)h << 16); }

FP4_HD float widen_f16(u16 h) {
  const u32 a = h & 0x7fffu;
  const bool small = a < 0x400u;
  const u32 bias = a >= 0x7c00u ? 224u : small ? 113u : 112u;
  const float v = sub(from_bits((a << 13) + (bias << 23)), small ? 0x1p-14f : 0.0f);
  return from_bits(bits(v) | (u32)(h & 0x8000u) << 16);
}

// ---- element types ----------------------------------------------------------------------------
// A type has `mant` mantissa bits, `smallest` normal and `largest` value (as FP32 bits), the code
// of the largest value, and the position of the sign in a code.

struct E2M1 {
  static constexpr u32 mant = 1, smallest = 0x3f800000u, largest = 0x40c00000u;
  static constexpr u32 top = 7, sign = 3;
};
struct E4M3 {
  static constexpr u32 mant = 3, smallest = 0x3c800000u, largest = 0x43e00000u;
  static constexpr u32 top = 0x7e, sign = 7;
};

// Nearest even of |x|, given as bits. Adding 2^(exponent + 23 - mant) leaves the number of grid
// steps in the low bits of the sum. NaN gives the largest code: callers exclude it.
template <class T>
FP4_HD u32 encode_magnitude(u32 x, float* value) {
  const u32 a = min_u(x, T::largest);
  const u32 p = max_u(a, T::smallest) & INFINITE;
  const u32 magic = p + ((23 - T::mant) << 23);
  const float s = add(from_bits(a), from_bits(magic));
  *value = sub(s, from_bits(magic));
  return bits(s) - magic + ((p - T::smallest) >> (23 - T::mant));
}

template <class T>
FP4_HD u32 encode(float y) {
  float value;
  return encode_magnitude<T>(magnitude(y), &value) | (bits(y) >> 31) << T::sign;
}

// Nearest even, as a value with the sign of y.
template <class T>
FP4_HD float nearest(float y) {
  float value;
  encode_magnitude<T>(magnitude(y), &value);
  return from_bits(bits(value) | (bits(y) & ~MAGNITUDE));
}

// Stochastic rounding with 16 random bits: the probability of rounding up is the fraction to
// within 2^-17 of a step (the half unit below the random bits).
template <class T>
FP4_HD u32 encode_stochastic(float y, u32 random16) {
  constexpr u32 drop = 23 - T::mant;
  const u32 a = magnitude(y);
  const bool small = a < T::smallest;
  const float z = add(from_bits(a), small ? from_bits(T::smallest) : 0.0f);
  const u32 up = bits(z) + (random16 << (drop - 16) | 1u << (drop - 17));
  const u32 first = (T::smallest >> drop) - (small ? 0u : 1u << T::mant);
  return min_u((up >> drop) - first, T::top) | (bits(y) >> 31) << T::sign;
}

// `encode_stochastic` as a value with the sign of y.
template <class T>
FP4_HD float stochastic(float y, u32 random16) {
  constexpr u32 drop = 23 - T::mant;
  const u32 a = magnitude(y);
  const float lift = a < T::smallest ? from_bits(T::smallest) : 0.0f;
  const u32 up = bits(add(from_bits(a), lift)) + (random16 << (drop - 16) | 1u << (drop - 17));
  const float value = sub(from_bits(up & ~((1u << drop) - 1)), lift);
  return from_bits(min_u(bits(value), T::largest) | (bits(y) & ~MAGNITUDE));
}

// The value of a code; E4M3's NaN (0x7f) is not looked for.
template <class T>
FP4_HD float decode(u32 code) {
  constexpr u32 drop = 23 - T::mant;
  const u32 c = code & ((1u << T::sign) - 1);
  const bool small = c < (1u << T::mant);
  const u32 b = (c << drop) + T::smallest - (small ? 0u : 1u << 23);
  const float v = sub(from_bits(b), small ? from_bits(T::smallest) : 0.0f);
  return from_bits(bits(v) | (code >> T::sign & 1u) << 31);
}

FP4_HD float decode_e4m3(u32 code) {
  return (code & 0x7fu) == 0x7fu ? from_bits(QUIET_NAN) : decode<E4M3>(code);
}

// Smallest E4M3 value >= x >= 0, at most 448.
FP4_HD u32 e4m3_ceil(float x) {
  const u32 c = encode<E4M3>(x);
  return min_u(c + (decode<E4M3>(c) < x ? 1u : 0u), E4M3::top);
}

// ---- MX scales --------------------------------------------------------------------------------

// Byte of the smallest power of two >= amax / largest(T); 255 where amax is not finite.
template <class T>
FP4_HD u32 e8m0(u32 amax) {
  const i32 b = (i32)((amax + 0x7fffffu - (T::largest & 0x7fffffu)) >> 23);
  const i32 e = b - (i32)((T::largest >> 23) - 127);
  return amax >= INFINITE ? 255u : e < 0 ? 0u : (u32)(e > 254 ? 254 : e);
}

FP4_HD float e8m0_value(u32 byte) {
  return from_bits(byte == 255 ? QUIET_NAN : byte == 0 ? 0x00400000u : byte << 23);
}

// 2^(127 - byte), what elements are multiplied with.
FP4_HD float e8m0_inverse(u32 byte) {
  return from_bits(byte >= 254 ? 0x00400000u : (254 - byte) << 23);
}

// ---- NVFP4 scales -----------------------------------------------------------------------------

constexpr float BOUND_PLAIN = 2688.0f, BOUND_SEARCH = 1536.0f, BOUND_EXACT = 384.0f;

// S = min(bound / amax, FLT_MAX), 1 where amax is 0.
FP4_HD float outer_inverse(u32 amax, float bound) {
  return amax == 0 ? 1.0f : min_f(div(bound, from_bits(amax)), LARGEST);
}

// What is stored: 1 / S, NaN where amax is not finite.
FP4_HD float outer_scale(u32 amax, float s) {
  return amax >= INFINITE ? from_bits(QUIET_NAN) : div(1.0f, s);
}

FP4_HD float block_base(u32 block_amax, float s) { return mul(div(from_bits(block_amax), 6.0f), s); }

// 1 / (scale * outer), at most FLT_MAX.
FP4_HD float block_inverse(float scale, float outer) {
  return min_f(div(1.0f, mul(scale, outer)), LARGEST);
}

// ---- the FP8-exact set G ----------------------------------------------------------------------
// 2^-8, 2^-7, 1.5*2^-7, {1, 1.25, 1.5}*2^e for -6 <= e <= 5, 64: the 40 E4M3 scales for which
// every code * scale is an E4M3 number.

constexpr u32 EXACT_COUNT = 40;

// Index of the first s in G with 6 s >= amax, the last if there is none. 6 s is 1.125, 1.5 or
// 1.875 times a power of two.
FP4_HD u32 exact_index(u32 amax) {
  const u32 m = amax & 0x7fffffu;
  const i32 high = 3 * ((i32)(amax >> 23) - 123) + 2 + (m > 0x100000u) + (m > 0x400000u) +
                   (m > 0x700000u);
  const i32 low = (amax > 0x3cc00000u) + (amax > 0x3d400000u);
  const i32 j = amax < 0x3d800000u ? low : high;
  return j < (i32)EXACT_COUNT ? (u32)j : EXACT_COUNT - 1;
}

FP4_HD u32 exact_byte(u32 j) { return j < 3 ? 2 * (j + 1) : 8 * (j / 3) + 2 * (j % 3); }

// FP32 bits of the scale: its mantissa has two bits, so has the reciprocal three cases.
FP4_HD float exact_scale(u32 byte) { return decode<E4M3>(byte); }

FP4_HD float exact_reciprocal(float scale) {
  const u32 b = bits(scale), m = b & 0x600000u;
  const u32 r = m == 0 ? 0x3f800000u : m == 0x200000u ? 0x3f4ccccdu : 0x3f2aaaabu;
  return from_bits(r + (127u << 23) - (b & INFINITE));
}

// ---- the FP8-exact search in FP16 -------------------------------------------------------------
// FP16 numbers are held in FP32: a product, sum or difference of two of them, rounded to FP32 and
// then to FP16, is what FP16 arithmetic gives, as 24 bits are at least 2 * 11 + 2. Elements and
// scales are in units of the power of two of the first candidate.

// The FP16 number nearest to x, ties to even, for |x| below 65520. -0 becomes 0.
FP4_HD float round_f16(float x, u32 smallest = 0x38800000u) {
  const float magic = from_bits(max_u(bits(x) & INFINITE, smallest) + (13u << 23 | 0x400000u));
  return sub(add(x, magic), magic);
}

// Sums and differences of FP16 numbers are FP16 numbers already where they are subnormal.
FP4_HD float half_sum(float a, float b) { return round_f16(add(a, b), 0); }
FP4_HD float half_product(float a, float b) { return round_f16(mul(a, b)); }

// 1 / the power of two of an FP8-exact scale.
FP4_HD float half_unit(float scale) { return from_bits((254u << 23) - (bits(scale) & INFINITE)); }

FP4_HD float half_value(float scaled, float unit) {
  return half_product(from_bits(magnitude(scaled)), unit);
}

// 2^14 times what v is multiplied with, FP16(1 / scale) * 2^-14 in FP16: 2^14 keeps it in FP32's
// normal numbers and changes nothing else.
FP4_HD float half_inverse(float scale) {
  return mul(half_product(round_f16(exact_reciprocal(scale)), 0x1p-14f), 0x1p14f);
}

// Code magnitude of v >= 0 and the value of the code: FP16's t = v * inverse * 2^-14 to the nearest
// of the codes * 2^-14, ties away. With p the power of two of y = v * inverse, at least 1, codes are
// 0x200000 apart in the bits of y + 2p; half a step more makes cutting them off rounding. 0x800 is
// half the distance of t from the FP16 number below a tie: a tie's bits are even, so what lies from
// there on rounds to it.
FP4_HD u32 half_code(float v, float inverse, float* value) {
  const float y = min_f(mul(v, inverse), 6.0f);
  const u32 p = max_u(bits(y), 0x3f800000u) & INFINITE;
  const float twice = from_bits(p + (1u << 23));
  const u32 steps = (bits(add(y, twice)) + 0x100800u) & ~0x1fffffu;
  *value = sub(from_bits(steps), twice);
  return (steps - 0x40000000u - ((p - 0x3f800000u) >> 1)) >> 21;
}

// (code * scale - v)^2, each operation in FP16; the first product is exact.
FP4_HD float half_square(float v, float inverse, float scale) {
  float value;
  half_code(v, inverse, &value);
  const float d = half_sum(mul(value, scale), -v);
  return half_product(d, d);
}

// ---- random bits ------------------------------------------------------------------------------

struct Words {
  u32 w[4];
};

FP4_HD u32 mul_high(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return (u32)((u64)a * b >> 32);
#endif
}

// Philox4x32-10: key = seed, counter = (group low, group high, stream, 0). Element i of a tensor
// uses 16-bit lane i % 8 of group i / 8, low halves first.
FP4_HD Words philox(u64 seed, u64 group, u32 stream) {
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  u32 c0 = (u32)group, c1 = (u32)(group >> 32), c2 = stream, c3 = 0;
  FP4_UNROLL
  for (int round = 0; round < 10; ++round) {
    const u32 h0 = mul_high(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const u32 h1 = mul_high(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

FP4_HD u32 lane16(const Words& words, u32 lane) { return words.w[lane >> 1] >> (lane & 1) * 16 & 0xffffu; }

}  // namespace fp4
