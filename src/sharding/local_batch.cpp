#include "sharding/local_batch.hpp"

#include "core/error.hpp"

namespace gyre {

LocalBatch make_local_batch(const SegmentBounds& bounds,
                            std::span<const std::span<const int32_t>> documents, int cp, int rank) {
  GYRE_CHECK(std::ssize(documents) == bounds.segments(), "{} documents for {} segments",
             documents.size(), bounds.segments());
  LocalBatch batch;
  int64_t segment = 0;
  for (int32_t slot : dual_chunk_swap_index(bounds, cp, rank)) {
    // The index ascends inside a segment's chunks and segments come in order: the next boundary is
    // never far.
    while (slot >= bounds.padded[static_cast<size_t>(segment) + 1]) ++segment;
    const std::span<const int32_t> document = documents[static_cast<size_t>(segment)];
    const int32_t position = slot - bounds.padded[static_cast<size_t>(segment)];
    const auto p = static_cast<size_t>(position);
    batch.positions.push_back(position);
    batch.tokens.push_back(p < document.size() ? document[p] : 0);
    batch.targets.push_back(p + 1 < document.size() ? document[p + 1] : -1);
  }
  return batch;
}

}  // namespace gyre
