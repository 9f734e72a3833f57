// 4-bit formats along rows (fourbit.cuh): a matrix, an activation of terms or a gradient to codes,
// scales and the operand a GEMM reads.
//   XD dtype (Dtype) · MX, SR see fourbit.cuh · CODES 0/1 · OPERAND (Form): NONE, BF16_FORM the values,
//   SCALES_FORM the codes, and swizzled behind them the scales
//   ACT (Act) · GATED 0/1 · TERM, UP parts of the terms (TermParts)
//   WIDE 1: rows are whole blocks on 16-byte boundaries · BIG 1: 2^32 groups of random bits or more
// Grid: 2^shift threads of a CTA side by side, eight columns each, and as many CTAs as the columns need;
// any number over rows. Threads keep their columns and walk rows.
#include "activations.cuh"
#include "fourbit.cuh"

using namespace fp4;

struct Blocks {
  Term x, up;
  i64 rows, cols, padded, wide, shift;
  u32* amax;  // of the tensor; MXFP4 has none
  u8 *codes, *scales;
  float* outer;
  void* operand;
  const u64* seed;
  i64 stream;
};

constexpr bool TAIL = OPERAND == SCALES_FORM;
constexpr bool SAME = !ACT && !GATED && !TERM;  // the tensor itself is quantized
constexpr u32 THREADS = 256;
constexpr u32 AHEAD = (XD == F32 ? 2 : 4) / (1 + GATED);  // rows of a thread that are read ahead

struct Raw {
  Raw8<XD> x;
#if GATED
  Raw8<XD> up;
#endif
};

// A thread's columns, and what does not change with the row.
struct Place8 {
  i64 column;
  u32 row;
  bool inside;
  float x_col, up_col;
};

FP4_D Place8 place8(const Blocks& a) {
  Place8 p;
  const u32 shift = (u32)a.shift, across = 1u << shift;
  p.column = (((i64)blockIdx.x << shift) + (threadIdx.x & (across - 1))) * 8;
  p.row = blockIdx.y * (THREADS >> shift) + (threadIdx.x >> shift);
  p.inside = p.column < a.padded;
  p.x_col = TERM & ONE_COL ? a.x.col[0] : 1.0f;
  p.up_col = GATED && (UP & ONE_COL) ? a.up.col[0] : 1.0f;
  return p;
}

FP4_D void fetch(const Blocks& a, const Place8& p, i64 row, Raw& raw) {
  const bool inside = p.inside && row < a.rows;
  const i64 valid = !inside ? 0 : WIDE ? 8 : a.cols - p.column;
  raw.x = load8<XD>(a.x.acc, row * a.x.ld + p.column, valid, WIDE || a.wide);
#if GATED
  raw.up = load8<XD>(a.up.acc, row * a.up.ld + p.column, valid, WIDE || a.wide);
#endif
}

// The eight FP32 values to be quantized.
FP4_D void evaluate(const Blocks& a, const Place8& p, i64 row, const Raw& raw, float* v) {
  widen8<XD>(raw.x, v);
  if (SAME) return;
  const i64 r = row < a.rows ? row : 0, c = p.inside ? p.column : 0;
  affine<TERM, 8>(a.x, row_factor<TERM>(a.x, r), p.x_col, c, a.cols, v);
#if GATED
  float up[8];
  widen8<XD>(raw.up, up);
  affine<UP, 8>(a.up, row_factor<UP>(a.up, r), p.up_col, c, a.cols, up);
#endif
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    float z = activate<ACT>(v[i]);
#if GATED
    z = mul(z, up[i]);
#endif
    v[i] = p.inside && (WIDE || p.column + i < a.cols) ? z : 0.0f;
  }
}

// The largest magnitude of eight values, as FP32 bits; NaN wins.
FP4_D u32 largest8(const Raw& raw, const float* v) {
  if (SAME && XD == BF16) {
    const u32* w = raw.x.w;
    const u32 m =
        max_magnitudes(max_magnitudes(max_magnitudes(w[0] & 0x7fff7fffu, w[1]), w[2]), w[3]);
    return max_u(m & 0xffff0000u, m << 16);
  }
  float m = 0.0f;
FP4_UNROLL
  for (int i = 0; i < 8; ++i) m = max_magnitude(m, v[i]);
  return bits(m);
}

