// 4-bit formats along columns (fourbit.cuh): the transpose of a matrix or gradient, its rows rotated if
// wanted, to codes and scales or to the operand a GEMM reads.
//   XD dtype (Dtype) · MX, SR see fourbit.cuh · ROT 0, 16, 32 · FORM (Form): NONE codes and scales,
//   BF16_FORM the operand's values, SCALES_FORM its codes, and swizzled behind them the scales
//   SWIZZLE 1: with NONE, the scales swizzled too, in the operand's place
//   FOLD, SUMS 0/1 · ALIGNED 1: pairs of columns are whole, on their boundaries
//   BIG 1: 2^32 groups of random bits or more · ACROSS warps of a CTA side by side over columns, of 8
// Grids: (column tiles, row chunks). A thread has two columns and STEP rows, whose blocks and groups of
// rotation are all its own; a warp turns tiles of 64 columns, of 64 bytes each. Column sums are of
// the unrotated, unfolded gradient, in an order that the shape alone decides.
#include "fourbit.cuh"

using namespace fp4;

struct Columns {
  const void* x;
  const float* fold;
  i64 ld, rows, cols, padded, padded_rows, chunk;
  u32* amax;  // of the rotated tensor; MXFP4 has none
  const u64* seed;
  i64 stream;
  u8 *codes, *scales;
  float* outer;
  void* operand;
  float* sums;
};

constexpr u32 WARPS = 8, DOWN = WARPS / ACROSS;
constexpr u32 STEP = MX || ROT == 32 ? 32 : 16;     // rows of a thread at a time
constexpr bool CODED = FORM != BF16_FORM;
constexpr bool SWIZZLED = FORM == SCALES_FORM || SWIZZLE;
constexpr u32 SPAN = CODED ? 128 : 32;  // rows of a tile: 64 bytes of a column
constexpr bool AHEAD = STEP == 16 && XD != F32;     // the next rows are read before these are done

// ---- two columns of a row ---------------------------------------------------------------------

struct Pair {
  u32 w[XD == F32 ? 2 : 1];
};

constexpr u32 SIZE = XD == F32 ? 4 : 2;

// `valid` columns exist.
FP4_D Pair load2(const u8* p, u32 valid) {
  Pair x;
  if (XD == F32) {
    const u32* q = reinterpret_cast<const u32*>(p);
    x.w[0] = ALIGNED || valid > 0 ? q[0] : 0u;
    x.w[SIZE / 4] = ALIGNED || valid > 1 ? q[1] : 0u;
  } else if (ALIGNED) {
    x.w[0] = *reinterpret_cast<const u32*>(p);
  } else {
    const u16* q = reinterpret_cast<const u16*>(p);
    const u32 low = valid > 0 ? q[0] : 0u, high = valid > 1 ? q[1] : 0u;
    x.w[0] = low | high << 16;
  }
  return x;
}

FP4_D float widen(const Pair& x, u32 j) {
  if (XD == F32) return from_bits(x.w[j * (SIZE / 4)]);
  if (XD == F16) return widen_f16((u16)(x.w[0] >> 16 * j));
  return from_bits(j ? x.w[0] & 0xffff0000u : x.w[0] << 16);
}

// A thread's columns n and n + 1. Threads past the end read the first ones: what they make is not
// stored, and changes no maximum.
struct Lane {
  u32 lane, n0, n, valid;
  const u8* column;
};

FP4_D Lane lane_of(const Columns& a) {
  Lane l;
  l.lane = threadIdx.x % 32;
  l.n0 = (blockIdx.x * ACROSS + threadIdx.x / 32 % ACROSS) * 64, l.n = l.n0 + 2 * l.lane;
  l.valid = l.n < (u32)a.cols ? (u32)a.cols - l.n : 0u;
  l.column = static_cast<const u8*>(a.x) + (l.valid ? l.n : 0u) * SIZE;
  return l;
}

// STEP rows from m on, zeros past the end.
FP4_D void read(const Columns& a, const Lane& l, u32 m, Pair* raw) {
  const u64 stride = (u64)a.ld * SIZE;
  const u8* p = l.column + m * stride;
  if (m + STEP <= (u32)a.rows) {
FP4_UNROLL
    for (u32 r = 0; r < STEP; ++r) raw[r] = load2(p + r * stride, l.valid);
    return;
  }
  rarely();
FP4_UNROLL
  for (u32 r = 0; r < STEP; ++r) {
    raw[r].w[0] = raw[r].w[SIZE / 4] = 0;
    if (m + r < (u32)a.rows) raw[r] = load2(p + r * stride, l.valid);
  }
}

