#include "core/error.hpp"
#include "recurrence/schedules/list.hpp"

namespace gyre {

const std::vector<StateSchedule>& state_schedules() {
#define GYRE_CALL_STATE_SCHEDULE(name) name##_schedule(),
  static const std::vector<StateSchedule> all = {GYRE_STATE_SCHEDULES(GYRE_CALL_STATE_SCHEDULE)};
#undef GYRE_CALL_STATE_SCHEDULE
  return all;
}

StatePlan plan_rank(const StateSchedule& schedule, const RecurrenceProblem& problem, int rank) {
  if (const std::string reason = schedule.why_not(problem); !reason.empty())
    throw_usage("schedule {}: {}", schedule.name, reason);
  return schedule.plan(problem, rank);
}

}  // namespace gyre
