// Row quantization from one read of the tensor: x, or an activation of it (rows.cu with ACT), to
// codes, scales, outer scale and the operand a GEMM reads.
//   XD dtype (Dtype) · MODE 0 plain, 1 four over six, 2 FP8-exact, 3 MXFP8 block 32, 4 MXFP8 row
//   OPERAND (Form) · ACT (Act) · GATED 0/1 · BLOCKS blocks of 16 a thread (1, 2; 0: any, read twice)
// Grid: any number of CTAs; each walks rows and reads the next one while it works. Threads: a
// multiple of 32, at most 512.
#include "activations.cuh"

using namespace fp4;

struct Rows {
  Term x, up;
  i64 rows, cols, padded, wide;
  const u32* amax;  // of the tensor, or null: of each row
  u8 *codes, *scales;
  float* outer;
  void* operand;
};

struct RawBlock {
  Raw8<XD> x[2];
#if GATED
  Raw8<XD> up[2];
#endif
};

FP4_D void fetch(const Rows& a, i64 row, i64 block, RawBlock& raw) {
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 c = block * 16 + h * 8, valid = row < a.rows ? a.cols - c : 0;
    raw.x[h] = load8<XD>(a.x.acc, row * a.x.ld + c, valid, a.wide);
#if GATED
    raw.up[h] = load8<XD>(a.up.acc, row * a.up.ld + c, valid, a.wide);
#endif
  }
}

// The sixteen FP32 values to be quantized.
FP4_D void evaluate(const Rows& a, i64 row, i64 block, const RawBlock& raw, float* v) {
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    widen8<XD>(raw.x[h], v + h * 8);
#if ACT || GATED
    const i64 c = block * 16 + h * 8;
    affine8(a.x, row, c, a.cols, v + h * 8);
#if GATED
    float up[8];
    widen8<XD>(raw.up[h], up);
    affine8(a.up, row, c, a.cols, up);
#endif
FP4_UNROLL
    for (int i = 0; i < 8; ++i) {
      float z = activate<ACT>(v[h * 8 + i]);
#if GATED
      z = mul(z, up[i]);
#endif
      v[h * 8 + i] = c + i < a.cols ? z : 0.0f;
    }
#endif
  }
}

FP4_D void store_nvfp4(const Rows& a, i64 row, i64 block, float* v, u32 amax, float s, float outer,
                       const u64* table) {
  Block16 b;
  if (amax >= INFINITE) {
    b.codes[0] = b.codes[1] = b.byte = 0;
    b.scale = 0.0f;
  } else if (MODE == 0) {
    plain_block(v, block_max(v), s, outer, b);
  } else if (MODE == 1) {
    four_over_six_block(v, block_max(v), s, outer, b);
  } else {
    exact_block(v, s, b);
  }
  const i64 at = row * a.padded + block * 16;
  *reinterpret_cast<uint2*>(a.codes + at / 2) = make_uint2(b.codes[0], b.codes[1]);
  a.scales[at / 16] = (u8)b.byte;
  if (OPERAND == E4M3_FORM) {
    const uint2 low = operand_e4m3(b.codes[0], table[b.byte]);
    const uint2 high = operand_e4m3(b.codes[1], table[b.byte]);
    *reinterpret_cast<uint4*>(static_cast<u8*>(a.operand) + at) =
        make_uint4(low.x, low.y, high.x, high.y);
  } else if (OPERAND == BF16_FORM) {
FP4_UNROLL
    for (int h = 0; h < 2; ++h) {
      float value[8];
      operand_f32(b.codes[h], b.byte ? b.scale : 0.0f, value);
      reinterpret_cast<uint4*>(static_cast<u16*>(a.operand) + at)[h] = eight_bf16(value);
    }
  }
}

