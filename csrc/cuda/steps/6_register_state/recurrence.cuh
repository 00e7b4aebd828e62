// Step 6, recurrence: a warpgroup owns 64 rows of the state and carries them from the first chunk to the last.
#pragma once

#include "../../common/hopper.cuh"
#include "../../common/state_rows.cuh"
#include "../../common/tensors.cuh"
#include "prepare.cuh"

namespace kda::step6 {

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

// A chunk's image as wgmma finds its operands B (distances in bytes, see matrix_descriptor): square tiles of 8x8 blocks
// of 128 bytes, panels of rows of 128 bytes.
struct Operands {
  uint64_t INV_beta_P, wq, k_restored;

  template <int D, bool PRECISE>
  static __device__ __forceinline__ Operands of(const ChunkImage<D, PRECISE>& image) {
    return {ptx::matrix_descriptor(image.INV_beta_P, 128, 256, 0), ptx::matrix_descriptor(image.wq, 16, 1024, 1),
            ptx::matrix_descriptor(image.k_restored, CHUNK * PANEL * sizeof(bf16), 1024, 1)};
  }

  // Of the image that many bytes further on.
  __device__ __forceinline__ Operands advanced(uint32_t bytes) const {
    return {ptx::advanced(INV_beta_P, bytes), ptx::advanced(wq, bytes), ptx::advanced(k_restored, bytes)};
  }
};

// Begins [U^T O^T] = V^T [INV_beta; P]^T + S [-w; q']^T: rows v, columns the 16 tokens of each.
template <int D>
__device__ __forceinline__ void form_U_and_O(float (&UO)[4][4], const uint32_t (&V_reg)[4],
                                             const uint32_t (&S_bf16)[D / 16][4], const Operands& operands) {
  ptx::wgmma_fence();
  ptx::wgmma_m64n32k16(UO, V_reg, operands.INV_beta_P, 0);
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    const uint32_t bytes = (k / PANEL * 2 * CHUNK * PANEL + k % PANEL) * sizeof(bf16);
    ptx::wgmma_m64n32k16(UO, S_bf16[k / 16], ptx::advanced(operands.wq, bytes), 1);
  }
  ptx::wgmma_commit_group();
}

// Begins S += U^T k_restored.
template <int D, bool PRECISE>
__device__ __forceinline__ void update_state(float (&S_reg)[D / 8][4], const uint32_t (&U_reg)[4],
                                             const Operands& operands) {
  ptx::wgmma_fence();
  ptx::wgmma_m64nNk16_trans(S_reg, U_reg, operands.k_restored);
  if constexpr (PRECISE) {
    ptx::wgmma_m64nNk16_trans(S_reg, U_reg, ptx::advanced(operands.k_restored, CHUNK * D * sizeof(bf16)));
  }
  ptx::wgmma_commit_group();
}

// U^T, the first two column groups of the product, or O^T, the last two, as pairs of bf16.
__device__ __forceinline__ void round_columns(uint32_t (&rounded)[4], const float (&UO)[4][4], int first) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    rounded[r] = ptx::cvt_rn_bf16x2(UO[first + r / 2][r % 2 * 2], UO[first + r / 2][r % 2 * 2 + 1]);
  }
}

// Where this lane's first values of a chunk lie: 4 neighbouring ones of token lane / 4; the others are 8 tokens on.
__device__ __forceinline__ unsigned value_offset(unsigned row_pitch) {
  return threadIdx.x % 32 / 4 * row_pitch + threadIdx.x / 32 * 16 + threadIdx.x % 4 * 4;
}

// `out` points at this lane's first values.
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
  const auto first = Operands::of(smem.stages[0].image);
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
  unsigned pending = 0;  // tokens of the chunk before, whose output is still in O_reg
  for (; length > 0; length -= CHUNK, ring.advance()) {
    const RecurrenceStage<D, WARPGROUPS, PRECISE>& stage = smem.stages[ring.stage];
    uint32_t S_bf16[D / 16][4], V_reg[4], U_reg[4];
    float UO[4][4];
    float2 decay[D / 8];
    uint2 values[2];
    ptx::mbarrier_wait(&smem.full[ring.stage], ring.parity);
    load_values(values, stage.v);
    if constexpr (WARPGROUPS == 1) load_decay<D>(decay, stage.image.decay);
    write_output(out - chunk_pitch, O_reg, pending, chunk_pitch);
    transpose_values(V_reg, values);
    ptx::wgmma_wait_group();  // the update by the chunk before
    release(ring.previous());
    const Operands operands = first.advanced(ring.stage * sizeof(stage));
    round_state<D>(S_bf16, S_reg);
    form_U_and_O<D>(UO, V_reg, S_bf16, operands);
    // While the products run: they have the rounded state. With two warpgroups the loads wait until here, so that
    // nothing delays the products; one alone would wait for the loads.
    if constexpr (WARPGROUPS == 2) load_decay<D>(decay, stage.image.decay);
    decay_state<D>(S_reg, decay);
    ptx::wgmma_wait_group();
    round_columns(U_reg, UO, 0);
    update_state<D, PRECISE>(S_reg, U_reg, operands);
    round_columns(O_reg, UO, 2);
    pending = static_cast<unsigned>(min(CHUNK, length));
    out += chunk_pitch;
  }
  write_output(out - chunk_pitch, O_reg, pending, chunk_pitch);
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
    // The state may be read before prepare has ended, which writes none. But where no sequence has a token, prepare was
    // not launched, and the kernel ahead of this one may be writing it.
    if (length == 0) ptx::griddepcontrol_wait();
    load_state_rows<D>(S_reg, tensors.initial_state, state_offset);
    consume<D, WARPGROUPS, CLUSTER, PRECISE>(smem, S_reg, tensors.out + offset + value_offset(row_pitch), length,
                                             row_pitch);
    store_state_rows<D>(S_reg, tensors.final_state, state_offset);
  }
  if constexpr (CLUSTER > 1) {  // the other CTA may still write to this one's shared memory
    __syncwarp();
    ptx::cluster_sync();
  }
#endif
}

}  // namespace kda::step6
