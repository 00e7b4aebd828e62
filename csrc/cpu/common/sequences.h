// Which token rows belong to which sequence and chunk, and the state at either end of a sequence.
//
// Tensors [B, T, H, ...] are read as [B * T, H, ...]: a `row` is a token's index in B * T.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../kda.h"
#include "bf16.h"

namespace kda::cpu {

// The elements of one token and head, in a tensor [B, T, H, width] of bf16.
inline const bf16* token(const void* tensor, const KdaArgs& args, int64_t width, int64_t row, int64_t head) {
  return static_cast<const bf16*>(tensor) + (row * args.H + head) * width;
}
inline bf16* token(void* tensor, const KdaArgs& args, int64_t width, int64_t row, int64_t head) {
  return static_cast<bf16*>(tensor) + (row * args.H + head) * width;
}

struct Sequence {
  int64_t first_row;
  int64_t tokens;
  int64_t first_chunk;  // index of its first chunk among all sequences' chunks
};

struct Chunk {
  int64_t first_row;
  int64_t tokens;  // args.chunk, or fewer at the end of a sequence
};

// The N sequences of a call, from cu_seqlens or, without it, one per batch row. Offsets are clamped to [0, T] and made
// non-decreasing, so that wrong ones (Python refuses them with a message) can neither reach outside a tensor nor
// overlap.
inline std::vector<Sequence> list_sequences(const KdaArgs& args) {
  const auto offset = [&](int64_t n) {
    if (!args.cu_seqlens) return n * args.T;
    const int64_t value = args.cu_seqlens_dtype == KDA_I32 ? static_cast<const int32_t*>(args.cu_seqlens)[n]
                                                           : static_cast<const int64_t*>(args.cu_seqlens)[n];
    return std::clamp<int64_t>(value, 0, args.T);
  };
  std::vector<Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.N));
  int64_t begin = offset(0);
  int64_t first_chunk = 0;
  for (int64_t n = 0; n < args.N; ++n) {
    const int64_t end = std::max(begin, offset(n + 1));
    sequences.push_back({begin, end - begin, first_chunk});
    if (args.chunk > 0) first_chunk += (end - begin + args.chunk - 1) / args.chunk;
    begin = end;
  }
  return sequences;
}

// The chunk of a sequence that begins with its token `begin`; no tokens where the sequence has ended.
inline Chunk chunk_at(const KdaArgs& args, const Sequence& sequence, int64_t begin) {
  return {sequence.first_row + begin, std::clamp<int64_t>(sequence.tokens - begin, 0, args.chunk)};
}

inline std::vector<Chunk> list_chunks(const KdaArgs& args, const std::vector<Sequence>& sequences) {
  std::vector<Chunk> chunks;
  for (const Sequence& sequence : sequences) {
    for (int64_t begin = 0; begin < sequence.tokens; begin += args.chunk) {
      chunks.push_back(chunk_at(args, sequence, begin));
    }
  }
  return chunks;
}

// How many chunks there can be, whatever cu_seqlens says: each sequence ends in at most one chunk that is not full.
inline int64_t most_chunks(const KdaArgs& args) { return args.B * (args.T / args.chunk) + args.N; }

// state(v, d), a float&, <- initial_state[n, h, v, d], or 0, for rows [begin, end) of V.
template <class State>
void load_state(const KdaArgs& args, int64_t n, int64_t h, int64_t begin, int64_t end, const State& state) {
  int64_t at = ((n * args.H + h) * args.V + begin) * args.K;
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t d = 0; d < args.K; ++d, ++at) {
      switch (args.initial_state_dtype) {
        case KDA_BF16:
          state(v, d) = static_cast<const bf16*>(args.initial_state)[at];
          break;
        case KDA_F32:
          state(v, d) = static_cast<const float*>(args.initial_state)[at];
          break;
        default:
          state(v, d) = 0.0f;
      }
    }
  }
}

// final_state[n, h, v, d] <- state(v, d), where the caller wants it.
template <class State>
void store_state(const KdaArgs& args, int64_t n, int64_t h, int64_t begin, int64_t end, const State& state) {
  int64_t at = ((n * args.H + h) * args.V + begin) * args.K;
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t d = 0; d < args.K; ++d, ++at) {
      switch (args.final_state_dtype) {
        case KDA_BF16:
          static_cast<bf16*>(args.final_state)[at] = bf16(state(v, d));
          break;
        case KDA_F32:
          static_cast<float*>(args.final_state)[at] = state(v, d);
          break;
        default:
          return;
      }
    }
  }
}

}  // namespace kda::cpu
