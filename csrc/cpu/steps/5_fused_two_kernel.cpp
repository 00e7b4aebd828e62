// Step 5, two kernels: everything that can be done for all chunks at once, then everything that cannot.
//
// Idea       prepare takes a chunk and head from its inputs to the six small matrices that recurrence needs, in one go:
//            the stages of step 3 run on a vector of channels at a time, in registers and the L1 cache. recurrence
//            carries the state from chunk to chunk as products of register tiles.
// Changed    From step 3 (`kda-lab diff 3 5`): passes over memory became two kernels; vectors instead of scalars; the
//            state is kept transposed, [K, values], so that a vector holds one channel of many values and no sum runs
//            across lanes; beta is folded into INV; k_restored is k_inv times the chunk's decay.
// Profiler   prepare and recurrence take turns on spans of a few hundred chunks, so that what one writes for the other
//            stays near the core: add up their ranges. recurrence does 90 % of the arithmetic in two thirds of the
//            time; its inner loop is loads and two fused multiply-adds a cycle. prepare waits for memory and exp2.
// Cost       Per token and head at K = V = 128: 117,760 FLOP (prepare 11,264, recurrence 106,496), 384 exponentials,
//            1.3 KB of inputs and output.
// Numerics   As step 3: fp32, |lower_bound| * 16 <= 87, an exact inverse. exp2 is a polynomial within 1.5 ulp. Sums
//            stop at the diagonal instead of adding zeros: 0 * NaN would carry a NaN to the tokens before it.
#include <math.h>

#include "../common/arena.h"
#include "../common/launch.h"
#include "../common/scalar.h"
#include "../common/sequences.h"
#include "../common/simd.h"

namespace kda::cpu::step5 {
namespace {

constexpr int kChunk = 16;
constexpr int kChunkVecs = kChunk / kLanes;
constexpr int kBlock = 2 * kLanes;   // values of a register tile
constexpr int64_t kSpanTiles = 256;  // 7 MB at K = 128
constexpr float kLog2e = 1.44269504f;

int64_t padded_K(const KdaArgs& args) { return (args.K + 15) / 16 * 16; }
int64_t value_blocks(const KdaArgs& args) { return (args.V + kBlock - 1) / kBlock; }

// What prepare hands to recurrence for one chunk and head, fp32. Tokens past the end of a sequence and channels past K
// (Kp = K rounded up) are zeros, which change nothing, so no loop needs a tail.
struct Tile {
  float* out_scale;    // [16]      scale, times what 1e-6 leaves of the length of q / |q|
  float* q_decayed;    // [16, Kp]  q / |q| * 2^G
  float* k_decayed;    // [16, Kp]  k / |k| * 2^G
  float* k_restored;   // [16, Kp]  k / |k| * 2^(G_C - G)
  float* total_decay;  // [Kp]      2^G_C
  float* Mqk;          // [16, 16]  lower triangular
  float* INV_beta;     // [16, 16]  (I + L)^-1 diag(beta), lower triangular

  static Tile place(const KdaArgs& args, Arena& arena) {
    const int64_t Kp = padded_K(args);
    return {arena.floats(kChunk), arena.floats(kChunk, Kp),     arena.floats(kChunk, Kp),    arena.floats(kChunk, Kp),
            arena.floats(Kp),     arena.floats(kChunk, kChunk), arena.floats(kChunk, kChunk)};
  }
};

// What one sequence and head keeps in recurrence, fp32.
struct Head {
  float* state;  // [value blocks, Kp, kBlock]
  int64_t Kp;

