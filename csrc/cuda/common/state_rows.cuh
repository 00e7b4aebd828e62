// A state [V, K] as the fp32 accumulators of tensor-core products: how it gets from memory into registers and back.
#pragma once

#include "tensors.cuh"
#include "tile.cuh"

namespace kda {

// Which value row of the state this lane's accumulators d[0], d[1] (half 0) and d[2], d[3] (half 1) are. Rows are dealt
// out so that a lane's two pairs of output columns are neighbours in memory: 8 bytes a lane, a full sector a token.
__device__ __forceinline__ int value_row(int half) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  return warp * 16 + g / 2 * 4 + g % 2 + half * 2;
}

template <int D>
__device__ __forceinline__ void load_state_rows(float (&S_reg)[D / 8][4], const State& state, int64_t offset) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = offset + value_row(half) * D + n * 8 + threadIdx.x % 4 * 2;
      float2 pair = {0.0f, 0.0f};
      if (state.dtype == KDA_F32)
        pair = *reinterpret_cast<const float2*>(static_cast<const float*>(state.pointer) + at);
      if (state.dtype == KDA_BF16) {
        const uint32_t bits = *reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(state.pointer) + at);
        pair = {tile::low_float(bits), tile::high_float(bits)};
      }
      S_reg[n][half * 2] = pair.x, S_reg[n][half * 2 + 1] = pair.y;
    }
  }
}

template <int D>
__device__ __forceinline__ void store_state_rows(const float (&S_reg)[D / 8][4], const State& state, int64_t offset) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = offset + value_row(half) * D + n * 8 + threadIdx.x % 4 * 2;
      const float x = S_reg[n][half * 2], y = S_reg[n][half * 2 + 1];
      if (state.dtype == KDA_F32) *reinterpret_cast<float2*>(static_cast<float*>(state.pointer) + at) = {x, y};
      if (state.dtype == KDA_BF16) {
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(state.pointer) + at) = ptx::cvt_rn_bf16x2(x, y);
      }
    }
  }
}

}  // namespace kda
