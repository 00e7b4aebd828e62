// Step 3, factored: exp(G_i - G_j) = e^G_i * e^-G_j.
//
// Idea       The decay between two tokens is a product of one factor per token. Give each key both factors beforehand,
//            a few exponentials per element, and L and Mqk become plain matrix products with no exponential inside.
// Changed    From step 2 (`kda-lab diff 2 3`): apply_decay makes k_inv = k_hat 2^-G, and form_L_and_Mqk multiplies
//            matrices. q_hat and k_hat need not be kept; what may be small in q_hat waits for the output (Numerics).
// Profiler   form_L_and_Mqk shrinks from the largest range to a small one: no call is left in its loop, so it becomes
//            vector code. On a GPU the same change lets tensor cores in. What remains is recurrence.
// Cost       Per token and head, D = K = V: 6 D^2 + 2 C D FLOP in matrix products and 5 D exponentials, whatever C is.
// Numerics   2^-G overflows where G in base 2 falls below -128, and 2^G is then 0: |lower_bound| * C may not exceed 87
//            in fp32. At C = 16 a bound of -5 is fine and -6 gives NaN. Within the limit factoring costs two
//            roundings: the rounding error of G cancels, because both factors see the same stored G. A small scale
//            or a query that 1e-6 shortens would underflow together with 2^G, before 2^-G lifts them: both multiply
//            the output's row instead.
#include <math.h>

#include "../common/arena.h"
#include "../common/launch.h"
#include "../common/scalar.h"
#include "../common/sequences.h"

namespace kda::cpu::step3 {
namespace {

// What the passes hand on for one chunk and head, fp32. C = args.chunk; rows past the end of a sequence are not used.
struct Tile {
  float* g_cumsum_log2;  // [C, K]  G_i: the log2-decay from the start of the chunk up to and including token i

  float* beta;         // [C]
  float* out_scale;    // [C]  scale, times what 1e-6 leaves of the length of q / |q|
  float* q_decayed;    // [C, K]  q / |q|, decayed since the chunk began
  float* k_decayed;    // [C, K]  k / |k|, decayed since the chunk began
  float* k_inv;        // [C, K]  k / |k| * 2^-G: large where G is low
  float* k_restored;   // [C, K]  k / |k|, decayed until the chunk ends
  float* total_decay;  // [K]  decay of the whole chunk
  float* L;            // [C, C]  strictly lower triangular
  float* Mqk;          // [C, C]  lower triangular
  float* INV;          // [C, C]  (I + L)^-1, lower triangular

  static Tile place(const KdaArgs& args, Arena& arena) {
    const int64_t C = args.chunk, K = args.K;
    return {arena.floats(C, K), arena.floats(C),    arena.floats(C),    arena.floats(C, K),
            arena.floats(C, K), arena.floats(C, K), arena.floats(C, K), arena.floats(K),
            arena.floats(C, C), arena.floats(C, C), arena.floats(C, C)};
  }
};

// What one sequence and head keeps in recurrence, fp32.
struct Head {
  float* U;      // [V, C]  corrected values of the current chunk
  float* state;  // [V, K]

