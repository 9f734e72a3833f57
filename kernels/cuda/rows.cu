// Row quantization from one read of the tensor: x, or an activation of terms (ACT, GATED), to
// codes, scales, outer scale and the operand a GEMM reads.
//   XD dtype (Dtype) · MODE 0 plain, 1 four over six, 2 FP8-exact, 3 MXFP8 block 32, 4 MXFP8 row,
//   5 FP8-exact with the search in FP16 · OPERAND (Form) · ACT (Act) · GATED 0/1
//   TERM, UP parts of the terms (TermParts) · BLOCKS blocks of 16 a thread (1, 2; 0: any, read
//   twice) · WIDE 1: rows are whole blocks on 16-byte boundaries
// Grid: any number of CTAs; each walks rows and reads the next one while it works. Threads: a
// multiple of 32, at most 512.
#include "activations.cuh"
#include "half_search.cuh"

using namespace fp4;

struct Rows {
  Term x, up;
  i64 rows, cols, padded;
  const u32* amax;  // of the tensor, or null: of each row
  u8 *codes, *scales;
  float* outer;
  void* operand;
};

constexpr bool SAME = !ACT && !GATED && !TERM;  // the tensor itself is quantized
constexpr bool NVFP4 = MODE < 3 || MODE == 5;

struct RawBlock {
  Raw8<XD> x[2];
#if GATED
  Raw8<XD> up[2];
#endif
};

FP4_D void fetch(const Rows& a, i64 row, i64 block, RawBlock& raw) {
  const bool inside = row < a.rows && block * 16 < a.padded;
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 c = block * 16 + h * 8, valid = !inside ? 0 : WIDE ? 8 : a.cols - c;
    raw.x[h] = load8<XD>(a.x.acc, row * a.x.ld + c, valid, WIDE);
#if GATED
    raw.up[h] = load8<XD>(a.up.acc, row * a.up.ld + c, valid, WIDE);
#endif
  }
}

// Factors of a term that do not depend on the column.
struct Factors {
  float x_col, up_col;
};

FP4_D Factors factors_of(const Rows& a) {
  Factors f;
  f.x_col = TERM & ONE_COL ? a.x.col[0] : 1.0f;
  f.up_col = GATED && (UP & ONE_COL) ? a.up.col[0] : 1.0f;
  return f;
}

// The sixteen FP32 values to be quantized.
FP4_D void evaluate(const Rows& a, const Factors& f, i64 row, i64 block, const RawBlock& raw,
                    float* v) {
  widen8<XD>(raw.x[0], v);
  widen8<XD>(raw.x[1], v + 8);
  if (SAME || row >= a.rows || block * 16 >= a.padded) return;
  const i64 c = block * 16;
  affine<TERM, 16>(a.x, row_factor<TERM>(a.x, row), f.x_col, c, a.cols, v);
#if GATED
  float up[16];
  widen8<XD>(raw.up[0], up);
  widen8<XD>(raw.up[1], up + 8);
  affine<UP, 16>(a.up, row_factor<UP>(a.up, row), f.up_col, c, a.cols, up);
#endif
FP4_UNROLL
  for (int i = 0; i < 16; ++i) {
    float z = activate<ACT>(v[i]);
#if GATED
    z = mul(z, up[i]);
#endif
    v[i] = WIDE || c + i < a.cols ? z : 0.0f;
  }
}

// Max |x| of a block as FP32 bits; NaN wins.
FP4_D u32 raw_max(const RawBlock& raw) {
  u32 m = 0;
#if defined(__CUDA_ARCH__)
  if (XD != F32) {
    u32 pair = 0;
FP4_UNROLL
    for (int i = 0; i < 8; ++i) {
      const u32 w = raw.x[i / 4].w[i % 4] & 0x7fff7fffu;
      if (XD == BF16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(w));
      else asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(w));
    }
    const u32 top = max_u(pair >> 16, pair & 0xffffu);
    return XD == BF16 ? top << 16 : bits(widen_f16((u16)top));
  }
#endif
  float v[16];
  widen8<XD>(raw.x[0], v);
  widen8<XD>(raw.x[1], v + 8);
FP4_UNROLL
  for (int i = 0; i < 16; ++i) m = max_u(m, magnitude(v[i]));
  return m;
}

// What the quantizers look up in shared memory.
struct Tables {
  u64 operand[OPERAND == E4M3_FORM && NVFP4 ? 128 : 1];
  HalfEntry half[MODE == 5 ? EXACT_COUNT : 1];
};

FP4_D void fill(Tables& t) {
  if (OPERAND == E4M3_FORM && NVFP4) fill_operand_table(t.operand);
  if (MODE == 5) fill_half_table(t.half);
  if ((OPERAND == E4M3_FORM && NVFP4) || MODE == 5) __syncthreads();
}

