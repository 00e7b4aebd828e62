// Step 6, prepare: all of a chunk that needs no state, in one image that recurrence copies as it is.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/tensors.cuh"
#include "../../common/tile.cuh"

namespace kda::step6 {

constexpr int CHUNK = 16;
constexpr int WARPGROUP = 128;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr double NARROW_BUDGET = 83.2;  // |lower_bound| * CHUNK up to which exponents relative to the chunk's start fit

using tile::below;
using tile::high_float;
using tile::low_float;
using tile::panel;
using tile::PANEL;
using tile::right;
using tile::split;
using tile::square_address;

// One chunk of one head, byte for byte as recurrence wants it in shared memory. D = K = V.
template <int D, bool PRECISE>
struct alignas(128) ChunkImage {
  bf16 wq[2 * CHUNK * D];  // panels of 32 rows: -w, then q'. Prepare holds k_decayed and q_decayed here first
  bf16 k_restored[(PRECISE ? 2 : 1) * CHUNK * D];  // panels of 16 rows: k^ 2^(G_C - G); PRECISE: then what it left
  float decay[D];                                  // 2^G_C
  bf16 INV_beta_P[2 * CHUNK * CHUNK];              // square tiles: INV diag(beta), then P
};

constexpr int TOKENS = 4;               // a thread of prepare has 4 channels of 4 tokens,
constexpr int GROUPS = CHUNK / TOKENS;  // D / 4 threads a whole row, 4 such groups the chunk

template <int D, bool PRECISE>
struct alignas(128) PrepareSmem {
  ChunkImage<D, PRECISE> image;
  bf16 q[CHUNK * D], g[CHUNK * D];  // inputs [16, D]; the next chunk's, once this one's are in registers
  bf16 k[CHUNK * D];                // likewise; in between panels of 16 rows: k_inv = k^ 2^-G
  union {
    float gate_total[GROUPS][D];
    struct {
      float L_columns[CHUNK][CHUNK];                         // L transposed
      bf16 Mqk_high[CHUNK * CHUNK], Mqk_low[CHUNK * CHUNK];  // square tiles, their sum is Mqk
      bf16 INV_beta_low[CHUNK * CHUNK];                      // what INV_beta_P's rounding left
    };
  };
  float beta[CHUNK], bias_log2[D];
  float middle_decay[D];  // 2^G of the middle row, where exponents are relative to it
};

// -log2 e exp(A_log). exp(A_log) overflows from 88.7 on. Clamped, so that its product with dt_bias stays finite (up to
// 2^28), and to a power of two, so that the product is exact and g = -dt_bias still cancels it. A NaN stays one.
__device__ __forceinline__ float gate_rate_log2(float A_log) {
  const float rate = LOG2_E * expf(A_log);
  return rate > 0x1p100f ? -0x1p100f : -rate;
}

// The share of lower_bound by which one token and channel decays: sigmoid(rate (g + dt_bias)), given -rate log2 e and
// -rate log2 e dt_bias.
__device__ __forceinline__ float activate_gate(float g_raw, float rate_log2, float bias_log2) {
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(fmaf(g_raw, rate_log2, bias_log2)));
}

// From each token's share of lower_bound to G_log2, their running sum times lower_bound, in place. The groups before
// this one add what they sum up to through shared memory; G_C, the sum over the chunk, falls out on the way. WIDE:
// relative to G of the middle row, G_middle.
template <int D, bool WIDE>
__device__ __forceinline__ void accumulate_gate(float (&G_log2)[TOKENS][4], float (&G_C_log2)[4],
                                                float (&G_middle_log2)[4], float (&gate_total_smem)[GROUPS][D],
                                                unsigned group, unsigned channel, float lower_bound_log2) {
#pragma unroll
  for (int t = 1; t < TOKENS; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) G_log2[t][c] += G_log2[t - 1][c];
  }
  store4(&gate_total_smem[group][channel], G_log2[TOKENS - 1]);
  __syncthreads();
  float before[4] = {}, middle[4] = {}, sum[4] = {};
