// Step 6, register_state: shorten the chain that the state makes from chunk to chunk, and move everything in bulk.
//
// Idea. Step 5's chain per chunk is S -> S k_decayed^T -> U = INV (..) -> output and update. The WY form (INV here with
// diag(beta) multiplied in) takes INV out of it:
//   w = INV k_decayed      P = Mqk INV           q' = q_decayed - P k_decayed          (all in prepare)
//   U = INV V - w S^T      O = q' S^T + P V      S <- S diag(decay) + U^T k_restored
// so that one product with S gives both U and O (the rows of w and q' lie one below the other), and the output no
// longer waits for U: its error for identical keys falls as well.
//
// What changed against step 5, and what it bought on one H200 (November 2026, T 8192, medians of 20):  kda-lab diff 5 6
//   WY form      prepare does 3 small products more a chunk, +0.07 ms at H 96; recurrence 2 fewer
//   wgmma        a warpgroup multiplies its 64 rows of S at once and reads the other operand from shared memory
//                itself; with the WY form and bulk copies recurrence fell from 0.57 to 0.37 ms at H 96
//   lean loops   in recurrence, descriptors and addresses computed once: 0.25 to 0.20 ms at H 32, where one warp a
//                scheduler issues all of the chain. In prepare, addresses from one flip of bits, whole chunks copied
//                without tests, the gate scaled after its sum: 10 % fewer instructions, 0.38 to 0.35 ms at H 96
//                Decays loaded after the products are under way, not before: 0.642 to 0.633 ms of the step at H 96
//   bulk copies  a producer warp keeps STAGES chunks in flight; 6, not 4: 0.32 to 0.29 ms at H 96 (prepare
//                differed between the two runs); 8, so that no SM holds two CTAs: 0.32 to 0.21 ms at H 32
//   value split  rows of S are independent: with few heads two CTAs take 64 rows each, half the chain's products
//   short links  less for a warp to do between two products: the output of a chunk is written during the next one,
//                lengths have 32 bits, addresses come from the chunk's. 0.308 to 0.289 ms at H 32, 0.632 to 0.618 at
//                H 96
//   clusters     where two CTAs a head fill the chip, each fetches half of every image for both: 0.451 to 0.421 ms at
//                H 64. With fewer heads the other CTA's pace lengthens the chain (0.289 to 0.305 ms at H 32)
//   persistent   prepare's CTAs stay and fetch the next chunk while they multiply and invert: 0.45 to 0.43 ms at
//                H 96; INV by rows: 0.41; beta fetched ahead, and no spills (6 CTAs of 80 registers): 0.38
//   launch       recurrence sets itself up while prepare drains (programmatic dependent launch); not measured apart
// What did not pay: two chunks joined to one link of the chain, in prepare (36 % slower) or by warps of their own in
// recurrence (0.308 to 0.37 ms at H 32: they take the chain's issue slots); ldmatrix and stmatrix in the place of
// movmatrix (to 0.322: the chain waits for them); asking for the next barrier early (to 0.319); inverting in turn by
// different warps; two accumulators in the chain (2 % of recurrence for 16 registers); addresses held in registers,
// which spill (prepare at H 96 from 0.35 to 0.38 ms), or more registers and fewer CTAs (to 0.39 ms); prepare from the
// last chunk to the first, for what L2 still holds of its images (1 % slower); cutting the sequence so that prepare of
// one part runs beside recurrence of the part before (H 32: from 0.33 ms to between 0.33 and 0.48 ms), because
// prepare's warps take issue slots from the chain.
//
// In the profiler: both kernels move bytes nearly as fast as a copy from H = 96 up; below that the chain of two
// dependent products a chunk decides.
//
// Range. A bound with |lower_bound| * 16 > 83.2 (and <= 166.4) makes prepare take exponents relative to G of the
// chunk's middle row (WIDE): half of the range, twice the bound. w and q' leave as if relative to the start, by one
// factor a column. A row's roundings then depend on later rows of its chunk, though not its value: causal, but not to
// the bit.
//
// Numbers. As step 5: bf16 factors rounded once, fp32 state; w and q' are formed from INV and P split into two bf16
// each, then rounded once. k^ is rounded before decays come in: equal keys stay equal where the decay of a chunk
// rounds away. Where it does not, roundings of nearly equal rows of k_restored differ and add up across the key,
// where the delta rule never corrects them: the error grows with T. PRECISE keeps k_restored as the sum of two bf16
// instead, which ends that for one more product and, at K = 128, 4 KB a chunk and head. Compute capability 9.0 only.
// A NaN reaches the other rows of its own chunk, nothing before or beside it.
#include <algorithm>

