// Step 2, rebased_ex2: base 2
//
// Idea      The hardware has one exponential, 2^x (MUFU.EX2); expf(x) is 2^(x log2(e)) with a range reduction that
//           keeps the product exact. But a log-decay is a number we make ourselves: make it in base 2 from the start.
//           log2(e) goes into the two factors of the gate, and every exponential is one ex2.approx.ftz.f32.
// Changed   expf(x) -> ptx::ex2_approx_ftz(x_log2); gate_scale and gate_slope carry log2(e); names of logarithms end in
//           _log2. The sigmoid is base 2, too. Nothing else.
// Look for  SASS: MUFU.EX2 alone where step 1 had eight instructions. ncu: the same XU count in `intra_chunk`, fewer
//           FMA and ALU instructions; then the two durations. `recurrence` has three exponentials an element beside 3
//           * V FMAs: it gets a few percent shorter, and is so long that this is most of what the step gains.
// Cost      As step 1, less seven instructions an exponential.
// Numerics  As step 1. ex2.approx.ftz: relative error <= 2^-22, results below 2^-126 are 0. log2(e) is rounded once, in
//           a factor, not in every exponent.
// Next      kda-lab diff 2 3
#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/tensors.cuh"
#include "../common/workspace.h"

namespace kda::step2 {
namespace {

constexpr int K = 128, V = 128;  // the sizes these kernels are written for
constexpr int INTRA_THREADS = 128;

// What one kernel hands to the next. "Row" (token, h) is row token * H + h of each.
struct Workspace {
  float* g_cumsum_log2;  // [tokens, H, K] running sum of the log2-decay inside the chunk
  float* q_hat;          // [tokens, H, K] scale * q / |q|
  float* k_hat;          // [tokens, H, K] k / |k|
  float* INV_beta;       // [tokens, H, CHUNK] row i of (I + L)^-1 diag(beta); only columns j <= i exist
  float* Mqk;            // [tokens, H, CHUNK] row i; only columns j <= i exist
};

Workspace carve(const KdaArgs& args, Carver& carver) {
  const int64_t rows = args.B * args.T * args.H;
  return {carver.take<float>(rows * K), carver.take<float>(rows * K), carver.take<float>(rows * K),
          carver.take<float>(rows * args.chunk), carver.take<float>(rows * args.chunk)};
}

// ---- Stages of `gate` ----------------------------------------------------------------------------------------------

constexpr double LOG2E = 1.4426950408889634;

__device__ __forceinline__ float sigmoid_log2(float x_log2) { return 1.0f / (1.0f + ptx::ex2_approx_ftz(-x_log2)); }

// The log2-decay of one token and channel.
__device__ __forceinline__ float activate_gate(float g, float dt_bias, float gate_slope_log2, float gate_scale_log2) {
  return gate_scale_log2 * sigmoid_log2(gate_slope_log2 * saturate(g + dt_bias));
}

// Thread d sums channel d, from the chunk's first token on.
__device__ void accumulate_gate(const Tensors& x, const Workspace& w, Chunk chunk, int64_t h, float gate_scale_log2) {
  const int d = threadIdx.x;
  const float log2e = static_cast<float>(LOG2E), dt_bias = x.dt_bias[h * K + d];
  const float gate_slope_log2 = saturate(log2e * ptx::ex2_approx_ftz(log2e * x.A_log[h]));
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < chunk.tokens; ++i) {
    const int64_t element = ((chunk.start + i) * x.H + h) * K + d;
    sum += activate_gate(__bfloat162float(x.g[element]), dt_bias, gate_slope_log2, gate_scale_log2);
    w.g_cumsum_log2[element] = sum;
  }
}

// x_hat = factor * x / sqrt(|x|^2 + 1e-6), a warp per row, four neighbouring channels a lane.
__device__ void normalise_rows(float* x_hat,   // [tokens, H, K]
                               const bf16* x,  // [tokens, H, K]
                               Chunk chunk, int64_t h, int64_t H, float factor) {
  for (int i = threadIdx.x / 32; i < chunk.tokens; i += K / 32) {
    const int64_t element = ((chunk.start + i) * H + h) * K + threadIdx.x % 32 * 4;
    float y[4];
    load4(y, x + element);
    const float norm = factor * rsqrtf(warp_sum(dot4(y, y)) + 1e-6f);
    for (float& channel : y) channel *= norm;
    store4(x_hat + element, y);
  }
}

// ---- Stages of `intra_chunk` ---------------------------------------------------------------------------------------

// Rows of L and Mqk, a warp per row i, four neighbouring channels a lane. Only j <= i is ever read: a NaN in a later
// row stays there.
template <int CHUNK>
__device__ void form_L_and_Mqk(float (&L_smem)[CHUNK][CHUNK],  // strictly lower triangle is written
                               const float (&beta_smem)[CHUNK], const Workspace& w, Chunk chunk, int64_t h, int64_t H) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < chunk.tokens; i += INTRA_THREADS / 32) {
    const int64_t row_i = (chunk.start + i) * H + h;
    float g_i_log2[4], q_i[4], k_i[4];
    load4(g_i_log2, w.g_cumsum_log2 + row_i * K + lane * 4);
    load4(q_i, w.q_hat + row_i * K + lane * 4);
    load4(k_i, w.k_hat + row_i * K + lane * 4);
    for (int j = 0; j <= i; ++j) {
      const int64_t row_j = (chunk.start + j) * H + h;
      float g_j_log2[4], k_j[4], qk = 0.0f, kk = 0.0f;
      load4(g_j_log2, w.g_cumsum_log2 + row_j * K + lane * 4);
      load4(k_j, w.k_hat + row_j * K + lane * 4);
      for (int d = 0; d < 4; ++d) {
        const float k_decayed = k_j[d] * ptx::ex2_approx_ftz(g_i_log2[d] - g_j_log2[d]);
        qk += q_i[d] * k_decayed;
        kk += k_i[d] * k_decayed;
      }
      qk = warp_sum(qk), kk = warp_sum(kk);
      if (lane == 0) w.Mqk[row_i * CHUNK + j] = qk;
      if (lane == 0 && j < i) L_smem[i][j] = beta_smem[i] * kk;
    }
  }
}

