#pragma once
// List of the schedules of states, one line each, in the order of printed tables. The first is the
// default. To add one, write a file in this folder that defines `StateSchedule NAME_schedule()`,
// and add X(NAME) here.

#include "recurrence/schedules/schedule.hpp"

#define GYRE_STATE_SCHEDULES(X) \
  X(state_gather)               \
  X(state_chain)                \
  X(state_scan)                 \
  X(head_exchange)              \
  /* the end */

namespace gyre {

#define GYRE_DECLARE_STATE_SCHEDULE(name) StateSchedule name##_schedule();
GYRE_STATE_SCHEDULES(GYRE_DECLARE_STATE_SCHEDULE)
#undef GYRE_DECLARE_STATE_SCHEDULE

}  // namespace gyre
