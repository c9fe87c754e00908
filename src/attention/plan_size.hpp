#pragma once
// Estimates the size of the plans of all ranks before they are made. Code that reads all plans
// needs time in proportion to it, and memory too if it keeps them.

#include <cstdint>
#include <functional>

#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Limits on the entries of all plans: kept in memory; made one rank at a time (in minutes).
inline constexpr int64_t max_kept_entries = int64_t{30} << 20;
inline constexpr int64_t max_streamed_entries = int64_t{1} << 30;

/// Estimated number of arrays, steps, messages, slices and rectangles in the plans of all ranks:
/// the maximum of three ranks, times the number of ranks. Throws a usage error if the schedule
/// refuses the problem.
int64_t estimated_entries(const Schedule& schedule, const AttentionProblem& problem);

/// A request for the plans of all ranks.
struct PlannedRequest {
  const Schedule& schedule;
  const char* purpose;  ///< what the plans are made for ("explained")
  int cp;
  int64_t tokens;  ///< of all documents
};

/// Throws a usage error if the plans of all ranks have more than `most` entries, as given by
/// `estimate(ranks)`. Tries 64, 128, 256, ... ranks, so that no plan is made that is itself too
/// large. The error names the last number that works; if even 64 is too many, a number of tokens.
void check_plan_size(const PlannedRequest& asked, int64_t most,
                     const std::function<int64_t(int ranks)>& estimate);

}  // namespace gyre
