// What every CPU kernel is made of: threads, reading and widening, random bits, and the branch-free
// loops over a row of blocks that the compiler vectorizes.
#pragma once
#include <algorithm>
#include <thread>
#include <vector>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
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

// out[c * ld + r] = in[r * TILE + c] for rows r < TILE, columns c < n.
template <class T>
void transpose_tile(const T* __restrict in, i64 n, T* __restrict out, i64 ld) {
  for (i64 c = 0; c < n; ++c)
    for (int r = 0; r < TILE; ++r) out[c * ld + r] = in[r * TILE + c];
}

// Columns col.. of x as n rows of `out` (TILE rows, ld floats each, zero where x ends).
void read_transposed(const Matrix& x, i64 col, i64 n, float* out, i64 ld) {
  float tile[TILE * TILE];
  for (i64 m = 0; m < ld; m += TILE) {
    const i64 rows = std::min<i64>(TILE, ld - m);
    std::fill(tile, tile + TILE * TILE, 0.0f);
    for (i64 r = 0; r < std::min(rows, x.rows - m); ++r)
      read_row(x, m + r, col, n, tile + r * TILE);
    for (i64 c = 0; c < n; ++c)
      for (i64 r = 0; r < rows; ++r) out[c * ld + m + r] = tile[r * TILE + c];
  }
}

// ---- random bits ------------------------------------------------------------------------------

// Lanes of the n groups group(0), group(1), ...: 8 n numbers.
template <class G>
void fill_random(u64 seed, u32 stream, i64 n, G group, u16* out) {
  constexpr int N = 16;
  u32 w[4][N];
  for (i64 g = 0; g < n; g += N) {
    for (int j = 0; j < N; ++j) {
      const Words words = philox(seed, group((u64)(g + j)), stream);
      w[0][j] = words.w[0];
      w[1][j] = words.w[1];
      w[2][j] = words.w[2];
      w[3][j] = words.w[3];
    }
    const i64 count = std::min<i64>(N, n - g);
    u16* o = out + g * 8;
    for (i64 j = 0; j < count; ++j)
      for (int k = 0; k < 4; ++k) {
        o[j * 8 + 2 * k] = (u16)w[k][j];
        o[j * 8 + 2 * k + 1] = (u16)(w[k][j] >> 16);
      }
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

// code = round(x * factor of its block), 0 where the block's `keep` is 0.
template <class T, int B, bool STOCHASTIC>
void encode_row(const float* __restrict x, const float* __restrict factor, const u8* __restrict keep,
                const u16* __restrict random16, i64 blocks, u8* __restrict code) {
  for (i64 b = 0; b < blocks; ++b) {
    const float f = factor[b];
    const u32 mask = keep[b] ? 0xffu : 0u;
    for (int i = 0; i < B; ++i) {
      const i64 k = b * B + i;
      const float y = mul(x[k], f);
      const u32 c = STOCHASTIC ? encode_stochastic<T>(y, random16[k]) : encode<T>(y);
      code[k] = (u8)(c & mask);
    }
  }
}

template <class T, int B>
void encode_row(bool stochastic, const float* x, const float* factor, const u8* keep,
                const u16* random16, i64 blocks, u8* code) {
  if (stochastic) encode_row<T, B, true>(x, factor, keep, random16, blocks, code);
  else encode_row<T, B, false>(x, factor, keep, nullptr, blocks, code);
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
