#pragma once
// Checksums that tell whether bytes are the same as before: XXH3, 64 bits. Not against forgery.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gyre {

/// The checksum of bytes that come in slices; how they are sliced does not matter.
class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> slice);
  uint64_t value() const;

 private:
  alignas(64) std::array<std::byte, 576> state_;  // of the library
};

uint64_t checksum_of(std::span<const std::byte> data);

}  // namespace gyre
