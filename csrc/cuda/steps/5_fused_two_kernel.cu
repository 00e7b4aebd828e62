// Step 5, fused_two_kernel: what depends on no other chunk first, all at once; what must wait, last and short.
//
// Idea. Of one chunk's work only the state is serial. `prepare` computes everything else for every (chunk, head) at
// once, thousands of CTAs, and leaves one 13.8 KB image a chunk in the workspace; `recurrence`, one CTA per (sequence,
// head), walks over the images. This is the published design.
//
// What changed against step 4: where the two halves run, and nothing in them. The stage functions are the same, so the
// tensor-core and MUFU instructions of a chunk are the same, and the ratio of the two steps measures the split alone.
//   kda-lab diff 4 5
//
// How the state stays in registers. A warp owns 16 rows of S [V, K] as the fp32 accumulators of mma.m16n8k16 (rows v,
// columns k). Everything that touches S is computed transposed (rows v, columns tokens): then the accumulators, rounded
// to bf16, ARE the A operand of S k_decayed^T and S q_decayed^T, the result U^T is again the A operand of the update
// S += U^T k_restored, and no value crosses a warp.
//
// In the profiler: prepare is bound by device memory (770 B read, 864 B written a token and head); recurrence by
// latency, the chain of dependent products from chunk to chunk: few warps active, most of them waiting.
//
// Numbers. bf16 factors, each rounded once from fp32; fp32 sums; the state stays fp32 from first chunk to last, so an
// fp32 initial_state loses nothing. INV by forward substitution in fp32, exact to rounding for collinear keys. The
// sigmoid is 1 / (1 + 2^-x): tanh.approx loses the gates that retain. |lower_bound| * 16 may be 83.2 at most (step 3
// says why). A NaN reaches the other rows of its own chunk (0 * NaN in a product), no earlier chunk, other head or
// other sequence.
#include <cfloat>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/state_rows.cuh"
#include "../common/tensors.cuh"
#include "../common/tile.cuh"

namespace kda::step5 {

constexpr int CHUNK = 16;
constexpr int STAGES = 4;  // chunks under way between device memory and recurrence
constexpr float LOG2_E = 1.4426950408889634f;

using tile::high_float;
using tile::low_float;

// One chunk of one head, byte for byte as recurrence wants it in shared memory, so that both sides move it in 16-byte
// pieces and neither computes an address per element. D = K = V.
template <int D>
struct alignas(128) ChunkImage {
  bf16 k_decayed[CHUNK * D];     // token tile: k^ 2^G
  bf16 q_decayed[CHUNK * D];     // token tile: scale q^ 2^G
  bf16 k_restored[CHUNK * D];    // token tile: k^ 2^(G_C - G)
  float decay[D];                // 2^G_C
  bf16 Mqk[CHUNK * CHUNK];       // square tile
  bf16 INV_beta[CHUNK * CHUNK];  // square tile: INV diag(beta)
};

constexpr int TOKENS = 4;               // a thread of prepare has 4 channels of 4 tokens,
constexpr int GROUPS = CHUNK / TOKENS;  // D / 4 threads a whole row, 4 such groups the chunk

template <int D>
struct PrepareSmem {
  ChunkImage<D> image;
  bf16 k_inv[CHUNK * D];  // token tile: k^ 2^-G
  float L[CHUNK][CHUNK];
  float gate_total_log2[GROUPS][D];
  float beta[CHUNK];
};

// log2 of the decay of one token and channel. exp(A_log) = inf comes clamped, so that 0 * inf cannot make a NaN.
__device__ __forceinline__ float activate_gate(float g_raw, float dt_bias, float rate_log2, float gate_scale_log2) {
  return gate_scale_log2 * ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(-rate_log2 * (g_raw + dt_bias)));
}

