// Saved codes to operands: along rows, transposed exactly, or transposed and quantized again.
//   SOURCE 0 NVFP4, 1 MXFP8 with block scales, 2 MXFP8 row scales (left out), 3 MXFP4 · FORM (Form)
//   MODE (requantize) 1 row scales (maxima from requantize_amax), 2 blocks of 32 (SCALES_FORM: their
//   codes, and swizzled behind them the scales; not E4M3_FORM)
//   SR, FACTOR 0/1 · BIG 1: 2^32 groups of random bits or more · ACROSS (1, 2, 4) warps of a CTA side
//   by side over columns
// Transposes: each warp takes tiles of 64 bytes of rows and reads ahead; any grid.
#include "warp_tile.cuh"

using namespace fp4;

constexpr bool NIBBLES = SOURCE == 0 || SOURCE == 3;
constexpr u32 LENGTH = SOURCE ? 32 : 16;  // elements of a scale

struct Saved {
  const u8 *codes, *scales;
  const float* factor;  // [rows], [1] (stride 0) or null
  i64 factor_stride, rows, cols, padded, padded_rows, group;
  u32* amax;  // [cols]
  const u64* seed;
  i64 stream;
  void* out;
  float* out_factor;
};

// Eight codes of a row as two words of E4M3 bytes.
FP4_D uint2 bytes8(const Saved& a, i64 m, i64 c, const u64* table) {
  const i64 at = m * a.padded + c;
  if (m >= a.rows || c >= a.padded) return make_uint2(0, 0);
  if (!NIBBLES) return *reinterpret_cast<const uint2*>(a.codes + at);
  return operand_e4m3(*reinterpret_cast<const u32*>(a.codes + at / 2), table[a.scales[at / 16] & 127]);
}

// Eight MXFP8 values code * block scale of a row.
FP4_D void values8(const Saved& a, i64 m, i64 c, float* v) {
  const i64 at = m * a.padded + c;
  if (m >= a.rows || c >= a.padded) {
FP4_UNROLL
    for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(a.codes + at);
    const float scale = SOURCE == 2 ? 1.0f : e8m0_value(a.scales[at / 32]);
    decode4(w.x, scale, v);
    decode4(w.y, scale, v + 4);
  }
}

// Signs of eight codes as the top bits of eight bytes; other bits are arbitrary.
FP4_D uint2 sign_bits(u32 codes) {
  const u32 even = codes << 4;
  return make_uint2(select_bytes(even, codes, 0x5140), select_bytes(even, codes, 0x7362));
}

// Eight 4-bit codes times their scale as four BF16 pairs.
FP4_D void bf16_of(u32 codes, u32 scale, u32* out) {
  const float value = SOURCE == 3 ? e8m0_value(scale) : decode_e4m3(scale);
  const u32 s = pack_bf16(value, value), c = codes & 0x77777777u;
  const uint2 sign = sign_bits(codes);
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    const u32 pick = h ? c >> 16 : c, top = h ? sign.y : sign.x;
    const u32 high = select_bytes(0x3f3f3f00u, 0x40404040u, pick) | (top & 0x80808080u);
    const u32 low = select_bytes(0xc0800000u, 0xc0804000u, pick);
    out[2 * h] = mul_bf16(select_bytes(low, high, 0x5140), s);
    out[2 * h + 1] = mul_bf16(select_bytes(low, high, 0x7362), s);
  }
}

