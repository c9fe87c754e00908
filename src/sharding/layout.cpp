#include "sharding/layout.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Checks the contract of DualChunkSwap for every boundary; "the shards cover the stream" would not
/// be enough, since a misaligned boundary can still give a perfect permutation that splits a
/// segment at the wrong slot.
void check_bounds(const SegmentBounds& bounds, int cp) {
  if (cp < 1) throw_usage("cp must be at least 1, not {}", cp);
  if (bounds.real.size() != bounds.padded.size() || bounds.padded.empty())
    throw_usage("segment boundaries: {} real and {} padded entries; both need segments + 1",
                bounds.real.size(), bounds.padded.size());
  if (bounds.real.front() != 0 || bounds.padded.front() != 0)
    throw_usage("segment boundaries must start at 0, not at {} (real) and {} (padded)",
                bounds.real.front(), bounds.padded.front());
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const int64_t real = bounds.real_length(i), slots = bounds.slot_length(i);
    if (real < 0 || slots < real)
      throw_usage("segment {}: real length {} and slot length {}; 0 <= real <= slots must hold", i,
                  real, slots);
    if (slots % (2 * cp) != 0)
      throw_usage(
          "segment {}: slot length {} is not a multiple of 2·cp = {}; the next valid one is {}", i,
          slots, 2 * cp, round_up(slots, 2 * cp));
  }
}

}  // namespace

Layout dual_chunk_swap(const SegmentBounds& bounds, int cp) {
  check_bounds(bounds, cp);
  Layout layout{"dual-chunk-swap", {}};
  for (int r = 0; r < cp; ++r) {
    Shard shard;
    for (int64_t i = 0; i < bounds.segments(); ++i) {
      const int64_t chunk = bounds.slot_length(i) / (2 * cp);
      LocalToken local(bounds.padded[static_cast<size_t>(i)] / cp);
      for (const ChunkIndex c : {ChunkIndex(r), ChunkIndex(2 * cp - 1 - r)}) {
        const int64_t start = c.value() * chunk;
        const int64_t valid = std::clamp<int64_t>(bounds.real_length(i) - start, 0, chunk);
        if (valid > 0)
          shard.fragments.push_back({SegmentIndex(i), DocPosition(start), 1, valid, local});
        local += chunk;
      }
    }
    shard.slots = bounds.padded.back() / cp;
    layout.shards.push_back(std::move(shard));
  }
  return layout;
}

std::vector<int32_t> dual_chunk_swap_index(const SegmentBounds& bounds, int cp, int rank) {
  check_bounds(bounds, cp);
  std::vector<int32_t> index;
  index.reserve(static_cast<size_t>(bounds.padded.back() / cp));
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const auto begin = bounds.padded[static_cast<size_t>(i)];
    const auto chunk = static_cast<int32_t>(bounds.slot_length(i) / (2 * cp));
    for (const int32_t c : {rank, 2 * cp - 1 - rank})
      for (int32_t k = 0; k < chunk; ++k) index.push_back(begin + c * chunk + k);
  }
  return index;
}

std::vector<Owner> dual_chunk_swap_owner(const SegmentBounds& bounds, int cp) {
  check_bounds(bounds, cp);
  std::vector<Owner> owners;
  owners.reserve(static_cast<size_t>(bounds.padded.back()));
  for (int64_t i = 0; i < bounds.segments(); ++i) {
    const auto slots = static_cast<int32_t>(bounds.slot_length(i));
    const int32_t base = bounds.padded[static_cast<size_t>(i)] / cp;
    const int32_t chunk = slots / (2 * cp);
    for (int32_t p = 0; p < slots; ++p) {
      const int32_t k = p / chunk, inside = p % chunk;
      if (k < cp)
        owners.push_back({k, base + inside});
      else
        owners.push_back({2 * cp - 1 - k, base + chunk + inside});
    }
  }
  return owners;
}

}  // namespace gyre