// (I + L)^-1 by forward substitution, exact and in place: INV_i = e_i - sum_(m<i) L_im INV_m. Thread j owns column j.
template <int CHUNK>
__device__ void invert_unit_lower(float (&L_smem)[CHUNK][CHUNK],  // in: L, out: INV; columns j <= i of row i
                                  int tokens) {
  const int j = threadIdx.x;
  for (int i = 0; i < tokens; ++i) {
    float inv = i == j ? 1.0f : 0.0f;
    for (int m = j; m < i; ++m) inv -= L_smem[i][m] * L_smem[m][j];
    __syncthreads();  // every thread has read row i of L
    if (j <= i) L_smem[i][j] = inv;
  }
}

// ---- Stages of `recurrence`: four lanes share two rows of the state ------------------------------------------------

constexpr int ROWS = 2, LANES = 4;    // rows of S [V, K] a thread works on; lanes that share them
constexpr int QUADS = K / LANES / 4;  // groups of four neighbouring channels in a lane's share of a row
constexpr int RECURRENCE_THREADS = V / ROWS * LANES;
constexpr int U_PITCH = V + 8;  // eight rows v in each of four rows j: 32 different banks

// Row of S, and first channel of it, that this thread's state_reg[r][c] holds.
__device__ __forceinline__ int value_row(int r) { return threadIdx.x / LANES + r * (V / ROWS); }
__device__ __forceinline__ int channel(int c) { return (c * LANES + threadIdx.x % LANES) * 4; }

template <int CHUNK>
struct Smem {
  float rows[CHUNK][K];  // k_decayed, then q_decayed, then k_restored
  float U[CHUNK][U_PITCH];
  float INV_beta[CHUNK][CHUNK];
  float Mqk[CHUNK][CHUNK];
  float chunk_decay[K];  // exp2(G_C)
};

// Values, INV and Mqk of a chunk; U begins as V.
template <int CHUNK>
__device__ void load_chunk(Smem<CHUNK>& smem, const Workspace& w,
                           const bf16* v,  // [tokens, H, V]
                           int64_t row_0, int64_t H, int tokens) {
  for (int e = threadIdx.x; e < tokens * V; e += RECURRENCE_THREADS) {
    smem.U[e / V][e % V] = __bfloat162float(v[(row_0 + e / V * H) * V + e % V]);
  }
  for (int e = threadIdx.x; e < tokens * CHUNK; e += RECURRENCE_THREADS) {
    const int i = e / CHUNK, j = e % CHUNK;
    if (j > i) continue;
    smem.INV_beta[i][j] = w.INV_beta[(row_0 + i * H) * CHUNK + j];
    smem.Mqk[i][j] = w.Mqk[(row_0 + i * H) * CHUNK + j];
  }
}

// rows = x_hat * exp2(G): what of x is left when it reaches back to the chunk's start.
template <int CHUNK>
__device__ void apply_decay(Smem<CHUNK>& smem, const Workspace& w,
                            const float* x_hat,  // [tokens, H, K]
                            int64_t row_0, int64_t H, int tokens) {
  const int d = threadIdx.x % K;
#pragma unroll 4
  for (int i = threadIdx.x / K; i < tokens; i += RECURRENCE_THREADS / K) {
    const int64_t element = (row_0 + i * H) * K + d;
    smem.rows[i][d] = x_hat[element] * ptx::ex2_approx_ftz(w.g_cumsum_log2[element]);
  }
}