#include "../common/hopper.cuh"
#include "../common/launch.cuh"
#include "../common/state_rows.cuh"
#include "../common/tensors.cuh"
#include "../common/tile.cuh"

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
// q_decayed. Factors that are sums of two bf16 keep the cancellation in w (nearly equal keys) exact to fp32.
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
      *reinterpret_cast<uint32_t*>(&smem.image.INV_beta_P[CHUNK * CHUNK + at]) = P_high[r] ^ 0x80008000;
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

// Starts the copy of a chunk's rows of one head: D threads move 8 rows of 16-byte pieces at a time, and `lane_source`
// is this thread's first piece. Rows past the sequence's end become zeros and are not read: they are another
// sequence's.
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

// CTAs of prepare on a multiprocessor: as many as have enough registers.
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
  const unsigned warp = threadIdx.x / 32, group = threadIdx.x / (D / 4), channel = threadIdx.x % (D / 4) * 4;
  // exp(A_log) overflows from 88.7 on. Clamped, so that its product with dt_bias stays finite (up to 2^28), and to a
  // power of two, so that the product is exact and g = -dt_bias still cancels it. A NaN stays one.
  const float rate = LOG2_E * expf(tensors.A_log[h]), rate_log2 = rate > 0x1p100f ? -0x1p100f : -rate;
  smem.bias_log2[threadIdx.x] = rate_log2 * tensors.dt_bias[h * D + threadIdx.x];

  const unsigned first = blockIdx.x / H;
  Cursor<CHUNK> cursor = {first, slots, stride};
  cursor.enter(tensors.sequences, sequence_of_slot<CHUNK>(tensors.sequences, first));
  bool more = cursor.found(tensors.sequences);
  bf16 beta_logit = {};
  const unsigned row_pitch = H * D, lane_offset = h * D + threadIdx.x / (D / 8) * row_pitch + threadIdx.x % (D / 8) * 8;
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
    const Chunk chunk = cursor.chunk;
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
    if (chunk.tokens < CHUNK) {  // only in a last chunk: rows past the end do not decay
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        if (group * TOKENS + t >= chunk.tokens) G_log2[t][0] = G_log2[t][1] = G_log2[t][2] = G_log2[t][3] = 0.0f;
      }
    }
    if (threadIdx.x < CHUNK) {
      smem.beta[threadIdx.x] = activate_gate(__bfloat162float(beta_logit), -LOG2_E, 0.0f);
    }
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read();  // the image before has left shared memory
    float G_C_log2[4], G_middle_log2[4];
    accumulate_gate<D, WIDE>(G_log2, G_C_log2, G_middle_log2, smem.gate_total, group, channel, lower_bound_log2);
    apply_decay<D, PRECISE, WIDE>(smem, q_reg, k_reg, G_log2, G_C_log2, G_middle_log2, group, channel, scale);
    ChunkImage<D, PRECISE>* image = &images[int64_t{cursor.slot} * H + h];
    cursor.slot += stride;
    more = cursor.found(tensors.sequences);
    if (more) {
      next = cursor.chunk.start * row_pitch + lane_offset;
      beta_logit = load_beta(tensors, cursor.chunk, h);
      load_rows<D>(smem.q, tensors.q + next, cursor.chunk.tokens, row_pitch);
      load_rows<D>(smem.g, tensors.g + next, cursor.chunk.tokens, row_pitch);
    }
    __syncthreads();
#pragma unroll
    for (unsigned job = 0; job < 4; job += D / 32) form_L_and_Mqk<D, PRECISE>(smem, job + warp);
    __syncthreads();
    if (more) load_rows<D>(smem.k, tensors.k + next, cursor.chunk.tokens, row_pitch);
    if (warp == 0) invert_unit_lower<D, PRECISE>(smem);
    __syncthreads();
    form_w_and_q<D, PRECISE, WIDE>(smem, warp);
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::cp_async_bulk_store(image, &smem.image, sizeof(smem.image));
      ptx::cp_async_bulk_commit_group();
    }
  }
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read();
#endif
}

