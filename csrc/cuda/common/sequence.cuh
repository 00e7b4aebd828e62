// Where a sequence, and a chunk of one, lies on the token axis.
//
// Tokens of all batch rows are counted through: [B, T, ...] is read as [tokens, ...] with tokens = B * T, so that a
// batch row is a sequence like any other. Packed sequences (B = 1) come with cu_seqlens [N + 1], which stays on the
// device: the host never waits for it. It only knows that there are at most chunk_slots() chunks, starts that many
// blocks, and a block finds its chunk, or that there is none, by find_chunk().
//
// Slots. Chunk c of sequence n has slot start_n / C + n + c. Sequence n needs ceil(length_n / C) of them and the next
// one begins at least that much later (floor(a/C) + ceil(b/C) <= floor((a+b)/C) + 1), so slots never overlap and no sum
// over the sequences before is needed; about one slot a sequence stays empty.
#pragma once

#include <cstdint>

#include "../../kda.h"

namespace kda {

struct Sequences {
  int64_t T;               // tokens of a batch row; of all packed sequences together
  int64_t N;               // sequences
  const void* cu_seqlens;  // [N + 1] int32 or int64 on the device, or nullptr: sequence n is batch row n
  bool is_i64;
};

struct Span {
  int64_t start, end;  // tokens [start, end)
};

struct Chunk {
  int64_t start;  // first token
  int tokens;     // 1..CHUNK; 0: no chunk has this slot
};

inline Sequences sequences_of(const KdaArgs& args) {
  return {args.T, args.N, args.cu_seqlens, args.cu_seqlens_dtype == KDA_I64};
}

// Upper bound of the slots in use: grid.x of a kernel that gives each chunk a block.
inline int64_t chunk_slots(const KdaArgs& args, int64_t chunk) {
  const int64_t chunks = (args.T + chunk - 1) / chunk;
  return args.cu_seqlens ? chunks + args.N : args.B * chunks;
}

// Entry n of cu_seqlens. Clamped: inside a captured graph nobody has checked it, and a wrong one must not lead outside.
__device__ inline int64_t boundary(const Sequences& s, int64_t n) {
  const int64_t token = s.is_i64 ? static_cast<const int64_t*>(s.cu_seqlens)[n]
                                 : static_cast<int64_t>(static_cast<const int32_t*>(s.cu_seqlens)[n]);
  return token < 0 ? 0 : token > s.T ? s.T : token;
}

__device__ inline Span find_sequence(const Sequences& s, int64_t n) {
  if (!s.cu_seqlens) return {n * s.T, (n + 1) * s.T};
  const int64_t start = boundary(s, n), end = boundary(s, n + 1);
  return {start, end < start ? start : end};
}

// Slot of chunk 0 of sequence n.
template <int CHUNK>
__device__ inline int64_t first_slot(const Sequences& s, int64_t n) {
  return s.cu_seqlens ? boundary(s, n) / CHUNK + n : n * ((s.T + CHUNK - 1) / CHUNK);
}

// The sequence that owns a slot, by bisection: first_slot() grows with n, so it is the last one that begins at or
// before it. Slots come from a grid's x: 31 bits are enough.
template <int CHUNK>
__device__ inline int64_t sequence_of_slot(const Sequences& s, uint32_t slot) {
  if (!s.cu_seqlens) return slot / static_cast<uint32_t>((s.T + CHUNK - 1) / CHUNK);
  int64_t n = 0;
  for (int64_t above = s.N; above - n > 1;) {
    const int64_t middle = (n + above) / 2;
    (first_slot<CHUNK>(s, middle) <= slot ? n : above) = middle;
  }
  return n;
}

// The chunk in a slot.
template <int CHUNK>
__device__ inline Chunk find_chunk(const Sequences& s, uint32_t slot) {
  const int64_t n = sequence_of_slot<CHUNK>(s, slot);
  const Span span = find_sequence(s, n);
  const int64_t start = span.start + (slot - first_slot<CHUNK>(s, n)) * CHUNK;
  if (start >= span.end) return {0, 0};
  return {start, static_cast<int>(span.end - start < CHUNK ? span.end - start : CHUNK)};
}

// A walk over the chunks in slots slot, slot + stride, ...
template <int CHUNK>
struct Cursor {
  unsigned slot, end, stride;
  int64_t n;                  // the sequence that owns the slot,
  Span span;                  // its tokens,
  int64_t first, first_next;  // its first slot and that of the next one
  Chunk chunk;                // what the slot holds, once found() has said that there is something

  __device__ __forceinline__ void enter(const Sequences& sequences, int64_t sequence) {
    n = sequence;
    span = find_sequence(sequences, n);
    first = first_slot<CHUNK>(sequences, n);
    first_next = n + 1 < sequences.N ? first_slot<CHUNK>(sequences, n + 1) : INT64_MAX;
  }

  __device__ __forceinline__ bool found(const Sequences& sequences) {
    for (; slot < end; slot += stride) {
      while (first_next <= slot) enter(sequences, n + 1);
      const int64_t start = span.start + (slot - first) * CHUNK;
      chunk = {start, static_cast<int>(min(int64_t{CHUNK}, span.end - start))};
      if (chunk.tokens > 0) return true;
    }
    return false;
  }
};

}  // namespace kda
