#pragma once
// Size of the plans of all ranks, estimated before they are made. Readers of all plans need time,
// and memory if they keep them, in proportion.

#include <cstdint>
#include <functional>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Limits on entries: all plans kept in memory; plans made one rank at a time (minutes).
inline constexpr int64_t most_kept_entries = int64_t{30} << 20;
inline constexpr int64_t most_streamed_entries = int64_t{1} << 30;

/// Estimated number of arrays, steps, messages, slices and rectangles in the plans of all ranks:
/// the maximum of three ranks, times their number. Throws the refusals of the schedule.
int64_t estimated_entries(const Schedule& schedule, const AttentionProblem& problem);

/// Throws a usage error, with the nearest valid number of ranks, when the plans of `cp` ranks have
/// more than `most` entries by `estimate(ranks)`. 64 ranks always work; larger numbers are tried in
/// ascending order, so that no oversized plan is made. `purpose`: what the plans are made for
/// ("explained").
void check_plan_size(const Schedule& schedule, const char* purpose, int cp, int64_t most,
                     const std::function<int64_t(int ranks)>& estimate);

}  // namespace gyre
