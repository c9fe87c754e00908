#include "core/error.hpp"
#include "recurrence/halo.hpp"
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
  StatePlan plan = schedule.plan(problem, rank);
  if (problem.shape.convolution > 0) add_convolution(problem, plan);
  return plan;
}

StateForm closed_form(const StateSchedule& schedule, const RecurrenceProblem& problem, int rank,
                      Pass pass) {
  const StateForm states = schedule.closed_form(problem, rank, pass);
  if (problem.shape.convolution == 0) return states;
  const HaloForm halo =
      schedule.whole_documents ? weight_sum_form(problem, pass) : halo_form(problem, rank, pass);
  return {states.messages + halo.messages, states.bytes_sent + halo.bytes_sent};
}

}  // namespace gyre