// ---- recurrence: a warpgroup owns 64 rows of the state --------------------------------------------------------------

// Chunks under way between device memory and recurrence; at D = 128 more than half of shared memory, so that no
// multiprocessor gets two CTAs while others have none.
constexpr int STAGES = 8;

// Where both sides are in the ring of stages.
struct Ring {
  unsigned stage = 0, parity = 0;
  __device__ __forceinline__ unsigned previous() const { return (stage + STAGES - 1) % STAGES; }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

template <int D, int WARPGROUPS, bool PRECISE>
struct alignas(1024) RecurrenceStage {
  ChunkImage<D, PRECISE> image;
  bf16 v[WARPGROUPS * CHUNK * PANEL];  // panels of 16 rows, one a warpgroup
};

template <int D, int WARPGROUPS, bool PRECISE>
struct RecurrenceSmem {
  RecurrenceStage<D, WARPGROUPS, PRECISE> stages[STAGES];
  uint64_t full[STAGES], empty[STAGES];
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

#if KDA_HOPPER

// The producer, one warp: keeps the ring of stages full. Rows of v past the sequence's end are filled with zeros and
// not read: they are another sequence's. In a cluster each CTA fetches half of an image for both.
template <int D, int WARPGROUPS, int CLUSTER, bool PRECISE>
__device__ __forceinline__ void produce(RecurrenceSmem<D, WARPGROUPS, PRECISE>& smem,
                                        const ChunkImage<D, PRECISE>* image, const bf16* v, int length, unsigned H) {
  constexpr unsigned GRANULES = WARPGROUPS * PANEL / 8;  // of 16 bytes in a row
  const unsigned lane = threadIdx.x % 32, row_pitch = H * D;
  ptx::griddepcontrol_wait();  // the images are there from here on
  Ring ring;
  for (; length > 0; length -= CHUNK, ring.advance()) {
    RecurrenceStage<D, WARPGROUPS, PRECISE>& stage = smem.stages[ring.stage];
    ptx::mbarrier_wait(&smem.empty[ring.stage], ring.parity);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(&smem.full[ring.stage], sizeof(stage.image));
      if constexpr (CLUSTER == 1) {
        ptx::cp_async_bulk_load(&stage.image, image, sizeof(stage.image), &smem.full[ring.stage]);
      } else {
        constexpr uint32_t HALF = sizeof(stage.image) / 2;
        const uint32_t begin = blockIdx.x % 2 * HALF;
        ptx::cp_async_bulk_load_multicast(reinterpret_cast<char*>(&stage.image) + begin,
                                          reinterpret_cast<const char*>(image) + begin, HALF, &smem.full[ring.stage],
                                          0b11);
      }
    }
#pragma unroll
    for (unsigned i = lane; i < CHUNK * GRANULES; i += 32) {
      const unsigned token = i / GRANULES, column = i % GRANULES * 8;
      const bool inside = token < length;
      ptx::cp_async_16(ptx::smem_address(&stage.v[panel<CHUNK>(token, column)]),
                       v + (inside ? token * row_pitch + column : 0), inside ? 16 : 0);
    }
    ptx::cp_async_mbarrier_arrive_noinc(&smem.full[ring.stage]);
    image += H, v += CHUNK * row_pitch;
  }
}

// This lane's part of V: two tokens, 4 neighbouring values of each.
__device__ __forceinline__ void load_values(uint2 (&values)[2], const bf16* v_smem) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const unsigned at = panel<CHUNK>(j * 8 + lane / 4, threadIdx.x / 32 * 16 + lane % 4 * 4);
    values[j] = *reinterpret_cast<const uint2*>(&v_smem[at]);
  }
}

// V^T as operand A.
__device__ __forceinline__ void transpose_values(uint32_t (&V_reg)[4], const uint2 (&values)[2]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    V_reg[j * 2] = ptx::movmatrix_trans(values[j].x), V_reg[j * 2 + 1] = ptx::movmatrix_trans(values[j].y);
  }
}

// U^T, the first two column groups of the product, or O^T, the last two, as pairs of bf16.
__device__ __forceinline__ void round_columns(uint32_t (&rounded)[4], const float (&UO)[4][4], int first) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    rounded[r] = ptx::cvt_rn_bf16x2(UO[first + r / 2][r % 2 * 2], UO[first + r / 2][r % 2 * 2 + 1]);
  }
}

