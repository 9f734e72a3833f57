// How the block scales of an NVFP4 row are chosen: the E4M3 rule, the best of some multiples, and
// the FP8-exact search in FP32 and in FP16.
#pragma once
#include "native_rows.h"

namespace {

enum Search { PLAIN, FACTORS, EXACT, HALF };

struct Panel {
  std::vector<float> x, t, factor, scale, unit;
  std::vector<u32> amax;
  std::vector<u16> random16;
  std::vector<u8> code, byte;

  Panel(i64 rows, i64 padded, i64 blocks, bool stochastic)
      : x(rows * padded), t(padded), factor(blocks), scale(blocks), unit(blocks),
        amax(rows * blocks), random16(stochastic ? rows * padded : 0), code(padded), byte(blocks) {}
};

// W blocks of a row side by side, element i of all of them adjacent, so that their errors, each
// summed in order, are computed together. Blocks past the end are zero.
constexpr int W = 16;

struct Blocks {
  alignas(64) float x[16][W], t[16][W];  // what is rounded, what the result is compared with
  alignas(64) float factor[W], scale[W], err[W], base[W], unit[W], relative[W];
  alignas(64) float best_factor[W], best_scale[W], best[W];
  alignas(64) u32 byte[W], best_byte[W], index[W], amax[W];
};

void load_blocks(const float* __restrict row, i64 count, float (*__restrict out)[W]) {
  for (int i = 0; i < 16; ++i)
    for (i64 b = 0; b < W; ++b) out[i][b] = b < count ? row[b * 16 + i] : 0.0f;
}

// Squared errors in FP32, in the order of the elements.
void errors(Blocks& k) {
  alignas(64) float err[W] = {};
  for (int i = 0; i < 16; ++i)
    for (int b = 0; b < W; ++b) {
      const float v = mul(nearest<E2M1>(mul(k.x[i][b], k.factor[b])), k.scale[b]);
      const float d = sub(v, k.t[i][b]);
      err[b] = add(err[b], mul(d, d));
    }
  std::copy(err, err + W, k.err);
}

// Squared errors in FP16: of the e// Squared errors in FP16: of the even elements, of the odd ones, and their sum.
void half_errors(Blocks& k) {
  alignas(64) float even[W] = {}, odd[W] = {};
  for (int i = 0; i < 16; i += 2)
    for (int b = 0; b < W; ++b) {
      const float f = k.factor[b], s = k.relative[b];
      even[b] = half_sum(even[b], half_square(k.x[i][b], f, s));
      odd[b] = half_sum(odd[b], half_square(k.x[i + 1][b], f, s));
    }
  for (int b = 0; b < W; ++b) k.err[b] = half_sum(even[b], odd[b]);
}

// Keeps the candidate in byte, scale, factor where its error is strictly smaller than the best.
void keep_better(Blocks& k, bool first) {
  for (int b = 0; b < W; ++b) {
    const bool better = first || k.err[b] < k.best[b];
    k.best[b] = better ? k.err[b] : k.best[b];
    k.best_byte[b] = better ? k.byte[b] : k.best_byte[b];
    k.best_scale[b] = better ? k.scale[b] : k.best_scale[b];
    k.best_factor[b] = better ? k.factor[b] : k.best_factor[b];
  }
}

void keep_best(const Blocks& k, i64 first, i64 count, Panel& p) {
  for (i64 b = 0; b < count; ++b) {
    p.byte[first + b] = (u8)k.best_byte[b];
    p.scale[first + b] = k.best_scale[b];
    p.factor[first + b] = k.best_factor[b];
  }
}

// Scale byte and factor of each block by the E4M3 rule.
void plain_factors(const u32* amax, i64 blocks, bool stochastic, float s, float outer, Panel& p) {
  for (i64 b = 0; b < blocks; ++b) {
    const float base = block_base(amax[b], s);
    const u32 byte = stochastic ? e4m3_ceil(base) : encode<E4M3>(base);
    p.byte[b] = (u8)byte;
    p.scale[b] = decode<E4M3>(byte);
    p.factor[b] = byte ? block_inverse(p.scale[b], outer) : 0.0f;
  }
}

// The best of the block scales e4m3(base * f), f one of the n multiples.
void searched_factors(const u32* amax, i64 blocks, const float* multiples, i64 n, float s,
                      float outer, const float* x, Panel& p) {
  Blocks k;
  for (i64 first = 0; first < blocks; first += W) {
    const i64 count = std::min<i64>(W, blocks - first);
    load_blocks(x + first * 16, count, k.x);
    for (int i = 0; i < 16; ++i)
      for (int b = 0; b < W; ++b) k.t[i][b] = mul(k.x[i][b], s);
    for (int b = 0; b < W; ++b) k.base[b] = block_base(b < count ? amax[first + b] : 0, s);
    for (i64 c = 0; c < n; ++c) {
      const float multiple = multiples[c];
      for (int b = 0; b < W; ++b) {
        k.byte[b] = encode<E4M3>(mul(k.base[b], multiple));
        k.scale[b] = decode<E4M3>(k.byte[b]);
        const float inverse = block_inverse(k.scale[b], outer);
        k.factor[b] = k.byte[b] ? inverse : 0.0f;
      }
      errors(k);
      keep_better(k, c == 0);
    }
    keep_best(k, first, count, p);
  }
}

// The FP8-exact search on t = x * s: in FP32, or (HALVES) in FP16.
template <bool HALVES>
void exact_factors(const float* t, i64 blocks, Panel& p) {
  Blocks k;
  for (i64 first = 0; first < blocks; first += W) {
    const i64 count = std::min<i64>(W, blocks - first);
    load_blocks(t + first * 16, count, k.t);
    for (int b = 0; b < W; ++b) k.amax[b] = 0;
    for (int i = 0; i < 16; ++i)
      for (int b = 0; b < W; ++b) k.amax[b] = max_u(k.amax[b], magnitude(k.t[i][b]));
    for (int b = 0; b < W; ++b) {
      k.index[b] = exact_index(k.amax[b]);
      k.unit[b] = half_unit(exact_scale(exact_byte(k.index[b])));
    }
    for (int i = 0; i < 16; ++i)
      for (int b = 0; b < W; ++b)
        k.x[i][b] = HALVES ? half_value(k.t[i][b], k.unit[b]) : k.t[i][b];
    for (int step : {0, 1, -1}) {
      for (int b = 0; b < W; ++b) {
        const i32 j = std::min(std::max((i32)k.index[b] + step, 0), (i32)EXACT_COUNT - 1);
        k.byte[b] = exact_byte((u32)j);
        k.scale[b] = exact_scale(k.byte[b]);
        k.relative[b] = mul(k.scale[b], k.unit[b]);
        k.factor[b] = HALVES ? half_inverse(k.relative[b]) : exact_reciprocal(k.scale[b]);
      }
      if (HALVES) half_errors(k);
      else errors(k);
      keep_better(k, step == 0);
    }
    for (int b = 0; b < W; ++b) k.best_byte[b] = k.amax[b] ? k.best_byte[b] : 0;
    keep_best(k, first, count, p);
    std::copy(k.unit, k.unit + count, p.unit.data() + first);
  }
}

// Codes of the search in FP16, 0 where the block's byte is 0.
void half_codes(const float* __restrict t, const float* __restrict unit,
                const float* __restrict factor, const u8* __restrict byte, i64 blocks,
                u8* __restrict code) {
  each_code<16>(blocks, code, [=](i64 b, i64 k) {
    float value;
    const u32 c = half_code(half_value(t[k], unit[b]), factor[b], &value);
    return byte[b] ? c | bits(t[k]) >> 31 << E2M1::sign : 0u;
  });
}

}  // namespace
