// Step 4, fused_one_kernel: everything of one (sequence, head) in one kernel, on tensor cores.
//
// Idea. Steps 1-3 write L, Mqk, INV and the decayed tensors to device memory in fp32 and read them back. Here one CTA
// carries a head through its sequence and all of that stays on chip: read q, k, v, g, beta once, write out once. With
// the factored form every large product is a matrix product, so it moves to the tensor cores: bf16 factors, fp32 sums.
//
// What changed against step 3: one kernel instead of three; bf16 factors for mma.sync (hence the tighter bound:
// |lower_bound| * 16 <= 83.2); the state in registers. The stages and their names are the same.
//   kda-lab diff 3 4
//
// How the state stays in registers. A warp owns 16 rows of S [V, K] as the fp32 accumulators of mma.m16n8k16 (rows v,
// columns k). Everything that touches S is computed transposed (rows v, columns tokens): then the accumulators, rounded
// to bf16, ARE the A operand of S k_decayed^T and S q_decayed^T, the result U^T is again the A operand of the update
// S += U^T k_restored, and no value crosses a warp.
//
// In the profiler: one kernel, N x H CTAs, few for the chip when sequences are few; within a chunk each stage waits for
// the one before (four barriers), so neither memory nor tensor cores are busy. What no other chunk waits for is in the
// way of what the next chunk needs: step 5 takes it out.
//
// Numbers. bf16 factors, each rounded once from fp32; fp32 sums; the state stays fp32 from first chunk to last, so an
// fp32 initial_state loses nothing. INV by forward substitution in fp32, exact to rounding for collinear keys. The
// sigmoid is 1 / (1 + 2^-x): tanh.approx loses the gates that retain. A NaN reaches the other rows of its own chunk (0
// * NaN in a product), no earlier chunk, other head or other sequence.
#include <cfloat>

#include "../common/launch.cuh"
#include "../common/ptx.cuh"
#include "../common/state_rows.cuh"
#include "../common/tensors.cuh"
#include "../common/tile.cuh"