// rows = k_hat * exp2(G_C - G): what of k is left at the chunk's end; chunk_decay = exp2(G_C).
template <int CHUNK>
__device__ void restore_keys(Smem<CHUNK>& smem, const Workspace& w, int64_t row_0, int64_t H, int tokens) {
  const int d = threadIdx.x % K;
  const float g_end_log2 = w.g_cumsum_log2[(row_0 + (tokens - 1) * H) * K + d];
  if (threadIdx.x < K) smem.chunk_decay[d] = ptx::ex2_approx_ftz(g_end_log2);
#pragma unroll 4
  for (int i = threadIdx.x / K; i < tokens; i += RECURRENCE_THREADS / K) {
    const int64_t element = (row_0 + i * H) * K + d;
    smem.rows[i][d] = w.k_hat[element] * ptx::ex2_approx_ftz(g_end_log2 - w.g_cumsum_log2[element]);
  }
}

// This thread's share of S x for its rows of S.
__device__ __forceinline__ void multiply_state(float (&product)[ROWS], const float (&state_reg)[ROWS][QUADS][4],
                                               const float* x_smem) {  // [K]
#pragma unroll
  for (int c = 0; c < QUADS; ++c) {
    float x[4];
    load4(x, x_smem + channel(c));
    for (int r = 0; r < ROWS; ++r) product[r] += dot4(state_reg[r][c], x);
  }
}

// U = INV_beta (V - k_decayed S^T): what every token writes into the state, earlier tokens of the chunk considered.
template <int CHUNK>
__device__ void correct_values(Smem<CHUNK>& smem, const float (&state_reg)[ROWS][QUADS][4], int tokens) {
  const int lane = threadIdx.x % LANES;
  for (int i = 0; i < tokens; ++i) {
    float recalled[ROWS] = {};
    multiply_state(recalled, state_reg, smem.rows[i]);
    for (int r = 0; r < ROWS; ++r) {
      recalled[r] = warp_sum<LANES>(recalled[r]);
      if (lane == 0) smem.U[i][value_row(r)] -= recalled[r];
    }
  }
  __syncwarp();
  for (int i = tokens - 1; i >= 0; --i) {  // upwards and in place: row i needs rows j <= i as they were
    for (int r = 0; r < ROWS; ++r) {
      float u = 0.0f;
      for (int j = lane; j <= i; j += LANES) u += smem.INV_beta[i][j] * smem.U[j][value_row(r)];
      u = warp_sum<LANES>(u);
      __syncwarp();  // a shuffle orders no memory: row i has been read before it is replaced
      if (lane == 0) smem.U[i][value_row(r)] = u;
    }
  }
  __syncwarp();
}

// out = q_decayed S^T + Mqk U
template <int CHUNK>
__device__ void write_output(bf16* out,  // [tokens, H, V]
                             const Smem<CHUNK>& smem, const float (&state_reg)[ROWS][QUADS][4], int64_t row_0,
                             int64_t H, int tokens) {
  const int lane = threadIdx.x % LANES;
  for (int i = 0; i < tokens; ++i) {
    float o[ROWS] = {};
    multiply_state(o, state_reg, smem.rows[i]);
    for (int r = 0; r < ROWS; ++r) {
      for (int j = lane; j <= i; j += LANES) o[r] += smem.Mqk[i][j] * smem.U[j][value_row(r)];
      o[r] = warp_sum<LANES>(o[r]);
      if (lane == 0) out[(row_0 + i * H) * V + value_row(r)] = __float2bfloat16_rn(o[r]);
    }
  }
}

// S = S * exp2(G_C) + U^T k_restored
template <int CHUNK>
__device__ void update_state(float (&state_reg)[ROWS][QUADS][4], const Smem<CHUNK>& smem, int tokens) {
#pragma unroll
  for (int c = 0; c < QUADS; ++c) {
    float decay[4];
    load4(decay, smem.chunk_decay + channel(c));
    for (int r = 0; r < ROWS; ++r) {
      for (int d = 0; d < 4; ++d) state_reg[r][c][d] *= decay[d];
    }
  }
  for (int j = 0; j < tokens; ++j) {
#pragma unroll
    for (int c = 0; c < QUADS; ++c) {
      float k_restored[4];
      load4(k_restored, smem.rows[j] + channel(c));
      for (int r = 0; r < ROWS; ++r) {
        for (int d = 0; d < 4; ++d) state_reg[r][c][d] += smem.U[j][value_row(r)] * k_restored[d];
      }
    }
  }
}

// ---- Kernels -------------------------------------------------------------------------------------------------------

