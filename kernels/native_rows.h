// What every CPU kernel is made of: threads, reading and widening, random bits, and the branch-free
// loops over a row of blocks that the compiler vectorizes.
#pragma once
#include <algorithm>
#include <thread>
#include <vector>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cuda/numerics.cuh"

using namespace fp4;

namespace {

constexpr int TILE = 32;          // rows of a panel that is transposed
constexpr i64 WORTH_A_THREAD = 1 << 15;  // elements

// ---- threads ----------------------------------------------------------------------------------

// Denormals are kept while this lives, whatever the process has set.
struct KeepDenormals {
#if defined(__x86_64__) || defined(__i386__)
  unsigned saved = _mm_getcsr();
  KeepDenormals() { _mm_setcsr(saved & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  u64 saved;
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" ::"r"(saved & ~(1ull << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#else
  KeepDenormals() {}
#endif
};

// f(first, last) over [0, n) split into contiguous parts; `cost` elements an index.
template <class F>
void parallel(i64 n, i64 cost, i64 threads, F f) {
  const i64 worth = n * cost / WORTH_A_THREAD + 1;
  const i64 parts = std::max<i64>(1, std::min({threads, n, worth}));
  auto part = [&](i64 p) {
    KeepDenormals keep;
    f(n * p / parts, n * (p + 1) / parts);
  };
  std::vector<std::thread> workers;
  for (i64 p = 1; p < parts; ++p) workers.emplace_back(part, p);
  part(0);
  for (auto& worker : workers) worker.join();
}

// Asks for pages of 2 MB in a result that is about to be written: fewer faults, fewer TLB misses.
void expect_large(void* start, i64 bytes) {
#if defined(__linux__)
  const u64 page = 1 << 21, first = ((u64)start + page - 1) / page * page;
  const u64 last = ((u64)start + (u64)bytes) / page * page;
  if (start && first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

// ---- reading ----------------------------------------------------------------------------------

enum Dtype { F32, BF16, F16 };

template <class T>
float widen(T v);
template <>
inline float widen<float>(float v) { return v; }
struct Bf16 { u16 v; };
struct Half { u16 v; };
template <>
inline float widen<Bf16>(Bf16 v) { return widen_bf16(v.v); }
template <>
inline float widen<Half>(Half v) { return widen_f16(v.v); }

struct Matrix {
  const void* data;
  i64 rows, cols, ld, dtype;
};

template <class T>
void widen_row(const void* data, i64 offset, i64 n, float* __restrict out) {
  const T* __restrict in = static_cast<const T*>(data) + offset;
  for (i64 i = 0; i < n; ++i) out[i] = widen<T>(in[i]);
}

void read_row(const Matrix& x, i64 row, i64 col, i64 n, float* out) {
  const i64 at = row * x.ld + col;
  if (x.dtype == F32) widen_row<float>(x.data, at, n, out);
  else if (x.dtype == BF16) widen_row<Bf16>(x.data, at, n, out);
  else widen_row<Half>(x.data, at, n, out);
}

// out[c * ld + r] = tile[r * TILE + c] for rows r < TILE, columns c < n. A perfect shuffle rotates the
// bits of an element's number by one, so that five of them swap rows and columns.
void transpose_tile(const float* __restrict tile, i64 n, float* __restrict out, i64 ld) {
  static_assert(TILE == 32, "five shuffles");
  constexpr int HALVES = TILE * TILE / 2;
  float buffer[2][2 * HALVES];
  const float* from = tile;
  for (int step = 0; step < 5; ++step) {
    float* __restrict to = buffer[step % 2];
    const float* __restrict low = from;
    for (int i = 0; i < HALVES; ++i) {
      to[2 * i] = low[i];
      to[2 * i + 1] = low[HALVES + i];
    }
    from = to;
  }
  for (i64 c = 0; c < n; ++c) std::copy(from + c * TILE, from + (c + 1) * TILE, out + c * ld);
}

// Columns col.. of x as n rows of `out` (TILE rows, ld floats each, zero where x ends).
void read_transposed(const Matrix& x, i64 col, i64 n, float* out, i64 ld) {
  float tile[TILE * TILE], last[TILE * TILE];
  for (i64 m = 0; m < ld; m += TILE) {
    const i64 rows = std::min<i64>(TILE, ld - m);
    std::fill(tile, tile + TILE * TILE, 0.0f);
    for (i64 r = 0; r < std::min(rows, x.rows - m); ++r)
      read_row(x, m + r, col, n, tile + r * TILE);
    if (rows == TILE) {
      transpose_tile(tile, n, out + m, ld);
      continue;
    }
    transpose_tile(tile, n, last, TILE);
    for (i64 c = 0; c < n; ++c)
      std::copy(last + c * TILE, last + c * TILE + rows, out + c * ld + m);
  }
}

// ---- random bits ------------------------------------------------------------------------------

// The 128 lanes of sixteen groups.
void random_groups(u64 seed, u32 stream, const u64 (&group)[16], u16* out) {
#if defined(__AVX2__)
  // A word is the low half of a 64-bit lane, which is all that a product reads; the high half holds
  // anything.
  __m256i c[4][4];
  for (int v = 0; v < 4; ++v) {
    c[0][v] = _mm256_loadu_si256((const __m256i*)(group + 4 * v));
    c[1][v] = _mm256_srli_epi64(c[0][v], 32);
    c[2][v] = _mm256_set1_epi64x(stream);
    c[3][v] = _mm256_setzero_si256();
  }
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  __m256i k0 = _mm256_set1_epi64x((i64)seed), k1 = _mm256_set1_epi64x((i64)(seed >> 32));
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < 4; ++v) {
      const __m256i p = _mm256_mul_epu32(c[0][v], m0), q = _mm256_mul_epu32(c[2][v], m1);
      const __m256i x = _mm256_xor_si256(c[1][v], k0), y = _mm256_xor_si256(c[3][v], k1);
      c[0][v] = _mm256_xor_si256(_mm256_srli_epi64(q, 32), x);
      c[1][v] = q;
      c[2][v] = _mm256_xor_si256(_mm256_srli_epi64(p, 32), y);
      c[3][v] = p;
    }
    k0 = _mm256_add_epi64(k0, _mm256_set1_epi64x(0x9E3779B9));
    k1 = _mm256_add_epi64(k1, _mm256_set1_epi64x(0xBB67AE85));
  }
  for (int v = 0; v < 4; ++v) {
    const __m256i a = _mm256_blend_epi32(c[0][v], _mm256_slli_epi64(c[1][v], 32), 0xaa);
    const __m256i b = _mm256_blend_epi32(c[2][v], _mm256_slli_epi64(c[3][v], 32), 0xaa);
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    __m256i* o = (__m256i*)(out + 32 * v);
    _mm256_storeu_si256(o, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(o + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
#else
  Words words[16];
  for (int j = 0; j < 16; ++j) words[j] = philox(seed, group[j], stream);
  for (int j = 0; j < 16; ++j)
    for (u32 i = 0; i < 8; ++i) out[j * 8 + i] = (u16)lane16(words[j], i);
#endif
}

// Lanes of the n groups group(0), group(1), ...: 8 n numbers.
template <class G>
void fill_random(u64 seed, u32 stream, i64 n, G group, u16* out) {
  u64 groups[16];
  u16 last[128];
  for (i64 g = 0; g < n; g += 16) {
    for (int j = 0; j < 16; ++j) groups[j] = group((u64)(g + j));
    const i64 count = std::min<i64>(16, n - g);
    random_groups(seed, stream, groups, count < 16 ? last : out + g * 8);
    if (count < 16) std::copy(last, last + count * 8, out + g * 8);
  }
}

// Elements first .. first + n (multiples of 8) of a tensor.
void random_elements(u64 seed, i64 stream, i64 first, i64 n, u16* out) {
  fill_random(seed, (u32)stream, n / 8, [=](u64 g) { return (u64)first / 8 + g; }, out);
}

// ---- loops over a row -------------------------------------------------------------------------

template <int B>
void block_maxima(const float* __restrict x, i64 blocks, u32* __restrict out) {
  for (i64 b = 0; b < blocks; ++b) {
    u32 m = 0;
    for (int i = 0; i < B; ++i) m = max_u(m, magnitude(x[b * B + i]));
    out[b] = m;
  }
}

u32 largest(const u32* __restrict x, i64 n) {
  u32 m = 0;
  for (i64 i = 0; i < n; ++i) m = max_u(m, x[i]);
  return m;
}

// f(b, k) for the elements k of each block b, as bytes. Parts are narrowed after all of them are
// there, which keeps the vectors of f's arithmetic full.
template <int B, class F>
void each_code(i64 blocks, u8* __restrict code, F f) {
  constexpr i64 N = 256 / B;
  u32 part[256];
  for (i64 first = 0; first < blocks; first += N) {
    const i64 count = std::min(N, blocks - first);
    for (i64 b = 0; b < count; ++b)
      for (int i = 0; i < B; ++i) part[b * B + i] = f(first + b, (first + b) * B + i);
    for (i64 i = 0; i < count * B; ++i) code[first * B + i] = (u8)part[i];
  }
}

// code = round(x * factor of its block), 0 where the block's `keep` is 0.
template <class T, int B, bool STOCHASTIC>
void encode_row(const float* __restrict x, const float* __restrict factor, const u8* __restrict keep,
                const u16* __restrict random16, i64 blocks, u8* __restrict code) {
  each_code<B>(blocks, code, [=](i64 b, i64 k) {
    const float y = mul(x[k], factor[b]);
    const u32 c = STOCHASTIC ? encode_stochastic<T>(y, random16[k]) : encode<T>(y);
    return keep[b] ? c : 0u;
  });
}

template <class T, int B>
void encode_row(bool stochastic, const float* x, const float* factor, const u8* keep,
                const u16* random16, i64 blocks, u8* code) {
  if (stochastic) encode_row<T, B, true>(x, factor, keep, random16, blocks, code);
  else encode_row<T, B, false>(x, factor, keep, nullptr, blocks, code);
}

// What `encode_row` and `decode_row` give one after the other.
template <class T, int B, bool STOCHASTIC>
void round_row(const float* __restrict x, const float* __restrict factor, const u8* __restrict keep,
               const float* __restrict scale, const u16* __restrict random16, i64 blocks,
               float* __restrict out) {
  for (i64 b = 0; b < blocks; ++b)
    for (int i = 0; i < B; ++i) {
      const float y = mul(x[b * B + i], factor[b]);
      const float value = STOCHASTIC ? stochastic<T>(y, random16[b * B + i]) : nearest<T>(y);
      out[b * B + i] = mul(keep[b] ? value : 0.0f, scale[b]);
    }
}

void pack_row(const u8* __restrict code, i64 n, u8* __restrict out) {
  for (i64 i = 0; i < n / 2; ++i) out[i] = (u8)(code[2 * i] | code[2 * i + 1] << 4);
}

void unpack_row(const u8* __restrict packed, i64 n, u8* __restrict code) {
  for (i64 i = 0; i < n / 2; ++i) {
    code[2 * i] = packed[i] & 15u;
    code[2 * i + 1] = packed[i] >> 4;
  }
}

template <class T, int B>
void decode_row(const u8* __restrict code, const float* __restrict scale, i64 blocks,
                float* __restrict out) {
  for (i64 b = 0; b < blocks; ++b)
    for (int i = 0; i < B; ++i) out[b * B + i] = mul(decode<T>(code[b * B + i]), scale[b]);
}

}  // namespace
