// A gradient in both orientations from one set of random bits: MXFP8 with one power of two a row or
// a block of 32, stochastic, of g, or of g * act'(z); the transposed copy of it times `fold`.
//   XD, ZD dtypes of g and of z's accumulator · ACT (Act) · SUMS 0/1
//   DMODE, WMODE 0 absent, 1 row scales (their maxima from gradient_amax), 2 blocks of 32
//   DFORM, WFORM (Form): E4M3_FORM the codes, BF16_FORM the values
// Grid: (column tiles, row chunks). A CTA walks the tiles of a chunk; column sums stay in registers
// and chunks depend on the shape alone, so sums have one order everywhere.
#include "activations.cuh"

using namespace fp4;

struct Gradient {
  Term g, z;
  const float* fold;
  i64 rows, cols, padded, padded_rows, chunk, wide, wide_z;
  u32 *row_amax, *col_amax;
  const u64* seed;
  i64 stream;
  void *d, *w;
  u8 *d_scales, *w_scales;
  float *d_factor, *w_factor, *sums;
};

// Eight values of dz, zero outside.
FP4_D void values8(const Gradient& a, i64 m, i64 n, float* v) {
  const i64 valid = m < a.rows ? a.cols - n : 0;
  widen8<XD>(load8<XD>(a.g.acc, m * a.g.ld + n, valid, a.wide), v);
#if ACT
  float z[8];
  widen8<ZD>(load8<ZD>(a.z.acc, m * a.z.ld + n, valid, a.wide_z), z);
  if (valid <= 0) return;
  affine8(a.g, m, n, a.cols, v);
  affine8(a.z, m, n, a.cols, z);
FP4_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = i < valid ? activate_grad<ACT>(v[i], z[i]) : 0.0f;
#endif
}

FP4_D float fold_of(const Gradient& a, i64 m) { return a.fold && m < a.rows ? a.fold[m] : 1.0f; }

extern "C" __global__ void __launch_bounds__(256, ACT ? 2 : 4) gradient_amax(Gradient a) {
  __shared__ u32 part[16][TILE_COLS];
  const u32 cq = threadIdx.x % 16, rq = threadIdx.x / 16;
  const i64 n = blockIdx.x * (i64)TILE_COLS + cq * 8;
  const i64 last = (blockIdx.y + 1) * a.chunk < a.rows ? (blockIdx.y + 1) * a.chunk : a.rows;
  u32 column[8] = {};
  for (i64 m0 = blockIdx.y * a.chunk; m0 < last; m0 += TILE_ROWS) {
    float v[4][8];
FP4_UNROLL
    for (int r = 0; r < 4; ++r) values8(a, m0 + rq * 4 + r, n, v[r]);
FP4_UNROLL
    for (int r = 0; r < 4; ++r) {
      const i64 m = m0 + rq * 4 + r;
      const float fold = fold_of(a, m);
      u32 row = 0;
FP4_UNROLL
      for (int i = 0; i < 8; ++i) {
        row = max_u(row, magnitude(v[r][i]));
        column[i] = max_u(column[i], magnitude(mul(v[r][i], fold)));
      }
FP4_UNROLL
      for (int lane = 1; lane < 16; lane *= 2)
        row = max_u(row, __shfl_xor_sync(0xffffffffu, row, lane));
      if (cq == 0 && m < a.rows && a.row_amax) atomicMax(a.row_amax + m, row);
    }
  }
FP4_UNROLL
  for (int i = 0; i < 8; ++i) part[rq][cq * 8 + i] = column[i];
  __syncthreads();
  const i64 c = blockIdx.x * (i64)TILE_COLS + threadIdx.x;
  if (threadIdx.x >= TILE_COLS || c >= a.cols || !a.col_amax) return;
  u32 m = 0;
  for (int r = 0; r < 16; ++r) m = max_u(m, part[r][threadIdx.x]);
  atomicMax(a.col_amax + c, m);
}