// From g_log2 to G_log2, its running sum, in place. The groups before this one add what they sum up to through shared
// memory; G_C, the sum over the chunk, falls out on the way.
template <int D>
__device__ __forceinline__ void accumulate_gate(float (&G_log2)[TOKENS][4], float4& G_C_log2,
                                                float (&gate_total_log2_smem)[GROUPS][D], int group, int channel) {
#pragma unroll
  for (int t = 1; t < TOKENS; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) G_log2[t][c] += G_log2[t - 1][c];
  }
  const float (&total)[4] = G_log2[TOKENS - 1];
  store4(&gate_total_log2_smem[group][channel], total);
  __syncthreads();
  float4 before = {};
  G_C_log2 = {};
#pragma unroll
  for (int other = 0; other < GROUPS; ++other) {
    const float4 add = *reinterpret_cast<const float4*>(&gate_total_log2_smem[other][channel]);
    if (other == group) before = G_C_log2;
    G_C_log2 = {G_C_log2.x + add.x, G_C_log2.y + add.y, G_C_log2.z + add.z, G_C_log2.w + add.w};
  }
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    G_log2[t][0] += before.x, G_log2[t][1] += before.y, G_log2[t][2] += before.z, G_log2[t][3] += before.w;
  }
}

// 1 / |x| of this group's TOKENS rows of q and k, each row spread over D / 4 lanes; eps as in the definition.
template <int D>
__device__ __forceinline__ void normalise(float (&q_factor)[TOKENS], float (&k_factor)[TOKENS],
                                          const uint2 (&q_reg)[TOKENS], const uint2 (&k_reg)[TOKENS]) {
  constexpr int LANES = D / 4, LANES_PER_SUM = LANES / (2 * TOKENS);
  float squares[2 * TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float q[4], k[4];
    tile::unpack(q, q_reg[t]);
    tile::unpack(k, k_reg[t]);
    squares[t] = q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3];
    squares[TOKENS + t] = k[0] * k[0] + k[1] * k[1] + k[2] * k[2] + k[3] * k[3];
  }
  const float factor = ptx::rsqrt_approx_ftz(tile::group_sums<LANES / 2>(squares) + 1e-6f);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    q_factor[t] = __shfl_sync(0xffffffffu, factor, t * LANES_PER_SUM, LANES);
    k_factor[t] = __shfl_sync(0xffffffffu, factor, (TOKENS + t) * LANES_PER_SUM, LANES);
  }
}

// The four decayed forms of q^ and k^, each rounded once, from fp32.
template <int D>
__device__ __forceinline__ void apply_decay(PrepareSmem<D>& smem, const uint2 (&q_reg)[TOKENS],
                                            const uint2 (&k_reg)[TOKENS], const float (&G_log2)[TOKENS][4],
                                            float4 G_C_log2, int group, int channel, float scale) {
  float q_factor[TOKENS], k_factor[TOKENS];
  normalise<D>(q_factor, k_factor, q_reg, k_reg);
  const float G_C[4] = {G_C_log2.x, G_C_log2.y, G_C_log2.z, G_C_log2.w};
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float q[4], k[4], k_decayed[4], q_decayed[4], k_inv[4], k_restored[4];
    tile::unpack(q, q_reg[t]);
    tile::unpack(k, k_reg[t]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float decay = ptx::ex2_approx_ftz(G_log2[t][c]), k_unit = k_factor[t] * k[c];
      q_decayed[c] = scale * q_factor[t] * q[c] * decay;
      k_decayed[c] = k_unit * decay;
      k_inv[c] = k_unit * ptx::ex2_approx_ftz(-G_log2[t][c]);
      k_restored[c] = k_unit * ptx::ex2_approx_ftz(G_C[c] - G_log2[t][c]);
    }
    const int at = tile::swizzled<D>(group * TOKENS + t, channel);
    *reinterpret_cast<uint2*>(&smem.image.k_decayed[at]) = tile::pack(k_decayed);
    *reinterpret_cast<uint2*>(&smem.image.q_decayed[at]) = tile::pack(q_decayed);
    *reinterpret_cast<uint2*>(&smem.k_inv[at]) = tile::pack(k_inv);
    *reinterpret_cast<uint2*>(&smem.image.k_restored[at]) = tile::pack(k_restored);
  }
  if (group == 0) {
    const float decay[4] = {ptx::ex2_approx_ftz(G_C[0]), ptx::ex2_approx_ftz(G_C[1]), ptx::ex2_approx_ftz(G_C[2]),
                            ptx::ex2_approx_ftz(G_C[3])};
    store4(&smem.image.decay[channel], decay);
  }
}