namespace kda::step4 {

constexpr int CHUNK = 16;
constexpr float LOG2_E = 1.4426950408889634f;

using tile::high_float;
using tile::low_float;

// What the recurrence needs of one chunk of one head, in shared memory. D = K = V.
template <int D>
struct alignas(128) ChunkImage {
  bf16 k_decayed[CHUNK * D];     // token tile: k^ 2^G
  bf16 q_decayed[CHUNK * D];     // token tile: scale q^ 2^G
  bf16 k_restored[CHUNK * D];    // token tile: k^ 2^(G_C - G)
  float decay[D];                // 2^G_C
  bf16 Mqk[CHUNK * CHUNK];       // square tile
  bf16 INV_beta[CHUNK * CHUNK];  // square tile: INV diag(beta)
};

constexpr int TOKENS = 2;               // a thread prepares 4 channels of 2 tokens,
constexpr int GROUPS = CHUNK / TOKENS;  // D / 4 threads a whole row, 8 such groups the chunk

template <int D>
struct Smem {
  ChunkImage<D> image;
  bf16 v[2][CHUNK * D];   // token tiles: this chunk's and the next one's
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
__device__ __forceinline__ void apply_decay(Smem<D>& smem, const uint2 (&q_reg)[TOKENS], const uint2 (&k_reg)[TOKENS],
                                            const float (&G_log2)[TOKENS][4], float4 G_C_log2, int group, int channel,
                                            float scale) {
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
__device__ __forceinline__ void form_L_and_Mqk(Smem<D>& smem, int job) {
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
__device__ __forceinline__ void invert_unit_lower(Smem<D>& smem) {
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

// ---- recurrence: a warp owns 16 rows of the state ------------------------------------------------------------------

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
                                             int tokens, int row_pitch) {
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

// One row group's share of a chunk of q, k and g: TOKENS rows of 4 channels. Rows past the sequence's end are not read.
struct Rows {
  uint2 q[TOKENS], k[TOKENS], g[TOKENS];
  float beta_logit;
};

__device__ __forceinline__ void load_rows(Rows& next, const Tensors& tensors, int64_t start, int tokens, int group,
                                          int64_t head_channel, int row_pitch, int h) {
  const int64_t first = (start + group * TOKENS) * row_pitch + head_channel;
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const bool inside = group * TOKENS + t < tokens;
    next.q[t] = inside ? *reinterpret_cast<const uint2*>(tensors.q + first + t * row_pitch) : uint2{};
    next.k[t] = inside ? *reinterpret_cast<const uint2*>(tensors.k + first + t * row_pitch) : uint2{};
    next.g[t] = inside ? *reinterpret_cast<const uint2*>(tensors.g + first + t * row_pitch) : uint2{};
  }
  const bool inside = threadIdx.x < tokens;
  next.beta_logit = inside ? __bfloat162float(tensors.beta[(start + threadIdx.x) * tensors.H + h]) : 0.0f;
}

// Starts the copy of a chunk of v. Rows past the sequence's end are filled with zeros and not read: they are another's.
template <int D>
__device__ __forceinline__ void load_values(bf16* v_smem, const bf16* v, int tokens, int row_pitch) {
  const int token = threadIdx.x / (D / 8), column = threadIdx.x % (D / 8) * 8;  // 2 D threads: 16 bytes each
  const bool inside = token < tokens;
  ptx::cp_async_16(ptx::smem_address(&v_smem[tile::swizzled<D>(token, column)]),
                   v + (inside ? token * row_pitch + column : 0), inside ? 16 : 0);
}

// Grid: N x H. One CTA carries one head through one sequence.
template <int D>
__global__ void __launch_bounds__(2 * D, 1) fused(Tensors tensors, float scale, float gate_scale_log2) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Smem<D>*>(smem_bytes);
  const int H = static_cast<int>(tensors.H), h = blockIdx.x % H, row_pitch = H * D;
  const int64_t n = blockIdx.x / H, state_offset = static_cast<int64_t>(blockIdx.x) * D * D;
  const int warp = threadIdx.x / 32, group = threadIdx.x / (D / 4), channel = threadIdx.x % (D / 4) * 4;
  const Span span = find_sequence(tensors.sequences, n);
  const auto tokens_at = [&](int64_t start) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{CHUNK}, span.end - start)));
  };

  float bias[4], S_reg[D / 8][4];
  load4(bias, tensors.dt_bias + h * D + channel);
  const float rate = LOG2_E * expf(tensors.A_log[h]), rate_log2 = rate > FLT_MAX ? FLT_MAX : rate;  // a NaN stays one
  load_state_rows<D>(S_reg, tensors.initial_state, state_offset);

  Rows rows;
  const auto prefetch = [&](int64_t start) {  // a chunk past the end has no tokens: nothing is read
    load_rows(rows, tensors, start, tokens_at(start), group, h * D + channel, row_pitch, h);
    if (start < span.end) {
      load_values<D>(smem.v[(start - span.start) / CHUNK % 2], tensors.v + start * row_pitch + h * D, tokens_at(start),
                     row_pitch);
    }
    ptx::cp_async_commit_group();
  };
  prefetch(span.start);

  for (int64_t start = span.start; start < span.end; start += CHUNK) {
    const int tokens = tokens_at(start);
    float G_log2[TOKENS][4];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      tile::unpack(G_log2[t], rows.g[t]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // a row past the sequence's end does not decay
        const bool inside = group * TOKENS + t < tokens;
        G_log2[t][c] = inside ? activate_gate(G_log2[t][c], bias[c], rate_log2, gate_scale_log2) : 0.0f;
      }
    }
    if (threadIdx.x < CHUNK) smem.beta[threadIdx.x] = activate_gate(rows.beta_logit, 0.0f, LOG2_E, 1.0f);
    float4 G_C_log2;
    accumulate_gate<D>(G_log2, G_C_log2, smem.gate_total_log2, group, channel);
    apply_decay<D>(smem, rows.q, rows.k, G_log2, G_C_log2, group, channel, scale);
    prefetch(start + CHUNK);
    __syncthreads();
    if (warp < 4) form_L_and_Mqk<D>(smem, warp);
    __syncthreads();
    if (warp == 0) invert_unit_lower<D>(smem);
    ptx::cp_async_wait_group<1>();  // this chunk's v; the next one's may still be under way
    __syncthreads();

    uint32_t S_bf16[D / 16][4], U_reg[4];
    round_state<D>(S_bf16, S_reg);
    correct_values<D>(U_reg, S_bf16, smem.image, smem.v[(start - span.start) / CHUNK % 2]);
    write_output<D>(tensors.out + start * row_pitch + h * D, U_reg, S_bf16, smem.image, tokens, row_pitch);
    update_state<D>(S_reg, U_reg, smem.image);
  }
  store_state_rows<D>(S_reg, tensors.final_state, state_offset);
}

// ---- host ----------------------------------------------------------------------------------------------------------

int64_t workspace_bytes(const KdaArgs& args) {
  if (args.K != args.V || (args.K != 64 && args.K != 128)) {
    throw Error(KDA_UNSUPPORTED, format("K = %lld, V = %lld: fused_one_kernel on CUDA runs K = V = 64 and K = V = 128",
                                        static_cast<long long>(args.K), static_cast<long long>(args.V)));
  }
  return 0;
}

template <int D>
void run(const KdaArgs& args) {
  launch("fused", args, fused<D>, dim3(args.N * args.H), dim3(2 * D), sizeof(Smem<D>), tensors_of(args),
         static_cast<float>(args.scale), static_cast<float>(args.lower_bound * double{LOG2_E}));
}

void forward(const KdaArgs& args) {
  require_rounded_keys(args, "fused_one_kernel");
  args.K == 64 ? run<64>(args) : run<128>(args);
}

}  // namespace kda::step4