#pragma unroll
  for (int other = 0; other < GROUPS; ++other) {
    float add[4];
    load4(add, &gate_total_smem[other][channel]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (other == group) before[c] = sum[c];
      if (other == GROUPS / 2) middle[c] = sum[c];
      sum[c] += add[c];
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    G_C_log2[c] = lower_bound_log2 * sum[c];
    G_middle_log2[c] = WIDE ? lower_bound_log2 * middle[c] : 0.0f;
    before[c] = lower_bound_log2 * before[c] - G_middle_log2[c];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) G_log2[t][c] = fmaf(lower_bound_log2, G_log2[t][c], before[c]);
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

// The four decayed forms of q^ and k^, each rounded once, from fp32. k^ is a bf16 vector: keys that are equal, or
// equal but for a decay that rounds away, stay equal in all forms, and what rounding did to them does not add up in
// the state.
// PRECISE: k^ is not rounded and k_restored, which writes the state, is kept as the sum of two bf16.
template <int D, bool PRECISE, bool WIDE>
__device__ __forceinline__ void apply_decay(PrepareSmem<D, PRECISE>& smem, const uint2 (&q_reg)[TOKENS],
                                            const uint2 (&k_reg)[TOKENS], const float (&G_log2)[TOKENS][4],
                                            const float (&G_C_log2)[4], const float (&G_middle_log2)[4], unsigned group,
                                            unsigned channel, float scale) {
  float q_factor[TOKENS], k_factor[TOKENS];
  normalise<D>(q_factor, k_factor, q_reg, k_reg);
  float decay_C[4], restore[4], middle_decay[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    decay_C[c] = ptx::ex2_approx_ftz(G_C_log2[c]);
    restore[c] = WIDE ? ptx::ex2_approx_ftz(G_C_log2[c] - G_middle_log2[c]) : decay_C[c];
    middle_decay[c] = ptx::ex2_approx_ftz(G_middle_log2[c]);
  }
  const unsigned first = group * TOKENS, at_wq = panel<2 * CHUNK>(first, channel), at_k = panel<CHUNK>(first, channel);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float q[4], k[4], k_decayed[4], q_decayed[4], k_inv[4], k_restored[4];
    tile::unpack(q, q_reg[t]);
    tile::unpack(k, k_reg[t]);
#pragma unroll
    for (int c = 0; c < 4; ++c) k[c] *= k_factor[t];
    if constexpr (!PRECISE) tile::unpack(k, tile::pack(k));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float decay = ptx::ex2_approx_ftz(G_log2[t][c]);
      q_decayed[c] = scale * q_factor[t] * q[c] * decay;
      k_decayed[c] = k[c] * decay;
      k_inv[c] = k[c] * ptx::ex2_approx_ftz(-G_log2[t][c]);
      k_restored[c] = k_inv[c] * restore[c];
    }
    *reinterpret_cast<uint2*>(&smem.image.wq[below(at_wq, t)]) = tile::pack(k_decayed);
    *reinterpret_cast<uint2*>(&smem.image.wq[below(at_wq, t) + CHUNK * PANEL]) = tile::pack(q_decayed);
    *reinterpret_cast<uint2*>(&smem.k[below(at_k, t)]) = tile::pack(k_inv);
    bf16* k_restored_smem = &smem.image.k_restored[below(at_k, t)];
    if constexpr (PRECISE) {
      uint2 high, low;
      split(high.x, low.x, k_restored[0], k_restored[1]);
      split(high.y, low.y, k_restored[2], k_restored[3]);
      *reinterpret_cast<uint2*>(k_restored_smem) = high;
      *reinterpret_cast<uint2*>(k_restored_smem + CHUNK * D) = low;
    } else {
      *reinterpret_cast<uint2*>(k_restored_smem) = tile::pack(k_restored);
    }
  }
  if (group == 0) {
    store4(&smem.image.decay[channel], decay_C);
    if constexpr (WIDE) store4(&smem.middle_decay[channel], middle_decay);
  }
}

