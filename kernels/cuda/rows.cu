// Row quantization from one read of the tensor: x, or an activation of terms (ACT, GATED), to
// codes, scales, outer scale and the operand a GEMM reads.
//   XD dtype (Dtype) · MODE 0 plain, 1 four over six, 2 FP8-exact, 3 MXFP8 block 32, 4 MXFP8 row,
//   5 FP8-exact with the search in FP16 · OPERAND (Form) · ACT (Act) · GATED 0/1
//   TERM, UP parts of the terms (TermParts) · BLOCKS blocks of 16 a thread (0: any, read twice)
//   WIDE 1: rows are whole blocks on 16-byte boundaries · STAGES rows in shared memory (WIDE only)
//   CTAS of 512 threads that a multiprocessor's registers are divided for · THREADS of a CTA, if
//   they are known (0: not) · FULL 1: a row is exactly THREADS x BLOCKS blocks
// Grid: any number of CTAs; each walks rows, and copies the next ones while it works on one. A
// warp copies, reads and writes the same blocks, so only the row's maximum needs a barrier.
#include "activations.cuh"
#include "nearest.cuh"

using namespace fp4;

struct Rows {
  Term x, up;
  i64 rows, cols, padded;
  const u32* amax;  // of the tensor, or null: of each row
  u8 *codes, *scales;
  float* outer;
  void* operand;  // SCALES_FORM: the scales swizzled
};

constexpr bool SAME = !ACT && !GATED && !TERM;  // the tensor itself is quantized
constexpr bool NVFP4 = MODE < 3 || MODE == 5;

FP4_D u32 threads() { return THREADS ? THREADS : blockDim.x; }

// The first element of a thread's block n, and whether the row has it.
FP4_D i64 column_of(u32 n) { return (threadIdx.x + n * threads()) * 16; }
FP4_D bool has(const Rows& a, i64 column) { return FULL || column < a.padded; }

struct RawBlock {
  Raw8<XD> x[2];
#if GATED
  Raw8<XD> up[2];
#endif
};

