// Activations of a chain in FP32 and their derivatives, every operation rounded where it stands, so
// that two kernels that evaluate one get the same value.
#pragma once
#include "device.cuh"

namespace fp4 {

enum Act { IDENTITY, GELU, GELU_TANH, RELU, RELU2, SILU };

FP4_D float tanh_fast(float x) {
#ifdef FP4_EMULATE
  return tanhf(x);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

FP4_D float sigmoid(float x) { return div(1.0f, add(1.0f, expf(-x))); }

constexpr float SQRT_HALF = 0.70710678118654752f, SQRT_2_PI = 0.79788456080286536f;
constexpr float CUBIC = 0.044715f, INV_SQRT_2PI = 0.39894228040143268f;

template <int A>
FP4_D float activate(float z) {
  if (A == GELU) return mul(mul(z, 0.5f), add(1.0f, erff(mul(z, SQRT_HALF))));
  if (A == GELU_TANH) {
    const float u = mul(SQRT_2_PI, add(z, mul(CUBIC, mul(z, mul(z, z)))));
    return mul(mul(z, 0.5f), add(1.0f, tanh_fast(u)));
  }
  if (A == RELU) return z > 0 || z != z ? z : 0.0f;
  if (A == RELU2) return z > 0 || z != z ? mul(z, z) : 0.0f;
  if (A == SILU) return div(z, add(1.0f, expf(-z)));
  return z;
}

// g * act'(z)
template <int A>
FP4_D float activate_grad(float g, float z) {
  if (A == GELU) {
    const float cdf = mul(0.5f, add(1.0f, erff(mul(z, SQRT_HALF))));
    const float pdf = mul(expf(mul(mul(z, z), -0.5f)), INV_SQRT_2PI);
    return mul(g, add(cdf, mul(z, pdf)));
  }
  if (A == GELU_TANH) {
    const float z2 = mul(z, z), u = mul(SQRT_2_PI, add(z, mul(CUBIC, mul(z, z2))));
    const float t = tanh_fast(u), slope = mul(SQRT_2_PI, add(1.0f, mul(3 * CUBIC, z2)));
    const float left = mul(0.5f, add(1.0f, t));
    return mul(g, add(left, mul(mul(mul(0.5f, z), sub(1.0f, mul(t, t))), slope)));
  }
  if (A == RELU) return z > 0 || z != z ? g : 0.0f;
  if (A == RELU2) return z > 0 || z != z ? mul(g, mul(2.0f, z)) : 0.0f;
  if (A == SILU) {
    const float s = sigmoid(z);
    return mul(mul(g, s), add(1.0f, mul(z, sub(1.0f, s))));
  }
  return g;
}

// z = (acc * row) * col + bias; a null factor is left out, a stride of 0 repeats it.
struct Term {
  const void* acc;
  const float *row, *col, *bias;
  i64 ld, row_stride, col_stride;
};

FP4_D void affine8(const Term& t, i64 r, i64 c, i64 cols, float* z) {
  const bool any = t.row || t.col || t.bias;
  if (!any) return;
  const float row = t.row ? t.row[r * t.row_stride] : 1.0f;
FP4_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (c + i >= cols) return;
    if (t.row) z[i] = mul(z[i], row);
    if (t.col) z[i] = mul(z[i], t.col[(c + i) * t.col_stride]);
    if (t.bias) z[i] = add(z[i], t.bias[c + i]);
  }
}

}  // namespace fp4