  static Head place(const KdaArgs& args, Arena& arena) {
    return {arena.floats(value_blocks(args), padded_K(args), kBlock), padded_K(args)};
  }
  float* block(int64_t b) const { return state + b * Kp * kBlock; }  // [Kp, kBlock]
  float& operator()(int64_t v, int64_t d) const { return block(v / kBlock)[d * kBlock + v % kBlock]; }
};

// What prepare keeps for one chunk and head while it works, all in the L1 cache.
struct Scratch {
  float q_scale[kChunk];      // 1 / |q|; 0 past the end of the sequence
  float k_scale[kChunk];      // 1 / |k|
  float beta[kChunk];         // sigmoid(beta)
  Vec g_cumsum_log2[kChunk];  // [16, kLanes]  kLanes channels at a time
  Vec k_inv[kChunk];          // [16, kLanes]  k / |k| * 2^-G of those channels
  float L[kChunk * kChunk];   // [16, 16]
};

// acc[r] += sum_n a[r, n] * b[n], rows of vectors; element (r, n) of a is at a[r * a_row + n * a_step].
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_add(Vec (&acc)[ROWS][VECS], const float* a, int64_t a_row,
                                                        int64_t a_step, const float* b, int64_t b_step, int64_t count) {
  for (int64_t n = 0; n < count; ++n, a += a_step, b += b_step) {
    Vec row[VECS];
    for (int c = 0; c < VECS; ++c) row[c] = load(b + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < VECS; ++c) acc[r][c] += a[r * a_row] * row[c];
    }
  }
}

// The same for ROWS rows of a lower triangular matrix that start at column 0 of a: row r sums columns 0 to r only.
template <int ROWS, int VECS>
inline __attribute__((always_inline)) void multiply_add_lower(Vec (&acc)[ROWS][VECS], const float* a, int64_t a_row,
                                                              const float* b, int64_t b_step) {
#pragma GCC unroll 16
  for (int n = 0; n < ROWS; ++n) {
    Vec row[VECS];
    for (int c = 0; c < VECS; ++c) row[c] = load(b + n * b_step + c * kLanes);
#pragma GCC unroll 16
    for (int r = n; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < VECS; ++c) acc[r][c] += a[r * a_row + n] * row[c];
    }
  }
}

Vec sigmoid_log2(Vec x_log2) { return 1.0f / (1.0f + exp2(-x_log2)); }

// What needs all of K: the norms; and beta.
void normalize(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile, Scratch& scratch) {
  const auto norm_of = [&](const void* tensor, int64_t row) {
    const bf16* x = token(tensor, args, args.K, row, h);
    return norm(x, args.K, sum_of_squares(x, args.K));
  };
  for (int64_t i = 0; i < chunk.tokens; ++i) {  // rows of a head are far apart: ask for all before the first is needed
    for (const void* tensor : {args.q, args.k, args.g}) {
      const bf16* x = token(tensor, args, args.K, chunk.first_row + i, h);
      for (int64_t d = 0; d < args.K; d += 32) __builtin_prefetch(x + d);
    }
  }
  for (int64_t i = 0; i < kChunk; ++i) {
    const bool is_token = i < chunk.tokens;
    const int64_t row = chunk.first_row + i;
    const Norm q = is_token ? norm_of(args.q, row) : Norm{}, k = is_token ? norm_of(args.k, row) : Norm{};
    scratch.q_scale[i] = q.reciprocal;
    scratch.k_scale[i] = k.reciprocal * k.length;
    scratch.beta[i] = is_token ? 1.0f / (1.0f + expf(-*token(args.beta, args, 1, row, h))) : 0.0f;
    tile.out_scale[i] = static_cast<float>(args.scale) * q.length;
  }
}

// g_log2 of kLanes channels from d on, into g_cumsum_log2; 0 past the end of the sequence.
void activate_gate(const KdaArgs& args, const Chunk& chunk, int64_t h, int64_t d, Scratch& scratch) {
  const Vec dt_bias = load_first(args.dt_bias + h * args.K + d, args.K - d);
  const float gate_slope_log2 = saturate(kLog2e * expf(args.A_log[h]));
  const float gate_scale_log2 = static_cast<float>(1.4426950408889634 * args.lower_bound);
  for (int64_t i = 0; i < kChunk; ++i) {
    scratch.g_cumsum_log2[i] = Vec{};
    if (i >= chunk.tokens) continue;
    const Vec g_raw = load_first(token(args.g, args, args.K, chunk.first_row + i, h) + d, args.K - d);
    const Vec argument_log2 = gate_slope_log2 * clamp(g_raw + dt_bias, -FLT_MAX, FLT_MAX);
    scratch.g_cumsum_log2[i] = gate_scale_log2 * sigmoid_log2(argument_log2);
  }
}

