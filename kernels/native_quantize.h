// A matrix along its rows or columns to codes, scales and outer scale, in every format.
#pragma once
#include "native_search.h"

namespace {

enum Kind { NVFP4, MXFP8, MXFP4 };

struct Quantize {
  Matrix x;
  i64 transpose, kind, search, tile, outer_row, stochastic, group, threads;
  i64 random_rows;  // 1: the bits of the untransposed element, `random_ld` a row
  i64 random_ld, stream, n_factors;
  const float* factors;
  const u64* seed;
  const u16* random16;  // [rows, padded] given bits, or null
  u8 *codes, *scales;
  float *outer, *values;
  float bound;

  i64 rows() const { return transpose ? x.cols : x.rows; }
  i64 cols() const { return transpose ? x.rows : x.cols; }
  i64 block() const { return kind == NVFP4 ? 16 : 32; }
  i64 padded() const { return (cols() + block() - 1) / block() * block(); }
  i64 blocks() const { return padded() / block(); }
};

void nvfp4_row(const Quantize& q, i64 row, const float* x, const u32* amax, u32 group_amax,
               const u16* random16, Panel& p) {
  const i64 blocks = q.blocks(), padded = q.padded();
  u8* codes = q.codes + row * padded / 2;
  u8* scales = q.scales + row * blocks;
  float* values = q.values ? q.values + row * padded : nullptr;
  const float s = outer_inverse(group_amax, q.bound), outer = outer_scale(group_amax, s);
  if (q.outer_row) q.outer[row] = outer;
  if (group_amax >= INFINITE) {
    std::fill(codes, codes + padded / 2, (u8)0);
    std::fill(scales, scales + blocks, (u8)0);
    if (values) std::fill(values, values + padded, 0.0f);
    return;
  }
  const bool exact = q.search == EXACT || q.search == HALF;
  const float* source = exact ? p.t.data() : x;
  if (exact)
    for (i64 i = 0; i < padded; ++i) p.t[i] = mul(x[i], s);
  if (q.search == EXACT) exact_factors<false>(source, blocks, p);
  else if (q.search == HALF) exact_factors<true>(source, blocks, p);
  else if (q.search == FACTORS)
    searched_factors(amax, blocks, q.factors, q.n_factors, s, outer, x, p);
  else plain_factors(amax, blocks, q.stochastic, s, outer, p);
  if (q.search == HALF)
    half_codes(source, p.unit.data(), p.factor.data(), p.byte.data(), blocks, p.code.data());
  else
    encode_row<E2M1, 16>(q.stochastic, source, p.factor.data(), p.byte.data(), random16, blocks,
                         p.code.data());
  pack_row(p.code.data(), padded, codes);
  std::copy(p.byte.begin(), p.byte.end(), scales);
  if (values) decode_row<E2M1, 16>(p.code.data(), p.scale.data(), blocks, values);
}

// Scale bytes of a row of MX blocks; blocks of one group (all where group is 0) share theirs.
template <class T>
void mx_scales(const u32* amax, i64 blocks, i64 group, u8* byte, float* factor, u8* keep,
               float* scale) {
  const i64 shared = group ? group / 32 : std::max<i64>(blocks, 1);
  for (i64 first = 0; first < blocks; first += shared) {
    const i64 last = std::min(blocks, first + shared);
    const u32 e = e8m0<T>(largest(amax + first, last - first));
    std::fill(byte + first, byte + last, (u8)e);
    std::fill(factor + first, factor + last, e == 255 ? 0.0f : e8m0_inverse(e));
    std::fill(keep + first, keep + last, (u8)(e != 255));
    std::fill(scale + first, scale + last, group ? e8m0_value(e) : 1.0f);
  }
}

template <class T>
void mx_row(const Quantize& q, i64 row, const float* x, const u32* amax, const u16* random16,
            Panel& p) {
  const i64 blocks = q.blocks(), padded = q.padded();
  u8* codes = q.kind == MXFP8 ? q.codes + row * padded : p.code.data();
  mx_scales<T>(amax, blocks, q.group, q.scales + row * blocks, p.factor.data(), p.byte.data(),
               p.scale.data());
  encode_row<T, 32>(q.stochastic, x, p.factor.data(), p.byte.data(), random16, blocks, codes);
  if (q.kind == MXFP4) pack_row(codes, padded, q.codes + row * padded / 2);
  if (q.values) decode_row<T, 32>(codes, p.scale.data(), blocks, q.values + row * padded);
}

// FP32 rows first..first+n of the (transposed) input.
void read_panel(const Quantize& q, i64 first, i64 n, float* out) {
  const i64 padded = q.padded(), cols = q.cols();
  if (q.transpose) return read_transposed(q.x, first, n, out, padded);
  for (i64 r = 0; r < n; ++r) {
    read_row(q.x, first + r, 0, cols, out + r * padded);
    std::fill(out + r * padded + cols, out + (r + 1) * padded, 0.0f);
  }
}

void random_panel(const Quantize& q, i64 first, i64 n, u16* out) {
  const i64 padded = q.padded();
  if (q.random16) {
    std::copy(q.random16 + first * padded, q.random16 + (first + n) * padded, out);
  } else if (!q.random_rows) {
    random_elements(*q.seed, q.stream, first * padded, n * padded, out);
  } else {
    const i64 step = 32;
    u16 part[32 * TILE];
    for (i64 m = 0; m < q.cols(); m += step) {
      const u64 group = (u64)(m * q.random_ld + first) / 8, stride = (u64)q.random_ld / 8;
      fill_random(*q.seed, (u32)q.stream, step * TILE / 8,
                  [=](u64 g) { return group + g / (TILE / 8) * stride + g % (TILE / 8); }, part);
      const i64 count = std::min(step, padded - m);
      for (i64 r = 0; r < n; ++r)
        for (i64 i = 0; i < count; ++i) out[r * padded + m + i] = part[i * TILE + r];
    }
  }
}

u32 tensor_amax(const Matrix& x, i64 threads) {
  std::vector<u32> rows(x.rows);
  parallel(x.rows, x.cols, threads, [&](i64 first, i64 last) {
    std::vector<float> row(x.cols);
    for (i64 r = first; r < last; ++r) {
      read_row(x, r, 0, x.cols, row.data());
      u32 m = 0;
      for (i64 i = 0; i < x.cols; ++i) m = max_u(m, magnitude(row[i]));
      rows[r] = m;
    }
  });
  return largest(rows.data(), x.rows);
}

void quantize_all(const Quantize& q) {
  const i64 rows = q.rows(), padded = q.padded(), blocks = q.blocks();
  const i64 step = q.transpose ? TILE : q.tile ? 16 : 1;
  const bool tensor_wide = q.kind == NVFP4 && !q.outer_row;
  expect_large(q.values, rows * padded * 4);
  u32 amax = 0;
  if (tensor_wide) {
    amax = tensor_amax(q.x, q.threads);
    KeepDenormals keep;
    q.outer[0] = outer_scale(amax, outer_inverse(amax, q.bound));
  }
  parallel((rows + step - 1) / step, step * padded, q.threads, [&](i64 first, i64 last) {
    Panel p(step, padded, blocks, q.stochastic);
    for (i64 r0 = first * step; r0 < std::min(rows, last * step); r0 += step) {
      const i64 n = std::min(step, rows - r0);
      read_panel(q, r0, n, p.x.data());
      if (q.stochastic) random_panel(q, r0, n, p.random16.data());
      for (i64 r = 0; r < n; ++r) {
        if (q.kind == NVFP4) block_maxima<16>(&p.x[r * padded], blocks, &p.amax[r * blocks]);
        else block_maxima<32>(&p.x[r * padded], blocks, &p.amax[r * blocks]);
      }
      if (q.tile)
        for (i64 t = 0; t < n; t += 16)
          for (i64 b = 0; b < blocks; ++b) {
            u32 m = 0;
            for (i64 r = t; r < std::min(n, t + 16); ++r) m = max_u(m, p.amax[r * blocks + b]);
            for (i64 r = t; r < std::min(n, t + 16); ++r) p.amax[r * blocks + b] = m;
          }
      for (i64 r = 0; r < n; ++r) {
        const float* x = p.x.data() + r * padded;
        const u32* block_amax = p.amax.data() + r * blocks;
        const u16* bits16 = p.random16.data() + r * padded;
        if (q.kind == MXFP8) mx_row<E4M3>(q, r0 + r, x, block_amax, bits16, p);
        else if (q.kind == MXFP4) mx_row<E2M1>(q, r0 + r, x, block_amax, bits16, p);
        else
          nvfp4_row(q, r0 + r, x, block_amax, tensor_wide ? amax : largest(block_amax, blocks),
                    bits16, p);
      }
    }
  });
}

}  // namespace
