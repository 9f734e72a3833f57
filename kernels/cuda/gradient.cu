// A gradient in both orientations from one set of random bits: MXFP8 with one power of two a row or
// a block of 32; the transposed copy of it times `fold`.
//   XD dtype of g · SUMS, FOLD 0/1 · DSR, WSR 0 to nearest, 1 stochastic
//   DMODE, WMODE 0 absent, 1 row scales (their maxima from gradient_amax or hidden.cu), 2 blocks of 32
//   DFORM, WFORM (Form): E4M3_FORM the codes of row scales, BF16_FORM the values, SCALES_FORM the
//   codes of blocks, and swizzled behind them the scales
//   ALIGNED 1: a row's groups of eight columns are whole and on 16-byte boundaries
//   BIG 1: 2^32 groups of random bits or more
//   ACROSS warps of a CTA side by side over columns, of 8
// Grids: (column tiles, row chunks). A warp walks tiles of 64 columns and 64 bytes of rows, which is
// a column's run in w; nothing waits for another warp. Column sums stay in registers, and chunks
// depend on the shape alone, so sums have one order everywhere.
#include "warp_tile.cuh"

using namespace fp4;

struct Gradient {
  const void* g;
  const float* fold;
  i64 ld, rows, cols, padded, padded_rows, chunk, wide;
  u32 *row_amax, *col_amax;
  const u64* seed;
  i64 stream;
  void *d, *w;
  float *d_factor, *w_factor, *sums;
};

// ---- eight columns of a thread ----------------------------------------------------------------

using Raw = Raw8<XD>;

// What is rounded stochastically is scaled to FP32's subnormals (warp_tile.cuh). To nearest, values
// are rounded before that, since FP32 would round them once more there, and nothing is added then.
template <bool SR> FP4_D float shrink_of(u32 byte) {
  return SR ? shrink_factor(byte) : e8m0_inverse(byte);
}

template <bool SR> FP4_D float shrunk_of(float x, u32 byte) {
  return SR ? shrunk_slowly(x, byte) : byte == 255 ? 0.0f : mul(x, e8m0_inverse(byte));
}

// Multiples of an eighth of their power of two, of at least 2^-6; NaN stays.
template <bool SR> FP4_D float settled(float t) {
  if (SR) return t;
  const float p = from_bits(bits(max_magnitude(0x1p-6f, t)) & INFINITE);
  const float y = fma_exact(p, -0x1.8p20f, fma_exact(p, 0x1.8p20f, t));
  return mul(from_bits(bits(y) & 0x7fffffffu | bits(t) & 0x80000000u), 0x1p-120f);
}

constexpr bool D_CODES = DFORM == E4M3_FORM || DFORM == SCALES_FORM;
constexpr bool W_CODES = WFORM == E4M3_FORM || WFORM == SCALES_FORM;

// Where a thread's columns lie.
struct Columns {
  const u8* g;
  i64 valid;
};

FP4_D Columns columns_at(const Gradient& a, i64 n) {
  const i64 valid = a.cols - n < 0 ? 0 : a.cols - n;
  return {static_cast<const u8*>(a.g) + (valid ? n : 0) * (XD == F32 ? 4 : 2), valid};
}

// Row m, if it exists.
FP4_D void load_row(const Gradient& a, const Columns& c, u32 m, Raw& raw) {
  constexpr u32 SIZE = XD == F32 ? 4 : 2;
  const bool exists = m < (u32)a.rows;
  const u8* p = c.g + (u64)m * ((u32)a.ld * SIZE);
  if (ALIGNED) {
FP4_UNROLL
    for (u32 i = 0; i < SIZE / 2; ++i) load16_if(raw.w + 4 * i, p + 16 * i, exists);
  } else if (exists) {
    raw = load8<XD>(p, 0, c.valid, a.wide);
  }
}

// A row past the end.
FP4_D void clear(Raw& raw) {
FP4_UNROLL
  for (u32& w : raw.w) w = 0;
}

FP4_D void clear_past(Raw* raw, u32 m, u32 rows) {
  rarely();
FP4_UNROLL
  for (int r = 0; r < 4; ++r)
    if (m + r >= rows) clear(raw[r]);
}