// L = beta * tril(k_decayed k_inv^T, -1) in fp32, Mqk = tril(q_decayed k_inv^T) split. Four jobs, each 8 columns of
// one.
template <int D, bool PRECISE>
__device__ __forceinline__ void form_L_and_Mqk(PrepareSmem<D, PRECISE>& smem, unsigned job) {
  const unsigned lane = threadIdx.x % 32, i = lane / 4, j0 = job % 2 * 8, j = j0 + lane % 4 * 2;
  const unsigned at_a = panel<2 * CHUNK>((job < 2 ? 0 : CHUNK) + lane % 16, lane / 16 * 8);
  const unsigned at_b = panel<CHUNK>(j0 + lane % 8, lane / 8 * 8);
  float sums[2][4] = {};  // two chains of products instead of one: half the latency
#pragma unroll
  for (int k0 = 0; k0 < D; k0 += 32) {
    uint32_t a[2][4], b[4];
    ptx::ldmatrix_x4(b, ptx::smem_address(smem.k + right<CHUNK>(at_b, k0)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::ldmatrix_x4(a[half], ptx::smem_address(smem.image.wq + right<2 * CHUNK>(at_a, k0 + half * 16)));
      ptx::mma_m16n8k16_bf16(sums[half], a[half], {b[half * 2], b[half * 2 + 1]});
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned row = i + half * 8;
    const float x = sums[0][half * 2] + sums[1][half * 2], y = sums[0][half * 2 + 1] + sums[1][half * 2 + 1];
    if (job < 2) {
      smem.L_columns[j][row] = row > j ? smem.beta[row] * x : 0.0f;
      smem.L_columns[j + 1][row] = row > j + 1 ? smem.beta[row] * y : 0.0f;
    } else {
      uint32_t high, low;
      split(high, low, row >= j ? x : 0.0f, row >= j + 1 ? y : 0.0f);
      *reinterpret_cast<uint32_t*>(&smem.Mqk_high[tile::blocked(row, j)]) = high;
      *reinterpret_cast<uint32_t*>(&smem.Mqk_low[tile::blocked(row, j)]) = low;
    }
  }
}

// INV = (I + L)^-1 by substitution in fp32: exact to rounding, whatever the keys. INV (I + L) = I has one unknown row
// of INV per lane (lanes 16-31 repeat 0-15), solved from the diagonal to the left; rows, because they leave in 16-byte
// pieces.
template <int D, bool PRECISE>
__device__ __forceinline__ void invert_unit_lower(PrepareSmem<D, PRECISE>& smem) {
  const unsigned i = threadIdx.x % CHUNK, half = threadIdx.x % 32 / CHUNK;
  float row[CHUNK];
#pragma unroll
  for (int j = CHUNK - 1; j >= 0; --j) {
    row[j] = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int m = CHUNK - 1; m > j; --m) row[j] -= row[m] * smem.L_columns[j][m];
  }
  uint32_t high[4], low[4];  // each half of the lanes writes 8 columns
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float x = half ? row[2 * c + 8] : row[2 * c], y = half ? row[2 * c + 9] : row[2 * c + 1];
    split(high[c], low[c], x * smem.beta[half * 8 + 2 * c], y * smem.beta[half * 8 + 2 * c + 1]);
  }
  const unsigned at = tile::blocked(i, half * 8);
  *reinterpret_cast<uint4*>(&smem.image.INV_beta_P[at]) = {high[0], high[1], high[2], high[3]};
  *reinterpret_cast<uint4*>(&smem.INV_beta_low[at]) = {low[0], low[1], low[2], low[3]};
}