// L = beta * tril(k_decayed k_inv^T, -1) in fp32, Mqk = tril(q_decayed k_inv^T) in bf16. Four jobs, each 8 columns of
// one.
template <int D>
__device__ __forceinline__ void form_L_and_Mqk(PrepareSmem<D>& smem, int job) {
  const int lane = threadIdx.x % 32, i = lane / 4, j0 = job % 2 * 8, j = j0 + lane % 4 * 2;
  const bf16* decayed_smem = job < 2 ? smem.image.k_decayed : smem.image.q_decayed;
  float sums[2][4] = {};  // two chains of products instead of one: half the latency
#pragma unroll
  for (int k0 = 0; k0 < D; k0 += 32) {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(b, ptx::smem_address(smem.k_inv + tile::swizzled<D>(j0 + lane % 8, k0 + lane / 8 * 8)));
    tile::load_a<D>(a, decayed_smem, k0);
    ptx::mma_m16n8k16_bf16(sums[0], a, {b[0], b[1]});
    tile::load_a<D>(a, decayed_smem, k0 + 16);
    ptx::mma_m16n8k16_bf16(sums[1], a, {b[2], b[3]});
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = i + half * 8;
    const float x = sums[0][half * 2] + sums[1][half * 2], y = sums[0][half * 2 + 1] + sums[1][half * 2 + 1];
    if (job < 2) {
      smem.L[row][j] = row > j ? smem.beta[row] * x : 0.0f;
      smem.L[row][j + 1] = row > j + 1 ? smem.beta[row] * y : 0.0f;
    } else {
      *reinterpret_cast<uint32_t*>(&smem.image.Mqk[tile::blocked(row, j)]) =
          ptx::cvt_rn_bf16x2(row >= j ? x : 0.0f, row >= j + 1 ? y : 0.0f);
    }
  }
}

// INV = (I + L)^-1, lane j solves for column j (lanes 16-31 repeat 0-15). Forward substitution: exact to fp32 rounding,
// whatever the keys; the Neumann series of the published kernel is not.
template <int D>
__device__ __forceinline__ void invert_unit_lower(PrepareSmem<D>& smem) {
  const int j = threadIdx.x % CHUNK;
  float column[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
    column[i] = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < i; ++m) column[i] -= smem.L[i][m] * column[m];
    smem.image.INV_beta[tile::blocked(i, j)] = __float2bfloat16_rn(column[i] * smem.beta[j]);
  }
}

