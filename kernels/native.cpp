// CPU kernels over cuda/numerics.cuh, called through ctypes (native_library.py): quantize along rows
// or columns (native_quantize.h), decode, and a gradient in both orientations. Elements are widened
// into a panel of FP32 rows in cache (native_rows.h). Nothing depends on the number of threads.
#include "native_quantize.h"

namespace {

// ---- decode -----------------------------------------------------------------------------------

struct Decode {
  const u8 *codes, *scales;
  i64 rows, padded, cols, kind, unit, transpose, threads;  // unit: block scales left out
  float* values;
};

void decode_one(const Decode& d, i64 row, std::vector<u8>& code, std::vector<float>& scale,
                float* out) {
  const i64 blocks = d.padded / (d.kind == NVFP4 ? 16 : 32);
  const u8* bytes = d.scales + row * blocks;
  for (i64 b = 0; b < blocks; ++b)
    scale[b] = d.unit ? 1.0f : d.kind == NVFP4 ? decode_e4m3(bytes[b]) : e8m0_value(bytes[b]);
  if (d.kind == MXFP8)
    return decode_row<E4M3, 32>(d.codes + row * d.padded, scale.data(), blocks, out);
  unpack_row(d.codes + row * d.padded / 2, d.padded, code.data());
  if (d.kind == NVFP4) decode_row<E2M1, 16>(code.data(), scale.data(), blocks, out);
  else decode_row<E2M1, 32>(code.data(), scale.data(), blocks, out);
}

void decode_all(const Decode& d) {
  const i64 block = d.kind == NVFP4 ? 16 : 32;
  if (!d.transpose) {
    expect_large(d.values, d.rows * d.padded * 4);
    parallel(d.rows, d.padded, d.threads, [&](i64 first, i64 last) {
      std::vector<u8> code(d.padded);
      std::vector<float> scale(d.padded / block);
      for (i64 r = first; r < last; ++r) decode_one(d, r, code, scale, d.values + r * d.padded);
    });
    return;
  }
  const i64 ld = (d.rows + block - 1) / block * block;
  expect_large(d.values, ld * d.cols * 4);
  parallel((ld + TILE - 1) / TILE, TILE * d.padded, d.threads, [&](i64 first, i64 last) {
    std::vector<u8> code(d.padded);
    std::vector<float> scale(d.padded / block), panel(TILE * d.padded);
    for (i64 m0 = first * TILE; m0 < std::min(ld, last * TILE); m0 += TILE) {
      const i64 n = std::min<i64>(TILE, ld - m0);
      for (i64 r = 0; r < n; ++r) {
        float* row = panel.data() + r * d.padded;
        if (m0 + r < d.rows) decode_one(d, m0 + r, code, scale, row);
        else std::fill(row, row + d.padded, 0.0f);
      }
      for (i64 c = 0; c < d.cols; ++c)
        for (i64 r = 0; r < n; ++r) d.values[c * ld + m0 + r] = panel[r * d.padded + c];
    }
  });
}

// ---- a gradient in both orientations ----------------------------------------------------------

struct Side {
  i64 kind, group, stochastic;  // MXFP8 or MXFP4; kind -1: this orientation is not wanted
  float *values, *factor;       // factor: one power of two a row, or null
};

struct Gradient {
  Matrix g;
  i64 threads, stream;
  const u64* seed;
  const float* fold;  // [rows] or null
  Side d, w;
  float* sums;  // [cols] or null