void accumulate_gate(Scratch& scratch) {
  for (int i = 1; i < kChunk; ++i) scratch.g_cumsum_log2[i] += scratch.g_cumsum_log2[i - 1];
}

void apply_decay(const KdaArgs& args, const Chunk& chunk, int64_t h, int64_t d, const Tile& tile, Scratch& scratch) {
  const int64_t Kp = padded_K(args);
  const Vec total_decay = exp2(scratch.g_cumsum_log2[kChunk - 1]);
  store(tile.total_decay + d, total_decay);
  for (int64_t i = 0; i < kChunk; ++i) {
    const bool is_token = i < chunk.tokens;
    const int64_t row = chunk.first_row + i;
    const Vec q = is_token ? load_first(token(args.q, args, args.K, row, h) + d, args.K - d) : Vec{};
    const Vec k = is_token ? load_first(token(args.k, args, args.K, row, h) + d, args.K - d) : Vec{};
    const Vec decay = exp2(scratch.g_cumsum_log2[i]);
    const Vec k_hat = scratch.k_scale[i] * k;
    scratch.k_inv[i] = k_hat * exp2(-scratch.g_cumsum_log2[i]);
    store(tile.q_decayed + i * Kp + d, scratch.q_scale[i] * q * decay);
    store(tile.k_decayed + i * Kp + d, k_hat * decay);
    store(tile.k_restored + i * Kp + d, scratch.k_inv[i] * total_decay);
  }
}

// L += k_decayed k_inv^T and Mqk += q_decayed k_inv^T over kLanes channels from d on. All columns of a row are
// computed; those past the diagonal are never read.
void form_L_and_Mqk(int64_t Kp, int64_t d, const Tile& tile, Scratch& scratch) {
  constexpr int kRows = 2 * kTileRows;  // the same number of accumulators as in recurrence
  for (int j = 0; j < kChunk; j += kLanes) {
    transpose(scratch.k_inv + j);
    const float* k_inv_T = reinterpret_cast<const float*>(scratch.k_inv + j);  // [kLanes, tokens from j on]
    const auto accumulate = [&](const float* decayed, float* product) {
      for (int i = 0; i < kChunk; i += kRows) {
        Vec acc[kRows][1];
        for (int r = 0; r < kRows; ++r) acc[r][0] = load(product + (i + r) * kChunk + j);
        multiply_add(acc, decayed + i * Kp + d, Kp, 1, k_inv_T, kLanes, kLanes);
        for (int r = 0; r < kRows; ++r) store(product + (i + r) * kChunk + j, acc[r][0]);
      }
    };
    accumulate(tile.k_decayed, scratch.L);
    accumulate(tile.q_decayed, tile.Mqk);
  }
}

// INV = (I + L)^-1 by forward substitution: INV_i = I_i - sum_(j<i) beta_i L_ij INV_j, whole rows at a time; then its
// columns times beta.
void invert_unit_lower(const Tile& tile, const Scratch& scratch) {
  float* INV = tile.INV_beta;
  for (int i = 0; i < kChunk; ++i) {
    Vec row[1][kChunkVecs] = {};
    multiply_add(row, scratch.L + i * kChunk, 0, 1, INV, kChunk, i);
    for (int c = 0; c < kChunkVecs; ++c) store(INV + i * kChunk + c * kLanes, -scratch.beta[i] * row[0][c]);
    INV[i * kChunk + i] = 1.0f;
  }
  for (int i = 0; i < kChunk; ++i) {
    for (int c = 0; c < kChunkVecs; ++c) {
      float* at = INV + i * kChunk + c * kLanes;
      store(at, load(at) * load(scratch.beta + c * kLanes));
    }
  }
}

