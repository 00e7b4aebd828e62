// Scalar arithmetic that no step teaches.
#pragma once

#include <math.h>

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "bf16.h"

namespace kda::cpu {

// Keeps a value finite, since inf * 0 would make a NaN out of finite inputs: exp(A_log) is inf from A_log 88.73 on, and
// g + dt_bias may be 0. The gate stops getting steeper there, which shows only where 0 < |g + dt_bias| < 1e-36. A NaN
// passes through.
inline float saturate(float x) { return std::clamp(x, -FLT_MAX, FLT_MAX); }

// x / sqrt(|x|^2 + 1e-6) in two factors: x * reciprocal has length 1, and `length` is 1 but for short x, which the 1e-6
// shortens further. A product of both with something small may underflow where `length` alone could wait.
struct Norm {
  float reciprocal, length;
};

inline float sum_of_squares(const bf16* x /* [size] */, int64_t size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += static_cast<float>(x[d]) * static_cast<float>(x[d]);
  return sum;
}

// The norm of x, whose sum of squares in fp32 is `squares`. bf16 reaches from 1e-40 to 3e38, fp32 squares of it do not:
// short and very long x are summed again in fp64.
inline Norm norm(const bf16* x /* [size] */, int64_t size, float squares) {
  if (squares >= 1e-4f && squares <= FLT_MAX) return {1.0f / sqrtf(squares + 1e-6f), 1.0f};
  double sum = 0.0;
  for (int64_t d = 0; d < size; ++d) sum += static_cast<double>(x[d]) * static_cast<double>(x[d]);
  const float reciprocal = static_cast<float>(std::min<double>(1.0 / sqrt(sum), FLT_MAX));
  return {reciprocal, static_cast<float>(1.0 / sqrt(sum + 1e-6) / reciprocal)};
}

// 1 / sqrt(|x|^2 + 1e-6)
inline float reciprocal_norm(const bf16* x /* [size] */, int64_t size) {
  const Norm whole = norm(x, size, sum_of_squares(x, size));
  return whole.reciprocal * whole.length;
}

}  // namespace kda::cpu
