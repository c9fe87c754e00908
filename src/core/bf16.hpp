#pragma once
// bfloat16: the upper half of an f32. Storage only; arithmetic is done in f32.

#include <bit>
#include <cstdint>

#include "core/host_device.hpp"

namespace gyre {

// NOLINTNEXTLINE(readability-identifier-naming): spelled like the built-in types
struct bf16 {
  uint16_t bits = 0;
  friend bool operator==(bf16, bf16) = default;
};

GYRE_HOST_DEVICE constexpr float to_float(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
GYRE_HOST_DEVICE constexpr float to_float(float x) {
  return x;
}

/// Rounds to nearest, ties to even. NaN stays NaN.
GYRE_HOST_DEVICE constexpr bf16 to_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

}  // namespace gyre
