// One exponential, measured and to be read: what does base 2 save, and where?
//
// Idea      An SM has one unit for it, MUFU.EX2, that gives 16 results a clock. Whatever a program calls ends there;
//           the forms differ in what they put around it. `throughput` keeps that unit busy from registers alone, 32
//           warps with eight chains each, and counts clocks. `single` is one call between a load and a store, for
//           reading:
//              kda-lab sass exp_throughput
//           `gate` is the gate stage alone on real tensors: there, memory may well hide the difference.
// Look for  Results a clock and SM of expf against ex2.approx.ftz; then the times of the three gates.
#include "../common/abi.h"
#include "common/launch.cuh"
#include "common/ptx.cuh"
#include "common/tensors.cuh"
#include "kda_exp.h"

namespace kda::exp_throughput {
namespace {

constexpr float LOG2E = 1.4426950408889634f;

enum ExpForm { EXPF, FAST_EXPF, EXP2F, EX2_APPROX, EX2_APPROX_FTZ, EX2_APPROX_FTZ_REBASED, EXP_FORMS };
constexpr const char* kExpForms[EXP_FORMS] = {"expf",       "__expf",         "exp2f",
                                              "ex2.approx", "ex2.approx.ftz", "ex2.approx.ftz(x * log2e)"};

template <int FORM>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (FORM == EXPF) return expf(x);
  if constexpr (FORM == FAST_EXPF) return __expf(x);
  if constexpr (FORM == EXP2F) return exp2f(x);
  if constexpr (FORM == EX2_APPROX) return ptx::ex2_approx(x);
  if constexpr (FORM == EX2_APPROX_FTZ) return ptx::ex2_approx_ftz(x);
  if constexpr (FORM == EX2_APPROX_FTZ_REBASED) return ptx::ex2_approx_ftz(x * LOG2E);
}

// x = e^-x again and again (or 2^-x): it stays between 0 and 1, and every result is the next one's argument, so none
// can be left out. CHAINS of them are independent and hide each other's latency.
template <int FORM>
__global__ void __launch_bounds__(KDA_EXP_THREADS) throughput(int iterations,
                                                              int64_t* clocks,   // [blocks]
                                                              float* results) {  // [blocks, KDA_EXP_THREADS]
  constexpr int CHAINS = 8;
  float x[CHAINS];
  for (int chain = 0; chain < CHAINS; ++chain) x[chain] = 1e-4f * (threadIdx.x * CHAINS + chain);
  __syncthreads();
  const int64_t start = clock64();
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int e = 0; e < KDA_EXP_PER_ITERATION; ++e) x[e % CHAINS] = exponential<FORM>(-x[e % CHAINS]);
  }
  __syncthreads();
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - start;
  float sum = 0.0f;
  for (const float result : x) sum += result;
  results[blockIdx.x * KDA_EXP_THREADS + threadIdx.x] = sum;
}

// Never launched: the machine code of one call.
template <int FORM>
__global__ void single(float* x) {  // [threads]
  x[threadIdx.x] = exponential<FORM>(x[threadIdx.x]);
}
template __global__ void single<EXPF>(float*);
template __global__ void single<FAST_EXPF>(float*);
template __global__ void single<EXP2F>(float*);
template __global__ void single<EX2_APPROX>(float*);
template __global__ void single<EX2_APPROX_FTZ>(float*);
template __global__ void single<EX2_APPROX_FTZ_REBASED>(float*);

enum GateForm { GATE_EXPF, GATE_EX2, GATE_TANH, GATE_FORMS };
constexpr const char* kGateForms[GATE_FORMS] = {"expf: 1 / (1 + expf(-x))", "ex2.approx.ftz: 1 / (1 + 2^-x)",
                                                "tanh.approx: 0.5 * tanh(x / 2) + 0.5"};

