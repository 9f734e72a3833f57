// FP8 with FP32 scales (docs/numerics.md, "FP8 blocks"): a CTA holds a tile of 128 x 128 elements
// in its registers and writes codes with scales along the rows, along the columns, or with one.
//   XD dtype (Dtype) · SAVED 1: the source is codes and scales along rows · ACT, GATED, TERM, UP as
//   in rows.cu · ALONG codes by rows: 0 none, 1 blocks of 1 x 128, 2 the tile · ACROSS 1: codes by
//   columns, transposed · SUMS 1: column sums · SR stochastic rounding: 1 by rows, 2 by columns
//   FULL 1: the matrix is whole tiles whose rows lie on 16-byte boundaries
// Grid: the tiles; where columns are written, those below one another follow each other.
#include "activations.cuh"

using namespace fp4;

struct Fp8 {
  Term x, up;
  const u8* saved;           // [rows, padded]
  const float* saved_scales;  // [padded / 128, rows]
  i64 rows, cols, padded, padded_rows, wide;
  const u64* seed;
  i64 stream;
  u8* along;            // [rows, padded]
  float* along_scales;  // [padded / 128, rows], or one a tile [rows / 128, padded / 128]
  u8* across;           // [cols, padded_rows]
  float* across_scales;  // [padded_rows / 128, cols]
  float* sums;           // [tiles below one another, cols]
};

constexpr int SIDE = 128, EIGHT = 8;
constexpr bool SAME = !ACT && !GATED && !TERM;  // the tensor itself is quantized

FP4_D float max_nan(float m, float x) {
#ifdef FP4_EMULATE
  return from_bits(max_u(bits(m), magnitude(x)));
#else
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(m), "f"(fabsf(x)));
  return m;
#endif
}

FP4_D float other_max(float m, u32 lane) {
  return max_nan(m, from_bits(__shfl_xor_sync(0xffffffffu, bits(m), lane)));
}

// amax / 448, NaN where amax is not finite; `inverse` is then 0, otherwise never.
FP4_D float scale_of(float amax, float* inverse) {
  const bool finite = bits(amax) < INFINITE;
  const float scale = div(amax, 448.0f);
  *inverse = finite ? min_f(div(1.0f, scale), LARGEST) : 0.0f;
  return finite ? scale : from_bits(QUIET_NAN);
}

// Eight codes of y = v * inverse, all 0 where inverse is 0; `random` are their bits.
FP4_D uint2 codes_of(const float* v, float inverse, bool stochastic, const Words& random) {
  float y[EIGHT];
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) y[i] = mul(v[i], inverse);
  uint2 out;
  if (!stochastic) {
    out.x = e4m3_codes4(y), out.y = e4m3_codes4(y + 4);
  } else {
    u32 code[EIGHT];
FP4_UNROLL
    for (int i = 0; i < EIGHT; ++i) code[i] = encode_stochastic<E4M3>(y[i], lane16(random, i));
    out.x = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
    out.y = code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24;
  }
  const u32 mask = inverse == 0.0f ? 0u : 0xffffffffu;
  return make_uint2(out.x & mask, out.y & mask);
}

// Values of eight codes times their scale, each product rounded once: the exponent of a code is
// moved to FP32's place, subnormals included, and 2^120 makes up for the biases, exactly.
FP4_D void decode8(uint2 codes, float scale, float* v) {
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) {
    const u32 top = (i < 4 ? codes.x : codes.y) << (24 - 8 * (i % 4));
    const u32 word = (top & 0x80000000u) | (top >> 4 & 0x07f00000u);
    v[i] = mul(mul(from_bits(word), 0x1p120f), scale);
  }
}

// Element [i][j] is row + i, col + j; zero outside.
FP4_D void read_tile(const Fp8& a, i64 row, i64 col, float (*v)[EIGHT]) {
#if SAVED
  uint2 raw[EIGHT];
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i)
    raw[i] = FULL || row + i < a.rows
                 ? *reinterpret_cast<const uint2*>(a.saved + (row + i) * a.padded + col)
                 : make_uint2(0, 0);
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i)
    decode8(raw[i], FULL || row + i < a.rows ? a.saved_scales[col / SIDE * a.rows + row + i] : 0.0f,
            v[i]);
#else
  Raw8<XD> raw[EIGHT];
#if GATED
  Raw8<XD> raw_up[EIGHT];