// `out` points at this lane's first element: token lane / 4 of the chunk, 4 neighbouring values.
__device__ __forceinline__ void write_output(bf16* out, const uint32_t (&O_reg)[4], unsigned tokens,
                                             int64_t chunk_pitch) {
#pragma unroll
  for (unsigned j = 0; j < 2; ++j) {
    const uint2 pairs = {ptx::movmatrix_trans(O_reg[j * 2]), ptx::movmatrix_trans(O_reg[j * 2 + 1])};
    if (j * 8 + threadIdx.x % 32 / 4 < tokens) *reinterpret_cast<uint2*>(out + j * (chunk_pitch / 2)) = pairs;
  }
}

template <int D>
__device__ __forceinline__ void load_decay(float2 (&decay)[D / 8], const float (&decay_smem)[D]) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    decay[n] = *reinterpret_cast<const float2*>(&decay_smem[n * 8 + threadIdx.x % 4 * 2]);
  }
}

template <int D>
__device__ __forceinline__ void decay_state(float (&S_reg)[D / 8][4], const float2 (&decay)[D / 8]) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    S_reg[n][0] *= decay[n].x, S_reg[n][1] *= decay[n].y, S_reg[n][2] *= decay[n].x, S_reg[n][3] *= decay[n].y;
  }
}

// The consumers: warpgroup by warpgroup, 64 rows of S from the first chunk to the last.
//   [U^T O^T] = V^T [INV_beta; P]^T + S [-w; q']^T        rows v, columns the 16 tokens of each
//   S         = S diag(decay) + U^T k_restored
// `out` as in write_output. Whatever a warp does between two products lengthens the chain, so the output of a chunk is
// written during the next one, while loads are under way, and lengths are 32 bits (no GPU holds 2^31 tokens).
template <int D, int WARPGROUPS, int CLUSTER, bool PRECISE>
__device__ __forceinline__ void consume(RecurrenceSmem<D, WARPGROUPS, PRECISE>& smem, float (&S_reg)[D / 8][4],
                                        bf16* out, int length, unsigned row_pitch) {
  const int64_t chunk_pitch = int64_t{CHUNK} * row_pitch;
  const ChunkImage<D, PRECISE>& first = smem.stages[0].image;
  const uint64_t INV_beta_P = ptx::matrix_descriptor(first.INV_beta_P, 128, 256, 0);
  const uint64_t wq = ptx::matrix_descriptor(first.wq, 16, 1024, 1);
  const uint64_t k_restored = ptx::matrix_descriptor(first.k_restored, CHUNK * PANEL * sizeof(bf16), 1024, 1);
  const auto release = [&](unsigned stage) {  // to the producers that fill it: this CTA's, in a cluster the other's too
    const unsigned lane = threadIdx.x % 32;
    if (lane == 0) ptx::mbarrier_arrive(&smem.empty[stage]);
    if constexpr (CLUSTER == 2) {
      if (lane == 1) ptx::mbarrier_arrive_at(&smem.empty[stage], blockIdx.x % 2 ^ 1);
    }
  };
  // At first all stages are empty; the last one is handed over with chunk 0.
  for (int s = 0; s < STAGES - 1; ++s) release(s);
  Ring ring;
  uint32_t O_reg[4] = {};
  unsigned written = 0;  // tokens of the chunk before, whose output O_reg holds
  for (; length > 0; length -= CHUNK, ring.advance()) {
    const RecurrenceStage<D, WARPGROUPS, PRECISE>& stage = smem.stages[ring.stage];
    const uint32_t offset = ring.stage * sizeof(stage);
    uint32_t S_bf16[D / 16][4], V_reg[4], U_reg[4];
    float UO[4][4];
    float2 decay[D / 8];
    uint2 values[2];
    ptx::mbarrier_wait(&smem.full[ring.stage], ring.parity);
    load_values(values, stage.v);
    if constexpr (WARPGROUPS == 1) load_decay<D>(decay, stage.image.decay);
    write_output(out - chunk_pitch, O_reg, written, chunk_pitch);
    transpose_values(V_reg, values);
    ptx::wgmma_wait_group();  // the update by the chunk before
    release(ring.previous());
    round_state<D>(S_bf16, S_reg);
    ptx::wgmma_fence();
    const uint64_t wq_here = ptx::advanced(wq, offset), k_here = ptx::advanced(k_restored, offset);
    ptx::wgmma_m64n32k16(UO, V_reg, ptx::advanced(INV_beta_P, offset), 0);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
      const uint32_t bytes = (k / PANEL * 2 * CHUNK * PANEL + k % PANEL) * sizeof(bf16);
      ptx::wgmma_m64n32k16(UO, S_bf16[k / 16], ptx::advanced(wq_here, bytes), 1);
    }
    ptx::wgmma_commit_group();
    // While the products run: they have the rounded state. With two warpgroups the loads wait until here, so that
    // nothing delays the products; one alone would wait for the loads.
    if constexpr (WARPGROUPS == 2) load_decay<D>(decay, stage.image.decay);
    decay_state<D>(S_reg, decay);
    ptx::wgmma_wait_group();
    round_columns(U_reg, UO, 0);
    ptx::wgmma_fence();
    ptx::wgmma_m64nNk16_trans(S_reg, U_reg, k_here);
    if constexpr (PRECISE) {
      ptx::wgmma_m64nNk16_trans(S_reg, U_reg, ptx::advanced(k_here, CHUNK * D * sizeof(bf16)));
    }
    ptx::wgmma_commit_group();
    round_columns(O_reg, UO, 2);
    written = static_cast<unsigned>(min(CHUNK, length));
    out += chunk_pitch;
  }
  write_output(out - chunk_pitch, O_reg, written, chunk_pitch);
  ptx::wgmma_wait_group();
}

