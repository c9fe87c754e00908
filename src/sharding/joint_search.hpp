#pragma once
// Search for the joint assignment; balanced.hpp defines the objective and the algorithm.

#include <cstdint>
#include <vector>

#include "sharding/chunk_assignment.hpp"

namespace gyre {

/// Returns the rank of each chunk, equally many per rank: the best assignment visited.
/// Precondition: at least one chunk.
std::vector<int32_t> search_joint(const Chunks& chunks, int cp, const TimeModel& time);

}  // namespace gyre