#endif
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) {
    const i64 valid = FULL ? EIGHT : row + i < a.rows ? a.cols - col : 0;
    raw[i] = load8<XD>(a.x.acc, (row + i) * a.x.ld + col, valid, FULL || a.wide);
#if GATED
    raw_up[i] = load8<XD>(a.up.acc, (row + i) * a.up.ld + col, valid, FULL || a.wide);
#endif
  }
  const float x_col = TERM & ONE_COL ? a.x.col[0] : 1.0f;
#if GATED
  const float up_col = UP & ONE_COL ? a.up.col[0] : 1.0f;
#endif
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) {
    widen8<XD>(raw[i], v[i]);
    if (SAME) continue;
    const i64 r = FULL || row + i < a.rows ? row + i : 0;
    affine<TERM, EIGHT>(a.x, row_factor<TERM>(a.x, r), x_col, col, a.cols, v[i]);
#if GATED
    float up[EIGHT];
    widen8<XD>(raw_up[i], up);
    affine<UP, EIGHT>(a.up, row_factor<UP>(a.up, r), up_col, col, a.cols, up);
#endif
FP4_UNROLL
    for (int j = 0; j < EIGHT; ++j) {
      float z = activate<ACT>(v[i][j]);
#if GATED
      z = mul(z, up[j]);
#endif
      v[i][j] = FULL || (row + i < a.rows && col + j < a.cols) ? z : 0.0f;
    }
  }
#endif
}

// Maxima of a thread's eight rows over the 16 lanes that share them; a lane gets that of the row
// whose number is its bits 3, 2 and 1.
FP4_D float share_rows(const float (*v)[EIGHT], u32 lane) {
  float m[EIGHT];
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) {
    m[i] = fabsf(v[i][0]);
FP4_UNROLL
    for (int j = 1; j < EIGHT; ++j) m[i] = max_nan(m[i], v[i][j]);
  }
FP4_UNROLL
  for (int step = 0; step < 3; ++step) {
    const int half = 4 >> step;
    const bool high = lane & (2 * half);
FP4_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i >= half) break;
      const float mine = high ? m[i + half] : m[i], theirs = high ? m[i] : m[i + half];
      m[i] = max_nan(mine, from_bits(__shfl_xor_sync(0xffffffffu, bits(theirs), 2 * half)));
    }
  }
  return other_max(m[0], 1);
}

