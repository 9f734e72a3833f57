// NVFP4 in 16 x 16 tiles, saved along rows, as the operand of its transpose for block-scaled tensor
// cores: the same codes along columns, and swizzled behind them the same scales.
// Grid: (64 columns, 128 rows) a CTA.
#include "warp_tile.cuh"

using namespace fp4;

struct Turned {
  const u8 *codes, *scales;  // [rows, padded / 2], [rows, padded / 16]
  i64 rows, cols, padded, padded_rows;
  u8* out;  // [cols, padded_rows / 2], scales
};

constexpr u32 ACROSS = 64, DOWN = 128;

extern "C" __global__ void __launch_bounds__(256) turn_tiles(Turned a) {
  __shared__ u32 tile[DOWN][ACROSS / 8 + 1];  // eight codes a word
  const u32 t = threadIdx.x, m0 = blockIdx.y * DOWN, n0 = blockIdx.x * ACROSS;
  const u32 rows = (u32)a.rows, end = (u32)a.padded_rows, blocks = end / 16;
FP4_UNROLL
  for (u32 k = 0; k < 2; ++k) {
    const u32 row = t / 2, word = t % 2 * 4 + k * 2;
    const u32 m = m0 + row, n = n0 + word * 8;
    uint2 q = make_uint2(0, 0);
    if (m < rows && n < (u32)a.padded)
      q = *reinterpret_cast<const uint2*>(a.codes + ((u64)m * (u64)a.padded + n) / 2);
    tile[row][word] = q.x, tile[row][word + 1] = q.y;
  }
  __syncthreads();
  const u32 c = t / 4, part = t % 4, n = n0 + c;
  u32 q[4] = {};
FP4_UNROLL
  for (u32 r = 0; r < 32; ++r)
    q[r / 8] |= (tile[part * 32 + r][c / 8] >> 4 * (c % 8) & 15u) << 4 * (r % 8);
  const u32 m = m0 + part * 32;
  u8* out = a.out + ((u64)n * end + m) / 2;
  store_if(out, make_uint2(q[0], q[1]), n < (u32)a.cols && m < end);
  store_if(out + 8, make_uint2(q[2], q[3]), n < (u32)a.cols && m + 16 < end);
  u8* swizzled = a.out + (u64)a.cols * end / 2;
FP4_UNROLL
  for (u32 k = 0; k < 2; ++k) {
    const u32 block = m0 / 16 + part * 2 + k;
    if (n < (u32)a.cols && block < blocks)
      swizzled[swizzled_at(n, block, tiles_across(blocks))] =
          a.scales[(u64)block * 16 * ((u64)a.padded / 16) + n / 16];
  }
  pad_swizzled(swizzled, (u32)a.cols, blocks,
               (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + t,
               gridDim.x * gridDim.y * blockDim.x);
}