extern "C" __global__ void __launch_bounds__(256) decode_rows(Saved a) {
  __shared__ u64 table[FORM == E4M3_FORM && SOURCE == 0 ? 128 : 1];
  if (FORM == E4M3_FORM && SOURCE == 0) {
    fill_operand_table(table);
    __syncthreads();
  }
  const i64 groups = a.rows * (a.padded / 8);
  for (i64 g = blockIdx.x * 256ll + threadIdx.x; g < groups; g += gridDim.x * 256ll) {
    // Rows are whole groups, so a group's place is its number.
    Saved flat = a;
    flat.rows = 1, flat.padded = groups * 8;
    if (FORM == E4M3_FORM) {
      *reinterpret_cast<uint2*>(static_cast<u8*>(a.out) + g * 8) = bytes8(flat, 0, g * 8, table);
    } else {
      uint4* out = reinterpret_cast<uint4*>(static_cast<u16*>(a.out) + g * 8);
      if (NIBBLES) {
        u32 pair[4];
        bf16_of(*reinterpret_cast<const u32*>(a.codes + g * 4), a.scales[g * 8 / LENGTH], pair);
        *out = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      } else {
        float v[8];
        values8(flat, 0, g * 8, v);
        *out = eight_bf16(v);
      }
    }
  }
}

// ---- transposes: what a thread reads of a row ---------------------------------------------------

constexpr u32 TILE_WARPS = 4;

// W codes of a row and their scale's byte.
template <int W>
struct Codes {
  u32 w[NIBBLES ? W / 8 : W / 4];
  u32 scale;
};

// Codes of row m from column c on, 0 outside; c is a multiple of W.
template <int W>
FP4_D Codes<W> codes_at(const Saved& a, u32 m, u32 c) {
  Codes<W> x;
  x.scale = 0;
FP4_UNROLL
  for (u32& w : x.w) w = 0;
  if (m >= (u32)a.rows || c >= (u32)a.padded) return x;
  const u64 at = (u64)m * (u32)a.padded + c;
  const u8* p = a.codes + (NIBBLES ? at / 2 : at);
  if (sizeof(x.w) == 16) {
    const uint4 q = *reinterpret_cast<const uint4*>(p);
    x.w[0] = q.x, x.w[1 % (sizeof(x.w) / 4)] = q.y;
    x.w[2 % (sizeof(x.w) / 4)] = q.z, x.w[3 % (sizeof(x.w) / 4)] = q.w;
  } else if (sizeof(x.w) == 8) {
    const uint2 q = *reinterpret_cast<const uint2*>(p);
    x.w[0] = q.x, x.w[1 % (sizeof(x.w) / 4)] = q.y;
  } else {
    x.w[0] = *reinterpret_cast<const u32*>(p);
  }
  if (SOURCE != 2) x.scale = a.scales[at / LENGTH];
  return x;
}

// Eight codes to eight E4M3 bytes, given their scale's row of the table.
FP4_D uint2 e4m3_of(u32 codes, u64 row) {
  const u32 low = (u32)row, high = (u32)(row >> 32), c = codes & 0x77777777u;
  const uint2 sign = sign_bits(codes);
  return make_uint2(select_bytes(low, high, c) | (sign.x & 0x80808080u),
                    select_bytes(low, high, c >> 16) | (sign.y & 0x80808080u));
}

// Byte i of E4M3 codes as a value in E4M3's own size times 2^-120.
FP4_D float small_e4m3(u32 codes, u32 i) {
  const i32 top = (i32)select_bytes(codes, 0u, 0x0444u | i << 12);
  return from_bits((u32)(top >> 4) & 0x87f00000u);
}

FP4_D float mxfp8_value(u32 codes, u32 i, u32 byte) {
  const float v = mul(small_e4m3(codes, i), 0x1p120f);
  return SOURCE == 2 ? v : mul(v, e8m0_value(byte));
}

// A four by four transpose of bytes: rows to columns.
FP4_D void transpose4(u32 a, u32 b, u32 c, u32 d, u32* out) {
  const u32 ab = select_bytes(a, b, 0x5140), ab2 = select_bytes(a, b, 0x7362);
  const u32 cd = select_bytes(c, d, 0x5140), cd2 = select_bytes(c, d, 0x7362);
  out[0] = select_bytes(ab, cd, 0x5410), out[1] = select_bytes(ab, cd, 0x7632);
  out[2] = select_bytes(ab2, cd2, 0x5410), out[3] = select_bytes(ab2, cd2, 0x7632);
}

