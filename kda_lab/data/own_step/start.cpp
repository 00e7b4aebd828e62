// Your own step. This one is the definition, right and slow; make it faster, and keep it right.
//
//    S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k^_t) k^_t^T;  o_t = scale S q^_t
//
// forward() is called with everything in `args` (csrc/kda.h); workspace_bytes() says how much scratch memory it gets.
// What may be used is in csrc/cpu/common: token() finds a row of a tensor, launch() runs a body on all threads.
#include <cfloat>
#include <cmath>

#include "../common/arena.h"
#include "../common/launch.h"
#include "../common/scalar.h"
#include "../common/sequences.h"

namespace kda::cpu::step7 {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Log-decay of channel d.
double gate(const KdaArgs& args, int64_t row, int64_t h, int64_t d) {
  const double slope = std::min(std::exp(double{args.A_log[h]}), double{FLT_MAX});
  const double logit = double{token(args.g, args, args.K, row, h)[d]} + args.dt_bias[h * args.K + d];
  return args.lower_bound * sigmoid(slope * logit);
}

// One token of one head, one row of the state [V, K] after another.
void one_token(const KdaArgs& args, int64_t row, int64_t h, double* state /* [V, K] */) {
  const bf16* q = token(args.q, args, args.K, row, h);
  const bf16* k = token(args.k, args, args.K, row, h);
  for (int64_t v = 0; v < args.V; ++v) {
    double* S = state + v * args.K;
    double recalled = 0.0;
    for (int64_t d = 0; d < args.K; ++d) {
      S[d] *= std::exp(gate(args, row, h, d));
      recalled += S[d] * k[d] * reciprocal_norm(k, args.K);
    }
    const double beta = sigmoid(*token(args.beta, args, 1, row, h));
    const double corrected = beta * (token(args.v, args, args.V, row, h)[v] - recalled);
    double out = 0.0;
    for (int64_t d = 0; d < args.K; ++d) {
      S[d] += corrected * k[d] * reciprocal_norm(k, args.K);
      out += S[d] * q[d] * reciprocal_norm(q, args.K);
    }
    token(args.out, args, args.V, row, h)[v] = bf16(static_cast<float>(args.scale * out));
  }
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  Arena arena(nullptr);
  arena.bytes(sizeof(double), args.N, args.H, args.V, args.K);
  return arena.used();
}

void forward(const KdaArgs& args) {
  const std::vector<Sequence> sequences = list_sequences(args);
  Arena arena(args.workspace);
  double* states = reinterpret_cast<double*>(arena.bytes(sizeof(double), args.N, args.H, args.V, args.K));

  launch("own_step", args, args.N, args.H, [&](int64_t n, int64_t h) {
    double* S = states + (n * args.H + h) * args.V * args.K;
    const auto state = [&](int64_t v, int64_t d) -> double& { return S[v * args.K + d]; };
    load_state(args, n, h, 0, args.V, state);
    for (int64_t t = 0; t < sequences[n].tokens; ++t) one_token(args, sequences[n].first_row + t, h, S);
    store_state(args, n, h, 0, args.V, state);
  });
}

}  // namespace kda::cpu::step7
