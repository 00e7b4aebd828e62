// Hands out pieces of the caller's workspace, one after another.
#pragma once

#include <cstdint>

#include "../../common/error.h"

namespace kda::cpu {

// Run once with a null workspace to measure, once with the real one to place: the same code, so both always agree.
class Arena {
 public:
  explicit Arena(void* workspace) : base_(static_cast<char*>(workspace)) {}

  // d0 * d1 * ... bytes, or floats, aligned to a cache line and not zeroed.
  template <class... Sizes>
  char* bytes(Sizes... sizes) {
    int64_t size = 1;
    bool overflow = (__builtin_mul_overflow(size, static_cast<int64_t>(sizes), &size) || ...);
    const int64_t begin = used_;
    overflow = overflow || __builtin_add_overflow(size, kAlignment - 1, &size);
    overflow = overflow || __builtin_add_overflow(used_, size / kAlignment * kAlignment, &used_);
    if (overflow) throw Error(KDA_INVALID_ARGUMENT, "B, T, H, K, V, N are too large: the workspace exceeds 2^63 bytes");
    return base_ ? base_ + begin : nullptr;
  }

  template <class... Sizes>
  float* floats(Sizes... sizes) {
    return reinterpret_cast<float*>(bytes(sizeof(float), sizes...));
  }

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 64;
  char* base_;
  int64_t used_ = 0;
};

// An array [blocks, heads] of records in the workspace; Record::place(args, arena) says what one holds.
template <class Record>
class Records {
 public:
  Records(const KdaArgs& args, int64_t blocks, Arena& arena) : args_(args) {
    Arena one(nullptr);
    Record::place(args, one);
    record_bytes_ = one.used();
    base_ = arena.bytes(record_bytes_, blocks, args.H);
  }

  Record at(int64_t block, int64_t head) const {
    Arena arena(base_ + (block * args_.H + head) * record_bytes_);
    return Record::place(args_, arena);
  }

 private:
  const KdaArgs& args_;
  int64_t record_bytes_;
  char* base_;
};

}  // namespace kda::cpu