// P = Mqk INV_beta, then -w = -INV_beta k_decayed and q' = q_decayed - P k_decayed in the place of k_decayed and
// q_decayed. INV and P as sums of two bf16 keep 16 bits: in w, nearly equal keys cancel.
template <int D, bool PRECISE, bool WIDE>
__device__ __forceinline__ void form_w_and_q(PrepareSmem<D, PRECISE>& smem, unsigned warp) {
  const unsigned lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  uint32_t INV_high[4], INV_low[4], P_high[4], P_low[4];  // operands A; P negated
  {
    uint32_t Mqk_high[4], Mqk_low[4], b_high[4], b_low[4];
    ptx::ldmatrix_x4(Mqk_high, square_address(smem.Mqk_high));
    ptx::ldmatrix_x4(Mqk_low, square_address(smem.Mqk_low));
    ptx::ldmatrix_x4_trans(b_high, square_address(smem.image.INV_beta_P));
    ptx::ldmatrix_x4_trans(b_low, square_address(smem.INV_beta_low));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float P[4] = {};
      ptx::mma_m16n8k16_bf16(P, Mqk_low, {b_high[n * 2], b_high[n * 2 + 1]});
      ptx::mma_m16n8k16_bf16(P, Mqk_high, {b_low[n * 2], b_low[n * 2 + 1]});
      ptx::mma_m16n8k16_bf16(P, Mqk_high, {b_high[n * 2], b_high[n * 2 + 1]});
      split(P_high[n * 2], P_low[n * 2], -P[0], -P[1]);
      split(P_high[n * 2 + 1], P_low[n * 2 + 1], -P[2], -P[3]);
    }
  }
  ptx::ldmatrix_x4(INV_high, square_address(smem.image.INV_beta_P));
  ptx::ldmatrix_x4(INV_low, square_address(smem.INV_beta_low));
  if (warp == 0) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int at = tile::blocked(row + r % 2 * 8, column + r / 2 * 8);
      *reinterpret_cast<uint32_t*>(&smem.image.INV_beta_P[CHUNK * CHUNK + at]) = P_high[r] ^ 0x80008000;  // both signs
    }
  }
  const unsigned at_b = panel<2 * CHUNK>(lane % 16, warp * 32 + lane / 16 * 8);
  const unsigned at_w = panel<2 * CHUNK>(row, warp * 32 + column);
#pragma unroll
  for (unsigned n0 = 0; n0 < 32; n0 += 16) {  // a warp's 32 columns
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, ptx::smem_address(smem.image.wq + right<2 * CHUNK>(at_b, n0)));
    __syncwarp();  // all lanes have read before one writes in the same place
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      bf16* at[2][2];  // w and q, rows `row` and `row` + 8
#pragma unroll
      for (int r = 0; r < 4; ++r) at[r / 2][r % 2] = &smem.image.wq[right<2 * CHUNK>(at_w, n0 + n * 8) + r * 8 * PANEL];
      const uint32_t q0 = *reinterpret_cast<const uint32_t*>(at[1][0]),
                     q1 = *reinterpret_cast<const uint32_t*>(at[1][1]);
      float w[4] = {}, q[4] = {low_float(q0), high_float(q0), low_float(q1), high_float(q1)};
      ptx::mma_m16n8k16_bf16(w, INV_low, {b[n * 2], b[n * 2 + 1]});
      ptx::mma_m16n8k16_bf16(q, P_low, {b[n * 2], b[n * 2 + 1]});
      ptx::mma_m16n8k16_bf16(w, INV_high, {b[n * 2], b[n * 2 + 1]});
      ptx::mma_m16n8k16_bf16(q, P_high, {b[n * 2], b[n * 2 + 1]});
      if constexpr (WIDE) {
        const float2 middle = *reinterpret_cast<const float2*>(&smem.middle_decay[warp * 32 + n0 + n * 8 + column]);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          w[half] *= middle.x, w[half + 1] *= middle.y, q[half] *= middle.x, q[half + 1] *= middle.y;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(at[0][half]) = ptx::cvt_rn_bf16x2(-w[half * 2], -w[half * 2 + 1]);
        *reinterpret_cast<uint32_t*>(at[1][half]) = ptx::cvt_rn_bf16x2(q[half * 2], q[half * 2 + 1]);
      }
    }
  }
}