// Tiles of a matrix of SPAN rows and C columns, rows fastest.
constexpr u32 SPAN = FORM == BF16_FORM ? 32 : 64;

// Where tile `i` starts.
struct Tiles {
  u32 rows, columns, group, count;
};

template <u32 C>
FP4_D Tiles tiles_of(const Saved& a) {
  Tiles t;
  t.rows = ((u32)a.padded_rows + SPAN - 1) / SPAN;
  t.columns = ((u32)a.cols + C * ACROSS - 1) / (C * ACROSS);
  t.group = (u32)a.group, t.count = t.rows * t.columns * ACROSS;
  return t;
}

template <u32 C>
FP4_D Place start_of(const Tiles& t, u32 i) {
  const Place p = place_of(i / ACROSS, t.rows, t.columns, t.group);
  return {p.row * SPAN, (p.column * ACROSS + i % ACROSS) * C};
}

// A tile of C columns to memory.
template <u32 C>
FP4_D void store_tile(const Saved& a, const uint4* tile, Place at, u32 lane) {
  constexpr u32 UNIT = FORM == BF16_FORM ? 2 : 1;
  const u32 chunk = lane % 4, m = at.row + chunk * (16 / UNIT);
  u8* out = static_cast<u8*>(a.out) + ((u64)(at.column + lane / 4) * (u32)a.padded_rows + m) * UNIT;
  const bool rows = m < (u32)a.padded_rows;
FP4_UNROLL
  for (u32 i = 0; i < C / 8; ++i) {
    const uint4 q = tile[tile_chunk(i * 8 + lane / 4, chunk, i * 8 / (C / 8))];
    store_if(out, q, rows && at.column + i * 8 + lane / 4 < (u32)a.cols);
    out += 8 * UNIT * (u64)(u32)a.padded_rows;
  }
}

// ---- decode -----------------------------------------------------------------------------------

constexpr int DECODE_W = FORM == E4M3_FORM ? 16 : 8;  // columns of a thread
constexpr u32 DECODE_COLS = 8 * DECODE_W;