FP4_D void fetch(const Rows& a, i64 row, i64 column, RawBlock& raw) {
  const bool inside = row < a.rows && has(a, column);
FP4_UNROLL
  for (int h = 0; h < 2; ++h) {
    const i64 c = column + h * 8, valid = !inside ? 0 : WIDE ? 8 : a.cols - c;
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
FP4_D void evaluate(const Rows& a, const Factors& f, i64 row, i64 c, const RawBlock& raw,
                    float* v) {
  widen8<XD>(raw.x[0], v);
  widen8<XD>(raw.x[1], v + 8);
  if (SAME || !has(a, c)) return;
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

// Where a thread's first block of a row is written.
struct Out {
  u8 *codes, *scales, *operand;
#if OPERAND == 3
  u32 block;  // its number; `operand` is where the row's swizzled scales start
#endif
};

// SCALES_FORM: the byte as tensor cores read it.
FP4_D void store_swizzled(const Out& o, u32 byte) {
#if OPERAND == 3
  o.operand[o.block / 4 * 512 + o.block % 4] = (u8)byte;
#endif
}

FP4_D Out out_of(const Rows& a, i64 row, i64 column) {
  constexpr int bits = NVFP4 ? 4 : 8, group = NVFP4 ? 16 : 32, size = OPERAND == BF16_FORM ? 2 : 1;
  const i64 at = row * a.padded + column;
  Out o;
  o.codes = a.codes + at * bits / 8;
  o.scales = a.scales + at / group;
  o.operand = static_cast<u8*>(a.operand) + at * size;
#if OPERAND == 3
  o.block = (u32)column / group;
  o.operand = static_cast<u8*>(a.operand) +
              swizzled_at((u32)row, 0, tiles_across((u32)a.padded / group));
#endif
  return o;
}

// `amax` of the row or tensor, `block_amax` of the block, as FP32 bits.
FP4_D void store_nvfp4(const Out& o, float* v, u32 amax, u32 block_amax, float s, float outer,
                       const Tables& tables) {
  Block16 b;
  HalfBlock h;
  b.codes[0] = b.codes[1] = b.byte = 0;
  b.scale = 0.0f;
  h.signs[0] = h.signs[1] = h.signs[2] = h.signs[3] = 0;
  if (amax < INFINITE) {
    if (MODE == 0) nearest_block(v, block_amax, s, outer, b);
    if (MODE == 1) nearest_of_two_block(v, block_amax, s, outer, b);
    if (MODE == 2) exact_block(v, s, b);
    if (MODE == 5 && block_amax) {
      half_block(v, block_amax, s, tables.half, h);
      b.codes[0] = h.codes[0], b.codes[1] = h.codes[1], b.byte = h.byte;
    }
  }
  *reinterpret_cast<uint2*>(o.codes) = make_uint2(b.codes[0], b.codes[1]);
  *o.scales = (u8)b.byte;
  store_swizzled(o, b.byte);
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
    *reinterpret_cast<uint4*>(o.operand) = make_uint4(low.x, low.y, high.x, high.y);
  } else if (OPERAND == BF16_FORM) {
FP4_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (MODE == 5) {
        float value[8];
        operand_f32(b.codes[half], b.byte ? exact_scale(b.byte) : 0.0f, value);
        words = eight_bf16(value);
      } else if (b.byte) {
        words = signed_bf16(b.q + 8 * half, b.scale, v + 8 * half);
      }
      reinterpret_cast<uint4*>(o.operand)[half] = words;
    }
  }
}

FP4_D void store_mx(const Out& o, bool first, const float* v, u32 amax) {
  const u32 byte = e8m0_byte(amax);
  const float up = e8m0_inverse(byte), scale = MODE == 4 ? 1.0f : e8m0_value(byte);
  u32 words[4];
FP4_UNROLL
  for (int w = 0; w < 4; ++w) {
    float y[4];
FP4_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = mul(v[4 * w + i], up);
    words[w] = byte == 255 ? 0u : e4m3_codes4(y);
  }
  *reinterpret_cast<uint4*>(o.codes) = make_uint4(words[0], words[1], words[2], words[3]);
  if (first) {
    *o.scales = (u8)byte;
    store_swizzled(o, byte);
  }
  if (OPERAND == BF16_FORM) {
FP4_UNROLL
    for (int h = 0; h < 2; ++h) {
      float value[8];
      decode4(words[2 * h], scale, value);
      decode4(words[2 * h + 1], scale, value + 4);
      reinterpret_cast<uint4*>(o.operand)[h] = eight_bf16(value);
    }
  }
}

// All lanes of a warp come here: neighbours share an MX block.
FP4_D void store(const Out& o, bool inside, bool first, float* v, u32 amax, u32 block_amax,
                 float s, float outer, const Tables& tables) {
  if (NVFP4) {
    if (inside) store_nvfp4(o, v, amax, block_amax, s, outer, tables);
    return;
  }
  u32 group = amax;
  if (MODE == 3) group = max_u(block_amax, __shfl_xor_sync(0xffffffffu, block_amax, 1));
  if (inside) store_mx(o, first, v, group);
}

// The place of block n from the place of block 0: a constant where the threads are known.
FP4_D Out moved(const Out& o, u32 n) {
  constexpr int bits = NVFP4 ? 4 : 8, group = NVFP4 ? 16 : 32, size = OPERAND == BF16_FORM ? 2 : 1;
  const u32 by = n * threads() * 16;
  Out m;
  m.codes = o.codes + by * bits / 8;
  m.scales = o.scales + by / group;
  m.operand = o.operand + by * size;
#if OPERAND == 3
  m.operand = o.operand, m.block = o.block + by / group;
#endif
  return m;
}

// ---- rows in flight -----------------------------------------------------------------------------

constexpr int N = BLOCKS ? BLOCKS : 1;
constexpr bool STAGED = WIDE && BLOCKS;

#ifdef FP4_EMULATE
static uint4 staged_rows[1 << 16];
#else
extern __shared__ uint4 staged_rows[];
#endif

FP4_D void copy16(uint4* to, const void* from, bool inside) {
#ifdef FP4_EMULATE
  *to = inside ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#else
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
               "r"(inside ? 16 : 0));
#endif
}

