#pragma once
// IEEE half precision. Storage only.

#include <bit>
#include <cstdint>

namespace gyre {

// NOLINTNEXTLINE(readability-identifier-naming): spelled like the built-in types
struct f16 {
  uint16_t bits = 0;
};

/// Exact. NaN stays NaN.
constexpr float to_float(f16 x) {
  const uint32_t sign = (x.bits & 0x8000U) << 16, size = x.bits & 0x7fffU;
  const uint32_t exponent = size < 0x7c00U ? 112U << 23 : 224U << 23;  // the biases differ by 112
  const uint32_t bits = size < 0x400U ? std::bit_cast<uint32_t>(static_cast<float>(size) * 0x1p-24F)
                                      : (size << 13) + exponent;
  return std::bit_cast<float>(sign | bits);
}

}  // namespace gyre