#endif

// Threads of one CTA. With two warpgroups of consumers the producer is a warpgroup too, so that it can give them
// registers.
constexpr int threads(int warpgroups) { return warpgroups == 2 ? 3 * WARPGROUP : WARPGROUP + 32; }

// Grid: N x H x (D / 64 / WARPGROUPS), slices of the state fastest. One CTA carries 64 WARPGROUPS rows of one head's
// state. CLUSTER = 2: the two slices of a head are a cluster.
template <int D, int WARPGROUPS, int CLUSTER, bool PRECISE>
__global__ void __launch_bounds__(threads(WARPGROUPS), 1)
    recurrence(Tensors tensors, const ChunkImage<D, PRECISE>* __restrict__ images /* [slots, H] */) {
#if KDA_HOPPER
  constexpr int SLICES = D / PANEL / WARPGROUPS;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<RecurrenceSmem<D, WARPGROUPS, PRECISE>*>(smem_bytes);
  const unsigned H = static_cast<unsigned>(tensors.H), row_pitch = H * D;
  const unsigned slice = blockIdx.x % SLICES, h = blockIdx.x / SLICES % H, n = blockIdx.x / SLICES / H;
  const Span span = find_sequence(tensors.sequences, n);
  const int64_t offset = span.start * row_pitch + h * D + slice * WARPGROUPS * PANEL;
  const int length = static_cast<int>(span.end - span.start);

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      ptx::mbarrier_init(&smem.full[s], 32 + 1);                     // every lane's copies of v, and the image
      ptx::mbarrier_init(&smem.empty[s], CLUSTER * WARPGROUPS * 4);  // every consumer warp
    }
    ptx::fence_proxy_async();
  }
  CLUSTER == 1 ? __syncthreads() : ptx::cluster_sync();

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // tells the compiler that a warp stays together
  if (warp >= WARPGROUPS * 4) {
    if constexpr (WARPGROUPS == 2) ptx::setmaxnreg_dec<40>();
    if (warp == WARPGROUPS * 4) {
      const int64_t slot = first_slot<CHUNK>(tensors.sequences, n);
      produce<D, WARPGROUPS, CLUSTER, PRECISE>(smem, images + slot * H + h, tensors.v + offset, length, H);
    }
  } else {
    if constexpr (WARPGROUPS == 2) ptx::setmaxnreg_inc<232>();
    const int64_t state_offset = ((int64_t{n} * H + h) * D + slice * WARPGROUPS * PANEL) * D;
    float S_reg[D / 8][4];
    // Prepare writes no state. But where no sequence has a token it was not launched, and the kernel ahead may.
    if (length == 0) ptx::griddepcontrol_wait();
    load_state_rows<D>(S_reg, tensors.initial_state, state_offset);
    const unsigned lane = threadIdx.x % 32;
    bf16* out = tensors.out + offset + lane / 4 * row_pitch + threadIdx.x / 32 * 16 + lane % 4 * 4;
    consume<D, WARPGROUPS, CLUSTER, PRECISE>(smem, S_reg, out, length, row_pitch);
    store_state_rows<D>(S_reg, tensors.final_state, state_offset);
  }
  if constexpr (CLUSTER > 1) {  // the other CTA may still write to this one's shared memory
    __syncwarp();
    ptx::cluster_sync();
  }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

