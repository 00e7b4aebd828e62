// Scalar arithmetic that no step teaches.
#pragma once

#include <math.h>

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "bf16.h"

namespace kda::cpu {

// Keeps a value finite, since inf * 0 would make a NaN out of finite inputs: exp(A_log) is inf from A_log 88.73 on, and
// g + dt_bias may be 0. A NaN passes through.
inline float saturate(float x) { return std::clamp(x, -FLT_MAX, FLT_MAX); }

// 1 / sqrt(|x|^2 + 1e-6)
inline float reciprocal_norm(const bf16* x /* [size] */, int64_t size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += static_cast<float>(x[d]) * static_cast<float>(x[d]);
  return 1.0f / sqrtf(sum + 1e-6f);
}

}  // namespace kda::cpu
