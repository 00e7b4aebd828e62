// The C ABI of kda.h for the CPU: the table of steps, and calls into steps/.
#include <iterator>

#include "../common/abi.h"
#include "../common/checks.h"
#include "../kda.h"

// Every step of the ladder is declared; those that exist on a CPU are defined in steps/.
#define KDA_STEP(number, slug, ...)          \
  namespace kda::cpu::step##number {         \
    int64_t workspace_bytes(const KdaArgs&); \
    void forward(const KdaArgs&);            \
  }
#include "../steps.def"
#undef KDA_STEP

namespace kda::cpu {
namespace {

constexpr KdaStep kSteps[] = {
#define KDA_STEP(number, slug, devices, cpu_chunks, cuda_chunks, compute_capability, cpu_budget, cuda_budget, title, \
                 idea)                                                                                               \
  {number, devices, cpu_chunks, compute_capability, cpu_budget, #slug, title, idea},
#include "../steps.def"
#undef KDA_STEP
};

struct Functions {
  int64_t (*workspace_bytes)(const KdaArgs&);
  void (*forward)(const KdaArgs&);
};

Functions functions_of(int32_t number) {
  switch (number) {
#define KDA_STEP(number, slug, devices, ...)                                                                        \
  case number:                                                                                                      \
    if constexpr (((devices) & KDA_DEVICE_CPU) != 0) return {step##number::workspace_bytes, step##number::forward}; \
    break;
#include "../steps.def"
#undef KDA_STEP
  }
  return {};
}

// A step that exists here, for sizes that it runs.
Functions find(int32_t number, const KdaArgs* args) {
  check_sizes(find_step(kSteps, number, KDA_DEVICE_CPU, "the CPU"), require(args));
  return functions_of(number);
}

}  // namespace
}  // namespace kda::cpu

int32_t kda_abi_version(void) { return KDA_ABI_VERSION; }

const KdaStep* kda_steps(int32_t* count) {
  if (count) *count = static_cast<int32_t>(std::size(kda::cpu::kSteps));
  return kda::cpu::kSteps;
}

int64_t kda_workspace_bytes(int32_t step, const KdaArgs* args) {
  int64_t bytes = 0;
  const KdaStatus status = kda::guard([&] { bytes = kda::cpu::find(step, args).workspace_bytes(*args); });
  return status == KDA_OK ? bytes : -int64_t{status};
}

KdaStatus kda_forward(int32_t step, const KdaArgs* args) {
  return kda::guard([&] {
    const auto [workspace_bytes, forward] = kda::cpu::find(step, args);
    kda::check_tensors(*args);
    kda::check_workspace(*args, workspace_bytes(*args));
    forward(*args);
  });
}

const char* kda_last_error(void) { return kda::last_error.c_str(); }
