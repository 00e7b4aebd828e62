// One function per PTX instruction, named after it, so that a kernel says which instruction it means and the listing
// (kda-lab sass) can be searched for it. Nothing here decides anything: no loops, no layouts, no policy.
//
// Needs sm_80 (mma.sync with bf16, cp.async); ex2, rcp, tanh run on sm_75 as well. PTX ISA 9.0, chapters named per
// group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kda::ptx {

// ---- Special functions (PTX ISA 9.7.3): each is one MUFU in SASS, 16 results a clock and SM ------------------------

// 2^x. Relative error <= 2^-22.5 or so. Without .ftz the compiler must add a scaling around MUFU.EX2 so that subnormal
// inputs and results survive; with it a result below 2^-126 is 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error <= 2^-23; 1 / inf = 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt_approx_ftz(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), relative error <= 2^-11: about as good as bf16, not as good as fp32.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Tensor cores (9.7.14): the whole warp takes part --------------------------------------------------------------

// d[16, 8] += a[16, 16] * b[16, 8], bf16 in, fp32 accumulated. In lane l, with g = l / 4 and t = l % 4:
//   a[0] holds rows g   , columns 2t, 2t+1      a[2] rows g   , columns 2t+8, 2t+9
//   a[1]       rows g+8 , columns 2t, 2t+1      a[3] rows g+8 , columns 2t+8, 2t+9
//   b[0] holds rows 2t, 2t+1 of column g        b[1] rows 2t+8, 2t+9 of column g
//   d[0], d[1] row g, columns 2t, 2t+1          d[2], d[3] row g+8, columns 2t, 2t+1
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Shared memory to registers (9.7.9 and 9.7.14): 8x8 tiles of 16-bit elements -----------------------------------

// The address of a shared-memory object as PTX wants it: 32 bits, in the shared window.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 tiles. Lane l passes the address of row l % 8 of tile l / 8 (16 bytes, 16-byte aligned); afterwards r[i] of
// lane l holds elements 2(l % 4), 2(l % 4) + 1 of row l / 4 of tile i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, each tile transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes one 8x8 tile held across the warp's registers (same layout as ldmatrix gives).
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---- Conversion (9.7.9) --------------------------------------------------------------------------------------------

// Two floats, rounded to nearest even, as a pair of bf16: `low` in bits 0-15.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ---- Asynchronous copies, device memory to shared memory (9.7.9.25) ------------------------------------------------

// 16 bytes past the L1 cache. Reads only `bytes` of them (0..16) and fills the rest with zeros; with 0 the source is
// not touched, but must still be a valid pointer.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* source, uint32_t bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's copies have landed.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace kda::ptx
