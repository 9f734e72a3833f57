// Saved codes to operands: along rows, transposed exactly, or transposed and quantized again.
//   SOURCE 0 NVFP4, 1 MXFP8 with block scales, 2 MXFP8 row scales (left out) · FORM (Form)
//   MODE (requantize) 1 row scales (maxima from requantize_amax), 2 blocks of 32 · SR 0/1
// Grids: decode_rows any; the others (row tiles, column tiles), rows fastest.
#include "device.cuh"

using namespace fp4;

struct Saved {
  const u8 *codes, *scales;
  const float* factor;  // [rows], [1] (stride 0) or null
  i64 factor_stride, rows, cols, padded, padded_rows;
  u32* amax;  // [cols]
  const u64* seed;
  i64 stream;
  void* out;
  u8* out_scales;
  float* out_factor;
};

// Eight codes of a row as two words of E4M3 bytes.
FP4_D uint2 bytes8(const Saved& a, i64 m, i64 c, const u64* table) {
  const i64 at = m * a.padded + c;
  if (m >= a.rows || c >= a.padded) return make_uint2(0, 0);
  if (SOURCE) return *reinterpret_cast<const uint2*>(a.codes + at);
  return operand_e4m3(*reinterpret_cast<const u32*>(a.codes + at / 2), table[a.scales[at / 16] & 127]);
}

// Eight values code * block scale of a row.
FP4_D void values8(const Saved& a, i64 m, i64 c, float* v) {
  const i64 at = m * a.padded + c;
  if (m >= a.rows || c >= a.padded) {
FP4_UNROLL
    for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  } else if (SOURCE) {
    const uint2 w = *reinterpret_cast<const uint2*>(a.codes + at);
    const float scale = SOURCE == 2 ? 1.0f : e8m0_value(a.scales[at / 32]);
    decode4(w.x, scale, v);
    decode4(w.y, scale, v + 4);
  } else {
    operand_f32(*reinterpret_cast<const u32*>(a.codes + at / 2), decode_e4m3(a.scales[at / 16]), v);
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
      float v[8];
      values8(flat, 0, g * 8, v);
      *reinterpret_cast<uint4*>(static_cast<u16*>(a.out) + g * 8) = eight_bf16(v);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 4) decode_transpose(Saved a) {
  constexpr bool BYTES = FORM == E4M3_FORM;
  __shared__ uint2 tile[TILE_COLS * 16 / (BYTES ? 2 : 1)];
  __shared__ u64 table[BYTES && SOURCE == 0 ? 128 : 1];
  const u32 cq = threadIdx.x % 16, rq = threadIdx.x / 16;
  const i64 m0 = blockIdx.x * (i64)TILE_ROWS, c0 = blockIdx.y * (i64)TILE_COLS;
  if (BYTES && SOURCE == 0) {
    fill_operand_table(table);
    __syncthreads();
  }
  if (BYTES) {
    uint2 w[4];
FP4_UNROLL
    for (int r = 0; r < 4; ++r) w[r] = bytes8(a, m0 + rq * 4 + r, c0 + cq * 8, table);
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      const u32 pick = j % 4 | (4 + j % 4) << 4;
      const u32 top = j < 4 ? select_bytes(w[0].x, w[1].x, pick) : select_bytes(w[0].y, w[1].y, pick);
      const u32 low = j < 4 ? select_bytes(w[2].x, w[3].x, pick) : select_bytes(w[2].y, w[3].y, pick);
      tile_store(reinterpret_cast<u32*>(tile), cq, j, rq, select_bytes(top, low, 0x5410));
    }
  } else {
    float v[4][8];
FP4_UNROLL
    for (int r = 0; r < 4; ++r) values8(a, m0 + rq * 4 + r, c0 + cq * 8, v[r]);
FP4_UNROLL
    for (int j = 0; j < 8; ++j)
      tile_store(tile, cq, j, rq, make_uint2(pack_bf16(v[0][j], v[1][j]), pack_bf16(v[2][j], v[3][j])));
  }
  __syncthreads();
FP4_UNROLL
  for (int item = 0; item < 2; ++item) {
    const u32 i = threadIdx.x + item * TILE_THREADS, column = tile_column(i), q = tile_quarter(i);
    const i64 c = c0 + column, m = m0 + q * 16;
    if (c >= a.cols || m >= a.padded_rows) continue;
    const i64 at = c * a.padded_rows + m;
    if (BYTES) {
      const u32* words = reinterpret_cast<const u32*>(tile);
      uint4 out;
      out.x = tile_load(words, column, q * 4), out.y = tile_load(words, column, q * 4 + 1);
      out.z = tile_load(words, column, q * 4 + 2), out.w = tile_load(words, column, q * 4 + 3);
      *reinterpret_cast<uint4*>(static_cast<u8*>(a.out) + at) = out;
    } else {
FP4_UNROLL
      for (int h = 0; h < 2; ++h) {
        const uint2 x = tile_load(tile, column, q * 4 + 2 * h);
        const uint2 y = tile_load(tile, column, q * 4 + 2 * h + 1);
        reinterpret_cast<uint4*>(static_cast<u16*>(a.out) + at)[h] = make_uint4(x.x, x.y, y.x, y.y);
      }
    }
  }
}

