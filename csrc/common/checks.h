// What both libraries check before a step sees the arguments: Python has checked them already, other callers have not.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "error.h"

namespace kda {

constexpr int64_t kMostElements = int64_t{1} << 40;  // far beyond any memory, and products of a few stay checkable

inline void check_size(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    throw Error(KDA_INVALID_ARGUMENT, format("%s is %lld; expected %lld to %lld", name, static_cast<long long>(value),
                                             static_cast<long long>(least), static_cast<long long>(most)));
  }
}

// The bytes of a tensor must fit 63 bits, or indexing it would overflow before memory runs out.
inline void check_product(const char* name, std::initializer_list<int64_t> sizes) {
  int64_t bytes = sizeof(float);
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) {
      throw Error(KDA_INVALID_ARGUMENT, format("%s would have more than 2^63 bytes", name));
    }
  }
}

// The step with this number, which `device` (KDA_DEVICE_CPU, ...) must have.
template <size_t COUNT>
const KdaStep& find_step(const KdaStep (&steps)[COUNT], int32_t number, int32_t device, const char* device_name) {
  for (const KdaStep& step : steps) {
    if (step.number != number) continue;
    if (step.devices & device) return step;
    throw Error(KDA_UNSUPPORTED, format("step %d (%s) does not exist on %s", number, step.slug, device_name));
  }
  throw Error(KDA_INVALID_ARGUMENT, format("step is %d; kda_steps() lists those there are", number));
}

inline void check_chunk(const KdaStep& step, int64_t chunk) {
  const bool is_power_of_two = chunk > 0 && (chunk & (chunk - 1)) == 0;
  if (step.chunks == 0 || (is_power_of_two && chunk <= step.chunks && (chunk & step.chunks) != 0)) return;
  std::string sizes;
  for (int32_t size = 1; size <= step.chunks; size *= 2) {
    if (step.chunks & size) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  }
  throw Error(KDA_INVALID_ARGUMENT, format("chunk is %lld; step %d (%s) runs %s here", static_cast<long long>(chunk),
                                           step.number, step.slug, sizes.c_str()));
}

inline const KdaArgs& require(const KdaArgs* args) {
  if (!args) throw Error(KDA_INVALID_ARGUMENT, "args is NULL");
  return *args;
}

inline void check_sizes(const KdaStep& step, const KdaArgs& args) {
  if (args.struct_bytes != static_cast<int64_t>(sizeof(KdaArgs))) {
    throw Error(KDA_INVALID_ARGUMENT, format("struct_bytes is %lld, the library's KdaArgs has %zu: rebuild the library",
                                             static_cast<long long>(args.struct_bytes), sizeof(KdaArgs)));
  }
  check_size("B", args.B, 0, kMostElements);
  check_size("T", args.T, 0, kMostElements);
  check_size("H", args.H, 1, kMostElements);
  check_size("K", args.K, 1, kMostElements);
  check_size("V", args.V, 1, kMostElements);
  check_size("N", args.N, 0, kMostElements);
  check_product("q [B, T, H, K]", {args.B, args.T, args.H, args.K});
  check_product("v [B, T, H, V]", {args.B, args.T, args.H, args.V});
  check_product("the state [N, H, V, K]", {args.N, args.H, args.V, args.K});
  check_chunk(step, args.chunk);
}

inline void check_pointer(const char* name, const void* pointer, bool needed, uintptr_t alignment) {
  if (needed && !pointer) throw Error(KDA_INVALID_ARGUMENT, format("%s is NULL", name));
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    throw Error(KDA_INVALID_ARGUMENT, format("%s is at %p; expected an address that is a multiple of %d", name, pointer,
                                             static_cast<int>(alignment)));
  }
}

inline void check_dtype(const char* name, const void* pointer, int32_t dtype, KdaDtype first, KdaDtype second) {
  const bool right = pointer ? dtype == first || dtype == second : dtype == KDA_NONE;
  if (right) return;
  throw Error(KDA_INVALID_ARGUMENT, format("%s_dtype is %d; expected %s", name, dtype,
                                           pointer ? (first == KDA_BF16 ? "KDA_BF16 or KDA_F32" : "KDA_I32 or KDA_I64")
                                                   : "KDA_NONE, since the pointer is NULL"));
}

// Kernels load and store four elements and more at a time, so the tensors they do that with begin at a multiple of 16;
// the same on both devices, or a call would be right on one and refused on the other.
inline void check_tensors(const KdaArgs& args) {
  const bool any_tokens = args.B > 0 && args.T > 0;
  check_pointer("q", args.q, any_tokens, 16);
  check_pointer("k", args.k, any_tokens, 16);
  check_pointer("v", args.v, any_tokens, 16);
  check_pointer("g", args.g, any_tokens, 16);
  check_pointer("beta", args.beta, any_tokens, 2);
  check_pointer("out", args.out, any_tokens, 16);
  check_pointer("A_log", args.A_log, true, 4);
  check_pointer("dt_bias", args.dt_bias, true, 16);
  check_pointer("initial_state", args.initial_state, false, 16);
  check_pointer("final_state", args.final_state, false, 16);
  check_pointer("cu_seqlens", args.cu_seqlens, false, args.cu_seqlens_dtype == KDA_I64 ? 8 : 4);
  check_dtype("initial_state", args.initial_state, args.initial_state_dtype, KDA_BF16, KDA_F32);
  check_dtype("final_state", args.final_state, args.final_state_dtype, KDA_BF16, KDA_F32);
  check_dtype("cu_seqlens", args.cu_seqlens, args.cu_seqlens_dtype, KDA_I32, KDA_I64);
  if (args.final_state && args.final_state == args.initial_state &&
      args.final_state_dtype != args.initial_state_dtype) {
    throw Error(KDA_INVALID_ARGUMENT, "final_state is initial_state with another dtype; expected the same dtype");
  }
  if (args.cu_seqlens ? args.B != 1 : args.N != args.B) {
    throw Error(KDA_INVALID_ARGUMENT,
                format("B is %lld and N is %lld; expected B = 1 with cu_seqlens, and N = B without",
                       static_cast<long long>(args.B), static_cast<long long>(args.N)));
  }
  if (args.cu_seqlens && args.N == 0 && args.T > 0) {
    throw Error(KDA_INVALID_ARGUMENT, format("cu_seqlens has 1 entry, which is no sequence, but T is %lld; expected 0",
                                             static_cast<long long>(args.T)));
  }
  if (!std::isfinite(args.scale) || !std::isfinite(args.lower_bound)) {
    throw Error(KDA_INVALID_ARGUMENT,
                format("scale is %g and lower_bound is %g; expected finite numbers", args.scale, args.lower_bound));
  }
}

inline void check_workspace(const KdaArgs& args, int64_t needed) {
  if (needed == 0) return;
  if (!args.workspace || reinterpret_cast<uintptr_t>(args.workspace) % 256 != 0 || args.workspace_bytes < needed) {
    throw Error(KDA_INVALID_ARGUMENT,
                format("workspace is %p with %lld bytes; expected %lld bytes (kda_workspace_bytes), 256-byte aligned",
                       args.workspace, static_cast<long long>(args.workspace_bytes), static_cast<long long>(needed)));
  }
}

}  // namespace kda