// Grid: H x slots, heads fastest (they are neighbours in memory). One CTA prepares one chunk of one head.
template <int D>
__global__ void __launch_bounds__(D, 896 / D)
    prepare(Tensors tensors, ChunkImage<D>* __restrict__ images /* [slots, H] */, float scale, float gate_scale_log2) {
  __shared__ PrepareSmem<D> smem;
  const int H = static_cast<int>(tensors.H), h = blockIdx.x % H, slot = blockIdx.x / H;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = threadIdx.x / (D / 4), channel = threadIdx.x % (D / 4) * 4;
  const Chunk chunk = find_chunk<CHUNK>(tensors.sequences, slot);
  if (chunk.tokens == 0) return;

  uint2 q_reg[TOKENS], k_reg[TOKENS], g_reg[TOKENS];
  const int row_pitch = H * D, rows = chunk.tokens - group * TOKENS;  // rows of this group inside the sequence
  const int64_t first = (chunk.start + group * TOKENS) * row_pitch + h * D + channel;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    q_reg[t] = t < rows ? *reinterpret_cast<const uint2*>(tensors.q + first + t * row_pitch) : uint2{};
    k_reg[t] = t < rows ? *reinterpret_cast<const uint2*>(tensors.k + first + t * row_pitch) : uint2{};
    g_reg[t] = t < rows ? *reinterpret_cast<const uint2*>(tensors.g + first + t * row_pitch) : uint2{};
  }
  if (threadIdx.x < CHUNK) {
    const bool inside = threadIdx.x < chunk.tokens;
    const float logit = inside ? __bfloat162float(tensors.beta[(chunk.start + threadIdx.x) * H + h]) : 0.0f;
    smem.beta[threadIdx.x] = activate_gate(logit, 0.0f, LOG2_E, 1.0f);
  }

  float bias[4], G_log2[TOKENS][4];
  load4(bias, tensors.dt_bias + h * D + channel);
  const float rate = LOG2_E * expf(tensors.A_log[h]), rate_log2 = rate > FLT_MAX ? FLT_MAX : rate;  // a NaN stays one
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    tile::unpack(G_log2[t], g_reg[t]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // a row past the sequence's end does not decay
      G_log2[t][c] = t < rows ? activate_gate(G_log2[t][c], bias[c], rate_log2, gate_scale_log2) : 0.0f;
    }
  }
  float4 G_C_log2;
  accumulate_gate<D>(G_log2, G_C_log2, smem.gate_total_log2, group, channel);
  apply_decay<D>(smem, q_reg, k_reg, G_log2, G_C_log2, group, channel, scale);
  __syncthreads();
  for (int job = warp; job < 4; job += D / 32) form_L_and_Mqk<D>(smem, job);
  __syncthreads();

  // One warp inverts while the others move what is ready.
  ChunkImage<D>& image = images[blockIdx.x];
  if (warp == 0) {
    invert_unit_lower<D>(smem);
    __syncwarp();
    tile::copy<sizeof(image.INV_beta), 32>(image.INV_beta, smem.image.INV_beta, lane);
  } else {
    tile::copy<offsetof(ChunkImage<D>, INV_beta), D - 32>(&image, &smem.image, threadIdx.x - 32);
  }
}

// ---- recurrence: a warp owns 16 rows of the state ------------------------------------------------------------------

template <int D>
struct RecurrenceStage {
  ChunkImage<D> image;
  bf16 v[CHUNK * D];  // token tile
};

// The state as the A operand of products over k.
template <int D>
__device__ __forceinline__ void round_state(uint32_t (&S_bf16)[D / 16][4], const float (&S_reg)[D / 8][4]) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&S)[4] = S_reg[k * 2 + half];
      S_bf16[k][half * 2] = ptx::cvt_rn_bf16x2(S[0], S[1]);
      S_bf16[k][half * 2 + 1] = ptx::cvt_rn_bf16x2(S[2], S[3]);
    }
  }
}

// U^T = (V^T - S k_decayed^T) (INV diag(beta))^T, rounded to the A operand of the two products that follow.
template <int D>
__device__ __forceinline__ void correct_values(uint32_t (&U_reg)[4], const uint32_t (&S_bf16)[D / 16][4],
                                               const ChunkImage<D>& image, const bf16* v_smem) {
  const int lane = threadIdx.x % 32;
  float u[2][4] = {};
  uint32_t b[2][2];
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    tile::load_b_tokens<D>(b, image.k_decayed, k * 16);
    ptx::mma_m16n8k16_bf16(u[0], S_bf16[k], b[0]);
    ptx::mma_m16n8k16_bf16(u[1], S_bf16[k], b[1]);
  }
  uint32_t difference[4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = tile::swizzled<D>(j * 8 + lane / 4, threadIdx.x / 32 * 16 + lane % 4 * 4);
    const uint2 v = *reinterpret_cast<const uint2*>(&v_smem[at]);
    const uint32_t v0 = ptx::movmatrix_trans(v.x), v1 = ptx::movmatrix_trans(v.y);
    difference[j * 2] = ptx::cvt_rn_bf16x2(low_float(v0) - u[j][0], high_float(v0) - u[j][1]);
    difference[j * 2 + 1] = ptx::cvt_rn_bf16x2(low_float(v1) - u[j][2], high_float(v1) - u[j][3]);
  }
  float U[2][4] = {};
  tile::load_b_square(b, image.INV_beta);
  ptx::mma_m16n8k16_bf16(U[0], difference, b[0]);
  ptx::mma_m16n8k16_bf16(U[1], difference, b[1]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    U_reg[j * 2] = ptx::cvt_rn_bf16x2(U[j][0], U[j][1]);
    U_reg[j * 2 + 1] = ptx::cvt_rn_bf16x2(U[j][2], U[j][3]);
  }
}

