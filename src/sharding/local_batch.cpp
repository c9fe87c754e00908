#include "sharding/local_batch.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {

LocalBatch make_local_batch(const Layout& layout, const SegmentBounds& bounds,
                            std::span<const std::span<const int32_t>> documents, int rank) {
  GYRE_CHECK(std::ssize(documents) == bounds.segments() && layout.stream_slots == bounds.slots(),
             "{} documents for {} segments, a layout of {} slots for {}", documents.size(),
             bounds.segments(), layout.stream_slots, bounds.slots());
  const size_t slots = layout.shard(rank).slots;
  LocalBatch batch{std::vector<int32_t>(slots, 0),
                   std::vector<int32_t>(slots, 0),
                   std::vector<int32_t>(slots, no_target),
                   {}};
  size_t t = 0;
  for (const SlotRun& run : layout.shard(rank).runs) {
    int64_t segment = 0;
    for (int64_t k = 0; k < run.length; ++k, ++t) {
      const int64_t slot = run.start.value() + k * run.stride;
      if (slot >= bounds.slots()) continue;
      if (k == 0)
        segment = std::upper_bound(bounds.padded.begin(), bounds.padded.end(), slot) -
                  bounds.padded.begin() - 1;
      while (slot >= bounds.padded[segment + 1]) ++segment;
      const std::span<const int32_t> document = documents[segment];
      const size_t p = slot - bounds.begin(segment);
      batch.positions[t] = static_cast<int32_t>(p);
      if (p < document.size()) batch.tokens[t] = document[p];
      if (p + 1 < document.size()) batch.targets[t] = document[p + 1];
    }
  }
  return batch;
}

}  // namespace gyre
