// How a chunk's matrices lie in shared memory and how a warp reads them as operands of mma.m16n8k16.
//
// Three layouts, all free of bank conflicts under ldmatrix (which reads 8 rows of 16 bytes at a time, wants them in 8
// different groups of 4 banks):
//   token tile  [16, D] bf16, rows of D: the 16-byte granules of row r are stored in the order granule ^ (r % 8).
//   panels      [rows, D] bf16: D / 64 token tiles [rows, 64] one after the other, which wgmma, too, can read: rows of
//               128 bytes in its 128-byte swizzle.
//   square tile [16, 16] bf16: four 8x8 blocks one after the other, (0,0) (0,1) (1,0) (1,1), rows of 8 inside.
#pragma once

#include "ptx.cuh"

namespace kda::tile {

constexpr unsigned kGranule = 8;  // bf16 elements in the 16 bytes that ldmatrix and a copy move at once

// Where element (row, column) of a token tile [16, D] lies.
template <int D>
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned column) {
  return row * D + ((column / kGranule ^ row % 8) * kGranule) + column % kGranule;
}

// Where element (row, column) of a square tile lies.
__device__ __forceinline__ unsigned blocked(unsigned row, unsigned column) {
  return ((row / 8) * 2 + column / 8) * 64 + (row % 8) * 8 + column % 8;
}

constexpr unsigned PANEL = 64;  // columns of a panel

// Where element (row, column) of a [ROWS, D] matrix lies that is stored as D / 64 panels [ROWS, 64].
template <int ROWS>
__device__ __forceinline__ unsigned panel(unsigned row, unsigned column) {
  return column / PANEL * ROWS * PANEL + swizzled<PANEL>(row, column % PANEL);
}

// From where an element lies to the one `rows` below or `columns` to the right, for constants whose bits the row or the
// column has not set: there the swizzle only flips bits, one instruction instead of the five of panel().
__device__ __forceinline__ unsigned below(unsigned at, unsigned rows) { return (at ^ rows * kGranule) + rows * PANEL; }

template <int ROWS>
__device__ __forceinline__ unsigned right(unsigned at, unsigned columns) {
  return (at ^ columns % PANEL) + columns / PANEL * ROWS * PANEL;
}

// Operand A, rows = the 16 tokens, depth = columns k0 .. k0+15.
template <int D>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const __nv_bfloat16* tile_smem, int k0) {
  const unsigned lane = threadIdx.x % 32;
  ptx::ldmatrix_x4(a, ptx::smem_address(tile_smem + swizzled<D>(lane % 16, k0 + lane / 16 * kGranule)));
}

// Operand B of two products: columns = tokens 0-7 (b[0]) and 8-15 (b[1]), depth = columns k0 .. k0+15 of the tile.
template <int D>
__device__ __forceinline__ void load_b_tokens(uint32_t (&b)[2][2], const __nv_bfloat16* tile_smem, int k0) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t r[4];
  ptx::ldmatrix_x4(r,
                   ptx::smem_address(tile_smem + swizzled<D>(lane % 8 + lane / 16 * 8, k0 + lane / 8 % 2 * kGranule)));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Operand B of two products: columns = columns n0 .. n0+7 (b[0]) and n0+8 .. n0+15 (b[1]) of the tile, depth = the
// tokens.
template <int D>
__device__ __forceinline__ void load_b_columns(uint32_t (&b)[2][2], const __nv_bfloat16* tile_smem, int n0) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t r[4];
  ptx::ldmatrix_x4_trans(r, ptx::smem_address(tile_smem + swizzled<D>(lane % 16, n0 + lane / 16 * kGranule)));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Operand B of two products: columns = rows 0-7 (b[0]) and 8-15 (b[1]) of a square tile, depth = its columns.
__device__ __forceinline__ void load_b_square(uint32_t (&b)[2][2], const __nv_bfloat16* square_smem) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::smem_address(square_smem + lane * kGranule));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// A square tile as operand A, or with `transposed` loads as operand B: b[0], b[1] columns 0-7, b[2], b[3] columns 8-15.
__device__ __forceinline__ uint32_t square_address(const __nv_bfloat16* square_smem) {
  const unsigned lane = threadIdx.x % 32, block = lane / 8 % 2 * 2 + lane / 16;
  return ptx::smem_address(square_smem + block * 64 + lane % 8 * 8);
}

__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// A pair of floats as two pairs of bf16 whose sum has 16 bits of mantissa.
__device__ __forceinline__ void split(uint32_t& high, uint32_t& low, float x, float y) {
  high = ptx::cvt_rn_bf16x2(x, y);
  low = ptx::cvt_rn_bf16x2(x - low_float(high), y - high_float(high));
}

// Four neighbouring bf16 elements, packed, as floats and back.
__device__ __forceinline__ void unpack(float (&x)[4], uint2 packed) {
  x[0] = low_float(packed.x), x[1] = high_float(packed.x), x[2] = low_float(packed.y), x[3] = high_float(packed.y);
}

__device__ __forceinline__ uint2 pack(const float (&x)[4]) {
  return {ptx::cvt_rn_bf16x2(x[0], x[1]), ptx::cvt_rn_bf16x2(x[2], x[3])};
}

// Copies BYTES, a multiple of 16, by THREADS threads; this one is number `thread`.
template <int BYTES, int THREADS>
__device__ __forceinline__ void copy(void* target, const void* source, int thread) {
  constexpr int COUNT = BYTES / sizeof(uint4);
#pragma unroll
  for (int first = 0; first < COUNT; first += THREADS) {
    if (first + thread < COUNT) {
      static_cast<uint4*>(target)[first + thread] = static_cast<const uint4*>(source)[first + thread];
    }
  }
}

// Sums N values at once over each group of 2 DISTANCE neighbouring lanes: lane l of a group returns the sum of
// x[l / (2 DISTANCE / N)]. Each exchange halves the number of values a lane still carries, so over 32 lanes N values
// cost N - 1 + log2(32 / N) shuffles instead of 5 N.
template <int DISTANCE, int N>
__device__ __forceinline__ float group_sums(const float (&x)[N]) {
  if constexpr (DISTANCE == 0) {
    return x[0];
  } else if constexpr (N == 1) {
    const float sum[1] = {x[0] + __shfl_xor_sync(0xffffffffu, x[0], DISTANCE)};
    return group_sums<DISTANCE / 2>(sum);
  } else {
    const bool upper = threadIdx.x & DISTANCE;
    float kept[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float low = x[i], high = x[i + N / 2];
      kept[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, DISTANCE);
    }
    return group_sums<DISTANCE / 2>(kept);
  }
}

}  // namespace kda::tile