// O^T = S q_decayed^T + U^T Mqk^T; the scale is in q_decayed.
template <int D>
__device__ __forceinline__ void write_output(bf16* __restrict__ out, const uint32_t (&U_reg)[4],
                                             const uint32_t (&S_bf16)[D / 16][4], const ChunkImage<D>& image,
                                             int tokens, int64_t row_pitch) {
  const int lane = threadIdx.x % 32;
  float o[2][4] = {};
  uint32_t b[2][2];
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    tile::load_b_tokens<D>(b, image.q_decayed, k * 16);
    ptx::mma_m16n8k16_bf16(o[0], S_bf16[k], b[0]);
    ptx::mma_m16n8k16_bf16(o[1], S_bf16[k], b[1]);
  }
  tile::load_b_square(b, image.Mqk);
  ptx::mma_m16n8k16_bf16(o[0], U_reg, b[0]);
  ptx::mma_m16n8k16_bf16(o[1], U_reg, b[1]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint2 pairs = {ptx::movmatrix_trans(ptx::cvt_rn_bf16x2(o[j][0], o[j][1])),
                         ptx::movmatrix_trans(ptx::cvt_rn_bf16x2(o[j][2], o[j][3]))};
    const int token = j * 8 + lane / 4;
    if (token < tokens) {
      *reinterpret_cast<uint2*>(out + token * row_pitch + threadIdx.x / 32 * 16 + lane % 4 * 4) = pairs;
    }
  }
}

// S <- S diag(decay) + U^T k_restored.
template <int D>
__device__ __forceinline__ void update_state(float (&S_reg)[D / 8][4], const uint32_t (&U_reg)[4],
                                             const ChunkImage<D>& image) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t b[2][2];
    tile::load_b_columns<D>(b, image.k_restored, k * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float (&S)[4] = S_reg[k * 2 + half];
      const float2 decay = *reinterpret_cast<const float2*>(&image.decay[k * 16 + half * 8 + threadIdx.x % 4 * 2]);
      S[0] *= decay.x, S[1] *= decay.y, S[2] *= decay.x, S[3] *= decay.y;
      ptx::mma_m16n8k16_bf16(S, U_reg, b[half]);
    }
  }
}

// Starts the copies of one chunk. Rows past the sequence's end are filled with zeros and not read: they are another's.
template <int D>
__device__ __forceinline__ void load_chunk(RecurrenceStage<D>& stage, const ChunkImage<D>* image, const bf16* v,
                                           int tokens, int64_t row_pitch) {
  const auto* source = reinterpret_cast<const uint4*>(image);
  auto* target = reinterpret_cast<uint4*>(&stage.image);
  constexpr int GRANULES = sizeof(ChunkImage<D>) / sizeof(uint4), THREADS = 2 * D;
#pragma unroll
  for (int first = 0; first < GRANULES; first += THREADS) {
    const int i = first + threadIdx.x;
    if (i < GRANULES) ptx::cp_async_16(ptx::smem_address(target + i), source + i);
  }
  const int token = threadIdx.x / (D / 8), column = threadIdx.x % (D / 8) * 8;  // 2 D threads: one granule each
  const bool inside = token < tokens;
  ptx::cp_async_16(ptx::smem_address(&stage.v[tile::swizzled<D>(token, column)]),
                   v + (inside ? token * row_pitch + column : 0), inside ? 16 : 0);
}