// Kernel 1: one chunk and head.
void prepare(const KdaArgs& args, const Chunk& chunk, int64_t h, const Tile& tile) {
  const int64_t Kp = padded_K(args);
  Scratch scratch;
  std::fill_n(scratch.L, kChunk * kChunk, 0.0f);
  std::fill_n(tile.Mqk, kChunk * kChunk, 0.0f);
  normalize(args, chunk, h, tile, scratch);
  for (int64_t d = 0; d < Kp; d += kLanes) {
    activate_gate(args, chunk, h, d, scratch);
    accumulate_gate(scratch);
    apply_decay(args, chunk, h, d, tile, scratch);
    form_L_and_Mqk(Kp, d, tile, scratch);
  }
  invert_unit_lower(tile, scratch);
}

// U [16, kBlock] = INV_beta (V - k_decayed S)
void correct_values(const KdaArgs& args, const Chunk& chunk, int64_t h, int64_t v, const Tile& tile, const float* S,
                    float* U) {
  const int64_t Kp = padded_K(args);
  float difference[kChunk * kBlock];
  for (int64_t i = 0; i < chunk.tokens; ++i)
    __builtin_prefetch(token(args.v, args, args.V, chunk.first_row + i, h) + v);
  for (int i = 0; i < kChunk; i += kTileRows) {
    Vec acc[kTileRows][2] = {};
    multiply_add(acc, tile.k_decayed + i * Kp, Kp, 1, S, kBlock, Kp);
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < 2; ++c) {
        const int64_t at = v + c * kLanes;
        const bool is_token = i + r < chunk.tokens;
        const Vec value = is_token && at < args.V
                              ? load_first(token(args.v, args, args.V, chunk.first_row + i + r, h) + at, args.V - at)
                              : Vec{};
        store(difference + (i + r) * kBlock + c * kLanes, value - acc[r][c]);
      }
    }
  }
  for (int i = 0; i < kChunk; i += kTileRows) {
    Vec acc[kTileRows][2] = {};
    multiply_add(acc, tile.INV_beta + i * kChunk, kChunk, 1, difference, kBlock, i);
    multiply_add_lower(acc, tile.INV_beta + i * kChunk + i, kChunk, difference + i * kBlock, kBlock);
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < 2; ++c) store(U + (i + r) * kBlock + c * kLanes, acc[r][c]);
    }
  }
}

// out = out_scale (q_decayed S + Mqk U)
void write_output(const KdaArgs& args, const Chunk& chunk, int64_t h, int64_t v, const Tile& tile, const float* S,
                  const float* U) {
  const int64_t Kp = padded_K(args);
  for (int i = 0; i < kChunk; i += kTileRows) {
    Vec acc[kTileRows][2] = {};
    multiply_add(acc, tile.q_decayed + i * Kp, Kp, 1, S, kBlock, Kp);
    multiply_add(acc, tile.Mqk + i * kChunk, kChunk, 1, U, kBlock, i);
    multiply_add_lower(acc, tile.Mqk + i * kChunk + i, kChunk, U + i * kBlock, kBlock);
    for (int r = 0; r < kTileRows && i + r < chunk.tokens; ++r) {
      bf16* out = token(args.out, args, args.V, chunk.first_row + i + r, h);
      for (int c = 0; c < 2; ++c) {
        const int64_t at = v + c * kLanes;
        if (at < args.V) store_first(out + at, tile.out_scale[i + r] * acc[r][c], args.V - at);
      }
    }
  }
}