FP4_D float fold_at(const Gradient& a, i64 m) { return FOLD && m < a.rows ? a.fold[m] : 1.0f; }

// ---- maxima -----------------------------------------------------------------------------------

constexpr u32 AMAX_COLS = 256, WARPS = 8;

extern "C" __global__ void __launch_bounds__(256, 4) gradient_amax(Gradient a) {
  __shared__ float folds[WARPS][32];
  __shared__ u32 part[WARPS][AMAX_COLS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Columns columns = columns_at(a, blockIdx.x * (i64)AMAX_COLS + lane * 8);
  const u32 rows = (u32)a.rows, first = blockIdx.y * (u32)a.chunk + warp * 32;
  const u32 last = min_u((blockIdx.y + 1) * (u32)a.chunk, rows);
  float column[8] = {};
  Raw raw[4];
FP4_UNROLL
  for (int r = 0; r < 4; ++r) {
    clear(raw[r]);
    load_row(a, columns, first + r, raw[r]);
  }
  for (u32 m0 = first; m0 < last; m0 += WARPS * 32) {
    __syncwarp();
    folds[warp][lane] = fold_at(a, m0 + lane);
    __syncwarp();
    u32 row_max = 0;
#pragma unroll 1
    for (u32 q = 0; q < 32; q += 4) {
      const u32 m = m0 + q, next = q < 28 ? m + 4 : m0 + WARPS * 32;
      if (m + 4 > rows) clear_past(raw, m, rows);
FP4_UNROLL
      for (int r = 0; r < 4; ++r) {
        float v[8];
        widen8<XD>(raw[r], v);
        load_row(a, columns, next + r, raw[r]);
        const float fold = folds[warp][q + r];
        float row = 0.0f;
FP4_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (DMODE == 1) row = max_magnitude(row, v[i]);
          if (WMODE == 1) column[i] = max_magnitude(column[i], FOLD ? mul(v[i], fold) : v[i]);
        }
        if (DMODE == 1) {
          const u32 of_row = warp_max(columns.valid ? bits(row) : 0u);
          row_max = lane == q + r ? of_row : row_max;
        }
      }
    }
    if (DMODE == 1 && m0 + lane < rows) atomicMax(a.row_amax + m0 + lane, row_max);
  }
  if (WMODE != 1) return;
FP4_UNROLL
  for (int i = 0; i < 8; ++i) part[warp][lane * 8 + i] = bits(column[i]);
  __syncthreads();
  const i64 c = blockIdx.x * (i64)AMAX_COLS + threadIdx.x;
  if (c >= a.cols) return;
  u32 m = 0;
FP4_UNROLL
  for (u32 k = 0; k < WARPS; ++k) m = max_u(m, part[k][threadIdx.x]);
  atomicMax(a.col_amax + c, m);
}

// ---- quantizing -------------------------------------------------------------------------------

// Rows of a tile: 64 bytes of a column, 32 where they are the codes of one block.
constexpr u32 SPAN = WFORM == BF16_FORM || WFORM == SCALES_FORM ? 32 : 64;
constexpr u32 PASSES = SPAN / 16;                   // of 16 rows: four of each thread
constexpr u32 DOWN = WARPS / ACROSS;                // warps of a CTA, over rows

// Swizzled scales, behind the codes.
FP4_D u8* d_scales(const Gradient& a) { return static_cast<u8*>(a.d) + (u64)a.rows * (u64)a.padded; }
FP4_D u8* w_scales(const Gradient& a) {
  return static_cast<u8*>(a.w) + (u64)a.cols * (u64)a.padded_rows;
}

