#include "apps/common/schedule_options.hpp"

namespace gyre {

RegistryOptions<Schedule, ScheduleOptions> schedule_choices() {
  return {"schedule", schedules(), schedule_option_fields()};
}

std::string schedule_help() {
  return schedule_choices().help("Schedules");
}

}  // namespace gyre
