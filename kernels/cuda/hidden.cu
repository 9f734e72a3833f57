// The gradient of a chain's hidden tensor: g * act'(z), or both terms of act(z) * up, written once,
// which may be over g itself; in the same pass the maxima of its rows and of its columns times
// `fold`, that MXFP8 with one scale a row needs.
//   XD, ZD dtypes of the accumulators of g and of z (and up) · ACT (Act) · GATED 0/1
//   GT, ZT, UT (TermParts) of g, z and up · AMAX 0/1 · FOLD bits: the first, the second has one
//   ALIGNED 1: a row's groups of eight columns are whole and on 16-byte boundaries
// Grid: tiles of 256 columns x 256 rows, 32 rows a warp.
#include "activations.cuh"
#include "warp_tile.cuh"

using namespace fp4;

struct Output {
  void* values;  // [rows, cols] in g's dtype
  u32 *row_amax, *col_amax;
  const float* fold;
};

struct Hidden {
  Term g, z, up;
  i64 rows, cols, wide;
  Output first, second;  // of z, of up
};

constexpr u32 COLS = 256, WARPS = 8, STRIP = 32, AHEAD = GATED || XD == F32 || ZD == F32 ? 2 : 4;
constexpr int OUTPUTS = 1 + GATED;

struct Raw {
  Raw8<XD> g;
  Raw8<ZD> z, up;
};

struct RowFactors {
  float g, z, up, fold[2];
};

// g may be written over by other warps' rows: no read-only loads.
template <int D>
FP4_D void load_row(const Term& t, u32 m, i64 n, i64 valid, bool wide, bool exists, Raw8<D>& raw) {
  if (!exists) return;
  constexpr u32 SIZE = D == F32 ? 4 : 2;
  const u8* p = static_cast<const u8*>(t.acc) + ((u64)m * (u64)t.ld + (u64)n) * SIZE;
#ifndef FP4_EMULATE
  if (ALIGNED) {
FP4_UNROLL
    for (u32 i = 0; i < SIZE / 2; ++i)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(raw.w[4 * i]), "=r"(raw.w[4 * i + 1]), "=r"(raw.w[4 * i + 2]),
                     "=r"(raw.w[4 * i + 3])
                   : "l"(p + 16 * i));
    return;
  }
#endif
  raw = load8<D>(p, 0, valid, wide);
}

FP4_D void load_all(const Hidden& a, u32 m, i64 n, i64 valid, Raw& raw) {
  const bool exists = m < (u32)a.rows && valid > 0;
  load_row<XD>(a.g, m, n, valid, a.wide, exists, raw.g);
  load_row<ZD>(a.z, m, n, valid, a.wide, exists, raw.z);
  if (GATED) load_row<ZD>(a.up, m, n, valid, a.wide, exists, raw.up);
}

// The gradients of eight columns, in FP32.
FP4_D void gradients8(const Hidden& a, const RowFactors& f, const float* common, i64 n, const Raw& raw,
                      float (*v)[8]) {
  float z[8], up[GATED ? 8 : 1];
  widen8<XD>(raw.g, v[0]);
  affine<GT, 8>(a.g, f.g, common[0], n, a.cols, v[0]);
  widen8<ZD>(raw.z, z);
  affine<ZT, 8>(a.z, f.z, common[1], n, a.cols, z);
  if (GATED) {
    widen8<ZD>(raw.up, up);
    affine<UT, 8>(a.up, f.up, common[2], n, a.cols, up);
  }
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float g = v[0][i];
    if (GATED) v[OUTPUTS - 1][i] = mul(g, activate<ACT>(z[i]));
    v[0][i] = activate_grad<ACT>(GATED ? mul(g, up[GATED ? i : 0]) : g, z[i]);
  }
}

