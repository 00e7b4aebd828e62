// Step 0, token_by_token: the definition
//
// Idea      One token after another, in fp32:
//              S = S diag(exp(g))      u = beta (v - S k)      S = S + u k^T      o = S q
//           Rows of S [V, K] never meet: a warp takes eight of them, four neighbouring channels a lane, and keeps them
//           in registers from the first token to the last.
// Look for  ncu: almost no DRAM traffic for its duration, few eligible warps a cycle, and "long scoreboard" and "wait"
//           stalls: every token waits for the one before, through a load, two reductions over the warp and an update.
// Cost      A chain of T tokens, whatever the GPU. Every warp evaluates the gate and the norms of its token again, 16
//           times a head in all.
// Numerics  The yardstick of the other steps: accurate expf, fp32 state. A NaN reaches its own token and later ones.
// Next      kda-lab diff 0 1
#include "../common/launch.cuh"
#include "../common/tensors.cuh"

namespace kda::step0 {
namespace {

constexpr int K = 128, V = 128;  // the sizes this kernel is written for
constexpr int ROWS = 8;          // rows of S a warp holds
constexpr int THREADS = 64;
constexpr int BLOCKS_PER_HEAD = V / (THREADS / 32 * ROWS);

// What one token brings, this lane's four channels of it.
struct Token {
  float g[4];  // log-decay
  float q[4];  // scale * q / |q|
  float k[4];  // k / |k|
  float beta;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Log-decay of four channels, in place, and beta.
__device__ __forceinline__ void activate_gate(Token& token, float beta, const float (&dt_bias)[4], float gate_slope,
                                              float gate_scale) {
  for (int d = 0; d < 4; ++d) token.g[d] = gate_scale * sigmoid(gate_slope * saturate(token.g[d] + dt_bias[d]));
  token.beta = sigmoid(beta);
}

// x = factor * x / sqrt(|x|^2 + 1e-6)
__device__ __forceinline__ void normalise(float (&x)[4], float factor) {
  const float norm = factor * rsqrtf(warp_sum(dot4(x, x)) + 1e-6f);
  for (float& channel : x) channel *= norm;
}

// S = S diag(exp(g))
__device__ __forceinline__ void apply_decay(float (&state_reg)[ROWS][4], const Token& token) {
  for (int d = 0; d < 4; ++d) {
    const float decay = expf(token.g[d]);
    for (int r = 0; r < ROWS; ++r) state_reg[r][d] *= decay;
  }
}

// u = beta (v - S k)
__device__ __forceinline__ void correct_values(float (&u)[ROWS], const float (&state_reg)[ROWS][4], const Token& token,
                                               const bf16* v) {  // [ROWS]
  for (int r = 0; r < ROWS; ++r) {
    u[r] = token.beta * (__bfloat162float(v[r]) - warp_sum(dot4(state_reg[r], token.k)));
  }
}

// S = S + u k^T
__device__ __forceinline__ void update_state(float (&state_reg)[ROWS][4], const float (&u)[ROWS], const Token& token) {
  for (int r = 0; r < ROWS; ++r) {
    for (int d = 0; d < 4; ++d) state_reg[r][d] += u[r] * token.k[d];
  }
}

// o = S q, of the updated state
__device__ __forceinline__ void write_output(bf16* out,  // [ROWS]
                                             const float (&state_reg)[ROWS][4], const Token& token) {
  for (int r = 0; r < ROWS; ++r) {
    const float o = warp_sum(dot4(state_reg[r], token.q));
    if (threadIdx.x % 32 == r) out[r] = __float2bfloat16_rn(o);
  }
}

// Grid (N * BLOCKS_PER_HEAD, H), a warp per ROWS rows of S.
__global__ void __launch_bounds__(THREADS) recurrence(Tensors x, float scale, float gate_scale) {
  const int64_t n = blockIdx.x / BLOCKS_PER_HEAD, h = blockIdx.y;
  const int first_row = (blockIdx.x % BLOCKS_PER_HEAD * THREADS + threadIdx.x) / 32 * ROWS;
  const int d = threadIdx.x % 32 * 4;  // this lane's first channel
  const int64_t state_0 = ((n * x.H + h) * V + first_row) * K + d;

  float state_reg[ROWS][4], dt_bias[4];
  for (int r = 0; r < ROWS; ++r) load_state4(state_reg[r], x.initial_state, state_0 + r * K);
  load4(dt_bias, x.dt_bias + h * K + d);
  const float gate_slope = saturate(expf(x.A_log[h]));

  const Span span = find_sequence(x.sequences, n);
  for (int64_t t = span.start; t < span.end; ++t) {
    const int64_t row = t * x.H + h;
    Token token;
    load4(token.g, x.g + row * K + d);
    load4(token.q, x.q + row * K + d);
    load4(token.k, x.k + row * K + d);
    activate_gate(token, __bfloat162float(x.beta[row]), dt_bias, gate_slope, gate_scale);
    normalise(token.q, scale);
    normalise(token.k, 1.0f);

    float u[ROWS];
    apply_decay(state_reg, token);
    correct_values(u, state_reg, token, x.v + row * V + first_row);
    update_state(state_reg, u, token);
    write_output(x.out + row * V + first_row, state_reg, token);
  }
  for (int r = 0; r < ROWS; ++r) store_state4(x.final_state, state_0 + r * K, state_reg[r]);
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  require_head_size(args, "token_by_token", K, V);
  return 0;
}

void forward(const KdaArgs& args) {
  launch("recurrence", args, recurrence, dim3(args.N * BLOCKS_PER_HEAD, args.H), THREADS, 0, tensors_of(args),
         static_cast<float>(args.scale), static_cast<float>(args.lower_bound));
}

}  // namespace kda::step0