// Eight values of a row in d's orientation, to memory. `amax`: the magnitude of the largest, for
// blocks. SLOW: bytes may be above LAST_SINGLE (LAST_GROWN for values).
template <bool SLOW>
FP4_D void store_d(const Gradient& a, u32 m, u32 n, bool inside, const float* v, u32 amax,
                   float shrink, const u32* rounding) {
  u32 byte = 0;
  float t[8], grow = 0x1p120f;
  if (DMODE == 2) {
    u32 block = inside ? amax : 0u;
    block = max_u(block, __shfl_xor_sync(ALL_LANES, block, 1));
    block = max_u(block, __shfl_xor_sync(ALL_LANES, block, 2));
    byte = e8m0_byte(block);
    const float up = SLOW ? e8m0_inverse(byte) : shrink_of<DSR>(byte);
    if (!SLOW) grow = grow_factor(byte);
FP4_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (SLOW && DFORM == SCALES_FORM) t[i] = shrunk_of<DSR>(v[i], byte);
      else t[i] = SLOW && DSR ? mul(mul(v[i], up), 0x1p-120f) : mul(v[i], up);
    }
  } else if (SLOW) {
    byte = m < a.rows ? e8m0_byte(a.row_amax[m]) : 0u;
FP4_UNROLL
    for (int i = 0; i < 8; ++i) t[i] = shrunk_of<DSR>(v[i], byte);
  } else {
FP4_UNROLL
    for (int i = 0; i < 8; ++i) t[i] = mul(v[i], shrink);
  }
FP4_UNROLL
  for (int i = 0; i < 8; ++i) t[i] = settled<DSR>(t[i]);
  const bool stored = m < (u32)a.rows && n < (u32)a.padded && (inside || !ALIGNED);
  const u64 at = (u64)m * (u32)a.padded + n;
  if (D_CODES) {
    u32 c[8];
FP4_UNROLL
    for (int i = 0; i < 8; ++i) c[i] = code_at_top(t[i], DSR ? rounding[i] : 0u);
    const uint2 word =
        make_uint2(top_bytes(c[0], c[1], c[2], c[3]), top_bytes(c[4], c[5], c[6], c[7]));
    store_if(static_cast<u8*>(a.d) + at, word, stored);
    if (DFORM == SCALES_FORM && n % 32 == 0 && m < (u32)a.rows && n < (u32)a.padded)
      d_scales(a)[swizzled_at(m, n / 32, tiles_across((u32)a.padded / 32))] = (u8)byte;
  } else {
    float value[8];
FP4_UNROLL
    for (int i = 0; i < 8; ++i) {
      value[i] = mul(rounded(t[i], DSR ? rounding[i] : 0u), grow);
      if (DMODE == 2 && SLOW) value[i] = mul(value[i], e8m0_value(byte));
    }
    store_if(static_cast<u16*>(a.d) + at, eight_bf16(value), stored);
  }
}

FP4_D u32 column_byte(const Gradient& a, u32 n) {
  return n < (u32)a.cols ? e8m0_byte(a.col_amax[n]) : 0u;
}

struct Warp {
  u32 lane, cq, rg;   // a thread's group of columns (8) and of rows (4)
  u32 n0, n;          // first column of the tile, of the thread
  bool inside;        // the thread's columns exist
  u32* tile;
  const float2* row;  // shrink, fold of the tile's rows
  bool slow_rows, slow_cols;
  float shrink[WMODE ? 8 : 1], grow[WMODE == 2 ? 8 : 1];
  float sum[SUMS ? 8 : 1];
  Cipher key;
};

FP4_D void random_of(const Gradient& a, const Warp& w, u32 m, Words* words) {
#if BIG
FP4_UNROLL
  for (int r = 0; r < 4; ++r)
    words[r] = philox(*a.seed, ((u64)(m + r) * (u64)a.padded + w.n) / 8, (u32)a.stream);
#else
  u32 group[4];
FP4_UNROLL
  for (int r = 0; r < 4; ++r) group[r] = (m + r) * ((u32)a.padded / 8) + w.n / 8;
  philox<4>(w.key, group, words);
#endif
}

FP4_D u32 largest8(const float* v) {
  float m = 0.0f;
FP4_UNROLL
  for (int i = 0; i < 8; ++i) m = max_magnitude(m, v[i]);
  return bits(m);
}

// Maxima of BF16 pairs are taken before widening.
constexpr bool PACKED = WMODE == 2 && XD == BF16 && !FOLD;

