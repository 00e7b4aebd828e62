// The instructions of compute capability 9.0 that step 6 uses, one function each, named after the instruction, as in
// ptx.cuh: barriers in shared memory that count bytes, bulk copies that report to them, and products of whole
// warpgroups.
//
// They assemble for sm_90a alone; a kernel that calls them is compiled to nothing elsewhere (KDA_HOPPER) and its
// launcher refuses other devices.
#pragma once

#include "ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KDA_HOPPER 1
#else
#define KDA_HOPPER 0
#endif

namespace kda::ptx {

#if KDA_HOPPER

// ---- mbarrier (PTX ISA 9.7.13.15): a phase ends when all arrivals and all announced bytes have come in --------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives on the barrier at this address in CTA `rank` of the cluster. Not .release.cluster, which waits until all that
// the thread wrote to device memory is there (recurrence took 2.3 times as long on an H200): what must come before are
// reads, and their results are in use.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// Returns once the phase of this parity has ended. try_wait sleeps in hardware for a while, so the loop seldom turns.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::
          "r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// This thread's cp.async copies so far arrive on the barrier when they have landed; they are among its counted
// arrivals.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// ---- bulk copies (9.7.9.25.4): one thread moves kilobytes; 16-byte aligned, a multiple of 16 bytes ------------------

__device__ __forceinline__ void cp_async_bulk_load(void* smem, const void* source, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem)),
               "l"(source), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

// The same into every CTA of the cluster whose bit is set in `ctas`, at this address there; each one's barrier at this
// address counts its bytes.
__device__ __forceinline__ void cp_async_bulk_load_multicast(void* smem, const void* source, uint32_t bytes,
                                                             uint64_t* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(smem_address(smem)),
      "l"(source), "r"(bytes), "r"(smem_address(barrier)), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_store(void* target, const void* smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(smem_address(smem)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the stores have read their shared memory.
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What this thread wrote to shared memory by ordinary stores becomes visible to bulk copies and warpgroup products.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters (9.7.13.4): CTAs that run at the same time and reach each other's shared memory ----------------------

// As __syncthreads, of all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- programmatic dependent launch (9.7.13.13): the next kernel of the stream may start before this one has ended ---

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- registers (9.7.19.5): a warpgroup gives some back, or takes them once others have ------------------------------

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- warpgroup products (9.7.15): D[64, N] += A[64, 16] B[16, N] by 4 warps -----------------------------------------
// Warp w holds rows 16 w .. 16 w + 15 of A and D in the register layout of mma.m16n8k16, d[n] being columns
// 8 n .. 8 n + 7. B lies in shared memory.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_group() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The 64 bits that tell a product where B is and how it lies. Offsets in bytes; swizzle 0 none, 1 the 128-byte pattern
// (granule ^ row % 8 within rows of 128 bytes, the matrix aligned to 1024 bytes).
//   depth contiguous:   `leading` between the two 8-deep halves (no swizzle), `stride` between groups of 8 columns
//   columns contiguous: `leading` between groups of 64 columns, `stride` between the two 8-deep halves
__device__ __forceinline__ uint64_t matrix_descriptor(const void* smem, uint32_t leading, uint32_t stride,
                                                      uint64_t swizzle) {
  return uint64_t{(smem_address(smem) & 0x3ffff) >> 4} | uint64_t{leading >> 4} << 16 | uint64_t{stride >> 4} << 32 |
         swizzle << 62;
}

// The descriptor of the same kind of matrix `bytes` further on.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);  // the address field; it never carries
  return (descriptor & 0xffffffff00000000u) | low;
}

#define KDA_D4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KDA_D16(d, n) KDA_D4(d, n), KDA_D4(d, n + 1), KDA_D4(d, n + 2), KDA_D4(d, n + 3)

// depth of B contiguous; `accumulate` = 0 starts from zero
__device__ __forceinline__ void wgmma_m64n32k16(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, "
      "0;\n}\n"
      : KDA_D16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// columns of B contiguous
__device__ __forceinline__ void wgmma_m64nNk16_trans(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
      : KDA_D16(d, 0), KDA_D16(d, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_m64nNk16_trans(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : KDA_D16(d, 0), KDA_D16(d, 4), KDA_D16(d, 8), KDA_D16(d, 12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef KDA_D16
#undef KDA_D4
#endif

}  // namespace kda::ptx
