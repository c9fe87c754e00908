#pragma once
// 64-bit XXH3 checksums that show whether bytes have changed. Not cryptographic.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gyre {

/// Checksum of bytes that arrive in slices; independent of how they are sliced.
class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> slice);
  uint64_t value() const;

 private:
  alignas(64) std::array<std::byte, 576> state_;  // XXH3_state_t
};

uint64_t checksum_of(std::span<const std::byte> data);

}  // namespace gyre