// Where this thread's first piece of a chunk's rows lies: D threads move 8 rows of 16-byte pieces at a time.
template <int D>
__device__ __forceinline__ unsigned row_offset(unsigned row_pitch) {
  return threadIdx.x / (D / 8) * row_pitch + threadIdx.x % (D / 8) * 8;
}

// Starts the copy of a chunk's rows of one head; `lane_source` is this thread's first piece. Rows past the sequence's
// end become zeros and are not read: they are another sequence's.
template <int D>
__device__ __forceinline__ void load_rows(bf16* rows_smem, const bf16* lane_source, int tokens, unsigned row_pitch) {
  const int row = threadIdx.x / (D / 8);
  bf16* target = &rows_smem[threadIdx.x * 8];
  if (tokens == CHUNK) {
    ptx::cp_async_16(ptx::smem_address(target), lane_source);
    ptx::cp_async_16(ptx::smem_address(target + CHUNK / 2 * D), lane_source + CHUNK / 2 * row_pitch);
    return;
  }
#pragma unroll
  for (int half = 0; half < CHUNK; half += CHUNK / 2) {
    if (half + row < tokens) {
      ptx::cp_async_16(ptx::smem_address(target + half * D), lane_source + half * row_pitch);
    } else {
      *reinterpret_cast<uint4*>(target + half * D) = {};
    }
  }
}

// The logit of beta that thread i < 16 turns into the chunk's beta; rows past the end get 0.
__device__ __forceinline__ bf16 load_beta(const Tensors& tensors, const Chunk& chunk, unsigned h) {
  if (static_cast<int>(threadIdx.x) >= chunk.tokens) return {};
  return tensors.beta[(chunk.start + threadIdx.x) * tensors.H + h];
}

// A chunk's image in shared memory, from inputs that have landed there. Calls q_and_g_are_read, then k_is_read, as soon
// as the next chunk's may take their place.
template <int D, bool PRECISE, bool WIDE, typename QAndGAreRead, typename KIsRead>
__device__ __forceinline__ void form_image(PrepareSmem<D, PRECISE>& smem, int tokens, bf16 beta_logit, float rate_log2,
                                           float scale, float lower_bound_log2, QAndGAreRead q_and_g_are_read,
                                           KIsRead k_is_read) {
  const unsigned warp = threadIdx.x / 32, group = threadIdx.x / (D / 4), channel = threadIdx.x % (D / 4) * 4;
  uint2 q_reg[TOKENS], k_reg[TOKENS];
  float G_log2[TOKENS][4], bias_log2[4];
  load4(bias_log2, &smem.bias_log2[channel]);
#pragma unroll
  for (unsigned t = 0; t < TOKENS; ++t) {
    const unsigned at = (group * TOKENS + t) * D + channel;
    q_reg[t] = *reinterpret_cast<const uint2*>(&smem.q[at]);
    k_reg[t] = *reinterpret_cast<const uint2*>(&smem.k[at]);
    tile::unpack(G_log2[t], *reinterpret_cast<const uint2*>(&smem.g[at]));
#pragma unroll
    for (int c = 0; c < 4; ++c) G_log2[t][c] = activate_gate(G_log2[t][c], rate_log2, bias_log2[c]);
  }
  if (tokens < CHUNK) {  // only in a last chunk: rows past the end do not decay
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (group * TOKENS + t >= tokens) G_log2[t][0] = G_log2[t][1] = G_log2[t][2] = G_log2[t][3] = 0.0f;
    }
  }
  if (threadIdx.x < CHUNK) {
    smem.beta[threadIdx.x] = activate_gate(__bfloat162float(beta_logit), -LOG2_E, 0.0f);
  }
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read();  // the image before has left shared memory
  float G_C_log2[4], G_middle_log2[4];
  accumulate_gate<D, WIDE>(G_log2, G_C_log2, G_middle_log2, smem.gate_total, group, channel, lower_bound_log2);
  apply_decay<D, PRECISE, WIDE>(smem, q_reg, k_reg, G_log2, G_C_log2, G_middle_log2, group, channel, scale);
  q_and_g_are_read();
  __syncthreads();