// ---- rotation ---------------------------------------------------------------------------------

// Bit i: element i of a group is negated.
constexpr u32 NEGATED = ROT == 32 ? 0x2817d7e8u : 0xd7e8u;
constexpr float ROOT = ROT == 32 ? 0.17677669529663687f : 0.25f;  // 1 / sqrt(ROT)

// Groups of ROT among STEP values, without the factor ROOT.
FP4_D void rotate(float* v) {
FP4_UNROLL
  for (u32 i = 0; i < STEP; ++i)
    if (ROT && NEGATED >> i % (ROT ? ROT : 1) & 1) v[i] = -v[i];
FP4_UNROLL
  for (u32 d = 1; d < ROT; d *= 2)
FP4_UNROLL
    for (u32 i = 0; i < STEP; ++i)
      if (!(i & d)) {
        const float x = v[i], y = v[i + d];
        v[i] = add(x, y), v[i + d] = sub(x, y);
      }
}

// Column j of STEP rows from m on, folded and rotated but for ROOT; adds to the column's sum.
FP4_D void values_of(const Columns& a, u32 m, const Pair* raw, u32 j, float* sum, float* v) {
FP4_UNROLL
  for (u32 r = 0; r < STEP; ++r) {
    v[r] = widen(raw[r], j);
    if (SUMS) *sum = add(*sum, v[r]);
    if (FOLD) v[r] = mul(v[r], m + r < (u32)a.rows ? a.fold[m + r] : 1.0f);
  }
  rotate(v);
}

// ---- maxima -----------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(256, 3) columns_amax(Columns a) {
  __shared__ u32 memory[64];
  const Lane l = lane_of(a);
  const u32 first = blockIdx.y * (u32)a.chunk + threadIdx.x / 32 / ACROSS * STEP;
  const u32 last = min_u((blockIdx.y + 1) * (u32)a.chunk, (u32)a.rows);
  float largest = 0.0f, sum = 0.0f;
  Pair raw[STEP], next[AHEAD ? STEP : 1];
  if (AHEAD && first < last) read(a, l, first, next);
  for (u32 m = first; m < last; m += DOWN * STEP) {
    if (AHEAD) {
FP4_UNROLL
      for (u32 r = 0; r < STEP; ++r) raw[r] = next[AHEAD ? r : 0];
      read(a, l, m + DOWN * STEP, next);
    } else {
      read(a, l, m, raw);
    }
FP4_UNROLL
    for (u32 j = 0; j < 2; ++j) {
      float v[STEP];
      values_of(a, m, raw, j, &sum, v);
FP4_UNROLL
      for (u32 r = 0; r < STEP; ++r) largest = max_magnitude(largest, v[r]);
    }
  }
  // Rounding keeps the order, so the largest of the products is the product of the largest.
  if (ROT) largest = mul(largest, ROOT);
  u32 phase = 0;
  const u32 m = cta_max(bits(largest), memory, phase);
  if (threadIdx.x == 0) atomicMax(a.amax, m);
}

// ---- random bits ------------------------------------------------------------------------------

#if SR
// Of eight rows of a column of the rotated tensor [cols, padded_rows].
FP4_D void bits_of_column(const Columns& a, const Cipher& key, u32 c, u32 m, Words* words) {
#if BIG
FP4_UNROLL
  for (u32 k = 0; k < STEP / 8; ++k)
    words[k] = philox(*a.seed, ((u64)c * (u64)a.padded_rows + m) / 8 + k, (u32)a.stream);
#else
  u32 group[STEP / 8];
FP4_UNROLL
  for (u32 k = 0; k < STEP / 8; ++k) group[k] = c * ((u32)a.padded_rows / 8) + m / 8 + k;
  philox<(int)(STEP / 8)>(key, group, words);
#endif
}

// Swap `low` of lanes with the bit set and `high` of those without.
FP4_D void swap(u32 lane, u32 bit, u32& low, u32& high) {
  const bool set = lane & bit;
  const u32 other = __shfl_xor_sync(ALL_LANES, set ? low : high, bit);
  low = set ? other : low, high = set ? high : other;
}