FP4_D u32 largest8(const Raw& raw) {
  const u32* w = raw.w;
  const u32 m = max_magnitudes(max_magnitudes(max_magnitudes(w[0] & 0x7fff7fffu, w[1]), w[2]), w[3]);
  return max_u(m & 0xffff0000u, m << 16);
}

// Four rows of a thread, from row m of the tensor and row `at` of the tile; `get(r, v)` gives
// the gradient, and returns the largest magnitude if PACKED.
template <bool SLOW, class Get>
FP4_D void quantize4(const Gradient& a, Warp& w, u32 m, u32 at, const Get& get) {
  Words words[4] = {};
  if (DSR || WSR) random_of(a, w, m, words);
  u32 half[8], packed[8];
FP4_UNROLL
  for (int r = 0; r < 4; ++r) {
    const float2 f = w.row[at + r];
    float v[8], x[8];
    u32 amax = get(r, v), rounding[8];
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      rounding[j] = rounding_bits(words[r], j);
      x[j] = FOLD ? mul(v[j], f.y) : v[j];
      if (SUMS) w.sum[j] = add(w.sum[j], v[j]);
    }
    if (DMODE == 2 && !PACKED) amax = largest8(v);
    if (DMODE) store_d<SLOW>(a, m + r, w.n, w.inside, v, amax, f.x, rounding);
    if (!WMODE) continue;
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (WFORM == SCALES_FORM && SLOW && bits(w.grow[j]) == QUIET_NAN) x[j] = 0.0f;
      else if (WMODE == 2 && SLOW && WSR) x[j] = mul(mul(x[j], w.shrink[j]), 0x1p-120f);
      else if (WMODE == 1 && SLOW) x[j] = shrunk_of<WSR>(x[j], column_byte(a, w.n + j));
      else x[j] = mul(x[j], w.shrink[j]);
      x[j] = settled<WSR>(x[j]);
      if (!WSR) rounding[j] = 0;
    }
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (W_CODES) {
        const u32 c = code_at_top(x[j], rounding[j]);
        if (r % 2 == 0) half[j] = c;
        else if (r == 1) packed[j] = select_bytes(half[j], c, 0x0073);
        else packed[j] = select_bytes(packed[j], select_bytes(half[j], c, 0x0073), 0x5410);
      } else {
        float y = mul(rounded(x[j], rounding[j]), WMODE == 2 && !SLOW ? w.grow[j] : 0x1p120f);
        if (WMODE == 2 && SLOW) y = mul(y, w.grow[j]);
        if (r % 2 == 0) half[j] = bits(y);
        else w.tile[tile_chunk(w.cq * 8, j, at / 16 * 2 + w.rg / 2, w.cq) * 4 + w.rg % 2 * 2 + r / 2] =
            pack_bf16(from_bits(half[j]), y);
      }
    }
  }
  if (!WMODE || !W_CODES) return;
FP4_UNROLL
  for (u32 j = 0; j < 8; ++j)
    w.tile[tile_chunk(w.cq * 8, j, at / 16, w.cq) * 4 + w.rg] = packed[j];
}

// The tile, 64 bytes a column (32 of codes of blocks), to memory.
FP4_D void store_w(const Gradient& a, const Warp& w, u32 m0) {
#if WFORM == 3
  __syncwarp();
  const u32 chunk = w.lane % 2, m = m0 + chunk * 16, first = w.lane / 2;
  u8* out = static_cast<u8*>(a.w) + (u64)(w.n0 + first) * (u32)a.padded_rows + m;
FP4_UNROLL
  for (u32 i = 0; i < 4; ++i) {
    const u32 c = i * 16 + first;
    const uint4 q = reinterpret_cast<uint4*>(w.tile)[tile_chunk(c, chunk, c / 8)];
    store_if(out, q, m < (u32)a.padded_rows && w.n0 + c < (u32)a.cols);
    out += 16 * (u64)(u32)a.padded_rows;
  }
  __syncwarp();
#else
  constexpr u32 UNIT = WFORM == BF16_FORM ? 2 : 1;
  __syncwarp();
  const u32 chunk = w.lane % 4, m = m0 + chunk * (16 / UNIT);
  u8* out = static_cast<u8*>(a.w) + ((u64)(w.n0 + w.lane / 4) * (u32)a.padded_rows + m) * UNIT;
  const bool rows = m < (u32)a.padded_rows;
FP4_UNROLL
  for (u32 i = 0; i < 8; ++i) {
    const uint4 q = reinterpret_cast<uint4*>(w.tile)[tile_chunk(i * 8 + w.lane / 4, chunk, i)];
    store_if(out, q, rows && w.n0 + i * 8 + w.lane / 4 < (u32)a.cols);
    out += 8 * UNIT * (u64)(u32)a.padded_rows;
  }
  __syncwarp();
#endif
}

