#pragma once
// Helpers of layouts with equal chunks.

#include "core/error.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Throws a usage error unless 1 <= cp <= max_ranks.
void check_cp(int cp);
/// Throws a usage error unless both times are finite and at least 0.
void check_times(const TimeModel& time);

SlotRun slot_run(int64_t start, int64_t length);

/// Slots of one of chunks·cp equal parts of segment i. Throws a usage error that names the segment
/// if its slots cannot be cut so, with the next length that can.
int64_t chunk_of_segment(const SegmentBounds& bounds, int64_t i, int cp, int chunks);

/// Chunks r and 2·cp-1-r of 2·cp. They stay two entries where they are adjacent (the last rank).
std::vector<int64_t> swapped_chunks(int rank, int cp);

/// swapped_chunks as runs of `length` slots each.
std::vector<SlotRun> swapped_runs(int rank, int cp, int64_t length);

}  // namespace gyre
