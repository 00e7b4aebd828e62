// The C ABI of kda.h for CUDA: the table of steps, the limits of a grid, and calls into steps/.
#include <iterator>

#include "../common/abi.h"
#include "../common/checks.h"
#include "../kda.h"
#include "common/launch.cuh"
#include "common/sequence.cuh"

// Every step of the ladder is declared; those that exist on CUDA are defined in steps/.
#define KDA_STEP(number, slug, ...)          \
  namespace kda::step##number {              \
    int64_t workspace_bytes(const KdaArgs&); \
    void forward(const KdaArgs&);            \
  }
#include "../steps.def"
#undef KDA_STEP

namespace kda {
namespace {

constexpr KdaStep kSteps[] = {
#define KDA_STEP(number, slug, devices, cpu_chunks, cuda_chunks, compute_capability, cpu_budget, cuda_budget, title, \
                 idea)                                                                                               \
  {number, devices, cuda_chunks, compute_capability, cuda_budget, #slug, title, idea},
#include "../steps.def"
#undef KDA_STEP
};

struct Functions {
  int64_t (*workspace_bytes)(const KdaArgs&);
  void (*forward)(const KdaArgs&);
};

Functions functions_of(int32_t number) {
  switch (number) {
#define KDA_STEP(number, slug, devices, ...)                                                                         \
  case number:                                                                                                       \
    if constexpr (((devices) & KDA_DEVICE_CUDA) != 0) return {step##number::workspace_bytes, step##number::forward}; \
    break;
#include "../steps.def"
#undef KDA_STEP
  }
  return {};
}

// Chunks, and sequences times up to 16 blocks each, are grid.x; heads are grid.y.
void check_grid(const KdaStep& step, const KdaArgs& args) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1, kMostHeads = 65535;
  check_size("H", args.H, 1, kMostHeads);
  check_size("N", args.N, 0, kMostBlocks / 16);
  check_size("N * H", args.N * args.H, 0, kMostBlocks);
  if (step.chunks != 0) check_size("the number of chunks", chunk_slots(args, args.chunk), 0, kMostBlocks);
}

// A step that exists here, for sizes that it runs.
Functions find(int32_t number, const KdaArgs* args) {
  const KdaStep& step = find_step(kSteps, number, KDA_DEVICE_CUDA, "CUDA");
  check_sizes(step, require(args));
  check_grid(step, *args);
  return functions_of(number);
}

}  // namespace
}  // namespace kda

int32_t kda_abi_version(void) { return KDA_ABI_VERSION; }

const KdaStep* kda_steps(int32_t* count) {
  if (count) *count = static_cast<int32_t>(std::size(kda::kSteps));
  return kda::kSteps;
}

int64_t kda_workspace_bytes(int32_t step, const KdaArgs* args) {
  int64_t bytes = 0;
  const KdaStatus status = kda::guard([&] { bytes = kda::find(step, args).workspace_bytes(*args); });
  return status == KDA_OK ? bytes : -int64_t{status};
}

KdaStatus kda_forward(int32_t step, const KdaArgs* args) {
  return kda::guard([&] {
    const auto [workspace_bytes, forward] = kda::find(step, args);
    kda::check_tensors(*args);
    kda::check_workspace(*args, workspace_bytes(*args));
    const kda::DeviceGuard device(args->device);
    forward(*args);
  });
}

const char* kda_last_error(void) { return kda::last_error.c_str(); }