// S = diag(total_decay) S + k_restored^T U, from the chunk's tokens only: U has NaN past an infinite one.
void update_state(const KdaArgs& args, const Chunk& chunk, const Tile& tile, float* S, const float* U) {
  const int64_t Kp = padded_K(args);
  for (int64_t d = 0; d < Kp; d += kTileRows) {
    Vec acc[kTileRows][2];
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < 2; ++c) acc[r][c] = load(S + (d + r) * kBlock + c * kLanes) * tile.total_decay[d + r];
    }
    multiply_add(acc, tile.k_restored + d, 1, Kp, U, kBlock, chunk.tokens);
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < 2; ++c) store(S + (d + r) * kBlock + c * kLanes, acc[r][c]);
    }
  }
}

// Kernel 2: one chunk, head and block of values from v on. S is [Kp, kBlock].
void recurrence(const KdaArgs& args, const Chunk& chunk, int64_t h, int64_t v, const Tile& tile, float* S) {
  float U[kChunk * kBlock];
  correct_values(args, chunk, h, v, tile, S, U);
  write_output(args, chunk, h, v, tile, S, U);
  update_state(args, chunk, tile, S, U);
}

// Chunks of each sequence that prepare does before recurrence takes over. More would push their matrices out of the
// cache; with fewer, threads wait more often at the two barriers of a span for one that a busy system put to sleep.
int64_t span_chunks(const KdaArgs& args) {
  const int64_t heads = std::max<int64_t>(1, args.N * args.H);
  return std::clamp<int64_t>(kSpanTiles / heads, 4, std::max<int64_t>(4, args.T / kChunk + 1));
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  Arena arena(nullptr);
  const Records<Tile> tiles(args, args.N * span_chunks(args), arena);
  const Records<Head> heads(args, args.N, arena);
  return arena.used();
}

void forward(const KdaArgs& args) {
  const std::vector<Sequence> sequences = list_sequences(args);
  int64_t most_tokens = 1;  // one span at least: a sequence without tokens still has a state to hand on
  for (const Sequence& sequence : sequences) most_tokens = std::max(most_tokens, sequence.tokens);
  const int64_t span = span_chunks(args), blocks = value_blocks(args);
  // Values never meet, so a head can be split among threads; whole heads read what prepare wrote only once, though.
  const int64_t splits = std::clamp<int64_t>(2 * thread_count() / std::max<int64_t>(1, args.N * args.H), 1, blocks);
  Arena arena(args.workspace);
  const Records<Tile> tiles(args, args.N * span, arena);
  const Records<Head> heads(args, args.N, arena);

  for (int64_t begin = 0, end = span * kChunk; begin < most_tokens; begin = end, end += span * kChunk) {
    launch("prepare", args, args.N * span, args.H, [&](int64_t tile, int64_t h) {
      const Chunk chunk = chunk_at(args, sequences[tile / span], begin + tile % span * kChunk);
      if (chunk.tokens > 0) prepare(args, chunk, h, tiles.at(tile, h));
    });
    launch("recurrence", args, args.N * args.H, splits, [&](int64_t nh, int64_t split) {
      const int64_t n = nh / args.H, h = nh % args.H;
      const int64_t first = split * blocks / splits, last = (split + 1) * blocks / splits;
      const int64_t v = first * kBlock, v_end = std::min(last * kBlock, args.V);
      const Head head = heads.at(n, h);
      if (begin == 0) {
        std::fill(head.block(first), head.block(last), 0.0f);
        load_state(args, n, h, v, v_end, head);
      }
      for (int64_t i = 0; i < span; ++i) {
        const Chunk chunk = chunk_at(args, sequences[n], begin + i * kChunk);
        if (chunk.tokens == 0) break;
        for (int64_t b = first; b < last; ++b) {
          recurrence(args, chunk, h, b * kBlock, tiles.at(n * span + i, h), head.block(b));
        }
      }
      if (end >= most_tokens) store_state(args, n, h, v, v_end, head);
    });
  }
}

}  // namespace kda::cpu::step5