FP4_D void copies_issued() {
#ifndef FP4_EMULATE
  asm volatile("cp.async.commit_group;");
#endif
}

// All but the latest `AHEAD` rows have arrived.
template <int AHEAD>
FP4_D void wait_for_copies() {
#ifndef FP4_EMULATE
  asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
#endif
}

constexpr int PIECES = XD == F32 ? 4 : 2;  // of 16 bytes, in a block of one tensor

// Piece `p` of a warp's 32 blocks; permuted, so that a thread's own pieces meet no bank conflict.
FP4_D uint4* staged(u32 slot, u32 n, u32 tensor, u32 p) {
  const u32 warp = threadIdx.x / 32, warps = threads() / 32;
  const u32 first = ((slot * N + n) * (1 + GATED) + tensor) * warps + warp;
  return staged_rows + first * 32 * PIECES + (p ^ (p >> 3 & (PIECES - 1)));
}

// Start to copy a warp's blocks of a row, in whole lines.
FP4_D void stage(const Rows& a, i64 row, u32 slot) {
  const u32 lane = threadIdx.x % 32;
  __syncwarp();  // every lane has read what the slot held
FP4_UNROLL
  for (int n = 0; n < N; ++n) {
    const i64 first = (threadIdx.x - lane + n * threads()) * 16;
FP4_UNROLL
    for (int tensor = 0; tensor <= GATED; ++tensor) {
      const Term& t = tensor ? a.up : a.x;
FP4_UNROLL
      for (int c = 0; c < PIECES; ++c) {
        const u32 p = c * 32 + lane;
        const i64 column = first + p * (16 / PIECES);
        const bool inside = row < a.rows && has(a, column);
        const i64 at = inside ? (row * t.ld + column) * (XD == F32 ? 4 : 2) : 0;
        copy16(staged(slot, n, tensor, p), static_cast<const u8*>(t.acc) + at, inside);
      }
    }
  }
  copies_issued();
}

