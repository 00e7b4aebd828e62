// Vectors of floats through the compiler's own vector types: + - * / work lane by lane, a scalar operand is broadcast.
// One width per target, no intrinsics, so the same source is AVX-512, AVX2, SSE or NEON code.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <utility>

#include "bf16.h"

namespace kda::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 8;  // rows of a register tile of two vectors: 16 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kTileRows = 4;  // 8 accumulators of 16 registers
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfWordVec __attribute__((vector_size(2 * kLanes)));

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }

// The first `count` elements at p (all lanes, where there are as many); the other lanes are 0.
inline Vec load_first(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

inline Vec load_first(const bf16* p, int64_t count) {
  if (count < kLanes) {  // apart, since a copy of variable size goes through memory and stalls the load that follows
    bf16 lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load_first(lanes, kLanes);
  }
  HalfWordVec halves;
  std::memcpy(&halves, p, sizeof(halves));
  return bit_cast<Vec>(__builtin_convertvector(halves, WordVec) << 16);
}

// Rounds to bf16 as bf16(float) does and stores the first `count` lanes.
inline void store_first(bf16* p, Vec x, int64_t count) {
  const WordVec words = bit_cast<WordVec>(x);
  const WordVec rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
  const WordVec quiet_nan = (words >> 16) | 0x40u;
  const HalfWordVec halves = __builtin_convertvector(x == x ? rounded : quiet_nan, HalfWordVec);
  if (count >= kLanes) {
    std::memcpy(p, &halves, sizeof(halves));
  } else {
    for (int64_t i = 0; i < count; ++i) p[i].bits = halves[i];
  }
}

// Swaps the second of every two runs of HALF lanes of `low` with the first of the same two of `high`.
template <int HALF, size_t... LANE>
inline void swap_runs(Vec& low, Vec& high, std::index_sequence<LANE...>) {
  const Vec a = low, b = high;
  low = Vec{(LANE & HALF ? b[LANE ^ HALF] : a[LANE])...};  // a constant choice for every lane: one shuffle
  high = Vec{(LANE & HALF ? b[LANE] : a[LANE ^ HALF])...};
}

// Transposes kLanes rows in place: the off-diagonal quarters change places, then within each quarter, and so on.
template <int HALF = kLanes / 2>
inline void transpose(Vec* rows /* [kLanes] */) {
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & HALF)) swap_runs<HALF>(rows[i], rows[i + HALF], std::make_index_sequence<kLanes>());
  }
  if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

inline float sum_of_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline Vec clamp(Vec x, float low, float high) {  // a NaN passes through
  x = x < low ? broadcast(low) : x;
  return x > high ? broadcast(high) : x;
}

// 2^x in every lane, within 1.5 ulp (measured over all floats by tests/test_cpu_steps.py); exact where x is whole,
// subnormal and infinite where 2^x is, NaN where x is.
inline Vec exp2(Vec x) {
  constexpr float kToInteger = 0x1.8p23f;  // added, pushes the fraction out of the significand: rounds to nearest
  x = clamp(x, -252.0f, 252.0f);
  const Vec shifted = x + kToInteger;
  const Vec f = x - (shifted - kToInteger);  // in [-1/2, 1/2]; the difference is exact
  Vec p = broadcast(0x1.41fbbcp-13f);        // (2^f - 1) / f, minimax, degree 5
  p = p * f + 0x1.5f3e54p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e430p-1f;
  const IntVec n = bit_cast<IntVec>(shifted) - bit_cast<int32_t>(kToInteger);
  const IntVec half = n >> 1;  // 2^n in two factors, each a normal float for all n of the clamp
  const Vec scale = bit_cast<Vec>((half + 127) << 23), rest = bit_cast<Vec>((n - half + 127) << 23);
  return (p * f + 1.0f) * scale * rest;
}

}  // namespace kda::cpu