  i64 padded() const { return (g.cols + 31) / 32 * 32; }
  i64 strips() const { return (g.rows + 31) / 32; }
};

float folded(const Gradient& a, i64 row) { return a.fold && row < a.g.rows ? a.fold[row] : 1.0f; }

// Largest magnitude of each column of each 32-row strip (folded), and the strip's column sums.
void gradient_strips(const Gradient& a, std::vector<u32>& amax, std::vector<float>& sums) {
  const i64 n = a.padded();
  amax.assign(a.w.kind >= 0 ? a.strips() * n : 0, 0);
  sums.assign(a.sums ? a.strips() * n : 0, 0.0f);
  parallel(a.strips(), 32 * n, a.threads, [&](i64 first, i64 last) {
    std::vector<float> row(n);
    for (i64 m = first * 32; m < std::min(a.g.rows, last * 32); ++m) {
      read_row(a.g, m, 0, a.g.cols, row.data());
      if (a.sums) {
        float* __restrict sum = sums.data() + m / 32 * n;
        for (i64 i = 0; i < n; ++i) sum[i] = add(sum[i], row[i]);
      }
      if (a.w.kind >= 0) {
        const float f = folded(a, m);
        u32* __restrict top = amax.data() + m / 32 * n;
        for (i64 i = 0; i < n; ++i) top[i] = max_u(top[i], magnitude(mul(row[i], f)));
      }
    }
  });
}

// Strips of one group take the group's largest magnitude, which becomes the scale byte.
template <class T>
void column_bytes(const Gradient& a, std::vector<u32>& amax) {
  const i64 n = a.padded(), strips = a.strips();
  const i64 shared = a.w.group ? a.w.group / 32 : std::max<i64>(strips, 1);
  for (i64 first = 0; first < strips; first += shared) {
    const i64 last = std::min(strips, first + shared);
    u32* __restrict top = amax.data() + first * n;
    for (i64 s = first + 1; s < last; ++s) {
      const u32* __restrict other = amax.data() + s * n;
      for (i64 i = 0; i < n; ++i) top[i] = max_u(top[i], other[i]);
    }
    for (i64 i = 0; i < n; ++i) top[i] = e8m0<T>(top[i]);
    for (i64 s = first + 1; s < last; ++s) std::copy(top, top + n, amax.data() + s * n);
  }
  if (a.w.factor)
    for (i64 i = 0; i < a.g.cols; ++i) a.w.factor[i] = strips ? e8m0_value(amax[i]) : e8m0_value(0);
}

// One row of the strip in w's orientation: values of (x * fold) * factor, times scale.
template <class T, bool STOCHASTIC>
void column_values(const float* __restrict x, float fold, const float* __restrict factor,
                   const float* __restrict scale, const u16* __restrict random16, i64 n,
                   float* __restrict out) {
  for (i64 i = 0; i < n; ++i) {
    const float y = mul(mul(x[i], fold), factor[i]);
    const float value = STOCHASTIC ? stochastic<T>(y, random16[i]) : nearest<T>(y);
    out[i] = mul(factor[i] == 0.0f ? 0.0f : value, scale[i]);
  }
}

template <class T>
void gradient_row(const Side& side, const float* x, const u16* random16, i64 row, i64 padded,
                  Panel& p) {
  const i64 blocks = padded / 32;
  block_maxima<32>(x, blocks, p.amax.data());
  std::vector<u8> bytes(blocks + 1);
  mx_scales<T>(p.amax.data(), blocks, side.group, bytes.data(), p.factor.data(), p.byte.data(),
               p.scale.data());
  if (side.factor) side.factor[row] = e8m0_value(bytes[0]);
  auto round = side.stochastic ? round_row<T, 32, true> : round_row<T, 32, false>;
  round(x, p.factor.data(), p.byte.data(), p.scale.data(), random16, blocks,
        side.values + row * padded);
}

// A strip of 32 rows in w's orientation, 32 columns at a time.
template <class T>
void gradient_columns(const Gradient& a, i64 strip, const u32* byte, const Panel& p) {
  const i64 padded = a.padded(), ld = a.strips() * 32;
  float tile[TILE * TILE], factor[TILE], scale[TILE];
  for (i64 c = 0; c < a.g.cols; c += TILE) {
    const i64 n = std::min<i64>(TILE, a.g.cols - c);
    for (int i = 0; i < TILE; ++i) {
      const u32 b = byte[c + i];
      factor[i] = b == 255 ? 0.0f : e8m0_inverse(b);
      scale[i] = a.w.group ? e8m0_value(b) : 1.0f;
    }
    for (int r = 0; r < TILE; ++r) {
      const float* x = p.x.data() + r * padded + c;
      const float fold = folded(a, strip * 32 + r);
      float* out = tile + r * TILE;
      if (a.w.stochastic)
        column_values<T, true>(x, fold, factor, scale, &p.random16[r * padded + c], TILE, out);
      else column_values<T, false>(x, fold, factor, scale, nullptr, TILE, out);
    }
    transpose_tile(tile, n, a.w.values + c * ld + strip * 32, ld);
  }
}

void gradient_both(const Gradient& a) {
  const i64 padded = a.padded(), rows = a.g.rows;
  const bool stochastic = a.d.stochastic || a.w.stochastic;
  expect_large(a.d.values, rows * padded * 4);
  expect_large(a.w.values, a.g.cols * a.strips() * 32 * 4);
  std::vector<u32> amax;
  std::vector<float> sums;
  if (a.w.kind >= 0 || a.sums) gradient_strips(a, amax, sums);
  KeepDenormals keep;
  if (a.w.kind == MXFP8) column_bytes<E4M3>(a, amax);
  if (a.w.kind == MXFP4) column_bytes<E2M1>(a, amax);
  if (a.sums)
    for (i64 i = 0; i < a.g.cols; ++i) {
      float total = 0.0f;
      for (i64 s = 0; s < a.strips(); ++s) total = add(total, sums[s * padded + i]);
      a.sums[i] = total;
    }
  parallel(a.strips(), 32 * padded, a.threads, [&](i64 first, i64 last) {
    Panel p(TILE, padded, padded / 32, stochastic);
    for (i64 s = first; s < last; ++s) {
      std::fill(p.x.begin(), p.x.end(), 0.0f);
      const i64 n = std::min<i64>(TILE, rows - s * TILE);
      for (i64 r = 0; r < n; ++r) read_row(a.g, s * TILE + r, 0, a.g.cols, &p.x[r * padded]);
      if (stochastic)
        random_elements(*a.seed, a.stream, s * TILE * padded, n * padded, p.random16.data());
      for (i64 r = 0; r < n && a.d.kind >= 0; ++r) {
        const u16* bits16 = p.random16.data() + r * padded;
        const float* x = p.x.data() + r * padded;
        if (a.d.kind == MXFP8) gradient_row<E4M3>(a.d, x, bits16, s * TILE + r, padded, p);
        else gradient_row<E2M1>(a.d, x, bits16, s * TILE + r, padded, p);
      }
      if (a.w.kind == MXFP8) gradient_columns<E4M3>(a, s, amax.data() + s * padded, p);
      if (a.w.kind == MXFP4) gradient_columns<E2M1>(a, s, amax.data() + s * padded, p);
    }
  });
}

}  // namespace

extern "C" {
void fp4_quantize(const Quantize* q) { quantize_all(*q); }
void fp4_decode(const Decode* d) { decode_all(*d); }
void fp4_gradient(const Gradient* g) { gradient_both(*g); }
}