FP4_D void column_scales(const Gradient& a, Warp& w, bool first) {
  u32 largest = 0;
FP4_UNROLL
  for (int j = 0; j < 8; ++j) {
    const u32 byte = column_byte(a, w.n + j);
    w.shrink[j] = shrink_of<WSR>(byte);
    largest = max_u(largest, byte);
    if (first && w.n + j < (u32)a.cols) a.w_factor[w.n + j] = e8m0_value(byte);
  }
  w.slow_cols = warp_max(largest) > LAST_SINGLE;
}

// Of the tile's rows from m0 on, one or two a lane.
struct RowInputs {
  float fold;
  u32 amax;
};

FP4_D void load_factors(const Gradient& a, u32 m0, u32 lane, RowInputs* in) {
FP4_UNROLL
  for (u32 k = 0; k < SPAN / 32; ++k) {
    const u32 m = m0 + k * 32 + lane;
    in[k].fold = fold_at(a, m);
    in[k].amax = DMODE == 1 && m < (u32)a.rows ? a.row_amax[m] : 0u;
  }
}

FP4_D void store_factors(const Gradient& a, Warp& w, u32 m0, const RowInputs* in, float2* row) {
  u32 largest = 0;
  __syncwarp();
FP4_UNROLL
  for (u32 k = 0; k < SPAN / 32; ++k) {
    const u32 byte = e8m0_byte(in[k].amax), m = m0 + k * 32 + w.lane;
    row[k * 32 + w.lane] = {shrink_of<DSR>(byte), in[k].fold};
    largest = max_u(largest, byte);
    if (DMODE == 1 && w.n0 == 0 && m < (u32)a.rows) a.d_factor[m] = e8m0_value(byte);
    // Padding at the end of d's rows belongs to no thread of ALIGNED columns.
    if (DMODE && ALIGNED && w.n0 + 64 > (u32)a.cols && m < (u32)a.rows)
      for (u32 n = max_u(w.n0, (u32)a.cols); n < (u32)a.padded && n < w.n0 + 64; ++n) {
        const u64 at = (u64)m * (u32)a.padded + n;
        if (D_CODES) static_cast<u8*>(a.d)[at] = 0;
        else static_cast<u16*>(a.d)[at] = 0;
      }
  }
  w.slow_rows = DMODE == 1 && warp_max(largest) > LAST_SINGLE;
  __syncwarp();
}

#if WMODE == 2
// Values, not what was read, wait for the block's maxima.
constexpr bool HELD = XD != BF16;
constexpr u32 DEPTH = HELD ? 4 : 8;  // rows of a thread that are read ahead

FP4_D u32 row_of(u32 k) { return k / 4 * 16 + k % 4; }  // row k of a thread, in the tile