int64_t workspace_bytes(const KdaArgs& args) {
  if (args.K != args.V || (args.K != 64 && args.K != 128)) {
    throw Error(KDA_UNSUPPORTED, format("K = %lld, V = %lld: register_state on CUDA runs K = V = 64 and K = V = 128",
                                        static_cast<long long>(args.K), static_cast<long long>(args.V)));
  }
  const int64_t image_bytes = args.precise ? args.K == 64 ? sizeof(ChunkImage<64, true>) : sizeof(ChunkImage<128, true>)
                              : args.K == 64 ? sizeof(ChunkImage<64, false>)
                                             : sizeof(ChunkImage<128, false>);
  return chunk_slots(args, CHUNK) * args.H * image_bytes;
}

template <int D, bool PRECISE, bool WIDE>
void launch_prepare(const KdaArgs& args, ChunkImage<D, PRECISE>* images, unsigned multiprocessors) {
  const unsigned slots = static_cast<unsigned>(chunk_slots(args, CHUNK)), H = static_cast<unsigned>(args.H);
  const unsigned at_once = CTAS<D, PRECISE, WIDE> * multiprocessors;
  const unsigned strides = std::min(slots, std::max(1u, at_once / H));
  launch("prepare", args, prepare<D, PRECISE, WIDE>, dim3(strides * H), dim3(D), 0, tensors_of(args), images, slots,
         static_cast<float>(args.scale), static_cast<float>(args.lower_bound * double{LOG2_E}));
}

template <int D, int WARPGROUPS, int CLUSTER, bool PRECISE>
void launch_recurrence(const KdaArgs& args, const ChunkImage<D, PRECISE>* images) {
  launch_dependent("recurrence", args, recurrence<D, WARPGROUPS, CLUSTER, PRECISE>,
                   dim3(args.N * args.H * D / PANEL / WARPGROUPS), dim3(threads(WARPGROUPS)),
                   sizeof(RecurrenceSmem<D, WARPGROUPS, PRECISE>), CLUSTER, tensors_of(args), images);
}

template <int D, bool PRECISE>
void run(const KdaArgs& args, unsigned multiprocessors) {
  auto* images = static_cast<ChunkImage<D, PRECISE>*>(args.workspace);
  const bool wide = -args.lower_bound * CHUNK > NARROW_BUDGET;
  wide ? launch_prepare<D, PRECISE, true>(args, images, multiprocessors)
       : launch_prepare<D, PRECISE, false>(args, images, multiprocessors);
  if constexpr (D == 128) {
    // One CTA for a head's 128 value rows, or two of 64 as long as the chip has room for all of them at once. With
    // nearly all of it taken they share each copy: then memory decides, otherwise the chain, which sharing lengthens.
    const int64_t ctas = 2 * args.N * args.H;
    if (ctas > multiprocessors) return launch_recurrence<D, 2, 1, PRECISE>(args, images);
    if (ctas * 10 > multiprocessors * int64_t{9}) return launch_recurrence<D, 1, 2, PRECISE>(args, images);
  }
  launch_recurrence<D, 1, 1, PRECISE>(args, images);
}

int attribute(cudaDeviceAttr which, const KdaArgs& args) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, args.device), "device attribute");
  return value;
}

void forward(const KdaArgs& args) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, args);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, args);
  if (major != 9 || minor != 0) {
    throw Error(KDA_UNSUPPORTED, format("register_state needs compute capability 9.0 (wgmma); this GPU has %d.%d: "
                                        "use fused_two_kernel",
                                        major, minor));
  }
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount, args);
  if (args.K == 64) return args.precise ? run<64, true>(args, multiprocessors) : run<64, false>(args, multiprocessors);
  args.precise ? run<128, true>(args, multiprocessors) : run<128, false>(args, multiprocessors);
}

}  // namespace kda::step6