// 256 threads: a warp has 16 rows, a lane eight rows of eight columns.
extern "C" __global__ void __launch_bounds__(256, 2) quantize_fp8(Fp8 a) {
  __shared__ float row_inverse[SIDE], col_inverse[SIDE];
  __shared__ float col_max[ACROSS ? EIGHT : 1][SIDE], col_sum[SUMS ? EIGHT : 1][SIDE];
  __shared__ uint2 turned[ACROSS ? SIDE : 1][16];  // [column][eight rows, moved by the column]
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % 16;
  const u32 r0 = warp * 16 + lane / 16 * EIGHT, c0 = chunk * EIGHT;
  const i64 below = (a.rows + SIDE - 1) / SIDE, beside = a.padded / SIDE;
  const i64 row_tile = ACROSS || SUMS ? blockIdx.x % below : blockIdx.x / beside;
  const i64 col_tile = ACROSS || SUMS ? blockIdx.x / below : blockIdx.x % beside;
  const i64 row = row_tile * SIDE + r0, col = col_tile * SIDE + c0;
  float v[EIGHT][EIGHT];
  read_tile(a, row, col, v);

  if (ALONG == 1) {  // a warp's rows are its own
    const float amax = share_rows(v, lane);
    const u32 mine = r0 + (lane >> 1 & 7);
    float inverse;
    const float scale = scale_of(amax, &inverse);
    if (!(lane & 1)) {
      row_inverse[mine] = inverse;
      const i64 r = row_tile * SIDE + mine;
      if (FULL || r < a.rows) a.along_scales[col_tile * a.rows + r] = scale;
    }
    __syncwarp();
  }
  if (ACROSS || SUMS || ALONG == 2) {
    float most[EIGHT], sum[EIGHT];
FP4_UNROLL
    for (int j = 0; j < EIGHT; ++j) {
      most[j] = fabsf(v[0][j]), sum[j] = v[0][j];
FP4_UNROLL
      for (int i = 1; i < EIGHT; ++i) {
        most[j] = max_nan(most[j], v[i][j]);
        if (SUMS) sum[j] = add(sum[j], v[i][j]);
      }
      if (ALONG != 2) most[j] = other_max(most[j], 16);
      if (SUMS) sum[j] = add(sum[j], from_bits(__shfl_xor_sync(0xffffffffu, bits(sum[j]), 16)));
    }
    if (ALONG == 2) {
FP4_UNROLL
      for (int j = 1; j < EIGHT; ++j) most[0] = max_nan(most[0], most[j]);
      const u32 m = warp_max(bits(most[0]));
      if (lane == 0) col_inverse[warp] = from_bits(m);
    } else if (lane < 16) {
FP4_UNROLL
      for (int j = 0; j < EIGHT; ++j) {
        if (ACROSS) col_max[warp][c0 + j] = most[j];
        if (SUMS) col_sum[warp][c0 + j] = sum[j];
      }
    }
    __syncthreads();
    const u32 c = threadIdx.x % SIDE;
    const i64 at = col_tile * SIDE + c;
    if (ACROSS && threadIdx.x < SIDE) {
      float m = col_max[0][c], inverse;
FP4_UNROLL
      for (int w = 1; w < EIGHT; ++w) m = max_nan(m, col_max[w][c]);
      const float scale = scale_of(m, &inverse);
      col_inverse[c] = inverse;
      if (FULL || at < a.cols) a.across_scales[row_tile * a.cols + at] = scale;
    }
    if (SUMS && threadIdx.x >= SIDE && (FULL || at < a.cols)) {
      float total = col_sum[0][c];
FP4_UNROLL
      for (int w = 1; w < EIGHT; ++w) total = add(total, col_sum[w][c]);
      a.sums[row_tile * a.cols + at] = total;
    }
    if (ACROSS) __syncthreads();
  }
  float tile_inverse = 0.0f;
  if (ALONG == 2) {
    float m = col_inverse[0];
FP4_UNROLL
    for (int w = 1; w < EIGHT; ++w) m = max_nan(m, col_inverse[w]);
    const float scale = scale_of(m, &tile_inverse);
    if (threadIdx.x == 0) a.along_scales[row_tile * beside + col_tile] = scale;
  }

  const u64 seed = SR ? *a.seed : 0;
  const u32 stream = (u32)a.stream;
  Words random[SR && !SAVED ? EIGHT : 1] = {};  // an element has one number in both orientations
  if (SR && !SAVED)
FP4_UNROLL
    for (int i = 0; i < EIGHT; ++i)
      random[i] = philox(seed, (u64)((row + i) * a.padded + col) / EIGHT, stream);
  if (ALONG)
FP4_UNROLL
    for (int i = 0; i < EIGHT; ++i)
      if (FULL || row + i < a.rows)
        *reinterpret_cast<uint2*>(a.along + (row + i) * a.padded + col) =
            codes_of(v[i], ALONG == 2 ? tile_inverse : row_inverse[r0 + i], SR & 1,
                     random[SR && !SAVED ? i : 0]);
  if (!ACROSS) return;
  const u32 unit = r0 / EIGHT;
FP4_UNROLL
  for (int j = 0; j < EIGHT; ++j) {
    float y[EIGHT];
    Words bits_of_column = {};
FP4_UNROLL
    for (int i = 0; i < EIGHT; ++i) y[i] = v[i][j];
    if (SR & 2) {
      if (SAVED) {
        bits_of_column = philox(seed, (u64)((col + j) * a.padded_rows + row) / EIGHT, stream);
      } else {
FP4_UNROLL
        for (int i = 0; i < EIGHT; ++i)
          bits_of_column.w[i / 2] |= lane16(random[SR ? i : 0], j) << 16 * (i % 2);
      }
    }
    turned[c0 + j][unit ^ chunk] = codes_of(y, col_inverse[c0 + j], SR & 2, bits_of_column);
  }
  __syncthreads();
FP4_UNROLL
  for (int i = 0; i < EIGHT; ++i) {
    const u32 c = warp * 16 + i * 2 + lane / 16;
    const i64 at = col_tile * SIDE + c;
    if (FULL || at < a.cols)
      *reinterpret_cast<uint2*>(a.across + at * a.padded_rows + row_tile * SIDE + chunk * EIGHT) =
          turned[c][chunk ^ c / EIGHT];
  }
}