extern "C" __global__ void __launch_bounds__(128, 5) decode_transpose(Saved a) {
  constexpr bool BYTES = FORM == E4M3_FORM;
  constexpr u32 HALVES = SPAN / 32;
  __shared__ uint4 tiles[TILE_WARPS][DECODE_COLS * 4];
  __shared__ u64 table[BYTES && SOURCE == 0 ? 128 : 1];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, cq = lane % 8, rg = lane / 8;
  const Tiles tiling = tiles_of<DECODE_COLS>(a);
  const u32 count = tiling.count;
  const u32 stride = gridDim.x * TILE_WARPS;
  if (BYTES && SOURCE == 0) {
    fill_operand_table(table);
    __syncthreads();
  }
  u32 tile = blockIdx.x * TILE_WARPS + warp;
  Place at = start_of<DECODE_COLS>(tiling, tile);
  Codes<DECODE_W> next[8];
FP4_UNROLL
  for (u32 r = 0; r < 8; ++r)
    next[r] = codes_at<DECODE_W>(a, tile < count ? at.row + rg * 8 + r : ~0u, at.column + cq * DECODE_W);
  for (; tile < count; tile += stride) {
    const Place here = at;
    __syncwarp();
#pragma unroll 1
    for (u32 half = 0; half < HALVES; ++half) {
      Codes<DECODE_W> x[8];
FP4_UNROLL
      for (u32 r = 0; r < 8; ++r) x[r] = next[r];
      u32 m = here.row + 32 + rg * 8;
      if (half + 1 == HALVES) {
        at = start_of<DECODE_COLS>(tiling, tile + stride);
        m = tile + stride < count ? at.row + rg * 8 : ~0u - 8;
      }
FP4_UNROLL
      for (u32 r = 0; r < 8; ++r) next[r] = codes_at<DECODE_W>(a, m + r, at.column + cq * DECODE_W);
      if (BYTES) {
        uint2* units = reinterpret_cast<uint2*>(tiles[warp]);
        u32 row[8][DECODE_W / 4];
FP4_UNROLL
        for (u32 r = 0; r < 8; ++r) {
          const u64 of_scale = SOURCE == 0 ? table[x[r].scale & 127] : 0;
FP4_UNROLL
          for (u32 k = 0; k < DECODE_W / 4; ++k) {
            if (!NIBBLES) row[r][k] = x[r].w[NIBBLES ? 0 : k];
            else if (k % 2 == 0) {
              const uint2 e = e4m3_of(x[r].w[k / 2], of_scale);
              row[r][k] = e.x, row[r][k + 1] = e.y;
            }
          }
        }
FP4_UNROLL
        for (u32 k = 0; k < DECODE_W / 4; ++k) {
          u32 top[4], low[4];
          transpose4(row[0][k], row[1][k], row[2][k], row[3][k], top);
          transpose4(row[4][k], row[5][k], row[6][k], row[7][k], low);
FP4_UNROLL
          for (u32 j = 0; j < 4; ++j)
            units[tile_chunk(cq * DECODE_W, k * 4 + j, half * 2 + rg / 2, cq) * 2 + rg % 2] =
                make_uint2(top[j], low[j]);
        }
      } else {
        u32 pair[8][4];
FP4_UNROLL
        for (u32 r = 0; r < 8; ++r) {
          if (NIBBLES) {
            bf16_of(x[r].w[0], x[r].scale, pair[r]);
          } else {
FP4_UNROLL
            for (u32 k = 0; k < 4; ++k)
              pair[r][k] = pack_bf16(mxfp8_value(x[r].w[NIBBLES ? 0 : k / 2], k % 2 * 2, x[r].scale),
                                     mxfp8_value(x[r].w[NIBBLES ? 0 : k / 2], k % 2 * 2 + 1, x[r].scale));
          }
        }
FP4_UNROLL
        for (u32 j = 0; j < 8; ++j) {
          u32 y[4];
FP4_UNROLL
          for (u32 k = 0; k < 4; ++k)
            y[k] = select_bytes(pair[2 * k][j / 2], pair[2 * k + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
          tiles[warp][tile_chunk(cq * 8, j, rg, cq)] = make_uint4(y[0], y[1], y[2], y[3]);
        }
      }
    }
    __syncwarp();
    store_tile<DECODE_COLS>(a, tiles[warp], here, lane);
  }
}

// ---- requantize -------------------------------------------------------------------------------

FP4_D float factor_at(const Saved& a, u32 m) {
  return FACTOR && m < (u32)a.rows ? a.factor[m * a.factor_stride] : 1.0f;
}

// Eight values code * block scale of a row: what is kept of them, and the values.
struct Held {
  u32 w[NIBBLES ? 4 : 2];
  u32 scale;
};

FP4_D Held hold(const Codes<8>& x) {
  Held h;
  h.scale = x.scale;
  if (NIBBLES) bf16_of(x.w[0], x.scale, h.w);
  else h.w[0] = x.w[0], h.w[1] = x.w[NIBBLES ? 0 : 1];
  return h;
}

FP4_D float value_of(const Held& h, u32 j) {
  if (!NIBBLES) return mxfp8_value(h.w[j / 4 % 2], j % 4, h.scale);
  const u32 w = h.w[NIBBLES ? j / 2 : 0];
  return from_bits(j % 2 ? w & 0xffff0000u : w << 16);
}

constexpr u32 AMAX_COLS = 256, AMAX_ROWS = 256;  // of a CTA

extern "C" __global__ void __launch_bounds__(256, 4) requantize_amax(Saved a) {
  __shared__ u32 part[8][AMAX_COLS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 first = blockIdx.x * AMAX_ROWS + warp * 32, c0 = blockIdx.y * AMAX_COLS;
  float column[8] = {};
#pragma unroll 1
  for (u32 m = first; m < first + 32; m += 8) {
    Codes<8> x[8];
FP4_UNROLL
    for (u32 r = 0; r < 8; ++r) x[r] = codes_at<8>(a, m + r, c0 + lane * 8);
FP4_UNROLL
    for (u32 r = 0; r < 8; ++r) {
      const Held h = hold(x[r]);
      const float factor = factor_at(a, m + r);
FP4_UNROLL
      for (u32 j = 0; j < 8; ++j) {
        const float v = value_of(h, j);
        column[j] = max_magnitude(column[j], FACTOR ? mul(v, factor) : v);
      }
    }
  }
FP4_UNROLL
  for (int j = 0; j < 8; ++j) part[warp][lane * 8 + j] = bits(column[j]);
  __syncthreads();
  const u32 c = c0 + threadIdx.x;
  if (c >= (u32)a.cols) return;
  u32 m = 0;
FP4_UNROLL
  for (int k = 0; k < 8; ++k) m = max_u(m, part[k][threadIdx.x]);
  atomicMax(a.amax + c, m);
}

// Eight row-adjacent values of a column to E4M3 bytes or BF16 values. SLOW: any byte.
template <bool SLOW>
FP4_D uint4 quantize_column(const float* x, u32 byte, const Words& random16) {
  float t[8], value[8];
  u32 c[8], word[2];
#if SR
  const float shrink = shrink_factor(byte);
FP4_UNROLL
  for (int i = 0; i < 8; ++i) t[i] = SLOW ? shrunk_slowly(x[i], byte) : mul(x[i], shrink);
  const float grow = MODE == 1 || SLOW ? 0x1p120f : grow_factor(byte);
FP4_UNROLL
  for (u32 i = 0; i < 8; ++i) {
    const u32 rounding = rounding_bits(random16, i);
    c[i] = code_at_top(t[i], rounding);
    value[i] = mul(rounded(t[i], rounding), grow);
    if (MODE == 2 && SLOW) value[i] = mul(value[i], e8m0_value(byte));
  }
  word[0] = top_bytes(c[0], c[1], c[2], c[3]), word[1] = top_bytes(c[4], c[5], c[6], c[7]);
#else
  const float up = e8m0_inverse(byte);
FP4_UNROLL
  for (int i = 0; i < 8; ++i) t[i] = byte == 255 ? 0.0f : mul(x[i], up);
  word[0] = e4m3_codes4(t), word[1] = e4m3_codes4(t + 4);
  const float scale = MODE == 1 ? 1.0f : e8m0_value(byte);
  decode4(word[0], scale, value), decode4(word[1], scale, value + 4);
#endif
  if (FORM != BF16_FORM) return make_uint4(word[0], word[1], 0, 0);
  return eight_bf16(value);
}

extern "C" __global__ void __launch_bounds__(128, 4) requantize_transpose(Saved a) {
  constexpr u32 HALVES = SPAN / 32, C = 64;
  __shared__ uint4 tiles[TILE_WARPS][C * 4];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, cq = lane % 8, rg = lane / 8;
  const Tiles tiling = tiles_of<C>(a);
  const u32 count = tiling.count, stride = gridDim.x * TILE_WARPS;
#if SR
  const Cipher key = cipher(*a.seed, (u32)a.stream);
#endif
#if FORM == 3
  pad_swizzled(static_cast<u8*>(a.out) + (u64)a.cols * (u64)a.padded_rows, (u32)a.cols,
               (u32)a.padded_rows / 32, blockIdx.x * 128 + threadIdx.x, gridDim.x * 128);
#endif
  u32 tile = blockIdx.x * TILE_WARPS + warp;
  Place at = start_of<C>(tiling, tile);
  Codes<8> next[8];
  float next_factor[FACTOR ? 8 : 1];
FP4_UNROLL
  for (u32 r = 0; r < 8; ++r) {
    const u32 m = tile < count ? at.row + rg * 8 + r : ~0u;
    next[r] = codes_at<8>(a, m, at.column + cq * 8);
    if (FACTOR) next_factor[r] = factor_at(a, m);
  }
  for (; tile < count; tile += stride) {
    const Place here = at;
    const u32 c0 = here.column + cq * 8;
    __syncwarp();
#pragma unroll 1
    for (u32 half = 0; half < HALVES; ++half) {
      const u32 m = here.row + half * 32 + rg * 8;
      Held x[8];
      float factor[FACTOR ? 8 : 1];
FP4_UNROLL
      for (u32 r = 0; r < 8; ++r) {
        x[r] = hold(next[r]);
        if (FACTOR) factor[r] = next_factor[r];
      }
      u32 ahead = m + 32;
      if (half + 1 == HALVES) {
        at = start_of<C>(tiling, tile + stride);
        ahead = tile + stride < count ? at.row + rg * 8 : ~0u - 8;
      }
FP4_UNROLL
      for (u32 r = 0; r < 8; ++r) {
        next[r] = codes_at<8>(a, ahead + r, at.column + cq * 8);
        if (FACTOR) next_factor[r] = factor_at(a, ahead + r);
      }
      u32 byte[8], largest = 0;
FP4_UNROLL
      for (u32 j = 0; j < 8; ++j) {
        u32 block = 0;
        if (MODE == 1) {
          block = c0 + j < (u32)a.cols ? a.amax[c0 + j] : 0u;
        } else {
          float amax = 0.0f;
FP4_UNROLL
          for (u32 r = 0; r < 8; ++r) {
            const float v = value_of(x[r], j);
            amax = max_magnitude(amax, FACTOR ? mul(v, factor[FACTOR ? r : 0]) : v);
          }
          block = bits(amax);
          block = max_u(block, __shfl_xor_sync(ALL_LANES, block, 8));
          block = max_u(block, __shfl_xor_sync(ALL_LANES, block, 16));
        }
        byte[j] = e8m0_byte(block);
        largest = max_u(largest, byte[j]);
#if FORM == 3
        if (rg == 0 && c0 + j < (u32)a.cols && m < (u32)a.padded_rows) {
          u8* scales = static_cast<u8*>(a.out) + (u64)a.cols * (u64)a.padded_rows;
          scales[swizzled_at(c0 + j, m / 32, tiles_across((u32)a.padded_rows / 32))] = (u8)byte[j];
        }
#endif
        if (MODE == 1 && m == 0 && c0 + j < (u32)a.cols) a.out_factor[c0 + j] = e8m0_value(byte[j]);
      }
      const bool slow = warp_max(largest) > LAST_GROWN;
FP4_UNROLL
      for (u32 q = 0; q < 8; q += 4) {
        Words words[4];
#if SR && BIG
FP4_UNROLL
        for (u32 k = 0; k < 4; ++k)
          words[k] = philox(*a.seed, ((u64)(c0 + q + k) * (u64)a.padded_rows + m) / 8, (u32)a.stream);
#elif SR
        u32 group[4];
FP4_UNROLL
        for (u32 k = 0; k < 4; ++k)
          group[k] = (c0 + q + k) * ((u32)a.padded_rows / 8) + m / 8;
        philox<4>(key, group, words);
#endif
FP4_UNROLL
        for (u32 k = 0; k < 4; ++k) {
          const u32 j = q + k;
          float v[8];
FP4_UNROLL
          for (u32 r = 0; r < 8; ++r) {
            v[r] = value_of(x[r], j);
            if (FACTOR) v[r] = mul(v[r], factor[FACTOR ? r : 0]);
          }
          uint4 y;
          if (slow) y = quantize_column<true>(v, byte[j], words[k]);
          else y = quantize_column<false>(v, byte[j], words[k]);
          if (FORM != BF16_FORM) {
            const u32 chunk = tile_chunk(cq * 8, j, half * 2 + rg / 2, cq);
            reinterpret_cast<uint2*>(tiles[warp])[chunk * 2 + rg % 2] = make_uint2(y.x, y.y);
          } else {
            tiles[warp][tile_chunk(cq * 8, j, rg, cq)] = y;
          }
        }
      }
    }
    __syncwarp();
    store_tile<C>(a, tiles[warp], here, lane);
  }
}