// 32 rows: maxima of their columns, then as without.
FP4_D void quantize_blocks(const Gradient& a, Warp& w, const Columns& columns, u32 m0, u32 next, Raw* raw) {
  const u32 rows = (u32)a.rows, m = m0 + w.rg * 4;
  float held[HELD ? 8 : 1][8];
  u32 amax[8] = {}, largest = 0;
  if (PACKED) {
    if (m0 + SPAN > rows) clear_past(raw, m, rows), clear_past(raw + 4 % DEPTH, m + 16, rows);
    u32 pair[4] = {};
FP4_UNROLL
    for (u32 j = 0; j < 4; ++j) {
FP4_UNROLL
      for (u32 k = 0; k < 8; ++k) pair[j] = max_magnitudes(pair[j], raw[k % DEPTH].w[j]);
      pair[j] = max_magnitudes(pair[j], __shfl_xor_sync(ALL_LANES, pair[j], 8));
      pair[j] = max_magnitudes(pair[j], __shfl_xor_sync(ALL_LANES, pair[j], 16));
      amax[2 * j] = pair[j] << 16, amax[2 * j + 1] = pair[j] & 0xffff0000u;
    }
  } else {
    if (!HELD && m0 + SPAN > rows) clear_past(raw, m, rows), clear_past(raw + 4 % DEPTH, m + 16, rows);
FP4_UNROLL
    for (u32 k = 0; k < 8; ++k) {
      if (HELD && k % 4 == 0 && m0 + k * 4 + 16 > rows) clear_past(raw, m + k * 4, rows);
      const float2 f = w.row[w.rg * 4 + row_of(k)];
      float v[8];
      widen8<XD>(raw[k % DEPTH], v);
      if (HELD && k < 4) load_row(a, columns, m + row_of(k + 4), raw[k]);
FP4_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float x = FOLD ? mul(v[j], f.y) : v[j];
        amax[j] = bits(max_magnitude(from_bits(amax[j]), x));
        if (HELD) held[k][j] = v[j];
      }
    }
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      amax[j] = max_u(amax[j], __shfl_xor_sync(ALL_LANES, amax[j], 8));
      amax[j] = max_u(amax[j], __shfl_xor_sync(ALL_LANES, amax[j], 16));
    }
  }
FP4_UNROLL
  for (int j = 0; j < 8; ++j) largest = max_u(largest, e8m0_byte(amax[j]));
  // Without a fold the columns' maxima bound those of the rows' blocks.
  const bool slow = FOLD || DMODE == 1 || warp_max(largest) > LAST_GROWN;
FP4_UNROLL
  for (int j = 0; j < 8; ++j) {
    const u32 byte = e8m0_byte(amax[j]);
    w.shrink[j] = slow ? e8m0_inverse(byte) : shrink_of<WSR>(byte);
    w.grow[j] = slow ? e8m0_value(byte) : grow_factor(byte);
#if WFORM == 3
    if (w.rg == 0 && w.n + j < (u32)a.cols)
      w_scales(a)[swizzled_at(w.n + j, m0 / 32, tiles_across((u32)a.padded_rows / 32))] = (u8)byte;
#endif
  }
FP4_UNROLL
  for (u32 p = 0; p < 2; ++p) {
    const auto get = [&](int r, float* v) {
      const u32 k = p * 4 + r;
      if (HELD) {
FP4_UNROLL
        for (int j = 0; j < 8; ++j) v[j] = held[HELD ? k : 0][j];
        return 0u;
      }
      widen8<XD>(raw[k % DEPTH], v);
      const u32 largest_of_row = PACKED && DMODE == 2 ? largest8(raw[k % DEPTH]) : 0u;
      load_row(a, columns, next + w.rg * 4 + row_of(k), raw[k % DEPTH]);
      return largest_of_row;
    };
    const u32 at = w.rg * 4 + p * 16;
    if (FOLD || DMODE == 1 || slow) quantize4<true>(a, w, m + p * 16, at, get);
    else quantize4<false>(a, w, m + p * 16, at, get);
  }
  store_w(a, w, m0);
}
#else
constexpr u32 DEPTH = 4;
FP4_D u32 row_of(u32 k) { return k; }
#endif