// Eight values of a row times its factor: what is quantized again.
FP4_D void scaled8(const Saved& a, i64 m, i64 c, float* v) {
  values8(a, m, c, v);
  if (!a.factor || m >= a.rows) return;
  const float factor = a.factor[m * a.factor_stride];
FP4_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = mul(v[i], factor);
}

extern "C" __global__ void __launch_bounds__(256, 4) requantize_amax(Saved a) {
  __shared__ u32 part[16][TILE_COLS];
  const u32 cq = threadIdx.x % 16, rq = threadIdx.x / 16;
  const i64 m0 = blockIdx.x * (i64)TILE_ROWS, c0 = blockIdx.y * (i64)TILE_COLS;
  u32 column[8] = {};
FP4_UNROLL
  for (int r = 0; r < 4; ++r) {
    float v[8];
    scaled8(a, m0 + rq * 4 + r, c0 + cq * 8, v);
FP4_UNROLL
    for (int j = 0; j < 8; ++j) column[j] = max_u(column[j], magnitude(v[j]));
  }
FP4_UNROLL
  for (int j = 0; j < 8; ++j) part[rq][cq * 8 + j] = column[j];
  __syncthreads();
  const i64 c = c0 + threadIdx.x;
  if (threadIdx.x >= TILE_COLS || c >= a.cols) return;
  u32 m = 0;
  for (int r = 0; r < 16; ++r) m = max_u(m, part[r][threadIdx.x]);
  atomicMax(a.amax + c, m);
}

// Sixteen values of one column to codes.
FP4_D void requantize16(const Saved& a, i64 c, i64 m, const float* v, u32 amax) {
  const u32 byte = e8m0<E4M3>(amax);
  const float up = e8m0_inverse(byte);
  const i64 at = c * a.padded_rows + m;
  u32 word[4];
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
#if SR
    const Words random16 = philox(*a.seed, (u64)(at / 8 + h), (u32)a.stream);
#endif
FP4_UNROLL
    for (int k = 0; k < 2; ++k) {
      const float* x = v + h * 8 + k * 4;
#if SR
      u32 t[4];
FP4_UNROLL
      for (int i = 0; i < 4; ++i) t[i] = stochastic_e4m3(x[i], up, rounding_bits(random16, k * 4 + i));
      word[h * 2 + k] = top_bytes(t[0], t[1], t[2], t[3]) | sign_bytes(x);
#else
      const float y[4] = {mul(x[0], up), mul(x[1], up), mul(x[2], up), mul(x[3], up)};
      word[h * 2 + k] = pack_e4m3(y);
#endif
      if (byte == 255) word[h * 2 + k] = 0;
    }
  }
  if (FORM == E4M3_FORM) {
    *reinterpret_cast<uint4*>(static_cast<u8*>(a.out) + at) =
        make_uint4(word[0], word[1], word[2], word[3]);
  } else {
    const float scale = MODE == 1 ? 1.0f : e8m0_value(byte);
FP4_UNROLL
    for (int h = 0; h < 2; ++h) {
      float value[8];
      decode4(word[2 * h], scale, value);
      decode4(word[2 * h + 1], scale, value + 4);
      reinterpret_cast<uint4*>(static_cast<u16*>(a.out) + at)[h] = eight_bf16(value);
    }
  }
  if (MODE == 2 && a.out_scales && m % 32 == 0) a.out_scales[at / 32] = (u8)byte;
  if (MODE == 1 && m == 0) a.out_factor[c] = e8m0_value(byte);
}

extern "C" __global__ void __launch_bounds__(256, 2) requantize_transpose(Saved a) {
  __shared__ float4 tile[TILE_COLS * 16];
  const u32 cq = threadIdx.x % 16, rq = threadIdx.x / 16;
  const i64 m0 = blockIdx.x * (i64)TILE_ROWS, c0 = blockIdx.y * (i64)TILE_COLS;
  float v[4][8];
FP4_UNROLL
  for (int r = 0; r < 4; ++r) scaled8(a, m0 + rq * 4 + r, c0 + cq * 8, v[r]);
FP4_UNROLL
  for (int j = 0; j < 8; ++j)
    tile_store(tile, cq, j, rq, make_float4(v[0][j], v[1][j], v[2][j], v[3][j]));
  __syncthreads();
FP4_UNROLL
  for (int item = 0; item < 2; ++item) {
    const u32 i = threadIdx.x + item * TILE_THREADS, column = tile_column(i), q = tile_quarter(i);
    const i64 c = c0 + column, m = m0 + q * 16;
    float x[16];
FP4_UNROLL
    for (int k = 0; k < 4; ++k) {
      const float4 u = tile_load(tile, column, q * 4 + k);
      x[4 * k] = u.x, x[4 * k + 1] = u.y, x[4 * k + 2] = u.z, x[4 * k + 3] = u.w;
    }
    u32 amax = block_max_nan(x);
    if (MODE == 2) amax = max_u(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    else amax = c < a.cols ? a.amax[c] : 0;
    if (c < a.cols && m < a.padded_rows) requantize16(a, c, m, x, amax);
  }
}