// Of STEP rows of the tensor [rows, padded]: for each row the word with the lanes of this thread's
// columns. Four threads share a group of eight columns: each draws every fourth row.
FP4_D void bits_of_rows(const Columns& a, const Cipher& key, const Lane& l, u32 m, u32* word) {
FP4_UNROLL
  for (u32 q = 0; q < STEP / 16; ++q) {
    Words words[4];
    const u32 row = m + 16 * q + l.lane % 4;
#if BIG
FP4_UNROLL
    for (u32 k = 0; k < 4; ++k)
      words[k] = philox(*a.seed, ((u64)(row + 4 * k) * (u64)a.padded + l.n) / 8, (u32)a.stream);
#else
    u32 group[4];
FP4_UNROLL
    for (u32 k = 0; k < 4; ++k) group[k] = (row + 4 * k) * ((u32)a.padded / 8) + l.n / 8;
    philox<4>(key, group, words);
#endif
FP4_UNROLL
    for (u32 k = 0; k < 4; ++k) {
      u32* w = words[k].w;
      swap(l.lane, 1, w[0], w[1]), swap(l.lane, 1, w[2], w[3]);
      swap(l.lane, 2, w[0], w[2]), swap(l.lane, 2, w[1], w[3]);
FP4_UNROLL
      for (u32 i = 0; i < 4; ++i) word[16 * q + 4 * k + i] = w[i];
    }
  }
}
#endif

// ---- quantizing -------------------------------------------------------------------------------

constexpr u32 TILE_SCALES = SPAN / LENGTH;

struct Tile {
  uint4* chunks;  // 64 columns of four
  u8* scales;     // 64 columns of TILE_SCALES
};

// STEP rows from row m of the tensor and row `at` of the tile.
FP4_D void quantize_step(const Columns& a, const Lane& l, const Whole& t, const uint2* table,
                         const Cipher& key, u32 m, u32 at, const Pair* raw, float* sum,
                         const Tile& tile) {
#if SR
  u32 by_row[ROT ? 1 : STEP];
  if (!ROT) bits_of_rows(a, key, l, m, by_row);
#endif
FP4_UNROLL
  for (u32 j = 0; j < 2; ++j) {
    float v[STEP];
    values_of(a, m, raw, j, sum + j, v);
    if (ROT)
FP4_UNROLL
      for (u32 r = 0; r < STEP; ++r) v[r] = mul(v[r], ROOT);
#if SR
    Words by_column[STEP / 8];
    if (ROT) bits_of_column(a, key, l.n + j, m, by_column);
#endif
FP4_UNROLL
    for (u32 first = 0; first < STEP; first += LENGTH) {
      float largest = 0.0f;
FP4_UNROLL
      for (u32 r = 0; r < LENGTH; ++r) largest = max_magnitude(largest, v[first + r]);
      const Block b = block_of(t, table, bits(largest));
      if (CODED) tile.scales[(2 * l.lane + j) * TILE_SCALES + (at + first) / LENGTH] = (u8)b.byte;
FP4_UNROLL
      for (u32 r = first; r < first + LENGTH; r += 8) {
        const float* x = v + r;
#if SR
        const auto rounding = [&](int i) {
          if (ROT) return rounding_bits(by_column[r / 8], (u32)i);
          return select_bytes(by_row[ROT ? 0 : r + i], 0x80u, j ? 0x5324u : 0x5104u);
        };
        const uint4 value = CODED ? make_uint4(0, 0, 0, 0) : stochastic_values(x, b, rounding);
        const u32 codes = CODED ? stochastic_codes(x, b, rounding) : 0u;
#else
        float q[8];
        nearest8(x, b, q);
        const uint4 value = CODED ? make_uint4(0, 0, 0, 0) : nearest_values(q, x, b);
        const u32 codes = CODED ? codes8(q, x, b) : 0u;
#endif
        if (CODED) {
          const u32 chunk = tile_chunk(2 * l.lane + j, (at + r) / 32, l.lane % 8);
          reinterpret_cast<u32*>(tile.chunks + chunk)[(at + r) / 8 % 4] = codes;
        }
        if (!CODED)
          tile.chunks[tile_chunk(2 * l.lane + j, (at + r) / 8, l.lane % 8)] = value;
      }
    }
  }
}

