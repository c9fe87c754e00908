#pragma once
// Random integers and reals that do not depend on the standard library: std::mt19937_64 is defined
// to the bit, the distributions of <random> and std::shuffle are not.

#include <cstdint>
#include <random>

namespace gyre {

using RandomBits = std::mt19937_64;

/// Uniform in [0, n), n >= 1, without bias: draws again when the value lies in the last, incomplete
/// block of n values.
inline uint64_t uniform_below(RandomBits& random, uint64_t n) {
  const uint64_t end = RandomBits::max() - RandomBits::max() % n;
  uint64_t value = random();
  while (value >= end) value = random();
  return value % n;
}

/// Uniform in (0, 1): the midpoint of one of 2^52 equal intervals.
inline double uniform_open(RandomBits& random) {
  return ((random() >> 12) + 0.5) * 0x1p-52;
}

}  // namespace gyre
