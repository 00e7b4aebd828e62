// Step 6, register_state: shorten the chain that the state makes from chunk to chunk, and move everything in bulk.
//
// Idea. Step 5's chain per chunk is S -> S k_decayed^T -> U = INV (..) -> output and update. The WY form (INV here with
// diag(beta) multiplied in) takes INV out of it:
//   w = INV k_decayed      P = Mqk INV           q' = q_decayed - P k_decayed          (all in prepare)
//   U = INV V - w S^T      O = q' S^T + P V      S <- S diag(decay) + U^T k_restored
// so that one product with S gives both U and O (the rows of w and q' lie one below the other), and the output no
// longer waits for U: its error for identical keys falls as well.
//
// Files, in the order to read them: prepare.cuh, what needs no state; recurrence.cuh, what waits for it;
// single_chunk.cuh, both in one kernel. Here: which of them a call gets.
//
// What changed against step 5 (kda-lab diff 5 6), and what it bought on one H200 (November 2026, T 8192, medians):
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
//                lengths have 32 bits, addresses come from the chunk's. 0.308 to 0.289 ms at H 32, 0.632 to 0.617 at
//                H 96
//   clusters     where two CTAs a head fill the chip, each fetches half of every image for both: 0.451 to 0.421 ms at
//                H 64. With fewer heads the other CTA's pace lengthens the chain (0.289 to 0.305 ms at H 32)
//   persistent   prepare's CTAs stay and fetch the next chunk while they multiply and invert: 0.45 to 0.43 ms at
//                H 96; INV by rows: 0.41; beta fetched ahead, and no spills (6 CTAs of 80 registers): 0.38
//   launch       recurrence sets itself up while prepare drains (programmatic dependent launch); not measured apart
//   one kernel   a sequence of one chunk has no chain, and launching two kernels takes longer than what they do: fused
//                does both and needs no workspace. T 16, H 32, fp32 states: the host launches it in 5.9, not 10.0 us,
//                and a CUDA graph replays it in 6.2, not 6.9 us
// What did not pay: two chunks joined to one link of the chain, in prepare (36 % slower) or by warps of their own in
// recurrence (0.308 to 0.37 ms at H 32: they take the chain's issue slots); ldmatrix and stmatrix in the place of
// movmatrix (to 0.322: the chain waits for them); asking for the next barrier early (to 0.319); inverting in turn by
// different warps; two accumulators in the chain (2 % of recurrence for 16 registers); addresses held in registers,
// which spill (prepare at H 96 from 0.35 to 0.38 ms), or more registers and fewer CTAs (to 0.39 ms); prepare from the
// last chunk to the first, for what L2 still holds of its images (1 % slower); cutting the sequence so that prepare of
// one part runs beside recurrence of the part before (H 32: from 0.33 ms to between 0.33 and 0.48 ms), because
// prepare's warps take issue slots from the chain; one kernel for two chunks (T 32, H 32, in a graph: 7.6 to 8.9 us);
// the producers of a cluster telling each other that a stage is free, by one arrival instead of four (H 64: 0.432 to
// 0.532 ms; perhaps because a copy now waits for two messages, one after the other); adding what rounding took from
// every other row of U to the next (identical keys: the state's error from 1.08e-2 to 0.73e-2; gates that forget: from
// 3.3e-3 to 3.8e-3; 0.634 to 0.640 ms at H 96).
//
// In the profiler: prepare and recurrence move bytes nearly as fast as a copy from H = 96 up; with fewer heads the
// chain of two dependent products a chunk decides, and near H = 64 both count.
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

#include "../common/launch.cuh"
#include "6_register_state/prepare.cuh"
#include "6_register_state/recurrence.cuh"
#include "6_register_state/single_chunk.cuh"

namespace kda::step6 {

// Whether `fused` takes the place of two kernels. No sequence may have more than one chunk; of packed ones the host
// only knows how long they are together. And all CTAs, two for each head of each sequence, should run at once, two on a
// multiprocessor, of which an H100 PCIe has 114. Beyond that the GPU is the slower side, and both CTAs of a head form
// the image that prepare forms once: 154 us, not 128, at T 16, N 64, H 32. At K = 64 prepare has half a warpgroup.
bool fuses(const KdaArgs& args) { return args.K == 128 && args.T <= CHUNK && args.N * args.H <= 114; }

int64_t workspace_bytes(const KdaArgs& args) {
  if (args.K != args.V || (args.K != 64 && args.K != 128)) {
    throw Error(KDA_UNSUPPORTED, format("K = %lld, V = %lld: register_state on CUDA runs K = V = 64 and K = V = 128",
                                        static_cast<long long>(args.K), static_cast<long long>(args.V)));
  }
  if (fuses(args)) return 0;
  const int64_t image_bytes = args.precise ? args.K == 64 ? sizeof(ChunkImage<64, true>) : sizeof(ChunkImage<128, true>)
                              : args.K == 64 ? sizeof(ChunkImage<64, false>)
                                             : sizeof(ChunkImage<128, false>);
  return chunk_slots(args, CHUNK) * args.H * image_bytes;
}

float lower_bound_log2(const KdaArgs& args) { return static_cast<float>(args.lower_bound * double{LOG2_E}); }

template <int D, bool PRECISE, bool WIDE>
void launch_prepare(const KdaArgs& args, ChunkImage<D, PRECISE>* images, unsigned multiprocessors) {
  const unsigned slots = static_cast<unsigned>(chunk_slots(args, CHUNK)), H = static_cast<unsigned>(args.H);
  const unsigned at_once = CTAS<D, PRECISE, WIDE> * multiprocessors;
  const unsigned strides = std::min(slots, std::max(1u, at_once / H));
  launch("prepare", args, prepare<D, PRECISE, WIDE>, dim3(strides * H), dim3(D), 0, tensors_of(args), images, slots,
         static_cast<float>(args.scale), lower_bound_log2(args));
}

template <int D, int WARPGROUPS, int CLUSTER, bool PRECISE>
void launch_recurrence(const KdaArgs& args, const ChunkImage<D, PRECISE>* images) {
  launch_dependent("recurrence", args, recurrence<D, WARPGROUPS, CLUSTER, PRECISE>,
                   dim3(args.N * args.H * D / PANEL / WARPGROUPS), dim3(threads(WARPGROUPS)),
                   sizeof(RecurrenceSmem<D, WARPGROUPS, PRECISE>), CLUSTER, tensors_of(args), images);
}

template <bool PRECISE, bool WIDE>
void launch_fused(const KdaArgs& args) {
  launch("fused", args, fused<PRECISE, WIDE>, dim3(args.N * args.H * 2), dim3(WARPGROUP), 0, tensors_of(args),
         static_cast<float>(args.scale), lower_bound_log2(args));
}

template <int D, bool PRECISE>
void run(const KdaArgs& args, unsigned multiprocessors) {
  auto* images = static_cast<ChunkImage<D, PRECISE>*>(args.workspace);
  const bool wide = -args.lower_bound * CHUNK > NARROW_BUDGET;
  if constexpr (D == 128) {
    if (fuses(args)) return wide ? launch_fused<PRECISE, true>(args) : launch_fused<PRECISE, false>(args);
  }
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
