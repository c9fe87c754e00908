#include "apps/pack/salm_shards.hpp"

#include <fmt/format.h>

#include "apps/common/swapped_slot.hpp"
#include "sharding/layouts.hpp"

namespace gyre {
namespace {

/// The slots of a rank, segment by segment.
std::vector<int64_t> slots_of(const SalmPacked& packed, int cp, int rank) {
  std::vector<int64_t> slots;
  const SegmentBounds bounds = packed.bounds();
  for (int64_t i = 0; i < bounds.segments(); ++i)
    for (int64_t t = 0; t < bounds.slot_length(i) / cp; ++t)
      slots.push_back(cp == 1 ? bounds.begin(i) + t
                              : swapped_slot(bounds.begin(i), bounds.slot_length(i), cp, rank, t));
  return slots;
}

}  // namespace

void check_salm_shards(const SalmPacked& packed, int cp, Verification& checks) {
  LayoutOptions options;
  options.cp = cp;
  const Layout layout =
      cp > 1 ? dual_chunk_swap(packed.bounds(), options) : contiguous(packed.bounds(), options);
  Check& check = checks.check("shards of text and audio", 0);
  for (int rank = 0; rank < cp; ++rank) {
    const SalmShard shard = shard_salm(packed, layout, rank);
    std::vector<float> embeddings;
    std::vector<int64_t> labels, positions;
    for (const int64_t slot : slots_of(packed, cp, rank)) {
      const auto row = packed.embeddings.begin() + slot * packed.hidden;
      embeddings.insert(embeddings.end(), row, row + packed.hidden);
      labels.push_back(packed.labels[slot]);
      positions.push_back(packed.positions[slot]);
    }
    check.add_all(shard.embeddings, embeddings, fmt::format("rank {} embeddings", rank));
    check.add_all(shard.labels, labels, fmt::format("rank {} labels", rank));
    check.add_all(shard.positions, positions, fmt::format("rank {} positions", rank));
  }
}

}  // namespace gyre