// `work(row, raw, v)` for every row of the thread; all lanes of a warp come to each.
template <class Work>
FP4_D void walk(const Blocks& a, const Place8& p, const Work& work) {
  const i64 down = THREADS >> a.shift, step = gridDim.y * down;
  Raw raw[AHEAD];
FP4_UNROLL
  for (u32 k = 0; k < AHEAD; ++k) fetch(a, p, p.row + k * step, raw[k]);
  for (i64 first = blockIdx.y * down, row = p.row; first < a.rows;
       first += AHEAD * step, row += AHEAD * step)
FP4_UNROLL
    for (u32 k = 0; k < AHEAD; ++k) {
      const i64 here = row + k * step;
      float v[8];
      evaluate(a, p, here, raw[k], v);
      const u32 amax = largest8(raw[k], v);
      fetch(a, p, here + AHEAD * step, raw[k]);
      work(here, amax, v);
    }
}

extern "C" __global__ void __launch_bounds__(256, GATED ? 3 : 4) term_amax(Blocks a) {
  __shared__ u32 memory[64];
  u32 phase = 0, m = 0;
  const Place8 p = place8(a);
  walk(a, p, [&](i64 row, u32 amax, const float*) { m = max_u(m, row < a.rows ? amax : 0u); });
  m = cta_max(m, memory, phase);
  if (threadIdx.x == 0) atomicMax(a.amax, m);
}

extern "C" __global__ void __launch_bounds__(256, GATED ? 3 : 4) quantize_blocks(Blocks a) {
  __shared__ uint2 table[SCALES];
  const Whole t = whole_of(MX ? 0u : *a.amax, table);
  const Place8 p = place8(a);
  if (!MX && blockIdx.x + blockIdx.y + threadIdx.x == 0) *a.outer = t.outer;
  u8* const tail = static_cast<u8*>(a.operand) + (u64)a.rows * (u64)a.padded / 2;
  const u32 across = tiles_across((u32)a.padded / LENGTH);
  if (TAIL)
    pad_swizzled(tail, (u32)a.rows, (u32)a.padded / LENGTH,
                 (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x,
                 gridDim.x * gridDim.y * blockDim.x);
#if SR && !BIG
  const Cipher key = cipher(*a.seed, (u32)a.stream);
#endif
  walk(a, p, [&](i64 row, u32 amax, const float* v) {
    amax = max_u(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
    if (MX) amax = max_u(amax, __shfl_xor_sync(ALL_LANES, amax, 2));
    const Block b = block_of(t, table, amax);
    const bool stored = p.inside && row < a.rows;
    const u64 at = (u64)row * (u64)a.padded + (u64)p.column;
#if SR
    Words words;
#if BIG
    words = philox(*a.seed, at / 8, (u32)a.stream);
#else
    const u32 group = (u32)(at / 8);
    philox<1>(key, &group, &words);
#endif
    const auto rounding = [&](int i) { return rounding_bits(words, (u32)i); };
    const u32 codes = TAIL ? stochastic_codes(v, b, rounding) : 0u;
    const uint4 value = TAIL ? make_uint4(0, 0, 0, 0) : stochastic_values(v, b, rounding);
#else
    float q[8];
    nearest8(v, b, q);
    if (CODES && stored) *reinterpret_cast<u32*>(a.codes + at / 2) = codes8(q, v, b);
    const u32 codes = TAIL ? codes8(q, v, b) : 0u;
    const uint4 value = TAIL ? make_uint4(0, 0, 0, 0) : nearest_values(q, v, b);
#endif
    if (CODES && stored && p.column % LENGTH == 0) a.scales[at / LENGTH] = (u8)b.byte;
    if (OPERAND == BF16_FORM)
      store_if(static_cast<u16*>(a.operand) + at, value, stored);
    if (TAIL && stored) {
      *reinterpret_cast<u32*>(static_cast<u8*>(a.operand) + at / 2) = codes;
      if (p.column % LENGTH == 0)
        tail[swizzled_at((u32)row, (u32)p.column / LENGTH, across)] = (u8)b.byte;
    }
  });
}
