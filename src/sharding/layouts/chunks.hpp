#pragma once
// What layouts of equal chunks share.

#include "core/error.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Throws a usage error when there are no ranks, or more than layouts are made for.
void check_cp(int cp);

/// `length` consecutive slots.
SlotRun slot_run(int64_t start, int64_t length);

/// Chunks of rank r of 2·cp, swapped: r and 2·cp-1-r. Where they are neighbours (the last rank),
/// two all the same.
std::vector<int64_t> swapped_chunks(int rank, int cp);

/// Those chunks, of `length` slots each, as slots.
std::vector<SlotRun> swapped_runs(int rank, int cp, int64_t length);

}  // namespace gyre