// `amax` of the row or tensor, `block_amax` of the block, as FP32 bits.
FP4_D void store_nvfp4(const Rows& a, i64 row, i64 block, float* v, u32 amax, u32 block_amax,
                       float s, float outer, const Tables& tables) {
  Block16 b;
  HalfBlock h;
  b.codes[0] = b.codes[1] = b.byte = 0;
  b.scale = 0.0f;
  h.signs[0] = h.signs[1] = h.signs[2] = h.signs[3] = 0;
  if (amax < INFINITE) {
    if (MODE == 0) plain_block(v, block_amax, s, outer, b);
    if (MODE == 1) four_over_six_block(v, block_amax, s, outer, b);
    if (MODE == 2) exact_block(v, s, b);
    if (MODE == 5) {
      half_block(v, block_amax, s, tables.half, h);
      b.codes[0] = h.codes[0], b.codes[1] = h.codes[1], b.byte = h.byte;
    }
  }
  const i64 at = row * a.padded + block * 16;
  *reinterpret_cast<uint2*>(a.codes + at / 2) = make_uint2(b.codes[0], b.codes[1]);
  a.scales[at / 16] = (u8)b.byte;
  if (OPERAND == E4M3_FORM) {
    const u64 entry = tables.operand[b.byte];
    uint2 low, high;
    if (MODE == 5) {
      low = signed_e4m3(b.codes[0], entry, h.signs);
      high = signed_e4m3(b.codes[1], entry, h.signs + 2);
    } else {
      low = operand_e4m3(b.codes[0], entry);
      high = operand_e4m3(b.codes[1], entry);
    }
    *reinterpret_cast<uint4*>(static_cast<u8*>(a.operand) + at) =
        make_uint4(low.x, low.y, high.x, high.y);
  } else if (OPERAND == BF16_FORM) {
    const float scale = MODE == 5 ? exact_scale(b.byte) : b.scale;
FP4_UNROLL
    for (int half = 0; half < 2; ++half) {
      float value[8];
      operand_f32(b.codes[half], b.byte ? scale : 0.0f, value);
      reinterpret_cast<uint4*>(static_cast<u16*>(a.operand) + at)[half] = eight_bf16(value);
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
FP4_D void store(const Rows& a, i64 row, i64 block, float* v, u32 amax, u32 block_amax, float s,
                 float outer, const Tables& tables) {
  const bool inside = block * 16 < a.padded;
  if (NVFP4) {
    if (inside) store_nvfp4(a, row, block, v, amax, block_amax, s, outer, tables);
    return;
  }
  u32 group = amax;
  if (MODE == 3) group = max_u(block_amax, __shfl_xor_sync(0xffffffffu, block_amax, 1));
  if (inside) store_mx(a, row, block, v, group);
}

// Registers a thread may have: 64 where a row is one block a thread and the search is not in FP32.
constexpr int MIN_CTAS = MODE != 1 && MODE != 2 && BLOCKS == 1 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(512, MIN_CTAS) quantize_rows(Rows a) {
  __shared__ u32 memory[64];
  __shared__ Tables tables;
  fill(tables);
  const float bound = MODE == 0 ? BOUND_PLAIN : MODE == 1 ? BOUND_SEARCH : BOUND_EXACT;
  constexpr int N = BLOCKS ? BLOCKS : 1;
  const Factors f = factors_of(a);
  u32 phase = 0;
  RawBlock next[N];
  if (BLOCKS)
FP4_UNROLL
    for (int n = 0; n < N; ++n) fetch(a, blockIdx.x, threadIdx.x + n * (i64)blockDim.x, next[n]);
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float v[N][16];
    RawBlock now[N];
    u32 amax = 0, block_amax[N];
    if (BLOCKS) {
FP4_UNROLL
      for (int n = 0; n < N; ++n) {
        const i64 block = threadIdx.x + n * (i64)blockDim.x;
        now[n] = next[n];
        if (SAME) {
          block_amax[n] = raw_max(now[n]);
        } else {
          evaluate(a, f, row, block, now[n], v[n]);
          block_amax[n] = block_max_nan(v[n]);
        }
        amax = max_u(amax, block_amax[n]);
        fetch(a, row + gridDim.x, block, next[n]);
      }
    } else if (!a.amax && MODE != 3) {
      for (i64 block = threadIdx.x; block * 16 < a.padded; block += blockDim.x) {
        fetch(a, row, block, next[0]);
        evaluate(a, f, row, block, next[0], v[0]);
        amax = max_u(amax, block_max_nan(v[0]));
      }
    }
    if (MODE != 3) amax = a.amax ? *a.amax : cta_max(amax, memory, phase);
    const float s = NVFP4 ? outer_inverse(amax, bound) : 0.0f;
    // The exact searches need no outer scale: one thread computes what is stored.
    const bool first = threadIdx.x == 0 && (!a.amax || row == 0);
    float outer = 0.0f;
    if (NVFP4 && (MODE < 2 || first)) outer = outer_scale(amax, s);
    if (first && MODE != 3)
      a.outer[a.amax ? 0 : row] = MODE == 4 ? e8m0_value(e8m0<E4M3>(amax)) : outer;
    if (BLOCKS) {
FP4_UNROLL
      for (int n = 0; n < N; ++n) {
        const i64 block = threadIdx.x + n * (i64)blockDim.x;
        if (SAME) evaluate(a, f, row, block, now[n], v[n]);
        store(a, row, block, v[n], amax, block_amax[n], s, outer, tables);
      }
    } else {
      const i64 rounds = (a.padded / 16 + blockDim.x - 1) / blockDim.x;
      for (i64 n = 0; n < rounds; ++n) {
        const i64 block = threadIdx.x + n * blockDim.x;
        fetch(a, row, block, next[0]);
        evaluate(a, f, row, block, next[0], v[0]);
        store(a, row, block, v[0], amax, block_max_nan(v[0]), s, outer, tables);
      }
    }
  }
}