FP4_D void unstage(u32 slot, u32 n, RawBlock& raw) {
  const u32 lane = threadIdx.x % 32;
FP4_UNROLL
  for (int c = 0; c < PIECES; ++c) {
    u32* w = raw.x[c / (PIECES / 2)].w + c % (PIECES / 2) * 4;
    const uint4 q = *staged(slot, n, 0, lane * PIECES + c);
    w[0] = q.x, w[1] = q.y, w[2] = q.z, w[3] = q.w;
#if GATED
    u32* up = raw.up[c / (PIECES / 2)].w + c % (PIECES / 2) * 4;
    const uint4 r = *staged(slot, n, 1, lane * PIECES + c);
    up[0] = r.x, up[1] = r.y, up[2] = r.z, up[3] = r.w;
#endif
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

struct RowScale {
  u32 amax;
  float s, outer;
};

// S, what is stored of it, and the maximum that the blocks are scaled with.
FP4_D RowScale row_scale(const Rows& a, i64 row, u32 amax, u32* memory, u32& phase) {
  const float bound = MODE == 0 ? BOUND_PLAIN : MODE == 1 ? BOUND_SEARCH : BOUND_EXACT;
  RowScale r;
  r.amax = MODE == 3 ? 0 : a.amax ? *a.amax : cta_max(amax, memory, phase);
  r.s = NVFP4 ? outer_inverse(r.amax, bound) : 0.0f;
  // The exact searches need no outer scale: one thread computes what is stored.
  const bool first = threadIdx.x == 0 && (!a.amax || row == 0);
  r.outer = NVFP4 && (MODE < 2 || first) ? outer_scale(r.amax, r.s) : 0.0f;
  if (first && MODE != 3)
    a.outer[a.amax ? 0 : row] = MODE == 4 ? e8m0_value(e8m0_byte(r.amax)) : r.outer;
  return r;
}

// A row whose tensor is quantized as it is: read from shared memory again after the barrier.
FP4_D void same_row(const Rows& a, const Factors& f, i64 row, u32 slot, u32* memory, u32& phase,
                    const Tables& tables) {
  u32 amax = 0, block_amax[N];
FP4_UNROLL
  for (int n = 0; n < N; ++n) {
    RawBlock raw;
    unstage(slot, n, raw);
    block_amax[n] = raw_max(raw);
    amax = max_u(amax, block_amax[n]);
  }
  const RowScale r = row_scale(a, row, amax, memory, phase);
  const Out out = out_of(a, row, column_of(0));
FP4_UNROLL
  for (int n = 0; n < N; ++n) {
    RawBlock raw;
    float v[16];
    unstage(slot, n, raw);
    evaluate(a, f, row, column_of(n), raw, v);
    store(moved(out, n), has(a, column_of(n)), threadIdx.x % 2 == 0, v, r.amax, block_amax[n], r.s,
          r.outer, tables);
  }
}

// A row of an activation: its values stay in registers across the barrier.
FP4_D void computed_row(const Rows& a, const Factors& f, i64 row, u32 slot, u32* memory,
                        u32& phase, const Tables& tables) {
  float v[N][16];
  u32 amax = 0, block_amax[N];
FP4_UNROLL
  for (int n = 0; n < N; ++n) {
    RawBlock raw;
    if (STAGED) unstage(slot, n, raw);
    else fetch(a, row, column_of(n), raw);
    evaluate(a, f, row, column_of(n), raw, v[n]);
    block_amax[n] = block_max_nan(v[n]);
    amax = max_u(amax, block_amax[n]);
  }
  const RowScale r = row_scale(a, row, amax, memory, phase);
  const Out out = out_of(a, row, column_of(0));
FP4_UNROLL
  for (int n = 0; n < N; ++n)
    store(moved(out, n), has(a, column_of(n)), threadIdx.x % 2 == 0, v[n], r.amax, block_amax[n],
          r.s, r.outer, tables);
}

// A row of any length, read twice.
FP4_D void long_row(const Rows& a, const Factors& f, i64 row, u32* memory, u32& phase,
                    const Tables& tables) {
  RawBlock raw;
  float v[16];
  u32 amax = 0;
  const u32 rounds = (u32)((a.padded / 16 + threads() - 1) / threads());
  for (u32 n = 0; n < rounds && !a.amax && MODE != 3; ++n) {
    fetch(a, row, column_of(n), raw);
    evaluate(a, f, row, column_of(n), raw, v);
    if (has(a, column_of(n))) amax = max_u(amax, block_max_nan(v));
  }
  const RowScale r = row_scale(a, row, amax, memory, phase);
  for (u32 n = 0; n < rounds; ++n) {
    fetch(a, row, column_of(n), raw);
    evaluate(a, f, row, column_of(n), raw, v);
    store(out_of(a, row, column_of(n)), has(a, column_of(n)), threadIdx.x % 2 == 0, v, r.amax,
          block_max_nan(v), r.s, r.outer, tables);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS > 512 ? THREADS : 512, CTAS)
    quantize_rows(Rows a) {
  __shared__ u32 memory[64];
  __shared__ Tables tables;
  fill(tables);
#if OPERAND == 3
  pad_swizzled(static_cast<u8*>(a.operand), (u32)a.rows, (u32)a.padded / (NVFP4 ? 16 : 32),
               blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
#endif
  const Factors f = factors_of(a);
  u32 phase = 0, slot = 0;
  if (STAGED)
FP4_UNROLL
    for (int i = 0; i < STAGES - 1; ++i) stage(a, blockIdx.x + i * (i64)gridDim.x, i);
  for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (STAGED) {
      const u32 free = slot ? slot - 1 : STAGES - 1;  // the slot of the row before
      stage(a, row + (STAGES - 1) * (i64)gridDim.x, free);
      wait_for_copies<STAGES - 1>();
      __syncwarp();
    }
    if (!BLOCKS) long_row(a, f, row, memory, phase, tables);
    else if (STAGED && SAME) same_row(a, f, row, slot, memory, phase, tables);
    else computed_row(a, f, row, slot, memory, phase, tables);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
}