// Eight codes of a row in d's orientation, and their place in memory.
FP4_D void store_d(const Gradient& a, i64 m, i64 n, const float* v, const Words& random16) {
  u32 amax = 0;
  if (DMODE == 1) {
    amax = m < a.rows ? a.row_amax[m] : 0;
  } else {
FP4_UNROLL
    for (int i = 0; i < 8; ++i) amax = max_u(amax, magnitude(v[i]));
    amax = max_u(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = max_u(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  }
  const u32 byte = e8m0<E4M3>(amax);
  const float up = e8m0_inverse(byte);
  u32 word[2];
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    u32 c[4];
FP4_UNROLL
    for (int i = 0; i < 4; ++i)
      c[i] = stochastic_e4m3(v[4 * h + i], up, rounding_bits(random16, 4 * h + i));
    word[h] = byte == 255 ? 0u : top_bytes(c[0], c[1], c[2], c[3]) | sign_bytes(v + 4 * h);
  }
  if (m >= a.rows || n >= a.padded) return;
  const i64 at = m * a.padded + n;
  if (DFORM == E4M3_FORM) {
    *reinterpret_cast<uint2*>(static_cast<u8*>(a.d) + at) = make_uint2(word[0], word[1]);
  } else {
    float value[8];
    const float scale = DMODE == 1 ? 1.0f : e8m0_value(byte);
    decode4(word[0], scale, value);
    decode4(word[1], scale, value + 4);
    *reinterpret_cast<uint4*>(static_cast<u16*>(a.d) + at) = eight_bf16(value);
  }
  if (DMODE == 2 && a.d_scales && n % 32 == 0) a.d_scales[at / 32] = (u8)byte;
  if (DMODE == 1 && n == 0) a.d_factor[m] = e8m0_value(byte);
}

// Sixteen row-adjacent codes of a column, from the tile to memory.
FP4_D void store_w(const Gradient& a, i64 m0, i64 n0, const u32* tile, const u32 (*amax)[TILE_COLS]) {
FP4_UNROLL
  for (int item = 0; item < 2; ++item) {
    const u32 i = threadIdx.x + item * TILE_THREADS, column = tile_column(i), q = tile_quarter(i);
    const i64 n = n0 + column, m = m0 + q * 16;
    if (n >= a.cols || m >= a.padded_rows) continue;
    u32 word[4];
FP4_UNROLL
    for (int k = 0; k < 4; ++k) word[k] = tile_load(tile, column, q * 4 + k);
    const i64 at = n * a.padded_rows + m;
    if (WFORM == E4M3_FORM) {
      *reinterpret_cast<uint4*>(static_cast<u8*>(a.w) + at) =
          make_uint4(word[0], word[1], word[2], word[3]);
    } else {
      const float scale = WMODE == 1 ? 1.0f : e8m0_value(e8m0<E4M3>(amax[q / 2][column]));
FP4_UNROLL
      for (int h = 0; h < 2; ++h) {
        float value[8];
        decode4(word[2 * h], scale, value);
        decode4(word[2 * h + 1], scale, value + 4);
        reinterpret_cast<uint4*>(static_cast<u16*>(a.w) + at)[h] = eight_bf16(value);
      }
    }
    if (WMODE == 2 && a.w_scales && m % 32 == 0)
      a.w_scales[at / 32] = (u8)e8m0<E4M3>(amax[q / 2][column]);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) quantize_gradient(Gradient a) {
  __shared__ u32 tiles[2][WMODE ? TILE_COLS * 16 : 1];
  __shared__ u32 block_amax[2][2][TILE_COLS];
  __shared__ float part[SUMS ? 16 : 1][SUMS ? TILE_COLS : 1];
  const u32 cq = threadIdx.x % 16, rq = threadIdx.x / 16;
  const i64 n0 = blockIdx.x * (i64)TILE_COLS, n = n0 + cq * 8;
  const i64 end = WMODE ? a.padded_rows : a.rows, first = blockIdx.y * a.chunk;
  const i64 last = first + a.chunk < end ? first + a.chunk : end;
  const u64 seed = *a.seed;
  u32 byte[8], buffer = 0;
  float sum[8] = {};
  if (WMODE == 1)
FP4_UNROLL
    for (int j = 0; j < 8; ++j) {
      byte[j] = n + j < a.cols ? e8m0<E4M3>(a.col_amax[n + j]) : 0;
      if (blockIdx.y == 0 && rq == 0 && n + j < a.cols) a.w_factor[n + j] = e8m0_value(byte[j]);
    }
  if (WMODE == 2) {
    for (u32 i = threadIdx.x; i < 4 * TILE_COLS; i += TILE_THREADS) (&block_amax[0][0][0])[i] = 0;
    __syncthreads();
  }
  for (i64 m0 = first; m0 < last; m0 += TILE_ROWS, buffer ^= 1) {
    float v[4][8];
FP4_UNROLL
    for (int r = 0; r < 4; ++r) values8(a, m0 + rq * 4 + r, n, v[r]);
    if (WMODE == 2) {
      const u32 half = rq / 8;
FP4_UNROLL
      for (int j = 0; j < 8; ++j) {
        u32 m = 0;
FP4_UNROLL
        for (int r = 0; r < 4; ++r)
          m = max_u(m, magnitude(mul(v[r][j], fold_of(a, m0 + rq * 4 + r))));
        m = max_u(m, __shfl_xor_sync(0xffffffffu, m, 16));
        if (threadIdx.x % 32 < 16) atomicMax(&block_amax[buffer][half][cq * 8 + j], m);
      }
      __syncthreads();
FP4_UNROLL
      for (int j = 0; j < 8; ++j) byte[j] = e8m0<E4M3>(block_amax[buffer][half][cq * 8 + j]);
      // The other buffer was last read before this barrier.
      for (u32 i = threadIdx.x; i < 2 * TILE_COLS; i += TILE_THREADS)
        (&block_amax[buffer ^ 1][0][0])[i] = 0;
    }
    u32 packed[8] = {};
FP4_UNROLL
    for (int r = 0; r < 4; ++r) {
      const i64 m = m0 + rq * 4 + r;
      const Words random16 = philox(seed, (u64)((m * a.padded + n) / 8), (u32)a.stream);
      if (SUMS)
FP4_UNROLL
        for (int j = 0; j < 8; ++j) sum[j] = add(sum[j], v[r][j]);
      if (DMODE) store_d(a, m, n, v[r], random16);
      if (WMODE) {
        const float fold = fold_of(a, m);
        const u32 insert = r == 0 ? 0x3217u : r == 1 ? 0x3270u : r == 2 ? 0x3710u : 0x7210u;
FP4_UNROLL
        for (int j = 0; j < 8; ++j) {
          const float x = mul(v[r][j], fold);
          const u32 c = stochastic_e4m3(x, e8m0_inverse(byte[j]), rounding_bits(random16, j));
          packed[j] = select_bytes(packed[j], c | (bits(x) & 0x80000000u), insert);
        }
      }
    }
    if (WMODE) {
FP4_UNROLL
      for (int j = 0; j < 8; ++j)
        tile_store(tiles[buffer], cq, j, rq, byte[j] == 255 ? 0u : packed[j]);
      __syncthreads();
      store_w(a, m0, n0, tiles[buffer], block_amax[buffer]);
    }
  }
  if (SUMS) {
FP4_UNROLL
    for (int j = 0; j < 8; ++j) part[rq][cq * 8 + j] = sum[j];
    __syncthreads();
    const i64 c = n0 + threadIdx.x;
    if (threadIdx.x < TILE_COLS && c < a.cols) {
      float total = 0.0f;
      for (int r = 0; r < 16; ++r) total = add(total, part[r][threadIdx.x]);
      a.sums[blockIdx.y * a.cols + c] = total;
    }
  }
}

struct Sums {
  const float* part;
  i64 chunks, cols;
  float* out;
};

// Column sums of the chunks, in order.
extern "C" __global__ void __launch_bounds__(128) add_chunks(Sums a) {
  const i64 c = blockIdx.x * 128ll + threadIdx.x;
  if (c >= a.cols) return;
  float total = 0.0f;
  for (i64 k = 0; k < a.chunks; ++k) total = add(total, a.part[k * a.cols + c]);
  a.out[c] = total;
}
