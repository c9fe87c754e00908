#pragma once
// Registry of the schedules; list.hpp explains how to add one.

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "attention/schedules/schedule.hpp"

namespace gyre {

/// Entries in the order of list.hpp.
const std::vector<Schedule>& schedules();

/// The first entry.
const Schedule& default_schedule();

/// The schedule of this name. Throws a usage error that lists the names if there is none.
const Schedule& find_schedule(const std::string& name);

/// The schedule's plan of one rank. Throws a usage error if the schedule refuses the problem.
RankPlan plan_rank(const Schedule& schedule, const AttentionProblem& problem, int rank);
/// plan_rank for all ranks.
Plan plan_all(const Schedule& schedule, const AttentionProblem& problem);

}  // namespace gyre
