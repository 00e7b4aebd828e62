// The operator's tensors as kernels see them, and how an element gets into a register and back: what no step teaches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "../../common/error.h"
#include "../../kda.h"
#include "sequence.cuh"

namespace kda {

using bf16 = __nv_bfloat16;

// A state tensor [N, H, V, K] in bf16 or fp32, or none (pointer nullptr).
struct State {
  void* pointer;
  int32_t dtype;  // KDA_BF16 or KDA_F32
};

// KdaArgs with types. `tokens` is B * T, see sequence.cuh.
struct Tensors {
  const bf16* q;         // [tokens, H, K]
  const bf16* k;         // [tokens, H, K]
  const bf16* v;         // [tokens, H, V]
  const bf16* g;         // [tokens, H, K], before its activation
  const bf16* beta;      // [tokens, H], logits
  const float* A_log;    // [H]
  const float* dt_bias;  // [H, K]
  bf16* out;             // [tokens, H, V]
  State initial_state;   // [N, H, V, K]; may share memory with final_state, so it is never read through a cache that
  State final_state;     // [N, H, V, K]  takes it for constant
  int64_t H;
  Sequences sequences;
};

inline Tensors tensors_of(const KdaArgs& args) {
  return {static_cast<const bf16*>(args.q),
          static_cast<const bf16*>(args.k),
          static_cast<const bf16*>(args.v),
          static_cast<const bf16*>(args.g),
          static_cast<const bf16*>(args.beta),
          args.A_log,
          args.dt_bias,
          static_cast<bf16*>(args.out),
          {const_cast<void*>(args.initial_state), args.initial_state_dtype},
          {args.final_state, args.final_state_dtype},
          args.H,
          sequences_of(args)};
}

// Throws unless K and V are the ones a step's kernels are written for.
inline void require_head_size(const KdaArgs& args, const char* slug, int64_t K, int64_t V) {
  if (args.K == K && args.V == V) return;
  throw Error(KDA_UNSUPPORTED, format("K = %lld, V = %lld: %s on CUDA runs K = %lld, V = %lld; the CPU steps run any",
                                      static_cast<long long>(args.K), static_cast<long long>(args.V), slug,
                                      static_cast<long long>(K), static_cast<long long>(V)));
}

// Throws where a step that rounds keys to bf16 is asked not to.
inline void require_rounded_keys(const KdaArgs& args, const char* slug) {
  if (!args.precise) return;
  throw Error(KDA_UNSUPPORTED, format("precise: %s writes bf16 keys to the state; use register_state", slug));
}

// Four neighbouring elements in one load; the address must be a multiple of 4 elements.
__device__ __forceinline__ void load4(float (&x)[4], const bf16* address) {
  const uint2 bits = *reinterpret_cast<const uint2*>(address);
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

__device__ __forceinline__ void load4(float (&x)[4], const float* address) {
  const float4 y = *reinterpret_cast<const float4*>(address);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

__device__ __forceinline__ void store4(float* address, const float (&x)[4]) {
  *reinterpret_cast<float4*>(address) = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void store4(bf16* address, const float (&x)[4]) {  // rounded to nearest even
  const __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]), high = __floats2bfloat162_rn(x[2], x[3]);
  *reinterpret_cast<uint2*>(address) =
      make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
}

// Four neighbouring elements of a state from `index` on; no state is a state of zeros.
__device__ __forceinline__ void load_state4(float (&x)[4], const State& state, int64_t index) {
  if (!state.pointer) {
    x[0] = x[1] = x[2] = x[3] = 0.0f;
  } else if (state.dtype == KDA_F32) {
    load4(x, static_cast<const float*>(state.pointer) + index);
  } else {
    load4(x, static_cast<const bf16*>(state.pointer) + index);
  }
}

__device__ __forceinline__ void store_state4(const State& state, int64_t index, const float (&x)[4]) {
  if (!state.pointer) return;
  if (state.dtype == KDA_F32) {
    store4(static_cast<float*>(state.pointer) + index, x);
  } else {
    store4(static_cast<bf16*>(state.pointer) + index, x);
  }
}

__device__ __forceinline__ float dot4(const float (&x)[4], const float (&y)[4]) {
  return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
}

// Keeps a value finite, since inf * 0 would make a NaN out of finite inputs: exp(A_log) is inf from A_log 88.73 on, and
// g + dt_bias may be 0. A NaN passes through, which fminf() would not let it.
__device__ __forceinline__ float saturate(float x) { return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x; }

// Sum over groups of LANES neighbouring lanes: the same bits in each of them, and in every run.
template <int LANES = 32>
__device__ __forceinline__ float warp_sum(float x) {
  for (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

}  // namespace kda
