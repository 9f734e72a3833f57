// Activations of a chain in FP32 and their derivatives, every operation rounded where it stands, so
// that two kernels that evaluate one get the same value.
#pragma once
#include "device.cuh"

namespace fp4 {

constexpr float QUICK = 1.702f;  // z * sigmoid(1.702 z)

enum Act { IDENTITY, GELU, GELU_TANH, RELU, RELU2, SILU, QUICK_GELU };

FP4_D float tanh_fast(float x) {
#ifdef FP4_EMULATE
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// GELU's normal distribution as 0.5 (1 + tanh(u)): u of the tanh form, or a fit of the exact form,
// whose value times z is 2.5e-5 off at most (tanh.approx adds 1e-5). `slope` is u's derivative.
template <int A>
FP4_D float gelu_argument(float z, float* slope) {
  const float w = fminf(mul(z, z), A == GELU ? 16.0f : 64.0f);  // tanh is 1 there
  constexpr float c0 = A == GELU ? 0.79750547f : 0.79788456f;
  constexpr float c1 = A == GELU ? 0.03700787f : 0.79788456f * 0.044715f;
  constexpr float c2 = A == GELU ? -0.00035187756f : 0.0f;
  const float odd = A == GELU ? fused(w, c2, c1) : c1;
  *slope = fused(w, A == GELU ? fused(w, 5 * c2, 3 * c1) : 3 * c1, c0);
  return mul(z, fused(w, odd, c0));
}

FP4_D float sigmoid(float z) { return fused(tanh_fast(mul(z, 0.5f)), 0.5f, 0.5f); }

template <int A>
FP4_D float activate(float z) {
  if (A == GELU || A == GELU_TANH) {
    float slope;
    const float half = mul(z, 0.5f);
    return fused(half, tanh_fast(gelu_argument<A>(z, &slope)), half);
  }
  if (A == RELU) return z > 0 || z != z ? z : 0.0f;
  if (A == RELU2) return z > 0 || z != z ? mul(z, z) : 0.0f;
  if (A == SILU || A == QUICK_GELU) return mul(z, sigmoid(A == SILU ? z : mul(z, QUICK)));
  return z;
}

// g * act'(z)
template <int A>
FP4_D float activate_grad(float g, float z) {
  if (A == GELU || A == GELU_TANH) {
    float slope;
    const float t = tanh_fast(gelu_argument<A>(z, &slope)), half = mul(z, 0.5f);
    return mul(g, fused(mul(half, slope), fused(-t, t, 1.0f), fused(t, 0.5f, 0.5f)));
  }
  if (A == RELU) return z > 0 || z != z ? g : 0.0f;
  if (A == RELU2) return z > 0 || z != z ? mul(g, mul(2.0f, z)) : 0.0f;
  if (A == SILU || A == QUICK_GELU) {
    const float u = A == SILU ? z : mul(z, QUICK), s = sigmoid(u);
    return mul(mul(g, s), fused(u, sub(1.0f, s), 1.0f));
  }
  return g;
}

// z = (acc * row) * col + bias; a null factor is left out, a stride of 0 repeats it.
struct Term {
  const void* acc;
  const float *row, *col, *bias;
  i64 ld, row_stride, col_stride;
};

// Which parts a term has, known when the kernel is compiled: ROW, bits for COL, BIAS.
enum TermParts { HAS_ROW = 1, ONE_COL = 2, MANY_COLS = 4, HAS_BIAS = 8 };

template <int PARTS>
FP4_D float row_factor(const Term& t, i64 row) {
  return PARTS & HAS_ROW ? t.row[row * t.row_stride] : 1.0f;
}

// N values from column c on; `row` and `col` are the row's factor and that of all columns.
template <int PARTS, int N>
FP4_D void affine(const Term& t, float row, float col, i64 c, i64 cols, float* z) {
FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    if (PARTS & HAS_ROW) z[i] = mul(z[i], row);
    if (PARTS & ONE_COL) z[i] = mul(z[i], col);
  }
  if (!(PARTS & (MANY_COLS | HAS_BIAS))) return;
FP4_UNROLL
  for (int i = 0; i < N; ++i) {
    const i64 at = c + i < cols ? c + i : 0;
    if (PARTS & MANY_COLS) z[i] = mul(z[i], t.col[at]);
    if (PARTS & HAS_BIAS) z[i] = add(z[i], t.bias[at]);
  }
}

}  // namespace fp4