#pragma unroll
  for (unsigned job = 0; job < 4; job += D / 32) form_L_and_Mqk<D, PRECISE>(smem, job + warp);
  __syncthreads();
  k_is_read();
  if (warp == 0) invert_unit_lower<D, PRECISE>(smem);
  __syncthreads();
  form_w_and_q<D, PRECISE, WIDE>(smem, warp);
  ptx::cp_async_wait_all();  // the next chunk's rows are here,
  ptx::fence_proxy_async();  // and bulk copies and wgmma see this one's image
  __syncthreads();
}

// CTAs of prepare on a multiprocessor: so many threads that none spills.
template <int D, bool PRECISE, bool WIDE>
constexpr int CTAS = (!WIDE      ? 768
                      : !PRECISE ? 640
                                 : 512) /
                     D;

// Grid: H x any number of strides, heads fastest (they are neighbours in memory). A CTA prepares every stride-th chunk
// of one head; the next chunk's rows are under way while it multiplies and inverts.
template <int D, bool PRECISE, bool WIDE>
__global__ void __launch_bounds__(D, CTAS<D, PRECISE, WIDE>)
    prepare(Tensors tensors, ChunkImage<D, PRECISE>* __restrict__ images /* [slots, H] */, unsigned slots, float scale,
            float lower_bound_log2) {
#if KDA_HOPPER
  __shared__ PrepareSmem<D, PRECISE> smem;
  ptx::griddepcontrol_launch_dependents();
  const unsigned H = static_cast<unsigned>(tensors.H), h = blockIdx.x % H, stride = gridDim.x / H;
  const float rate_log2 = gate_rate_log2(tensors.A_log[h]);
  smem.bias_log2[threadIdx.x] = rate_log2 * tensors.dt_bias[h * D + threadIdx.x];

  const unsigned first = blockIdx.x / H;
  Cursor<CHUNK> cursor = {first, slots, stride};
  cursor.enter(tensors.sequences, sequence_of_slot<CHUNK>(tensors.sequences, first));
  bool more = cursor.found(tensors.sequences);
  bf16 beta_logit = {};
  const unsigned row_pitch = H * D, lane_offset = h * D + row_offset<D>(row_pitch);
  int64_t next = 0;
  if (more) {
    next = cursor.chunk.start * row_pitch + lane_offset;
    beta_logit = load_beta(tensors, cursor.chunk, h);
    load_rows<D>(smem.q, tensors.q + next, cursor.chunk.tokens, row_pitch);
    load_rows<D>(smem.g, tensors.g + next, cursor.chunk.tokens, row_pitch);
    load_rows<D>(smem.k, tensors.k + next, cursor.chunk.tokens, row_pitch);
  }
  ptx::cp_async_wait_all();
  __syncthreads();
  while (more) {
    ChunkImage<D, PRECISE>* image = &images[int64_t{cursor.slot} * H + h];
    form_image<D, PRECISE, WIDE>(
        smem, cursor.chunk.tokens, beta_logit, rate_log2, scale, lower_bound_log2,
        [&] {
          cursor.slot += stride;
          more = cursor.found(tensors.sequences);
          if (!more) return;
          next = cursor.chunk.start * row_pitch + lane_offset;
          beta_logit = load_beta(tensors, cursor.chunk, h);
          load_rows<D>(smem.q, tensors.q + next, cursor.chunk.tokens, row_pitch);
          load_rows<D>(smem.g, tensors.g + next, cursor.chunk.tokens, row_pitch);
        },
        [&] {
          if (more) load_rows<D>(smem.k, tensors.k + next, cursor.chunk.tokens, row_pitch);
        });
    if (threadIdx.x == 0) {
      ptx::cp_async_bulk_store(image, &smem.image, sizeof(smem.image));
      ptx::cp_async_bulk_commit_group();
    }
  }
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read();
#endif
}

}  // namespace kda::step6
