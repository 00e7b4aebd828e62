// A faster own step: what does not depend on the value row is computed once a token, in fp32, and the two passes over
// a row of the state are written so that they vectorise.
#include <cmath>

#include "../common/arena.h"
#include "../common/launch.h"
#include "../common/scalar.h"
#include "../common/sequences.h"

namespace kda::cpu::step7 {
namespace {

// What one sequence and head keeps, fp32.
struct Head {
  float* q_hat;  // [K]  scale * q / |q|
  float* k_hat;  // [K]  k / |k|
  float* decay;  // [K]  exp(g)
  float* state;  // [V, K]

  static Head place(const KdaArgs& args, Arena& arena) {
    return {arena.floats(args.K), arena.floats(args.K), arena.floats(args.K), arena.floats(args.V, args.K)};
  }
};

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Everything that all value rows share: q_hat, k_hat and decay.
void prepare(const KdaArgs& args, int64_t row, int64_t h, const Head& head) {
  const bf16* q = token(args.q, args, args.K, row, h);
  const bf16* k = token(args.k, args, args.K, row, h);
  const bf16* g = token(args.g, args, args.K, row, h);
  const float q_scale = static_cast<float>(args.scale) * reciprocal_norm(q, args.K);
  const float k_scale = reciprocal_norm(k, args.K);
  const float slope = saturate(expf(args.A_log[h])), bound = static_cast<float>(args.lower_bound);
  for (int64_t d = 0; d < args.K; ++d) {
    head.q_hat[d] = q_scale * q[d];
    head.k_hat[d] = k_scale * k[d];
    head.decay[d] = expf(bound * sigmoid(slope * saturate(g[d] + args.dt_bias[h * args.K + d])));
  }
}

void one_token(const KdaArgs& args, int64_t row, int64_t h, const Head& head) {
  prepare(args, row, h, head);
  const float beta = sigmoid(*token(args.beta, args, 1, row, h));
  const bf16* values = token(args.v, args, args.V, row, h);
  bf16* out = token(args.out, args, args.V, row, h);
  for (int64_t v = 0; v < args.V; ++v) {
    float* S = head.state + v * args.K;
    float recalled = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : recalled)
    for (int64_t d = 0; d < args.K; ++d) {
      S[d] *= head.decay[d];
      recalled += S[d] * head.k_hat[d];
    }
    const float corrected = beta * (values[v] - recalled);
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < args.K; ++d) {
      S[d] += corrected * head.k_hat[d];
      sum += S[d] * head.q_hat[d];
    }
    out[v] = bf16(sum);
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

  launch("own_step", args, args.N, args.H, [&](int64_t n, int64_t h) {
    const Head head = heads.at(n, h);
    const auto state = [&](int64_t v, int64_t d) -> float& { return head.state[v * args.K + d]; };
    load_state(args, n, h, 0, args.V, state);
    for (int64_t t = 0; t < sequences[n].tokens; ++t) one_token(args, sequences[n].first_row + t, h, head);
    store_state(args, n, h, 0, args.V, state);
  });
}

}  // namespace kda::cpu::step7
