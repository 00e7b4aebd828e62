// Step 6, fused: both kernels in one, for calls of so few tokens that launching a kernel takes as long as its work.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/state_rows.cuh"
#include "../../common/tensors.cuh"
#include "prepare.cuh"
#include "recurrence.cuh"

namespace kda::step6 {

// Grid: N x H x 2, slices of the state fastest; sequences of at most one chunk. One CTA, a warpgroup, has 64 rows of a
// head's state and forms the chunk's image for itself, as does its twin with the other rows: the image never leaves
// shared memory. The arithmetic is that of the two kernels, to the bit.
template <bool PRECISE, bool WIDE>
__global__ void __launch_bounds__(WARPGROUP, 2) fused(Tensors tensors, float scale, float lower_bound_log2) {
#if KDA_HOPPER
  constexpr int D = 128, SLICES = D / PANEL;
  __shared__ __align__(1024) PrepareSmem<D, PRECISE> smem;  // wgmma reads the image
  const unsigned H = static_cast<unsigned>(tensors.H), row_pitch = H * D;
  const unsigned slice = blockIdx.x % SLICES, h = blockIdx.x / SLICES % H, n = blockIdx.x / SLICES / H;
  const Span span = find_sequence(tensors.sequences, n);
  const Chunk chunk = {span.start, static_cast<int>(min(int64_t{CHUNK}, span.end - span.start))};
  const int64_t state_offset = ((int64_t{n} * H + h) * D + slice * PANEL) * D;
  float S_reg[D / 8][4];
  load_state_rows<D>(S_reg, tensors.initial_state, state_offset);
  if (chunk.tokens > 0) {
    const int64_t head_offset = chunk.start * row_pitch + h * D, rows = head_offset + row_offset<D>(row_pitch);
    const int64_t values_offset = head_offset + slice * PANEL + value_offset(row_pitch);
    load_rows<D>(smem.q, tensors.q + rows, chunk.tokens, row_pitch);
    load_rows<D>(smem.g, tensors.g + rows, chunk.tokens, row_pitch);
    load_rows<D>(smem.k, tensors.k + rows, chunk.tokens, row_pitch);
    uint2 values[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bf16* v = tensors.v + values_offset + j * (CHUNK / 2) * row_pitch;
      if (j * 8 + static_cast<int>(threadIdx.x) % 32 / 4 < chunk.tokens) values[j] = *reinterpret_cast<const uint2*>(v);
    }
    const bf16 beta_logit = load_beta(tensors, chunk, h);
    const float rate_log2 = gate_rate_log2(tensors.A_log[h]);
    smem.bias_log2[threadIdx.x] = rate_log2 * tensors.dt_bias[h * D + threadIdx.x];
    ptx::cp_async_wait_all();
    __syncthreads();
    const auto nothing_more_to_load = [] {};
    form_image<D, PRECISE, WIDE>(smem, chunk.tokens, beta_logit, rate_log2, scale, lower_bound_log2,
                                 nothing_more_to_load, nothing_more_to_load);

    // As in consume. But no chunk waits behind this one: what the compiler would make wait for a product comes first.
    const Operands operands = Operands::of(smem.image);
    uint32_t S_bf16[D / 16][4], V_reg[4], U_reg[4], O_reg[4];
    float UO[4][4];
    float2 decay[D / 8];
    transpose_values(V_reg, values);
    round_state<D>(S_bf16, S_reg);
    load_decay<D>(decay, smem.image.decay);
    decay_state<D>(S_reg, decay);
    form_U_and_O<D>(UO, V_reg, S_bf16, operands);
    ptx::wgmma_wait_group();
    round_columns(U_reg, UO, 0);
    round_columns(O_reg, UO, 2);
    update_state<D, PRECISE>(S_reg, U_reg, operands);
    write_output(tensors.out + values_offset, O_reg, chunk.tokens, int64_t{CHUNK} * row_pitch);
    ptx::wgmma_wait_group();
  }
  store_state_rows<D>(S_reg, tensors.final_state, state_offset);
#endif
}

}  // namespace kda::step6
