#pragma once
// Dual-chunk-swap by its definition, as the reference of checks of shards.

#include <cstdint>

namespace gyre {

/// The slot of the segment [begin, begin + slots) that is the local slot `local` of `rank`. A rank
/// holds chunk `rank`, then chunk 2·cp - 1 - rank, of slots / (2·cp) each.
inline int64_t swapped_slot(int64_t begin, int64_t slots, int cp, int rank, int64_t local) {
  const int64_t chunk = slots / (2 * cp);
  if (local < chunk) return begin + rank * chunk + local;
  return begin + (2 * cp - 1 - rank) * chunk + (local - chunk);
}

}  // namespace gyre
