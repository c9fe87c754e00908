#pragma once
// The search for the joint deal of balanced.hpp, which says what it minimises and how.

#include <cstdint>
#include <vector>

#include "sharding/chunk_deal.hpp"

namespace gyre {

/// The rank of each chunk, equally many on each of `cp` ranks: the best deal that the search meets.
/// There is at least one chunk.
std::vector<int32_t> search_joint(const Chunks& chunks, int cp, const TimeModel& time);

}  // namespace gyre