// exp(A_log) and lower_bound come in the base that the form works in.
template <int FORM>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (FORM == GATE_EXPF) return 1.0f / (1.0f + expf(-x));
  if constexpr (FORM == GATE_EX2) return 1.0f / (1.0f + ptx::ex2_approx_ftz(-x));
  if constexpr (FORM == GATE_TANH) return 0.5f * ptx::tanh_approx(0.5f * x) + 0.5f;
}

constexpr int CHUNK = 16;

// Grid (chunks of all batch rows, H), a thread per channel: step 1's or step 2's gate.
template <int FORM>
__global__ void gate(const bf16* g,         // [tokens, H, K]
                     const float* A_log,    // [H]
                     const float* dt_bias,  // [H, K]
                     float* g_cumsum,       // [tokens, H, K]
                     Sequences sequences, float gate_scale) {
  const Chunk chunk = find_chunk<CHUNK>(sequences, blockIdx.x);
  const int64_t h = blockIdx.y, H = gridDim.y, K = blockDim.x, d = threadIdx.x;
  const float gate_slope = saturate(FORM == GATE_EX2 ? LOG2E * ptx::ex2_approx_ftz(LOG2E * A_log[h]) : expf(A_log[h]));
  const float bias = dt_bias[h * K + d];
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < chunk.tokens; ++i) {
    const int64_t element = ((chunk.start + i) * H + h) * K + d;
    sum += gate_scale * sigmoid<FORM>(gate_slope * saturate(__bfloat162float(g[element]) + bias));
    g_cumsum[element] = sum;
  }
}

void require_form(int32_t form, int32_t forms) {
  if (form < 0 || form >= forms)
    throw Error(KDA_INVALID_ARGUMENT, format("form is %d; expected 0 to %d", form, forms - 1));
}

}  // namespace
}  // namespace kda::exp_throughput

using namespace kda::exp_throughput;

const char* const* kda_exp_forms(int32_t* count) {
  *count = EXP_FORMS;
  return kExpForms;
}

const char* const* kda_gate_forms(int32_t* count) {
  *count = GATE_FORMS;
  return kGateForms;
}

KdaStatus kda_exp_throughput(int32_t form, int32_t device, void* stream, int32_t blocks, int32_t iterations,
                             int64_t* clocks, float* results) {
  return kda::guard([&] {
    require_form(form, EXP_FORMS);
    const kda::DeviceGuard guard(device);
    KdaArgs args = {};
    args.stream = stream;
    constexpr decltype(&throughput<EXPF>) kKernels[EXP_FORMS] = {
        throughput<EXPF>,       throughput<FAST_EXPF>,      throughput<EXP2F>,
        throughput<EX2_APPROX>, throughput<EX2_APPROX_FTZ>, throughput<EX2_APPROX_FTZ_REBASED>};
    kda::launch("exp_throughput", args, kKernels[form], dim3(blocks), dim3(KDA_EXP_THREADS), 0, iterations, clocks,
                results);
  });
}

KdaStatus kda_gate(int32_t form, const KdaArgs* args, float* g_cumsum) {
  return kda::guard([&] {
    require_form(form, GATE_FORMS);
    if (args->K < 1 || args->K > 1024) {
      throw kda::Error(KDA_INVALID_ARGUMENT, kda::format("K is %lld; expected 1 to 1024, a thread per channel",
                                                         static_cast<long long>(args->K)));
    }
    const kda::DeviceGuard guard(args->device);
    constexpr decltype(&gate<GATE_EXPF>) kKernels[GATE_FORMS] = {gate<GATE_EXPF>, gate<GATE_EX2>, gate<GATE_TANH>};
    const kda::Sequences batch_rows = {args->T, args->B, nullptr, false};
    const double base = form == GATE_EX2 ? 1.4426950408889634 : 1.0;
    kda::launch("gate", *args, kKernels[form], dim3(args->B * ((args->T + CHUNK - 1) / CHUNK), args->H), dim3(args->K),
                0, static_cast<const kda::bf16*>(args->g), args->A_log, args->dt_bias, g_cumsum, batch_rows,
                static_cast<float>(base * args->lower_bound));
  });
}
