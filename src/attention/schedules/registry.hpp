#pragma once
// The schedules that exist, by name. A new schedule is one file here that returns a rank's plan,
// and one line in registry.cpp.

#include <string>
#include <vector>

#include "attention/plan.hpp"

namespace gyre {

struct Schedule {
  std::string name;
  std::string summary;
  /// The plan of one rank, both directions. Any problem for which refusal() is empty.
  RankPlan (*plan)(const AttentionProblem& problem, int rank);
  /// Why this schedule cannot do the problem, with the nearest that it can; "" when it can. Null:
  /// it can do all.
  std::string (*refusal)(const AttentionProblem& problem) = nullptr;

  /// refusal(), "" where there is none.
  std::string why_not(const AttentionProblem& problem) const {
    return refusal == nullptr ? "" : refusal(problem);
  }
};

const std::vector<Schedule>& schedules();

/// Throws a usage error that lists the names when there is none such.
const Schedule& find_schedule(const std::string& name);

/// The schedule's plan of one rank; a usage error with the schedule's refusal if it has one.
RankPlan plan_rank(const Schedule& schedule, const AttentionProblem& problem, int rank);
/// The same of all ranks.
Plan plan_all(const Schedule& schedule, const AttentionProblem& problem);

// One function a file; see there.
RankPlan ring_plan(const AttentionProblem& problem, int rank);
RankPlan ring_forward_plan(const AttentionProblem& problem, int rank);
RankPlan all_gather_plan(const AttentionProblem& problem, int rank);
RankPlan all_gather_strided_plan(const AttentionProblem& problem, int rank);
std::string all_gather_strided_refusal(const AttentionProblem& problem);
RankPlan all_to_all_plan(const AttentionProblem& problem, int rank);
RankPlan all_to_all_ring_plan(const AttentionProblem& problem, int rank);
std::string all_to_all_ring_refusal(const AttentionProblem& problem);
RankPlan group_cast_plan(const AttentionProblem& problem, int rank);
RankPlan halo_plan(const AttentionProblem& problem, int rank);
std::string halo_refusal(const AttentionProblem& problem);
RankPlan canonical_plan(const AttentionProblem& problem, int rank);

}  // namespace gyre
