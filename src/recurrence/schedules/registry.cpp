#include "core/error.hpp"
#include "recurrence/schedules/list.hpp"

namespace gyre {

const std::vector<StateSchedule>& state_schedules() {
#define GYRE_CALL_STATE_SCHEDULE(name) name##_schedule(),
  static const std::vector<StateSchedule> all = {GYRE_STATE_SCHEDULES(GYRE_CALL_STATE_SCHEDULE)};
#undef GYRE_CALL_STATE_SCHEDULE
  return all;
}

const StateSchedule& find_state_schedule(const std::string& name) {
  std::string names;
  for (const StateSchedule& schedule : state_schedules()) {
    if (schedule.name == name) return schedule;
    names += (names.empty() ? "" : ", ") + schedule.name;
  }
  throw_usage("no schedule '{}'; there are: {}", name, names);
}

StatePlan plan_rank(const StateSchedule& schedule, const RecurrenceProblem& problem, int rank) {
  if (const std::string reason = state_refusal(*problem.layout); !reason.empty())
    throw_usage("schedule {}: {}", schedule.name, reason);
  return schedule.plan(problem, rank);
}

}  // namespace gyre
