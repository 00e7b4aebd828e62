// Step 0, token by token: the definition.
//
// Idea       One token after another updates a state S [V, K] and reads its output from it, exactly as the formula is
//            written in kda.h. Nothing is clever, so this is the step to read first and the one to trust.
// Changed    Nothing: it is where the ladder starts. `kda-lab diff 0 1` shows what chunks cost in code.
// Profiler   One range, recurrence. A token is serial in the one before it, so the only parallelism is N * H, and each
//            token walks through the whole state (64 KB at K = V = 128) three times to do 3 multiply-adds per element.
// Cost       6 K V FLOP per token and head and 2 K V floats moved to do it: bound by the L2 cache, not by arithmetic.
//            On a GPU this is worse: the state is in registers, but one token's work is too small to fill the machine.
// Numerics   fp32, and exp() only of a log-decay <= 0, so any lower_bound is safe. exp(g) alone is kept in fp64: in
//            fp32 a decay near 1 is wrong by up to 2^-25, to the same side every time, and thousands of tokens
//            multiply it up. The state is rounded twice a token. Where one key repeats and nothing is forgotten, so do
//            these roundings: the final state's error then grows with T, to 1e-4 after 16,384 tokens.
#include <math.h>

#include "../common/arena.h"
#include "../common/launch.h"
#include "../common/scalar.h"
#include "../common/sequences.h"

namespace kda::cpu::step0 {
namespace {

// What one sequence and head keeps, fp32.
struct Head {
  float* q_hat;   // [K]     scale * q / |q|
  float* k_hat;   // [K]     k / |k|
  double* decay;  // [K]     exp(g), fp64: see Numerics
  float* state;   // [V, K]

  static Head place(const KdaArgs& args, Arena& arena) {
    return {arena.floats(args.K), arena.floats(args.K), reinterpret_cast<double*>(arena.bytes(sizeof(double), args.K)),
            arena.floats(args.V, args.K)};
  }
};

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// decay = exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias))); returns beta.
float activate_gate(const KdaArgs& args, int64_t row, int64_t h, const Head& head) {
  const bf16* g_raw = token(args.g, args, args.K, row, h);
  const float* dt_bias = args.dt_bias + h * args.K;
  const float gate_slope = saturate(expf(args.A_log[h]));
  const float gate_scale = static_cast<float>(args.lower_bound);
  for (int64_t d = 0; d < args.K; ++d) {
    head.decay[d] = exp(double{gate_scale} * sigmoid(gate_slope * saturate(g_raw[d] + dt_bias[d])));
  }
  return sigmoid(*token(args.beta, args, 1, row, h));
}

// S = S diag(decay)
void apply_decay(const KdaArgs& args, const Head& head) {
  for (int64_t v = 0; v < args.V; ++v) {
    float* S = head.state + v * args.K;
    for (int64_t d = 0; d < args.K; ++d) S[d] = static_cast<float>(S[d] * head.decay[d]);
  }
}

// S = S + beta (v - S k_hat) k_hat^T. Here the corrected value lives only between these two lines; chunks need it kept.
void update_state(const KdaArgs& args, int64_t row, int64_t h, float beta, const Head& head) {
  const bf16* values = token(args.v, args, args.V, row, h);
  for (int64_t v = 0; v < args.V; ++v) {
    float* S = head.state + v * args.K;
    float recalled = 0.0f;
#pragma omp simd reduction(+ : recalled)
    for (int64_t d = 0; d < args.K; ++d) recalled += S[d] * head.k_hat[d];
    const float corrected = beta * (values[v] - recalled);
    for (int64_t d = 0; d < args.K; ++d) S[d] += corrected * head.k_hat[d];
  }
}

// out = S q_hat, after the update: a token sees itself.
void write_output(const KdaArgs& args, int64_t row, int64_t h, const Head& head) {
  bf16* out = token(args.out, args, args.V, row, h);
  for (int64_t v = 0; v < args.V; ++v) {
    const float* S = head.state + v * args.K;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < args.K; ++d) sum += S[d] * head.q_hat[d];
    out[v] = bf16(sum);
  }
}

void normalize(const KdaArgs& args, int64_t row, int64_t h, const Head& head) {
  const bf16* q = token(args.q, args, args.K, row, h);
  const bf16* k = token(args.k, args, args.K, row, h);
  const float q_scale = static_cast<float>(args.scale) * reciprocal_norm(q, args.K);
  const float k_scale = reciprocal_norm(k, args.K);
  for (int64_t d = 0; d < args.K; ++d) {
    head.q_hat[d] = q_scale * q[d];
    head.k_hat[d] = k_scale * k[d];
  }
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  Arena arena(nullptr);
  const Records<Head> heads(args, args.N, arena);
  return arena.used();
}

void forward(const KdaArgs& args) {
  const std::vector<Sequence> sequences = list_sequences(args);
  Arena arena(args.workspace);
  const Records<Head> heads(args, args.N, arena);

  launch("recurrence", args, args.N, args.H, [&](int64_t n, int64_t h) {
    const Head head = heads.at(n, h);
    const auto state = [&](int64_t v, int64_t d) -> float& { return head.state[v * args.K + d]; };
    load_state(args, n, h, 0, args.V, state);
    for (int64_t t = 0; t < sequences[n].tokens; ++t) {
      const int64_t row = sequences[n].first_row + t;
      const float beta = activate_gate(args, row, h, head);
      normalize(args, row, h, head);
      apply_decay(args, head);
      update_state(args, row, h, beta, head);
      write_output(args, row, h, head);
    }
    store_state(args, n, h, 0, args.V, state);
  });
}

}  // namespace kda::cpu::step0