FP4_D void store_mx(const Rows& a, i64 row, i64 block, const float* v, u32 amax) {
  const u32 byte = e8m0<E4M3>(amax);
  const float up = e8m0_inverse(byte), scale = MODE == 4 ? 1.0f : e8m0_value(byte);
  const i64 at = row * a.padded + block * 16;
  u32 words[4];
FP4_UNROLL
  for (int w = 0; w < 4; ++w) {
    float y[4];
FP4_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = mul(v[4 * w + i], up);
    words[w] = byte == 255 ? 0u : pack_e4m3(y);
  }
  *reinterpret_cast<uint4*>(a.codes + at) = make_uint4(words[0], words[1], words[2], words[3]);
  if (block % 2 == 0) a.scales[at / 32] = (u8)byte;
  if (OPERAND == BF16_FORM) {
FP4_UNROLL
    for (int h = 0; h < 2; ++h) {
      float value[8];
      decode4(words[2 * h], scale, value);
      decode4(words[2 * h + 1], scale, value + 4);
      reinterpret_cast<uint4*>(static_cast<u16*>(a.operand) + at)[h] = eight_bf16(value);
    }
  }
}

// All lanes of a warp come here: neighbours share an MX block.
FP4_D void store(const Rows& a, i64 row, i64 block, bool inside, float* v, u32 amax, float s,
                 float outer, const u64* table) {
  if (MODE < 3) {
    if (inside) store_nvfp4(a, row, block, v, amax, s, outer, table);
    return;
  }
  u32 group = amax;
  if (MODE == 3) {
    group = block_max_nan(v);
    group = max_u(group, __shfl_xor_sync(0xffffffffu, group, 1));
  }
  if (inside) store_mx(a, row, block, v, group);
}

// Registers a thread may have: 64 where a row is one block a thread and nothing is searched.
constexpr int MIN_CTAS = (MODE == 0 || MODE >= 3) && BLOCKS == 1 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(512, MIN_CTAS) quantize_rows(Rows a) {
  __shared__ u32 memory[64];
  __shared__ u64 table[OPERAND == E4M3_FORM && MODE < 3 ? 128 : 1];
  if (OPERAND == E4M3_FORM && MODE < 3) {
    fill_operand_table(table);
    __syncthreads();
  }
  const float bound = MODE == 0 ? BOUND_PLAIN : MODE == 1 ? BOUND_SEARCH : BOUND_EXACT;
  const i64 blocks = a.padded / 16;
  constexpr int N = BLOCKS ? BLOCKS : 1;
  u32 phase = 0;
  RawBlock raw[N];
  if (BLOCKS)
FP4_UNROLL
    for (int n = 0; n < N; ++n) fetch(a, blockIdx.x, threadIdx.x + n * (i64)blockDim.x, raw[n]);
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float v[N][16];
    u32 amax = 0;
    if (BLOCKS) {
FP4_UNROLL
      for (int n = 0; n < N; ++n) {
        const i64 block = threadIdx.x + n * (i64)blockDim.x;
        evaluate(a, row, block, raw[n], v[n]);
        amax = max_u(amax, block_max_nan(v[n]));
        fetch(a, row + gridDim.x, block, raw[n]);
      }
    } else if (!a.amax && MODE != 3) {
      for (i64 block = threadIdx.x; block < blocks; block += blockDim.x) {
        fetch(a, row, block, raw[0]);
        evaluate(a, row, block, raw[0], v[0]);
        amax = max_u(amax, block_max_nan(v[0]));
      }
    }
    if (MODE != 3) amax = a.amax ? *a.amax : cta_max(amax, memory, phase);
    const float s = MODE < 3 ? outer_inverse(amax, bound) : 0.0f;
    const float outer = MODE < 3 ? outer_scale(amax, s) : 0.0f;
    if (threadIdx.x == 0 && MODE != 3 && (!a.amax || row == 0))
      a.outer[a.amax ? 0 : row] = MODE == 4 ? e8m0_value(e8m0<E4M3>(amax)) : outer;
    if (BLOCKS) {
FP4_UNROLL
      for (int n = 0; n < N; ++n) {
        const i64 block = threadIdx.x + n * (i64)blockDim.x;
        store(a, row, block, block < blocks, v[n], amax, s, outer, table);
      }
    } else {
      const i64 rounds = (blocks + blockDim.x - 1) / blockDim.x;
      for (i64 n = 0; n < rounds; ++n) {
        const i64 block = threadIdx.x + n * blockDim.x;
        fetch(a, row, block, raw[0]);
        evaluate(a, row, block, raw[0], v[0]);
        store(a, row, block, block < blocks, v[0], amax, s, outer, table);
      }
    }
  }
}
