#pragma once
// How large the plans of all ranks are, before they are made: what reads them all takes time, and
// memory where it keeps them, in proportion.

#include <cstdint>
#include <functional>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Entries that may be kept in memory, and those that may be made one rank at a time (minutes).
inline constexpr int64_t most_kept_entries = int64_t{30} << 20;
inline constexpr int64_t most_streamed_entries = int64_t{1} << 30;

/// Arrays, steps, messages, slices and rectangles of the plans of all ranks, estimated: the most of
/// three ranks, times their number. Throws the refusals of the schedule.
int64_t estimated_entries(const Schedule& schedule, const AttentionProblem& problem);

/// Throws a usage error, with the nearest number of ranks that works, when the plans of `cp` ranks
/// have more than `most` entries by `estimate(ranks)`. 64 ranks always work; larger numbers are
/// tried from small to large, so that no plan is made that is itself too large. `purpose`: what
/// the plans are made for ("explained").
void check_plan_size(const Schedule& schedule, const char* purpose, int cp, int64_t most,
                     const std::function<int64_t(int ranks)>& estimate);

}  // namespace gyre