// Eight values to memory; `v` becomes what was stored.
FP4_D void store8(void* values, u64 at, i64 valid, bool exists, float* v) {
  Raw8<XD> out;
  if (XD == F32) {
FP4_UNROLL
    for (int i = 0; i < 8; ++i) out.w[XD == F32 ? i : 0] = bits(v[i]);
  } else {
FP4_UNROLL
    for (int i = 0; i < 4; ++i) out.w[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
  }
  widen8<XD>(out, v);
  constexpr u32 SIZE = XD == F32 ? 4 : 2;
  u8* p = static_cast<u8*>(values) + at * SIZE;
  if (ALIGNED) {
FP4_UNROLL
    for (u32 i = 0; i < SIZE / 2; ++i) {
      const uint4 q = make_uint4(out.w[4 * i], out.w[4 * i + 1], out.w[4 * i + 2], out.w[4 * i + 3]);
      store_if(p + 16 * i, q, exists);
    }
    return;
  }
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (!exists || i >= valid) continue;
    if (XD == F32) reinterpret_cast<float*>(p)[i] = v[i];
    else reinterpret_cast<u16*>(p)[i] = (u16)(bits(v[i]) >> 16);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) hidden_gradient(Hidden a) {
  __shared__ RowFactors row_factors[WARPS][STRIP];
  __shared__ u32 part[WARPS][COLS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = (u32)a.rows;
  const i64 column = blockIdx.x * (i64)COLS + lane * 8;
  const i64 valid = a.cols - column < 0 ? 0 : a.cols - column, n = valid ? column : 0;
  const u32 first = blockIdx.y * (WARPS * STRIP) + warp * STRIP;
  const float common[3] = {GT & ONE_COL ? a.g.col[0] : 1.0f, ZT & ONE_COL ? a.z.col[0] : 1.0f,
                           UT & ONE_COL ? a.up.col[0] : 1.0f};
  const u32 mine = first + lane;
  if (mine < rows) {
    const float one = 1.0f;
    row_factors[warp][lane] = {row_factor<GT>(a.g, mine), row_factor<ZT>(a.z, mine),
                               row_factor<UT>(a.up, mine),
                               {FOLD & 1 ? a.first.fold[mine] : one, FOLD & 2 ? a.second.fold[mine] : one}};
  }
  __syncwarp();
  float columns[OUTPUTS][8] = {};
  u32 row_max[OUTPUTS] = {};
  Raw raw[AHEAD] = {};
FP4_UNROLL
  for (u32 r = 0; r < AHEAD; ++r) load_all(a, first + r, n, valid, raw[r]);
#pragma unroll 1
  for (u32 q = 0; q < STRIP && first + q < rows; q += AHEAD) {
FP4_UNROLL
    for (u32 r = 0; r < AHEAD; ++r) {
      const u32 m = first + q + r;
      const bool exists = m < rows && valid > 0;
      const RowFactors f = row_factors[warp][q + r];
      float v[OUTPUTS][8];
      gradients8(a, f, common, n, raw[r], v);
      if (q + AHEAD < STRIP) load_all(a, m + AHEAD, n, valid, raw[r]);
FP4_UNROLL
      for (int k = 0; k < OUTPUTS; ++k) {
        const Output& out = k ? a.second : a.first;
        store8(out.values, (u64)m * (u64)a.cols + (u64)n, valid, exists, v[k]);
        if (!AMAX) continue;
        float row = 0.0f;
FP4_UNROLL
        for (int i = 0; i < 8; ++i) {
          const float x = exists && (ALIGNED || i < valid) ? v[k][i] : 0.0f;
          row = max_magnitude(row, x);
          columns[k][i] = max_magnitude(columns[k][i], FOLD >> k & 1 && exists ? mul(x, f.fold[k]) : x);
        }
        const u32 of_row = warp_max(bits(row));
        row_max[k] = lane == q + r ? of_row : row_max[k];
      }
    }
  }
  if (!AMAX) return;
FP4_UNROLL
  for (int k = 0; k < OUTPUTS; ++k) {
    const Output& out = k ? a.second : a.first;
    if (mine < rows) atomicMax(out.row_amax + mine, row_max[k]);
FP4_UNROLL
    for (int i = 0; i < 8; ++i) part[warp][lane * 8 + i] = bits(columns[k][i]);
    __syncthreads();
    const i64 c = blockIdx.x * (i64)COLS + threadIdx.x;
    u32 m = 0;
FP4_UNROLL
    for (u32 w = 0; w < WARPS; ++w) m = max_u(m, part[w][threadIdx.x]);
    if (c < a.cols) atomicMax(out.col_amax + c, m);
    __syncthreads();
  }
}
