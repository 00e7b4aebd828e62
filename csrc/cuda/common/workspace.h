// Hands out parts of KdaArgs::workspace, each 256-byte aligned; without a workspace it only counts the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kda {

class Carver {
 public:
  explicit Carver(void* workspace) : base_(static_cast<char*>(workspace)) {}

  template <typename Element>
  Element* take(int64_t elements) {
    const int64_t offset = bytes_;
    bytes_ += (elements * static_cast<int64_t>(sizeof(Element)) + 255) / 256 * 256;
    return base_ ? reinterpret_cast<Element*>(base_ + offset) : nullptr;
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace kda