  static Head place(const KdaArgs& args, Arena& arena) {
    return {arena.floats(args.V, args.chunk), arena.floats(args.V, args.K)};
  }
};

constexpr double kLog2e = 1.4426950408889634;

float sigmoid_log2(float x_log2) { return 1.0f / (1.0f + exp2f(-x_log2)); }

// g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), into g_cumsum_log2, and beta = sigmoid(beta).
void activate_gate(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile) {
  const int64_t K = args.K;
  const float* dt_bias = args.dt_bias + h * K;
  const float gate_slope_log2 = saturate(static_cast<float>(kLog2e) * expf(args.A_log[h]));
  const float gate_scale_log2 = static_cast<float>(kLog2e * args.lower_bound);
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const bf16* g_raw = token(args.g, args, K, chunk.first_row + i, h);
    for (int64_t d = 0; d < K; ++d) {
      tile.g_cumsum_log2[i * K + d] = gate_scale_log2 * sigmoid_log2(gate_slope_log2 * saturate(g_raw[d] + dt_bias[d]));
    }
    tile.beta[i] = sigmoid_log2(static_cast<float>(kLog2e) * *token(args.beta, args, 1, chunk.first_row + i, h));
  }
}

// G_i = G_(i-1) + g_i, in place.
void accumulate_gate(const KdaArgs& args, const Chunk& chunk, const Tile& tile) {
  const int64_t K = args.K;
  for (int64_t i = 1; i < chunk.tokens; ++i) {
    for (int64_t d = 0; d < K; ++d) tile.g_cumsum_log2[i * K + d] += tile.g_cumsum_log2[(i - 1) * K + d];
  }
}

// Normalises q and k and gives them the decay since the chunk began, or until it ends.
void apply_decay(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile) {
  const int64_t K = args.K;
  const float* g_total_log2 = tile.g_cumsum_log2 + (chunk.tokens - 1) * K;
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    const bf16* q = token(args.q, args, K, chunk.first_row + i, h);
    const bf16* k = token(args.k, args, K, chunk.first_row + i, h);
    const Norm q_norm = norm(q, K, sum_of_squares(q, K));
    const float k_scale = reciprocal_norm(k, K);
    tile.out_scale[i] = static_cast<float>(args.scale) * q_norm.length;
    for (int64_t d = 0, at = i * K; d < K; ++d, ++at) {
      const float decay = exp2f(tile.g_cumsum_log2[at]);
      const float k_hat = k_scale * k[d];
      tile.q_decayed[at] = q_norm.reciprocal * q[d] * decay;
      tile.k_decayed[at] = k_hat * decay;
      tile.k_inv[at] = k_hat * exp2f(-tile.g_cumsum_log2[at]);
      tile.k_restored[at] = k_hat * exp2f(g_total_log2[d] - tile.g_cumsum_log2[at]);
    }
  }
  for (int64_t d = 0; d < K; ++d) tile.total_decay[d] = exp2f(g_total_log2[d]);
}

// L = tril(k_decayed k_inv^T, -1), rows times beta;  Mqk = tril(q_decayed k_inv^T).
void form_L_and_Mqk(const KdaArgs& args, const Chunk& chunk, const Tile& tile) {
  const int64_t C = args.chunk, K = args.K;
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      float kk = 0.0f, qk = 0.0f;
#pragma omp simd reduction(+ : kk, qk)
      for (int64_t d = 0; d < K; ++d) {
        kk += tile.k_decayed[i * K + d] * tile.k_inv[j * K + d];
        qk += tile.q_decayed[i * K + d] * tile.k_inv[j * K + d];
      }
      tile.L[i * C + j] = tile.beta[i] * kk;  // the diagonal is there, too, but never read
      tile.Mqk[i * C + j] = qk;
    }
  }
}

// INV = (I + L)^-1 by forward substitution: row i of (I + L) INV = I says INV_i = I_i - sum_(j<i) L_ij INV_j.
void invert_unit_lower(const KdaArgs& args, const Chunk& chunk, const Tile& tile) {
  const int64_t C = args.chunk;
  for (int64_t i = 0; i < chunk.tokens; ++i) {
    for (int64_t column = 0; column < i; ++column) {
      float sum = 0.0f;
      for (int64_t j = column; j < i; ++j) sum += tile.L[i * C + j] * tile.INV[j * C + column];
      tile.INV[i * C + column] = -sum;
    }
    tile.INV[i * C + i] = 1.0f;
  }
}

// U = INV (beta * (V - k_decayed S^T)): what each token adds, once it knows what the tokens before it will have added.
void correct_values(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile, const Head& head) {
  const int64_t C = args.chunk, K = args.K;
  for (int64_t v = 0; v < args.V; ++v) {
    const float* S = head.state + v * K;
    float* U = head.U + v * C;
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      float recalled = 0.0f;
#pragma omp simd reduction(+ : recalled)
      for (int64_t d = 0; d < K; ++d) recalled += tile.k_decayed[i * K + d] * S[d];
      U[i] = tile.beta[i] * (token(args.v, args, args.V, chunk.first_row + i, h)[v] - recalled);
    }
    for (int64_t i = chunk.tokens - 1; i >= 0; --i) {  // from below, so that the rows above are still uncorrected
      float sum = 0.0f;
      for (int64_t j = 0; j <= i; ++j) sum += tile.INV[i * C + j] * U[j];
      U[i] = sum;
    }
  }
}

