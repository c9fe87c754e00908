#pragma once
// Size of the plans of all ranks, estimated before they are made. Readers of all plans need time,
// and memory if they keep them, in proportion.

#include <cstdint>
#include <functional>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Limits on entries: all plans kept in memory; plans made one rank at a time (minutes).
inline constexpr int64_t max_kept_entries = int64_t{30} << 20;
inline constexpr int64_t max_streamed_entries = int64_t{1} << 30;

/// Estimated number of arrays, steps, messages, slices and rectangles in the plans of all ranks:
/// the maximum of three ranks, times the number of ranks. Throws the refusals of the schedule.
int64_t estimated_entries(const Schedule& schedule, const AttentionProblem& problem);

/// Plans that were asked for.
struct PlannedRequest {
  const Schedule& schedule;
  const char* purpose;  ///< what the plans are made for ("explained")
  int cp;
  int64_t tokens;  ///< of all documents
};

/// Throws a usage error when the plans of all ranks have more than `most` entries by
/// `estimate(ranks)`, with the nearest number of ranks that works, or, where even 64 have more,
/// about how many tokens do. Numbers of ranks are tried from small to large, so that no plan is
/// made that is itself too large.
void check_plan_size(const PlannedRequest& asked, int64_t most,
                     const std::function<int64_t(int ranks)>& estimate);

}  // namespace gyre