// The tile to memory: four threads a column.
FP4_D void store_chunks(const Columns& a, const Lane& l, u32 m0, const uint4* chunks) {
  constexpr u32 ROWS = CODED ? 32 : 8;  // of a chunk
  const u32 chunk = l.lane % 4, m = m0 + chunk * ROWS, end = (u32)a.padded_rows;
  const u64 stride = (u64)end * 16 / ROWS;  // bytes of a column
  u8* out = (FORM == NONE ? a.codes : static_cast<u8*>(a.operand)) +
            (l.n0 + l.lane / 4) * stride + (u64)m * 16 / ROWS;
  const bool halves = CODED && end % 32;  // a column's codes are not on 16-byte boundaries
FP4_UNROLL
  for (u32 i = 0; i < 8; ++i) {
    const u32 column = i * 8 + l.lane / 4;
    const uint4 q = chunks[tile_chunk(column, chunk, column / 2 % 8)];
    const bool exists = m < end && l.n0 + column < (u32)a.cols;
    if (halves) {
      store_if(out, make_uint2(q.x, q.y), exists);
      store_if(out + 8, make_uint2(q.z, q.w), exists && m + 16 < end);
    } else {
      store_if(out, q, exists);
    }
    out += 8 * stride;
  }
}

FP4_D u8* swizzled(const Columns& a) {
  const u64 codes = FORM == NONE ? 0 : (u64)a.cols * (u64)a.padded_rows / 2;
  return static_cast<u8*>(a.operand) + codes;
}

// Two columns a thread.
FP4_D void store_scales(const Columns& a, const Lane& l, u32 m0, const u8* scales) {
  const u32 count = (u32)a.padded_rows / LENGTH, place = m0 / LENGTH;
FP4_UNROLL
  for (u32 j = 0; j < 2; ++j) {
    if (l.valid <= j) continue;
    const u8* from = scales + (2 * l.lane + j) * TILE_SCALES;
    if (SWIZZLED)
      for (u32 k = 0; k < TILE_SCALES && place + k < count; ++k)
        swizzled(a)[swizzled_at(l.n + j, place + k, tiles_across(count))] = from[k];
    if (FORM != NONE) continue;
    u8* out = a.scales + (u64)(l.n + j) * count + place;
    if (count % TILE_SCALES == 0) {
      if (TILE_SCALES == 8) *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(from);
      else *reinterpret_cast<u32*>(out) = *reinterpret_cast<const u32*>(from);
    } else {
      for (u32 k = 0; k < TILE_SCALES && place + k < count; ++k) out[k] = from[k];
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) quantize_columns(Columns a) {
  __shared__ uint4 chunks[WARPS][256];
  __shared__ uint2 tile_scales[WARPS][CODED ? 8 * TILE_SCALES : 1];
  __shared__ uint2 table[SCALES];
  __shared__ float part[SUMS ? DOWN : 1][SUMS ? ACROSS * 64 : 1];
  const u32 warp = threadIdx.x / 32;
  const Whole t = whole_of(MX ? 0u : *a.amax, table);
  if (!MX && blockIdx.x + blockIdx.y + threadIdx.x == 0) *a.outer = t.outer;
  const Lane l = lane_of(a);
  const Tile tile = {chunks[warp], reinterpret_cast<u8*>(tile_scales[warp])};
  Cipher key = {};
#if SR
  key = cipher(*a.seed, (u32)a.stream);
#endif
  if (SWIZZLED)
    pad_swizzled(swizzled(a), (u32)a.cols, (u32)a.padded_rows / LENGTH,
                 (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x,
                 gridDim.x * gridDim.y * blockDim.x);
  const u32 first = blockIdx.y * (u32)a.chunk + warp / ACROSS * SPAN;
  const u32 last = min_u((blockIdx.y + 1) * (u32)a.chunk, (u32)a.padded_rows);
  float sum[2] = {0.0f, 0.0f};
  Pair raw[STEP], next[AHEAD ? STEP : 1];
  if (AHEAD && first < last) read(a, l, first, next);
  for (u32 m0 = first; m0 < last; m0 += DOWN * SPAN) {
#pragma unroll(AHEAD ? 2 : 1)
    for (u32 at = 0; at < SPAN; at += STEP) {
      if (AHEAD) {
FP4_UNROLL
        for (u32 r = 0; r < STEP; ++r) raw[r] = next[AHEAD ? r : 0];
        read(a, l, at + STEP < SPAN ? m0 + at + STEP : m0 + DOWN * SPAN, next);
      } else {
        read(a, l, m0 + at, raw);
      }
      quantize_step(a, l, t, table, key, m0 + at, at, raw, sum, tile);
    }
    __syncwarp();
    store_chunks(a, l, m0, tile.chunks);
    if (CODED) store_scales(a, l, m0, tile.scales);
    __syncwarp();
  }
  if (!SUMS) return;
FP4_UNROLL
  for (u32 j = 0; j < 2; ++j) part[warp / ACROSS][warp % ACROSS * 64 + 2 * l.lane + j] = sum[j];
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