// Grid (chunk slots, H), a thread per channel.
template <int CHUNK>
__global__ void __launch_bounds__(K) gate(Tensors x, Workspace w, float scale, float gate_scale_log2) {
  const Chunk chunk = find_chunk<CHUNK>(x.sequences, blockIdx.x);
  const int64_t h = blockIdx.y;
  accumulate_gate(x, w, chunk, h, gate_scale_log2);
  normalise_rows(w.q_hat, x.q, chunk, h, x.H, scale);
  normalise_rows(w.k_hat, x.k, chunk, h, x.H, 1.0f);
}

// Grid (chunk slots, H).
template <int CHUNK>
__global__ void __launch_bounds__(INTRA_THREADS) intra_chunk(Tensors x, Workspace w) {
  __shared__ float L_smem[CHUNK][CHUNK];
  __shared__ float beta_smem[CHUNK];
  const Chunk chunk = find_chunk<CHUNK>(x.sequences, blockIdx.x);
  const int64_t h = blockIdx.y;
  const int j = threadIdx.x;
  if (j < chunk.tokens)
    beta_smem[j] = sigmoid_log2(static_cast<float>(LOG2E) * __bfloat162float(x.beta[(chunk.start + j) * x.H + h]));
  __syncthreads();
  form_L_and_Mqk(L_smem, beta_smem, w, chunk, h, x.H);
  __syncthreads();
  invert_unit_lower(L_smem, chunk.tokens);
  for (int i = j; i < chunk.tokens; ++i) {
    w.INV_beta[((chunk.start + i) * x.H + h) * CHUNK + j] = L_smem[i][j] * beta_smem[j];
  }
}

// Grid (N, H): a block walks through one sequence of one head, the state in registers from first chunk to last.
template <int CHUNK>
__global__ void __launch_bounds__(RECURRENCE_THREADS, 2) recurrence(Tensors x, Workspace w) {
  extern __shared__ float4 shared_memory[];
  Smem<CHUNK>& smem = *reinterpret_cast<Smem<CHUNK>*>(shared_memory);
  const int64_t n = blockIdx.x, h = blockIdx.y, H = x.H;
  float state_reg[ROWS][QUADS][4];
  for (int r = 0; r < ROWS; ++r) {
    const int64_t row = (n * H + h) * V + value_row(r);
    for (int c = 0; c < QUADS; ++c) load_state4(state_reg[r][c], x.initial_state, row * K + channel(c));
  }
  const Span span = find_sequence(x.sequences, n);
  for (int64_t start = span.start; start < span.end; start += CHUNK) {
    const int tokens = span.end - start < CHUNK ? static_cast<int>(span.end - start) : CHUNK;
    const int64_t row_0 = start * H + h;
    __syncthreads();  // the chunk before is done with shared memory
    load_chunk(smem, w, x.v, row_0, H, tokens);
    apply_decay(smem, w, w.k_hat, row_0, H, tokens);
    __syncthreads();
    correct_values(smem, state_reg, tokens);
    __syncthreads();
    apply_decay(smem, w, w.q_hat, row_0, H, tokens);
    __syncthreads();
    write_output(x.out, smem, state_reg, row_0, H, tokens);
    __syncthreads();
    restore_keys(smem, w, row_0, H, tokens);
    __syncthreads();
    update_state(state_reg, smem, tokens);
  }
  for (int r = 0; r < ROWS; ++r) {
    const int64_t row = (n * H + h) * V + value_row(r);
    for (int c = 0; c < QUADS; ++c) store_state4(x.final_state, row * K + channel(c), state_reg[r][c]);
  }
}

template <int CHUNK>
void run(const KdaArgs& args) {
  Carver carver(args.workspace);
  const Workspace w = carve(args, carver);
  const Tensors x = tensors_of(args);
  const dim3 chunks(chunk_slots(args, CHUNK), args.H), sequences(args.N, args.H);
  const float scale = static_cast<float>(args.scale);
  const float gate_scale_log2 = static_cast<float>(LOG2E * args.lower_bound);
  launch("gate", args, gate<CHUNK>, chunks, K, 0, x, w, scale, gate_scale_log2);
  launch("intra_chunk", args, intra_chunk<CHUNK>, chunks, INTRA_THREADS, 0, x, w);
  launch("recurrence", args, recurrence<CHUNK>, sequences, RECURRENCE_THREADS, sizeof(Smem<CHUNK>), x, w);
}

}  // namespace

int64_t workspace_bytes(const KdaArgs& args) {
  require_head_size(args, "rebased_ex2", K, V);
  Carver carver(nullptr);
  carve(args, carver);
  return carver.bytes();
}

void forward(const KdaArgs& args) {
  args.chunk == 16 ? run<16>(args) : args.chunk == 32 ? run<32>(args) : run<64>(args);
}

}  // namespace kda::step2