extern "C" __global__ void __launch_bounds__(256, 2) quantize_gradient(Gradient a) {
  __shared__ uint4 tiles[WARPS][WMODE ? 256 : 1];
  __shared__ float2 row_factors[WARPS][SPAN];
  __shared__ float part[SUMS ? DOWN : 1][SUMS ? ACROSS * 64 : 1];
  const u32 warp = threadIdx.x / 32, rows = (u32)a.rows;
  Warp w;
  w.lane = threadIdx.x % 32, w.cq = w.lane % 8, w.rg = w.lane / 8;
  w.n0 = (blockIdx.x * ACROSS + warp % ACROSS) * 64, w.n = w.n0 + w.cq * 8;
  w.inside = w.n < (u32)a.cols;
  w.tile = reinterpret_cast<u32*>(tiles[warp]), w.row = row_factors[warp];
  if (DSR || WSR) w.key = cipher(*a.seed, (u32)a.stream);
  w.slow_rows = w.slow_cols = false;
#if DFORM == 3 || WFORM == 3
  const u32 number = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  const u32 count = gridDim.x * gridDim.y * blockDim.x;
  if (DFORM == SCALES_FORM) pad_swizzled(d_scales(a), rows, (u32)a.padded / 32, number, count);
  if (WFORM == SCALES_FORM)
    pad_swizzled(w_scales(a), (u32)a.cols, (u32)a.padded_rows / 32, number, count);
#endif
FP4_UNROLL
  for (float& s : w.sum) s = 0.0f;
  const u32 end = WMODE ? (u32)a.padded_rows : rows;
  const u32 first = blockIdx.y * (u32)a.chunk + warp / ACROSS * SPAN;
  const u32 last = min_u((blockIdx.y + 1) * (u32)a.chunk, end);
  const Columns columns = columns_at(a, w.n);
  if (WMODE == 1) column_scales(a, w, blockIdx.y == 0 && warp < ACROSS && w.rg == 0);
  RowInputs inputs[SPAN / 32];
  load_factors(a, first, w.lane, inputs);
  Raw raw[DEPTH];
FP4_UNROLL
  for (u32 k = 0; k < DEPTH; ++k) {
    clear(raw[k]);
    if (first < last) load_row(a, columns, first + w.rg * 4 + row_of(k), raw[k]);
  }
  for (u32 m0 = first; m0 < last; m0 += DOWN * SPAN) {
    store_factors(a, w, m0, inputs, row_factors[warp]);
#if WMODE == 2
    load_factors(a, m0 + DOWN * SPAN, w.lane, inputs);
    quantize_blocks(a, w, columns, m0, m0 + DOWN * SPAN, raw);
    if (HELD)
FP4_UNROLL
      for (u32 k = 0; k < DEPTH; ++k)
        load_row(a, columns, m0 + DOWN * SPAN + w.rg * 4 + row_of(k), raw[k]);
#else
    const bool slow = w.slow_rows || w.slow_cols || (DMODE == 2);
#pragma unroll 1
    for (u32 p = 0; p < PASSES; ++p) {
      const u32 m = m0 + p * 16 + w.rg * 4;
      const u32 next = p + 1 < PASSES ? m + 16 : m + DOWN * SPAN - p * 16;
      if (m + 4 > rows) clear_past(raw, m, rows);
      if (p + 1 == PASSES) load_factors(a, m0 + DOWN * SPAN, w.lane, inputs);
      const auto get = [&](int r, float* v) {
        widen8<XD>(raw[r], v);
        load_row(a, columns, next + r, raw[r]);
        return DMODE == 2 ? largest8(v) : 0u;
      };
      if (slow) quantize4<true>(a, w, m, p * 16 + w.rg * 4, get);
      else quantize4<false>(a, w, m, p * 16 + w.rg * 4, get);
    }
    if (WMODE) store_w(a, w, m0);
#endif
  }
  if (SUMS) {
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      float s = w.sum[j];
      s = add(s, from_bits(__shfl_xor_sync(ALL_LANES, bits(s), 8)));
      s = add(s, from_bits(__shfl_xor_sync(ALL_LANES, bits(s), 16)));
      if (w.rg == 0) part[warp / ACROSS][warp % ACROSS * 64 + w.cq * 8 + j] = s;
    }
    __syncthreads();
    for (u32 k = threadIdx.x; k < ACROSS * 64; k += 256) {
      const u32 c = blockIdx.x * ACROSS * 64 + k;
      if (c >= (u32)a.cols) continue;
      float total = 0.0f;
FP4_UNROLL
      for (u32 r = 0; r < DOWN; ++r) total = add(total, part[r][k]);
      a.sums[(u64)blockIdx.y * a.cols + c] = total;
    }
  }
}
