// Tensor-wide magnitudes, sums of column sums, weights in tiles of 16 x 16 that share a block scale.
//   XD dtype (Dtype) · OPERAND (Form), not E4M3_FORM
#include "device.cuh"

using namespace fp4;

struct Amax {
  const void* x;
  i64 rows, cols, ld, wide;
  u32* amax;  // zero before
};

// Bits of max |x|; the maximum of integers depends on no order.
extern "C" __global__ void __launch_bounds__(256, XD == F32 ? 4 : 8) tensor_amax(Amax a) {
  __shared__ u32 memory[64];
  u32 phase = 0, m = 0;
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x)
    for (i64 c = threadIdx.x * 8; c < a.cols; c += 4 * 8 * (i64)blockDim.x) {
      Raw8<XD> raw[4];
FP4_UNROLL
      for (int i = 0; i < 4; ++i) {
        const i64 at = c + i * 8 * (i64)blockDim.x;
        raw[i] = load8<XD>(a.x, row * a.ld + at, a.cols - at, a.wide);
      }
FP4_UNROLL
      for (int i = 0; i < 4; ++i) {
        float v[8];
        widen8<XD>(raw[i], v);
FP4_UNROLL
        for (int k = 0; k < 8; ++k) m = max_u(m, magnitude(v[k]));
      }
    }
  m = cta_max(m, memory, phase);
  if (threadIdx.x == 0) atomicMax(a.amax, m);
}

struct Tiles {
  const void* x;
  i64 rows, cols, padded, ld, wide;
  const u32* amax;
  u8 *codes, *scales;
  float* outer;
  void* operand;
};

// A CTA of 256 threads takes 16 rows (neighbouring lanes) of 16 blocks. Grid: (blocks, rows) / 16.
extern "C" __global__ void __launch_bounds__(256, 4) quantize_tiles(Tiles a) {
  const i64 row = blockIdx.y * 16 + threadIdx.x % 16, block = blockIdx.x * 16 + threadIdx.x / 16;
  const bool inside = row < a.rows && block < a.padded / 16;
  float v[16];
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 c = block * 16 + h * 8;
    widen8<XD>(load8<XD>(a.x, row * a.ld + c, inside ? a.cols - c : 0, a.wide), v + h * 8);
  }
  const u32 amax = *a.amax;
  const float s = outer_inverse(amax, BOUND_PLAIN), outer = outer_scale(amax, s);
  if (row == 0 && block == 0) a.outer[0] = outer;
  u32 m = block_max_nan(v);
FP4_UNROLL
  for (int lane = 1; lane < 16; lane *= 2) m = max_u(m, __shfl_xor_sync(0xffffffffu, m, lane));
#if OPERAND == 3
  pad_swizzled(static_cast<u8*>(a.operand), (u32)a.rows, (u32)a.padded / 16,
               (blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x, gridDim.x * gridDim.y * 256);
#endif
  if (!inside) return;
  Block16 b;
  if (amax >= INFINITE) b.codes[0] = b.codes[1] = b.byte = 0, b.scale = 0.0f;
  else plain_block(v, m, s, outer, b);
  const i64 at = row * a.padded + block * 16;
  *reinterpret_cast<uint2*>(a.codes + at / 2) = make_uint2(b.codes[0], b.codes[1]);
  a.scales[at / 16] = (u8)b.byte;
#if OPERAND == 3
  const u32 blocks = (u32)a.padded / 16;
  static_cast<u8*>(a.operand)[swizzled_at((u32)row, (u32)block, tiles_across(blocks))] = (u8)b.byte;
#endif
  if (OPERAND == BF16_FORM)
FP4_UNROLL
    for (int h = 0; h < 2; ++h) {
      float value[8];
      operand_f32(b.codes[h], b.byte ? b.scale : 0.0f, value);
      reinterpret_cast<uint4*>(static_cast<u16*>(a.operand) + at)[h] = eight_bf16(value);
    }
}

struct Sums {
  const float* part;
  i64 chunks, cols;
  float* out;
};

// Column sums of the chunks, in one order: four threads a column.
extern "C" __global__ void __launch_bounds__(128) add_chunks(Sums a) {
  __shared__ float part[4][32];
  const u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32;
  const i64 c = blockIdx.x * 32ll + lane;
  float total = 0.0f;
  if (c < a.cols)
#pragma unroll 8
    for (i64 k = slice; k < a.chunks; k += 4) total = add(total, a.part[k * a.cols + c]);
  part[slice][lane] = total;
  __syncthreads();
  if (slice == 0 && c < a.cols)
    a.out[c] = add(add(part[0][lane], part[1][lane]), add(part[2][lane], part[3][lane]));
}
