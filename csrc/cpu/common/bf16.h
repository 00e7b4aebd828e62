// bf16 is the upper half of an fp32: widening appends sixteen zero bits, narrowing rounds them away.
#pragma once

#include <cstdint>
#include <cstring>

namespace kda::cpu {

struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float value) {  // rounds to nearest, ties to even; a NaN stays a NaN
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = word + 0x7fffu + ((word >> 16) & 1u);
    bits = static_cast<uint16_t>(is_nan ? (word >> 16) | 0x40u : rounded >> 16);  // 0x40: quiet, and never all zeros
  }

  operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};
static_assert(sizeof(bf16) == 2, "a tensor's element");

}  // namespace kda::cpu
