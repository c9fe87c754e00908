#include "attention/schedules/registry.hpp"

#include "attention/schedules/list.hpp"
#include "core/error.hpp"

namespace gyre {

const std::vector<Schedule>& schedules() {
#define GYRE_CALL_SCHEDULE(name) name##_schedule(),
  static const std::vector<Schedule> all = {GYRE_SCHEDULES(GYRE_CALL_SCHEDULE)};
#undef GYRE_CALL_SCHEDULE
  return all;
}

const std::vector<OptionField<ScheduleOptions>>& schedule_option_fields() {
  static const std::vector<OptionField<ScheduleOptions>> fields = {
      {"inner",
       "Ranks of an inner group; 0: as many as the heads allow",
       &ScheduleOptions::inner,
       0,
       {}},
      {"heads-at-once", "KV heads of a stage", &ScheduleOptions::heads_at_once, 1, {}},
      {"collectives",
       "Transport of all-gathers, reduce-scatters and all-to-alls",
       &ScheduleOptions::collectives,
       0,
       {"messages", "library"}},
      {"merge",
       "When the outputs of a ring's steps are merged: each at once, or all at the end, as "
       "TransformerEngine does",
       &ScheduleOptions::merge,
       0,
       {"at-once", "at-end"}}};
  return fields;
}

const Schedule& default_schedule() {
  return schedules().front();
}

const Schedule& find_schedule(const std::string& name) {
  std::string names;
  for (const Schedule& schedule : schedules()) {
    if (schedule.name == name) return schedule;
    names += (names.empty() ? "" : ", ") + schedule.name;
  }
  throw_usage("no schedule '{}'; there are: {}", name, names);
}

namespace {

void check_refusal(const Schedule& schedule, const AttentionProblem& problem) {
  const std::string reason = schedule.why_not(problem);
  if (!reason.empty()) throw_usage("schedule {}: {}", schedule.name, reason);
}

}  // namespace

RankPlan plan_rank(const Schedule& schedule, const AttentionProblem& problem, int rank) {
  check_refusal(schedule, problem);
  return schedule.plan(problem, rank);
}

Plan plan_all(const Schedule& schedule, const AttentionProblem& problem) {
  check_refusal(schedule, problem);
  Plan plan{schedule.name, {}};
  for (int r = 0; r < problem.cp(); ++r) plan.ranks.push_back(schedule.plan(problem, r));
  return plan;
}

}  // namespace gyre