// out = out_scale (q_decayed S^T + Mqk U): from the tokens before this chunk, and from those in it.
void write_output(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile, const Head& head) {
  const int64_t C = args.chunk, K = args.K;
  for (int64_t v = 0; v < args.V; ++v) {
    const float* S = head.state + v * K;
    const float* U = head.U + v * C;
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < K; ++d) sum += tile.q_decayed[i * K + d] * S[d];
      for (int64_t j = 0; j <= i; ++j) sum += tile.Mqk[i * C + j] * U[j];
      token(args.out, args, args.V, chunk.first_row + i, h)[v] = bf16(tile.out_scale[i] * sum);
    }
  }
}

// S = S diag(total_decay) + U^T k_restored
void update_state(const KdaArgs& args, const Chunk& chunk, const Tile& tile, const Head& head) {
  const int64_t C = args.chunk, K = args.K;
  for (int64_t v = 0; v < args.V; ++v) {
    float* S = head.state + v * K;
    const float* U = head.U + v * C;
    for (int64_t d = 0; d < K; ++d) S[d] *= tile.total_decay[d];
    for (int64_t i = 0; i < chunk.tokens; ++i) {
      for (int64_t d = 0; d < K; ++d) S[d] += U[i] * tile.k_restored[i * K + d];
    }
  }
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  Arena arena(nullptr);
  const Records<Tile> tiles(args, most_chunks(args), arena);
  const Records<Head> heads(args, args.N, arena);
  return arena.used();
}

void forward(const KdaArgs& args) {
  const std::vector<Sequence> sequences = list_sequences(args);
  const std::vector<Chunk> chunks = list_chunks(args, sequences);
  const int64_t chunk_count = static_cast<int64_t>(chunks.size());
  Arena arena(args.workspace);
  const Records<Tile> tiles(args, most_chunks(args), arena);
  const Records<Head> heads(args, args.N, arena);

  {
    const Range range(args, "gate");
    launch("activate_gate", args, chunk_count, args.H,
           [&](int64_t c, int64_t h) { activate_gate(args, chunks[c], h, tiles.at(c, h)); });
    launch("accumulate_gate", args, chunk_count, args.H,
           [&](int64_t c, int64_t h) { accumulate_gate(args, chunks[c], tiles.at(c, h)); });
  }
  {
    const Range range(args, "intra_chunk");
    launch("apply_decay", args, chunk_count, args.H,
           [&](int64_t c, int64_t h) { apply_decay(args, chunks[c], h, tiles.at(c, h)); });
    launch("form_L_and_Mqk", args, chunk_count, args.H,
           [&](int64_t c, int64_t h) { form_L_and_Mqk(args, chunks[c], tiles.at(c, h)); });
    launch("invert_unit_lower", args, chunk_count, args.H,
           [&](int64_t c, int64_t h) { invert_unit_lower(args, chunks[c], tiles.at(c, h)); });
  }
  launch("recurrence", args, args.N, args.H, [&](int64_t n, int64_t h) {
    const Head head = heads.at(n, h);
    const auto state = [&](int64_t v, int64_t d) -> float& { return head.state[v * args.K + d]; };
    load_state(args, n, h, 0, args.V, state);
    for (int64_t begin = 0, c = sequences[n].first_chunk; begin < sequences[n].tokens; begin += args.chunk, ++c) {
      const Tile tile = tiles.at(c, h);
      correct_values(args, chunks[c], h, tile, head);
      write_output(args, chunks[c], h, tile, head);
      update_state(args, chunks[c], tile, head);
    }
    store_state(args, n, h, 0, args.V, state);
  });
}

}  // namespace kda::cpu::step3