// Grid: N x H. One CTA carries the state of one head through one sequence.
template <int D>
__global__ void __launch_bounds__(2 * D, 1)
    recurrence(Tensors tensors, const ChunkImage<D>* __restrict__ images /* [slots, H] */) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  auto* stages = reinterpret_cast<RecurrenceStage<D>*>(smem_bytes);
  const int H = static_cast<int>(tensors.H), h = blockIdx.x % H;
  const int64_t n = blockIdx.x / H;
  const Span span = find_sequence(tensors.sequences, n);
  const int64_t row_pitch = int64_t{H} * D, state_offset = (n * H + h) * D * D;
  const int64_t head_offset = span.start * row_pitch + h * D;
  const int64_t length = span.end - span.start, chunks = (length + CHUNK - 1) / CHUNK;
  const ChunkImage<D>* head_images = images + first_slot<CHUNK>(tensors.sequences, n) * H + h;

  float S_reg[D / 8][4];
  load_state_rows<D>(S_reg, tensors.initial_state, state_offset);
  const auto prefetch = [&](int64_t c) {
    if (c < chunks) {
      const int tokens = static_cast<int>(min(int64_t{CHUNK}, length - c * CHUNK));
      load_chunk<D>(stages[c % STAGES], head_images + c * H, tensors.v + head_offset + c * CHUNK * row_pitch, tokens,
                    row_pitch);
    }
    ptx::cp_async_commit_group();  // an empty group keeps the count of groups the count of chunks
  };
  for (int c = 0; c < STAGES - 1; ++c) prefetch(c);

  for (int64_t c = 0; c < chunks; ++c) {
    ptx::cp_async_wait_group<STAGES - 2>();
    __syncthreads();  // chunk c has landed for everyone, and everyone has left the stage that is filled next
    prefetch(c + STAGES - 1);
    const RecurrenceStage<D>& stage = stages[c % STAGES];
    uint32_t S_bf16[D / 16][4], U_reg[4];
    round_state<D>(S_bf16, S_reg);
    correct_values<D>(U_reg, S_bf16, stage.image, stage.v);
    const int tokens = static_cast<int>(min(int64_t{CHUNK}, length - c * CHUNK));
    write_output<D>(tensors.out + head_offset + c * CHUNK * row_pitch, U_reg, S_bf16, stage.image, tokens, row_pitch);
    update_state<D>(S_reg, U_reg, stage.image);
  }
  store_state_rows<D>(S_reg, tensors.final_state, state_offset);
}

// ---- host ----------------------------------------------------------------------------------------------------------

int64_t workspace_bytes(const KdaArgs& args) {
  if (args.K != args.V || (args.K != 64 && args.K != 128)) {
    throw Error(KDA_UNSUPPORTED, format("K = %lld, V = %lld: fused_two_kernel on CUDA runs K = V = 64 and K = V = 128",
                                        static_cast<long long>(args.K), static_cast<long long>(args.V)));
  }
  const int64_t image_bytes = args.K == 64 ? sizeof(ChunkImage<64>) : sizeof(ChunkImage<128>);
  return chunk_slots(args, CHUNK) * args.H * image_bytes;
}

template <int D>
void run(const KdaArgs& args) {
  const Tensors tensors = tensors_of(args);
  auto* images = static_cast<ChunkImage<D>*>(args.workspace);
  launch("prepare", args, prepare<D>, dim3(chunk_slots(args, CHUNK) * args.H), dim3(D), 0, tensors, images,
         static_cast<float>(args.scale), static_cast<float>(args.lower_bound * double{LOG2_E}));
  launch("recurrence", args, recurrence<D>, dim3(args.N * args.H), dim3(2 * D), STAGES * sizeof(RecurrenceStage<D>),
         tensors, images);
}

void forward(const KdaArgs& args) {
  require_rounded_keys(args, "fused_two_kernel");
  args.K == 64 ? run<64>(args) : run<128>(args);
}

}  // namespace kda::step5
