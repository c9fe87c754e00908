#include "apps/common/schedule_options.hpp"

namespace gyre {

RegistryOptions<Schedule, ScheduleOptions> schedule_choices() {
  return {"schedule", schedules(), schedule_option_fields()};
}

RegistryOptions<Schedule, ScheduleOptions> schedule_choices_without_window() {
  static const std::vector<Schedule> some = [] {
    std::vector<Schedule> list;
    for (const Schedule& schedule : schedules())
      if (!schedule.needs_window) list.push_back(schedule);
    return list;
  }();
  return {"schedule", some, schedule_option_fields()};
}

std::string schedule_help() {
  return schedule_choices().help("Schedules");
}

}  // namespace gyre
