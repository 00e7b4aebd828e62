// forward() fills out and final_state with STUB_VALUE and remembers its arguments.
#include <cstdio>
#include <cstring>
#include <string>

#include "../kda.h"

#define STUB_VALUE 7

namespace {
KdaArgs last;
int calls = 0;
std::string text;

int64_t state_bytes(const KdaArgs* a, int32_t dtype) { return a->N * a->H * a->V * a->K * (dtype == KDA_F32 ? 4 : 2); }
}  // namespace

extern "C" {
KDA_EXPORT int32_t kda_abi_version(void) { return KDA_ABI_VERSION; }

KDA_EXPORT const KdaStep* kda_steps(int32_t* count) {
  static const KdaStep steps[] = {
#define KDA_STEP(number, slug, devices, cpu_chunks, cuda_chunks, compute_capability, cpu_budget, cuda_budget, title, \
                 idea)                                                                                               \
  {number, devices, cpu_chunks, compute_capability, cpu_budget, #slug, title, idea},
#include "../steps.def"
  };
  *count = sizeof(steps) / sizeof(steps[0]);
  return steps;
}

KDA_EXPORT int64_t kda_workspace_bytes(int32_t, const KdaArgs* args) {
  if (args->T == 601) text = "the stub has no workspace for T = 601";
  return args->T == 601 ? -KDA_UNSUPPORTED : 100;
}

KDA_EXPORT KdaStatus kda_forward(int32_t step, const KdaArgs* args) {
  last = *args;
  ++calls;
  text = "status " + std::to_string(args->T - 600) + " from step " + std::to_string(step);
  if (args->T > 600 && args->T < 610) return static_cast<KdaStatus>(args->T - 600);
  const bool aligned = reinterpret_cast<uintptr_t>(args->workspace) % 256 == 0;
  if (args->struct_bytes != sizeof(KdaArgs) || !aligned || args->workspace_bytes != 100) return KDA_INTERNAL_ERROR;
  std::memset(args->workspace, 0xff, args->workspace_bytes);
  if (args->push_range) args->push_range("first");
  std::memset(args->out, STUB_VALUE, args->B * args->T * args->H * args->V * 2);
  if (args->pop_range) args->pop_range();
  if (args->push_range) args->push_range("second");
  if (args->final_state) std::memset(args->final_state, STUB_VALUE, state_bytes(args, args->final_state_dtype));
  if (args->pop_range) args->pop_range();
  return KDA_OK;
}

KDA_EXPORT const char* kda_last_error(void) { return text.c_str(); }

KDA_EXPORT int32_t stub_calls(void) { return calls; }

// The arguments of the last call, a line for each field, as this side of the ABI reads them.
KDA_EXPORT const char* stub_last_args(void) {
  text.clear();
  auto line = [](const char* name, long long value) { text += std::string(name) + " " + std::to_string(value) + "\n"; };
#define INTEGER(field) line(#field, static_cast<long long>(last.field));
#define POINTER(field) line(#field, reinterpret_cast<long long>(last.field));
  INTEGER(struct_bytes)
  INTEGER(B)
  INTEGER(T) INTEGER(H) INTEGER(K) INTEGER(V) INTEGER(N) INTEGER(chunk)
      line("scale", static_cast<long long>(last.scale * 1000)),
      line("lower_bound", static_cast<long long>(last.lower_bound * 1000));
  POINTER(q)
  POINTER(k)
  POINTER(v) POINTER(g) POINTER(beta) POINTER(A_log) POINTER(dt_bias) POINTER(out) POINTER(initial_state)
      POINTER(final_state) POINTER(cu_seqlens) INTEGER(initial_state_dtype) INTEGER(final_state_dtype)
          INTEGER(cu_seqlens_dtype) INTEGER(device) INTEGER(precise) POINTER(stream) POINTER(workspace)
              INTEGER(workspace_bytes) POINTER(push_range) POINTER(pop_range) return text.c_str();
}
}
