// How every kernel of the project is started: the only <<<>>> and the only place that checks one.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "../../common/error.h"
#include "../../common/range.h"

namespace kda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // do not leave our error behind for the next caller's check to find
    throw Error(KDA_DEVICE_ERROR, format("%s: %s (%s)", what, cudaGetErrorString(status), cudaGetErrorName(status)));
  }
}

// Makes `device` current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) {
      check(cudaSetDevice(device), format("cudaSetDevice(%d)", device).c_str());
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(before_);  // it was current a moment ago
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Asks for the kernel's dynamic shared memory: together with what it declares it may exceed 48 KB, which needs asking
// for, once for each kernel and device.
inline void allow_shared_memory(const char* name, const KdaArgs& args, const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  if (bytes == 0) return;
  const std::lock_guard lock(mutex);
  size_t& most = allowed[{kernel, args.device}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), name);
  most = bytes;
}

// Starts `kernel` on args.stream inside a range called `name`; throws when the launch fails. A grid with no blocks,
// which CUDA refuses, is nothing to do. Neither allocates nor synchronises, so a call can be captured in a CUDA graph.
//
//   launch("gate", args, gate<16>, dim3(chunks, H), 128, smem_bytes, q, k, ...);
//
// Put what can be large (tokens, chunks) on grid.x, which may have 2^31 - 1 blocks; y and z end at 65535.
template <typename... Parameters, typename... Values>
void launch(const char* name, const KdaArgs& args, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t smem_bytes, Values... values) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  Range range(args, name);
  allow_shared_memory(name, args, reinterpret_cast<const void*>(kernel), smem_bytes);
  kernel<<<grid, block, smem_bytes, static_cast<cudaStream_t>(args.stream)>>>(values...);
  check(cudaGetLastError(), name);
}

// The same for a kernel that may start before the one ahead of it in the stream has ended, and that itself waits
// (griddepcontrol.wait) before it reads what that one writes: its set-up hides behind the other's tail. `cluster`
// neighbouring CTAs form a cluster.
template <typename... Parameters, typename... Values>
void launch_dependent(const char* name, const KdaArgs& args, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                      size_t smem_bytes, unsigned cluster, Values... values) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  Range range(args, name);
  allow_shared_memory(name, args, reinterpret_cast<const void*>(kernel), smem_bytes);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(args.stream), config.attrs = attributes,
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(values)...), name);
}

}  // namespace kda
