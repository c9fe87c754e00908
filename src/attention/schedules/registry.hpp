#pragma once
// The schedules that exist, by name. list.hpp says how to add one.

#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "attention/schedules/schedule.hpp"

namespace gyre {

/// In the order of list.hpp.
const std::vector<Schedule>& schedules();

/// The first of the list.
const Schedule& default_schedule();

/// Throws a usage error that lists the names when there is none such.
const Schedule& find_schedule(const std::string& name);

/// The schedule's plan of one rank; a usage error with the schedule's refusal if it has one.
RankPlan plan_rank(const Schedule& schedule, const AttentionProblem& problem, int rank);
/// The same of all ranks.
Plan plan_all(const Schedule& schedule, const AttentionProblem& problem);

}  // namespace gyre
