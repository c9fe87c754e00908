#pragma once
// List of the schedules, one line each, in the order of printed tables. The first is the default.
//
// To add a schedule, write a file in this folder that defines `Schedule NAME_schedule()`, and add
// X(NAME) here. See schedule.hpp for what an entry needs.

#include "attention/schedules/schedule.hpp"

#define GYRE_SCHEDULES(X) \
  X(ring)                 \
  X(ring_forward)         \
  X(ring_query)           \
  X(all_gather)           \
  X(all_gather_strided)   \
  X(all_gather_query)     \
  X(all_to_all)           \
  X(all_to_all_ring)      \
  X(group_cast)           \
  X(halo)                 \
  X(canonical)            \
  /* the end */

namespace gyre {

#define GYRE_DECLARE_SCHEDULE(name) Schedule name##_schedule();
GYRE_SCHEDULES(GYRE_DECLARE_SCHEDULE)
#undef GYRE_DECLARE_SCHEDULE

}  // namespace gyre
